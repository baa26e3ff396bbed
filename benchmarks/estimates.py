"""Error of the estimates of time and memory, over 12 cases: python benchmarks/estimates.py [CASE ...].

Every case is a command on built-in data. "Planned" is the estimate that the command prints first, for a run that of
its dry run; "taken" are the seconds from that line to its end, and, if a run writes them, those of its loop, because
its estimate is of the steps alone. Memory is that of the whole process. The ratio is taken over planned: above 1, the
estimate was too optimistic.

On a machine with other work, PROCESSOR=1 measures the processor's time of one thread instead; this has no meaning for
cases with several processes. RUN names a run's folder or an encoder's file to evaluate.
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
_LONGEST = 600.0  # seconds of a case
_UNITS = {"s": 1, "min": 60, "h": 3600, "days": 86400}
_SECONDS = re.compile(r"(?:takes|take) (?:at most )?about ((?:[\d,]+ (?:s|min|h|days)\b ?)+)")
_MEMORY = re.compile(r"needs about ([\d.]+) of [\d.]+ GiB of memory")


@dataclass(frozen=True)
class Case:
    """Estimate and measurement of a command, in seconds and GiB; None if it printed no estimate.

    Attributes:
        loop: seconds in the run's own table.
        load: load of the machine at the end.
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
    """Return the seconds of the wall clock, or of the processor."""
    if not _BUSY:
        return time.perf_counter()
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, command: str, out: Path) -> Case | None:
    """Run a case, and print its output if it fails or takes too long."""
    words = [sys.executable, "-u", "-c", _PROGRAM, *command.split()]
    planned = memory = None
    said: list[str] = []
    if command.startswith("pretrain "):  # a run that trains times its first steps: only a dry run tries some
        plan = subprocess.run([*words, "--dry-run"], capture_output=True, text=True).stdout
        planned = seconds_in(found[1]) if (found := _SECONDS.search(plan)) else None
        memory = float(found[1]) if (found := _MEMORY.search(plan)) else None
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    started = begun = now(process.pid)
    for line in process.stdout:
        said.append(line)
        if planned is None and (found := _SECONDS.search(line)):
            planned, begun = seconds_in(found[1]), now(process.pid)
        if "everything goes to" in line:  # the end of the plan of a run
            begun = now(process.pid)
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
    """Return the rows in Markdown, then the median ratios and the worst ones."""
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
    """Measure all cases, or the named ones; the run of the first is the one to evaluate."""
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
