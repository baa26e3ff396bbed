"""Arms of a comparison, and its plan."""

from dataclasses import replace

import pytest
from in_process import hurry

from patchloom import PatchloomError
from patchloom.compare.compare import _describe_plan
from patchloom.compare.plan import (
    Arm,
    ComparisonPlan,
    name_arms,
    new_plan,
    resolve_settings,
    split_arms,
    store,
    stored_plan,
    threads_each,
)
from patchloom.compare.runner import Bar, Job, Length
from patchloom.data.sources.open import open_data
from patchloom.options.parse import parse_pretrain
from patchloom.options.verbs import Compare
from patchloom.runs.settings import option_text
from patchloom.system.checksummed import read_checksummed, write_checksummed

GIVEN = {"img_size": 16, "patch_size": 8, "batch_size": 16, "threads": 1, "workers": 0}


def asked_of(folder, tasks=("mae", "mp3"), **changes) -> Compare:
    return Compare(str(folder), tasks=tasks, **{"seeds": 1, "samples": 96, **GIVEN, **changes})


def plan_of(asked: Compare, threads: int | None = None) -> ComparisonPlan:
    length = Length(16, 1.5 if asked.minutes is None else None, 6.0)
    return ComparisonPlan(asked, dict.fromkeys(asked.tasks, length), 40, threads, ("a note",))


def test_arms_are_separated_by_commas_and_options_by_colons():
    text = "mae, mae:blr=1e-3:task.mask_ratio=0.5,my/t.py:Mine:init=timm:vit_tiny:betas=[0.9,0.95],mae:img-size=64x128"
    plain, rates, custom, size = map(Arm.of, split_arms(text))
    assert (plain.task, plain.typed) == ("mae", {})
    assert rates.typed == {"blr": "1e-3", "task.mask_ratio": "0.5"}
    assert (custom.task, custom.name) == ("my/t.py:Mine", "Mine:init=timm:vit_tiny:betas=[0.9,0.95]")
    assert custom.typed == {"init": "timm:vit_tiny", "betas": "[0.9,0.95]"} and size.typed == {"img_size": "64x128"}


def test_an_arm_has_settings_of_pretrain(tmp_path):
    asked = asked_of(tmp_path, model="nano")
    found = Arm.of("mae:blr=1e-3:task.mask_ratio=.5:model.depth=2:img_size=16x32:flip=false").settings(asked)
    assert found.blr == 1e-3 and found.task["mask_ratio"] == 0.5 and not found.flip and found.img_size == (16, 32)
    assert found.model == {"name": "nano", "depth": 2} and found.batch_size == 16
    assert Arm.of("mae:model.name=mini").settings(asked).model == {"name": "mini"}
    with pytest.raises(PatchloomError, match="--blr cannot be"):
        Arm.of("mae:blr=").settings(asked)


@pytest.mark.parametrize("option", ["seed=1", "held-out=0.5", "minutes=3", "task.name=mp3", "out=here", "blr=1:blr=2"])
def test_an_arm_cannot_change_what_is_common_to_all_nor_an_option_twice(option):
    with pytest.raises(PatchloomError, match="same for all|twice"):
        Arm.of(f"mae:{option}")


