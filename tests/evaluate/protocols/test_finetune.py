"""Fine-tuning: variants of the encoder, learning rates of every parameter, and classifiers on files."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from evaluating import numbers
from perturbing import perturbed
from refusing import refusal
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from torch import nn

from patchloom.cli import main
from patchloom.data.source import Data, Source
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.evaluate import classification, features, settings
from patchloom.evaluate.classification import ClassPredictions, begin_classifier, predict_classes
from patchloom.evaluate.classifier import (
    Classifier,
    ClassifierCard,
    Pool,
    fresh_blocks,
    load_classifier,
    read_classifier,
    save_classifier,
    variant_of,
)
from patchloom.evaluate.protocols import evaluate, finetune
from patchloom.evaluate.protocols.fewshot import load_stem, subsample_training
from patchloom.evaluate.protocols.finetune import average, candidate
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.settings import EvalSettings, Parts, open_subjects, parts_of
from patchloom.evaluate.trainer import temporary_seed
from patchloom.nets import performance
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder, save_extra_module
from patchloom.nets.encode import grid_size, patch_positions
from patchloom.nets.finetune import RelativeAttention, Variant, with_variant
from patchloom.nets.heads import InstanceHead, Stem
from patchloom.pace import Pace
from patchloom.results import store
from patchloom.results.evaluation import Evaluation
from patchloom.tasks.extrema import ExtreMA
from patchloom.tasks.lut import LUT
from patchloom.withhold.encoder_input import all_patches

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
# wider than high, so that rows and columns are not confused
SPEC = EncoderSpec("nano", (8, 12), 4, channels=1, options=SMALL)
IMAGES = torch.randn(3, 1, 8, 12, generator=torch.Generator().manual_seed(0))
QUICK = {"device": "cpu", "epochs": 2, "flip": False}


def encoder(**changes) -> tuple:
    torch.manual_seed(1)
    spec = replace(SPEC, **changes)
    return build_encoder(spec).eval(), EncoderCard(spec, (0.0,), (1.0,), "mae", "small")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    vit, card = encoder(img_size=(8, 8))
    save_encoder(vit, card, tmp_path / "run" / "encoder.safetensors")
    return tmp_path / "run"


@pytest.mark.parametrize("options", [{}, {"class_token": False}, {"reg_tokens": 2}, {"no_embed_class": True}])
@pytest.mark.parametrize("positions", ["sincos", "learned", "none"])
def test_keep_is_the_encoder_itself(options: dict, positions: str) -> None:
    vit, card = encoder(options=SMALL | options, positions=positions)
    copy = with_variant(vit, card, drop_path=0.5).eval()
    tokens = vit.forward_features(IMAGES)
    assert torch.equal(copy.forward_features(IMAGES), tokens)
    trained = {name for name, weight in vit.named_parameters() if weight.requires_grad}
    assert {name for name, weight in copy.named_parameters() if weight.requires_grad} == trained
    if vit.has_class_token:
        torch.testing.assert_close(Classifier(copy, 5, "class").eval().pooled(IMAGES), tokens[:, 0])


def test_the_mean_is_normed_afterwards_by_the_encoders_norm_or_a_fresh_one() -> None:
    """MAE's program: mean of the patch tokens before the last norm, then a norm that begins at one and zero."""
    vit, card = encoder()
    torch.nn.init.normal_(vit.norm.weight)
    seen = []
    vit.norm.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    vit.forward_features(IMAGES)
    mean, copy = seen[0][:, 1:].mean(1), with_variant(vit, card)
    torch.testing.assert_close(Classifier(copy, 5, "mean").eval().pooled(IMAGES), vit.norm(mean))
    fresh = torch.nn.functional.layer_norm(mean, (32,), eps=1e-6)
    torch.testing.assert_close(Classifier(copy, 5, "mean", fresh_norm=True).eval().pooled(IMAGES), fresh)


