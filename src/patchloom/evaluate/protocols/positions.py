"""Accuracy of a run's own task in predicting positions, over ratios of withheld patches and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.augment import cuts_natively
from patchloom.data.loader import Batch, plain_batches, steps_per_epoch
from patchloom.data.source import Source, digest
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.display import track_progress
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classification import constant_answers, results_of_answers
from patchloom.evaluate.classifier import load_classifier
from patchloom.evaluate.frozen import encoder_extractor, open_frozen
from patchloom.evaluate.logistic import linear_probe
from patchloom.evaluate.protocols.knn import TEMPERATURE, knn_answers
from patchloom.evaluate.recipes import Course
from patchloom.evaluate.settings import EvalSettings, Subject, open_subjects, open_with_notes, parts_of
from patchloom.evaluate.trainer import Forward, Trainer, image_batches, temporary_seed
from patchloom.look.position_map import Example, draw_position_map
from patchloom.look.sheet import brightness, to_pixels
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import (
    attention_heads,
    encode,
    entry_width,
    grid_size,
    has_positions,
    has_rotations,
    input_channels,
    input_size,
    patch_count,
    patch_positions,
    patch_size,
    prefix_count,
    rotations_at,
    width,
)
from patchloom.nets.optimizer import parameter_groups
from patchloom.nets.swin import Encoder
from patchloom.options import protocols
from patchloom.options.protocols import Order, PositionPlaceholder, PositionSensitivity
from patchloom.pace import Pace
from patchloom.patches.partition import random_dropped
from patchloom.patches.positions import distances
from patchloom.patches.tokens import grid_of, patchify, unpatchify
from patchloom.questions.positions import PositionPrediction, Positions, chance_accuracy, scores
from patchloom.results.claims import START
from patchloom.results.classes import called, explain_measure, headline_row
from patchloom.results.evaluation import Drawing, Evaluation, as_control, note_unreadable
from patchloom.results.result import ACCURACY, Result
from patchloom.runs.encoder import load_encoder
from patchloom.runs.folder import data_slug
from patchloom.runs.held_out import note_test_overlap, stored_held_out
from patchloom.runs.task import LoadedTask, load_task
from patchloom.sizes import Sides, compact, in_pixels, to_pair
from patchloom.withhold.encoder_input import all_patches, drop_positions

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
    top = likely.topk(min(2, likely.shape[-1]), dim=-1)  # [b k 1 or 2]
    best, second = top.values[..., 0], top.values[..., -1]
    right = top.indices[..., 0] == visible
    # large for the patches to show of each kind
    kinds = {
        "sure, and right": torch.where(right, best, -1.0),
        "between two places": second,
        "sure, and wrong": torch.where(right, -1.0, best),
    }
    found = []
    for name, worth in kinds.items():
        most, which = torch.where(dropped, worth, -1.0).max(dim=1)
        images = [i for i in most.argsort(descending=True, stable=True).tolist() if most[i] > 0][:each]
        some = [
            Example(pictures[i].numpy(), int(visible[i, which[i]]), likely[i, which[i]].view(grid).numpy())
            for i in images
        ]
        found.append((name, some))
    return found


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

    @property
    def accuracy(self) -> float:
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


def normalized(batches: Iterable[Batch], card: EncoderCard, unreadable: list[str]) -> Iterator[Tensor]:
    """Yield the normalised images of batches; names of unreadable images are added to ``unreadable``."""
    for batch in batches:
        unreadable += batch.unreadable
        yield normalize(batch.views[0], card.mean, card.std)


@torch.inference_mode()
def measure_positions(
    place: Callable[..., PositionPrediction],
    axes: Mapping[str, Sequence[float]],
    grid: tuple[int, int],
    batches: Iterable[Tensor],
    seed: int,
) -> list[Cell]:
    """Predict the positions of the patches of all images, once for each combination of ratios.

    Args:
        place: function that predicts the positions of the patches of images, given a generator and the ratios.
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
                at = ", ".join(f"{name.replace('_', ' ')} {ratio:g}" for name, ratio in ratios.items())
                raise PatchloomError(
                    f"only one of {n} patches would be visible ({at}), without context to place it: train a run with "
                    "smaller patches or larger images"
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
    # the position with the smallest mean distance is always predicted
    centre = distances(grid).double().mean(0).min().item()
    return [*rows, Result.exact("distance", _CENTRE, protocol, {}, centre, UNITS["distance"])]


def _with_average(cells: Sequence[Cell], values: list[Tensor]) -> list[tuple[dict[str, Any], Tensor]]:
    """Return the ratios of each cell with its values [m] or []; several cells also have their average per image."""
    found: list[tuple[dict[str, Any], Tensor]] = [(c.ratios, v) for c, v in zip(cells, values, strict=True)]
    if len(cells) > 1:
        found.append((dict.fromkeys(cells[0].ratios, _AVERAGE), torch.stack(values).mean(0)))
    return found


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
    pictured = source.subset(np.arange(min(_PICTURED, len(source))))
    drawn = plain_batches(pictured, (h, w), _PICTURED, channels=channels, device=settings.torch_device, native=native)
    with torch.inference_mode():
        asked = next(normalized(drawn, card, []))
        # easiest to read: nothing masked, and few positions given
        ratios = {name: (max if name == "position_mask_ratio" else min)(values) for name, values in axes.items()}
        placed = predict(asked, torch.Generator().manual_seed(settings.seed), **ratios)
    gain = brightness(asked, card.mean, card.std)
    each = ((cell.found, cell.asked, cell.offsets) for cell in cells)
    found_all, asked_all, offsets = (reduce(torch.add, counts) for counts in zip(*each, strict=True))
    pictures = torch.from_numpy(to_pixels(asked, card.mean, card.std, gain))
    content = {
        "shares": (found_all / asked_all).view(grid).numpy(),
        "offsets": offsets.numpy(),
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
    lost, tested = note_unreadable(unreadable, source.noun), f"on {n_test:,} test {source.noun}"
    headline = f"Positions found: {quoted[0].text()} against {quoted[1].text()} {_CHANCE}"
    if len(cells) == 1:
        headline += f"{_at(cells[0].ratios)} {tested}."
    else:
        ends = ", ".join(f"{cell.accuracy:.1%}{_at(cell.ratios)}" for cell in (cells[0], cells[-1]))
        headline += f", the average of {len(cells)} ratios {tested}; {ends}."
    return Evaluation.of_test(
        source,
        settings.seed,
        n_test,
        results=rows,
        method=" ".join([*[card.note] * bool(card.note), done, describe_measures(source.noun), story, *lost, table]),
        headline=headline,
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


def _at(ratios: Mapping[str, float]) -> str:
    """Format the ratios of a number; "" for a task without ratios."""
    said = ", ".join(f"{_symbol(name)} {ratio:g}" for name, ratio in ratios.items())
    return f" at {said}" if said else ""


def _symbol(name: str) -> str:
    """Return the paper's symbol of a ratio, or its name for a custom task."""
    return _SYMBOLS.get(name, name.replace("_", " "))


# Position sensitivity: prediction of positions with most position embeddings masked (DropPos Table 7).

_FINETUNED = "fine-tuned"
_BATCH, _RATE = 64, 1e-2


def position_sensitivity(
    run: str | Path, data: DataLike, settings: EvalSettings, options: PositionSensitivity
) -> Evaluation:
    """Mask most position embeddings of a frozen encoder, and predict positions by a linear layer.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`; labels are not needed.

    Raises:
        PatchloomError: unknown encoder or data, or an encoder without position embeddings.
    """
    finetuned, ratio, steps, placeholder = options.finetuned, options.ratio, options.steps, options.placeholder
    opened = open_subjects(run, settings)
    ours, grid = opened.ours, grid_size(opened.ours.vit)
    subjects, tuned_for = [ours], ""  # fingerprint of the test images of the classifier
    if finetuned is not None:
        try:
            model, its_card = load_classifier(finetuned)
        except PatchloomError:
            subjects.append(Subject(_FINETUNED, *load_encoder(finetuned)))
        else:
            subjects.append(Subject(_FINETUNED, model.encoder, its_card.encoder))
            tuned_for = its_card.test
    for subject in subjects:
        if not has_positions(subject.vit):
            raise PatchloomError(
                f"{subject.name} has no position embeddings to mask: if its task predicts positions, use "
                "`patchloom evaluate positions`"
            )
        if grid_size(subject.vit) != grid:
            raise PatchloomError(
                f"{subject.name} has another patch grid than {ours.name}: give encoders of the same grid"
            )
    subjects += opened.controls
    parts = parts_of(data, settings, labels=False, card=ours.card, run=run)
    test, noun, story = parts.test, parts.test.noun, parts.story
    if tuned_for and tuned_for != test.fingerprint():
        story += f" {finetuned} was fine-tuned with another split, perhaps on some of the test {noun}."
    names = listing([subject.name for subject in subjects], "and")
    settings.end_if_dry(test, f"position-sensitivity would train {steps:,} steps on each of {names}.", story)

    # ---- a probe of each encoder
    cells: dict[str, list[Cell]] = {}
    unreadable: dict[str, None] = {}
    pace = Pace(steps * len(subjects))
    for name, vit, card, *_ in subjects:
        with temporary_seed(settings):
            probe = PositionProbe(vit, placeholder, options.standardize)
            trainer = begin_position_probe(probe, card, parts.train, ratio=ratio, steps=steps, settings=settings)
            probe = trainer.fit(name, pace).model
        lost, size, channels, device = list[str](), input_size(vit), input_channels(vit), settings.torch_device
        read = plain_batches(test, size, **settings.reading(test), channels=channels, device=device)
        shown = track_progress(read, settings.batches(test), f"{name}: test {noun}")
        images = normalized(shown, card, lost)
        cells[name] = measure_positions(probe, {"ratio": (ratio,)}, grid, images, settings.seed)
        unreadable |= dict.fromkeys([*sorted(trainer.unreadable), *lost])

    # ---- the report
    rows = position_rows("position-sensitivity", cells, grid)
    quoted = tuple(row for row in rows if row.measure == "top-1")
    found, *others = quoted
    n, n_test = len(parts.train), len(cells[ours.name][0].values["top-1"])
    against = ", ".join(as_control(row) for row in others)
    stand_in, trained = "zeros", "a linear layer"
    if placeholder == "learned":
        stand_in, trained = "a learned vector", "that vector and a linear layer"
    features = "standardised features" if options.standardize else "features"
    done = (
        f"Position sensitivity: {100 * ratio:g} % of the position embeddings were replaced by {stand_in}. The "
        f"places of these patches, among {grid[0] * grid[1]}, were predicted from their {features} by {trained}, "
        f"trained on centre crops of {n:,} {noun} in {steps:,} steps of {_BATCH} (Adam, rate {_RATE:g} with "
        f"cosine decay to 0) and tested on {n_test:,} others. The encoders stayed frozen, and nothing was chosen."
    )
    return Evaluation.of_test(
        test,
        settings.seed,
        n_test,
        results=rows,
        method=" ".join([done, describe_measures(noun), story, *note_unreadable(list(unreadable), noun)]),
        headline=f"Position sensitivity: {found.text()} against {against} on {n_test:,} test {noun}.",
        quoted=quoted,
        across="measure",
    )


class PositionProbe(nn.Module):
    """Frozen encoder, a vector or place that replaces masked positions, and a linear layer on the features."""

    def __init__(self, vit: Encoder, placeholder: PositionPlaceholder, standardize: bool = False) -> None:
        super().__init__()
        self.vit = vit.requires_grad_(False).eval()
        self.n, d = patch_count(vit), width(vit)
        self.token = nn.Parameter(torch.zeros(entry_width(vit)), requires_grad=placeholder == "learned")
        # a place in the encoder's coordinates; at zero a patch is not rotated
        origin = nn.Parameter(torch.zeros(1, 2), requires_grad=placeholder == "learned")
        self.origin = origin if has_rotations(vit) else None
        self.standardize = nn.BatchNorm1d(d, affine=False) if standardize else nn.Identity()
        self.layer = nn.Linear(d, self.n)
        for weight in self.layer.parameters():
            nn.init.zeros_(weight)

    def train(self, mode: bool = True) -> PositionProbe:
        super().train(mode)
        self.vit.eval()
        return self

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        assert layer_decay == 1
        return parameter_groups(self, weight_decay)

    def forward(self, images: Tensor, generator: torch.Generator, ratio: float) -> PositionPrediction:
        """Predict positions of patches of images [b c h w] with a fraction ``ratio`` of the embeddings masked."""
        dropped = random_dropped(len(images), self.n, ratio, generator, images.device)
        given = drop_positions(all_patches(images, self.n), dropped)
        turned = None if self.origin is None else rotations_at(self.vit, self.origin)[:, None]
        tokens = encode(self.vit, given, position_token=self.token, rotation=turned)[:, prefix_count(self.vit) :]
        features = self.standardize(tokens.flatten(0, 1)).view_as(tokens)
        assert given.dropped is not None  # set by `drop_positions`
        return PositionPrediction(given.visible, given.dropped, self.layer(features))


def begin_position_probe(
    probe: PositionProbe, card: EncoderCard, train: Source, *, ratio: float, steps: int, settings: EvalSettings
) -> Trainer:
    """Return the training of a probe on centre crops, with a fraction ``ratio`` of the position embeddings masked."""
    size, channels = input_size(probe.vit), input_channels(probe.vit)
    centre = train.modality.centre(size, name=train.name)
    course = Course(
        steps=steps,
        per_epoch=steps_per_epoch(len(train), _BATCH),
        unit="step",
        batch=_BATCH,
        peak=_RATE,
        rate_option="the scale of the features by --standardize",  # the rate is fixed
    )
    identity = {
        "ratio": ratio,
        "course": asdict(course),
        "images": train.fingerprint(),
        "numbers": [card.mean, card.std],
        "sizes": [attention_heads(probe.vit), size],  # which the weights do not show
        "sound": train.modality.plain(),
    }

    def loss(forward: Forward, batch: Batch) -> Tensor:
        # the trainer seeds this generator by seed and step, so a resumed training masks the same positions
        generator = torch.default_generator
        placed = forward(normalize(batch.views[0], card.mean, card.std), generator, ratio)
        return F.cross_entropy(placed.logits[placed.dropped], placed.visible[placed.dropped])

    return Trainer(
        probe,
        loss,
        image_batches(train, centre, _BATCH, channels, settings),
        course,
        settings=settings,
        identity=identity,
        noun=train.noun,
        workers=partial(settings.workers_for, train),
    )


# Sensitivity to patch order: accuracy with shuffled patches, and without position embeddings.

_LINEAR_PROBE = "linear"
AS_THEY_ARE, SHUFFLED, ZEROED = "as they are", "patches shuffled", "positions zeroed"


def order(run: str | Path, data: DataLike, settings: EvalSettings, options: Order) -> Evaluation:
    """Test probes of normal images on shuffled patches, and with position embeddings set to zero.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown encoder or data, data without labels, or a pooling that the encoder lacks.
    """
    pooling, k = options.pooling, options.k
    study = open_frozen("order", run, data, settings, pooling=pooling, head=False, plain=True)
    vit, parts = study.subjects.ours.vit, study.parts

    # ---- two probes of each encoder on each kind of test images
    shuffled = ShuffledPatches(parts.test, input_size(vit), patch_size(vit), settings.seed)
    rows: list[Result] = []
    beside: list[Result] = []
    for one in study.each():
        train = one.features_of(parts.train)
        pooled = "pixels" if one.subject is None else pooling
        features, labels, device = train.pooled(pooled), train.labels, settings.torch_device
        probe, _ = linear_probe(features, labels, seed=settings.seed, device=device, groups=train.groups)
        # all choices are made: read the test images
        tests = {AS_THEY_ARE: one.features_of(parts.test), SHUFFLED: one.features_of(shuffled)}
        if one.subject is not None and has_positions(one.subject.vit):
            blind = one.subject._replace(vit=without_positions(one.subject.vit))
            tests[ZEROED] = study.noting(encoder_extractor(blind, settings)).features_of(parts.test)
        for kind in (_LINEAR_PROBE, f"kNN, k = {k}"):
            for given, test in tests.items():
                queries = test.pooled(pooled)
                if kind == _LINEAR_PROBE:
                    answers = probe.predict(queries)
                else:
                    answers, _ = knn_answers(features, labels, queries, (k,), device=device)[k]
                row_settings = {"pooling": pooled, "probe": kind, "test_images": given}
                its = one.name, "order", row_settings, parts.test, settings, test.labels, answers, None
                made = results_of_answers(*its, test.groups, quoted=False)
                rows.append(headline_row(made, test.labels))
                beside += [row for row in made if rows[-1].measure != ACCURACY == row.measure]

    # ---- the report
    test = tests[AS_THEY_ARE]
    n_test = len(test.labels)
    constant = constant_answers("order", test.labels, parts.test, test.groups)
    quoted = tuple(row for row in rows if row.settings["probe"] == _LINEAR_PROBE)
    zeroed = "and with the position embeddings of the patches set to zero"
    if has_rotations(vit):
        zeroed = "and without positions: no patch is rotated, and embeddings, if there are any, are zero"
    if not has_positions(vit):
        zeroed = "while the encoder has no position embeddings to remove"
    shown: dict[str, list[str]] = {}
    for row in quoted:
        number = row.number() if shown else f"{called(row)}{row.text()}"
        shown.setdefault(row.encoder, []).append(f"{number} {row.settings['test_images']}")
    each = "; ".join(f"{name} {', '.join(numbers)}" for name, numbers in shown.items())
    report = Evaluation.of_test(
        parts.test,
        settings.seed,
        n_test,
        results=[*rows, headline_row(constant, test.labels), *beside],
        method=(
            f"Order: a linear probe (its L2 strength chosen on a stratified fifth) and the {k} nearest neighbours "
            f"(votes weighted by exp(similarity / {TEMPERATURE})) learn from the frozen features of "
            f"{len(train.labels):,} normal training {train.noun}. They are tested on {n_test:,} test {train.noun} as "
            f"they are, with their patches in a random order for each, {zeroed}. "
        )
        + f"{explain_measure(test.labels.numpy(), parts.test.classes, test.noun)} "
        + study.around(train, test),
        headline=f"Order (linear probe, {quoted[0].pooling}): {each}; on {n_test:,} test {train.noun}.",
        quoted=quoted,
        across="test_images",
    )
    same = [i for i, row in enumerate(quoted) if (row.encoder, row.settings["test_images"]) == (START, AS_THEY_ARE)]
    return report.with_differences(False, *same) if same else report


class ShuffledPatches(Source):
    """Centre crops of a source's images, or pictures of its recordings, with patches in random order.

    An image's order depends only on the seed and its index.
    """

    def __init__(self, source: Source, size: Sides, p: Sides, seed: int) -> None:
        self.source, self.size, self.p, self.seed = source, to_pair(size), p, seed
        self.crop = source.modality.centre(self.size, name=source.name)
        self.name, self.classes, self.labels = source.name, source.classes, source.labels

    def __len__(self) -> int:
        return len(self.source)

    def read(self, i: int) -> Tensor:
        (image,) = self.crop(self.source.read(i))
        image = self.source.modality.pictures(image[None])[0]
        patches = patchify(image[None], self.p)
        places = np.random.default_rng((self.seed, i)).permutation(patches.shape[1])
        return unpatchify(patches[:, torch.from_numpy(places)], self.p, grid_of(image[None], self.p))[0]

    def describe(self, i: int) -> str:
        return self.source.describe(i)

    def fingerprint(self) -> str:
        return self._digest(self.source.fingerprint())

    def stamp(self) -> str | None:
        stamp = self.source.stamp()
        return None if stamp is None else self._digest(stamp)

    def _digest(self, images: str) -> str:
        return digest(["patches shuffled", str(self.size), in_pixels(compact(self.p)), str(self.seed), images])


def without_positions(vit: Encoder) -> Encoder:
    """Return a copy of an encoder with zero position embeddings for patches, and without rotations.

    Class and register tokens keep their embeddings.
    """
    copy = deepcopy(vit)
    if has_rotations(copy):
        copy.register_module("rope", None)
    with torch.no_grad():
        table = patch_positions(copy)
        if table is not None:
            table.zero_()
    return copy
