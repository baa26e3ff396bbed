"""Eva encoders: equal to timm on all patches and on subsets, blind to withheld rotations, weights under any names."""

import json
from copy import deepcopy

import pytest
import timm
import torch
from refusing import refusal
from safetensors.torch import save_file

from patchloom.dense.backbone import Windows, tokens_after
from patchloom.evaluate.protocols.positions import PositionProbe, without_positions
from patchloom.nets.attention import attention_each
from patchloom.nets.build import EncoderSpec, build_encoder, rotates
from patchloom.nets.checkpoints.fit import load_pretrained, load_published
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.origin import Weights, public_shape
from patchloom.nets.checkpoints.resize import resize_input
from patchloom.nets.encode import (
    attend,
    embed,
    encode,
    has_positions,
    has_rotations,
    patch_layers,
    patch_rotations,
    pooled_norm,
    prefix_count,
    rotations,
    rotations_at,
)
from patchloom.nets.finetune import with_variant
from patchloom.nets.performance import fuse_attention
from patchloom.nets.sparse_attention import query_block
from patchloom.patches.partition import random_partition
from patchloom.patches.tokens import patchify, unpatchify
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.mixture import Mixture
from patchloom.tasks.mp3 import MP3
from patchloom.withhold.encoder_input import all_patches, drop_positions, limit_context, mask_patches

SIZE, GRID, N = (32, 24), (4, 3), 12
# one of each form: rotations, tables, projections of queries, norms, MLPs
FORMS = {
    "DINOv3": "vit_small_patch16_dinov3",
    "DINOv3 with biases": "vit_small_patch16_dinov3_qkvb",
    "DINOv3 with SwiGLU": "vit_small_plus_patch16_dinov3",
    "EVA-02, fused": "eva02_small_patch14_224",
    "EVA-02, apart": "eva02_base_patch14_224",
    "EVA-02 of CLIP": "eva02_base_patch16_clip_224",
    "register, no class token": "vit_medium_patch16_rope_reg1_gap_256",
    "axial": "vit_small_patch16_rope_224",
    "mixed": "vit_small_patch16_rope_mixed_224",
    "axial, with a table": "vit_small_patch16_rope_ape_224",
    "mixed, with a table": "vit_small_patch16_rope_mixed_ape_224",
    "PE core": "vit_pe_core_tiny_patch16_384",
    "PE spatial": "vit_pe_spatial_tiny_patch16_512",
    "EVA, table only": "eva_giant_patch14_224",
}
SMALL = {"embed_dim": 32, "depth": 3, "num_heads": 2}


def eva(model=FORMS["DINOv3"], size=SIZE, positions=None, **options):
    torch.manual_seed(0)
    positions = positions or rotates(model) or "sincos"
    vit = build_encoder(EncoderSpec(model, size, 8, 3, positions, {**SMALL, **options}))
    with torch.no_grad():  # LayerScale near 0, zero biases and a zero table would hide errors
        for weight in vit.parameters():
            weight.normal_(std=0.3) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)
    return vit.double().eval()


@pytest.fixture(params=FORMS)
def vit(request):
    return eva(FORMS[request.param])


@pytest.fixture
def images():
    torch.manual_seed(1)
    return torch.randn(2, 3, *SIZE, dtype=torch.float64)


def masked(vit, images, kept):
    """Return timm's features if only the patches ``kept`` [b k], and the prefix, are attended to."""
    prefix = vit.num_prefix_tokens
    keep = torch.zeros(len(images), prefix + N, dtype=torch.bool)
    keep[:, :prefix] = True
    keep.scatter_(1, kept + prefix, True)
    return vit.forward_features(images, attn_mask=keep[:, None, None].expand(-1, 1, prefix + N, -1))


