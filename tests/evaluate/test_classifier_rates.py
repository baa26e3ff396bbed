"""Rate and weight decay of every parameter in fine-tuning are those of MAE's program (util/lr_decay.py)."""

import pytest
import timm
from torch import nn

from patchloom.evaluate.classifier import Classifier, Pool, fresh_blocks
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.finetune import Variant, with_variant
from patchloom.nets.heads import InstanceHead, mlp

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
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


def encoder(**changes) -> tuple:
    options = changes.pop("options", {})
    spec = EncoderSpec("nano", (8, 8), 4, channels=1, options=SMALL | options, **changes)
    return build_encoder(spec), EncoderCard(spec, (0.0,), (1.0,), "mae", "small")


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
    assert rates(Classifier(encoder(options={"class_token": False})[0], 5, "mean")) == EVERYWHERE
    assert rates(Classifier(encoder(options={"reg_tokens": 2})[0], 5, "mean")) == EVERYWHERE | CLASS | REGISTERS
    without, card = encoder(options={"class_token": False})
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
    assert rates(Classifier(encoder(options={"class_token": False})[0], 5, "mean", fresh_norm=True)) == fresh


@pytest.mark.parametrize(("had", "trained"), [("sincos", TABLE), ("random", TABLE), ("learned", TABLE), ("none", {})])
def test_kept_positions_can_be_trained(had: str, trained: dict) -> None:
    vit, card = encoder(positions=had)
    assert rates(Classifier(with_variant(vit, card, train_positions=True), 5, "mean")) == EVERYWHERE | CLASS | trained
    fixed = with_variant(vit, card, "fixed", train_positions=True)
    assert rates(Classifier(fixed, 5, "mean")) == EVERYWHERE | CLASS, "what was asked for as fixed stays so"


def test_what_is_on_the_encoder_has_the_full_rate() -> None:
    vit, _ = encoder(options={"class_token": False})
    head = InstanceHead(32, 2)
    stem = mlp((32, 24, 1), "layer")[:3]
    on_it = {f"stem.0.{name}": name == "weight" for name in ("weight", "bias")}
    on_it |= {f"stem.1.{name}": False for name in ("weight", "bias")}
    on_it |= {f"instance.{name}": weight.ndim == 2 for name, weight in head.named_parameters()}
    found = rates(Classifier(vit, 5, "instance", instance=head, stem=stem, width=24))
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
