"""Mutation study: the number of small faults in src/ that the quick tests catch, by package.

    python benchmarks/mutants.py run /tmp/mutants                       # 200 faults, about an hour on two cores
    python benchmarks/mutants.py run /tmp/old --again /tmp/mutants      # its survivors, with the tests of this checkout
    python benchmarks/mutants.py show /tmp/mutants                      # the table, and every survivor

A mutation changes one operator, constant, index or order of two arguments, or drops one statement. Half of them lie in
CORE. First, every test file runs once on unchanged code: its seconds and the lines that it executes are recorded, and
tests that fail there are left out. Then a mutation meets the test files that execute its line: its own package's first,
then the others, the quickest first, within ``--limit`` seconds. It is caught if a test fails, or if the tests take far
longer than before. What no test executes survives. Tests marked ``slow`` do not run.

Needs ``coverage``. Processes are forked from one that has imported torch, so that a mutation costs seconds.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORE = ("patches", "withhold", "questions", "tasks", "nets", "train", "results")
_PATIENCE = 3.0  # times as long as on unchanged code is a hang
_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change of a file of src/patchloom: lines and columns in bytes, as `ast` counts them."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    kind: str
    before: str
    after: str

    @property
    def package(self) -> str:
        return Path(self.file).parts[0].removesuffix(".py")

    def apply(self, source: str) -> str:
        """Return the source of the file with this change."""
        lines = source.encode().splitlines(keepends=True)
        first, last = lines[self.line - 1], lines[self.end_line - 1]
        changed = first[: self.column] + self.after.encode() + last[self.end_column :]
        return b"".join([*lines[: self.line - 1], changed, *lines[self.end_line :]]).decode()


def mutations(file: str, source: str) -> list[Mutation]:
    """Return all mutations of a file, in the order of its syntax tree; an index is also a constant."""
    found = []
    lines = source.encode().splitlines()

    def add(node: ast.AST, kind: str, changed: ast.AST | None) -> None:
        after = "pass" if changed is None else ast.unparse(changed)
        after = f"({after})" if isinstance(changed, ast.BinOp | ast.BoolOp | ast.Compare) else after
        line, column, end_line, end_column = _span(node)
        # a statement of many lines is known by its first
        before = lines[line - 1][column : end_column if line == end_line else None].decode()
        found.append(Mutation(file, line, column, end_line, end_column, kind, before, after))

    for node in _walk(ast.parse(source)):
        match node:
            case ast.Compare(ops=[operator]) | ast.BinOp(op=operator) | ast.BoolOp(op=operator):
                changed = copy.deepcopy(node)
                swapped = _SWAPS.get(type(operator), ast.Add)()  # others are shifts and exclusive or
                if isinstance(changed, ast.Compare):
                    changed.ops = [swapped]
                else:
                    changed.op = swapped
                add(node, "operator", changed)
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
                add(node, "operator", operand)
            case ast.Subscript(slice=ast.Constant(value=int(index)) as part) if not isinstance(index, bool):
                add(part, "index", ast.Constant(index + 1))
            case ast.Subscript(slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(index))) as part):
                add(part, "index", ast.Constant(1 - index))
            case ast.Constant(value=bool(value)):
                add(node, "constant", ast.Constant(not value))
            case ast.Constant(value=int(value)):
                add(node, "constant", ast.Constant(value + 1))
            case ast.Constant(value=float(value)):
                add(node, "constant", ast.Constant(value * 2 or 1.0))
            case ast.Call(args=[ast.Starred(), *_] | [_, ast.Starred(), *_]):
                pass
            case ast.Call(args=[first, second, *rest]):
                changed = copy.copy(node)
                changed.args = [second, first, *rest]
                add(node, "arguments", changed)
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
                add(node, "dropped statement", None)
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                add(node, "dropped statement", None)
    return found


def _span(node: Any) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes that compute something: no annotations, messages, docstrings, or imports for types."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment", "msg", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Raise):
                yield child  # it may be dropped, but its message is text
            else:
                yield from _walk(child)


def draw(count: int, seed: int) -> list[Mutation]:
    """Draw mutations, half of them in CORE; every kind is equally frequent as long as there are enough."""
    source = ROOT / "src" / "patchloom"
    parts: dict[bool, dict[str, list[Mutation]]] = {True: {}, False: {}}
    for path in sorted(source.rglob("*.py")):
        for one in mutations(str(path.relative_to(source)), path.read_text()):
            parts[one.package in CORE].setdefault(one.kind, []).append(one)
    rng, drawn = random.Random(seed), []
    for core, wanted in ((True, count // 2), (False, count - count // 2)):
        kinds = [rng.sample(of_kind, len(of_kind)) for _, of_kind in sorted(parts[core].items())]
        for turn in range(wanted):
            drawn.append(kinds[turn % len(kinds)].pop())
    return drawn


class Places:
    """Copies of the checkout, one a process, in which tests run in forked processes."""

    def __init__(self, out: Path, processes: int) -> None:
        self.trees = [out / f"tree{i}" for i in range(processes)]
        listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
        files = [name for name in names if (ROOT / name).is_file()]
        for tree in self.trees:
            shutil.rmtree(tree, ignore_errors=True)
            for name in files:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
        self.logs = out / "logs"
        self.logs.mkdir(exist_ok=True)

    def run(self, jobs: Iterable[Job], done: Callable[[Job, int | None, float], None]) -> None:
        """Run jobs, one a tree; report the exit status (None for too long) and the seconds of each."""
        waiting, free = iter(jobs), [*self.trees]
        running: dict[int, tuple[Job, Path, float]] = {}
        while True:
            while free and (job := next(waiting, None)) is not None:
                tree = free.pop()
                job.prepare(tree)
                running[self._fork(job, tree)] = (job, tree, time.monotonic())
            if not running:
                return
            time.sleep(0.05)
            for pid, (job, tree, start) in [*running.items()]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                took = time.monotonic() - start
                if late := not ended and took > job.most_seconds:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                if ended or late:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # processes that the tests left behind
                    job.undo(tree)
                    done(job, None if late else os.waitstatus_to_exitcode(status), took)
                    free.append(tree)
                    del running[pid]

    def _fork(self, job: Job, tree: Path) -> int:
        if pid := os.fork():
            return pid
        status = 3
        try:
            os.setsid()
            log = os.open(self.logs / f"{job.name}.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.chdir(tree)
            os.environ["PYTHONPATH"] = f"{tree / 'src'}"
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutation may keep a file's size and second
            sys.dont_write_bytecode = True
            sys.path[:0] = [str(tree / "src")]
            status = int(job.work(tree))
        finally:
            os._exit(status)


@dataclass
class Job:
    """Test files to run in one process, with what precedes and follows them."""

    name: str
    files: Sequence[str]
    most_seconds: float
    left_out: Sequence[str] = ()
    mutation: Mutation | None = None
    record: Path | None = None

    def _changed(self, tree: Path) -> Path:
        assert self.mutation is not None
        return tree / "src" / "patchloom" / self.mutation.file

    def prepare(self, tree: Path) -> None:
        if self.mutation is not None:
            path = self._changed(tree)
            path.write_text(self.mutation.apply(path.read_text()))

    def undo(self, tree: Path) -> None:
        if self.mutation is not None:
            path = self._changed(tree)
            path.write_bytes((ROOT / path.relative_to(tree)).read_bytes())

    def work(self, tree: Path) -> int:
        import pytest

        options = ["-q", "-x", "-n", "0", "-m", "not slow", "--tb=short", "-p", "no:cacheprovider"]
        options += [f"--deselect={test}" for test in self.left_out]
        if self.record is None:
            return pytest.main([*options, *self.files])
        import coverage

        measured = coverage.Coverage(data_file=None, source=[str(tree / "src" / "patchloom")])
        failures = Failures()
        measured.start()
        start = time.monotonic()
        options.remove("-x")
        status = pytest.main([*options, *self.files], plugins=[failures])
        took = time.monotonic() - start
        measured.stop()
        data, source = measured.get_data(), tree / "src" / "patchloom"
        lines = {str(Path(file).relative_to(source)): sorted(data.lines(file) or ()) for file in data.measured_files()}
        found = {"seconds": took, "failed": failures.found, "lines": lines, "status": int(status)}
        self.record.write_text(json.dumps(found))
        return status


class Failures:
    """Plugin of pytest that collects the tests that failed."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.found.append(report.nodeid)


