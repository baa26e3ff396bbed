"""Eva encoders: equal to timm on all patches and on subsets, blind to withheld rotations, weights under any names."""

import json
from copy import deepcopy

import pytest
import timm
import torch
from safetensors.torch import save_file

from patchloom.dense.backbone import FeatureMaps, Windows, tokens_after
from patchloom.errors import PatchloomError
from patchloom.evaluate.protocols.order import without_positions
from patchloom.evaluate.protocols.sensitivity import PositionProbe
from patchloom.nets.attention import attention_each
from patchloom.nets.build import EncoderSpec, build_encoder, check_servable, rotates
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.load import Weights, infer_architecture, load_pretrained, load_published, public_shape
from patchloom.nets.checkpoints.programs import timm_names
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
from patchloom.nets.finetune import at_size, with_variant
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


def eva(model="vit_small_patch16_dinov3", size=SIZE, positions=None, **options):
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
def test_all_patches_give_timms_features(vit, images, fused):
    fuse_attention(vit, fused)
    close(encode(vit, all_patches(images, N)), vit.forward_features(images))


def test_a_permuted_subset_gives_the_features_of_masked_attention(vit, images):
    kept = random_partition(2, N, (5,), None)[0]
    theirs = masked(vit, images, kept)
    prefix = vit.num_prefix_tokens
    rows = theirs[:, prefix:].take_along_dim(kept[..., None], 1)
    close(encode(vit, mask_patches(all_patches(images, N), kept)), torch.cat([theirs[:, :prefix], rows], 1))


def test_a_context_gives_the_features_of_masked_attention(vit, images):
    context = random_partition(2, N, (5,), None)[0]
    close(encode(vit, limit_context(all_patches(images, N), context)), masked(vit, images, context))


def test_a_block_of_few_queries_gives_the_last_outputs_of_the_block(vit, images):
    given = all_patches(images, N)
    tokens, turns = embed(vit, given), rotations(vit, given)
    rope = None if turns is None else turns[1]
    close(query_block(vit.blocks[1], tokens, 7, rope), vit.blocks[1](tokens, rope=rope)[:, 7:])


def test_attention_weights_give_the_values_of_the_block(vit, images):
    given, seen = all_patches(images, N), []
    norm = vit.blocks[0].attn.norm
    hook = norm.register_forward_pre_hook(lambda _, tokens: seen.append(tokens[0]))
    weights, _ = next(attention_each(vit, embed(vit, given), rotations(vit, given)))
    hook.remove()
    attn, normed = vit.blocks[0].attn, vit.blocks[0].norm1(embed(vit, given))
    if attn.qkv is None:
        v = attn.v_proj(normed)
    else:
        v = normed @ attn.qkv.weight[-32:].T
        bias = getattr(attn, "v_bias", None) if attn.qkv.bias is None else attn.qkv.bias[-32:]
        v = v if bias is None else v + bias
    mixed = (weights.double() @ v.unflatten(-1, (2, 16)).transpose(1, 2)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixed, seen[0], rtol=0, atol=1e-5)  # weights are float32
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_patch_layers_end_with_timms_features(vit, images):
    theirs = vit.forward_features(images)[:, vit.num_prefix_tokens :].unflatten(1, GRID)
    *_, last = patch_layers(vit, images)
    close(last, theirs)