@pytest.mark.parametrize("class_token", [True, False])
def test_relative_positions_begin_as_none_and_are_timms(class_token: bool) -> None:
    vit, card = encoder(options=SMALL | {"class_token": class_token, "qk_norm": True})
    relative = with_variant(vit, card, "relative").eval()
    tokens = relative.forward_features(IMAGES)
    torch.testing.assert_close(tokens, with_variant(vit, card, "none").eval().forward_features(IMAGES))
    tables = [weight for name, weight in relative.named_parameters() if name.endswith("position_bias_table")]
    assert len(tables) == 2 and all(table.requires_grad and not table.any() for table in tables)
    for table in tables:
        torch.nn.init.normal_(table)
    stock = VisionTransformerRelPos(
        (8, 12), 4, 1, 0, "", 32, 2, 2, qk_norm=True, init_values=None, class_token=class_token, rel_pos_type="bias"
    ).eval()
    assert all(type(block.attn) is RelPosAttention for block in stock.blocks)
    stock.load_state_dict(relative.state_dict(), strict=True)
    biased = relative.forward_features(IMAGES)
    torch.testing.assert_close(biased, stock.forward_features(IMAGES))
    assert (biased - tokens).abs().max() > 0.01
    with torch.autocast("cpu", torch.bfloat16):
        assert (relative.forward_features(IMAGES).float() - biased).abs().max() < 0.2
    unfused = with_variant(vit, card, "relative").eval()
    unfused.load_state_dict(relative.state_dict())
    for module in unfused.modules():
        if isinstance(module, RelativeAttention):
            module.fused_attn = False
    torch.testing.assert_close(unfused.forward_features(IMAGES), biased)


def test_positions_that_are_given() -> None:
    without, card = encoder(positions="none", options=SMALL | {"class_token": False})
    with_, other = encoder()
    sincos = patch_positions(with_)
    assert (variant_of("auto", without), variant_of("auto", with_), variant_of("none", with_)) == (
        *("learned", "keep", "none"),
    )
    fixed = with_variant(without, card, "fixed", class_token=True)
    assert torch.equal(patch_positions(fixed), sincos) and not fixed.pos_embed.requires_grad
    assert fixed.has_class_token and not fixed.pos_embed[0, 0].any() and fixed.cls_token.std() < 0.05
    learned = with_variant(without, card, "learned")
    assert learned.pos_embed.requires_grad and 0.01 < learned.pos_embed.std() < 0.03
    on = with_variant(with_, other, "learned")
    assert torch.equal(on.pos_embed, with_.pos_embed) and on.pos_embed.requires_grad
    assert with_variant(with_, other, "none").pos_embed is None
    unchanged = with_variant(*encoder(options=SMALL | {"class_token": False}), "keep", class_token=True)
    assert torch.equal(patch_positions(unchanged), sincos) and not unchanged.pos_embed[0, 0].any()
    assert [block.drop_path1.drop_prob for block in with_variant(with_, other, drop_path=0.25).blocks[1:]] == [0.25]
    with pytest.raises(PatchloomError, match="relative positions cannot be given to register tokens"):
        with_variant(*encoder(options=SMALL | {"reg_tokens": 2}), "relative")
    narrow = {"embed_dim": 30, "num_heads": 2, "depth": 1}
    assert "divisible by 4, not 30" in refusal(with_variant, *encoder(positions="none", options=narrow), "fixed")


def test_an_encoder_of_timms_own_can_be_varied() -> None:
    name = "vit_tiny_patch16_224"
    vit = timm.create_model(name, num_classes=0).eval()
    card = EncoderCard(None, (0.5,) * 3, (0.5,) * 3, f"timm:{name}", name)
    images = torch.randn(1, 3, 224, 224)
    assert torch.equal(with_variant(vit, card).eval()(images), vit(images))
    assert grid_size(with_variant(vit, card, "relative")) == (14, 14)


def _tuned(run: Path, **options) -> Evaluation:
    return evaluate("finetune", run, "digits", **QUICK | {"control": False} | options)


def test_one_seed_one_result(run: Path, record_reads) -> None:
    record_reads(64, 40)
    same = {"recipe": "mae", "batch_size": 16, "epochs": 1, "blr": 0.02, "erasing": 0.5}
    torch.manual_seed(1)
    first = _tuned(run, **same)
    one = _weights(run)
    again = _tuned(run, **same)
    assert numbers(again.results) == numbers(first.results) and _weights(run) == one
    _tuned(run, **same | {"seed": 1})
    assert len(_weights(run)) == 2 and len(set(_weights(run).values())) == 2
    both = _tuned(run, **same | {"seeds": 2, "from_scratch": True})
    assert len(both.others) == 1 and both.results[0].encoder == "from scratch" and len(_weights(run)) == 2


def test_nothing_outside_notices_a_training() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with temporary_seed(EvalSettings(seed=2**40, device="cpu")):
        drawn = torch.rand(1).item(), np.random.rand(), random.random()
    assert torch.equal(before[0], torch.get_rng_state()) and before[2] == random.getstate()
    assert before[1] == np.random.get_state()[1].tolist()
    with temporary_seed(EvalSettings(seed=2**40, device="cpu")):
        assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())


