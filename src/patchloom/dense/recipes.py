"""Recipes of segmentation and detection: hyper-parameters, each of them an option."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from patchloom.errors import PatchloomError
from patchloom.evaluate.recipes import Course, Resolved, held_out_count, named_recipe
from patchloom.options.declare import Auto, check_declared
from patchloom.options.recipes import DenseValues, DetectValues, SegmentValues

_UPDATES = {"cpu": 1_000, "gpu": 20_000}  # of a training whose steps are auto: an hour or so
_BATCH = {"cpu": 8, "gpu": 16}
_VALIDATION_SHARE, _LEAST_VALIDATION, _MOST_VALIDATION = 0.15, 10, 500
VALIDATIONS = 10  # in a training

Asked = TypeVar("Asked", bound="DenseRecipe")
R = TypeVar("R", bound="ResolvedDenseRecipe")


@dataclass(frozen=True)
class DenseRecipe(DenseValues):
    """Hyper-parameters that segmentation and detection share."""

    def check(self) -> None:
        check_declared(self)
        for name in ("scale", "drops"):
            self._rises(name)
        if self.steps != "auto" and self.warmup_steps != "auto" and self.warmup_steps > self.steps:
            raise PatchloomError(f"--warmup_steps {self.warmup_steps} is more than --steps {self.steps}: lower it")

    def _rises(self, name: str) -> None:
        pair = getattr(self, name)
        if pair[0] > pair[1]:
            raise PatchloomError(f"--{name} {list(pair)} has the larger number first: turn them round")

    def settled(self, n: int, device: str, own_validation: int, side: int, patch: int, width: int) -> Any:
        """Return the recipe with every ``auto`` resolved."""
        raise NotImplementedError

    def _settled(self, n: int, device: str, own_validation: int, side: int, patch: int) -> dict[str, Any]:
        """The fields, with every shared ``auto`` resolved."""
        kind = "cpu" if device == "cpu" else "gpu"
        steps, warmup, batch, validation, size = self.steps, self.warmup_steps, self.batch, self.validation, self.size
        if validation == "auto":
            held = round(_VALIDATION_SHARE * n)
            validation = _VALIDATION_SHARE if own_validation or held >= _LEAST_VALIDATION else 0.0
        if steps == "auto":
            steps = _UPDATES[kind]
        if warmup == "auto":
            warmup = round(steps / 10)
        if batch == "auto":
            batch = _BATCH[kind]
        if size == "auto":
            size = round(1.5 * side / patch) * patch
        batch = min(batch, max(1, n - (0 if own_validation else held_out_count(validation, n, _MOST_VALIDATION))))
        same = {"steps": steps, "warmup_steps": warmup, "batch": batch, "validation": validation, "size": size}
        return vars(self) | same

    def plain(self) -> dict[str, Any]:
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {name: value for name, value in found.items() if name not in self._idle()}

    def _idle(self) -> set[str]:
        return set() if self.decay == "steps" else {"drops"}


@dataclass(frozen=True)
class SegmentRecipe(SegmentValues, DenseRecipe):
    """Hyper-parameters of segmentation."""

    @property
    def resized(self) -> int | None:
        """Shorter side in pixels to which images are resized; None without resizing."""
        return self.side if isinstance(self.side, int) else None

    def settled(
        self, n: int, device: str, own_validation: int, side: int, patch: int, width: int
    ) -> ResolvedSegmentRecipe:
        """The recipe with every ``auto`` resolved, but for rare classes, which `patchloom.dense.segment` looks for."""
        values = self._settled(n, device, own_validation, side, patch)
        values |= {name: value for name, value in NOT_RARE.items() if values[name] == "auto"}
        values |= {"side": values["size"]} if self.side in ("auto", "size") else {}
        values |= {"head_width": _within(width)} if self.head_width == "auto" else {}
        return ResolvedSegmentRecipe(**values)


@dataclass(frozen=True)
class DetectRecipe(DetectValues, DenseRecipe):
    """Hyper-parameters of detection."""

    @property
    def sides(self) -> tuple[int, int, int] | None:
        """Range of the shorter side and largest longer side in pixels; None: images are fitted into the canvas."""
        return (*self.shorter, self.longer or 2**14) if self.shorter[1] else None

    def check(self) -> None:
        super().check()
        self._rises("shorter")
        if self.shorter[1] and not self.shorter[0]:
            raise PatchloomError(f"--shorter {list(self.shorter)} begins at 0 pixels: raise it")
        if self.longer and not self.shorter[1]:
            raise PatchloomError(f"--longer {self.longer} has no effect without --shorter: give both")

    def _idle(self) -> set[str]:
        return super()._idle() | ({"scale"} if self.shorter[1] else {"shorter", "longer"})

    def settled(
        self, n: int, device: str, own_validation: int, side: int, patch: int, width: int
    ) -> ResolvedDetectRecipe:
        """The recipe with every ``auto`` resolved, but for the window, which depends on the encoder."""
        usual = 256 if self.heads == "papers" else min(256, _within(width))
        values = self._settled(n, device, own_validation, side, patch)
        return ResolvedDetectRecipe(**values | ({"head_width": usual} if self.head_width == "auto" else {}))


@dataclass(frozen=True, kw_only=True)
class ResolvedDenseRecipe(DenseRecipe, Resolved):
    """`DenseRecipe` without ``auto``; the window follows from the encoder at its new size."""

    most_held_out = _MOST_VALIDATION
    later = "window"

    steps: int
    warmup_steps: int
    batch: int
    size: int
    validation: float

    def course(self, n: int, accumulate: int = 1) -> Course:
        return Course(
            steps=self.steps,
            per_epoch=max(1, n // self.batch),
            unit="step",
            batch=self.batch,
            peak=self.lr,
            rate_option=f"--lr (now {self.lr:g})",
            warmup=min(self.warmup_steps, self.steps - 1),
            decay=self.decay,
            drops=self.drops,
            betas=self.betas,
            weight_decay=self.weight_decay,
            layer_decay=self.layer_decay,
            clip=self.clip,
            every=max(1, math.ceil(self.steps / VALIDATIONS)),
            patience=self.patience,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedSegmentRecipe(ResolvedDenseRecipe, SegmentRecipe):
    """`SegmentRecipe` without ``auto``, as `SegmentRecipe.settled` makes it."""

    side: int | Literal["native"]
    head_width: int
    class_weights: bool
    rare_crops: float


@dataclass(frozen=True, kw_only=True)
class ResolvedDetectRecipe(ResolvedDenseRecipe, DetectRecipe):
    """`DetectRecipe` without ``auto``, as `DetectRecipe.settled` makes it."""

    head_width: int


def _within(width: int) -> int:
    return min(512, max(64, width))


# training for rare classes where it is auto: without any, and with them
NOT_RARE: dict[str, Any] = {"class_weights": False, "rare_crops": 0.0}
FOR_RARE: dict[str, Any] = {"class_weights": True, "rare_crops": 0.5}

# for small data on one machine: as long as there is patience for, light heads, weights chosen on validation images
_SMALL: dict[str, Any] = {
    **{"steps": "auto", "warmup_steps": "auto", "batch": "auto", "size": "auto", "lr": 1e-3, "layer_decay": 0.75},
    **{"drop_path": 0.0, "clip": 5.0, "validation": "auto"},
}
# UPerNet on ADE20K. MAE's values stand in for what a paper does not state
_PAPERS = SegmentRecipe()
SEGMENT: dict[str, SegmentRecipe] = {
    "small": SegmentRecipe(**_SMALL, side="auto", class_weights="auto", rare_crops="auto"),
    "mae": _PAPERS,
    "lut": _PAPERS,  # Table E
    "droppos": replace(_PAPERS, steps=80_000, lr=7e-4),  # appendix A.3
    "restore": replace(_PAPERS, lr=3e-4),  # section 4.4: the better of two rates; it does not say which that was
    "restore-4e-4": replace(_PAPERS, lr=4e-4),
    "extrema": replace(_PAPERS, steps=80_000, layer_decay=0.85),  # section 5.3
}
# a linear layer on the frozen encoder, which neither decays by layer nor drops paths
PROBE = replace(SEGMENT["small"], **NOT_RARE, lr=5e-3, weight_decay=0.0, layer_decay=1.0, auxiliary=0.0)
_VITDET = DetectRecipe(
    # DropPos, appendix A.2, at the length of the 1x schedule; what it does not state is ViTDet's for ViT-B (Li et al.
    # 2022), at whose shares of the training the rate drops
    steps=88_750,
    warmup_steps=250,
    lr=3e-4,
    weight_decay=0.1,
    layer_decay=0.7,
    decay="steps",
    drops=(78_889 / 88_750, 85_463 / 88_750),
    size=1024,
    scale=(0.1, 2.0),
    color=False,
)
DETECT: dict[str, DetectRecipe] = {
    "small": DetectRecipe(**_SMALL | {"scale": (0.5, 1.5)}, heads="light"),
    "vitdet": _VITDET,
    # Beyond Masking, section 4.4: 12 epochs of COCO's 118,287 images, of which the rate drops after 9 and 11. Batch,
    # warm-up and weight decay are not stated: the above. The canvas is a multiple of 16 that holds every image
    "restore": replace(
        _VITDET,
        steps=12 * (118_287 // 16),
        layer_decay=0.75,
        drops=(9 / 12, 11 / 12),
        size=1344,
        shorter=(480, 800),
        longer=1333,
    ),
}
# ExtreMA, section 5.3, states 12 epochs of Mask R-CNN. The rest is from the program of CAE, which ExtreMA's names: its
# configuration of ViT-B, on 16 GPUs with 2 images each. The warm-up of 500 updates is mmdetection's
DETECT["extrema"] = replace(
    DETECT["restore"], steps=12 * (118_287 // 32), warmup_steps=500, batch=32, weight_decay=0.05, drop_path=0.2
)


def usual_crops(device: str) -> int:
    """Return the number of crops of a training with auto steps and batch, on a type of device."""
    kind = "cpu" if device == "cpu" else "gpu"
    return _UPDATES[kind] * _BATCH[kind]


def dense_recipe(
    name: str, known: Mapping[str, Asked], changes: Mapping[str, Any], batch: int | Auto = "auto"
) -> Asked:
    """A recipe by its name with ``changes``, in which None means no change, and another batch unless it is auto."""
    recipe = named_recipe(name, known)
    changes = changes if batch == "auto" else {**changes, "batch": batch}
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    given = {key: value for key, value in given.items() if value is not None}
    was, warmup = recipe.steps, recipe.warmup_steps
    if isinstance(given.get("steps"), int) and was != "auto" and warmup != "auto":
        given.setdefault("warmup_steps", round(warmup * given["steps"] / was))
    recipe = replace(recipe, **given)
    recipe.check()
    return recipe
