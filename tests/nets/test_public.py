"""Published weights: timm's own result is the oracle, nothing is left out silently, and no pickle is run."""

import argparse
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models._builder import load_pretrained
from timm.models.vision_transformer import checkpoint_filter_fn

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import patch_positions
from patchloom.nets.public import Matched, load_public, public_shape
from patchloom.nets.weights import EncoderCard, load_encoder, save_encoder

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2}
NAME = "vit_tiny_patch16_224"


def theirs(img_size=16, patch_size=4, seed=0, **options):
    """A ViT of timm's, with no weight at zero or one."""
    torch.manual_seed(seed)
    vit = timm.create_model(
        NAME, img_size=img_size, patch_size=patch_size, **({"num_classes": 0} | TINY | options)
    ).eval()
    with torch.no_grad():
        for weight in vit.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return vit


def ours(img_size=16, patch_size=4, channels=3, positions="learned", **options):
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    torch.manual_seed(7)
    return build_encoder(EncoderSpec(NAME, size, patch_size, channels, positions, TINY | options)).eval()


def written(path: Path, state) -> Path:
    """A file with a state dict, or with whatever it lies in."""
    if path.suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    else:
        torch.save(state, path)
    return path


def same(one, other, images, tolerance=0.0):
    with torch.inference_mode():
        torch.testing.assert_close(one.forward_features(images), other.forward_features(images), rtol=0, atol=tolerance)


def by_timm(source, **arguments):
    """What timm makes of the weights for other sizes, on its own path."""
    vit = timm.create_model(NAME, **({"num_classes": 0} | TINY | arguments)).eval()
    vit.load_state_dict(checkpoint_filter_fn(dict(source.state_dict()), vit), strict=False)
    return vit


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pt", "bin", "pth.tar"])
@pytest.mark.parametrize(
    "options", [{}, {"reg_tokens": 2}, {"reg_tokens": 2, "no_embed_class": True}, {"class_token": False}]
)
def test_the_same_architecture_gives_the_very_same_features(tmp_path, suffix, options):
    source = theirs(**options, **({"global_pool": ""} if "class_token" in options else {}))
    vit, drawn = ours(**options), torch.random.get_rng_state()
    done = load_public(vit, written(tmp_path / f"weights.{suffix}", source.state_dict()))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    same(vit, source, torch.randn(2, 3, 16, 16))
    assert set(done.matched) == set(source.state_dict()) and done[2:] == ((), (), ())
    assert done.sentences() == [
        f"Weights from {tmp_path}/weights.{suffix}: {len(done.matched)} matched, 0 missing, "
        "0 unexpected, 0 resampled or adapted."
    ]


@pytest.mark.parametrize(
    "options", [{}, {"reg_tokens": 2}, {"reg_tokens": 2, "no_embed_class": True}, {"class_token": False}]
)
@pytest.mark.parametrize(("size", "patch"), [((32, 32), 4), ((8, 24), 4), ((16, 16), 8), ((48, 24), 6)])
def test_another_grid_or_patch_size_gives_what_timm_gives(tmp_path, options, size, patch):
    pooling = {"global_pool": ""} if "class_token" in options else {}
    source, vit = theirs(**options, **pooling), ours(size, patch, **options)
    done = load_public(vit, written(tmp_path / "weights.pth", source.state_dict()))
    expected = by_timm(source, img_size=size, patch_size=patch, **options, **pooling)
    same(vit, expected, torch.randn(2, 3, *size), 1e-6)
    grid = f"{size[0] // patch}x{size[1] // patch}"
    told = [f"pos_embed: from a grid of 4x4 to {grid}"] if grid != "4x4" else []
    if patch != 4:
        told.insert(0, f"patch_embed.proj.weight: from patches of 4x4 to {patch}x{patch} pixels")
    assert done.resampled == tuple(told) and not done.missing and not done.unexpected


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_other_channels_give_what_timm_gives(tmp_path, channels):
    source, vit = theirs(), ours(channels=channels)
    path = written(tmp_path / "weights.pth", source.state_dict())
    done = load_public(vit, path)
    assert done.resampled == (f"patch_embed.proj.weight: from 3 channels to {channels}",)
    expected = timm.create_model(NAME, img_size=16, patch_size=4, in_chans=channels, num_classes=0, **TINY).eval()
    cfg = {"file": str(path), "first_conv": "patch_embed.proj", "classifier": None, "num_classes": 0}
    load_pretrained(expected, cfg, num_classes=0, in_chans=channels, filter_fn=checkpoint_filter_fn)
    same(vit, expected, torch.randn(2, channels, 16, 16), 1e-6)


