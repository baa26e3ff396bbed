"""Weights for another grid, patch size, or number of channels: results equal timm's."""

import pytest
import timm
import torch
from published import NAME, TINY, by_timm, ours, same, theirs, written
from timm.models import swin_transformer
from timm.models._builder import load_pretrained
from timm.models.vision_transformer import checkpoint_filter_fn
from torch.nn import functional as F

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.fit import load_published
from patchloom.nets.checkpoints.resize import resize_input

SWIN = "swin_tiny_patch4_window7_224"


@pytest.mark.parametrize(
    "options", [{}, {"reg_tokens": 2}, {"reg_tokens": 2, "no_embed_class": True}, {"class_token": False}]
)
@pytest.mark.parametrize(("size", "patch"), [((32, 32), 4), ((8, 24), 4), ((16, 16), 8), ((48, 24), 6)])
def test_another_grid_or_patch_size_equals_timm(tmp_path, options, size, patch):
    pooling = {"global_pool": ""} if "class_token" in options else {}
    source, vit = theirs(**options, **pooling), ours(size, patch, **options)
    done = load_published(vit, written(tmp_path / "weights.pth", source.state_dict()))
    expected = by_timm(source, img_size=size, patch_size=patch, **options, **pooling)
    same(vit, expected, torch.randn(2, 3, *size), 1e-6)
    grid = f"{size[0] // patch}x{size[1] // patch}"
    changes = [f"pos_embed: from a grid of 4x4 to {grid}"] if grid != "4x4" else []
    if patch != 4:
        changes.insert(0, f"patch_embed.proj.weight: from patches of 4x4 to {patch}x{patch} pixels")
    assert done.resampled == tuple(changes) and not done.missing and not done.unexpected


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_other_channels_equal_timm(tmp_path, channels):
    source, vit = theirs(), ours(channels=channels)
    path = written(tmp_path / "weights.pth", source.state_dict())
    done = load_published(vit, path)
    how = "as their sum" if channels == 1 else f"repeated in turn, times 3/{channels}"
    assert done.resampled == (f"patch_embed.proj.weight: from 3 channels to {channels}, {how}",)
    expected = timm.create_model(NAME, img_size=16, patch_size=4, in_chans=channels, num_classes=0, **TINY).eval()
    cfg = {"file": str(path), "first_conv": "patch_embed.proj", "classifier": None, "num_classes": 0}
    load_pretrained(expected, cfg, num_classes=0, in_chans=channels, filter_fn=checkpoint_filter_fn)
    same(vit, expected, torch.randn(2, channels, 16, 16), 1e-6)


@pytest.mark.parametrize("size", [(8, 16), (8, 24), (8, 32)])  # one less than a square, none, and one
@pytest.mark.parametrize("options", [{}, {"no_embed_class": True}])
def test_an_unknown_grid_is_the_encoders_if_the_number_of_patches_fits(tmp_path, size, options):
    n = size[1] // 2
    path = written(tmp_path / "oblong.pth", theirs(size, **options).state_dict())
    changes = f"pos_embed: for {n} patches in a grid that is not stated, taken for 2x{n // 2}"
    vit = ours(size, **options)
    assert load_published(vit, path).resampled == (changes,)
    same(vit, theirs(size, **options), torch.randn(1, 3, *size))
    if options:
        vit = ours(size)
        assert load_published(vit, path).resampled == (changes, "pos_embed: zero for cls_token")
        same(vit, theirs(size, **options), torch.randn(1, 3, *size), 1e-6)


@pytest.mark.parametrize("positions", ["learned", "sincos"])  # fixed ones show their grid, if it is square
@pytest.mark.parametrize(("old", "new"), [((2, 8), (4, 4)), ((4, 4), (2, 8))])
def test_grids_of_as_many_patches_are_resampled(old, new, positions):
    """timm before 1.0.29 left the positions of a square grid as they were: its lower bound in pyproject.toml."""
    source, vit = (ours((4 * rows, 4 * columns), positions=positions) for rows, columns in (old, new))
    if positions == "learned":
        torch.nn.init.normal_(source.pos_embed)
    like = None if positions == "sincos" and old == (4, 4) else source
    done = load_published(vit, "other weights", dict(source.state_dict()), like=like)
    picture = source.pos_embed[:, -16:].unflatten(1, old).movedim(-1, 1)
    wanted = F.interpolate(picture, new, mode="bicubic", antialias=True).flatten(2).mT
    assert done.resampled == (f"pos_embed: from a grid of {old[0]}x{old[1]} to {new[0]}x{new[1]}",)
    resize_input(source, (4 * new[0], 4 * new[1]))
    for one in (vit, source):
        torch.testing.assert_close(one.pos_embed[:, -16:], wanted)
        assert one.pos_embed.requires_grad == (positions == "learned")


@pytest.mark.parametrize("size", [(64, 96), (128, 128)])
def test_a_swin_of_another_size_equals_timm(tmp_path, size):
    own = {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
    torch.manual_seed(0)
    source = timm.create_model(SWIN, img_size=64, patch_size=4, num_classes=0, **own)
    for name, value in source.named_parameters():
        if "bias_table" in name:
            torch.nn.init.normal_(value)
    vit = build_encoder(EncoderSpec(SWIN, size, 8, positions="none", options=own)).eval()
    load_published(vit, written(tmp_path / "swin.pth", source.state_dict()))
    expected = timm.create_model(SWIN, img_size=size, patch_size=8, num_classes=0, **own).eval()
    # timm before 1.0.30 takes weights without a head for old ones, whose downsamplings have other names
    headed = source.state_dict() | {"head.fc.weight": torch.zeros(1)}
    resized = swin_transformer.checkpoint_filter_fn(headed, expected)
    expected.load_state_dict({name: value for name, value in resized.items() if not name.startswith("head.")})
    same(vit, expected, torch.randn(1, 3, *size), 1e-5)


def test_the_position_of_a_token_is_added_to_the_token(tmp_path):
    images = torch.randn(2, 3, 16, 16)
    source, vit = theirs(reg_tokens=2), ours(reg_tokens=2, no_embed_class=True)
    done = load_published(vit, written(tmp_path / "with.pth", source.state_dict()))
    same(vit, source, images, 1e-6)
    where = "with its entry of pos_embed, because this encoder has no place for it"
    assert done.resampled == (f"cls_token: {where}", f"reg_token: {where}")

    source, vit = theirs(no_embed_class=True), ours()
    done = load_published(vit, written(tmp_path / "without.pth", source.state_dict()))
    same(vit, source, images, 1e-6)
    assert done.resampled == ("pos_embed: zero for cls_token",)


def test_deits_distilled_token_is_left_out(tmp_path):
    torch.manual_seed(0)
    source = timm.create_model("deit_tiny_distilled_patch16_224", img_size=16, patch_size=4, num_classes=0, **TINY)
    vit = ours()
    done = load_published(vit, written(tmp_path / "deit.pth", source.state_dict()))
    assert done.unexpected == ("dist_token",) and done.resampled == ("pos_embed: without the entry of dist_token",)
    assert torch.equal(vit.pos_embed, source.pos_embed[:, [0, *range(2, 18)]])
