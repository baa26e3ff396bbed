"""Published weights: results equal timm's, and every omission is reported."""

import re
from dataclasses import replace

import pytest
import timm
import torch
from packaging.version import Version
from published import NAME, TINY, ours, same, theirs, written
from refusing import refusal

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.fit import load_published
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.nets.checkpoints.origin import Weights, kind_of, public_shape


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pt", "bin", "pth.tar"])
def test_the_same_architecture_gives_identical_features(tmp_path, suffix):
    source, vit, drawn = theirs(), ours(), torch.random.get_rng_state()
    done = load_published(vit, written(tmp_path / f"weights.{suffix}", source.state_dict()))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    same(vit, source, torch.randn(2, 3, 16, 16))
    assert set(done.matched) == set(source.state_dict()) and done[2:5] == ((), (), ())
    assert done.source == f"{tmp_path}/weights.{suffix}"
    assert f"{len(done.matched)} matched, 0 missing" in str(done.sentences())


def test_a_link_is_of_the_kind_of_its_file(tmp_path):
    spec = EncoderSpec("nano", (8, 8), 4, options={"embed_dim": 16, "depth": 1, "num_heads": 2})
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.5,) * 3, (0.5,) * 3, "mae", "x"), tmp_path / "a.safetensors")
    (link := tmp_path / "link.safetensors").symlink_to("a.safetensors")
    assert kind_of(link) == "patchloom"


@pytest.mark.skipif(Version(timm.__version__) < Version("1.0.31"), reason="its files that are named are NumPy's alone")
def test_timm_weights_load_by_name(tmp_path, monkeypatch):
    torch.manual_seed(0)
    source = timm.create_model(NAME).eval()
    torch.nn.init.normal_(source.pos_embed)
    path, create = written(tmp_path / "fetched.safetensors", source.state_dict()), timm.create_model

    def offline(model_name, pretrained=False, **arguments):
        overlay = {"pretrained_cfg_overlay": {"file": str(path)}} if pretrained else {}
        return create(model_name, pretrained=pretrained, **overlay, **arguments)

    monkeypatch.setattr(timm, "create_model", offline)
    vit = build_encoder(EncoderSpec(NAME, (64, 64), 16, positions="learned")).eval()
    drawn = torch.random.get_rng_state()
    done = load_published(vit, f"timm:{NAME}.augreg_in21k_ft_in1k")
    assert torch.equal(torch.random.get_rng_state(), drawn)
    expected = create(NAME, pretrained=True, num_classes=0, img_size=64, pretrained_cfg_overlay={"file": str(path)})
    same(vit, expected.eval(), torch.randn(1, 3, 64, 64), 1e-6)
    assert done.resampled == ("pos_embed: from a grid of 14x14 to 4x4",) and not done.missing + done.unexpected
    assert done.source == f"timm:{NAME}.augreg_in21k_ft_in1k"


@pytest.mark.parametrize(
    ("name", "said"),
    [("vit_huge_nonsense", "timm has no model called"), ("swinv2_tiny_window8_256", "SwinTransformerV2")],
)
def test_unknown_or_unsupported_names_are_rejected_before_fetching(monkeypatch, name, said):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *given, **also: create(*given, **also | {"pretrained": False}))
    for read in (lambda source: load_published(ours(), source), lambda source: public_shape(Weights(source))):
        assert said in refusal(read, f"timm:{name}")


def card(spec):
    return EncoderCard(spec, (0.5,) * 3, (0.5,) * 3, "mae", "one")


@pytest.mark.parametrize("positions", ["sincos", "learned", "none"])
def test_a_run_is_a_source(tmp_path, positions):
    spec = EncoderSpec("nano", (16, 32), 4, 3, positions, TINY)
    torch.manual_seed(0)
    source = build_encoder(spec).eval()
    save_encoder(source, card(spec), tmp_path / "encoder.safetensors")
    for place in (tmp_path, str(tmp_path / "encoder.safetensors")):
        vit = build_encoder(spec).eval()
        done = load_published(vit, place)
        same(vit, source, torch.randn(1, 3, 16, 32))
        assert not done.missing + done.unexpected + done.resampled
        sizes = {"patch_size": 4, "img_size": (16, 32), "channels": 3, "positions": positions}
        assert public_shape(Weights(place)) == {"name": "nano", "options": TINY} | sizes
    assert load_encoder_file(tmp_path)[1].spec == spec

    # the card has the grid: 32 patches are 4x8 there, and 8x4 here
    vit = build_encoder(replace(spec, img_size=(32, 16))).eval()
    done = load_published(vit, tmp_path)
    changes = () if positions == "none" else ("pos_embed: from a grid of 4x8 to 8x4",)
    assert done.resampled == changes and not done.missing + done.unexpected
    if positions == "sincos":
        assert not vit.pos_embed.requires_grad


