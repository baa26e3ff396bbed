"""Removal of the place from patch features after training, as RASA (Venkataramanan et al. 2025), in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import encode, grid_size, patch_count, prefix_count
from patchloom.nets.swin import Encoder, refuse_hierarchical
from patchloom.withhold.encoder_input import all_patches

_IMAGES, _TESTED, _BATCH = 500, 100, 50


class ProbeScore(NamedTuple):
    """Scores of linear probes of the place: R², mean over the axes, mean distance in patches, and top-1 accuracy."""

    r2: float
    distance: float
    accuracy: float


@dataclass(frozen=True)
class PositionRemoval:
    """Linear map of patch tokens after the final norm, from which a linear probe cannot read row and column.

    Attributes:
        weight: [d d] the map, float32: token -> weight @ token.
        before, after: scores of fresh probes of the tokens and of their images under the map.
        chance: scores of the middle of the grid, and of guessing a place.
        images, tested: number of images that directions and probes are fitted to, and of others that they are tested
            on.
        noun: noun of the images.
    """

    weight: Tensor
    before: ProbeScore
    after: ProbeScore
    chance: ProbeScore
    images: int
    tested: int
    noun: str

    def sentence(self) -> str:
        """Return a sentence on the scores."""
        old, new, chance = self.before, self.after, self.chance
        return (
            f"Linear probes of row and column: R² {old.r2:z.2f} before, {new.r2:z.2f} after; {old.distance:.2f} and "
            f"{new.distance:.2f} patches off (the middle: {chance.distance:.2f}). A linear discriminant of the place: "
            f"{old.accuracy:.1%} before, {new.accuracy:.1%} after (chance {chance.accuracy:.1%}). Fitted to "
            f"{self.images} {self.noun}, tested on {self.tested} others."
        )

    def plain(self) -> dict[str, Any]:
        """Return the scores as values for JSON."""
        scores = {name: getattr(self, name)._asdict() for name in ("before", "after", "chance")}
        return {**scores, "images": self.images, "tested": self.tested}


def remove_positions(
    batches: Iterator[Tensor], tested: Tensor, grid: tuple[int, int], noun: str = "images"
) -> PositionRemoval:
    """Find the map that removes row and column from tokens: the directions that covary with them are projected away.

    Afterwards no linear function of a token covaries with row or column, so no linear probe is better than the middle
    (Shao et al. 2023; Belrose et al. 2023, LEACE, Theorem 3.1).

    Args:
        batches: tokens [b n d] of batches of images, in the order of the grid.
        tested: [b n d] tokens of other images.
        grid: rows and columns of patches.
        noun: noun of the images.

    Raises:
        PatchloomError: if the grid has a single patch.
    """
    axes = [axis for axis, side in enumerate(grid) if side > 1]
    if not axes:
        raise PatchloomError("a single patch has no place to remove: leave out --without_positions")
    n = grid[0] * grid[1]
    index = torch.arange(n)
    places = torch.stack([index // grid[1], index % grid[1]], 1)[:, axes].double()
    offsets = places - places.mean(0)
    count, square, sums = 0, torch.zeros(()), torch.zeros(())
    for batch in batches:
        z = batch.double()
        count, square, sums = count + len(z), square + torch.einsum("bnd,bne->de", z, z), sums + z.sum(0)
    means = sums / count  # of the tokens at each place
    mean = means.mean(0)
    means, covariance = means - mean, square / (count * n) - torch.outer(mean, mean)
    apart, whole = tested.double() - mean, torch.eye(len(mean), dtype=torch.float64)

    def score(done: Tensor) -> ProbeScore:
        """Score a least-squares probe and a linear discriminant of the tokens under the map ``done``."""
        inverse = torch.linalg.pinv(done @ covariance @ done.T, rtol=1e-9, hermitian=True)
        mapped = apart @ done.T @ inverse @ done
        off = mapped @ (means.T @ offsets / n) - offsets
        r2 = 1 - off.square().mean((0, 1)) / offsets.square().mean(0)
        centres = means @ done.T
        within = done @ (covariance - means.T @ means / n) @ done.T
        within = within + 1e-6 * covariance.diagonal().mean() * whole  # invertible
        weights = centres @ torch.linalg.inv(within)
        right = (apart @ done.T @ weights.T - (weights * centres).sum(1) / 2).argmax(-1) == index
        return ProbeScore(r2.mean().item(), off.norm(dim=-1).mean().item(), right.double().mean().item())

    basis = torch.linalg.qr(means.T @ offsets).Q  # Gram-Schmidt
    done = whole - basis @ basis.T
    chance = ProbeScore(0.0, offsets.norm(dim=-1).mean().item(), 1 / n)
    return PositionRemoval(done.float(), score(whole), score(done), chance, count, len(tested), noun)


def remove_positions_of(vit: Encoder, card: EncoderCard, source: Source) -> PositionRemoval:
    """Find the map for an encoder on images of ``source``, flipped and turned at random where a picture may be.

    Without flips and turns, the directions would also hold what the images have in common, such as the sky above.
    """
    plain = refuse_hierarchical(vit, "--without_positions", "leave it out")
    count = min(len(source), _IMAGES + _TESTED)
    if count < 10:
        raise PatchloomError(
            f"--without_positions needs 10 {source.noun} or more, and {source.name} has {len(source)}: give --data"
        )
    drawn = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:count].sort().values
    tested = max(2, round(count * _TESTED / (_IMAGES + _TESTED)))
    mixed = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    size, channels, prefix = card.own_spec.img_size, card.own_spec.channels, prefix_count(vit)

    def encoded(which: Tensor) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(2)
        chosen = source.subset(drawn[which].sort().values.numpy())
        for batch in plain_batches(chosen, size, _BATCH, channels=channels):
            images = normalize(batch.views[0], card.mean, card.std)
            if card.modality.resizable:
                images = turned(images, generator)
            with torch.inference_mode():
                yield encode(plain, all_patches(images, patch_count(plain)))[:, prefix:]

    others = torch.cat(list(encoded(mixed[:tested])))
    return remove_positions(encoded(mixed[tested:]), others, grid_size(vit), source.noun)


def turned(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images [b c h w], each flipped along both axes and, if square, transposed, each with probability 1/2."""
    made = []
    square = images.shape[2] == images.shape[3]
    for image, (rows, columns, across) in zip(
        images, torch.randint(2, (len(images), 3), generator=generator).tolist(), strict=True
    ):
        image = image.flip([axis for axis, flip in ((1, rows), (2, columns)) if flip])
        made.append(image.transpose(1, 2) if across and square else image)
    return torch.stack(made)
