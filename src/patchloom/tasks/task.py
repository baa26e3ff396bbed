"""What every pretext task is: a module with an encoder, a loss, a measure of progress, and pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.data import RandomCrop
from patchloom.errors import PatchloomError
from patchloom.nets.encode import grid_size, patch_side
from patchloom.objectives.agreement import effective_rank, output_spread
from patchloom.views.tokens import share_of

# Values that stand for colours in pictures, because pictures are drawn in normalised pixels.
WITHHELD = float("nan")  # drawn black
WRONG = float("inf")  # drawn white

# Below these a teacher's outputs count as collapsed: two images' outputs have a mean cosine above 0.99, or they differ
# in hardly more directions than one. ExtreMA on CIFAR-10 fell from 28 to 3 where its learning rate was too high, and
# its kNN accuracy with it.
_LEAST_SPREAD, _LEAST_RANK = 0.1, 4.0

Size = int | Literal["auto"]


class Outcome(NamedTuple):
    """What a forward pass returns, in every task and mode.

    Attributes:
        loss: scalar with gradient, float32.
        metrics: scalars worth a column in ``metrics.csv``, without gradient.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class Measure:
    """How well a task is done on held-out images, beside what needs no learning.

    Attributes:
        name: what is measured, in words.
        values: [b] the result on each image.
        yardsticks: [b] each, results of trivial answers by name, such as chance.
        bar: the yardstick that has to be beaten before anything is learnt, or several, of which the best one on the mean
            has to be; others may know what the network does not.
        higher_is_better: which way is up.
        form: how a result is written, as for `format`.
        details: [b] each, further results by name, on the same scale.
        outputs: [b d] of the teacher, for tasks that could collapse; None for the others.
    """

    name: str
    values: Tensor
    yardsticks: dict[str, Tensor]
    bar: str | tuple[str, ...]
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
            yardsticks=whole(lambda part: part.yardsticks),
            details=whole(lambda part: part.details),
            outputs=None if parts[0].outputs is None else torch.cat([part.outputs for part in parts]),
        )

    def show(self, value: float) -> str:
        """A result as people read it."""
        return format(value, self.form)

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
        found = self.diversity()
        return found["spread"] < _LEAST_SPREAD or found["effective rank"] < _LEAST_RANK

    def hurdle(self) -> str:
        """The name of the yardstick that has to be beaten."""
        bars = (self.bar,) if isinstance(self.bar, str) else self.bar
        means = self.means()
        return (max if self.higher_is_better else min)(bars, key=means.__getitem__)

    @property
    def value(self) -> float:
        """The mean result."""
        return self.values.mean().item()

    def means(self) -> dict[str, float]:
        """The mean of each yardstick."""
        return {name: values.mean().item() for name, values in self.yardsticks.items()}

    def gain(self) -> tuple[float, float]:
        """By how much the bar is beaten (negative: missed), and half the width of that mean's 95 % interval.

        The difference is taken image by image, since some images are easier than others for both.
        """
        better = self.values - self.yardsticks[self.hurdle()]
        better = better if self.higher_is_better else -better
        if len(better) < 2:
            return better.mean().item(), float("inf")
        return better.mean().item(), 1.96 * better.std().item() / len(better) ** 0.5


class Sheet(NamedTuple):
    """One picture sheet: a row an image, a column a stage.

    Attributes:
        name: file name without suffix.
        caption: what is shown, and what was taken from the original.
        columns: by heading, images [b c h w] in normalised pixels; nan is drawn black, inf white.
    """

    name: str
    caption: str
    columns: dict[str, Tensor]


