"""Where were these patches? Found positions and how far off the others are, against how much is withheld.

Nothing here knows of tasks: a `Place` is any function that places patches. Letters as in `patchloom.patches`; m images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from patchloom.data import Batch, normalize
from patchloom.errors import PatchloomError
from patchloom.evaluate.report import Row
from patchloom.nets.weights import EncoderCard
from patchloom.patches.positions import distances
from patchloom.questions.positions import PositionPrediction, chance_accuracy

UNITS = {"top-1": "%", "top-5": "%", "distance": "patches"}  # by measure
CHANCE, CENTRE = "chance", "always the centre"
AVERAGE = "average"

STORY = (
    "Distance is that of the likeliest place from the true one. Chance is exact: a guesser who knows nothing of a "
    "patch, but never names a position that was given. A second guesser always names the centre of the image: only a "
    "distance below both means something. Intervals are normal, of the means of images, since the patches of one image "
    "are not independent."
)


class Place(Protocol):
    """Places patches of normalised images [b c h w], when shares of what could be known are withheld."""

    def __call__(self, images: Tensor, generator: torch.Generator, **ratios: float) -> PositionPrediction: ...


@dataclass(frozen=True)
class Cell:
    """What was found with certain shares withheld.

    Attributes:
        ratios: the shares, by name.
        values: [m] by measure of `UNITS`, each image's mean over its patches without position.
        chance: by measure, exact.
        found, asked: [n] how many patches of each place were found, and how many were asked for.
    """

    ratios: dict[str, float]
    values: dict[str, Tensor]
    chance: dict[str, float]
    found: Tensor
    asked: Tensor

    def map(self, grid: tuple[int, int]) -> Tensor:
        """[rows columns] share of the patches of each place that are found; nan where none was asked for."""
        return (self.found / self.asked).view(grid)

    @property
    def accuracy(self) -> float:
        """Mean top-1 accuracy of the images."""
        return self.values["top-1"].mean().item()


def scores(placed: PositionPrediction, grid: tuple[int, int]) -> dict[str, Tensor]:
    """Each measure of `UNITS` [b k] for every patch, asked or not."""
    best = placed.logits.topk(min(5, placed.logits.shape[-1]), dim=-1).indices
    right = best == placed.visible[..., None]
    apart = distances(grid, best.device)[placed.visible, best[..., 0]]
    return {"top-1": right[..., 0].float(), "top-5": right.any(-1).float(), "distance": apart}


def chance(grid: tuple[int, int], given: int) -> dict[str, float]:
    """Expected scores of a guesser who never names one of the ``given`` positions, and all others alike."""
    n = grid[0] * grid[1]
    others = distances(grid).double().sum().item() / (n * (n - 1))  # between two patches
    hit = chance_accuracy(n, given)
    return {"top-1": hit, "top-5": min(5 * hit, 1.0), "distance": (1 - hit) * others}


def centre_distance(grid: tuple[int, int]) -> float:
    """Expected distance of a guesser who always names the patch that is nearest to all."""
    return distances(grid).double().mean(0).min().item()


def normalized(batches: Iterable[Batch], card: EncoderCard, unreadable: list[str]) -> Iterator[Tensor]:
    """The images of batches, normalised; names of those that could not be read are added to ``unreadable``."""
    for batch in batches:
        unreadable += batch.unreadable
        yield normalize(batch.views[0], card.mean, card.std)


@torch.inference_mode()
def measure_positions(
    place: Place,
    axes: Mapping[str, Sequence[float]],
    grid: tuple[int, int],
    batches: Iterable[Tensor],
    seed: int,
) -> list[Cell]:
    """Place the patches of all images once at every combination of the ratios.

    Args:
        place: places patches.
        axes: ratios by name; the last one varies fastest.
        grid: rows and columns of patches.
        batches: normalised images [b c h w].
        seed: of what is withheld, the same for every combination.

    Raises:
        PatchloomError: so few patches are visible that none can be placed by another.
    """
    settings = [dict(zip(axes, ratios, strict=True)) for ratios in product(*axes.values())]
    generators = [torch.Generator().manual_seed(seed) for _ in settings]
    n = grid[0] * grid[1]
    values: list[dict[str, list[Tensor]]] = [{name: [] for name in UNITS} for _ in settings]
    found, asked = torch.zeros(2, len(settings), n, dtype=torch.float64)
    given = [0] * len(settings)
    for images in batches:
        for i, (ratios, generator) in enumerate(zip(settings, generators, strict=True)):
            placed = place(images, generator, **ratios)
            if placed.visible.shape[1] < 2:
                raise PatchloomError(
                    f"of {n} patches only one would be visible ({_said(ratios)}), with nothing to be placed by: "
                    "train a run with smaller patches or larger images"
                )
            dropped = placed.dropped.cpu()
            # float64 from here on, which not every device has
            each = {name: score.cpu().double() * dropped for name, score in scores(placed, grid).items()}
            for name, score in each.items():
                values[i][name].append(score.sum(1) / dropped.sum(1))
            where = placed.visible.flatten().cpu()
            found[i].index_add_(0, where, each["top-1"].flatten())
            asked[i].index_add_(0, where, dropped.double().flatten())
            given[i] = int(placed.known()[0])
    return [
        Cell(ratios, {name: torch.cat(parts) for name, parts in values[i].items()}, chance(grid, given[i]), *counts)
        for i, (ratios, *counts) in enumerate(zip(settings, found, asked, strict=True))
    ]


def rows_of(protocol: str, cells_of: Mapping[str, Sequence[Cell]], grid: tuple[int, int]) -> list[Row]:
    """Rows of every measure: the encoders' cells, each with their average if there are several, and the guessers'."""
    rows = []
    for name, unit in UNITS.items():
        for encoder, cells in cells_of.items():
            for ratios, values in _with_average(cells, [cell.values[name] for cell in cells]):
                rows.append(Row.of_means(encoder, protocol, {"measure": name, **ratios}, values.tolist(), unit))
        cells = next(iter(cells_of.values()))
        levels = [torch.tensor(cell.chance[name], dtype=torch.float64) for cell in cells]
        for ratios, level in _with_average(cells, levels):
            rows.append(Row.exact(CHANCE, protocol, {"measure": name, **ratios}, level.item(), unit))
        if name == "distance":
            rows.append(Row.exact(CENTRE, protocol, {"measure": name}, centre_distance(grid), unit))
    return rows


def _with_average(cells: Sequence[Cell], values: list[Tensor]) -> list[tuple[dict[str, Any], Tensor]]:
    """The ratios of each cell with its values [m] or []; with several cells also their average, image by image."""
    found: list[tuple[dict[str, Any], Tensor]] = [(c.ratios, v) for c, v in zip(cells, values, strict=True)]
    if len(cells) > 1:
        found.append((dict.fromkeys(cells[0].ratios, AVERAGE), torch.stack(values).mean(0)))
    return found


def _said(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {ratio:g}" for name, ratio in ratios.items())
