"""The command line: ``patchloom VERB ...``, one function a verb, words as in Python.

Words are read before the verb is imported: neither --help nor a slip of the keyboard shall wait for torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from patchloom.errors import AlreadyReported, PatchloomError, Stopped
from patchloom.files import mendable, similar
from patchloom.hints import listing, nearest
from patchloom.options import parse_call, parse_evaluate, parse_pretrain
from patchloom.recipes import recipe_named, recipe_names
from patchloom.stopping import StopAtOnce, nobody_reads
from patchloom.tasks import TASKS
from patchloom.tasks.code import fault_of
from patchloom.usage import filled, overview, page, page_width
from patchloom.verbs import VERBS, protocols
from patchloom.waiting import Waiting, is_first

# how others call a verb, and what is a part of one
_MEANT = {
    **dict.fromkeys(("train", "fit", "run", "pre-train", "resume", "continue"), "pretrain"),
    **dict.fromkeys(("eval", "test", "score", "measure", "probe", "validate"), "evaluate"),
    **dict.fromkeys(("draw", "show", "view", "plot", "visualize", "visualise", "pictures"), "look"),
    **dict.fromkeys(("save", "convert"), "export"),
    **dict.fromkeys(("versus", "vs", "choose", "select"), "compare"),
    **dict.fromkeys(("html", "page", "summary", "summarize", "summarise"), "report"),
    **dict.fromkeys(("features", "embeddings", "embedding", "encode", "extract", "vectors", "similar"), "embed"),
    **dict.fromkeys(("infer", "inference", "apply", "label"), "predict"),
    **dict.fromkeys(("time", "benchmark", "profile"), "bench"),
    **dict.fromkeys(("list", "task", "ls"), "tasks"),
    **dict.fromkeys(("info", "inspect", "stats", "propose"), "check"),
}
_ON_FEWER = (
    "What you give beside --recipe wins. An update has {:,} images: where fewer fit in a step, --batch_size {} makes "
    "several steps of an update, and --accumulate follows."
)
_HELP = ("-h", "--help", "--help=all", "--help-all", "--help_all")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 done, 2 the user can mend it, 1 patchloom is at fault, 130 stopped, by whichever signal.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    with StopAtOnce() as stop:
        try:
            return _run([word for word in words if word != "--debug"])
        except BaseException as error:
            # what a library makes of Ctrl-C, or of another process's end by the same signal, is no error of its own
            if isinstance(error, KeyboardInterrupt) or (stop.asked and not isinstance(error, Stopped)):
                return _stopped()
            if not isinstance(error, Exception) or (debug and not isinstance(error, BrokenPipeError)):
                raise
            return _failed(error)


def _run(words: list[str]) -> int:
    verb, *rest = words or ["--help"]
    if verb == "help":
        verb, *rest = [*rest[:1], "--help", *rest[1:]] if rest and rest[0] != "all" else ["--help"]
    if verb in _HELP:
        print(overview())
    elif verb in ("--version", "-V", "version"):
        from patchloom.version import __version__

        print(__version__)
    elif verb not in VERBS:
        raise PatchloomError(_no_verb(verb, rest))
    elif any(word in _HELP for word in rest):
        print(page(verb, rest))
    else:
        globals()[f"_{verb}"](rest)
    return 0


def _stopped() -> int:
    if is_first():
        _say("stopped.")
    return 130


def _failed(error: Exception) -> int:
    """Say in a sentence what was wrong."""
    if isinstance(error, BrokenPipeError):  # the reader of our output went away, as `| head` does
        nobody_reads()
        return 0
    problem = error if isinstance(error, PatchloomError) else mendable(error) or _too_little_memory(error)
    problem = problem or fault_of(error)
    if problem is None:
        _say(f"unexpected {type(error).__name__}: {error}. Run again with --debug and report what it shows.")
        return 1
    if not isinstance(problem, AlreadyReported):
        _say(str(problem))
    return 130 if isinstance(problem, Stopped) else 2


def _too_little_memory(error: Exception) -> PatchloomError | None:
    if "torch" not in sys.modules:
        return None
    from patchloom.memory import memory_shortage

    need = memory_shortage(error)
    return need and PatchloomError(f"this needs more memory than there is ({need}): lower --batch_size, or free memory")


def _say(sentence: str) -> None:
    # names and values that a user gave may hold line breaks
    with contextlib.suppress(OSError):  # a terminal that was closed
        print(f"patchloom: {' '.join(sentence.splitlines())}", file=sys.stderr)


def _no_verb(word: str, rest: Sequence[str]) -> str:
    """The sentence about a first word that is no verb."""
    known = f"The verbs are {listing(VERBS, 'and')}; patchloom --help tells what they do."
    typed = " ".join([word, *rest])
    if word.startswith("-"):
        return f"{word} comes too early: begin with a verb, as in patchloom pretrain photos/ --epochs 50. {known}"
    if word in protocols():
        return f"{word} is a protocol of evaluation: did you mean patchloom evaluate {typed}?"
    if word in TASKS:
        return f"{word} is a task: did you mean patchloom pretrain photos/ --task {word}?"
    if word not in _MEANT and os.path.exists(word):
        return f"{word} is no verb: did you mean patchloom check {word}, or patchloom pretrain {word}?"
    near = _MEANT.get(word) or nearest(word, VERBS)
    return f"there is no verb {word}{f'; did you mean {near}?' if near else '.'} {known}"


def _starting() -> Waiting:
    """While entered, torch is loaded, which takes seconds, and on a busy machine many."""
    return Waiting("starting")


def _refuse_missing(data: object) -> None:
    """Refuse a path of data that is not there before torch is loaded; of all else `open_data` decides.

    Raises:
        PatchloomError: it is plainly a path, and nothing is there.
    """
    if isinstance(data, str) and "/" in data and not any(sign in data for sign in "*?[]{}:@,|"):
        path = os.path.expanduser(data)
        if not os.path.lexists(path):
            beside = similar(Path(path))
            then = f"did you mean {beside}?" if beside else "give a folder, or a text file of paths"
            raise PatchloomError(f"{data} does not exist: {then}")


def _check(words: list[str]) -> None:
    given = parse_call("check", words)
    _refuse_missing(given.get("data"))
    with _starting():
        from patchloom.check import check

    done = check(**given)
    print(*_in_columns(done.table()), *done.sentences(), sep="\n")
    print("", *_in_columns(done.proposal.table()), "", *done.proposal.sentences(), sep="\n")


def _pretrain(words: list[str]) -> None:
    given, out = parse_pretrain(words)
    _refuse_missing(given.get("data"))
    with _starting():
        from patchloom.train.pretrain import pretrain

    pretrain(**given, out=out)


def _evaluate(words: list[str]) -> None:
    given = parse_evaluate(words)
    _refuse_missing(given.get("data"))
    with _starting():
        from rich.console import Console

        from patchloom.evaluate import evaluate

    report = evaluate(**given)
    if is_first():
        report.print(Console(highlight=False))


def _compare(words: list[str]) -> None:
    given = parse_call("compare", words)
    _refuse_missing(given.get("data"))
    with _starting():
        from patchloom.compare.verb import compare

    print("", compare(**given), sep="\n")


def _embed(words: list[str]) -> None:
    given = parse_call("embed", words)
    _refuse_missing(given.get("data"))
    with _starting():
        from patchloom.embed.verb import embed

    done = embed(**given)
    print(*done.notes, *done.sentences(), *_in_columns(done.table() if done.neighbours else []), sep="\n")


def _predict(words: list[str]) -> None:
    given = parse_call("predict", words)
    with _starting():
        from patchloom.predict import predict

    done = predict(**given)
    print(*done.notes, *done.sentences(), sep="\n")


def _look(words: list[str]) -> None:
    if words[:1] == ["curves"]:
        _look_curves(words[1:])
        return
    given = parse_call("look", words)
    with _starting():
        from patchloom.look.verb import look

    for path in look(**given):
        print(path)


def _look_curves(words: list[str]) -> None:
    given = parse_call("look curves", words)
    with _starting():
        from patchloom.look.together import curves

    for path in curves(**given):
        print(path)


def _report(words: list[str]) -> None:
    given = parse_call("report", words)
    with _starting():
        from patchloom.report.verb import report

    print(report(**given))


def _export(words: list[str]) -> None:
    given = parse_call("export", words)
    with _starting():
        from patchloom.export.verb import export

    done = export(**given)
    print(done.sentence(), *done.checks, *done.notes, "", done.snippet, sep="\n")


def _bench(words: list[str]) -> None:
    given = parse_call("bench", words)
    with _starting():
        from patchloom.bench import bench

    done = bench(**given)
    print(*done.sentences(), *_in_columns(done.table()), sep="\n")


def _tasks(words: list[str]) -> None:
    if words:
        raise PatchloomError(
            "patchloom tasks takes no arguments; patchloom pretrain --task NAME --help tells its options"
        )
    rows = [("task", "paper", "withheld from the encoder", "asked of it", "nano", "ViT-S")]
    for name, entry in TASKS.items():
        small, large = ("", "") if entry.cost is None else (f"×{cost:.1f}" for cost in entry.cost)
        rows.append((name, entry.paper, entry.withheld, entry.asked, small, large))
    print(*_in_columns(rows, page_width()), sep="\n")
    print(
        "",
        *filled(
            "nano, ViT-S: the time of a step over that of mae, with 96 pixels and patches of 8, and with 224 and 16. "
            "It depends on sizes and machine: patchloom bench photos/ measures yours. patchloom pretrain --task NAME "
            "--help tells a task's options."
        ),
        sep="\n",
    )


def _recipes(words: list[str]) -> None:
    if len(words) > 1 or any(word.startswith("-") for word in words):
        raise PatchloomError("patchloom recipes takes the name of one recipe, or nothing: it lists all then")
    if words:
        recipe, width = recipe_named(words[0]), page_width()
        print(
            f"{recipe.name}: {recipe.row}, {recipe.epochs:,} epochs",
            "",
            *_in_columns(recipe.rows(), width),
            "",
            sep="\n",
        )
        print(f"patchloom pretrain DATA --recipe {recipe.name}", "is short for", sep="\n")
        print(*recipe.command("DATA", width), "", sep="\n")
        print(*filled(_ON_FEWER.format(recipe.batch, min(256, recipe.batch // 4))), sep="\n")
        return
    found = [recipe_named(name) for name in recipe_names()]
    rows = [("recipe", "paper", "epochs", "published")]
    rows += [(one.name, one.source, f"{one.epochs:>6,}", one.score().partition(",")[0]) for one in found]
    print(*_in_columns(rows), "", sep="\n")
    run = [one.name for one in found if one.measured]
    said = f"Measured here: {listing(run, 'and')}." if run else "They have not been run here."
    print(*filled(f"Rows of the papers' tables, with the score that is published. {said}"), "", sep="\n")
    print("patchloom pretrain photos/ --recipe NAME  trains by one")
    print("patchloom recipes NAME                    tells all of it")


def _in_columns(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """A line for each row, its cells as wide as the widest of their column; within ``width``, several lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 10:
        widths[widths.index(max(widths))] -= 1
    lines: list[str] = []
    for row in rows:
        cells = [
            [cell] if len(cell) <= size else textwrap.wrap(cell, size) for cell, size in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip())
    return lines


if __name__ == "__main__":
    sys.exit(main())
