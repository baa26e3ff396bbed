"""Tests of the charts: values of each run, merged baselines, and the limit on points."""

from dataclasses import replace

import numpy as np
import pytest

from patchloom.report.numbers import charts_of
from patchloom.runs.past import load_run

NAN = float("nan")


def with_metrics(found, name="one", task="droppos", measured=("position accuracy", "%"), **columns):
    folder = type(found.folder)(found.folder.path.with_name(name))
    settings = replace(found.settings, task=found.settings.task | {"name": task})
    metrics = {key.replace("__", ":").replace("_of_", ":"): np.array(value, float) for key, value in columns.items()}
    result = replace(found.measured, measure=measured[0], unit=measured[1])
    return replace(found, folder=folder, name=name, settings=settings, metrics=metrics, measured=result)


def by_title(charts):
    return {chart.title: chart for chart in charts}


def test_a_run_of_its_own_columns(finished):
    found = by_title(charts_of([load_run(finished)]))
    assert list(found)[:2] == ["training loss", "position accuracy"] and found["position accuracy"].percent
    names = {line.name: line for line in found["kNN accuracy"].lines}
    assert {"kNN accuracy", "untrained", "raw pixels"} == set(names)
    assert names["untrained"].dashed and names["untrained"].x.tolist() == [0, 2] and not names["kNN accuracy"].dashed
    assert "position accuracy, in training" in found and not found["training loss"].percent


def test_baselines_that_move_are_curves(finished):
    one = with_metrics(
        load_run(finished), epoch=[0, 1, 2], held_out=[0.1, 0.2, 0.3], baseline__chance=[0.05, 0.05, NAN],
        baseline__others=[0.1, NAN, 0.4],
    )  # fmt: skip
    lines = {line.name: line for line in charts_of([one])[0].lines}
    assert [*map(list, lines["chance"][1:3])] == [[0, 2], [0.05, 0.05]]
    assert [*map(list, lines["others"][1:3])] == [[0, 2], [0.1, 0.4]]


def test_several_runs_share_axes_where_they_measure_the_same(finished):
    found = load_run(finished)
    epochs = {"epoch": [0, 1, 2], "loss": [NAN, 4.0, 2.0]}
    one = with_metrics(found, "one", held_out=[0.1, 0.2, 0.3], baseline__chance=[0.1, 0.1, 0.1], **epochs)
    two = with_metrics(found, "two", held_out=[0.1, 0.2, 0.4], baseline__chance=[0.1, 0.1, 0.1], **epochs)
    other = {"task": "mae", "measured": ("reconstruction error", "")}
    far = with_metrics(found, "far", held_out=[1, 0.8, 0.7], baseline__copy=[0.5, 0.5, 0.5], **other, **epochs)
    charts = by_title(charts_of([one, two, far]))
    assert [line.name for line in charts["position accuracy"].lines] == ["one", "two", "chance"]
    assert [line.name for line in charts["reconstruction error"].lines] == ["far", "copy"]
    assert not charts["reconstruction error"].percent
    shares = charts["training loss, relative to its start"]
    assert [line.y.tolist() for line in shares.lines] == [[1, 0.5]] * 3
    assert [line.y.tolist() for line in charts_of([one, two])[0].lines] == [[4, 2]] * 2
    apart = replace(two, metrics=two.metrics | {"baseline:chance": np.array([0.2, 0.2, 0.2])})
    named = [line.name for line in by_title(charts_of([one, apart]))["position accuracy"].lines]
    assert named == ["one", "two", "chance, one", "chance, two"]


@pytest.mark.parametrize("n", [1, 400, 401, 5000])
def test_a_line_has_at_most_400_points_and_its_ends(finished, n):
    loss = np.linspace(5, 1, n)
    one = with_metrics(load_run(finished), epoch=np.arange(n), loss=loss)
    (line,) = charts_of([one])[0].lines
    assert len(line.x) == len(line.y) == min(n, 400)
    assert (line.x[0], line.x[-1], line.y[-1]) == (0, n - 1, pytest.approx(loss[-1], rel=1e-5))
    assert all(np.diff(line.x) > 0)


def test_nothing_logged_is_no_chart(finished):
    assert charts_of([replace(load_run(finished), metrics={})]) == []
    assert charts_of([with_metrics(load_run(finished), epoch=[0], loss=[NAN])]) == []
