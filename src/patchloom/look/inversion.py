"""The sheet of inversions: images, what the encoder is given of them, and what it takes for the same."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from patchloom.data.stats import normalize
from patchloom.display import StatusMessage, duration
from patchloom.errors import PatchloomError
from patchloom.look.charts import write_table
from patchloom.look.context import LookRequest, NamedEncoder, check_finite, sheet_as_drawn
from patchloom.look.image_grid import draw_sheet
from patchloom.nets.encode import (
    attend_each,
    embed,
    encode,
    grid_size,
    has_class_token,
    has_positions,
    input_size,
    layer_names,
    patch_count,
    patch_size,
    prefix_count,
)
from patchloom.nets.heads import InstanceHead, represent
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.patches.partition import random_partition, share_of, uniform_partition
from patchloom.patches.tokens import gather_tokens, patchify, scatter_tokens, unpatchify
from patchloom.questions.question import Sheet
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches

# A deep image prior: untrained convolutional generators, of which each can be fitted to one picture.


NOISE_CHANNELS, _NOISE_SIZE = 32, 0.1  # channels of what a generator starts from, and the upper end of its values
_WIDTHS = (16, 32, 64, 128, 128, 128)  # channels at each scale, from the image's own; as for inversion in their paper
SKIPPED = 4  # channels that a skip passes on
_SMALLEST = 4  # pixels along the shorter side at the last scale: reflection needs two


class Generators(nn.Module):
    """Generators r(z), one an image, that share neither a weight nor a statistic: an hourglass with skips each.

    They are computed together, as groups of one convolution. All begin with the same weights and the same noise z,
    so that only what they are fitted to makes their pictures differ. Every convolution reflects the image at its
    border and is followed by batch norm, whose statistics are those of the one picture, and a leaky ReLU.

    Args:
        images: how many generators b there are.
        channels: of the images, c.
        size: height and width of the images in pixels.
        seed: of weights and noise.
        widths: channels at each scale, each half as large as the one before; a small image has fewer scales.
    """

    noise: Tensor

    def __init__(
        self, images: int, channels: int, size: tuple[int, int], seed: int = 0, widths: Sequence[int] = _WIDTHS
    ):
        super().__init__()
        scales = max(1, min(len(widths), int(math.log2(max(1, min(size) / _SMALLEST)))))
        drawn = torch.Generator().manual_seed(seed)
        noise = _NOISE_SIZE * torch.rand(1, NOISE_CHANNELS, *size, generator=drawn)
        self.register_buffer("noise", noise.repeat(1, images, 1, 1))
        self.images, self.channels = images, channels
        entering = (NOISE_CHANNELS, *widths[:scales])
        rising = (*widths[:scales], widths[scales - 1])
        self.skip = nn.ModuleList(_Layer(images, one, SKIPPED, 1, 1, drawn) for one in entering[:-1])
        self.halve = nn.ModuleList(
            nn.Sequential(_Layer(images, one, out, 3, 2, drawn), _Layer(images, out, out, 3, 1, drawn))
            for one, out in pairwise(entering)
        )
        self.merge = nn.ModuleList(
            nn.Sequential(_Layer(images, below + SKIPPED, out, 3, 1, drawn), _Layer(images, out, out, 1, 1, drawn))
            for out, below in pairwise(rising)
        )
        self.last = _convolution(images, rising[0], channels, 1, 1, drawn)

    def forward(self) -> Tensor:
        """The pictures [b c h w], in [0, 1]."""
        down, skipped = self.noise, []
        for skip, halve in zip(self.skip, self.halve, strict=True):
            skipped.append(skip(down))
            down = halve(down)
        for merge, beside in zip(reversed(self.merge), reversed(skipped), strict=True):
            up = F.interpolate(down, beside.shape[-2:], mode="nearest")
            each = (one.unflatten(1, (self.images, -1)) for one in (up, beside))
            down = merge(torch.cat([*each], dim=2).flatten(1, 2))
        return self.last(down).sigmoid().unflatten(1, (self.images, self.channels))[0]


class _Layer(nn.Sequential):
    """A convolution of each picture's channels, with its norm and activation."""

    def __init__(self, images: int, width: int, out: int, kernel: int, stride: int, drawn: torch.Generator):
        super().__init__(
            nn.ReflectionPad2d(kernel // 2),
            _convolution(images, width, out, kernel, stride, drawn),
            nn.BatchNorm2d(images * out, track_running_stats=False),
            nn.LeakyReLU(0.2),
        )


def _convolution(images: int, width: int, out: int, kernel: int, stride: int, drawn: torch.Generator) -> nn.Conv2d:
    """One a picture, all with the same first weights."""
    made = skip_init(nn.Conv2d, images * width, images * out, kernel, stride, groups=images)
    bound = 1 / math.sqrt(width * kernel * kernel)
    with torch.no_grad():
        for weight in (made.weight, made.bias):
            first = torch.empty(out, *weight.shape[1:]).uniform_(-bound, bound, generator=drawn)
            weight.copy_(first.repeat(images, *[1] * (weight.ndim - 1)))
    return made


# Pictures that an encoder takes for an image of which it sees a part: inversion by a deep image prior.


InvertedFeature = Literal["patches", "class", "instance"]
_STEPS, _RATE = 3000, 1e-3  # of Adam, ExtreMA's
_SWIN_RATIOS = 0.0, 0.75


@dataclass(frozen=True)
class Inversion:
    """Images and what an encoder takes for them.

    Attributes:
        images: [b c h w] what was fitted, normalised as the encoder wants it; pixels in [0, 1] before that.
        given: [b c h w] what the encoder saw of the originals, nan elsewhere.
        curve: [steps+1 b] the distance of the features before each step, and after the last one: their squared
            difference over the squared length of the original's.
    """

    images: Tensor
    given: Tensor
    curve: Tensor

    @property
    def before(self) -> Tensor:
        """[b] the distance of what an untrained generator draws."""
        return self.curve[0]

    @property
    def after(self) -> Tensor:
        """[b] the distance of ``images``."""
        return self.curve[-1]


class FittingProgress(StatusMessage):
    """What is told while generators are fitted: the time left, and how near they are.

    Args:
        steps: of all fits together.
        what: is fitted.
    """

    def __init__(self, steps: int, what: str = "inverting"):
        super().__init__(what, steps)
        self.share: Tensor | None = None

    def line(self) -> str:
        """The time left first, since a narrow terminal cuts the end."""
        if not self.done or self.share is None:
            return f"{self.what} ..."
        spent = time.monotonic() - self.begun
        left = spent / self.done * max(0, (self.total or 0) - self.done)
        count = f"step {self.done:,} of {self.total:,}"
        return f"{duration(left)} left · {self.what}: {count}, distance {float(self.share):.2%} of what it was"


def invert(
    one: NamedEncoder,
    images: Tensor,
    *,
    ratio: float = 0.8,
    of: InvertedFeature = "patches",
    block: int | None = None,
    steps: int = _STEPS,
    seed: int = 0,
    fitting: FittingProgress | None = None,
) -> Inversion:
    """Fit a picture to an image so that an encoder cannot tell them apart by a part of it (ExtreMA, Figs. 2, 7, 8).

    The encoder is given the visible patches of the image alone, as in pre-training, and keeps what it makes of them. A
    generator `Generators` that never saw an image is then fitted until the encoder, given *all* of its picture, makes
    the same of those patches (or of the class token): so ExtreMA's "features of its image match those of the visible
    patches" is read here. Were the picture masked, too, nothing would be asked of its other patches, and the generator
    would fill them with what is smooth, whatever the encoder knows. As it is, they have to be what the encoder takes
    for granted beside the visible ones: a picture of what it infers.

    Args:
        one: an encoder, whose weights, and their gradients, stay as they are; with its card, by whose mean and
            deviation the images are normalised, and the class attention beside it, of ExtreMA, for "instance".
        images: [b c h w] normalised. Each has a generator of its own, and one mask is for all.
        ratio: share γ of the patches that are withheld. Of a Swin: 0, or 0.75, one patch of each 2x2 cell.
        of: what is compared: the visible patches' tokens, the class token, or ExtreMA's instance representation.
        block: number, from 1, of the block whose tokens are compared; None: the last, after the final norm. For
            "instance" it is the last one always.
        steps: of Adam, at 1e-3; 3,000 in the paper.
        seed: of the mask, and of the generators.
        fitting: is told of each step; None: a line is shown if it takes a while.
    """
    vit, head = one.vit, one.head
    if steps < 1:
        raise PatchloomError(f"an inversion needs 1 step or more, not {steps}")
    if of == "instance" and block is not None:
        raise PatchloomError("the instance representation is made of the last block's tokens: leave the block out")
    if of == "instance" and head is None or of == "class" and not has_class_token(vit):
        raise PatchloomError(f"this encoder has no {of} representation to invert: invert its patches")
    b, c, h, w = images.shape
    n = patch_count(vit)
    keep = _visible(vit, ratio, torch.Generator().manual_seed(seed)).expand(b, -1).to(images.device)
    with torch.no_grad():
        masked = mask_patches(all_patches(images, n), keep)
        wanted = check_finite(one, _features(vit, masked, of, head, block).float())
    generators = Generators(b, c, (h, w), seed).to(images.device)
    weights = [*generators.parameters()]
    adam = torch.optim.Adam(weights, _RATE)
    statistics = [torch.tensor(each, device=images.device).view(-1, 1, 1) for each in (one.card.mean, one.card.std)]

    def distance() -> tuple[Tensor, Tensor]:
        drawn = normalize(generators(), *statistics)  # in full precision, whatever the encoder's
        features = _features(vit, all_patches(drawn.to(images.dtype), n), of, head, block).float()
        if of == "patches":
            features = gather_tokens(features, keep)
        off = (features - wanted).square().sum((1, 2)) / wanted.square().sum((1, 2)).clamp(min=1e-12)
        return off, drawn.detach()

    curve = []
    telling = fitting or FittingProgress(steps)
    with nullcontext() if fitting else telling, torch.enable_grad():
        for _ in range(steps):
            off, _ = distance()
            curve.append(off.detach())
            # not backward(): that would give the encoder's weights gradients, too
            for weight, slope in zip(weights, torch.autograd.grad(off.sum(), weights), strict=True):
                weight.grad = slope
            adam.step()
            telling.advance()
            telling.share = curve[-1].mean() / curve[0].mean()
        with torch.no_grad():
            off, drawn = distance()
    return Inversion(drawn, _shown(vit, images, keep), torch.stack([*curve, off]))


def _visible(vit: Encoder, ratio: float, generator: torch.Generator) -> Tensor:
    """Which patches [1 k] are visible."""
    if not 0 <= ratio < 1:
        raise PatchloomError(f"the share of patches withheld must be 0 or more and below 1, not {ratio:g}")
    if is_hierarchical(vit) and ratio:
        if ratio not in _SWIN_RATIOS or any(side % 2 for side in grid_size(vit)):
            raise PatchloomError(
                "of a Swin none of the patches can be withheld, or three of each 2x2 cell of an even grid: invert with "
                "a ratio of 0 or 0.75"
            )
        return uniform_partition(1, grid_size(vit), generator)[0]
    n = patch_count(vit)
    return random_partition(1, n, (max(1, share_of(n, 1 - ratio)),), generator)[0]


def _features(
    vit: Encoder, given: EncoderInput, of: InvertedFeature, head: InstanceHead | None, block: int | None
) -> Tensor:
    """Features [b k d], or [b 1 d] of the whole image."""
    if is_hierarchical(vit):
        if block is not None:
            raise PatchloomError("a Swin's blocks have patches of several sizes: invert its last one")
        return encode(vit, given)
    names = layer_names(vit)
    if block is not None and not 1 <= block < len(names) - 1:
        raise PatchloomError(f"the encoder has blocks 1 to {len(names) - 2}, and no block {block}")
    # the head takes tokens before the final norm
    last = block or len(names) - (2 if of == "instance" else 1)
    tokens = next(islice(attend_each(vit, embed(vit, given)), last, None))
    if of == "instance":
        assert head is not None
        return represent(vit, head, tokens)[:, None]
    return tokens[:, :1] if of == "class" else tokens[:, prefix_count(vit) :]


def _shown(vit: Encoder, images: Tensor, keep: Tensor) -> Tensor:
    """The visible patches [b c h w] of images, nan elsewhere."""
    patches = patchify(images, patch_size(vit))
    return unpatchify(
        scatter_tokens(gather_tokens(patches, keep), keep, torch.full_like(patches, torch.nan)),
        patch_size(vit),
        grid_size(vit),
    )


FEW_STEPS, _FEW_PIXELS = 300, 2**15  # on a CPU, and the pixels of all its images together
_RATIOS = 0.0, 0.5, 0.8, 0.9
MAX_INVERTED_IMAGES = 4  # images of a sheet
# of the distance; MP3 showed nothing with 20 % of it left, and the animal with 2 %
_UNFINISHED = 0.1
_CALLED = {"class": "class token", "instance": "instance token"}


class InversionFit(NamedTuple):
    """One inversion of a sheet: the share of patches withheld, and what is compared."""

    ratio: float
    of: InvertedFeature

    def heading(self) -> str:
        """Above its column."""
        return f"inverted, {_CALLED.get(self.of) or f'γ {self.ratio:g}'}"


def fits_of(asked: LookRequest) -> list[InversionFit]:
    """What is inverted: patch tokens at several ratios, and what stands for the whole image, if there is such a token.

    Of a Swin there are the ratios that its windows allow, and of earlier blocks there is no instance token.
    """
    vit = asked.encoder.vit
    ratios: Sequence[float] = _RATIOS
    if is_hierarchical(vit):
        ratios = _SWIN_RATIOS[: 1 + all(side % 2 == 0 for side in grid_size(vit))]
    fits = [InversionFit(ratio, "patches") for ratio in ratios]
    if asked.encoder.head is not None and asked.blocks is None:
        return [*fits, InversionFit(0.0, "instance")]
    return [*fits, InversionFit(0.0, "class")] if has_class_token(vit) else fits


def draw_inversion(asked: LookRequest) -> list[Path]:
    """Draw images, what the encoder is given of them, and what it takes for the same, at several mask ratios.

    On a CPU there are fewer steps than the paper's, and fewer images, so that it ends within minutes. ``asked.steps``
    has its way on any machine.
    """
    (name, vit, card, _), fits = asked.encoder, fits_of(asked)
    slow = asked.device.type == "cpu"
    steps = asked.steps or (FEW_STEPS if slow else _STEPS)
    images = asked.pictures(
        min(
            asked.images,
            MAX_INVERTED_IMAGES,
            max(1, _FEW_PIXELS // math.prod(input_size(vit))) if slow else MAX_INVERTED_IMAGES,
        )
    )
    blocks = asked.blocks or (None,)
    item = card.modality.item
    what = f"inverting {card.modality.counted(len(images))}, {len(fits) * len(blocks)} times {steps:,} steps"
    if steps < _STEPS:
        what += f" (the paper: {_STEPS:,})"
    files, rows = [], []
    with FittingProgress(steps * len(fits) * len(blocks), what) as fitting:
        for block in blocks:
            asks: dict[str, Any] = dict(block=block, steps=steps, seed=asked.seed, fitting=fitting)
            found = {fit: invert(asked.encoder, images, ratio=fit.ratio, of=fit.of, **asks) for fit in fits}
            columns = {item: images}
            for fit, inverted in found.items():
                if fit.ratio:
                    columns[f"given, γ {fit.ratio:g}"] = inverted.given
                columns[fit.heading()] = inverted.images
                distances = zip(inverted.before.tolist(), inverted.after.tolist(), strict=True)
                at = "norm" if block is None else block
                rows += [(name, at, fit.of, fit.ratio, i + 1, steps, *both) for i, both in enumerate(distances)]
            place = "inversion" if block is None else f"inversion-block-{block}"
            files.append(_draw(asked, Sheet(place, _caption(asked, found, block, steps), columns)))
    heading = ("encoder", "block", "of", "ratio", item, "steps", "distance_before", "distance_after")
    return [*files, write_table(heading, rows, asked.folder / "inversion.csv")]


def _draw(asked: LookRequest, sheet: Sheet) -> Path:
    card, title = asked.encoder.card, asked.title("inversion of its features")
    return draw_sheet(*sheet_as_drawn(sheet, card.modality, card.mean, card.std), asked.folder, title)


def _caption(asked: LookRequest, found: dict[InversionFit, Inversion], block: int | None, steps: int) -> str:
    vit = asked.encoder.vit
    left = {fit: (inverted.after / inverted.before).mean().item() for fit, inverted in found.items()}
    shares = [f"{100 * share:.2g} % ({_CALLED.get(fit.of) or f'γ {fit.ratio:g}'})" for fit, share in left.items()]
    said = [
        "A deep image prior, an untrained network that draws "
        f"{asked.encoder.modality.noun}, was fitted until the encoder makes the same of the visible patches, whether "
        "it "
        "is given them alone or the whole of what was drawn. Look at where patches were withheld: what is there, the "
        "encoder infers from the others. What is lost at γ 0, such as brightness, its features do not tell.",
        f"Compared are features after {'the last norm' if block is None else f'block {block}'}. Their distance fell to "
        f"{', '.join(shares)} of what it was, in {steps:,} steps"
        + (f"; the paper has {_STEPS:,}, which show more detail." if steps < _STEPS else "."),
    ]
    if max(left.values()) > _UNFINISHED:
        said.append(f"Where more than {100 * _UNFINISHED:.0f} % is left, the fit is not finished: give more --steps.")
    if not has_positions(vit):
        said.append("This encoder knows no positions: nothing tells it where withheld patches lie.")
    if any(fit.of == "class" for fit in found):
        said.append("A class token of which no loss asked anything, as MAE's, is met by a picture that shows nothing.")
    return " ".join([*said, "As in ExtreMA, Figs. 2, 7 and 8."])
