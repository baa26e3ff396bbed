"""Everything that the first GPU shall tell, in one command of 25 minutes, which may be stopped and called again.

    python benchmarks/gpu.py --cifar /tmp/data/cifar10         # writes gpu.json and gpu.md
    python benchmarks/gpu.py --minutes 9                # what is missing; without --cifar, the built-in shapes serve
    python benchmarks/gpu.py --only steps peers         # some of the sections
    python benchmarks/gpu.py --tiny                     # the same in miniature, on a CPU, in two minutes

Sections: what the machine can do; the suite's GPU tests; a step of every task at ViT-S/16 and ViT-B/16 with the largest
batch that fits, in bfloat16 (or what auto takes), with and without compiled blocks; Hugging Face's and lightly's MAE
beside ours; how often training waits for the GPU; DDP and FSDP with NCCL in a group of one; loading from a 256-px
cache; ten minutes of CIFAR-10. It needs patchloom alone; pytest, transformers and lightly are used where they are.

Each row runs in a process of its own, with a limit of time, and is written as soon as it is done. A row that failed, or
that time ran out for, is kept with the last lines of its error, and tried again by the next call, after those that were
never tried. Done rows are not repeated.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import gpu_attempt
from gpu_tables import markdown, told_in_short

from patchloom.errors import PatchloomError
from patchloom.system.files import write_whole
from patchloom.tasks import ready_tasks

# with the hundredths of the time that each may take; what one leaves over is for those after it
SECTIONS = {"machine": 2, "tests": 12, "steps": 27, "peers": 4, "training": 5, "group": 4, "loading": 6, "cifar": 40}
MODELS = {"ViT-S/16": "vit_small_patch16_224", "ViT-B/16": "vit_base_patch16_224"}
_LEAST = 10.0  # seconds with which it makes no sense to begin a row
_TRAINED = 240.0  # seconds of training of each run on CIFAR-10: five minutes with its evaluation


class Row(NamedTuple):
    """One measurement: its section and name, the function that makes it, its arguments, and its limit in seconds."""

    section: str
    name: str
    call: str
    arguments: dict[str, Any]
    limit: float


def plan(device: str, tiny: bool, work: str, cifar: str) -> list[Row]:
    """All rows in their order."""
    on, at = {"device": device, "tiny": tiny}, {"device": device, "tiny": tiny, "work": work}
    rows = [Row("machine", "figures", "gpu_steps.machine", on | {"known": {}}, 90)]
    rows.append(Row("tests", "pytest -m gpu", "gpu_runs.tests", {"tiny": tiny}, 400))
    models = {"nano": "nano"} if tiny else MODELS
    for compiled in (False,) if tiny else (False, True):
        for size, model in models.items():
            for task in ready_tasks():
                name, form = f"{size} {task}", {"model": model, "task": task, "compiled": compiled}
                form |= {"known": {}, "eager": name if compiled else ""}
                limit = 300 if compiled else 180
                rows.append(Row("steps", f"{name}{', compiled' * compiled}", "gpu_steps.step", on | form, limit))
    for size, model in {"ViT-Ti/16": "vit_tiny_patch16_224"}.items() if tiny else MODELS.items():
        rows.append(Row("peers", size, "gpu_steps.peers", on | {"known": {}, "model": model}, 240))
    for task in ("mae", "lut") if tiny else ready_tasks():
        rows.append(Row("training", task, "gpu_runs.training", at | {"task": task}, 120))
    for task, strategy in (("lut", "ddp"),) if tiny else (("extrema", "ddp"), ("lut", "ddp"), ("lut", "fsdp")):
        form = {"task": task, "strategy": strategy}
        rows.append(Row("group", f"{task}, {strategy}", "gpu_runs.group", at | form, 120))
    for name, cached in (("256-px cache", True), ("JPEG files", False)):
        rows.append(Row("loading", name, "gpu_runs.loading", at | {"known": {}, "cached": cached}, 120))
    rows.append(Row("loading", "pretrain droppos from the cache", "gpu_runs.run", at, 180))
    for task in ("droppos",) if tiny else ("droppos", "mae"):
        form = {"task": task, "data": cifar, "trained": 1.0 if tiny else _TRAINED}
        rows.append(Row("cifar", task, "gpu_runs.cifar", at | form, 900))
    return rows


class Book:
    """What was found so far, in a file that is whole at any moment, and the same as Markdown beside it."""

    def __init__(self, path: Path):
        self.path, self.kept = path, {"about": {}, "sections": {}}
        if path.exists():
            try:
                self.kept = json.loads(path.read_text("utf-8"))
                self.kept["about"]["machine"], self.kept["sections"]  # else it is another file
            except (ValueError, KeyError, TypeError) as problem:
                raise PatchloomError(f"{path} was not written by this script: give another --out") from problem

    def begin(self, about: dict[str, Any]) -> None:
        """Say on what all figures were measured.

        Raises:
            PatchloomError: what is there was measured on something else.
        """
        there = self.kept["about"]
        found, here = ([one["machine"][name] for name in ("name", "torch")] for one in (there or about, about))
        if found != here or (there and there["tiny"] != about["tiny"]):
            before = ", torch ".join(found)
            raise PatchloomError(
                f"{self.path} has other figures ({before}{', tiny' * there['tiny']}): give another --out"
            )
        self.kept["about"] = about | {"begun": there.get("begun", about["date"])}
        self.write()

    def entry(self, row: Row) -> dict[str, Any]:
        return self.kept["sections"].get(row.section, {}).get(row.name, {})

    def note(self, row: Row, told: dict[str, Any]) -> None:
        """Keep what became of a row."""
        attempts = self.entry(row).get("attempts", 0) + ("seconds" in told)
        self.kept["sections"].setdefault(row.section, {})[row.name] = told | {"attempts": attempts}
        self.write()

    def known(self) -> dict[str, dict[str, Any]]:
        """Results by section and row."""
        sections = self.kept["sections"].items()
        return {
            section: {name: one["result"] for name, one in rows.items() if one["state"] == "done"}
            for section, rows in sections
        }

    def write(self) -> None:
        write_whole(self.path, json.dumps(self.kept, indent=1) + "\n")
        write_whole(self.path.with_suffix(".md"), markdown(self.kept))


class Budget:
    """Seconds that are left, shared among the sections that still have something to do."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def section_end(self, section: str, waiting: list[str]) -> float:
        """When a section must end, if those ``waiting`` (it is one of them) share what is left."""
        now = time.monotonic()
        return now + (self.end - now) * SECTIONS[section] / sum(SECTIONS[name] for name in waiting)


