"""Beyond Masking: demystifying token-based pre-training for vision transformers (Tian et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from patchloom.data.augment import RandomCrop
from patchloom.errors import PatchloomError, check_type
from patchloom.nets.swin import PlainViT
from patchloom.patches.partition import central_block, random_block, random_partition
from patchloom.questions.pixels import BandTarget, Restoration, TargetNorm
from patchloom.tasks.defaults import check_normalizable, patch_decoder, refuse_unused
from patchloom.tasks.masking import visible_of
from patchloom.tasks.task import PAPERS, Size, Task
from patchloom.withhold.degradation import CanvasFit, CropPlace, Degradation, DegradationKind, Fill
from patchloom.withhold.degrade import KernelInit, KernelOf
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches

# Degradations as options of a task: kind, strength, form, and size of the canvas.


Strength = float | list[float] | Literal["auto"]

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
# options of form: their degradations, values, default and its reason
_FORMS: dict[str, tuple[tuple[str, ...], Any, str, str]] = {
    "zoom_place": (("zoom_in",), CropPlace, "centre", PAPERS),
    "fill": (("zoom_out",), Fill, "mirror", PAPERS),
    "kernel_init": (("blur",), KernelInit, "normal", "the paper's; mean 1/k² and deviation 0.02 are its program's"),
    "kernel_of": (("blur",), KernelOf, "channel", PAPERS),
    "canvas_fit": (("fisheye", "wave"), CanvasFit, "resize", PAPERS),
}


def build_degradation(
    task: Task,
    kind: DegradationKind,
    canvas: Size = "auto",
    strengths: Mapping[str, Strength] | None = None,
    forms: Mapping[str, str] | None = None,
) -> Degradation:
    """Build a degradation for ``task``'s images."""
    check_type("task.degradation", kind, DegradationKind)
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
    check_type("task.band_target", chosen, BandTarget)
    share = task.resolve_auto("band_weight", weight, 0.2, "as in the authors' program")
    if not 0 <= share <= 1:
        raise PatchloomError(f"--task.band_weight must lie in [0, 1], not {share}")
    return share, chosen


