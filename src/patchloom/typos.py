"""Words that are no option or value: one sentence each, with what may have been meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from patchloom.errors import PatchloomError
from patchloom.hints import in_words, listing, nearest, squeezed

if TYPE_CHECKING:  # a slip in a Python call does not need it
    from jsonargparse import ArgumentParser

# what other programs call it, or what it was called before, without hyphens and underscores
_RATE = "the base learning rate: the peak is blr · (images an update) / 256, so that it need not change with the batch"
_ELSEWHERE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("lr", "learningrate", "baselr"), ("blr", _RATE)),
    **dict.fromkeys(("batch", "bs", "b", "batchsizepergpu"), ("batch_size", "")),
    **dict.fromkeys(("output", "outputdir", "outdir", "outfolder", "savedir", "logdir", "name"), ("out", "")),
    **dict.fromkeys(("imagesize", "inputsize", "resolution", "size", "imgsz"), ("img_size", "")),
    **dict.fromkeys(("numworkers", "nworkers", "j"), ("workers", "")),
    **dict.fromkeys(("gpus", "ngpus", "numgpus", "nprocpernode"), ("devices", "")),
    **dict.fromkeys(("gpu", "cuda", "cpu"), ("device", "it takes cuda or cpu, and is chosen where it is left out")),
    **dict.fromkeys(("amp", "fp16", "bf16", "halfprecision"), ("precision", "")),
    **dict.fromkeys(("arch", "architecture", "backbone", "encoder", "net"), ("model", "")),
    **dict.fromkeys(("pretrained", "weights", "checkpoint", "ckpt"), ("init", "it takes timm:NAME or a file")),
    **dict.fromkeys(("steps", "iterations", "niter", "maxepochs", "numepochs"), ("epochs", "")),
    **dict.fromkeys(("wd", "decay"), ("weight_decay", "")),
    **dict.fromkeys(("warmup", "warmupsteps"), ("warmup_epochs", "")),
    **dict.fromkeys(("pretext", "method", "objective"), ("task", "")),
    **dict.fromkeys(("logger", "loggers", "tracker", "trackers", "reportto"), ("log", "")),
    **dict.fromkeys(("earlystop", "earlystopping", "stopafter"), ("patience", "")),
    **dict.fromkeys(("limit", "subset", "most", "maximages"), ("max_train", "")),
    **dict.fromkeys(("cfg", "conf", "yaml"), ("config", "")),
}
_NEEDLESS = {
    **dict.fromkeys(("resume", "continue"), "the same command, with the same --out, goes on where a run was stopped"),
    **dict.fromkeys(("verbose", "quiet"), "what is printed cannot be chosen"),
    **dict.fromkeys(("augment", "augmentation", "transforms"), "--flip, --crop_scale and --randaugment can be chosen"),
}
_WORDS = ("data", "dataset", "datapath", "datadir", "input", "images", "run")  # which are given without a name


def short(text: str) -> str:
    """With --task for --task.name: nested names keep a name beside its options, and people type the short form."""
    return re.sub(r"--(task|model|config|from)[._](name|file|run)\b", r"--\1", text)


def sentence(problem: str, parser: ArgumentParser, owners: Callable[[str], Sequence[str]]) -> str:
    """What jsonargparse reports, as one sentence that says what to do.

    Args:
        problem: its report.
        parser: that which refused.
        owners: what else takes an option that this parser does not, in words of the command line.
    """
    known = [short(name) for action in parser._actions for name in action.option_strings if name[-1] != "+"]
    if "arguments are required" in problem:
        places = [action for action in parser._actions if not action.option_strings and action.required]
        lacking = problem.rpartition(":")[2].replace(",", " ").split()
        said = [f"{place.dest.upper()} ({place.help.rstrip('.')})" for place in places if place.dest in lacking]
        return f"{parser.prog} needs {listing(said, 'and')}; {parser.prog} --help tells more"
    if bare := re.search(r"argument (\S+): expected", problem):
        return f"{short(bare[1])} needs a value; {parser.prog} --help tells which"
    unknown = re.search(r"(?:[Uu]nrecognized arguments|No action for key): *(.+)", problem)
    if unknown:
        return _unknown(unknown[1] if unknown[1][0] != "-" else unknown[1].split()[0], parser, known, owners)
    key = re.search(r'(?:Parser key |[Aa]rgument )"?([\w.]+)"?', problem)
    value = re.search(r"Given value: (.*)", problem) or re.search(r"[Vv]alue:? [\"']?(.*?)[\"']?(?:$|\n)", problem)
    if key and value and (inner := re.match(r"NestedArg\(key='(.*?)'", value[1])):
        return f"there is no option --{key[1]}.{inner[1]}; {parser.prog} --help lists them"
    if key and value:
        action = next((a for a in parser._actions if key[1] in (a.dest, a.metavar)), None)
        kind = in_words(getattr(action, "_typehint", None) or action.type) if action else "another kind of value"
        name = short(f"--{key[1]}") if action is None or action.option_strings else key[1].upper()
        return f"{name} cannot be {value[1]}: it takes {kind}"
    return " ".join(problem.split()) + f"; {parser.prog} --help tells how"


def without_hyphens(word: str, known: Sequence[str]) -> str | None:
    """The sentence about a word that would be one of the options ``known``, if it began with two hyphens, or None."""
    name, equals, value = word.partition("=")
    bare = name.lstrip("-–—")
    meant = nearest(bare, [one[2:] for one in known]) if equals or name != bare else None
    if meant is None:
        return None
    return f"{word} is no option, since these begin with two hyphens; did you mean --{meant}{equals}{value}?"


def _unknown(word: str, parser: ArgumentParser, known: Sequence[str], owners: Callable[[str], Sequence[str]]) -> str:
    name = word.partition("=")[0]
    bare = name.lstrip("-")
    if not name.startswith("--"):
        return without_hyphens(word, known) or (
            f"{word} is one word too many; {parser.prog} --help tells what it takes (names of options begin with --, "
            "and a name with spaces needs quotes)"
        )
    if said := _otherwise_called(name, bare, known):
        return said
    places = [action.dest.upper() for action in parser._actions if not action.option_strings]
    if squeezed(bare) in _WORDS and places:
        return (
            f"there is no option {name}: give {listing(places, 'and')} without a name, {parser.prog} {' '.join(places)}"
        )
    if said := _mistyped(name, bare, known):
        return said
    if found := owners(name):
        return f"{name} is an option of {listing(found, 'and')}; {parser.prog} --help all lists those that go with it"
    return f"there is no option {name}; {parser.prog} --help all lists them"


def _otherwise_called(name: str, bare: str, known: Sequence[str]) -> str | None:
    """The sentence on an option that is not needed, or that has another name here."""
    if squeezed(bare) in _NEEDLESS:
        return f"there is no option {name}: {_NEEDLESS[squeezed(bare)]}"
    meant, why = _ELSEWHERE.get(squeezed(bare), ("", ""))
    if f"--{meant}" in known:
        return f"there is no option {name}; did you mean --{meant}" + (f"? It is {why}" if why else "?")
    if re.match("no[-_]", bare) and (switch := f"--{bare[3:].replace('-', '_')}") in known:
        return f"there is no option {name}; did you mean {switch} false?"
    return None


def _mistyped(name: str, bare: str, known: Sequence[str]) -> str | None:
    """The sentence on an option that is like one of those that there are."""
    inside = [one for one in known if one.endswith(f".{bare}")]
    if near := inside[0] if inside else nearest(name, known):
        return f"there is no option {name}; did you mean {near if near.startswith('--') else f'--{near}'}?"
    return None


def no_option(name: str, known: Iterable[str], otherwise: str) -> PatchloomError:
    """The refusal of a keyword of a Python call, in the words of the command line.

    Args:
        name: what was given.
        known: what there is.
        otherwise: what to say if none of that is meant.
    """
    options = [f"--{one}" for one in known]
    said = _otherwise_called(f"--{name}", name, options) or _mistyped(f"--{name}", name, options)
    return PatchloomError(said or f"there is no option --{name}; {otherwise}")
