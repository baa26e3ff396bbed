"""Construction of encoders: sizes, options, positions and initial weights; everything else is rejected by name."""

import re

import pytest
import timm
import torch
from refusing import refusal
from swins import DEEP, spec_of, swin
from torch.utils._python_dispatch import TorchDispatchMode

from patchloom.nets.build import (
    EncoderSpec,
    build_encoder,
    check_model_options,
    check_servable,
    initialized_as,
    models_like,
    outline,
    rotates,
    served_like,
    spec_of_stock,
    swin_sizes,
)
from patchloom.nets.encode import attention_heads, heads_by_stage, input_size, patch_count, patch_positions
from patchloom.nets.geometry import Geometry
from patchloom.patches.positions import sincos_1d, sincos_2d

ROTARY = "vit_small_patch16_dinov3"


class Noted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_an_outline_has_the_sizes_of_its_encoder_and_draws_no_numbers():
    for positions in ("sincos", "learned"):
        spec = EncoderSpec("nano", (32, 32), 8, 3, positions, {})
        with Noted() as noted:
            made = outline(spec)
        assert not noted.names & {"uniform_", "normal_", "clamp", "clamp_", "erfinv", "erfinv_", "fill_"}
        shapes = [
            {name: (one.shape, one.requires_grad) for name, one in vit.named_parameters()}
            for vit in (made, build_encoder(spec))
        ]
        assert shapes[0] == shapes[1] and all(one.is_meta for one in made.parameters())


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "no_embed_class": True}])
def test_position_embeddings(options):
    vit = build_encoder(EncoderSpec("nano", (16, 32), 8, options=options))
    torch.testing.assert_close(patch_positions(vit), sincos_2d(128, (2, 4)))
    assert not vit.pos_embed.requires_grad and not vit.pos_embed[:, :-8].any()
    assert vit.pos_embed.shape[1] == 8 + (0 if options else 1)
    learned = build_encoder(EncoderSpec("nano", (16, 32), 8, positions="sincos-learned", options=options))
    assert torch.equal(learned.pos_embed, vit.pos_embed) and learned.pos_embed.requires_grad
    for positions in ("learned", "random"):
        other = build_encoder(EncoderSpec("nano", (16, 32), 8, positions=positions, options=options))
        assert other.pos_embed.std().item() == pytest.approx(0.02, rel=0.2)
        assert other.pos_embed.requires_grad == (positions == "learned")
    frames = build_encoder(EncoderSpec("nano", (40, 98), (40, 1), 1, options=options))
    torch.testing.assert_close(patch_positions(frames), sincos_1d(128, torch.arange(98)))


@pytest.mark.parametrize(("how", "std"), [("xavier", (2 / (192 + 128)) ** 0.5), ("normal", 0.02)])
def test_initial_weights(how, std):
    with initialized_as(how):
        vit = build_encoder(EncoderSpec("nano", (32, 32), 8, options={"reg_tokens": 4}))
    project = vit.patch_embed.proj
    assert project.weight.std().item() == pytest.approx(std, rel=0.05) and not project.bias.any()
    assert not vit.blocks[0].mlp.fc1.bias.any() and bool((vit.blocks[0].norm1.weight == 1).all())
    assert torch.cat([vit.cls_token, vit.reg_token], 1).std().item() == pytest.approx(0.02, rel=0.15)


def test_options_have_one_name_in_all_models():
    sizes = {"embed_dim": 32, "depth": 1, "num_heads": 2, "reg_tokens": 2, "class_token": False, "pre_norm": True}
    for model in ("nano", ROTARY):
        vit = build_encoder(EncoderSpec(model, (32, 32), 8, positions="learned", options=sizes))
        assert vit.reg_token.shape[1] == 2 and vit.cls_token is None and vit.pos_embed is not None
        assert not isinstance(vit.norm_pre, torch.nn.Identity)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", ROTARY, "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224"]
)
def test_a_stock_model_is_built_again_from_its_spec(name):
    stock = timm.create_model(name, num_classes=0)
    again = outline(spec_of_stock(stock, f"{name}.tag"))
    assert {key: one.shape for key, one in stock.named_parameters()} == {
        key: one.shape for key, one in again.named_parameters()
    }


def test_usual_positions_and_units_of_models():
    found = [rotates(name) for name in ("auto", "nano", ROTARY, "vit_small_patch16_rope_ape_224")]
    assert found == [None, None, "rotary", "sincos"]
    assert swin_sizes("swin_tiny_patch4_window7_224", {}) == (4, 8) and swin_sizes("nano", {}) is None
    assert swin_sizes("swin-nano", {}) == (None, 4) and swin_sizes("swin-nano", {"depths": [1, 1]}) == (None, 2)


def test_sizes_of_encoders():
    oblong = EncoderSpec("nano", (24, 20), (6, 4), 2, options={"reg_tokens": 2})
    assert oblong.grid == (4, 5)
    vit = Geometry((4, 5), (6, 4), 2, prefix=3, width=128, has_class_token=True, entry=128, positions="fixed", depth=6)
    units = Geometry(
        (2, 3),
        (8, 8),
        3,
        prefix=0,
        width=32,
        has_class_token=False,
        entry=8,
        hierarchical=True,
        positions="fixed",
        depth=3,
    )
    for net, sizes, heads in ((build_encoder(oblong), vit, [4]), (swin((16, 24), **DEEP), units, [1, 2, 2])):
        assert Geometry.of(net) == sizes and sizes.size == input_size(net) and sizes.n == patch_count(net)
        assert sizes.patch_dim == sizes.channels * sizes.p[0] * sizes.p[1] and sizes.token_width == sizes.entry
        assert heads_by_stage(net) == heads and attention_heads(net) == heads[-1]


