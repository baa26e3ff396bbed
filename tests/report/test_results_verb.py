"""Tests of the table of results: seeds, controls and several runs, on the screen and in files."""

import csv
import json
import math
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
from refusing import refusal

from patchloom.cli import main
from patchloom.report.results import escape_latex, over_seeds, results
from patchloom.results import store
from patchloom.results.claims import Claim
from patchloom.results.evaluation import Evaluation
from patchloom.results.intervals import mean_interval
from patchloom.results.result import Result

N = 200  # test images


def evaluation(name: str, share: float, seed: int, protocol: str = "linear", day=1, n=N, **settings) -> Evaluation:
    """Return an evaluation of an encoder that is right on this share of the images, and of an untrained one."""
    ours, theirs, other = (
        Result.of_images(encoder, protocol, {"pooling": "mean"} | settings, np.arange(n) < round(right * n))
        for encoder, right in ((name, share), ("untrained", 0.3), ("raw pixels", 0.25))
    )
    unquoted = replace(ours, settings={**ours.settings, "pooling": "class"})
    date = f"2026-11-{day:02}T00:00:{seed:02}+00:00"
    about = {"data": "labelled & co", "fingerprint": "0123456789abcdef", "n_test": n}
    found = Evaluation([ours, theirs, other, unquoted], "", "", (ours, theirs, other), seed=seed, date=date, **about)
    return found.with_differences(False)


def run_of(folder: Path, shares: tuple[float, ...] = (0.5, 0.6, 0.61), **settings) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    seeds = [evaluation("run", share, seed, **settings) for seed, share in enumerate(shares)]
    for one in (*seeds[:-1], seeds[-1].over_seeds(seeds[:-1]) if len(seeds) > 1 else seeds[-1]):
        store.append(folder, one.results)
    return folder


def test_mean_and_interval_over_seeds_and_the_stored_differences(tmp_path):
    table = results(run_of(tmp_path / "100%_sure"))
    ours, untrained, raw = table.rows
    values = [0.5, 0.6, 0.61]
    assert (ours.result.encoder, ours.seeds, ours.over) == ("100%_sure", 3, "seeds"), "the folder was renamed"
    assert ours.result.value == pytest.approx(statistics.fmean(values))
    assert (ours.result.low, ours.result.high) == pytest.approx(mean_interval(values))
    assert ours.std == pytest.approx(statistics.stdev(values)) and ours.result.interval()
    assert [one.control for one in ours.result.against] == ["untrained", "raw pixels"]
    assert all(one.trainings == 3 and one.claim is Claim.BETTER for one in ours.result.against)
    # the controls are equal for all seeds, so their interval is that over images
    assert (untrained.std, untrained.over, untrained.result.value) == (0, "images", 0.3) and not raw.result.against
    assert untrained.result.low < 0.3 < untrained.result.high
    shown = table.text(140)
    assert "57.0 ± 6.1 [41.9, 72.1]" in shown and "+27.0, better [" in shown and "over seeds" in shown
    assert table.remarks().endswith("Settings: pooling mean. Data (tested): labelled & co (200). Seeds: 3.")
    assert "\nlinear, accuracy (%)  100%_sure" in shown
    assert max(map(len, table.text(100).splitlines())) <= 100


def test_the_newest_evaluation_of_each_seed_and_setting(tmp_path):
    run = run_of(tmp_path / "run", (0.5,))
    for again in (evaluation("run", 0.7, 0, day=2), evaluation("run", 0.4, 0, day=3, k=20)):
        store.append(run, again.results)
    store.append(run, evaluation("run", 0.2, 0, "knn", n=8).results)
    table = results(run)
    own = [row for row in table.rows if row.result.encoder == "run"]
    assert [(row.measure, row.result.value, row.seeds) for row in own] == [
        ("linear, accuracy (%)", 0.7, 1),
        ("linear, accuracy (%)", 0.4, 1),
        ("knn, accuracy (%)", 0.25, 1),
    ]
    assert all(row.over == "images" and math.isnan(row.std) for row in own)
    shown = table.text(200)
    assert "k = 20" in shown and "too few images" in shown and "over seeds [" not in shown
    assert {row.result.pooling for row in results(run, all=True).rows} == {"mean", "class"}
    assert [row.result.value for row in results(run, protocol="knn", measure="accuracy").rows] == [0.25, 0.25, 0.25]
    assert "did you mean knn" in refusal(results, run, protocol="knm")


def test_seeds_that_drew_their_own_images_are_joined_and_others_are_out_of_date(tmp_path):
    run = run_of(tmp_path / "run", (0.9,))  # on other images
    seeds = [replace(evaluation("run", 0.5 + seed / 20, seed), fingerprint=f"{seed:016x}") for seed in (1, 2)]
    for one in (seeds[0], seeds[1].over_seeds(seeds[:1])):
        store.append(run, one.results)
    row = results(run).rows[0]
    assert row.seeds == 2 and row.result.value == pytest.approx(0.575) and row.result.against[0].trainings == 2


