"""Text that fits the terminal and HTML for notebooks, of results; and status messages for slow work."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from typing import Any, TextIO, TypeVar

from patchloom.errors import PatchloomError
from patchloom.pace import Pace

T = TypeVar("T")

_GAP = "  "  # between two columns
_SHORTEST = 14  # least characters of a shortened name: one more than "best constant" has
_NARROWEST = 16  # least characters in a line of a wrapped text
_TOGETHER = re.compile(r"\[[^][]{1,30}\]|(?<=[\d%]) (?=[%[])")  # an interval, and a number with its unit or interval
TIE = "\x00"  # a space where no line is broken
_WIDE = 10_000  # characters of a line in a notebook, where nothing is shortened


# control characters, among them line breaks and those that begin an escape sequence; separators of lines; characters
# that reverse the order of others; and bytes of a file's name that are not UTF-8
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Lines(str):
    """Text whose line breaks are the program's own; those of other texts are part of a name or value."""


def visible(text: str) -> str:
    """Return a text with its control characters written out, as ``\\x1b`` or ``\\n``; those of `Lines` stay in lines.

    Texts contain names and values from files of strangers, which could otherwise command the terminal, or imitate a
    line of the program. Everything that is printed comes through here.
    """
    if isinstance(text, Lines):
        return Lines("\n".join(map(visible, text.split("\n"))))
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print one line at once, by default to standard output."""
    print(visible(text), file=file, flush=True)


@dataclass(frozen=True)
class TextTable:
    """Table of text. Cells are made `visible`, and may be `Lines`.

    Attributes:
        heading: one cell per column.
        rows: the other rows; a row with a single cell spans all columns.
        names: columns whose cells may be shortened in the middle.
        texts: columns whose cells may be wrapped between words.
        ends: indices of the rows that an empty line follows.
    """

    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: frozenset[int] = frozenset()
    texts: frozenset[int] = frozenset()
    ends: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heading", tuple(map(visible, self.heading)))
        object.__setattr__(self, "rows", tuple(tuple(map(visible, row)) for row in self.rows))

    @staticmethod
    def of(rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> TextTable:
        """Make a table whose first row is the heading."""
        heading, *others = (tuple(row) for row in rows)
        return TextTable(heading, tuple(others), texts=frozenset(texts))

    def widths(self) -> list[int]:
        """Return the widths of the columns, with nothing shortened or wrapped."""
        return [max(_width(cell) for cell in column) for column in zip(self.heading, *self._full_rows(), strict=True)]

    def _full_rows(self) -> list[tuple[str, ...]]:
        return [row for row in self.rows if len(row) == len(self.heading)]

    def least(self) -> int:
        return _total(self._narrowed(0))

    def text(self, width: int) -> str:
        """Return lines of up to ``width`` characters, or of the table's least width."""
        widths = self._narrowed(width)
        heading = tuple("\n".join(textwrap.wrap(cell, w)) for cell, w in zip(self.heading, widths, strict=True))
        lines = [*_side_by_side([cell.split("\n") for cell in heading], widths), "─" * _total(widths)]
        for number, row in enumerate(self.rows):
            if len(row) < len(self.heading):
                lines.append(truncate_middle(row[0], max(width, _SHORTEST)))
            else:
                cells = [cell.split("\n") for cell in row]
                for i in self.texts:
                    cells[i] = textwrap.wrap(row[i], widths[i], break_long_words=False, break_on_hyphens=False) or [""]
                for i in self.names:
                    cells[i] = [truncate_middle(row[i], widths[i])]
                lines += _side_by_side(cells, widths)
            if number in self.ends and number + 1 < len(self.rows):
                lines.append("")
        return "\n".join(lines)

    def html(self) -> str:
        head = "".join(f"<th>{_html(cell)}</th>" for cell in self.heading)
        body = "".join(f"<tr>{''.join(f'<td>{_html(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _narrowed(self, width: int) -> list[int]:
        widths = self.widths()
        for columns, least in ((self.texts, _NARROWEST), (self.names, _SHORTEST)):
            while _total(widths) > width:
                widest = max(columns, key=lambda column: widths[column], default=None)
                if widest is None or widths[widest] <= least:
                    break
                widths[widest] -= 1
        for column, heading in enumerate(self.heading):  # a heading may be longer than the cells below it
            if column not in self.names | self.texts:
                cells = max((_width(row[column]) for row in self._full_rows()), default=0)
                least = max(cells, *map(len, heading.split()), 0)
                widths[column] = max(widths[column] - max(0, _total(widths) - width), min(widths[column], least))
        return widths


class Verbatim(str):
    """Line that is never wrapped, such as one with a path to copy."""


class Snippet(Verbatim, Lines):
    """Program text of several lines, which are never wrapped."""


class Displayable:
    """Base class of results, shown by ``print``, at a prompt and in a notebook.

    Attributes:
        refusal: error with which a command ends after its result is printed; "" for none. In Python it is shown below.
    """

    refusal: str = ""

    @abstractmethod
    def parts(self, width: int) -> Sequence[str | TextTable]:
        """Return sentences and tables in reading order, for lines of ``width`` characters."""

    @abstractmethod
    def plain(self) -> dict[str, Any]:
        """Return the values, as ``--json`` prints them: numbers unformatted, paths as text (docs/reference/json.md)."""

    def text(self, width: int | None = None) -> str:
        """Return the text in lines of ``width`` characters, by default those of the terminal."""
        width, lines = width or shutil.get_terminal_size().columns, list[str]()
        for part in self.parts(width):
            if isinstance(part, TextTable):
                lines.append(part.text(width))
            elif isinstance(part, Verbatim):
                lines.append(visible(part))
            else:  # wrapped between words only; percentages and intervals stay whole
                for line in tied(visible(part)).split("\n"):
                    words = textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
                    lines.append("\n".join(words).replace(TIE, " "))
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.text(), visible(self.refusal)]))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        parts: list[str | TextTable] = [part for part in (*self.parts(_WIDE), self.refusal) if part]
        shown = []
        for part in parts:
            if isinstance(part, TextTable):
                shown.append(part.html())
            else:
                shown.append(f"<pre>{escape(part)}</pre>" if isinstance(part, Verbatim) else f"<p>{_html(part)}</p>")
        return "\n".join(shown)


