"""Pre-training with several tasks and seeds, and a table of each encoder beside its controls.

    python benchmarks/pretext.py shapes --seeds 0 1 2
    python benchmarks/get_data.py cifar10 /tmp/data
    python benchmarks/pretext.py /tmp/data/cifar10 --tasks mae droppos --epochs 10
    python benchmarks/pretext.py /tmp/data/cifar10 --minutes 7 --seeds 0 1 2      # every task, equal time

With ``--minutes``, the tasks' steps are timed first (in turns, data included), and each task gets the number of epochs
that is nearest to it; so equal budgets do not depend on other work on the machine during the runs. Every run is
`patchloom pretrain` with the options after ``--``, so each row can be repeated on the command line. Finished runs in
``--out`` are read, not repeated; an interrupted one is resumed.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path

from pace import seconds_a_step

from patchloom.cli import main as patchloom
from patchloom.data.sources.open import open_data
from patchloom.data.splits import hold_out
from patchloom.results import store
from patchloom.system.files import write_whole
from patchloom.tasks import ready_tasks


def last_results(run: Path) -> dict[tuple[str, str], float]:
    """Return the accuracies of the final evaluation by (protocol, encoder)."""
    return {
        (one.protocol, "trained" if one.encoder == run.name else one.encoder): one.value
        for one in store.load(run)
        if one.quoted
    }


def measure_of(run: Path) -> tuple[float, dict[str, float], float]:
    """Return the task's last measure, its baselines, and the seconds of training."""
    with open(run / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["held_out"]]
    baselines = {name: float(value) for name, value in rows[-1].items() if name.startswith("baseline:")}
    return float(rows[-1]["held_out"]), baselines, float(rows[-1]["seconds"])


def affordable(data: str, tasks: list[str], minutes: float, kept: Path) -> dict[str, list[str]]:
    """Return the options that give each task the epochs that fit into some minutes; timings are stored."""
    if not kept.exists():
        found = seconds_a_step(data, {name: {"name": name} for name in tasks}, {"device": "cpu"})
        write_whole(kept, json.dumps(found))
    images = len(hold_out(open_data(data).train, "auto", seed=0)[0])
    words = {}
    for name, (seconds, batch) in json.loads(kept.read_text()).items():
        epochs = max(1, round(minutes * 60 * batch / seconds / images))
        print(f"{name}: {seconds:.3f} s a step of {batch} images, {batch / seconds:.0f} images/s: {epochs} epochs")
        words[name] = ["--epochs", str(epochs)]
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--tasks", nargs="+", default=[name for name in ready_tasks() if name != "mixture"])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("/tmp/patchloom-pretext"))
    args, words = parser.parse_known_args()
    words = [word for word in words if word != "--"]
    epochs = {name: [] for name in args.tasks}
    if args.minutes:
        epochs = affordable(args.data, args.tasks, args.minutes, args.out / "pace.json")
    print("| task | seed | held-out measure | kNN trained / untrained / pixels | linear, the same | minutes |")
    print("| --- | --- | --- | --- | --- | --- |")
    gathered: dict[tuple[str, str], list[float]] = {}
    for task in args.tasks:
        for seed in args.seeds:
            run = args.out / f"{task}-{seed}"
            code = patchloom(
                ["pretrain", args.data, "--task", task, "--seed", str(seed), "--out", str(run), *epochs[task], *words]
            )
            if code:
                sys.exit(code)
            results, (measure, baselines, seconds) = last_results(run), measure_of(run)
            cells = []
            for protocol in ("knn", "linear"):
                values = [results[protocol, name] for name in ("trained", "untrained", "raw pixels")]
                gathered.setdefault((task, protocol), []).append(values[0])
                cells.append(" / ".join(f"{value:.1%}" for value in values))
            beside = ", ".join(f"{name.split(':')[1]} {value:.3f}" for name, value in baselines.items())
            print(
                f"| {task} | {seed} | {measure:.3f} ({beside}) | {cells[0]} | {cells[1]} | {seconds / 60:.1f} |",
                flush=True,
            )
    for (task, protocol), values in gathered.items():
        if len(values) > 1:
            print(
                f"{task} {protocol}: mean {statistics.mean(values):.1%}, spread {min(values):.1%} to {max(values):.1%}"
            )


if __name__ == "__main__":
    main()
