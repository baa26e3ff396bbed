"""Evaluation protocols, one file each, and a function that runs any of them by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from patchloom.arguments import PathLike, validate_arguments
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import is_first, print_line
from patchloom.errors import (
    PatchloomError,
    listing,
    suggestion,
    unknown_option_error,
)
from patchloom.evaluate.settings import DryRun, EvalSettings, print_notes_once, share_nothing
from patchloom.evaluate.trainer import keep_until_done
from patchloom.look.charts import draw_confusion
from patchloom.nets.checkpoints.live import has_no_folder
from patchloom.nets.checkpoints.origin import check_model
from patchloom.options.declare import filled
from patchloom.options.protocols import PROTOCOLS
from patchloom.results import store
from patchloom.results.classes import MACRO_F1, confusion_of
from patchloom.results.evaluation import Drawing, Evaluation, frozen_ahead
from patchloom.results.result import Result
from patchloom.runs.encoder import encoder_place
from patchloom.system.device import float32_products
from patchloom.system.distributed import explain_peer_death


def protocol_of(name: str) -> tuple[Callable[[Any, DataLike, EvalSettings, Any], Evaluation], dict[str, Any]]:
    """Return the function of a protocol, and options from its name: ``blocks:2`` means blocks with count=2.

    It is imported on demand.
    """
    plain, _, number = name.partition(":")
    if plain not in PROTOCOLS or (number and (plain != "blocks" or not number.isdigit())):
        raise PatchloomError(f"there is no protocol {name}{suggestion(plain, PROTOCOLS)} Choose {listing(PROTOCOLS)}.")
    module, _, function = PROTOCOLS[plain].path.rpartition(".")
    return getattr(importlib.import_module(module), function), {"count": int(number)} if number else {}


def _split(protocol: str, given: dict[str, Any]) -> tuple[EvalSettings, Any]:
    """Return the common settings and the protocol's own options, checked."""
    kind, there = PROTOCOLS[protocol.partition(":")[0]].options, f"patchloom evaluate {protocol} --help all lists them"
    common = [one.name for one in fields(EvalSettings)]
    known = [*(one.name for one in fields(kind)), *common]
    for name in given:
        if name not in known:
            raise unknown_option_error(name, known, there)
    own = {name: value for name, value in given.items() if name not in common}
    settings = filled(EvalSettings, {name: value for name, value in given.items() if name in common}, there)
    return settings, filled(kind, own, there)


@validate_arguments
@float32_products()
def evaluate(
    protocol: str,
    run: PathLike | nn.Module,
    data: DataLike,
    *,
    mean: Iterable[float] | None = None,
    std: Iterable[float] | None = None,
    **options: Any,
) -> Evaluation:
    """Evaluate an encoder by one protocol, with its controls.

    Its results are appended to ``results.jsonl`` if ``run`` is a run's folder. Pictures show the last seed.

    Args:
        protocol: one of `patchloom.options.protocols.PROTOCOLS`.
        run: folder of a finished or interrupted run; an encoder's ``.safetensors`` file; ``timm:NAME``; or, with
            ``model=NAME``, a file of weights only with timm's names; in Python also a ViT, Eva or Swin of timm as a
            module, whose results are returned and not stored.
        data: labelled images, as for `patchloom.data.sources.open.open_data`.
        mean, std: statistics per channel, in [0, 1] units, that normalise the images of a module; not needed for
            timm's published weights.
        options: fields of `patchloom.options.evaluate.CommonOptions`, such as ``seeds=3``, and of the protocol's
            dataclass in `patchloom.options.protocols`.

    Returns:
        The evaluation of the last seed, which includes those of the others and the differences over all seeds; of a dry
        run, an evaluation without results.

    Raises:
        PatchloomError: unknown protocol, option, encoder or data, or invalid values.
    """
    function, given = protocol_of(protocol)
    declaration = PROTOCOLS[protocol.partition(":")[0]]
    settings, chosen = _split(protocol, {**options, **given})
    run = encoder_place(run, mean, std)
    check_model(run, settings.model)
    if settings.network is not None and declaration.own_network:
        raise PatchloomError(f"{protocol} is of the networks that were trained for it: leave out --network")
    place, before = None, list[Result]()
    if not declaration.trains:
        share_nothing(settings, protocol)
    if not has_no_folder(run) and Path(run).is_dir() and is_first():
        place = Path(run)
        before = store.check(place, outcomes=protocol == "finetune")
    reports: list[Evaluation] = []
    with print_notes_once(), keep_until_done(), explain_peer_death():
        for seed in range(settings.seed, settings.seed + settings.seeds):
            if settings.seeds > 1 and is_first():
                print_line(f"Seed {seed}, {seed - settings.seed + 1} of {settings.seeds}:")
            try:
                report = function(run, data, replace(settings, seed=seed), chosen)
            except DryRun as plan:
                again = [f"The same for {settings.seeds} seeds."] * (settings.seeds > 1)
                return Evaluation.of_test(
                    plan.test,
                    settings.seed,
                    len(plan.test),
                    results=[],
                    method=" ".join([*plan.sentences, *again]),
                    headline="This was a dry run: nothing was trained, and no result was written.",
                    quoted=(),
                )
            if settings.group is not None:
                report = report.with_setting("group", settings.group)
            if settings.network == "teacher":
                report = report.with_setting("network", "teacher")
            if protocol == "finetune" and (ahead := frozen_ahead(before, report)):
                report = replace(report, method=f"{report.method} {ahead}")
            if settings.seeds > 1 and len(reports) == settings.seeds - 1:
                report = report.over_seeds(reports)
            if settings.workers == "auto":
                number, why = settings.readers
                by = f"Up to {number} process{'es' * (number > 1)}" if number else "The main process"
                read = f"{by} read{'s' * (number < 2)} the data (--workers auto: {why})."
                report = replace(report, method=f"{report.method} {read}")
            reports.append(report)
            if place is not None:
                store.append(place, report.results)
    report = reports[-1]
    matrix = next((one for one in report.results if one.measure == MACRO_F1 and one.also), None)
    if settings.all_measures and place is not None and protocol != "keywords" and matrix is not None:  # has its own
        content = {
            "counts": confusion_of(matrix, report.classes),
            "classes": report.classes,
            "title": f"{matrix.encoder}, {protocol}: {report.quoted[0].measure} {report.quoted[0].text()}",
            "caption": f"Each cell: number of {report.noun} and fraction of the row. Blue: correct; red: wrong.",
        }
        out = place / "pictures" / f"confusion-{protocol.replace(':', '-')}.png"
        report = replace(report, drawings=(*report.drawings, Drawing(draw_confusion, out, content)))
    for drawing in report.drawings if is_first() else ():
        drawing.function(**drawing.content, out=drawing.out)
    return report