def test_similar_names_are_those_of_supported_models_small_ones_first():
    assert models_like("swin_tiny") == ["swin_tiny_patch4_window7_224"]
    tiny, *small = models_like("dinov3")
    assert tiny.startswith("vit_tiny") and len(small) == 2 and all(name.startswith("vit_small") for name in small)
    assert models_like("timm:vit") == [] and models_like("nanno", own=("nano",)) == ["nano"]
    assert served_like("resnet50") == "" and served_like("vit_base_patch16_sapiens2").startswith("vit_base_patch16")
    assert served_like("vit_huge_plus_patch16_dinov3.lvd1689m") == "vit_huge_plus_patch16_dinov3.lvd1689m"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        # names
        (EncoderSpec("vit_tinny_patch16_224", (224, 224), 16), "did you mean vit_tiny_patch16_224"),
        (EncoderSpec("os.system", (224, 224), 16), "no model is called"),
        (EncoderSpec("resnet50", (224, 224), 16), "ResNet"),
        (EncoderSpec("eva02_enormous_patch14_clip_224", (224, 224), 16), "EvaBlockPostNorm"),
        (EncoderSpec("deit_tiny_distilled_patch16_224", (224, 224), 16), "VisionTransformerDistilled"),
        (EncoderSpec("swinv2_tiny_window8_256", (256, 256), 4, positions="none"), "SwinTransformerV2"),
        # sizes
        (EncoderSpec("nano", (100, 96), 16), "16 pixels do not divide images of 100x96: .* such as 96"),
        (EncoderSpec("nano", (50, 97), (40, 2)), "40x2 pixels do not divide images of 50x97: .* such as 40x96"),
        (EncoderSpec("nano", (32, 32), 8, options={"num_heads": 7}), "timm cannot build"),
        (EncoderSpec("nano", (32, 32), 8, options={"embed_dim": 6, "num_heads": 2}), "divisible by 4, not 6"),
        # positions
        (EncoderSpec(ROTARY, (32, 32), 8, positions="none"), "--positions rotary"),
        (EncoderSpec("vit_tiny_patch16_224", (32, 32), 8, positions="rotary"), "--positions sincos"),
        (EncoderSpec("eva_giant_patch14_224", (32, 32), 8, positions="rotary"), "--positions sincos"),
        # Swin
        (EncoderSpec("swin-nano", (32, 32), 2), "leave out --positions sincos"),
        (spec_of((30, 32)), "units of 4 pixels, .* do not divide images of 30x32: .* preferably of 8"),
        (spec_of((32, 30)), "units of 4 pixels"),
        (spec_of(embed_dim=6, num_heads=[1, 2]), "divisible by 4, not 6"),
        (spec_of(always_partition=True), "always_partition of the model is set by patchloom"),
        (spec_of(num_heads=3), "--model.num_heads 3 does not fit a Swin of 2 stages: .* such as '.1, 2.'"),
        (spec_of(num_heads=[1, 2, 4]), "num_heads .1, 2, 4. does not fit a Swin of 2 stages"),
        (
            EncoderSpec("swin-nano", (32, 32), 1, positions="none", options={"depths": [2] * 4}),
            "num_heads, which are 3 in swin-nano, do not fit 4 stages",
        ),
        (spec_of(class_token=True), "timm cannot build swin_tiny_patch4_window7_224"),
    ],
)
def test_unsupported_models_and_sizes_are_rejected(spec, said):
    assert re.search(said, refusal(build_encoder, spec))


@pytest.mark.parametrize(
    ("model", "options", "part"),
    [
        ("vit_tiny_patch16_224", {"block_fn": timm.models.vision_transformer.ResPostBlock}, "ResPostBlock"),
        ("vit_tiny_patch16_224", {"patch_drop_rate": 0.5}, "patch_drop_rate"),
        ("vit_large_patch16_sapiens2", {}, "grouped-query"),
        ("vit_base_patch16_sapiens2", {}, "random rotations"),
    ],
)
def test_parts_that_would_not_be_reproduced_are_rejected(model, options, part):
    with torch.device("meta"):
        stock = timm.create_model(model, num_classes=0, **options)
    assert part in refusal(check_servable, stock, model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"img_size": 32}, "img_size of the model is set by patchloom"),
        ({"dept": 2}, "no option dept"),
        ({"depth": "2"}, "model.depth"),
        ({"depth": 0}, "--model.depth"),
        ({"drop_path_rate": 1.0}, "--model.drop_path_rate"),
        ({"checkpoint_path": "/etc/passwd"}, "no option checkpoint_path"),
    ],
)
def test_other_options_are_rejected(options, said):
    check_model_options(
        {"depth": 1000, "reg_tokens": 0, "drop_path_rate": 0.99, "depths": [1, 1], "num_heads": 3, "mlp_ratio": None}
    )
    assert said in refusal(check_model_options, options)
