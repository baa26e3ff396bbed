"""Signals that request a stop: the main process handles them, all others ignore them, and no process is left over."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from killing import Numbers, work_for_ever

from patchloom import cli
from patchloom.data.workers import in_threads, in_workers
from patchloom.errors import PatchloomError, Stopped
from patchloom.system.hardware import peak_in_subprocess
from patchloom.system.signals import SIGNALS, Stop, StopAtOnce

INT, TERM, HUP = SIGNALS


def raised(number: int) -> None:
    signal.raise_signal(number)


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
        raised(number)
        assert stop.asked
        raised(number)  # `timeout` sends it to the process and to its group
        clock[0] += 20
        raised(TERM)  # torchrun forwards a signal that all have received
        raised(HUP)
        with pytest.raises(KeyboardInterrupt):
            raised(INT)
    assert [signal.getsignal(one) for one in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_stop_at_once(number, clock):
    with StopAtOnce() as stop:
        with pytest.raises(KeyboardInterrupt):
            raised(number)
        raised(number)  # while the interrupted code is being left
        clock[0] += 2
        with pytest.raises(KeyboardInterrupt):
            raised(number)
    assert stop.asked


def raised_at_work(number: int, seconds: float) -> None:
    """Raise a signal as a backward pass of a large model begins, during which the interpreter runs no bytecode."""
    end = time.perf_counter() + seconds
    come = functools.partial(getattr(ctypes.PyDLL(None), "raise"), int(number))
    work = functools.partial(any, map(end.__le__, iter(time.perf_counter, None)))
    list(map(functools.partial.__call__, (come, work)))


def test_a_repeated_signal_that_is_handled_late_counts_as_one():
    """Two Ctrl-C within 0.15 s: the second one came in a backward pass, and was mistaken for a later one."""
    with Stop() as stop:
        time.sleep(0.1)
        raised(INT)
        raised_at_work(INT, 2.0)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):  # this one comes two seconds later
            raised_at_work(INT, 0.1)


def test_a_key_that_is_held_is_one_signal_for_five_seconds(clock):
    with Stop() as stop:
        raised(INT)
        for _ in range(40):  # after half a second a key repeats, some 10 to 30 times a second
            clock[0] += 0.12
            raised(INT)
        assert stop.asked
        clock[0] += 0.3
        with pytest.raises(KeyboardInterrupt):
            raised(INT)


def test_a_repeated_signal_after_the_checkpoint_counts_as_one(clock):
    """The key may still be held when it has ended training."""
    with StopAtOnce() as outer:
        with Stop():
            raised(INT)
            clock[0] += 0.4
        raised(INT)
        assert outer.asked
        clock[0] += 1.5
        with pytest.raises(KeyboardInterrupt):
            raised(INT)


def test_a_message_on_a_terminal_at_the_first_signal():
    reader, writer = os.openpty()
    before = os.dup(2)
    try:
        with Stop("stopping after this update"):
            os.dup2(writer, 2)
            raised(INT)
            raised(INT)
    finally:
        os.dup2(before, 2)
        os.close(before)
    os.close(writer)
    assert os.read(reader, 1000) == b"\r\nstopping after this update\r\n"
    os.close(reader)


def test_handlers_and_files_are_restored():
    def open_files() -> list[str]:
        return os.listdir("/proc/self/fd")

    before = open_files()
    for _ in range(5):
        with StopAtOnce(), Stop(), Stop():
            pass
    assert len(open_files()) == len(before) and signal.set_wakeup_fd(-1) == -1


class Finalised:
    def __del__(self) -> None:
        raised(TERM)


def test_a_signal_that_cannot_raise_is_sent_again(capsys):
    """Python prints an exception in a finaliser or during a fork, and continues."""
    with StopAtOnce() as stop, pytest.raises(KeyboardInterrupt):
        Finalised()
        assert stop.asked
        time.sleep(60)
    assert capsys.readouterr() == ("", "")


def test_nohup_is_respected():
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        for kind in (Stop, StopAtOnce):
            with kind() as stop:
                raised(HUP)
            assert not stop.asked
    finally:
        signal.signal(HUP, before)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("verb", ["check", "pretrain", "evaluate", "look", "predict", "export", "bench", "tasks"])
def test_every_verb_says_that_it_was_stopped(verb, number, monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, verb, lambda words: raised(number))
    assert cli.main([verb]) == 130
    assert capsys.readouterr() == ("", "patchloom: stopped.\n")
    monkeypatch.setenv("LOCAL_RANK", "1")  # the first process reports for all
    assert cli.main([verb]) == 130 and not capsys.readouterr().err


@pytest.mark.parametrize("problem", [RuntimeError("gloo: connection closed"), PatchloomError("a process has died")])
def test_consequences_of_a_signal_are_not_reported_as_errors(problem, monkeypatch, capsys):
    def verb(words):
        try:
            raised(TERM)
        except KeyboardInterrupt:
            raise problem from None

    monkeypatch.setitem(cli.COMMANDS, "tasks", verb)
    assert cli.main(["tasks", "--debug"]) == 130 and capsys.readouterr().err == "patchloom: stopped.\n"
    problem = Stopped("stopped, and a checkpoint was written")
    assert cli.main(["tasks"]) == 130 and capsys.readouterr().err == f"patchloom: {problem}\n"


def there(process: int) -> bool:
    """Return whether a process runs, and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(process: int, seconds: float) -> bool:
    end = time.perf_counter() + seconds
    while there(process) and time.perf_counter() < end:
        time.sleep(0.05)
    return not there(process)


