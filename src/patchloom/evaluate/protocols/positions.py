"""Accuracy of a run's own task in predicting positions, over ratios of withheld patches and positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.augment import cuts_natively
from patchloom.data.loader import Batch, plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.display import track_progress
from patchloom.errors import PatchloomError
from patchloom.evaluate.settings import EvalSettings, open_with_notes
from patchloom.look.position_map import Example, draw_position_map
from patchloom.look.sheet import brightness, to_pixels
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.options import protocols
from patchloom.patches.positions import distances
from patchloom.questions.positions import PositionPrediction, Positions, chance_accuracy, scores
from patchloom.results.evaluation import Drawing, Evaluation, note_unreadable
from patchloom.results.result import Result
from patchloom.runs.folder import data_slug
from patchloom.runs.held_out import note_test_overlap, stored_held_out
from patchloom.runs.task import LoadedTask, load_task

# Example patches for the picture of predicted positions, certain and uncertain ones.


_EACH = 4  # of a kind


def choose_examples(
    placed: PositionPrediction, pictures: Tensor, grid: tuple[int, int], each: int = _EACH
) -> list[tuple[str, list[Example]]]:
    """Return some patches of each kind by name: sure and right, between two places, sure and wrong.

    Args:
        placed: predicted positions.
        pictures: [b h w 3] uint8 images.
        grid: rows and columns of patches.
        each: maximal number per kind, each of a different image.
    """
    likely = placed.logits.detach().float().softmax(-1).cpu()
    visible, dropped = placed.visible.cpu(), placed.dropped.cpu()
    (best, second), guess = _two_best(likely)
    right = guess == visible
    # large for the patches to show of each kind
    kinds = {
        "sure, and right": torch.where(right, best, -1.0),
        "between two places": second,
        "sure, and wrong": torch.where(right, -1.0, best),
    }
    found = []
    for name, worth in kinds.items():
        worth = torch.where(dropped, worth, -1.0)
        top, which = worth.max(dim=1)
        images = [i for i in top.argsort(descending=True, stable=True).tolist() if top[i] > 0][:each]
        some = [
            Example(pictures[i].numpy(), int(visible[i, which[i]]), likely[i, which[i]].view(grid).numpy())
            for i in images
        ]
        found.append((name, some))
    return found


def _two_best(likely: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return probabilities [b k] of the likeliest and of the second place, and the likeliest place [b k]."""
    top = likely.topk(min(2, likely.shape[-1]), dim=-1)
    return (top.values[..., 0], top.values[..., -1]), top.indices[..., 0]


# Accuracy and distance of predicted patch positions by withheld fractions, with chance level.


UNITS = {"top-1": "%", "top-5": "%", "distance": "patches"}  # by measure
_CHANCE, _CENTRE = "chance", "always the centre"
_AVERAGE = "average"


def describe_measures(noun: str) -> str:
    """Describe the measures in sentences on images or recordings."""
    of = "image" if noun == "images" else "picture"
    return (
        "Distance is measured from the likeliest place to the true one. Chance is exact, for uniform guesses among the "
        f"positions that were not given. A second baseline always predicts the centre of the {of}: only a distance "
        f"below both is meaningful. Intervals are normal, over means of {noun}, since the patches of one are not "
        "independent."
    )


class PositionPredictor(Protocol):
    """Function that predicts patch positions of normalised images [b c h w], with fractions ``ratios`` withheld."""

    def __call__(self, images: Tensor, generator: torch.Generator, **ratios: float) -> PositionPrediction: ...


