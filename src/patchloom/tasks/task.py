"""What every pretext task is: a module with an encoder, a loss, a measure of progress, and pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.data import RandomCrop
from patchloom.errors import PatchloomError
from patchloom.nets.encode import grid_size, patch_side
from patchloom.tasks.measure import Measure
from patchloom.views.tokens import share_of

# Values that stand for colours in pictures, because pictures are drawn in normalised pixels.
WITHHELD = float("nan")  # drawn black
WRONG = float("inf")  # drawn white

Size = int | Literal["auto"]


class Outcome(NamedTuple):
    """What a forward pass returns, in every task and mode.

    Attributes:
        loss: scalar with gradient, float32.
        metrics: scalars worth a column in ``metrics.csv``, without gradient.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


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

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """How many images a step needs, of all processes together, with the reason; ``options`` are all the task's."""
        return 1, "a step without images has nothing to ask"

    def normalized_by(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Tell the task by which statistics per channel, in [0, 1] units, its images are normalised."""
        for name, values in (("mean", mean), ("std", std)):
            getattr(self, name).copy_(torch.tensor(values).view(-1, 1, 1))

    def augmented(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The views [b c h w] that `augment` makes of normalised images [b c h w], for pictures."""
        rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
        plain, white = (images * self.std + self.mean).clamp(0, 1), 1
        levels = (plain * 255).round()
        if torch.equal((levels / 255 - self.mean) / self.std, images):  # of 8 bits, in which training crops them, too
            plain, white = levels.byte(), 255
        views = zip(*(self.augment(image, rng) for image in plain.cpu()), strict=True)
        return tuple((torch.stack(view).to(images.device) / white - self.mean) / self.std for view in views)

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
        """``value`` if ``asked`` is auto, which is noted with its reason; else what was asked.

        Raises:
            PatchloomError: a whole number beyond all sizes that are ever meant.
        """
        if asked != "auto":
            if isinstance(asked, int) and not abs(asked) <= 2**16:
                raise PatchloomError(f"--task.{option} must be 65536 or less, not {asked}")
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
        if depth > 1000:
            raise PatchloomError(f"--task.{depth_option} must be 1000 or less, not {depth}")
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
        visible = share_of(self.patches, 1 - min(max(mask_ratio, 0), 1))
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
