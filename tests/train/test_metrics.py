"""Printed progress of a run: time left, latest measure, and intervals."""

import csv
import io
import sys

import pytest
from killing import SMALL, draw_images, left_behind

from patchloom.errors import Stopped
from patchloom.runs.folder import RunFolder
from patchloom.train import metrics
from patchloom.train.loop import pretrain
from patchloom.train.metrics import Line, LinePart, Pace, Reporter, event_steps, measuring_steps
from patchloom.train.step import Stepper

pytestmark = pytest.mark.usefixtures("quick_probe")


class Clock:
    """Clock that only advances when seconds are added."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def reporter_on(stream, folder, clock, monkeypatch, columns=40):
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    return Reporter(folder, clock=clock)


def counted(number):
    return Line((LinePart((f"line {number}",)), LinePart((" and more that is long, long, long", ""), (1,))))


# ---- the rhythm


def test_where_there_is_no_terminal_lines_come_now_and_then(folder, clock, monkeypatch):
    out = io.StringIO()
    reporter, told = reporter_on(out, folder, clock, monkeypatch), []
    for second in range(3600):
        before = len(out.getvalue())
        reporter.progress(lambda second=second: counted(second))
        if len(out.getvalue()) > before:
            told.append(second)
        clock.now += 1
    assert told[:6] == [10, 40, 70, 100, 130, 160]
    pauses = [b - a for a, b in zip(told[1:], told[2:], strict=False)]
    assert all(30 <= one <= 180 for one in pauses) and pauses == sorted(pauses) and len(told) < 60
    assert out.getvalue().startswith("line 10 ·  and more that is long"), "whole lines: nothing knows how wide it is"
    assert not folder.log.exists(), "when these lines come depends on the machine"


def test_a_line_that_stays_counts_too(folder, clock, monkeypatch):
    out = io.StringIO()
    reporter = reporter_on(out, folder, clock, monkeypatch)
    reporter.progress(lambda: counted(0))
    clock.now += 9
    reporter.say("measured")
    clock.now += 9
    reporter.progress(lambda: counted(1))
    assert out.getvalue() == "measured\n" == folder.log.read_text()


def test_on_a_terminal_one_line_is_kept_up_to_date_and_never_wraps(folder, clock, monkeypatch):
    out = Screen()
    reporter = reporter_on(out, folder, clock, monkeypatch)
    for number in range(10):
        reporter.progress(lambda number=number: counted(number))
        clock.now += 0.1
    reporter.say(counted(10))
    assert out.getvalue() == "\r\x1b[2K".join([*(f"line {n}" for n in range(0, 10, 2)), "line 10\n"])
    assert folder.log.read_text() == "line 10 ·  and more that is long, long, long\n", "the log has it whole"


def test_prose_on_a_terminal_is_broken_between_words(folder, clock, monkeypatch):
    out = Screen()
    reporter_on(out, folder, clock, monkeypatch).say("kNN (k=20, mean): 29.9 % [27.9, 31.9] against 11.0 %")
    assert out.getvalue() == "kNN (k=20, mean): 29.9 % [27.9, 31.9]\n  against 11.0 %\n"


def test_a_name_is_printed_as_it_is(folder, clock, monkeypatch):
    out = io.StringIO()
    reporter_on(out, folder, clock, monkeypatch).say("Encoder: [red]/mnt:dog:/a.safetensors")
    assert out.getvalue() == "Encoder: [red]/mnt:dog:/a.safetensors\n"


def test_a_notebook_gets_plain_lines(folder, clock, monkeypatch):
    """Stdout of Jupyter, which is no terminal."""
    out = io.StringIO()
    reporter = reporter_on(out, folder, clock, monkeypatch)
    reporter.say("begun")
    reporter.progress(lambda: counted(0))
    clock.now += 11
    reporter.progress(lambda: counted(1))
    assert out.getvalue() == "begun\nline 1 ·  and more that is long, long, long\n"


@pytest.mark.parametrize(("name", "value"), [("FORCE_COLOR", "1"), ("TERM", "dumb")])
def test_an_output_without_cursor_control_is_no_terminal(name, value, folder, clock, monkeypatch):
    out = io.StringIO() if name == "FORCE_COLOR" else Screen()
    reporter = reporter_on(out, folder, clock, monkeypatch)
    monkeypatch.setenv(name, value)
    assert not Reporter(folder, clock=clock).terminal
    reporter = Reporter(folder, clock=clock)
    reporter.flash("passing")
    assert out.getvalue() == ""


def test_other_processes_are_silent(folder, clock, monkeypatch):
    out = Screen()
    monkeypatch.setattr(sys, "stdout", out)
    reporter = Reporter(folder, loud=False, clock=clock)
    reporter.say("this")
    reporter.flash("that")
    reporter.progress(lambda: pytest.fail("a line that nobody reads was made"))
    assert out.getvalue() == "" and not folder.log.exists()


# ---- the time left


def walk(pace, clock, step, seconds):
    for each in seconds:
        clock.now += each
        step += 1
        pace.update(step)
    return step


def test_slow_first_updates_do_not_count(clock):
    pace = Pace(1000, 0, 32, clock=clock)
    assert pace.seconds_left() is None and pace.describe() == ("", "")
    step = walk(pace, clock, 0, [3.0])
    assert pace.seconds_left() == pytest.approx(3.0 * 999), "better than nothing"
    step = walk(pace, clock, step, [2.0, 1.5, 1.0] + [0.5] * 16)
    assert pace.seconds_left() == pytest.approx(0.5 * 980), "the mean since the start would say 825 s"
    assert pace.describe()[0] == "64 images/s"


def test_after_a_start_the_pace_of_the_one_before_is_believed_until_there_is_another(clock):
    pace = Pace(1000, 400, 32, seconds=200.0, before=0.5, clock=clock)
    assert pace.seconds_left() == pytest.approx(300.0)
    step = walk(pace, clock, 400, [3.0, 1.0, 1.0])
    assert pace.seconds_left() == pytest.approx(0.5 * 597)
    walk(pace, clock, step, [0.25] * 17)
    assert pace.seconds_left() == pytest.approx(0.25 * 580)
    assert pace.seconds() == pytest.approx(200 + 5 + 0.25 * 17)


def test_the_pace_is_that_of_the_last_minute(clock):
    pace = Pace(100_000, 0, 32, clock=clock)
    step = walk(pace, clock, 0, [0.1] * 3000)
    walk(pace, clock, step, [0.4] * 200)
    assert pace.seconds_a_step() == pytest.approx(0.4, rel=0.01)
    assert len(pace._marks) < 400


def test_many_quick_steps_are_not_all_kept(clock):
    pace = Pace(10**6, 0, 32, clock=clock)
    walk(pace, clock, 0, [0.001] * 20_000)
    assert pace.seconds_a_step() == pytest.approx(0.001, rel=0.01) and len(pace._marks) < 300


def test_measures_do_not_count_as_training_and_waiting_is_of_late(clock):
    pace = Pace(1000, 0, 32, clock=clock)
    step = walk(pace, clock, 0, [1.0] * 20)
    with pace.paused():
        clock.now += 100
    for _ in range(120):
        with pace.waits():
            clock.now += 0.5
        step = walk(pace, clock, step, [0.5])
    assert pace.seconds_a_step() == pytest.approx(1.0)
    assert pace.describe() == ("32 images/s", "50% waiting for data")


# ---- the measures


@pytest.mark.parametrize(
    ("steps", "images", "expected"),
    [
        (1558, 128, [78, 390, 779, 1168, 1558]),  # shapes: after 11 s, where it was after 55
        (100, 32, [5, 25, 50, 75, 100]),
        (16, 16, [1, 4, 8, 12, 16]),
        (78_125, 256, [391, 1562, 5078, 19_531, 39_062, 58_594, 78_125]),  # 20 million images on a GPU
        (2, 8, [1, 2]),
        (1, 8, [1]),
    ],
)
def test_the_first_measure_comes_early(steps, images, expected):
    logged = event_steps(steps, 1 / 200) - {0}
    found = measuring_steps(steps, logged, images)
    assert sorted(found) == expected
    assert found <= logged, "rows, and the means in them, are the same as without"


@pytest.mark.parametrize("steps", [*range(1, 120), 199, 200, 201, 1000, 12_345])
@pytest.mark.parametrize("images", [1, 128, 4096, 100_000])
def test_for_any_number_of_steps(steps, images):
    logged = event_steps(steps, 1 / 200) - {0}
    found = measuring_steps(steps, logged, images)
    assert max(found) == steps and min(found) <= 1 + steps / 20 + steps / 200 and found <= logged


def values(run):
    with open(run / "metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row["held_out"]]


def test_a_run_shows_its_latest_measure_and_after_resuming_at_once(tmp_path, monkeypatch, capsys):
    """The progress line is built at every update, and shows the last measure of the rows."""
    images, run, seen = draw_images(tmp_path / "images"), tmp_path / "run", []
    line = metrics.progress_line

    def noted(epoch, epochs, losses, measured, *rest):
        seen.append((round(epoch * 3), measured[2], rest[0][0]))
        return line(epoch, epochs, losses, measured, *rest)

    monkeypatch.setattr(metrics, "progress_line", noted)
    monkeypatch.setattr(Reporter, "progress", lambda self, make: make())
    update = Stepper.update

    def stopped(self, done, rate, forwards, questions, scale=1.0):
        return update(self, done, rate, forwards, (done == 11, *questions[1:]), scale)

    options = SMALL | {"task": "mae", "epochs": 8}
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "update", stopped)
        with pytest.raises(Stopped):
            pretrain(images, out=run, **options)
    before, _ = capsys.readouterr()
    begun = len(seen)
    pretrain(images, out=run, **options)
    after, _ = capsys.readouterr()

    at = {int(row["step"]): f"reconstruction error {float(row['held_out']):.3f}" for row in values(run)}
    assert list(at) == [0, 2, 6, 12, 18, 24] and len(set(at.values())) == 6
    for step, measured, _ in seen:
        latest = at[max(one for one in at if one <= step)]
        earlier = at[max((one for one in at if one < step), default=0)]
        assert measured in (latest, earlier), "the line before the measure has the one before"
    assert seen[begun][:2] == (11, at[6]), "what was measured before the stop is shown at once"
    assert f"Resuming after step 11 of 24. The last measure: {at[6]} (mean colour" in after
    assert "Resuming" not in before and "unknown" in seen[0][2] and "left" in seen[begun][2]
    assert "unknown" not in seen[begun][2], "the pace of the start before"
    assert seen[-1][2].startswith("trained in ")


def test_more_measures_change_nothing_that_is_trained(tmp_path, monkeypatch):
    images, runs = draw_images(tmp_path / "images"), []
    options = SMALL | {"task": "lut", "epochs": 8}
    for name in ("often", "seldom"):
        with monkeypatch.context() as patch:
            if name == "seldom":
                patch.setattr(metrics, "measuring_steps", lambda steps, logged, images: {steps})
            runs.append(left_behind(pretrain(images, out=tmp_path / name / "run", **options).folder))
    often, seldom = runs
    rows = [one.pop("metrics.csv") for one in runs]
    for found in runs:
        found.pop("curves.png")
    assert often == seldom
    assert len(rows[0]) == len(rows[1]) == 25
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert [bool(row["held_out"]) for row in rows[0]].count(True) == 6
    assert rows[0][-1] == rows[1][-1]
