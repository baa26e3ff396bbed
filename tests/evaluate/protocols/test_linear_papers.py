"""The papers' linear probe: MAE's on the class token, ExtreMA's on the instance representation."""

import math
import os
import signal
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.linear import _done
from patchloom.evaluate.recipes import PROBES, ProbeRecipe, images_per_step
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.training import FitPlan, LinearClassifier, ProbeTraining, train_classifier
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder, save_extra_module
from patchloom.nets.heads import InstanceHead, represent

SPEC = EncoderSpec("nano", (8, 8), 4, channels=1, options={"depth": 2, "embed_dim": 32, "num_heads": 2})
CARD = EncoderCard(SPEC, (0.3,), (0.37,), "mae", "tiny")
SETTINGS = EvalSettings(device="cpu")
DIGITS = open_data("digits").train
EASY = {"device": "cpu", "precision": "float32", "crop_scale": 1.0, "flip": False}
QUICK = {**EASY, "recipe": "mae", "epochs": 3, "max_train": 60}


def probe(pooling: str = "class", **options) -> LinearClassifier:
    torch.manual_seed(0)
    spec = replace(SPEC, options=SPEC.options | options)
    return LinearClassifier(build_encoder(spec), 10, pooling, InstanceHead(32, 2) if pooling == "instance" else None)


def begun(recipe: ProbeRecipe, images: int = 40, model: LinearClassifier | None = None) -> ProbeTraining:
    plan = FitPlan("mae", recipe, (recipe.blr,), CARD, SETTINGS, "float32")
    training = plan.begin(model or probe(), DIGITS.subset(range(images)))
    assert type(training) is ProbeTraining
    return training


def test_a_batch_norm_without_scale_and_shift_is_in_front_of_the_head() -> None:
    model = probe()
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
    model = probe(pooling, reg_tokens=2).train()
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
    recipe = ProbeRecipe(epochs=10, warmup_epochs=2, batch=16)
    training, rates = begun(recipe), []
    for step in range(training.steps):
        training.schedule.step_update(step + 1)
        (rate,) = {group["lr"] for group in training.optimizer.param_groups}
        rates.append(rate)
    peak = 0.1 * 16 / 256
    assert training.steps == 20 and rates[:4] == pytest.approx([peak * step / 4 for step in (1, 2, 3, 4)])
    assert rates[4:] == pytest.approx([peak * (1 + math.cos(math.pi * step / 17)) / 2 for step in range(1, 17)])
    # the paper's batch on a million images, and what is left of it on 40
    assert PROBES["mae"][0].peak(images_per_step(PROBES["mae"][0], 1_281_167)[1]) == 6.4
    assert PROBES["extrema"][0].peak(images_per_step(PROBES["extrema"][0], 1_281_167)[1]) == 1.6
    assert begun(ProbeRecipe()).optimizer.param_groups[0]["initial_lr"] == pytest.approx(0.1 * 40 / 256)
    sgd = begun(ProbeRecipe(optimizer="sgd")).optimizer  # as in the command of ExtreMA's program
    assert isinstance(sgd, torch.optim.SGD) and sgd.param_groups[0]["initial_lr"] == pytest.approx(0.1 * 40 / 256)
    assert [(group["momentum"], group["weight_decay"], len(group["params"])) for group in sgd.param_groups] == [
        (0.9, 0, 2)
    ]


