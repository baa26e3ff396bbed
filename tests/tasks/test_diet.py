"""DIET: one class per training image, and two views of a held-out image that find each other."""

import numpy as np
import pytest
import torch
from refusing import refusal
from small import seeded, small
from torch.nn import functional as F

import patchloom
from patchloom.audio.config import Sound
from patchloom.audio.recordings import modality_of
from patchloom.questions.identity import same_image_found
from patchloom.runs.folder import RunFolder
from patchloom.runs.task import load_task
from patchloom.tasks.diet import DIET

SMALL = {"batch_size": 16, "model": {"name": "nano", "embed_dim": 16, "depth": 1, "num_heads": 2}, "img_size": 16}
SMALL |= {"patch_size": 8, "precision": "float32", "workers": 0}


def noise(n=40, seed=0):
    return [*np.random.default_rng(seed).integers(0, 256, (n, 24, 24, 3), dtype=np.uint8)]


def test_the_loss_is_the_smoothed_cross_entropy_of_the_images_own_class_less_its_least_value():
    task, images = small(DIET, images=7).eval(), torch.randn(3, 3, 32, 32)
    own = torch.tensor([6, 0, 2])
    outcome = task(images, indices=own)
    features = task.encoder.forward_features(images)[:, task.geometry.prefix :].mean(1)
    logs = F.log_softmax(features @ task.identity.head.weight.T, dim=1)
    target = torch.full((3, 7), 0.8 / 7)
    target[torch.arange(3), own] += 0.2
    by_hand = (target * (target.log() - logs)).sum(1).mean()
    torch.testing.assert_close(outcome.loss, by_hand)
    alone = small(DIET, images=1)(images, indices=torch.zeros(3, dtype=torch.int64))
    assert abs(alone.loss.item()) < 1e-6, "one image has nothing to tell apart"
    assert outcome.metrics["identity_chance"].item() == pytest.approx(1 / 7)
    assert outcome.metrics["identity_accuracy"].item() == pytest.approx((logs.argmax(1) == own).float().mean().item())


def test_large_sets_and_a_wrong_number_of_images_are_refused():
    options = {"images": "auto", "smoothing": 0.8, "color": "own"}
    assert DIET.data_defaults(options, 2**16, "images")["task.images"][0] == 2**16
    assert "65,537 images: choose another" in refusal(DIET.data_defaults, options, 2**16 + 1, "images")
    assert "leave the option out" in refusal(DIET.data_defaults, options | {"images": 9}, 10, "images")


def test_the_measure_counts_images_whose_views_find_each_other():
    one = torch.eye(4)
    assert same_image_found(one, one[[0, 1, 3, 2]]).tolist() == [1, 1, 0, 0]
    assert same_image_found(torch.ones(4, 2), torch.ones(4, 2)).tolist() == [0] * 4  # a collapse finds nothing
    assert same_image_found(one[:1], one[:1]).tolist() == [1]
    crossed = same_image_found(torch.tensor([[1.0, 0.0], [1.0, 0.1]]), torch.tensor([[1.0, 0.09], [0.0, 1.0]]))
    assert crossed.tolist() == [0.5, 0.5]  # the first by its first view only, the second by its second one


def test_chance_and_raw_pixels_have_to_be_beaten_and_views_of_recordings_are_shifts():
    task, images = small(DIET).eval(), torch.randn(8, 3, 32, 32)
    found = task.measure(images, seeded())
    assert found.means()["chance"] == pytest.approx(1 / 8) and found.to_beat == ("chance", "raw pixels")
    task.modality = modality_of(Sound())
    one, two = task._two_views(images, seeded())
    assert not torch.equal(one, two)
    torch.testing.assert_close(one.sum(-1), images.sum(-1))  # only shifted in time


def test_every_image_is_trained_as_its_own_class_once_an_epoch(tmp_path, monkeypatch, quick_probe):
    seen, real = [], DIET.forward

    def forward(self, view, *, indices=None, **rest):
        seen.extend([] if indices is None else [indices.tolist()])  # None while the time of a step is measured
        return real(self, view, indices=indices, **rest)

    monkeypatch.setattr(DIET, "forward", forward)
    run = RunFolder(patchloom.pretrain(noise(), "diet", out=tmp_path, **SMALL, epochs=3, held_out=0.2).folder)
    assert run.read_config().task["images"] == 32 and len(seen) == 6
    for epoch in range(3):
        assert sorted(sum(seen[2 * epoch : 2 * epoch + 2], [])) == [*range(32)]
    metrics = run.metrics.read_text().splitlines()
    assert "identity_accuracy" in metrics[0] and "baseline:raw pixels" in metrics[0]
    assert load_task(tmp_path).task.identity.head.weight.shape == (32, 16)


def test_the_head_of_other_images_is_not_taken_over(tmp_path, quick_probe):
    options = SMALL | {"epochs": 1, "held_out": 0.2}
    patchloom.pretrain(noise(), "diet", out=tmp_path / "one", **options)
    patchloom.pretrain(noise(seed=1), "diet", out=tmp_path / "two", from_run=tmp_path / "one", blr=1e-30, **options)
    one, two = (load_task(tmp_path / name).task for name in ("one", "two"))
    torch.testing.assert_close(one.encoder.patch_embed.proj.weight, two.encoder.patch_embed.proj.weight)
    assert not torch.equal(one.identity.head.weight, two.identity.head.weight)
