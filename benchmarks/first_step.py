"""First-step profile: seconds of wall clock from the command to a run's first training step, and where they go.

    python benchmarks/first_step.py                                  # five starts of `patchloom pretrain shapes`
    python benchmarks/first_step.py photos/ --model mini --runs 3    # other images and options of pretrain
    python benchmarks/first_step.py --verbs                          # seconds of --help and of small verbs

Every start is a new process, with Python's and patchloom's own caches as they are: the first one warms the disc and is
left out. "At" is when a stage ended, counted from the moment before the process was started, and "took" its duration;
stages inside another one are indented. The values are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

# stage, and the function that is one: module and name of its place of use
STAGES = (
    ("command line parsed", "patchloom.cli:parse_call"),
    ("images opened", "patchloom.train.loop:open_data"),
    ("process launched", "patchloom.train.loop:launch"),
    ("  held-out images chosen", "patchloom.train.plan:choose_held_out"),
    ("  statistics", "patchloom.train.plan:measure_data"),
    ("  automatic options", "patchloom.train.plan:resolve"),
    ("  near copies", "patchloom.train.plan:near_copies"),
    ("plan", "patchloom.train.plan:Planner.plan"),
    ("  upper bound of memory", "patchloom.train.estimate:upper_bound_bytes"),
    ("  memory counted", "patchloom.train.estimate:sketch"),
    ("  sizes of the task", "patchloom.train.estimate:meta_task"),
    ("forecast", "patchloom.train.plan:Planner.forecast"),
    ("task initialised", "patchloom.train.loop:prepare_task"),
    ("plan printed", "patchloom.train.loop:announce"),
    ("plan stored", "patchloom.train.plan:Planner.store"),
    ("optimiser built", "patchloom.train.loop:Stepper.__init__"),
    ("measure before the first step", "patchloom.train.metrics:MetricsLog._measured"),
    ("checkpoint before the first step", "patchloom.train.loop:save_checkpoint"),
    ("worker processes started", "patchloom.train.loop:batches_of"),
    ("first batch", "patchloom.data.loader:Prefetcher.__next__"),
    ("forward and backward", "patchloom.train.step:Stepper.forward"),
    ("first training step", "patchloom.train.step:Stepper.update"),
)
IMPORTS = ("torch", "timm", "lightning_fabric", "matplotlib", "torch._dynamo", "sympy", "scipy", "sklearn")
VERBS = ("--help", "pretrain --help", "evaluate --help", "evaluate knn --help", "look --help", "tasks", "recipes")


class Enough(BaseException):
    """End of the trial, after the first training step."""


class Stamps:
    """Stages of this process with the time of their end and their duration, in seconds."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.found: dict[str, tuple[float, float]] = {}

    def stamp(self, stage: str, since: float) -> None:
        """Record the end of a stage's first occurrence."""
        now = time.monotonic()
        self.found.setdefault(stage, (now - self.began, now - since))

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a stage with a stamp at its end."""

        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            since = time.monotonic()
            try:
                return function(*given, **named)
            finally:
                self.stamp(stage, since)

        return call

    def watch(self, stage: str, place: str) -> None:
        """Have a function stamp the end of its stage."""
        module, _, name = place.partition(":")
        *inside, name = name.split(".")
        owner: Any = import_module(module)
        for one in inside:
            owner = getattr(owner, one)
        setattr(owner, name, self.timed(stage, getattr(owner, name)))


def child(began: float, words: list[str]) -> None:
    """Run ``patchloom pretrain`` up to the first step, and print the stages as JSON."""
    stamps = Stamps(began)
    stamps.stamp("Python started", began)
    since = time.monotonic()
    from patchloom import cli

    stamps.stamp("command line imported", since)
    stamps.watch(*STAGES[0])
    imported = cli.function_of

    def import_verb(verb: str) -> Any:
        for library in IMPORTS[:2]:  # as the verb does
            since = time.monotonic()
            import_module(library)
            stamps.stamp(f"{library} imported", since)
        since = time.monotonic()
        function = imported(verb)
        stamps.stamp("verb imported", since)
        for one in STAGES[1:]:
            stamps.watch(*one)
        from patchloom.train.step import Stepper

        update = Stepper.update

        def last(*given: Any, **named: Any) -> Any:
            update(*given, **named)
            raise Enough

        Stepper.update = last  # type: ignore[method-assign]
        return function

    cli.function_of = import_verb
    try:
        cli.main(["pretrain", *words])
    except Enough:
        pass
    loaded = [name for name in IMPORTS if name in sys.modules]
    print(json.dumps({"stages": stamps.found, "loaded": loaded}), file=sys.stderr)


def first_step(words: list[str]) -> dict[str, Any]:
    """Return the stages of one start."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", repr(time.monotonic()), *words, "--out", f"{folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stderr.strip().splitlines()
        if not lines or not lines[-1].startswith('{"stages"'):
            sys.exit(done.stdout + done.stderr)
        return dict(json.loads(lines[-1]))


def show_stages(words: list[str], runs: int) -> None:
    """Print the median times of all stages."""
    found = [first_step(words) for _ in range(runs + 1)][1:]
    order = ["Python started", "command line imported", STAGES[0][0], "torch imported", "timm imported"]
    order += ["verb imported", *(stage for stage, _ in STAGES[1:])]
    print("| stage | at | took |\n| --- | --- | --- |")
    for stage in order:
        times = [one["stages"][stage] for one in found if stage in one["stages"]]
        if times:
            at, took = (statistics.median(values) for values in zip(*times, strict=True))
            print(f"| {stage.replace('  ', '&nbsp;&nbsp;')} | {at:.2f} s | {took:.2f} s |")
    starts = [one["stages"][STAGES[-1][0]][0] for one in found]
    print(f"\nfirst step: {', '.join(f'{start:.2f}' for start in starts)} s")
    print(f"loaded by then, of the libraries watched: {', '.join(found[-1]['loaded'])}")


def show_verbs(runs: int) -> None:
    """Print the median seconds of commands that need no torch."""
    print("| command | seconds |\n| --- | --- |")
    taken: dict[str, list[float]] = {verb: [] for verb in VERBS}
    for number in range(runs + 1):
        for verb in VERBS:
            began = time.monotonic()
            subprocess.run([sys.executable, "-m", "patchloom.cli", *verb.split()], check=True, capture_output=True)
            if number:
                taken[verb].append(time.monotonic() - began)
    for verb, seconds in taken.items():
        print(f"| `patchloom {verb}` | {statistics.median(seconds):.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(float(sys.argv[2]), sys.argv[3:])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="shapes")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--verbs", action="store_true")
    asked, others = parser.parse_known_args()
    if asked.verbs:
        show_verbs(asked.runs)
    else:
        show_stages([asked.data, *others], asked.runs)
