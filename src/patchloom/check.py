"""``check``: what images or recordings are like, what is wrong with them, and what pre-training would be and cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from patchloom.calls import checked
from patchloom.data import DataLike, Source, Stats, hold_out, is_object, named, open_data
from patchloom.data.near import NearCopies, near_copies, parted_wholes
from patchloom.data.sound.told import advice_on_lengths, column_of
from patchloom.data.stats import channels_for_all
from patchloom.data.survey import Survey, survey
from patchloom.errors import PatchloomError
from patchloom.files import write_whole
from patchloom.propose import Proposal, propose
from patchloom.runs.held_out import with_share
from patchloom.runs.settings import TaskLike, request, why_task
from patchloom.shown import Grid, Shown
from patchloom.sides import PatchSize
from patchloom.sound import in_words
from patchloom.tasks import AUTO, task_class
from patchloom.train.resolve import LARGE, measured, resolve

_TOLD = 10  # broken files, and classes, that are named
_GROUPS = 3  # examples of anything else
_FEW = 500  # different images
_MANY = 0.05  # the share of the images from which on a fault of theirs is worth advice


@dataclass(frozen=True, repr=False)
class Checked(Shown):
    """What `check` found.

    Attributes:
        train: the images to train on.
        test: those that the data brings for the test, or None.
        channels: that all images are given.
        proposal: for pre-training.
        out: the file that lists what could not be read, or None.
        notes: on what the data has that is not read, or taken otherwise than its name says.
        close: neighbours in name that look alike, or None.
    """

    train: Survey
    test: Survey | None
    channels: int
    proposal: Proposal
    out: str | Path | None = None
    notes: tuple[str, ...] = ()
    close: NearCopies | None = None

    def parts(self, width: int) -> list[str | Grid]:
        """See `Shown`."""
        table = Grid.of(self.table(), texts=range(1, 1 + len(self.splits)))
        return [table, "", *self.sentences(), "", *self.proposal.parts(width)]

    @property
    def splits(self) -> dict[str, Survey]:
        """By name."""
        return {"train": self.train} if self.test is None else {"train": self.train, "test": self.test}

    @property
    def noun(self) -> str:
        """What was read: images or recordings."""
        return self.train.source.noun

    @cached_property
    def leaks(self) -> list[tuple[int, int]]:
        """Test images that are among the training images, too: pairs of an index in test and one in train."""
        return [] if self.test is None else self.test.shared_with(self.train)

    def table(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each property; a column a split."""
        columns = [_column(found, self.channels) for found in self.splits.values()]
        rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
        return [("", *self.splits), *(row for row in rows if any(row[1:]))]

    def sentences(self) -> list[str]:
        """What is left out, or read otherwise, and what is wrong, with examples; what to do where that is sure."""
        said = [f"{note}." for note in self.notes]
        for split, found in self.splits.items():
            where = "" if self.test is None else f"{split}: "
            said += [
                f"{where}{line}." for line in found.noticed.sentences(found.source.describe, len(found.rows), self.noun)
            ]
            said += _faults(found, where)
        if self.leaks:
            pairs = [f"{self.test.name(one)} = {self.train.name(two)}" for one, two in self.leaks[:_GROUPS]]
            said.append(
                f"{len(self.leaks):,} of {self.test.tried:,} test {self.noun} could be known by heart, being in train, "
                f"too ({_some(pairs, len(self.leaks))}): take them out, or scores say less about new ones."
            )
        if self.test is not None and (parted := parted_wholes(self.train.source, self.test.source, "split by them")):
            said.append(f"{parted[0].upper()}{parted[1:]}.")
        if self.out is not None:
            said.append(f"{self.out} lists every file that cannot be read.")
        return [*said, *self._advice()]

    def _advice(self) -> list[str]:
        said, found, settings = [], self.train, self.proposal.settings
        read, sound = len(found.rows), found.source.sound
        if self.close is not None:
            sentence = self.close.sentence()
            said.append(sentence[0].upper() + sentence[1:])
        different = round((read - found.repeated) / found.tried * len(found.source))
        if sound is not None and different < _FEW:
            said.append(f"{different:,} different recordings are few to learn from.")
        elif different < _FEW:
            said.append(
                f"{different:,} different images are few to learn from: begin with weights that timm publishes "
                "(--init timm:NAME), and compare with them (patchloom evaluate knn timm:NAME)."
            )
        if found.repeated > _MANY * read:
            said.append(
                f"{found.repeated / read:.0%} are copies of others: keep one of each. A run leaves out those copies of "
                f"held-out {self.noun} whose files are equal, but others make its measures look better than they are."
            )
        if sound is not None:
            return [*said, *advice_on_lengths(found, settings.sound())]
        depths, (h, w) = np.unique(found.rows["deep"]), settings.img_size
        if len(depths) > 1:
            said.append("Images of 8 bits and deeper ones have different scales: keep one kind, or convert them alike.")
        small, tiny = found.smaller_than(h, w), found.smaller_than(h / 2, w / 2)
        if tiny > _MANY * read:
            said.append(
                f"{tiny:,} of {read:,} images would be blurred, having less than half of {h}x{w} pixels on a side: "
                "leave them out, or lower --img_size."
            )
        elif small:
            said.append(f"{small:,} of {read:,} images would be enlarged, being smaller than {h}x{w}.")
        factor = min(np.median(found.rows["height"]) / h, np.median(found.rows["width"]) / w)
        if factor >= LARGE and settings.crop_scale != "native" and task_class(settings.task["name"]).native_crops:
            said.append(
                f"Images are x{factor:.1f} as large as what is trained on, so crops of them are reduced: --crop_scale "
                "native cuts crops at the images' own scale, for what is small in them."
            )
        return said


