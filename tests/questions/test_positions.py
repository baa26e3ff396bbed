"""Prediction of positions: weights of patches, accuracy, and the exact chance level."""

import pytest
import torch
from answering import Answers, encoded_of, geometry_of, masking
from small import seeded, small
from torch.nn import functional as F

from patchloom.patches.tokens import patchify
from patchloom.questions.positions import PositionPrediction, Positions, chance_accuracy, shift_note, whole_shifts
from patchloom.tasks.droppos import DropPos
from patchloom.withhold.encoder_input import blank_patches, drop_positions


@pytest.mark.parametrize("class_token", [True, False])
def test_attentive_reconstruction_weighs_the_visible_patches(class_token):
    """The weights are shares of the visible patches of those of all patches, which a plain pass has (Eq. 9)."""
    task = small(DropPos, p=8, mask_ratio=0.5, temperature=0.1, encoder={"class_token": class_token})
    images = torch.randn(3, 3, 32, 32)
    given = task.given(images, torch.Generator().manual_seed(0))
    found = task.questions["positions"].affinities(task.encode(images, given))
    features = task.encoder.eval().forward_features(images)
    patches = features[:, task.encoder.num_prefix_tokens :]
    query = features[:, :1] if class_token else patches.mean(1, keepdim=True)
    shares = (torch.cosine_similarity(query, patches, dim=-1) / 0.1).exp().gather(1, given.visible)
    torch.testing.assert_close(found, shares / shares.sum(1, keepdim=True), atol=1e-5, rtol=1e-5)


def test_accuracy_counts_only_dropped_positions():
    logits = torch.eye(4)[torch.tensor([[3, 0, 0], [1, 1, 2]])]
    predicted = PositionPrediction(
        torch.tensor([[3, 1, 0], [0, 1, 2]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), logits
    )
    assert predicted.places().tolist() == [[3, 0, 0], [1, 1, 2]]
    assert predicted.accuracy().tolist() == pytest.approx([1 / 2, 2 / 3]) and predicted.known().tolist() == [1, 0]
    assert chance_accuracy(4, predicted.known()).tolist() == pytest.approx([1 / 3, 1 / 4])


def test_the_picture_hides_masked_and_blank_patches():
    """One of four patches is masked and one blank; one of the others has its position, and one is misplaced."""
    images = torch.rand(1, 3, 4, 4)
    given = masking(images, 2, torch.tensor([[0, 1, 2]]), torch.tensor([[3]]))
    given = drop_positions(blank_patches(given, torch.tensor([[1]])), torch.tensor([[2]]))
    logits = torch.zeros(1, 3, 4)
    logits[..., 0], logits[..., 3] = 1, 0.5
    question = Positions(geometry_of(images, 2), Answers(logits), {})
    (sheet,) = question.sheets(encoded_of(images, given))
    shown, rebuilt, right = (
        patchify(sheet.columns[name], (2, 2))[0] for name in ("given", "rebuilt", "at the true place")
    )
    truth = patchify(images, (2, 2))[0]
    assert torch.equal(shown[[0, 2]], truth[[0, 2]]) and shown[[1, 3]].isnan().all()
    # place 3 is the likeliest that is free
    assert torch.equal(rebuilt[0], truth[0]) and torch.equal(rebuilt[3], truth[2]) and rebuilt[[1, 2]].isnan().all()
    assert torch.equal(right[0], truth[0]) and right[[1, 3]].isnan().all() and (right[2] == float("inf")).all()
    assert "1 of 4 patches are removed, and the positions of 1 of 3 patches" in sheet.caption


def prediction(places, given=()):
    """Return a prediction that prefers ``places``, with the positions of the patches ``given`` known."""
    logits = 5.0 * F.one_hot(torch.tensor([places]), len(places)).float()
    dropped = torch.ones(1, len(places), dtype=torch.bool)
    dropped[0, list(given)] = False
    return PositionPrediction(torch.arange(len(places))[None], dropped, logits)


def test_patches_that_share_a_place_get_one_each_by_the_likeliest_assignment():
    predicted = prediction([1, 1, 2, 3])
    predicted.logits[0, 0] = torch.tensor([3.0, 5.0, 0.0, 0.0])  # loses little by moving on to place 0
    predicted.logits[0, 1] = torch.tensor([-9.0, 5.0, 0.0, 0.0])
    assert predicted.places().tolist() == [[1, 1, 2, 3]] and predicted.assigned().tolist() == [[0, 1, 2, 3]]
    taken = prediction([3, 3, 3, 0], given=(3,))
    assert taken.assigned()[0, 3] == 3 and sorted(taken.assigned()[0].tolist()) == [0, 1, 2, 3]
    impossible = prediction([0, 0, 0, 0])._replace(logits=torch.full((1, 4, 4), -torch.inf))
    assert sorted(impossible.assigned()[0].tolist()) == [0, 1, 2, 3]


def test_images_that_are_shifted_as_a_whole_are_named():
    visible = torch.arange(9)
    down = (visible + 3) % 9  # the last row comes out at the top
    placed = torch.stack([visible, down, (visible + 4) % 9, visible.flip(0)])
    asked = torch.ones(4, 9, dtype=torch.bool)
    found = whole_shifts(placed, visible.expand(4, 9), asked, (3, 3))
    assert found == {1: (1, 0)}  # 4 of 9 by (1, 1), and a turned image, are no shifts of the whole
    assert shift_note(found) == " Shifted as a whole (most patches by the same step): row 2 by 1 down."
    assert shift_note({0: (-1, 2)}).endswith("row 1 by 1 up and 2 right.") and shift_note({}) == ""
    asked[2, 2:] = False  # only withheld positions count
    assert whole_shifts(placed, visible.expand(4, 9), asked, (3, 3))[2] == (1, 1)


def test_the_first_picture_withholds_as_much_as_training_did():
    """On a grid of 16 patches Fig. 3's 95 % are all places; DropPos trains and measures with 12 of 16."""
    task = small(DropPos, (32, 32), (8, 8), 3).eval()
    with torch.inference_mode():
        first, figure, _ = task.draw(torch.randn(2, 3, 32, 32), seeded())
    assert first.name == "rebuilt" and "positions of 12 of 16 patches" in first.caption
    assert figure.name == "positions" and "16 of 16" in figure.caption
    assert not first.columns["rebuilt"].isnan().any()  # a rearranged image: nothing overlaps, nothing is empty
