"""How well a task is done: results image by image, beside what needs no learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from patchloom.questions.collapse import effective_rank, output_spread
from patchloom.verdict import Effect, effect_of

# Below these a teacher's outputs count as collapsed: two images' outputs have a mean cosine above 0.99, or they differ
# in hardly more directions than one. ExtreMA on CIFAR-10 fell from 28 to 3 where its learning rate was too high, and
# its kNN accuracy with it.
_LEAST_SPREAD, _LEAST_RANK = 0.1, 4.0
# Above this agreement on other images little is left by which the image itself could be told, and half of so little
# looks like much: 0.973 against 0.934 is 59 % of the way to 1.
_ALIKE = 0.9


@dataclass(frozen=True)
class Measure:
    """How well a task is done on held-out images, beside what needs no learning.

    Attributes:
        name: what is measured, in words.
        values: [b] the result on each image.
        baselines: [b] each, results of answers that need no learning by name, such as chance.
        to_beat: the baseline that has to be beaten before anything is learnt, or several, of which the best one on the
            mean has to be; others may know what the network does not.
        higher_is_better: which way is up.
        form: how a result is written, as for `format`.
        details: [b] each, further results by name, on the same scale.
        outputs: [b d] of the teacher, for tasks that could collapse; None for the others.
    """

    name: str
    values: Tensor
    baselines: dict[str, Tensor]
    to_beat: str | tuple[str, ...]
    higher_is_better: bool
    form: str = ".1%"
    details: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Measure]) -> Measure:
        """One measure of the images of several batches."""

        def whole(of: Callable[[Measure], dict[str, Tensor]]) -> dict[str, Tensor]:
            return {name: torch.cat([of(part)[name] for part in parts]) for name in of(parts[0])}

        return replace(
            parts[0],
            values=torch.cat([part.values for part in parts]),
            baselines=whole(lambda part: part.baselines),
            details=whole(lambda part: part.details),
            outputs=None if parts[0].outputs is None else torch.cat([part.outputs for part in parts]),
        )

    def show(self, value: float) -> str:
        """A result as people read it."""
        return format(value, self.form)

    @cached_property
    def diversity(self) -> dict[str, float]:
        """Spread (0 to 1) and effective rank of the teacher's outputs; empty for tasks that cannot collapse."""
        if self.outputs is None:
            return {}
        return {"spread": output_spread(self.outputs), "effective rank": effective_rank(self.outputs)}

    def collapsed(self) -> bool:
        """Whether the teacher gives nearly the same answer to every image, so that agreeing with it means little.

        Of fewer than 16 images nothing is said: their outputs cannot differ in many directions.
        """
        if self.outputs is None or len(self.outputs) < 16:
            return False
        found = self.diversity
        return found["spread"] < _LEAST_SPREAD or found["effective rank"] < _LEAST_RANK

    def alike(self) -> bool:
        """Whether the teacher's outputs of different images agree so much that agreement on one of them says little."""
        return self.outputs is not None and self.means()[self.baseline_to_beat()] > _ALIKE

    def baseline_to_beat(self) -> str:
        """The name of the baseline that has to be beaten."""
        means = self.means()
        return (max if self.higher_is_better else min)(self._to_beat(), key=means.__getitem__)

    def has_to_be_beaten(self, baseline: str) -> bool:
        """Whether a baseline is one of those to beat; others may know what the network does not."""
        return baseline in self._to_beat()

    def _to_beat(self) -> tuple[str, ...]:
        return (self.to_beat,) if isinstance(self.to_beat, str) else self.to_beat

    @property
    def value(self) -> float:
        """The mean result."""
        return self.values.mean().item()

    def means(self) -> dict[str, float]:
        """The mean of each baseline."""
        return {name: values.mean().item() for name, values in self.baselines.items()}

    def effect(self, baseline: str | None = None) -> Effect:
        """Where the result is on the way from a baseline to perfect; by default from the one that has to be beaten.

        It is taken image by image, since some images are easier than others for both.
        """
        base = self.baselines[baseline or self.baseline_to_beat()]
        return effect_of(self.values.tolist(), base.tolist(), 1.0 if self.higher_is_better else 0.0)
