"""Comparisons from the command line, of tiny runs on images with two classes."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import hurry
from PIL import Image

from patchloom import PatchloomError, compare, results
from patchloom.cli import main
from patchloom.compare import runner, scores, unlabelled
from patchloom.compare.outcome import compare_labelled
from patchloom.compare.scores import Contender, LabelledData, Way, labelled_parts, ways_of
from patchloom.data.source import Data
from patchloom.data.sources.open import open_data
from patchloom.display import StatusMessage
from patchloom.evaluate.protocols import label_free
from patchloom.evaluate.recipes import RECIPES
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.results import store as results_store
from patchloom.results.result import Result
from patchloom.runs.folder import RunFolder
from patchloom.runs.training_set import read_record
from patchloom.tasks.mae import MAE

SMALL = ["--img_size", "16", "--patch_size", "8", "--batch_size", "16", "--threads", "1", "--workers", "0"]
TRAINED = ["--tasks", "mae,mp3", "--samples", "96", "--seeds", "1"]


def drawn(folder: Path, count: int = 30) -> Path:
    rng = np.random.default_rng(0)
    for name, low in (("bright", 120), ("dark", 0)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(low, low + 130, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, quick_probe: None) -> tuple[Path, Path]:
    """Return labelled images, and the folder of a comparison of two tasks on them."""
    folder = tmp_path_factory.mktemp("compared")
    images, out = drawn(folder / "images"), folder / "out"
    words = ["compare", str(images), *TRAINED, "--few", "2,0.5"]
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        patch.setattr(scores, "_ATTENTIVE_LABELS", 1)
        assert main([*words, *SMALL, "--out", str(out)]) == 0
    return images, out


def results_of(out: Path) -> list[Result]:
    return [replace(one, date="") for one in results_store.load(out)]


def test_every_encoder_is_scored_in_every_way_on_the_same_images(compared):
    found = results_of(compared[1])
    everyone = {"mae", "mp3", "untrained", "raw pixels", "best constant"}
    assert {one.encoder for one in found} == everyone
    assert {row.result.encoder for row in results(compared[1]).rows if row.run == "out"} == everyone
    ways = {(one.protocol, one.settings.get("labels"), one.settings.get("per_class")) for one in found}
    whole = {(name, None, None) for name in ("attentive", "linear", "knn")}
    assert ways == {*whole, ("linear", 0.5, None), ("linear", None, 2)}
    assert len(found) == 25 and len({(one.data, one.fingerprint, one.n) for one in found}) == 1
    assert all(0 <= one.low <= one.value <= one.high <= 1 for one in found)
    page, verdict = (compared[1] / "report.html").read_text(), (compared[1] / "summary.txt").read_text().strip()
    assert verdict and verdict.split(":")[0] in page and "linear, 2 labels a class" in page
    assert "by attentive probe" in verdict and "by the first column, the attentive probe" in page
    runs = [RunFolder(compared[1] / f"{task}-seed0") for task in ("mae", "mp3")]
    held = [run.read_data()["held_out"] for run in runs]
    assert held[0] == held[1] and held[0] and len({run.read_config().epochs for run in runs}) == 1


@pytest.mark.usefixtures("quick_probe")
def test_arms_differ_in_their_options_alone(tmp_path, capsys, monkeypatch):
    hurry(monkeypatch)
    monkeypatch.setitem(RECIPES, "small", (replace(RECIPES["small"][0], epochs=1), {}))
    arms, out = ["mae", "mae:blr=1e-3"], tmp_path / "out"
    words = ["compare", str(drawn(tmp_path / "images")), f"--tasks={','.join(arms)}", "--minutes", "0.01", *SMALL]
    words += ["--seeds", "1", "--few", "9", "--finetune", "--log", "tensorboard", f"--out={out}", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    usual, other = (RunFolder(out / name).read_config() for name in ("mae-seed0", "mae-blr=1e-3-seed0"))
    assert other.blr == 1e-3 != usual.blr and (out / "mae-seed0" / "logs" / "tensorboard").exists()
    assert replace(other, epochs=usual.epochs, warmup_epochs=usual.warmup_epochs, blr=usual.blr) == usual
    assert [one["task"] for one in found["trained"]] == arms and found["verdict_by"] == "linear"
    assert all(one["updates"] * 16 == one["images"] > 0 and one["seconds"] > 0 for one in found["trained"])
    page = (out / "report.html").read_text()
    assert "Training of each run" in page and "mae:blr=1e-3" in page and "fine-tuned, small" in page


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
    hurry(monkeypatch)
    monkeypatch.setattr(scores, "_ATTENTIVE_LABELS", 1)
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tasks", "mae,droppos"], "holds a comparison with other settings (tasks"),
        (["--tasks", "mae"], "--tasks needs two or more"),
        (["--tasks", "mae,mae"], "different tasks"),
        (["--tasks", "mae,dropos"], "did you mean droppos?"),
        (["--tasks", "mae,mae:blrr=1"], "mae:blrr=1: there is no option --blrr; did you mean --blr?"),
        (["--tasks", "mae,mae:blr=fast"], "mae:blr=fast: --blr cannot be fast"),
        (["--tasks", "mae,droppos:task.sigmaa=0"], "did you mean --task.sigma?"),
        (["--tasks", "mae,mae:task.mask_ratio=2"], "--task.mask_ratio must be 0 or more and below 1"),
        (["--tasks", "mae,distill"], "--task.features_of"),
        (["--task.mask_ratio", "0.5"], "--tasks mae,mae:task.mask_ratio=VALUE"),
        (["--log", "wandbb"], "did you mean wandb"),
        (["--finetune", "tiny"], "there is no such recipe: choose small"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--minutes", "1", "--samples", "5"], "give one of them"),
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
        with pytest.raises(PatchloomError, match="mae:blr=1e-3"):
            compare("digits", tasks=["mae", task])
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(PatchloomError, match="holds no comparison"):
        compare(str(compared[0]), tasks=["mae", "mp3"], samples=96, out=tmp_path)
    with pytest.raises(PatchloomError, match="images in memory"):
        compare(torch.zeros(8, 3, 16, 16, dtype=torch.uint8))


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
    opened, settings = open_data(str(images)), EvalSettings(device="cpu")
    on = labelled_parts(opened, None, run, settings, [])
    trained_on = read_record(RunFolder(run).trained_on).contents
    assert not np.isin(on.parts.test.contents(), trained_on).any()
    rng = np.random.default_rng(1)
    for i in range(40):  # sorted before the others
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(images / "bright" / f"-{i}.png")
    more = open_data(str(images))
    with pytest.raises(PatchloomError, match="changed since"):
        labelled_parts(more, None, run, settings, [])
    with pytest.raises(PatchloomError, match="changed since"):
        unlabelled.compare_unlabelled([], more, run, settings, out, [])
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
    on = LabelledData(parts, [Way("linear", "linear")], [])
    compared = compare_labelled({"linear": found}, those, on, Path("out"), [])
    assert compared.winner == "mae" and compared.order == ("mae", "mp3") and compared.verdict_by == "linear"
    names = ["mae", "mp3", "raw pixels", "best constant", "timm:x"]
    assert [row[0] for row in compared.tables[0][1].rows] == names
    against = {one.encoder: one.against for one in compared.results if one.against}
    assert [one.control for one in against["mae"]] == ["mp3", "raw pixels", "best constant", "timm:x"]
    assert [*against] == ["mae"] and against["mae"][0].trainings == 2
