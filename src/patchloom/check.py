"""``check``: properties and faults of images or recordings, and proposed settings with their cost."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.audio.config import Sound
from patchloom.data.channels import channel_rows, is_listed
from patchloom.data.near_duplicates import NearCopies, near_copies, parted_wholes, subject_note
from patchloom.data.scan import Survey, survey
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import is_object, is_object_name
from patchloom.data.sources.open import open_data, split_names
from patchloom.data.splits import hold_out
from patchloom.data.stats import Stats, channels_for_all
from patchloom.display import Displayable, TextTable, Verbatim, duration
from patchloom.errors import PatchloomError
from patchloom.look.sheet import png_path
from patchloom.look.windows import draw_windows
from patchloom.options.declare import verb
from patchloom.options.verbs import Check
from patchloom.runs.folder import RunFolder
from patchloom.runs.held_out import with_share
from patchloom.runs.settings import ResolvedSettings, request, why_task
from patchloom.sizes import compact, in_pixels
from patchloom.system.device import Cores, cores, keep_freed_memory
from patchloom.system.files import write_whole
from patchloom.tasks import task_class
from patchloom.tasks.custom import label
from patchloom.train.estimate import Forecast, forecast_run, smaller_steps
from patchloom.train.resolve import LARGE, measure_data, resolve

# Proposed settings for pre-training, and their cost on this machine.


_KEPT = 1.25  # side of cached images over that of training crops (docs/reference/data-sources.md)


@dataclass(frozen=True, repr=False)
class Proposal(Displayable):
    """Settings that `pretrain` would choose.

    Attributes:
        data: arguments that the user gave for the data.
        settings: resolved settings.
        reasons: reasons for the values of ``auto``, by setting.
        estimate: cost of the run; None if it was not asked for or could not be measured.
        failure: reason why it could not be measured.
        fixed_size: whether all pictures have one fixed size and one channel, as for recordings.
    """

    data: Sequence[str]
    settings: ResolvedSettings
    reasons: dict[str, str]
    estimate: Forecast | None
    failure: str = ""
    fixed_size: bool = False

    def parts(self, width: int) -> list[str | TextTable]:
        command, *sentences = self.sentences()
        return [TextTable.of(self.table(), texts=[1, 2]), "", Verbatim(command), *sentences]

    def plain(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "settings": self.settings.plain(),
            "reasons": self.reasons,
            "estimate": None if self.estimate is None else self.estimate.plain(),
            "failure": self.failure or None,
        }

    @property
    def command(self) -> str:
        """Command for a terminal, or call for Python, which reproduces these settings."""
        s = self.settings
        begin = {"task": s.task["name"].partition("#")[0]} if s.recipe is None else {"recipe": s.recipe}
        options = begin | {"model": s.model["name"]}
        options |= {} if self.fixed_size else {"img_size": compact(s.img_size)}
        options |= {"patch_size": s.patch_size} | ({} if self.fixed_size else {"channels": s.channels})
        options |= {"epochs": s.epochs, "batch_size": s.batch_size}
        options |= {"crop_scale": s.crop_scale} if s.crop_scale == "native" else {}
        options |= {name: getattr(s, name) for name in ("workers", "device") if name not in self.reasons}
        options |= {"group": s.group} if s.group is not None else {}
        if is_object_name(self.data[0]):
            return f"patchloom.pretrain(data, {', '.join(f'{name}={value!r}' for name, value in options.items())})"
        options |= {name: in_pixels(options[name]) for name in ("img_size", "patch_size") if name in options}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return shlex.join(["patchloom", "pretrain", *self.data, *words])

    def table(self) -> list[tuple[str, ...]]:
        """Return a heading, and a row for each setting that was ``auto``."""
        s = self.settings
        shown = s.plain() | {
            "task": label(s.task["name"]),
            "model": s.model["name"],
            "img_size": in_pixels(s.img_size),
            "patch_size": in_pixels(s.patch_size),
        }
        shown |= {f"model.{name}": value for name, value in s.model.items()}
        rows: list[tuple[str, ...]] = [("setting", "proposed", "reason")]
        for name, why in self.reasons.items():
            value = shown[name]
            rows.append((name, f"{value:.4g}" if isinstance(value, float) else str(value), why))
        return rows

    def sentences(self) -> list[str]:
        """Return the command, then sentences on its cost."""
        said = [self.command]
        if self.failure:
            said.append(f"It would fail: {self.failure.rstrip('.')}.")
        if self.estimate is None:
            return said
        e, s = self.estimate, self.settings
        said += e.sentences()
        if e.step is not None and e.reading > e.step:
            remedy = "more --workers" if e.apart else "--workers 1"
            kept = "whole" if self.fixed_size or s.crop_scale == "native" else round(_KEPT * e.crop)
            remedy += f" or --cache {kept}" if s.cache == "none" else ""
            said.append(f"reading takes longer than training: {remedy} can make it faster")
        return said


def propose(
    data: Sequence[str], training: Source, settings: ResolvedSettings, reasons: dict[str, str], estimate: bool = True
) -> Proposal:
    """Build a proposal, with the cost of a run measured in a few steps if ``estimate``."""
    made, failure = None, ""
    if estimate:
        keep_freed_memory()
        share = min(settings.batch_size, len(training))
        try:
            made = forecast_run(settings, training, share, Cores(cores()), RunFolder("runs"))
        except torch.OutOfMemoryError:
            full = f"the device has too little memory for {share} {training.noun} at once"
            failure = f"{full}: {smaller_steps(settings)}"
        except PatchloomError as problem:  # keeps the results on the images
            failure = str(problem)
    return Proposal(data, settings, reasons, made, failure, training.modality.own_size is not None)


# Survey of recordings: a column of the table, and advice.


_MOST = 5  # sampling rates, formats or numbers of channels that are listed


def column_of(found: Survey) -> dict[str, str]:
    """Return the properties of recordings by name: formats, lengths, number of silent ones."""
    kinds, rates, channels = (Counter[str]() for _ in range(3))
    for (kind, rate, tracks), count in found.kinds.items():
        kinds[kind] += count
        rates[f"{rate:,} Hz"] += count
        channels[str(tracks)] += count
    lengths = _seconds(found)
    shortest, median, longest = (f"{value:.2f}" for value in (lengths.min(), np.median(lengths), lengths.max()))
    span = shortest if shortest == longest else f"{shortest} to {longest}, {median} at the median"
    return {
        "files": _format_counts(kinds, _MOST),
        "rate": _format_counts(rates, _MOST),
        "channels": _format_counts(channels, _MOST),
        "seconds": f"{span}; {duration(float(lengths.sum()))} in all",
        "unreadable": f"{len(found.broken):,}",
        "copies": f"{found.repeated:,}",
        "silent": f"{len(found.flat):,}",
    }


def advice_on_lengths(found: Survey, sound: Sound) -> list[str]:
    """Return a sentence if recordings are shorter or longer than ``sound.seconds``."""
    lengths, n = _seconds(found), len(found.rows)
    shorter, longer = (int(other.sum()) for other in (lengths < 0.99 * sound.seconds, lengths > 1.01 * sound.seconds))
    said = []
    if shorter:
        said.append(
            f"{shorter:,} of {n:,} recordings are shorter than {sound.seconds:g} s, and are padded with silence"
        )
    if longer:
        said.append(f"{longer:,} of {n:,} are longer, and are cut to {sound.seconds:g} s at a time")
    return [f"{'; '.join(said)}: --seconds sets the length."] if said else []


def _seconds(found: Survey) -> np.ndarray:
    """Return the length of each recording in seconds, float64 [n]."""
    assert found.source.sound is not None
    return found.rows["width"] / found.source.sound.rate


_TOLD = 10  # unreadable files, and classes, that are listed
_GROUPS = 3  # examples of anything else
_FEW = 500  # distinct images; fewer are worth a warning
_DEPTHS = ("8 bits", "more than 8 bits")  # names of an image's depth
_MANY = 0.05  # fraction of the images with a fault from which advice is given


@dataclass(frozen=True, repr=False)
class CheckResult(Displayable):
    """Result of `check`.

    Attributes:
        train: survey of the training images.
        test: survey of the data's own test images, or None.
        channels: number of channels to which all images are converted.
        proposal: proposed settings for pre-training.
        out: file that lists unreadable files, or None.
        notes: notes on files that are ignored, or read in another way than their names suggest.
        close: near copies with neighbouring names, or None.
        refusal: reason why the images cannot be used together; table and proposal are of the commonest kind then.
        odd: name of each image whose channels or depth are not those of most, with the reason.
        picture: picture of the windows of slides, or None.
    """

    train: Survey
    test: Survey | None
    channels: int
    proposal: Proposal
    out: str | Path | None = None
    notes: tuple[str, ...] = ()
    close: NearCopies | None = None
    refusal: str = ""
    odd: tuple[tuple[str, str], ...] = ()
    picture: Path | None = None

    def parts(self, width: int) -> list[str | TextTable]:
        table = TextTable.of(self.table(), texts=range(1, 1 + len(self.splits)))
        said: list[str | TextTable] = [table]
        for name, found in self.splits.items() if self.train.source.sound is None else ():
            if is_listed(channels := found.stats(self.channels).channels):
                said += [f"\n{name}:" if self.test is not None else "", TextTable.of(channel_rows(channels))]
        return [*said, "", *self.sentences(), "", *self.proposal.parts(width)]

    def plain(self) -> dict[str, Any]:
        return {
            "noun": self.noun,
            "channels": self.channels,
            "splits": {name: _values(found, self.channels) for name, found in self.splits.items()},
            "leaks": [
                {"test": self.test.name(one), "train": self.train.name(two)}
                for one, two in self.leaks
                if self.test is not None
            ],
            "near_copies": None if self.close is None else self.close._asdict(),
            "sentences": self.sentences(),
            "out": None if self.out is None else str(self.out),
            "picture": None if self.picture is None else str(self.picture),
            "proposal": self.proposal.plain(),
        }

    @property
    def splits(self) -> dict[str, Survey]:
        """Surveys by name of the split."""
        return {"train": self.train} if self.test is None else {"train": self.train, "test": self.test}

    @property
    def noun(self) -> str:
        """Kind of the data: "images" or "recordings"."""
        return self.train.source.noun

    @cached_property
    def leaks(self) -> list[tuple[int, int]]:
        """Test images that are also training images, as pairs of an index in test and one in train."""
        return [] if self.test is None else self.test.shared_with(self.train)

    def table(self) -> list[tuple[str, ...]]:
        """Return a heading, and a row for each property, with one column per split."""
        columns = [_column(found, self.channels) for found in self.splits.values()]
        rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
        return [("", *self.splits), *(row for row in rows if any(row[1:]))]

    def sentences(self) -> list[str]:
        """Return sentences on ignored files and faults with examples, and advice."""
        said = [f"{note}." for note in self.notes]
        for split, found in self.splits.items():
            where = "" if self.test is None else f"{split}: "
            describe = found.source.describe
            lines = found.noticed.sentences(describe, len(found.rows), self.noun) + found.channels.sentences(describe)
            said += [f"{where}{line}." for line in lines]
            of, broken = f"of {found.tried:,} {found.source.noun}", found.broken
            if broken:
                said.append(f"{where}{len(broken):,} {of} cannot be read:")
                said += [Verbatim(f"  {found.name(i)}: {reason}") for i, reason in broken[:_TOLD]]
            if len(broken) > _TOLD:
                said.append(f"  and {len(broken) - _TOLD:,} more; --out FILE lists them all")
            if found.copies:
                groups = [" = ".join(map(found.name, group[:_GROUPS])) for group in found.copies[:_GROUPS]]
                shown = _some(groups, len(found.copies))
                said.append(f"{where}{found.repeated:,} {of} are copies of others ({shown}).")
            if found.flat:
                names = _some([found.name(i) for i in found.flat[:_GROUPS]], len(found.flat))
                blank = f"are {found.source.modality.blank}, so nothing can be learnt from them"
                said.append(f"{where}{len(found.flat):,} {of} {blank} ({names}).")
        if self.leaks:
            assert self.test is not None  # because there are leaks
            pairs = [f"{self.test.name(one)} = {self.train.name(two)}" for one, two in self.leaks[:_GROUPS]]
            said.append(
                f"{len(self.leaks):,} of {self.test.tried:,} test {self.noun} also occur in the training set "
                f"({_some(pairs, len(self.leaks))}): remove them, or scores say less about new {self.noun}."
            )
        if self.test is not None and (parted := parted_wholes(self.train.source, self.test.source, "split by them")):
            said.append(f"{parted[0].upper()}{parted[1:]}.")
        if subjects := subject_note(self.train.source):
            said.append(f"{subjects}.")
        if self.out is not None:
            said.append(f"{self.out} lists all files that cannot be read{', and the odd ones' * bool(self.odd)}.")
        if self.picture is not None:
            said.append(f"{self.picture} shows the windows that are read.")
        return [*said, *self._advice()]

    def _advice(self) -> list[str]:
        said, found, settings = [], self.train, self.proposal.settings
        read, sound = len(found.rows), found.source.sound
        if self.close is not None:
            sentence = self.close.sentence()
            said.append(sentence[0].upper() + sentence[1:])
        different = round((read - found.repeated) / found.tried * len(found.source))
        if different < _FEW:
            if_few = found.source.modality.if_few
            if if_few and {1, 3}.issuperset(found.moments):  # the channels that public weights can take as they are
                if_few += ", and compare with them (patchloom evaluate knn timm:NAME)"
            said.append(f"{different:,} different {self.noun} are few to learn from{if_few}.")
        if found.repeated > _MANY * read:
            said.append(
                f"{found.repeated / read:.0%} are copies of others: keep one of each. A run leaves out copies of "
                f"held-out {self.noun} with identical files, but other copies make its measures too good."
            )
        if sound is not None:
            return [*said, *advice_on_lengths(found, settings.sound())]
        depths, (h, w) = np.unique(found.rows["deep"]), settings.img_size
        if len(depths) > 1:
            few = _odd_images(found)
            names = _some([found.name(i) for i, _ in few[:_GROUPS]], len(few))
            said.append(
                f"8-bit images and deeper ones have different scales: {len(few):,} of {read:,} "
                f"{'is' if len(few) == 1 else 'are'} {few[0][1]} ({names}). Keep one kind, or convert them all."
            )
        small, tiny = found.smaller_than(h, w), found.smaller_than(h / 2, w / 2)
        if tiny > _MANY * read:
            said.append(
                f"{tiny:,} of {read:,} images would be blurred, because a side is less than half of {h}x{w}: "
                "leave them out, or lower --img_size."
            )
        elif small:
            said.append(f"{small:,} of {read:,} images are smaller than {h}x{w}, and would be enlarged.")
        factor = min(np.median(found.rows["height"]) / h, np.median(found.rows["width"]) / w)
        if factor >= LARGE and settings.crop_scale != "native" and task_class(settings.task["name"]).native_crops:
            said.append(
                f"Images are {factor:.1f} times as large as the training size, so crops are shrunk: --crop_scale "
                "native cuts crops at the images' own scale, which keeps small structures."
            )
        return said


@verb(Check)
def check(options: Check) -> CheckResult:
    """Check all images or recordings for faults, and propose settings for pre-training.

    Raises:
        PatchloomError: unknown data or task, no readable image, settings that do not fit, numbers of channels
            of which none occurs in all splits (otherwise they are a ``refusal``), or a file that cannot be written.
    """
    data, workers = options.data, None if options.workers == "auto" else options.workers
    picture = None if options.picture is None else png_path(options.picture)
    given = options.settings()
    if options.recipe is not None:
        given = {name: value for name, value in given.items() if value != "auto"}
    asked = request(data, options.task, given)
    opened = open_data(data, group=options.group)
    if picture is not None and draw_windows(opened.train, picture) is None:
        raise PatchloomError(
            f"--picture draws the windows of slides, and {opened.train.name} is not divided into windows: leave it "
            "out, or add tile=256 after @"
        )
    # exact=False: copies are found below
    training = hold_out(opened.train, asked.held_out, seed=asked.seed, exact=False)[0]
    sources = [source for source in (opened.train, opened.test) if source is not None]
    found = [survey(source, options.images, workers) for source in sources]
    refusal, odd = "", list[tuple[str, str]]()
    if training.sound is None:
        examples = {channels: name for one in reversed(found) for channels, name in one.examples().items()}
        # grey and colour are one kind
        counts = Counter(1 if c in (1, 3) else c for one in found for c in one.rows["channels"].tolist())
        most = counts.most_common(1)[0][0]
        usual = {1, 3} if most == 1 else {most}
        try:
            channels = channels_for_all(examples, opened.train.name)
        except PatchloomError as problem:
            refusal, channels = str(problem), max(usual & set(examples))
        odd = [(one.name(i), reason) for one in found for i, reason in _odd_images(one, usual if refusal else None)]
    if options.out is not None:
        lines = [f"{one.source.describe(i)}\t{reason}\n" for one in found for i, reason in one.broken]
        write_whole(Path(options.out), "".join([*lines, *(f"{name}\t{reason}\n" for name, reason in odd)]))
    if refusal:  # report the commonest kind alone, and end with the reason
        if not all(set(one.moments) & usual for one in found):
            raise PatchloomError(refusal)
        sources = []
        for one in found:
            alike = one.rows["index"][np.isin(one.rows["channels"], list(usual))]
            unreadable = np.array([i for i, _ in one.broken], np.int64)
            sources.append(one.source.subset(np.union1d(alike, unreadable)))
        found = [survey(source, None, workers) for source in sources]
        training = hold_out(sources[0], asked.held_out, seed=asked.seed, exact=False)[0]
    if training.sound is None:
        stats = found[0].stats(channels)
    else:
        channels, stats = measure_data(asked, training)
    training = training.heard_as(stats.sound)
    asked, share = with_share(asked, len(opened.train), opened.train.noun)
    settings, reasons = resolve(asked, len(training), channels, stats, images=training)
    reasons = why_task(data, options.task, options.recipe, training.noun) | share | reasons
    names = [str(asked.data)] if is_object(data) else [str(name) for name in split_names(data)]
    proposal = propose(names, training, settings, reasons, options.estimate)
    close = near_copies(found[0].source)
    test = found[1] if len(found) > 1 else None
    about = opened.notes, close, refusal, tuple(odd), picture
    return CheckResult(found[0], test, channels, proposal, options.out, *about)


def _odd_images(found: Survey, usual: set[int] | None = None) -> list[tuple[int, str]]:
    """Return index and property of the images whose channels are not ``usual``, or whose depth few others have."""
    said: dict[int, str] = {}
    depths, counts = np.unique(found.rows["deep"], return_counts=True)
    if len(depths) > 1:
        few = depths[counts.argmin()]
        said |= dict.fromkeys(found.rows["index"][found.rows["deep"] == few].tolist(), _DEPTHS[int(few)])
    if usual is not None:
        for i, c in found.rows[["index", "channels"]].tolist():
            if c not in usual:
                said[i] = f"{c} channel{'s' * (c > 1)}"
    return sorted(said.items())


def _column(found: Survey, channels: int) -> dict[str, str]:
    """Return the properties of a split by name; empty if one does not apply."""
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
    listed = is_listed(stats.channels)  # they are in a table of their own
    return begin | {
        "files": _format_counts(found.kinds),
        "height x width": _sizes(rows, stats),
        "channels": _format_counts({str(c): int((rows["channels"] == c).sum()) for c in sorted(found.moments)}),
        "depth": _format_counts({_DEPTHS[int(d)]: int(c) for d, c in zip(depths, counts, strict=True)}),
        "mean": "" if listed else " ".join(f"{value:.3f}" for value in stats.mean),
        "std": "" if listed else " ".join(f"{value:.3f}" for value in stats.std),
        "unreadable": f"{len(found.broken):,}",
        "copies": f"{found.repeated:,}",
        "one colour": f"{len(found.flat):,}",
    }


def _values(found: Survey, channels: int) -> dict[str, Any]:
    """Return the properties of a split for JSON; those of the other kind of data are None."""
    rows, source = found.rows, found.source
    counts = None
    if source.labels is not None and source.classes:
        known = np.bincount(source.labels[source.labels >= 0], minlength=len(source.classes))
        counts = dict(zip(source.classes, known.tolist(), strict=True))
    values: dict[str, Any] = {
        "n": len(source),
        "tried": found.tried,
        "read": len(rows),
        "classes": counts,
        "unreadable": [{"file": found.name(i), "reason": reason} for i, reason in found.broken],
        "copies": [list(map(found.name, group)) for group in found.copies],
        "flat": list(map(found.name, found.flat)),
        "formats": None,
        "height": None,
        "width": None,
        "channels": None,
        "deep": None,
        "mean": None,
        "std": None,
        "by_channel": None,
        "sounds": None,
        "seconds": None,
    }
    if source.sound is not None:
        heads = [(*head, count) for head, count in found.kinds.items()]
        names = ("kind", "hz", "channels", "n")
        sounds = [dict(zip(names, one, strict=True)) for one in heads]
        return values | {"sounds": sounds, "seconds": _span(_seconds(found))}
    stats = found.stats(channels)
    return values | {
        "formats": found.kinds,
        "height": _span(rows["height"]),
        "width": _span(rows["width"]),
        "channels": {str(c): int((rows["channels"] == c).sum()) for c in sorted(found.moments)},
        "deep": int(rows["deep"].sum()),
        "mean": list(stats.mean),
        "std": list(stats.std),
        "by_channel": [one._asdict() for one in stats.channels],
    }


def _span(values: np.ndarray) -> dict[str, float]:
    return {"least": float(values.min()), "median": float(np.median(values)), "most": float(values.max())}


def _classes(source: Source) -> str:
    if source.labels is None or not source.classes:
        return "no labels"
    known = source.labels[source.labels >= 0]
    counts = np.bincount(known, minlength=len(source.classes))
    rarest, commonest = counts.argmin(), counts.argmax()
    if counts[rarest] == counts[commonest]:
        text = f"{len(counts)} of {counts[commonest]:,} {source.noun} each"
    elif len(counts) <= _TOLD:
        text = _format_counts(dict(zip(source.classes, counts.tolist(), strict=True)))
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


def _format_counts(counts: Mapping[str, int], most: int | None = None) -> str:
    """Format counts as "16,000 Hz (900), 8,000 Hz (3)": all in their order, or the ``most`` frequent ones."""
    if len(counts) == 1:
        return next(iter(counts))
    shown = counts.items() if most is None else Counter(counts).most_common(most)
    others = [f"{len(counts) - len(shown):,} others"] * (len(counts) > len(shown))
    return ", ".join([*(f"{name} ({count:,})" for name, count in shown), *others])


def _some(examples: Sequence[str], of: int) -> str:
    return "; ".join([*examples, *["..."] * (of > len(examples))])
