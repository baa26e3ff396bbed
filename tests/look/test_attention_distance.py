"""Tests of attention by offset, for constructed heads and against loops over all pairs."""

import math

import numpy as np
import pytest
import torch
from attending import GRIDS, PREFIXES, attending_vit, random_vit
from running import csv_rows
from seeing import asked_of, named
from swins import swin

from patchloom.look import attention_distance, charts
from patchloom.look.attention import attention_maps
from patchloom.look.attention_distance import draw_relative, relative_attention, uniform_distance
from patchloom.nets.encode import grid_size
from patchloom.results.claims import UNTRAINED


@pytest.mark.parametrize("options", [*PREFIXES.values(), {"positions": "none"}], ids=[*PREFIXES, "no positions"])
@pytest.mark.parametrize("sizes", GRIDS.values(), ids=GRIDS)
def test_all_pairs_of_an_offset_are_averaged(sizes, options):
    vit, images = random_vit(*sizes, **options), torch.randn(3, sizes[2], *sizes[0])
    rows, columns = grid_size(vit)
    maps = attention_maps(vit, images)[..., -rows * columns :, -rows * columns :].mean(0)  # [blocks heads n n]
    by_offset, far, all_of_it = {}, 0.0, 0.0
    for q in range(rows * columns):
        for k in range(rows * columns):
            down, right = k // columns - q // columns, k % columns - q % columns
            by_offset.setdefault((down, right), []).append(maps[..., q, k])
            far, all_of_it = far + math.hypot(down, right) * maps[..., q, k], all_of_it + maps[..., q, k]
    found = relative_attention(vit, images)
    assert found.maps.shape == (3, 2, 2 * rows - 1, 2 * columns - 1)
    for (down, right), some in by_offset.items():
        mine = found.maps[..., down + rows - 1, right + columns - 1]
        torch.testing.assert_close(mine, torch.stack(some).mean(0), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.distances, far / all_of_it, rtol=1e-4, atol=0)


def test_the_mean_distance_of_all_pairs():
    assert uniform_distance((1, 2)) == 0.5 and uniform_distance((1, 3)) == pytest.approx(8 / 9)


@pytest.fixture
def figures(monkeypatch):
    kept, write = {}, charts.write_figure
    monkeypatch.setattr(
        attention_distance, "write_figure", lambda one, out, _: kept.update({out.name: one}) or write(one, out)
    )
    return kept


def test_a_map_a_head_with_the_most_local_head_first(pages, tmp_path):
    far, itself = (lambda i: 11 - i), (lambda i: i)
    vit = attending_vit([far, itself], *GRIDS["3x4"])
    files = draw_relative(asked_of(named(vit), tmp_path, images=2))
    assert [file.name for file in files] == ["relative.png", "distances.png", "relative.csv"]
    (page,) = pages
    local, other = page.rows[0]
    assert local.words == "2: 0.0" and other.words.startswith("1: ") and page.above[0] == "block 1"
    # all of it to itself, of 13 tokens; nothing to the others
    times = np.full((5, 7), 1 / attention_distance.MAX_TIMES_UNIFORM)
    times[2, 3] = 13
    assert (local.picture == page.scales[0].shade(np.log2(times))).all()


def test_distances_of_all_encoders_beside_uniform_attention(figures, tmp_path):
    one, other = named(random_vit()), named(random_vit((32, 32), 8, depth=2), UNTRAINED)
    namesake = one._replace(vit=random_vit(reg_tokens=1))  # another run of the same name
    asked = asked_of(one, tmp_path, images=2, beside=(other, namesake, named(swin(), "shifted")))
    *_, table = draw_relative(asked)
    rows = csv_rows(table)
    assert [(row["encoder"], row["block"], row["head"]) for row in rows] == [
        *(("mine", str(block), str(head)) for block in (1, 2, 3) for head in (1, 2)),
        *((UNTRAINED, str(block), str(head)) for block in (1, 2) for head in (1, 2)),
        *(("mine", str(block), str(head)) for block in (1, 2, 3) for head in (1, 2)),
    ]
    found = [relative_attention(each.vit, asked.pictures(of=each)).distances for each in (one, other, namesake)]
    expected = torch.cat([distances.flatten() for distances in found])
    torch.testing.assert_close(torch.tensor([float(row["distance"]) for row in rows]), expected, rtol=1e-4, atol=0)
    (axes,) = figures["distances.png"].axes
    uniform = {line.get_ydata()[0] for line in axes.lines[-2:]}
    assert uniform == {uniform_distance((3, 4)), uniform_distance((4, 4))}
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > max(uniform)
    for head, dots in enumerate(axes.lines[:2]):
        np.testing.assert_allclose(dots.get_ydata(), found[0][:, head])
    np.testing.assert_allclose(axes.lines[6].get_ydata(), found[0].mean(1))
    caption = figures["distances.png"].get_supxlabel()
    assert "Left out: shifted" in caption
