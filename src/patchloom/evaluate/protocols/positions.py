"""How well a run's own task finds positions, with more and with less withheld than in its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from patchloom.data import DataLike, Source, plain_batches
from patchloom.data.crop import cuts_natively
from patchloom.data.sound.hearing import heard_by
from patchloom.errors import PatchloomError
from patchloom.evaluate import EvalSettings, Report, Row
from patchloom.evaluate.pace import watched
from patchloom.evaluate.position_examples import examples_of
from patchloom.evaluate.position_scores import (
    AVERAGE,
    CHANCE,
    Cell,
    measure_positions,
    normalized,
    rows_of,
    story_of,
)
from patchloom.evaluate.report import Drawing, lost_images
from patchloom.evaluate.settings import open_and_tell
from patchloom.look.sheets import brightness, to_pixels
from patchloom.questions.positions import PositionPrediction, Positions
from patchloom.runs.folder import plain_name
from patchloom.runs.held_out import doubt_of_test, stored_held_out
from patchloom.runs.settings import TaskLike
from patchloom.runs.task import Loaded, load_task

_SYMBOLS = {"mask_ratio": "γ", "position_mask_ratio": "γ_pos", "context_mask_ratio": "η"}
_PICTURED = 64  # images among which patches are chosen for the picture
_WITHHELD = {
    "mask_ratio": "a share γ of the patches was removed",
    "position_mask_ratio": "a share γ_pos of the visible patches lost its position",
    "context_mask_ratio": "a share η of the patches was barred from keys and values",
}


def positions(
    run: str | Path, data: DataLike, settings: EvalSettings, *, images: int = 1000, task: TaskLike | None = None
) -> Report:
    """Ask a run's own task where patches were, with more and with less withheld than in its training.

    Args:
        run: the folder of a run that asked for positions: droppos, mp3, or a mixture.
        data: images, as `patchloom.data.open_data` takes them; labels are not needed.
        settings: common to all protocols.
        images: measure on at most so many test images.
        task: FILE.py:CLASS, or the class, of a task of your own that the run does not find again, or that has changed.

    Raises:
        PatchloomError: no such run or data, or a run that asked for no positions.
    """
    if images < 1:
        raise PatchloomError(f"--images must be 1 or more, not {images}")
    loaded = load_task(run, task)
    pretext, card, folder = loaded.task, loaded.card, loaded.folder
    question = next((one for one in pretext.questions.values() if isinstance(one, Positions)), None)
    if question is None:
        raise PatchloomError(
            f"{folder.path} was trained by {loaded.card.task}, which asks for no positions, so none can be "
            "measured: give a run of droppos or mp3, or measure its encoder with position-sensitivity"
        )

    def predict(images: Tensor, generator: torch.Generator, **ratios: float) -> PositionPrediction:
        return question.predict(pretext.encode(images, pretext.given(images, generator, **ratios), generator))

    axes, grid = question.ratios, pretext.geometry.grid
    if empty := [name for name, ratios in axes.items() if not ratios]:
        raise PatchloomError(f"the task of {folder.path} has no ratio for {empty[0]}: give its Positions at least one")
    source, story = _test_images(loaded, data)
    some = np.random.default_rng(settings.seed).permutation(len(source))[:images]
    if len(some) < len(source):
        story += f" {len(some):,} of {len(source):,} {source.noun} were drawn (seed {settings.seed})."
        source = source.subset(np.sort(some))
    unreadable: list[str] = []
    # larger than the encoder's where a task sees a part of its images
    size = tuple(pretext.augment.size)
    channels = pretext.geometry.channels
    native = cuts_natively(pretext.augment)
    reading = settings.reading(source)
    drawn = plain_batches(source, size, **reading, channels=channels, device=settings.at, native=native)
    count = settings.batches(source)
    batches = normalized(
        watched(drawn, count, f"{card.name}: positions in {len(source):,} {source.noun}"), card, unreadable
    )
    pretext.to(settings.at)
    cells = measure_positions(predict, axes, grid, batches, settings.seed)
    rows = rows_of("positions", {card.name: cells}, grid)
    found = [row for row in rows if row.settings["measure"] == "top-1"]
    quoted = tuple(row for row in found if len(cells) == 1 or AVERAGE in row.settings.values())
    n_test, n = len(cells[0].values["top-1"]), pretext.geometry.n
    withheld = ", ".join(_WITHHELD.get(name, f"the share {_symbol(name)} varied") for name in axes)
    out = folder.pictures / f"position_map-{plain_name(data)}.png"
    pictured, ratios = source.subset(np.arange(min(_PICTURED, len(source)))), _plainest(axes)
    drawn = plain_batches(pictured, size, _PICTURED, channels=channels, device=settings.at, native=native)
    with torch.inference_mode():
        asked = next(normalized(drawn, card, []))
        placed = predict(asked, torch.Generator().manual_seed(settings.seed), **ratios)
    gain = brightness(asked, card.mean, card.std)
    pictures = torch.from_numpy(to_pixels(asked, card.mean, card.std, gain))
    content = {
        "shares": (sum(cell.found for cell in cells) / sum(cell.asked for cell in cells)).view(grid).numpy(),
        "offsets": sum(cell.offsets for cell in cells).numpy(),
        "examples": examples_of(placed, pictures, grid),
        "title": f"{card.name}: {quoted[0].number()} of positions found, chance {quoted[1].number()}",
        "caption": (
            f"Left: {n_test:,} test {source.noun}, all ratios together; grey: too few to tell. Right"
            f"{_at(ratios)}: a patch at its own place (blue), and how likely each other place is held to be it "
            "(orange; framed: the likeliest)."
        ),
    }
    done = (
        f"Positions: {withheld or 'as in its training'}; the run's own task then placed every patch without position "
        f"among {n}, on {n_test:,} test {source.noun}."
    )
    table = (
        "The table has accuracies in % and distances in patches; their intervals are in the rows of results.csv. Where "
        f"in the picture positions are found, and where patches are put instead, is drawn in {out}."
    )
    return Report(
        rows=rows,
        protocol=" ".join(
            filter(None, [card.note, done, story_of(source.noun), story, *lost_images(unreadable, source.noun), table])
        ),
        headline=_headline(cells, *quoted, f"{n_test:,} test {source.noun}"),
        quoted=quoted,
        data=source.name,
        fingerprint=source.fingerprint(),
        seed=settings.seed,
        n_test=n_test,
        noun=source.noun,
        across=list(axes)[-1] if axes else "measure",
        short=True,
        symbols=_SYMBOLS,
        drawings=(Drawing("patchloom.look.draw_position_map", out, content),),
    )


def _test_images(loaded: Loaded, data: DataLike) -> tuple[Source, str]:
    """The images to measure on, and in words whether they were trained on."""
    opened = heard_by(open_and_tell(data), loaded.card.sound, loaded.card.name)
    if opened.test is not None:
        doubt = doubt_of_test(loaded.folder, loaded.settings, opened.test)
        return opened.test, f"The data brings its own test {opened.test.noun}.{doubt}"
    if opened.train.fingerprint() == loaded.folder.read_data()["fingerprint"]:
        held_out = stored_held_out(loaded.folder, loaded.settings, opened.train)
        return held_out.parts(opened.train)[1], held_out.sentence(f"The test {opened.train.noun}")
    return (
        opened.train,
        f"The data brings no test {opened.train.noun}, so all were taken: pre-training may have seen them.",
    )


def _headline(cells: Sequence[Cell], ours: Row, guessed: Row, tested: str) -> str:
    found = f"Positions found: {ours.text()} against {guessed.text()} {CHANCE}"
    if len(cells) == 1:
        return f"{found}{_at(cells[0].ratios)} on {tested}."
    ends = [f"{cell.accuracy:.1%}{_at(cell.ratios)}" for cell in (cells[0], cells[-1])]
    return f"{found}, the average of {len(cells)} ratios on {tested}; {ends[0]}, {ends[1]}."


def _at(ratios: Mapping[str, float]) -> str:
    """Where a number was measured; "" for a task without ratios."""
    said = ", ".join(f"{_symbol(name)} {ratio:g}" for name, ratio in ratios.items())
    return f" at {said}" if said else ""


def _symbol(name: str) -> str:
    """The paper's letter of a ratio, or the name that a task of one's own gives."""
    return _SYMBOLS.get(name, name.replace("_", " "))


def _plainest(axes: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Ratios with which examples are easiest to read: nothing masked, and hardly a position given."""
    return {name: (max if name == "position_mask_ratio" else min)(ratios) for name, ratios in axes.items()}
