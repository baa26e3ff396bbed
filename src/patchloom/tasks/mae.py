"""MAE: masked autoencoders are scalable vision learners (He et al., CVPR 2022)."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.nets.decode import RefillingDecoder
from patchloom.nets.encode import encode
from patchloom.objectives.pixels import (
    guessed_statistics,
    paint_patches,
    pixel_errors,
    pixel_loss,
    pixel_targets,
    recovered_images,
    trivial_errors,
)
from patchloom.tasks.measure import Measure
from patchloom.tasks.task import WITHHELD, Outcome, Sheet, Size, Task
from patchloom.views.positions import sincos_2d
from patchloom.views.tokens import deal, patch_statistics, patchify
from patchloom.views.view import mask_patches, whole


class MAE(Task):
    """Most patches are removed; their pixels are asked.

    Args:
        encoder: the ViT to train.
        mask_ratio: share γ of the patches that is removed.
        normalized_pixels: ask for pixels normalised within each patch instead of plain ones.
        decoder_width: width of the decoder; auto: 512, or the encoder's own below ViT-S.
        decoder_depth: transformer blocks of the decoder; auto: 8, or 2 below ViT-S.
        decoder_heads: attention heads of the decoder; auto: 16, or one for every 32 channels below ViT-S.

    Raises:
        PatchloomError: the mask ratio leaves nothing visible or nothing masked.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        mask_ratio: float = 0.75,
        normalized_pixels: bool = True,
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
    ):
        super().__init__(encoder)
        visible = self.visible_of(mask_ratio)
        check_masks_something(self, visible, mask_ratio)
        self.hands = (visible, self.patches - visible)
        if normalized_pixels:
            self.check_normalizable()
        self.normalized_pixels = normalized_pixels
        self.decoder = pixel_decoder(self, decoder_width, decoder_depth, decoder_heads)

    def forward(self, images: Tensor, *, progress: float = 0.0, generator=None, hands=None) -> Outcome:
        """The loss on one batch; ``hands`` fixes the visible and masked patches ([b k], [b m]) instead of drawing."""
        visible, masked = hands or deal(len(images), self.patches, self.hands, generator, images.device)
        predicted = self.recover(images, visible, masked)
        loss = pixel_loss(predicted, pixel_targets(images, self.p, masked, self.normalized_pixels))
        return Outcome(loss, {})

    def recover(self, images: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """Predicted pixels [b m c*p*p] of the ``masked`` patches [b m] from the ``visible`` ones [b k]."""
        view = mask_patches(whole(images, self.patches), visible)
        return self.decoder(encode(self.encoder, view), visible, masked)

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """The reconstruction error beside those of each patch's mean colour and of a blurred copy.

        The mean colour of a masked patch is nothing that the network is told, so it is the blurred copy that counts.
        """
        hands = deal(len(images), self.patches, self.hands, generator, images.device)
        target = pixel_targets(images, self.p, hands[1], self.normalized_pixels)
        errors = pixel_errors(self.recover(images, *hands), target)
        yardsticks = trivial_errors(images, self.p, *hands, self.normalized_pixels)
        return Measure(
            "reconstruction error", errors, yardsticks, bar="blurred copy", higher_is_better=False, form=".3f"
        )

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Original | what was given | what came back."""
        visible, masked = deal(len(images), self.patches, self.hands, generator, images.device)
        return [recovery_sheet(self, images, visible, masked, self.recover(images, visible, masked))]


def pixel_decoder(
    task: Task,
    width: Size,
    depth: Size,
    heads: Size,
    depth_option: str = "decoder_depth",
    usual: tuple[int, int, int] = (512, 8, 16),
    refills: bool = True,
    visible_asked: int = 0,
) -> RefillingDecoder:
    """A decoder that asks for the pixels of ``task``'s patches; ``usual`` are the paper's width, depth and heads.

    ``refills`` and ``visible_asked`` are as for `RefillingDecoder`: by default those patches answer that the encoder
    did not see.

    Raises:
        PatchloomError: sizes that do not go together, or nothing that is asked would reach the encoder.
    """
    width, depth, heads = task.decoder_sizes(width, depth, heads, usual, depth_option)
    if not depth and not visible_asked:
        raise PatchloomError(
            "without a block in the decoder, a masked patch's pixels are guessed from its place alone and the encoder "
            f"learns nothing by them: give --task.{depth_option} 1 or more"
        )
    positions = sincos_2d(width, task.grid)
    pixels = task.channels * task.p**2
    return RefillingDecoder(
        task.encoder.embed_dim, pixels, positions, depth, heads, task.prefix, refills, visible_asked
    )


def check_masks_something(task: Task, visible: int, mask_ratio: float) -> None:
    """Refuse a mask ratio that leaves all of ``task``'s patches visible.

    Raises:
        PatchloomError: nothing is masked.
    """
    if visible == task.patches:
        raise PatchloomError(f"a mask ratio of {mask_ratio} masks nothing: raise --task.mask_ratio")


def recovery_sheet(task: Task, images: Tensor, visible: Tensor, masked: Tensor, predicted: Tensor) -> Sheet:
    """The sheet original | given | recovered of a task that has ``normalized_pixels``."""
    columns = {"original": images, "given": paint_patches(images, task.p, masked, WITHHELD)}
    caption = f"{masked.shape[1] / task.patches:.0%} of the patches are masked; visible patches are the original's."
    if task.normalized_pixels:
        own = patch_statistics(patchify(images, task.p, masked))
        guessed = guessed_statistics(images, task.p, visible, masked)
        columns["recovered, own statistics"] = recovered_images(predicted, images, task.p, masked, own)
        columns["guessed statistics"] = recovered_images(predicted, images, task.p, masked, guessed)
        caption += (
            " Pixels are predicted normalised within each patch. Own statistics: each patch's mean and deviation "
            "come from the original. Guessed: they come from the visible patches around it, so nothing masked is shown."
        )
    else:
        columns["recovered"] = recovered_images(predicted, images, task.p, masked)
    return Sheet("recovered", caption, columns)