def test_only_weights_for_colour_images_are_adapted_to_other_channels(tmp_path):
    grey = theirs(in_chans=1)
    with pytest.raises(PatchloomError, match="proj.weight is 32x1x4x4 there and 32x3x4x4 here: give --channels 1"):
        load_public(ours(), written(tmp_path / "grey.pth", grey.state_dict()))
    with pytest.raises(PatchloomError, match="32x2x4x4 there and 32x5x4x4 here: give --channels 2"):
        load_public(ours(channels=5), written(tmp_path / "two.pth", theirs(in_chans=2).state_dict()))


def test_timm_is_asked_by_name(tmp_path, monkeypatch):
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
    done = load_public(vit, f"timm:{NAME}.augreg_in21k_ft_in1k")
    assert torch.equal(torch.random.get_rng_state(), drawn)
    expected = create(NAME, pretrained=True, num_classes=0, img_size=64, pretrained_cfg_overlay={"file": str(path)})
    same(vit, expected.eval(), torch.randn(1, 3, 64, 64), 1e-6)
    assert done.resampled == ("pos_embed: from a grid of 14x14 to 4x4",) and not done.missing + done.unexpected
    assert done.source == f"timm:{NAME}.augreg_in21k_ft_in1k"


def test_a_name_that_timm_does_not_know_or_we_cannot_serve_is_refused_before_anything_is_fetched(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *given, **also: create(*given, **also | {"pretrained": False}))
    for name, said in {"vit_huge_nonsense": "timm has no model called", "swin_tiny_patch4_window7_224": "Swin"}.items():
        for call in (lambda name: load_public(ours(), f"timm:{name}"), lambda name: public_shape(f"timm:{name}")):
            with pytest.raises(PatchloomError, match=said):
                call(name)


def card(spec):
    return EncoderCard(spec, (0.5,) * 3, (0.5,) * 3, "mae", "one")


@pytest.mark.parametrize("positions", ["sincos", "learned", "none"])
def test_a_run_of_ours_is_a_source(tmp_path, positions):
    spec = EncoderSpec("nano", (16, 32), 4, 3, positions, TINY)
    torch.manual_seed(0)
    source = build_encoder(spec).eval()
    save_encoder(source, card(spec), tmp_path / "encoder.safetensors")
    for place in (tmp_path, str(tmp_path / "encoder.safetensors")):
        vit = build_encoder(spec).eval()
        done = load_public(vit, place)
        same(vit, source, torch.randn(1, 3, 16, 32))
        assert not done.missing + done.unexpected + done.resampled
        assert public_shape(place) == {"name": "nano", "patch_size": 4, "positions": positions, "options": TINY}
    assert load_encoder(tmp_path)[1].spec == spec

    # the card tells the grid: 32 patches are 4x8 there, and 8x4 here
    vit = build_encoder(replace(spec, img_size=(32, 16))).eval()
    done = load_public(vit, tmp_path)
    told = () if positions == "none" else ("pos_embed: from a grid of 4x8 to 8x4",)
    assert done.resampled == told and not done.missing + done.unexpected
    if positions == "sincos":
        assert not vit.pos_embed.requires_grad


@pytest.mark.parametrize("size", [(8, 16), (8, 24), (8, 32)])  # one less than a square, none, and one
@pytest.mark.parametrize("options", [{}, {"no_embed_class": True}])
def test_a_grid_that_is_not_told_is_the_encoders_if_it_has_as_many_patches(tmp_path, size, options):
    n = size[1] // 2
    path = written(tmp_path / "oblong.pth", theirs(size, **options).state_dict())
    told = f"pos_embed: for {n} patches in a grid that is not stated, taken for 2x{n // 2}"
    vit = ours(size, **options)
    assert load_public(vit, path).resampled == (told,)
    same(vit, theirs(size, **options), torch.randn(1, 3, *size))
    if options:
        vit = ours(size)
        assert load_public(vit, path).resampled == (told, "pos_embed: zero for cls_token")
        same(vit, theirs(size, **options), torch.randn(1, 3, *size), 1e-6)


def test_a_grid_that_cannot_be_told_is_refused(tmp_path):
    odd = written(tmp_path / "odd.pth", theirs((8, 24)).state_dict())
    with pytest.raises(PatchloomError, match="pos_embed in .*odd.pth has 13 entries, and no square grid"):
        load_public(ours(), odd)


