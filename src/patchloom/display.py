"""How what patchloom returns is shown: as text that fits the terminal, and as HTML in a notebook."""

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

T = TypeVar("T")

_GAP = "  "  # between two columns
_SHORTEST = 14  # characters that are left of a name: as many as "majority class" has
_NARROWEST = 16  # characters in a line of a text that may be broken
_TOGETHER = re.compile(r"\d %|\[[^\[\] ]+, [^\[\] ]+\]")  # a share, and an interval
_UNBROKEN = "\N{NO-BREAK SPACE}"
_WIDE = 10_000  # characters of a line in a notebook, in which nothing needs to be shortened


@dataclass(frozen=True)
class TextTable:
    """A table of text. Cells may hold line breaks, and are broken nowhere else.

    Attributes:
        heading: a cell for each column.
        rows: the other lines; one of a single cell goes over all columns.
        names: columns whose cells may be shortened in the middle.
        texts: columns whose cells may be broken between words.
        ends: numbers of the rows after which a line is drawn.
    """

    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: frozenset[int] = frozenset()
    texts: frozenset[int] = frozenset()
    ends: frozenset[int] = field(default_factory=frozenset)

    @staticmethod
    def of(rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> TextTable:
        """A heading and the rows below it."""
        heading, *others = (tuple(row) for row in rows)
        return TextTable(heading, tuple(others), texts=frozenset(texts))

    def widths(self) -> list[int]:
        """Of the columns, if nothing is shortened or broken."""
        return [max(_width(cell) for cell in column) for column in zip(self.heading, *self._whole(), strict=True)]

    def _whole(self) -> list[tuple[str, ...]]:
        return [row for row in self.rows if len(row) == len(self.heading)]

    def least(self) -> int:
        """The narrowest that it can be."""
        return _total(self._narrowed(0))

    def text(self, width: int) -> str:
        """Lines of up to ``width`` characters, or more where it cannot be narrower."""
        widths = self._narrowed(width)
        heading = tuple("\n".join(textwrap.wrap(cell, w)) for cell, w in zip(self.heading, widths, strict=True))
        lines = [*_side_by_side([cell.split("\n") for cell in heading], widths), "─" * _total(widths)]
        for number, row in enumerate(self.rows):
            if len(row) < len(self.heading):
                lines.append(truncate_middle(row[0], max(width, _SHORTEST)))
            else:
                lines += _side_by_side([self._cell(cell, i, widths[i]) for i, cell in enumerate(row)], widths)
            if number in self.ends and number + 1 < len(self.rows):
                lines.append("")
        return "\n".join(lines)

    def html(self) -> str:
        """A table element."""
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
        for column, heading in enumerate(self.heading):  # one may be longer than all that stands below it
            if column not in self.names | self.texts:
                cells = max((_width(row[column]) for row in self._whole()), default=0)
                least = max(cells, *map(len, heading.split()), 0)
                widths[column] = max(widths[column] - max(0, _total(widths) - width), min(widths[column], least))
        return widths

    def _cell(self, cell: str, column: int, width: int) -> list[str]:
        if column in self.names:
            return [truncate_middle(cell, width)]
        if column in self.texts:
            return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) or [""]
        return cell.split("\n")


class Verbatim(str):
    """A line that is never broken, such as one with a path that is to be copied."""


class Displayable:
    """What can be shown: by ``print``, at a prompt, and in a notebook."""

    @abstractmethod
    def parts(self, width: int) -> Sequence[str | TextTable]:
        """Sentences and tables, in the order in which they are read, for lines of ``width`` characters."""

    @abstractmethod
    def plain(self) -> dict[str, Any]:
        """Return the values, as ``--json`` prints them: numbers unformatted, paths as text (docs/reference/json.md)."""

    def text(self, width: int | None = None) -> str:
        """For lines of ``width`` characters, or as wide as the terminal is."""
        width = width or shutil.get_terminal_size().columns
        return "\n".join(
            part.text(width)
            if isinstance(part, TextTable)
            else part
            if isinstance(part, Verbatim)
            else _wrapped(part, width)
            for part in self.parts(width)
        )

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        parts = self.parts(_WIDE)
        return "\n".join(_element(part) for part in parts if part)


def json_value(value: Any) -> Any:
    """Return a value with the types that JSON has: a number that is not finite is None, and a path its text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): json_value(one) for name, one in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return json_value(value.item()) if hasattr(value, "item") else [json_value(one) for one in value]


def _element(part: str | TextTable) -> str:
    if isinstance(part, TextTable):
        return part.html()
    return f"<pre>{escape(part)}</pre>" if isinstance(part, Verbatim) else f"<p>{_html(part)}</p>"


def truncate_middle(name: str, width: int) -> str:
    """A name of up to ``width`` characters, of which beginning and end are left."""
    if len(name) <= width:
        return name
    end = (width - 1) // 2
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"


def _side_by_side(cells: Sequence[list[str]], widths: Sequence[int]) -> list[str]:
    """The lines of a row, of which each cell may have several."""
    padded = zip_longest(*cells, fillvalue="")
    return [_GAP.join(part.ljust(w) for part, w in zip(line, widths, strict=True)).rstrip() for line in padded]


def _wrapped(text: str, width: int) -> str:
    """Broken between words alone: a path can still be copied, and neither a number nor an interval is torn."""
    whole = _TOGETHER.sub(lambda found: found[0].replace(" ", _UNBROKEN), text)
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in whole.split("\n"))
    return "\n".join("\n".join(line) for line in lines).replace(_UNBROKEN, " ")


def _html(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _width(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


# What is said while something takes a while, so that no program is silent: a line that is replaced, or lines at times.


_SOON = 1.0  # seconds after which a terminal shows a line
_AGAIN = 0.5  # seconds between two of its changes
_FIRST, _EVERY = 10.0, 30.0  # seconds to the first plain line, where there is no terminal, and between two of them
# of several processes that train together, one alone speaks
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def is_first() -> bool:
    """Whether this is the first of the processes that train together, as their launcher numbers them."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


