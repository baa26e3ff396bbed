"""Tests of the key numbers and tables: the newest quoted results with intervals, controls and claims."""

import shutil
from dataclasses import replace

import pytest

from patchloom.report.numbers import gains_of, key_numbers, results_of
from patchloom.report.page import render
from patchloom.report.report import page_of
from patchloom.report.results import rows_of
from patchloom.results import store
from patchloom.results.claims import Difference
from patchloom.results.result import Result
from patchloom.runs.encoder import load_encoder
from patchloom.runs.past import load_run

LATER = "2026-11-23T10:00:00+00:00"


def one(encoder="one", value=0.507, seed=0, settings=None, protocol="knn", **changes):
    """Return a quoted result; its date grows with the seed."""
    settings = {"k": 20, "pooling": "mean"} if settings is None else settings
    first = Result("accuracy", value, value - 0.018, value + 0.018, 2000, encoder, protocol, settings, data="birds")
    about = {"fingerprint": "f", "date": f"2026-11-22T10:00:0{seed}+00:00", "seed": seed, "quoted": True}
    return replace(first, **about | changes)


@pytest.fixture
def numbers(finished):
    run = load_run(finished)
    return lambda *results: key_numbers(run, rows_of(results, "mine", "mine"))[1:]


def gains(*results):
    return gains_of(rows_of(results, "mine", "mine"))


def test_the_measure_of_the_run_stands_beside_its_baselines(finished):
    first = key_numbers(load_run(finished), [])[0]
    assert first.label == "position accuracy" and first.result.unit == "%" and first.result.interval() == ""
    assert [control.encoder for control in first.beside if control.unit == "%"] == ["chance"]
    assert "12 held-out images, after 2 epochs" in first.note


def test_quoted_numbers_have_intervals_and_controls(numbers):
    results = one(value=0.9, quoted=False), one(), one("untrained", 0.3), one("chance", 0.1, low=0.1, high=0.1)
    (number,) = numbers(*results)
    assert (number.label, number.result.text()) == ("kNN accuracy", "50.7 % [48.9, 52.5]")
    assert [(row.encoder, row.text()) for row in number.beside] == [
        ("untrained", "30.0 % [28.2, 31.8]"),
        ("chance", "10.0 %"),
    ]
    assert "On 2,000 test images of birds, k = 20, pooling mean." in number.note
    (table,) = results_of(rows_of(results, "mine", "mine"))
    assert table.heading == ("measure", "encoder", "value")
    assert table.rows[0] == ("knn, accuracy (%)", "mine", "50.7 [48.9, 52.5]")  # the folder was named one at first
    assert [row[1] for row in table.rows] == ["mine", "untrained", "chance"]
    assert "Data (tested): birds (2,000)." in table.note and table.title.endswith("of 2026-11-22")
    (table,) = results_of(rows_of([*results, one(data="cats", n=30, date=LATER)], "mine", "mine"))
    assert table.rows[-1][2] == "cats (30)" and table.title.endswith("2026-11-22 to 2026-11-23")


def test_a_renamed_run_keeps_the_step_and_the_names_of_others(run):
    assert load_encoder(run)[1].name == load_encoder(run / "encoder.safetensors")[1].name == "mine"
    shutil.copy(run / "encoder.safetensors", other := run.parent / "encoder.safetensors")
    assert load_encoder(other)[1].name == "droppos", "it lies in no run"
    for first, shown in {"one (step 3 of 9)": "mine (step 3 of 9)", "from scratch": "from scratch"}.items():
        (table,) = results_of(rows_of([one(first), one("untrained")], "mine", "mine"))
        assert [row[1] for row in table.rows] == [shown, "untrained"]


def test_a_run_in_training_has_the_last_accuracy_that_was_measured(run):
    (run / "metrics.csv").write_text(
        "step,epoch,held_out,knn,knn:untrained,knn:raw pixels\n1,0.5,0.2,0.3,0.25,0.1\n2,1.5333,0.2,0.407,,\n"
    )
    assert [number.label for number in key_numbers(load_run(run), [])] == ["position accuracy"]  # it is finished
    (run / "summary.txt").unlink()
    found = load_run(run)
    number = key_numbers(found, [])[1]
    assert (number.label, number.result.text()) == ("kNN accuracy", "40.7 %")
    assert [(row.encoder, row.value) for row in number.beside] == [("untrained", 0.25), ("raw pixels", 0.1)]
    assert "during training, after 1.53 epochs" in number.note
    quoted = key_numbers(found, rows_of([one()], "mine", "mine"))[1:]
    assert [number.result.number() for number in quoted] == ["50.7 %"]


def test_the_newest_counts_beside_other_seeds_on_the_same_images(numbers):
    later = one(value=0.5, date=LATER), one(value=0.6, seed=1, date=LATER)
    first, second = numbers(one(value=0.4), *later, one(data="cats"), one(value=0.1, seed=2, fingerprint="old"))
    assert first.result.number() == "55.0 %" and "seeds 0, 1: 50.0 %, 60.0 %" in first.note
    assert "cats" in second.label and second.result.number() == "50.7 %"


def test_evaluations_that_differ_in_any_setting_have_their_own_cards(numbers):
    """Settings that no card displays, such as the temperature, also distinguish evaluations; groups do not."""
    first, second = numbers(
        one(settings={"temperature": 0.07}), one(value=0.4, settings={"temperature": 0.5}, date=LATER)
    )
    assert (first.result.number(), second.result.number()) == ("50.7 %", "40.0 %")
    assert "temperature 0.07" in first.label and "temperature 0.5" in second.label
    first, second = numbers(one(), one(settings={"k": 5}, date=LATER))
    assert "k = 20" in first.label and "k = 5" in second.label
    (number,) = numbers(one(), one(value=0.4, settings={"k": 20, "pooling": "mean", "group": "module"}, date=LATER))
    assert number.result.number() == "40.0 %"
    ours, alone = numbers(one(protocol="finetune"), one("from scratch", 0.4, protocol="finetune", date=LATER))
    assert "from scratch" in alone.label and "from scratch" not in ours.label


