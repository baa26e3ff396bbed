"""The version of this package, apart from everything else: it is also part of file names and of digests.

A release has it from its tag in git. What is installed has it in the metadata beside the package, and nothing else is
asked: a tree that is used as it is, or installed as editable, may stand beside another version in the same environment.
"""

from importlib.metadata import distributions
from pathlib import Path

UNRELEASED = "0.1.0.dev0"  # the version to come, as in pyproject.toml


def version_in(folder: Path) -> str:
    """The version of patchloom whose metadata are in a folder; `UNRELEASED`, if there are none."""
    found = next(iter(distributions(name="patchloom", path=[str(folder)])), None)
    return found.version if found else UNRELEASED


__version__ = version_in(Path(__file__).parents[1])