def test_a_step_is_lars_and_the_bias_is_not_adapted() -> None:
    recipe = ProbeRecipe(epochs=3, warmup_epochs=0, batch=40, weight_decay=0.01, momentum=0.5)
    training = begun(recipe)
    weight, bias = (one.detach().clone() for one in (training.model.head.weight, training.model.head.bias))
    moving = [torch.zeros_like(weight), torch.zeros_like(bias)]
    batches = training._batches(2, workers=0)
    for step in range(2):
        batch = next(batches)
        normed = nn.functional.batch_norm(batch.views[0], None, None, training=True, eps=1e-6)
        leaves = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        labels = training.labels[batch.indices]
        loss = nn.functional.cross_entropy(normed @ leaves[0].T + leaves[1], labels)
        slope, slope_of_bias = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close(training.update(step, batch), loss.detach())
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
    first, second = training._batches(2, workers=0)
    assert len(first.indices) == 600 and len({*first.indices.tolist(), *second.indices.tolist()}) == 1200
    later = begun(recipe, 1200)
    later.step = 1  # as after a stop
    (again,) = later._batches(2, workers=0)
    assert torch.equal(again.indices, second.indices) and torch.equal(again.views[0], second.views[0])
    images = torch.stack([training.source.read(int(i)) for i in first.indices[:5]])
    expected = training.model.features(normalize(images, CARD.mean, CARD.std))
    torch.testing.assert_close(first.views[0][:5], expected)


def test_it_learns_and_the_encoder_stays_as_it_is() -> None:
    plan = FitPlan("mae", ProbeRecipe(epochs=30, warmup_epochs=3, batch=50, blr=40.0, flip=False, crop_scale=1.0),
                   (40.0,), CARD, SETTINGS, "float32")  # fmt: skip
    model, source = probe(), DIGITS.subset(range(200))
    before = deepcopy(model.encoder.state_dict())
    trained = train_classifier(model, source, plan, "tiny").model
    assert all(torch.equal(value, before[name]) for name, value in trained.encoder.state_dict().items())
    images = normalize(torch.stack([source.read(i) for i in range(200)]), CARD.mean, CARD.std)
    right = trained(images).argmax(1) == torch.from_numpy(source.labels)
    assert right.double().mean() > 0.5


def test_it_beats_chance_beside_an_untrained_encoder_and_one_seed_gives_one_result(tiny_encoder: Path) -> None:
    hard = {**EASY, "recipe": "mae", "epochs": 20, "blr": 20.0, "max_train": 250, "batch_size": 50}
    hard["test_crop"] = 1.0  # digits of 8 pixels have no border to leave out
    first, again = (evaluate("linear", tiny_encoder, "digits", **hard) for _ in range(2))
    assert [row.encoder for row in first.rows] == ["tiny", "untrained", "best constant"]
    assert first.rows[0].low > first.rows[-1].high and first.rows[0].pooling == "class"
    assert [row.right.tolist() for row in first.rows] == [row.right.tolist() for row in again.rows]
    other = evaluate("linear", tiny_encoder, "digits", **hard, seed=1, control=False)
    assert other.rows[0].right.tolist() != first.rows[0].right.tolist()
    about = first.rows[0].settings
    assert about.items() >= {"recipe": "mae", "optimizer": "LARS", "epochs": 20, "blr": 20.0, "momentum": 0.9}.items()
    assert about["lr"] == pytest.approx(20 * 50 / 256) and not {"mixup", "betas", "layer_decay"} & set(about)
    assert {row.protocol for row in first.rows} == {"linear"}


def test_the_report_says_by_which_protocol_and_in_what_it_is_not_the_papers(tiny_encoder: Path) -> None:
    said = evaluate("linear", tiny_encoder, "digits", **QUICK, control=False).protocol
    assert said.startswith("The linear probe of MAE (Table 10): a batch norm without scale and shift, then a linear")
    assert (
        "Differences from the paper: epochs 3, not 90; warmup epochs 0.33, not 10; crop scale 1, not 0.08; flip false, "
        "not true; batch 60, not 16,384 (there are 60 images), with the rate in proportion. LARS moves the layer"
    ) in said
    assert "blr 0.1, lr 0.0234375, weight decay 0, momentum 0.9" in said.replace("\n", " ")


def test_the_whole_of_the_papers_recipe_is_named_so() -> None:
    for name, (recipe, _) in PROBES.items():
        plan = FitPlan(name, recipe, (recipe.blr,), CARD, SETTINGS, "float32")
        said = _done(plan, recipe, 1_281_167, False).partition("the frozen encoder. ")[2]
        assert said.startswith("The recipe's values are the paper's: optimizer, epochs, warmup epochs, batch, blr")


