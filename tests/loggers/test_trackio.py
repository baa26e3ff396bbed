"""Trackio, by its own database where it is installed, and by a module that notes its calls everywhere."""

import json
import sqlite3
import sys
from types import SimpleNamespace

import pytest
from tracked import RESULT, whole_run


def test_what_it_is_called_with(tmp_path, monkeypatch):
    begun, calls = [], []

    def init(project, name, **options):
        begun.append((project, name, options["resume"]))
        log = lambda values, step: calls.append((step, values))  # noqa: E731
        return SimpleNamespace(config={}, log=log, finish=lambda: calls.append("finish"))

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, Image=lambda picture: picture))
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    said = []
    whole_run(["trackio"], tmp_path / "photos-mae", said)
    assert [line for line in said if "switched off" in line] == []
    assert len(begun) == 2 and begun[0] == begun[1] and begun[0][::2] == ("patchloom", "allow")
    assert begun[0][1].startswith("photos-mae-")
    assert [one[0] for one in calls if one != "finish"] == [0, 0, 4, 8, 8, 8]
    assert calls[0][1]["baseline/flat patches"] == 1.0 and calls[1][1]["pictures/recovered"].getpixel((0, 0))[0] == 10
    assert calls[-2][1]["verdict"] == RESULT.verdict and calls[-2][1]["results/knn/run"] == 0.5


def test_its_database(tmp_path_factory, monkeypatch):
    """Its module reads where that is when it is imported."""
    home = tmp_path_factory.mktemp("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(home))
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    pytest.importorskip("trackio", exc_type=ImportError)
    said = []
    whole_run(["trackio"], home / "runs" / "photos-mae", said)
    assert [line for line in said if "switched off" in line] == []
    with sqlite3.connect(home / "patchloom.db") as store:
        rows = [
            (name, step, json.loads(values))
            for name, step, values in store.execute("select run_name, step, metrics from metrics order by id")
        ]
        (config,) = store.execute("select config from configs").fetchone()
    assert len({name for name, *_ in rows}) == 1
    assert [step for _, step, values in rows if "epoch" in values] == [0, 4, 8]
    assert [(step, values["held_out"]) for _, step, values in rows if "held_out" in values] == [(0, 1.5), (8, 0.75)]
    assert [step for _, step, values in rows if "pictures/recovered" in values] == [0, 8]
    assert rows[-1][2]["verdict"] == RESULT.verdict
    assert json.loads(config)["task.mask_ratio"] == "0.75"
