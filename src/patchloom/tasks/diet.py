"""DIET: which image was it? (Balestriero 2023, arXiv 2302.10260; on public weights: DIET-CP, arXiv 2509.06990)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from patchloom.data.augment import ColoredCrop
from patchloom.errors import PatchloomError
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.tasks import DIETOptions
from patchloom.questions.identity import Identity
from patchloom.questions.question import ROWS, Encoded, Measure, Outcome, Sheet
from patchloom.system.distributed import rank
from patchloom.tasks.task import Task, augment_views, views_sheet
from patchloom.withhold.encoder_input import EncoderInput, all_patches

_MOST = 2**16  # images: the head and its logits grow with them, and DIET is for small sets
# on 1,365 digits the measure stayed at chance for 200 updates, and beat raw pixels after 640 to 960
_UPDATES = (1_000, "it stays near chance for hundreds of updates")
_OUTSIDE_A_RUN = 1000  # classes where there is no training set, as in `patchloom bench`
_SHIFT = 0.1  # largest shift of a recording for a view, as a share of its length


class DIET(Task):
    """Classification of views: which image of the training set is it? For small sets, one class per image.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: too many images, or a smoothing that leaves nothing to learn.
    """

    uses_indices: ClassVar[bool] = True
    encoder: PlainViT

    @takes(DIETOptions)
    def __init__(self, encoder: PlainViT, options: DIETOptions) -> None:
        super().__init__(encoder, options)
        count = self.resolve_auto("images", options.images, _OUTSIDE_A_RUN, "there is no training set")
        if options.color == "own":
            self.augment = ColoredCrop(self.augment.size)
        self.questions["identity"] = Identity(self.geometry, count, options.smoothing)

    @classmethod
    def data_defaults(cls, options: Mapping[str, Any], n: int, noun: str) -> dict[str, tuple[Any, str]]:
        """Return the number of classes: that of the training images."""
        if n > _MOST:
            raise PatchloomError(
                f"diet has one class per training image, up to {_MOST:,}, and there are {n:,} {noun}: choose another "
                "--task, or give a part of them"
            )
        if options["images"] not in ("auto", n):
            raise PatchloomError(
                f"--task.images {options['images']}: there are {n:,} training {noun}, so leave the option out"
            )
        return {"task.images": (n, f"one class for each of the training {noun}")}

    @classmethod
    def updates_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return enough updates to leave chance, where the task stays for the first hundreds."""
        return _UPDATES

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return all patches: the view itself withholds."""
        return all_patches(images, self.geometry.n)

    def forward(  # type: ignore[override]  # it also takes indices
        self,
        view: Tensor,
        *,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        given: EncoderInput | None = None,
        indices: Tensor | None = None,
    ) -> Outcome:
        """Return the loss of a step.

        Args:
            view: [b c h w] one view of each image.
            progress, generator, given: as for `Task.forward`.
            indices: int64 [b] places of the images in the training set; None: they are its first ones.
        """
        if indices is None:
            first = rank() * len(view)
            indices = torch.arange(first, first + len(view), device=view.device) % self.identity.images
        given = replace(given or self.given(view), targets={"identity": indices})
        return super().forward(view, progress=progress, generator=generator, given=given)

    @property
    def identity(self) -> Identity:
        """Question of the task."""
        return cast(Identity, self.questions["identity"])

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """Measure how often two views of one of the ``images`` find each other among those of all."""
        return self.identity.measure(self._encoded(torch.cat(self._two_views(images, generator))))

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Draw two views of some images, and their nearest neighbours."""
        one, two = self._two_views(images[:ROWS], generator)
        views: dict[str, tuple[Tensor, Tensor | None]] = {self.modality.item: (images[:ROWS], None)}
        views |= {"view 1": (one, None), "view 2": (two, None)}
        caption = f"Input of two training steps. Every view is of the class of its {self.modality.item}."
        return [views_sheet(self.geometry, views, caption), *self.identity.sheets(self._encoded(images))]

    def _encoded(self, images: Tensor) -> Encoded:
        return self.encode(images, self.given(images))

    def _two_views(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return two views [b c h w] of each image; of recordings, two random shifts."""
        if self.modality.resizable:
            return augment_views(self, images, generator)[0], augment_views(self, images, generator)[0]
        most = max(1, round(_SHIFT * images.shape[-1]))
        by = torch.randint(-most, most + 1, (2, len(images)), generator=generator).tolist()
        one, two = (torch.stack([x.roll(k, -1) for x, k in zip(images, each, strict=True)]) for each in by)
        return one, two
