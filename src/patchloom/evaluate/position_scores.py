"""Accuracy and distance of predicted patch positions, by the shares that are withheld, beside chance.

Nothing here depends on a task: a `Place` is any function that predicts positions. Letters: b batch, c channels, h w
height and width, n patches of the grid, k visible patches, m images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from patchloom.data import Batch, normalize
from patchloom.errors import PatchloomError
from patchloom.evaluate.report import Row
from patchloom.nets.weights import EncoderCard
from patchloom.patches.positions import distances
from patchloom.questions.positions import PositionPrediction, chance_accuracy, scores

UNITS = {"top-1": "%", "top-5": "%", "distance": "patches"}  # by measure
CHANCE, CENTRE = "chance", "always the centre"
AVERAGE = "average"


def story_of(noun: str) -> str:
    """What the measures mean, in sentences on images or recordings."""
    of = "image" if noun == "images" else "picture"
    return (
        "Distance is that of the likeliest place from the true one. Chance is exact: a guesser who knows nothing of a "
        f"patch, but never names a position that was given. A second guesser always names the centre of the {of}: only "
        f"a distance below both means something. Intervals are normal, of the means of {noun}, since the patches of "
        "one are not independent."
    )


class Place(Protocol):
    """Predicts the positions of patches of normalised images [b c h w], with the shares ``ratios`` withheld."""

    def __call__(self, images: Tensor, generator: torch.Generator, **ratios: float) -> PositionPrediction: ...


@dataclass(frozen=True)
class Cell:
    """Results for one combination of withheld shares.

    Attributes:
        ratios: the shares, by name.
        values: [m] by measure of `UNITS`: means over each image's patches without position.
        chance: by measure, exact.
        found, asked: [n] by position of the grid: patches that were placed correctly, and all that were asked for.
        offsets: [2 rows - 1, 2 columns - 1] how many patches were put so far from their own place, found ones in the
            middle.
    """

    ratios: dict[str, float]
    values: dict[str, Tensor]
    chance: dict[str, float]
    found: Tensor
    asked: Tensor
    offsets: Tensor = field(default_factory=lambda: torch.empty(0))

    def map(self, grid: tuple[int, int]) -> Tensor:
        """[rows columns] accuracy by position of the grid; nan where no patch was asked for."""
        return (self.found / self.asked).view(grid)

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy in [0, 1], averaged over images."""
        return self.values["top-1"].mean().item()


def offsets_of(placed: PositionPrediction, grid: tuple[int, int]) -> Tensor:
    """How many patches were put so far off, as `Cell` has them: [2 rows - 1, 2 columns - 1] float64."""
    rows, columns = grid
    guess, own = placed.places().cpu(), placed.visible.cpu()
    down = guess // columns - own // columns + rows - 1
    along = guess % columns - own % columns + columns - 1
    where = (down * (2 * columns - 1) + along)[placed.dropped.cpu()]
    return where.bincount(minlength=(2 * rows - 1) * (2 * columns - 1)).double().view(2 * rows - 1, 2 * columns - 1)


def chance(grid: tuple[int, int], given: int) -> dict[str, float]:
    """Expected scores of uniform guessing among the positions that are not ``given``."""
    n = grid[0] * grid[1]
    others = distances(grid).double().sum().item() / (n * (n - 1))  # between two patches
    hit = chance_accuracy(n, given)
    return {"top-1": hit, "top-5": min(5 * hit, 1.0), "distance": (1 - hit) * others}


def centre_distance(grid: tuple[int, int]) -> float:
    """Expected distance, in patches, when the position with the smallest mean distance is always predicted."""
    return distances(grid).double().mean(0).min().item()


def normalized(batches: Iterable[Batch], card: EncoderCard, unreadable: list[str]) -> Iterator[Tensor]:
    """Yield the normalised images of batches; names of unreadable images are added to ``unreadable``."""
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
    """Predict the positions of the patches of all images, once for every combination of the ratios.

    Args:
        place: predicts positions.
        axes: ratios by name; the last one varies fastest.
        grid: rows and columns of patches.
        batches: normalised images [b c h w].
        seed: of what is withheld, the same for every combination.

    Raises:
        PatchloomError: a combination leaves a single patch visible.
    """
    settings = [dict(zip(axes, ratios, strict=True)) for ratios in product(*axes.values())]
    generators = [torch.Generator().manual_seed(seed) for _ in settings]
    n = grid[0] * grid[1]
    values: list[dict[str, list[Tensor]]] = [{name: [] for name in UNITS} for _ in settings]
    found, asked = torch.zeros(2, len(settings), n, dtype=torch.float64)
    off = torch.zeros(len(settings), 2 * grid[0] - 1, 2 * grid[1] - 1, dtype=torch.float64)
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
            off[i] += offsets_of(placed, grid)
            given[i] = int(placed.known()[0])
    return [
        Cell(ratios, {name: torch.cat(parts) for name, parts in values[i].items()}, chance(grid, given[i]), *counts)
        for i, (ratios, *counts) in enumerate(zip(settings, found, asked, off, strict=True))
    ]


def rows_of(protocol: str, cells_of: Mapping[str, Sequence[Cell]], grid: tuple[int, int]) -> list[Row]:
    """Rows of every measure: for each encoder its cells, and their average if there are several; then for guessing."""
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
    """The ratios of each cell with its values [m] or []; with several cells also their average per image."""
    found: list[tuple[dict[str, Any], Tensor]] = [(c.ratios, v) for c, v in zip(cells, values, strict=True)]
    if len(cells) > 1:
        found.append((dict.fromkeys(cells[0].ratios, AVERAGE), torch.stack(values).mean(0)))
    return found


def _said(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {ratio:g}" for name, ratio in ratios.items())
