"""Distributed runs with torchrun's environment, forked from a server that has imported patchloom."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from forked import server
from killing import SMALL, shorten_ends

SAVING = 3.0


class ProcessOutcome(NamedTuple):
    """End of a process: exit code, lines on stderr, and lifetime in seconds."""

    code: int
    told: str
    seconds: float


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


class Signal(NamedTuple):
    """Signal that some ranks send to themselves before the update of a step."""

    ranks: tuple[int, ...]
    step: int
    number: int = signal.SIGKILL


def _rank(
    rank: int,
    world: int,
    port: int,
    images: str,
    out: str,
    options: dict[str, Any],
    beside: str,
    sent: Signal | None,
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)  # the server has that of the test in which it began
    multiprocessing.set_start_method("fork", force=True)
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{beside}.{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if world > 1:
        found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        os.environ.update({name: str(value) for name, value in found.items()})
    from patchloom import cli
    from patchloom.runs.checkpoint import Checkpoints, tensors_of
    from patchloom.train import loop as training
    from patchloom.train.step import Stepper

    shorten_ends()
    training._SAVE_EVERY = 0.0 if sent and sent.number == signal.SIGKILL else 60.0
    torch.set_num_threads(1)
    if options.get("compile"):  # without a compiler, and with graphs split as DDP splits those of large models
        torch.compile = partial(torch.compile, backend="aot_eager", fullgraph=True)
        torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 4096
    begin, update, train, save = Stepper.__init__, Stepper.update, training.train, Checkpoints.save
    steppers = []

    def dying_update(self, done, *rest):
        if sent and rank in sent.ranks and done == sent.step:
            os.kill(os.getpid(), sent.number)
        return update(self, done, *rest)

    def noted_begin(self, *given):
        begin(self, *given)
        steppers.append(self)

    def noted_train(*given):
        ended = train(*given)
        torch.save(tensors_of(steppers[-1].task, steppers[-1].optimizer.optimizer), f"{beside}.{rank}.pt")
        return ended

    def slow_save(self, *what):
        time.sleep(SAVING)
        save(self, *what)

    Stepper.update, Stepper.__init__, training.train = dying_update, noted_begin, noted_train
    if sent and sent.number != signal.SIGKILL:
        Checkpoints.save = slow_save
    cli.run_verb = lambda verb, words: training.pretrain(images, out=out, **SMALL | options)
    sys.exit(cli.main(["pretrain", images]))


def run_together(
    images: Path, out: Path, world: int, options: dict[str, Any], sent: Signal | None = None
) -> tuple[list[ProcessOutcome], list[dict[str, torch.Tensor]]]:
    """Run ``world`` processes; if they are interrupted, writing a checkpoint takes `SAVING` seconds.

    Returns:
        The end of each process, and its final weights and moments.
    """
    context = server()
    out.parent.mkdir(parents=True, exist_ok=True)
    beside, port, begin = out.parent / f"{out.name}-of-{world}", free_port(), time.monotonic()
    processes = [
        context.Process(
            target=_rank, args=(rank, world, port, str(images), str(out), options, str(beside), sent, dict(os.environ))
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    ends: dict[int, float] = {}
    while len(ends) < world and time.monotonic() - begin < 240:
        time.sleep(0.05)
        for rank, process in enumerate(processes):
            if process.exitcode is not None:
                ends.setdefault(rank, time.monotonic() - begin)
    for process in processes:
        process.kill()
        process.join()
    told = [Path(f"{beside}.{rank}.err").read_text() for rank in range(world)]
    ended = [ProcessOutcome(p.exitcode, told[r], ends.get(r, float("inf"))) for r, p in enumerate(processes)]
    kept = [Path(f"{beside}.{rank}.pt") for rank in range(world)]
    return ended, [torch.load(path) for path in kept if path.exists()]
