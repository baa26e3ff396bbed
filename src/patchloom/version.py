"""Version of this package, which is also part of file names and digests.

A release takes it from its tag in git. An installed package has it in the metadata beside it, an editable installation
in the metadata that name its folder. Other metadata are ignored: another version may be installed in the environment
of a source tree that is not.
"""

import json
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

UNRELEASED = "0.1.0.dev0"  # the next version, as in pyproject.toml


def version_in(folder: Path, installed: list[str] | None = None) -> str:
    """Return the version of the patchloom in a folder from its metadata; `UNRELEASED` if there are none."""
    found = next(iter(distributions(name="patchloom", path=[str(folder)])), None)
    if found is None:
        places = sys.path if installed is None else installed
        here = (one for one in distributions(name="patchloom", path=places) if _is_of(one, folder.parent))
        found = next(here, None)
    return found.version if found else UNRELEASED


def _is_of(distribution: Distribution, tree: Path) -> bool:
    """Return whether the metadata belong to an editable installation of a source tree."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        return origin["dir_info"]["editable"] and origin["url"].rstrip("/") == tree.resolve().as_uri()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not editable, or damaged
        return False


__version__ = version_in(Path(__file__).parents[1])
