"""LOCA: location of the patches of one crop in another (Caron et al. 2022, arXiv 2212.02400), without its clusters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from timm.layers import Mlp
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.augment import RandomCrop
from patchloom.nets.build import initialize
from patchloom.nets.encode import attention_heads, encode
from patchloom.nets.geometry import Geometry
from patchloom.nets.sparse_attention import cross_attention
from patchloom.nets.swin import PlainViT
from patchloom.nets.teacher import Teacher, no_grad_autocast
from patchloom.options.declare import takes
from patchloom.options.refusals import PAPERS
from patchloom.options.tasks import LOCAOptions
from patchloom.patches.partition import complement, random_partition
from patchloom.patches.pictures import paint_patches, put_together
from patchloom.patches.tokens import gather_tokens, patchify
from patchloom.questions.agreement import momentum_at
from patchloom.questions.question import ROWS, Encoded, Measure, Outcome, Question, Sheet
from patchloom.sizes import share_of
from patchloom.system.distributed import draw, total, world
from patchloom.tasks.defaults import AGREEMENT_UPDATES, momentum_for, teacher_momentum
from patchloom.tasks.task import TaskWithoutPositions
from patchloom.withhold.degrade import sample_affine
from patchloom.withhold.encoder_input import EncoderInput, all_patches, drop_positions, mask_patches

_ENLARGED = 320 / 224  # side of the image from which both crops are cut, relative to theirs
_AREA, _RATIO = (0.32, 1.0), (3 / 4, 4 / 3)  # of a crop, relative to that image


class LocationHead(nn.Module):
    """One block of cross-attention from a query's tokens to a reference's, a norm, and a linear layer to n places."""

    def __init__(self, width: int, heads: int, n: int):
        super().__init__()
        self.norm1, self.norm_reference, self.norm2, self.norm = (nn.LayerNorm(width, eps=1e-6) for _ in range(4))
        self.attn = Attention(width, heads, qkv_bias=True)
        self.mlp = Mlp(width, 4 * width)
        self.answer = nn.Linear(width, n)
        initialize(self)

    def forward(self, query: Tensor, reference: Tensor) -> Tensor:
        """Return logits [b k n] from tokens [b k d] of a query and [b m d] of a reference."""
        tokens = query + cross_attention(self.attn, self.norm1(query), self.norm_reference(reference))
        return self.answer(self.norm(tokens + self.mlp(self.norm2(tokens))))


class Location(Question):
    """Classification of each patch of a query: which patch of the reference covers its centre; none is ignored.

    ``encoded.given.targets`` has the ``reference`` [b c h w], the patches ``seen`` [b m] of it by the head, the true
    ``places`` [b k], and whether they are ``inside`` [b k] the reference.

    Args:
        encoder: the student; the teacher, a moving average of it, encodes the reference.
        momentum: momentum of the teacher at the start; it rises to 1 along a half cosine.
    """

    def __init__(self, encoder: PlainViT, momentum: float):
        super().__init__(Geometry.of(encoder))
        self.momentum, self.teacher = momentum, Teacher(encoder=encoder)
        self.head = LocationHead(self.geometry.width, attention_heads(encoder), self.geometry.n)

    def answer(self, encoded: Encoded) -> Tensor:
        """Return logits [b k n] of the places of the query's patches."""
        targets, prefix = encoded.given.targets, self.geometry.prefix
        reference = targets["reference"]
        with no_grad_autocast(self.teacher, reference):
            tokens = encode(self.teacher.encoder, all_patches(reference, self.geometry.n))[:, prefix:]
        return self.head(encoded.tokens[:, prefix:], gather_tokens(tokens, targets["seen"]))

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the mean cross-entropy over the patches inside the references of all images."""
        logits, places = self.answer(encoded).float(), encoded.given.targets["places"]
        inside = encoded.given.targets["inside"].float()
        each = F.cross_entropy(logits.flatten(0, 1), places.flatten(), reduction="none").view_as(inside)
        counted = (total(inside.sum()) / world()).clamp_min(1)
        right = (logits.argmax(-1) == places) * inside
        return Outcome((each * inside).sum() / counted, {"location_accuracy": right.sum().detach() / counted})

    def after_step(self, progress: float, encoder: Any, applied: float | Tensor = 1.0) -> None:
        """Update the teacher after an update of the weights."""
        self.teacher.follow(momentum_at(progress, self.momentum), applied, encoder=encoder)

    def teacher_modules(self) -> dict[str, nn.Module]:
        """Return the teacher's encoder."""
        return {"encoder": self.teacher.encoder}

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the share of patches that are located, beside answers that need no learning.

        *Most frequent place* is the best single answer for all patches of the batch. *Raw pixels* answers with the
        nearest patch of the whole reference; the network sees a part of it.
        """
        given, n, p = encoded.given, self.geometry.n, self.geometry.p
        places, inside = given.targets["places"], given.targets["inside"]

        def accuracy(answers: Tensor) -> Tensor:
            return ((answers == places) & inside).sum(1) / inside.sum(1).clamp_min(1)

        found = accuracy(self.answer(encoded).argmax(-1))
        often = places[inside].bincount(minlength=n).argmax()
        near = torch.cdist(patchify(given.images, p, given.visible), patchify(given.targets["reference"], p)).argmin(-1)
        baselines = {"chance": torch.full_like(found, 1 / n), "most frequent place": accuracy(often)}
        return Measure(
            "location accuracy",
            found,
            baselines | {encoded.modality.raw: accuracy(near)},
            ("chance", "most frequent place"),
            higher_is_better=True,
        )

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw the query's patches in the reference, at their true and at their predicted places."""
        given, n, p = encoded.given, self.geometry.n, self.geometry.p
        reference, places, inside = (given.targets[name] for name in ("reference", "places", "inside"))
        outside = torch.full_like(places, n)  # left out
        found = self.answer(encoded).argmax(-1)
        columns = {
            "reference": reference,
            "seen by the head": paint_patches(reference, p, complement(given.targets["seen"], n)),
            "query": self.given_picture(given),
            "true places": put_together(given.images, p, given.visible, torch.where(inside, places, outside)),
            "predicted places": put_together(given.images, p, given.visible, torch.where(inside, found, outside)),
        }
        caption = (
            "The query's patches enter without positions. Then: each patch that lies in the reference, at its true "
            "place there and at the predicted one; the mean where several share a place."
        )
        return [
            Sheet(
                "located",
                caption,
                columns,
                "not seen, or no patch placed here",
                "Patches of the query in the reference",
                "The query's patches at their true and at their predicted places. Compare both with the reference.",
            )
        ]


