"""Comparisons from the command line, of tiny runs on images with two classes."""

import contextlib
import io
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom import PatchloomError, compare
from patchloom.cli import main
from patchloom.compare import plan, runner, timing, unlabelled
from patchloom.compare.compare import _describe_plan
from patchloom.compare.outcome import compare_labelled
from patchloom.compare.plan import (
    ComparisonPlan,
    ComparisonRequest,
    name_tasks,
    pretrain_arguments,
    resolve_settings,
    store,
    stored_plan,
)
from patchloom.compare.runner import Bar, Job
from patchloom.compare.scores import Contender, LabelledData, Way, labelled_parts, ways_of
from patchloom.compare.timing import TimeAfterTraining, TrainingSpeed
from patchloom.data.source import Data
from patchloom.data.sources.open import open_data
from patchloom.display import StatusMessage
from patchloom.evaluate import label_free
from patchloom.evaluate.protocols.linear import LINEAR
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.results import store as results_store
from patchloom.results.result import Result
from patchloom.runs.checksummed import read_checksummed, write_checksummed
from patchloom.runs.encoder import load_encoder
from patchloom.runs.folder import RunFolder
from patchloom.runs.training_set import read_record
from patchloom.system.load import Load
from patchloom.tasks.mae import MAE

SMALL = ["--img_size", "16", "--patch_size", "8", "--batch_size", "16", "--threads", "1", "--workers", "0"]
TRAINED = ["--tasks", "mae,mp3", "--samples", "96", "--seeds", "1"]
GIVEN = {"img_size": 16, "patch_size": 8, "batch_size": 16, "threads": 1, "workers": 0}


class Here:
    """Replacement for `subprocess.Popen` that trains in this process, which saves the start of another."""

    def __init__(self, words: list[str], *, stdout: IO[bytes], **how) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            self.code = main(words[3:])
        stdout.write(said.getvalue().encode())
        self.stdin = io.BytesIO()

    def poll(self) -> int:
        return self.code


HERE = SimpleNamespace(Popen=Here, PIPE=subprocess.PIPE)