def json_value(value: Any) -> Any:
    """Convert a value to the types of JSON: numbers that are not finite become None, paths become text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): json_value(one) for name, one in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return json_value(value.item()) if hasattr(value, "item") else [json_value(one) for one in value]


def truncate_middle(name: str, width: int) -> str:
    """Shorten a name to ``width`` characters, with an ellipsis in the middle."""
    if len(name) <= width:
        return name
    end = (width - 1) // 2
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"


def _side_by_side(cells: Sequence[list[str]], widths: Sequence[int]) -> list[str]:
    """Return the lines of a row whose cells may have several lines each."""
    padded = zip_longest(*cells, fillvalue="")
    return [_GAP.join(part.ljust(w) for part, w in zip(line, widths, strict=True)).rstrip() for line in padded]


def tied(text: str) -> str:
    """Replace the spaces inside intervals, and between numbers, their units and their intervals, by `TIE`."""
    return _TOGETHER.sub(lambda found: found[0].replace(" ", TIE), text)


def _html(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _width(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


# Status messages for slow work: on a terminal one line that is updated, elsewhere a line from time to time.


_SOON = 1.0  # seconds before a terminal shows a line
_AGAIN = 0.5  # seconds between two updates of the line
_FIRST, _EVERY = 10.0, 30.0  # without a terminal: seconds before the first line, and between two lines
# environment variables with the number of a process; only the first process prints
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
_COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES", "MASTER_PORT")


def check_launcher() -> None:
    """Raise if the environment numbers processes by anything but whole numbers."""
    for name in (*_RANKS, *_COUNTS):
        if not (text := os.environ.get(name, "0")).isdecimal():
            raise PatchloomError(
                f"the environment has {name}={text[:40]}, and a whole number is needed: unset {name}, or start the "
                "processes by torchrun or SLURM"
            )


def is_first() -> bool:
    """Return whether this is the first of the processes that train together, as their launcher numbers them."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


