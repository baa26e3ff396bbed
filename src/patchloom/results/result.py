"""A measured value, with everything that is needed to read it and to compare it: the only type of such a value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from patchloom.display import visible
from patchloom.errors import conforms, typed_fields
from patchloom.results.claims import Difference
from patchloom.results.intervals import accuracy_interval, mean_interval, wilson

ACCURACY = "accuracy"
SHARE = "share of the way"  # from a baseline (0) to perfect (1)
_LONGEST = 2**17  # characters of a name in a file: the longest argument of a command on Linux


class Outcomes(NamedTuple):
    """Values that a result is the mean of, so that two encoders can be compared image by image.

    Attributes:
        values: [n] result of each test image, such as 1 for a right answer and 0 for a wrong one; or jackknife
            pseudo-values of images or groups, for a value that is no mean over images.
        pseudo: whether they are pseudo-values.
        groups: [n] groups of the images, such as patients; None: no groups.
        classes: [n] true classes, if the result is the mean over classes of the means of their images; else None.
    """

    values: np.ndarray
    pseudo: bool = False
    groups: np.ndarray | None = None
    classes: np.ndarray | None = None


class Baseline(NamedTuple):
    """An answer that needs no learning, on the same images as a task's measure.

    Attributes:
        name: its name, such as "chance".
        value: its mean over images.
        share: the share of the way from it to perfect.
        barred: whether it must be beaten; others may use information that the network lacks.
        to_beat: whether it is the best of those, from which claims are made.
    """

    name: str
    value: float
    share: Result
    barred: bool
    to_beat: bool


@dataclass(frozen=True)
class Result:
    """A measured value.

    Attributes:
        measure: what was measured, such as "accuracy", "mean IoU" or "position accuracy".
        value: the result; a fraction in [0, 1] if the unit is %.
        low, high: 95 % interval over test images; equal to the value if it is exact, infinite if images
            are too few.
        n: number of test images.
        encoder: name of the encoder or control.
        protocol: name of the protocol; "" for a task's own measure.
        settings: settings of the protocol, such as ``k`` and ``pooling``; plain values.
        unit: unit of the value, "" if it has none.
        digits: decimals when it is shown, of a percentage or of the number; None: 1 and 2.
        noun: "images" or "recordings".
        groups: number of groups of the test images; 0: none.
        data, fingerprint: name of the test images, and 16 hex digits of their content.
        seed: random seed of splits and trainings.
        date: ISO 8601, UTC; the same for all results of an evaluation.
        quoted: whether it is among the numbers of the evaluation's headline.
        higher_is_better: whether 1, and not 0, is perfect.
        baselines: answers that need no learning; () for encoders that have controls instead.
        also: further figures of the same pass by name, such as the effective rank of a teacher's outputs.
        against: differences from the controls, if it is an encoder's; over several seeds, those of all of them.
        outcomes: what the value is a mean of; None if unknown.
    """

    measure: str
    value: float
    low: float
    high: float
    n: int
    encoder: str = ""
    protocol: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "%"
    digits: int | None = None
    noun: str = "images"
    groups: int = 0
    data: str = ""
    fingerprint: str = ""
    seed: int = 0
    date: str = ""
    quoted: bool = False
    higher_is_better: bool = True
    baselines: tuple[Baseline, ...] = ()
    also: Mapping[str, float] = field(default_factory=dict)
    against: tuple[Difference, ...] = ()
    outcomes: Outcomes | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of_images(
        encoder: str, protocol: str, settings: Mapping[str, Any], right: ArrayLike, groups: ArrayLike | None = None,
        measure: str = ACCURACY,
    ) -> Result:  # fmt: skip
        """Return the accuracy from the correctness ``right`` [n] of test images, perhaps in ``groups`` [n]."""
        found, of = np.asarray(right), None if groups is None else np.asarray(groups)
        value, ends = float(found.astype(np.float64).mean()), accuracy_interval(found, of)
        count = 0 if of is None else len(np.unique(of))
        outcomes = Outcomes(found, False, of)
        return Result(measure, value, *ends, len(found), encoder, protocol, settings, groups=count, outcomes=outcomes)

    @staticmethod
    def of_means(
        measure: str,
        encoder: str,
        protocol: str,
        settings: Mapping[str, Any],
        values: Sequence[float],
        unit: str = "%",
        groups: ArrayLike | None = None,
    ) -> Result:
        """Return a mean over images (``values`` [n]), perhaps in ``groups`` [n], with Student's interval."""
        low, high = mean_interval(values, groups=groups)
        ends = max(0.0, low), min(1.0 if unit == "%" else math.inf, high)
        mean, count = float(np.mean(values, dtype=np.float64)), 0 if groups is None else len(np.unique(groups))
        return Result(measure, mean, *ends, len(values), encoder, protocol, settings, unit, groups=count)

    @staticmethod
    def of_share(encoder: str, protocol: str, settings: Mapping[str, Any], value: float, n: int) -> Result:
        """Return an accuracy of ``n`` test images that are not known one by one, with Wilson's interval."""
        return Result(ACCURACY, value, *wilson(value, n), n, encoder, protocol, settings)

    @staticmethod
    def exact(
        measure: str, encoder: str, protocol: str, settings: Mapping[str, Any], value: float, unit: str = "%"
    ) -> Result:
        """Return a computed value without an interval."""
        return Result(measure, value, value, value, 0, encoder, protocol, settings, unit)

    # How it is compared.

    @property
    def to_beat(self) -> Baseline:
        """The baseline that must be beaten before anything is learnt."""
        return next(one for one in self.baselines if one.to_beat)

    @property
    def pooling(self) -> str:
        """Pooling of the features, "-" if not applicable."""
        return str(self.settings.get("pooling", "-"))

    @cached_property
    def about(self) -> tuple[str, ...]:
        """Content and number of the images, measure and unit: equal for results that can be compared."""
        return self.fingerprint, str(self.n), self.measure, self.unit

    # How it is shown. Every printer uses these.

    def amount(self, value: float | None = None) -> str:
        """Return this or another value in the unit of the result, without its name."""
        shown = self.value if value is None else value
        rounded = round(100 * shown if self.unit == "%" else shown, self._decimals)
        return f"{rounded + 0.0:.{self._decimals}f}"  # no minus sign on what is rounded to 0

    def number(self, value: float | None = None) -> str:
        """Return text such as "61.2 %"."""
        return f"{self.amount(value)} {self.unit}".rstrip()

    def compact(self, value: float | None = None) -> str:
        """Return text such as "61.2%", for lines in which many numbers stand."""
        return f"{self.amount(value)}{self.unit}"

    def interval(self) -> str:
        """Return text such as "[59.0, 63.3]"; "" without an interval."""
        known = self.low != self.high and math.isfinite(self.low) and math.isfinite(self.high)
        return f"[{self.amount(self.low)}, {self.amount(self.high)}]" if known else ""

    def text(self, gap: str = " ") -> str:
        """Return text such as "61.2 % [59.0, 63.3]", with ``gap`` between the two."""
        return gap.join(filter(None, (self.number(), self.interval())))

    @property
    def _decimals(self) -> int:
        return self.digits if self.digits is not None else 1 if self.unit == "%" else 2

    # How it is kept.

    def plain(self) -> dict[str, Any]:
        """Return values for JSON, with None for numbers that are not finite, and without the outcomes."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _NESTED}
        found |= {name: finite_or_none(found[name]) for name in _ENDS}
        found["settings"] = dict(self.settings)
        found["also"] = {name: finite_or_none(value) for name, value in self.also.items()}
        found["baselines"] = [one._asdict() | {"share": one.share.plain()} for one in self.baselines]
        return found | {"against": [one.plain() for one in self.against]}

    @staticmethod
    def of(values: Any) -> Result:
        """Validate and read the result of `plain` from a file, which anybody may have written.

        Raises:
            ValueError: a value is missing, or of another type or range, with its name.
        """
        try:
            values = _visible(values)
            plain = {one.name: values[one.name] for one in fields(Result) if one.name not in (*_ENDS, *_NESTED)}
            found = typed_fields(Result, plain, _RANGES)
            found |= {name: number_of(values[name], missing) for name, missing in _ENDS.items()}
            found |= {name: text_of(one) for name, one in found.items() if isinstance(one, str)}
            also = {text_of(name): number_of(one, math.nan) for name, one in values["also"].items()}
            baselines = list[Baseline]()
            for one in values["baselines"]:
                flags = one["barred"], one["to_beat"]
                if not all(isinstance(flag, bool) for flag in flags):
                    raise ValueError("barred or to_beat is neither true nor false")
                value = number_of(one["value"], math.nan)
                baselines.append(Baseline(text_of(one["name"]), value, Result.of(one["share"]), *flags))
            against = tuple(map(Difference.of, values["against"]))
            result = Result(**found, also=also, baselines=tuple(baselines), against=against)
        except KeyError as problem:
            raise ValueError(f"a result lacks {problem}") from problem
        except (TypeError, AttributeError, RecursionError) as problem:
            raise ValueError(f"not a result: {problem}") from problem
        if result.noun not in ("images", "recordings") or result.low > result.high:
            raise ValueError("its noun is unknown, or its interval ends before it begins")
        if baselines and sum(one.to_beat for one in baselines) != 1:
            raise ValueError("not one of its baselines is to be beaten")
        return result


def _visible(value: Any) -> Any:
    """Write out the control characters of all texts in a document, which go into tables."""
    if isinstance(value, dict):
        return {visible(name): _visible(one) for name, one in value.items()}
    if isinstance(value, list):
        return [*map(_visible, value)]
    return visible(value) if isinstance(value, str) else value


_ENDS = {"value": math.nan, "low": -math.inf, "high": math.inf}  # numbers, and what stands for None in a file
_NESTED = ("also", "baselines", "against", "outcomes")
_RANGES = {"digits": (0, 6), "n": (0, math.inf), "groups": (0, math.inf), "seed": (0, math.inf)}


# Values in files.


def finite_or_none(value: float) -> float | None:
    """Return a number for JSON; None for infinity, nan, and what `conforms` takes for them."""
    return float(value) if conforms(float(value), float) and value != math.inf else None


def number_of(value: Any, missing: float) -> float:
    """Read a number from a file; ``missing`` if it was not finite."""
    if value is None:
        return missing
    if not conforms(value, float) or value == math.inf:
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return float(value)


def text_of(value: Any) -> str:
    """Read a name, or another text, from a file: of limited length, with its control characters written out."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"{str(value)[:40]!r} is not a name")
    return visible(value)