def test_unknown_values_stay_unknown():
    first, second = (Result.exact("rank", "run", "label-free", {}, value, "") for value in (3.0, math.nan))
    row = over_seeds([first, second], "run")
    assert math.isnan(row.result.value) and math.isnan(row.std) and row.text(" ") == "nan ± nan"
    assert over_seeds([first], "run").over == "" and over_seeds([first], "run").text(" ") == "3.00"


def test_runs_side_by_side(tmp_path, capsys):
    one, other = (run_of(tmp_path / name / "run") for name in "ab")
    (other / store.FILE).write_text((other / store.FILE).read_text() + "{damaged\n")
    (tmp_path / "b" / "new").mkdir()
    (tmp_path / "b" / "new" / "config.yaml").touch()
    table = results([one, tmp_path / "b", other])
    assert [row.run for row in table.rows] == ["a/run"] * 3 + ["b/run"] * 3
    assert table.rows[3].result.encoder == "b/run" and len(table.notes) == 2
    assert "new has no results" in table.notes[0] and "could not be read" in table.notes[1]
    (one / store.FILE).unlink()
    for places, said in (
        ([one], "evaluate knn"),
        ([tmp_path / "c"], "c does not exist"),
        ([tmp_path], "no run"),
        ([], "needs"),
    ):
        assert said in refusal(results, places)
    assert main(["results", str(other), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["result"]["rows"] == json.loads(json.dumps(results(other).records()).replace("NaN", "null"))


def test_a_comparison_has_results_of_its_own(tmp_path):
    run_of(tmp_path / "both" / "mae")
    store.append(tmp_path / "both", evaluation("mae", 0.8, 0, "knn").results)
    table = results(tmp_path / "both")
    assert [(row.run, row.result.encoder) for row in table.rows if row.result.against] == [
        ("both", "mae"),
        ("mae", "mae"),
    ]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_values_in_files_are_equal(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    run = run_of(tmp_path / 'a,"b"_&\'')
    table = results(run, to=tmp_path / f"table{suffix}")
    read = pandas.read_csv(table.file) if suffix == ".csv" else pandas.read_parquet(table.file)
    assert [*read.columns] == [*table.records()[0]] and len(read) == 4, "the encoder beside two controls, and these"
    for row, record in zip(read.to_dict("records"), table.records(), strict=True):
        assert json.loads(row["settings"]) == record["settings"]
        for name, value in record.items():
            if name == "settings":
                continue
            if value is None or value != value:
                assert pandas.isna(row[name])
            else:
                assert row[name] == value, name


def test_parquet_without_its_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install" in refusal(results, run_of(tmp_path / "run"), to=tmp_path / "t.parquet")
    assert ".csv, .parquet, .md or .tex" in refusal(results, tmp_path / "run", to=tmp_path / "t.xlsx")


def test_markdown(tmp_path):
    table = results(run_of(tmp_path / "a_b|c"), to=tmp_path / "t.md")
    lines = table.file.read_text().splitlines()
    assert len({line.replace(r"\|", "").count("|") for line in lines[:6]}) == 1 and r"| a\_b\|c |" in lines[2]
    assert r"57.0 ± 6.1 \[41.9, 72.1\]" in lines[2] and lines[-1].startswith("Values: mean ± standard")


def test_latex(tmp_path):
    run = run_of(tmp_path / "100%_a&b#{}$~^\\")
    store.append(run, evaluation("run", 0.2, 0, "[knn").results)
    text = results(run, to=tmp_path / "t.tex").file.read_text()
    assert r"100\%\_a\&b\#\{\}\$\textasciitilde{}\textasciicircum{}\textbackslash{} & " in text
    assert r"57.0 $\pm$ 6.1 [41.9, 72.1]" in text and "$-$10.0, worse [$-$" in text and text.count(r"\midrule") == 2
    assert escape_latex("[a") == "{}[a" and escape_latex("a-1 -1 [-2") == "a-1 $-$1 [$-$2"
    body = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert len({line.replace(r"\&", "").count("&") for line in body}) == 1 and len(body) == 9
    if (latex := shutil.which("pdflatex")) is None:
        pytest.skip("LaTeX is not installed")
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{text}\end{{document}}"
    (tmp_path / "d.tex").write_text(document.replace("% ", "%\n% ", 1))
    subprocess.run([latex, "-halt-on-error", "d.tex"], cwd=tmp_path, check=True, capture_output=True)


def test_it_starts_without_torch(tmp_path):
    run_of(tmp_path / "run")
    code = "import sys; from patchloom.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, "results", str(tmp_path / "run")], check=True, capture_output=True)


def test_csv_has_no_formula_of_a_stranger(tmp_path):
    run = run_of(tmp_path / "run")
    (run / "results.jsonl").write_text((run / "results.jsonl").read_text().replace("untrained", "=1+1"))
    rows = [*csv.DictReader(results(run).csv().splitlines())]
    assert [row["control"] for row in rows] == ["'=1+1", "raw pixels", "", ""] and rows[2]["encoder"] == "'=1+1"
    assert float(rows[0]["difference"]) > 0 and rows[0]["claim"] == "better"
    (run / "results.jsonl").unlink()
    store.append(run, [replace(Result.exact("rank", "run", "label-free", {}, 3.0, ""), quoted=True)])
    assert [float(row["mean"]) for row in csv.DictReader(results(run).csv().splitlines())] == [3.0]