def test_a_run_gets_the_settings_of_its_arm_and_a_folder_of_its_own(tmp_path):
    places = (
        "/mine/t.py:Mine",
        "/yours/t.py:Mine",
        "mae:blr=1e-3:betas=[0.9,0.95]:task.mask_ratio=.5",
        "mae:batch_size=8",
    )
    names = ["Mine", "Mine-2", places[2], places[3]]
    assert [*name_arms(places).values()] == names
    jobs = plan_of(asked_of(tmp_path, places, log="tensorboard,wandb")).jobs(tmp_path / "out")
    folders = ["Mine-seed0", "Mine-2-seed0", "mae-blr=1e-3-betas=-0.9-0.95--task.mask_ratio=.5-seed0"]
    assert [job.folder.name for job in jobs] == [*folders, "mae-batch_size=8-seed0"]
    assert [job.task for job in jobs] == names and all(job.data == [str(tmp_path)] for job in jobs)
    assert jobs[1].log == tmp_path / "out" / "logs" / "Mine-2-seed0.txt" and jobs[1].given["task.name"] == places[1]
    own = {
        "blr": 1e-3,
        "betas": (0.9, 0.95),
        "task.mask_ratio": 0.5,
        "task.name": "mae",
        "epochs": 1.5,
        "split_seed": 0,
    }
    assert jobs[2].given | own | {"log": "tensorboard,wandb"} == jobs[2].given
    assert jobs[3].given["batch_size"] == 8 and jobs[2].given["batch_size"] == 16
    clock = asked_of(tmp_path, minutes=2.5, samples=None)
    given = plan_of(clock).jobs(tmp_path)[0].given
    assert given | {"minutes": 2.5, "seed": 0, "img_size": 16} == given and "epochs" not in given
    # the words of the process are read back as these values
    words = [f"--{name}={option_text(name, value)}" for name, value in jobs[2].given.items()]
    read, out = parse_pretrain([str(tmp_path), *words])
    assert read | {"blr": 1e-3, "betas": (0.9, 0.95), "log": "tensorboard,wandb"} == read and out == str(jobs[2].folder)
    assert read["task"]["mask_ratio"] == 0.5 and read["img_size"] == (16, 16)
    alike = [f"mae:init={'/x' * 200}{letter}" for letter in "ab"]
    one, other = (job.folder.name for job in plan_of(asked_of(tmp_path, alike)).jobs(tmp_path)[:2])
    assert other == one.replace("-seed0", "-2-seed0") and "/" not in one and len(other) < 100