def test_checkpointing_changes_no_gradient(vit, images):
    given = mask_patches(all_patches(images, N), random_partition(2, N, (5,), None)[0])
    gradients = []
    for checkpointing in (False, True):
        vit.grad_checkpointing = checkpointing
        vit.zero_grad()
        encode(vit, given).square().mean().backward()
        gradients.append({name: w.grad.clone() for name, w in vit.named_parameters() if w.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient, atol=1e-12)


@pytest.mark.parametrize("model", [FORMS["mixed"], FORMS["mixed, with a table"]])
def test_frequencies_of_mixed_rotations_get_timms_gradient(model, images):
    vit = eva(model)
    found = []
    for features in (encode(vit, all_patches(images, N)), vit.forward_features(images)):
        (gradient,) = torch.autograd.grad(features.square().mean(), vit.rope.freqs)
        found.append(gradient)
    assert found[0].abs().max() > 1e-6
    close(*found)


def test_inference_first_does_not_forbid_training_after(images):
    vit = eva()
    with torch.inference_mode():
        encode(vit, all_patches(images, N))
    encode(vit, all_patches(images, N)).mean().backward()


def test_another_input_size_has_its_own_rotations():
    vit = eva()
    before = patch_rotations(vit)
    vit.set_input_size((16, 48))
    images = torch.randn(1, 3, 16, 48, dtype=torch.float64)
    assert patch_rotations(vit).shape == before.shape and not torch.equal(patch_rotations(vit), before)
    close(encode(vit, all_patches(images, N)), vit.forward_features(images))


# Withheld positions: embeddings and rotations.


def swapped(images, i, j):
    patches = patchify(images, (8, 8))
    order = torch.arange(N)
    order[[i, j]] = order[[j, i]]
    return unpatchify(patches[:, order], (8, 8), GRID), order


def stand_ins(vit, which):
    token = torch.full((32,), 0.3, dtype=torch.float64)
    place = torch.tensor([[0.4, -0.7]], dtype=torch.float64)
    turned = rotations_at(vit, place)[:, None] if which == "a place" and has_rotations(vit) else None
    return {"position_token": token, "rotation": turned}


@pytest.mark.parametrize("which", ["identity", "a place"])
def test_permuting_patches_without_positions_permutes_outputs(vit, images, which):
    prefix, order = vit.num_prefix_tokens, torch.randperm(N)
    moved = unpatchify(patchify(images, (8, 8))[:, order], (8, 8), GRID)
    dropped = torch.arange(N).expand(2, -1)
    one, other = (
        encode(vit, drop_positions(all_patches(some, N), dropped), **stand_ins(vit, which)) for some in (images, moved)
    )
    close(other[:, :prefix], one[:, :prefix])
    close(other[:, prefix:], one[:, prefix:][:, order])
    assert (encode(vit, all_patches(moved, N)) - encode(vit, all_patches(images, N)))[:, :prefix].abs().max() > 1e-6


@pytest.mark.parametrize("which", ["identity", "a place"])
def test_swapping_two_patches_without_positions_swaps_two_outputs(vit, images, which):
    prefix = vit.num_prefix_tokens
    moved, order = swapped(images, 2, 9)
    dropped = torch.tensor([[2, 9, 5], [9, 2, 7]])
    one, other = (
        encode(vit, drop_positions(all_patches(some, N), dropped), **stand_ins(vit, which)) for some in (images, moved)
    )
    close(other[:, :prefix], one[:, :prefix])
    close(other[:, prefix:], one[:, prefix:][:, order])


def test_no_rotation_is_what_timm_computes_without_rotations(images):
    vit = eva()
    given = drop_positions(all_patches(images, N), torch.arange(N).expand(2, -1))
    ours = encode(vit, given)
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
    places = torch.stack([rows, columns], -1)
    if form in ("axial", "mixed"):
        places = torch.stack([columns, rows], -1)
    torch.testing.assert_close(rotations_at(vit, places.flatten(0, 1)), patch_rotations(vit), rtol=0, atol=1e-5)


# Tasks that withhold positions.


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


def test_mp3_withholds_rotations(images):
    vit = eva(class_token=False)
    task = MP3(vit, context_mask_ratio=0.0).double()
    order = torch.randperm(N)
    moved = unpatchify(patchify(images, (8, 8))[:, order], (8, 8), GRID)
    tokens = [task.encode(some, task.given(some)).tokens[:, task.geometry.prefix :] for some in (images, moved)]
    close(tokens[1], tokens[0][:, order])
    assert has_positions(vit)
    task(images, generator=torch.Generator().manual_seed(0)).loss.backward()


def test_mp3_refuses_a_table_beside_rotations():
    with pytest.raises(PatchloomError, match="--positions rotary"):
        MP3(eva("eva02_small_patch14_224"))
    MP3(eva("eva02_small_patch14_224"), known_positions=0.2)


def test_a_mixture_drops_all_or_some_rotations(images):
    for share in (0.5, 1):
        task = Mixture(eva().float(), ask={"positions": 1}, withhold={"drop_positions": share})
        assert task(images.float()).loss.isfinite() and task.position_token is None


def test_protocols_take_rotations_away(vit, images):
    bare, order = without_positions(vit), torch.randperm(N)
    moved = unpatchify(patchify(images, (8, 8))[:, order], (8, 8), GRID)
    prefix = vit.num_prefix_tokens
    close(encode(bare, all_patches(moved, N))[:, prefix:], encode(bare, all_patches(images, N))[:, prefix:][:, order])
    assert has_rotations(vit) or vit.pos_embed.abs().max() > 0  # the encoder itself has not changed


@pytest.mark.parametrize("placeholder", ["zeros", "learned"])
def test_position_sensitivity_trains_a_place(placeholder, images):
    probe = PositionProbe(eva().float(), placeholder)
    torch.nn.init.normal_(probe.layer.weight)
    placed = probe.place(images.float(), torch.Generator().manual_seed(0), 0.75)
    placed.logits.square().mean().backward()
    assert (probe.origin.grad is not None) == (placeholder == "learned")


# Construction and weights.


@pytest.mark.parametrize(
    ("model", "positions", "said"),
    [
        ("vit_small_patch16_dinov3", "none", "--positions rotary"),
        ("vit_tiny_patch16_224", "rotary", "--positions sincos"),
        ("eva_giant_patch14_224", "rotary", "--positions sincos"),
    ],
)
def test_positions_must_fit_the_model(model, positions, said):
    with pytest.raises(PatchloomError, match=said):
        build_encoder(EncoderSpec(model, SIZE, 8, positions=positions, options=SMALL))


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("eva02_enormous_patch14_clip_224", "PostNorm"),
        ("vit_large_patch16_sapiens2", "grouped-query"),
        ("vit_base_patch16_sapiens2", "random rotations"),
    ],
)
def test_other_forms_are_refused_by_name(model, part):
    with torch.device("meta"):
        stock = timm.create_model(model, num_classes=0)
    with pytest.raises(PatchloomError, match=part):
        check_servable(stock, model)