@checked
def check(
    data: DataLike,
    *,
    task: TaskLike = AUTO,
    images: int | None = None,
    model: str = "auto",
    img_size: int | tuple[int, int] | Literal["auto"] = "auto",
    patch_size: PatchSize | Literal["auto"] = "auto",
    epochs: int | Literal["auto"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
    workers: int | Literal["auto"] = "auto",
    device: Literal["cpu", "cuda", "mps", "auto"] = "auto",
    group: str | None = None,
    recipe: str | None = None,
    estimate: bool = True,
    out: str | Path | None = None,
) -> Checked:
    """Read every image or recording, tell what they are like and what is wrong, and propose how to pre-train on them.

    Args:
        data: images, as pretrain takes them.
        task: pretext task for which to propose; what is given besides, up to device, is kept.
        images: read at most so many of each split, drawn at random; all, if absent.
        model: nano, micro, mini, or a timm ViT.
        img_size: pixels of a side; 64x128 is height x width.
        patch_size: side of a patch in pixels; 40x1 is rows x columns.
        epochs: passes over the training images.
        batch_size: images a step.
        workers: processes that read, here and in the run; here as many as there are cores, if auto.
        device: what computes; auto takes a GPU where there is one.
        group: which images are held out together, as in pretrain.
        recipe: a row of a paper's table, as in pretrain.
        estimate: measure time and memory in a few steps.
        out: file for the names of all images that cannot be read, each with the reason after a tab.

    Raises:
        PatchloomError: no such data or task, nothing that can be read, numbers of channels that do not go together,
            settings that do not go together, or a file that cannot be written.
    """
    if images is not None and images < 1:
        raise PatchloomError(f"--images must be 1 or more, not {images}")
    given = {"model": model, "img_size": img_size, "patch_size": patch_size, "epochs": epochs}
    given |= {"batch_size": batch_size, "workers": workers, "device": device, "group": group, "recipe": recipe}
    if recipe is not None:
        given = {name: value for name, value in given.items() if value != "auto"}
    asked = request(data, task, given)
    opened = open_data(data, group=group)
    # copies are found below; of all images, even if they are copies of one
    training = hold_out(opened.train, asked.held_out, seed=asked.seed, exact=False)[0]
    sources = [source for source in (opened.train, opened.test) if source is not None]
    found = [survey(source, images, None if workers == "auto" else workers) for source in sources]
    if out is not None:
        lines = (f"{one.source.describe(i)}\t{reason}\n" for one in found for i, reason in one.broken)
        write_whole(Path(out), "".join(lines))
    if training.sound is None:
        examples = {channels: name for one in reversed(found) for channels, name in one.examples().items()}
        channels = channels_for_all(examples, opened.train.name)
        stats = found[0].stats(channels)
    else:
        channels, stats = measured(asked, training)
        training = training.heard_as(stats.sound)
    asked, share = with_share(asked, len(opened.train))
    settings, reasons = resolve(asked, len(training), channels, stats, images=training)
    reasons = why_task(data, task, recipe) | share | reasons
    reasons = {name: in_words(why, stats.sound) for name, why in reasons.items()}
    names = [asked.data] if is_object(data) else [os.fspath(name) for name in named(data)]
    proposal = propose(names, training, settings, reasons, estimate)
    close = near_copies(opened.train)
    test = found[1] if len(found) > 1 else None
    return Checked(found[0], test, channels, proposal, out, opened.notes, close)


def _column(found: Survey, channels: int) -> dict[str, str]:
    """Properties of a split by name; what does not apply is empty."""
    rows, n = found.rows, len(found.source)
    begin = {
        found.source.noun: f"{n:,}",
        "read": "" if found.tried == n else f"{found.tried:,}, drawn at random",
        "classes": _classes(found.source),
    }
    if found.source.sound is not None:
        return begin | column_of(found)
    stats = found.stats(channels)
    depths, counts = np.unique(rows["deep"], return_counts=True)
    return begin | {
        "files": _counted(found.kinds),
        "height x width": _sizes(rows, stats),
        "channels": _counted({str(c): int((rows["channels"] == c).sum()) for c in sorted(found.moments)}),
        "depth": _counted({("8 bits", "deeper")[int(d)]: int(c) for d, c in zip(depths, counts, strict=True)}),
        "mean": " ".join(f"{value:.3f}" for value in stats.mean),
        "std": " ".join(f"{value:.3f}" for value in stats.std),
        "unreadable": f"{len(found.broken):,}",
        "copies": f"{found.repeated:,}",
        "one colour": f"{len(found.flat):,}",
    }


def _classes(source: Source) -> str:
    if source.labels is None or not source.classes:
        return "no labels"
    known = source.labels[source.labels >= 0]
    counts = np.bincount(known, minlength=len(source.classes))
    rarest, commonest = counts.argmin(), counts.argmax()
    if counts[rarest] == counts[commonest]:
        text = f"{len(counts)} of {counts[commonest]:,} {source.noun} each"
    elif len(counts) <= _TOLD:
        text = _counted(dict(zip(source.classes, counts.tolist(), strict=True)))
    else:
        smallest, largest = (f"{counts[i]:,} ({source.classes[i]})" for i in (rarest, commonest))
        text = f"{len(counts)} of {smallest} to {largest} {source.noun}"
    return text if len(known) == len(source) else f"{text}; {len(source) - len(known):,} without a label"


def _sizes(rows: np.ndarray, stats: Stats) -> str:
    sizes = np.unique(rows[["height", "width"]])
    area = sizes["height"].astype(np.int64) * sizes["width"]
    smallest, largest = ("x".join(map(str, sizes[i])) for i in (area.argmin(), area.argmax()))
    if len(sizes) == 1:
        return smallest
    return f"{smallest} to {largest}, {stats.height}x{stats.width} at the median; {len(sizes):,} sizes"


def _counted(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count:,})" for name, count in counts.items())


def _faults(found: Survey, split: str) -> list[str]:
    said, broken = [], found.broken
    of = f"of {found.tried:,} {found.source.noun}"
    if broken:
        said.append(f"{split}{len(broken):,} {of} cannot be read:")
        said += [f"  {found.name(i)}: {reason}" for i, reason in broken[:_TOLD]]
        said += [f"  and {len(broken) - _TOLD:,} more; --out FILE lists them all"] * (len(broken) > _TOLD)
    if found.copies:
        groups = [" = ".join(map(found.name, group[:_GROUPS])) for group in found.copies[:_GROUPS]]
        said.append(f"{split}{found.repeated:,} {of} can go, as copies of others ({_some(groups, len(found.copies))}).")
    if found.flat:
        names = _some([found.name(i) for i in found.flat[:_GROUPS]], len(found.flat))
        flat = "of one colour" if found.source.sound is None else "silent"
        said.append(f"{split}{len(found.flat):,} {of} can teach nothing, being {flat} ({names}).")
    return said


def _some(examples: Sequence[str], of: int) -> str:
    return "; ".join([*examples, *["..."] * (of > len(examples))])
