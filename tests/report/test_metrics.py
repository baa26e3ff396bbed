"""Tests of the key numbers: the newest quoted results with intervals and controls."""

import csv
import json
import re
import shutil

import pytest

from patchloom.report.load_run import load_run
from patchloom.report.metrics import gains_of, has_labelled_results, key_numbers, results_of
from patchloom.report.page import Quantity, render
from patchloom.report.report import page_of
from patchloom.results.claims import Difference
from patchloom.runs.encoder import load_encoder

HEAD = "date,protocol,encoder,pooling,settings,data,data_fingerprint,seed,value,low,high,n_test,quoted"


def write(run, *rows):
    """Write quoted results of kNN; rows are changed cells, settings as values, and differences in "against"."""
    with open(run / "results.csv", "w", newline="") as file:
        table = csv.DictWriter(file, [*HEAD.split(","), "against"])
        table.writeheader()
        for row in rows:
            cells = {"date": "2026-11-22T10:00:00+00:00", "protocol": "knn", "encoder": "one", "pooling": "mean"}
            cells |= {"settings": {"k": 20}, "data": "birds", "data_fingerprint": "f", "seed": 0}
            cells |= {"value": 0.507, "low": 0.489, "high": 0.525, "n_test": 2000, "quoted": True, "against": ""} | row
            if isinstance(cells["settings"], dict):
                cells["settings"] = json.dumps(cells["settings"])
            if cells["against"]:
                cells["against"] = json.dumps([one.plain() for one in cells["against"]])
            table.writerow(cells)


def numbers_of(run, *rows):
    """Return the numbers of a run with these quoted results, after its own measure."""
    write(run, *rows)
    return key_numbers(load_run(run))[1:]


def gains_with(run, *rows):
    write(run, *rows)
    return gains_of(load_run(run))


def test_the_measure_of_the_run_stands_beside_its_baselines(finished):
    first = key_numbers(load_run(finished))[0]
    assert first.label == "position accuracy" and first.quantity.percent and first.quantity.interval() == ""
    assert [one.name for one in first.beside if one.percent] == ["chance"]
    assert "12 held-out images, after 2 epochs" in first.note


def test_quoted_numbers_have_intervals_and_controls(run):
    untrained = {"encoder": "untrained", "value": 0.3, "low": 0.28, "high": 0.32}
    chance = {"encoder": "chance", "value": 0.1, "low": 0.1, "high": 0.1}
    (number,) = numbers_of(run, {"quoted": False, "value": 0.9}, {}, untrained, chance)
    assert number[:2] == ("kNN accuracy", Quantity(0.507, True, 0.489, 0.525))
    assert (number.quantity.text(), number.quantity.interval()) == ("50.7 %", "[48.9, 52.5]")
    assert number.beside == [Quantity(0.3, True, 0.28, 0.32, "untrained"), Quantity(0.1, name="chance")]
    assert "20 neighbours, mean tokens" in number.note and "2,000 test images of birds" in number.note
    (table,) = results_of(load_run(run))
    assert [row[0] for row in table.rows] == ["mine", "untrained", "chance"], "the folder was named one at first"
    assert len(table.heading) == len(table.rows[0])


def test_a_renamed_run_keeps_the_step_and_the_names_of_others(run):
    assert load_encoder(run)[1].name == load_encoder(run / "encoder.safetensors")[1].name == "mine"
    shutil.copy(run / "encoder.safetensors", other := run.parent / "encoder.safetensors")
    assert load_encoder(other)[1].name == "droppos", "it lies in no run"
    for first, shown in {"one (step 3 of 9)": "mine (step 3 of 9)", "from scratch": "from scratch"}.items():
        write(run, {"encoder": first}, {"encoder": "untrained"})
        assert [row[0] for row in results_of(load_run(run))[0].rows] == [shown, "untrained"]


