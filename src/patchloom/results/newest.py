"""The newest evaluations among the results of a run, with the seeds of each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from patchloom.results.claims import BLEND, OF_TEACHER, RAW, START, UNTRAINED
from patchloom.results.result import Result
from patchloom.results.store import evaluations

_MEASURED = {  # settings that an evaluation measured: they differ between seeds
    *("l2", "key", "held_out", "held_out_accuracy", "held_out_score", "best_epoch", "best_step", "agreement"),
    *("validation_accuracy", "validation_score", "validation_images"),
}
_SELECTED = {"pooling", "layer", "blend", "blr", "lr"}  # settings that held-out training images may have selected
_OTHERS = ("from scratch", "ensemble")  # encoders of a first result that are not the run's
_CONTROLS = (UNTRAINED, *RAW, START, BLEND)


def settings_of(one: Result) -> dict[str, Any]:
    """Return the settings of a result without what its evaluation measured."""
    return {name: value for name, value in one.settings.items() if name not in _MEASURED}


def newest(results: Iterable[Result], name: str = "") -> list[list[list[Result]]]:
    """Return the newest evaluation of each seed, the newest seed last, by protocol, data and settings.

    All evaluations of a group quote results of the same encoders and measures in the same order.

    Args:
        results: all results of a run, the newest last.
        name: present name of the run, whose folder may have been renamed since; "": encoders keep their names, and
            controls may stand alone, as in the folder of a comparison.
    """
    alike: dict[tuple[Any, ...], dict[int, list[Result]]] = {}
    for each in evaluations(results):
        first = next((one.encoder for one in each if one.quoted), _CONTROLS[0])
        if name and first in _CONTROLS and first != name:  # the encoder's own result is lost
            continue
        rows = each
        if name and first not in _OTHERS:  # the run may have been renamed since
            teacher = OF_TEACHER if first.endswith(OF_TEACHER) else ""
            _, step, reached = first.removesuffix(teacher).partition(" (step ")
            now = f"{name}{step}{reached}{teacher}"
            rows = [replace(one, encoder=now) if one.encoder == first else one for one in each]
        quoted = [one for one in rows if one.quoted]
        of = tuple((one.encoder, one.measure) for one in quoted)
        asked = frozenset(json.dumps(asked_of(one), sort_keys=True) for one in quoted)
        key = rows[0].protocol, rows[0].data, of, asked
        alike.setdefault(key, {})[rows[0].seed] = rows
    found = []
    for seeds in alike.values():
        ordered = sorted(seeds.values(), key=lambda rows: (rows[0].date, rows[0].seed))
        last, trainings = ordered[-1][0], max((a.trainings for one in ordered[-1] for a in one.against), default=1)
        # seeds of one command are consecutive, and each may have drawn its own test images; others are out of date
        found.append([
            rows for rows in ordered
            if rows[0].fingerprint == last.fingerprint or 0 < last.seed - rows[0].seed < trainings
        ])  # fmt: skip
    return found


def asked_of(one: Result) -> dict[str, Any]:
    """Return the settings that identify an evaluation: with images in groups or without, it is the same one."""
    free = {"group"} | (_SELECTED if {"held_out_accuracy", "held_out_score"} & {*one.settings} else set())
    return {name: value for name, value in settings_of(one).items() if name not in free}
