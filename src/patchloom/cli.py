"""Command line ``patchloom VERB ...``: help pages, dispatch to the verbs, error messages and exit codes.

Options are parsed before the verb is imported, so that --help and typing errors do not wait for torch.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import platform
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from patchloom.display import (
    Displayable,
    Lines,
    StatusMessage,
    TextTable,
    Verbatim,
    check_launcher,
    is_first,
    json_value,
    print_line,
    truncate_middle,
    visible,
)
from patchloom.errors import AlreadyReported, PatchloomError, Stopped, closest_word, listing
from patchloom.options.help import HELP, help_page, overview, page_width, two_columns
from patchloom.options.parse import VERBS, parse_call, protocols
from patchloom.recipes import recipe_named, recipe_names
from patchloom.system.files import disk_error, no_such_path
from patchloom.system.signals import StopAtOnce, discard_output
from patchloom.tasks import TASKS
from patchloom.tasks.custom import fault_of

_ON_FEWER = (
    "Options that you give override the recipe. An update has {:,} images: if fewer fit in memory, --batch_size {} "
    "splits an update into several steps, and --accumulate follows."
)
_ON_RECIPES = (
    "patchloom pretrain photos/ --recipe NAME  trains with one",
    "patchloom recipes NAME                    shows all its settings",
)
_HINT_TASKS = (
    "nano, ViT-S: time of a step relative to mae, for nano at 96 pixels with patches of 8, and for ViT-S at 224 with "
    "patches of 16. It depends on sizes and machine: patchloom bench photos/ measures yours. Options of a task: "
    "patchloom pretrain --task NAME --help"
)


_LONGEST = 4000  # characters of an error message


def _explain(error: Exception) -> tuple[int, str]:
    """Return the exit code after an error, and the message."""
    problem = error if isinstance(error, PatchloomError) else disk_error(error) or _fault_of_torch(error)
    problem = problem or fault_of(error)
    if problem is None:
        return 1, f"unexpected {type(error).__name__}: {error}. Run again with --debug and report the traceback."
    return problem.exit_code, str(problem)


def _fault_of_torch(error: Exception) -> PatchloomError | None:
    """Return the message about too little memory or a lost reading process, if torch reports one."""
    if "torch" not in sys.modules:
        return None
    from patchloom.data.workers import lost_worker
    from patchloom.system.device import memory_shortage

    if lost := lost_worker(error):  # from a signal handler, so it may come outside of the training
        return lost
    need = memory_shortage(error)
    if not need:
        return None
    return PatchloomError(f"this needs more memory than is free ({need}): lower --batch_size, or free memory")


def _no_verb(word: str, rest: Sequence[str]) -> str:
    """Return the message about a first word that is no verb."""
    known = f"The verbs are {listing(VERBS, 'and')}; patchloom --help describes them."
    typed = " ".join([word, *rest])
    if word.startswith("-"):
        return f"{word} comes too early: begin with a verb, as in patchloom pretrain photos/ --epochs 50. {known}"
    if word in protocols():
        return f"{word} is a protocol of evaluation: did you mean patchloom evaluate {typed}?"
    if word in TASKS:
        return f"{word} is a task: did you mean patchloom pretrain photos/ --task {word}?"
    if os.path.exists(word):
        return f"{word} is no verb: did you mean patchloom check {word}, or patchloom pretrain {word}?"
    near = closest_word(word, VERBS)
    return f"there is no verb {word}{f'; did you mean {near}?' if near else '.'} {known}"


def _refuse_missing(data: object) -> None:
    """Raise if the data is a path that does not exist, before torch is loaded; `open_data` checks everything else."""
    if isinstance(data, str) and "/" in data and not any(sign in data for sign in "*?[]{}:@,|"):
        path = os.path.expanduser(data)
        if not os.path.lexists(path):
            raise no_such_path(data, Path(path), "give a folder, or a text file of paths")


def run_verb(verb: str, words: list[str]) -> Any:
    """Call a verb with the words after it, and return its result."""
    match verb:
        case "tasks":
            return _tasks(words)
        case "recipes":
            return _recipes(words)
    if verb == "look" and words[:1] == ["curves"]:
        verb, words = "look curves", words[1:]
    given = parse_call(verb, words)
    _refuse_missing(given.get("data"))
    with StatusMessage("starting"), _without_collection():  # importing torch takes seconds
        function = function_of(verb)
        if "torch" in sys.modules:  # results does not need it
            from patchloom.system.waiting import sleep_when_busy

            sleep_when_busy()
    return function(**given)


def function_of(verb: str) -> Callable[..., Any]:
    """Import the function of a verb, which `parse_call` knows: that of this package, or of ``look curves``."""
    if verb == "look curves":
        from patchloom.look.run_curves import draw_run_curves

        return draw_run_curves
    found: Callable[..., Any] = getattr(import_module("patchloom"), verb)  # which knows the homes of all verbs
    return found


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pause garbage collection: it takes a fifth of the time of imports and of parsing, and finds nothing to free.

    Later collections need not search the million objects of torch and timm either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@dataclass(frozen=True, repr=False)
class Catalog(Displayable):
    """Tables and lines about tasks, recipes or the version, with their values for ``--json``."""

    shown: Sequence[str | TextTable]
    values: dict[str, Any]

    def parts(self, width: int) -> Sequence[str | TextTable]:
        """See `Displayable`."""
        return self.shown

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        return self.values


def _tasks(words: list[str]) -> Catalog:
    if words:
        raise PatchloomError(
            "patchloom tasks takes no arguments: patchloom pretrain --task NAME --help shows the options of a task"
        )
    rows = [("task", "paper", "withheld from the encoder", "asked of it", "nano", "ViT-S")]
    for name, entry in TASKS.items():
        small, large = ("", "") if entry.cost is None else (f"×{cost:.1f}" for cost in entry.cost)
        rows.append((name, entry.paper, entry.withheld, entry.asked, small, large))
    shown = ("path", "paper", "withheld", "asked", "cost", "needs")
    found = [{"task": name, **{one: getattr(entry, one) for one in shown}} for name, entry in TASKS.items()]
    return Catalog([TextTable.of(rows, texts=(1, 2, 3)), "", _HINT_TASKS], {"tasks": found})


def _recipes(words: list[str]) -> Catalog:
    if len(words) > 1 or any(word.startswith("-") for word in words):
        raise PatchloomError("patchloom recipes takes the name of one recipe, or nothing to list all")
    found = [recipe_named(name) for name in words or recipe_names()]
    values = {"recipes": [asdict(one) for one in found]}
    if words:
        one, width = found[0], page_width()
        lines = [f"{one.name}: {one.row}, {one.epochs:,} epochs", ""]
        lines += [line for name, text in one.rows() for line in two_columns(name, text, 15, width)]
        lines += ["", f"patchloom pretrain DATA --recipe {one.name}", "stands for", *one.command("DATA", width), ""]
        return Catalog([*map(Verbatim, lines), _ON_FEWER.format(one.batch, min(256, one.batch // 4))], values)
    rows = [("recipe", "paper", "epochs", "published")]
    rows += [(one.name, one.source, f"{one.epochs:>6,}", one.score().partition(",")[0]) for one in found]
    run = [one.name for one in found if one.measured]
    measured = f"Run with patchloom: {listing(run, 'and')}." if run else "No recipe was run with patchloom yet."
    about = f"Rows of the papers' tables, with their published scores. {measured}"
    return Catalog([TextTable.of(rows, texts=[1]), "", about, "", *map(Verbatim, _ON_RECIPES)], values)


def _run(words: list[str]) -> Any:
    """Run one command, and return its result or a page of help."""
    verb, *rest = words or ["--help"]
    if verb == "help":
        verb, *rest = [*rest[:1], "--help", *rest[1:]] if rest and rest[0] != "all" else ["--help"]
    if verb in HELP:
        return overview()
    if verb in ("--version", "-V", "version"):
        from patchloom.version import __version__

        return Catalog([__version__], {"version": __version__, "python": platform.python_version()})
    if verb not in VERBS:
        raise PatchloomError(_no_verb(verb, rest))
    if any(word.startswith("--json=") for word in rest):
        raise PatchloomError("--json takes no value: give it alone")
    if any(word in HELP for word in rest):
        with _without_collection():
            return help_page(verb, rest)
    return run_verb(verb, rest)


def _print_document(verb: str, **content: Any) -> None:
    """Print the document of ``--json``, which docs/reference/json.schema.json describes."""
    from patchloom.version import __version__

    document = json.dumps({"verb": verb, "version": __version__, **content}, indent=2, allow_nan=False)
    print(document.replace("\x7f", "\\u007f"), flush=True)  # the only control character that JSON does not escape


def _values(result: Any) -> Any:
    """Return a result as JSON values; some verbs return the files that they wrote."""
    if isinstance(result, Displayable):
        return json_value(result.plain())
    return {"files": json_value(result if isinstance(result, list) else [result])}


def _text(one: Any, wants_help: bool) -> str:
    """Return a result or a part of it as text for the terminal; a refusal is left out, since an error follows."""
    if isinstance(one, Displayable):
        return one.text()
    return visible(Lines(one) if wants_help else str(one))


def _print_traceback(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    print_line(Lines("".join(traceback.format_exception(kind, error, trace)).rstrip()), sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 success, 2 an error that the user can correct, 75 a fault that may pass by itself, 1 a fault of
        patchloom, 130 stopped by a signal.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug, as_json = "--debug" in words, "--json" in words
    words = [word for word in words if word not in ("--debug", "--json")]
    wants_help = words[:1] in ([], ["help"]) or not {*HELP}.isdisjoint(words)
    as_json = as_json and not wants_help
    verb = "version" if words[:1] == ["-V"] else words[0].lstrip("-") if words else ""
    for stream in (sys.stdout, sys.stderr):  # a terminal may lack letters, such as those of file names
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with StopAtOnce() as stop:
        try:
            check_launcher()
            # progress goes to stderr, so that stdout holds nothing but the document
            with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
                result = _run(words)
            refusal = result.refusal if isinstance(result, Displayable) else ""
            if is_first() and as_json and not refusal:
                _print_document(verb, result=_values(result))
            elif (is_first() and not as_json and verb != "pretrain") or wants_help:  # pretrain has printed it already
                shown = result if isinstance(result, list) else [result]
                print(*(_text(one, wants_help) for one in shown), sep="\n", flush=True)
            if refusal:
                raise PatchloomError(refusal)
            return 0
        except BaseException as error:
            # libraries turn Ctrl-C, or the end of another process by the same signal, into errors of their own
            stopped = isinstance(error, KeyboardInterrupt) or (stop.asked and not isinstance(error, Stopped))
            if not stopped and not isinstance(error, Exception):
                raise
            if not stopped and isinstance(error, BrokenPipeError):  # the reader went away, as `| head` does
                discard_output()
                return 0
            code, message = _explain(error) if isinstance(error, Exception) and not stopped else (130, "stopped.")
            message = truncate_middle(message, _LONGEST)
            if as_json and is_first():
                run = {"run": error.progress} if isinstance(error, Stopped) and error.progress else {}
                number = 1 if debug and not stopped else code
                _print_document(verb, error={"message": message, "exit_code": number, **run})
            if debug and not stopped:
                sys.excepthook = _print_traceback
                raise
            # every process reports its own error, but only the first one that they were stopped
            silent = isinstance(error, AlreadyReported) or ((stopped or isinstance(error, Stopped)) and not is_first())
            if not silent:
                with contextlib.suppress(OSError):  # a terminal that was closed
                    # names and values from the user may contain line breaks
                    print_line(f"patchloom: {' '.join(message.splitlines())}", sys.stderr)
            return code


if __name__ == "__main__":
    sys.exit(main())
