"""Held-out split of a run, and whether the initial weights have seen its images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from patchloom.data.duplicates import comparable, copies_among, copies_sentence
from patchloom.data.source import Source
from patchloom.data.splits import MAX_HELD_OUT, choose_indices, default_held_out_share, split_off
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import card_of, weights_file
from patchloom.nets.checkpoints.live import has_no_folder
from patchloom.runs.encoder import unfinished_run
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import ResolvedSettings, Settings
from patchloom.runs.training_set import Record, digest_of_record, no_record, read_record

_WORDS = {"trained": "were trained on", "unknown": "may have been trained on"}


class HeldOut(NamedTuple):
    """Held-out split of a run.

    Attributes:
        indices: int64 [h], sorted indices of the held-out images.
        copies: indices of exact copies of them, which are not trained on either.
        doubt: "trained" if the initial weights, or those of a frozen teacher, were trained on some of them, because no
            others were left; "unknown" if that is not known; "" if they were not.
        start: name of those weights; "" for random ones.
        looked: whether exact copies were searched for.
    """

    indices: np.ndarray
    copies: np.ndarray
    doubt: Literal["", "trained", "unknown"] = ""
    start: str = ""
    looked: bool = True

    def parts(self, source: Source) -> tuple[Source, Source]:
        """Split a source into training images and held-out images."""
        return split_off(source, self.indices, self.copies)

    def named(self, noun: str = "images") -> str:
        """Return a name for the images, which says if they are not new to the initial weights."""
        return f"{noun} that the weights of {self.start} {_WORDS[self.doubt]}" if self.doubt else f"held-out {noun}"

    def sentence(self, what: str) -> str:
        """Return a sentence on how ``what``, the held-out images, were used in training before."""
        if not self.doubt:
            said = f"{what} are the held-out ones, which were never trained on."
            if self.start:
                said = (
                    f"{what} are the held-out ones: neither this run nor the weights of {self.start}, with which it "
                    "began, were trained on them or on exact copies."
                )
            return said if self.looked else f"{said} Exact copies of them were not looked for."
        weights = f"the weights of {self.start}, with which it began, {_WORDS[self.doubt]} them"
        return f"{what} were held out of this run, but {weights}."

    def plain(self) -> dict[str, Any]:
        return {
            "held_out": self.indices.tolist(),
            "held_out_copies": self.copies.tolist(),
            "held_out_doubt": self.doubt,
            "held_out_looked": self.looked,
        }


def choose_held_out(asked: Settings, source: Source) -> tuple[HeldOut, Record]:
    """Draw the held-out split of a run, and return it with the record of all images it and earlier runs train on.

    Images that no earlier run trained on are preferred, so there may be fewer than asked for.
    """
    before, start = no_record(), " and ".join(asked.weights_before)
    for name in asked.weights_before:
        record = read_record(RunFolder(name).trained_on) if name == asked.from_run else record_of(name)
        record = record or no_record(name)
        before = before.and_trained_on(record.contents, name)
        for unknown in record.unknown:
            before = before.and_trained_on(None, unknown)
    contents = source.contents()
    known = not before.unknown and contents is not None and comparable(contents, before.contents)
    indices, copies = _drawn(asked, source, before.contents)
    found = HeldOut(indices, copies, "", start, contents is not None)
    if contents is not None and np.isin(contents[indices], before.contents).any():
        found = found._replace(doubt="trained")
    elif start and len(indices):
        runs = [RunFolder(one) for one in asked.weights_before if Path(one).is_dir()]
        same = any(run.config.exists() and run.read_config().data == asked.data for run in runs)
        # files of the same data that were written anew would all seem new
        if not known or (same and contents is not None and not np.isin(contents, before.contents).any()):
            found = found._replace(doubt="unknown")
            # without content digests, the split of the previous run is reused if the data are the same
            if asked.from_run is not None and len(asked.weights_before) == 1 and contents is None:
                folder = RunFolder(asked.from_run)
                there = stored_held_out(folder, folder.read_config(), source)
                if not there.doubt and folder.read_data()["fingerprint"] == source.fingerprint():
                    found = there._replace(start=asked.from_run)
    trained_on = np.setdiff1d(np.arange(len(source)), np.concatenate([found.indices, found.copies]))
    return found, before.and_trained_on(None if contents is None else contents[trained_on], source.name)


def stored_held_out(folder: RunFolder, settings: ResolvedSettings, source: Source) -> HeldOut:
    """Return the stored held-out split of a run, whose images are unchanged."""
    found, start = folder.read_data(), " and ".join(settings.weights_before)
    indices, copies = (np.array(found[name], np.int64) for name in ("held_out", "held_out_copies"))
    return HeldOut(indices, copies, found["held_out_doubt"], start, found["held_out_looked"])


def unchanged_held_out(run: Path, source: Source) -> HeldOut:
    """Return the stored held-out split of a run; refuse a ``source`` whose images have changed."""
    folder = RunFolder(run)
    if source.fingerprint() != folder.read_data()["fingerprint"]:
        raise PatchloomError(
            f"the {source.noun} of {source.name} have changed since {run} was trained, so its held-out split is "
            "unknown: restore the data, or begin again with another --out"
        )
    return stored_held_out(folder, folder.read_config(), source)


def _drawn(settings: Settings, source: Source, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw the held-out images, as `choose_indices`; none with ``--held_out 0``."""
    if settings.held_out == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return choose_indices(source, held_out_count(settings, source), split_seed(settings), known)