def test_a_mean_stands_in_for_a_class_token_that_is_not_there(tmp_path: Path) -> None:
    spec = replace(SPEC, options=SPEC.options | {"class_token": False})
    save_encoder(build_encoder(spec), replace(CARD, spec=spec), tmp_path / "e.safetensors")
    report = evaluate("linear", tmp_path / "e.safetensors", "digits", **QUICK)
    assert report.rows[0].pooling == "mean" and "pooling mean, not class (there is no class token)" in report.protocol
    with pytest.raises(PatchloomError, match="no class token for class features: use --pooling mean"):
        evaluate("linear", tmp_path / "e.safetensors", "digits", **QUICK, pooling="class")


def test_extremas_is_on_the_instance_representation(tmp_path: Path, tiny_encoder: Path) -> None:
    run = tmp_path / "run"
    torch.manual_seed(0)
    card = replace(CARD, extra_modules={"instance_head": "pooling"})
    save_encoder(build_encoder(SPEC), card, run / "encoder.safetensors")
    save_extra_module(InstanceHead(32, 2), run / "instance_head.safetensors")
    report = evaluate("linear", run, "digits", **QUICK | {"recipe": "extrema"})
    assert [row.pooling for row in report.rows] == ["instance", "instance", "-"]
    assert "batch 60, not 4,096" in report.protocol and "ExtreMA (Table 14)" in report.protocol
    with pytest.raises(PatchloomError, match="no module beside it for instance features"):
        evaluate("linear", tiny_encoder, "digits", **QUICK | {"recipe": "extrema"})


def test_test_images_are_read_once_at_the_end(tiny_encoder: Path, record_reads) -> None:
    record = record_reads(120, 40)
    evaluate("linear", tiny_encoder, "digits", **QUICK)
    assert record.count("test") == 80 and set(record[: record.index("test")]) == {"train"}


def test_stopped_it_goes_on_and_ends_the_same(tiny_encoder: Path, monkeypatch, capsys) -> None:
    asked = {**QUICK, "epochs": 4, "batch_size": 20}
    whole = evaluate("linear", tiny_encoder, "digits", **asked)
    step, done = ProbeTraining.update, []

    def stopped(self, number, batch):
        done.append(number)
        if len(done) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, number, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ProbeTraining, "update", stopped)
        with pytest.raises(Stopped, match="run the same command to resume"):
            evaluate("linear", tiny_encoder, "digits", **asked)
    capsys.readouterr()
    again = evaluate("linear", tiny_encoder, "digits", **asked)
    assert "tiny resumes at epoch 2.0 of 4." in capsys.readouterr().out
    assert [row.right.tolist() for row in again.rows] == [row.right.tolist() for row in whole.rows]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epochs": 5}, "--epochs applies to --recipe mae or extrema only, not to logistic"),
        ({"control": False}, "--control applies to --recipe mae or extrema"),
        ({"recipe": "droppos"}, "there is no recipe droppos: choose one of logistic, mae, extrema"),
        ({"recipe": "mae", "pooling": "both"}, "--pooling both applies to --recipe logistic"),
        ({"recipe": "mae", "pooling": "prefix"}, "--pooling prefix applies to --recipe logistic"),
        ({"recipe": "mae", "momentum": 1.5}, "--momentum must be 0 to 0.9999"),
        ({"recipe": "mae", "mixup": 0.8}, "there is no option --mixup"),
        ({"recipe": "mae", "blr": 0.0}, "--blr must be above 0"),
        ({"recipe": "mae", "batch_size": 1}, "use --batch_size 2 or more"),
    ],
)
def test_refusals(tiny_encoder: Path, options: dict, said: str) -> None:
    with pytest.raises(PatchloomError, match=said):
        evaluate("linear", tiny_encoder, "digits", device="cpu", **options)
