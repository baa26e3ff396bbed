"""Comparison without labels over several seeds."""

import pytest

from patchloom.compare.outcome import HEADING, Comparison
from patchloom.compare.unlabelled import _by_rankme, _csv, _table
from patchloom.evaluate.results import Row


def row(value: float, low: float, high: float) -> list[Row]:
    return [Row("mae", "-", "label-free", {"measure": "own crop 90 %"}, value, low, high)]


def test_several_seeds_have_a_range_instead_of_an_interval(tmp_path):
    found = {"mae": [row(0.2, 0.1, 0.3), row(0.4, 0.3, 0.5)], "mp3": [row(0.3, 0.2, 0.4)]}
    mae, mp3 = (dict(zip(HEADING, cells, strict=True)) for cells in _csv(found))
    assert (mae["mean"], mae["lowest"], mae["highest"]) == (pytest.approx(0.3), 0.2, 0.4)
    assert (mae["low"], mae["high"], mae["seeds"]) == (None, None, 2)
    assert (mp3["mean"], mp3["low"], mp3["high"], mp3["seeds"]) == (0.3, 0.2, 0.4, 1)
    Comparison(tmp_path, [], [], None, rows=_csv(found)).write()
    written = [line.split(",") for line in (tmp_path / "comparison.csv").read_text().splitlines()]
    assert written[1][3:9] == ["2", "0.300000", "0.200000", "0.400000", "", ""]
    assert written[2][3:9] == ["1", "0.300000", "0.300000", "0.300000", "0.200000", "0.400000"]
    assert _table(found).rows == (("own crop 90 %", "30.0 %\n(20.0-40.0)", "30.0 %"),)


def test_the_hint_has_the_order_by_rankme():
    def rank(value: float) -> list[Row]:
        return [Row("", "-", "label-free", {"measure": "RankMe"}, value, value, value)]

    (said,) = _by_rankme({"mae": [rank(3.0), rank(4.0)], "mp3": [rank(9.0), rank(10.0)], "lut": [row(0.2, 0.1, 0.3)]})
    assert said.startswith("A hint, not a verdict: by RankMe the order is mp3 (9.5) and mae (3.5). ")
    assert _by_rankme({"mae": [rank(3.0)]}) == _by_rankme({"mae": [row(0.2, 0.1, 0.3)]}) == []