@dataclass(frozen=True)
class Cell:
    """Results for one combination of withheld fractions.

    Attributes:
        ratios: withheld fractions by name.
        values: [m] by measure of `UNITS`: mean over the patches without position of each image.
        chance: exact chance level by measure.
        found, asked: [n] by position of the grid: numbers of correctly placed and of all predicted patches.
        offsets: [2 rows - 1, 2 columns - 1] number of patches by offset of the predicted from the true place, with
            correct ones in the centre.
    """

    ratios: dict[str, float]
    values: dict[str, Tensor]
    chance: dict[str, float]
    found: Tensor
    asked: Tensor
    offsets: Tensor = field(default_factory=lambda: torch.empty(0))

    def map(self, grid: tuple[int, int]) -> Tensor:
        """Return accuracy [rows columns] by position of the grid; nan without predicted patches."""
        return (self.found / self.asked).view(grid)

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy in [0, 1], averaged over images."""
        return self.values["top-1"].mean().item()


def offsets_of(placed: PositionPrediction, grid: tuple[int, int]) -> Tensor:
    """Count patches by offset, as in `Cell`: [2 rows - 1, 2 columns - 1] float64."""
    rows, columns = grid
    guess, own = placed.places().cpu(), placed.visible.cpu()
    down = guess // columns - own // columns + rows - 1
    along = guess % columns - own % columns + columns - 1
    where = (down * (2 * columns - 1) + along)[placed.dropped.cpu()]
    return where.bincount(minlength=(2 * rows - 1) * (2 * columns - 1)).double().view(2 * rows - 1, 2 * columns - 1)


def chance(grid: tuple[int, int], given: int) -> dict[str, float]:
    """Return expected scores of uniform guessing among the positions that are not ``given``."""
    n = grid[0] * grid[1]
    others = distances(grid).double().sum().item() / (n * (n - 1))  # between two patches
    hit = chance_accuracy(n, given)
    return {"top-1": hit, "top-5": min(5 * hit, 1.0), "distance": (1 - hit) * others}


def centre_distance(grid: tuple[int, int]) -> float:
    """Return the expected distance, in patches, if the position with the smallest mean distance is always predicted."""
    return distances(grid).double().mean(0).min().item()


def normalized(batches: Iterable[Batch], card: EncoderCard, unreadable: list[str]) -> Iterator[Tensor]:
    """Yield the normalised images of batches; names of unreadable images are added to ``unreadable``."""
    for batch in batches:
        unreadable += batch.unreadable
        yield normalize(batch.views[0], card.mean, card.std)


@torch.inference_mode()
def measure_positions(
    place: PositionPredictor,
    axes: Mapping[str, Sequence[float]],
    grid: tuple[int, int],
    batches: Iterable[Tensor],
    seed: int,
) -> list[Cell]:
    """Predict the positions of the patches of all images, once for each combination of ratios.

    Args:
        place: function that predicts positions.
        axes: ratios by name; the last one varies fastest.
        grid: rows and columns of patches.
        batches: normalised images [b c h w].
        seed: seed of withheld patches, the same for every combination.
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
                    f"only one of {n} patches would be visible ({_format_ratios(ratios)}), without context to place "
                    "it: train a run with smaller patches or larger images"
                )
            dropped = placed.dropped.cpu()
            # float64 from here on, which not every device supports
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


def position_rows(protocol: str, cells_of: Mapping[str, Sequence[Cell]], grid: tuple[int, int]) -> list[Result]:
    """Return rows of every measure: for each encoder its cells and, if several, their average; then for guessing."""
    rows = []
    for name, unit in UNITS.items():
        for encoder, cells in cells_of.items():
            for ratios, values in _with_average(cells, [cell.values[name] for cell in cells]):
                rows.append(Result.of_means(name, encoder, protocol, ratios, values.tolist(), unit))
        cells = next(iter(cells_of.values()))
        levels = [torch.tensor(cell.chance[name], dtype=torch.float64) for cell in cells]
        for ratios, level in _with_average(cells, levels):
            rows.append(Result.exact(name, _CHANCE, protocol, ratios, level.item(), unit))
        if name == "distance":
            rows.append(Result.exact(name, _CENTRE, protocol, {}, centre_distance(grid), unit))
    return rows


