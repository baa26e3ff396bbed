"""All trackers receive the data of a run; a failing one is switched off, and training never waits for one."""

import json
import socket
import threading
import time
from unittest.mock import Mock

import pytest
from noting import Noting, Other
from refusing import refusal
from tracked import RESULT, ROWS, SETTINGS, png

from patchloom.errors import PatchloomError, Stopped
from patchloom.loggers import queue
from patchloom.loggers.base import SentRecord
from patchloom.loggers.queue import TrackerSet, send_pending
from patchloom.results.result import SHARE, Baseline, Result
from patchloom.results.verdict import Health, Verdict
from patchloom.runs.folder import FolderLocked, RunFolder
from patchloom.system.checksummed import write_checksummed


@pytest.fixture
def run(tmp_path, monkeypatch):
    Noting.forget()
    monkeypatch.setattr(queue, "tracker_class", {"noting": Noting, "other": Other, "silent": Silent}.__getitem__)
    (tmp_path / "run" / "pictures").mkdir(parents=True)
    return tmp_path / "run"


def received(kind, tracker=Noting):
    """The first value of each call of a kind, such as the step of each row."""
    return [one[1] for one in tracker.calls if one[0] == kind]


def tell(run, said, names=("noting", "other")):
    with TrackerSet(names, RunFolder(run), said.append) as tracks:
        tracks.start(SETTINGS, ROWS[:1])
        tracks.log_row(ROWS[1])
        tracks.log_images([png(run / "pictures" / "recovered.png", 10), run / "page.html"], 4)
        tracks.log_row(ROWS[2])
        png(run / "pictures" / "recovered.png", 200)
        tracks.log_result(RESULT)


def test_everything_is_sent_in_order_and_nothing_twice(run):
    said = []
    tell(run, said)
    early, last = {"recovered": ("RGB", (10, 10, 10))}, {"recovered": ("RGB", (200, 200, 200))}
    assert Noting.calls == Other.calls
    assert Noting.calls == [
        *(("init",), ("settings", "mae"), ("row", 0), ("row", 4), ("pictures", 4, early), ("row", 8)),
        *(("pictures", 8, last), ("result", 8), ("end", "success")),
    ]
    assert said == ["  noting: here", "  other: here"]
    Noting.calls = []
    tell(run, [], ["noting"])
    assert Noting.calls == [("init",), ("settings", "mae"), ("end", "success")]


def test_the_last_pictures_are_sent_though_others_were_at_that_step(run):
    """A run that stops early may have sent pictures at that step; its last pictures show its best weights."""
    for _ in range(2):  # the second start is that of a run that was killed at its end: it makes the pictures again
        with TrackerSet(["noting"], RunFolder(run), print) as tracks:
            tracks.start(SETTINGS, ROWS)
            tracks.log_images([png(run / "pictures" / "recovered.png", 10)], 8)
            png(run / "pictures" / "recovered.png", 200)
            tracks.log_result(RESULT)
    assert [one[2]["recovered"][1][0] for one in Noting.calls if one[0] == "pictures"] == [10, 200]


def test_an_extended_run_sends_its_next_result_and_a_later_tracker_gets_all_rows(run):
    tell(run, [], ["noting"])
    with TrackerSet(["noting", "other"], RunFolder(run), print) as tracks:
        tracks.start(SETTINGS, ROWS)
        tracks.log_result(RESULT._replace(step=16))
    assert received("result") == [8, 16] and received("row", Other) == received("row") == [0, 4, 8]


@pytest.mark.parametrize("where", [("init",), ("settings",), ("row", 4), ("pictures",), ("result",), ("end",)], ids=str)
@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), SystemExit(1)], ids=repr)
def test_a_failing_tracker_is_switched_off_in_one_sentence(where, problem, run):
    said = []
    Noting.fails = {where: problem}
    tell(run, said)
    (about,) = (line for line in said if "switched off" in line)
    assert about.startswith("  noting is switched off") and type(problem).__name__ in about
    assert [one[0] for one in Other.calls] == "init settings row row pictures row pictures result end".split()
    Noting.fails = {}
    tell(run, [])  # it receives the missing data when the run continues
    assert received("row") == [0, 4, 8]


def wait_for_senders():
    """Let stuck trackers go, and wait for their threads: otherwise they would print in the next test."""
    Noting.let_go.set()
    for thread in threading.enumerate():
        if isinstance(thread, queue.Sender):
            thread.join()


