"""Heads: layout of MLPs, batch norm equal to torch's, and a class token that only attends."""

import copy

import pytest
import torch
from torch import nn

from patchloom.system.distributed import SharedBatchNorm, share_batch_norms


def same(ours, theirs, images):
    """Check outputs, gradients of the images and parameters, and statistics of two nets."""
    found = []
    for net in (ours, theirs):
        given = images.clone().requires_grad_()
        output = net(given)
        loss = (output.square() * torch.arange(float(output.numel())).view_as(output) / output.numel()).sum()
        gradients = torch.autograd.grad(loss, [given, *net.parameters()])
        found.append([output, gradients, dict(net.state_dict())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.3, None])  # without, they average the statistics of all batches
@pytest.mark.parametrize("shape", [(3, 6), (32, 6), (6, 3, 4, 5)])
def test_shared_batch_norms_are_torchs(affine, momentum, shape):
    torch.manual_seed(0)
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    theirs = kind(shape[1], momentum=momentum, affine=affine)
    with torch.no_grad():
        for one in (*theirs.parameters(), theirs.running_mean, theirs.running_var):  # none at its initial value
            one.copy_(torch.rand_like(one) + 0.5)
    model = share_batch_norms(nn.ModuleList([copy.deepcopy(theirs), nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))]))
    assert type(model[0]) is type(model[1][1]) is SharedBatchNorm
    for training in (True, True, False, True, False):
        model.train(training), theirs.train(training)
        same(model[0], theirs, torch.randn(shape) * 2 + 3)
    assert model[0].num_batches_tracked == 3


def test_batch_norm_far_from_zero():
    """The variance uses centred values: the mean square minus the squared mean would lose it to rounding."""
    torch.manual_seed(0)
    ours, theirs, images = SharedBatchNorm(6), nn.BatchNorm1d(6), torch.randn(16, 6) + 1000
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-4, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_float32_under_autocast(training):
    ours, theirs, linear = SharedBatchNorm(6).train(training), nn.BatchNorm1d(6).train(training), nn.Linear(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        low = linear(torch.randn(8, 4))
        output = ours(low)
    assert low.dtype == torch.bfloat16 and output.dtype == torch.float32
    torch.testing.assert_close(output, theirs(low.float()))
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    output.square().sum().backward()
    assert linear.weight.grad.isfinite().all() and linear.weight.grad.dtype == ours.weight.grad.dtype == torch.float32


def test_batch_norm_needs_two_images_in_training():
    ours = SharedBatchNorm(6)
    with pytest.raises(ValueError, match="2 or more images"):
        ours(torch.randn(1, 6))
    assert ours.num_batches_tracked == 0
    assert ours.eval()(torch.randn(1, 6)).shape == (1, 6)
