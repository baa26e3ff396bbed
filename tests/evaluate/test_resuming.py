"""Every protocol that trains resumes after Ctrl-C, with the same results to the bit."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from evaluating import ctrl_c_at, numbers, write_encoder
from spoken import encoder_of_sound, speech_commands

from patchloom.errors import Stopped
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.trainer import Trainer


def images(folder: Path) -> str:
    """Write an encoder of digits; return the name of the data."""
    write_encoder(folder / "run" / "encoder.safetensors", depth=2)
    return "digits"


def recordings(folder: Path) -> Path:
    """Write an encoder of recordings and keywords; return their folder."""
    pytest.importorskip("soundfile")
    encoder_of_sound(folder / "run")
    return speech_commands(folder / "words")


def evaluated(protocol: str, run: Path, data: str | Path, **options: Any) -> list[tuple]:
    return numbers(evaluate(protocol, run, data, device="cpu", seed=3, **options).results)


class Case(NamedTuple):
    """Command that trains.

    Attributes:
        prepare: function that writes FOLDER/run and data; its result is given to the command.
        command: function from a run and data to results.
        step: update, from 1, that Ctrl-C interrupts.
        position: where the training stops.
    """

    prepare: Callable[[Path], Any]
    command: Callable[[Path, Any], Any]
    step: int
    position: str


# a checkpoint has to hold a moving average, the best weights and random numbers of every kind
KEPT = {"epochs": 2, "batch_size": 16, "max_train": 80, "validation": 0.25, "patience": 1.0, "ema": 0.9, "clip": 0.5}
KEPT |= {"mixup": 0.8, "erasing": 0.5}
FEW = {"per_class": 4, "epochs": 2, "batch_size": 8}
LARS = {"recipe": "mae", "epochs": 2, "max_train": 80, "batch_size": 20, "blr": 10.0}
SPEECH = {"recipe": "mp3-speech", "updates": 4, "batch_size": 8, "words": "yes,no,up"}
CASES = {
    "finetune": Case(images, partial(evaluated, "finetune", **KEPT, drop_path=0.1), 5, "epoch 1.7 of 2"),
    "few-shot": Case(images, partial(evaluated, "few-shot", **FEW), 6, "epoch 1.2 of 2"),
    "blocks": Case(images, partial(evaluated, "blocks:2", **KEPT), 4, "epoch 1.3 of 2"),
    "linear": Case(images, partial(evaluated, "linear", **LARS), 6, "epoch 1.5 of 2"),
    "keywords": Case(recordings, partial(evaluated, "keywords", **SPEECH), 3, "update 3 of 4"),
}


@pytest.mark.parametrize("name", CASES)
def test_stopped_it_resumes_and_gives_the_same_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    case, found = CASES[name], []
    data = case.prepare(tmp_path)
    for place in ("whole", "stopped"):
        run = Path(shutil.copytree(tmp_path / "run", tmp_path / place))
        if place == "stopped":
            with ctrl_c_at(Trainer, case.step) as begun, pytest.raises(Stopped, match="run the same command to resume"):
                case.command(run, data)
            assert len(begun) == case.step and "resumes at" not in capsys.readouterr().out
        results = case.command(run, data)
        found.append((results, {path.name: path.read_bytes() for path in run.rglob("*.safetensors")}))
    assert f"resumes at {case.position}." in capsys.readouterr().out
    assert found[0] == found[1]
