"""First minutes on a GPU: its tests, a step of every task beside a roofline, a peer, reading, and whole runs.

    python benchmarks/gpu.py                                # everything, at most 7.6 minutes; writes into gpu/
    python benchmarks/gpu.py --minutes 3 --phases tests eager compiled --tasks mae droppos --select "droppos or linear"
    python benchmarks/gpu.py --tiny                         # the same in miniature on a CPU
    python benchmarks/gpu.py --count_gflop                  # count GFLOP per image anew, into benchmarks/gpu_gflop.json

Phases are done in the order of their worth, and what the minutes do not reach is listed. Each row is appended to
OUT/rows.jsonl as soon as it is measured; OUT/table.md, which is also printed, has all of them; OUT/log.txt has all
other output. Some phases share a process. A row that ends its process costs itself, and one that hangs its phase.

Nothing need be installed: ``PYTHONPATH=src:benchmarks`` is enough where the dependencies in pyproject.toml are there.
Those that are not, or are too old, are printed first. pytest, xdist and transformers are used if they are there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError

SCRIPT, ROOT = Path(__file__), Path(__file__).parents[1]


# function of each phase, and the seconds that it may take
PHASES: dict[str, tuple[str, float]] = {
    "photographs": ("gpu_runs.photographs", math.inf),  # beside the tests
    "tests": ("gpu_runs.tests", 130),
    "machine": ("gpu_steps.machine", 15),
    "eager": ("gpu_steps.steps", 90),
    "peers": ("gpu_steps.peers", 20),
    "compiled": ("gpu_steps.steps", 110),
    "graphs": ("gpu_steps.steps", 90),
    "loading": ("gpu_runs.loading", 30),
    "runs": ("gpu_runs.runs", 80),
    "profile": ("gpu_steps.profile", 20),
    "rest": ("gpu_steps.steps", math.inf),  # compiled steps of the other tasks, in what is left
}
# These share a process, because imports and the start of a GPU take seconds.
GROUPS = (("tests",), ("machine", "eager", "peers", "compiled", "graphs"), ("loading", "runs"), ("profile", "rest"))
WANTED = tuple(name for group in GROUPS for name in group)
READING = {"loading", "runs"}  # which need the photographs
SIZES = ("S", "B", "L")
_LEAST = 8.0  # with fewer seconds left, no process is started
_START = 15.0  # seconds in which a process may start, or a phase end its last row, before it is killed
_ENDING = 3.0  # seconds at the end for the table
_DRAWING = 20.0  # seconds to wait for the photographs, which are drawn while other phases run
_POLL = 0.2


class Rows:
    """Rows of a call, in a file with a line of JSON each, which grows as soon as something is known.

    A line has a phase, a row ("" for the phase itself) and a state: begun, done, failed or not reached. The last line
    of a row counts.
    """

    def __init__(self, path: Path):
        self.path = path

    def note(self, phase: str, row: str = "", state: str = "done", **figures: Any) -> None:
        """Append a line."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": phase, "row": row, "state": state, **figures}) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines so far."""
        if not self.path.exists():
            return []
        with open(self.path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]

    def of(self, phase: str) -> dict[str, dict[str, Any]]:
        """Return the last line of each row of a phase, by row."""
        return {line["row"]: line for line in self.lines() if line["phase"] == phase and line["row"]}

    def ended(self) -> set[str]:
        """Return the phases that have ended."""
        return {line["phase"] for line in self.lines() if not line["row"]}


@dataclass(frozen=True)
class Call:
    """What is measured, and where, as a phase gets it."""

    out: Path  # folder of the results
    work: Path  # folder of caches, photographs and runs, which is removed at the end
    tiny: bool  # everything in miniature on the CPU
    tasks: Sequence[str] | None  # in this order; None for all, mae and droppos first
    sizes: Sequence[str]  # of the encoder, in `SIZES`
    batch: int  # images per step
    select: str  # pytest's -k
    until: float  # time at which the call or the phase ends, as `time.time` has it
    phase: str = ""

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def rows(self) -> Rows:
        return Rows(self.out / "rows.jsonl")

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.time()

    def open_rows(self, names: Iterable[str], least: float) -> Iterator[str]:
        """Yield the rows without an outcome, as long as ``least`` seconds are left; the others are not reached."""
        ended = {name for name, line in self.rows.of(self.phase).items() if line["state"] in ("done", "failed")}
        for name in names:
            if name in ended:
                continue
            if self.left() > (1.0 if self.tiny else least):
                yield name
            else:
                self.rows.note(self.phase, name, "not reached")

    @contextmanager
    def row(self, name: str) -> Iterator[dict[str, Any]]:
        """Store what the block puts into the dictionary as the figures of a row, or its error.

        An error after which the GPU cannot be used any more ends the process: the other rows go on in a new one.
        """
        figures: dict[str, Any] = {}
        self.rows.note(self.phase, name, "begun")
        try:
            yield figures
        except Exception as problem:  # of any kind: the other rows go on
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"[:400]
            self.rows.note(self.phase, name, "begun", error=error)
            if not self.tiny:
                import torch  # the process of the tests does without

                try:
                    torch.cuda.synchronize()
                except RuntimeError:
                    sys.exit("the GPU cannot be used any more")
            self.rows.note(self.phase, name, "failed", error=error)
        else:
            self.rows.note(self.phase, name, **figures)


def do_phases(call: Call, todo: dict[str, float]) -> None:
    """Do phases in this process, each in its seconds."""
    # a copy: pytest points 0 at /dev/null, where a read that a signal has interrupted would go on
    threading.Thread(target=end_with_parent, args=(os.dup(0),), daemon=True).start()
    for name, seconds in todo.items():
        begun = time.time()
        module, _, function = PHASES[name][0].rpartition(".")
        outcome: dict[str, Any] = {}
        try:
            present = replace(call, phase=name, until=min(call.until, begun + seconds))
            getattr(importlib.import_module(module), function)(present)
        except Exception as problem:  # of any kind: the other phases go on
            traceback.print_exc()
            outcome = {"state": "failed", "error": f"{type(problem).__name__}: {problem}"[:400]}
        call.rows.note(name, seconds=time.time() - begun, **outcome)


def end_with_parent(pipe: int) -> None:
    """End this process and all that it has started when the supervisor ends, which holds the other end of a pipe."""
    while os.read(pipe, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


class Supervisor:
    """Processes of the phases, one after another, until the end of a call."""

    def __init__(self, call: Call):
        self.call, self.printed = call, 0
        caches = {"XDG_CACHE_HOME": str(call.work / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(call.work / "inductor")}
        self.environment = os.environ | caches | {"HF_HUB_OFFLINE": "1"}
        if call.tiny:  # no GPU is used, and nothing compiled, which takes minutes on a CPU
            self.environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}

    def run(self, phases: Iterable[str]) -> None:
        """Do phases, by groups."""
        wanted = set(phases)
        drawing = self.start({"photographs": math.inf}) if wanted & READING else None  # while the tests run
        try:
            for group in GROUPS:
                todo = {name: PHASES[name][1] for name in group if name in wanted}
                if drawing and READING & todo.keys():
                    with suppress(subprocess.TimeoutExpired):
                        drawing.wait(_DRAWING)
                while todo and self.call.left() > _LEAST:
                    todo = self.attend(todo)
                for name in todo:
                    self.call.rows.note(name, state="not reached")
        finally:
            if drawing:
                end_group(drawing)

    def start(self, todo: dict[str, float]) -> subprocess.Popen[bytes]:
        """Start phases in a process, and a process group, of their own."""
        job = json.dumps({"call": asdict(self.call), "todo": todo}, default=str)
        with open(self.call.out / "log.txt", "ab") as log:
            return subprocess.Popen(
                [sys.executable, str(SCRIPT), "--job", job],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def attend(self, todo: dict[str, float]) -> dict[str, float]:
        """Do phases in one process, and return those that another one has to do, with their seconds.

        A phase is killed when its seconds are over. If a row ends the process before, the phase goes on after it.
        """
        rows, rest, late = self.call.rows, todo, False
        process, begun = self.start(todo), time.time()
        try:
            while rest and process.poll() is None and not late:
                time.sleep(_POLL)
                self.print_new()
                before, rest = rest, {name: todo[name] for name in todo if name not in rows.ended()}
                begun = begun if rest == before else time.time()
                late = self.call.left() < -_ENDING or time.time() - begun > next(iter(rest.values()), 0.0) + _START
        finally:
            end_group(process)
        rest = {name: todo[name] for name in todo if name not in rows.ended()}
        if not rest:
            self.print_new()
            return {}
        fault, took = next(iter(rest)), time.time() - begun
        why = f"killed after {took:.0f} s" if late else f"its process ended with {process.returncode}"
        cut = [line for line in rows.of(fault).values() if line["state"] == "begun"]
        for line in cut:
            rows.note(fault, line["row"], "failed", error=f"{line['error']}; {why}" if "error" in line else why)
        self.print_new()
        left = rest[fault] - took
        if cut and not late and left > _LEAST:
            return rest | {fault: left}
        rows.note(fault, state="failed", error=why)
        del rest[fault]
        return rest

    def print_new(self) -> None:
        """Print the rows that have ended since the last time, without the tests that passed."""
        lines = self.call.rows.lines()
        for line in lines[self.printed :]:
            if line["row"] and line["state"] != "begun" and line.get("outcome") not in ("passed", "skipped"):
                rate = f"{line['images/s']:,.0f} images/s" if "images/s" in line else line["state"]
                print(f"{line['phase']:<9} {line['row']:<28} {rate} {line.get('error', '')[:90]}".rstrip(), flush=True)
        self.printed = len(lines)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def unmet_requirements(requirements: Iterable[str]) -> list[str]:
    """Return the requirements that this environment does not meet, and what it has instead."""
    from packaging.requirements import Requirement  # only the supervisor needs it

    found = []
    for one in map(Requirement, requirements):
        there = next((found.version for found in distributions(name=one.name)), "")
        if not there or not one.specifier.contains(there, prereleases=True):
            found.append(f"{one}, {there or 'missing'} here")
    return found


# The table.

# by phases: columns, each the name of a figure and its format
_WORK = "batch:d images/s:,.0f ms:.2f least:.2f most:.2f TFLOP/s:.3g of_peak:.0% GiB:.1f"
_STEPS = f"{_WORK} CPU_ms:.1f queued_ms:.1f H100_roofline:,d over_eager:.2f waits:d where:"
TABLES = {
    ("machine",): "TFLOP/s:.4g of_peak:.0% GB/s:,.4g",
    ("eager", "compiled", "graphs", "rest"): _STEPS,
    ("peers",): f"{_WORK} ours_over_it:.2f expected:",
    ("loading", "runs"): "images/s:,.0f seconds:.1f waiting:.0%",
    ("profile",): "kernel_ms:.2f",
}


def markdown(rows: Rows) -> str:
    """Return the page with the tables of all rows."""
    last = {(line["phase"], line["row"]): line for line in rows.lines()}
    facts = [f"{name}: {value}" for name, value in rows.of("machine").get("versions", {}).get("about", {}).items()]
    outcomes = Counter(line["outcome"] for line in rows.of("tests").values())
    facts += [f"tests {outcome}: {count}" for outcome, count in outcomes.items()]
    parts = [bullets(facts)]
    for phases, columns in TABLES.items():
        forms = dict(column.split(":") for column in columns.split())
        cells = [["row", "phase", *(name.replace("_", " ") for name in forms)], ["---"] * (2 + len(forms))]
        for (phase, row), line in last.items():
            if row and phase in phases and line["state"] == "done" and forms.keys() & line.keys():
                figures = ((line.get(name), form) for name, form in forms.items())
                cells.append([row, phase, *("" if value is None else format(value, form) for value, form in figures)])
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells) if len(cells) > 2 else "")
    for state in ("failed", "not reached"):
        parts.append(
            bullets(
                f"{state}: {phase} {row} {line.get('error', '')}".rstrip()
                for (phase, row), line in last.items()
                if line["state"] == state
            )
        )
    return "\n\n".join(part for part in parts if part) + "\n"


def bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results, without earlier ones")
    made.add_argument("--minutes", type=float, default=7.6, help="minutes in all")
    made.add_argument("--phases", nargs="+", choices=WANTED, default=WANTED)
    made.add_argument("--tasks", nargs="+", help="tasks of the steps; default: mae, droppos and then all others")
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=["S", "B"], help="sizes of the encoder")
    made.add_argument("--batch", type=int, default=256, help="images per step")
    made.add_argument("--select", default="", metavar="EXPRESSION", help="GPU tests by name, as pytest's -k")
    made.add_argument("--tiny", action="store_true", help="everything in miniature on the CPU, to test the script")
    made.add_argument("--count_gflop", action="store_true", help="count GFLOP per image anew, and write the file")
    made.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)  # of a process that does phases
    return made


def supervise(args: argparse.Namespace, work: Path) -> int:
    """Measure everything, and write the table, also if this is stopped."""
    sizes = args.sizes[:1] if args.tiny else args.sizes
    chosen = args.tasks, sizes, args.batch, args.select, time.time() + 60 * args.minutes - _ENDING
    call = Call(args.out.absolute(), work, args.tiny, *chosen)
    if call.rows.path.exists():
        raise PatchloomError(f"{args.out} has rows of an earlier call: give another --out")
    if not call.tiny:
        import torch  # the processes of the phases import it on their own

        if not torch.cuda.is_available():
            raise PatchloomError("there is no CUDA GPU here: use --tiny to try the script on a CPU")
    call.out.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for requirement in unmet_requirements(project["dependencies"]):
        print(f"not met: {requirement}", flush=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes and writes the table
    try:
        Supervisor(call).run(args.phases)
    finally:
        signal.signal(signal.SIGTERM, before)
        page = markdown(call.rows)
        (call.out / "table.md").write_text(page, "utf-8")
        print(f"\n{page}", flush=True)
    return int(any(line["state"] == "failed" for line in call.rows.lines()))


def main(words: list[str] | None = None) -> int:
    args = parser().parse_args(words)
    if args.count_gflop:
        from gpu_steps import count_gflop  # imports torch

        count_gflop()
        return 0
    if args.job:
        fields = args.job["call"]
        call = Call(**fields | {name: Path(fields[name]) for name in ("out", "work")})
        do_phases(call, args.job["todo"])
        return 0
    try:
        with tempfile.TemporaryDirectory(prefix="patchloom-gpu-", ignore_cleanup_errors=True) as work:
            return supervise(args, Path(work))
    except PatchloomError as problem:
        print(f"gpu.py: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu.py: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
