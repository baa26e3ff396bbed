"""Version of this package, which is also part of file names and digests.

A release takes it from its tag in git. An installed package has it in the metadata beside it, an editable installation
in the metadata that name its folder. Other metadata are ignored: another version may be installed in the environment
of a source tree that is not.
"""

import json
import sys
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

UNRELEASED = "0.1.0.dev0"  # the next version, as in pyproject.toml


def version_in(folder: Path, installed: list[str] | None = None) -> str:
    """Return the version of the patchloom in a folder from its metadata; `UNRELEASED` if there are none."""
    for beside in distributions(name="patchloom", path=[str(folder)]):
        return beside.version
    for one in distributions(name="patchloom", path=sys.path if installed is None else installed):
        # of no editable installation, or damaged
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            origin = json.loads(one.read_text("direct_url.json") or "{}")
            if origin["dir_info"]["editable"] and origin["url"].rstrip("/") == folder.parent.resolve().as_uri():
                return one.version
    return UNRELEASED


__version__ = version_in(Path(__file__).parents[1])
