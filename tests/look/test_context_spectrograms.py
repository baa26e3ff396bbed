"""Tests of pictures of recordings: orientation, colours and captions."""

from dataclasses import replace

import matplotlib
import numpy as np
import torch
from answering import Answers, encoded_of
from PIL import Image
from small import seeded
from tiling import tiles

from patchloom.audio.config import GREY, SIXTH, Sound
from patchloom.audio.recordings import modality_of
from patchloom.look import sheet
from patchloom.look.sheet import EMPTY_MARK, draw_sheet, hatch
from patchloom.nets.geometry import Geometry
from patchloom.patches.pictures import fill_holes
from patchloom.questions.positions import Positions
from patchloom.questions.question import Sheet
from patchloom.withhold.encoder_input import all_patches, drop_positions

SOUND = Sound(bins=8, seconds=0.22, mean=(0.0,) * 8, std=(1.0,) * 8)  # of 20 frames
MAGMA = (np.array(matplotlib.colormaps["magma"].colors) * 255).round()


def drawn(values, folder, sound=SOUND):
    sheet = Sheet("a", "The values.", {"recording": values})
    path = draw_sheet(sheet, (GREY,), (SIXTH,), folder, modality=modality_of(sound))
    return np.asarray(Image.open(path))


def test_low_rows_are_at_the_bottom_and_time_runs_to_the_right(tmp_path):
    assert SOUND.size == (8, 20)
    images = torch.zeros(1, 1, 8, 20)
    images[..., 0, :] = 3  # standard deviations
    images[..., 7, :10] = -3
    images[..., 10:12] = torch.nan
    ((tile,),) = tiles(drawn(images, tmp_path))
    h, w = tile.shape[:2]
    assert (h, w) == (120, 300)
    middle = MAGMA[128]
    places = {(h - 8, 20): MAGMA[255], (7, 20): MAGMA[0], (7, w - 20): middle, (60, 20): middle}
    for (y, x), colour in places.items():
        assert np.abs(tile[y, x] - colour).max() <= 2, (y, x)
    assert (tile[:, 150:180] == hatch(EMPTY_MARK, h, w)[:, 150:180]).all()
    colours = set(map(tuple, tile[:, :150].reshape(-1, 3).tolist()))
    assert not colours & set(map(tuple, hatch(EMPTY_MARK, 40, 40).reshape(-1, 3).tolist()))


def test_the_caption_tells_time_rows_and_colours(tmp_path, monkeypatch):
    pages, real = [], sheet.lay_out
    monkeypatch.setattr(sheet, "lay_out", lambda page: pages.append(page) or real(page))
    for sound, rows in ((SOUND, "coefficients 1 to 8;"), (replace(SOUND, features="logmel"), "from 20 to 8,000 Hz")):
        drawn(torch.zeros(1, 1, 8, 20), tmp_path, sound)
        assert "The values. Left to right: 0.22 s, a frame every 10 ms" in pages[-1].caption
        assert rows in pages[-1].caption
    ((long,),) = tiles(drawn(torch.zeros(1, 1, 40, 998), tmp_path))
    assert long.shape[0] > 50  # no stripe


def test_frames_stand_in_disorder_and_where_they_were_put():
    images = torch.arange(20.0).expand(1, 1, 8, 20)
    geometry = Geometry((1, 20), (8, 1), 1, 1, 8, True)
    dropped = torch.ones(1, 20, dtype=torch.bool)
    dropped[0, 0] = False
    logits = torch.eye(20).roll(2, 1)[None] * 9 + torch.eye(20)[None]  # two frames too late, the right one comes second
    logits[0, 1] = 9 * torch.eye(20)[1]
    given = drop_positions(all_patches(images, 20), dropped.nonzero()[:, 1][None])
    encoded = replace(encoded_of(images, given), modality=modality_of(SOUND), generator=seeded())
    (found,) = Positions(geometry, Answers(logits), {}).sheets(encoded)
    original, disorder, back, right = (column[0, 0, 0] for column in found.columns.values())
    assert torch.equal(original, torch.arange(20.0))
    assert disorder[0] == 0 and (disorder != original).sum() > 10 and disorder.sort().values.tolist() == [*range(20)]
    assert back[0] == 0 and back[4:].tolist() == [*range(2, 18)]  # two frames late
    assert back.sort().values.tolist() == [*range(20)]  # each at a place of its own
    assert right[0] == 0 and right[4:].isinf().all()
    assert "row 1 by 2 right." in found.caption
    off = (16 * 2 + 2 * 18) / 19
    for said in ("19 of 20 frames", f"{1 / 19:.1%}", "100.0%", f"{off:.1f} frames ({10 * off:.0f} ms)"):
        assert said in found.caption


def test_holes_between_frames_are_filled_row_by_row():
    """Blurring along a frame is no baseline: rows are different coefficients."""
    images = torch.tensor([5.0, -5.0])[:, None].expand(1, 1, 2, 9).clone()
    images[..., 3:6] = torch.randn(2, 3)
    filled = fill_holes(images, (2, 1), torch.tensor([[0, 1, 2, 6, 7, 8]]))
    torch.testing.assert_close(filled[0, 0, :, 4], torch.tensor([5.0, -5.0]))
