"""An evaluation of several processes, as torchrun starts them; of segmentation, on drawn squares."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from forked import server
from ranks import SAVING, free_port


def _rank(
    rank: int,
    world: int,
    port: int,
    words: list[str],
    run: str,
    options: dict[str, Any],
    cache: str,
    dies: int | None,
    sent: int,
) -> None:
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{run}/{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "XDG_CACHE_HOME": cache}
    os.environ.update({name: str(value) for name, value in found.items() if world > 1 or name == "XDG_CACHE_HOME"})
    torch.set_num_threads(1)
    from scenes import Squares

    from patchloom.cli import main
    from patchloom.dense import segmenter
    from patchloom.dense.annotations import segmentation
    from patchloom.dense.annotations.base import AnnotatedData
    from patchloom.evaluate import features, trainer
    from patchloom.evaluate.trainer import Trainer
    from patchloom.runs import checkpoint

    parts = AnnotatedData(Squares(8), Squares(3, seed=1), Squares(5, seed=2))
    segmentation.open_label_maps = lambda *_, **__: parts
    segmenter._DROPOUT = 0.0  # each process draws its own
    features.choose_precision = lambda device: ("float32", "as the test says")
    fit, update = Trainer.fit, Trainer.update

    def noted(self: Trainer, *given: Any) -> Any:
        done = fit(self, *given)
        torch.save(self.tested.state_dict(), f"{run}/{rank}.pt")
        return done

    def dying(self: Trainer, batch: Any) -> Any:
        if self.step == dies and rank == world - 1:
            os.kill(os.getpid(), sent)
        return update(self, batch)

    def slow_save(self: checkpoint.Checkpoints, *given: Any) -> None:
        time.sleep(SAVING)
        save(self, *given)
        Path(f"{run}/saved").touch()

    Trainer.fit, Trainer.update = noted, dying
    if dies is not None and sent != signal.SIGKILL:
        save, checkpoint.Checkpoints.save = checkpoint.Checkpoints.save, slow_save
    elif dies is not None:
        trainer._SAVE_EVERY, checkpoint.SAVE_COST = 0.0, 0  # after every step
    protocol, data = words
    given = [f"--{name}={value}" for name, value in options.items()]
    code = main(["evaluate", protocol, run, data, "--device=cpu", "--workers=0", *given])
    Path(f"{run}/{rank}.saw").write_text(" ".join(path.name for path in Path(run).glob("saved")))
    sys.exit(code)


def segment_together(run: Path, world: int, cache: Path, **options: Any) -> tuple[list[int], list[str], list[str]]:
    return evaluate_together("segment", run, "squares", world, cache, **options)


def evaluate_together(
    protocol: str,
    run: Path,
    data: str,
    world: int,
    cache: Path,
    dies: int | None = None,
    number: int = signal.SIGKILL,
    **options: Any,
) -> tuple[list[int], list[str], list[str]]:
    """Exit codes, what each process printed, and what it printed to stderr; the weights at the end are in RANK.pt.

    The last process sends itself the signal ``number`` before step ``dies``. If that kills it, checkpoints are written
    after every step; otherwise, writing one takes `SAVING` seconds, and RANK.saw names the file ``saved`` if a process
    ended after that.
    """
    port, words = free_port(), [protocol, data]
    given = [(rank, world, port, words, str(run), options, str(cache), dies, number) for rank in range(world)]
    processes = [server().Process(target=_rank, args=one) for one in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    told = [[(run / f"{rank}.{stream}").read_text() for rank in range(world)] for stream in ("out", "err")]
    return [process.exitcode for process in processes], *told
