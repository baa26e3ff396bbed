"""Removal of the place from patch features after training (RASA, Venkataramanan et al. 2025), in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

ROUNDS = 8  # the paper's; more lower the accuracy of segmentation
_SOLVED = 0.01  # R² below which no place is left
_IMAGES, _TESTED, _BATCH = 500, 100, 50


class ProbeScore(NamedTuple):
    """Score of a linear probe of the place: R², mean over the axes, and mean distance in patches."""

    r2: float
    distance: float


@dataclass(frozen=True)
class PositionRemoval:
    """Linear map of patch tokens after the final norm, from which a linear probe cannot read the place.

    Attributes:
        weight: [d d] the map, float32: token -> weight @ token.
        rounds: number of rounds, each of which removes one direction per axis of the grid.
        before, after: scores of fresh probes of the tokens and of their images under the map.
        chance: mean distance in patches of the middle of the grid, the answer without any knowledge.
        images, tested: number of images that the directions and probes are fitted to, and of others that they are
            tested on.
        noun: noun of the images.
    """

    weight: Tensor
    rounds: int
    before: ProbeScore
    after: ProbeScore
    chance: float
    images: int
    tested: int
    noun: str

    def sentence(self) -> str:
        """Return a sentence on the scores."""
        before, after = self.before, self.after
        return (
            f"A linear probe of the place: R² {before.r2:.2f} before, {after.r2:.2f} after; {before.distance:.2f} and "
            f"{after.distance:.2f} patches off (the middle is {self.chance:.2f} off). {self.rounds} rounds on "
            f"{self.images} {self.noun}, tested on {self.tested} others."
        )

    def plain(self) -> dict[str, Any]:
        """Return the scores as values for JSON."""
        return {
            "rounds": self.rounds,
            "before": self.before._asdict(),
            "after": self.after._asdict(),
            "chance": self.chance,
            "images": self.images,
            "tested": self.tested,
        }


class _Moments:
    """Means and covariances of tokens and of their places, in float64."""

    def __init__(self, places: Tensor):
        self.places = places.double()  # [n a]
        self.count = 0
        self.sums: list[Tensor] = []

    def add(self, tokens: Tensor) -> None:
        """Add tokens [b n d] in the order of the grid."""
        z, r = tokens.double(), self.places
        new = [z.sum((0, 1)), torch.einsum("bnd,bne->de", z, z), torch.einsum("bnd,na->da", z, r)]
        self.sums = [a + b for a, b in zip(self.sums, new, strict=True)] if self.sums else new
        self.count += len(z) * len(r)

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean [d], the covariance [d d], and the covariance with the places [d a]."""
        mean, square, cross = (one / self.count for one in self.sums)
        return mean, square - torch.outer(mean, mean), cross - torch.outer(mean, self.places.mean(0))


def probe(covariance: Tensor, cross: Tensor) -> Tensor:
    """Return the weights [a d] of the least-squares probe of the places."""
    return cross.T @ torch.linalg.pinv(covariance, rtol=1e-9, hermitian=True)


def directions_removed(moments: tuple[Tensor, Tensor, Tensor], done: Tensor) -> Tensor:
    """Return the map [d d] after one more round: without the directions of a probe of what the map ``done`` left."""
    _, covariance, cross = moments
    weights = probe(done @ covariance @ done.T, done @ cross)
    basis = torch.linalg.qr(weights.T).Q  # Gram-Schmidt
    return done - basis @ (basis.T @ done)


def remove_positions(
    tokens: Callable[[], Iterator[Tensor]],
    tested: Tensor,
    grid: tuple[int, int],
    noun: str = "images",
) -> PositionRemoval:
    """Find the map that removes the place from tokens, in rounds, until a fresh probe finds none in other tokens.

    Args:
        tokens: function that yields tokens [b n d] of batches of images, in the order of the grid.
        tested: [b n d] tokens of other images.
        grid: rows and columns of patches.
        noun: noun of the images.

    Raises:
        PatchloomError: if the grid has a single patch.
    """
    axes = [axis for axis, side in enumerate(grid) if side > 1]
    if not axes:
        raise PatchloomError("a single patch has no place to remove: leave out --without_positions")
    index = torch.arange(grid[0] * grid[1])
    places = torch.stack([index // grid[1], index % grid[1]], 1)[:, axes].double()
    moments = _Moments(places)
    for batch in tokens():
        moments.add(batch)
    found = moments.centred()
    mean, covariance, cross = found

    def score(done: Tensor) -> ProbeScore:
        weights = probe(done @ covariance @ done.T, done @ cross)
        guess = (tested.double() - mean) @ done.T @ weights.T + places.mean(0)
        off = guess - places
        r2 = 1 - off.square().mean((0, 1)) / (places - places.mean(0)).square().mean(0)
        return ProbeScore(r2.mean().item(), off.norm(dim=-1).mean().item())

    done = torch.eye(len(mean), dtype=torch.float64)
    before = after = score(done)
    rounds = 0
    while rounds < ROUNDS and after.r2 > _SOLVED and (rounds + 1) * len(axes) < len(mean):
        done = directions_removed(found, done)
        after = score(done)
        rounds += 1
    chance = (places - places.mean(0)).norm(dim=-1).mean().item()
    images = moments.count // len(places)
    return PositionRemoval(done.float(), rounds, before, after, chance, images, len(tested), noun)


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
    return remove_positions(lambda: encoded(mixed[tested:]), others, grid_size(vit), source.noun)


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