def test_a_run_on_the_way_has_the_last_accuracy_that_was_measured(run):
    (run / "results.csv").unlink()
    (run / "metrics.csv").write_text(
        "step,epoch,held_out,knn,knn:untrained,knn:raw pixels\n1,0.5,0.2,0.3,0.25,0.1\n2,1.5333,0.2,0.407,,\n"
    )
    assert [one.label for one in key_numbers(load_run(run))] == ["position accuracy"]  # it is finished
    (run / "summary.txt").unlink()
    number = key_numbers(load_run(run))[1]
    assert number[:2] == ("kNN accuracy", Quantity(0.407))
    assert number.beside == [Quantity(0.25, name="untrained"), Quantity(0.1, name="raw pixels")]
    assert "during training, after 1.53 epochs" in number.note
    assert [one.quantity.text() for one in numbers_of(run, {})] == ["50.7 %"]  # what is quoted counts


def test_what_all_results_share_is_in_the_title(run):
    write(run, {}, {"encoder": "untrained", "value": 0.3, "low": 0.28, "high": 0.32})
    (table,) = results_of(load_run(run))
    assert table.title == "Results: data birds, seed 0, tested 2,000, date 2026-11-22"
    assert table.heading == ["encoder", "value", "95 % interval", "measure", "settings"]
    assert table.rows[1][:3] == ["untrained", "30.0 %", "[28.0, 32.0]"]
    write(run, {}, {"data": "cats", "seed": 1, "n_test": 30, "date": "2026-11-23T10:00:00+00:00"})
    (table,) = results_of(load_run(run))
    assert table.title == "Results" and table.heading[5:] == ["data", "seed", "tested", "date"]
    assert [row[5:] for row in table.rows][1] == ["cats", "1", "30", "2026-11-23"]


def test_the_newest_counts_and_other_seeds_are_told(run):
    later = {"date": "2026-11-22T11:00:00+00:00"}
    rows = {"value": 0.4}, {"value": 0.5, **later}, {"value": 0.6, "seed": 1, **later}, {"data": "cats", **later}
    found = numbers_of(run, *rows)
    assert [one.quantity.text() for one in found] == ["60.0 %", "50.7 %"]
    assert "seeds 0, 1: 50.0 %, 60.0 %" in found[0].note


@pytest.mark.parametrize(("protocol", "labelled"), [("knn", True), ("positions", False)])
def test_a_single_row_says_whether_labels_were_needed(run, protocol, labelled):
    write(run, {"protocol": protocol})
    assert has_labelled_results(load_run(run)) == labelled


@pytest.mark.parametrize("open_end", [{"low": "-inf"}, {"high": "inf"}, {"low": "nan"}])
def test_an_interval_without_an_end_is_none(run, open_end):
    (number,) = numbers_of(run, open_end)
    assert number.quantity == Quantity(0.507)


def test_one_comparison_is_judged_once_over_groups_if_they_are_known(run):
    """The same test images once by themselves (better) and once in groups (indistinguishable): the groups count."""
    later = {"date": "2026-11-22T11:00:00+00:00", "low": 0.2, "high": 0.8}
    found = numbers_of(run, {}, {"settings": {"k": 20, "group": "module"}, **later}, {"data": "cats"})
    assert [one.quantity.interval() for one in found] == ["[20.0, 80.0]", "[48.9, 52.5]"]


def test_an_encoder_that_is_quoted_several_times_is_told_apart(run):
    (number,) = numbers_of(run, {}, {"settings": {"k": 1}, "value": 0.4, "low": 0.4, "high": 0.4})
    assert number.beside == [Quantity(0.4, name="mine, 1 neighbours, mean tokens")]


def test_what_is_no_share_is_no_percentage(run):
    (number,) = numbers_of(run, {"settings": {"measure": "distance"}, "value": 0.9, "low": 0.8, "high": 1.0})
    assert (number.quantity.text(), number.quantity.interval()) == ("0.900", "[0.8, 1]")
    head, line = (run / "results.csv").read_text().splitlines()
    for unit, shown in {"patches": "0.900", "-": "0.900", "%": "90.0 %", "": "0.900"}.items():
        (run / "results.csv").write_text(f"{head},unit\n{line},{unit}\n")
        assert key_numbers(load_run(run))[1].quantity.text() == shown
    (number,) = numbers_of(run, {"protocol": "layers", "value": 12.34, "low": 12, "high": 13})
    assert number.quantity.text() == "12.3"


