"""Which images a run does not train on, and whether they are new to the weights with which it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from patchloom.data.duplicates import comparable, copies_among, copies_sentence
from patchloom.data.source import Source
from patchloom.data.splits import MAX_HELD_OUT, choose_indices, default_held_out_share, split_off
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import is_encoder_file, read_encoder_card, weights_file
from patchloom.runs.encoder import unfinished_run
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import ResolvedSettings, Settings
from patchloom.runs.training_set import Record, digest_of_record, no_record, read_record

_WORDS = {"trained": "were trained on", "unknown": "may have been trained on"}


class HeldOut(NamedTuple):
    """The images that a run holds out of its data's training images.

    Attributes:
        indices: int64 [h], sorted.
        copies: indices of exact copies of them, which are not trained on either.
        doubt: "trained" if the weights with which the run begins, or those of its frozen teacher, were trained on some
            of them, since no others were left; "unknown" if nobody can tell whether they were; "" if they were not.
        start: what those weights are called; "" for fresh ones.
        looked: exact copies were looked for.
    """

    indices: np.ndarray
    copies: np.ndarray
    doubt: Literal["", "trained", "unknown"] = ""
    start: str = ""
    looked: bool = True

    def parts(self, source: Source) -> tuple[Source, Source]:
        """The images to train on, and those that are held out."""
        return split_off(source, self.indices, self.copies)

    def named(self, noun: str = "images") -> str:
        """What to call them: held-out ones only where they are."""
        return f"{noun} that the weights of {self.start} {_WORDS[self.doubt]}" if self.doubt else f"held-out {noun}"

    def sentence(self, what: str) -> str:
        """That the run did not train on ``what``, and what its weights may have done before."""
        if not self.doubt:
            said = f"{what} are the held-out ones, which were never trained on."
            if self.start:
                said = (
                    f"{what} are the held-out ones: they were not trained on here, and no exact copy of them for the "
                )
                said += f"weights of {self.start}, with which the run began."
            return said if self.looked else f"{said} Exact copies of them were not looked for."
        weights = f"the weights of {self.start}, with which it began, {_WORDS[self.doubt]} them"
        return f"{what} were held out of this run, but {weights}."

    def plain(self) -> dict[str, Any]:
        """As plain values for YAML."""
        return {
            "held_out": self.indices.tolist(),
            "held_out_copies": self.copies.tolist(),
            "held_out_doubt": self.doubt,
            "held_out_looked": self.looked,
        }


def choose_held_out(asked: Settings, source: Source) -> tuple[HeldOut, Record]:
    """The images that a run holds out of ``source``, and the record of what it and those before it train on.

    They are images that no run before it trained on, as long as there are such images, and perhaps fewer than asked.
    """
    before, start = _record_before(asked), " and ".join(asked.weights_before)
    contents = source.contents()
    known = not before.unknown and contents is not None and comparable(contents, before.contents)
    indices, copies = choose_indices(source, held_out_count(asked, source), split_seed(asked), before.contents)
    found = HeldOut(indices, copies, "", start, contents is not None)
    if contents is not None and np.isin(contents[indices], before.contents).any():
        found = found._replace(doubt="trained")
    elif start and not (known and contents is not None and _known_again(asked, contents, before)):
        found = _as_there(asked, source) or found._replace(doubt="unknown")
    trained_on = np.setdiff1d(np.arange(len(source)), np.concatenate([found.indices, found.copies]))
    return found, before.and_trained_on(None if contents is None else contents[trained_on], source.name)


def stored_held_out(folder: RunFolder, settings: ResolvedSettings, source: Source) -> HeldOut:
    """What a run holds out of ``source``, the very images with which it was begun.

    A run of a version that did not store it held out the images of certain numbers, copies or not.
    """
    found, start = folder.read_data(), " and ".join(settings.weights_before)
    if "held_out" in found:
        indices, copies = (np.array(found[name], np.int64) for name in ("held_out", "held_out_copies"))
        return HeldOut(indices, copies, found["held_out_doubt"], start, found.get("held_out_looked", True))
    drawn = choose_indices(source, held_out_count(settings, source), split_seed(settings), exact=False)
    return HeldOut(*drawn, "unknown" if start else "", start, looked=False)


def unchanged_held_out(run: Path, source: Source) -> HeldOut:
    """Return what a run holds out of ``source``, whose indices mean nothing once its images have changed."""
    folder = RunFolder(run)
    if source.fingerprint() != folder.read_data()["fingerprint"]:
        raise PatchloomError(
            f"the {source.noun} of {source.name} have changed since {run} was trained, so its held-out ones are not "
            "known: put them back as they were, or begin anew with another --out"
        )
    return stored_held_out(folder, folder.read_config(), source)


def own_held_out(folder: RunFolder, settings: ResolvedSettings, source: Source) -> HeldOut:
    """What a run held out of ``source``; if the images have changed since, some that it did not train on, if it can."""
    if source.fingerprint() == folder.read_data()["fingerprint"]:
        return stored_held_out(folder, settings, source)
    record = read_record(folder.trained_on) or no_record()
    return HeldOut(*choose_indices(source, held_out_count(settings, source), split_seed(settings), record.contents))


def note_test_overlap(folder: RunFolder, settings: ResolvedSettings, test: Source) -> str:
    """What keeps test images that data brings from being new to a run: sentences after a space; "" if nothing does."""
    record, start = read_record(folder.trained_on), " and ".join(settings.weights_before)
    doubt = "" if record is None else copies_sentence(test, record.contents)
    if start and (record is None or record.unknown or copies_among(test, record.contents) is None):
        doubt += f" The weights of {start}, with which the run began, may have been trained on the test images."
    return doubt


def record_of(source: str | Path) -> Record | None:
    """Return the record of what an encoder was trained on; None if there is none."""
    if unfinished_run(source) is not None:
        return read_record(RunFolder(source).trained_on)
    return None if str(source).startswith("timm:") else _record_beside(weights_file(source))


def seen_in_pretraining(source: str | Path, test: Source) -> str:
    """Return the sentence on test images that an encoder was trained on, after a space; "" if none are known."""
    record = record_of(source)
    seen = None if record is None else copies_among(test, record.contents)
    if not seen:
        return ""
    were = f"{seen:,} of {len(test):,} test {test.noun} were in pre-training, without their labels"
    return f" {were}: scores say less about new {test.noun} until they are left out of it."


def held_out_count(settings: Settings, source: Source) -> int:
    """How many images of ``source`` are to be held out."""
    share = default_held_out_share(len(source))[0] if settings.held_out == "auto" else settings.held_out
    return min(round(share * len(source)), MAX_HELD_OUT)


def split_seed(settings: Settings) -> int:
    """The seed that draws the images that are held out."""
    return settings.seed if settings.split_seed is None else settings.split_seed


def with_share(settings: Settings, n: int, noun: str = "images") -> tuple[Settings, dict[str, str]]:
    """Settings that say which share of ``n`` images is held out, and the reason, by ``held_out``, where it was auto."""
    if settings.held_out != "auto":
        return settings, {}
    share, why = default_held_out_share(n, noun)
    return replace(settings, held_out=share), {"held_out": why}


def _record_before(asked: Settings) -> Record:
    """Of the weights with which a run begins, and of a frozen teacher's, whose features tell what it has seen."""
    found = no_record()
    for source in asked.weights_before:
        of_run = source == asked.from_run
        record = read_record(RunFolder(source).trained_on) if of_run else record_of(source)
        record = record or no_record(source)
        unknown = dict.fromkeys([*found.unknown, *record.unknown])
        found = Record(np.unique(np.concatenate([found.contents, record.contents])), tuple(unknown))
    return found