def test_equal_samples_become_epochs_of_each_batch_size(draw, monkeypatch):
    hurry(monkeypatch)
    folder = [draw(f"images/{i}.png", 16, 16) for i in range(60)][0].parent
    asked = asked_of(folder, ("mae", "mae:batch_size=8"), device="cpu")
    plan = new_plan(asked, open_data(str(folder)), folder.parent / "out")
    n = 60 - plan.held_out
    for arm, batch in (("mae", 16), ("mae:batch_size=8", 8)):
        assert plan.arms[arm].batch == batch and plan.arms[arm].seconds > 0
        assert round(plan.arms[arm].epochs * (n // batch)) * batch == 96
    clock = new_plan(replace(asked, minutes=0.5, samples=None), open_data(str(folder)), folder.parent / "out")
    assert clock.arms["mae"] == Length(16, None, 30.0) and clock.threads == 1


def test_an_unsuitable_task_is_left_out_unless_it_was_requested(draw):
    folder = [draw(f"images/{i}.png", 16, 16) for i in range(20)][0].parent
    source = open_data(str(folder)).train

    def asked(*tasks: str, **given) -> dict:
        return {task: Arm.of(task).settings(asked_of(folder, **given)) for task in tasks}

    found, _, notes = resolve_settings(asked("mae", "mp3"), source, explicit=False)
    assert [*found] == ["mae", "mp3"] and not any("left out" in note for note in notes)
    swins = asked("mae", "mp3", "restore", model="swin-nano")
    with pytest.raises(PatchloomError):
        resolve_settings(swins, source, explicit=True)
    with pytest.raises(PatchloomError, match="two tasks or more"):
        resolve_settings(swins, source, explicit=False)
    with pytest.raises(PatchloomError, match="^mae:task.mask_ratio=1.5: --task.mask_ratio must be"):
        resolve_settings(asked("mae", "mae:task.mask_ratio=1.5"), source, explicit=True)


@pytest.mark.parametrize("changes", [{}, {"minutes": 2.0, "samples": None}])
def test_a_plan_is_read_back(tmp_path, changes):
    asked = asked_of(tmp_path, ("mae", "mae:blr=1e-3"), **changes)
    plan = plan_of(asked, 1)
    store(plan, tmp_path)
    assert stored_plan(asked, tmp_path) == replace(plan, resumed=True)
    with pytest.raises(PatchloomError, match="other settings .tasks"):
        stored_plan(replace(asked, tasks=("mae", "mae:blr=2e-3")), tmp_path)
    stored = read_checksummed(tmp_path / "compare.yaml")
    for wrong in ({"held_out": "x"}, {"arms": {"mae": {}}}, {"arms": {"mae:out=/": {}, "mae": {}}}, {"asked": 3}):
        write_checksummed(tmp_path / "compare.yaml", stored | wrong)
        with pytest.raises(PatchloomError, match="not the plan of a comparison"):
            stored_plan(asked, tmp_path)


def test_a_resumed_comparison_prints_the_remaining_time(draw, tmp_path):
    draw("images/bright/0.png", 16, 16), draw("images/dark/1.png", 16, 16)
    asked = asked_of(tmp_path / "images", seeds=2, parallel=2, beside=["other"])
    plan, out, opened = plan_of(asked), tmp_path / "out", open_data(str(tmp_path / "images"))
    assert plan.seconds_left(out) == pytest.approx(4 * 66 / 2)
    said = "\n".join(_describe_plan(plan, opened, out, None))
    assert "4 runs, 2 of each task, with 96 samples each, take about 2 min 12 s, with 1 min 0 s" in said
    assert "mp3  1.5 epochs, 16 images per step, about 6 s" in said and "2 at once may be slower" in said
    assert "8 encoders are scored and" in said  # four, two untrained ones, raw pixels and one of --beside
    (out / "mae-seed0").mkdir(parents=True)
    (out / "mae-seed0" / "summary.txt").write_text("done\n")
    tuned = replace(plan, asked=replace(asked, finetune="small"))
    said = "\n".join(_describe_plan(tuned, opened, out, None))
    assert "about 1 min 39 s from now: 1 of them are finished" in said and "scored and fine-tuned" in said


def test_a_plan_has_sizes_of_both_sides_and_refuses_others(tmp_path):
    sizes = {"img_size": (64, 16), "patch_size": (8, 4)}
    asked = asked_of(tmp_path, **sizes)
    store(plan_of(asked), tmp_path / "out")
    (job, _) = stored_plan(asked, tmp_path / "out").jobs(tmp_path / "out")
    assert job.given | sizes == job.given
    with pytest.raises(PatchloomError, match="img_size: was 64x16, now 16x64"):
        stored_plan(asked_of(tmp_path, **sizes | {"img_size": (16, 64)}), tmp_path / "out")
    store(plan_of(asked_of(tmp_path, img_size=(16, 16))), tmp_path / "square")
    assert stored_plan(asked_of(tmp_path), tmp_path / "square").resumed  # a square is stored as its side


def test_the_number_of_simultaneous_runs_may_change(tmp_path, monkeypatch):
    monkeypatch.setattr("patchloom.compare.plan.cores", lambda: 8)
    alone, four, nine = (asked_of(tmp_path, threads=None, device="cpu", parallel=count) for count in (1, 4, 9))
    assert [threads_each(one).get("threads") for one in (alone, four, nine)] == [None, 2, 1]
    assert not threads_each(asked_of(tmp_path, parallel=4))  # set by the user
    store(plan_of(four, threads=2), tmp_path / "out")
    for asked in (alone, nine):  # resumed runs keep their number of threads
        found = stored_plan(asked, tmp_path / "out")
        assert found.threads == 2 and all(job.given["threads"] == 2 for job in found.jobs(tmp_path / "out"))


@pytest.mark.parametrize("epochs", [4.0, None])
def test_the_progress_line(tmp_path, epochs):
    jobs = [Job(name, 0, tmp_path / name, [], Length(16, epochs, 40.0)) for name in ("one", "two")]
    now = [0.0]
    bar = Bar(jobs, 1, lambda: now[0])
    bar.running = [jobs[0].name]
    assert bar.line().startswith("3 min 20 s left ····") and bar.line().endswith("0 of 2 runs finished · one, seed 0")
    (tmp_path / "one").mkdir()
    for quarter in range(1, 5):  # 40 of 100 seconds are training
        now[0] += 10
        (tmp_path / "one" / "metrics.csv").write_text(f"step,epoch,seconds\n{quarter},{quarter}.0,{10 * quarter}\n")
        bar.line()
    assert bar.line().startswith("2 min 40 s left ████·"), "as planned, until there are enough rows"
    now[0] += 40
    (tmp_path / "one" / "summary.txt").write_text("done\n")
    assert " ██████████·" in bar.line() and "1 of 2" in bar.line()
