"""TensorBoard reads back what a run of two starts was told."""

import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked import RESULT, ROWS, SETTINGS, shade, whole_run

from patchloom.loggers.queue import TrackerSet
from patchloom.runs.folder import RunFolder


def read(run) -> EventAccumulator:
    found = EventAccumulator(str(run / "logs" / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    return found.Reload()


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    said, run = [], tmp_path_factory.mktemp("told") / "run"
    whole_run(["tensorboard"], run, said)
    return run, said, read(run)


def test_every_row_once_at_its_step(told):
    _, said, found = told
    assert [line for line in said if "switched off" in line] == []
    assert [(one.step, one.value) for one in found.Scalars("held_out")] == [(0, 1.5), (8, 0.75)]
    assert [one.step for one in found.Scalars("epoch")] == [0, 4, 8]
    assert [(one.step, one.value) for one in found.Scalars("baseline/flat patches")] == [(0, 1.0)]
    losses = found.Scalars("loss")
    assert (losses[0].step, losses[0].value) == (4, 1.25) and losses[1].step == 8 and math.isnan(losses[1].value)
    assert "knn" not in found.Tags()["scalars"] and "step" not in found.Tags()["scalars"]


def test_pictures_as_they_were_at_each_step(told):
    found = told[2].Images("pictures/recovered")
    assert [(one.step, shade(one.encoded_image_string)) for one in found] == [(0, 10), (8, 200)]


def test_settings_and_result(told):
    found = told[2]

    def text(name):
        return found.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()

    assert "| task.mask_ratio | 0.75 |" in text("settings") and "| model.depth | 2 |" in text("settings")
    assert text("verdict") == RESULT.verdict and text("summary") == RESULT.summary
    assert "| knn | raw pixels | 0.25 | 0.2 | 0.3 |" in text("results")
    assert found.Scalars("results/knn/run")[0].value == 0.5


@pytest.mark.parametrize("noted", [4, 0, -1, None])
def test_what_a_kill_left_unnoted_is_there_once(told, tmp_path, noted):
    """Between the writing of a row and the note of it a kill has the row written again."""
    run = tmp_path / "run"
    whole_run(["tensorboard"], run, [])
    note = run / "logs" / "tensorboard.json"
    note.write_text(
        note.read_text().replace('"step": 8', f'"step": {noted}').replace('"ended": true', '"ended": false')
    )
    if noted is None:  # killed at the first row
        note.unlink()
    again = TrackerSet(["tensorboard"], RunFolder(run), print)
    again.start(SETTINGS, ROWS)
    again.close("success")
    assert [one.step for one in read(run).Scalars("epoch")] == [0, 4, 8]


def test_a_run_that_went_back_has_the_later_numbers(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with TrackerSet(["tensorboard"], RunFolder(run), print) as tracks:
        tracks.start(SETTINGS, ROWS[:2])
        tracks.row({"step": "6", "loss": "9"})
        tracks.back([4])
        tracks.row({"step": "6", "loss": "1"})
    assert [(one.step, one.value) for one in read(run).Scalars("loss")] == [(4, 1.25), (6, 1.0)]
