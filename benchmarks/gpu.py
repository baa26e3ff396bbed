"""All GPU measurements in one command of 25 minutes, which may be stopped and repeated.

    python benchmarks/get_data.py cifar10 /tmp/data
    python benchmarks/gpu.py --cifar /tmp/data/cifar10  # writes gpu.json and gpu.md
    python benchmarks/gpu.py --minutes 9                # only what is missing; without --cifar, the built-in shapes
    python benchmarks/gpu.py --only steps peers         # some of the sections
    python benchmarks/gpu.py --tiny                     # the same in miniature, on a CPU, in two minutes

Sections: peak rates of the machine; the suite's GPU tests; a step of every task at ViT-S/16 and ViT-B/16 with the
largest batch that fits, in bfloat16 (or what auto takes), with and without compiled blocks; Hugging Face's and
lightly's MAE beside ours; how often training waits for the GPU; DDP and FSDP with NCCL in a group of one; loading from
a 256-px cache; ten minutes of CIFAR-10. It needs only patchloom; pytest, transformers and lightly are used if they are
installed.

Each row runs in a separate process with a time limit, and is written as soon as it is finished. Rows that fail or run
out of time are stored with the last lines of their error, and tried again by the next call, after those that were never
tried. Finished rows are not repeated.
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
from gpu_tables import markdown, outcome_line

from patchloom.errors import PatchloomError
from patchloom.system.files import write_whole
from patchloom.tasks import ready_tasks

# by section, per cent of the time; unused time goes to the later sections
SECTIONS = {"machine": 2, "tests": 12, "steps": 27, "peers": 4, "training": 5, "group": 4, "loading": 6, "cifar": 40}
MODELS = {"ViT-S/16": "vit_small_patch16_224", "ViT-B/16": "vit_base_patch16_224"}
_LEAST = 10.0  # with fewer seconds left, no row is started
_TRAINED = 240.0  # seconds of training of each run on CIFAR-10: five minutes with its evaluation


class Row(NamedTuple):
    """Measurement: its section, name, function, arguments, and time limit in seconds."""

    section: str
    name: str
    call: str
    arguments: dict[str, Any]
    limit: float


def plan(device: str, tiny: bool, work: str, cifar: str) -> list[Row]:
    """Return all rows in order."""
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
    """Results so far, in a JSON file that is complete at any moment, and in a Markdown file beside it."""

    def __init__(self, path: Path):
        self.path, self.kept = path, {"about": {}, "sections": {}}
        if path.exists():
            try:
                self.kept = json.loads(path.read_text("utf-8"))
                self.kept["about"]["machine"], self.kept["sections"]  # KeyError if it is another file
            except (ValueError, KeyError, TypeError) as problem:
                raise PatchloomError(f"{path} was not written by this script: give another --out") from problem

    def begin(self, about: dict[str, Any]) -> None:
        """Store the machine and versions of all figures.

        Raises:
            PatchloomError: the file has figures of another machine.
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

    def note(self, row: Row, outcome: dict[str, Any]) -> None:
        """Store the outcome of a row."""
        attempts = self.entry(row).get("attempts", 0) + ("seconds" in outcome)
        self.kept["sections"].setdefault(row.section, {})[row.name] = outcome | {"attempts": attempts}
        self.write()

    def known(self) -> dict[str, dict[str, Any]]:
        """Return the results by section and row."""
        sections = self.kept["sections"].items()
        return {
            section: {name: one["result"] for name, one in rows.items() if one["state"] == "done"}
            for section, rows in sections
        }

    def write(self) -> None:
        write_whole(self.path, json.dumps(self.kept, indent=1) + "\n")
        write_whole(self.path.with_suffix(".md"), markdown(self.kept))


class Budget:
    """Remaining seconds, shared among the sections with unfinished rows."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def section_end(self, section: str, waiting: list[str]) -> float:
        """Return the time at which a section must end, if the sections ``waiting``, itself included, share the rest."""
        now = time.monotonic()
        return now + (self.end - now) * SECTIONS[section] / sum(SECTIONS[name] for name in waiting)


def work_through(rows: list[Row], book: Book, budget: Budget, made: Any, logs: Path) -> None:
    """Try all unfinished rows, as long as there is time."""
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
            print(f"{row.section:<9} {row.name:<32} {outcome_line(row.section, told)}", flush=True)
        waiting = waiting[1:]


def one_row(row: Row, book: Book, left: float, made: Any, logs: Path) -> dict[str, Any]:
    """Try one row in the remaining time."""
    arguments = row.arguments | ({"known": book.known()} if "known" in row.arguments else {})
    seconds, begin = min(row.limit, left), time.monotonic()
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{row.section} {row.name}")
    told = gpu_attempt.attempt(made, row.call, arguments, seconds, logs / f"{name}.log")
    if told["state"] == "late" and seconds == row.limit:
        told["state"] = "failed"  # it had its whole time limit
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return told | {"seconds": round(time.monotonic() - begin, 1), "date": now}


def identified(device: str, logs: Path) -> tuple[dict[str, Any], Any]:
    """Return the machine, and a context that starts processes on it.

    Raises:
        PatchloomError: no process can use the device.
    """
    for method in ("forkserver", "spawn"):
        made = gpu_attempt.context(method)
        told = gpu_attempt.attempt(made, "gpu_steps.identity", {"device": device}, 300, logs / "identity.log")
        if told["state"] == "done":
            return told["result"], made
    reason = " ".join(told["error"][-2:])
    raise PatchloomError(f"no process here can use the {device} device ({reason}); --tiny runs the script on a CPU")


def commit() -> str:
    """Return the commit of the code, if git knows it."""
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
    parser.add_argument(
        "--out", type=Path, default=Path("gpu.json"), help="file of results; finished rows are not repeated"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="minutes of this call, shared among the sections")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections")
    parser.add_argument("--cifar", help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--tiny", action="store_true", help="everything in miniature on the CPU, to test the script")
    args = parser.parse_args()
    args.out = args.out.absolute()
    try:
        run(args)
    except PatchloomError as problem:
        print(f"gpu.py: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu.py: stopped; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running row is ended, too
    sys.exit(main())
