"""Plots of several runs: losses over epochs, or results against a setting in which the runs differ."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.errors import PatchloomError, listing, suggestion
from patchloom.look.charts import SMOOTH, Line, Panel, draw_lines, short_name, write_table
from patchloom.options.declare import verb
from patchloom.options.protocols import PROTOCOLS
from patchloom.options.verbs import Curves
from patchloom.results import store
from patchloom.results.result import Result
from patchloom.runs.past import RunData, load_runs
from patchloom.runs.settings import LAUNCH, settings_by_name

POSITION_ACCURACY = "position-accuracy"
PROTOCOL_TITLES = {name: one.title for name, one in PROTOCOLS.items() if one.title}
_TITLES = PROTOCOL_TITLES | dict.fromkeys((POSITION_ACCURACY, "positions"), "position accuracy")
_DRAWN = (POSITION_ACCURACY, "finetune", "linear", "knn", "few-shot", "blocks")  # unless --of chooses another
_OVER_EPOCHS = {"knn": "mean patch tokens", "instance-knn": "the task's representation of an image"}

# settings that do not distinguish experiments; seeds are averaged
_MACHINE = {*LAUNCH, *"device workers threads cache crop_on attention kernels compile checkpointing".split()}
# settings of an evaluation that must be equal in compared results; the others follow from the data
_ALIKE = (
    *("recipe", "epochs", "k", "gallery", "labels", "per_class", "method", "head_on", "ratio", "probe", "column"),
    *("test_crop", "last_norm", "network"),
)
_AVERAGE = "average"  # value of a setting in a result that is the mean over all its values
_ALONE = "from scratch"  # name of the encoder in an evaluation with only the control

Way = tuple[tuple[str, Any], ...]  # how results were measured: names and values
Pair = tuple[Result, Result | None]  # of an encoder and of its control; low and high of a mean are its range


def evaluations_of(run: RunData) -> dict[str, list[list[Result]]]:
    """Return evaluations of a run's encoder by protocol, the oldest first; position accuracy: of held-out images."""
    found: dict[str, list[list[Result]]] = {}
    curves = run.curves("held_out")
    if {"", "chance"} <= curves.keys():  # only tasks of positions have chance
        ends = {run.name: curves[""][1][-1], "chance": curves["chance"][1][-1]}
        results = [
            Result.exact(POSITION_ACCURACY, name, POSITION_ACCURACY, {}, float(end)) for name, end in ends.items()
        ]
        found[POSITION_ACCURACY] = [[replace(one, data="held-out images", quoted=True) for one in results]]
    for results in store.evaluations(one for one in run.results if math.isfinite(one.value)):
        if next((one.encoder for one in results if one.quoted), _ALONE) != _ALONE:
            found.setdefault(results[0].protocol, []).append(results)
    return found


# The axis, and the lines.


def setting_of(runs: Sequence[RunData], name: str) -> tuple[str, list[Any]]:
    """Return the full name of a setting and its value in each run."""
    known = list(dict.fromkeys(one for run in runs for one in run.became))
    full = next((one for one in (name, f"{name}.name", f"task.{name}", f"model.{name}") if one in known), None)
    if full is None:
        near = suggestion(name, [*known, *map(_short, known)])
        raise PatchloomError(
            f"--against {name} is not a setting of these runs{near} Their config.yaml lists all settings; those of the "
            "task are given as in task.mask_ratio."
        )
    for run in runs:
        if full not in run.became:
            raise PatchloomError(
                f"{run.folder.path} has no setting {full}: leave that run out, or choose another --against"
            )
    values = [run.became[full] for run in runs]
    if all(value == values[0] for value in values):
        raise PatchloomError(
            f"all of these runs have {full} {values[0]}: give runs that differ in it, or choose another --against"
        )
    return full, values


def lines_of(runs: Sequence[RunData], against: str) -> list[str]:
    """Return the line of each run, named by the other settings that differ; seeds share a line.

    A setting that is ``auto`` in all runs follows from the others and is ignored.
    """
    # the values of each setting, as requested and as resolved; of a task's option, for each task
    values: dict[tuple[str, Any], list[tuple[str, str]]] = {}
    for run in runs:
        asked = settings_by_name(run.asked)
        for name, value in run.became.items():
            if name not in _MACHINE and name not in ("seed", against):
                of_task = name.startswith("task.") and name != "task.name"
                kind = name, run.became.get("task.name") if of_task else None
                values.setdefault(kind, []).append((str(asked.get(name)), str(value)))
    differ = {name for (name, _), its in values.items() if all(len(set(part)) > 1 for part in zip(*its, strict=True))}
    names = [name for name in dict.fromkeys(name for name, _ in values) if name in differ]
    return [", ".join(f"{_short(name)} {run.became[name]}" for name in names if name in run.became) for run in runs]