class StatusMessage:
    """While entered, what is being done is said where it takes a while. Inside of another one, this one is shown.

    Args:
        what: is being done, such as "reading images".
        total: how many times `advance` will be called, if that is known.
    """

    def __init__(self, what: str, total: int | None = None):
        self.what, self.total, self.done = what, total, 0
        self.begun = self.spoken = 0.0
        self._silent = multiprocessing.parent_process() is not None or not is_first()

    def __enter__(self) -> StatusMessage:
        self.begun = time.monotonic()
        self.spoken = self.begun + _FIRST - _EVERY
        if not self._silent:
            _teller.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._silent:
            _teller.end(self)

    def advance(self, by: int = 1) -> None:
        """So many more are done."""
        self.done += by

    def line(self) -> str:
        """What is being done, how far it is, and for how long."""
        count = "" if not self.total else f": {self.done:,} of {self.total:,}"
        return f"{self.what}{count} ({time.monotonic() - self.begun:.0f} s)"


@contextlib.contextmanager
def clear_status() -> Iterator[None]:
    """What began inside is over after an error, too.

    A generator that a function holds, and leaves amid its items, is never closed where somebody keeps the error, as
    notebooks do: what it waited for would be told for ever.
    """
    before = [*_teller.under_way]
    try:
        yield
    except BaseException:
        for waiting in [*_teller.under_way]:
            if not any(waiting is one for one in before):
                _teller.end(waiting)
        raise


class _StatusThread:
    """The thread that speaks for whatever is waited for, the innermost of all that is."""

    def __init__(self) -> None:
        self.lock, self.changed = threading.Lock(), threading.Condition()
        self.under_way: list[StatusMessage] = []
        self.thread: threading.Thread | None = None
        self.shown = False

    def begin(self, waiting: StatusMessage) -> None:
        with self.lock:
            self.under_way.append(waiting)
            if self.thread is None:
                self.thread = threading.Thread(target=self._tell, name="waiting", daemon=True)
                self.thread.start()

    def end(self, waiting: StatusMessage) -> None:
        with self.lock:
            if waiting in self.under_way:
                self.under_way.remove(waiting)
            self._clear()
        with self.changed:
            self.changed.notify()

    def _tell(self) -> None:
        while True:
            with self.changed:
                self.changed.wait(_AGAIN)
            with self.lock:
                if not self.under_way:  # a program that waits for nothing has no thread for it
                    self.thread = None
                    return
                self._say(self.under_way[-1])

    def _say(self, waiting: StatusMessage) -> None:
        stream, now = _stream(), time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # a terminal that was closed, or a stream
            if stream.isatty():
                if now - waiting.begun > _SOON:
                    text = waiting.line()[: shutil.get_terminal_size().columns - 1]
                    stream.write(f"\r\x1b[2K{text}")
                    stream.flush()
                    self.shown = True
            elif now - waiting.spoken > _EVERY:
                stream.write(f"{waiting.line()}\n")
                stream.flush()
                waiting.spoken = now

    def _clear(self) -> None:
        if self.shown:
            with contextlib.suppress(OSError, ValueError):
                _stream().write("\r\x1b[2K")
                _stream().flush()
            self.shown = False


def duration(seconds: float) -> str:
    """'42 s', '3 min 20 s', '5 h 10 min' or '40 days'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole / 86400:,.0f} days"


class TimeLeft:
    """The time left in all steps of something.

    Args:
        steps: how many there are.
        seconds: of a step, as far as it was measured before.
    """

    def __init__(self, steps: int, seconds: float = 0.0):
        self.steps, self.seconds, self.done = steps, seconds, 0
        self.begin()

    def begin(self) -> None:
        """From now on time is taken, until the next beginning."""
        self._timed, self._begun = 0, time.perf_counter()

    def step(self) -> None:
        """One more was made."""
        self.done, self._timed = self.done + 1, self._timed + 1
        self.seconds = (time.perf_counter() - self._begun) / self._timed

    def skip(self, steps: int) -> None:
        """So many need not be made."""
        self.done += steps

    def __str__(self) -> str:
        return f"{duration(self.seconds * max(0, self.steps - self.done))} left"


class Counted(StatusMessage):
    """What is being done, with the time left."""

    def line(self) -> str:
        """The time left first, since a narrow terminal cuts the end."""
        if not self.done or self.total is None:
            return f"{self.what} ..."
        left = (time.monotonic() - self.begun) / self.done * max(0, self.total - self.done)
        return f"{duration(left)} left · {self.what}: {self.done / self.total:.0%}"


def track_progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The same items; with a line, if they take a while and ``what`` is not empty."""
    if not what:
        yield from items
        return
    with Counted(what, total) as waiting:
        for item in items:
            yield item
            waiting.advance()


def progress_message(what: str) -> contextlib.AbstractContextManager[object]:
    """While entered, what is being done is said if it takes a while; nothing is said without ``what``."""
    return StatusMessage(what) if what else contextlib.nullcontext()


def _stream() -> TextIO:
    # a program that runs notebooks, or lists kernels, imports ipykernel, too: only in a kernel has the shell one
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stdout if getattr(shell, "kernel", None) is not None else sys.stderr


_teller = _StatusThread()


def _forget() -> None:
    """In a process that was forked: the thread is not there, and the lock may never be released."""
    global _teller
    _teller = _StatusThread()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