def close(ours, theirs, atol=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("fused", [True, False])
def test_features_are_those_of_timms_masked_attention(vit, images, fused):
    every, kept = all_patches(images, N), random_partition(2, N, (5,), None)[0]
    theirs, some, prefix = vit.forward_features(images), masked(vit, images, kept), vit.num_prefix_tokens
    fuse_attention(vit, fused)
    close(encode(vit, every), theirs)
    close(encode(vit, limit_context(every, kept)), some)
    subset = some[:, prefix:].take_along_dim(kept[..., None], 1)  # in a random order
    close(encode(vit, mask_patches(every, kept)), torch.cat([some[:, :prefix], subset], 1))
    *_, last = patch_layers(vit, images)
    close(last, theirs[:, prefix:].unflatten(1, GRID))


def embedded(vit, images):
    """Return tokens and rotations of all patches."""
    given = all_patches(images, N)
    return embed(vit, given), rotations(vit, given)


def test_a_block_of_few_queries_gives_the_last_outputs_of_the_block(vit, images):
    tokens, _ = embedded(vit, images)
    close(query_block(vit.blocks[1], tokens, 7), vit.blocks[1](tokens)[:, 7:])


def test_attention_weights_are_those_inside_timms_blocks(vit, images):
    found, seen = [one for one, _ in attention_each(vit, *embedded(vit, images))], []
    fuse_attention(vit, False)
    for block in vit.blocks:
        block.attn.attn_drop.register_forward_pre_hook(lambda _, weights: seen.append(weights[0]))
    vit.forward_features(images)
    for mine, its in zip(found, seen, strict=True):
        close(mine.double(), its, atol=1e-5)  # mine are float32


@pytest.mark.parametrize("model", [FORMS["mixed"], FORMS["mixed, with a table"]])
def test_frequencies_of_mixed_rotations_get_timms_gradient(model, images):
    vit = eva(model)
    outputs = encode(vit, all_patches(images, N)), vit.forward_features(images)
    ours, theirs = (torch.autograd.grad(one.square().mean(), vit.rope.freqs)[0] for one in outputs)
    assert ours.abs().max() > 1e-6
    close(ours, theirs)


def test_another_input_size_has_its_own_rotations_and_inference_forbids_no_training(vit, images):
    with torch.inference_mode():
        encode(vit, all_patches(images, N))
    encode(vit, all_patches(images, N)).mean().backward()
    resize_input(vit, (16, 48))
    wide = torch.randn(1, 3, 16, 48, dtype=torch.float64)
    close(encode(vit, all_patches(wide, N)), vit.forward_features(wide))


# Withheld positions: embeddings and rotations.


def shuffled(images, order):
    return unpatchify(patchify(images, (8, 8))[:, order], (8, 8), GRID)


@pytest.mark.parametrize("which", ["identity", "a place"])
def test_swapping_two_patches_without_positions_swaps_two_outputs(vit, images, which):
    token, place = torch.full((32,), 0.3, dtype=torch.float64), torch.tensor([[0.4, -0.7]], dtype=torch.float64)
    turned = rotations_at(vit, place)[:, None] if which == "a place" and has_rotations(vit) else None
    prefix, order = vit.num_prefix_tokens, torch.tensor([0, 1, 9, 3, 4, 5, 6, 7, 8, 2, 10, 11])
    moved, dropped = shuffled(images, order), torch.tensor([[2, 9, 5], [9, 2, 7]])
    one, other = (
        encode(vit, drop_positions(all_patches(some, N), dropped), position_token=token, rotation=turned)
        for some in (images, moved)
    )
    close(other[:, :prefix], one[:, :prefix])
    close(other[:, prefix:], one[:, prefix:][:, order])
    assert (encode(vit, all_patches(moved, N)) - encode(vit, all_patches(images, N)))[:, :prefix].abs().max() > 1e-6


def test_no_rotation_is_what_timm_computes_without_rotations(images):
    vit = eva()
    ours = encode(vit, drop_positions(all_patches(images, N), torch.arange(N).expand(2, -1)))
    close(ours, attend(vit, embed(vit, all_patches(images, N)), None))
    vit.rope = None
    close(ours, vit.forward_features(images))


@pytest.mark.parametrize("form", ["DINOv3", "EVA-02, fused", "axial", "mixed"])
def test_rotations_at_the_places_of_patches_are_their_rotations(form):
    vit = eva(FORMS[form])
    axes = [torch.arange(side, dtype=torch.float64) for side in GRID]
    if form == "DINOv3":
        axes = [2 * (axis + 0.5) / len(axis) - 1 for axis in axes]
    elif form.startswith("EVA"):  # EVA-02 measures places in patches of its pre-training
        axes = [axis * 16 / len(axis) for axis in axes]
    rows, columns = torch.meshgrid(*axes, indexing="ij")
    places = torch.stack([columns, rows] if form in ("axial", "mixed") else [rows, columns], -1)
    torch.testing.assert_close(rotations_at(vit, places.flatten(0, 1)), patch_rotations(vit), rtol=0, atol=1e-5)


# Tasks and protocols that withhold positions.


@pytest.mark.parametrize("positions", ["rotary", "sincos"])
@pytest.mark.parametrize("placeholder", ["learned", "zeros", "foreign"])
def test_droppos_trains_on_rotations(placeholder, positions, images):
    vit = eva(positions=positions).float().train()
    task = DropPos(vit, mask_ratio=0.25, placeholder=placeholder, decoder_width=32, decoder_heads=2)
    loss = task(images.float(), generator=torch.Generator().manual_seed(0)).loss
    loss.backward()
    assert loss.isfinite()
    if placeholder == "learned":
        assert task.position_place.grad.abs().min() > 0
        assert (task.position_token is None) == (positions == "rotary")


def test_mp3_withholds_rotations_and_refuses_a_table_beside_them(images):
    vit, order = eva(class_token=False), torch.randperm(N)
    task = MP3(vit, context_mask_ratio=0.0).double()
    one, other = (task.encode(some, task.given(some)).tokens for some in (images, shuffled(images, order)))
    close(other[:, task.geometry.prefix :], one[:, task.geometry.prefix :][:, order])
    assert has_positions(vit)
    task(images, generator=torch.Generator().manual_seed(0)).loss.backward()
    assert "--positions rotary" in refusal(MP3, eva("eva02_small_patch14_224"))
    MP3(eva("eva02_small_patch14_224"), known_positions=0.2)


@pytest.mark.parametrize("share", [0.5, 1])
def test_a_mixture_drops_all_or_some_rotations(share, images):
    task = Mixture(eva().float(), ask={"positions": 1}, withhold={"drop_positions": share})
    assert task(images.float()).loss.isfinite() and task.position_token is None


def test_protocols_take_rotations_away(vit, images):
    bare, order, prefix = without_positions(vit), torch.randperm(N), vit.num_prefix_tokens
    one, other = (encode(bare, all_patches(some, N))[:, prefix:] for some in (images, shuffled(images, order)))
    close(other, one[:, order])
    assert has_rotations(vit) or vit.pos_embed.abs().max() > 0  # the encoder itself has not changed


@pytest.mark.parametrize("placeholder", ["zeros", "learned"])
def test_position_sensitivity_trains_a_place(placeholder, images):
    probe = PositionProbe(eva().float(), placeholder)
    torch.nn.init.normal_(probe.layer.weight)
    probe(images.float(), torch.Generator().manual_seed(0), 0.75).logits.square().mean().backward()
    assert (probe.origin.grad is not None) == (placeholder == "learned")


@pytest.mark.parametrize("form", ["DINOv3", "mixed", "EVA-02, apart"])
def test_patches_in_windows_keep_their_rotations(form, images):
    vit = eva(FORMS[form], depth=8)
    (tokens, turns), prefix = embedded(vit, images), vit.num_prefix_tokens
    found = tokens_after(vit, tokens, (1,), Windows(GRID, 2, prefix), turns)[1]
    fronts = []
    for rows in torch.arange(N).view(GRID).tensor_split(2):
        for window in rows.tensor_split(2, dim=1):
            members = window.flatten()
            some = torch.cat([tokens[:, :prefix], tokens[:, prefix + members]], 1)
            out = vit.blocks[0](some, rope=turns[0][:, :, members])
            close(found[:, prefix + members], out[:, prefix:])
            fronts.append(out[:, :prefix])
    close(found[:, :prefix], torch.stack(fronts).mean(0))


def test_rotations_are_kept_in_fine_tuning():
    card = EncoderCard(EncoderSpec(FORMS["DINOv3"], SIZE, 8, 3, "rotary", SMALL), (0.5,) * 3, (0.5,) * 3, "mae", "one")
    for positions in ("none", "relative"):
        assert "keeps them" in refusal(with_variant, eva().float(), card, positions)
    with_table = with_variant(eva().float(), card, "fixed", class_token=True)
    assert with_table.pos_embed is not None and has_rotations(with_table)


# Weights.


def loaded(vit, state):
    """Load weights into a copy of an encoder whose weights are zero; return it and the report."""
    other = deepcopy(vit).float()
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    return other, load_published(other, "weights", state, like=vit)


def equal(one, other):
    return all(torch.equal(other.state_dict()[name], value) for name, value in one.state_dict().items())


def test_weights_under_timms_names_are_read_back(vit):
    other, done = loaded(vit, dict(vit.float().state_dict()))
    assert not done.missing and not done.unexpected and not done.resampled and equal(vit, other)


@pytest.mark.parametrize("biased", [True, False])
def test_weights_under_metas_names_are_read(biased):
    vit = eva("vit_small_patch16_dinov3" + "_qkvb" * biased).float()
    meta = {"mask_token": torch.zeros(1, 32)}
    for name, value in vit.state_dict().items():
        name = name.replace("gamma_", "ls").replace("reg_token", "storage_tokens")
        if not name.endswith(("q_bias", "v_bias")):
            meta[f"{name}.gamma" if name.endswith(("ls1", "ls2")) else name] = value
    for i, block in enumerate(vit.blocks):
        q, v = (block.attn.q_bias, block.attn.v_bias) if biased else (torch.zeros(32), torch.zeros(32))
        meta[f"blocks.{i}.attn.qkv.bias"] = torch.cat([q, torch.full((32,), 0.2), v]).detach()
        meta[f"blocks.{i}.attn.qkv.bias_mask"] = torch.ones(96).index_fill(0, torch.arange(32, 64), 0)
    other, done = loaded(vit, meta)
    assert not done.missing and done.unexpected == ("mask_token",) and not done.lost and equal(vit, other)


@pytest.mark.parametrize("model", ["eva02_small_patch14_224", "vit_tiny_patch16_224"])
def test_the_norm_of_pooled_features_becomes_that_of_tokens(model):
    vit = eva(model).float()
    pooled = {f"fc_{name}" if name.startswith("norm.") else name: weight for name, weight in vit.state_dict().items()}
    other, done = loaded(vit, pooled)
    assert not done.missing and not done.unexpected and any("fc_norm" in one for one in done.resampled)
    assert equal(vit, other)


@pytest.mark.parametrize(("model", "side"), [("eva02_tiny_patch14_224", 28), ("vit_mediumd_patch16_reg4_gap_256", 32)])
def test_a_folder_of_the_hub_keeps_its_norms_and_pre_training_norms_tokens(model, side, tmp_path):
    torch.manual_seed(0)
    net = timm.create_model(model, depth=1, num_classes=0, img_size=side).eval()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    about = {"input_size": [3, side, side], "mean": [0.5] * 3, "std": [0.5] * 3}
    config = {"architecture": model, "pretrained_cfg": about, "model_args": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    vit, _ = load_pretrained(tmp_path)
    images = torch.randn(2, 3, side, side)
    tokens = encode(vit, all_patches(images, 4))
    close(tokens, net.forward_features(images), atol=1e-5)
    close(pooled_norm(vit, tokens[:, prefix_count(vit) :].mean(1)), net(images), atol=1e-5)
    shape = public_shape(Weights(tmp_path))
    assert shape["positions"] == "learned" and shape["options"] == {"depth": 1}


def test_layer_scale_that_an_eva_lacks_is_lost():
    scaled = eva("eva02_small_patch14_224", init_values=0.1).float()
    _, done = loaded(eva("eva02_small_patch14_224"), dict(scaled.state_dict()))
    assert done.lost and "ls1.gamma" in done.lost[0]
