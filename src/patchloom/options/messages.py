"""Messages about unknown options and wrong words, each with a suggestion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from patchloom.errors import PatchloomError, closest_word, listing, normalize_word

# names of options in other programs, without hyphens and underscores
_RATE = "the base learning rate: the peak is blr · (images per update) / 256, independent of the batch size"
_ELSEWHERE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("lr", "learningrate", "baselr"), ("blr", _RATE)),
    **dict.fromkeys(("batch", "bs", "b", "batchsizepergpu"), ("batch_size", "")),
    **dict.fromkeys(("output", "outputdir", "outdir", "outfolder", "savedir", "logdir", "name"), ("out", "")),
    **dict.fromkeys(("imagesize", "inputsize", "resolution", "size", "imgsz"), ("img_size", "")),
    **dict.fromkeys(("numworkers", "nworkers", "j"), ("workers", "")),
    **dict.fromkeys(("gpus", "ngpus", "numgpus", "nprocpernode"), ("devices", "")),
    **dict.fromkeys(("gpu", "cuda", "cpu"), ("device", "it takes cuda or cpu, and has a default")),
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
    **dict.fromkeys(("resume", "continue"), "the same command, with the same --out, resumes a run"),
    **dict.fromkeys(
        ("nodes", "nnodes", "numnodes"),
        "start processes on several machines by torchrun or srun (docs/how-to/slurm.md)",
    ),
    **dict.fromkeys(("verbose", "quiet"), "the output is always the same"),
    **dict.fromkeys(("augment", "augmentation", "transforms"), "use --flip, --crop_scale and --randaugment"),
}
_WORDS = ("data", "dataset", "datapath", "datadir", "input", "images", "run")  # names of positional arguments


def shorten_options(text: str) -> str:
    """Replace the internal names of options, such as --task.name, by the names that users type, such as --task."""
    return re.sub(r"--(task|model|config|from)[._](name|file|run)\b", r"--\1", text)


def without_hyphens(word: str, known: Sequence[str]) -> str | None:
    """Return the message about an option without its two hyphens, or None if no option in ``known`` is similar."""
    name, equals, value = word.partition("=")
    bare = name.lstrip("-–—")
    meant = closest_word(bare, [one[2:] for one in known]) if equals or name != bare else None
    if meant is None:
        return None
    return f"{word} is no option: options begin with two hyphens; did you mean --{meant}{equals}{value}?"


def unknown_word_error(
    word: str, prog: str, places: Sequence[str], known: Sequence[str], owners: Callable[[str], Sequence[str]]
) -> PatchloomError:
    """Return the error about a word that is no option, or one too many.

    Args:
        word: the word, with the value of an option behind =.
        prog: the command.
        places: names of positional arguments, in capitals.
        known: options as the user types them.
        owners: function from an option to the commands that have it.
    """
    name = word.partition("=")[0]
    bare = name.lstrip("-")
    if not name.startswith("--"):
        return PatchloomError(
            without_hyphens(word, known)
            or f"{word} is one word too many; see {prog} --help (names of options begin with --, and a name with "
            "spaces needs quotes)"
        )
    if bare.startswith("task.") and "--tasks" in known:
        said = f"there is no option {name} for all tasks: write it behind a task, as in --tasks mae,mae:{bare}=VALUE"
    elif other := _otherwise_called(name, bare, known):
        said = other
    elif normalize_word(bare) in _WORDS and places:
        said = f"there is no option {name}: give {listing(places, 'and')} without a name, {prog} {' '.join(places)}"
    elif near := _mistyped(name, bare, known):
        said = near
    elif found := owners(name):
        said = f"{name} is an option of {listing(found, 'and')}; {prog} --help all shows its options"
    else:
        said = f"there is no option {name}; {prog} --help all lists them"
    return PatchloomError(said)


def _otherwise_called(name: str, bare: str, known: Sequence[str]) -> str | None:
    """Return the message about an option that does not exist here, or that has another name, or None."""
    if normalize_word(bare) in _NEEDLESS:
        return f"there is no option {name}: {_NEEDLESS[normalize_word(bare)]}"
    meant, why = _ELSEWHERE.get(normalize_word(bare), ("", ""))
    if f"--{meant}" in known:
        return f"there is no option {name}; did you mean --{meant}" + (f"? It is {why}" if why else "?")
    if re.match("no[-_]", bare) and (switch := f"--{bare[3:].replace('-', '_')}") in known:
        return f"there is no option {name}; did you mean {switch} false?"
    return None


def _mistyped(name: str, bare: str, known: Sequence[str]) -> str | None:
    """Return the message about an option whose name is similar to a known one, or None."""
    inside = [one for one in known if one.endswith(f".{bare}")]
    if near := inside[0] if inside else closest_word(name, known):
        return f"there is no option {name}; did you mean {near if near.startswith('--') else f'--{near}'}?"
    return None


def unknown_option_error(name: str, known: Iterable[str], otherwise: str) -> PatchloomError:
    """Return the error about an unknown keyword of a Python call, in the words of the command line."""
    options = [f"--{one}" for one in known]
    said = _otherwise_called(f"--{name}", name, options) or _mistyped(f"--{name}", name, options)
    return PatchloomError(said or f"there is no option --{name}; {otherwise}")
