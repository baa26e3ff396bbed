"""The same command resumes a run of an older version with other defaults."""

import pytest

from patchloom.runs.settings import request, setting_differences

NEW = {
    "recipe",
    "randaugment",
    "randaugment_std",
    "initialization",
}  # which versions did not have that did not know these autos


def older_requested(**task):
    """Return requested.yaml of an extrema run of an older version."""
    asked = request("photos", {"name": "extrema", "loss": "byol", "momentum": 0.996, **task}, {"weight_decay": 0.05})
    values = {name: value for name, value in asked.plain().items() if name not in NEW}
    del values["task"]["attention_blocks"]
    return values


def differing(before, run, task="extrema", **settings):
    return setting_differences(before, request("photos", task, settings), {}, run)


def test_a_run_with_older_defaults_resumes(tmp_path):
    assert differing(older_requested(), tmp_path) == []
    assert differing(older_requested(momentum=0.9), tmp_path) == ["task.momentum: was 0.9, now auto"]
    assert differing(older_requested(), tmp_path, {"name": "extrema", "loss": "infonce"}) == [
        "task.loss: was byol, now infonce"
    ]
    assert differing(older_requested(), tmp_path, weight_decay=0.1) == ["weight_decay: was 0.05, now 0.1"]


def test_older_crops_resume_with_or_without_recipes(tmp_path):
    before = request("photos", "mae", {"crop_scale": 0.2}).plain()
    assert differing(before, tmp_path, "mae") == []
    assert differing(before, tmp_path, "mae", crop_scale="native") == ["crop_scale: was 0.2, now native"]
    before["crop_scale"] = 0.3
    assert differing(before, tmp_path, "mae") == ["crop_scale: was 0.3, now auto"]


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ({"loss": "byol"}, {}, "task.loss: was byol, now auto"),
        ({"momentum": 0.996}, {}, "task.momentum: was 0.996, now auto"),
        ({}, {"weight_decay": 0.05}, "weight_decay: was 0.05, now auto"),
        ({}, {"held_out": 0.05}, "held_out: was 0.05, now auto"),
    ],
)
def test_a_given_value_is_not_taken_for_an_older_default(task, settings, said, tmp_path):
    begun = request("photos", {"name": "extrema", **task}, settings).plain()
    assert differing(begun, tmp_path) == [said]


def test_a_patch_is_the_same_by_its_side_and_by_both(tmp_path):
    before = request("photos", "mae", {"patch_size": 8}).plain()
    assert before["patch_size"] == 8
    assert differing(before, tmp_path, "mae", patch_size=(8, 8)) == []
    assert differing(before, tmp_path, "mae", patch_size=[40, 1]) == ["patch_size: was 8, now 40x1"]
