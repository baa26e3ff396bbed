"""Whether the wheel and the sdist in a folder hold what git has, and nothing else: python .ci/contents.py FOLDER."""

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/patchloom/"


def known(root: Path) -> set[str]:
    """The files of the tree that git has, or would take: those that are ignored are left out.

    Without git, as in a copy of the tree, all files are known but Python's own.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        paths = (path.relative_to(root) for path in root.rglob("*"))
        listed = [path.as_posix() for path in paths if "__pycache__" not in path.parts]
    return {name for name in listed if name and (root / name).is_file()}


def faults(wheel: Iterable[str], sdist: Iterable[str], known: set[str]) -> list[str]:
    """What is missing or should not be there, a sentence each.

    Args:
        wheel: the names in the wheel.
        sdist: the names in the sdist, without the folder that all of them are in.
        known: the files of the tree.
    """
    package = {name.removeprefix(PACKAGE) for name in known if name.startswith(PACKAGE)}
    inside = {name.removeprefix("patchloom/") for name in wheel if name.startswith("patchloom/")}
    beside = {name for name in wheel if not name.startswith("patchloom/") and ".dist-info/" not in name}
    made = {"PKG-INFO"}  # by the builder
    return [
        *(f"the wheel lacks {PACKAGE}{name}" for name in sorted(package - inside)),
        *(f"the wheel has patchloom/{name}, which the tree has not" for name in sorted(inside - package)),
        *(f"the wheel has {name} beside the package" for name in sorted(beside)),
        *(f"the sdist lacks {name}" for name in sorted(known - set(sdist)) if name.startswith((PACKAGE, "tests/"))),
        *(f"the sdist has {name}, which the tree has not" for name in sorted(set(sdist) - known - made)),
    ]


def main(folder: Path) -> int:
    """Print what is wrong, and return the exit code."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = opened.namelist()
    with tarfile.open(sdist) as opened:
        in_sdist = [member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()]
    found = faults(in_wheel, in_sdist, known(ROOT))
    print(*found or [f"{wheel.name}: {len(in_wheel):,} files; {sdist.name}: {len(in_sdist):,} files"], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
