"""Declarations of the pretext tasks: a dataclass each, with its options and, beside its name, its row of ``TASKS``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import floor, inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from patchloom.options.declare import as_in, option
from patchloom.options.degradations import STRENGTHS, DegradationOptions, forms_of
from patchloom.options.refusals import (
    PAPERS,
    POSITION_DECODER,
    UNIFORM,
    few_visible,
    growing_sigma,
    has_embeddings,
    masked_units,
    no_teacher,
    not_normalizable,
    not_uniform,
    resolved,
    unfit_decoder,
    unfit_loss,
    unfit_masks,
    unfit_parts,
    unfit_representation,
    unfit_unit,
    unit_of,
    unused,
)
from patchloom.sizes import Sides, scaled, share_of

if TYPE_CHECKING:
    from patchloom.nets.geometry import Geometry

WIDEST = 2**16  # larger sizes are typos, which would overload a machine

Size = int | Literal["auto"]
Strength = float | list[float] | Literal["auto"]  # of a degradation

# views and pixels
Sharing = Literal["none", "shared", "own"]
Coloring = Literal["none", "shared", "own", "second"]  # the last is LUT's, which changes the second view alone
TargetNorm = Literal["channel", "patch"]
BandTarget = Literal["grown", "original"]

# degradations of an image
DegradationKind = Literal["masked", "zoom_in", "zoom_out", "fisheye", "wave", "blur", "decolorize", "none"]
CropPlace = Literal["centre", "random"]
Fill = Literal["mirror", "black", "images", "none"]
CanvasFit = Literal["resize", "crop"]
KernelInit = Literal["normal", "kaiming", "xavier"]
KernelOf = Literal["channel", "image"]

# questions
Smoothing = Literal["paper", "program"]
Representation = Literal["cait", "vit", "mean"]
Loss = Literal["byol", "infonce", "sigreg", "visreg"]
FeatureLoss = Literal["cosine", "smooth_l1"]
HiddenLoss = Literal["smooth_l1", "mse"]
LayerOutput = Literal["block", "mlp"]
Combine = Literal["each", "mean"]

# of one task each
Placeholder = Literal["auto", "learned", "zeros", "foreign"]  # DropPos
Sampling = Literal["random", "block", "centre", "surroundings"]  # Restore
MaskSampling = Literal["blocks", "inverse", "random"]  # Latent
Predictor = Literal["transformer", "conv"]  # Latent
Base = Literal["mae", "simmim"]  # LUT
Color = Literal["none", "own"]  # DIET
Head = Literal["attention", "linear"]  # PART
Second = Literal["same", "second", "none"]  # Mixture
Padding = Literal["mirror", "black", "images"]  # Mixture
SHARES = ("mask", "blank", "drop_positions", "limit_context")  # withholdings of Mixture, beside STRENGTHS
QUESTIONS = ("pixels", "positions", "agreement", "features")  # Mixture

# decoders of CrossMAE and Latent, as `MAE_DECODER`
CROSS_DECODER = 512, 12, 16
LATENT_DECODERS = {"transformer": (384, 6, 12), "conv": (768, 6, 1)}

_ENOUGH = 16  # with fewer visible patches there is too little context to tell positions
_LARGE = 1024  # width of a ViT-L
# options of the questions of Mixture
_OWN = {
    "agreement": (
        *("agreement_loss", "infonce_temperature", "gaussian_weight", "directions", "momentum"),
        *("class_token", "attention_blocks", "head_width", "head_out"),
    ),
    "positions": ("position_depth", "position_temperature", "sigma_end"),
    "features": ("features_of", "features_model", "feature_loss"),
}
_NO_BAND = "only zooming in with masks and a canvas has two losses"


def _size(about: str, least: int = 1, most: int = WIDEST) -> Any:
    """Declare a number, or auto. The width of a decoder is a multiple of 4, and its depth may be 0."""
    return option("auto", about, least=least, most=most)


class Entry(NamedTuple):
    """Registry entry of a task.

    Attributes:
        path: import path of the class; a string, so that listing the tasks does not import torch.
        options: dataclass that declares the options.
        paper: authors and year.
        withheld: what the encoder does not see.
        asked: what has to be predicted.
        papers: keys of its papers in `patchloom.report.papers.PAPERS`.
        cost: time of a step relative to MAE's, in bfloat16 on a CPU (`benchmarks/step_time.py tasks`): for nano with
            96 pixels and patches of 8, and for ViT-S/16 with 224 pixels; None if it depends on the options.
        needs: the required option, "" if there is none.
    """

    path: str
    options: type
    paper: str
    withheld: str
    asked: str
    papers: tuple[str, ...]
    cost: tuple[float, float] | None
    needs: str


TASKS: dict[str, Entry] = {}


class TaskOptions:
    """Options of a task, which declares itself by them: ``NAMEOptions`` are those of ``NAME`` in ``tasks/name.py``."""

    def __init_subclass__(
        cls,
        *,
        paper: str,
        withheld: str,
        asked: str,
        papers: tuple[str, ...] = (),
        cost: tuple[float, float] | None = None,
        needs: str = "",
    ) -> None:
        """Add the task to ``TASKS``; the arguments are the attributes of `Entry`."""
        kind = cls.__name__.removesuffix("Options")
        name = kind.lower()
        TASKS[name] = Entry(f"patchloom.tasks.{name}.{kind}", cls, paper, withheld, asked, papers, cost, needs)

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        """Yield conditions on the options and an encoder, and the sentence with which each of them is refused.

        The first true one is raised before anything is built, so that later ones may rely on it.
        """
        yield from ()


@dataclass(frozen=True)
class MAEOptions(
    TaskOptions,
    paper="He et al. 2022",
    withheld="patches (removed)",
    asked="their pixels",
    papers=("he2022mae",),
    cost=(1.0, 1.0),
):
    """Reconstruction of the pixels of removed patches."""

    mask_ratio: float = option(
        0.75, "fraction γ of the mask units that is removed; for a Swin always 0.75", least=0, below=1
    )
    normalized_pixels: bool = option(True, "target pixels normalised within each patch")
    decoder_width: Size = _size("width of the decoder; auto: 512, or the encoder's below ViT-S", least=4)
    decoder_depth: Size = _size(
        "number of transformer blocks of the decoder; auto: 8, or 2 below ViT-S", least=0, most=1000
    )
    decoder_heads: Size = _size(
        "number of attention heads of the decoder; auto: 16, or one per 32 channels below ViT-S"
    )
    mask_unit: Size = option(
        "auto", "side of a mask unit in pixels; auto: one patch. Pixio's is 4x4 patches, 64 pixels for patches of 16"
    )

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield from unfit_unit(g, self.mask_unit)
        unit, _ = unit_of(g, self.mask_unit, 1)
        yield from unfit_masks(g, self.mask_ratio, unit)
        yield from not_uniform(g, self.mask_ratio, unit)
        yield from not_normalizable(g, self.normalized_pixels)
        yield from unfit_decoder(g, self)


@dataclass(frozen=True)
class CrossMAEOptions(
    TaskOptions,
    paper="Fu et al. 2024",
    withheld="patches (removed)",
    asked="the pixels of a third of them",
    papers=("fu2024crossmae",),
    cost=(0.6, 0.6),
):
    """Independent reconstruction of the pixels of some removed patches, by cross-attention alone."""

    mask_ratio: float = option(0.75, "fraction γ of the patches that is removed", least=0, below=1)
    prediction_ratio: float = option(
        0.25,
        "fraction ρ of all patches that a training step predicts, at most the masked ones; measures and pictures "
        "predict all of these",
        above=0,
    )
    normalized_pixels: bool = as_in(MAEOptions, "normalized_pixels")
    encoder_maps: Size = option(
        "auto",
        "number of feature maps of the encoder, evenly spaced, that each decoder block weighs (inter-block "
        "attention); auto: all, the embedding and every block; 1: the encoder's output alone",
    )
    decoder_width: Size = as_in(MAEOptions, "decoder_width")
    decoder_depth: Size = _size("number of blocks of the decoder; auto: 12, or 2 below ViT-S", least=0, most=1000)
    decoder_heads: Size = as_in(MAEOptions, "decoder_heads")

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield from unfit_masks(g, self.mask_ratio)
        yield (
            self.prediction_ratio > self.mask_ratio,
            f"--task.prediction_ratio must be above 0 and at most the mask ratio of {self.mask_ratio}, not "
            f"{self.prediction_ratio}",
        )
        yield from not_normalizable(g, self.normalized_pixels)
        yield (
            not 1 <= resolved(self.encoder_maps, 1) <= g.depth + 1,
            f"the encoder has {g.depth + 1} feature maps, the embedding and {g.depth} blocks: give "
            f"--task.encoder_maps 1 to {g.depth + 1}, not {self.encoder_maps}",
        )
        yield from unfit_decoder(g, self, CROSS_DECODER)


@dataclass(frozen=True)
class SimMIMOptions(
    TaskOptions,
    paper="Xie et al. 2022",
    withheld="patches (a mask token instead)",
    asked="their pixels",
    papers=("xie2022simmim",),
    cost=(1.6, 0.7),
):
    """Reconstruction of the pixels of patches that were replaced by a mask token."""

    mask_ratio: float = option(0.6, "fraction of the mask units that is replaced", least=0, below=1)
    mask_unit: Size = option(
        "auto",
        "side of a mask unit in pixels; auto: two patches (32 pixels for patches of 16), or one if the grid has odd "
        "sides; for a Swin the area of one token of its last stage, 32 pixels for Swin-T",
    )
    normalized_pixels: bool = as_in(MAEOptions, "normalized_pixels", False)

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield from unfit_unit(g, self.mask_unit)
        yield from unfit_masks(g, self.mask_ratio, unit_of(g, self.mask_unit, 2)[0])
        yield from not_normalizable(g, self.normalized_pixels)


@dataclass(frozen=True)
class DropPosOptions(
    TaskOptions,
    paper="Wang et al. 2023",
    withheld="patches, and most visible patches' positions",
    asked="where each visible patch was",
    papers=("wang2023droppos",),
    cost=(1.1, 0.5),
):
    """Prediction of dropped positions, after other patches were removed."""

    mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction γ of the patches that is removed; auto: the paper's 0.75, lowered until 16 patches stay. A Swin "
        "takes 0.75 or 0",
        least=0,
        below=1,
    )
    position_mask_ratio: float = option(
        0.75, "fraction γ_pos of the visible patches whose position embedding is dropped", above=0, most=1
    )
    sigma: float = option(
        1.0, "σ of position smoothing (Eq. 5) at the start of the training; 0 switches it off", least=0
    )
    sigma_end: float = option(
        0.0, "σ at the end of the training, reached linearly (Eq. 7); equal to ``sigma``: constant (Table 3)", least=0
    )
    smoothing: Smoothing = option(
        "paper", "smoothed labels of Eq. 5 (paper), or of the authors' program, which mistakes the grid"
    )
    temperature: float | Literal["auto"] = option(
        "auto",
        "τ of attentive reconstruction (Eq. 9); inf weighs all patches alike. auto: the paper's 0.1, but inf without "
        "masking, because the forward pass over the whole image would add a third to the step",
        above=0,
        most=inf,
    )
    placeholder: Placeholder = option(
        "auto",
        "stand-in for a dropped position: a learned vector, zeros, or another patch's position. auto: learned, as in "
        "the paper; for a Swin zeros, because without pre-training it has no position embeddings. Rotations (RoPE) "
        "are dropped, too: learned is a trained place of two coordinates, zeros no rotation",
    )
    shuffle: bool = option(
        False, "random order of the visible patches instead of row by row. Does not affect the result"
    )
    pixels: bool = option(
        False, "reconstruction of the removed patches as a second task, with MAE's decoder; the two losses are added"
    )
    normalized_pixels: bool = option(True, "with ``pixels``, target pixels normalised within each patch")
    decoder_width: Size = _size("width of the decoders; auto: 512, or the encoder's below ViT-S", least=4)
    decoder_depth: Size = _size("number of transformer blocks of the position decoder; auto: 2", least=0, most=1000)
    decoder_heads: Size = _size(
        "number of attention heads of the decoders; auto: 16, or one per 32 channels below ViT-S"
    )
    pixel_decoder_depth: Size = _size(
        "number of transformer blocks of the pixel decoder; auto: 8, or 2 below ViT-S", least=0, most=1000
    )

    def usual_mask(self, g: Geometry) -> tuple[float, str]:
        """Return the mask ratio that auto becomes, and the reason."""
        usual = max(0.0, min(UNIFORM, 1 - _ENOUGH / g.n))
        if usual == UNIFORM:
            if g.hierarchical and any(side % 2 for side in g.grid):
                rows, columns = g.grid
                return 0.0, f"uniform masking needs even sides, and {rows}x{columns} are not: give another --img_size"
            return usual, PAPERS
        if g.hierarchical:
            return 0.0, f"uniform masking would leave only {g.n // 4} patches visible"
        return usual, f"keeps {min(_ENOUGH, g.n)} patches visible"

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield not g.has_places, "droppos needs an encoder with position embeddings: use --positions sincos"
        yield from growing_sigma(self.sigma, self.sigma_end)
        if self.smoothing == "program":
            (rows, columns), (high, wide) = g.grid, g.p
            program = "--task.smoothing program: the authors' map"
            yield (
                rows != columns or high != wide,
                f"{program} knows square images and patches only, not a grid of {rows}x{columns} patches of "
                f"{high}x{wide} pixels: use --task.smoothing paper",
            )
            yield (
                g.n > high * wide,
                f"{program} has labels for as many patches as one has pixels, {high * wide} here, and the grid has "
                f"{g.n}: use --task.smoothing paper",
            )
        ratio = resolved(self.mask_ratio, self.usual_mask(g)[0])
        yield from few_visible(g, ratio, least=2)
        yield from not_uniform(g, ratio)
        yield from unfit_decoder(g, self, POSITION_DECODER, only_masked=False)
        if not self.pixels:
            return
        hidden = share_of(g.n, 1 - ratio) < g.n
        yield not hidden, "with --task.mask_ratio 0 no pixels are hidden: leave out --task.pixels"
        yield from not_normalizable(g, self.normalized_pixels)
        yield from unfit_decoder(g, self, depth="pixel_decoder_depth")


@dataclass(frozen=True)
class MP3Options(
    TaskOptions,
    paper="Zhai et al. 2022",
    withheld="positions, and most keys and values",
    asked="where every patch was",
    papers=("zhai2022mp3",),
    cost=(1.3, 0.6),
):
    """Prediction of the positions of all patches, with most patches barred from keys and values."""

    context_mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction η of the patches that are queries only, neither keys nor values; auto: the paper's for such a grid: "
        "0.75 from 100 patches (ImageNet), 0.8 from 64 patches of 8 pixels or more (Tiny ImageNet), else 0.5 "
        "(CIFAR-100)",
        least=0,
        below=1,
    )
    known_positions: float = option(
        0.0,
        "fraction of the patches that keep their position embedding (5 % in the paper's speech models)",
        least=0,
        below=1,
    )

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield g.n < 2, "an image of one patch has no position to predict: use smaller patches or larger images"
        yield (
            not share_of(g.n, 1 - resolved(self.context_mask_ratio, 0.0)),
            f"--task.context_mask_ratio {self.context_mask_ratio} leaves no patch as context: lower it",
        )
        if share_of(g.n, self.known_positions):
            yield not g.has_places, "known positions need an encoder that has them: use --positions sincos"
        else:
            yield from has_embeddings(
                g, "mp3", ", or let a share of the patches keep theirs with --task.known_positions"
            )


@dataclass(frozen=True)
class RestoreOptions(
    TaskOptions,
    paper="Tian et al. 2022",
    withheld="surroundings, geometry, sharpness or colour, and patches",
    asked="the original pixels",
    papers=("tian2022beyond",),
    cost=(1.5, 0.5),
):
    """Reconstruction of the original from a degraded image: a part, or changed geometry, sharpness or colour."""

    degradation: DegradationKind = option(
        "zoom_in",
        "change of the image: zoom_in shows the centre of a larger image; zoom_out a small copy amid its mirror "
        "images; fisheye bends it; wave shifts its columns up and down; blur convolves it with a random kernel; "
        "decolorize removes colour; masked and none leave it unchanged",
    )
    mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction γ of the patches that is also removed; auto: 0.75 for zoom_in and masked, else 0",
        least=0,
        below=1,
    )
    sampling: Sampling = option(
        "random",
        "choice of the visible patches: random ones; one block, at a random place (block) or in the centre (centre); "
        "or all but a block in the centre (surroundings)",
    )
    canvas: Size = _size(
        "shorter side in pixels of the image before zoom_in, fisheye or wave; auto: 10/7 of the input for zoom_in "
        "(320 for 224), the input's size for the others"
    )
    canvas_fit: CanvasFit | Literal["auto"] = option(
        "auto",
        "reduction of a larger canvas to the input after fisheye or wave: resize (auto), or crop to the centre. The "
        "target is the centre before it was bent",
    )
    zoom_place: CropPlace | Literal["auto"] = option(
        "auto", "part that zoom_in shows: the centre (auto), or one at a random place"
    )
    band_weight: float | Literal["auto"] = option(
        "auto",
        "fraction of the loss on the band around the input, with zoom_in and masks; the rest is on the masked "
        "patches. auto: 0.2",
        least=0,
        most=1,
    )
    band_target: BandTarget | Literal["auto"] = option(
        "auto",
        "target of the band around the input: the canvas reduced to the input's size and enlarged again, as in the "
        "authors' program (grown), or the canvas itself (original); auto: grown if pixels are normalised, else "
        "original",
    )
    scale: Strength = option(
        "auto",
        "fraction of the side that zoom_in shows (without a canvas) or to which zoom_out shrinks; a number or a list "
        "to draw from; auto: 0.714",
    )
    fill: Fill | Literal["auto"] = option(
        "auto",
        "surroundings of zoom_out's small copy: its mirror images (auto), black, patches of other images, or none: "
        "only the patches that it covers enter",
    )
    twist: Strength = option("auto", "strength of fisheye; a number, or two bounds to draw between; auto: 0.2 to 0.25")
    amplitude: Strength = option(
        "auto",
        "amplitude of wave as a fraction of the height; a number, or two bounds to draw between; auto: 0.05 to 0.1",
    )
    kernel: Strength = option(
        "auto",
        "side of blur's kernel in pixels, odd; a number or a list to draw from; auto: 9 for 224 pixels, and in "
        "proportion for other sizes",
    )
    kernel_init: KernelInit | Literal["auto"] = option(
        "auto", "weights of blur's kernels: normal around the mean (auto), or around 0 as in kaiming or xavier"
    )
    kernel_of: KernelOf | Literal["auto"] = option(
        "auto", "one blur kernel per channel of an image (auto: channel), or one for all channels (image)"
    )
    saturation: Strength = option(
        "auto", "fraction of the colour that decolorize leaves; a number or a list to draw from; auto: 0.3"
    )
    normalized_pixels: bool = as_in(MAEOptions, "normalized_pixels")
    target_norm: TargetNorm | Literal["auto"] = option(
        "auto",
        "statistics that normalise the targets: those of each channel of a patch (auto: channel), or of the whole "
        "patch, as in mae (patch)",
    )
    decoder_width: Size = _size(
        "width of the decoder; auto: 384, 512 for a ViT-L, or the encoder's below ViT-S", least=4
    )
    decoder_depth: Size = _size(
        "number of transformer blocks of the decoder; auto: 4, or 2 below ViT-S", least=0, most=1000
    )
    decoder_heads: Size = _size(
        "number of attention heads of the decoder; auto: 6, 8 for a ViT-L, or one per 32 channels below ViT-S"
    )

    @property
    def degraded(self) -> DegradationOptions:
        strengths = {name: getattr(self, name) for name in STRENGTHS.values()}
        return DegradationOptions(self.degradation, self.canvas, strengths, forms_of(self))

    @property
    def usual_mask(self) -> float:
        """Mask ratio that auto becomes."""
        return 0.75 if self.degradation in ("masked", "zoom_in") else 0.0

    def masks(self, grid: Sides) -> tuple[int, Sides | None]:
        """Return the number of visible patches of a ``grid``, and rows and columns of the block, if there is one.

        The block is visible, or, for surroundings, masked.
        """
        n, ratio = grid[0] * grid[1], resolved(self.mask_ratio, self.usual_mask)
        visible = share_of(n, 1 - ratio)
        if self.sampling == "random" or visible == n:
            return visible, None
        around = self.sampling == "surroundings"
        rows, columns = block_of(grid, ratio if around else 1 - ratio)
        return (n - rows * columns if around else rows * columns), (rows, columns)

    @staticmethod
    def usual_decoder(g: Geometry) -> tuple[int, int, int]:
        """Return the paper's decoder; for a ViT-L, as in the program."""
        return (512, 4, 8) if g.width >= _LARGE else (384, 4, 6)

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield from self.degraded.refusals(g)
        ratio = resolved(self.mask_ratio, self.usual_mask)
        entering = replace(g, grid=self.degraded.grid(g.grid, g.size))
        yield from few_visible(entering, ratio)
        visible, _ = self.masks(entering.grid)
        yield (
            not visible,
            f"with a mask ratio of {ratio} the central block covers all of {entering.n} patches and leaves no "
            "surroundings: lower --task.mask_ratio",
        )
        yield (
            self.degradation == "masked" and visible == g.n,
            f"a mask ratio of {ratio} masks nothing: raise --task.mask_ratio",
        )
        yield (
            self.sampling != "random" and visible == entering.n,
            f"--task.sampling {self.sampling} has no effect here, because a mask ratio of {ratio} masks nothing: "
            "raise --task.mask_ratio",
        )
        yield from not_normalizable(g, self.normalized_pixels, each_channel=self.target_norm != "patch")
        if not self.normalized_pixels:
            yield from unused(self, "pixels are not normalised", "target_norm")
        masks = visible < g.n
        if not (masks and self.degraded.has_band(g.size)):
            yield from unused(self, _NO_BAND, "band_weight", "band_target")
        only_masked = masks and self.degradation in ("masked", "none")
        yield from unfit_decoder(g, self, self.usual_decoder(g), only_masked)


