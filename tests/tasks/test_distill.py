"""Distill: a frozen teacher's features at blank patches, on another grid and with another normalisation."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from golden import close
from killing import SMALL
from labelled import write_noise
from refusing import refusal
from small import SIZES, seeded
from sweep import TEACHER, build, teacher_file, views_of
from torch.nn import functional as F

from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.nets.teacher import FrozenTeacher
from patchloom.patches.tokens import gather_tokens, patchify
from patchloom.runs.checkpoint import restore
from patchloom.runs.folder import RunFolder
from patchloom.runs.held_out import own_held_out
from patchloom.runs.settings import request
from patchloom.runs.training_set import read_record
from patchloom.tasks import build_task
from patchloom.tasks.defaults import frozen_teacher
from patchloom.train.init import Start
from patchloom.train.loop import pretrain


@pytest.mark.parametrize("loss", ["cosine", "smooth_l1"])
def test_the_loss_written_out(loss):
    """Computed with timm's forward pass on images resized and normalised with torchvision."""
    task = build("distill", asked={"loss": loss})
    (images,) = views_of(task, b=3)
    task.normalized_by((0.4, 0.5, 0.3), (0.2, 0.3, 0.25))
    given = task.given(images, seeded())
    found = task(images, given=given)

    spec = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 8, "img_size": (64, 48), "num_classes": 0}
    teacher = timm.create_model("vit_tiny_patch16_224", **spec).eval()
    teacher.load_state_dict(task.questions["features"].teacher.encoder.state_dict(), strict=False)
    plain = images * torch.tensor((0.2, 0.3, 0.25)).view(-1, 1, 1) + torch.tensor((0.4, 0.5, 0.3)).view(-1, 1, 1)
    large = F.interpolate(plain, (64, 48), mode="bilinear", antialias=True)
    large = (large - torch.tensor((0.4, 0.5, 0.6)).view(-1, 1, 1)) / torch.tensor((0.2, 0.2, 0.3)).view(-1, 1, 1)
    with torch.no_grad():
        target = teacher.forward_features(large)[:, 1:]
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()

    tokens = task.encode(images, given).tokens[:, task.geometry.prefix :]
    head = task.questions["features"].decoder
    answers = F.linear(tokens, head.weight, head.bias)[given.blank]
    target = target[given.blank]
    cosine = F.cosine_similarity(answers, target, dim=-1).mean()
    expected = 1 - cosine if loss == "cosine" else F.smooth_l1_loss(answers, target)
    close(found.loss, expected.detach())
    close(found.metrics["feature_cosine"], cosine.detach())
    assert given.blank.sum(1).tolist() == [20] * 3  # 48 patches, a fraction of 0.4, rounded up


def test_the_teacher_is_frozen_draws_nothing_and_is_named_from_any_folder(monkeypatch):
    monkeypatch.chdir(Path(teacher_file()).parent)
    asked = request("digits", {"name": "distill", "features_of": "teacher.safetensors"}, {})
    assert asked.task["features_of"] == teacher_file()
    geometry = build("mae").geometry
    torch.manual_seed(5)
    teacher = frozen_teacher(geometry, teacher_file())
    drawn = torch.rand(())
    torch.manual_seed(5)
    assert torch.rand(()) == drawn
    teacher.train()
    assert not teacher.training and not any(weight.requires_grad for weight in teacher.parameters())


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("distill", {}),
        ("mixture", {"withhold": {"mask": 0.5}, "ask": {"features": 1.0}, "features_of": TEACHER}),
        ("mixture", {"withhold": {"mask": 0.25, "blank": 0.5}, "ask": {"features": 1.0}, "features_of": TEACHER}),
    ],
)
def test_a_right_answer_has_no_error_and_the_teachers_colours(name, asked, monkeypatch):
    task = build(name, asked=asked).eval()
    question, (images,) = task.questions["features"], views_of(task, b=4)
    encoded = task.encode(images, task.given(images, seeded()))
    asked_patches, _ = question.answer(encoded)
    truth = gather_tokens(question.teacher_features(encoded), asked_patches)
    monkeypatch.setattr(question, "predict", lambda encoded: (asked_patches, 3 * truth))  # of any length
    assert question(encoded, 0.5).loss < 1e-6
    assert question.measure(encoded).value > 0.9999 > question.measure(encoded).means()["mean feature"]
    (sheet,) = question.sheets(encoded)
    p = task.geometry.p
    teacher, answer = (patchify(sheet.columns[key], p) for key in ("teacher's features", "answer"))
    shown = ~answer.isnan().any(-1)
    assert torch.equal(shown, torch.zeros_like(shown).scatter(1, asked_patches, True)) and not shown.all()
    torch.testing.assert_close(answer[shown], teacher[shown], rtol=1e-3, atol=1e-3)
    given = patchify(sheet.columns["given"], p)
    assert torch.equal(given.isnan().any(-1), shown)