WRAPPINGS = {
    "model": lambda state: {"model": state, "epoch": 3},
    "state_dict": lambda state: {"state_dict": OrderedDict(state), "args": argparse.Namespace(lr=1.0)},
    "deep": lambda state: {"checkpoint": {"net": {"ema": state}}},
    "module": lambda state: {f"module.{name}": value for name, value in state.items()},
    "module.backbone": lambda state: {"model": {f"module.backbone.{name}": value for name, value in state.items()}},
    "any": lambda state: {"x": {f"a.b.vit_3.{name}": value for name, value in state.items()}},
}


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_wrappings_and_prefixes_are_found(tmp_path, kind):
    source, vit = theirs(), ours()
    done = load_public(vit, written(tmp_path / "weights.pth", WRAPPINGS[kind](dict(source.state_dict()))))
    same(vit, source, torch.randn(1, 3, 16, 16))
    assert not done.missing + done.unexpected + done.resampled
    place = {"deep": "checkpoint.net.ema", "module.backbone": "model.module.backbone", "any": "x.a.b.vit_3"}
    assert done.source == f"{tmp_path}/weights.pth ({place.get(kind, kind)})"


@pytest.mark.parametrize("nested", [True, False])
def test_of_student_and_teacher_the_teacher_is_taken_and_the_rest_is_told(tmp_path, nested):
    student, teacher = theirs(seed=1).state_dict(), theirs(seed=2).state_dict()
    head = {"head.mlp.0.weight": torch.zeros(3, 3)}
    states = {
        "student": {f"module.backbone.{name}": value for name, value in student.items()},
        "teacher": {f"backbone.{name}": value for name, value in teacher.items()} | head,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}},
    }
    if not nested:
        states = {f"{path}.{name}": value for path, part in states.items() for name, value in part.items()}
        states = {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
    vit = ours()
    done = load_public(vit, written(tmp_path / "weights.pth", states))
    same(vit, theirs(seed=2), torch.randn(1, 3, 16, 16))
    assert done.source.endswith("weights.pth (teacher.backbone)") and not done.missing
    if nested:
        expected = ("head.mlp.0.weight", f"{len(student)} tensors of student", "2 tensors of optimizer")
        assert done.unexpected == expected
    else:
        assert len(done.unexpected) == len(student) + 1


def test_a_decoder_with_as_many_blocks_is_not_the_encoder(tmp_path):
    source, other = theirs(seed=1), theirs(seed=2, embed_dim=16, img_size=24)
    state = {f"predictor.{name}": value for name, value in other.state_dict().items()}
    state |= {f"encoder.{name}": value for name, value in source.state_dict().items()}
    vit = ours()
    assert load_public(vit, written(tmp_path / "weights.pth", state)).source.endswith("(encoder)")
    same(vit, source, torch.randn(1, 3, 16, 16))


def test_what_is_missing_and_unexpected_is_told_by_name(tmp_path):
    source = theirs(num_classes=5, depth=3)
    vit = ours(reg_tokens=2, init_values=0.1)
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    done = load_public(vit, written(tmp_path / "weights.pth", source.state_dict()))
    assert done.missing == ("reg_token", *(f"blocks.{i}.ls{j}.gamma" for i in range(2) for j in (1, 2)))
    assert done.unexpected[-2:] == ("head.weight", "head.bias") and done.unexpected[0].startswith("blocks.2.")
    assert done.resampled == ("pos_embed: zero for reg_token",)
    for name, value in vit.state_dict().items():
        if name in done.missing:
            assert torch.equal(value, before[name])
        elif name != "pos_embed":
            assert torch.equal(value, source.state_dict()[name])
    counts, missing, unexpected, resampled = done.sentences()
    assert "30 matched, 5 missing, 14 unexpected, 1 resampled" in counts
    assert missing == f"Missing there, so as initialised: {', '.join(done.missing)}."
    assert unexpected == f"Unexpected, so left out: {', '.join(done.unexpected[:8])}, and 6 more."
    assert resampled == "Resampled or adapted: pos_embed: zero for reg_token."


def test_an_encoder_without_positions_or_class_token_leaves_them(tmp_path):
    path = written(tmp_path / "weights.pth", theirs().state_dict())
    assert load_public(ours(positions="none"), path).unexpected == ("pos_embed",)
    vit = ours(class_token=False)
    done = load_public(vit, path)
    assert done.unexpected == ("cls_token",) and done.resampled == ("pos_embed: without the entry of cls_token",)
    assert torch.equal(vit.pos_embed, theirs().pos_embed[:, 1:])


def test_the_entry_of_a_token_goes_where_it_has_the_same_effect(tmp_path):
    images = torch.randn(2, 3, 16, 16)
    source, vit = theirs(reg_tokens=2), ours(reg_tokens=2, no_embed_class=True)
    done = load_public(vit, written(tmp_path / "with.pth", source.state_dict()))
    same(vit, source, images, 1e-6)
    where = "with its entry of pos_embed, where this encoder has no place for it"
    assert done.resampled == (f"cls_token: {where}", f"reg_token: {where}")

    source, vit = theirs(no_embed_class=True), ours()
    done = load_public(vit, written(tmp_path / "without.pth", source.state_dict()))
    same(vit, source, images, 1e-6)
    assert done.resampled == ("pos_embed: zero for cls_token",)


def test_deits_distilled_token_is_left_out(tmp_path):
    torch.manual_seed(0)
    source = timm.create_model("deit_tiny_distilled_patch16_224", img_size=16, patch_size=4, num_classes=0, **TINY)
    vit = ours()
    done = load_public(vit, written(tmp_path / "deit.pth", source.state_dict()))
    assert done.unexpected == ("dist_token",) and done.resampled == ("pos_embed: without the entry of dist_token",)
    assert torch.equal(vit.pos_embed, source.pos_embed[:, [0, *range(2, 18)]])


def test_fixed_positions_stay_fixed(tmp_path):
    source, vit = theirs(), ours(positions="sincos")
    load_public(vit, written(tmp_path / "weights.pth", source.state_dict()))
    assert torch.equal(patch_positions(vit), patch_positions(source)) and not vit.pos_embed.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(tmp_path, dtype):
    state = {name: value.to(dtype) for name, value in theirs().state_dict().items()}
    vit = ours()
    load_public(vit, written(tmp_path / "weights.pth", state))
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
        ({"norm.bias": torch.zeros(31)}, r"norm.bias is 31 there and 32 here: give the --model of which"),
        ({"norm.bias": torch.tensor(1.0)}, r"norm.bias is a scalar there and 32 here"),
        ({"pos_embed": torch.zeros(17, 32)}, r"pos_embed is 17x32 there and 1x17x32 here"),
        ({"pos_embed": torch.zeros(1, 15, 32)}, "pos_embed in .* has 15 entries"),
        ({"pos_embed": torch.zeros(1, 0, 32)}, "pos_embed in .* has 0 entries"),
        ({"cls_token": torch.zeros(1, 1, 31)}, "cls_token is 1x1x31 there and 1x1x32 here"),
        ({"patch_embed.proj.weight": torch.zeros(32, 48)}, "patch_embed.proj.weight is 32x48 there"),
        ({"blocks.0.mlp.fc1.weight": torch.zeros(64, 32)}, "give --model.mlp_ratio 2"),
    ],
)
def test_a_weight_that_cannot_be_used_is_refused_by_name_and_nothing_changes(tmp_path, change, said):
    state = dict(theirs().state_dict()) | change
    path = written(tmp_path / "weights.pth", {f"module.{name}": value for name, value in state.items()})
    vit = ours()
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    with pytest.raises(PatchloomError, match=said) as refusal:
        load_public(vit, path)
    assert "\n" not in str(refusal.value)
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())