def block_of(grid: Sides, share: float) -> Sides:
    """Return rows and columns of a rectangle shaped like ``grid`` with about ``share`` of its patches."""
    along = max(1, sum(side > 1 for side in grid))  # a grid of one row has one axis
    return scaled(grid, share ** (1 / along))


@dataclass(frozen=True)
class ExtreMAOptions(
    TaskOptions,
    paper="Wu et al. 2023",
    withheld="almost all patches, several times over",
    asked="agreement with a teacher that sees all",
    papers=("wu2023extrema",),
    cost=(2.0, 0.9),
):
    """Agreement of several small parts of an image with a teacher that sees all of it."""

    mask_ratio: float = option(0.8, "fraction γ of the patches that is removed", least=0, below=1)
    masks: int | Literal["auto"] = option(
        "auto",
        "number of disjoint masks per image, compared with one output of the teacher; auto: 5, as in the paper's main "
        "result (Table 7), or fewer if there are too few patches",
    )
    loss: Loss | Literal["auto"] = option(
        "auto",
        "agreement loss: byol; infonce with the other images of all processes as negatives; or sigreg (LeJEPA) or "
        "visreg, which have neither teacher nor negatives; auto: byol, as in the paper's main results, but infonce in "
        "trainings of fewer than 20,000 updates: byol showed no gain in 2,448",
    )
    temperature: float | Literal["auto"] = option("auto", "τ of infonce; auto: 0.2", above=0)
    gaussian_weight: float | Literal["auto"] = option(
        "auto",
        "λ of sigreg and visreg: weight of the test for a Gaussian; that of the agreement is 1 - λ. auto: 0.05 for "
        "sigreg, 0.9 for visreg, or 0.6 below ViT-S",
        above=0,
        below=1,
    )
    directions: Size = _size(
        "number of random directions of that test; auto: 1024 for sigreg, 4096 for visreg, or 256 below ViT-S"
    )
    class_token: Representation = option(
        "cait",
        "image representation: a class token in class-attention blocks after the encoder (cait), the encoder's own "
        "class token (vit), or the mean of its patch tokens (mean)",
    )
    attention_blocks: Size = _size("number of class-attention blocks of cait (Table 5 has 1 to 3); auto: 2")
    crop: Sharing = option(
        "shared", "crop of student and teacher: the centre (none), one random crop for both (shared), or one each (own)"
    )
    color: Coloring = option(
        "own",
        "colour changes: none, the same for both views (shared), or independent ones (own); or those of LUT's second "
        "view (second)",
    )
    momentum: float | Literal["auto"] = option(
        "auto",
        "momentum of the teacher at the start; rises to 1 along a half cosine. auto: 0.996, less in short trainings",
        least=0,
        most=1,
    )
    head_width: Size = _size(
        "hidden width of projection and prediction heads; auto: 4096, 2048 for sigreg and visreg, or 4 encoder widths "
        "below ViT-S"
    )
    head_out: Size = _size(
        "output width of the heads; auto: 256, 64 for sigreg, or at most the encoder's width below ViT-S"
    )

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield from few_visible(g, self.mask_ratio)
        yield from unfit_parts(g, resolved(self.masks, 1), share_of(g.n, 1 - self.mask_ratio), "--task.mask_ratio")
        yield from unfit_loss(self, resolved(self.loss, "byol"))
        yield from unfit_representation(g, self)


