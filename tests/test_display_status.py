"""Status messages: on a terminal, without one, and with several processes."""

import io
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from patchloom import display
from patchloom.arguments import validate_arguments
from patchloom.display import StatusMessage, track_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch):
    """A terminal, to be put in place of stderr, and all messages twenty times as early."""
    for name, seconds in {"_SOON": 0.05, "_AGAIN": 0.025, "_FIRST": 0.5, "_EVERY": 1.5}.items():
        monkeypatch.setattr(display, name, seconds)
    return Terminal()


def until(done) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_terminal_shows_a_line_that_is_replaced_and_removed(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    with StatusMessage("reading images", 1000) as outer:
        outer.advance(350)
        until(lambda: " left · reading images: 350 of 1,000" in screen.getvalue())
        with StatusMessage("compiling"):
            until(lambda: "\r\x1b[2Kcompiling (0 s)" in screen.getvalue())
    assert screen.getvalue().endswith("\r\x1b[2K") and "\n" not in screen.getvalue()
    before = screen.getvalue()
    time.sleep(0.1)
    assert screen.getvalue() == before


def test_a_line_fits_the_terminal(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "30")
    with StatusMessage("reading " + "x" * 100):
        until(lambda: screen.getvalue())
    assert all(len(line) < 30 for line in re.split(r"\r\x1b\[2K", screen.getvalue()))


def test_without_a_terminal_lines_are_printed_at_intervals(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with StatusMessage("reading images", 3) as waited:
        waited.advance(2)
        time.sleep(0.3)
        assert log.getvalue() == ""
        until(lambda: log.getvalue())
    assert re.fullmatch(r"\d s left · reading images: 2 of 3\n", log.getvalue())


def test_a_notebook_shows_the_status_line_on_stdout(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setitem(sys.modules, "ipykernel", display)  # which a program may import and be no notebook
    with StatusMessage("reading"):
        until(lambda: "reading" in screen.getvalue())
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "stdout", log := io.StringIO())
    with StatusMessage("reading"):
        until(lambda: "reading" in log.getvalue())


def test_only_the_first_process_prints_and_only_of_slow_work(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    with StatusMessage("reading"):
        pass
    monkeypatch.setenv("RANK", "1")
    with StatusMessage("reading"):
        time.sleep(0.3)
    assert screen.getvalue() == ""


def test_a_closed_stream_is_ignored(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    with StatusMessage("reading"):
        until(lambda: screen.getvalue())
        screen.close()
        time.sleep(0.1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_a_process_that_is_forked_meanwhile_can_end():
    code = """
import os, time
from patchloom.display import StatusMessage, _status_thread
with StatusMessage("outer"):
    with _status_thread.lock:  # as if the thread were about to print
        child = os.fork()
    with StatusMessage("inner"):
        pass
    if not child:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "7\n", done.stderr


def test_an_interrupted_generator_leaves_no_status_line():
    @validate_arguments
    def verb() -> None:
        batches = track_progress(range(9), 9, "positions")
        for _ in batches:
            raise KeyboardInterrupt

    with StatusMessage("of the program"):
        with pytest.raises(KeyboardInterrupt) as kept:  # which holds the frame, and in it the generator
            verb()
        assert [one.what for one in display._status_thread.under_way] == ["of the program"]
    assert kept.value.__traceback__ is not None and not display._status_thread.under_way
