"""Fine-tuning in a separate process that may kill itself; a module, because processes import it by name."""

import os
import pickle
import signal
from pathlib import Path

import torch
from evaluating import numbers

from patchloom.evaluate import features, trainer
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.training import Training
from patchloom.runs import checkpoint

# noqa: F401

# everything that a checkpoint has to hold: a moving average, the best epoch, random numbers of every kind
OPTIONS = {
    "device": "cpu",
    "epochs": 3,
    "batch_size": 16,
    "max_train": 120,
    "validation": 0.25,
    "patience": 1.0,
    "ema": 0.9,
}
OPTIONS |= {"mixup": 0.8, "erasing": 0.5, "drop_path": 0.1, "control": True, "seed": 3}


def left(run: Path, report) -> tuple:
    """Return what was measured, and the bytes of the classifier."""
    (path,) = (run / "finetuned").iterdir()
    return numbers(report.results), path.read_bytes()


def tune(run: str, home: str, event: int | None) -> None:
    """Fine-tune and store the result; the process is killed during step ``event``, if given."""
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = home  # the server has that of an earlier test
    features.choose_precision = lambda device: ("float32", "")
    trainer._SAVE_EVERY, checkpoint.SAVE_COST = 0.0, 0  # after every step
    steps, step = 0, Training.update

    def counted(self, *given):
        nonlocal steps
        steps += 1
        if steps == event:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *given)

    Training.update = counted
    report = evaluate("finetune", run, "digits", **OPTIONS)
    Path(run, "told.pickle").write_bytes(pickle.dumps((steps, left(Path(run), report))))