def test_missing_and_unexpected_weights_are_named(tmp_path):
    source = theirs(num_classes=5, depth=3)
    vit = ours(reg_tokens=2, init_values=0.1)
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    done = load_published(vit, written(tmp_path / "weights.pth", source.state_dict()))
    assert done.missing == ("reg_token", *(f"blocks.{i}.ls{j}.gamma" for i in range(2) for j in (1, 2)))
    assert done.unexpected[-2:] == ("head.weight", "head.bias") and done.unexpected[0].startswith("blocks.2.")
    assert done.resampled == ("pos_embed: zero for reg_token",)
    for name, value in vit.state_dict().items():
        if name in done.missing:
            assert torch.equal(value, before[name])
        elif name != "pos_embed":
            assert torch.equal(value, source.state_dict()[name])
    counts, start, missing, unexpected, resampled = done.sentences()
    assert "30 matched, 5 missing, 14 unexpected, 1 resampled" in counts
    assert "NOT the encoder" in start and "blocks.2.norm1.weight and 11 more" in start
    assert f": {', '.join(done.missing)}." in missing and done.resampled[0] in resampled
    assert f": {', '.join(done.unexpected[:8])}, and 6 more." in unexpected


def test_another_number_of_heads_is_refused_wherever_it_is_stated(tmp_path):
    spec = EncoderSpec(NAME, (16, 16), 4, positions="learned", options=TINY)  # with 2 heads
    save_encoder(ours(), card(spec), tmp_path / "encoder.safetensors")
    assert not load_published(ours(), tmp_path).missing
    with pytest.raises(PatchloomError, match="has 2 attention heads, and this encoder 4: give --model.num_heads 2"):
        load_published(ours(num_heads=4), tmp_path)


@pytest.mark.parametrize(
    ("there", "here", "lost"),
    [
        ({"pre_norm": True}, {}, "norm_pre.weight"),
        ({"scale_attn_norm": True}, {}, "blocks.0.attn.norm.weight"),
        ({"scale_mlp_norm": True}, {}, "blocks.0.mlp.norm.weight"),
        ({}, {"qkv_bias": False}, "blocks.0.attn.qkv.bias"),
    ],
)
def test_parts_that_change_the_blocks_are_lost(tmp_path, there, here, lost):
    done = load_published(ours(**here), written(tmp_path / "weights.pth", theirs(**there).state_dict()))
    assert lost in done.lost and any("NOT the encoder" in line for line in done.sentences())


def test_unused_weights_of_other_parts_and_of_any_type_are_not_lost(tmp_path):
    more = {f"{part}.0.attn.qkv.bias": torch.zeros(96) for part in ("decoder_blocks", "predictor_blocks")}
    more |= {"head.weight": torch.tensor([torch.nan]), "tracked": torch.tensor(3), "mask": torch.tensor([True])}
    done = load_published(ours(), written(tmp_path / "weights.pth", theirs().state_dict() | more))
    assert not done.lost and done.unexpected == tuple(more)


