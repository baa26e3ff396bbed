"""What somebody may have meant who named a path that is not a run's folder."""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

_CONFIG = "config.yaml"  # which every run has


def run_around(path: str | Path) -> Path | None:
    """The folder of the run in which a path lies, at most two folders further up; None if it lies in none."""
    return next((folder for folder in list(Path(path).parents)[:2] if (folder / _CONFIG).is_file()), None)


def meant(path: str | Path) -> str:
    """What may have been meant instead of ``path``, as the end of a sentence; "" if nothing is near.

    That is the run in which it lies, a run that lies in it, or one of nearly the same name.
    """
    path = Path(path)
    with suppress(OSError, ValueError, RecursionError):  # such a path names nothing
        if path.exists():
            if (around := run_around(path)) is not None:
                return f"it is a part of the run {around}, so give {around}"
            if runs := _runs_in(path):
                if len(runs) == 1:
                    return f"the run {runs[0].name} is in it, so give {runs[0]}"
                listed = ", ".join(run.name for run in runs[:3]) + ", ..." * (len(runs) > 3)
                return f"{len(runs)} runs are in it ({listed}), so give one of them, such as {runs[0]}"
            return ""
        if runs := _runs_in(Path("runs") / path.parent if path.parent == Path() else path.parent):
            near = get_close_matches(path.name, [run.name for run in runs], n=1)
            return f"did you mean {next(run for run in runs if run.name == near[0])}?" if near else ""
    return ""


def _runs_in(folder: Path) -> list[Path]:
    return sorted(inside.parent for inside in folder.glob(f"*/{_CONFIG}")) if folder.is_dir() else []
