"""Encoders of interrupted runs and files of bare weights work wherever a finished run does."""

import shutil
from pathlib import Path

import pytest
import timm
import torch
from killing import SMALL
from safetensors.torch import load_file, save_file

import patchloom
from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.evaluate.protocols import evaluate
from patchloom.export.export import export
from patchloom.nets.checkpoints.load import Weights
from patchloom.nets.heads import InstanceHead
from patchloom.runs.folder import suggest_run
from patchloom.runs.settings import request
from patchloom.train.init import Start
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

NAME = "vit_tiny_patch16_224"
REACHED = "step 6 of 6"


@pytest.fixture(autouse=True)
def own_cache(cache_in, tmp_path):
    cache_in(tmp_path / "cache")


@pytest.fixture(scope="module", params=["droppos", "extrema"])
def finished(request, small_run, tmp_path_factory):
    return shutil.copytree(small_run(request.param), tmp_path_factory.mktemp("runs") / request.param)


@pytest.fixture
def stopped(finished, tmp_path):
    """Run that was interrupted after its last step."""
    folder = tmp_path / "runs" / finished.name
    shutil.copytree(finished, folder)
    for path in (folder / "summary.txt", *folder.glob("*.safetensors"), folder / "results.csv"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "pictures")
    return folder


def test_an_interrupted_run_can_be_evaluated_exported_and_looked_at(stopped, finished, images, capsys):
    vit, card = patchloom.load_encoder(stopped)
    whole, _ = patchloom.load_encoder(finished)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in vit.state_dict().items())
    assert card.name == f"{stopped.name} ({REACHED})" and f"{stopped} is not finished" in card.note

    ours, theirs = (evaluate("knn", run, images, device="cpu", ks=(5,)) for run in (stopped, finished))
    assert [row.value for row in ours.rows] == [row.value for row in theirs.rows]  # the instance head is there, too
    assert [row.pooling for row in ours.rows] == [row.pooling for row in theirs.rows]
    assert card.note in ours.protocol and "not finished" not in theirs.protocol
    assert ours.quoted[0].encoder == card.name
    assert REACHED in (stopped / "results.csv").read_text()

    done = export(stopped)
    assert done.notes == (card.note,) and (done.head is None) == (stopped.name == "droppos")
    assert all(torch.equal(load_file(done.weights)[name], value) for name, value in whole.state_dict().items())
    capsys.readouterr()
    assert main(["look", str(stopped)]) == 0 and "positions.png" in capsys.readouterr().out or stopped.name == "extrema"
    head = patchloom.load_extra_module(stopped, "pooling")
    assert isinstance(head, InstanceHead) == (stopped.name == "extrema")


def test_positions_are_evaluated_on_an_interrupted_run(stopped, images):
    if stopped.name == "extrema":
        pytest.skip("asks for no positions")
    report = evaluate("positions", stopped, images, device="cpu", images=8)
    assert report.quoted[0].encoder == f"droppos ({REACHED})" and "is not finished" in report.protocol


@pytest.mark.parametrize("option", ["init", "from_run"])
def test_a_run_starts_from_an_interrupted_one(stopped, finished, images, tmp_path, capsys, option):
    if stopped.name == "extrema":
        pytest.skip("one is enough")
    settings = {name: value for name, value in SMALL.items() if name not in ("model", "img_size", "patch_size")}
    settings |= {"epochs": 1, option: str(stopped), "out": tmp_path / "new"}
    pretrain(images, "mae", **settings)
    told = " ".join(capsys.readouterr().out.split())
    assert f"Weights from the encoder of {stopped}: 18 matched, 0 missing" in told
    assert f"The run {stopped} is not finished: this is its newest checkpoint, {REACHED}." in told
    # what it trained on is known, so that its held-out images are new to both
    assert (tmp_path / "new" / "trained_on.bin").exists() and "may have been trained on" not in told


def test_a_run_without_a_checkpoint_has_no_encoder(stopped):
    shutil.rmtree(stopped / "checkpoints")
    with pytest.raises(PatchloomError, match="there is no encoder at .*: the run has no checkpoint yet"):
        patchloom.load_encoder(stopped)


def test_a_finished_run_without_its_encoder_is_not_interrupted(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "encoder.safetensors").unlink()
    with pytest.raises(PatchloomError, match="the run has finished, .* delete summary.txt"):
        patchloom.load_encoder(tmp_path / "run")


def test_a_path_near_a_run_suggests_the_run(stopped, monkeypatch):
    runs = stopped.parent
    assert suggest_run(runs) == f"the run {stopped.name} is in it, so give {stopped}"
    shutil.copytree(stopped, runs / "zebra")
    assert suggest_run(runs).startswith(
        f"2 runs are in it ({stopped.name}, zebra), so give one of them, such as {stopped}"
    )
    for part in ("checkpoints", "checkpoints/last.safetensors", "config.yaml"):
        assert suggest_run(stopped / part) == f"it is part of the run {stopped}, so give {stopped}"
    assert suggest_run(runs / "zebre") == f"did you mean {runs / 'zebra'}?"
    monkeypatch.chdir(runs.parent)
    assert suggest_run("zebra") == f"did you mean {Path('runs') / 'zebra'}?"
    assert suggest_run(runs.parent / "elsewhere" / "zebra") == suggest_run("\0") == suggest_run("x" * 5000) == ""

    for said in (patchloom.load_encoder, lambda path: export(path), lambda path: evaluate("knn", path, "digits")):
        with pytest.raises(PatchloomError, match=f"it is part of the run {stopped}, so give {stopped}"):
            said(stopped / "checkpoints" / "last.safetensors")
    with pytest.raises(PatchloomError, match="is not the folder of a run: it is part of the run"):
        evaluate("positions", stopped / "checkpoints" / "last.safetensors", "digits")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """File of bare timm weights."""
    torch.manual_seed(0)
    vit, folder = timm.create_model(NAME, num_classes=7, depth=1), tmp_path_factory.mktemp("fetched")
    save_file(vit.state_dict(), folder / "one.safetensors")
    torch.save({"model": vit.state_dict(), "epoch": 3}, folder / "one.pth")
    return folder


