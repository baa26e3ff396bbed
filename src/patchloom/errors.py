"""The exceptions that are meant for the user."""

import re

# an open file, as Python shows it: neither which one it is nor what to do
_FILE_OBJECT = re.compile(r"<(?:_io\.\w+|\w+(?:\.\w+)* object at) [^<>]*>")


class PatchloomError(Exception):
    """One clear sentence that says what is wrong and what to do; the command line prints it and exits with code 2."""


class Stopped(PatchloomError):
    """Somebody stopped a run, and nothing is lost; the command line exits with code 130."""


class AlreadyReported(PatchloomError):
    """What another process of the same training has reported already; the command line prints nothing."""


def one_line(error: BaseException, path: str = "") -> str:
    """Return the message of an exception in one line, or its type; an open file and ``path`` are "it"."""
    text = str(error).replace(f"'{path}'", "it").replace(path, "it") if path else str(error)
    return " ".join(_FILE_OBJECT.sub("it", text).split()) or type(error).__name__
