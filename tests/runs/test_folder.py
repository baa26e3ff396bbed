"""Folders of runs: settings, statistics, tables, lists of names, and records of training images."""

from dataclasses import replace

import numpy as np
import pytest
from refusing import refusal
from resolved import resolved_settings

from patchloom.data.sources.synthetic import Shapes
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.runs.folder import RunFolder, line_of, metrics_row
from patchloom.runs.settings import Settings, request, setting_differences
from patchloom.runs.training_set import digest_of_record, no_record, read_record, write_record
from patchloom.tasks import with_defaults

ASKED = Settings("photos/", {"name": "mae", "mask_ratio": 0.75}, {"name": "auto"})
RESOLVED = resolved_settings(img_size=(32, 64), epochs=10)
STATS = Stats((0.5, 0.4, 0.3), (0.2, 0.2, 0.2), 32, 64, 10, [])
SPLIT = {"held_out": [1], "held_out_copies": [], "held_out_doubt": "", "held_out_looked": True}


@pytest.fixture
def begun(tmp_path):
    """Return a function that begins a run with resolved settings in a folder."""

    def begin(settings=RESOLVED):
        folder = RunFolder(tmp_path / "run")
        assert not folder.holds(ASKED)
        folder.begin(ASKED, settings, {"img_size": "as the images"}, STATS, "abc", SPLIT, no_record())
        return folder

    return begin


def test_a_run_is_recognised_and_restores_its_settings(begun):
    folder = begun()
    assert folder.holds(ASKED) and folder.read_config() == RESOLVED
    assert folder.read_stats() == STATS and folder.read_data()["fingerprint"] == "abc"
    assert "# img_size: as the images" in folder.config.read_text()
    assert folder.read_reasons() == {"img_size": "as the images"}


def test_other_settings_are_refused_with_the_difference(begun):
    folder = begun(replace(RESOLVED, epochs=9))
    of_auto = {"epochs": 9, "patch_size": 4, "img_size": (32, 64), "model": {"name": "nano"}}
    assert folder.holds(replace(ASKED, **of_auto)), "the value of auto is no difference"
    assert folder.holds(replace(ASKED, task=with_defaults(ASKED.task))), "nor is a default"
    other = {"epochs": 8, "task": {"name": "mae", "mask_ratio": 0.5}}
    with pytest.raises(PatchloomError, match="a run .*epochs: was auto, now 8; task.mask_ratio: was 0.75, now 0.5"):
        folder.holds(replace(ASKED, **other))
    # options of another task or model are not listed
    foreign = {"data": "other/", "task": {"name": "droppos", "mask_ratio": 0.1}, "model": {"name": "mini", "depth": 3}}
    said = "data: was photos/, now other/; model: was auto, now mini; task: was mae, now droppos"
    with pytest.raises(PatchloomError, match=rf"run holds a run with other settings \({said}\)"):
        folder.holds(replace(ASKED, **foreign))
    folder.summary.write_text("Done.\n")
    many = replace(ASKED, epochs=8, seed=1, clip=2.0, flip=False, blr=1.0, batch_size=3, held_out=0.3)
    with pytest.raises(PatchloomError, match="holds a finished run .*; and 1 more"):
        folder.holds(many)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "holds no run of patchloom" in refusal(RunFolder(tmp_path).holds, ASKED)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_columns_may_appear_later(tmp_path):
    rows = [{"step": 10, "loss": 10 / 7}, {"step": 20, "loss": 20 / 7, "knn": 0.5}]
    RunFolder(tmp_path).write_metrics([metrics_row(row) for row in rows])
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,loss,knn", "10,1.42857,", "20,2.85714,0.5"]


# Differences of settings.


def differing(before, run, task="extrema", **settings):
    return setting_differences(before, request("photos", task, settings), {}, run)


def test_differences_are_named_with_both_values(tmp_path):
    before = request("photos", {"name": "extrema", "loss": "byol"}, {"weight_decay": 0.05, "held_out": 0.05}).plain()
    assert differing(before, tmp_path, {"name": "extrema", "loss": "byol"}, weight_decay=0.05, held_out=0.05) == []
    assert differing(before, tmp_path, {"name": "extrema", "loss": "infonce"}, weight_decay=0.1) == [
        "held_out: was 0.05, now auto",
        "task.loss: was byol, now infonce",
        "weight_decay: was 0.05, now 0.1",
    ]
    assert differing(before, tmp_path, "mae")[-2:] == ["task: was extrema, now mae", "weight_decay: was 0.05, now auto"]


def test_what_starts_a_run_may_change(tmp_path):
    before = request("photos", "mae", {"devices": 2, "strategy": "fsdp", "log": "wandb"}).plain()
    assert differing(before, tmp_path, "mae") == []


def test_a_patch_is_the_same_by_its_side_and_by_both(tmp_path):
    before = request("photos", "mae", {"patch_size": 8}).plain()
    assert before["patch_size"] == 8
    assert differing(before, tmp_path, "mae", patch_size=(8, 8)) == []
    assert differing(before, tmp_path, "mae", patch_size=[40, 1]) == ["patch_size: was 8, now 40x1"]


# Lists of names, and records of training images.

HARD = ["two\nlines.png", "a\r.png", "a\u2028b.png", "a\x85.png", '"quoted".png', '"', "", "two\n\udcff.png"]
PLAIN = ["plain.png", "back\\nslash.png", "C:\\new\\x.png", "\udcff.png", 'in "quotes".png', "äö.png"]


@pytest.mark.parametrize("name", HARD + PLAIN)
def test_a_name_is_one_line_and_comes_back(name, tmp_path):
    line, folder = line_of(name), RunFolder(tmp_path)
    folder.note_unreadable([name])
    assert line.splitlines() == [line] and folder.unreadable_names() == [name]
    assert (line == name) == (name in PLAIN)


def test_a_list_is_counted_by_names(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.lock()
    folder.note_unreadable(HARD)
    folder.note_unreadable(PLAIN + HARD[:2])
    assert sorted(folder.unreadable_names()) == sorted(HARD + PLAIN)
    assert len(folder.unreadable.read_bytes().splitlines()) == len(HARD + PLAIN)


def test_a_record_comes_back_and_grows(tmp_path):
    path, contents = tmp_path / "trained_on.bin", Shapes(20).contents()
    assert read_record(path) is None and digest_of_record(path) == ""
    record = no_record("timm:x").and_trained_on(contents[5:], "one").and_trained_on(contents[:10], "two")
    assert (record.contents == np.unique(contents)).all() and record.unknown == ("timm:x",)
    record = record.and_trained_on(None, "a\nb \udcff").and_trained_on(None, "timm:x")
    write_record(record, path)
    again = read_record(path)
    assert (again.contents == record.contents).all() and again.unknown == ("timm:x", "a\nb \udcff")
    before = digest_of_record(path)
    write_record(again.and_trained_on(contents[:3], "two"), path)
    assert digest_of_record(path) == before, "nothing new"
    write_record(again.and_trained_on(Shapes(1, seed=1).contents(), "two"), path)
    assert digest_of_record(path) != before
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(PatchloomError, match="trained_on.bin is not what patchloom wrote .*: restore it from a copy"):
        read_record(path)
    path.unlink()
    path.mkdir()
    assert "trained_on.bin" in refusal(read_record, path)
