"""The verb ``results``: one table of the results of one or several runs, for a paper or a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from patchloom.display import Displayable, Lines, TextTable, Verbatim, json_value
from patchloom.errors import PatchloomError, listing, pip_install, suggestion
from patchloom.options.declare import verb
from patchloom.options.verbs import Results
from patchloom.results import store
from patchloom.results.claims import Claim, Difference
from patchloom.results.intervals import mean_interval
from patchloom.results.newest import newest, settings_of
from patchloom.results.result import Result
from patchloom.results.table import choose_fitting_table, describe_settings, varying
from patchloom.system.files import distinct_names, no_such_path, write_whole

_ELSEWHERE = ("settings", "data (tested)", "seeds")  # columns that are a remark if all rows have the same cell


class Row(NamedTuple):
    """Result of a run over all its seeds.

    Attributes:
        run: name of the run.
        result: the newest result and its differences from controls, with the mean over seeds as its value.
        each: results of each seed, the newest seed last.
        std: standard deviation over seeds; nan with one seed.
        over: what the interval of the result covers: "seeds", "images", or "" without one.
    """

    run: str
    result: Result
    each: Sequence[Result]
    std: float
    over: str

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(self.each)

    @property
    def measure(self) -> str:
        """Protocol and measure with its unit, such as "knn, accuracy (%)"."""
        named = ", ".join(filter(None, (self.result.protocol, self.result.measure)))
        return f"{named} ({self.result.unit})" if self.result.unit else named

    @property
    def data(self) -> str:
        """Test images and their number, such as "labelled (120)"."""
        return f"{self.result.data} ({self.result.n:,})"

    def text(self, gap: str) -> str:
        """Format as "61.2 ± 0.3 [58.5, 63.9]", without the unit, with ``gap`` before the interval."""
        spread = f" ± {self.result.amount(self.std)}" if self.over == "seeds" else ""
        return gap.join(filter(None, (self.result.amount() + spread, self.result.interval())))

    def records(self) -> list[dict[str, Any]]:
        """Return values by column: a record for each control, or one if there is none."""
        one = self.result
        found = {
            "run": self.run, "protocol": one.protocol, "data": one.data, "fingerprint": one.fingerprint,
            "measure": one.measure, "encoder": one.encoder, "settings": settings_of(one), "seeds": self.seeds,
            "mean": one.value, "std": self.std, "low": one.low, "high": one.high, "interval": self.over, "n": one.n,
            "unit": one.unit, "date": one.date,
        }  # fmt: skip
        return [found | _record(apart) for apart in one.against or (None,)]


_OF_DIFFERENCE = ("control", "difference", "difference_low", "difference_high", "difference_seeds", "claim")


def _record(apart: Difference | None) -> dict[str, Any]:
    """Return the columns of a difference, without an interval if the two were tested on different images."""
    if apart is None:
        return dict.fromkeys(_OF_DIFFERENCE)
    ends = (None, None) if apart.claim is Claim.APART else (apart.low, apart.high)
    values = apart.control, apart.value, *ends, apart.trainings, apart.claim.value
    return dict(zip(_OF_DIFFERENCE, values, strict=True))


def over_seeds(same: Sequence[Result], run: str) -> Row:
    """Return the mean of a result over seeds, the newest last.

    Results that are equal for all seeds do not depend on the seed, and keep their interval over test images.
    """
    last, values = same[-1], [one.value for one in same]
    if len(set(values)) == 1:
        spread = 0.0 if len(values) > 1 else math.nan
        return Row(run, last, same, spread, "images" if last.interval() else "")
    bounds = (0, 1) if last.unit == "%" else (-math.inf, math.inf)
    low, high = np.clip(mean_interval(values), *bounds).tolist()
    settings = {  # seeds may have selected different ones
        name: value for name, value in last.settings.items() if all(one.settings.get(name) == value for one in same)
    }
    mean = replace(last, value=float(np.mean(values)), low=low, high=high, settings=settings)
    return Row(run, mean, same, float(np.std(values, ddof=1)), "seeds")


def rows_of(results: Sequence[Result], run: str, name: str = "", every: bool = False) -> list[list[Row]]:
    """Return the quoted results of each of a run's newest evaluations over seeds.

    Args:
        results: all results of the run, the newest last.
        run: name of the run.
        name: name of its encoder; "": as it was when it was evaluated.
        every: whether to return the results that are not quoted, too.
    """
    found = list[list[Row]]()
    for group in newest(results, name):
        quoted = [[one for one in each if one.quoted] for each in group]
        same: dict[str, list[Result]] = {str(i): list(alike) for i, alike in enumerate(zip(*quoted, strict=True))}
        for one in (one for each in group for one in each if every and not one.quoted):
            same.setdefault(json.dumps([one.encoder, one.measure, settings_of(one)]), []).append(one)
        found.append([over_seeds(alike, run) for alike in same.values()])
    return found


@dataclass(frozen=True, repr=False)
class ResultsTable(Displayable):
    """Table of results of one or several runs.

    Attributes:
        rows: results by protocol and measure, then by run.
        notes: sentences on what is left out.
        file: file that was written; None without one.
    """

    rows: Sequence[Row]
    notes: Sequence[str] = ()
    file: Path | None = None

    def parts(self, width: int) -> list[str | TextTable]:
        # in the last form, each measure is on a separate line above its rows
        table = choose_fitting_table([self.table(" "), self.table("\n"), self.table("\n", once=False)], width)
        below = [*self.notes, *([] if self.file is None else [Verbatim(f"Table: {self.file}")])]
        return [self.remarks(), "", table, *[""] * bool(below), *below]

    def plain(self) -> dict[str, Any]:
        return {"rows": self.records(), "notes": self.notes, "file": self.file}

    def records(self) -> list[dict[str, Any]]:
        """Return values by column, with a record for each result and control."""
        return [record for row in self.rows for record in row.records()]

    def _flat(self) -> list[dict[str, Any]]:
        """Return the records with settings as JSON."""
        return [one | {"settings": json.dumps(one["settings"])} for one in json_value(self.records())]

    def remarks(self) -> str:
        """Return sentences on the values and their intervals, and on what all rows share."""
        over = {row.over for row in self.rows}
        said = ["mean ± standard deviation over seeds [Student's 95 % interval over seeds]"] * ("seeds" in over)
        said += [f"{'without ±, ' * bool(said)}value [95 % interval over test images]"] * ("images" in over)
        found = [f"Values: {'; '.join(said)}."] * bool(said)
        if any(row.result.against for row in self.rows):
            found.append("Differences: encoder minus control [95 % interval over test images and seeds].")
        shared = {name: cells[0] for name, cells in self._columns(" ").items() if len(set(cells)) == 1 and cells[0]}
        found += [f"{name.capitalize()}: {shared[name]}." for name in _ELSEWHERE if name in shared]
        return " ".join(found)

    def table(self, gap: str, once: bool = True) -> TextTable:
        """Return the table as text with ``gap`` before intervals, and a line for each control.

        ``once``: write each measure in its first line only.
        """
        always = ("measure", "encoder", "value")
        columns = {name: cells for name, cells in self._columns(gap).items() if name in always or len(set(cells)) > 1}
        last = ["control", "difference"] * any(row.result.against for row in self.rows)
        lines, ends, before = list[tuple[str, ...]](), list[int](), ""
        for row, (measure, *cells) in zip(self.rows, zip(*columns.values(), strict=True), strict=True):
            if lines and measure != before:
                ends.append(len(lines) - 1)
            pairs = []
            for apart in row.result.against:
                # such as "+2.1, better [+0.4, +3.8]", without an interval if there are too few images for one
                text = ", ".join([apart.amount(apart.value), *[apart.claim.value] * (apart.claim is not Claim.NONE)])
                text = apart.claim.value if apart.claim is Claim.APART else text
                text += "" if apart.claim in (Claim.APART, Claim.FEW) else f"{gap}{apart.interval()}"
                pairs.append([apart.control, Lines(text)])
            for pair in pairs or [[""] * len(last)]:
                lines.append(("" if once and measure == before else measure, *cells, *pair))
                before, cells = measure, [""] * len(cells)
        heading = (*columns, *last)
        names, texts = (
            frozenset(heading.index(name) for name in those if name in heading)
            for those in (("run", "encoder", "control"), ("settings", "data (tested)"))
        )
        return TextTable(heading, tuple(lines), names, texts, frozenset(ends))

    def _columns(self, gap: str) -> dict[str, list[str]]:
        """Return the cells of all columns but those of differences, a cell for each row."""
        alike: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            alike.setdefault(row.measure, []).append(settings_of(row.result))
        names = {measure: varying(settings) for measure, settings in alike.items()}
        return {
            "measure": [row.measure for row in self.rows],
            "run": [row.run for row in self.rows],
            "encoder": [row.result.encoder for row in self.rows],
            "settings": [describe_settings(row.result, names[row.measure]) for row in self.rows],
            "data (tested)": [row.data for row in self.rows],
            "seeds": [f"{row.seeds}" for row in self.rows],
            "value": [Lines(row.text(gap)) for row in self.rows],
        }

    # How it is written.

    def csv(self) -> str:
        """Return the records as CSV; settings are JSON.

        A text that a spreadsheet would compute as a formula is quoted by an apostrophe: names may be a stranger's.
        """
        text, records = io.StringIO(), self._flat()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(records[0])
        for record in records:
            writer.writerow(
                f"'{one}" if str(one)[:1] in _FORMULA and isinstance(one, str) else one for one in record.values()
            )
        return text.getvalue()

    def markdown(self, clean: Callable[[str], str] = str) -> str:
        """Return the table and its remarks in Markdown, each text changed by ``clean``."""
        table = self.table(" ")
        lines = [table.heading, ["---"] * len(table.heading), *table.rows]
        written = ["| " + " | ".join(escape_markdown(clean(cell)) for cell in line) + " |" for line in lines]
        return "\n".join([*written, "", escape_markdown(clean(self.remarks())), ""])

    def latex(self) -> str:
        """Return a tabular of the LaTeX package booktabs, with the remarks as a comment."""
        table = self.table(" ")
        first, *lines = (" & ".join(map(escape_latex, line)) + r" \\" for line in (table.heading, *table.rows))
        for i in sorted(table.ends, reverse=True):
            lines.insert(i + 1, r"\midrule")
        head = [
            f"% {' '.join(self.remarks().split())}",
            r"% \usepackage{booktabs}",
            rf"\begin{{tabular}}{{{'l' * len(table.heading)}}}",
        ]
        return "\n".join([*head, r"\toprule", first, r"\midrule", *lines, r"\bottomrule", r"\end{tabular}", ""])

    def parquet(self) -> bytes:
        """Return the records as Parquet; settings are JSON."""
        try:
            import pyarrow as pa  # an extra
            import pyarrow.parquet
        except ImportError as error:
            raise PatchloomError(f"Parquet needs pyarrow: {pip_install('parquet')}, or choose .csv") from error
        records, file = self._flat(), io.BytesIO()
        schema = pa.schema([(name, pa.type_for_alias(_KINDS.get(name, "string"))) for name in records[0]])
        pa.parquet.write_table(pa.Table.from_pylist(records, schema), file)
        return file.getvalue()


_FORMULA = ("=", "+", "-", "@")  # first characters of formulas
_MARKUP = re.compile(r"([\\`*_\[\]<>#|~&$])")
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", "<": "$<$", ">": "$>$"},
}


def escape_markdown(text: str) -> str:
    """Escape Markdown in a text and join its lines."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))