def drawn(folder: Path, count: int = 30) -> Path:
    """Write ``count`` images of each of two classes, bright and dark noise."""
    rng = np.random.default_rng(0)
    for name, low in (("bright", 120), ("dark", 0)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(low, low + 130, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def asked_of(folder: Path, tasks: tuple[str, ...] = ("mae", "mp3"), **changes) -> ComparisonRequest:
    given = dict(seeds=1, minutes=None, samples=96, given=dict(GIVEN), at_once=1)
    return ComparisonRequest(data=(str(folder),), tasks=tasks, **{**given, **changes})


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, quick_probe: None) -> tuple[Path, Path]:
    """Return labelled images, and the folder of a comparison of two tasks on them."""
    folder = tmp_path_factory.mktemp("compared")
    images, out = drawn(folder / "images"), folder / "out"
    words = ["compare", str(images), *TRAINED, "--few", "2,0.5"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_SECONDS", 0.0)
        patch.setattr("patchloom.train.estimate._READING_SECONDS", 0.0)
        patch.setattr(runner, "subprocess", HERE)
        patch.setattr(runner, "_LOOK", 0.02)
        assert main([*words, *SMALL, "--out", str(out)]) == 0
    return images, out


def results_of(out: Path) -> list[Result]:
    """Return the results of a comparison without their dates, which differ between two."""
    return [replace(one, date="") for one in results_store.load(out)]


def test_every_encoder_is_scored_in_every_way_on_the_same_images(compared):
    found = results_of(compared[1])
    assert {one.encoder for one in found} == {"mae", "mp3", "untrained", "raw pixels", "best constant"}
    ways = {(one.protocol, one.settings.get("labels"), one.settings.get("per_class")) for one in found}
    assert ways == {("linear", None, None), ("knn", None, None), ("linear", 0.5, None), ("linear", None, 2)}
    assert len(found) == 20 and len({(one.data, one.fingerprint, one.n) for one in found}) == 1
    assert all(0 <= one.low <= one.value <= one.high <= 1 for one in found)
    page, verdict = (compared[1] / "report.html").read_text(), (compared[1] / "summary.txt").read_text().strip()
    assert verdict and verdict.split(":")[0] in page and "linear, 2 labels a class" in page
    runs = [RunFolder(compared[1] / f"{task}-seed0") for task in ("mae", "mp3")]
    held = [run.read_data()["held_out"] for run in runs]
    assert held[0] == held[1] and held[0] and len({run.read_config().epochs for run in runs}) == 1


def until(what: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads processes from /proc")
def test_a_killed_comparison_resumes_with_the_same_result(compared, capsys, monkeypatch):
    images, out = compared
    again = out.with_name("again")
    again.mkdir()
    shutil.copy(out / "compare.yaml", again)  # another measurement would give other speeds
    words = ["compare", str(images), *TRAINED, "--few", "2,0.5", *SMALL, "--out", str(again)]
    process = subprocess.Popen([sys.executable, "-m", "patchloom", *words], stdout=subprocess.PIPE)
    try:
        until(lambda: (again / "mae-seed0" / "config.yaml").exists() or process.poll() is not None)
        assert process.poll() is None and not (again / "mae-seed0" / "summary.txt").exists()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.kill()
        process.communicate()
    until(lambda: not Path(f"/proc/{child}").exists())  # no orphaned process
    assert not (again / "mp3-seed0").exists()
    monkeypatch.setattr(runner, "subprocess", HERE)
    assert main(words) == 0
    assert "is resumed" in capsys.readouterr().out
    for name in ("compare.yaml", "summary.txt"):
        assert (again / name).read_bytes() == (out / name).read_bytes(), name
    assert results_of(again) == results_of(out)
    for task in ("mae", "mp3"):
        one, other = (folder / f"{task}-seed0" / "encoder.safetensors" for folder in (out, again))
        assert one.read_bytes() == other.read_bytes(), task


def test_failed_runs_are_explained_if_fewer_than_two_tasks_are_left(compared, tmp_path, capsys, monkeypatch):
    sentence = "print('patchloom: no room is left: free some'); raise SystemExit(2)"
    monkeypatch.setattr(runner, "_PROGRAM", (sys.executable, "-c", sentence))
    monkeypatch.setattr(runner, "_LOOK", 0.02)
    images, out = compared
    (tmp_path / "out").mkdir()
    shutil.copy(out / "compare.yaml", tmp_path / "out")
    words = ["compare", str(images), *TRAINED, *SMALL]
    assert main([*words, "--parallel", "2", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "mp3, seed 0 failed after" in said.out and "no room is left: free some" in said.out
    assert "fewer than two tasks" in said.err and "mae, seed 0 failed: no room is left" in said.err


def test_a_dry_run_trains_nothing_and_explains_its_estimate(compared, tmp_path, capsys, monkeypatch):
    def refused(*_):
        raise AssertionError("a dry run starts no run")

    monkeypatch.setattr(plan, "run_all", refused)
    words = ["compare", str(compared[0]), "--tasks", "mae,mp3", "--samples", "96", "--seeds", "3", *SMALL, "--dry_run"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert not (tmp_path / "out").exists() and "Dry run" in said
    assert "6 runs" in said and "6 min 0 s of start-up" in said and "not timed" in said
    assert re.search(r"mp3 .* epochs of \d+ images .* s for a step of 16", said)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tasks", "mae,droppos"], "holds a comparison with other settings (tasks"),
        (["--tasks", "mae"], "--tasks needs two or more"),
        (["--tasks", "mae,mae"], "different tasks"),
        (["--tasks", "mae,dropos"], "did you mean droppos?"),
        (["--tasks", "mae,distill"], "distill needs the option features_of"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--minutes", "1", "--samples", "5"], "give one of them"),
        (["--seeds", "0"], "--seeds must be 1 or more"),
        (["--few", "0.1,1.5"], "--few 1.5 is invalid"),
        (["--beside", "nowhere"], "there is no encoder at nowhere"),
        (["--labels", "nowhere"], "nowhere"),
    ],
)
def test_invalid_options_are_refused_before_training(compared, tmp_path, capsys, words, sentence):
    out = compared[1] if "mae,droppos" in words else tmp_path / "new"
    assert main(["compare", str(compared[0]), *words, *SMALL, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_what_only_python_can_ask_for_is_refused(compared, tmp_path):
    for task in ({"name": "mae", "mask_ratio": 0.5}, MAE):
        with pytest.raises(PatchloomError, match=r"FILE\.py:CLASS"):
            compare("digits", tasks=["mae", task])
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(PatchloomError, match="holds no comparison"):
        compare(str(compared[0]), tasks=["mae", "mp3"], samples=96, out=tmp_path, **GIVEN)
    with pytest.raises(PatchloomError, match="images in memory"):
        compare(torch.zeros(8, 3, 16, 16, dtype=torch.uint8))


def test_an_unsuitable_task_is_left_out_unless_it_was_requested(compared):
    source = open_data(str(compared[0])).train
    asked = asked_of(compared[0], ("mae", "mp3", "restore"), given={**GIVEN, "model": "swin-nano"})
    found, _, notes = resolve_settings(asked_of(compared[0]), source, explicit=False)
    assert [*found] == ["mae", "mp3"] and not any("left out" in note for note in notes)
    with pytest.raises(PatchloomError):
        resolve_settings(asked, source, explicit=True)
    with pytest.raises(PatchloomError, match="two tasks or more"):
        resolve_settings(asked, source, explicit=False)


def test_equal_time_gives_epochs_in_proportion_to_speed():
    fast, slow = TrainingSpeed(step=0.1, images=10, epoch=20), TrainingSpeed(step=0.4, images=10, epoch=20)
    assert fast.epochs_in(60) == 30 and slow.epochs_in(60) == 7.5
    assert fast.seconds_of(30) == pytest.approx(slow.seconds_of(7.5))
    assert fast.epochs_of(1000) == slow.epochs_of(1000) == 5
    assert slow.epochs_in(0.001) == 0.05  # one step


def plan_of(asked: ComparisonRequest, threads: int | None = None) -> ComparisonPlan:
    epochs, paces = ({task: value for task in asked.tasks} for value in (1, TrainingSpeed(0.1, 16, 3)))
    load = Load(cores=2, wanted=2, own=0.4, others=1.6)
    return ComparisonPlan(asked, epochs, paces, 4.0, TimeAfterTraining(2.5, 1.5), 40, threads, ("a note",), load)


def test_a_plan_is_read_back(tmp_path):
    asked = asked_of(tmp_path)
    plan = replace(plan_of(asked, 1), epochs={"mae": 1.5, "mp3": 2})
    store(plan, tmp_path / "new")
    found = stored_plan(asked, tmp_path / "new")
    assert found == replace(plan, resumed=True)
    assert [job.name for job in found.jobs(tmp_path)] == ["mae, seed 0", "mp3, seed 0"]
    stored = read_checksummed(tmp_path / "new" / "compare.yaml")
    write_checksummed(tmp_path / "new" / "compare.yaml", {name: stored[name] for name in stored if name != "top"})
    with pytest.raises(PatchloomError, match="another version"):
        stored_plan(asked, tmp_path / "new")


def test_a_resumed_comparison_prints_the_remaining_time(tmp_path):
    images = drawn(tmp_path / "images", 2)
    asked = asked_of(images, seeds=2, at_once=2)
    plan, out, opened = plan_of(asked), tmp_path / "out", open_data(str(images))
    # three steps of 0.1 s and 4 s of overhead, two at a time
    assert plan.seconds_left(out) == pytest.approx(4 * 4.3 / 2)
    said = "\n".join(_describe_plan(plan, opened, out, None, 1))
    assert "4 runs, 2 of each task, with 96 samples each, take about 9 s: 1 s of training, and 8 s" in said
    assert "2 at once may be slower" in said and "1.6 of 2 cores" in said
    # four encoders, two untrained ones, raw pixels and one of --beside; a page of two runs
    assert "8 encoders" in said and "in about 23 s" in said
    (out / "mae-seed0").mkdir(parents=True)
    (out / "mae-seed0" / "summary.txt").write_text("done\n")
    results_store.append(out, [Result.of_images("mae", "linear", {}, [True])])
    said = "\n".join(_describe_plan(plan, opened, out, None, 1))
    assert "about 6 s from now: 1 of them are finished" in said and "7 encoders" in said


def test_a_plan_has_sizes_of_both_sides_and_refuses_others(tmp_path):
    sizes = {"img_size": (64, 16), "patch_size": (8, 4)}
    asked = asked_of(tmp_path, given={**GIVEN, **sizes})
    store(plan_of(asked), tmp_path / "out")
    (job, _) = stored_plan(asked, tmp_path / "out").jobs(tmp_path / "out")
    assert {"--img_size=64x16", "--patch_size=8x4"} <= {*job.words}
    with pytest.raises(PatchloomError, match=r"settings: .*\[64, 16\].*\[16, 64\]"):
        stored_plan(asked_of(tmp_path, given={**GIVEN, **sizes, "img_size": (16, 64)}), tmp_path / "out")
    store(plan_of(asked_of(tmp_path, given={**GIVEN, "img_size": (16, 16)})), tmp_path / "square")
    assert stored_plan(asked_of(tmp_path), tmp_path / "square").resumed  # a square is stored as its side


def test_the_number_of_simultaneous_runs_may_change(tmp_path, monkeypatch):
    monkeypatch.setattr("patchloom.compare.plan.cores", lambda: 8)
    given = {name: value for name, value in GIVEN.items() if name != "threads"} | {"device": "cpu"}
    alone, four, nine = (asked_of(tmp_path, given=given, at_once=count) for count in (1, 4, 9))
    assert [one.threads_each() for one in (alone, four, nine)] == [None, 2, 1]
    assert asked_of(tmp_path, at_once=4).threads_each() is None  # set by the user
    store(plan_of(four, threads=2), tmp_path / "out")
    for asked in (alone, nine):  # resumed runs keep their number of threads
        found = stored_plan(asked, tmp_path / "out")
        assert found.threads == 2 and all("--threads=2" in job.words for job in found.jobs(tmp_path / "out"))


def test_a_run_gets_the_common_settings_and_a_folder_of_its_own(tmp_path):
    places = ["/mine/t.py:Mine", "/yours/t.py:Mine", "mae"]
    assert name_tasks(places) == {places[0]: "Mine", places[1]: "Mine-2", "mae": "mae"}
    jobs = plan_of(asked_of(tmp_path, tuple(places))).jobs(tmp_path / "out")
    assert [job.folder for job in jobs] == [tmp_path / "out" / f"{name}-seed0" for name in ("Mine", "Mine-2", "mae")]
    assert jobs[1].log == tmp_path / "out" / "logs" / "Mine-2-seed0.txt" and jobs[1].name == "Mine-2, seed 0"
    words = pretrain_arguments(asked_of(tmp_path), places[1], tmp_path / "run", 1.5, 16, 3)
    expected = {"--epochs=1.5", "--seed=3", "--split_seed=0", "--img_size=16", "--batch_size=16"}
    assert {f"--task={places[1]}", *expected} <= {*words} and f"--task={places[1]}" in jobs[1].words


def test_the_progress_line(tmp_path):
    jobs = [Job(name, 0, tmp_path / name, [], tmp_path / "log", 60.0, 20.0, 4.0) for name in ("one", "two")]
    now = [0.0]
    bar = Bar(jobs, 1, lambda: now[0])
    bar.running = [jobs[0].name]
    assert bar.line().startswith("2 min 0 s left ····") and bar.line().endswith("0 of 2 runs finished · one, seed 0")
    (tmp_path / "one").mkdir()
    for quarter in range(1, 5):  # 40 of 60 seconds are training, which takes twice as long as planned
        now[0] += 20
        (tmp_path / "one" / "metrics.csv").write_text(f"step,epoch,seconds\n{quarter},{quarter}.0,{20 * quarter}\n")
        bar.line()
    assert bar.line().startswith("1 min 20 s left ███████·"), "as planned, until there are enough rows"
    now[0] += 40
    (tmp_path / "one" / "summary.txt").write_text("done\n")
    assert bar.line().startswith("2 min 0 s left ██████████·") and "1 of 2" in bar.line()


def test_few_labels_that_cannot_be_drawn_are_left_out_with_a_note(compared):
    source = open_data(str(compared[0])).train
    ways, notes = ways_of((0.01, 0.5, 3, 1000), source)
    assert [way.name for way in ways] == ["linear", "kNN", "linear, 50 % of labels", "linear, 3 labels a class"]
    assert len(notes) == 2 and "fewer than the 2 classes" in notes[0] and "a class has only 30" in notes[1]


@pytest.fixture
def without_labels(compared, tmp_path, monkeypatch) -> list[str]:
    """Return the arguments of the same comparison with unlabelled images and finished runs."""
    images, out = compared

    def opened(*given, **named) -> Data:
        found = open_data(*given, **named)
        whole = found.train.fingerprint()
        found.train.labels, found.train.fingerprint = None, lambda: whole  # the same images as those of the runs
        return found

    monkeypatch.setattr("patchloom.compare.compare.open_data", opened)
    again = tmp_path / "again"
    shutil.copytree(out, again)
    for name in (results_store.FILE, "summary.txt", "report.html"):
        (again / name).unlink()
    words = ["compare", str(images), *TRAINED, *SMALL]
    return [*words, "--out", str(again)]


def test_without_labels_there_is_no_winner(without_labels, capsys, monkeypatch):
    for place in (unlabelled, label_free):  # 12 images are held out
        monkeypatch.setattr(place, "MIN_LABEL_FREE_IMAGES", 12)
    assert main(without_labels) == 0
    said = capsys.readouterr().out
    assert "no task can be named the best" in " ".join(said.split())
    assert "RankMe" in said and "by no labels" in said
    out = Path(without_labels[-1])
    assert {one.encoder for one in results_of(out)} == {"mae", "mp3", "untrained"}
    monkeypatch.setattr(unlabelled, "label_free_rows", None)  # nothing is measured again
    before = (out / results_store.FILE).read_bytes()
    assert main(without_labels) == 0
    assert (out / results_store.FILE).read_bytes() == before


def test_without_labels_too_few_images_leave_out_one_table_only(without_labels, capsys):
    out = Path(without_labels[-1])
    assert main(without_labels) == 0
    said = "each run holds out 12 images"
    before, _, after = capsys.readouterr().out.partition("everything goes to")
    assert said in before and said in " ".join(after.split()) and "then the page is written" in before
    assert said in (out / "summary.txt").read_text() and said in (out / "report.html").read_text()
    assert "How each task went" in after and "Measures without labels" not in after


def test_no_training_image_becomes_a_test_image(compared, tmp_path, capsys, monkeypatch):
    images, out = (Path(shutil.copytree(one, tmp_path / one.name)) for one in compared)  # keeps modification times
    run = next(out.rglob("encoder.safetensors")).parent
    card, opened = load_encoder(run)[1], open_data(str(images))
    settings = EvalSettings(device="cpu")
    on = labelled_parts(opened, None, run, card, settings, [])
    trained_on = read_record(RunFolder(run).trained_on).contents
    assert not np.isin(on.parts.test.contents(), trained_on).any()
    rng = np.random.default_rng(1)
    for i in range(40):  # sorted before the others
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(images / "bright" / f"-{i}.png")
    more = open_data(str(images))
    for parts in (
        lambda: labelled_parts(more, None, run, card, settings, []),
        lambda: unlabelled.held_out_of(more, run),
    ):
        with pytest.raises(PatchloomError, match="changed since"):
            parts()
    monkeypatch.setattr("patchloom.compare.compare.open_data", lambda *_, **__: more)
    words = ["compare", str(compared[0]), *TRAINED, *SMALL, "--few", "2,0.5", "--out", str(out)]
    assert main(words) == 2 and "changed since" in " ".join(capsys.readouterr().err.split())


def test_an_encoder_that_cannot_be_measured_is_left_out(compared, tmp_path, monkeypatch):
    images, out = compared
    monkeypatch.setattr(unlabelled, "MIN_LABEL_FREE_IMAGES", 12)

    def rows(name: str, *_) -> list[Result]:
        if name == "mp3":
            raise PatchloomError("mp3 gives features that are not finite: its training has diverged")
        return [Result.exact("RankMe", name, "label-free", {}, 3.0, "dimensions")]

    shown: list[StatusMessage] = []
    monkeypatch.setattr(unlabelled, "StatusMessage", lambda *given: shown.append(StatusMessage(*given)) or shown[0])
    monkeypatch.setattr(unlabelled, "label_free_rows", rows)
    those = [Contender(task, 0, "task", str(out / f"{task}-seed0")) for task in ("mae", "mp3")]
    found = unlabelled.compare_unlabelled(
        those, open_data(str(images)), out / "mae-seed0", EvalSettings(), tmp_path, []
    )
    assert found.tables[0][1].heading == ("measure", "mae")
    assert "mp3, seed 0, has no measures without labels: mp3 gives features that are not finite" in found.verdict[1]
    assert [one.position() for one in shown] == ["2 of 2"]


def test_an_encoder_of_beside_is_not_ranked_as_a_task():
    parts = Parts(None, type("Test", (), {"noun": "images", "__len__": lambda self: 100})(), "A story.")
    those = [Contender(task, seed, "task", "") for task in ("mae", "mp3") for seed in (0, 1)]
    those += [Contender("raw pixels", 0, "control", ""), Contender("timm:x", 0, "beside", "timm:x")]
    right = {"mae": 60, "mp3": 30, "raw pixels": 10, "timm:x": 99, "best constant": 50}
    counts = [(one.name, one.seed) for one in those] + [("best constant", 0)]
    found: dict[str, list[Result]] = {}
    for name, seed in counts:
        one = Result.of_images(name, "linear", {"answer": "dog"}, np.arange(100) < right[name])
        found.setdefault(name, []).append(replace(one, seed=seed))
    on = LabelledData(parts, [Way("linear", LINEAR)], [])
    compared = compare_labelled({"linear": found}, those, on, Path("out"), [])
    assert compared.winner == "mae" and compared.order == ("mae", "mp3")
    names = ["mae", "mp3", "raw pixels", "best constant", "timm:x"]
    assert [row[0] for row in compared.tables[0][1].rows] == names
    against = {one.encoder: one.against for one in compared.results if one.against}
    assert [one.control for one in against["mae"]] == ["mp3", "raw pixels", "best constant", "timm:x"]
    assert [*against] == ["mae"] and against["mae"][0].trainings == 2