def test_training_does_not_wait_for_a_stuck_tracker(run, monkeypatch):
    monkeypatch.setattr(queue, "_END", 0.2)
    said, began = [], time.monotonic()
    with TrackerSet(["noting", "other"], RunFolder(run), said.append) as tracks:
        tracks.start(SETTINGS, [])
        tracks.log_row(ROWS[0] | {"stuck": "1"})
        tracks.log_row(ROWS[1])
    assert time.monotonic() - began < 20
    wait_for_senders()
    assert any(line.startswith("  noting did not receive everything") for line in said)


class Silent(Noting):
    """Tracker that begins as its server never answers, or answers late."""

    calls: list = []
    url = ""

    def __init__(self, folder, kind):
        Noting.let_go.wait(30)
        super().__init__(folder, kind)

    @classmethod
    def server(cls):
        return cls.url


@pytest.fixture
def silent(run, monkeypatch):
    """Function that tracks a run by a `Silent` tracker whose server is there or not; returns lines and seconds."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, seconds in (("_START", 0.2), ("_SOON", 0.2), ("_ABSENT", 0.4), ("_END", 20.0)):
        monkeypatch.setattr(queue, name, seconds)
    Silent.calls = []

    def track(answers_after: float | None = None):
        said, began = [], time.monotonic()
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            monkeypatch.setattr(Silent, "url", f"http://127.0.0.1:{server.getsockname()[1]}")
            if answers_after is not None:
                server.listen()
            with TrackerSet(["silent"], RunFolder(run), said.append) as tracks:
                tracks.start(SETTINGS, ROWS[:1])
                if answers_after is not None:
                    threading.Timer(answers_after, Noting.let_go.set).start()
                tracks.log_row(ROWS[1])
        seconds = time.monotonic() - began
        wait_for_senders()
        return said, seconds

    return track


def test_a_server_that_is_not_there_is_named_at_the_start_and_not_waited_for(silent):
    (ready, waiting, lost), seconds = silent()
    assert "is not ready (127.0.0.1:" in ready and "refuses connections" in ready
    assert "waiting up to 0.4 s" in waiting and "refuses connections" in waiting
    assert "did not receive everything" in lost and seconds < 15


def test_a_slow_server_gets_everything(silent):
    said, _ = silent(answers_after=1.0)
    assert said[0].startswith("  silent is not ready: training begins") and "waiting up to 20 s" in said[1]
    assert not any("did not receive" in line for line in said)
    assert received("row", Silent) == [0, 4] and "  silent: here" in said


def test_a_run_that_went_back_sends_its_rows_again(run):
    with TrackerSet(["noting"], RunFolder(run), print) as tracks:
        tracks.start(SETTINGS, ROWS)
        tracks.rewind(4)
        tracks.log_row(ROWS[2])
    assert [one[:2] for one in Noting.calls[2:]] == [
        *(("row", 0), ("row", 4), ("row", 8), ("back", 4), ("row", 8), ("end", "success"))
    ]


@pytest.mark.parametrize(
    "problem, status", [(Stopped("s"), "aborted"), (KeyboardInterrupt(), "aborted"), (PatchloomError("p"), "failed")]
)
def test_the_end_says_how_the_run_ended(problem, status, run):
    with pytest.raises(type(problem)), TrackerSet(["noting"], RunFolder(run), print) as tracks:
        tracks.start(SETTINGS, [])
        raise problem
    assert Noting.calls[-1] == ("end", status)


def test_nothing_is_written_into_a_folder_that_took_the_place_of_the_runs(run):
    said, folder = [], RunFolder(run)
    folder.lock()
    tracks = TrackerSet(["noting"], folder, said.append)
    tracks.start(SETTINGS, ROWS[:1])
    while not (run / "logs" / "noting.json").exists():
        time.sleep(0.01)
    run.rename(run.with_name("moved"))
    run.mkdir()
    tracks.log_row(ROWS[1])
    tracks.close("success")
    folder.unlock()
    assert not list(run.iterdir()) and "was removed, moved or replaced" in said[-1]
    assert json.loads((run.with_name("moved") / "logs" / "noting.json").read_text())["step"] == 0


@pytest.fixture
def folder(run):
    """Folder of a run that was killed when a tracker had received its first two rows."""
    found = RunFolder(run)
    write_checksummed(found.config, SETTINGS.plain())
    found.write_metrics(ROWS)
    png(found.pictures / "recovered.png", 200)
    png(found.pictures / "layers.png", 0)  # made by an evaluation
    with TrackerSet(["noting"], found, print) as killed:
        killed.start(SETTINGS, ROWS[:2])
    TrackerSet(["noting"], found, print).log_result(RESULT._replace(images=["recovered.png", "gone.png"]))
    Noting.calls = []
    return found


def test_missing_data_after_a_kill_is_sent_once(folder, monkeypatch):
    with monkeypatch.context() as another:
        another.setenv("RANK", "1")
        send_pending(["noting"], folder)
    assert not Noting.calls  # other processes send nothing
    send_pending(["noting"], folder)
    picture = {"recovered": ("RGB", (200, 200, 200))}
    told = [("row", 8), ("pictures", 8, picture), ("result", 8), ("end", "success")]
    assert Noting.calls == [("init",), ("settings", "mae"), *told]
    Noting.calls = []
    send_pending(["noting"], folder)
    assert not Noting.calls
    folder.lock()  # the lock was released: otherwise this process would look like another one that trains
    folder.unlock()


def test_an_unreachable_tracker_gets_the_rest_later(folder):
    said = []
    Noting.fails = {("result",): OSError("no network")}
    send_pending(["noting"], folder, said.append)
    assert "noting is switched off" in said[-1]
    Noting.fails, Noting.calls = {}, []
    send_pending(["noting"], folder, said.append)
    assert [one[0] for one in Noting.calls] == ["init", "settings", "pictures", "result", "end"]


def test_a_run_without_a_result_sends_nothing_and_says_so(folder):
    said = []
    folder.summary.write_text("The end of the first epochs.\n")
    folder.keep_end(3)  # as a run that is extended without trackers
    send_pending(["noting"], folder, said.append)
    assert not Noting.calls and "nothing is sent to noting" in said[0] and "ending.json is missing" in said[0]
    assert (folder.kept_end(3) / "ending.json").exists()


@pytest.mark.parametrize(
    "changed",
    [
        None,
        {"step": "two"},
        {"images": 5},
        {"images": ["../../photo.png"]},  # an untrusted run must not send files from elsewhere
        {"images": ["/home/photo.png"]},
        {"images": [".."]},
        {"results": [1]},
        {"results": "none"},
        {"results": [RESULT.results[0].plain() | {"value": "0.5"}]},
        {"verdict": 1},
        {"health": 5},
        {"health": {"verdict": "splendid", "why": "", "then": "", "epoch": 1, "ended": True}},
    ],
)
def test_a_damaged_result_is_named(folder, changed):
    result = RESULT.plain()
    (folder.path / "ending.json").write_text("[]" if changed is None else json.dumps(result | changed))
    said = refusal(send_pending, ["noting"], folder)
    assert "ending.json" in said and "is damaged" in said and not Noting.calls


def test_a_run_that_another_process_trains_sends_nothing(folder, monkeypatch):
    monkeypatch.setattr(RunFolder, "lock", Mock(side_effect=FolderLocked("another process is training in it")))
    with pytest.raises(FolderLocked):
        send_pending(["noting"], folder)
    assert not Noting.calls


def test_records_and_damaged_ones(tmp_path):
    record = tmp_path / "wandb.json"
    assert SentRecord.read(record) == SentRecord("", -1, -1, -1)  # before the first start
    record.write_text(json.dumps({"id": "a1", "step": 8}))
    assert SentRecord.read(record) == SentRecord("a1", 8)
    for text in ("{", "[]", '{"new": 1}', '{"step": null}', '{"step": "x"}', '{"step": 1e999}'):
        record.write_text(text)
        assert "wandb.json is damaged: delete it" in refusal(SentRecord.read, record)


def test_quoted_results_verdict_and_measure_are_values():
    assert RESULT.scores() == {"results/knn/trained": 0.5, "results/knn/raw pixels": 0.25} and not RESULT.tags()
    chance = Baseline("chance", 0.2, Result(SHARE, 0.5, 0.4, 0.6, 50), True, True)
    measure = Result("accuracy", 0.6, 0.5, 0.7, 50, baselines=(chance,))
    health = Health(Verdict.WEAK, "", "", 2.0, True, "weak", measure, {"epochs": 40})
    result = RESULT._replace(health=health)
    shares = {"results/share": 0.5, "results/share/low": 0.4, "results/share/high": 0.6}
    assert result.scores() == RESULT.scores() | {"results/held_out": 0.6, **shares}
    assert result.tags() == {"verdict_value": "learning but weak", "verdict_rule": "weak"}