def escape_latex(text: str) -> str:
    """Escape LaTeX in a cell; negative numbers have a minus sign."""
    escaped = "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
    # after the end of a line, [ and * would be its options
    return re.sub(r"(?<![\w.)}-])-(?=\d)", "$-$", f"{{}}{escaped}" if escaped[:1] in ("[", "*") else escaped)


# columns of a Parquet file that are no text
_KINDS = {
    **dict.fromkeys(("mean", "std", "low", "high", "difference", "difference_low", "difference_high"), "float64"),
    **dict.fromkeys(("seeds", "n", "difference_seeds"), "int64"),
}
_WRITERS: dict[str, Callable[[ResultsTable], str | bytes]] = {
    ".csv": ResultsTable.csv,
    ".parquet": ResultsTable.parquet,
    ".md": ResultsTable.markdown,
    ".tex": ResultsTable.latex,
}


@verb(Results)
def results(options: Results) -> ResultsTable:
    """Make a table of the results of one or several runs, with intervals and differences from controls.

    By default it has what the headlines of the newest evaluations quote: of each protocol, data and settings the newest
    evaluation of each seed. It reads only the runs' results.jsonl.

    Returns:
        The table: `rows`, and `records()` for a data frame.

    Raises:
        PatchloomError: if there are no such results, or the file cannot be written.
    """
    runs = options.runs
    places = [Path(runs)] if isinstance(runs, str | os.PathLike) else [Path(run) for run in runs]
    file = None if options.to is None else Path(options.to)
    if file is not None and file.suffix.lower() not in _WRITERS:
        raise PatchloomError(f"--to {file} has no known suffix: end the file in {listing(_WRITERS)}")
    distinct, notes, rows = dict[Path, Path](), list[str](), list[Row]()
    for place in places:
        if not place.is_dir():
            raise no_such_path(place, place, "give the folder of a run")
        inside = [place] * (place / store.FILE).exists() + sorted(filter(_is_run, place.iterdir()))
        if not (its := [place] if _is_run(place) else inside):
            raise PatchloomError(
                f"{place} is no run, and holds none: give the folder of a run, such as runs/photos-mae"
            )
        distinct |= {one.resolve(): one for one in its}
    folders = [*distinct.values()]
    for folder, name in zip(folders, distinct_names(folders), strict=True):
        groups = rows_of(store.load(folder, notes), name, name * _is_run(folder), options.all)
        rows += [row for group in groups for row in group]
        if not groups:
            notes.append(f"{folder} has no results: make some, as in patchloom evaluate knn {folder} labelled/")
    if not rows:
        raise PatchloomError("; ".join(notes) or "results needs the folder of a run, such as runs/photos-mae")
    rows = _only("protocol", options.protocol, _only("measure", options.measure, rows))
    measures, tests = (
        [*dict.fromkeys(values)] for values in zip(*((row.measure, row.data) for row in rows), strict=True)
    )
    rows.sort(key=lambda row: (measures.index(row.measure), tests.index(row.data)))
    if any(one.trainings < row.seeds for row in rows for one in row.result.against):
        notes.append(
            "Some differences cover fewer seeds than the means: evaluate all seeds by one command with --seeds."
        )
    table = ResultsTable(rows, notes, file)
    if file is not None:
        write_whole(file, _WRITERS[file.suffix.lower()](table))
    return table


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()  # every run has it


def _only(name: str, value: str | None, rows: list[Row]) -> list[Row]:
    """Return the rows with a protocol or measure; None: all."""
    there = dict.fromkeys(str(getattr(row.result, name)) for row in rows)
    if value is not None and value not in there:
        raise PatchloomError(
            f"--{name} {value} has no results{suggestion(value, there, ':')} there are {listing(there, 'and')}"
        )
    return [row for row in rows if value in (None, getattr(row.result, name))]
