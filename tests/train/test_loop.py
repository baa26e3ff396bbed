"""Settings asked for in Python, parts of the loop, and its batches."""

import math
import re
from pathlib import Path

import pytest
import torch
from killing import SMALL
from labelled import write_noise
from ranks import run_together
from refusing import refusal
from running import column, each_update

from patchloom.cli import main
from patchloom.data.loader import Batch
from patchloom.data.sources.open import open_data
from patchloom.data.splits import hold_out
from patchloom.errors import AlreadyReported, PatchloomError, TemporaryError
from patchloom.options.parse import parse_pretrain
from patchloom.runs.settings import Settings, request
from patchloom.schedules import cosine_rate, halving_rate
from patchloom.train import loop
from patchloom.train.loop import equalize_batches, pretrain
from patchloom.train.step import Stepper

pytestmark = pytest.mark.usefixtures("quick_probe")


def test_a_failed_start_leaves_the_folder_free(draw, tmp_path):
    images = [draw(f"images/{i}.png") for i in range(12)][0].parent
    (images / "cut.png").write_bytes((images / "0.png").read_bytes()[:100])
    given = SMALL | {"out": tmp_path / "run", "epochs": 1}
    assert "do not divide" in refusal(pretrain, images, **given | {"img_size": 30})
    assert not (tmp_path / "run").exists()
    assert pretrain(images, **given).summary
    assert "cut.png" in (tmp_path / "run" / "unreadable.txt").read_text()


def test_betas_reach_the_optimiser_and_are_a_setting_of_the_run(unlabelled_images, tmp_path, monkeypatch):
    seen, given = [], SMALL | {"epochs": 0.3, "out": tmp_path / "run"}
    each_update(monkeypatch, lambda stepper, _: seen.append(stepper.optimizer.param_groups[0]["betas"]))
    pretrain(unlabelled_images, betas=(0.9, 0.999), **given)
    assert seen == [(0.9, 0.999)]
    assert "betas: was [0.9, 0.999], now [0.9, 0.95]" in refusal(pretrain, unlabelled_images, **given)


def test_labels_of_a_single_class_are_no_obstacle(unlabelled_images, tmp_path, capsys):
    listed = "".join(f"{path}\tcat\n" for path in sorted(unlabelled_images.iterdir()))
    (tmp_path / "list.txt").write_text(listed)
    pretrain(tmp_path / "list.txt", out=tmp_path / "run", **SMALL | {"epochs": 0.3})
    assert "not what the features are good for." in capsys.readouterr().out


def test_rows_have_the_rate_and_the_place_of_their_update(unlabelled_images, small_run, tmp_path):
    run, peak = small_run("mae"), 4e-3 * 16 / 256
    assert column(run, "lr") == pytest.approx([cosine_rate(step, 6, 1, peak) for step in range(6)], rel=1e-5)
    assert column(run, "images") == [16 * step for step in range(7)]
    assert column(run, "epoch") == pytest.approx([step / 3 for step in range(7)], abs=1e-4)
    given = SMALL | {"epochs": 2, "accumulate": 2, "blr": 1e-3, "warmup_epochs": 1, "halve_every": 1}
    halved = pretrain(unlabelled_images, "mae", out=tmp_path / "run", **given).folder
    rates = [halving_rate(step, 3, 1e-3 * 32 / 256, 2) for step in (1, 3, 5)]
    assert column(halved, "lr") == pytest.approx(rates, rel=1e-5) and column(halved, "step") == [0, 2, 4, 6]


def test_least_rate_and_final_weight_decay_end_their_cosines(unlabelled_images, tmp_path, monkeypatch):
    """I-JEPA's weight decay at a third of the training: final + (first - final) · (1 + cos(π/3)) / 2."""
    seen = []

    def note(stepper, done):
        seen.append([group["weight_decay"] for group in stepper.optimizer.param_groups])

    each_update(monkeypatch, note)
    given = SMALL | {"epochs": 2, "warmup_epochs": 0.34, "least_rate": 1e-5, "out": tmp_path / "run"}
    pretrain(unlabelled_images, weight_decay=0.04, final_weight_decay=0.4, **given)
    run, peak = tmp_path / "run", 4e-3 * 16 / 256
    assert column(run, "lr") == pytest.approx([cosine_rate(step, 6, 1, peak, 1e-5) for step in range(6)], rel=1e-5)
    assert cosine_rate(6, 6, 1, peak, 1e-5) == 1e-5 and cosine_rate(0, 6, 1, peak, 1e-5) == peak
    decays = [0.4 - 0.36 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]
    assert decays[2] == pytest.approx(0.4 - 0.36 * 0.75)
    assert column(run, "weight_decay") == pytest.approx(decays, rel=1e-5)
    assert [before for before, _ in seen] == pytest.approx([0.04, *decays[:-1]]), "an update sets its own"
    assert {free for _, free in seen} == {0.0}
    assert "least_rate: was 1e-05, now 0.0" in refusal(pretrain, unlabelled_images, **given | {"least_rate": 0.0})


