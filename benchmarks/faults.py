"""Runs of every task that are killed many times, compared bit for bit with undisturbed runs.

python benchmarks/faults.py [--kills 25] [--seed 1] [--tasks mae,droppos]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from patchloom.tasks import ready_tasks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from killing import Kill, kill_until_done, left_behind, start  # noqa: E402, found by the path above
from labelled import write_noise  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25, help="least number of kills of each task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", default=",".join(ready_tasks()))
    arguments = parser.parse_args()
    print("| task | kills | runs that were killed | runs that differ |\n| --- | --- | --- | --- |", flush=True)
    for name in arguments.tasks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            images, rng = write_noise(Path(folder, "images")), random.Random(f"{arguments.seed} {name}")
            options = {"task": name}
            start(images, Path(folder, "first", "run"), options, Kill())
            begin = time.perf_counter()
            _, events = start(images, Path(folder, "plain", "run"), options, Kill())
            seconds = time.perf_counter() - begin
            plain, kills, runs, differences = left_behind(Path(folder, "plain", "run")), 0, 0, 0
            while kills < arguments.kills:
                out = Path(folder, f"killed{runs}", "run")
                hits = kill_until_done(images, out, options, events, seconds, rng)
                kills, runs = kills + hits, runs + (hits > 0)
                found = left_behind(out)
                differing = [part for part in plain if plain[part] != found.get(part)]
                differences += found.keys() != plain.keys() or bool(differing)
                if differing:
                    print(f"{out}: {differing}", file=sys.stderr, flush=True)
                if hits == 0:  # so that the next one has another name
                    out.parent.rename(Path(folder, f"spared-{time.monotonic_ns()}"))
            print(f"| {name} | {kills} | {runs} | {differences} |", flush=True)


if __name__ == "__main__":
    main()