def test_options_have_one_name_in_all_models():
    vit = eva(reg_tokens=2, class_token=False, positions="learned", pre_norm=True)
    assert vit.reg_token.shape[1] == 2 and vit.cls_token is None and vit.pos_embed is not None
    assert not isinstance(vit.norm_pre, torch.nn.Identity)


def zeros_like(vit):
    """Return a copy of an encoder whose weights are zero."""
    other = deepcopy(vit).float()
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    return other


def test_weights_under_timms_names_are_read_back(vit):
    other = zeros_like(vit)
    done = load_published(other, "weights", dict(vit.float().state_dict()), GRID)
    assert not done.missing and not done.unexpected and not done.resampled
    for name, value in vit.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


@pytest.mark.parametrize("biased", [True, False])
def test_weights_under_metas_names_are_read(biased):
    vit = eva("vit_small_patch16_dinov3" + "_qkvb" * biased).float()
    meta = {}
    for name, value in vit.state_dict().items():
        name = name.replace("gamma_", "ls").replace("reg_token", "storage_tokens")
        name = f"{name}.gamma" if name.endswith(("ls1", "ls2")) else name
        if not name.endswith(("q_bias", "v_bias")):
            meta[name] = value
    for i, block in enumerate(vit.blocks):
        q, v = (block.attn.q_bias, block.attn.v_bias) if biased else (torch.zeros(32), torch.zeros(32))
        meta[f"blocks.{i}.attn.qkv.bias"] = torch.cat([q, torch.full((32,), 0.2), v]).detach()
        meta[f"blocks.{i}.attn.qkv.bias_mask"] = torch.ones(96).index_fill(0, torch.arange(32, 64), 0)
    meta["mask_token"] = torch.zeros(1, 32)
    other = zeros_like(vit)
    done = load_published(other, "weights", meta, GRID)
    assert not done.missing and done.unexpected == ("mask_token",) and not done.lost
    for name, value in vit.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