def test_a_missing_column_is_named(run):
    write(run, {})
    with open(run / "results.csv", newline="") as file:
        (cells,) = csv.DictReader(file)
    found = load_run(run)
    for name in HEAD.split(","):
        with open(run / "results.csv", "w", newline="") as file:
            table = csv.DictWriter(file, [one for one in cells if one != name], extrasaction="ignore")
            table.writeheader()
            table.writerow(cells)
        for read in (key_numbers, results_of):
            with pytest.raises(ValueError, match=rf"results.csv could not be read \(no column {name}\)"):
                read(found)


def test_a_damaged_row_is_named(run):
    found = load_run(run)
    damages = [("settings", "null", "settings null"), ("settings", "[1]", "1"), ("settings", "{", "Expecting")]
    damages += [
        ("n_test", "many", "many"),
        ("n_test", "inf", "inf"),
        ("n_test", 1.5, "n_test 1.5"),
        ("value", "", "''"),
    ]
    for name, cell, said in damages:
        write(run, {name: cell})
        with pytest.raises(ValueError, match=f"results.csv could not be read .*{said}"):
            key_numbers(found)
    for text in ("", "nothing\n1\n", HEAD + "\n" + "x,x\n" + ",".join(["x"] * 12) + ",True\n"):
        (run / "results.csv").write_text(text)
        with pytest.raises(ValueError, match="results.csv could not be read"):
            key_numbers(found)


def test_a_number_ends_with_what_its_difference_allows_to_say(run):
    """The interpretation of a difference follows the number."""
    one = Difference("untrained", 0.01, -0.02, 0.04, 2000)
    (number,) = numbers_of(run, {"against": [one]}, {"encoder": "untrained", "value": 0.497})
    assert number.note.endswith(one.sentence())


def test_one_table_answers_whether_pre_training_helped(run):
    """One table has the differences of all evaluations."""
    linear = {"protocol": "linear", "settings": {}, "pooling": "both"}
    better, level = Difference("untrained", 0.207, 0.19, 0.22, 2000), Difference("raw pixels", 0.007, -0.01, 0.02, 2000)
    table = gains_with(
        run,
        {"against": [better, level]},
        {"encoder": "untrained", "value": 0.3},
        {"encoder": "raw pixels", "pooling": "pixels", "value": 0.5},
        {**linear, "value": 0.6, "against": [Difference("untrained", -0.1, -0.2, -0.05, 2000)]},
        {**linear, "encoder": "untrained", "value": 0.7},
    )
    assert table.heading == ("measure", "this run", "control", "its score", "difference", "verdict")
    assert [tuple(row) for row in table.rows] == [
        ("kNN accuracy", "50.7 %", "untrained", "30.0 %", "+20.7 [+19.0, +22.0]", "better"),
        ("kNN accuracy", "50.7 %", "raw pixels", "50.0 %", "+0.7 [-1.0, +2.0]", "indistinguishable"),
        ("linear probe", "60.0 %", "untrained", "70.0 %", "-10.0 [-20.0, -5.0]", "worse"),
    ]
    assert "better in 1 and worse in 1; no claim is made in 1" in table.note
    assert page_of([run]).runs[0].gains == table
    (run / "results.csv").unlink()
    assert gains_of(load_run(run)) is None is page_of([run]).runs[0].gains


def test_few_images_and_single_trainings_make_no_claim_on_the_page(run):
    tuned = {"protocol": "finetune", "settings": {}}
    once = Difference("from scratch", 0.2, 0.1, 0.3, 2000, trained=True)
    table = gains_with(
        run,
        {"against": [Difference("untrained", 0.5, 0.2, 0.8, 9)], "n_test": 9},
        {"encoder": "untrained", "value": 0.007, "n_test": 9},
        {**tuned, "against": [once]},
        {**tuned, "encoder": "from scratch", "value": 0.307},
        {**tuned, "data": "bees", "against": [Difference("from scratch", 0.2, -1.0, 1.0, 0, trained=True)]},
    )
    assert [row[4] for row in table.rows] == ["+50.0", "+20.0 [+10.0, +30.0]", ""]
    verdicts = [row[5] for row in table.rows]
    assert "no claim below 10" in verdicts[0] and "in this one training" in verdicts[1] and "different" in verdicts[2]
    assert "no claim" in table.note
    page = render(page_of([run]))
    assert "no claim is made below 10" in page and "--seeds 3" in page
    assert not re.search(r"points (better|worse) than|better in \d", page)


