"""Loss that keeps an encoder near its start (``--anchor``)."""

import pytest
import swins
import torch
from perturbing import perturbed
from small import seeded, small
from torchvision.transforms.v2 import functional as V

from patchloom.nets.encode import encode, input_size, patch_count, prefix_count
from patchloom.questions.anchor import Anchor
from patchloom.tasks.extrema import ExtreMA
from patchloom.tasks.mae import MAE
from patchloom.withhold.encoder_input import all_patches


def moved(net, by=0.05):
    torch.manual_seed(5)
    return perturbed(net, by)


@pytest.mark.parametrize("swin", [False, True])
def test_the_loss_is_zero_at_the_start_and_grows_away_from_it(swin):
    net = swins.swin() if swin else small(MAE).encoder
    anchor = Anchor(net.eval(), 1.0)
    images = torch.rand(2, 3, *input_size(net))
    larger = torch.rand(2, 3, *(side + side // 2 for side in input_size(net)))  # is reduced
    assert [anchor(net, one).loss.item() for one in (images, larger)] == pytest.approx([0, 0], abs=1e-6)
    near, far = (anchor(moved(net), images).loss.item() for _ in range(2))
    assert 0 < near < far
    resized = V.resize(larger, list(input_size(net)), antialias=True)
    assert anchor(net, larger).loss.item() == pytest.approx(anchor(net, resized).loss.item(), rel=1e-4)


def test_class_token_and_patches_count_the_same():
    net = small(MAE).encoder.eval()
    assert prefix_count(net) == 1
    anchor, images = Anchor(net, 1.0), torch.rand(2, 3, 32, 32)
    given = all_patches(images, patch_count(net))
    before, after = encode(net, given), encode(moved(net), given)
    cosines = torch.cosine_similarity(before, after, dim=-1)
    outcome = anchor(net, images)
    assert outcome.loss.item() == pytest.approx(1 - (cosines[:, 0].mean() + cosines[:, 1:].mean()).item() / 2, abs=1e-6)
    assert outcome.metrics["anchor_loss"].item() == pytest.approx(1 - outcome.metrics["anchor_cosine"].item())


@pytest.mark.parametrize("task_class", [MAE, ExtreMA])
def test_it_is_added_to_the_loss_of_a_task(task_class):
    task = small(task_class, **{"encoder": {"class_token": False}} if task_class is ExtreMA else {}).eval()
    views = [torch.rand(4, 3, 32, 32)] * (2 if task_class is ExtreMA else 1)
    alone = task(*views, generator=seeded())
    task.anchor_to_start(2.5)
    same = task(*views, generator=seeded())
    assert same.loss.item() == pytest.approx(alone.loss.item(), abs=1e-5)
    assert same.metrics.keys() - alone.metrics.keys() == {"anchor_loss", "anchor_cosine"}
    moved(task.encoder)
    other, bare = task(*views, generator=seeded()), task.forward(*views, generator=seeded())
    added = other.loss - bare.loss
    assert added.item() == pytest.approx(2.5 * other.metrics["anchor_loss"].item(), abs=1e-5) and added > 1e-3
    added.backward()
    touched = {name.split(".")[0] for name, weight in task.named_parameters() if weight.grad is not None}
    assert "encoder" in touched and "anchor" not in touched