def test_a_seed_touches_no_gpu_but_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU of a node whose generator is read begins a context of half a gigabyte on it."""
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda one: asked.append(("read", str(one))))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, one: asked.append(("restored", str(one))))
    monkeypatch.setattr(settings, "usable_device", torch.device)
    for device in ("cpu", "cuda:3"):
        with temporary_seed(EvalSettings(device=device)):
            pass
    assert asked == [("read", "cuda:3"), ("restored", "cuda:3")]


def _weights(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "finetuned").iterdir())}


@pytest.mark.parametrize("positions", ["auto", "relative"])
def test_what_is_saved_says_the_same_again(run: Path, tmp_path: Path, positions: str) -> None:
    out = tmp_path / "my.safetensors"
    new = {"fresh_norm": positions == "auto", "train_positions": positions == "auto"}
    report = _tuned(run, positions=positions, pooling="class", max_train=60, blr=0.05, out=str(out), **new)
    model, card = load_classifier(out)
    assert (model.norm is not None) == card.fresh_norm == (positions == "auto")
    data = open_data("digits")
    found = predict_classes(model, data.test, card.encoder, EvalSettings(device="cpu"))
    assert found.accuracy() == report.results[0].value and not model.training
    assert (card.classes, card.data, card.seed, card.pooling) == (data.test.classes, "digits", 0, "class")
    assert card.positions == {"auto": "keep"}.get(positions, positions) == card.settings["positions"]
    assert card.settings["blr"] == 0.05 and card.test == data.test.fingerprint() and card == read_classifier(out)
    assert not (run / "finetuned").exists()


def test_the_command_prints_what_was_trained(run: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["finetune", str(run), "digits", "--epochs", "2", "--max_train", "40", "--positions", "learned"]
    assert main(["evaluate", *words, "--validation", "0.25", "--device", "cpu"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"small: epoch \d of 2 was best.* on 10 validation images\)", printed)  # and 30 in steps of 8
    assert "saved as" in printed and "positions: learned" in printed and "on 360 test images." in printed
    assert "recipe small: epochs 2, warmup epochs 0.2, batch 8, blr 0.004" in printed
    rows = store.load(run)
    assert [row.encoder for row in rows[:3]] == ["small", "from scratch", "best constant"]
    assert [row.measure for row in rows if row.encoder == "small"][:3] == [
        "accuracy",
        "balanced accuracy",
        "recall of 0",
    ]
    assert {row.protocol for row in rows} == {"finetune"}


def test_images_of_one_class_are_refused(run: Path, record_reads) -> None:
    record_reads(30, 20)
    settings.open_data("digits").train.labels = np.zeros(30, np.int64)
    assert "images of one class only" in refusal(_tuned, run)


def test_a_loss_that_is_no_number_stops_it(run: Path) -> None:
    vit, card = load_encoder_file(run)
    source, recipe = open_data("digits").train.subset(range(20)), Recipe(epochs=1, warmup_epochs=0, batch=10)
    with torch.no_grad():
        vit.norm.weight[0] = torch.nan
    model = Classifier(with_variant(vit, card), 10, "mean")
    trainer = begin_classifier(
        model, card, recipe.settled(20, "cpu"), source, None, settings=EvalSettings(device="cpu")
    )
    assert "not finite after 1 steps: lower --blr" in refusal(trainer.fit, "bad", Pace(2))


@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_auto_is_the_precision_of_the_hardware(run: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setattr(features, "choose_precision", lambda device: ("bfloat16", "here"))
    seen, chosen = set(), []
    monkeypatch.setattr(classification, "choose_kernels", lambda vit, *how: chosen.append(how) or ("torch", ""))
    forward = Classifier.forward

    def watched(self, images):
        seen.add((self.training, torch.is_autocast_enabled("cpu")))
        return forward(self, images)

    monkeypatch.setattr(Classifier, "forward", watched)
    report = _tuned(run, max_train=40, precision=asked)
    half = asked == "auto"
    # the test is in float32, as it is for whoever loads the classifier
    assert report.results[0].settings["precision"] == ("bfloat16" if half else "float32")
    assert seen == {(True, half), (False, False)} and chosen == [("cpu", half, 8)]


def test_native_kernels_train_as_torchs_do(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := performance.missing_kernels("native"):
        pytest.skip(reason)
    monkeypatch.setattr(features, "choose_precision", lambda device: ("bfloat16", "here"))
    native, used = performance.NATIVE, []

    def noting(*given, **options):
        used.append(kernels)
        return native.compute(*given, **options)

    monkeypatch.setattr(performance, "NATIVE", native._replace(compute=noting))
    weights = []
    for kernels in ("torch", "native"):
        monkeypatch.setattr(classification, "choose_kernels", lambda *given, kernels=kernels: (kernels, ""))
        _tuned(run, max_train=40, out=str(run / f"{kernels}.safetensors"))
        weights.append(load_classifier(run / f"{kernels}.safetensors")[0].state_dict())
    steps, blocks = 10, len(load_encoder_file(run)[0].blocks)
    assert used == ["native"] * steps * blocks  # the test is in float32
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=5e-3, rtol=0.1)


BLOCKS = {"device": "cpu", "flip": False}


def test_the_encoder_stays_as_it_is(tiny_encoder: Path, record_reads, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Watched(Classifier):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append((self, {name: weight.clone() for name, weight in self.state_dict().items()}))

    monkeypatch.setattr(finetune, "Classifier", Watched)
    record_reads(48, 30)
    report = evaluate("blocks:2", tiny_encoder, "digits", epochs=2, blr=0.02, **BLOCKS)
    assert [row.encoder for row in report.results[:3]] == ["tiny", "untrained", "best constant"]
    assert {row.protocol for row in report.results} == {"blocks:2"} and report.headline.startswith("Probe of 2 blocks")
    vit, _ = load_encoder_file(tiny_encoder)
    assert torch.equal(made[0][0].encoder.norm.weight, vit.norm.weight) and len(made) == 2
    for model, before in made:
        changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
        assert {name.split(".")[0] for name in changed} == {"body", "norm", "head"}
        assert {name.split(".")[1] for name in changed if name.startswith("body")} == {"0", "1"}
    again = evaluate("blocks:2", tiny_encoder, "digits", epochs=2, blr=0.02, **BLOCKS)
    assert numbers(again.results) == numbers(report.results)


@pytest.mark.parametrize("protocol", ["blocks:1", "finetune"])
def test_digits_are_told_apart(tiny_encoder: Path, protocol: str) -> None:
    options = {"max_train": 200, "batch_size": 10, "blr": 0.05, "epochs": 8, "crop_scale": 1.0, "validation": 0.0}
    report = evaluate(protocol, tiny_encoder, "digits", control=False, **BLOCKS | options)
    assert report.results[0].value > 0.25 > 0.2 > report.results[-1].value and len(report.quoted) == 1


# Rates and weight decay of every parameter are those of MAE's program (util/lr_decay.py).


WEIGHT_DECAY = 0.05

# with two blocks and a decay of 0.5: the layer is 0 for what makes tokens of patches, 1 and 2 for the blocks, 3 above
STEM, FIRST, SECOND, TOP = 0.125, 0.25, 0.5, 1.0
BLOCK = {
    **{"norm1.weight": False, "norm1.bias": False, "attn.qkv.weight": True, "attn.qkv.bias": False},
    **{"attn.proj.weight": True, "attn.proj.bias": False, "norm2.weight": False, "norm2.bias": False},
    **{"mlp.fc1.weight": True, "mlp.fc1.bias": False, "mlp.fc2.weight": True, "mlp.fc2.bias": False},
}
# by name: the share of the peak rate, and whether weight decays
EVERYWHERE = {
    "encoder.patch_embed.proj.weight": (STEM, True),
    "encoder.patch_embed.proj.bias": (STEM, False),
    **{f"encoder.blocks.0.{name}": (FIRST, decays) for name, decays in BLOCK.items()},
    **{f"encoder.blocks.1.{name}": (SECOND, decays) for name, decays in BLOCK.items()},
    "encoder.norm.weight": (TOP, False),
    "encoder.norm.bias": (TOP, False),
    "head.weight": (TOP, True),
    "head.bias": (TOP, False),
}
CLASS = {"encoder.cls_token": (STEM, False)}
REGISTERS = {"encoder.reg_token": (STEM, False)}
TABLE = {"encoder.pos_embed": (STEM, False)}
BIASES = {
    "encoder.blocks.0.attn.rel_pos.relative_position_bias_table": (FIRST, False),
    "encoder.blocks.1.attn.rel_pos.relative_position_bias_table": (SECOND, False),
}


def rates(model: nn.Module) -> dict[str, tuple[float, bool]]:
    names, found = {id(weight): name for name, weight in model.named_parameters()}, {}
    for group in model.groups(WEIGHT_DECAY, 0.5):
        for weight in group["params"]:
            assert names[id(weight)] not in found and group["weight_decay"] in (0, WEIGHT_DECAY)
            found[names[id(weight)]] = (group["lr_scale"], group["weight_decay"] > 0)
    return found


@pytest.mark.parametrize("pooling", ["mean", "class"])
@pytest.mark.parametrize(
    ("had", "variant", "positions"),
    [("sincos", "keep", {}), ("learned", "keep", TABLE), ("random", "keep", {}), ("none", "keep", {})]
    + [("none", "fixed", {}), ("sincos", "learned", TABLE), ("none", "learned", TABLE)]
    + [("sincos", "relative", BIASES), ("sincos", "none", {})],
)
def test_every_form_of_positions(had: str, variant: Variant, positions: dict, pooling: Pool) -> None:
    vit, card = encoder(positions=had)
    assert rates(Classifier(with_variant(vit, card, variant), 5, pooling)) == EVERYWHERE | CLASS | positions


def test_tokens_and_norms() -> None:
    assert rates(Classifier(encoder(options=SMALL | {"class_token": False})[0], 5, "mean")) == EVERYWHERE
    assert rates(Classifier(encoder(options=SMALL | {"reg_tokens": 2})[0], 5, "mean")) == EVERYWHERE | CLASS | REGISTERS
    without, card = encoder(options=SMALL | {"class_token": False})
    assert rates(Classifier(with_variant(without, card, class_token=True), 5, "class")) == EVERYWHERE | CLASS
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=0, global_pool="avg", **SMALL
    )
    pooled = {name.replace("encoder.norm", "encoder.fc_norm"): rate for name, rate in EVERYWHERE.items()}
    assert rates(Classifier(vit, 5, "mean")) == pooled | CLASS | TABLE
    # MAE's program deletes the encoder's norm: what is unused must not wait for gradients
    fresh = {name.replace("encoder.norm", "norm"): rate for name, rate in EVERYWHERE.items()}
    assert rates(Classifier(encoder(options=SMALL | {"class_token": False})[0], 5, "mean", fresh_norm=True)) == fresh


@pytest.mark.parametrize(("had", "trained"), [("sincos", TABLE), ("random", TABLE), ("learned", TABLE), ("none", {})])
def test_kept_positions_can_be_trained(had: str, trained: dict) -> None:
    vit, card = encoder(positions=had)
    assert rates(Classifier(with_variant(vit, card, train_positions=True), 5, "mean")) == EVERYWHERE | CLASS | trained
    fixed = with_variant(vit, card, "fixed", train_positions=True)
    assert rates(Classifier(fixed, 5, "mean")) == EVERYWHERE | CLASS, "what was asked for as fixed stays so"


def test_what_is_on_the_encoder_has_the_full_rate() -> None:
    vit, _ = encoder(options=SMALL | {"class_token": False})
    head = InstanceHead(32, 2)
    stem = Stem.fresh(width=32, hidden=24, pooling="instance")
    on_it = {f"stem.0.{name}": name == "weight" for name in ("weight", "bias")}
    on_it |= {f"stem.1.{name}": False for name in ("weight", "bias")}
    on_it |= {f"instance.{name}": weight.ndim == 2 for name, weight in head.named_parameters()}
    found = rates(Classifier(vit, 5, "instance", instance=head, stem=stem))
    assert found == EVERYWHERE | {name: (TOP, decays) for name, decays in on_it.items()}
    assert found["instance.token"] == (TOP, False)


def test_blocks_on_a_frozen_encoder_and_decays_that_are_none() -> None:
    vit, _ = encoder()
    on_it = {f"body.{i}.{name}": decays for i in (0, 1) for name, decays in BLOCK.items()}
    on_it |= {"norm.weight": False, "norm.bias": False, "head.weight": True, "head.bias": False}
    found = rates(Classifier(vit, 5, "mean", body=fresh_blocks(vit, 2)))
    assert found == {name: (TOP, decays) for name, decays in on_it.items()}
    model = Classifier(encoder()[0], 5, "mean")
    assert {group["lr_scale"] for group in model.groups(WEIGHT_DECAY, 1.0)} == {1.0}
    assert not any(group["weight_decay"] for group in model.groups(0.0, 0.5))


# Ensembles are of classifiers that may be compared, and average what they say.

SQUARE = EncoderSpec("nano", (8, 8), 4, channels=1, options={"depth": 1, "embed_dim": 32, "num_heads": 2})
DIGITS = open_data("digits")
NAMES = DIGITS.train.classes


def saved(path: Path, draw: int, classes: tuple[str, ...] = NAMES, test: str = "", **about) -> Path:
    torch.manual_seed(draw)
    model = Classifier(build_encoder(SQUARE), len(classes), "mean")
    torch.nn.init.normal_(model.head.weight)
    card = EncoderCard(SQUARE, (0.3,), (0.37,), "mae", f"mae{draw}")
    about = {"data": "digits", "seed": 0, "settings": {}, "test": test or DIGITS.test.fingerprint()} | about
    save_classifier(model, ClassifierCard(card, "keep", "mean", classes, **about), path)
    return path


def test_a_model_with_itself_is_itself(tmp_path: Path) -> None:
    path = saved(tmp_path / "run" / "finetuned" / "digits-small-0.safetensors", 1)
    report = evaluate("ensemble", path, "digits", others=str(path), device="cpu")
    ensemble, one, other, majority = report.results[:4]
    assert ensemble.value == one.value == other.value and majority.encoder == "best constant"
    assert ensemble.settings == {"members": 2, "agreement": 1.0} and one.encoder == "mae1 (digits-small-0)"
    again = evaluate("ensemble", tmp_path / "run", "digits", others=[str(path)], device="cpu")
    assert numbers(again.results) == numbers(report.results)
    assert (tmp_path / "run" / store.FILE).exists()
    plan = evaluate("ensemble", path, "digits", others=str(path), device="cpu", dry_run=True)
    assert plan.results == [] and "would average mae1 (digits-small-0)" in plan.method


def test_three_models_are_averaged(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2, 3)]
    report = evaluate("ensemble", paths[0], "digits", others=f"{paths[1]},{paths[2]}", device="cpu")
    test = open_data("digits").test
    each = [predict_classes(*_loaded(path, test)) for path in paths]
    assert report.results[0].value == average(each).accuracy() and report.n_test == 360
    assert [row.value for row in report.results[1:4]] == [one.accuracy() for one in each]
    answers = torch.stack([one.logits.argmax(1) for one in each])
    same = (answers[[0, 0, 1]] == answers[[1, 2, 2]]).double().mean().item()
    assert report.results[0].settings == {"members": 3, "agreement": pytest.approx(same)} and 0 < same < 1


def _loaded(path: Path, test: Source) -> tuple:
    model, card = load_classifier(path)
    return model, test, card.encoder, settings.EvalSettings(device="cpu")


def test_the_mean_is_of_probabilities() -> None:
    labels = torch.tensor([0, 1])
    sure = ClassPredictions(torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), labels, [])
    unsure = ClassPredictions(torch.tensor([[0.0, 1.0, 0.0], [0.0, 9.0, 0.0]]), labels, [])
    mean = average([sure, unsure])
    expected = (sure.logits.softmax(1) + unsure.logits.softmax(1)) / 2
    torch.testing.assert_close(mean.logits.exp().float(), expected)
    assert mean.accuracy() == 1.0 and (sure.accuracy(), unsure.accuracy()) == (0.5, 0.5)


def test_wrong_pairs_are_refused_in_a_sentence(tmp_path: Path) -> None:
    good = saved(tmp_path / "good.safetensors", 1)
    hundred = saved(tmp_path / "hundred.safetensors", 2, tuple(f"c{i}" for i in range(100)), data="cifar100")
    letters = saved(tmp_path / "letters.safetensors", 2, tuple("abcdefghij"), data="letters")
    split = saved(tmp_path / "split.safetensors", 2, test="0" * 16, seed=3)
    (tmp_path / "broken.safetensors").write_bytes(good.read_bytes()[:500])
    for number in (1, 2):
        saved(tmp_path / "several" / "finetuned" / f"{number}.safetensors", number)
    for run, others, said in (
        (good, hundred, "100 classes of cifar100, and digits has 10"),
        (good, letters, "letters, with other class names"),
        (good, split, "another split .* --seed 3"),
        (good, "", "two or more classifiers"),
        (good, "nowhere", "no classifier at nowhere"),
        (tmp_path, good, "has no classifier of digits and seed 0"),
        (tmp_path / "several", good, "name one of 1.safetensors, 2.safetensors"),
        (tmp_path / "broken.safetensors", good, "cannot be read as a classifier"),
    ):
        with pytest.raises(PatchloomError, match=said):
            evaluate("ensemble", run, "digits", others=str(others), device="cpu")


def test_another_seed_splits_otherwise_where_there_is_no_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = DIGITS.train.subset(np.arange(100))
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(train, None))
    test = settings.parts_of("digits", settings.EvalSettings(seed=1)).test.fingerprint()
    path = saved(tmp_path / "one.safetensors", 1, test=test, seed=1)
    assert evaluate("ensemble", path, "digits", others=str(path), device="cpu", seed=1).n_test == 20
    with pytest.raises(PatchloomError, match="use the same data and --seed 1"):
        evaluate("ensemble", path, "digits", others=str(path), device="cpu")


# Few labels are few, of every class, and the same for the control.

QUICKLY = {"device": "cpu", "epochs": 2, "flip": False}
SQUARE_OF_2 = EncoderSpec("nano", (8, 8), 2, channels=1, options={"depth": 1, "embed_dim": 32, "num_heads": 2})
BARE = EncoderSpec("nano", (8, 8), 2, channels=1, options={**SQUARE_OF_2.options, "class_token": False})


def _run(folder: Path, task, spec: EncoderSpec, name: str) -> Path:
    beside = task.extra_modules()
    uses = {key: module.use for key, module in beside.items()}
    card = EncoderCard(spec, (0.3,), (0.37,), name, name, extra_modules=uses)
    save_encoder(task.encoder, card, folder / "encoder.safetensors")
    for key, module in beside.items():
        save_extra_module(module, folder / f"{key}.safetensors")
    return folder


def _extrema(folder: Path, class_token: str = "cait") -> tuple[Path, ExtreMA]:
    torch.manual_seed(0)
    spec = SQUARE_OF_2 if class_token == "vit" else BARE
    task = ExtreMA(build_encoder(spec), class_token=class_token, head_width=16, head_out=8)
    perturbed(task, 0.1)  # zero biases and equal scales would hide mistakes
    return _run(folder, task.eval(), spec, "extrema"), task


@pytest.mark.parametrize(("share", "count"), [(0.01, 14), (0.1, 144), (None, 144), (50, 50), (1.0, 1437)])
def test_a_share_has_every_class(share: float | None, count: int) -> None:
    parts = parts_of("digits", EvalSettings())
    some, what = subsample_training(parts, share, None, 0)
    assert len(some.train) == what["labelled"] == count and set(some.train.labels) == set(range(10))
    assert some.test is parts.test and f"A stratified {count:,} of 1,437 training images" in some.story
    assert what["labels"] == (share or 0.1)
    other = subsample_training(parts, share, None, 1)[0].train
    assert np.array_equal(other.indices, some.train.indices) == (count == 1437)
    some, what = subsample_training(parts, None, 3, 0)
    assert np.bincount(some.train.labels).tolist() == [3] * 10 and what == {"per_class": 3, "labelled": 30}


@pytest.fixture
def named(tmp_path: Path, draw: Callable[..., Path]) -> Path:
    for part, count in (("train", 4), ("test", 2)):
        for label in ("cat", "dog"):
            for name in (*(f"{label}_{i}.png" for i in range(count)), "same.png"):
                draw(f"data/{part}/{label}/{name}")
    return tmp_path / "data"


def test_a_list_names_the_labelled_images(named: Path, tmp_path: Path) -> None:
    """SimCLR's lists are names of files; with folders they are told apart."""
    parts, file = parts_of(str(named), EvalSettings()), tmp_path / "1percent.txt"
    file.write_text("cat_1.png\r\n\n./dog/dog_2.png\ntrain\\cat\\same.png\ncat_1.png\ncat_77.png\n")
    some, what = subsample_training(parts, str(file), None, 0)
    paths = [some.train.describe(i) for i in range(len(some.train))]
    assert sorted(Path(path).name for path in paths) == ["cat_1.png", "dog_2.png", "same.png"]
    assert all("/train/" in path for path in paths) and what == {"labels": "1percent.txt", "labelled": 3}
    assert "The 3 of 10 training images" in some.story and "1 of its 4 names are of no" in some.story
    file.write_text("cat_1.png\ncat_2.png\n")
    assert "1 of the 2 classes" in subsample_training(parts, str(file), None, 0)[0].story
    for text, said in (
        ("same.png\n", "same.png in .* names 2 training images"),
        ("bird.png\n", "names none of the 10 training images: .*cat_0.png"),
    ):
        file.write_text(text)
        assert re.search(said, refusal(subsample_training, parts, str(file), None, 0))


