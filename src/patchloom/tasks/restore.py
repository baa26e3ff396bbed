"""Beyond Masking: demystifying token-based pre-training for vision transformers (Tian et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from patchloom.data.augment import RandomCrop
from patchloom.errors import PatchloomError
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.tasks import (
    BandTarget,
    DegradationKind,
    MixtureOptions,
    RestoreOptions,
    Size,
    Strength,
    TargetNorm,
)
from patchloom.patches.partition import central_block, random_block, random_partition
from patchloom.questions.pixels import Restoration
from patchloom.tasks.defaults import check_normalizable, patch_decoder, refuse_unused
from patchloom.tasks.masking import visible_of
from patchloom.tasks.task import PAPERS, Task
from patchloom.withhold.degradation import Degradation
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches

# Degradations as options of a task: kind, strength, form, and size of the canvas.


# option that sets the strength of each degradation
STRENGTHS: dict[DegradationKind, str] = {
    "zoom_in": "scale",
    "zoom_out": "scale",
    "fisheye": "twist",
    "wave": "amplitude",
    "blur": "kernel",
    "decolorize": "saturation",
}
_WITH_CANVAS = ("zoom_in", "fisheye", "wave")
# options of form: their degradations, default and its reason
_FORMS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "zoom_place": (("zoom_in",), "centre", PAPERS),
    "fill": (("zoom_out",), "mirror", PAPERS),
    "kernel_init": (("blur",), "normal", "the paper's; mean 1/k² and deviation 0.02 are its program's"),
    "kernel_of": (("blur",), "channel", PAPERS),
    "canvas_fit": (("fisheye", "wave"), "resize", PAPERS),
}


def forms_of(options: RestoreOptions | MixtureOptions) -> dict[str, str]:
    """Return the options of form."""
    return {name: getattr(options, name) for name in _FORMS}


def build_degradation(
    task: Task,
    kind: DegradationKind,
    canvas: Size = "auto",
    strengths: Mapping[str, Strength] | None = None,
    forms: Mapping[str, str] | None = None,
) -> Degradation:
    """Build a degradation for ``task``'s images."""
    if kind == "decolorize" and task.geometry.channels != 3:
        raise PatchloomError(
            f"decolorize is for images of 3 channels, and these have {task.geometry.channels}: choose another"
        )
    strengths = strengths or {}
    size = task.geometry.size
    option = STRENGTHS.get(kind)
    for other, value in strengths.items():
        if value != "auto" and other != option:
            raise PatchloomError(f"--task.{other} is not for the degradation {kind}: leave it out")
    whole = _canvas(task, kind, canvas, size, strengths.get("scale", "auto"))
    chosen = _forms(task, kind, whole != size, forms or {})
    if option is None or (kind == "zoom_in" and whole != size):
        return Degradation(kind, size, whole, (), task.geometry.p, **chosen)
    side = min(size)
    odd = max(3, round(9 * side / 224) // 2 * 2 + 1)
    usual = {
        "scale": (160 / 224, "the paper's 160 of 224 pixels"),
        "twist": ([0.2, 0.25], PAPERS),
        "amplitude": ([0.05, 0.1], "patchloom's: up to 22 pixels of 224"),
        "kernel": (float(odd), "the paper's 9 pixels of 224, and at least 3"),
        "saturation": (0.3, PAPERS),
    }
    drawn = task.resolve_auto(option, strengths.get(option, "auto"), *usual[option])
    drawn = tuple(drawn) if isinstance(drawn, list | tuple) else (drawn,)
    fits = {
        "scale": lambda x: 0 < x <= 1,
        "twist": lambda x: 0 <= x <= 1,
        "amplitude": lambda x: 0 <= x <= 1,
        "kernel": lambda x: x == round(x) and x % 2 == 1 and 0 < x <= side,
        "saturation": lambda x: 0 <= x <= 1,
    }
    if not drawn or not all(map(fits[option], drawn)):
        ranges = {
            "scale": "fractions of the side in (0, 1]",
            "twist": "numbers in [0, 1]",
            "kernel": "odd sides in pixels",
        }
        # a mixture has another name for the option
        raise PatchloomError(
            f"the {option} of {kind} must be {ranges.get(option, 'numbers in [0, 1]')}, not {list(drawn)}"
        )
    degradation = Degradation(kind, size, whole, drawn, task.geometry.p, **chosen)
    if not degradation.padded and (len(drawn) > 1 or degradation.grid == task.geometry.grid):
        raise PatchloomError(
            "without padding only the patches of the small picture enter, equally many of every image and fewer than "
            f"all: give --task.scale one number that leaves fewer than {task.geometry.grid[0]}x"
            f"{task.geometry.grid[1]} patches, not {list(drawn)}"
        )
    return degradation


def band_loss(
    task: Task,
    has_band: bool,
    weight: float | Literal["auto"],
    target: BandTarget | Literal["auto"],
    normalized_pixels: bool = True,
) -> tuple[float | None, BandTarget]:
    """Resolve weight and target of the loss on the band around zoom_in's part of a canvas; None without a band."""
    if not has_band:
        refuse_unused("only zooming in with masks and a canvas has two losses", band_weight=weight, band_target=target)
        return None, "grown"
    usual: BandTarget = "grown" if normalized_pixels else "original"
    why = "as in the authors' program" if normalized_pixels else PAPERS
    chosen = task.resolve_auto("band_target", target, usual, why)
    share = task.resolve_auto("band_weight", weight, 0.2, "as in the authors' program")
    return share, chosen


def others_needed(options: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the number of images that a step needs to show patches of other images, with the reason, else None."""
    return (2, "the small picture is shown amid patches of other images") if options["fill"] == "images" else None


def _forms(task: Task, kind: DegradationKind, on_canvas: bool, asked: Mapping[str, str]) -> dict[str, Any]:
    """Resolve the options of form that apply to ``kind``; raise an error if another one is given."""
    found = {}
    for option, value in asked.items():
        kinds, usual, why = _FORMS[option]
        if kind in kinds and (on_canvas or option != "canvas_fit"):
            found[option] = task.resolve_auto(option, value, usual, why)
        elif value != "auto":
            lacking = f"is not for the degradation {kind}" if kind not in kinds else "is for a --task.canvas"
            raise PatchloomError(f"--task.{option} {lacking}: leave it out")
    return found


def _canvas(task: Task, kind: DegradationKind, canvas: Size, size: tuple[int, int], scale: Strength) -> tuple[int, int]:
    wide = kind == "zoom_in" and scale == "auto"  # with a scale, zoom_in works on images of the usual size
    share, why = (96 / 224, "the paper's 320 for 224 pixels") if wide else (0.0, "the images' own size")
    side = task.resolve_auto("canvas", canvas, min(size) + 2 * round(min(size) * share / 2), why)
    more = side - min(size)
    if more < 0 or more % 2 or (more and kind not in _WITH_CANVAS) or (more and kind == "zoom_in" and not wide):
        raise PatchloomError(
            f"--task.canvas {side} does not go with {kind}: give a size above {min(size)} by an even number of pixels, "
            f"for {' or '.join(_WITH_CANVAS)}, without --task.scale"
        )
    h, w = (along + 2 * round(along * more / min(size) / 2) for along in size)
    return h, w


_LARGE = 1024  # width of a ViT-L


class Restore(Task):
    """Reconstruction of the original from a degraded image: a part, or changed geometry, sharpness or colour.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: options that exclude each other, or that leave nothing to predict or to see.
    """

    @takes(RestoreOptions)
    def __init__(self, encoder: PlainViT, options: RestoreOptions) -> None:
        super().__init__(encoder)
        strengths = {name: getattr(options, name) for name in STRENGTHS.values()}
        forms = forms_of(options)
        self.degradation = build_degradation(self, options.degradation, options.canvas, strengths, forms)
        usual = 0.75 if options.degradation in ("masked", "zoom_in") else 0.0
        why = PAPERS if usual else "the degradation is enough"
        ratio = self.resolve_auto("mask_ratio", options.mask_ratio, usual, why)
        g, self.sampling = self.geometry, options.sampling
        self.entering = replace(g, grid=self.degradation.grid)
        visible = self._visible(ratio)
        if options.degradation == "masked" and visible == g.n:
            raise PatchloomError(f"a mask ratio of {ratio} masks nothing: raise --task.mask_ratio")
        if options.sampling != "random" and visible == self.entering.n:
            raise PatchloomError(
                f"--task.sampling {options.sampling} has no effect here, because a mask ratio of {ratio} masks "
                "nothing: raise --task.mask_ratio"
            )
        norm: TargetNorm = "channel"
        if options.normalized_pixels:
            norm = self.resolve_auto("target_norm", options.target_norm, norm, "as in the authors' program")
            check_normalizable(g, each_channel=norm == "channel")
        else:
            refuse_unused("pixels are not normalised", target_norm=options.target_norm)
        self.sizes = (visible, g.n - visible)
        self.augment = RandomCrop(self.degradation.canvas)
        masks = visible < g.n
        has_band = masks and options.degradation == "zoom_in" and self.degradation.canvas != self.degradation.size
        weight, target = band_loss(self, has_band, options.band_weight, options.band_target, options.normalized_pixels)
        # if only patches are missing, the visible ones have nothing to predict
        asked = visible if self.degradation.changes_pixels or not masks else 0
        sizes = options.decoder_width, options.decoder_depth, options.decoder_heads
        usual_sizes = (512, 4, 8) if encoder.embed_dim >= _LARGE else (384, 4, 6)  # ViT-L: as in the program
        decoder = patch_decoder(self, *sizes, usual=usual_sizes, has_masked=masks, visible_asked=asked)
        self.questions["pixels"] = Restoration(
            g, decoder, self.degradation, options.normalized_pixels, 0, weight, norm, target
        )

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return 2 if patches of other images are shown."""
        return others_needed(options) or super().images_needed(options)

    def _visible(self, mask_ratio: float) -> int:
        """Return the number of visible patches, and set ``block``, the size of their rectangle, if any."""
        g, self.block = self.entering, None
        visible = visible_of(g, mask_ratio)
        if self.sampling == "random" or visible == g.n:
            return visible
        hides = self.sampling == "surroundings"
        self.block = block_of(g.grid, mask_ratio if hides else 1 - mask_ratio)
        inside = self.block[0] * self.block[1]
        if hides and inside == g.n:
            raise PatchloomError(
                f"with a mask ratio of {mask_ratio} the central block covers all of {g.n} patches and leaves no "
                "surroundings: lower --task.mask_ratio"
            )
        return g.n - inside if hides else inside

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return the visible patches of the degraded image."""
        b, g, device = len(images), self.entering, images.device
        given = self.degradation(all_patches(images, self.geometry.n), self.mean, self.std, generator)
        if self.block is None:
            visible, masked = random_partition(b, g.n, (self.sizes[0], g.n - self.sizes[0]), generator, device)
            visible = visible.sort(dim=1).values
        elif self.sampling == "block":
            visible, masked = random_block(b, g.grid, self.block, generator, device)
        else:
            inside, outside = central_block(b, g.grid, self.block, device)
            visible, masked = (outside, inside) if self.sampling == "surroundings" else (inside, outside)
        return mask_patches(given, visible, masked)


def block_of(grid: tuple[int, int], share: float) -> tuple[int, int]:
    """Return rows and columns of a rectangle shaped like ``grid`` with about ``share`` of its patches."""
    along = max(1, sum(side > 1 for side in grid))  # a grid of one row has one axis
    rows, columns = (max(1, round(side * share ** (1 / along))) for side in grid)
    return rows, columns