def test_what_is_not_taken_may_be_of_any_kind(tmp_path):
    strange = {"head.weight": torch.tensor([torch.nan]), "tracked": torch.tensor(3), "mask": torch.tensor([True])}
    done = load_public(ours(), written(tmp_path / "weights.pth", dict(theirs().state_dict()) | strange))
    assert done.unexpected == tuple(strange)


def test_another_width_is_refused_with_advice(tmp_path):
    wide = timm.create_model("vit_small_patch16_224", num_classes=0, depth=1)
    path = written(tmp_path / "small.pth", wide.state_dict())
    with pytest.raises(
        PatchloomError, match="cls_token is 1x1x384 there and 1x1x32 here: the width there is 384, here"
    ) as refusal:
        load_public(ours(depth=1), path)
    assert "32: give --model vit_small_patch16_224, or --model.embed_dim 384 with" in str(refusal.value)
    path = written(tmp_path / "odd.pth", theirs(embed_dim=40).state_dict())
    with pytest.raises(PatchloomError, match="the width there is 40, here 32: give --model.embed_dim 40"):
        load_public(ours(), path)
    path = written(tmp_path / "registers.pth", theirs(reg_tokens=3).state_dict())
    with pytest.raises(PatchloomError, match="give --model.reg_tokens 3"):
        load_public(ours(reg_tokens=2), path)


