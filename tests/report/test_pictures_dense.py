"""Tests of the sliders between ground truth and prediction: equal sizes, and the budget of bytes."""

import json
import shutil

import torch
from PIL import Image

from patchloom.dense.annotations.base import Objects
from patchloom.dense.pictures import BoxRow, MapRow, detection_picture, load_pairs, segmentation_picture
from patchloom.report.load_run import load_run
from patchloom.report.pictures import sheets_of, sliders_of

CLASSES = ("<script>", "road")


def drawn(run):
    image = torch.randint(0, 256, (3, 60, 80), generator=torch.Generator().manual_seed(0)).byte()
    truth, answer = torch.zeros(60, 80, dtype=torch.int16), torch.ones(60, 80, dtype=torch.int16)
    rows = [MapRow(image, truth, answer, "best: a.png"), MapRow(image, None, answer, "unknown")]
    segmentation_picture(rows, CLASSES, run / "pictures" / "segment-small.png")
    box = Objects(torch.tensor([[5.0, 5, 30, 40]]), torch.tensor([1]), None, torch.tensor([False]))
    row = BoxRow(image, box, box, torch.tensor([0.9]), "worst: <b>")
    detection_picture([row], CLASSES, run / "pictures" / "detect-small.png")


def test_truth_and_answer_lie_over_one_another(run):
    drawn(run)
    detected, segmented = sliders_of(load_run(run))
    assert (detected.name, segmented.name) == ("worst: <b>", "best: a.png")
    for one in (detected, segmented):
        assert (one.truth.width, one.truth.height) == (one.answer.width, one.answer.height)
        assert one.truth.uri != one.answer.uri and one.caption
    assert len(sheets_of(load_run(run))) == 5  # three of the task, and the two sheets with legends


def test_they_are_in_the_colours_of_the_classes(run):
    drawn(run)
    (pair,) = load_pairs(run / "pictures" / "segment-small")
    truth, answer = (Image.open(path).resize((1, 1), Image.Resampling.BOX).getpixel((0, 0)) for path in pair[1:])
    assert truth[0] > truth[2] + 60 and answer[2] > answer[0] + 60  # orange, and blue


def test_they_stay_small(run):
    drawn(run)
    whole = sum(len(one.truth.uri) + len(one.answer.uri) for one in sliders_of(load_run(run)))
    less = sliders_of(load_run(run), whole - 1)
    assert len(less) == 2 and less[0].truth.width < sliders_of(load_run(run))[0].truth.width
    assert sliders_of(load_run(run), 10) == []


def test_nothing_outside_of_the_folder_is_shown(run):
    drawn(run)
    index = run / "pictures" / "segment-small" / "apart.json"
    for place in ("../positions.png", str(run / "pictures" / "positions.png"), 3):
        index.write_text(json.dumps([{"title": "x", "truth": place, "answer": place}]))
        assert len(sliders_of(load_run(run))) == 1
    index.write_text("{")
    (run / "pictures" / "detect-small" / "1-truth.jpg").write_bytes(b"")
    assert sliders_of(load_run(run)) == []


def test_sliders_of_several_evaluations_say_of_which_they_are(run):
    drawn(run)
    shutil.copytree(run / "pictures" / "segment-small", run / "pictures" / "segment-large")
    detected, large, small = sliders_of(load_run(run))
    assert [one.name for one in (large, small)] == ["segment-large: best: a.png", "segment-small: best: a.png"]
    assert detected.name == "worst: <b>"