def _short(name: str) -> str:
    return name.removeprefix("task.").removeprefix("model.") if not name.endswith(".name") else name.partition(".")[0]


def _word(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value)


# Results that were measured in the same way.


def _words(way: Way) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {short_name(str(value))}".strip() for name, value in way)


def pairs_at(results: Sequence[Result], setting: str) -> dict[Any, Pair]:
    """Return the quoted results of an encoder and its control by a setting, with those that differ only in it.

    If the quoted result is an average over another setting, so is each of them. Without a ``setting`` (""), there is
    only the quoted one.
    """
    quoted = [one for one in results if one.quoted]
    control = next((one for one in quoted if one.encoder != quoted[0].encoder), None)
    if not setting:
        return {"": (quoted[0], control)}
    found: dict[Any, list[list[Result]]] = {}
    for one in results:
        value, kind = _word(one.settings.get(setting, _AVERAGE)), (one.encoder, one.measure, one.settings.keys())
        for side, like in enumerate((quoted[0], control)):
            if like is None or value == _AVERAGE or kind != (like.encoder, like.measure, like.settings.keys()):
                continue
            # equal but for this setting, and those averaged over
            if all(name == setting or kept in (one.settings[name], _AVERAGE) for name, kept in like.settings.items()):
                found.setdefault(value, [[], []])[side].append(one)
    return {
        value: (_mean(mine), _mean(theirs) if theirs else control) for value, (mine, theirs) in found.items() if mine
    }


def _mean(results: Sequence[Result]) -> Result:
    values = [one.value for one in results]
    return replace(results[-1], value=float(np.mean(values)), low=min(values), high=max(values))


def mean_pair(pairs: Sequence[Pair]) -> Pair:
    """Return the means of results and of their controls."""
    controls = [control for _, control in pairs if control is not None]
    return _mean([mine for mine, _ in pairs]), _mean(controls) if controls else None


def comparable_pairs(runs: Sequence[RunData], of: str, setting: str = "") -> tuple[str, list[dict[Any, Pair]]]:
    """Return each run's results of a protocol by a setting of the evaluation, and how all of them were measured.

    Seeds are averaged; the newest evaluation of each seed counts.
    """
    evaluations = [evaluations_of(run) for run in runs]
    known = sorted({name for its in evaluations for name in its})
    if of not in known:
        there = f"They have {listing(known, 'and')}." if known else "They have none yet."
        raise PatchloomError(f"these runs have no {of} results{suggestion(of, known)} {there}")
    # pairs by the way of measuring, the value of the setting, and the seed
    found: list[dict[Way, dict[Any, dict[int, Pair]]]] = []
    for run, its in zip(runs, evaluations, strict=True):
        if of not in its:
            why = f"no {of} result: patchloom evaluate {of} {run.folder.path} DATA makes one, or leave that run out"
            if of == POSITION_ACCURACY:
                why = "no position accuracy, because its task does not predict positions: leave that run out"
            raise PatchloomError(f"{run.folder.path} has {why}")
        found.append({})
        for results in its[of]:
            for value, pair in pairs_at(results, setting).items():
                one = pair[0]
                # what must be equal in compared results: data, settings and pooling
                equal = {name: _word(one.settings[name]) for name in _ALIKE if name in one.settings and name != setting}
                if "l2" not in one.settings and one.pooling != "-":  # the linear probe selects its own
                    equal["pooling"] = one.pooling
                ways = found[-1].setdefault((("", one.data), *equal.items()), {})
                ways.setdefault(value, {})[one.seed] = pair
        if not found[-1]:
            names = sorted({name for results in its[of] for one in results for name in one.settings})
            there = f"{suggestion(setting, names)} They have {', '.join(names)}." if names else "."
            raise PatchloomError(f"--against {of}.{setting}: {of} results of {run.folder.path} have none{there}")

    def values_and_date(way: Way) -> tuple[int, str]:
        of_way = [ways[way] for ways in found if way in ways]
        dates = (pair[0].date for values in of_way for seeds in values.values() for pair in seeds.values())
        return len({value for values in of_way for value in values}), max(dates)

    common = [way for way in found[0] if all(way in ways for ways in found)]
    if not common:
        other = next((ways for ways in found if found[0].keys().isdisjoint(ways)), found[-1])
        two = "; ".join(_words(max(ways, key=values_and_date)) for ways in (found[0], other))
        raise PatchloomError(
            f"the {of} results of these runs were not measured in the same way ({two}): evaluate all of them on the "
            "same data with the same options"
        )
    best = max(common, key=values_and_date)
    if setting and values_and_date(best)[0] < 2:
        (value,) = found[0][best]
        raise PatchloomError(
            f"all {of} results of these runs have {setting} {value}: evaluate with another value, as in "
            f"patchloom evaluate {of} {runs[0].folder.path} DATA --{setting} ..."
        )
    means = [{value: mean_pair([*seeds.values()]) for value, seeds in ways[best].items()} for ways in found]
    return _words(best), means