def others_needed(options: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the number of images that a step needs to show patches of other images, with the reason, else None."""
    return (2, "the small picture is shown amid patches of other images") if options["fill"] == "images" else None


def _forms(task: Task, kind: DegradationKind, on_canvas: bool, asked: Mapping[str, str]) -> dict[str, Any]:
    """Resolve the options of form that apply to ``kind``; raise an error if another one is given."""
    found = {}
    for option, value in asked.items():
        kinds, words, usual, why = _FORMS[option]
        if kind in kinds and (on_canvas or option != "canvas_fit"):
            found[option] = value = task.resolve_auto(option, value, usual, why)
            check_type(f"task.{option}", value, words)
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
Sampling = Literal["random", "block", "centre", "surroundings"]


class Restore(Task):
    """Reconstruction of the original from a degraded image: a part, or changed geometry, sharpness or colour.

    Args:
        encoder: ViT to train.
        degradation: change of the image: zoom_in shows the centre of a larger image; zoom_out a small copy amid its
            mirror images; fisheye bends it; wave shifts its columns up and down; blur convolves it with a random
            kernel; decolorize removes colour; masked and none leave it unchanged.
        mask_ratio: fraction γ of the patches that is also removed; auto: 0.75 for zoom_in and masked, else 0.
        sampling: choice of the visible patches: random ones; one block, at a random place (block) or in the centre
            (centre); or all but a block in the centre (surroundings).
        canvas: shorter side in pixels of the image before zoom_in, fisheye or wave; auto: 10/7 of the input for
            zoom_in (320 for 224), the input's size for the others.
        canvas_fit: reduction of a larger canvas to the input after fisheye or wave: resize (auto), or crop to the
            centre. The target is the centre before it was bent.
        zoom_place: part that zoom_in shows: the centre (auto), or one at a random place.
        band_weight: fraction of the loss on the band around the input, with zoom_in and masks; the rest is on the
            masked patches. auto: 0.2.
        band_target: target of the band around the input: the canvas reduced to the input's size and enlarged again,
            as in the authors' program (grown), or the canvas itself (original); auto: grown if pixels are normalised,
            else original.
        scale: fraction of the side that zoom_in shows (without a canvas) or to which zoom_out shrinks; a number or a
            list to draw from; auto: 0.714.
        fill: surroundings of zoom_out's small copy: its mirror images (auto), black, patches of other images, or none:
            only the patches that it covers enter.
        twist: strength of fisheye; a number, or two bounds to draw between; auto: 0.2 to 0.25.
        amplitude: amplitude of wave as a fraction of the height; a number, or two bounds to draw between; auto: 0.05 to
            0.1.
        kernel: side of blur's kernel in pixels, odd; a number or a list to draw from; auto: 9 for 224 pixels, and in
            proportion for other sizes.
        kernel_init: weights of blur's kernels: normal around the mean (auto), or around 0 as in kaiming or xavier.
        kernel_of: one blur kernel per channel of an image (auto: channel), or one for all channels (image).
        saturation: fraction of the colour that decolorize leaves; a number or a list to draw from; auto: 0.3.
        normalized_pixels: target pixels normalised within each patch.
        target_norm: statistics that normalise the targets: those of each channel of a patch (auto: channel), or of the
            whole patch, as in mae (patch).
        decoder_width: width of the decoder; auto: 384, 512 for a ViT-L, or the encoder's below ViT-S.
        decoder_depth: number of transformer blocks of the decoder; auto: 4, or 2 below ViT-S.
        decoder_heads: number of attention heads of the decoder; auto: 6, 8 for a ViT-L, or one per 32 channels below
            ViT-S.

    Raises:
        PatchloomError: options that exclude each other, or that leave nothing to predict or to see.
    """

    def __init__(
        self,
        encoder: PlainViT,
        degradation: DegradationKind = "zoom_in",
        mask_ratio: float | Literal["auto"] = "auto",
        sampling: Sampling = "random",
        canvas: Size = "auto",
        canvas_fit: CanvasFit | Literal["auto"] = "auto",
        zoom_place: CropPlace | Literal["auto"] = "auto",
        band_weight: float | Literal["auto"] = "auto",
        band_target: BandTarget | Literal["auto"] = "auto",
        scale: Strength = "auto",
        fill: Fill | Literal["auto"] = "auto",
        twist: Strength = "auto",
        amplitude: Strength = "auto",
        kernel: Strength = "auto",
        kernel_init: KernelInit | Literal["auto"] = "auto",
        kernel_of: KernelOf | Literal["auto"] = "auto",
        saturation: Strength = "auto",
        normalized_pixels: bool = True,
        target_norm: TargetNorm | Literal["auto"] = "auto",
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
    ):
        super().__init__(encoder)
        check_type("task.sampling", sampling, Sampling)
        strengths = dict(scale=scale, twist=twist, amplitude=amplitude, kernel=kernel, saturation=saturation)
        forms = {
            "zoom_place": zoom_place,
            "fill": fill,
            "kernel_init": kernel_init,
            "kernel_of": kernel_of,
            "canvas_fit": canvas_fit,
        }
        self.degradation = build_degradation(self, degradation, canvas, strengths, forms)
        usual = 0.75 if degradation in ("masked", "zoom_in") else 0.0
        why = PAPERS if usual else "the degradation is enough"
        ratio = self.resolve_auto("mask_ratio", mask_ratio, usual, why)
        g, self.sampling = self.geometry, sampling
        self.entering = replace(g, grid=self.degradation.grid)
        visible = self._visible(ratio)
        if degradation == "masked" and visible == g.n:
            raise PatchloomError(f"a mask ratio of {ratio} masks nothing: raise --task.mask_ratio")
        if sampling != "random" and visible == self.entering.n:
            raise PatchloomError(
                f"--task.sampling {sampling} has no effect here, because a mask ratio of {ratio} masks nothing: "
                "raise --task.mask_ratio"
            )
        norm: TargetNorm = "channel"
        if normalized_pixels:
            norm = self.resolve_auto("target_norm", target_norm, norm, "as in the authors' program")
            check_type("task.target_norm", norm, TargetNorm)
            check_normalizable(g, each_channel=norm == "channel")
        else:
            refuse_unused("pixels are not normalised", target_norm=target_norm)
        self.sizes = (visible, g.n - visible)
        self.augment = RandomCrop(self.degradation.canvas)
        masks = visible < g.n
        has_band = masks and degradation == "zoom_in" and self.degradation.canvas != self.degradation.size
        weight, target = band_loss(self, has_band, band_weight, band_target, normalized_pixels)
        # if only patches are missing, the visible ones have nothing to predict
        asked = visible if self.degradation.changes_pixels or not masks else 0
        sizes = decoder_width, decoder_depth, decoder_heads
        usual_sizes = (512, 4, 8) if encoder.embed_dim >= _LARGE else (384, 4, 6)  # ViT-L: as in the program
        decoder = patch_decoder(self, *sizes, usual=usual_sizes, has_masked=masks, visible_asked=asked)
        self.questions["pixels"] = Restoration(g, decoder, self.degradation, normalized_pixels, 0, weight, norm, target)

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
