"""Fine-tuning: variants of the encoder, learning rates of every parameter, and classifiers on files."""

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from evaluating import numbers
from refusing import refusal
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from torch import nn

from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import classification, features, settings
from patchloom.evaluate.classification import begin_classifier, predict_classes
from patchloom.evaluate.classifier import Classifier, Pool, fresh_blocks, load_classifier, read_classifier, variant_of
from patchloom.evaluate.protocols import blocks, evaluate
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import temporary_seed
from patchloom.nets import performance
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.nets.encode import grid_size, patch_positions
from patchloom.nets.finetune import RelativeAttention, Variant, with_variant
from patchloom.nets.heads import InstanceHead, Stem
from patchloom.pace import Pace
from patchloom.results import store
from patchloom.results.evaluation import Evaluation

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
    """A folder with an encoder for digits of 8 x 8."""
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


# Blocks on a frozen encoder.


BLOCKS = {"device": "cpu", "flip": False}


def test_the_encoder_stays_as_it_is(tiny_encoder: Path, record_reads, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Watched(Classifier):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append((self, {name: weight.clone() for name, weight in self.state_dict().items()}))

    monkeypatch.setattr(blocks, "Classifier", Watched)
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
    """By name: the share of the peak rate, and whether weight decays."""
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


def test_tokens() -> None:
    assert rates(Classifier(encoder(options=SMALL | {"class_token": False})[0], 5, "mean")) == EVERYWHERE
    assert rates(Classifier(encoder(options=SMALL | {"reg_tokens": 2})[0], 5, "mean")) == EVERYWHERE | CLASS | REGISTERS
    without, card = encoder(options=SMALL | {"class_token": False})
    assert rates(Classifier(with_variant(without, card, class_token=True), 5, "class")) == EVERYWHERE | CLASS


def test_a_norm_after_the_pooling_is_the_top_and_takes_no_layer_of_its_own() -> None:
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=0, global_pool="avg", **SMALL
    )
    pooled = {name.replace("encoder.norm", "encoder.fc_norm"): rate for name, rate in EVERYWHERE.items()}
    assert rates(Classifier(vit, 5, "mean")) == pooled | CLASS | TABLE


def test_a_fresh_norm_has_the_full_rate_and_replaces_the_encoders() -> None:
    """MAE's program deletes the encoder's norm; what is unused here must not wait for gradients."""
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


def test_blocks_on_a_frozen_encoder_have_the_full_rate() -> None:
    vit, _ = encoder()
    on_it = {f"body.{i}.{name}": decays for i in (0, 1) for name, decays in BLOCK.items()}
    on_it |= {"norm.weight": False, "norm.bias": False, "head.weight": True, "head.bias": False}
    found = rates(Classifier(vit, 5, "mean", body=fresh_blocks(vit, 2)))
    assert found == {name: (TOP, decays) for name, decays in on_it.items()}


def test_a_layer_decay_of_one_is_none_and_so_is_a_weight_decay_of_zero() -> None:
    model = Classifier(encoder()[0], 5, "mean")
    assert {group["lr_scale"] for group in model.groups(WEIGHT_DECAY, 1.0)} == {1.0}
    assert not any(group["weight_decay"] for group in model.groups(0.0, 0.5))