def _with_average(cells: Sequence[Cell], values: list[Tensor]) -> list[tuple[dict[str, Any], Tensor]]:
    """Return the ratios of each cell with its values [m] or []; several cells also have their average per image."""
    found: list[tuple[dict[str, Any], Tensor]] = [(c.ratios, v) for c, v in zip(cells, values, strict=True)]
    if len(cells) > 1:
        found.append((dict.fromkeys(cells[0].ratios, _AVERAGE), torch.stack(values).mean(0)))
    return found


def _format_ratios(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {ratio:g}" for name, ratio in ratios.items())


_SYMBOLS = {"mask_ratio": "γ", "position_mask_ratio": "γ_pos", "context_mask_ratio": "η"}
_PICTURED = 64  # number of images with candidate patches for the picture
_WITHHELD = {
    "mask_ratio": "a fraction γ of the patches was removed",
    "position_mask_ratio": "a fraction γ_pos of the visible patches lost its position",
    "context_mask_ratio": "a fraction η of the patches was excluded from keys and values",
}


def positions(run: str | Path, data: DataLike, settings: EvalSettings, options: protocols.Positions) -> Evaluation:
    """Measure how well a run's own task predicts positions, with more and less withheld than in training.

    Args:
        run: folder of a run whose task predicts positions: droppos, mp3, jigsaw or a mixture.
        data: images, as for `patchloom.data.sources.open.open_data`; labels are not needed.
        settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown run or data, or a run whose task does not predict positions.
    """
    loaded = load_task(run, options.task)
    pretext, card, folder = loaded.task, loaded.card, loaded.folder
    question = next((one for one in pretext.questions.values() if isinstance(one, Positions)), None)
    if question is None:
        raise PatchloomError(
            f"{folder.path} was trained by {loaded.card.task}, which does not predict positions: give a run "
            "of droppos, mp3 or jigsaw, or measure its encoder by position-sensitivity"
        )

    def predict(images: Tensor, generator: torch.Generator, **ratios: float) -> PositionPrediction:
        return question.predict(pretext.encode(images, pretext.given(images, generator, **ratios), generator))

    axes, grid = question.ratios, pretext.geometry.grid
    if empty := [name for name, ratios in axes.items() if not ratios]:
        raise PatchloomError(f"the task of {folder.path} has no ratio for {empty[0]}: give its Positions one or more")
    source, story = _test_images(loaded, data)
    some = np.random.default_rng(settings.seed).permutation(len(source))[: options.images]
    if len(some) < len(source):
        story += f" {len(some):,} of {len(source):,} {source.noun} were drawn (seed {settings.seed})."
        source = source.subset(np.sort(some))
    settings.end_if_dry(source, f"positions would place patches of {len(source):,} {source.noun}.", story)
    unreadable: list[str] = []
    # larger than the encoder's size if the task sees part of its images
    h, w = pretext.augment.size
    channels = pretext.geometry.channels
    native = cuts_natively(pretext.augment)
    reading = settings.reading(source)
    drawn = plain_batches(source, (h, w), **reading, channels=channels, device=settings.torch_device, native=native)
    count = settings.batches(source)
    batches = normalized(
        track_progress(drawn, count, f"{card.name}: positions in {len(source):,} {source.noun}"), card, unreadable
    )
    pretext.to(settings.torch_device)
    cells = measure_positions(predict, axes, grid, batches, settings.seed)
    rows = position_rows("positions", {card.name: cells}, grid)
    found = [row for row in rows if row.measure == "top-1"]
    quoted = tuple(row for row in found if len(cells) == 1 or _AVERAGE in row.settings.values())
    n_test, n = len(cells[0].values["top-1"]), pretext.geometry.n
    withheld = ", ".join(_WITHHELD.get(name, f"the fraction {_symbol(name)} varied") for name in axes)
    out = folder.pictures / f"position_map-{data_slug(data)}.png"
    pictured, ratios = source.subset(np.arange(min(_PICTURED, len(source)))), _plainest(axes)
    drawn = plain_batches(pictured, (h, w), _PICTURED, channels=channels, device=settings.torch_device, native=native)
    with torch.inference_mode():
        asked = next(normalized(drawn, card, []))
        placed = predict(asked, torch.Generator().manual_seed(settings.seed), **ratios)
    gain = brightness(asked, card.mean, card.std)
    pictures = torch.from_numpy(to_pixels(asked, card.mean, card.std, gain))
    content = {
        "shares": (_total(cell.found for cell in cells) / _total(cell.asked for cell in cells)).view(grid).numpy(),
        "offsets": _total(cell.offsets for cell in cells).numpy(),
        "examples": choose_examples(placed, pictures, grid),
        "title": f"{card.name}: {quoted[0].number()} of positions found, chance {quoted[1].number()}",
        "caption": (
            f"Left: {n_test:,} test {source.noun}, all ratios together; grey: too few patches. Right"
            f"{_at(ratios)}: a patch at its true place (blue), and the predicted probability of each place "
            "(orange; framed: the likeliest)."
        ),
    }
    done = (
        f"Positions: {withheld or 'as in its training'}; the run's own task then placed every patch without position "
        f"among {n}, on {n_test:,} test {source.noun}."
    )
    table = (
        "The table has accuracies in % and distances in patches; their intervals are in results.jsonl. A map of "
        f"correct and wrong positions is drawn in {out}."
    )
    return Evaluation.of_test(
        source,
        settings.seed,
        n_test,
        results=rows,
        method=" ".join(
            filter(
                None,
                [
                    card.note,
                    done,
                    describe_measures(source.noun),
                    story,
                    *note_unreadable(unreadable, source.noun),
                    table,
                ],
            )
        ),
        headline=_headline(cells, quoted[0], quoted[1], f"{n_test:,} test {source.noun}"),
        quoted=quoted,
        across=list(axes)[-1] if axes else "measure",
        short=True,
        symbols=_SYMBOLS,
        drawings=(Drawing(draw_position_map, out, content),),
    )


def _test_images(loaded: LoadedTask, data: DataLike) -> tuple[Source, str]:
    """Return the images to measure on, and a sentence on whether they were trained on."""
    opened = with_encoder_sound(open_with_notes(data), loaded.card.sound, loaded.card.name)
    if opened.test is not None:
        doubt = note_test_overlap(loaded.folder, loaded.settings, opened.test)
        return opened.test, f"The data brings its own test {opened.test.noun}.{doubt}"
    if opened.train.fingerprint() == loaded.folder.read_data()["fingerprint"]:
        held_out = stored_held_out(loaded.folder, loaded.settings, opened.train)
        return held_out.parts(opened.train)[1], held_out.sentence(f"The test {opened.train.noun}")
    return (
        opened.train,
        f"The data brings no test {opened.train.noun}, so all were taken: pre-training may have seen them.",
    )


def _total(counts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, counts)


def _headline(cells: Sequence[Cell], ours: Result, guessed: Result, tested: str) -> str:
    found = f"Positions found: {ours.text()} against {guessed.text()} {_CHANCE}"
    if len(cells) == 1:
        return f"{found}{_at(cells[0].ratios)} on {tested}."
    ends = [f"{cell.accuracy:.1%}{_at(cell.ratios)}" for cell in (cells[0], cells[-1])]
    return f"{found}, the average of {len(cells)} ratios on {tested}; {ends[0]}, {ends[1]}."


def _at(ratios: Mapping[str, float]) -> str:
    """Format the ratios of a number; "" for a task without ratios."""
    said = ", ".join(f"{_symbol(name)} {ratio:g}" for name, ratio in ratios.items())
    return f" at {said}" if said else ""


def _symbol(name: str) -> str:
    """Return the paper's symbol of a ratio, or its name for a custom task."""
    return _SYMBOLS.get(name, name.replace("_", " "))


def _plainest(axes: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the ratios at which examples are easiest to read: nothing masked, and few positions given."""
    return {name: (max if name == "position_mask_ratio" else min)(ratios) for name, ratios in axes.items()}