def test_a_least_rate_above_the_peak_is_refused(images, tmp_path):
    given = SMALL | {"least_rate": 1e-3, "out": tmp_path / "run"}
    assert "--least_rate 0.001 exceeds the peak of the learning rate, 0.00025" in refusal(pretrain, images, **given)
    assert not (tmp_path / "run").exists()


def test_the_last_update_is_the_mean_of_its_own_steps(unlabelled_images, tmp_path, monkeypatch):
    """A window of ``--accumulate`` 4 that has only 3 steps gives the gradient of one of 3."""
    norms, update = [], Stepper.update
    monkeypatch.setattr(Stepper, "update", lambda *a: norms.append((made := update(*a)).read().norm) or made)
    for steps in (3, 4):
        given = SMALL | {"batch_size": 16, "epochs": 1, "accumulate": steps, "out": tmp_path / str(steps)}
        pretrain(unlabelled_images, "mae", **given)
    assert len(norms) == 2 and norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"betas": [0.9, 1.0]}, "--betas must be 0 or more and below 1"),
        ({"betas": [0.9]}, "--betas cannot be"),
        ({"precision": "bf16"}, "--precision cannot be bf16: it takes float32, tf32, bfloat16, float16 or auto"),
        ({"positions": "rope"}, "--positions cannot be rope"),
        ({"epochs": "5"}, "--epochs cannot be 5"),
        ({"epochs": None}, "--epochs needs a value: it takes float or auto"),
        ({"img_size": "16x16"}, "--img_size cannot be 16x16"),
        ({"flip": 1}, "--flip cannot be 1: it takes true or false"),
        ({"blr": float("nan")}, "--blr cannot be nan"),
        ({"epochs": 0}, "--epochs must be above 0"),
        ({"blr": -1.0}, "--blr must be above 0"),
        ({"held_out": 1.5}, "--held_out must be 0 or more and below 1"),
        ({"crop_scale": 0.0}, "--crop_scale must be above 0 and at most 1"),
        ({"img_size": (0, 32)}, "--img_size must be 1 to 65,536"),
        ({"patch_size": (40, 0)}, "--patch_size must be 1 to 65,536, not 0"),
        ({"seed": -1}, "--seed must be 0 or more"),
        ({"least_rate": -1e-6}, "--least_rate must be 0 or more"),
        ({"least_rate": 1e-6, "halve_every": 2}, "--least_rate ends the cosine"),
        ({"final_weight_decay": -0.1}, "--final_weight_decay must be 0 or more"),
        ({"final_weight_decay": 0.4, "weight_decay": 0.0}, "--final_weight_decay is reached from"),
        ({"keep_every": 0}, "--keep_every must be 1 or more"),
        ({"keep_every": 0.5}, "keep_every cannot be 0.5"),
        ({"patience": 0}, "--patience must be 1 or more, not 0"),
        ({"from_run": "a", "init": "timm:b"}, "--from and --init both set the initial weights"),
        # of runs that adapt initial weights
        ({"adapt": "lora"}, "--adapt lora freezes weights, which are random"),
        ({"anchor": 1.0}, "--anchor keeps features"),
        ({"heads_first": 0.1}, "--heads_first keeps the encoder's weights, which are random"),
        ({"train_blocks": 1}, "--train_blocks .* random without --init"),
        ({"init": "x", "adapt": "all", "train_blocks": 1}, "leave out --train_blocks"),
        ({"init": "x", "lora_rank": 4}, "add --adapt lora"),
        ({"init": "x", "adapt": "lora", "lora_rank": 0}, "--lora_rank must be 1 or more, not 0"),
        ({"init": "x", "adapt": "lora", "strategy": "fsdp"}, "use --strategy ddp"),
        ({"init": "x", "adapt": "some"}, "adapt cannot be"),
        ({"layer_decay": 0.0}, "--layer_decay must be above 0 and at most 1, not 0"),
        ({"layer_decay": 1.1}, "--layer_decay must be above 0 and at most 1"),
        ({"init": "x", "heads_first": 1.0}, "--heads_first must be 0 or more and below 1"),
        ({"init": "x", "anchor": -1.0}, "--anchor must be 0 or more"),
        ({"init": "x", "anchor": float("nan")}, "--anchor cannot be nan"),
        ({"init": "x", "train_blocks": -1}, "--train_blocks must be 0 or more, not -1"),
        ({"init": "x", "train_blocks": 1.5}, "train_blocks cannot be 1.5"),
        ({"init": "x", "train_blocks": True}, "train_blocks cannot be True"),
    ],
)
def test_invalid_settings_are_refused(wrong, said):
    """Python is as strict as the command line."""
    assert re.search(said, refusal(request, "shapes", "mae", wrong))