def measure(places: Places, kept: Path) -> dict[str, Any]:
    """Run every version of a test file on unchanged code, once; return seconds, failures and executed lines by file."""
    kept.mkdir(exist_ok=True)
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    record = {}
    for file in files:
        version = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:12]
        record[file] = kept / f"{file.replace('/', '.')}.{version}.json"
    todo = {file: path for file, path in record.items() if not path.exists()}
    jobs = [Job(f"unchanged.{path.stem}", [file], 900, record=path) for file, path in todo.items()]
    places.run(jobs, lambda job, status, took: print(f"{job.files[0]}: status {status}, {took:.0f} s", flush=True))
    found = {file: json.loads(path.read_text()) for file, path in record.items() if path.exists()}
    return {file: one for file, one in found.items() if one["status"] in (0, 1)}  # others cannot be run, or are empty


def chosen(mutation: Mutation, measured: dict[str, Any], seconds: float) -> list[str]:
    """Return the test files for a mutation: those that execute its line, its own package's first, within seconds."""
    span = range(mutation.line, mutation.end_line + 1)
    runs = [file for file, found in measured.items() if {*found["lines"].get(mutation.file, ())} & {*span}]
    stem = Path(mutation.file).stem

    def order(file: str) -> tuple[bool, bool, float]:
        parts = Path(file).parts
        own = parts[1] == mutation.package or parts[1].removeprefix("test_").startswith(mutation.package)
        return not own, stem not in Path(file).stem, measured[file]["seconds"]

    files: list[str] = []
    total = 0.0
    for file in sorted(runs, key=order):
        if not files or total + measured[file]["seconds"] <= seconds:
            files.append(file)
            total += measured[file]["seconds"]
    return files