@dataclass(frozen=True)
class LUTOptions(
    TaskOptions,
    paper="Kim et al. 2024",
    withheld="patches, in two disjoint parts",
    asked="pixels, and agreement on the other view",
    papers=("kim2024lut",),
    cost=(2.7, 1.6),
):
    """Pixel reconstruction and agreement with a teacher, from disjoint parts of two views."""

    base: Base = option(
        "mae",
        "masked-image method: mae removes masked patches and decodes their pixels; simmim replaces them by a mask "
        "token",
    )
    mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction γ of the patches that is withheld from each view; auto: 0.75 on mae, 0.6 on simmim",
        least=0,
        below=1,
    )
    context_weight: float = option(
        0.25, "weight of the broader-context loss: agreement of the unmasked tokens with the teacher", above=0
    )
    pixel_weight: float = option(
        1.0, "weight of the pixel loss on the first view; 0: the broader-context loss alone", least=0
    )
    loss: Loss = option(
        "byol",
        "agreement loss: byol, the paper's; infonce with the other images of all processes as negatives; or sigreg "
        "(LeJEPA) or visreg, which have neither teacher nor negatives",
    )
    temperature: float | Literal["auto"] = as_in(ExtreMAOptions, "temperature")
    gaussian_weight: float | Literal["auto"] = as_in(ExtreMAOptions, "gaussian_weight")
    directions: Size = as_in(ExtreMAOptions, "directions")
    normalized_pixels: bool | Literal["auto"] = option(
        "auto", "target pixels normalised within each patch; auto: true on mae, false on simmim"
    )
    mask_unit: Size = option(
        "auto", "side of a mask unit in pixels on simmim; auto: two patches. On mae it is one patch"
    )
    color: Coloring = option(
        "none",
        "colour changes: none, the same jitter for both views (shared), or independent ones (own); or, as in the "
        "authors' program, jitter and one of grey, solarised and blurred for the second view (second)",
    )
    momentum: float | Literal["auto"] = as_in(ExtreMAOptions, "momentum")
    head_width: Size = as_in(ExtreMAOptions, "head_width")
    decoder_width: Size = _size("width of the decoder on mae; auto: 512, or the encoder's below ViT-S", least=4)
    decoder_depth: Size = _size(
        "number of transformer blocks of the decoder on mae; auto: 8, or 2 below ViT-S", least=0, most=1000
    )
    decoder_heads: Size = _size(
        "number of attention heads of the decoder on mae; auto: 16, or one per 32 channels below ViT-S"
    )

    @property
    def usual_mask(self) -> float:
        """Mask ratio that auto becomes: the paper's."""
        return 0.75 if self.base == "mae" else 0.6

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield from unfit_loss(self, self.loss)
        sparse, unit = self.base == "mae", 1
        if sparse:
            yield from unused(self, "base mae masks single patches", "mask_unit")
        else:
            yield from unfit_unit(g, self.mask_unit)
            unit, _ = unit_of(g, self.mask_unit, 2)
        ratio = resolved(self.mask_ratio, self.usual_mask)
        yield from few_visible(g, ratio)
        visible, masked = masked_units(g, ratio, unit)
        yield (
            not 0 < visible <= masked,
            f"a mask ratio of {ratio} leaves {visible} of {visible + masked} mask units visible, and two disjoint "
            f"views need at least 1 and at most half of them each: {'raise' if visible else 'lower'} --task.mask_ratio",
        )
        yield from not_normalizable(g, self.pixel_weight > 0 and resolved(self.normalized_pixels, sparse))
        if self.pixel_weight and sparse:
            yield from unfit_decoder(g, self)
        else:
            why = "only base mae with a pixel loss has such a decoder"
            yield from unused(self, why, "decoder_width", "decoder_depth", "decoder_heads")


