"""Heads: layout of MLPs, batch norm equal to torch's, and a class token that only attends."""

import copy

import pytest
import torch
from torch import nn

from patchloom.nets.heads import InstanceHead, mlp
from patchloom.system.distributed import SharedBatchNorm, share_batch_norms


@pytest.mark.parametrize(
    ("sizes", "norm", "kinds"),
    [
        ((4, 6, 6, 3), "layer", "Linear LayerNorm GELU Linear LayerNorm GELU Linear"),
        ((4, 6, 3), "layer", "Linear LayerNorm GELU Linear"),
        ((4, 6, 4), "batch", "Linear SharedBatchNorm ReLU Linear"),
        ((4, 6, 5, 4), "batch", "Linear SharedBatchNorm ReLU Linear SharedBatchNorm ReLU Linear"),
        ((4, 3), "batch", "Linear"),
    ],
)
def test_layout_of_mlps(sizes, norm, kinds):
    net = mlp(sizes, norm)
    assert [type(layer).__name__ for layer in net] == kinds.split()
    linears = [layer for layer in net if isinstance(layer, nn.Linear)]
    assert [(one.in_features, one.out_features) for one in linears] == list(zip(sizes, sizes[1:], strict=False))
    assert all((one.bias is not None) == (norm == "layer") for one in linears)
    norms = [layer for layer in net if isinstance(layer, nn.LayerNorm | SharedBatchNorm)]
    assert [one.weight.shape for one in norms] == [(size,) for size in sizes[1:-1]]
    assert net(torch.randn(5, sizes[0])).shape == (5, sizes[-1])


def pair(d=6):
    """Return our and torch's batch norm with the same weights, none at its initial value."""
    torch.manual_seed(0)
    theirs = nn.BatchNorm1d(d)
    with torch.no_grad():
        for tensor in (theirs.weight, theirs.bias, theirs.running_mean, theirs.running_var):
            tensor.copy_(torch.rand(d) + 0.5)
    ours = SharedBatchNorm(d)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def outcome(norm, images, weights):
    """Return the output, and gradients with respect to images and weights."""
    images = images.clone().requires_grad_()
    output = norm(images)
    gradients = torch.autograd.grad((output.square() * weights).sum(), [images, norm.weight, norm.bias])
    return output, *gradients


@pytest.mark.parametrize("b", [2, 3, 32])
def test_batch_norm_is_torchs(b):
    ours, theirs = pair()
    for training in (True, True, False, True, False):
        ours.train(training), theirs.train(training)
        images, weights = torch.randn(b, 6) * 2 + 3, torch.randn(b, 6)
        found, expected = outcome(ours, images, weights), outcome(theirs, images, weights)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert ours.num_batches_tracked == 3 and not ours.running_mean.requires_grad


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_shared_batch_norms_of_a_model_are_torchs(affine, momentum):
    """Batch norms of vectors and of maps; without a momentum they average the statistics of all batches."""
    torch.manual_seed(0)
    theirs = nn.Sequential(
        nn.BatchNorm2d(3, momentum=momentum, affine=affine),
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * 4 * 5, momentum=momentum, affine=affine)),
        nn.Linear(60, 2),
    )
    ours = share_batch_norms(copy.deepcopy(theirs))
    assert [type(one) for one in ours.modules()].count(SharedBatchNorm) == 2
    for training in (True, True, False):
        ours.train(training), theirs.train(training)
        images = torch.randn(6, 3, 4, 5) * 2 + 3
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_batch_norm_far_from_zero():
    """The variance uses centred values: the mean square minus the squared mean would lose it to rounding."""
    ours, theirs = pair()
    images = torch.randn(16, 6) + 1000
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-4, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_float32_under_autocast(training):
    (ours, theirs), linear = pair(), nn.Linear(4, 6)
    ours.train(training), theirs.train(training)
    images = torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        low = linear(images)
        output = ours(low)
    assert low.dtype == torch.bfloat16 and output.dtype == torch.float32
    torch.testing.assert_close(output, theirs(low.float()))
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    output.square().sum().backward()
    assert linear.weight.grad.isfinite().all() and linear.weight.grad.dtype == ours.weight.grad.dtype == torch.float32


def test_batch_norm_needs_two_images_in_training():
    ours, _ = pair()
    with pytest.raises(ValueError, match="2 or more images"):
        ours(torch.randn(1, 6))
    assert ours.num_batches_tracked == 0
    assert ours.eval()(torch.randn(1, 6)).shape == (1, 6)


def head(depth=2):
    torch.manual_seed(0)
    made = InstanceHead(16, 2, depth)
    with torch.no_grad():  # zero biases would hide errors
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return made


def test_patches_are_attended_to_and_do_not_change():
    instance, patches = head(depth=3), torch.randn(4, 7, 16)
    before, asked = patches.clone(), []
    for block in instance.layers:
        block.register_forward_pre_hook(lambda _, given: asked.append(given))
    output = instance(patches)
    assert output.shape == (4, 16)
    assert torch.equal(patches, before) and len(asked) == 3
    assert all(given is patches and token.shape == (4, 1, 16) for given, token in asked)
    tokens = [token for _, token in asked]
    assert torch.equal(tokens[0], instance.token.expand(4, 1, 16)) and not torch.equal(tokens[1], tokens[2])


def test_the_content_of_patches_matters_and_their_order_does_not():
    instance, patches = head(), torch.randn(4, 7, 16)
    output = instance(patches)
    torch.testing.assert_close(instance(patches.roll(2, 1)), output)
    other = patches.clone()
    other[1, 3] = torch.randn(16)
    differs = (instance(other) - output).abs().amax(1)
    assert differs[1] > 1e-3 and differs[[0, 2, 3]].max() < 1e-6  # and images do not affect each other


def test_gradients_reach_every_patch_and_every_weight():
    instance, patches = head(), torch.randn(4, 7, 16, requires_grad=True)
    instance(patches).square().sum().backward()
    assert (patches.grad.abs().amax(-1) > 1e-6).all()
    for name, weight in instance.named_parameters():
        assert weight.grad is not None
        if not name.endswith("attn.k.bias"):  # a softmax ignores it
            assert weight.grad.abs().max() > 1e-6, name
