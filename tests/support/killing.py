"""Runs that are killed at random times, and the files they leave behind.

A separate module because the killed processes have to import it. They are forked from a server that has imported
patchloom, so that a start takes 0.1 s.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dying import die_at
from evaluating import numbers
from forked import server
from matplotlib.figure import Figure
from pseudo_cuda import pseudo_cuda
from running import rows
from safetensors.torch import load_file

from patchloom.look.charts import write_figure
from patchloom.results import store
from patchloom.runs.folder import read_metrics

SMALL = {"model": {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2, "drop_path_rate": 0.1}, "img_size": 32}
SMALL |= {"patch_size": 8, "batch_size": 16, "epochs": 6, "precision": "float32", "attention": "explicit"}
SMALL |= {"threads": 1, "compile": False, "workers": 0, "device": "cpu", "held_out": 0.2}
PROBE_STEPS = 5
STRENGTHS = (1.0, 1e-2)
_KEPT = ("summary.txt", "verdict.yaml", "encoder.safetensors")
# audit hooks see these events before a file is written or renamed
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod")


class Kill(NamedTuple):
    """Time of a kill: at an event of its files (from 1), or after some seconds; else never."""

    event: int | None = None
    seconds: float | None = None


def shorten_ends(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Shorten the ends of small runs in this process.

    Linear and attentive probes are hardly fitted, curves are blank, and near copies are not looked for, which other
    tests cover; and nothing waits until the disc has written it, which takes a second a run.
    """
    from patchloom.evaluate import logistic
    from patchloom.evaluate.protocols import attentive
    from patchloom.evaluate.recipes import ATTENTIVE
    from patchloom.train import metrics, plan

    put(logistic, "_ITERATIONS", PROBE_STEPS)
    put(logistic, "L2_STRENGTHS", STRENGTHS)
    put(logistic.choose_strength, "__kwdefaults__", logistic.choose_strength.__kwdefaults__ | {"strengths": STRENGTHS})
    put(attentive, "ATTENTIVE", ATTENTIVE | {"small": (replace(ATTENTIVE["small"][0], epochs=2), {})})
    put(metrics, "draw_curves", _blank_curves)
    put(plan, "near_copies", lambda source: None)
    put(os, "fsync", lambda handle: None)


def _blank_curves(metrics_csv: Path, out: Path, *_: Any, **__: Any) -> Path:
    """Replace `draw_curves` by reading and writing the same files with an empty figure."""
    assert "epoch" in read_metrics(metrics_csv)
    return write_figure(Figure((1, 1)), out)


class Numbers:
    """Dataset of numbers with the process that prepared each; one of them never returns."""

    def __init__(self, stuck: int | None = None):
        self.stuck = stuck

    def __getitem__(self, number: int) -> tuple[int, int]:
        while number == self.stuck:
            time.sleep(0.05)
        return number, os.getpid()


def _train(images: str, out: str, options: dict[str, Any], event: int | None, told: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)  # for processes that read images; a fork server is slow
    seen = die_at(event, out, _EVENTS)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    from patchloom.runs import checkpoint
    from patchloom.train import loop as training

    shorten_ends()
    training._SAVE_EVERY = 0.02  # so that many kills meet a checkpoint that is being written
    checkpoint.SAVE_COST = 0
    torch.set_num_threads(1)
    with pseudo_cuda() if options.get("device") == "cuda" else nullcontext():
        training.pretrain(images, out=out, **SMALL | options)
    told.put(len(seen))


def start(images: Path, out: Path, options: dict[str, Any], kill: Kill) -> tuple[bool, int]:
    """Run one process until its end or its kill.

    Returns:
        Whether it was killed, and how many events of its files it saw (0 if it was killed).
    """
    context = server()
    told = context.SimpleQueue()
    process = context.Process(target=_train, args=(str(images), str(out), options, kill.event, told))
    process.start()
    process.join(kill.seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    if process.exitcode == 0:
        return False, told.get()
    assert process.exitcode == -signal.SIGKILL, f"{out} ended with {process.exitcode}"
    return True, 0


def kill_until_done(images: Path, out: Path, options: dict, events: int, seconds: float, rng: random.Random) -> int:
    """Restart a run and kill it at random times until it finishes; return the number of kills."""
    kills = 0
    while True:
        at_event = rng.random() < 0.5  # half of the kills: a resumed run has fewer events left
        kill = Kill(event=rng.randint(1, events // 2)) if at_event else Kill(seconds=rng.uniform(0.05, seconds))
        killed, _ = start(images, out, options, kill)
        if not killed:
            return kills
        kills += 1


def left_behind(run: Path) -> dict[str, Any]:
    """Return the contents of a finished run: tensors, tables without times, pictures and texts."""
    tensors = load_file(run / "checkpoints" / "last.safetensors")
    found: dict[str, Any] = {name: value.numpy().tobytes() for name, value in tensors.items()}
    found["metrics.csv"] = rows(run)
    found[store.FILE] = numbers(store.load(run, outcomes=True))
    for path in [*sorted(run.glob("pictures/*.png")), *[run / name for name in _KEPT]]:
        found[path.name] = path.read_bytes()
    return found


def typed(images: Path, out: Path, options: dict[str, Any]) -> list[str]:
    words = ["pretrain", str(images), f"--out={out}"]
    for name, value in (SMALL | options).items():
        pairs = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        words += [f"--{key}={str(one).lower()}" for key, one in pairs.items()]
    return words