def test_teachers_that_do_not_fit_are_rejected(tmp_path):
    encoder = build_encoder(EncoderSpec("nano", (32, 32), 4, options=SIZES))
    assert "give --task.features_of timm:NAME" in refusal(build_task, {"name": "distill"}, encoder)
    with pytest.raises(PatchloomError, match="nowhere"):
        build_task({"name": "distill", "features_of": str(tmp_path / "nowhere.safetensors")}, encoder)
    spec = EncoderSpec("nano", (32, 32), 4, channels=1, options=SIZES)
    grey = tmp_path / "grey.safetensors"
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.5,), (0.2,), "mae", "grey"), grey)
    assert "1 channels, and these have 3" in refusal(build_task, {"name": "distill", "features_of": str(grey)}, encoder)
    assert "features_of has no effect" in refusal(build_task, {"name": "mixture", "features_of": str(grey)}, encoder)


def test_a_teacher_of_the_same_grid_keeps_its_positions():
    vit, card = load_encoder_file(teacher_file())
    before = vit.pos_embed.clone()
    same = FrozenTeacher(vit, card.mean, card.std, (2, 2))
    assert torch.equal(same.encoder.pos_embed, before)
    features = same(torch.rand(2, 3, 16, 16))
    assert features.shape == (2, 4, 16) and features.mean(-1).abs().max() < 1e-5


def test_a_teacher_that_only_norms_pooled_features_norms_its_tokens_by_it():
    sizes = {"depth": 1, "embed_dim": 64, "num_heads": 2, "img_size": 32}
    vit = timm.create_model("vit_mediumd_patch16_reg4_gap_256", num_classes=0, **sizes)
    torch.nn.init.normal_(vit.fc_norm.weight)
    images = torch.rand(2, 3, 32, 32)
    tokens = vit.eval().fc_norm(vit.forward_features(images)[:, 4:])
    found = FrozenTeacher(vit, (0.0,) * 3, (1.0,) * 3, (2, 2))(images)
    torch.testing.assert_close(found, F.layer_norm(tokens, (64,)))


def test_checkpoints_leave_the_teacher_out_and_recognise_another(tmp_path):
    task, other = build("distill"), build("distill", seed=3)
    state = task.state_dict()
    assert not any("teacher.encoder" in name for name in state)
    assert "questions.features.teacher.digest" in state
    other.load_state_dict(state, strict=True)
    for one, two in zip(task.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)

    another = build("distill", asked={"features_of": changed_teacher(tmp_path)})
    before = another.questions["features"].teacher.encoder.norm.weight.clone()
    assert "has changed since the run began" in refusal(restore, state, another)
    assert torch.equal(another.questions["features"].teacher.encoder.norm.weight, before)

    # `--from` with another teacher uses the one that is named now
    start = Start.__new__(Start)
    start.run = start.asked = SimpleNamespace(task={"name": "distill"}, from_run="before", init=None)
    start.checkpoint, start.sentences = (state, {}), []
    start.load_task_weights(another)
    question = another.questions["features"]
    assert torch.equal(question.teacher.encoder.norm.weight, before)
    assert torch.equal(question.decoder.weight, task.questions["features"].decoder.weight)


def changed_teacher(folder):
    """A file of a teacher with other weights than in the sweep."""
    vit, card = load_encoder_file(teacher_file())
    with torch.no_grad():
        vit.norm.weight.mul_(1.5)
    save_encoder(vit, card, folder / "changed.safetensors")
    return str(folder / "changed.safetensors")


def test_the_mean_feature_is_that_of_other_images():
    task = build("distill").eval()
    (images,) = views_of(task, b=3)
    question, encoded = task.questions["features"], task.encode(images, task.given(images, seeded()))
    features, blank = question.teacher_features(encoded), encoded.given.blank
    baseline = question.measure(encoded).baselines["mean feature"]
    for i in range(3):
        mean = (features.sum(0) - features[i]) / 2
        expected = F.cosine_similarity(mean, features[i], dim=-1)[blank[i]].mean()
        torch.testing.assert_close(baseline[i], expected)
    alone = question.measure(task.encode(images[:1], task.given(images[:1], seeded())))
    assert alone.baselines["mean feature"].item() < 0.999


def test_training_data_of_a_teacher_is_not_called_new(tmp_path, quick_probe):
    images = write_noise(tmp_path / "images", count=40)
    small = SMALL | {"epochs": 1}
    pretrain(images, "mae", out=tmp_path / "teacher", **small | {"held_out": 0.6, "seed": 1})
    task = {"name": "distill", "features_of": str(tmp_path / "teacher")}
    pretrain(images, task, out=tmp_path / "run", **small | {"held_out": 0.3})
    folder, source = RunFolder(tmp_path / "run"), open_data(str(images)).train
    held_out = own_held_out(folder, folder.read_config(), source)
    trained = read_record(RunFolder(tmp_path / "teacher").trained_on).contents
    assert len(held_out.indices) == 12 and not held_out.doubt
    assert not np.isin(source.contents()[held_out.indices], trained).any()
    assert str(tmp_path / "teacher") in held_out.sentence("The images")
    assert np.isin(trained, read_record(folder.trained_on).contents).all()
