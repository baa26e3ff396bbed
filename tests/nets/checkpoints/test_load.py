"""Published weights: results equal timm's, and every omission is reported."""

from dataclasses import replace

import pytest
import timm
import torch
from packaging.version import Version
from published import NAME, TINY, ours, same, theirs, written

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder, stock_encoder
from patchloom.nets.checkpoints.load import LoadedWeights, Weights, load_pretrained, load_published, public_shape


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pt", "bin", "pth.tar"])
@pytest.mark.parametrize(
    "options", [{}, {"reg_tokens": 2}, {"reg_tokens": 2, "no_embed_class": True}, {"class_token": False}]
)
def test_the_same_architecture_gives_identical_features(tmp_path, suffix, options):
    source = theirs(**options, **({"global_pool": ""} if "class_token" in options else {}))
    vit, drawn = ours(**options), torch.random.get_rng_state()
    done = load_published(vit, written(tmp_path / f"weights.{suffix}", source.state_dict()))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    same(vit, source, torch.randn(2, 3, 16, 16))
    assert set(done.matched) == set(source.state_dict()) and done[2:5] == ((), (), ())
    assert done.sentences() == [
        f"Weights from {tmp_path}/weights.{suffix}: {len(done.matched)} matched, 0 missing, "
        "0 unexpected, 0 resampled or adapted."
    ]


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


def test_unknown_or_unsupported_names_are_rejected_before_fetching(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *given, **also: create(*given, **also | {"pretrained": False}))
    for name, said in {
        "vit_huge_nonsense": "timm has no model called",
        "swinv2_tiny_window8_256": "SwinTransformerV2",
    }.items():
        for call in (
            lambda name: load_published(ours(), f"timm:{name}"),
            lambda name: public_shape(Weights(f"timm:{name}")),
        ):
            with pytest.raises(PatchloomError, match=said):
                call(name)


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
        assert public_shape(Weights(place)) == {
            "name": "nano",
            "patch_size": 4,
            "img_size": (16, 32),
            "channels": 3,
            "positions": positions,
            "options": TINY,
        }
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
    assert start.startswith("This is NOT the encoder that was trained, only a start: it has blocks.2.norm1.weight and ")
    assert "30 matched, 5 missing, 14 unexpected, 1 resampled" in counts
    assert missing == f"Missing there, kept as initialised: {', '.join(done.missing)}."
    assert unexpected == f"Unexpected, left out: {', '.join(done.unexpected[:8])}, and 6 more."
    assert resampled == "Resampled or adapted: pos_embed: zero for reg_token."


def test_another_number_of_heads_is_refused_wherever_it_is_stated(tmp_path):
    spec = EncoderSpec(NAME, (16, 16), 4, positions="learned", options=TINY)  # with 2 heads
    card = EncoderCard(spec, (0.5,) * 3, (0.5,) * 3, "mae", "a")
    save_encoder(ours(), card, tmp_path / "encoder.safetensors")
    assert not load_published(ours(), tmp_path).missing
    said = "has 2 attention heads, and this encoder 4: give --model.num_heads 2, or leave out --model and its options"
    with pytest.raises(PatchloomError, match=said):
        load_published(ours(num_heads=4), tmp_path)


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"pre_norm": True}, "norm_pre.weight"),
        ({"scale_attn_norm": True}, "blocks.0.attn.norm.weight"),
        ({"scale_mlp_norm": True}, "blocks.0.mlp.norm.weight"),
        ({}, "blocks.0.attn.qkv.bias"),
    ],
)
def test_parts_that_change_the_blocks_are_lost(tmp_path, options, lost):
    path = written(tmp_path / "weights.pth", theirs(**options).state_dict())
    done = load_published(ours(**({} if options else {"qkv_bias": False})), path)
    assert lost in done.lost and any("NOT the encoder" in line for line in done.sentences())


def test_names_like_those_of_blocks_elsewhere_are_not_lost(tmp_path):
    state = theirs().state_dict()
    more = {f"{part}.0.attn.qkv.bias": torch.zeros(96) for part in ("decoder_blocks", "predictor_blocks")}
    assert not load_published(ours(), written(tmp_path / "weights.pth", state | more)).lost


