"""PART: relative translations between randomly placed patches (Ayoughi et al. 2025, arXiv 2506.03682)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.build import initialize
from patchloom.nets.geometry import Geometry
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.refusals import PAPERS
from patchloom.options.tasks import Head, PARTOptions
from patchloom.patches.partition import random_partition
from patchloom.patches.tokens import patchify, unpatchify
from patchloom.questions.question import ROWS, Encoded, Measure, Outcome, Question, Sheet
from patchloom.sizes import share_of
from patchloom.system.distributed import draw
from patchloom.tasks.task import TaskWithoutPositions
from patchloom.withhold.encoder_input import EncoderInput, all_patches, drop_positions, limit_context

_FEWEST = 2048  # pairs; with 64 of them a trained copy of the program learnt too little


class PairHead(nn.Module):
    """Head from the tokens z_r and z_t of two patches to the translation from the first to the second.

    attention: q = Linear([z_r; z_t]) of every pair attends with one head to the tokens of all patches, then a linear
    layer. linear: a linear layer on [z_r; z_t].

    With one head the output is linear in the values, and the scores are a sum over both patches. So all linear layers
    run once per patch instead of once per pair, with the same result; a pair costs a softmax over the patches.
    """

    def __init__(self, width: int, kind: Head):
        super().__init__()
        self.query = nn.Linear(2 * width, width if kind == "attention" else 2)
        # holds the weights; calling it would project every pair
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True) if kind == "attention" else None
        self.answer = nn.Linear(width, 2) if kind == "attention" else None
        initialize(self)

    def forward(self, patches: Tensor, pairs: Tensor) -> Tensor:
        """Return translations [b m 2] in rows and columns between ``pairs`` [m 2] of ``patches`` [b n d]."""
        parts = [F.linear(patches, half) for half in self.query.weight.chunk(2, dim=1)]
        parts[0] = parts[0] + self.query.bias
        if self.attention is None or self.answer is None:
            return _of_pairs(parts, pairs).float()
        weights, biases = (one.chunk(3) for one in (self.attention.in_proj_weight, self.attention.in_proj_bias))
        keys, values = (F.linear(patches, weights[i], biases[i]) for i in (1, 2))
        queries = F.linear(parts[0], weights[0], biases[0]), F.linear(parts[1], weights[0])
        scores = [q @ keys.mT * keys.shape[-1] ** -0.5 for q in queries]
        answers = self.answer(self.attention.out_proj(values))
        return (_of_pairs(scores, pairs).softmax(-1) @ answers).float()


def _of_pairs(parts: Sequence[Tensor], pairs: Tensor) -> Tensor:
    """Add what the first and the second patch of ``pairs`` [m 2] contribute, twice [b n ...]: [b m ...]."""
    first, second = (part.index_select(1, one) for part, one in zip(parts, pairs.unbind(1), strict=True))
    return first + second


class Translations(Question):
    """Prediction of the translation between the patches of random pairs, in patch sides: rows, columns.

    ``encoded.given.targets`` has the ``corners`` [b n 2] of the patches in pixels, and the ``pairs`` [b m 2], which are
    the same for all images.

    Args:
        geometry: geometry of the encoder.
        head: head of the pairs.
    """

    def __init__(self, geometry: Geometry, head: Head):
        super().__init__(geometry)
        self.head = PairHead(geometry.width, head)

    def places(self, encoded: Encoded) -> Tensor:
        """Return the corners [b n 2] of the patches in patch sides."""
        corners = encoded.given.targets["corners"].float()
        return torch.stack([corners[..., 0] / self.geometry.p[0], corners[..., 1] / self.geometry.p[1]], dim=-1)

    def answer(self, encoded: Encoded, pairs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return predicted and true translations [b m 2] of ``pairs`` [m 2]; None: those of the input."""
        pairs = encoded.given.targets["pairs"][0] if pairs is None else pairs
        places = self.places(encoded)
        truth = _of_pairs((-places, places), pairs)
        return self.head(encoded.tokens[:, self.geometry.prefix :], pairs), truth

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the mean squared error over pairs and both directions; R² of the batch is a metric."""
        found, truth = self.answer(encoded)
        loss = F.mse_loss(found, truth)
        return Outcome(loss, {"translation_r2": 1 - loss.detach() / truth.square().mean().clamp_min(1e-6)})

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the squared error, in squared patch sides, beside that of the best constant, which is zero.

        Its expectation in a direction with M places is (M² - 1) / 6 squared pixels for two different patches. Details
        are squares on the same scale, 0 if the answers are those of one arrangement: d(i, i), d(i, j) + d(j, i), and
        d(i, j) + d(j, k) - d(i, k).
        """
        found, truth = self.answer(encoded)
        i, j = encoded.given.targets["pairs"][0].unbind(-1)
        k = j.roll(1)

        def d(one: Tensor, other: Tensor) -> Tensor:
            return self.answer(encoded, torch.stack([one, other], dim=-1))[0]

        there = d(i, j)
        wrong = {
            "self": d(i, i),
            "antisymmetry": there + d(j, i),
            "additivity": there + d(j, k) - d(i, k),
        }
        return Measure(
            "squared translation error",
            _mean_square(found - truth),
            {"no translation": _mean_square(truth)},
            "no translation",
            higher_is_better=False,
            unit="",
            details={name: _mean_square(one) for name, one in wrong.items()},
        )

    def arrangement(self, encoded: Encoded) -> Tensor:
        """Return the corners [b n 2] in patch sides that fit the predictions of all pairs best (least squares).

        Translations leave the centre open: it is that of the true corners.
        """
        b, n = encoded.given.visible.shape
        every = torch.arange(n, device=encoded.tokens.device)
        sums = encoded.tokens.new_zeros(b, n, 2, dtype=torch.float32)
        for i in range(n):  # one reference at a time, since all n² pairs may not fit in memory
            found = self.answer(encoded, torch.stack([torch.full_like(every, i), every], dim=-1))[0]
            sums += found
            sums[:, i] -= found.sum(1)
        places = self.places(encoded)
        # without consistency the best fit is half of the mean of d(i, j) - d(j, i) over all i
        return sums / (2 * n) + places.mean(1, keepdim=True)

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw the patches at their true corners, and where the predictions of all pairs put them."""
        g, p = self.geometry, self.geometry.p
        crops = patchify(encoded.given.images, p)
        truth = encoded.given.targets["corners"]
        sides = torch.tensor(p, device=truth.device)
        most = torch.tensor(g.size, device=truth.device) - sides
        places = self.arrangement(encoded)
        found = torch.minimum((places * sides).round().long().clamp_min(0), most)
        true = self.places(encoded)
        off, heap = ((one - true).norm(dim=-1).mean().item() for one in (places, true.mean(1, keepdim=True)))
        columns = {
            encoded.modality.item: encoded.images,
            "given": encoded.given.images,
            "true places": place_crops(crops, truth, p, g.size),
            "predicted places": place_crops(crops, found, p, g.size),
        }
        caption = (
            "Given: patches cut at random places, overlapping, in random order. Then: each patch at its true place, "
            "and where the predicted translations of all pairs put it (least squares; the centre is the true one). The "
            f"mean where several overlap. The mean distance between both is {off:.2f} patch sides; with all patches at "
            f"the centre it would be {heap:.2f}."
        )
        return [
            Sheet(
                "arranged",
                caption,
                columns,
                "no patch there",
                "Patches at their predicted places",
                "Patches were cut at random places and placed by the model. If all lie in the middle, nothing was "
                "learnt.",
            )
        ]


class PART(TaskWithoutPositions):
    """Prediction of the translations between patches that are cut at random places, off any grid.

    Args:
        encoder: ViT to train; without position embeddings. Rotations (RoPE) are withheld.

    Raises:
        PatchloomError: an encoder with position embeddings, no pairs, or no patches as context.
    """

    encoder: PlainViT

    @takes(PARTOptions)
    def __init__(self, encoder: PlainViT, options: PARTOptions) -> None:
        super().__init__(encoder, options)
        n = self.geometry.n
        usual, why = n**2 // 8, PAPERS
        if usual < _FEWEST:
            usual, why = min(_FEWEST, n**2), f"at least {_FEWEST:,}, or all {n**2:,}"
        self.pairs = self.resolve_auto("pairs", options.pairs, usual, why)
        self.context = share_of(n, 1 - options.context_mask_ratio)
        self.questions["translations"] = Translations(self.geometry, options.head)

    @classmethod
    def encoder_defaults(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Return no positions, because none enter."""
        return {"positions": ("none", "part withholds all of them")}

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return patches cut at random places, packed into images of the same size, without positions."""
        g, b, device = self.geometry, len(images), images.device
        n = g.n
        u = draw(torch.rand, (b, n, 2), generator, device).to(device, non_blocking=True)
        room = [side - p + 1 for side, p in zip(g.size, g.p, strict=True)]
        corners = torch.stack(
            [(u[..., axis] * count).long().clamp(max=count - 1) for axis, count in enumerate(room)], dim=-1
        )
        # the same pairs in all processes, unlike draws that have a row for each image
        noise = torch.rand(n**2, generator=generator, device=device if generator is None else generator.device)
        order = noise.argsort()[: self.pairs].to(device, non_blocking=True)
        pairs = torch.stack([order // n, order % n], dim=-1).expand(b, -1, 2)
        packed = unpatchify(cut_crops(images, corners, g.p), g.p, g.grid)
        given = replace(all_patches(packed, n), targets={"corners": corners, "pairs": pairs})
        given = drop_positions(given, given.visible)
        if self.context == n:
            return given
        return limit_context(given, random_partition(b, n, (self.context,), generator, device)[0])

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Draw the arrangement of the patches of the first images."""
        return super().draw(images[:ROWS], generator)


