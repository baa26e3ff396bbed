"""The version of this package, apart from everything else: it is also part of file names and of digests.

A release has it from its tag in git. What is installed has it in the metadata beside the package; what is installed as
editable has it in the metadata that names its folder, as pip shows it. Nothing else is asked: a tree that is used as it
is may stand beside another version in the same environment.
"""

import json
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

UNRELEASED = "0.1.0.dev0"  # the version to come, as in pyproject.toml


def version_in(folder: Path, installed: list[str] | None = None) -> str:
    """Return the version of the patchloom in a folder by its metadata; `UNRELEASED`, if there are none."""
    found = next(iter(distributions(name="patchloom", path=[str(folder)])), None)
    if found is None:
        places = sys.path if installed is None else installed
        here = (one for one in distributions(name="patchloom", path=places) if _is_of(one, folder.parent))
        found = next(here, None)
    return found.version if found else UNRELEASED


def _is_of(distribution: Distribution, tree: Path) -> bool:
    """Return whether the metadata are of an editable installation of a tree."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        return origin["dir_info"]["editable"] and origin["url"].rstrip("/") == tree.resolve().as_uri()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # installed otherwise, or damaged
        return False


__version__ = version_in(Path(__file__).parents[1])
