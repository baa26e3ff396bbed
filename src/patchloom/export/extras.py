"""Libraries that a form of export needs: whether they are there, as they are extras, and that they do not chatter."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec

from patchloom.errors import PatchloomError
from patchloom.hints import listing, pip_install


def need(to: str, *libraries: str) -> None:
    """Refuse to go on without them, before anything takes time.

    Args:
        to: the form, which is the name of the extra, too.
        libraries: by the names by which they are imported.

    Raises:
        PatchloomError: one is missing.
    """
    if absent := [name for name in libraries if find_spec(name) is None]:
        raise PatchloomError(f"--to {to} needs {listing(absent, 'and')}: {pip_install(to)}")


@contextmanager
def quiet() -> Iterator[None]:
    """While entered, what other libraries say of their progress is not heard: prints, logging and warnings.

    torch's exporter and transformers print lines of which none is for whoever exports; what fails raises all the same.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
