"""Printed progress of a run, its measures and pictures on the way, and lines that fit the terminal."""

import io
import sys

import pytest
import torch
from killing import SMALL, left_behind
from running import column, rows, stop_at
from small import small
from torch import nn

from patchloom.display import duration
from patchloom.errors import Stopped
from patchloom.nets.encode import patch_count
from patchloom.runs.folder import RunFolder
from patchloom.tasks.mae import MAE
from patchloom.train import metrics
from patchloom.train.loop import pretrain
from patchloom.train.metrics import (
    Line,
    Reporter,
    drawing_steps,
    estimate_flops,
    event_steps,
    measuring_steps,
    progress_line,
    round_duration,
    wrap_columns,
)

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
def on(tmp_path, clock, monkeypatch):
    """Return a function that makes a reporter on a stream of 40 columns."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")

    def report(stream, **more):
        monkeypatch.setattr(sys, "stdout", stream)
        return Reporter(RunFolder(tmp_path), clock=clock, **more)

    return report


def counted(number):
    return Line((((f"line {number}",), ()), ((" and more that is long, long, long", ""), (1,))))


# The rhythm of lines.


def test_where_there_is_no_terminal_lines_come_now_and_then(on, clock):
    out, told = io.StringIO(), []
    reporter = on(out)
    for second in range(3600):
        before = len(out.getvalue())
        reporter.progress(lambda second=second: counted(second))
        if len(out.getvalue()) > before:
            told.append(second)
        clock.now += 1
    assert told[:6] == [10, 40, 70, 100, 130, 160]
    pauses = [b - a for a, b in zip(told[1:], told[2:], strict=False)]
    assert all(30 <= one <= 180 for one in pauses) and pauses == sorted(pauses) and 20 < len(told) < 60
    assert out.getvalue().startswith("line 10 ·  and more that is long"), "whole lines: nothing knows how wide it is"
    assert not reporter.folder.log.exists(), "when these lines come depends on the machine"
    clock.now += 90 * 3600
    for _ in range(2):
        before = len(out.getvalue())
        reporter.progress(lambda: counted(0))
        assert len(out.getvalue()) > before
        clock.now += 301  # the longest pause


def test_a_line_that_stays_counts_too(on, clock):
    out = io.StringIO()
    reporter = on(out)
    reporter.progress(lambda: counted(0))
    clock.now += 9
    reporter.say("measured [red]/mnt:dog:/a.safetensors")
    clock.now += 9
    reporter.progress(lambda: counted(1))
    assert out.getvalue() == "measured [red]/mnt:dog:/a.safetensors\n" == reporter.folder.log.read_text()


def test_on_a_terminal_one_line_is_kept_up_to_date_and_never_wraps(on, clock):
    out = Screen()
    reporter = on(out)
    for number in range(10):
        reporter.progress(lambda number=number: counted(number))
        clock.now += 0.1
    reporter.say(counted(10))
    assert out.getvalue() == "\r\x1b[2K".join([*(f"line {n}" for n in range(0, 10, 2)), "line 10\n"])
    assert reporter.folder.log.read_text() == "line 10 ·  and more that is long, long, long\n", "the log has it whole"
    reporter.show("kNN (k=20, mean): 29.9 % [27.9, 31.9] against 11.0 %")
    assert out.getvalue().endswith("\nkNN (k=20, mean): 29.9 % [27.9, 31.9]\n  against 11.0 %\n")


def test_an_output_without_cursor_control_gets_no_passing_lines(on, monkeypatch):
    for out, name, value in ((io.StringIO(), "FORCE_COLOR", "1"), (Screen(), "TERM", "dumb")):
        reporter = on(out)
        monkeypatch.setenv(name, value)
        reporter.flash("passing")
        assert not reporter.terminal and out.getvalue() == ""


def test_a_closed_output_does_not_end_training(on, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    discarded = []
    monkeypatch.setattr(metrics, "discard_output", lambda: discarded.append(True))
    reporter = on(Closed())
    reporter.say("still in the log")
    assert discarded and reporter.folder.log.read_text() == "still in the log\n"


def test_other_processes_are_silent(on):
    out = Screen()
    reporter = on(out, loud=False)
    reporter.say("this")
    reporter.flash("that")
    reporter.progress(lambda: pytest.fail("a line that nobody reads was made"))
    assert out.getvalue() == "" and not reporter.folder.log.exists()


# The steps of measures and pictures.


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
    assert sorted(measuring_steps(steps, event_steps(steps, 1 / 200) - {0}, images)) == expected


def test_measures_are_in_rows_for_any_number_of_steps():
    for steps in (*range(1, 120), 199, 200, 201, 1000, 12_345):
        logged = event_steps(steps, 1 / 200) - {0}
        for images in (1, 128, 4096, 100_000):
            found = measuring_steps(steps, logged, images)
            assert max(found) == steps and min(found) <= 1 + steps / 20 + steps / 200 and found <= logged


def test_drawings_are_far_apart_and_none_is_at_the_end(monkeypatch):
    def drawn(steps, images, operations):
        monkeypatch.setattr(metrics, "estimate_flops", lambda task: operations)
        measured = measuring_steps(steps, event_steps(steps, 1 / 200) - {0}, images)
        return drawing_steps(steps, measured, images, nn.Identity())

    assert drawn(1554, 128, 1.6e8) == {0, 388, 777, 1166}  # `pretrain shapes`
    assert drawn(1554, 128, 2e10) == {0, 78, 388, 777, 1166}, "of a larger model every measure is worth a picture"
    assert drawn(18, 16, 2e6) == set(), "a run that takes seconds has them at its end"


def test_operations_are_six_per_weight_and_patch():
    task = small(MAE, p=8)
    trained = sum(one.numel() for one in task.parameters() if one.requires_grad)
    assert estimate_flops(task) == 6 * trained * patch_count(task.encoder)
    task.encoder.blocks[0].mlp.fc1.weight.requires_grad = False
    assert estimate_flops(task) == (6 * trained - 4 * 32 * 128) * patch_count(task.encoder)


# Runs that print, measure and draw.

OPTIONS = SMALL | {"epochs": 8}  # 24 steps


def test_a_run_shows_its_latest_measure_and_after_resuming_at_once(unlabelled_images, tmp_path, monkeypatch, capsys):
    """The progress line is built at every update, and shows the last measure of the rows."""
    run, seen, line = tmp_path / "run", [], metrics.progress_line

    def noted(epoch, epochs, losses, measured, *rest):
        seen.append((round(epoch * 3), measured[2], rest[0][0]))
        return line(epoch, epochs, losses, measured, *rest)

    monkeypatch.setattr(metrics, "progress_line", noted)
    monkeypatch.setattr(Reporter, "progress", lambda self, make: make())
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(patch, 11)
        pretrain(unlabelled_images, "mae", out=run, **OPTIONS)
    before, begun = capsys.readouterr().out, len(seen)
    pretrain(unlabelled_images, "mae", out=run, **OPTIONS)
    after = capsys.readouterr().out
    measured = {int(row["step"]): float(row["held_out"]) for row in rows(run) if row["held_out"]}
    at = {step: f"reconstruction error {value:.3f}" for step, value in measured.items()}
    assert list(at) == [0, 2, 6, 12, 18, 24] and len(set(at.values())) == 6
    for step, shown, _ in seen:
        latest = at[max(one for one in at if one <= step)]
        earlier = at[max((one for one in at if one < step), default=0)]
        assert shown in (latest, earlier), "the line before the measure has the one before"
    assert seen[begun][:2] == (11, at[6]), "what was measured before the stop is shown at once"
    assert f"Resuming after step 11 of 24. The last measure: {at[6]} (mean colour" in after
    assert "Resuming" not in before and "unknown" in seen[0][2] and "left" in seen[begun][2]
    assert "unknown" not in seen[begun][2], "the pace of the start before"
    assert seen[-1][2].startswith("trained in ")
    for told in (before, after):  # the second start knows the verdict from its file
        assert told.count("  still too early to tell\n") == 2 and "  so far " not in told


def test_measures_and_pictures_change_nothing_that_is_trained(unlabelled_images, tmp_path, monkeypatch, capsys):
    usual = pretrain(unlabelled_images, "lut", out=tmp_path / "usual" / "run", **OPTIONS).folder
    assert "first pictures" not in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "measuring_steps", lambda steps, logged, images: {steps})
        seldom = pretrain(unlabelled_images, "lut", out=tmp_path / "seldom" / "run", **OPTIONS).folder
    capsys.readouterr()
    monkeypatch.setattr(metrics, "_BETWEEN", 1.0)
    drawn, draw_run = [], metrics.draw_run

    def noted(validation, folder, settings, measure, place, *more, **how):
        torch.rand(3)  # as if drawing used the random numbers of all
        files = draw_run(validation, folder, settings, measure, place, *more, **how)
        drawn.append((place[0], (folder.pictures / "curves.png").exists()))
        return files

    monkeypatch.setattr(metrics, "draw_run", noted)
    often = pretrain(unlabelled_images, "lut", out=tmp_path / "often" / "run", **OPTIONS).folder
    told = capsys.readouterr().out
    assert drawn == [(1, False), (2, True), (6, True), (12, True), (18, True)], "first pictures have no curves"
    places = [told.index(said) for said in ("before the first step: ", "first pictures: ", "epoch 0.7")]
    assert places == sorted(places) and told.count("first pictures: ") == 1
    assert left_behind(often) == left_behind(usual)
    one, other = left_behind(usual), left_behind(seldom)
    tables = [found.pop("metrics.csv") for found in (one, other)]
    assert one == other
    assert [row["loss"] for row in tables[0]] == [row["loss"] for row in tables[1]] and len(tables[0]) == 25
    assert len(column(usual, "held_out")) == 6 and tables[0][-1] == tables[1][-1]


# Lines that fit: the most important parts stay longest.

MEASURED = ["reconstruction error 0.499 (mean colour 0.615, blurred copy 0.727)"]
MEASURED += ["reconstruction error 0.499 (blurred copy 0.727)", "reconstruction error 0.499"]
PACE = ("1,891 images/s", "1% waiting for data")
NOW = progress_line(10.5, 42, "loss 2.4360", MEASURED, ["2 min 48 s left", "3 min left"], PACE)


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (None, f"2 min 48 s left · epoch 10.5/42 · {MEASURED[0]} · loss 2.4360 · 1,891 images/s · 1% waiting for data"),
        (135, f"2 min 48 s left · epoch 10.5/42 · {MEASURED[0]} · loss 2.4360 · 1,891 images/s"),
        (115, f"2 min 48 s left · epoch 10.5/42 · {MEASURED[0]} · loss 2.4360"),
        (96, f"2 min 48 s left · epoch 10.5/42 · {MEASURED[1]} · loss 2.4360"),
        (79, f"3 min left · epoch 10.5/42 · {MEASURED[1]}"),
        (60, f"3 min left · epoch 10.5/42 · {MEASURED[2]}"),
        (50, f"3 min left · 10.5/42 · {MEASURED[2]}"),
        (30, "3 min left · 10.5/42"),
        (5, "3 min"),
    ],
)
def test_what_matters_least_goes_first(width, text):
    assert NOW.fit(width) == text


def test_parts_give_way_in_their_order_and_to_any_width():
    one = Line(((("aaaa", "a", ""), (1, 3)), (("bbbb", "b"), (2,))))
    fitted = {None: "aaaa · bbbb", 11: "aaaa · bbbb", 8: "a · bbbb", 5: "a · b", 4: "b", 1: "b"}
    assert {width: one.fit(width) for width in fitted} == fitted
    assert all(len(NOW.fit(width)) <= width for width in range(200))
    assert str(progress_line(0.0, 42, "", [], ["5 s left", "5 s left"], ("", ""))) == "5 s left · epoch 0.0/42"
    assert "epoch 0.125/0.5" in str(progress_line(0.125, 0.5, "", [], ["", ""], ("", "")))


def test_prose_is_broken_between_words_and_numbers_stay_whole():
    text = "kNN (k=20, mean): 29.9 % [27.9, 31.9] against 11.0 % untrained and 17.5 % raw pixels on 2,000 test images."
    for width in range(30, 130):
        lines = wrap_columns(text, width).split("\n")
        assert all(len(one) <= width for one in lines)
        assert " ".join(one.strip() for one in lines) == text
        for whole in ("29.9 % [27.9, 31.9]", "11.0 %", "17.5 %"):
            assert any(whole in one for one in lines)
        assert all(one.startswith("  ") and one[2] != " " for one in lines[1:])


def test_a_table_goes_on_under_its_column_and_words_are_never_cut():
    text = "  compile   False        (unknown here: patchloom bench --compile true measures it)"
    assert wrap_columns(text, 60).split("\n")[1] == " " * 25 + "--compile true measures it)"
    assert wrap_columns("  " + "x" * 100 + " end", 80) == "  " + "x" * 100 + "\n    end"
    assert [wrap_columns(short, 80) for short in ("", "  two  columns")] == ["", "  two  columns"]


@pytest.mark.parametrize(
    ("seconds", "long", "short"),
    [
        (42.4, "42 s", "42 s"),
        (168, "2 min 48 s", "3 min"),
        (3599.9, "1 h 0 min", "1 h"),
        (18_600, "5 h 10 min", "5 h"),
        (40 * 86_400, "40 days", "960 h"),
    ],
)
def test_durations(seconds, long, short):
    assert (duration(seconds), round_duration(seconds)) == (long, short)
