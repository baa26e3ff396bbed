"""Signals that request a stop: the main process handles them, all others ignore them, and no process is left over."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from signal import raise_signal

import pytest
from killing import Numbers
from refusing import refusal

from patchloom import cli
from patchloom.data.workers import in_threads, in_workers
from patchloom.errors import PatchloomError, Stopped
from patchloom.system.signals import SIGNALS, Stop, StopAtOnce

INT, TERM, HUP = SIGNALS


@pytest.fixture
def clock(monkeypatch):
    """Clock that only advances when seconds are added."""
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_sets_asked_and_programs_may_repeat_theirs(number, clock):
    before = [signal.getsignal(one) for one in SIGNALS]
    with Stop() as stop:
        assert not stop.asked
        raise_signal(number)
        assert stop.asked
        raise_signal(number)  # `timeout` sends it to the process and to its group
        clock[0] += 20
        raise_signal(TERM)  # torchrun forwards a signal that all have received
        raise_signal(HUP)
        with pytest.raises(KeyboardInterrupt):
            raise_signal(INT)
    assert [signal.getsignal(one) for one in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_stop_at_once(number, clock):
    with StopAtOnce() as stop:
        with pytest.raises(KeyboardInterrupt):
            raise_signal(number)
        raise_signal(number)  # while the interrupted code is being left
        clock[0] += 4
        with pytest.raises(KeyboardInterrupt):
            raise_signal(number)
    assert stop.asked


def raise_at_work(number: int, seconds: float) -> None:
    """Raise a signal as a backward pass of a large model begins, during which the interpreter runs no bytecode."""
    end = time.perf_counter() + seconds
    come = functools.partial(getattr(ctypes.PyDLL(None), "raise"), int(number))
    work = functools.partial(any, map(end.__le__, iter(time.perf_counter, None)))
    list(map(functools.partial.__call__, (come, work)))


def test_a_repeated_signal_that_is_handled_late_counts_as_one():
    """Two Ctrl-C within 0.15 s: the second one came in a backward pass, and was mistaken for a later one."""
    with Stop() as stop:
        time.sleep(0.1)
        raise_signal(INT)
        raise_at_work(INT, 1.3)
        assert stop.asked


def test_a_key_that_is_held_is_one_signal_for_five_seconds_also_when_training_has_ended(clock):
    with StopAtOnce() as outer:
        with Stop() as stop:
            for _ in range(41):  # after half a second a key repeats, some 10 to 30 times a second
                raise_signal(INT)
                clock[0] += 0.12
            assert stop.asked
            clock[0] += 0.2
            with pytest.raises(KeyboardInterrupt):
                raise_signal(INT)
            clock[0] += 0.4
        raise_signal(INT)
        assert outer.asked
        clock[0] += 3.5
        with pytest.raises(KeyboardInterrupt):
            raise_signal(INT)


def test_a_message_on_a_terminal_at_the_first_signal():
    reader, writer = os.openpty()
    before = os.dup(2)
    try:
        with Stop("stopping after this update"):
            os.dup2(writer, 2)
            raise_signal(INT)
            raise_signal(INT)
    finally:
        os.dup2(before, 2)
    assert os.read(reader, 1000) == b"\r\nstopping after this update\r\n"
    for file in (before, writer, reader):
        os.close(file)


def test_handlers_and_files_are_restored_and_nohup_is_respected():
    files, before = os.listdir("/proc/self/fd"), signal.signal(HUP, signal.SIG_IGN)
    try:
        for kind in (Stop, StopAtOnce, Stop):
            with kind() as stop, kind():
                raise_signal(HUP)
            assert not stop.asked
    finally:
        signal.signal(HUP, before)
    assert len(os.listdir("/proc/self/fd")) == len(files) and signal.set_wakeup_fd(-1) == -1


class Finalised:
    def __del__(self) -> None:
        raise_signal(TERM)


def test_a_signal_that_cannot_raise_is_sent_again(capsys):
    """Python prints an exception in a finaliser or during a fork, and continues."""
    with StopAtOnce() as stop, pytest.raises(KeyboardInterrupt):
        Finalised()
        assert stop.asked
        time.sleep(60)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("verb", ["check", "pretrain", "evaluate", "look", "predict", "export", "bench", "tasks"])
def test_every_verb_says_that_it_was_stopped(verb, monkeypatch, capsys):
    for number in SIGNALS:
        monkeypatch.setattr(cli, "run_verb", lambda name, words, number=number: raise_signal(number))
        assert cli.main([verb]) == 130
        assert capsys.readouterr() == ("", "patchloom: stopped.\n")
    monkeypatch.setenv("LOCAL_RANK", "1")  # the first process reports for all
    assert cli.main([verb]) == 130 and not capsys.readouterr().err


@pytest.mark.parametrize("problem", [RuntimeError("gloo: connection closed"), PatchloomError("a process has died")])
def test_consequences_of_a_signal_are_not_reported_as_errors(problem, monkeypatch, capsys):
    def verb(words):
        try:
            raise_signal(TERM)
        except KeyboardInterrupt:
            raise problem from None

    monkeypatch.setattr(cli, "run_verb", lambda name, words: verb(words))
    assert cli.main(["tasks", "--debug"]) == 130 and capsys.readouterr().err == "patchloom: stopped.\n"
    problem = Stopped("stopped, and a checkpoint was written")
    assert cli.main(["tasks"]) == 130 and capsys.readouterr().err == f"patchloom: {problem}\n"


def gone(process: int, seconds: float) -> bool:
    """Return whether a process ends, or is a zombie, within some seconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_workers_leave_signals_to_the_main_process():
    with Stop() as stop:
        given = in_workers(Numbers(), range(400), 2)
        found = [next(given)]
        for number in SIGNALS:
            for worker in {process for _, process in found}:
                os.kill(worker, number)
            found += [next(given) for _ in range(100)]
        found += given
    assert [number for number, _ in found] == list(range(400)) and not stop.asked
    workers = {process for _, process in found}
    assert len(workers) == 2 and os.getpid() not in workers and all(gone(worker, 10) for worker in workers)