def test_workers_leave_signals_to_the_main_process():
    with Stop() as stop:
        given = in_workers(Numbers(), range(400), 2)
        found = [next(given)]
        for number in SIGNALS:
            for worker in {process for _, process in found} or set():
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
    begin = time.perf_counter()
    given.close()
    assert time.perf_counter() - begin < 20 and gone(worker, 5)


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


@pytest.mark.parametrize("then", ["time.sleep(600)", "pass", "raise SystemExit(3)"])
def test_no_worker_outlives_the_main_process(then):
    """The main process is killed, or ends while images are being read."""
    code = ALONE.format(here=str(Path(__file__).parents[1] / "support"), then=then)
    main = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = [int(word) for word in main.stdout.readline().split()]
    assert len(set(workers)) == 2
    if "sleep" in then:
        assert all(map(there, workers))
        main.kill()
    _, told = main.communicate(timeout=60)
    assert main.returncode == {"time.sleep(600)": -9, "pass": 0, "raise SystemExit(3)": 3}[then] and told == ""
    assert all(gone(worker, 20) for worker in workers)


def test_the_process_that_measures_memory_ends_with_the_main_one(tmp_path):
    file, seen = tmp_path / "process", []

    def ask() -> None:
        while not (file.exists() and file.read_text()):
            time.sleep(0.05)
        seen.append(int(file.read_text()))
        for number in SIGNALS:
            os.kill(seen[0], number)
        time.sleep(0.5)
        seen.append(there(seen[0]))
        os.kill(os.getpid(), TERM)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    with StopAtOnce(), pytest.raises(KeyboardInterrupt):
        peak_in_subprocess(work_for_ever, "cpu", str(file))
    asking.join()
    process, ignored = seen
    assert ignored and gone(process, 60)


ENDLESS = """
import sys, threading, time
from patchloom.data.workers import in_threads
def work(number):
    print("begun", flush=True)
    threading.Event().wait() if number else None
list(in_threads(work, range(100)))
"""


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_ends_threads_in_the_middle_of_an_item(number):
    """A thread pool of the standard library would wait for them."""
    program = ENDLESS if number == INT else f"import signal\nsignal.signal(15, signal.default_int_handler)\n{ENDLESS}"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(number)
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

    with pytest.raises(PatchloomError, match="three"):
        list(in_threads(fail, range(1000)))
    time.sleep(0.1)
    assert len(begun) < 100
