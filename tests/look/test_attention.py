"""Tests of attention maps, rollout, the choice of the query patch, and the drawn sheets."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attending import GRIDS, PREFIXES, attending_vit, random_vit
from refusing import refusal
from seeing import asked_of, asked_of_sound, named

from patchloom.look.attention import attention_maps, class_attention, draw_attention, rollout
from patchloom.look.context import ImagePoint
from patchloom.nets.encode import patch_count, prefix_count
from patchloom.nets.heads import InstanceHead


@pytest.mark.parametrize("options", [*PREFIXES.values(), {"positions": "none"}], ids=[*PREFIXES, "no positions"])
@pytest.mark.parametrize("sizes", GRIDS.values(), ids=GRIDS)
def test_maps_are_of_the_blocks_that_were_asked_for(sizes, options):
    vit = random_vit(*sizes, **options)
    images = torch.randn(2, sizes[2], *sizes[0])
    t = prefix_count(vit) + patch_count(vit)
    maps = attention_maps(vit, images)
    assert maps.shape == (2, 3, 2, t, t) and not maps.requires_grad and torch.is_grad_enabled()
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 2, t))
    assert torch.equal(attention_maps(vit, images, (1, 3)), maps[:, [0, 2]])


@pytest.mark.parametrize(
    ("blocks", "said"), [((0,), "no block 0"), ((1, 4, 9), "no block 4"), ((), "no block is given")]
)
def test_blocks_that_are_not_there(blocks, said):
    assert said in refusal(attention_maps, random_vit(), torch.randn(1, 3, 24, 32), blocks)


def test_rollout_of_two_blocks_by_hand():
    one = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # the mean is 1/2 everywhere
    two = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    rolled = rollout(torch.stack([torch.stack(one), torch.stack(two)])[None])
    first = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    second = torch.tensor([[0.5, 0.5], [0.0, 1.0]]) @ first
    torch.testing.assert_close(rolled, torch.stack([first, second])[None])
    torch.testing.assert_close(rolled[0, 1], torch.tensor([[0.5, 0.5], [0.25, 0.75]]))


def reddest(tile, grid):
    red, green, _ = np.moveaxis(tile.picture.astype(int), -1, 0)
    h, w = red.shape
    by_patch = (red - green).reshape(grid[0], h // grid[0], grid[1], w // grid[1]).mean((1, 3))
    return int(by_patch.argmax())


@pytest.mark.parametrize("options", PREFIXES.values(), ids=PREFIXES)
def test_a_head_is_drawn_at_the_patch_it_attends_to(options, pages, tmp_path):
    vit = attending_vit([lambda i: i, lambda i: (i + 5) % 12], *GRIDS["3x4"], **options)
    # row 2 of 3, column 2 of 4
    (file,) = draw_attention(asked_of(named(vit), tmp_path, images=1, queries=(ImagePoint(9.0, 15.0),)))
    assert file == tmp_path / "attention.png"
    ((rows, headings, _, _, groups, *_),) = pages
    first, second, rollout_row = rows
    assert [first[0].marks[0][0], first[1].marks[0][0]] == [(1 / 3, 1 / 4, 1 / 3, 1 / 4)] * 2
    assert (reddest(first[1], (3, 4)), first[1].words) == (5, "head 1: 100%")
    assert (reddest(second[1], (3, 4)), second[1].words) == (10, "head 2: 100%")
    # half of the mean of two heads; what the patch keeps of itself would be three quarters
    assert (reddest(rollout_row[1], (3, 4)), rollout_row[1].words) == (10, "rollout: 25%")
    assert headings == ["image", "block 1", *(["block 1"] if vit.has_class_token else [])]
    assert [name for name, _ in groups][1:] == ["the marked patch", *["the class token"] * vit.has_class_token]
    if vit.has_class_token:
        assert not first[2].marks


def test_without_a_query_the_most_attended_patch_of_each_image_asks(pages, tmp_path):
    vit = attending_vit([lambda i: i, lambda i: 7 if i < 3 else i], *GRIDS["3x4"])
    files = draw_attention(asked_of(named(vit), tmp_path, images=2))
    assert [file.name for file in files] == ["attention-1.png", "attention-2.png"]
    assert [page.rows[0][0].marks[0][0] for page in pages] == [(1 / 3, 3 / 4, 1 / 3, 1 / 4)] * 2


def test_extremas_class_token_has_blocks_of_its_own(pages, tmp_path):
    torch.manual_seed(1)
    head = InstanceHead(32, 4, depth=2).eval()
    with torch.no_grad():
        for block in head.layers:
            block.attn.q.weight.mul_(1000)  # each head attends to hardly more than one patch
    one = named(random_vit(class_token=False), head=head)
    asked = asked_of(one, tmp_path, images=1)
    draw_attention(asked)
    ((rows, headings, _, caption, groups, *_),) = pages
    assert headings[-2:] == ["own block 1", "own block 2"] and groups[-1] == ("the class token", 2)
    assert "separate blocks" in caption
    weights = class_attention(one.vit, head, asked.pictures())[0, 1, :, 1:]
    assert len(rows) == 5  # four heads of its own, and a rollout
    for row, own in zip(rows, weights, strict=False):
        assert reddest(row[-1], (3, 4)) == int(own.argmax())
    assert rows[-1][-1] is None and rows[-1][1].words.startswith("rollout") and rows[2][1] is None
    draw_attention(replace(asked, heads="mean"))
    (_, (rows, headings, _, caption, *_)) = pages
    assert headings[-1] == "class token" and "class-attention" in caption
    assert rows[0][-1].words == f"{100 * float(weights.mean(0).max()):.2g}%"


def test_marks_of_recordings_count_rows_from_the_bottom(pages, tmp_path):
    assert len(draw_attention(asked_of_sound(tmp_path, images=2, queries=(ImagePoint(4, 2),)))) == 2
    assert pages[0].headings[0] == "recording" and "image" not in pages[0].caption
    assert pages[0].rows[0][1].marks[0][0] == (0, 4 / 9, 1, 1 / 9)


@pytest.mark.parametrize("options", PREFIXES.values(), ids=PREFIXES)
def test_the_mean_of_heads_is_drawn_for_several_patches_at_once(options, pages, tmp_path):
    """ExtreMA Fig. 1: four query patches, averaged over heads, each in the colour of its frame."""
    vit = attending_vit([lambda i: i, lambda i: i], *GRIDS["3x4"], **options)
    asked = asked_of(named(vit), tmp_path, images=2, heads="mean")
    assert draw_attention(asked) == [tmp_path / "attention-mean.png"]
    ((rows, headings, *_),) = pages
    assert headings == ["image", *(f"patch {i}" for i in (1, 2, 3, 4)), *["class token"] * vit.has_class_token]
    for image, *maps in rows:
        places = [(0, 1 / 4), (0, 3 / 4), (2 / 3, 1 / 4), (2 / 3, 3 / 4)]  # in the middle of each quarter
        assert [mark[:2] for mark, _ in image.marks] == [pytest.approx(place) for place in places]
        assert len({colour for _, colour in image.marks}) == 4
        for (mark, colour), tile in zip(image.marks, maps, strict=False):
            patch = reddest(tile, (3, 4))  # each attends to itself alone
            assert (patch // 4 / 3, patch % 4 / 4) == pytest.approx(mark[:2]) and tile.frame == colour
    draw_attention(replace(asked, queries=(ImagePoint(9.0, 15.0),)))
    assert pages[1].headings[:2] == ["image", "patch 1"]
    assert pages[1].rows[0][0].marks[0][0] == (1 / 3, 1 / 4, 1 / 3, 1 / 4)