def test_a_worker_that_does_not_end_is_ended():
    given = in_workers(Numbers(stuck=3), range(10), 1)
    _, worker = next(given)
    os.kill(worker, TERM)
    assert not gone(worker, 0.5)
    given.close()
    assert gone(worker, 20)


ALONE = """
import os, sys, time
sys.path[:0] = [{here!r}]
from killing import Numbers
from patchloom.data.workers import in_threads, in_workers
if __name__ == "__main__":
    given = in_workers(Numbers(), range(100), 2)
    circle = [given]
    circle.append(circle)  # so that nothing but the end of the program ends it
    print(next(given)[1], next(given)[1], flush=True)
    {then}
"""
ENDLESS = """
import threading
from patchloom.data.workers import in_threads
def work(number):
    print("begun", flush=True)
    threading.Event().wait() if number else None
list(in_threads(work, range(100)))
"""


def start(program: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("then", "code"), [("time.sleep(600)", -9), ("raise SystemExit(3)", 3)])
def test_no_worker_outlives_the_main_process(then, code):
    """The main process is killed, or ends while images are being read."""
    main = start(ALONE.format(here=str(Path(__file__).parents[1] / "support"), then=then))
    workers = [int(word) for word in main.stdout.readline().split()]
    assert len(set(workers)) == 2
    if code == -9:
        assert not any(gone(worker, 0.1) for worker in workers)
        main.kill()
    _, told = main.communicate(timeout=60)
    assert main.returncode == code and told == ""
    assert all(gone(worker, 20) for worker in workers)


@pytest.mark.slow
def test_a_signal_ends_threads_in_the_middle_of_an_item():
    """A thread pool of the standard library would wait for them."""
    process = start(ENDLESS)
    try:
        assert process.stdout.readline()
        process.send_signal(INT)
        process.communicate(timeout=30)
        assert process.returncode
    finally:
        process.kill()


def test_threads_return_results_in_order_and_the_first_error():
    assert list(in_threads(lambda number: number**2, range(100))) == [number**2 for number in range(100)]
    begun = []

    def fail(number: int) -> None:
        begun.append(number)
        time.sleep(0.01)
        if number == 3:
            raise PatchloomError("three")

    assert "three" in refusal(list, in_threads(fail, range(1000)))
    time.sleep(0.1)
    assert len(begun) < 100
