"""A finished run sends what its trackers lack of it, and nothing else."""

import pytest
from noting import Noting
from tracked import RESULT, ROWS, SETTINGS, png

from patchloom.errors import PatchloomError
from patchloom.loggers import queue
from patchloom.loggers.pending import RunEnding, send_pending, write_run_ending
from patchloom.loggers.queue import TrackerSet
from patchloom.runs.checksummed import write_checksummed
from patchloom.runs.folder import RunFolder, write_metrics


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run that was killed while a tracker had the first two rows of it."""
    Noting.forget()
    monkeypatch.setattr(queue, "tracker_class", {"noting": Noting}.__getitem__)
    found = RunFolder(tmp_path / "run")
    found.pictures.mkdir(parents=True)
    write_checksummed(found.config, SETTINGS.plain())
    write_metrics(found.metrics, ROWS)
    png(found.pictures / "recovered.png", 200)
    png(found.pictures / "layers.png", 0)  # which an evaluation drew
    with TrackerSet(["noting"], found, print) as killed:
        killed.start(SETTINGS, ROWS[:2])
    write_run_ending(RunEnding(8, [], ["recovered.png", "gone.png"], RESULT), found)
    Noting.calls = []
    return found


def test_what_a_kill_left_is_sent_once(folder):
    send_pending(["noting"], folder)
    picture = {"recovered": ("RGB", (200, 200, 200))}
    told = [("row", 8), ("pictures", 8, picture), ("result", 8), ("end", "success")]
    assert Noting.calls == [("init",), ("settings", "mae"), *told]
    Noting.calls = []
    send_pending(["noting"], folder)
    assert not Noting.calls
    folder.lock()  # it was let go: else this process could not be told from another that trains
    folder.unlock()


def test_what_could_not_be_reached_is_told_the_rest_later(folder):
    said = []
    Noting.fails = {("result",): OSError("no network")}
    send_pending(["noting"], folder, said.append)
    assert "noting is switched off" in said[-1]
    Noting.fails, Noting.calls = {}, []
    send_pending(["noting"], folder, said.append)
    assert [one[0] for one in Noting.calls] == ["init", "settings", "result", "end"]


def test_other_processes_send_nothing(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    send_pending(["noting"], folder)
    assert not Noting.calls


def test_a_run_without_trackers_says_that_nothing_is_sent(folder):
    said = []
    (folder.path / "logs" / "ending.json").unlink()
    send_pending(["noting"], folder, said.append)
    assert not Noting.calls and "nothing is kept for noting" in said[0]


def test_a_damaged_ending_is_named(folder):
    (folder.path / "logs" / "ending.json").write_text("[]")
    with pytest.raises(PatchloomError, match=r"ending.json is damaged"):
        send_pending(["noting"], folder)