@dataclass(frozen=True)
class DistillOptions(
    TaskOptions,
    paper="Fang et al. 2023",
    withheld="patches (a mask token instead)",
    asked="a frozen model's features of them",
    papers=("fang2023eva",),
    needs="features_of",
):
    """Prediction of a frozen teacher's features at patches that were replaced by a mask token."""

    features_of: str | None = option(None, "teacher (required): timm:NAME, a run's folder, or a file of weights")
    mask_ratio: float = option(
        0.4, "fraction of the patches that is replaced, each independently (EVA masks blocks)", least=0, below=1
    )
    loss: FeatureLoss = option("cosine", "loss on the features: cosine, as in EVA, or smooth_l1, as in MaskDistill")
    features_model: str | None = option(
        None, "timm's name of the teacher's model, if features_of is a file of weights alone"
    )

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield from unfit_masks(g, self.mask_ratio)
        yield from no_teacher(self.features_of)


@dataclass(frozen=True)
class LatentOptions(
    TaskOptions,
    paper="I-JEPA, data2vec 2.0, Bootleg",
    withheld="patches (removed)",
    asked="a teacher's hidden layers there",
    papers=("assran2023ijepa", "baevski2023data2vec2", "lowe2026bootleg"),
    cost=(2.0, 1.1),
):
    """Prediction of hidden layers of a moving-average teacher, which sees the whole image, at masked patches."""

    layers: list[int] | Literal["auto"] = option(
        "auto", "numbers of the predicted blocks, counted from 1; auto: those at each quarter of the depth"
    )
    combine: Combine = option("each", "each of the layers (each), or their mean (mean)")
    source: LayerOutput = option("block", "tokens after a block (block), or the output of its MLP (mlp)")
    sampling: MaskSampling = option(
        "blocks",
        "masks: blocks to predict, and a context without them (blocks); 3x3 visible blocks (inverse); or random "
        "patches (random)",
    )
    mask_ratio: float | Literal["auto"] = option(
        "auto",
        "fraction of the patches that is removed; auto: what the blocks require, otherwise 0.8",
        least=0,
        below=1,
    )
    masks: int = option(1, "number of masks per image, compared with one output of the teacher", least=1, most=1000)
    target_blocks: Size = option(
        "auto", "number of blocks to predict per mask, each separately; auto: 4, or fewer on small grids"
    )
    target_scale: float | Literal["auto"] = option(
        "auto", "fraction of the patches in each of these blocks; auto: 0.175", above=0, below=1
    )
    loss: HiddenLoss = option("smooth_l1", "loss on the features: smooth_l1, or mean squared error (mse)")
    momentum: float | Literal["auto"] = as_in(ExtreMAOptions, "momentum")
    decoder: Predictor = option(
        "transformer", "predictor: a transformer with mask tokens (transformer), or convolutions over the grid (conv)"
    )
    decoder_width: Size = _size("width of the predictor; auto: 384, conv: 768; the encoder's below ViT-S", least=4)
    decoder_depth: Size = _size("number of blocks of the predictor; auto: 6, or 2 below ViT-S", least=0, most=1000)
    decoder_heads: Size = _size(
        "number of attention heads of a transformer; auto: 12, or one per 32 channels below ViT-S"
    )

    def target_sizes(self, n: int) -> tuple[int, int]:
        """Return number and size of the blocks to predict, of ``n`` patches."""
        size = max(1, round(n * resolved(self.target_scale, 0.175)))
        return resolved(self.target_blocks, min(4, (n - 1) // size)), size

    def usual_mask(self, n: int) -> float:
        """Return the mask ratio that auto becomes; with blocks, the least that leaves no more than is outside them."""
        if self.sampling != "blocks":
            return 0.8
        count, size = self.target_sizes(n)
        return floor((1 - (n - count * size) / n) * 1e4) / 1e4  # rounded, but with as many patches

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        layers = resolved(self.layers, [1])
        yield (
            not layers or sorted({*layers}) != layers or not 1 <= layers[0] <= layers[-1] <= g.depth,
            f"--task.layers {layers} are not blocks of this encoder: give increasing numbers from 1 to {g.depth}",
        )
        if self.sampling == "blocks":
            count, size = self.target_sizes(g.n)
            most, room = (g.n - 1) // size, g.n - count * size
            yield (
                not most,
                f"a block of {size} of {g.n} patches leaves none visible: lower --task.target_scale, use smaller "
                "patches, or larger images",
            )
            yield (
                not 1 <= count <= most,
                f"{count} blocks of {size} patches may cover all {g.n} patches: give --task.target_blocks 1 to "
                f"{most}, or lower --task.target_scale",
            )
        else:
            yield from unused(self, f"--task.sampling is {self.sampling}", "target_blocks", "target_scale")
        usual = self.usual_mask(g.n)
        ratio = resolved(self.mask_ratio, usual)
        yield from unfit_masks(g, ratio)
        if self.sampling == "blocks":
            visible = share_of(g.n, 1 - ratio)
            yield (
                visible > room,
                f"a mask ratio of {self.mask_ratio} leaves {visible} patches visible, and {count} blocks of {size} "
                f"patches only {room}: give --task.mask_ratio {usual} or more, or fewer --task.target_blocks",
            )
        if self.decoder == "conv":
            yield from unused(self, "--task.decoder conv has no attention", "decoder_heads")
        sized = replace(self, decoder_heads=1) if self.decoder == "conv" else self
        yield from unfit_decoder(g, sized, LATENT_DECODERS[self.decoder])


@dataclass(frozen=True)
class DIETOptions(
    TaskOptions,
    paper="Balestriero 2023",
    withheld="surroundings and colours, by a random view",
    asked="which training image it is",
    papers=("balestriero2023diet",),
    cost=(1.9, 0.8),
):
    """Classification of views: which image of the training set is it? For small sets, one class per image."""

    images: int | Literal["auto"] = _size(
        "number of training images, one class each; auto: as many as there are, up to 65,536"
    )
    smoothing: float = option(
        0.8, "label smoothing, the share of the target that is spread over all images", least=0, below=1
    )
    color: Color = option("own", "colour changes of a view: none, or random ones as ExtreMA's (own)")


@dataclass(frozen=True)
class JigsawOptions(
    TaskOptions,
    paper="Chen et al. 2022",
    withheld="half of the patches, and all positions",
    asked="where each visible patch was",
    papers=("chen2022jigsaw",),
    cost=(0.9, 0.4),
):
    """Prediction of the positions of patches that are seen without any position, after others were removed."""

    mask_ratio: float = option(0.5, "fraction of the patches that is removed", least=0, below=1)

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield from has_embeddings(g, "jigsaw")
        yield from few_visible(g, self.mask_ratio, least=2)


@dataclass(frozen=True)
class PARTOptions(
    TaskOptions,
    paper="Ayoughi et al. 2025",
    withheld="the grid, and all positions",
    asked="how far one patch is from another",
    papers=("ayoughi2025part",),
    cost=(2.3, 0.8),
):
    """Prediction of the translations between patches that are cut at random places, off any grid."""

    pairs: Size = option(
        "auto",
        "number of pairs of patches, drawn without replacement from all n² and shared by a step's images; auto: an "
        "eighth of n², as in the program on ImageNet, but at least 2,048, or all if there are fewer",
        most=WIDEST,
    )
    head: Head = option(
        "attention",
        "cross-attention from every pair to all patches with one head (attention), or a linear layer (linear)",
    )
    context_mask_ratio: float = option(
        0.0, "fraction η of the patches that are queries only, neither keys nor values, as in MP3", least=0, below=1
    )

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield from has_embeddings(g, "part")
        yield g.n < 2, "an image of one patch has no pairs: use smaller patches or larger images"
        yield (
            not 1 <= resolved(self.pairs, 1) <= g.n**2,
            f"--task.pairs must be 1 to {g.n**2}, the pairs of {g.n} patches, not {self.pairs}",
        )
        yield (
            not share_of(g.n, 1 - self.context_mask_ratio),
            f"--task.context_mask_ratio {self.context_mask_ratio} leaves no patch as context: lower it",
        )


@dataclass(frozen=True)
class LOCAOptions(
    TaskOptions,
    paper="Caron et al. 2022",
    withheld="a crop's positions, and most of its patches",
    asked="where each patch is in another crop",
    papers=("caron2022loca",),
    cost=(1.4, 0.6),
):
    """Location of the patches of a query crop, seen without positions, in a reference crop that a teacher sees."""

    mask_ratio: float = option(0.64, "fraction of the query's patches that is removed", least=0, below=1)
    context_ratio: float = option(
        0.2, "fraction of the reference's patches, consecutive ones, that the head sees", above=0, most=1
    )
    momentum: float | Literal["auto"] = as_in(ExtreMAOptions, "momentum")

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield (
            not g.has_places or g.positions == "trained",
            "loca withholds positions from the query and needs them in the reference, so they must be fixed: use "
            "--positions sincos",
        )
        yield from few_visible(g, self.mask_ratio)
        yield (
            not share_of(g.n, self.context_ratio),
            f"--task.context_ratio {self.context_ratio} leaves no patch of the reference: give at least {1 / g.n:.3g}",
        )


@dataclass(frozen=True)
class NEPAOptions(
    TaskOptions,
    paper="NEPA 2025",
    withheld="all later patches, in raster order",
    asked="the next patch's embedding",
    papers=("xu2025nepa",),
    cost=(2.2, 0.8),
):
    """Prediction of the embedding of the next patch, row by row, from the patches before it (causal attention)."""

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield g.n < 2, "an image of one patch has no next patch: use smaller patches or larger images"


@dataclass(frozen=True)
class MixtureOptions(TaskOptions, paper="your own", withheld="any of these", asked="any of these, weighted"):
    """Composed task: any withholdings and any weighted questions."""

    withhold: dict[str, float] | Literal["auto"] = option(
        "auto",
        "withholdings and their strengths. mask takes the fraction of the patches that is removed; blank, "
        "drop_positions and limit_context the fractions of the others that lose content, position, or their use as "
        "keys and values; no patch loses both content and position. One of zoom_in, zoom_out (fraction of the side), "
        "fisheye (twist), wave (amplitude), blur (side of the kernel) and decolorize (fraction of the colour that "
        "stays) degrades the image first. auto: mask 0.5 and drop_positions 0.75",
    )
    ask: dict[str, float] | Literal["auto"] = option(
        "auto",
        "questions and their weights: pixels, positions, agreement, features; the first one is reported. auto: pixels "
        "and positions, 1 each",
    )
    teacher: Second | Literal["auto"] = option(
        "auto",
        "teacher's view for agreement: the student's crop (same), a second crop (second), or none; auto: same with "
        "agreement, else none",
    )
    masks: int = option(1, "number of disjoint masks per image, as in ExtreMA; each leaves what mask does not remove")
    crop: Sharing | Literal["auto"] = option(
        "auto", "crop of the two views of ``teacher`` second: one each (auto: own), or one for both (shared)"
    )
    color: Coloring | Literal["auto"] = option(
        "auto",
        "colour changes of these views: none (auto), the same for both (shared), or independent ones (own); or those "
        "of LUT's second view (second)",
    )
    class_token: Representation = option(
        "mean",
        "image representation for agreement: the mean of the patch tokens (mean), the encoder's own class token "
        "(vit), or a class token in class-attention blocks after the encoder (cait), as in ExtreMA",
    )
    attention_blocks: Size = _size("number of class-attention blocks of cait; auto: 2")
    agreement_loss: Loss = option(
        "byol", "byol, infonce, or sigreg or visreg without a teacher, as ``loss`` of extrema"
    )
    infonce_temperature: float | Literal["auto"] = as_in(ExtreMAOptions, "temperature")
    gaussian_weight: float | Literal["auto"] = option("auto", "λ of sigreg and visreg, as in extrema", above=0, below=1)
    directions: Size = _size("number of random directions of sigreg and visreg, as in extrema")
    sigma: float = option(1.0, "σ of position smoothing at the start, as in DropPos", least=0)
    sigma_end: float = option(
        0.0, "σ at the end of the training, reached linearly; equal to ``sigma``: constant", least=0
    )
    position_temperature: float = option(
        inf, "τ of attentive reconstruction, as in DropPos (there 0.1); inf weighs all patches alike", above=0, most=inf
    )
    momentum: float | Literal["auto"] = as_in(ExtreMAOptions, "momentum")
    head_width: Size = _size("hidden width of the agreement heads; auto: 4096, or 4 encoder widths below ViT-S")
    head_out: Size = _size("output width of the agreement heads; auto: 256, or the encoder's width below ViT-S")
    decoder_width: Size = as_in(DropPosOptions, "decoder_width")
    decoder_depth: Size = _size("number of blocks of the pixel decoder; auto: 8, or 2 below ViT-S", least=0, most=1000)
    decoder_heads: Size = as_in(DropPosOptions, "decoder_heads")
    position_depth: Size = _size(
        "number of blocks of the position decoder; 0: linear, as in MP3; auto: 2", least=0, most=1000
    )
    features_of: str | None = option(
        None, "frozen teacher of features: timm:NAME, a run's folder, or a file of weights"
    )
    features_model: str | None = option(
        None, "timm's name of that teacher's model, if features_of is a file of weights alone"
    )
    feature_loss: FeatureLoss | Literal["auto"] = option(
        "auto", "loss on the features: cosine or smooth_l1; auto: cosine"
    )
    canvas: Size = _size(
        "shorter side in pixels of the image before zoom_in, fisheye or wave, as in restore; auto: the input's. "
        "zoom_in is then the input's fraction of it, such as 0.7 for 224 of 320"
    )
    canvas_fit: CanvasFit | Literal["auto"] = option(
        "auto", "reduction of a larger canvas to the input after fisheye or wave: resize (auto), or crop"
    )
    band_weight: float | Literal["auto"] = option(
        "auto",
        "fraction of the pixel loss on the band around the input, with mask and zoom_in on a canvas; the rest is on "
        "the masked patches. auto: 0.2",
        least=0,
        most=1,
    )
    band_target: BandTarget | Literal["auto"] = option(
        "auto", "target of the band, as in restore: grown (auto) or original"
    )
    zoom_place: CropPlace | Literal["auto"] = as_in(RestoreOptions, "zoom_place")
    fill: Padding | Literal["auto"] = option(
        "auto", "surroundings of zoom_out's small copy: its mirror images (auto), black, or patches of other images"
    )
    kernel_init: KernelInit | Literal["auto"] = as_in(RestoreOptions, "kernel_init")
    kernel_of: KernelOf | Literal["auto"] = as_in(RestoreOptions, "kernel_of")

    @property
    def withheld(self) -> dict[str, float]:
        return resolved(self.withhold, {"mask": 0.5, "drop_positions": 0.75})

    @property
    def asked(self) -> dict[str, float]:
        return resolved(self.ask, {"pixels": 1.0, "positions": 1.0})

    @property
    def view(self) -> Second:
        return resolved(self.teacher, "same" if "agreement" in self.asked else "none")

    def degraded(self, size: Sides) -> DegradationOptions:
        """Return the options of the degradation of images of ``size``; a canvas sets the strength of zoom_in."""
        kind: DegradationKind = next((kind for kind in STRENGTHS if kind in self.withheld), "none")  # one at most
        side = resolved(self.canvas, min(size))
        whole = kind == "none" or (kind == "zoom_in" and side != min(size))
        strengths: dict[str, Strength] = {} if whole else {STRENGTHS[kind]: float(self.withheld[kind])}
        return DegradationOptions(kind, side, strengths, forms_of(self))

    def has_band(self, size: Sides) -> bool:
        """Return whether pixels of images of ``size`` have a second loss, on the band around the input."""
        return "mask" in self.withheld and "pixels" in self.asked and self.degraded(size).has_band(size)

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        withhold, ask = self.withheld, self.asked
        for one, given, known in (("withhold", withhold, (*SHARES, *STRENGTHS)), ("ask", ask, QUESTIONS)):
            for name in given:
                yield name not in known, f"--task.{one} has no entry {name}: choose among {', '.join(known)}"
        yield (
            not ask or min(ask.values()) <= 0,
            "--task.ask needs one question or more, each with a weight above 0",
        )
        for name, share in withhold.items():
            yield (
                name in SHARES and not 0 < share < 1 and (name, share) != ("drop_positions", 1),
                f"--task.withhold {name} must be a fraction between 0 and 1, not {share}",
            )
        yield (
            sum(name in STRENGTHS for name in withhold) > 1,
            "--task.withhold takes one degradation of the image at a time",
        )
        order = [*withhold]
        yield (
            {"mask", "limit_context"} <= withhold.keys() and order.index("limit_context") < order.index("mask"),
            "limit_context chooses among the patches that enter: put it after mask",
        )
        yield from self._unanswerable(g)
        yield from few_visible(g, withhold.get("mask", 0.0))
        yield from self._empty(g)
        yield from self._unfit_canvas(g)
        yield from growing_sigma(self.sigma, self.sigma_end)
        if self.view != "second":
            yield from unused(self, "there is no second view", "crop", "color")
        yield from self._unfit_questions(g)

    def _unanswerable(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        """Yield questions about something that is not withheld."""
        withhold, ask, view = self.withheld, self.asked, self.view
        content = withhold.keys() & {"mask", "blank", *STRENGTHS}
        for name in ("pixels", "features"):
            yield (
                name in ask and not content,
                f"no pixels are withheld, so {name} cannot be asked: add mask or blank",
            )
        dropped = withhold.get("drop_positions", 0)
        yield (
            "positions" in ask and not dropped,
            "no visible patch's position is withheld, and a masked patch has no token to predict it from: add "
            "drop_positions to --task.withhold",
        )
        wrong = f"drop_positions {dropped} does not go with an encoder that"
        yield (
            0 < dropped < 1 and not g.has_places,
            f"{wrong} has no positions: use --positions sincos",
        )
        yield (
            dropped == 1 and g.positions != "none",
            f"{wrong} has positions: use --positions {'rotary' if g.rotations else 'none'}",
        )
        yield (
            "agreement" in ask and view == "none",
            "agreement needs a whole view of the image: give --task.teacher same or second",
        )
        yield (
            "agreement" not in ask and view != "none",
            "the teacher is not used: add agreement to --task.ask, or leave out --task.teacher",
        )
        yield (
            ask.keys() == {"agreement"} and view == "same" and not withhold,
            "the student sees all that the teacher sees: withhold something, or give --task.teacher second",
        )

    def _empty(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        """Yield fractions that withhold nothing, or leave nothing."""
        counts = counts_of(g.n, self.withheld)
        enter, blank, dropped = counts.get("mask", g.n), counts.get("blank", 0), counts.get("drop_positions", 0)
        yield (
            blank > 0 and blank + dropped > enter,
            f"of {enter} patches that enter, {blank} would be blank and {dropped} without a position, so some would "
            "have neither: lower one of the fractions",
        )
        yield blank == enter, "every patch would be blank: lower blank in --task.withhold"
        for name, count in counts.items():
            yield (
                name != "limit_context" and count == (g.n if name == "mask" else 0),
                f"{name} {self.withheld[name]} takes none of the patches: raise it in --task.withhold",
            )
        yield from unfit_parts(g, self.masks, enter, "mask in --task.withhold")

    def _unfit_canvas(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        """Yield degradations that cannot be, and canvases that do not go with the questions."""
        size, degraded = min(g.size), self.degraded(g.size)
        side = degraded.side(g.size)
        if degraded.kind == "zoom_in" and side != size:
            share = self.withheld["zoom_in"]
            yield (
                abs(size / side - share) > 0.5 / size,
                f"the input's {size} pixels are {size / side:.3f} of --task.canvas {side}, not zoom_in {share:g}: give "
                f"zoom_in {size / side:.3f} in --task.withhold, or another canvas",
            )
        yield from degraded.refusals(g)
        yield (
            side != size and ("agreement" in self.asked or self.position_temperature < inf),
            "agreement and attentive reconstruction need images of the encoder's size: leave out --task.canvas, or "
            "these",
        )
        if self.has_band(g.size):
            yield self.masks > 1, "the loss on the band of a canvas is for one mask: leave out --task.masks"
        else:
            yield from unused(self, _NO_BAND, "band_weight", "band_target")

    def _unfit_questions(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        """Yield options of questions that are not asked, and parts of others that cannot be."""
        ask = self.asked
        for name, own in _OWN.items():
            if name not in ask:
                yield from unused(self, f"--task.ask has no {name}", *own)
        if "agreement" in ask:
            yield from unfit_loss(self, self.agreement_loss, "infonce_temperature")
            yield from unfit_representation(g, self)
        if "positions" in ask:
            yield from unfit_decoder(g, self, POSITION_DECODER, only_masked=False, depth="position_depth")
        yield from not_normalizable(g, "pixels" in ask, each_channel=True)
        if "features" in ask:
            yield from no_teacher(self.features_of)
        if ask.keys() & {"pixels", "features"}:
            only_masked = self.degraded(g.size).kind == "none" and "blank" not in self.withheld
            yield from unfit_decoder(g, self, only_masked=only_masked)
        else:
            yield from unused(self, "--task.ask has neither pixels nor features", "decoder_depth")


def counts_of(n: int, withhold: Mapping[str, float]) -> dict[str, int]:
    """Return how many of ``n`` patches each withholding leaves (mask, limit_context) or takes (the others)."""
    counts, entering = dict[str, int](), n
    if "mask" in withhold:
        counts["mask"] = entering = max(1, share_of(n, 1 - withhold["mask"]))
    for name in ("blank", "drop_positions", "limit_context"):
        if name in withhold:
            kept = share_of(entering, 1 - withhold[name])
            counts[name] = max(1, kept) if name == "limit_context" else entering - kept
    return counts