def _mean_square(values: Tensor) -> Tensor:
    """Return the mean square [b] of values [b m 2]."""
    return values.square().mean((1, 2))


def _pixels(corners: Tensor, p: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return rows [b n p 1] and columns [b n 1 p] of the pixels of patches at ``corners`` [b n 2]."""
    rows, columns = (torch.arange(side, device=corners.device) for side in p)
    return corners[..., 0, None, None] + rows[:, None], corners[..., 1, None, None] + columns


def cut_crops(images: Tensor, corners: Tensor, p: tuple[int, int]) -> Tensor:
    """Cut the patches at ``corners`` [b n 2] of images [b c h w]: flat [b n c*p[0]*p[1]], as `patchify` has them."""
    which = torch.arange(len(images), device=images.device)[:, None, None, None]
    return images.movedim(1, -1)[which, *_pixels(corners, p)].movedim(-1, 2).flatten(2)


def place_crops(crops: Tensor, corners: Tensor, p: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Paint flat patches [b n c*p[0]*p[1]] at ``corners`` [b n 2] of empty images [b c h w]; the mean of overlaps."""
    rows, columns = _pixels(corners, p)
    at = (rows * size[1] + columns).flatten(1)[:, None]
    values = crops.unflatten(2, (-1, p[0] * p[1])).movedim(2, 1).flatten(2)
    sums = values.new_zeros(len(crops), values.shape[1], size[0] * size[1])
    count = sums[:, :1].scatter_add(2, at, torch.ones_like(values[:, :1]))
    painted = sums.scatter_add(2, at.expand_as(values), values) / count  # 0 / 0 is nan: empty
    return painted.unflatten(2, size)