@pytest.mark.parametrize(
    ("share", "per_class", "said"),
    [
        (0.005, None, "7, fewer than the 10 classes: use --labels 0.007"),
        (1.5, None, "--labels must be a fraction above 0 and up to 1"),
        (50.5, None, "--labels must be a fraction above 0"),
        (9, None, "--labels 9 is fewer than the 10 classes"),
        (1438, None, "--labels 1,438 is more than the 1,437"),
        ("none.txt", None, "there is no file none.txt"),
        ("10%", None, "write 0.1 for a fraction"),
        (None, 145, "use --per_class 1"),
        (0.1, 2, "both set the number of labels"),
    ],
)
def test_refusals(share: float | str | None, per_class: int | None, said: str) -> None:
    assert said in refusal(subsample_training, parts_of("digits", EvalSettings()), share, per_class, 0)


def test_fine_tuning_sees_only_those(tiny_encoder: Path, record_reads) -> None:
    record = record_reads(120, 40)
    report = evaluate("few-shot", tiny_encoder, "digits", per_class=2, blr=0.02, **QUICKLY)
    assert record.count("test") == 80 and set(record[: record.index("test")]) == {"train"}  # tiny, and from scratch
    assert list(dict.fromkeys(row.encoder for row in report.results)) == ["tiny", "from scratch", "best constant"]
    assert report.results[0].settings.items() >= {"per_class": 2, "labelled": 20, "head_on": "features"}.items()
    assert report.headline.startswith("Fine-tuning with 20 labels (small): ")
    assert {row.protocol for row in report.results} == {"few-shot"}