def test_choices_of_seeds_settings_of_one_encoder_and_other_units(numbers):
    chosen = [{"l2": 0.1, "held_out_accuracy": 0.5, "pooling": "mean"}, {"l2": 2.0, "held_out_accuracy": 0.7}]
    (number,) = numbers(one(settings=chosen[0]), one(value=0.6, seed=1, settings=chosen[1]))
    assert number.result.number() == "55.4 %" and "seeds 0, 1" in number.note
    (number,) = numbers(one(), one(value=0.4, settings={"k": 1, "pooling": "mean"}), one("raw pixels", settings={}))
    assert [row.encoder for row in number.beside] == ["mine, k = 1, pooling mean", "raw pixels"]
    (number,) = numbers(one(value=1.234, measure="distance", unit="patches", protocol="positions"))
    assert (number.label, number.result.text()) == ("positions, distance", "1.23 patches [1.22, 1.25]")


def test_a_control_is_never_shown_as_the_run(run):
    (run / "results.jsonl").unlink()
    store.append(run, [one(), one("untrained", 0.3)])
    line, rest = (run / "results.jsonl").read_text().split("\n", 1)
    (run / "results.jsonl").write_text(f"{line[:50]}\n{rest}")
    page = page_of([run])
    assert [number.label for number in page.runs[0].numbers] == ["position accuracy"] and not page.runs[0].tables
    assert "line 1 of" in page.notes[0] and "left out" in page.notes[0]


def test_one_table_answers_whether_pre_training_helped():
    better, level = Difference("untrained", 0.207, 0.19, 0.22, 2000), Difference("raw pixels", 0.007, -0.01, 0.02, 2000)
    worse = Difference("untrained", -0.1, -0.2, -0.05, 2000, constant="bird")
    linear = {"protocol": "linear", "settings": {"pooling": "both"}}
    results = [one(against=(better, level)), one("untrained", 0.3), one("raw pixels", 0.5)]
    table = gains(*results, one(value=0.6, against=(worse,), **linear), one("untrained", 0.7, **linear))
    assert table.heading == ("measure", "this run", "control", "its score", "difference", "verdict")
    assert table.rows == [
        ("kNN accuracy", "50.7 %", "untrained", "30.0 %", "+20.7 [+19.0, +22.0]", "better"),
        ("kNN accuracy", "50.7 %", "raw pixels", "50.0 %", "+0.7 [-1.0, +2.0]", "indistinguishable"),
        ("linear probe", "60.0 %", "untrained", "70.0 %", "-10.0 [-20.0, -5.0]",
         "worse; no better than always answering bird"),
    ]  # fmt: skip
    assert "better in 1 and worse in 1; no claim is made in 1" in table.note
    assert gains(one()) is None


def test_few_images_and_single_trainings_make_no_claim_on_the_page(run):
    once = Difference("from scratch", 0.2, 0.1, 0.3, 2000, trained=True)
    tuned = {"protocol": "finetune", "settings": {}}
    (run / "results.jsonl").unlink()
    store.append(run, [
        one(against=(Difference("untrained", 0.5, 0.2, 0.8, 9),), n=9),
        one("untrained", 0.007, n=9),
        one(against=(once,), **tuned),
        one("from scratch", 0.307, **tuned),
        one(against=(replace(once, n=0),), data="bees", **tuned),
    ])  # fmt: skip
    page = page_of([run])
    rows = [row[4:] for row in page.runs[0].gains.rows]
    assert rows == [
        ("+50.0", "no claim: too few images"),
        ("+20.0 [+10.0, +30.0]", "no claim: one training"),
        ("", "no claim: different images"),
    ]
    assert "and no claim" in page.runs[0].gains.note
    text = render(page)
    assert "no claim is made below 10" in text and "--seeds 3" in text


@pytest.mark.parametrize("prints", ["fff", "012"])  # one test set, or one drawn by each seed
def test_scores_over_several_seeds_are_the_means_that_the_difference_is_of(numbers, prints):
    results = []
    for seed, ours, theirs in ((0, 0.9, 0.1), (1, 0.5, 0.2), (2, 0.7, 0.6)):  # seed 0 is of an earlier command
        about = {"protocol": "finetune", "settings": {}, "seed": seed, "fingerprint": prints[seed]}
        its = (Difference("from scratch", 0.2, 0.1, 0.3, 2000, 2, True),) if seed == 2 else ()
        results += [one(value=ours, against=its, **about), one("from scratch", theirs, **about)]
    (row,) = gains(*results).rows
    assert row[1:] == ("60.0 %", "from scratch", "40.0 %", "+20.0 [+10.0, +30.0]", "better over 2 trainings")
    seeds = "seeds 0, 1, 2: 90.0 %, 50.0 %, 70.0 %" if prints == "fff" else "seeds 1, 2: 50.0 %, 70.0 %"
    assert seeds in numbers(*results)[0].note


def test_a_control_of_the_same_name_is_that_of_the_difference():
    ours = one(against=(Difference("untrained", 0.207, 0.19, 0.22, 2000),))
    assert gains(ours, one("untrained", 0.4, settings={}), one("untrained", 0.3)).rows[0][3] == "30.0 %"