@pytest.mark.parametrize("model", ["eva02_small_patch14_224", "vit_tiny_patch16_224"])
def test_the_norm_of_pooled_features_becomes_that_of_tokens(model):
    vit = eva(model).float()
    pooled = {
        name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: w
        for name, w in vit.state_dict().items()
    }
    other = zeros_like(vit)
    done = load_published(other, "weights", pooled, GRID)
    assert not done.missing and not done.unexpected and any("fc_norm" in one for one in done.resampled)
    assert torch.equal(other.norm.weight, vit.norm.weight)


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
    torch.testing.assert_close(tokens, net.forward_features(images), rtol=0, atol=1e-5)
    pooled = tokens[:, prefix_count(vit) :].mean(1)
    torch.testing.assert_close(pooled_norm(vit, pooled), net(images), rtol=0, atol=1e-5)
    shape = public_shape(Weights(tmp_path))
    assert shape["positions"] == "learned" and shape["options"] == {"depth": 1}


def test_weights_alone_do_not_pass_for_a_vit_without_rotations():
    net = timm.create_model("vit_tiny_patch16_dinov3_qkvb", depth=12, num_classes=0)
    assert infer_architecture(timm_names(net.state_dict())) is None
    with pytest.raises(PatchloomError, match="vit_small_patch16_dinov3"):
        load_published(build_encoder(EncoderSpec("nano", (32, 32), 8)), "weights", dict(net.state_dict()))


def test_layer_scale_that_an_eva_lacks_is_lost():
    done = load_published(
        eva("eva02_small_patch14_224").float(),
        "weights",
        dict(eva("eva02_small_patch14_224", init_values=0.1).float().state_dict()),
        GRID,
    )
    assert done.lost and "ls1.gamma" in done.lost[0]


# Dense predictions.


def test_feature_maps_are_timms_intermediates(vit, images):
    maps = FeatureMaps(vit, (1, 3))
    maps.norms = torch.nn.ModuleDict({number: torch.nn.Identity() for number in ("1", "3")})
    theirs = vit.forward_intermediates(images, indices=[0, 2], intermediates_only=True)
    for one, other in zip(maps(images), theirs, strict=True):
        close(one, other)


@pytest.mark.parametrize("form", ["DINOv3", "mixed", "EVA-02, apart"])
def test_patches_in_windows_keep_their_rotations(form, images):
    vit = eva(FORMS[form], depth=8)
    given, prefix = all_patches(images, N), vit.num_prefix_tokens
    tokens, turns = embed(vit, given), rotations(vit, given)
    found = tokens_after(vit, tokens, (1,), Windows(GRID, 2, prefix), turns)[1]
    rows, columns = torch.arange(4).tensor_split(2), torch.arange(3).tensor_split(2)
    fronts = []
    for down in rows:
        for along in columns:
            members = torch.arange(N).view(GRID)[down][:, along].flatten()
            some = torch.cat([tokens[:, :prefix], tokens[:, prefix + members]], 1)
            out = vit.blocks[0](some, rope=turns[0][:, :, members])
            close(found[:, prefix + members], out[:, prefix:])
            fronts.append(out[:, :prefix])
    close(found[:, :prefix], torch.stack(fronts).mean(0))


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_at_another_size_for_fine_tuning(form):
    vit, model = eva(FORMS[form]).float(), FORMS[form]
    spec = EncoderSpec(model, SIZE, 8, 3, rotates(model) or "sincos", SMALL)
    card = EncoderCard(spec, (0.5,) * 3, (0.5,) * 3, "mae", "one")
    copy = at_size(vit, card, (16, 48), drop_path=0.1).double().eval()
    images = torch.randn(1, 3, 16, 48, dtype=torch.float64)
    close(encode(copy, all_patches(images, N)), copy.forward_features(images))
    assert copy.state_dict().keys() == vit.state_dict().keys()


def test_rotations_are_kept_in_fine_tuning():
    card = EncoderCard(EncoderSpec(FORMS["DINOv3"], SIZE, 8, 3, "rotary", SMALL), (0.5,) * 3, (0.5,) * 3, "mae", "one")
    for positions in ("none", "relative"):
        with pytest.raises(PatchloomError, match="keeps them"):
            with_variant(eva().float(), card, positions)
    with_table = with_variant(eva().float(), card, "fixed", class_token=True)
    assert with_table.pos_embed is not None and has_rotations(with_table)