def test_foreign_names_and_too_few_blocks_are_refused(tmp_path):
    state = {f"vit.layer.{i}.weight": torch.zeros(3) for i in range(5)}
    with pytest.raises(
        PatchloomError,
        match="0 of the 24 weights .* are like vit.layer.0.weight, vit.layer.1.weight, vit.layer.2.weight, "
        "and timm's, like blocks.0.norm1.weight, are expected",
    ):
        load_public(ours(), written(tmp_path / "foreign.pth", state))
    with pytest.raises(PatchloomError, match="has 2 blocks and this encoder 5: give --model.depth 2"):
        load_public(ours(depth=5), written(tmp_path / "shallow.pth", theirs().state_dict()))
    half = load_public(ours(depth=4), tmp_path / "shallow.pth")
    assert len(half.missing) == 24 and half.missing[0] == "blocks.2.norm1.weight"
    for nothing in ({}, {"epoch": 3}, torch.zeros(3), [torch.zeros(3)]):
        with pytest.raises(PatchloomError, match="empty.pth holds no tensors"):
            load_public(ours(), written(tmp_path / "empty.pth", nothing))


class Bomb:
    """Touches a file when a pickle of it is run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Call(Bomb):
    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("kind", [Bomb, Call])
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_a_pickle_is_never_run(tmp_path, monkeypatch, kind, raw, forced):
    if forced:  # torch's own way around its safeguard does not count here
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    bomb, path = tmp_path / "bomb", tmp_path / "weights.pth"
    hostile = dict(theirs().state_dict()) | {"head": kind(bomb)}
    if raw:
        path.write_bytes(pickle.dumps(kind(bomb)))
    else:
        torch.save(hostile, path)
    with pytest.raises(PatchloomError, match="and was not loaded: save its state_dict alone") as refusal:
        load_public(ours(), path)
    assert "\n" not in str(refusal.value) and not bomb.exists()
    assert argparse.Namespace not in torch.serialization.get_safe_globals()
    if raw:
        pickle.loads(path.read_bytes())  # the test would notice
        assert bomb.exists()


class Odd:
    """Becomes an OrderedDict on which ``items`` is a number."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return OrderedDict, (), {"items": 3}, None, iter(self.state.items())


def test_a_dict_with_other_attributes_is_a_dict(tmp_path):
    vit = ours()
    load_public(vit, written(tmp_path / "odd.pth", {"model": Odd(theirs().state_dict())}))
    same(vit, theirs(), torch.randn(1, 3, 16, 16))


def test_damaged_files_are_refused_in_one_sentence(tmp_path):
    whole = {suffix: written(tmp_path / f"whole.{suffix}", theirs().state_dict()) for suffix in ("pth", "safetensors")}
    cases = {}
    for suffix, path in whole.items():
        content = path.read_bytes()
        cases |= {f"cut.{suffix}": content[: len(content) // 2], f"empty.{suffix}": b"", f"text.{suffix}": b"hello\n"}
    cases["short.pth"] = whole["pth"].read_bytes()[:3]
    cases["renamed.pth"] = whole["safetensors"].read_bytes()
    itself: dict = {}
    itself["again"] = itself
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    written(tmp_path / "itself.pth", itself)
    (tmp_path / "folder.pth").mkdir()
    for name in (*cases, "itself.pth", "folder.pth", "absent.pth"):
        with pytest.raises(PatchloomError, match=name) as refusal:
            load_public(ours(), tmp_path / name)
        assert "\n" not in str(refusal.value), name


def test_what_sources_say_of_their_model(tmp_path):
    assert public_shape("timm:vit_small_patch16_224.augreg_in1k") == {
        "name": "vit_small_patch16_224",
        "patch_size": 16,
        "positions": "learned",
        "options": {},
    }
    assert public_shape(written(tmp_path / "weights.pth", theirs().state_dict())) is None
    assert public_shape(written(tmp_path / "weights.safetensors", theirs().state_dict())) is None
    with pytest.raises(PatchloomError, match="there is no encoder at .*absent.pth"):
        public_shape(tmp_path / "absent.pth")


def test_few_lines_tell_it():
    names = tuple(f"n{i}" for i in range(9))
    done = Matched("here", names, names[:8], names, ())
    assert done.sentences() == [
        "Weights from here: 9 matched, 8 missing, 9 unexpected, 0 resampled or adapted.",
        "Missing there, so as initialised: n0, n1, n2, n3, n4, n5, n6, n7.",
        "Unexpected, so left out: n0, n1, n2, n3, n4, n5, n6, n7, and 1 more.",
    ]
