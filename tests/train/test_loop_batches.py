"""Batches with unreadable images: equal in all processes, and large enough for the task."""

from pathlib import Path

import pytest
import torch
from killing import draw_images
from ranks import run_together

from patchloom.cli import main
from patchloom.data.loader import Batch
from patchloom.data.sources.open import open_data
from patchloom.data.splits import hold_out
from patchloom.errors import AlreadyReported, PatchloomError, TemporaryError
from patchloom.runs.settings import Settings
from patchloom.train import loop
from patchloom.train.loop import equalize_batches

pytestmark = pytest.mark.usefixtures("quick_probe")

CASES = {
    "extrema": {"task": {"name": "extrema", "loss": "infonce"}},
    "lut": {"task": "lut"},
    "droppos": {"task": "droppos", "accumulate": 2},
}


def with_damage(folder: Path, count: int, broken: int) -> tuple[Path, list[str]]:
    """Return a folder of ``count`` unlabelled images and the training names; the first ``broken`` are unreadable."""
    for path in sorted(draw_images(folder, count).glob("*/*")):
        path.rename(folder / path.name)
    training, _ = hold_out(open_data(str(folder)).train, 0.2, seed=0)
    names = [training.describe(i) for i in range(len(training))]
    for name in names[:broken]:
        Path(name).write_bytes(b"broken")
    return folder, names


@pytest.mark.parametrize("case", CASES)
def test_processes_take_as_many_images_as_the_one_that_can_read_fewest(case, tmp_path):
    images, names = with_damage(tmp_path / "images", 20, 1)
    options = CASES[case] | {"epochs": 2, "batch_size": len(names)}  # so that none is left to take the place
    ended, ranks = run_together(images, tmp_path / "run", 2, options)
    assert [one.code for one in ended] == [0, 0], "\n".join(one.told for one in ended)
    assert all(torch.equal(value, ranks[1][name]) for name, value in ranks[0].items())
    assert all(value.isfinite().all() for value in ranks[0].values())
    assert (tmp_path / "run" / "unreadable.txt").read_text().splitlines() == names[:1]


def test_a_process_that_can_read_nothing_says_so_and_the_others_end(tmp_path):
    images, names = with_damage(tmp_path / "images", 3, 1)
    assert len(names) == 2
    options = {"task": "mae", "epochs": 2, "batch_size": 2}
    ended, _ = run_together(images, tmp_path / "run", 2, options)
    assert [one.code for one in ended] == [2, 2]
    silent, said = sorted(one.told for one in ended)
    assert silent == "" and said.count("\n") == 1
    assert f"could be read by process {[one.told for one in ended].index(said)}, beginning with {names[0]}: " in said
    assert said.endswith("or use fewer processes\n")
    (ended,), _ = run_together(images, tmp_path / "run", 1, options)  # the same run goes on
    assert ended.code == 0, ended.told


def batch_of(count):
    return Batch((torch.zeros(count, 3, 4, 4),), torch.arange(count), ["a.png"])


def test_a_batch_that_is_too_small_for_the_task_is_refused():
    lut = Settings("x", {"name": "lut"}, batch_size=4)
    assert [len(one.indices) for one in equalize_batches(iter([batch_of(4), batch_of(2)]), lut, 4)] == [4, 2]
    with pytest.raises(
        PatchloomError, match="^lut needs 2 or more images in a step, .* only 1 of the training images can be read: add"
    ):
        next(equalize_batches(iter([batch_of(1)]), lut, 4))
    assert (
        len(next(equalize_batches(iter([batch_of(1)]), Settings("x", {"name": "mae"}, batch_size=4), 4)).indices) == 1
    )


@pytest.mark.parametrize(("sent", "code"), [(-2, 2), (-75, 75), (0, 2)])
def test_a_process_that_fails_ends_the_others_with_its_exit_code(monkeypatch, sent, code):
    mae = Settings("x", {"name": "mae"}, batch_size=4)
    monkeypatch.setattr(loop, "smallest", lambda count: min(count, sent))
    with pytest.raises(AlreadyReported) as raised:
        next(equalize_batches(iter([batch_of(4)]), mae, 4))
    assert raised.value.exit_code == code

    def lost():
        raise TemporaryError("a process that read images has died")
        yield

    told = []
    monkeypatch.setattr(loop, "smallest", lambda count: told.append(count) or count)
    with pytest.raises(TemporaryError):
        next(equalize_batches(lost(), mae, 4))
    assert told == [-75]


REFUSED = {
    "lut, one image a step": (["--task=lut", "--batch_size=1"], 20, 0, "give --batch_size 2 or more"),
    "infonce, one image a step": (
        ["--task=extrema", "--task.loss=infonce", "--batch_size=1"],
        *(20, 0),
        "since infonce distinguishes the images of a step: give --batch_size 2 or more",
    ),
    "lut, one image": (["--task=lut"], 2, 0, "only 1 of the training images can be read: add images"),
    "lut, one image that can be read": (["--task=lut"], 4, 2, "only 1 of the training images can be read: add images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_steps_too_small_for_the_task_are_refused_before_anything_is_written(case, tmp_path, capfd):
    words, count, broken, said = REFUSED[case]
    images, _ = with_damage(tmp_path / "images", count, broken)
    small = ["--model.embed_dim=32", "--model.depth=1", "--img_size=32", "--patch_size=8", "--held_out=0.2"]
    assert main(["pretrain", str(images), *words, *small, f"--out={tmp_path / 'run'}"]) == 2
    told = capfd.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_check_and_bench_refuse_them_too(tmp_path, capfd):
    images, _ = with_damage(tmp_path / "images", 20, 0)
    for words in (["check", str(images), "--task=lut"], ["bench", str(images), "--tasks=mae,lut"]):
        assert main([*words, "--batch_size=1", "--workers=0"]) == 2
        assert "lut needs 2 or more images in a step" in capfd.readouterr().err
