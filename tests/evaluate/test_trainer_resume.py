"""A training that is stopped or killed goes on where it was, and ends as if nothing had happened."""

import json
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import server
from tuning import OPTIONS, left, tune

from patchloom.data.sources.open import open_data
from patchloom.errors import Stopped
from patchloom.evaluate import trainer
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.training import Training
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.runs import checkpoint
from patchloom.system.files import cache_root

# noqa: F401


def _run(tiny: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "encoder.safetensors").write_bytes(tiny.read_bytes())
    return folder


def _process(run: Path, event: int | None):
    process = server().Process(target=tune, args=(str(run), os.environ["XDG_CACHE_HOME"], event))
    process.start()
    process.join(120)
    if process.exitcode == 0:
        return pickle.loads((run / "told.pickle").read_bytes())
    assert process.exitcode == -signal.SIGKILL
    return None


def test_killed_again_and_again_it_ends_as_if_it_had_not_been(tiny_encoder: Path, tmp_path: Path) -> None:
    steps, whole = _process(_run(tiny_encoder, tmp_path / "whole"), None)
    run = _run(tiny_encoder, tmp_path / "killed")
    # 15 steps each: in the first training, soon after its end, and amid the second
    for event in (9, 9, 8):
        assert _process(run, event) is None
        assert list((cache_root() / "trainings").iterdir())
    last, found = _process(run, None)
    assert found == whole
    assert last < steps - 15  # the first training was not repeated
    assert not list((cache_root() / "trainings").iterdir())


def test_ctrl_c_ends_it_after_a_step_and_the_same_command_goes_on(tiny_encoder, tmp_path, monkeypatch, capsys) -> None:
    whole_run, run = (_run(tiny_encoder, tmp_path / name) for name in ("whole", "stopped"))
    whole = left(whole_run, evaluate("finetune", whole_run, "digits", **OPTIONS))
    step, done = Training.update, []

    def pressed(self, *given):
        done.append(1)
        if len(done) == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", pressed)
        with pytest.raises(Stopped, match=r"stopped at epoch 1\.6 of 3 of tiny: run the same command to resume"):
            evaluate("finetune", run, "digits", **OPTIONS)
    assert len(done) == 8 and not (run / "finetuned").exists()
    capsys.readouterr()
    again = evaluate("finetune", run, "digits", **OPTIONS)
    assert "tiny resumes at epoch 1.6 of 3." in capsys.readouterr().out
    assert left(run, again) == whole


def test_another_training_does_not_go_on_with_it(tiny_encoder, tmp_path, monkeypatch, capsys) -> None:
    run = _run(tiny_encoder, tmp_path / "run")
    monkeypatch.setattr(trainer, "_SAVE_EVERY", 0.0)
    step = Training.update

    def stopped(self, number, batch):
        if number == 4:
            raise KeyboardInterrupt
        return step(self, number, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", stopped)
        with pytest.raises(KeyboardInterrupt):
            evaluate("finetune", run, "digits", **OPTIONS)
    for change in ({"blr": 0.01}, {"seed": 4}, {"max_train": 110}, {"positions": "learned"}):
        evaluate("finetune", run, "digits", **OPTIONS | {"control": False} | change)
    assert "resumes" not in capsys.readouterr().out
    damaged = [path for path in (cache_root() / "trainings").rglob("*.safetensors")]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1])
    evaluate("finetune", run, "digits", **OPTIONS | {"control": False})  # which begins again
    assert "resumes" not in capsys.readouterr().out


def test_heads_pixels_and_groups_decide_too() -> None:
    def key(heads=2, side=8, film=None):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderSpec("nano", (side, side), 4, 1, "none", {"num_heads": heads}))
        source = open_data("digits").train.subset(range(40))
        source.groups = None if film is None else np.arange(40) // film
        recipe = Recipe(epochs=1, warmup_epochs=0, batch=8, validation=0.25)
        training = Training(Classifier(encoder, 10, "mean"), source, recipe, (0.5,), (0.2,), EvalSettings(device="cpu"))
        return json.dumps(training.about, sort_keys=True)

    assert key() == key()
    assert len({key(), key(heads=4), key(side=16), key(film=4), key(film=5)}) == 5


def test_nothing_is_kept_without_a_cache_or_for_ever(tiny_encoder, tmp_path, monkeypatch) -> None:
    run = _run(tiny_encoder, tmp_path / "run")
    monkeypatch.setattr(trainer, "_SAVE_EVERY", 0.0)
    old = cache_root() / "trainings" / "old"
    old.mkdir(parents=True)
    month = time.time() - 31 * 86_400
    os.utime(old, (month, month))
    saved = []
    monkeypatch.setattr(checkpoint.Checkpoints, "save", lambda self, *given: saved.append(given))
    evaluate("finetune", run, "digits", **OPTIONS | {"cache": False, "control": False})
    assert not saved and old.exists()
    evaluate("finetune", run, "digits", **OPTIONS | {"control": False})
    assert len(saved) > 1 and not old.exists()