def _known_again(asked: Settings, contents: np.ndarray, before: Record) -> bool:
    """Whether the files of the other run's data are still those: written anew, they would all seem to be new."""
    runs = [RunFolder(source) for source in asked.weights_before if Path(source).is_dir()]
    if not any(run.config.exists() and run.read_config().data == asked.data for run in runs):
        return True
    return bool(np.isin(contents, before.contents).any())


def _record_beside(encoder: Path) -> Record | None:
    """The record of an encoder's file; another one's may lie there, too."""
    path = RunFolder(encoder.parent).trained_on
    if (
        not is_encoder_file(encoder)
        or not (digest := read_encoder_card(encoder).trained_on)
        or digest != digest_of_record(path)
    ):
        return None
    return read_record(path)


def _as_there(asked: Settings, source: Source) -> HeldOut | None:
    """What the run before held out, if that was new to it, and the data is the same, even though it has no contents."""
    if asked.from_run is None or len(asked.weights_before) > 1 or source.contents() is not None:
        return None
    folder = RunFolder(asked.from_run)
    there = stored_held_out(folder, folder.read_config(), source)
    if there.doubt or "held_out" not in (found := folder.read_data()) or found["fingerprint"] != source.fingerprint():
        return None
    return there._replace(start=asked.from_run)