def panel_of(
    runs: Sequence[RunData], of: str, names: Sequence[str], places: Sequence[Any] = (), setting: str = ""
) -> tuple[Panel, list[tuple[Any, ...]]]:
    """Return the panel of a protocol's results, with a point for each line and place, and the rows of its table.

    Args:
        runs: the runs.
        of: the protocol.
        names: name of each run's line.
        places: place of each run; () if the places are the values of a setting of the evaluation.
        setting: that setting.
    """
    measured, found = comparable_pairs(runs, of, setting)
    points = found if setting else [{place: each[""]} for place, each in zip(places, found, strict=True)]
    order = list(dict.fromkeys(place for each in points for place in each))
    numbers = all(isinstance(place, int | float) and not isinstance(place, bool) for place in order)
    ticks: dict[float, Any] = {place: place for place in sorted(order)} if numbers else dict(enumerate(order))
    lines, rows, counts, beside = [], [], set[int](), dict[float, list[Result]]()
    for name in dict.fromkeys(names):
        drawn: dict[float, Result] = {}
        for x, place in ticks.items():
            members = [i for i, its in enumerate(names) if its == name and place in points[i]]
            if not members:
                continue
            drawn[x], control = mean_pair([points[i][place] for i in members])
            if control is not None:
                beside.setdefault(x, []).append(control)
            counts.add(len(members))
            shown = drawn[x]
            beside_it = ("", "") if control is None else (control.encoder, control.value)
            of_runs = " ".join(runs[i].name for i in members)
            rows.append((of, measured, name, place, shown.value, shown.low, shown.high, *beside_it, of_runs))
        ends = np.array([(one.value, one.low, one.high) for one in drawn.values()])
        lines.append(Line(name, np.array([*drawn]), *ends.T))
    if beside:  # averaged over all lines
        controls = {x: _mean(beside[x]) for x in ticks if x in beside}
        name = next(iter(controls.values())).encoder
        values = np.array([one.value for one in controls.values()])
        lines.append(Line(name, np.array([*controls]), values, dashed=True))
    note = measured
    if counts != {1}:
        note = f"{measured}; mean and range of {'up to ' * (len(counts) > 1)}{max(counts)} runs"
    return Panel(_TITLES.get(of, of), note, lines, shown.unit == "%", shown.compact, ticks=ticks, joined=numbers), rows


