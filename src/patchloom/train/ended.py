"""A finished run, as `patchloom.pretrain` returns it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from patchloom.shown import Shown, Verbatim


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """A finished run.

    Attributes:
        folder: where everything is.
        summary: the closing sentence.
    """

    folder: Path
    summary: str

    def parts(self, width: int) -> list[str]:
        """See `Shown`."""
        return [Verbatim(f"Run {self.folder}"), self.summary]

    def __fspath__(self) -> str:
        """So that every verb takes the run for its folder."""
        return str(self.folder)
