"""Runs on in-memory images: resuming with the same images, and errors where only a name would do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch.utils.data import Dataset

import patchloom
from patchloom.check import Proposal
from patchloom.cli import main
from patchloom.errors import PatchloomError, Stopped

pytestmark = pytest.mark.usefixtures("quick_probe")

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
SMALL = {"model": {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2}, "batch_size": 16, "workers": 0}
SMALL |= {"epochs": 12, "patch_size": 4, "threads": 1, "precision": "float32", "compile": False}


class Stopping(Dataset):
    """Images that raise KeyboardInterrupt after a number of reads."""

    def __init__(self, stop: int | None = None):
        self.stop, self.asked = stop, 0

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, i):
        self.asked += 1
        if self.asked == self.stop:
            os.kill(os.getpid(), signal.SIGINT)
        return PIXELS[i]


def weights(run: Path) -> dict[str, bytes]:
    return {name: one.numpy().tobytes() for name, one in load_file(run / "checkpoints/last.safetensors").items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return patchloom.pretrain(list(PIXELS), "mae", out=tmp_path_factory.mktemp("runs") / "run", **SMALL).folder


def failed(capsys, *words) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("patchloom: ") and err.count("\n") == 1 and "Traceback" not in out + err
    return err


def test_a_run_goes_on_when_the_same_is_given_again(run, tmp_path):
    with pytest.raises(Stopped):
        patchloom.pretrain(Stopping(500), "mae", out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run/encoder.safetensors").exists()
    patchloom.pretrain(Stopping(), "mae", out=tmp_path / "run", **SMALL)
    assert "Resuming after step" in (tmp_path / "run/log.txt").read_text()
    plain = patchloom.pretrain(Stopping(), "mae", out=tmp_path / "plain", **SMALL)
    assert weights(plain.folder) == weights(tmp_path / "run")
    with pytest.raises(PatchloomError, match="the 60 images given in Python are not those with which .* was begun"):
        patchloom.pretrain(255 - PIXELS, "mae", out=tmp_path / "run", **SMALL)
    (tmp_path / "run/summary.txt").unlink()
    with pytest.raises(PatchloomError, match="the 60 images given in Python are not those with which .* was begun"):
        patchloom.pretrain(255 - PIXELS, "mae", out=tmp_path / "run", **SMALL)


def test_the_same_images_in_another_form_are_the_same_run(run):
    before = (run / "encoder.safetensors").read_bytes()
    done = patchloom.pretrain(PIXELS.transpose(0, 3, 1, 2), "mae", out=run, **SMALL)
    assert done.folder == run and (run / "encoder.safetensors").read_bytes() == before
    assert "mae on 60 images given in Python: 48 images to train on, 12 held out" in (run / "log.txt").read_text()


def test_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = SMALL | {"epochs": 1}
    assert str(patchloom.pretrain(PIXELS[:20], "mae", **few).folder) == "runs/20-images-given-in-Python-mae"


def test_verbs_accept_a_run_object(run):
    done = patchloom.pretrain(PIXELS, "mae", out=run, **SMALL)
    assert patchloom.load_encoder(done)[1].name == "run"
    assert os.fspath(done) == str(run) and patchloom.export(done, data=PIXELS[:8]).weights == run / "timm.safetensors"


def test_look_draws_the_held_out_ones_of_the_same_images(run):
    assert patchloom.look(run, PIXELS) == [run / "pictures/recovered.png"]
    held = (run / "pictures/recovered.png").read_bytes()
    (other,) = patchloom.look(run, 255 - PIXELS)  # as many
    assert other == run / "pictures-60-images-given-in-Python/recovered.png" and other.read_bytes() != held


def test_evaluate_on_labelled_arrays(run):
    tones = np.repeat(np.array([40, 200], np.uint8), 20)
    images = [(np.full((16, 16, 3), tone + i % 7, np.uint8), int(tone > 100)) for i, tone in enumerate(tones)]
    report = patchloom.evaluate("knn", run, {"train": images[::2], "test": images[1::2]}, ks=(1,), device="cpu")
    assert (
        report.data == "20 images given in Python (test)" and "The data brings its own test images." in report.protocol
    )


def test_check_proposes_a_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proposal: Proposal = patchloom.check(PIXELS, task="mae", estimate=False, out=tmp_path / "broken.txt").proposal
    assert (
        proposal.command.startswith("patchloom.pretrain(data, task='mae', model=") and "img_size=16" in proposal.command
    )
    names = {"patchloom": patchloom, "data": PIXELS}
    settings = proposal.settings
    with pytest.raises(PatchloomError, match="exists and holds no run"):  # it is a call that can be made
        exec(f"{proposal.command[:-1]}, out={str(tmp_path)!r})", names)
    assert settings.img_size == (16, 16)


@pytest.mark.parametrize("words", [["look", "RUN"], ["look", "RUN", "60 images given in Python"]])
def test_the_command_line_says_that_no_name_leads_to_them(run, words, capsys):
    said = failed(capsys, *[str(run) if word == "RUN" else word for word in words])
    assert said == (
        "patchloom: 60 images given in Python cannot be found by that name: give the same object in Python again, or "
        "name other images, with --data where that is an option\n"
    )


def test_a_configuration_without_its_images(run, capsys, tmp_path):
    said = failed(capsys, "pretrain", "--config", run / "config.yaml", "--out", tmp_path / "run")
    assert "60 images given in Python cannot be found by that name" in said and not (tmp_path / "run").exists()
