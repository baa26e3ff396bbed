"""What a run remembers beside its tensors. Plain values, which JSON keeps to the last digit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_STEADY = 2000  # updates without an overflow after which the scale is doubled


@dataclass
class State:
    """Where a run is.

    Attributes:
        step: steps done.
        seconds: that they took, all starts of the run together.
        rows: of ``metrics.csv``.
        sums: of the loss and of each metric, over the ``counted`` steps since the last row.
        counted: steps in ``sums``.
        skipped: updates since the last row that were not made, for they were no numbers.
        in_a_row: such updates up to now, without a good one between them.
        setbacks: how often the run went back to a checkpoint; each halves the learning rate.
        scale: by which losses are multiplied in float16.
        steady: updates since it last changed.
    """

    step: int = 0
    seconds: float = 0.0
    rows: list[dict[str, str]] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    counted: int = 0
    skipped: int = 0
    in_a_row: int = 0
    setbacks: int = 0
    scale: float = 2.0**16
    steady: int = 0

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> State:
        """From what a checkpoint keeps; what it does not know is at its default."""
        return cls(**{one.name: about[one.name] for one in fields(cls) if one.name in about})

    def plain(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return asdict(self)

    @property
    def factor(self) -> float:
        """By which the learning rate is multiplied."""
        return 0.5**self.setbacks

    def adapt(self, overflow: bool) -> None:
        """Halve the scale after a gradient that was too large for float16, double it after 2,000 that were not.

        As `torch.amp.GradScaler` does (Micikevicius et al. 2018, section 3.2), but as a number that a checkpoint keeps.
        """
        self.steady = 0 if overflow else self.steady + 1
        if overflow:
            self.scale = max(1.0, self.scale / 2)
        elif self.steady == _STEADY:
            self.scale, self.steady = self.scale * 2, 0

    def count(self, names: Sequence[str], values: Sequence[Sequence[float]]) -> None:
        """Add the loss and metrics of some steps to the sums: ``values`` has a row a step, a column a name."""
        for row in values:
            for name, value in zip(names, row, strict=True):
                self.sums[name] = self.sums.get(name, 0.0) + value
        self.counted += len(values)

    def means(self) -> dict[str, float]:
        """Of the loss and each metric since the last row, which begins anew; nothing if all updates were skipped."""
        means = {name: value / self.counted for name, value in self.sums.items()}
        if self.skipped:
            means["skipped"] = self.skipped
        self.sums, self.counted, self.skipped = {}, 0, 0
        return means
