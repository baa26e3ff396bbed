"""Freezing of weights: only the last blocks are trained, and no activations are kept for the others."""

import pytest
import swins
import torch
from sweep import SIZE

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import encode, patch_count
from patchloom.nets.finetune import block_count, freeze_for, frozen_names
from patchloom.withhold.encoder_input import all_patches, blank_patches


def vit(positions="learned", **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 3, "num_heads": 2, "reg_tokens": 1, **options}
    return build_encoder(EncoderSpec("nano", SIZE, 4, positions=positions, options=sizes))


def trained(net):
    """Return the first two parts of the names of trained parameters, such as blocks with their numbers."""
    return {".".join(name.split(".")[:2]) for name, weight in net.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_only_the_last_blocks_and_norm_are_trained(count):
    net = vit()
    assert block_count(net) == 3
    kept = frozen_names(net, "blocks", count)
    assert {"cls_token", "reg_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"} <= set(kept)
    freeze_for(net, "blocks", count)
    assert trained(net) == {"norm.weight", "norm.bias"} | {f"blocks.{i}" for i in range(3 - count, 3)}
    assert sorted(kept) == sorted(name for name, weight in net.named_parameters() if not weight.requires_grad)


def test_fixed_positions_are_not_listed_and_too_many_blocks_are_rejected():
    assert "pos_embed" not in frozen_names(vit("sincos"), "blocks", 1)
    with pytest.raises(PatchloomError, match="--train_blocks 4 is more than the 3 blocks of the encoder: give fewer"):
        freeze_for(vit(), "blocks", 4)


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (1, {"layers.1.blocks.1"}),
        (2, {"layers.1.blocks.0", "layers.1.blocks.1", "layers.1.downsample"}),
        (3, {"layers.0.blocks.1", "layers.1.blocks.0", "layers.1.blocks.1", "layers.1.downsample"}),
    ],
)
def test_blocks_of_a_swin_are_counted_through_its_stages(count, wanted):
    net = swins.swin()
    assert block_count(net) == 4
    freeze_for(net, "blocks", count)
    names = [name.split(".") for name, weight in net.named_parameters() if weight.requires_grad and "layers" in name]
    assert {".".join(one[:4] if one[2] == "blocks" else one[:3]) for one in names} == wanted
    assert net.norm.weight.requires_grad and not net.patch_embed.proj.weight.requires_grad


def kept_elements(net, blank=None):
    """Count the numbers that autograd keeps of a forward pass, besides the weights."""
    own = {weight.data_ptr() for weight in net.parameters()}
    kept = {}

    def keep(value):
        if value.untyped_storage().data_ptr() not in own:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        alive.append(value)
        return value

    alive = []
    given = all_patches(torch.ones(2, 3, *SIZE), patch_count(net))
    if blank is not None:
        given = blank_patches(given, torch.zeros(2, 1, dtype=torch.long))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        encode(net, given, mask_token=blank)
    return sum(kept.values())


def test_no_activations_are_kept_of_frozen_blocks_unless_a_token_is_trained():
    one, last = vit(), vit()
    freeze_for(one, "blocks", 1)
    freeze_for(last, "blocks", 1)
    last.blocks = last.blocks[2:]  # an encoder of only the trained block
    assert kept_elements(one) == kept_elements(last) < 0.5 * kept_elements(vit())
    token = torch.nn.Parameter(torch.zeros(32))
    assert kept_elements(one) < kept_elements(one, token) < kept_elements(vit(), token)