class LOCA(TaskWithoutPositions):
    """Location of the patches of a query crop, seen without positions, in a reference crop that a teacher sees.

    Args:
        encoder: ViT to train; with fixed position embeddings, or rotations (RoPE), for the reference.

    Raises:
        PatchloomError: an encoder without positions or with trained ones, or ratios that leave nothing to see.
    """

    cuts_crops: ClassVar[bool] = True
    encoder: PlainViT

    @takes(LOCAOptions)
    def __init__(self, encoder: PlainViT, options: LOCAOptions) -> None:
        super().__init__(encoder, options)
        g = self.geometry
        self.visible = share_of(g.n, 1 - options.mask_ratio)
        self.seen = share_of(g.n, options.context_ratio)
        self.augment = RandomCrop((round(_ENLARGED * g.size[0]), round(_ENLARGED * g.size[1])))
        self.questions["location"] = Location(encoder, teacher_momentum(self, options.momentum))

    @classmethod
    def training_defaults(cls, options: Mapping[str, Any], updates: int) -> dict[str, tuple[Any, str]]:
        """Return the paper's weight decay, and a momentum that suits short trainings."""
        return {"weight_decay": (0.1, PAPERS), "task.momentum": momentum_for(updates)}

    @classmethod
    def updates_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return enough updates for a teacher that starts as a random network."""
        return AGREEMENT_UPDATES

    @property
    def views(self) -> float:
        """Query and reference."""
        return 2.0

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Cut a query and a reference out of images [b c h w] larger than the encoder's; the query may be mirrored."""
        g, b, device = self.geometry, len(images), images.device
        drawn = draw(torch.rand, (b, 10), generator, device).to(device, non_blocking=True)
        reference, query = random_boxes(drawn[:, :4]), random_boxes(drawn[:, 4:8])
        mirrored = (drawn[:, 8] < 0.5) if self.augment.flip else torch.zeros_like(drawn[:, 8], dtype=torch.bool)
        visible, masked = random_partition(b, g.n, (self.visible, g.n - self.visible), generator, device)
        places, inside = places_in(query, reference, g.grid, mirrored)
        first = (drawn[:, 9:] * (g.n - self.seen + 1)).long().clamp(max=g.n - self.seen)
        targets = {
            "reference": cut_boxes(images, reference, g.size),
            "seen": first + torch.arange(self.seen, device=device),
            "places": gather_tokens(places, visible),
            "inside": gather_tokens(inside, visible),
        }
        given = mask_patches(all_patches(cut_boxes(images, query, g.size, mirrored), g.n), visible, masked)
        given = drop_positions(given, torch.arange(self.visible, device=device).expand_as(visible))
        return replace(given, targets=targets)

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Draw the query's patches in the reference."""
        return super().draw(images[:ROWS], generator)


