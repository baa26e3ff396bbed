"""How far off the estimates are, of seconds and of memory, over 12 cases: python benchmarks/estimates.py [CASE ...].

On a machine with other work, PROCESSOR=1 takes the processor's time of one thread for all that is planned and taken;
it is meaningless for cases of several processes. RUN names a run's folder or an encoder's file to evaluate.

Each is a command of its own, on built-in data. Planned is what the command prints before it works; taken are the
seconds from that line to its end, and of them those of the loop, where a run writes them: its estimate is of the steps
alone. Memory is that of the whole process. The ratio is taken over planned: above 1, the estimate promised too much.
"""

from __future__ import annotations

import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PRETRAIN = "pretrain shapes --model nano --patch_size 8 --img_size 32 --epochs 4 --held_out 0.02 --device cpu"
CASES = {
    **{task: f"{PRETRAIN} --workers 0 --task {task}" for task in ("mae", "droppos", "extrema", "mp3", "simmim")},
    "mae, one worker": f"{PRETRAIN} --workers 1 --task mae",
    "knn": "evaluate knn {run} shapes --device cpu",
    "linear, by MAE's recipe": "evaluate linear {run} shapes --recipe mae --epochs 4 --device cpu",
    "finetune": "evaluate finetune {run} shapes --recipe mae --epochs 4 --device cpu",
    "segment": "evaluate segment {run} shapes --steps 60 --device cpu",
    "compare": "compare shapes --tasks mae,simmim --seeds 1 --minutes 0.1 --model nano --img_size 32 --patch_size 8",
    "embed": "embed {run} shapes --device cpu --to {out}.npz",
}
_BUSY = "PROCESSOR" in os.environ  # the machine has other work
_PROGRAM = "import sys, time\n" + "time.perf_counter = time.process_time\n" * _BUSY
_PROGRAM += "from patchloom.cli import main\nsys.exit(main(sys.argv[1:]))"
_LONGEST = 240.0  # seconds of a case
_UNITS = {"s": 1, "min": 60, "h": 3600, "days": 86400}
_SECONDS = re.compile(r"(?:takes|take) (?:at most )?about ((?:[\d,]+ (?:s|min|h|days)\b ?)+)")
_MEMORY = re.compile(r"needs about ([\d.]+) of [\d.]+ GiB of memory")


@dataclass(frozen=True)
class Case:
    """What a command planned and took: seconds, and GiB; None where it said nothing.

    Attributes:
        loop: seconds of a run's own table.
        load: processes that wanted a core, at the end.
    """

    name: str
    planned: float | None
    taken: float
    loop: float | None
    memory: float | None
    peak: float
    load: float


def seconds_in(words: str) -> float:
    """Return the seconds of a duration, such as "3 min 20 s"."""
    return sum(_UNITS[unit] * float(n.replace(",", "")) for n, unit in re.findall(r"([\d,]+) (s|min|h|days)\b", words))


def now(process: int) -> float:
    """Return the seconds of the clock, or those that a process has worked."""
    if not _BUSY:
        return time.perf_counter()
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, command: str, out: Path) -> Case | None:
    """Do one, and print what it says if it fails or takes too long."""
    words = [sys.executable, "-u", "-c", _PROGRAM, *command.split()]
    planned = memory = None
    said: list[str] = []
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    started = begun = now(process.pid)
    for line in process.stdout:
        said.append(line)
        if planned is None and (found := _SECONDS.search(line)):
            planned, begun = seconds_in(found[1]), now(process.pid)
        if found := _MEMORY.search(line):
            memory = float(found[1])
        if now(process.pid) - started > _LONGEST:
            process.terminate()
            break
    _, status, used = os.wait4(process.pid, 0)
    if status:
        print(f"{name} was not measured: {''.join(said[-3:])}", flush=True)
        return None
    taken, loop = (used.ru_utime + used.ru_stime if _BUSY else now(process.pid)) - begun, None
    if (table := out / "metrics.csv").exists():
        with open(table, newline="") as file:
            *_, row = csv.DictReader(file)
        loop = float(row["seconds"])
    return Case(name, planned, taken, loop, memory, used.ru_maxrss / 2**20, os.getloadavg()[0])


def table(cases: list[Case]) -> list[str]:
    """Rows in Markdown, then the ratios at the median and at their worst."""
    rows = ["| case | planned | taken | ratio | of it the loop | planned GiB | peak GiB | load |", "|" + " --- |" * 8]
    for one in cases:
        plan = "" if one.planned is None else f"{one.planned:.0f} s"
        ratio = "" if not one.planned else f"{one.taken / one.planned:.2f}"
        loop, memory = ("" if value is None else f"{value:.1f}" for value in (one.loop, one.memory))
        taken = f"{one.taken:.1f} s | {ratio} | {f'{loop} s' if loop else ''}"
        rows.append(f"| {one.name} | {plan} | {taken} | {memory} | {one.peak:.1f} | {one.load:.1f} |")
    ratios = {
        "seconds": [one.taken / one.planned for one in cases if one.planned],
        "seconds, the loop's where it is known": [
            (one.loop or one.taken) / one.planned for one in cases if one.planned
        ],
        "memory": [one.peak / one.memory for one in cases if one.memory],
    }
    for what, values in ratios.items():
        if values:
            worst = max(values, key=lambda ratio: max(ratio, 1 / ratio))
            rows += [
                "",
                f"{what}: ×{statistics.median(values):.2f} at the median, ×{worst:.2f} at worst, of {len(values)}",
            ]
    return rows


def main(names: list[str]) -> None:
    """Measure all cases, or those that are named; what is evaluated is the run of the first."""
    with tempfile.TemporaryDirectory() as place:
        run, cases = Path(os.environ.get("RUN", Path(place) / "mae")), list[Case]()
        for name in names or CASES:
            command, out = CASES[name], Path(place) / name.replace(" ", "_").replace(",", "").replace("'", "")
            if "{run}" in command and not run.exists():
                measure("mae", f"{CASES['mae']} --out {run}", run)
            if not command.startswith(("evaluate", "embed")):
                command += f" --out {out}"
            if found := measure(name, command.format(run=run, out=out), out):
                cases.append(found)
                print(found, file=sys.stderr, flush=True)
    print("\n".join(table(cases)))


if __name__ == "__main__":
    main(sys.argv[1:])
