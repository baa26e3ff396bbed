"""Messages about unknown options and wrong words, each with a suggestion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from patchloom.errors import PatchloomError, closest_word, listing, normalize_word

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
    elif normalize_word(bare) in _WORDS and places:
        said = f"there is no option {name}: give {listing(places, 'and')} without a name, {prog} {' '.join(places)}"
    elif near := _mistyped(name, bare, known):
        said = near
    elif found := owners(name):
        said = f"{name} is an option of {listing(found, 'and')}; {prog} --help all shows its options"
    else:
        said = f"there is no option {name}; {prog} --help all lists them"
    return PatchloomError(said)


def _mistyped(name: str, bare: str, known: Sequence[str]) -> str | None:
    """Return the message about an option whose name is similar to a known one, or None."""
    switch = f"--{bare[3:].replace('-', '_')}"
    if bare.startswith(("no-", "no_")) and switch in known:
        return f"there is no option {name}; did you mean {switch} false?"
    inside = [one for one in known if one.endswith(f".{bare}")]
    if near := inside[0] if inside else closest_word(name, known):
        return f"there is no option {name}; did you mean {near if near.startswith('--') else f'--{near}'}?"
    return None


def unknown_option_error(name: str, known: Iterable[str], otherwise: str) -> PatchloomError:
    """Return the error about an unknown keyword of a Python call, in the words of the command line."""
    options = [f"--{one}" for one in known]
    return PatchloomError(_mistyped(f"--{name}", name, options) or f"there is no option --{name}; {otherwise}")