def own_held_out(folder: RunFolder, settings: ResolvedSettings, source: Source) -> HeldOut:
    """Return the held-out split of a run; if its images have changed, draw one without images it trained on.

    Raises:
        PatchloomError: the run held out no images.
    """
    if settings.held_out == 0:
        raise PatchloomError(
            f"{folder.path} was trained on all of its images (--held_out 0): give images, as in "
            "patchloom look RUN IMAGES"
        )
    if source.fingerprint() == folder.read_data()["fingerprint"]:
        return stored_held_out(folder, settings, source)
    record = read_record(folder.trained_on) or no_record()
    return HeldOut(*_drawn(settings, source, record.contents))


def note_test_overlap(folder: RunFolder, settings: ResolvedSettings, test: Source) -> str:
    """Return sentences, after a space, on test images that a run may have trained on; "" if there are none."""
    record, start = read_record(folder.trained_on), " and ".join(settings.weights_before)
    doubt = "" if record is None else copies_sentence(test, record.contents)
    if start and (record is None or record.unknown or copies_among(test, record.contents) is None):
        doubt += f" The weights of {start}, with which the run began, may have been trained on the test images."
    return doubt


def record_of(source: str | Path) -> Record | None:
    """Return the record of what an encoder was trained on; None if there is none."""
    if unfinished_run(source) is not None:
        return read_record(RunFolder(source).trained_on)
    if has_no_folder(source):
        return None
    encoder = weights_file(source)
    card = card_of(encoder)
    if card is None or not card.trained_on:
        return None
    for folder in list(encoder.parents)[:2]:  # a teacher is in a folder of the run
        beside = RunFolder(folder).trained_on
        if digest_of_record(beside) == card.trained_on:
            return read_record(beside)
    return None


def describe_seen(source: str | Path | None, test: Source, labels: bool = True) -> str:
    """Return a clause on whether an encoder was trained on test images that were split off its own data, perhaps."""
    record, noun = None if source is None else record_of(source), test.noun
    seen = None if record is None or record.unknown else copies_among(test, record.contents)
    unseen = ", without their labels" if labels else ""
    if seen is None:
        return f"pre-training may have seen those {noun}{unseen}"
    if not seen:
        return f"none of those {noun} were in pre-training"
    return f"{seen:,} of those {len(test):,} {noun} were in pre-training{unseen}"


def seen_in_pretraining(source: str | Path, test: Source) -> str:
    """Return a sentence, after a space, on test images that an encoder was trained on; "" if none are known."""
    record = record_of(source)
    seen = None if record is None else copies_among(test, record.contents)
    if not seen:
        return ""
    were = f"{seen:,} of {len(test):,} test {test.noun} were in pre-training, without their labels"
    return f" {were}: scores say less about new {test.noun} until they are left out of it."


def held_out_count(settings: Settings, source: Source) -> int:
    share = default_held_out_share(len(source))[0] if settings.held_out == "auto" else settings.held_out
    return min(round(share * len(source)), MAX_HELD_OUT)


def split_seed(settings: Settings) -> int:
    return settings.seed if settings.split_seed is None else settings.split_seed


def with_share(settings: Settings, n: int, noun: str = "images") -> tuple[Settings, dict[str, str]]:
    """Replace an ``auto`` held-out fraction for ``n`` images; return the settings, and the reason by setting."""
    if settings.held_out != "auto":
        return settings, {}
    share, why = default_held_out_share(n, noun)
    return replace(settings, held_out=share), {"held_out": why}