@verb(Curves)
def draw_run_curves(options: Curves) -> list[Path]:
    """Draw several runs in one plot: their losses, or their results against a setting.

    Losses over epochs are drawn as in Beyond Masking, Fig. 2; results against a setting as in MP3, Figs. 3-7. The
    points are also written as a table.

    Returns:
        Paths of the files written.

    Raises:
        PatchloomError: if there is no run, the runs do not differ in the setting, or they have no such result.
    """
    runs, against, of = options.runs, options.against, options.of
    places = [runs] if isinstance(runs, str | os.PathLike) else runs
    protocol, dot, inner = (against or "").partition(".")
    of_evaluation = bool(dot) and protocol not in ("task", "model")
    found = load_runs([Path(place) for place in places], needed=("asked", "metrics", "results"))
    if len(found) < 2 and not of_evaluation:
        raise PatchloomError(
            "look curves compares two runs or more: give another; the curves of one run are in its pictures/curves.png"
        )
    folder = Path(options.out or ".")  # not beside the runs, where runs/* would match the picture
    if against is None:
        if of in _OVER_EPOCHS:
            return _draw_over_epochs(found, of, folder)
        if of is not None:
            raise PatchloomError(
                f"--of {of} is for --against SETTING, such as --against epochs: give both, or --of "
                f"{listing(_OVER_EPOCHS)} alone"
            )
        return _draw_over_epochs(found, "loss", folder)
    if of_evaluation:
        if of is not None:
            raise PatchloomError(f"--against {against} determines which result is drawn: leave out --of {of}")
        lines = lines_of(found, "")
        if len(set(lines)) < len(lines) and len({run.became.get("seed") for run in found}) == 1:
            lines = [run.name for run in found]
        name, panels = against, [panel_of(found, protocol, lines, setting=inner)]
    else:
        name, values = setting_of(found, against)
        lines, panels = lines_of(found, name), []
        evaluations = [evaluations_of(run) for run in found]
        known = [kind for first in _DRAWN for kind in evaluations[0] if kind.partition(":")[0] == first]
        for kind in [of] if of else [kind for kind in known if all(kind in its for its in evaluations)]:
            with nullcontext() if of else suppress(PatchloomError):
                panels.append(panel_of(found, kind, lines, values))
        if not panels:
            raise PatchloomError(
                "these runs have no result in common to draw: evaluate all of them in the same way, as in patchloom "
                f"evaluate finetune {found[0].folder.path} DATA"
            )
    place = f"{f'{of}-' if of else ''}against-{name}"
    heading = ("result", "measured", "line", name, "value", "low", "high", "control", "control_value", "runs")
    return [
        draw_lines([panel._replace(axis=name) for panel, _ in panels], folder / f"{place}.png"),
        write_table(heading, [row for _, rows in panels for row in rows], folder / f"{place}.csv"),
    ]


# Curves over epochs.


def _draw_over_epochs(runs: Sequence[RunData], of: str, folder: Path) -> list[Path]:
    """Draw the loss, or the kNN accuracy measured during training, with a line per run."""
    curves, tasks = [], [run.became.get("task.name", "") for run in runs]
    for run in runs:
        its = run.curves(of.replace("-", "_"))
        if "" not in its:
            missing = "has logged no loss yet: let it train first, or leave it out"
            if of != "loss":
                own = " and a task with its own representation" if of != "knn" else ""
                missing = f"did not measure {of} during training, which needs labels{own}: leave it out"
            raise PatchloomError(f"{run.folder.path} {missing}")
        curves.append(its[""])
    first = [float(values[0]) for _, values in curves]
    place, heading = of, ["run", "task", "epoch", of]
    if of == "loss":
        place, heading = "losses", [*heading, "relative"]
        note = "as logged" if len(set(tasks)) == 1 else "as logged, in each task's own unit"
        scales = [("training loss", note, [1.0] * len(runs))]
        if all(one > 0 for one in first):
            scales.append(("training loss, relative", "divided by the first value", first))
    elif len({tuple(run.became.get(name) for name in ("knn_k", "knn_gallery")) for run in runs}) > 1:
        raise PatchloomError(
            f"these runs measured {of} with different --knn_k or --knn_gallery: give runs with equal ones"
        )
    else:
        scales = [("kNN accuracy", f"on held-out images, {_OVER_EPOCHS[of]}", [1.0] * len(runs))]
    panels = []
    for title, note, units in scales:
        lines = [Line(run.name, x, y / unit) for run, (x, y), unit in zip(runs, curves, units, strict=True)]
        panels.append(Panel(title, note, lines, of != "loss", smooth=SMOOTH * (of == "loss")))
    table = [
        (run.name, task, epoch, value, value / start if start > 0 else "")[: len(heading)]
        for run, task, (epochs, values), start in zip(runs, tasks, curves, first, strict=True)
        for epoch, value in zip(epochs.tolist(), values.tolist(), strict=True)
    ]
    return [draw_lines(panels, folder / f"{place}.png"), write_table(heading, table, folder / f"{place}.csv")]
