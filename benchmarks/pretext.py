"""Pre-train with several tasks and seeds, and tabulate what each encoder learnt beside its controls.

    python benchmarks/pretext.py shapes --seeds 0 1 2
    tar -xf ../shared/data/cifar10.tar -C /tmp/cifar
    python benchmarks/pretext.py /tmp/cifar --tasks mae droppos --epochs 10

Every run is `patchloom pretrain` with what is given after ``--`` (same words), so each row can be had from the command
line. Finished runs in ``--out`` are read, not repeated; an interrupted one is resumed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path

from patchloom.cli import main as patchloom


def last_results(run: Path) -> dict[tuple[str, str], float]:
    """(protocol, encoder) -> accuracy, as the closing evaluation quotes it."""
    with open(run / "results.csv", newline="") as file:
        quoted = [row for row in csv.DictReader(file) if row["quoted"] == "True"]
    return {
        (row["protocol"], "trained" if row["encoder"] == run.name else row["encoder"]): float(row["value"])
        for row in quoted
    }


def measure_of(run: Path) -> tuple[float, dict[str, float], float]:
    """The task's measure at the end, its yardsticks, and the seconds that training took."""
    with open(run / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["held_out"]]
    yardsticks = {name: float(value) for name, value in rows[-1].items() if name.startswith("yardstick:")}
    return float(rows[-1]["held_out"]), yardsticks, float(rows[-1]["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--tasks", nargs="+", default=["mae", "droppos"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("/tmp/patchloom-pretext"))
    args, words = parser.parse_known_args()
    words = [word for word in words if word != "--"]
    print("| task | seed | held-out measure | kNN trained / untrained / pixels | linear, the same | minutes |")
    print("| --- | --- | --- | --- | --- | --- |")
    gathered: dict[tuple[str, str], list[float]] = {}
    for task in args.tasks:
        for seed in args.seeds:
            run = args.out / f"{task}-{seed}"
            code = patchloom(["pretrain", args.data, "--task", task, "--seed", str(seed), "--out", str(run), *words])
            if code:
                sys.exit(code)
            results, (measure, yardsticks, seconds) = last_results(run), measure_of(run)
            cells = []
            for protocol in ("knn", "linear"):
                values = [results[protocol, name] for name in ("trained", "untrained", "raw pixels")]
                gathered.setdefault((task, protocol), []).append(values[0])
                cells.append(" / ".join(f"{value:.1%}" for value in values))
            beside = ", ".join(f"{name.split(':')[1]} {value:.3f}" for name, value in yardsticks.items())
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