def test_scores_over_several_seeds_are_the_means_that_the_difference_is_of(run):
    rows = []
    for seed, ours, theirs in ((0, 0.9, 0.1), (1, 0.5, 0.2), (2, 0.7, 0.6)):  # seed 0 is of an earlier command
        about = {"protocol": "finetune", "settings": {}, "seed": seed, "date": f"2026-11-22T10:00:0{seed}+00:00"}
        rows += [{**about, "value": ours}, {**about, "encoder": "from scratch", "value": theirs}]
    rows[-2]["against"] = [Difference("from scratch", 0.2, 0.1, 0.3, 2000, 2, True)]
    (row,) = gains_with(run, *rows).rows
    assert row[1:] == ("60.0 %", "from scratch", "40.0 %", "+20.0 [+10.0, +30.0]", "better over 2 trainings")


def test_seeds_with_test_splits_of_their_own_are_one_evaluation(run):
    """Such seeds share a card and a line."""
    rows = []
    for seed, ours, theirs in ((0, 0.5, 0.4), (1, 0.7, 0.6)):
        about = {"protocol": "finetune", "settings": {}, "seed": seed, "data_fingerprint": f"f{seed}"}
        rows += [{**about, "value": ours}, {**about, "encoder": "from scratch", "value": theirs}]
    rows[0]["against"] = [Difference("from scratch", 0.1, -0.1, 0.3, 20, 1, True)]
    rows[2]["against"] = [Difference("from scratch", 0.1, -0.3, 0.5, 20, 2, True)]
    (row,) = gains_with(run, *rows).rows
    assert row[1:] == ("60.0 %", "from scratch", "50.0 %", "+10.0 [-30.0, +50.0]", "indistinguishable over 2 trainings")
    (number,) = key_numbers(load_run(run))[1:]
    assert "seeds 0, 1: 50.0 %, 70.0 %" in number.note


def test_a_number_of_trainings_that_cannot_be_costs_nothing(run):
    for trainings in (0, -3, 10**15):
        table = gains_with(run, {"against": [Difference("untrained", 0.2, 0.1, 0.3, 99, trainings)]})
        assert table.rows[0][1] == "50.7 %"


def test_a_control_of_the_same_name_is_that_of_the_difference(run):
    ours, control = {"against": [Difference("untrained", 0.207, 0.19, 0.22, 2000)]}, {"encoder": "untrained"}
    table = gains_with(run, ours, {**control, "value": 0.4, "pooling": "class"}, {**control, "value": 0.3})
    assert table.rows[0][3] == "30.0 %"


def test_evaluations_that_differ_in_any_setting_have_their_own_cards(run):
    """Settings that no card displays, such as the temperature, also distinguish evaluations."""
    later, settings = {"date": "2026-11-23T10:00:00+00:00"}, {"k": 20, "temperature": 0.07}
    warm = {"settings": settings | {"temperature": 0.5}, "value": 0.4, **later}
    first, second = numbers_of(run, {"settings": settings}, warm)
    assert (first.quantity.text(), second.quantity.text()) == ("50.7 %", "40.0 %")
    assert "temperature 0.07" in first.label and "temperature 0.5" in second.label
    first, second = numbers_of(run, {}, {"settings": {"k": 5}, **later})
    assert "20 neighbours" in first.label and "5 neighbours" in second.label


def test_seeds_that_choose_differently_are_of_one_evaluation(run):
    (number,) = numbers_of(
        run,
        {"settings": {"l2": 0.1, "held_out_accuracy": 0.5}},
        {"settings": {"l2": 0.2, "held_out_accuracy": 0.4}, "pooling": "class", "quoted": False},
        {"settings": {"l2": 1.0, "held_out_accuracy": 0.6}, "seed": 1, "quoted": False},
        {"settings": {"l2": 2.0, "held_out_accuracy": 0.7}, "seed": 1, "pooling": "class", "value": 0.6},
    )
    assert number.quantity.text() == "60.0 %" and "seeds 0, 1" in number.note