@pytest.fixture
def shallow(monkeypatch):
    """Replace timm's model by one with a single block, for speed."""
    create = timm.create_model

    def made(name, **arguments):
        return create(name, **({"depth": 1} if name.startswith(NAME) else {}) | arguments)

    monkeypatch.setattr(timm, "create_model", made)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_bare_weights_are_evaluated_with_a_model_name(plain, shallow, images, suffix):
    path, tag = plain / f"one.{suffix}", f"{NAME}.augreg_in21k_ft_in1k"
    vit, card = patchloom.load_encoder(path, tag)
    there = load_file(plain / "one.safetensors")
    assert all(torch.equal(value, there[name]) for name, value in vit.state_dict().items()) and not vit.training
    assert card.mean == card.std == (0.5, 0.5, 0.5) and card.name == "one"  # timm's of these weights, not ImageNet's
    assert "18 matched, 0 missing, 2 unexpected" in card.note and "head.bias" in card.note
    assert f"as in timm for {tag}: mean 0.5, 0.5, 0.5; standard deviation 0.5, 0.5, 0.5." in card.note
    report = evaluate("knn", path, images, device="cpu", model=tag, ks=(1,), pooling="mean")
    assert card.note in report.protocol and [row.encoder for row in report.rows][:2] == ["one", "untrained"]


def test_the_statistics_of_a_name_are_those_of_all_its_weights(plain):
    """timm's vit_small_patch16_224 has weights of two kinds of normalisation, and vit_tiny_patch16_224 of one."""
    weights = Weights(plain / "one.pth")
    assert weights.own_statistics(NAME) == ((0.5,) * 3, (0.5,) * 3)
    assert weights.own_statistics("vit_small_patch16_224") is None
    assert weights.own_statistics("vit_small_patch16_224.dino")[0] == pytest.approx((0.485, 0.456, 0.406))
    given = {"init": str(plain / "one.pth"), "model": "vit_small_patch16_224"}
    found, why = Start(request("x", {"name": "mae"}, given)).normalization(3)
    assert found is None and why.endswith("and timm's weights of vit_small_patch16_224 differ in these")


def test_names_that_do_not_match_are_reported(plain, tmp_path, shallow):
    with pytest.raises(PatchloomError, match="holds weights alone.*--model vit_small_patch16_224"):
        patchloom.load_encoder(plain / "one.pth")
    with pytest.raises(PatchloomError, match="holds weights alone.*give its name in timm"):
        evaluate("linear", plain / "one.safetensors", "digits")
    with pytest.raises(PatchloomError, match="timm has no model called vit_tny"):
        patchloom.load_encoder(plain / "one.pth", "vit_tny")
    for source, model in ((plain / "one.pth", f"{NAME}.nonsense"), (f"timm:{NAME}.nonsense", None)):
        with pytest.raises(PatchloomError, match=f"no weights called {NAME}.nonsense: it has {NAME}.augreg"):
            patchloom.load_encoder(source, model)
    state = load_file(plain / "one.safetensors")
    save_file({name: value for name, value in state.items() if name != "norm.bias"}, tmp_path / "less.safetensors")
    with pytest.raises(PatchloomError, match="less.safetensors is not .*: 17 of the 18 weights .* lacks norm"):
        patchloom.load_encoder(tmp_path / "less.safetensors", NAME)
    more = state | {name.replace("blocks.0", "blocks.1"): value for name, value in state.items() if "blocks" in name}
    save_file({name: value.clone() for name, value in more.items()}, tmp_path / "more.safetensors")
    with pytest.raises(PatchloomError, match="18 of the 18 weights match, and it also has blocks.1."):
        patchloom.load_encoder(tmp_path / "more.safetensors", NAME)
    save_file({"layer.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(PatchloomError, match="its names are like layer.weight, and timm's, like blocks.0"):
        patchloom.load_encoder(tmp_path / "other.safetensors", NAME)


def test_a_model_name_is_only_for_bare_weights(finished, plain):
    for what in (finished, f"timm:{NAME}"):
        with pytest.raises(PatchloomError, match="--model is for a file of weights alone"):
            patchloom.load_encoder(what, NAME)
    with pytest.raises(PatchloomError, match="--model is for a file of weights alone"):
        evaluate("positions", finished, "digits", model=NAME)
    with pytest.raises(PatchloomError, match="holds weights alone.*--model"):
        export(plain / "one.safetensors")


def test_a_run_starts_from_bare_weights_with_a_model_name(plain, images, tmp_path, capsys):
    words = ["--init", str(plain / "one.pth"), "--model.name", NAME, "--model.depth", "1", "--img_size", "32"]
    words += ["--epochs", "1", "--workers", "0", "--batch_size", "16", "--out", str(tmp_path / "run")]
    words += ["--task.decoder_width", "32", "--task.decoder_depth", "1"]
    assert main(["pretrain", str(images), "--task", "mae", *words]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"patch_size 16 (as in timm's {NAME})" in told and f"positions learned (as in timm's {NAME})" in told
    assert "18 matched, 0 missing, 2 unexpected, 1 resampled" in told
    assert f"normalization init (timm's for {NAME}: mean 0.5, 0.5, 0.5; standard deviation 0.5, 0.5, 0.5)" in told