def test_python_and_the_command_line_ask_for_the_same(tmp_path, monkeypatch):
    typed = ["shapes", "--task", "droppos", "--task.sigma", "0.5", "--epochs", "3", "--model", "micro"]
    given, _ = parse_pretrain(typed)
    words = request(given.pop("data"), given.pop("task"), given)
    assert words == request("shapes", {"name": "droppos", "sigma": 0.5}, {"epochs": 3, "model": "micro"})
    (tmp_path / "shapes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert request(Path("shapes"), "mae", {}).data == str(tmp_path / "shapes"), "a path is never a built-in"
    assert request("shapes", "mae", {}).data == "shapes"


# Batches with unreadable images: equal in all processes, and large enough for the task.


def with_damage(folder: Path, count: int, broken: int) -> tuple[Path, list[str]]:
    """Return a folder of ``count`` unlabelled images and the training names; the first ``broken`` are unreadable."""
    for path in sorted(write_noise(folder, count).glob("*/*")):
        path.rename(folder / path.name)
    training, _ = hold_out(open_data(str(folder)).train, 0.2, seed=0)
    names = [training.describe(i) for i in range(len(training))]
    for name in names[:broken]:
        Path(name).write_bytes(b"broken")
    return folder, names


@pytest.mark.slow
def test_processes_take_as_many_images_as_the_one_that_can_read_fewest(tmp_path):
    images, names = with_damage(tmp_path / "images", 20, 1)
    options = {"task": {"name": "extrema", "loss": "infonce"}, "epochs": 2}
    options |= {"batch_size": len(names)}  # so that none is left to take the place
    ended, ranks = run_together(images, tmp_path / "run", 2, options)
    assert [one.code for one in ended] == [0, 0], "\n".join(one.told for one in ended)
    assert all(torch.equal(value, ranks[1][name]) for name, value in ranks[0].items())
    assert all(value.isfinite().all() for value in ranks[0].values())
    assert (tmp_path / "run" / "unreadable.txt").read_text().splitlines() == names[:1]


@pytest.mark.slow
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
    lut, mae = (Settings("x", {"name": name}, batch_size=4) for name in ("lut", "mae"))
    assert [len(one.indices) for one in equalize_batches(iter([batch_of(4), batch_of(2)]), lut, 4)] == [4, 2]
    assert [len(one.indices) for one in equalize_batches(iter([batch_of(1)]), mae, 4)] == [1]
    with pytest.raises(PatchloomError, match="^lut needs 2 or more images in a step, .* only 1 of the training images"):
        next(equalize_batches(iter([batch_of(1)]), lut, 4))


def test_a_process_that_fails_ends_the_others_with_its_exit_code(monkeypatch):
    mae = Settings("x", {"name": "mae"}, batch_size=4)
    for sent, code in ((-2, 2), (-75, 75), (0, 2)):
        monkeypatch.setattr(loop, "smallest", lambda count, sent=sent: min(count, sent))
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


@pytest.mark.parametrize(
    ("task", "batch_size", "count", "broken", "said"),
    [
        ("lut", 1, 20, 0, "give --batch_size 2 or more"),
        ({"name": "extrema", "loss": "infonce"}, 1, 20, 0, "infonce distinguishes .*: give --batch_size 2 or more"),
        ("lut", 16, 2, 0, "only 1 of the training images can be read: add images"),
        ("lut", 16, 4, 2, "only 1 of the training images can be read: add images"),
    ],
)
def test_steps_too_small_for_the_task_are_refused(task, batch_size, count, broken, said, tmp_path, capfd):
    """Before anything is written, and by other verbs, too."""
    images, _ = with_damage(tmp_path / "images", count, broken)
    assert re.search(said, refusal(pretrain, images, task, out=tmp_path / "run", **SMALL | {"batch_size": batch_size}))
    assert not (tmp_path / "run").exists()
    if (task, batch_size) == ("lut", 1):
        for words in (["check", str(images), "--task=lut"], ["bench", str(images), "--tasks=mae,lut"]):
            assert main([*words, "--batch_size=1", "--workers=0"]) == 2
            assert "lut needs 2 or more images in a step" in capfd.readouterr().err