def random_boxes(drawn: Tensor) -> Tensor:
    """Return boxes [b 4] (top, left, height, width, as shares of the sides) from uniform numbers [b 4] in [0, 1)."""
    area = _AREA[0] + (_AREA[1] - _AREA[0]) * drawn[:, 0]
    low, high = (math.log(end) for end in _RATIO)
    ratio = (low + (high - low) * drawn[:, 1]).exp()
    sides = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], dim=1).clamp(max=1)
    return torch.cat([drawn[:, 2:4] * (1 - sides), sides], dim=1)


def places_in(query: Tensor, reference: Tensor, grid: tuple[int, int], mirrored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the patch of the reference that covers the centre of each patch of the query, for boxes [b 4].

    Returns:
        Places [b n] of the grid, and True [b n] where the centre lies in the reference; elsewhere the nearest place.
    """
    rows, columns = ((torch.arange(side, device=query.device) + 0.5) / side for side in grid)
    along = torch.where(mirrored[:, None], 1 - columns, columns)
    centres = rows.expand(len(query), -1), along
    axes, inside = [], []
    for axis, side in enumerate(grid):
        at = query[:, None, axis] + centres[axis] * query[:, None, axis + 2]
        at = (at - reference[:, None, axis]) / reference[:, None, axis + 2]
        inside.append((at >= 0) & (at < 1))
        axes.append((at * side).floor().long().clamp(0, side - 1))
    places = axes[0][:, :, None] * grid[1] + axes[1][:, None]
    return places.flatten(1), (inside[0][:, :, None] & inside[1][:, None]).flatten(1)


def cut_boxes(images: Tensor, boxes: Tensor, size: tuple[int, int], mirrored: Tensor | None = None) -> Tensor:
    """Cut boxes [b 4] out of images [b c h w] and resize them to ``size``, bilinearly; some are then mirrored."""
    top, left, height, width = boxes.unbind(1)
    across = width if mirrored is None else torch.where(mirrored, -width, width)
    zero = torch.zeros_like(top)
    # from the coordinates of the crop to those of the image, both in [-1, 1]
    rows = [torch.stack([across, zero, 2 * left + width - 1], 1), torch.stack([zero, height, 2 * top + height - 1], 1)]
    return sample_affine(images, torch.stack(rows, 1), size)