@pytest.mark.usefixtures("quick_probe")
def test_the_linear_probe_is_that_of_frozen_features(tiny_encoder: Path) -> None:
    report = evaluate("few-shot", tiny_encoder, "digits", method="linear", labels=0.1, device="cpu")
    names = ["tiny", "untrained", "raw pixels", "best constant"]
    assert list(dict.fromkeys(row.encoder for row in report.results)) == names
    assert report.results[0].settings.items() >= {"labels": 0.1, "labelled": 144, "method": "linear"}.items()
    assert all(row in report.results for row in report.quoted) and {row.protocol for row in report.results} == {
        "few-shot"
    }
    assert report.headline.startswith("With 144 labels: Linear probe")
    assert next(row for row in report.quoted if row.encoder == "raw pixels").value > 0.8


@pytest.mark.parametrize("class_token", ["cait", "vit", "mean"])
def test_the_projections_first_layer_is_the_tasks_own(tmp_path: Path, class_token: str) -> None:
    run, task = _extrema(tmp_path, class_token)
    settings, digits = EvalSettings(device="cpu"), open_data("digits").train
    ours, _, fresh = open_subjects(run, settings, tuned=True, head=True)
    stem = load_stem(run, ours, settings)
    assert stem.pooling == {"cait": "instance", "vit": "class"}.get(class_token, "mean")
    card, parts = ours.card, Parts(digits, digits, "")
    build = candidate(ours._replace(stem=stem), "auto", parts, pooling=stem.pooling).build
    model, again = build(Recipe()).eval(), build(Recipe())
    images = normalize(torch.stack([digits.read(i) for i in range(5)]), card.mean, card.std)
    with torch.no_grad():
        expected = task.agreement.projection[:3](task.agreement.represent(task.encoder, all_patches(images, 16)))
        if class_token != "mean":  # there, the norm comes after the mean
            torch.testing.assert_close(model.stem(model.pooled(images)), expected)
        assert model(images).shape == (5, 10)
    assert torch.equal(model.stem[0].weight, task.agreement.projection[0].weight)
    assert model.stem[0].weight is not again.stem[0].weight
    untrained = fresh._replace(stem=Stem.fresh(**stem.sizes))
    scratch = candidate(untrained, "auto", parts, pooling=stem.pooling).build(Recipe())
    assert not torch.equal(scratch.stem[0].weight, model.stem[0].weight)
    assert scratch.stem[0].weight.shape == model.stem[0].weight.shape and scratch.pooling == model.pooling
    trained = {id(weight) for group in model.groups(0.05, 0.75) for weight in group["params"]}
    assert trained == {id(weight) for weight in model.parameters() if weight.requires_grad}


def test_a_head_on_the_projection_from_end_to_end(tmp_path: Path) -> None:
    run, _ = _extrema(tmp_path)
    options = {"head_on": "projection", "recipe": "extrema", "batch_size": 10, "per_class": 2, **QUICKLY}
    report = evaluate("few-shot", run, "digits", **options)
    assert report.results[0].pooling == report.results[1].pooling == "instance" and report.n_test == 360
    assert "projection's first layer" in report.method
    assert report.results[0].settings["pooling"] == "instance" and "fresh_norm" not in report.results[0].settings
    for name, value in {"pooling": "class", "fresh_norm": True}.items():
        assert f"leave --{name} out" in refusal(evaluate, "few-shot", run, "digits", **{name: value}, **options)
    (head,) = Path(run).rglob("instance_head.safetensors")
    head.unlink()
    assert "needs the instance head" in refusal(evaluate, "few-shot", run, "digits", **options)
    run = _run(tmp_path / "lut", LUT(build_encoder(SQUARE_OF_2), head_width=16, decoder_depth=1), SQUARE_OF_2, "lut")
    assert "task lut saved no projection" in refusal(evaluate, "few-shot", run, "digits", **options)