def study(out: Path, count: int, seed: int, limit: float, processes: int, again: Path | None) -> None:
    """Run the study; what is already in ``out`` is not run again."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = [one for one, caught in load(again) if not caught] if again else draw(count, seed)
    known = {one for one, _ in load(out)}
    # imported once, for all forked processes
    import sklearn.linear_model  # noqa: F401
    import timm  # noqa: F401
    import torch
    import torchvision  # noqa: F401

    torch.set_num_threads(1)
    places = Places(out, processes)
    measured = measure(places, (again or out) / "lines")
    left_out = [test for found in measured.values() for test in found["failed"]]
    print(f"{len(measured)} test files, {sum(found['seconds'] for found in measured.values()):.0f} s", flush=True)
    if left_out:
        print(f"{len(left_out)} tests fail on unchanged code:", *left_out[:20], sep="\n", flush=True)

    def note(mutation: Mutation, caught: bool, why: str) -> None:
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(mutation) | {"caught": caught, "why": why}) + "\n")
        print("caught  " if caught else "SURVIVED", describe(mutation), why, flush=True)

    def jobs() -> Iterator[Job]:
        for number, mutation in enumerate(wanted):
            if mutation in known:
                continue
            files = chosen(mutation, measured, limit)
            if not files:
                note(mutation, False, "no quick test executes it")
                continue
            seconds = 30 + _PATIENCE * sum(measured[file]["seconds"] for file in files)
            yield Job(f"mutation{number}", files, seconds, left_out, mutation)

    def done(job: Job, status: int | None, took: float) -> None:
        assert job.mutation is not None
        caught = status not in (0, 5)  # 5: no test was left
        note(job.mutation, caught, f"{'hang' if status is None else status}, {took:.0f} s, {len(job.files)} files")

    places.run(jobs(), done)
    show(out)


def describe(one: Mutation) -> str:
    return f"{one.file}:{one.line} {one.kind}: {one.before[:70]} -> {one.after[:70]}"


def load(out: Path) -> list[tuple[Mutation, bool]]:
    """Return the mutations of a study and whether each was caught."""
    path = out / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(Mutation(**{k: v for k, v in row.items() if k not in ("caught", "why")}), row["caught"]) for row in rows]


def in_package(package: str, one: Mutation) -> bool:
    return one.package == package


def show(out: Path) -> None:
    """Print the mutations caught by package, in CORE and elsewhere, and the survivors."""
    results = load(out)

    def line(name: str, which: Callable[[Mutation], bool]) -> str:
        caught = [found for one, found in results if which(one)]
        return f"| {name} | {len(caught)} | {sum(caught)} | {100 * sum(caught) / max(len(caught), 1):.0f} % |"

    print("| package | mutations | caught | share |\n| --- | --- | --- | --- |")
    for package in sorted({one.package for one, _ in results}, key=lambda name: (name not in CORE, name)):
        print(line(package, partial(in_package, package)))
    print(line("the core", lambda one: one.package in CORE))
    print(line("elsewhere", lambda one: one.package not in CORE))
    print(line("all", lambda one: True))
    print(*(describe(one) for one, caught in results if not caught), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of tests per mutation")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--again", type=Path, help="an earlier study: run only its survivors")
    given = parser.parse_args()
    if given.what == "show":
        show(given.out)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        study(given.out, given.count, given.seed, given.limit, given.processes, given.again)


if __name__ == "__main__":
    main()
