"""Low-rank updates of the encoder's weights (``--adapt lora``), for every class of encoder that is served."""

from copy import deepcopy

import pytest
import swins
import torch
from sweep import SIZE
from traced import graph_count, traced_parts

from patchloom.nets import native
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import encode, patch_count
from patchloom.nets.finetune import add_low_rank, freeze_for
from patchloom.nets.lora import effective_parameters, has_adapters, merged
from patchloom.nets.performance import fuse_attention, use_kernels
from patchloom.nets.swin import is_hierarchical
from patchloom.nets.teacher import Teacher
from patchloom.withhold.encoder_input import all_patches, limit_context


def vit(model="nano", positions="learned", **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2, **options}
    net = build_encoder(EncoderSpec(model, SIZE, 4, positions=positions, options=sizes))
    with torch.no_grad():  # LayerScale of 1e-5 would hide the updates
        for name, weight in net.named_parameters():
            if "gamma" in name:
                weight.fill_(0.5)
    return net


SERVED = {
    "ViT": vit,
    "ViT without a bias of qkv": lambda: vit(qkv_bias=False),
    "ViT with norms of queries and keys": lambda: vit(qk_norm=True),
    "ViT with LayerScale": lambda: vit(init_values=0.1, reg_tokens=2),
    "Eva with biases of queries and values": lambda: vit("vit_small_patch16_dinov3_qkvb", "rotary"),
    "Eva without a bias of qkv": lambda: vit("vit_small_patch16_dinov3", "rotary"),
    "Eva with separate queries": lambda: vit("eva02_base_patch14_224"),
    "Eva with trained rotations": lambda: vit("vit_small_patch16_rope_mixed_224", "rotary"),
    "Swin": swins.swin,
}


@pytest.fixture(params=SERVED)
def net(request):
    return SERVED[request.param]().train()


def images_for(net):
    torch.manual_seed(1)
    return torch.randn(2, 3, *net.patch_embed.img_size)


def output(net, images):
    return encode(net, all_patches(images, patch_count(net)))


def adapted(net, target="both", count=None):
    freeze_for(net, "lora", count)
    torch.manual_seed(2)
    add_low_rank(net, 4, target, count)
    return net


def train(net, images):
    """Take a step on everything that has gradients, and return their names."""
    torch.manual_seed(3)
    loss = (output(net, images) * torch.randn(net.num_features)).sum()
    loss.backward()
    names = [name for name, weight in net.named_parameters() if weight.grad is not None]
    torch.optim.SGD(net.parameters(), lr=0.01).step()
    return names


KINDS = {"both": {"attn", "mlp"}, "attention": {"attn"}, "mlp": {"mlp"}}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("target", KINDS)
def test_a_step_moves_the_output_and_merged_weights_compute_it(net, target, fused):
    fuse_attention(net, fused)
    images, plain, names_before = images_for(net), deepcopy(net), {name for name, _ in net.named_parameters()}
    before = output(net, images)
    adapted(net, target)
    torch.testing.assert_close(output(net, images), before, rtol=0, atol=1e-5)  # the updates start at zero
    names = train(net, images)
    assert names and all(name.endswith((".up", ".down")) for name in names)
    assert {name.split(".parametrizations")[0].split(".")[-2] for name in names} == KINDS[target]
    assert (output(net, images) - before).abs().max() > 1e-4
    assert names_before == effective_parameters(net).keys()
    with torch.no_grad():  # code that reads the weight of a wrapped layer would pass over its update
        for name, weight in net.named_parameters():
            if name.endswith(".up"):
                weight.normal_(std=0.02)
    images, net, plain = images.double(), net.double().eval(), plain.double().eval()
    plain.load_state_dict(merged(net.state_dict()), strict=True)
    assert not has_adapters(plain) and has_adapters(net)
    torch.testing.assert_close(output(plain, images), output(net, images), rtol=0, atol=1e-10)
    if not is_hierarchical(net):  # of few keys and values, which are computed apart
        given = limit_context(all_patches(images, patch_count(net)), torch.tensor([[0, 7], [5, 1]]))
        torch.testing.assert_close(encode(plain, given), encode(net, given), rtol=0, atol=1e-10)


def test_updates_are_computed_in_full_precision_under_autocast():
    """Else the encoder that is written would not be the one that was trained."""
    net = adapted(vit())
    layer = net.blocks[0].mlp.fc1
    torch.nn.init.normal_(layer.parametrizations.weight[0].up)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.weight
    assert torch.equal(found, merged(net.state_dict())["blocks.0.mlp.fc1.weight"])
    low = layer.parametrizations.weight[0]
    torch.testing.assert_close(layer.weight, layer.parametrizations.weight.original + 2 * low.up @ low.down)


def test_the_last_blocks_are_trained_whole_and_the_others_by_updates():
    names = train(adapted(net := vit(depth=3), count=1), images_for(net))
    whole = {name for name in names if not name.endswith((".up", ".down"))}
    assert whole == {name for name, _ in net.named_parameters() if name.startswith(("blocks.2.", "norm."))}
    assert {name.split(".")[1] for name in names if name.endswith(".up")} == {"0", "1"}


def test_a_teacher_follows_the_effective_weights(net):
    images = images_for(net)
    teacher = Teacher(encoder=net)
    assert not has_adapters(teacher)
    adapted(net)
    before = {name: weight.clone() for name, weight in teacher.encoder.named_parameters()}
    train(net, images)
    teacher.follow(0.75, encoder=net)
    now = merged(net.state_dict())
    for name, weight in teacher.encoder.named_parameters():
        torch.testing.assert_close(weight, 0.75 * before[name] + 0.25 * now[name], rtol=1e-6, atol=1e-7)
    assert not all(torch.equal(weight, before[name]) for name, weight in teacher.encoder.named_parameters())
    teacher.follow(0.0, encoder=net)
    net.eval()
    torch.testing.assert_close(output(teacher.encoder, images), output(net, images), rtol=0, atol=1e-6)


def test_the_rank_is_at_most_the_side_of_a_weight():
    net = swins.swin()
    freeze_for(net, "lora", None)
    add_low_rank(net, 1000, "attention", None)
    assert net.layers[0].blocks[0].attn.qkv.parametrizations.weight[0].down.shape == (8, 8)


@pytest.mark.parametrize("kind", ["ViT", "Eva with separate queries"])
def test_a_compiled_encoder_uses_the_updates_in_one_graph(kind):
    net = SERVED[kind]().train()
    images = images_for(net)
    adapted(net)
    with traced_parts():
        train(net, images)
        after = output(net, images)
        assert graph_count() == 1
    torch.testing.assert_close(output(net, images), after, rtol=0, atol=1e-5)


@pytest.mark.skipif(native.lacking() is not None, reason=f"no native kernels: {native.lacking()}")
def test_native_kernels_use_the_updates():
    net = vit(embed_dim=64)
    images = images_for(net)
    adapted(net)
    use_kernels(net, "native")
    assert all(block.kernels is not None for block in net.blocks)
    with torch.autocast("cpu", torch.bfloat16):
        before = output(net, images).detach()
        names = train(net, images)
        after = output(net, images).detach()
    assert len(names) == 16 and (after - before).abs().max() > 0.05
    use_kernels(net, "torch")
    with torch.autocast("cpu", torch.bfloat16):
        expected = output(net, images)
    torch.testing.assert_close(after, expected, rtol=0.02, atol=0.05)
