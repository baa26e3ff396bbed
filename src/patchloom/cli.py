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
from patchloom.errors import AlreadyReported, PatchloomError, Stopped, listing, suggestion
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
    problem = error if isinstance(error, PatchloomError) else disk_error(error)
    if problem is None and "torch" in sys.modules:
        from patchloom.data.workers import lost_worker
        from patchloom.system.device import memory_shortage

        problem = lost_worker(error)  # from a signal handler, so it may come outside of the training
        if problem is None and (need := memory_shortage(error)):
            problem = PatchloomError(
                f"this needs more memory than is free ({need}): lower --batch_size, or free memory"
            )
    problem = problem or fault_of(error)
    if problem is None:
        return 1, f"unexpected {type(error).__name__}: {error}. Run again with --debug and report the traceback."
    return problem.exit_code, str(problem)


def run_verb(verb: str, words: list[str]) -> Any:
    """Call a verb with the words after it, and return its result."""
    if verb == "tasks":
        return _tasks(words)
    if verb == "recipes":
        return _recipes(words)
    if verb == "look" and words[:1] == ["curves"]:
        verb, words = "look curves", words[1:]
    given = parse_call(verb, words)
    data = given.get("data")  # a missing path is reported before torch is loaded; `open_data` checks the rest
    if isinstance(data, str) and "/" in data and not any(sign in data for sign in "*?[]{}:@,|"):
        path = Path(os.path.expanduser(data))
        if not os.path.lexists(path):
            raise no_such_path(data, path, "give a folder, or a text file of paths")
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
        return self.shown

    def plain(self) -> dict[str, Any]:
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
        known = f"The verbs are {listing(VERBS, 'and')}; patchloom --help describes them."
        said = f"there is no verb {verb}{suggestion(verb, VERBS)} {known}"
        if verb.startswith("-"):
            said = f"{verb} comes too early: begin with a verb, as in patchloom pretrain photos/ --epochs 50. {known}"
        elif verb in protocols():
            said = f"{verb} is a protocol of evaluation: did you mean patchloom evaluate {' '.join([verb, *rest])}?"
        elif verb in TASKS:
            said = f"{verb} is a task: did you mean patchloom pretrain photos/ --task {verb}?"
        elif os.path.exists(verb):
            said = f"{verb} is no verb: did you mean patchloom check {verb}, or patchloom pretrain {verb}?"
        raise PatchloomError(said)
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
            files = result if isinstance(result, list) else [result]  # some verbs return what they wrote
            refusal = result.refusal if isinstance(result, Displayable) else ""
            if is_first() and as_json and not refusal:
                values = result.plain() if isinstance(result, Displayable) else {"files": files}
                _print_document(verb, result=json_value(values))
            elif wants_help:
                print(visible(Lines(result)), flush=True)
            elif is_first() and not as_json and verb != "pretrain":  # pretrain has printed it already
                texts = [one.text() if isinstance(one, Displayable) else visible(str(one)) for one in files]
                print(*texts, sep="\n", flush=True)
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
                sys.excepthook = lambda *about: print_line(
                    Lines("".join(traceback.format_exception(*about)).rstrip()), sys.stderr
                )
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
