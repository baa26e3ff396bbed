"""Runs on in-memory images: resuming with the same images, and errors where only a name would do."""

from __future__ import annotations

import os

import numpy as np
import pytest
from running import stop_at, weights

import patchloom
from patchloom.check import Proposal
from patchloom.cli import main
from patchloom.errors import PatchloomError, Stopped
from patchloom.runs.folder import usual_folder

pytestmark = pytest.mark.usefixtures("quick_probe")

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
SMALL = {"model": {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2}, "batch_size": 16, "workers": 0}
SMALL |= {"epochs": 4, "patch_size": 4, "threads": 1, "precision": "float32", "compile": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return patchloom.pretrain(list(PIXELS), "mae", out=tmp_path_factory.mktemp("runs") / "run", **SMALL).folder


def test_a_run_goes_on_when_the_same_is_given_again(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(patch, 6)
        patchloom.pretrain(PIXELS, "mae", out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run/encoder.safetensors").exists()
    patchloom.pretrain(PIXELS, "mae", out=tmp_path / "run", **SMALL)
    assert "Resuming after step 6 of 12" in (tmp_path / "run/log.txt").read_text()
    assert weights(run) == weights(tmp_path / "run")
    for _ in range(2):  # finished, and not
        with pytest.raises(PatchloomError, match="the 60 images given in Python are not those with which .* was begun"):
            patchloom.pretrain(255 - PIXELS, "mae", out=tmp_path / "run", **SMALL)
        (tmp_path / "run/summary.txt").unlink(missing_ok=True)


def test_the_same_images_in_another_form_are_the_same_run(run):
    before = (run / "encoder.safetensors").read_bytes()
    done = patchloom.pretrain(PIXELS.transpose(0, 3, 1, 2), "mae", out=run, **SMALL)
    assert done.folder == run and (run / "encoder.safetensors").read_bytes() == before
    assert "mae on 60 images given in Python: 48 images to train on, 12 held out" in (run / "log.txt").read_text()
    assert str(usual_folder(PIXELS[:20], "mae")) == "runs/20-images-given-in-Python-mae"
    # verbs take the run as it is
    assert patchloom.load_encoder(done)[1].name == "run"
    assert os.fspath(done) == str(run) and patchloom.export(done, data=PIXELS[:8]).weights == run / "timm.safetensors"


def test_other_verbs_take_images_and_labels_that_are_given(run):
    assert patchloom.look(run, PIXELS) == [run / "pictures/recovered.png"]
    (other,) = patchloom.look(run, 255 - PIXELS)  # as many
    assert other == run / "pictures-60-images-given-in-Python/recovered.png"
    tones = np.repeat(np.array([40, 200], np.uint8), 20)
    images = [(np.full((16, 16, 3), tone + i % 7, np.uint8), int(tone > 100)) for i, tone in enumerate(tones)]
    report = patchloom.evaluate("knn", run, {"train": images[::2], "test": images[1::2]}, ks=(1,), device="cpu")
    assert report.data == "20 images given in Python (test)" and report.n_test == 20


def test_check_proposes_a_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proposal: Proposal = patchloom.check(PIXELS, task="mae", estimate=False, out=tmp_path / "broken.txt").proposal
    assert proposal.command.startswith("patchloom.pretrain(data, task='mae', model=")
    assert proposal.settings.img_size == (16, 16) and "img_size=16" in proposal.command
    with pytest.raises(PatchloomError, match="exists and holds no run"):  # it is a call that can be made
        exec(f"{proposal.command[:-1]}, out={str(tmp_path)!r})", {"patchloom": patchloom, "data": PIXELS})


def test_the_command_line_says_that_no_name_leads_to_them(run, tmp_path, capsys):
    name = "60 images given in Python"
    again = ["pretrain", "--config", str(run / "config.yaml"), "--out", str(tmp_path / "run")]
    for words in (["look", str(run)], ["look", str(run), name], again):
        capsys.readouterr()
        assert main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"patchloom: {name} cannot be found by that name: give the same object in Python again")
        assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