@pytest.mark.parametrize("lost", ["blocks.0.ls1.gamma", "blocks.1.attn.rel_pos.relative_position_bias_table"])
def test_an_encoder_that_lost_parts_of_its_blocks_is_not_evaluated(tmp_path, lost):
    state = {name: torch.zeros(value.shape) for name, value in stock_encoder(NAME).state_dict().items()}
    path = written(tmp_path / "weights.pth", state | {lost: torch.ones(3)})
    with pytest.raises(PatchloomError, match=f"{lost}, for which this encoder has no .* Use it with pretrain"):
        load_pretrained(path, NAME)


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm.weight": torch.full((32,), torch.nan)}, "module.norm.weight in .* not finite"),
        ({"cls_token": torch.full((1, 1, 32), -torch.inf)}, "module.cls_token in .* not finite"),
        ({"norm.bias": torch.full((32,), 1e300, dtype=torch.float64)}, "module.norm.bias in .* not finite"),
        ({"norm.bias": torch.zeros(32, dtype=torch.int8)}, "module.norm.bias in .* is torch.int8, not floating-point"),
        ({"norm.bias": torch.zeros(32, dtype=torch.complex64)}, "is torch.complex64, not floating-point"),
        ({"norm.bias": torch.zeros(31)}, r"norm.bias is 31 there and 32 here: give the --model"),
        ({"norm.bias": torch.tensor(1.0)}, r"norm.bias is a scalar there and 32 here"),
        ({"pos_embed": torch.zeros(17, 32)}, r"pos_embed is 17x32 there and 1x17x32 here"),
        ({"pos_embed": torch.zeros(1, 15, 32)}, "pos_embed in .* has 15 entries"),
        ({"pos_embed": torch.zeros(1, 0, 32)}, "pos_embed in .* has 0 entries"),
        ({"cls_token": torch.zeros(1, 1, 31)}, "cls_token is 1x1x31 there and 1x1x32 here"),
        ({"patch_embed.proj.weight": torch.zeros(32, 48)}, "patch_embed.proj.weight is 32x48 there"),
        ({"blocks.0.mlp.fc1.weight": torch.zeros(64, 32)}, "give --model.mlp_ratio 2"),
    ],
)
def test_unusable_weights_are_rejected_by_name_and_nothing_changes(tmp_path, change, said):
    state = dict(theirs().state_dict()) | change
    path = written(tmp_path / "weights.pth", {f"module.{name}": value for name, value in state.items()})
    vit = ours()
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    with pytest.raises(PatchloomError, match=said) as refusal:
        load_published(vit, path)
    assert "\n" not in str(refusal.value)
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())


def test_unused_weights_may_be_of_any_type(tmp_path):
    strange = {"head.weight": torch.tensor([torch.nan]), "tracked": torch.tensor(3), "mask": torch.tensor([True])}
    done = load_published(ours(), written(tmp_path / "weights.pth", dict(theirs().state_dict()) | strange))
    assert done.unexpected == tuple(strange)


def test_another_width_is_rejected_with_advice(tmp_path):
    wide = timm.create_model("vit_small_patch16_224", num_classes=0, depth=1)
    path = written(tmp_path / "small.pth", wide.state_dict())
    with pytest.raises(
        PatchloomError, match="cls_token is 1x1x384 there and 1x1x32 here: the width there is 384, here"
    ) as refusal:
        load_published(ours(depth=1), path)
    assert "32: give --model vit_small_patch16_224, or --model.embed_dim 384 with" in str(refusal.value)
    path = written(tmp_path / "odd.pth", theirs(embed_dim=40).state_dict())
    with pytest.raises(PatchloomError, match="the width there is 40, here 32: give --model.embed_dim 40"):
        load_published(ours(), path)
    path = written(tmp_path / "registers.pth", theirs(reg_tokens=3).state_dict())
    with pytest.raises(PatchloomError, match="give --model.reg_tokens 3"):
        load_published(ours(reg_tokens=2), path)


def test_foreign_names_and_too_few_blocks_are_rejected(tmp_path):
    state = {f"vit.layer.{i}.weight": torch.zeros(3) for i in range(5)}
    with pytest.raises(
        PatchloomError,
        match="0 of the 24 weights .* are like vit.layer.0.weight, vit.layer.1.weight, vit.layer.2.weight, "
        "and timm's, like blocks.0.norm1.weight, are expected",
    ):
        load_published(ours(), written(tmp_path / "foreign.pth", state))
    with pytest.raises(PatchloomError, match="has 2 blocks and this encoder 5: give --model.depth 2"):
        load_published(ours(depth=5), written(tmp_path / "shallow.pth", theirs().state_dict()))
    with pytest.raises(PatchloomError, match="has 2 blocks and this encoder 3: give --model.depth 2"):
        load_published(ours(depth=3), tmp_path / "shallow.pth")
    for nothing in ({}, {"epoch": 3}, torch.zeros(3), [torch.zeros(3)]):
        with pytest.raises(PatchloomError, match="empty.pth holds no tensors"):
            load_published(ours(), written(tmp_path / "empty.pth", nothing))


def test_public_shape_of_every_kind_of_source(tmp_path):
    assert public_shape(Weights("timm:vit_small_patch16_224.augreg_in1k")) == {
        "name": "vit_small_patch16_224",
        "patch_size": 16,
        "positions": "learned",
        "options": {},
    }
    assert public_shape(Weights(written(tmp_path / "weights.pth", theirs().state_dict()))) is None
    assert public_shape(Weights(written(tmp_path / "weights.safetensors", theirs().state_dict()))) is None
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
        with pytest.raises(
            PatchloomError, match=rf"holds weights alone, with {sign}: give its name in timm by --model"
        ):
            read(Weights(tmp_path / "bare.pth"))
    if "clip" not in model:
        assert public_shape(Weights(tmp_path / "bare.pth"), model)["name"] == model


def test_long_reports_are_shortened():
    names = tuple(f"n{i}" for i in range(9))
    done = LoadedWeights("here", names, names[:8], names, ())
    assert done.sentences() == [
        "Weights from here: 9 matched, 8 missing, 9 unexpected, 0 resampled or adapted.",
        "Missing there, kept as initialised: n0, n1, n2, n3, n4, n5, n6, n7.",
        "Unexpected, left out: n0, n1, n2, n3, n4, n5, n6, n7, and 1 more.",
    ]
