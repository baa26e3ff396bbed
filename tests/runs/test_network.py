"""Student and teacher of a run: both are saved, and each can be evaluated."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from killing import SMALL

from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate
from patchloom.nets.encode import encode, patch_count
from patchloom.nets.finetune import without_last_norm
from patchloom.nets.swin import Encoder
from patchloom.report.report import report
from patchloom.runs.encoder import has_teacher, load_encoder, load_extra_module
from patchloom.runs.task import load_task
from patchloom.train.loop import pretrain
from patchloom.withhold.encoder_input import all_patches

TASKS = ("extrema", "lut", "latent", "loca")


def same(one: Encoder, other: Encoder) -> bool:
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(value, its[name]) for name, value in mine.items())


@pytest.mark.parametrize("task", TASKS)
def test_a_finished_run_has_both(small_run: Callable[[str], Path], task: str) -> None:
    run = small_run(task)
    (student, card), (teacher, its) = (load_encoder(run, network=which) for which in ("student", "teacher"))
    trained = load_task(run).task
    assert same(student, trained.encoder) and same(student, load_encoder(run)[0])
    assert same(teacher, trained.teacher_modules()["encoder"]) and not same(teacher, student)
    assert same(teacher, load_encoder(run / "teacher" / "encoder.safetensors")[0])  # for other verbs
    assert (card.name, its.name) == (task, f"{task} (teacher)") and its.trained_on == card.trained_on
    assert its.mean == card.mean and has_teacher(run)
    assert f"Teacher: {run / 'teacher' / 'encoder.safetensors'}" in (run / "log.txt").read_text()
    for use in ("pooling", "stem"):
        mine, theirs = (load_extra_module(run, use, which) for which in ("student", "teacher"))
        assert (mine is None) == (theirs is None) == (task != "extrema")
        if mine is not None:
            pairs = zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True)
            assert not all(torch.equal(one, other) for one, other in pairs)


def test_an_unfinished_run_has_both(images: Path, tmp_path: Path) -> None:
    run = pretrain(images, "extrema", out=tmp_path / "run", **SMALL | {"epochs": 2}).folder
    finished, head = load_encoder(run, network="teacher")[0], load_extra_module(run, "pooling", "teacher")
    for path in (run / "encoder.safetensors", run / "summary.txt"):
        path.unlink()
    shutil.rmtree(run / "teacher")
    again, card = load_encoder(run, network="teacher")
    assert same(again, finished) and card.name.endswith(") (teacher)") and has_teacher(run)
    assert torch.equal(load_extra_module(run, "pooling", "teacher").token, head.token)


def test_without_a_teacher(small_run: Callable[[str], Path], images: Path) -> None:
    run = small_run("mae")
    assert not (run / "teacher").exists() and not has_teacher(run)
    for source in (run, "timm:vit_tiny_patch16_224"):
        with pytest.raises(PatchloomError, match="has no teacher: leave out --network"):
            load_encoder(source, network="teacher")
    for protocol in ("positions", "ensemble"):
        with pytest.raises(PatchloomError, match="leave out --network"):
            evaluate(protocol, run, images, network="student")


@pytest.fixture
def run(small_run: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run("extrema"), tmp_path / "copied"))


def test_either_is_evaluated_and_told_apart(run: Path, images: Path) -> None:
    options = {"device": "cpu", "ks": (5,), "pooling": "mean"}
    found = {which: evaluate("knn", run, images, network=which, **options) for which in ("student", "teacher")}
    alone = evaluate("knn", run / "teacher", images, **options)
    assert [row.encoder for row in found["teacher"].rows[:2]] == ["copied (teacher)", "untrained"]
    pairs = [report.rows[0].right.tolist() for report in (found["teacher"], alone)]
    assert pairs[0] == pairs[1]
    assert "network" not in found["student"].rows[0].settings
    assert {row.settings["network"] for row in found["teacher"].rows} == {"teacher"}
    assert evaluate("knn", run, images, **options).rows[0].value == found["student"].rows[0].value
    rows = [row for row in csv.DictReader((run / "results.csv").open()) if row["protocol"] == "knn"]
    assert {"copied", "copied (teacher)"} <= {row["encoder"] for row in rows}
    page = report(run).read_text("utf-8")
    assert "teacher" in page.partition("kNN")[2]
    with pytest.raises(PatchloomError, match="--blend is of the student"):
        evaluate("knn", run, images, network="teacher", blend=0.5)


def test_features_before_the_last_norm(run: Path, images: Path) -> None:
    (vit, card), source = load_encoder(run), open_data(images).train
    torch.nn.init.normal_(vit.norm.weight)
    plain = extract(without_last_norm(vit), card, source, device="cpu")
    given = torch.randn(2, len(card.mean), *card.own_spec.img_size)
    tokens = encode(vit, all_patches(given, patch_count(vit)), norm=False)
    assert torch.allclose(without_last_norm(vit).forward_features(given), tokens, atol=1e-5)
    normed = extract(vit, card, source, device="cpu")
    assert not torch.allclose(plain.tokens["mean"], normed.tokens["mean"], atol=1e-3)
    options = {"device": "cpu", "pooling": "mean"}
    for protocol, more in (("knn", {"ks": (5,)}), ("linear", {})):
        before, after = (evaluate(protocol, run, images, last_norm=last, **options, **more) for last in (False, True))
        assert before.rows[0].settings["last_norm"] is False and "last_norm" not in after.rows[0].settings
        assert "before the encoder's last norm" in before.protocol


def test_the_linear_probe_of_extrema(run: Path, images: Path) -> None:
    """The paper's program probes the teacher without its last norm; Table 14 has LARS, its command SGD."""
    options = {"device": "cpu", "recipe": "extrema", "epochs": 1, "batch_size": 8, "control": False}
    usual = evaluate("linear", run, images, **options)
    assert usual.rows[0].encoder == "copied (teacher)" and "is the student" not in usual.protocol
    about = usual.rows[0].settings
    assert (about["network"], about["last_norm"], about["optimizer"]) == ("teacher", False, "LARS")
    other = evaluate("linear", run, images, network="student", last_norm=True, optimizer="sgd", **options)
    assert other.rows[0].encoder == "copied" and "trained by SGD" in other.protocol
    assert "optimizer SGD, not LARS" in other.protocol and "last norm true, not false" in other.protocol
    assert "The paper's program probes the teacher; this is the student." in other.protocol
    shutil.rmtree(run / "teacher")
    assert evaluate("linear", run, images, **options).rows[0].encoder == "copied"
