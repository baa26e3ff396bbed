"""Key numbers of a run and their tables, from its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from patchloom.look.run_curves import PROTOCOL_TITLES
from patchloom.report.load_run import RunData
from patchloom.report.page import Number, Table
from patchloom.results import store
from patchloom.results.claims import Claim, Difference
from patchloom.results.newest import asked_of, newest
from patchloom.results.result import ACCURACY, Result

# settings that are always displayed, with their templates
_DISPLAYED = {
    "k": "{} neighbours",
    "per_class": "{} labels per class",
    "labels": "labels: {}",
    "epochs": "{} epochs",
    "recipe": "recipe {}",
    "head": "head {}",
    "head_on": "head on {}",
    "count": "{} blocks",
    "network": "{}",
    "test_crop": "test crop {}",
    "pooling": "{} tokens",
}


class EvaluationGroup(NamedTuple):
    """Newest evaluation of a protocol, of data and of settings, with its other seeds.

    Attributes:
        label: name of the measure, with settings if another evaluation has the same name.
        seeds: quoted results of each seed, the newest seed last; the encoder's result first, then its controls'.
    """

    label: str
    seeds: Sequence[Sequence[Result]]


def newest_evaluations(results: Sequence[Result], name: str) -> list[EvaluationGroup]:
    """Return the newest evaluation of each protocol, data and settings.

    Args:
        results: all results of a run.
        name: present name of the run.
    """
    found = [[[one for one in rows if one.quoted] for rows in seeds] for seeds in newest(results, name)]
    firsts = [seeds[-1][0] for seeds in found]
    return [EvaluationGroup(_label(first, firsts), seeds) for first, seeds in zip(firsts, found, strict=True)]


def key_numbers(run: RunData, groups: Sequence[EvaluationGroup]) -> list[Number]:
    """Return the run's held-out measure, then the result of each evaluation with its controls.

    An unfinished run without a quoted kNN accuracy has the last one measured during training instead.
    """
    noun, count = run.modality.noun, len(run.data.get("held_out", ()))
    many = f"{count:,} " if count else ""
    seen = f"{many}{noun} that pre-trained weights may have seen"
    images = seen if run.data.get("held_out_doubt") else f"{many}held-out {noun}"
    found = _logged(run, "held_out", run.measured, f"On {images}")
    if not run.finished and not any(one.seeds[-1][0].protocol == "knn" for one in groups):
        for column, label in (("knn", "kNN accuracy"), ("instance_knn", "kNN accuracy, instance")):
            like = Result.exact(label, "", "", {}, 0.0)
            found += _logged(run, column, like, f"On held-out {noun}, measured during training")
    return [*found, *map(_number, groups)]


def gains_of(groups: Sequence[EvaluationGroup]) -> Table | None:
    """Return the differences from all controls, with the claim about each; None without any.

    Scores are means over the seeds that a difference covers.
    """
    found = [
        (one, difference, place)
        for one in groups
        for place, row in enumerate(one.seeds[-1])
        for difference in row.against
    ]
    if not found:
        return None
    heading = ("measure", "this run", "control", "its score", "difference", "verdict")
    note = _count_claims([difference.claim for _, difference, _ in found])
    return Table("Difference from each control, with its 95 % interval", heading, [_gain(*one) for one in found], note)


def results_of(groups: Sequence[EvaluationGroup]) -> list[Table]:
    """Return the results behind `key_numbers` as a table; [] without any.

    Columns with the same value in all rows, such as the data, move to the title.
    """
    cells = [
        {
            "encoder": row.encoder, "value": row.number(), "95 % interval": row.interval(), "measure": _title(row),
            "settings": _settings(row), "data": row.data, "seed": str(row.seed), "tested": f"{row.n:,}",
            "date": row.date[:10],
        }
        for one in groups for row in one.seeds[-1]
    ]  # fmt: skip
    if not cells:
        return []
    same = [name for name in ("data", "seed", "tested", "date") if len({row[name] for row in cells}) == 1]
    heading = [name for name in cells[0] if name not in same]
    title = ": ".join(filter(None, ["Results", ", ".join(f"{name} {cells[0][name]}" for name in same)]))
    note = f"The newest quoted results of each evaluation; all results are in {store.FILE}."
    return [Table(title, heading, [[row[name] for name in heading] for row in cells], note)]


def _title(row: Result) -> str:
    named = PROTOCOL_TITLES.get(row.protocol, row.protocol)
    return named if row.measure == ACCURACY else f"{named}, {row.measure}"


def _settings(row: Result) -> str:
    shown = {**row.settings, "pooling": None if row.pooling in ("-", "pixels") else row.pooling}
    return ", ".join(words.format(shown[name]) for name, words in _DISPLAYED.items() if shown.get(name) is not None)


def _label(row: Result, others: Sequence[Result]) -> str:
    """Return the name of a measure, with settings and data if several of the ``others`` have the same name."""
    title, its = _title(row), asked_of(row)
    same = [asked_of(other) for other in others if _title(other) == title]
    alone = [title, "from scratch"] if row.encoder == "from scratch" else [title]
    if len(same) == 1:
        return ", ".join(alone)
    differing = [name for name in its if name not in _DISPLAYED and any(one.get(name) != its[name] for one in same)]
    said = [*alone, _settings(row), *(f"{name.replace('_', ' ')} {its[name]}" for name in differing), f"on {row.data}"]
    return ", ".join(filter(None, said))


def _logged(run: RunData, column: str, like: Result, note: str) -> list[Number]:
    """Return the last value of a column of ``metrics.csv`` with its baselines; [] before the first."""
    curves = run.curves(column)
    if "" not in curves:
        return []
    ends = {name: float(values[-1]) for name, (_, values) in curves.items()}
    like = replace(like, noun=run.modality.noun, baselines=())
    own, *beside = (replace(like, encoder=name, value=end, low=end, high=end) for name, end in ends.items())
    epochs = float(curves[""][0][-1])
    return [Number(like.measure, own, beside, f"{note}, after {epochs:.3g} epoch{'s' * (epochs != 1)}.")]


def _number(one: EvaluationGroup) -> Number:
    """Return the result of the newest seed with its controls; the note has all seeds and the claims."""
    first, *controls = one.seeds[-1]
    if len({row.encoder for row in one.seeds[-1]}) <= len(controls):
        controls = [replace(row, encoder=", ".join(filter(None, [row.encoder, _settings(row)]))) for row in controls]
    said = ["; ".join(filter(None, [_settings(first), f"on {first.n:,} test {first.noun} of {first.data}."]))]
    if len(one.seeds) > 1:
        each = ", ".join(rows[0].number() for rows in one.seeds)
        said.append(f"Results of seeds {', '.join(str(rows[0].seed) for rows in one.seeds)}: {each}.")
    note = " ".join([*said, *(difference.sentence() for row in one.seeds[-1] for difference in row.against)])
    return Number(one.label, first, controls, f"{note[0].upper()}{note[1:]}")


def _gain(one: EvaluationGroup, found: Difference, place: int) -> tuple[str, ...]:
    """Return the row of a difference from a control, of the quoted result at ``place``."""
    newest = one.seeds[-1]
    seeds = [rows for rows in one.seeds[-max(1, found.trainings) :] if len(rows) == len(newest)]
    means = [sum(rows[i].value for rows in seeds) / len(seeds) for i in range(len(newest))]
    # a control may be quoted with several settings
    controls = [mean for i, mean in enumerate(means) if i != place and newest[i].encoder == found.control]
    theirs = min(controls, key=lambda mean: abs(means[place] - mean - found.value), default=None)
    unit = "" if found.unit == "%" else f" {found.unit}"
    apart = f"{found.amount(found.value)}{unit}" if found.n else ""
    apart += f" {found.interval()}" if found.claim not in (Claim.APART, Claim.FEW) else ""
    score = "" if theirs is None else newest[place].number(theirs)
    return one.label, newest[place].number(means[place]), found.control, score, apart, _verdict(found)


def _verdict(one: Difference) -> str:
    """Return the claim in few words; `Difference.sentence` has it in full."""
    said = {Claim.NONE: "indistinguishable", Claim.BETTER: "better", Claim.WORSE: "worse"}.get(one.claim)
    seeds = f" over {one.trainings} {'trainings' if one.trained else 'seeds'}" if one.trainings > 1 else ""
    constant = f"; no better than always answering {one.constant}" if one.constant else ""
    return (f"{said}{seeds}" if said else f"no claim: {one.claim.value}") + constant


def _count_claims(claims: Sequence[Claim]) -> str:
    """Return a sentence that counts the verdicts."""
    better, worse = (claims.count(one) for one in (Claim.BETTER, Claim.WORSE))
    said = f"Of {len(claims):,} comparison{'s' * (len(claims) != 1)}, the encoder is better in {better} and worse in"
    return f"{said} {worse}; no claim is made in {len(claims) - better - worse}."
