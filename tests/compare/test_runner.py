"""Processes of a comparison: simultaneous, failing and waiting ones, and an interruption.

The processes are small programs instead of ``patchloom pretrain``.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from holding import hold

from patchloom import PatchloomError
from patchloom.compare import runner
from patchloom.compare.runner import Job, Length, TrainedRun, is_locked, lock_folder, read_trained, run_all
from patchloom.errors import Stopped

CHILD = """
import pathlib, signal, sys, time
how, folder = sys.argv[1], pathlib.Path(sys.argv[2])
folder.mkdir(exist_ok=True)
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / "begun").write_text(repr(time.time()))
if how == "fails":
    print("patchloom: the images are gone: restore them", file=sys.stderr)
    sys.exit(2)
time.sleep(0.4 if how == "works" else 60)
(folder / "summary.txt").write_text("done\\n")
"""


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(runner, "_PROGRAM", (sys.executable, "-c", CHILD))
    monkeypatch.setattr(runner, "_LOOK", 0.02)


@pytest.fixture
def begun(monkeypatch) -> list[runner._Process]:
    begin, found = runner._start, []

    def start(*given) -> runner._Process:
        found.append(begin(*given))
        return found[-1]

    monkeypatch.setattr(runner, "_start", start)
    return found


def job_of(place: Path, task: str, how: str = "works") -> Job:
    folder = place / f"{task}-seed0"
    return Job(task, 0, folder, [how, str(folder)], Length(8, 1.0, 1.0))


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def soon(*actions) -> threading.Thread:
    thread = threading.Thread(target=lambda: [action() for action in actions], daemon=True)
    thread.start()
    return thread


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_failed_run_does_not_stop_the_others(tmp_path, begun):
    jobs = [job_of(tmp_path, "one", "fails"), job_of(tmp_path, "two")]
    told = {}
    run_all(jobs, 1, [], lambda job, seconds: told.update({job.name: seconds}))
    assert jobs[0].failure == "the images are gone: restore them" and not jobs[0].finished
    assert jobs[1].finished and not jobs[1].failure and [*told] == ["one, seed 0", "two, seed 0"]
    assert told["two, seed 0"] >= 0.4
    assert all(one.process.stdin.closed for one in begun)
    run_all(jobs[1:], 1, [], told.pop)  # it has finished already


def test_the_number_of_simultaneous_runs(tmp_path, begun):
    jobs = [job_of(tmp_path, "slow", "sleeps"), *(job_of(tmp_path, task) for task in ("two", "three"))]
    ended = []

    def told(job: Job, seconds: float) -> None:
        assert len([one for one in begun if one.process.poll() is None]) <= 2
        ended.append(job.task)
        if len(ended) == 2:  # both of the others ended while the slow one was running
            interrupt()

    with pytest.raises(Stopped, match="run the same command to resume"):
        run_all(jobs, 2, [], told)
    assert not jobs[0].failure  # it was interrupted
    assert [(one.job.task, one.slot) for one in begun] == [("slow", 0), ("two", 1), ("three", 1)]
    assert ended == ["two", "three"]


def test_a_run_of_another_process_is_waited_for(tmp_path, capsys):
    jobs = [job_of(tmp_path, "one"), job_of(tmp_path, "two")]
    jobs[0].folder.mkdir()
    other = hold(jobs[0].folder / ".lock")
    soon(lambda: wait_for(jobs[1].folder / "summary.txt"), other.communicate)
    run_all(jobs, 1, [], lambda *_: None)
    assert all(job.finished and not job.failure for job in jobs)
    begun = [float((job.folder / "begun").read_text()) for job in jobs]
    assert begun[1] < begun[0]
    said = capsys.readouterr().out
    assert said == f"  one, seed 0 waits: another process is still training in {jobs[0].folder}\n"


def test_no_process_is_left_after_a_second_interruption(tmp_path, monkeypatch, begun):
    monkeypatch.setattr(runner, "_PATIENCE", 0.2)
    job = job_of(tmp_path, "one", "deaf")
    # two within three seconds count as one
    soon(lambda: wait_for(job.folder / "begun"), interrupt, lambda: time.sleep(3.5), interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_all([job], 1, [], lambda *_: None)
    (one,) = begun
    assert one.process.returncode == -signal.SIGKILL and one.process.stdin.closed


def test_no_process_is_left_after_an_error(tmp_path, begun):
    jobs = [job_of(tmp_path, "one", "fails"), job_of(tmp_path, "two", "sleeps")]

    def told(job: Job, seconds: float) -> None:
        raise PatchloomError("told")

    with pytest.raises(PatchloomError, match="told"):
        run_all(jobs, 2, [], told)
    assert [one.process.returncode for one in begun] == [2, -signal.SIGTERM]


@pytest.fixture
def held(tmp_path):
    process = hold(tmp_path / ".lock")
    yield tmp_path
    process.communicate()


def test_a_folder_is_locked_while_another_process_works_there(held, tmp_path_factory):
    assert is_locked(held)
    assert not is_locked(tmp_path_factory.mktemp("free")) and not is_locked(held / "none")
    with pytest.raises(PatchloomError, match="another comparison is running in"):
        with lock_folder(held):
            raise AssertionError


def test_a_folder_that_stays_empty_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
        1 / 0  # noqa: B018
    assert not (tmp_path / "a" / "b").exists()
    with lock_folder(tmp_path / "new"):
        (tmp_path / "new" / "plan").touch()
    assert (tmp_path / "new" / "plan").exists()
    with lock_folder(tmp_path / "new"):  # again, since the first lock was released
        pass


def test_steps_and_seconds_are_those_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("patchloom.compare.runner.RunFolder.read_config", lambda _: type("", (), {"accumulate": 4}))
    job = Job("mae", 2, tmp_path, [], Length(8, None, 60.0))
    (tmp_path / "metrics.csv").write_text("step,epoch,images,seconds\n1,0.5,8,1\n10,5,80,30.5\n")
    assert read_trained(job) == TrainedRun("mae", 2, 30.5, 3, 80)
    for text in ("step,epoch\n1,2\n", "step,epoch,images,seconds\n1,1,8,\n", "step,epoch,images,seconds\n1,1,8,-1\n"):
        (tmp_path / "metrics.csv").write_text(text)
        with pytest.raises(PatchloomError, match="restore it"):
            read_trained(job)
