"""What a survey of recordings tells: a column of the table of `patchloom.check.check`, and advice."""

from __future__ import annotations

from collections import Counter

import numpy as np

from patchloom.data.survey import Survey
from patchloom.sound import Sound
from patchloom.waiting import duration

_MOST = 5  # rates, kinds or numbers of channels that are named


def column_of(found: Survey) -> dict[str, str]:
    """What the files are, how long they are, and how many are silent, by the name of the property."""
    kinds, rates, channels = (Counter[str]() for _ in range(3))
    for (kind, rate, tracks), count in found.heads.items():
        kinds[kind] += count
        rates[f"{rate:,} Hz"] += count
        channels[str(tracks)] += count
    lengths = _seconds(found)
    shortest, median, longest = (f"{value:.2f}" for value in (lengths.min(), np.median(lengths), lengths.max()))
    span = shortest if shortest == longest else f"{shortest} to {longest}, {median} at the median"
    return {
        "files": _counted(kinds),
        "rate": _counted(rates),
        "channels": _counted(channels),
        "seconds": f"{span}; {duration(float(lengths.sum()))} in all",
        "unreadable": f"{len(found.broken):,}",
        "copies": f"{found.repeated:,}",
        "silent": f"{len(found.flat):,}",
    }


def advice_on_lengths(found: Survey, sound: Sound) -> list[str]:
    """A sentence if recordings have another length than ``sound`` takes."""
    lengths, n = _seconds(found), len(found.rows)
    shorter, longer = (int(other.sum()) for other in (lengths < 0.99 * sound.seconds, lengths > 1.01 * sound.seconds))
    said = []
    if shorter:
        said.append(
            f"{shorter:,} of {n:,} recordings are shorter than {sound.seconds:g} s, and are padded with silence"
        )
    if longer:
        said.append(f"{longer:,} of {n:,} are longer, and {sound.seconds:g} s of each are heard at a time")
    return [f"{'; '.join(said)}: --seconds sets it."] if said else []


def _seconds(found: Survey) -> np.ndarray:
    """The length of each recording, float64 [n]."""
    assert found.source.sound is not None
    return found.rows["width"] / found.source.sound.rate


def _counted(counts: Counter[str]) -> str:
    """As "16,000 Hz (900), 8,000 Hz (3)"."""
    if len(counts) == 1:
        return next(iter(counts))
    more = [f"{len(counts) - _MOST:,} others"] * (len(counts) > _MOST)
    return ", ".join([*(f"{name} ({count:,})" for name, count in counts.most_common(_MOST)), *more])