def work_through(rows: list[Row], book: Book, budget: Budget, made: Any, logs: Path) -> None:
    """Try all rows that are not done, as far as time goes."""
    open_ones = [row for row in rows if book.entry(row).get("state") != "done"]
    waiting = [section for section in SECTIONS if any(row.section == section for row in open_ones)]
    while waiting:
        section, ends = waiting[0], budget.section_end(waiting[0], waiting)
        mine = [row for row in open_ones if row.section == section]
        for row in sorted(mine, key=lambda row: book.entry(row).get("attempts", 0)):
            left = min(ends, budget.end - gpu_attempt.GRACE) - time.monotonic()
            if left < _LEAST:
                if not book.entry(row):
                    book.note(row, {"state": "not reached"})
                continue
            told = one_row(row, book, left, made, logs)
            book.note(row, told)
            print(f"{row.section:<9} {row.name:<32} {told_in_short(row.section, told)}", flush=True)
        waiting = waiting[1:]


def one_row(row: Row, book: Book, left: float, made: Any, logs: Path) -> dict[str, Any]:
    """Try one row in the time that is left."""
    arguments = row.arguments | ({"known": book.known()} if "known" in row.arguments else {})
    seconds, begin = min(row.limit, left), time.monotonic()
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{row.section} {row.name}")
    told = gpu_attempt.attempt(made, row.call, arguments, seconds, logs / f"{name}.log")
    if told["state"] == "late" and seconds == row.limit:
        told["state"] = "failed"  # it had all the time that it may have
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return told | {"seconds": round(time.monotonic() - begin, 1), "date": now}


def identified(device: str, logs: Path) -> tuple[dict[str, Any], Any]:
    """Which machine this is, and how processes begin on it.

    Raises:
        PatchloomError: no process can use the device.
    """
    for method in ("forkserver", "spawn"):
        made = gpu_attempt.context(method)
        told = gpu_attempt.attempt(made, "gpu_steps.identity", {"device": device}, 300, logs / "identity.log")
        if told["state"] == "done":
            return told["result"], made
    reason = " ".join(told["error"][-2:])
    raise PatchloomError(f"no process here can use the {device} device ({reason}); --tiny tries the script on a CPU")


def commit() -> str:
    """Of which state of the code the figures are, where git knows."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def run(args: argparse.Namespace) -> None:
    device = "cpu" if args.tiny else "cuda"
    work, cifar = args.out.with_suffix(""), args.cifar or "shapes:20000"
    book = Book(args.out)
    budget = Budget(args.minutes * 60)
    machine, made = identified(device, work / "logs")
    now = datetime.now(UTC).isoformat(timespec="minutes")
    book.begin({"machine": machine, "tiny": args.tiny, "device": device, "date": now, "commit": commit()})
    rows = [row for row in plan(device, args.tiny, str(work), cifar) if row.section in args.only]
    work_through(rows, book, budget, made, work / "logs")
    entries = [book.entry(row) for row in rows]
    done = sum(one.get("state") == "done" for one in entries)
    print(f"{done} of {len(rows)} rows are done: {args.out} and {args.out.with_suffix('.md')}", end="")
    print("" if done == len(rows) else "; the same command tries the others", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="what is there already is not repeated")
    parser.add_argument("--minutes", type=float, default=25.0, help="of this call, shared among the sections")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections")
    parser.add_argument("--cifar", help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--tiny", action="store_true", help="all in miniature on the CPU: is the script sound?")
    args = parser.parse_args()
    args.out = args.out.absolute()
    try:
        run(args)
    except PatchloomError as problem:
        print(f"gpu.py: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu.py: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the row that runs is ended, too
    sys.exit(main())
