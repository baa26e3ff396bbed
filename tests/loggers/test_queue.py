"""What a run tells goes to all trackers; one that fails is switched off, and none is waited for."""

import json
import threading
import time

import pytest
from noting import Noting, Other
from tracked import RESULT, ROWS, SETTINGS, png

from patchloom.errors import PatchloomError, Stopped
from patchloom.loggers import queue
from patchloom.loggers.queue import TrackerSet
from patchloom.runs.folder import RunFolder


@pytest.fixture
def run(tmp_path, monkeypatch):
    Noting.forget()
    monkeypatch.setattr(queue, "tracker_class", {"noting": Noting, "other": Other}.__getitem__)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def tell(run, said, names=("noting", "other")):
    with TrackerSet(names, RunFolder(run), said.append) as all_of_it:
        all_of_it.start(SETTINGS, ROWS[:1])
        all_of_it.row(ROWS[1])
        all_of_it.pictures([png(run / "recovered.png", 10), run / "page.html"], 4)
        all_of_it.row(ROWS[2])
        all_of_it.result(RESULT, 8)


def test_all_is_told_in_order(run):
    said = []
    tell(run, said)
    picture = {"recovered": ("RGB", (10, 10, 10))}
    assert Noting.calls == Other.calls
    assert Noting.calls == [
        *(("init",), ("settings", "mae"), ("row", 0), ("row", 4), ("pictures", 4, picture), ("row", 8)),
        *(("result", 8), ("end", "success")),
    ]
    assert said == ["  noting: here", "  other: here"]


def test_what_a_tracker_has_is_not_sent_again(run):
    tell(run, [])
    Noting.calls = []
    tell(run, [], ["noting"])
    assert Noting.calls == [("init",), ("settings", "mae"), ("end", "success")]


def test_the_last_pictures_are_sent_though_others_were_at_that_step(run):
    """A run that stops early may have drawn there on the way; its last pictures are of its best weights."""
    for _ in range(2):  # the second start is that of a run that was killed at its end: it draws them again
        with TrackerSet(["noting"], RunFolder(run), print) as all_of_it:
            all_of_it.start(SETTINGS, ROWS)
            all_of_it.pictures([png(run / "recovered.png", 10)], 8)
            all_of_it.pictures([png(run / "recovered.png", 200)], 8, ended=True)
    shades = [one[2]["recovered"][1][0] for one in Noting.calls if one[0] == "pictures"]
    assert shades == [10, 200]


def test_one_that_is_asked_for_later_gets_all_rows(run):
    tell(run, [], ["noting"])
    late = TrackerSet(["other"], RunFolder(run), print)
    late.start(SETTINGS, ROWS)
    late.close("success")
    assert [one[1] for one in Other.calls if one[0] == "row"] == [0, 4, 8]


@pytest.mark.parametrize("where", [("init",), ("settings",), ("row", 4), ("pictures",), ("result",), ("end",)], ids=str)
@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), SystemExit(1)], ids=repr)
def test_one_that_fails_is_switched_off_in_one_sentence(where, problem, run):
    said = []
    Noting.fails = {where: problem}
    tell(run, said)
    about = [line for line in said if "switched off" in line]
    assert len(about) == 1 and about[0].startswith("  noting is switched off, and the run goes on without it: ")
    assert type(problem).__name__ in about[0]
    assert [one[0] for one in Other.calls] == "init settings row row pictures row result end".split()
    Noting.fails = {}
    tell(run, [])  # what it lacks, it gets when the run goes on
    assert [one[1] for one in Noting.calls if one[0] == "row"] == [0, 4, 8]


def test_training_does_not_wait_for_one_that_is_stuck(run, monkeypatch):
    monkeypatch.setattr(queue, "_END", 0.2)
    said, began = [], time.monotonic()
    with TrackerSet(["noting", "other"], RunFolder(run), said.append) as all_of_it:
        all_of_it.start(SETTINGS, [])
        all_of_it.row(ROWS[0] | {"stuck": "1"})
        all_of_it.row(ROWS[1])
    assert time.monotonic() - began < 20
    Noting.let_go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tracker "):
            thread.join()  # else it would tell the next test
    assert "  noting did not take all that it was sent within 0.2 s; the rest is in the run" in said


def test_a_run_that_went_back_sends_its_rows_again(run):
    with TrackerSet(["noting"], RunFolder(run), print) as all_of_it:
        all_of_it.start(SETTINGS, ROWS)
        all_of_it.back([4])
        all_of_it.row(ROWS[2])
    assert [one[:2] for one in Noting.calls[2:]] == [
        *(("row", 0), ("row", 4), ("row", 8), ("back", 4), ("row", 8), ("end", "success")),
    ]


@pytest.mark.parametrize(
    "known, went_back, back, rows",
    [(0, [4], [4], [8]), (0, [4, 0], [0], [4, 8]), (1, [0, 4], [4], [8]), (1, [0], [], [])],
)
def test_setbacks_without_the_tracker_are_made_good_at_its_next_start(known, went_back, back, rows, run):
    """A start without --log may go back, and any may be killed before its trackers hear of it."""
    with TrackerSet(["noting"], RunFolder(run), print) as all_of_it:
        all_of_it.start(SETTINGS, [], went_back[:known])
        for row in ROWS:
            all_of_it.row(row)
    for expected in ([*back, *rows], []):  # each setback is made good once
        Noting.calls = []
        with TrackerSet(["noting"], RunFolder(run), print) as all_of_it:
            all_of_it.start(SETTINGS, ROWS, went_back)
        assert [one[1] for one in Noting.calls if one[0] in ("back", "row")] == expected


@pytest.mark.parametrize("problem, status", [(Stopped("s"), "aborted"), (PatchloomError("p"), "failed")])
def test_the_end_says_how_the_run_ended(problem, status, run):
    with pytest.raises(type(problem)), TrackerSet(["noting"], RunFolder(run), print) as all_of_it:
        all_of_it.start(SETTINGS, [])
        raise problem
    assert Noting.calls[-1] == ("end", status)


def test_a_damaged_note_is_named(run):
    said = []
    tell(run, [])
    (run / "logs" / "noting.json").write_text("{")
    tell(run, said)
    assert "noting.json is damaged: delete it, and a new run begins there" in " ".join(said)


def test_nothing_is_written_into_a_folder_that_took_the_place_of_the_runs(run):
    said, folder = [], RunFolder(run)
    folder.lock()
    tracked = TrackerSet(["noting"], folder, said.append)
    tracked.start(SETTINGS, ROWS[:1])
    while not (run / "logs" / "noting.json").exists():
        time.sleep(0.01)
    run.rename(run.with_name("moved"))
    run.mkdir()
    tracked.row(ROWS[1])
    tracked.close("success")
    folder.unlock()
    assert not list(run.iterdir()) and "was removed, moved or replaced" in said[-1]
    assert json.loads((run.with_name("moved") / "logs" / "noting.json").read_text())["step"] == 0