def test_positions_and_class_token_are_left_out_without_a_place(tmp_path):
    path = written(tmp_path / "weights.pth", theirs().state_dict())
    assert load_published(ours(positions="none"), path).unexpected == ("pos_embed",)
    vit = ours(class_token=False)
    done = load_published(vit, path)
    assert done.unexpected == ("cls_token",) and done.resampled == ("pos_embed: without the entry of cls_token",)
    assert torch.equal(vit.pos_embed, theirs().pos_embed[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(tmp_path, dtype):
    state = {name: value.to(dtype) for name, value in theirs().state_dict().items()}
    vit = ours()
    load_published(vit, written(tmp_path / "weights.pth", state))
    assert all(torch.equal(value, state[name].float()) for name, value in vit.state_dict().items())
    assert {value.dtype for value in vit.state_dict().values()} == {torch.float32}


HUGE = torch.full((32,), 1e300, dtype=torch.float64)


@pytest.mark.parametrize(
    ("source", "change", "here", "said"),
    [
        ({}, {"norm.weight": torch.full((32,), torch.nan)}, {}, "module.norm.weight in .* not finite"),
        ({}, {"norm.bias": HUGE}, {}, "module.norm.bias in .* not finite"),
        ({}, {"norm.bias": torch.zeros(32, dtype=torch.int8)}, {}, "torch.int8, not floating-point"),
        ({}, {"norm.bias": torch.zeros(31)}, {}, "norm.bias is 31 there and 32 here: give the --model"),
        ({}, {"norm.bias": torch.tensor(1.0)}, {}, "norm.bias is a scalar there and 32 here"),
        ({}, {"pos_embed": torch.zeros(17, 32)}, {}, "pos_embed is 17x32 there and 1x17x32 here"),
        ({}, {"pos_embed": torch.zeros(1, 15, 32)}, {}, "pos_embed in .* has 15 entries"),
        ({"img_size": (8, 24)}, {}, {}, "has 13 entries, which fit no square grid"),
        ({}, {"cls_token": torch.zeros(1, 1, 31)}, {}, "cls_token is 1x1x31 there and 1x1x32 here"),
        ({}, {"patch_embed.proj.weight": torch.zeros(32, 48)}, {}, "proj.weight is 32x48 there"),
        ({"in_chans": 1}, {}, {}, "32x1x4x4 there and 32x3x4x4 here: give --channels 1"),
        ({"in_chans": 2}, {}, {"channels": 5}, "32x2x4x4 there and 32x5x4x4 here: give --channels 2"),
        ({"mlp_ratio": 2}, {}, {}, "give --model.mlp_ratio 2"),
        ({"reg_tokens": 3}, {}, {"reg_tokens": 2}, "give --model.reg_tokens 3"),
        ({"embed_dim": 40}, {}, {}, "the width there is 40, here 32: give --model.embed_dim 40"),
        ({"embed_dim": 40}, {"rope.freqs": torch.zeros(4)}, {}, "give its name in timm, such as --model vit_small"),
        ({"embed_dim": 384, "depth": 1}, {}, {"depth": 1}, "--model vit_small_patch16_224, or --model.embed_dim 384"),
        ({}, {}, {"depth": 5}, "has 2 blocks and this encoder 5: give --model.depth 2"),
    ],
)
def test_unusable_weights_are_rejected_by_name_and_nothing_changes(tmp_path, source, change, here, said):
    state = dict(theirs(**source).state_dict()) | change
    path = written(tmp_path / "weights.pth", {f"module.{name}": value for name, value in state.items()})
    vit = ours(**here)
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    assert re.search(said, refusal(load_published, vit, path))
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())


def test_foreign_names_are_rejected(tmp_path):
    state = {f"vit.layer.{i}.weight": torch.zeros(3) for i in range(5)}
    with pytest.raises(
        PatchloomError, match="0 of the 24 weights .* like vit.layer.0.weight, .* blocks.0.norm1.weight"
    ):
        load_published(ours(), written(tmp_path / "foreign.pth", state))
    for nothing in ({}, {"epoch": 3}, torch.zeros(3), [torch.zeros(3)]):
        assert "empty.pth holds no tensors" in refusal(load_published, ours(), written(tmp_path / "empty.pth", nothing))


def test_public_shape_of_every_kind_of_source(tmp_path):
    stock = {"name": "vit_small_patch16_224", "patch_size": 16, "positions": "learned", "options": {}}
    assert public_shape(Weights("timm:vit_small_patch16_224.augreg_in1k")) == stock
    for suffix in ("pth", "safetensors"):
        assert public_shape(Weights(written(tmp_path / f"weights.{suffix}", theirs().state_dict()))) is None
    with pytest.raises(PatchloomError, match="there is no encoder at .*absent.pth"):
        Weights(tmp_path / "absent.pth")


@pytest.mark.parametrize(
    ("model", "sign"),
    [
        ("vit_small_patch16_rope_ape_224", "scales called gamma_1"),
        ("vit_small_patch16_rope_224", "scales called gamma_1"),
        ("vit_small_patch16_rope_mixed_ape_224", "rotations of queries and keys"),
        ("vit_small_patch16_dinov3", "rotations of queries and keys"),
        ("eva02_small_patch14_224", "gated MLPs"),
        ("vit_pe_core_small_patch16_384", "a norm before the blocks"),
        ("vit_base_patch16_clip_224", "a norm before the blocks"),
    ],
)
def test_bare_weights_of_other_models_are_not_read_as_a_plain_vit(tmp_path, model, sign):
    vit = timm.create_model(model, num_classes=0, depth=1, embed_dim=384, num_heads=6)
    torch.save(vit.state_dict(), tmp_path / "bare.pth")
    for read in (public_shape, Weights.encoder_spec):
        with pytest.raises(PatchloomError, match=f"weights alone, with {sign}: give its name in timm by --model"):
            read(Weights(tmp_path / "bare.pth"))
    if "clip" not in model:
        assert public_shape(Weights(tmp_path / "bare.pth"), model)["name"] == model
