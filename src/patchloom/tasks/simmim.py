"""SimMIM: a simple framework for masked image modeling (Xie et al., CVPR 2022)."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.build import initialize
from patchloom.nets.encode import encode
from patchloom.objectives.pixels import pixel_errors, pixel_loss, pixel_targets, trivial_errors
from patchloom.tasks.mae import check_masks_something, recovery_sheet
from patchloom.tasks.measure import Measure
from patchloom.tasks.task import Outcome, Sheet, Size, Task
from patchloom.views.tokens import deal_units, share_of, take
from patchloom.views.view import blank_patches, whole


class SimMIM(Task):
    """Most patches are replaced by a mask token; their pixels are asked.

    Args:
        encoder: the ViT to train.
        mask_ratio: share of the mask units whose content is withheld.
        mask_unit: side of a mask unit in pixels; auto: two patches (32 pixels for patches of 16), or one where the
            grid has odd sides.
        normalized_pixels: ask for pixels normalised within each patch instead of plain ones.

    Raises:
        PatchloomError: a mask ratio that leaves nothing visible or nothing masked, or a unit that does not fit.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        mask_ratio: float = 0.6,
        mask_unit: Size = "auto",
        normalized_pixels: bool = False,
    ):
        super().__init__(encoder)
        self.visible_of(mask_ratio)
        self.unit = patches_of_unit(self, mask_unit)
        units = self.patches // self.unit**2
        visible = share_of(units, 1 - mask_ratio)
        if visible == 0:
            raise PatchloomError(
                f"a mask ratio of {mask_ratio} leaves none of {units} mask units visible: lower --task.mask_ratio or "
                "--task.mask_unit"
            )
        check_masks_something(self, visible * self.unit**2, mask_ratio)
        self.hands = (visible, units - visible)
        if normalized_pixels:
            self.check_normalizable()
        self.normalized_pixels = normalized_pixels
        self.mask_token = nn.Parameter(torch.empty(encoder.embed_dim).normal_(std=0.02))
        self.head = pixel_head(self)

    def forward(self, images: Tensor, *, progress: float = 0.0, generator=None, hands=None) -> Outcome:
        """The loss on one batch; ``hands`` fixes the visible and masked patches ([b k], [b m]) instead of drawing."""
        _, masked = hands or self.deal(len(images), generator, images.device)
        predicted = self.recover(images, masked)
        target = pixel_targets(images, self.p, masked, self.normalized_pixels)
        return Outcome(pixel_loss(predicted, target, absolute=True), {})

    def deal(self, b: int, generator, device) -> tuple[Tensor, Tensor]:
        """Draw the visible and the masked patches of whole units, [b k] and [b m]."""
        return deal_units(b, self.grid, self.unit, self.hands, generator, device)

    def recover(self, images: Tensor, masked: Tensor) -> Tensor:
        """Predicted pixels [b m c*p*p] of the ``masked`` patches [b m] from the others, mask tokens in the sequence."""
        view = blank_patches(whole(images, self.patches), masked)
        tokens = encode(self.encoder, view, mask_token=self.mask_token)
        return self.head(take(tokens, masked + self.prefix))

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """The absolute error beside those of each patch's mean colour and of a blurred copy (see MAE's)."""
        visible, masked = self.deal(len(images), generator, images.device)
        target = pixel_targets(images, self.p, masked, self.normalized_pixels)
        errors = pixel_errors(self.recover(images, masked), target, absolute=True)
        yardsticks = trivial_errors(images, self.p, visible, masked, self.normalized_pixels, absolute=True)
        return Measure("absolute error", errors, yardsticks, bar="blurred copy", higher_is_better=False, form=".3f")

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Original | what was given | what came back."""
        visible, masked = self.deal(len(images), generator, images.device)
        return [recovery_sheet(self, images, visible, masked, self.recover(images, masked))]


def patches_of_unit(task: Task, mask_unit: Size) -> int:
    """Patches along a mask unit of ``mask_unit`` pixels.

    Raises:
        PatchloomError: the unit is no multiple of the patch, or does not divide the image.
    """
    usual = 1 if any(side % 2 for side in task.grid) else 2
    why = "two patches, as 32 pixels for patches of 16" if usual == 2 else "one patch, since the grid has odd sides"
    unit = task.choose("mask_unit", mask_unit, usual * task.p, why)
    side = unit // task.p
    if side < 1 or unit % task.p or any(along % side for along in task.grid):
        raise PatchloomError(
            f"mask units of {unit} pixels do not fit {task.grid[0]}x{task.grid[1]} patches of {task.p} pixels: give "
            f"--task.mask_unit a multiple of {task.p} that divides the image"
        )
    return side


def pixel_head(task: Task) -> nn.Linear:
    """One linear layer from a token to the pixels of its patch (SimMIM section 3.3)."""
    head = nn.Linear(task.encoder.embed_dim, task.channels * task.p**2)
    initialize(head)
    return head
