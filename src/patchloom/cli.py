"""The command line: ``patchloom VERB ...``, one function a verb, words as in Python."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from patchloom.errors import AlreadyReported, PatchloomError, Stopped
from patchloom.files import mendable
from patchloom.stopping import StopAtOnce, nobody_reads
from patchloom.waiting import Waiting

# Verbs are imported when they are called: --help must not wait for torch.
VERBS: dict[str, str] = {
    "check": "read all images, report what is wrong with them, and propose how to pre-train",
    "pretrain": "train an encoder on images without labels",
    "evaluate": "measure what an encoder learnt, by one of many protocols",
    "look": "draw what was withheld, and what came back",
    "export": "write an encoder for use with timm alone",
    "bench": "time each task on this machine, and tell what limits a run",
    "tasks": "list the pretext tasks",
}
# of several processes that train together, the first speaks
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


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
    if not words or words[0] in ("-h", "--help"):
        print(_help())
    elif words[0] == "--version":
        from patchloom.version import __version__

        print(__version__)
    else:
        _verb(words[0])(words[1:])
    return 0


def _stopped() -> int:
    if all(os.environ.get(name, "0") == "0" for name in _RANKS):
        _say("stopped.")
    return 130


def _failed(error: Exception) -> int:
    """Say in a sentence what was wrong."""
    if isinstance(error, BrokenPipeError):  # the reader of our output went away, as `| head` does
        nobody_reads()
        return 0
    problem = error if isinstance(error, PatchloomError) else mendable(error) or _too_little_memory(error)
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


def _help() -> str:
    verbs = "\n".join(f"  {name:<10} {what}" for name, what in VERBS.items())
    return (
        "usage: patchloom VERB ...\n\n"
        "Pre-train vision transformers on your own unlabelled images, and see honestly what they learnt.\n\n"
        f"{verbs}\n\n"
        "  patchloom pretrain shapes                   built-in images, offline, a few minutes\n"
        "  patchloom pretrain photos/ --task droppos   any folder of images\n\n"
        "patchloom VERB --help tells the options; --debug shows where an error came from."
    )


def _verb(name: str) -> Callable[[list[str]], None]:
    if name not in VERBS:
        near = get_close_matches(name, VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise PatchloomError(f"there is no verb {name}{hint} The verbs are {', '.join(VERBS)}.")
    return globals()[f"_{name}"]


def _starting() -> Waiting:
    """While entered, torch is loaded, which takes seconds, and on a busy machine many."""
    return Waiting("starting")


def _check(words: list[str]) -> None:
    with _starting():
        from patchloom.check import check
        from patchloom.options import parse_call

    done = check(**parse_call("check", check, words))
    print(*_in_columns(done.table()), *done.sentences(), sep="\n")
    print("", *_in_columns(done.proposal.table()), "", *done.proposal.sentences(), sep="\n")


def _pretrain(words: list[str]) -> None:
    from patchloom.options import parse_pretrain

    with _starting():
        given, out = parse_pretrain(words)
        from patchloom.train.pretrain import pretrain

    pretrain(**given, out=out)


def _evaluate(words: list[str]) -> None:
    with _starting():
        from rich.console import Console

        from patchloom.evaluate import evaluate
        from patchloom.options import parse_evaluate

    evaluate(**parse_evaluate(words)).print(Console(highlight=False))


def _look(words: list[str]) -> None:
    with _starting():
        from patchloom.look.pictures import look
        from patchloom.options import parse_call

    for path in look(**parse_call("look", look, words)):
        print(path)


def _export(words: list[str]) -> None:
    with _starting():
        from patchloom.export import export
        from patchloom.options import parse_call

    done = export(**parse_call("export", export, words))
    files, what = f"{done.weights}", "features"
    if done.head is not None:
        files, what = f"{files} and {done.head}", "features, the instance representation among them,"
    print(f"{files}: timm's {what} differ by at most {done.difference:.1e} on {done.images} images.\n")
    print(done.snippet)


def _bench(words: list[str]) -> None:
    with _starting():
        from patchloom.bench import bench
        from patchloom.options import parse_call

    done = bench(**parse_call("bench", bench, words))
    print(*done.sentences(), *_in_columns(done.table()), sep="\n")


def _tasks(words: list[str]) -> None:
    from patchloom.tasks import TASKS

    if words:
        raise PatchloomError(
            "patchloom tasks takes no arguments; patchloom pretrain --task NAME --help tells its options"
        )
    rows = [("task", "paper", "withheld from the encoder", "asked of it", "step")]
    for name, entry in TASKS.items():
        cost = "" if entry.cost is None else f"×{entry.cost:.1f}"
        rows.append((name, entry.paper, entry.withheld, entry.asked, cost))
    print(*_in_columns(rows), sep="\n")


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, its cells as wide as the widest of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
