"""Feature inversion: images generated to have the same features as the visible patches of others."""

from __future__ import annotations

import math
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
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.look.charts import write_table
from patchloom.look.context import LookRequest, NamedEncoder, check_finite
from patchloom.look.sheet import draw_sheet
from patchloom.nets.encode import (
    encode,
    encode_each,
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
from patchloom.patches.partition import random_partition, uniform_partition
from patchloom.patches.tokens import gather_tokens, patchify, scatter_tokens, unpatchify
from patchloom.questions.question import Sheet
from patchloom.sizes import share_of
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches

# Deep image prior: untrained convolutional generators, each fitted to one image.


NOISE_CHANNELS, _NOISE_SIZE = 32, 0.1  # channels of the input noise, and its largest value
_WIDTHS = (16, 32, 64, 128, 128, 128)  # channels at each scale, from full resolution, as in the paper's inversions
SKIPPED = 4  # channels of a skip connection
_SMALLEST = 4  # pixels of the shorter side at the last scale; reflection padding needs two


class Generators(nn.Module):
    """Independent generators r(z), one per image: hourglass networks with skip connections.

    They are computed together as groups of one convolution. All start with the same weights and the same noise z.
    Every convolution has reflection padding and is followed by batch norm over the one image, and a leaky ReLU.

    Args:
        images: number b of generators.
        channels: number c of image channels.
        size: height and width of the images in pixels.
        seed: random seed of weights and noise.
        widths: channels at each scale, each half the size of the one before; small images have fewer scales.
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
        """Generate images [b c h w] in [0, 1]."""
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
    """Convolution with norm and activation, grouped by image."""

    def __init__(self, images: int, width: int, out: int, kernel: int, stride: int, drawn: torch.Generator):
        super().__init__(
            nn.ReflectionPad2d(kernel // 2),
            _convolution(images, width, out, kernel, stride, drawn),
            nn.BatchNorm2d(images * out, track_running_stats=False),
            nn.LeakyReLU(0.2),
        )


def _convolution(images: int, width: int, out: int, kernel: int, stride: int, drawn: torch.Generator) -> nn.Conv2d:
    """Return a convolution grouped by image; all groups have the same initial weights."""
    made = skip_init(nn.Conv2d, images * width, images * out, kernel, stride, groups=images)
    bound = 1 / math.sqrt(width * kernel * kernel)
    with torch.no_grad():
        for weight in (made.weight, made.bias):
            first = torch.empty(out, *weight.shape[1:]).uniform_(-bound, bound, generator=drawn)
            weight.copy_(first.repeat(images, *[1] * (weight.ndim - 1)))
    return made


# Inversion of features with a deep image prior.


InvertedFeature = Literal["patches", "class", "instance"]
_STEPS, _RATE = 3000, 1e-3  # of Adam, as in ExtreMA
_SWIN_RATIOS = 0.0, 0.75


@dataclass(frozen=True)
class Inversion:
    """Generated images with the same features as the originals.

    Attributes:
        images: [b c h w] generated images, normalised for the encoder.
        given: [b c h w] visible patches of the originals, NaN elsewhere.
        curve: [steps+1 b] distance of the features before each step and after the last one: the squared difference
            divided by the squared norm of the original's features.
    """

    images: Tensor
    given: Tensor
    curve: Tensor


class FittingProgress(StatusMessage):
    """Status message with the time left and the distance while generators are fitted.

    Args:
        steps: number of steps of all fits together.
        what: name of the work.
    """

    def __init__(self, steps: int, what: str = "inverting"):
        super().__init__(what, steps)
        self.share: Tensor | None = None

    def position(self) -> str:
        """Return the step and the distance."""
        if self.share is None:
            return ""
        return f"step {super().position()}, distance {float(self.share):.2%} of the start"


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
    """Generate images whose features match those of the visible patches of others (ExtreMA, Figs. 2, 7, 8).

    The encoder computes the features of the visible patches only, as in pre-training. An untrained `Generators` is then
    fitted until the encoder, given *all* patches of its image, computes the same features for those patches (or the
    class token). This is how ExtreMA's "features of its image match those of the visible patches" is read here. If the
    generated image were masked as well, its other patches would be unconstrained and smooth. Here, they have to be
    consistent with the visible ones and show what the encoder infers.

    Args:
        one: encoder; its weights and their gradients are not changed. "instance" needs the class attention of ExtreMA.
        images: normalised images [b c h w]. Each has its own generator; all share one mask.
        ratio: fraction γ of hidden patches. For a Swin: 0, or 0.75, which keeps one patch of each 2x2 cell.
        of: features to match: tokens of the visible patches, the class token, or ExtreMA's instance representation.
        block: number, from 1, of the block whose tokens are matched; None: the last one after the final norm.
            "instance" always uses the last block.
        steps: number of steps of Adam at a learning rate of 1e-3; 3,000 in the paper.
        seed: random seed of the mask and the generators.
        fitting: status message to advance; None: a new one.
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
        drawn = normalize(generators(), *statistics)  # in full precision, independent of the encoder's
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
            # backward() would also set gradients of the encoder's weights
            for weight, slope in zip(weights, torch.autograd.grad(off.sum(), weights), strict=True):
                weight.grad = slope
            adam.step()
            telling.advance()
            telling.share = curve[-1].mean() / curve[0].mean()
        with torch.no_grad():
            off, drawn = distance()
    patches = patchify(images, patch_size(vit))
    hidden = torch.full_like(patches, torch.nan)
    visible = scatter_tokens(gather_tokens(patches, keep), keep, hidden)
    return Inversion(drawn, unpatchify(visible, patch_size(vit), grid_size(vit)), torch.stack([*curve, off]))


def _visible(vit: Encoder, ratio: float, generator: torch.Generator) -> Tensor:
    """Draw the visible patches [1 k]."""
    if not 0 <= ratio < 1:
        raise PatchloomError(f"the fraction of hidden patches must be 0 or more and below 1, not {ratio:g}")
    if is_hierarchical(vit) and ratio:
        if ratio not in _SWIN_RATIOS or any(side % 2 for side in grid_size(vit)):
            raise PatchloomError(
                "a Swin can hide no patches, or three of each 2x2 cell of an even grid: invert with a ratio of 0 or "
                "0.75"
            )
        return uniform_partition(1, grid_size(vit), generator)[0]
    n = patch_count(vit)
    if is_hierarchical(vit):  # its windows need all units in the order of the grid
        return torch.arange(n)[None]
    return random_partition(1, n, (max(1, share_of(n, 1 - ratio)),), generator)[0]


def _features(
    vit: Encoder, given: EncoderInput, of: InvertedFeature, head: InstanceHead | None, block: int | None
) -> Tensor:
    """Return features [b k d], or [b 1 d] of the whole image."""
    if is_hierarchical(vit):
        if block is not None:
            raise PatchloomError("a Swin's blocks have patches of several sizes: invert its last one")
        return encode(vit, given)
    names = layer_names(vit)
    if block is not None and not 1 <= block < len(names) - 1:
        raise PatchloomError(f"the encoder has no block {block}: choose from 1 to {len(names) - 2}")
    # the head takes tokens before the final norm
    last = block or len(names) - (2 if of == "instance" else 1)
    tokens = next(islice(encode_each(vit, given), last, None))
    if of == "instance":
        assert head is not None
        return represent(vit, head, tokens)[:, None]
    return tokens[:, :1] if of == "class" else tokens[:, prefix_count(vit) :]


FEW_STEPS, _FEW_PIXELS = 300, 2**15  # limits on a CPU: steps, and pixels of all images together
_RATIOS = 0.0, 0.5, 0.8, 0.9
MAX_INVERTED_IMAGES = 4  # images of a sheet
# remaining fraction of the distance: images of MP3's encoder showed nothing at 20 %, and the animal at 2 %
_UNFINISHED = 0.1
_CALLED = {"class": "class token", "instance": "instance token"}


class InversionFit(NamedTuple):
    """Inversion of a sheet: the fraction of hidden patches, and the features to match."""

    ratio: float
    of: InvertedFeature

    def heading(self) -> str:
        """Return the heading of its column."""
        return f"inverted, {_CALLED.get(self.of) or f'γ {self.ratio:g}'}"


def fits_of(asked: LookRequest) -> list[InversionFit]:
    """Return the inversions of an encoder: patch tokens at several ratios, and the class or instance token, if any.

    A Swin has only the ratios that its windows allow. Earlier blocks have no instance token.
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
    """Draw images, their visible patches, and inversions at several mask ratios.

    On a CPU there are fewer steps than in the paper and fewer images, so that it takes minutes. ``asked.steps``
    overrides the number of steps.
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
    item, noun = card.modality.item, card.modality.noun.capitalize()
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
                distances = zip(inverted.curve[0].tolist(), inverted.curve[-1].tolist(), strict=True)
                at = "norm" if block is None else block
                rows += [(name, at, fit.of, fit.ratio, i + 1, steps, *both) for i, both in enumerate(distances)]
            place = "inversion" if block is None else f"inversion-block-{block}"
            sheet = Sheet(
                place,
                _caption(asked, found, block, steps),
                columns,
                page_title=f"{noun} with the same features{'' if block is None else f', block {block}'}",
                page_text=f"{noun} generated so that the encoder computes the same features from a part of their "
                "patches. They show what the features retain.",
            )
            title = asked.title("inversion of its features")
            files.append(draw_sheet(sheet, card.mean, card.std, asked.folder, title, order=170, modality=card.modality))
    heading = ("encoder", "block", "of", "ratio", item, "steps", "distance_before", "distance_after")
    return [*files, write_table(heading, rows, asked.folder / "inversion.csv")]


def _caption(asked: LookRequest, found: dict[InversionFit, Inversion], block: int | None, steps: int) -> str:
    vit = asked.encoder.vit
    left = {fit: (inverted.curve[-1] / inverted.curve[0]).mean().item() for fit, inverted in found.items()}
    shares = [f"{100 * share:.2g} % ({_CALLED.get(fit.of) or f'γ {fit.ratio:g}'})" for fit, share in left.items()]
    said = [
        f"{asked.encoder.modality.noun.capitalize()} generated by a deep image prior, an untrained network, so that "
        "the features of the visible patches are like those that the encoder gives these patches alone. Hidden patches "
        "show what it infers from the others. What is lost at γ 0, such as brightness, is hardly in its features, if "
        "the fit there is finished.",
        f"The features are those after {'the last norm' if block is None else f'block {block}'}. Their distance fell "
        f"to {', '.join(shares)} of its start in {steps:,} steps"
        + (f"; the paper has {_STEPS:,}, which show more detail." if steps < _STEPS else "."),
    ]
    if max(left.values()) > _UNFINISHED:
        said.append(
            f"If more than {100 * _UNFINISHED:.0f} % remain at γ 0, the fit is not finished: give more --steps. With "
            "hidden patches, no image may come nearer."
        )
    if not has_positions(vit):
        said.append("This encoder knows no positions, so it does not know where hidden patches are.")
    if any(fit.of == "class" for fit in found):
        said.append("A class token without a loss, such as MAE's, is matched by meaningless images.")
    return " ".join([*said, "As in ExtreMA, Figs. 2, 7 and 8."])