class Task(nn.Module, ABC):
    """A pretext task: what is withheld from an encoder, and what is asked of it.

    Attributes:
        encoder: the ViT that is being trained; `patchloom export` writes its ``state_dict``, and in a file of its own
            an instance head that is `beside` it.
        augment: turns one image and a random generator into the views that `forward` takes.
        chosen: by option, what each ``auto`` became, and why.
        mean, std: [c 1 1] by which the images were normalised; `normalized_by` sets them.
        pictured: how many images `draw` wants; of these the first few are shown.
    """

    encoder: VisionTransformer
    augment: RandomCrop
    pictured: ClassVar[int] = 8

    def __init__(self, encoder: VisionTransformer):
        super().__init__()
        self.encoder = encoder
        self.chosen: dict[str, tuple[Any, str]] = {}
        self.augment = RandomCrop(tuple(encoder.patch_embed.img_size))
        self.register_buffer("mean", torch.zeros(self.channels, 1, 1), persistent=False)
        self.register_buffer("std", torch.ones(self.channels, 1, 1), persistent=False)

    @classmethod
    def encoder_wishes(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """What the encoder should be where the user leaves it open: "positions" or "class_token", each with a reason.

        ``options`` are the task's own, all of them.
        """
        return {}

    def normalized_by(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Tell the task by which statistics per channel, in [0, 1] units, its images are normalised."""
        for name, values in (("mean", mean), ("std", std)):
            getattr(self, name).copy_(torch.tensor(values).view(-1, 1, 1))

    def augmented(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The views [b c h w] that `augment` makes of normalised images [b c h w], for pictures."""
        rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
        plain = ((images * self.std + self.mean).clamp(0, 1) * 255).round().byte().cpu()
        views = zip(*(self.augment(image, rng) for image in plain), strict=True)
        return tuple((torch.stack(view).to(images.device) / 255 - self.mean) / self.std for view in views)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return grid_size(self.encoder)

    @property
    def patches(self) -> int:
        """Patches of the grid, n."""
        return self.grid[0] * self.grid[1]

    @property
    def p(self) -> int:
        """Side of a patch in pixels."""
        return patch_side(self.encoder)

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return self.encoder.patch_embed.proj.in_channels

    @property
    def prefix(self) -> int:
        """Class and register tokens in front of the patch tokens."""
        return self.encoder.num_prefix_tokens

    def choose(self, option: str, asked: Any, value: Any, why: str) -> Any:
        """``value`` if ``asked`` is auto, which is noted with its reason; else what was asked."""
        if asked != "auto":
            return asked
        self.chosen[option] = (value, why)
        return value

    def refuse_unused(self, why: str, **options: Any) -> None:
        """Refuse options (their values, ``auto`` where not given) that would change nothing.

        Raises:
            PatchloomError: one is given.
        """
        for option, value in options.items():
            if value != "auto":
                raise PatchloomError(f"--task.{option} changes nothing here, since {why}: leave it out")

    def decoder_sizes(
        self,
        width: Size,
        depth: Size,
        heads: Size,
        usual: tuple[int, int, int],
        depth_option: str = "decoder_depth",
    ) -> tuple[int, int, int]:
        """Width, depth and heads of a decoder; ``auto`` is the paper's, which are ``usual``.

        For an encoder narrower than ViT-S (384), which the papers do not train, auto is the encoder's own width, at
        most two blocks, and heads 32 wide, since a decoder should cost less than its encoder.

        Raises:
            PatchloomError: sizes that do not go together.
        """
        d = self.encoder.embed_dim
        small = d < 384
        why = "as narrow as an encoder below ViT-S" if small else "the paper's"
        width = self.choose("decoder_width", width, d if small else usual[0], why)
        depth = self.choose(depth_option, depth, min(2, usual[1]) if small else usual[1], why)
        heads = self.choose("decoder_heads", heads, max(1, width // 32) if small else usual[2], why)
        if min(width, heads) < 1 or depth < 0 or width % heads or width % 4:
            raise PatchloomError(
                f"a decoder cannot be {width} wide and {depth} blocks deep with {heads} heads: choose a width that "
                "is a multiple of 4 and of the heads"
            )
        return width, depth, heads

    def visible_of(self, mask_ratio: float, least: int = 1) -> int:
        """How many patches a mask ratio leaves visible.

        Raises:
            PatchloomError: fewer than ``least`` would stay, or none would be masked.
        """
        visible = share_of(self.patches, 1 - mask_ratio)
        if not 0 <= mask_ratio < 1 or visible < least:
            if self.patches < least:
                raise PatchloomError(
                    f"images of {self.patches} patch{'es'[: 2 * (self.patches > 1)]} leave nothing to ask: use smaller "
                    "patches or larger images"
                )
            raise PatchloomError(
                f"a mask ratio of {mask_ratio} leaves {max(visible, 0)} of {self.patches} patches visible, and {least} "
                "are needed: lower --task.mask_ratio, or use smaller patches or larger images"
            )
        return visible

    def check_normalizable(self, each_channel: bool = False) -> None:
        """Refuse to normalise within patches, or within each channel of them, that are a single number.

        Raises:
            PatchloomError: they are.
        """
        if self.p == 1 and (each_channel or self.channels == 1):
            raise PatchloomError("within patches of one pixel there is nothing to normalise: use larger patches")

    @abstractmethod
    def forward(self, *views: Tensor, progress: float, generator: torch.Generator | None = None) -> Outcome:
        """One step's loss.

        Args:
            views: what `augment` gave, batched and normalised, each [b c h w].
            progress: share of the training that is done, in [0, 1]; replaces every stateful schedule.
            generator: source of what is random, on any device; the global one if absent.
        """

    def after_step(self, progress: float) -> None:
        """Called after each optimiser step; tasks with a moving-average teacher follow here."""

    def position_axes(self) -> dict[str, tuple[float, ...]]:
        """Ratios at which positions are measured, by their names; none unless positions are asked.

        A task that has some also has ``place(images, generator, **ratios) -> Placed``.
        """
        return {}

    def beside(self) -> dict[str, nn.Module]:
        """What is saved beside the encoder, by file name without suffix: modules whose ``sizes`` build them again."""
        return {}

    @abstractmethod
    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """How well the task is done on held-out ``images`` [b c h w], beside trivial answers."""

    @abstractmethod
    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Picture sheets of the task on ``images`` [b c h w]."""
