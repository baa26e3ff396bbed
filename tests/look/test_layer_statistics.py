"""Tests of layer statistics with known values, and of their picture and table."""

import math

import pytest
import torch
from attending import random_vit
from running import csv_rows
from seeing import asked_of, named
from swins import swin

from patchloom.look.layer_statistics import _scaled, _shared, draw_depth, measure_depth, relative_log_amplitude
from patchloom.nets.encode import layer_names, patch_layers
from patchloom.questions.collapse import effective_rank


def linear_cka(a, b):
    return _shared(_scaled(a), _scaled(b))


@pytest.mark.parametrize(("m", "d", "e"), [(200, 6, 9), (5, 20, 12)])
def test_cka_is_one_of_itself_and_of_its_rotation(m, d, e):
    a, b = torch.randn(m, d), torch.randn(m, e)
    rotation = torch.linalg.qr(torch.randn(d, d)).Q
    assert linear_cka(a, a) == pytest.approx(1, abs=1e-5)
    assert linear_cka(a, 1e8 * a @ rotation + 3e8) == pytest.approx(1, abs=1e-5)
    x, y = a - a.mean(0), b - b.mean(0)
    norms = [torch.linalg.matrix_norm(one).item() for one in (y.T @ x, x.T @ x, y.T @ y)]
    assert linear_cka(a, b) == pytest.approx(norms[0] ** 2 / norms[1] / norms[2], rel=1e-4) == linear_cka(b, a)
    assert linear_cka(a, b) < 0.99


def test_cka_of_what_has_nothing_in_common_is_none():
    a = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    assert linear_cka(a, torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])) == pytest.approx(0, abs=1e-6)
    assert math.isnan(linear_cka(a, torch.ones(4, 1)))


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 10), (1, 6)])
def test_frequencies_of_a_constant_and_of_a_checkerboard(rows, columns):
    ones = torch.ones(2, rows, columns, 3)
    board = (-1.0) ** (torch.arange(rows)[:, None] + torch.arange(columns))[None, :, :, None]
    assert relative_log_amplitude(5 * ones)[-1] < -12  # nothing at all
    # the mean is 4, the board 0.5 high
    mixed = relative_log_amplitude(4 * ones + 0.5 * board)
    assert mixed[0] == 0 and mixed[-1].item() == pytest.approx(math.log(0.5 / 4), abs=1e-4)
    assert len(mixed) == max(rows, columns) // 2 + 1 and (mixed[1:-1] < -12).all()
    assert relative_log_amplitude(board.expand_as(ones))[-1] > 12


def test_a_wave_is_at_its_frequency():
    wave = torch.cos(2 * math.pi * 2 * (torch.arange(16)[:, None] + torch.arange(16)) / 16)[None, ..., None]
    spectrum = relative_log_amplitude(1 + wave)
    assert spectrum[1:].argmax() == 1 and spectrum[2].item() == pytest.approx(math.log(0.5), abs=1e-3)


def test_layers_are_measured_as_each_alone_would_be():
    vit, images = random_vit(), torch.randn(11, 3, 24, 32)  # more than one batch
    found = measure_depth(named(vit), images)
    layers = [layer.detach() for layer in patch_layers(vit, images)][:-1]
    assert found.layers == layer_names(vit)[:-1] and found.patches == 11 * 12
    for i, layer in enumerate(layers):
        flat = layer.flatten(0, 2)
        assert found.fourier[i].item() == pytest.approx(relative_log_amplitude(layer)[-1].item(), abs=1e-4)
        assert found.rank[i].item() == pytest.approx(effective_rank(flat), rel=1e-4)
        assert found.similarity[i, -1].item() == pytest.approx(linear_cka(flat, layers[-1].flatten(0, 2)), abs=1e-4)
    assert found.similarity.diagonal().tolist() == pytest.approx([1] * 4, abs=1e-4)
    assert torch.equal(found.similarity, found.similarity.T)


def test_of_many_patches_some_are_drawn_by_lot(monkeypatch):
    monkeypatch.setattr("patchloom.look.layer_statistics._PATCHES", 50)
    vit, images = random_vit(), torch.randn(11, 3, 24, 32)
    first, again, other = (measure_depth(named(vit), images, seed) for seed in (0, 0, 1))
    assert first.patches == 50 and torch.equal(first.rank, again.rank) and not torch.equal(first.rank, other.rank)
    assert torch.equal(first.fourier, other.fourier)


def test_the_caption_says_what_few_patches_do(monkeypatch, tmp_path):
    said, module = [], "patchloom.look.layer_statistics"
    monkeypatch.setattr(f"{module}.wrap", lambda text, *given: said.append(text) or [])
    monkeypatch.setattr(f"{module}.write_figure", lambda figure, out, page_caption: out)
    for patches in (20, 2048):  # of the 36 that three images have
        monkeypatch.setattr(f"{module}._PATCHES", patches)
        draw_depth(asked_of(named(random_vit()), tmp_path))
    assert ["rank is lower" in each for each in said] == [False, True]


def test_picture_and_table_of_several_encoders(tmp_path, monkeypatch):
    drawn, module = [], "patchloom.look.layer_statistics"
    monkeypatch.setattr(f"{module}.write_figure", lambda figure, out, page_caption: drawn.append(figure) or out)
    others = (named(random_vit(depth=2, class_token=False), "untrained"), named(swin(), "swin"))
    picture, table = draw_depth(asked_of(named(random_vit(reg_tokens=2)), tmp_path, beside=others))
    assert (picture.name, table.name) == ("depth.png", "depth.csv")
    for axes in drawn[0].subfigs[0].axes:
        places = [line.get_xdata().tolist() for line in axes.lines]
        assert places == [pytest.approx([0, 1 / 3, 2 / 3, 1]), [0, 0.5, 1], [0, 0.5, 1]]  # fractions of each depth
    rows = csv_rows(table)
    assert [row["encoder"] for row in rows].count("mine") == 4 * (2 + 4)
    ranks = [row for row in rows if row["encoder"] == "untrained" and row["measure"] == "effective rank"]
    assert [row["block"] for row in ranks] == ["0", "1", "2"]
    itself = next(row for row in rows if row["measure"] == "linear CKA with block 1" and row["block"] == "1")
    assert float(itself["value"]) == pytest.approx(1, abs=1e-4)


def test_one_patch_has_no_frequencies(tmp_path):
    _, table = draw_depth(asked_of(named(random_vit((16, 16), 16, positions="none")), tmp_path / "patch"))
    assert {row["value"] for row in csv_rows(table) if row["measure"] == "relative log-amplitude"} == {""}
