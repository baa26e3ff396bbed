"""Linear probes: a logistic regression, and the trainings of the papers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluating import numbers
from refusing import refusal
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from patchloom.data.sources.open import open_data
from patchloom.data.splits import pick
from patchloom.data.stats import normalize
from patchloom.evaluate import logistic
from patchloom.evaluate.features import extract
from patchloom.evaluate.logistic import L2_STRENGTHS, fit_path, linear_probe
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.attentive import AttentiveClassifier, CrossPool, EfficientPool
from patchloom.evaluate.protocols.linear import LinearClassifier, begin_probe
from patchloom.evaluate.recipes import PROBES, ProbeRecipe, images_per_step
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import Trainer
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder, save_extra_module
from patchloom.nets.heads import InstanceHead, represent

IMAGES, LABELS = load_digits(return_X_y=True)
X, Y = torch.from_numpy(IMAGES.astype(np.float32)), torch.from_numpy(LABELS)


def test_agrees_with_scikit_learn() -> None:
    scaler = StandardScaler().fit(IMAGES[:1000])
    strengths = (1.0, 1e-2, 1e-3)
    for strength, probe in zip(strengths, fit_path(X[:1000], Y[:1000], strengths), strict=True):
        theirs = LogisticRegression(C=1 / (strength * 1000), tol=1e-7, max_iter=2000)
        theirs.fit(scaler.transform(IMAGES[:1000]), LABELS[:1000])
        reach = np.abs(theirs.coef_).max()
        assert np.abs(probe.weights.numpy().T - theirs.coef_).max() < 0.01 * reach
        assert np.abs(probe.biases.numpy() - theirs.intercept_).max() < 0.01 * reach
        expected = theirs.predict(scaler.transform(IMAGES[1000:]))
        assert (probe.predict(X[1000:]).numpy() == expected).mean() > 0.997


def test_the_protocol_agrees_with_scikit_learn_on_features_of_an_encoder(tiny_encoder: Path) -> None:
    report = evaluate("linear", tiny_encoder, "digits", device="cpu", pooling="mean", max_train=400, seed=3)
    row = report.results[0]
    digits, (vit, card) = open_data("digits"), load_encoder_file(tiny_encoder)
    some = digits.train.subset(np.setdiff1d(np.arange(1437), pick(digits.train.labels, 1437 - 400, 3)))
    train, test = (extract(vit, card, source, device="cpu") for source in (some, digits.test))
    x, y = train.pooled("mean").numpy(), some.labels
    held = pick(y, 80, 3)
    rest = np.setdiff1d(np.arange(400), held)

    def score(of: np.ndarray, labels: np.ndarray, on: np.ndarray, truth: np.ndarray, strength: float) -> float:
        theirs = LogisticRegression(C=1 / (strength * len(of)), solver="newton-cg", tol=1e-6, max_iter=500)
        return make_pipeline(StandardScaler(), theirs).fit(of, labels).score(on, truth)

    inner = {strength: score(x[rest], y[rest], x[held], y[held], strength) for strength in L2_STRENGTHS}
    assert row.settings["held_out_accuracy"] == pytest.approx(inner[row.settings["l2"]], abs=1.1 / 80)
    assert inner[row.settings["l2"]] >= max(inner.values()) - 1.1 / 80 > inner[10.0]
    theirs = score(x, y, test.pooled("mean").numpy(), digits.test.labels, row.settings["l2"])
    assert row.value == pytest.approx(theirs, abs=2.1 / 360) and row.settings["held_out"] == 80


def test_a_small_problem_is_solved_on_the_cpu_whatever_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """L-BFGS reads thousands of single numbers, and a GPU waits for each."""
    here, there = (linear_probe(X[:200], Y[:200], device=device) for device in ("cpu", "meta"))
    assert torch.equal(here[0].weights, there[0].weights) and here[1] == there[1]
    monkeypatch.setattr(logistic, "_ON_CPU", 200 * 64 * 10)
    with pytest.raises(NotImplementedError, match="Meta"):
        fit_path(X[:200], Y[:200], (1.0,), "meta")
    fit_path(X[:199], Y[:199], (1.0,), "meta")


def test_scaling_and_constant_features_do_not_matter() -> None:
    plain, _ = linear_probe(X[:300], Y[:300])
    shifted, _ = linear_probe(X[:300] * 100 + 7, Y[:300])
    assert (plain.predict(X[300:]) == shifted.predict(X[300:] * 100 + 7)).double().mean() > 0.99


def test_rare_classes_are_served() -> None:
    labels = Y[:200].clone()
    labels[labels == 9] = 0
    labels[:1] = 42
    probe, _ = linear_probe(X[:200], labels)
    assert probe.classes.tolist() == [*range(9), 42]
    assert linear_probe(X[:2], torch.tensor([3, 5]))[0].classes.tolist() == [3, 5]
    assert "two classes" in refusal(linear_probe, X[:5], torch.zeros(5, dtype=torch.int64))


def test_fewer_images_than_numbers_agree_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    wide = IMAGES @ rng.normal(size=(64, 1500)) / 50 + rng.normal(size=(len(IMAGES), 1500))
    (probe,) = fit_path(torch.from_numpy(wide[:90].astype(np.float32)), Y[:90], [0.01])
    theirs = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (0.01 * 90), tol=1e-8, max_iter=5000))
    expected = theirs.fit(wide[:90], LABELS[:90]).predict(wide[90:])
    assert (probe.predict(torch.from_numpy(wide[90:].astype(np.float32))).numpy() == expected).mean() > 0.995


# MAE's probe of the class token, ExtreMA's of the instance representation.


SPEC = EncoderSpec("nano", (8, 8), 4, channels=1, options={"depth": 2, "embed_dim": 32, "num_heads": 2})
CARD = EncoderCard(SPEC, (0.3,), (0.37,), "mae", "tiny")
SETTINGS = EvalSettings(device="cpu")
DIGITS = open_data("digits").train
EASY = {"device": "cpu", "precision": "float32", "crop_scale": 1.0, "flip": False}
QUICK = {**EASY, "recipe": "mae", "epochs": 3, "max_train": 60}


def classifier(pooling: str = "class", **options) -> LinearClassifier:
    torch.manual_seed(0)
    spec = replace(SPEC, options=SPEC.options | options)
    return LinearClassifier(build_encoder(spec), 10, pooling, InstanceHead(32, 2) if pooling == "instance" else None)


def begun(recipe: ProbeRecipe, images: int = 40, model: LinearClassifier | None = None) -> Trainer:
    settled = recipe.settled(images, "cpu")
    return begin_probe(model or classifier(), CARD, settled, DIGITS.subset(range(images)), None, settings=SETTINGS)


def test_a_batch_norm_without_scale_and_shift_is_in_front_of_the_head() -> None:
    model = classifier()
    assert isinstance(model.norm, nn.BatchNorm1d) and not model.norm.affine and model.norm.eps == 1e-6
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained == ["head.weight", "head.bias"] and 0.008 < model.head.weight.std() < 0.012
    images = normalize(torch.stack([DIGITS.read(i) for i in range(20)]), CARD.mean, CARD.std)
    features = model.encoder.forward_features(images)[:, 0].detach()
    torch.testing.assert_close(model.features(images), features)
    normed = (features - features.mean(0)) / (features.var(0, unbiased=False) + 1e-6).sqrt()
    torch.testing.assert_close(model.train()(images), normed @ model.head.weight.T + model.head.bias)
    # tested by the mean and variance of all batches, each of which counts alike
    model.train()(images[:10] * 2)
    seen = [features, model.features(images[:10] * 2)]
    mean, var = (sum(map(of, seen)) / 2 for of in (lambda one: one.mean(0), lambda one: one.var(0)))
    normed = (features - mean) / (var + 1e-6).sqrt()
    torch.testing.assert_close(model.eval()(images), normed @ model.head.weight.T + model.head.bias)


@pytest.mark.parametrize("pooling", ["class", "mean", "instance"])
def test_the_features_are_those_of_the_other_protocols(pooling: str) -> None:
    model = classifier(pooling, reg_tokens=2).train()
    assert not model.encoder.training and (model.instance is None or not model.instance.training)
    source = DIGITS.subset(range(12))
    found = extract(model.encoder, CARD, source, device="cpu", head=model.instance).pooled(pooling)
    images = normalize(torch.stack([source.read(i) for i in range(12)]), CARD.mean, CARD.std)
    torch.testing.assert_close(model.features(images), found)
    if pooling == "instance":
        with torch.no_grad():
            tokens = model.encoder.blocks(model.encoder._pos_embed(model.encoder.patch_embed(images)))
            torch.testing.assert_close(found, represent(model.encoder, model.instance, tokens))


def test_the_rates_are_those_worked_out_by_hand() -> None:
    course = begun(ProbeRecipe(epochs=10, warmup_epochs=2, batch=16)).course
    assert (course.steps, course.warmup, course.peak) == (20, 4, 0.1 * 16 / 256)
    # the paper's batch on a million images, and what is left of it on 40
    for name, rate in (("mae", 6.4), ("extrema", 1.6)):
        assert PROBES[name][0].settled(1_281_167, "cpu").course(1_281_167).peak == rate
    assert begun(ProbeRecipe()).course.peak == pytest.approx(0.1 * 40 / 256)
    sgd = begun(ProbeRecipe(optimizer="sgd")).optimizer  # as in the command of ExtreMA's program
    assert isinstance(sgd, torch.optim.SGD)
    assert [(group["momentum"], group["weight_decay"]) for group in sgd.param_groups] == [(0.9, 0), (0.9, 0)]


def test_a_step_is_lars_and_the_bias_is_not_adapted() -> None:
    recipe = ProbeRecipe(epochs=3, warmup_epochs=0, batch=40, weight_decay=0.01, momentum=0.5)
    training = begun(recipe)
    weight, bias = (one.detach().clone() for one in (training.model.head.weight, training.model.head.bias))
    moving = [torch.zeros_like(weight), torch.zeros_like(bias)]
    batches, labels_of_all = training.batches(0, 2, 0), torch.from_numpy(DIGITS.labels[:40])
    for _ in range(2):
        batch = next(batches)
        normed = nn.functional.batch_norm(batch.views[0], None, None, training=True, eps=1e-6)
        leaves = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        labels = labels_of_all[batch.indices]
        loss = nn.functional.cross_entropy(normed @ leaves[0].T + leaves[1], labels)
        slope, slope_of_bias = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close(training.update(batch), loss.detach())
        rate = training.optimizer.param_groups[0]["lr"]
        share = 0.001 * weight.norm() / (slope.norm() + 0.01 * weight.norm() + 1e-8)
        moving[0] = 0.5 * moving[0] + share * (slope + 0.01 * weight)
        moving[1] = 0.5 * moving[1] + slope_of_bias
        weight, bias = weight - rate * moving[0], bias - rate * moving[1]
        torch.testing.assert_close(training.model.head.weight.detach(), weight)
        torch.testing.assert_close(training.model.head.bias.detach(), bias)


def test_a_large_step_is_read_and_encoded_in_parts() -> None:
    recipe = ProbeRecipe(epochs=2, warmup_epochs=0, batch=600, crop_scale=1.0, flip=False)
    assert images_per_step(recipe, 1437) == (600, 600) and recipe.parts(600) == 3
    assert images_per_step(ProbeRecipe(), 1437) == (1434, 1434) and images_per_step(ProbeRecipe(), 20_000) == (
        16_384,
        16_384,
    )
    training = begun(recipe, 1200)
    first, second = training.batches(0, 2, 0)
    assert len(first.indices) == 600 and len({*first.indices.tolist(), *second.indices.tolist()}) == 1200
    (again,) = begun(recipe, 1200).batches(1, 2, 0)  # as after a stop
    assert torch.equal(again.indices, second.indices) and torch.equal(again.views[0], second.views[0])
    images = torch.stack([DIGITS.read(int(i)) for i in first.indices[:5]])
    expected = training.model.features(normalize(images, CARD.mean, CARD.std))
    torch.testing.assert_close(first.views[0][:5], expected)


def test_it_beats_chance_beside_an_untrained_encoder_and_one_seed_gives_one_result(tiny_encoder: Path) -> None:
    hard = {**EASY, "recipe": "mae", "epochs": 12, "blr": 30.0, "max_train": 200, "batch_size": 50}
    hard["test_crop"] = 1.0  # digits of 8 pixels have no border to leave out
    first, again = (evaluate("linear", tiny_encoder, "digits", **hard) for _ in range(2))
    assert [row.encoder for row in first.results[:3]] == ["tiny", "untrained", "best constant"]
    assert first.results[0].low > first.results[2].high and first.results[0].pooling == "class"
    assert numbers(first.results) == numbers(again.results)
    about = first.results[0].settings
    assert about.items() >= {"recipe": "mae", "optimizer": "LARS", "epochs": 12, "blr": 30.0, "momentum": 0.9}.items()
    assert about["lr"] == pytest.approx(30 * 50 / 256) and not {"mixup", "betas", "layer_decay"} & set(about)
    assert {row.protocol for row in first.results} == {"linear"}


def test_the_report_says_in_what_it_is_not_the_papers(tiny_encoder: Path) -> None:
    said = evaluate("linear", tiny_encoder, "digits", **QUICK, control=False).method
    assert "MAE (Table 10)" in said
    for change in ("epochs 3, not 90", "warmup epochs 0.33, not 10", "flip false, not true", "batch 60, not 16,384"):
        assert change in said.partition("Differences from the paper")[2]
    assert "blr 0.1, lr 0.0234375, weight decay 0, momentum 0.9" in said


def test_a_mean_stands_in_for_a_class_token_that_is_not_there(tmp_path: Path) -> None:
    spec = replace(SPEC, options=SPEC.options | {"class_token": False})
    save_encoder(build_encoder(spec), replace(CARD, spec=spec), tmp_path / "e.safetensors")
    report = evaluate("linear", tmp_path / "e.safetensors", "digits", **QUICK, control=False)
    assert report.results[0].pooling == "mean" and "pooling mean, not class" in report.method


def test_extremas_is_on_the_instance_representation(run: Path) -> None:
    torch.manual_seed(0)
    save_encoder(build_encoder(SPEC), replace(CARD, extra_modules={"head": "pooling"}), run / "encoder.safetensors")
    save_extra_module(InstanceHead(32, 2), run / "head.safetensors")
    report = evaluate("linear", run, "digits", **QUICK | {"recipe": "extrema"})
    assert [row.pooling for row in report.results[:3]] == ["instance", "instance", "-"]
    assert "batch 60, not 4,096" in report.method and "ExtreMA (Table 14)" in report.method


# The attentive probe: its pooling beside a plain implementation, and its training on cached tokens.


def test_efficient_pooling_is_one_softmax_and_one_slice_of_the_values_a_query() -> None:
    torch.manual_seed(0)
    pool, tokens = EfficientPool(12, queries=4), torch.randn(3, 5, 12)
    values = tokens @ pool.values.weight.T  # as the equations say: all tokens are mapped first
    slices = []
    for j, query in enumerate(pool.queries):
        weights = torch.softmax(tokens @ query / 12**0.5, dim=1)
        slices.append((weights[..., None] * values[..., 3 * j : 3 * j + 3]).sum(1))
    torch.testing.assert_close(pool(tokens), torch.cat(slices, 1))
    torch.testing.assert_close(pool.attention(tokens).sum(-1), torch.ones(3, 4))
    # M·D + D²/r + (D/r + 1)·K, 1,383,400 for ViT-B on ImageNet-1k (the log of the authors' program)
    large = EfficientPool(768)
    assert sum(one.numel() for one in large.parameters()) + 769 * 1000 == 1_383_400
    assert EfficientPool(12, queries=3, reduce=2)(tokens).shape == (3, 6)


def test_cross_pooling_equals_attention_of_torch() -> None:
    torch.manual_seed(0)
    pool, tokens = CrossPool(12, heads=3).eval(), torch.randn(2, 5, 12)
    plain = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    with torch.no_grad():
        plain.in_proj_weight.copy_(torch.cat([torch.eye(12), pool.keys.weight, pool.values.weight]))
        plain.out_proj.weight.copy_(torch.eye(12))
    query = pool.query.flatten()[None, None].expand(2, 1, 12)
    normed = tokens / (1 + 1e-6) ** 0.5  # running statistics of a new batch norm
    expected, weights = plain(query, normed, normed, average_attn_weights=False)
    torch.testing.assert_close(pool(tokens), expected[:, 0])
    torch.testing.assert_close(pool.attention(tokens), weights[:, :, 0])


def test_the_encoder_stays_as_it_is_and_whole_adds_the_class_token() -> None:
    vit = build_encoder(EncoderSpec("nano", (16, 16), 8, options={"depth": 1, "embed_dim": 24, "num_heads": 2}))
    images = torch.randn(2, 3, 16, 16)
    model = AttentiveClassifier(vit, 3, EfficientPool(24, 4)).train()
    assert not model.encoder.training and model.norm.training
    assert model.features(images).shape == (2, 4, 24)
    assert AttentiveClassifier(vit, 3, EfficientPool(24, 4), whole=True).features(images).shape == (2, 5, 24)
    model(images).sum().backward()
    assert all(one.grad is None for one in vit.parameters()) and model.pool.queries.grad is not None
    groups = model.groups(0.1, 1.0)
    assert [len(group["params"]) for group in groups] == [3, 1]  # queries, values and head; its bias


@pytest.mark.parametrize("options", [{}, {"form": "cross"}, {"recipe": "ep", "optimizer": "adamw"}])
def test_digits_are_told_apart_by_the_encoder_alone(run: Path, options: dict[str, Any]) -> None:
    queries = {} if "form" in options else {"queries": 4}
    usual = {"device": "cpu", "max_train": 300, "epochs": 12, "batch_size": 32, "lr": 5e-3, "control": False}
    report = evaluate("attentive", run, "digits", **usual, **queries, **options)
    (ours,) = report.quoted
    assert ours.value > 0.25 and ours.pooling == "attentive"
    assert ours.settings["form"] == options.get("form", "efficient")
    assert list((run / "pictures").glob("attentive-digits-*.png"))
