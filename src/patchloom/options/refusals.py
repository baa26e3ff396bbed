"""Impossible options that several pretext tasks share: pairs of a condition and the sentence with which it is refused.

Beside them stand the numbers that ``auto`` becomes, where a condition depends on them and a task needs them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from patchloom.errors import PatchloomError
from patchloom.sizes import in_pixels, share_of

if TYPE_CHECKING:
    from patchloom.nets.geometry import Geometry
    from patchloom.options.tasks import Loss, Size

T = TypeVar("T")

PAPERS = "the paper's"  # reason of an ``auto`` that is the paper's value
UNIFORM = 0.75  # fraction that uniform masking of a Swin removes
GAUSSIAN: tuple[Loss, ...] = ("sigreg", "visreg")  # losses without a teacher
SMALL = 384  # the papers train no encoder narrower than ViT-S
# width, depth and heads of the papers' decoders
MAE_DECODER = 512, 8, 16
POSITION_DECODER = 512, 2, 16  # DropPos'


def refuse(pairs: Iterable[tuple[bool, str]]) -> None:
    """Raise an error with the first sentence whose condition is true; later pairs may rely on it."""
    for refused, sentence in pairs:
        if refused:
            raise PatchloomError(sentence)


def resolved(asked: T | Literal["auto"], usual: T) -> T:
    """Return the value of an option, or ``usual`` if it is auto."""
    return usual if asked == "auto" else asked


def unused(options: object, why: str, *names: str) -> Iterator[tuple[bool, str]]:
    """Yield options without effect that have another value than their default."""
    for name in names:
        given = getattr(options, name) != getattr(type(options), name)
        yield given, f"--task.{name} has no effect here, because {why}: leave it out"


# Masks.


def few_visible(g: Geometry, mask_ratio: float, least: int = 1) -> Iterator[tuple[bool, str]]:
    """Yield a mask ratio that leaves fewer than ``least`` patches visible."""
    visible = share_of(g.n, 1 - mask_ratio)
    yield (
        g.n < least,
        f"images of {g.n} patch{'es'[: 2 * (g.n > 1)]} leave nothing to predict: use smaller patches or larger images",
    )
    yield (
        visible < least,
        f"a mask ratio of {mask_ratio} leaves {visible} of {g.n} patches visible, and {least} are needed: lower "
        "--task.mask_ratio, or use smaller patches or larger images",
    )


def masked_units(g: Geometry, mask_ratio: float, unit: int = 1) -> tuple[int, int]:
    """Return the numbers of units of ``unit`` x ``unit`` patches that a mask ratio leaves visible and masks."""
    units = g.n // unit**2
    visible = share_of(units, 1 - mask_ratio)
    return visible, units - visible


def unfit_masks(g: Geometry, mask_ratio: float, unit: int = 1) -> Iterator[tuple[bool, str]]:
    """Yield a mask ratio that leaves nothing visible, or masks nothing."""
    visible, masked = masked_units(g, mask_ratio, unit)
    yield from few_visible(g, mask_ratio)
    yield (
        not visible,
        f"a mask ratio of {mask_ratio} leaves none of {masked} mask units visible: lower --task.mask_ratio or "
        "--task.mask_unit",
    )
    yield not masked, f"a mask ratio of {mask_ratio} masks nothing: raise --task.mask_ratio"


def unit_of(g: Geometry, mask_unit: Size, usual: int) -> tuple[int, str]:
    """Return the number of patches along a mask unit (SimMIM section 3.2), and the reason of an ``auto``.

    ``auto`` becomes ``usual``: 1 for MAE, 2 for SimMIM; 2 becomes 1 if the grid has an odd side.
    """
    p = g.p[0]
    if mask_unit != "auto":
        return mask_unit // p, ""
    if g.hierarchical:
        return 1, f"one token of the last stage, which covers {p} pixels"
    if g.p != (p, p):
        return 1, "units are square, and patches are not"
    if usual == 2 and any(side % 2 for side in g.grid):
        return 1, "one patch, because the grid has odd sides"
    return usual, "one patch" if usual == 1 else "two patches, like 32 pixels for patches of 16"


def unfit_unit(g: Geometry, mask_unit: Size) -> Iterator[tuple[bool, str]]:
    """Yield a mask unit that does not tile the grid."""
    if mask_unit == "auto":
        return
    p = g.p[0]
    yield (
        g.p != (p, p),
        f"mask units are square, and patches of {in_pixels(g.p)} pixels are not: leave out --task.mask_unit to mask "
        "single patches",
    )
    yield (
        mask_unit < p or mask_unit % p != 0 or any(side % (mask_unit // p) for side in g.grid),
        f"mask units of {mask_unit} pixels do not fit {g.grid[0]}x{g.grid[1]} patches of {p} pixels: give "
        f"--task.mask_unit a multiple of {p} that divides the image",
    )


def not_uniform(g: Geometry, mask_ratio: float, unit: int = 1) -> Iterator[tuple[bool, str]]:
    """Yield masks of a Swin that do not leave one patch of each 2x2 (uniform masking; UM-MAE, Li 2022)."""
    if not g.hierarchical or mask_ratio == 0:
        return
    (rows, columns), p = g.grid, g.p[0]
    yield (
        unit != 1,
        f"mask units of {unit * p} pixels do not fit a Swin, whose uniform masks leave one of each 2x2 units of {p} "
        "pixels: leave out --task.mask_unit",
    )
    yield (
        mask_ratio != UNIFORM,
        f"a mask ratio of {mask_ratio} does not fit a Swin, whose uniform masks leave one of each 2x2 units: give "
        f"--task.mask_ratio {UNIFORM}, or leave it out",
    )
    near = "x".join(str(max(1, round(side / 2)) * 2 * p) for side in (rows, columns))
    yield (
        rows % 2 != 0 or columns % 2 != 0,
        f"a Swin is masked in cells of 2x2 units of {p} pixels (uniform masking), and {rows}x{columns} units have an "
        f"odd side: give --img_size {near}",
    )


def unfit_parts(g: Geometry, masks: int, visible: int, remedy: str) -> Iterator[tuple[bool, str]]:
    """Yield more disjoint masks of ``visible`` patches than there are patches for."""
    yield (
        not 1 <= masks <= g.n // visible,
        f"there are no {masks} disjoint masks of {visible} visible patches each in {g.n}: give --task.masks 1 to "
        f"{g.n // visible}, or raise {remedy}",
    )


# Positions and pixels.


def has_embeddings(g: Geometry, task: str, otherwise: str = "") -> Iterator[tuple[bool, str]]:
    """Yield an encoder with position embeddings, all of which ``task`` withholds, so that none would be trained."""
    none = "rotary, without embeddings" if g.rotations else "none"
    yield (
        g.positions != "none",
        f"{task} withholds every position, so the encoder must have none: use --positions {none}{otherwise}",
    )


def growing_sigma(sigma: float, sigma_end: float) -> Iterator[tuple[bool, str]]:
    """Yield a σ of position smoothing that is larger at the end of the training than at the start."""
    yield (
        sigma_end > sigma,
        f"--task.sigma_end must be 0 to --task.sigma, which is {sigma:g}, not {sigma_end:g}: give both the same value "
        "for a constant σ",
    )


def not_normalizable(g: Geometry, normalized: bool, each_channel: bool = False) -> Iterator[tuple[bool, str]]:
    """Yield ``normalized`` patches that are, or with ``each_channel`` whose channels are, a single number."""
    yield (
        normalized and g.p == (1, 1) and (each_channel or g.channels == 1),
        "within patches of one pixel there is nothing to normalise: use larger patches",
    )


# Decoders, teachers and losses.


def decoder_of(
    g: Geometry, asked: tuple[Size, Size, Size], usual: tuple[int, int, int] = MAE_DECODER
) -> tuple[int, int, int]:
    """Return width, depth and heads of a decoder; ``auto`` becomes the paper's sizes ``usual``.

    For an encoder narrower than ViT-S (384), which the papers do not train, auto becomes the encoder's width, at most
    two blocks, and heads 32 wide, because a decoder should cost less than its encoder.
    """
    if g.width >= SMALL:
        return resolved(asked[0], usual[0]), resolved(asked[1], usual[1]), resolved(asked[2], usual[2])
    wide = resolved(asked[0], g.width)
    return wide, resolved(asked[1], min(2, usual[1])), resolved(asked[2], max(1, wide // 32))


def unfit_decoder(
    g: Geometry,
    options: Any,
    usual: tuple[int, int, int] = MAE_DECODER,
    only_masked: bool = True,
    depth: str = "decoder_depth",
) -> Iterator[tuple[bool, str]]:
    """Yield sizes that no decoder has, and a ``depth`` (an option) of 0 if ``only_masked`` patches are predicted."""
    wide, deep, many = decoder_of(g, (options.decoder_width, getattr(options, depth), options.decoder_heads), usual)
    yield (
        wide % many != 0 or wide % 4 != 0,
        f"a decoder cannot be {wide} wide and {deep} blocks deep with {many} heads: choose a width that is a multiple "
        "of 4 and of the heads",
    )
    yield (
        only_masked and not deep,
        "without a block in the decoder, masked patches are guessed from their place alone and the encoder learns "
        f"nothing from them: give --task.{depth} 1 or more",
    )


def unfit_loss(options: object, loss: Loss, temperature: str = "temperature") -> Iterator[tuple[bool, str]]:
    """Yield options of agreement that ``loss`` does not have; ``temperature`` is the name of one of them."""
    if loss != "infonce":
        yield from unused(options, f"{loss} has no temperature", temperature)
    if loss in GAUSSIAN:
        yield from unused(options, f"{loss} has no teacher", "momentum")
    else:
        yield from unused(options, f"{loss} does not test for a Gaussian", "gaussian_weight", "directions")


def unfit_representation(g: Geometry, options: Any) -> Iterator[tuple[bool, str]]:
    """Yield a class token that the encoder lacks, and blocks of class attention that are not in use."""
    if options.class_token != "cait":
        yield from unused(options, "only --task.class_token cait has class attention", "attention_blocks")
    yield (
        options.class_token == "vit" and not g.has_class_token,
        "--task.class_token vit needs an encoder with one: give --model.class_token true",
    )


def no_teacher(features_of: str | None) -> Iterator[tuple[bool, str]]:
    """Yield features without a teacher."""
    yield (
        features_of is None,
        "the task needs a teacher of features: give --task.features_of timm:NAME, the folder of a run, or a "
        ".safetensors file",
    )
