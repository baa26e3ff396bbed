"""What DropPos withholds and asks, beyond what the sweep and the golden vectors see."""

import math

import pytest
import torch

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import patch_positions
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.positions_drawn import mark_wrong, put_together, scattered

SIZES = {"embed_dim": 32, "depth": 1, "num_heads": 2}


def make(size=(32, 32), p=4, **options):
    torch.manual_seed(0)
    return DropPos(build_encoder(EncoderSpec("nano", size, p, options=SIZES)), **options)


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("mask", "position", "visible", "dropped"), [(0.75, 0.75, 16, 12), (0, 1, 64, 64), (0.5, 0.25, 32, 8)]
)
def test_how_many_are_masked_and_dropped(mask, position, visible, dropped):
    seen, masked, without = make(mask_ratio=mask, position_mask_ratio=position).deal(2, generator(), "cpu")
    assert (seen.shape[1], masked.shape[1], without.shape[1]) == (visible, 64 - visible, dropped)
    assert set(seen[0].tolist()).isdisjoint(masked[0].tolist())


def test_auto_keeps_enough_patches_to_tell_positions():
    assert make().mask_ratio == 0.75 and make().temperature == 0.1
    few = make(size=(16, 16), p=4)
    assert few.mask_ratio == 0 and math.isinf(few.temperature)
    assert make(size=(24, 24), p=4).mask_ratio == pytest.approx(1 - 16 / 36)
    assert make(size=(56, 56), p=4).visible_of(0.75) == 49


def test_order_of_the_visible_patches_changes_no_loss():
    task = make(sigma=0.5)
    images = torch.randn(3, 3, 32, 32)
    visible, masked, dropped = task.deal(3, generator(), "cpu")
    order = torch.randperm(visible.shape[1])
    place = order.argsort()
    one = task(images, hands=(visible, masked, dropped)).loss
    two = task(images, hands=(visible[:, order], masked, place[dropped])).loss
    torch.testing.assert_close(one, two)


def test_shuffle_only_changes_the_order():
    plain, shuffled = make().deal(2, generator(), "cpu")[0], make(shuffle=True).deal(2, generator(), "cpu")[0]
    assert not torch.equal(plain, shuffled)
    assert torch.equal(plain, shuffled.sort(1).values)


@pytest.mark.parametrize("placeholder", ["learned", "zeros", "foreign"])
def test_placeholders_hide_the_true_position(placeholder):
    """Fed with the same content everywhere, the encoder must not tell patches without position apart by place."""
    task = make(placeholder=placeholder, mask_ratio=0.0, position_mask_ratio=1.0).eval()
    images = torch.ones(1, 3, 32, 32)
    everything = torch.arange(64)[None]
    tokens = task.encode(task.view(images, everything, everything), generator())[0, 1:]
    if placeholder == "foreign":
        # each has the position of some other patch, drawn anew by the generator
        again = task.encode(task.view(images, everything, everything), torch.Generator().manual_seed(1))[0, 1:]
        assert not torch.equal(tokens, again)
        assert task.position_token is None
    else:
        torch.testing.assert_close(tokens, tokens[:1].expand_as(tokens), rtol=1e-4, atol=1e-5)
        assert (task.position_token is None) == (placeholder == "zeros")
    assert patch_positions(task.encoder).std() > 0


def test_smoothing_ends_one_hot_and_no_dropped_position_is_free():
    task = make(temperature=float("inf"))
    images, hands = torch.randn(2, 3, 32, 32), make().deal(2, generator(), "cpu")
    end = task(images, progress=1.0, hands=hands).loss
    visible, _, dropped = hands
    view = task.view(images, visible, dropped)
    logits = task.decoder(task.encode(view))
    plain = torch.nn.functional.cross_entropy(logits[view.dropped], visible[view.dropped])
    torch.testing.assert_close(end, plain)
    assert task(images, progress=0.0, hands=hands).loss != end


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"position_mask_ratio": 0.0}, "position_mask_ratio must lie in"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"mask_ratio": 0.0, "pixels": True}, "no pixels are hidden"),
        ({"mask_ratio": 0.98}, "2 are needed"),
        ({"decoder_width": 30, "decoder_heads": 4}, "decoder cannot be 30 wide and 2 blocks deep with 4 heads"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_an_encoder_without_positions_is_refused():
    encoder = build_encoder(EncoderSpec("nano", (16, 16), 4, options=SIZES | {"pos_embed": "none"}))
    with pytest.raises(PatchloomError, match="needs an encoder with position embeddings"):
        DropPos(encoder)


def test_pictures_mark_what_is_wrong_and_put_patches_where_they_were_placed():
    images = torch.arange(1 * 1 * 4 * 4.0).view(1, 1, 4, 4)
    visible, placed = torch.tensor([[0, 1, 3]]), torch.tensor([[0, 3, 3]])
    marked = mark_wrong(images, 2, visible, placed)
    assert torch.equal(marked[..., :2, :2], images[..., :2, :2])  # right
    assert (marked[..., :2, 2:] == float("inf")).all()  # wrong, shown at its true place
    assert marked[..., 2:, :2].isnan().all()  # masked
    assert torch.equal(marked[..., 2:, 2:], images[..., 2:, 2:])
    rebuilt = put_together(images, 2, visible, placed)
    assert torch.equal(rebuilt[..., 2:, 2:], (images[..., :2, 2:] + images[..., 2:, 2:]) / 2)
    assert rebuilt[..., :2, 2:].isnan().all() and rebuilt[..., 2:, :2].isnan().all()


def test_what_was_given_keeps_told_places_and_loses_none():
    visible = torch.arange(12).expand(5, 12)
    dropped = torch.ones(5, 12, dtype=torch.bool)
    dropped[:, [2, 7]] = False
    places = scattered(visible, dropped, generator())
    assert (places[:, [2, 7]] == torch.tensor([2, 7])).all()
    assert torch.equal(places.sort(1).values, visible) and not torch.equal(places[0], visible[0])