class StatusMessage:
    """Context manager that shows a status line if its block is slow. Of nested ones, the innermost is shown.

    Args:
        what: description of the work, such as "reading images".
        total: number of items, if known; `advance` counts those that are done.
        pace: pace of the work, if it is part of a longer one.
    """

    def __init__(self, what: str, total: int | None = None, pace: Pace | None = None):
        self.what, self.total, self.done = what, total, 0
        self.pace = pace or Pace(total or 0)
        self.begun = self.spoken = 0.0
        self._silent = multiprocessing.parent_process() is not None or not is_first()

    def __enter__(self) -> StatusMessage:
        self.begun = time.monotonic()
        self.spoken = self.begun + _FIRST - _EVERY
        if not self._silent:
            _status_thread.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._silent:
            _status_thread.end(self)

    def advance(self, by: int = 1) -> None:
        """Count ``by`` more items as done."""
        self.done += by
        self.pace.advance(by)

    def left(self) -> float | None:
        """Return the seconds left; None if unknown."""
        return self.pace.left()

    def position(self) -> str:
        """Return what is done, such as "350 of 1,000"; "" if it is unknown."""
        return f"{self.done:,} of {self.total:,}" if self.total else ""

    def line(self) -> str:
        """Return the status line, with the time left first, since a narrow terminal cuts the end.

        While that is unknown, the seconds since the beginning are at its end.
        """
        work = ": ".join(filter(None, (self.what, self.position())))
        left = self.left()
        if left is None:
            return f"{work} ({time.monotonic() - self.begun:.0f} s)"
        return f"{time_left(left)} · {work}"


@contextlib.contextmanager
def clear_status() -> Iterator[None]:
    """End the status messages that began inside, also after an error.

    A generator that an error interrupts is not closed as long as the error is kept, as notebooks do: its message would
    be shown for ever.
    """
    before = [*_status_thread.under_way]
    try:
        yield
    except BaseException:
        for waiting in [*_status_thread.under_way]:
            if not any(waiting is one for one in before):
                _status_thread.end(waiting)
        raise


class _StatusThread:
    """Thread that shows the innermost status message."""

    def __init__(self) -> None:
        self.lock, self.changed = threading.Lock(), threading.Condition()
        self.under_way: list[StatusMessage] = []
        self.thread: threading.Thread | None = None
        self.shown = False

    def begin(self, waiting: StatusMessage) -> None:
        with self.lock:
            self.under_way.append(waiting)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="waiting", daemon=True)
                self.thread.start()

    def end(self, waiting: StatusMessage) -> None:
        with self.lock:
            if waiting in self.under_way:
                self.under_way.remove(waiting)
            if self.shown:
                with contextlib.suppress(OSError, ValueError):
                    _stream().write("\r\x1b[2K")
                    _stream().flush()
                self.shown = False
        with self.changed:
            self.changed.notify()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait(_AGAIN)
            with self.lock:
                if not self.under_way:  # no message, no thread
                    self.thread = None
                    return
                self._show(self.under_way[-1])

    def _show(self, waiting: StatusMessage) -> None:
        stream, now = _stream(), time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # the terminal or the stream was closed
            if stream.isatty():
                if now - waiting.begun > _SOON:
                    text = visible(waiting.line())[: shutil.get_terminal_size().columns - 1]
                    stream.write(f"\r\x1b[2K{text}")
                    stream.flush()
                    self.shown = True
            elif now - waiting.spoken > _EVERY:
                stream.write(f"{visible(waiting.line())}\n")
                stream.flush()
                waiting.spoken = now


def duration(seconds: float) -> str:
    """Format seconds as '42 s', '3 min 20 s', '5 h 10 min' or '40 days'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole / 86400:,.0f} days"


def time_left(seconds: float | None) -> str:
    """Format seconds as '3 min 20 s left'; None is unknown."""
    return "time left unknown" if seconds is None else f"{duration(seconds)} left"


def track_progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield the items, with a status line if they are slow and ``what`` is not empty."""
    if not what:
        yield from items
        return
    with StatusMessage(what, total) as waiting:
        for item in items:
            yield item
            waiting.advance()


def _stream() -> TextIO:
    # importing ipykernel proves nothing: only inside a notebook has the shell a kernel
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stdout if getattr(shell, "kernel", None) is not None else sys.stderr


_status_thread = _StatusThread()


def _replace_thread() -> None:
    """Replace the thread in a forked process, which has no thread and maybe a lock that is never released."""
    global _status_thread
    _status_thread = _StatusThread()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_replace_thread)
