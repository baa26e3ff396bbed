"""The verb distill: a backbone of timm learns an encoder's features, and its files need no patchloom."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import timm
import torch
from evaluating import ctrl_c_at
from PIL import Image
from safetensors.torch import load_file
from sweep import teacher_file

import patchloom
from patchloom.cli import main
from patchloom.distill import distillation_course, feature_cosines
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate import trainer
from patchloom.evaluate.trainer import Trainer
from patchloom.nets.student import Student, create_backbone, student_options

SCHEMA = Path(__file__).parents[1] / "docs" / "reference" / "json.schema.json"
QUICK = {"side": 32, "batch_size": 8, "workers": 0, "device": "cpu"}


def noise(n=24):
    return [*np.random.default_rng(0).integers(0, 256, (n, 40, 40, 3), dtype=np.uint8)]


def states(folder):
    return load_file(folder / "student.safetensors")


def document(capsys):
    """Return the result of the printed document, which is valid by the schema."""
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text("utf-8")))
    return found["result"]


@pytest.mark.parametrize("name", ["convnext_atto", "mobilenetv3_small_050", "vit_tiny_patch16_224", "resnet10t"])
def test_a_student_loads_in_timm_without_patchloom(name, tmp_path):
    found = patchloom.distill(teacher_file(), noise(8), student=name, epochs=1, out=tmp_path / "s", **QUICK)
    card = json.loads((tmp_path / "s" / "student.json").read_text())
    model = timm.create_model(card["model"], num_classes=0, **card["options"])
    model.load_state_dict(states(tmp_path / "s"), strict=True)
    assert card["mean"] == pytest.approx([0.4, 0.5, 0.6]) and card["size"] == [32, 32]  # the teacher's
    assert (found.card.model, found.card.options, found.card.license) == (name, card["options"], card["license"])


@pytest.mark.parametrize("name", ["convnext_atto", "mobilenetv3_small_050", "swin_s3_tiny_224", "vit_tiny_patch16_224"])
def test_every_layout_gives_pooled_and_dense_features_with_gradients(name):
    size = (64, 64)
    backbone = create_backbone(name, student_options(name, size, 3))
    net = Student(backbone, size, 3, 16, name).train()
    pooled, dense = net(torch.randn(2, 3, *size), (3, 5))
    assert pooled.shape == (2, 16) and dense.shape == (2, 15, 16)
    (pooled.sum() + dense.sum()).backward()
    assert all(head.weight.grad.abs().sum() > 0 for head in (net.pooled_head, net.dense_head))
    assert any(one.grad is not None for one in backbone.parameters())


def test_dense_features_keep_their_place():
    net = Student(create_backbone("convnext_atto", {"in_chans": 3}), (64, 64), 3, 16, "convnext_atto").eval()
    images = torch.randn(1, 3, 64, 64)
    dense = net(images, (2, 2))[1]
    by_hand = net.dense_head(net.backbone.forward_features(images).permute(0, 2, 3, 1)).flatten(1, 2)
    torch.testing.assert_close(dense, by_hand)


def test_the_cosines_are_those_of_the_mean_and_of_each_patch():
    features = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    whole, each = feature_cosines(torch.tensor([[2.0, 2.0]]), torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), features)
    assert whole.item() == pytest.approx(1.0) and each.item() == pytest.approx(0.5)


def test_a_stopped_training_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = {"student": "mobilenetv3_small_050", "epochs": 2, **QUICK}
    patchloom.distill(teacher_file(), noise(), out=tmp_path / "whole", **asked)
    monkeypatch.setattr(trainer, "_SAVE_EVERY", 0.0)
    with ctrl_c_at(Trainer, 4), pytest.raises(Stopped, match=r"epoch 1\.3 of 2 .* run the same command"):
        patchloom.distill(teacher_file(), noise(), out=tmp_path / "cut", **asked)
    assert not (tmp_path / "cut" / "student.safetensors").exists()
    with ctrl_c_at(Trainer, 0) as begun:
        patchloom.distill(teacher_file(), noise(), out=tmp_path / "cut", **asked)
    assert len(begun) == 2
    whole, cut = states(tmp_path / "whole"), states(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_fraction_of_an_epoch_reads_well():
    course = distillation_course(24, 0.5, 5e-4, 0.04, 8)
    assert (course.steps, course.length, course.position(1)) == (2, "0.67 epochs", "epoch 0.3 of 0.67")


def test_the_loss_falls(tmp_path, monkeypatch):
    losses, update = [], Trainer.update
    monkeypatch.setattr(Trainer, "update", lambda *given: losses.append(update(*given)) or losses[-1])
    asked = {"student": "convnext_atto", "epochs": 20, "lr": 2e-3, **QUICK}
    patchloom.distill(teacher_file(), noise(8), out=tmp_path / "s", **asked)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.usefixtures("quick_probe")
def test_the_controls_are_the_random_start_and_the_teacher_over_seeds(tmp_path, capsys):
    words = ["distill", teacher_file(), "shapes:60", "--student", "mobilenetv3_small_050", "--labels", "shapes:200"]
    words += ["--side", "32", "--epochs", "1", "--seeds", "2", "--out", str(tmp_path / "s"), "--workers", "0", "--json"]
    assert main(words) == 0
    result = document(capsys)
    assert result["student"]["model"] == "mobilenetv3_small_050"
    for report, protocol in ((result["report"], "knn"), (result["linear"], "linear")):
        names = {row["encoder"] for row in report["results"] if row["protocol"] == protocol}
        assert {"mobilenetv3_small_050", "random mobilenetv3_small_050", "teacher"} <= names
        against = next(row["against"] for row in report["results"] if row["quoted"])
        assert [one["control"] for one in against] == ["random mobilenetv3_small_050", "teacher"]
        assert all(one["trainings"] == 2 for one in against)
        assert "student's training" not in report["method"]  # the test images of shapes are other ones


def test_test_images_that_the_student_was_trained_on_are_counted(tmp_path):
    data = tmp_path / "data"
    for i, image in enumerate(noise(20)):
        (folder := data / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i}.png")
    asked = {"student": "resnet10t", "epochs": 1, "labels": data, **QUICK}
    found = patchloom.distill(teacher_file(), data, out=tmp_path / "s", **asked)
    assert "4 of 4 test images are among the student's training images" in found.report.method


def test_a_dry_run_times_the_training_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "shapes:60 --student mobilenetv3_small_050 --side 32 --epochs 5 --workers 0 --dry-run --json".split()
    assert main(["distill", teacher_file(), *words]) == 0
    result = document(capsys)
    assert result["planned"]["steps"] == 5 and result["planned"]["seconds"] > 0 and not result["files"]
    assert not list(tmp_path.iterdir())


def test_a_student_is_refused_as_an_encoder_with_what_to_do(tmp_path):
    patchloom.distill(teacher_file(), noise(8), student="resnet10t", epochs=1, out=tmp_path, **QUICK)
    for place in (tmp_path, tmp_path / "student.safetensors"):
        with pytest.raises(PatchloomError, match=r"student of patchloom distill.*distill --labels.*distill\.md.*timm"):
            patchloom.evaluate("knn", place, "digits")


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"student": "convnext_ato"}, "convnext_atto"),
        ({"student": "convnext_atto", "side": 16}, "16x16 pixels are too small.*--side 32 or more"),
        ({"decay": -1.0}, "--decay"),
        ({"seeds": 2}, "--labels"),
        ({"out": "taken"}, "another --out"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(asked, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("taken/student.safetensors").touch()
    with pytest.raises(PatchloomError, match=word):
        patchloom.distill(teacher_file(), noise(8), **{"student": "convnext_atto", "out": "s"} | QUICK | asked)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("patchloom.evaluate.settings.launched_processes", lambda: 2)
    with pytest.raises(PatchloomError, match="one process"):
        patchloom.distill(teacher_file(), noise(8), student="convnext_atto", out=tmp_path / "s", **QUICK)


def test_windows_that_do_not_fit_are_refused_in_a_sentence():
    backbone = create_backbone("coat_lite_tiny", {"in_chans": 3, "img_size": 64})
    with pytest.raises(PatchloomError, match="coat_lite_tiny .*--student"):
        Student(backbone, (60, 60), 3, 16, "coat_lite_tiny")
