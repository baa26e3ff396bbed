"""Segmentation and detection end to end: candidates, order of reading, rejected options."""

import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_together import segment_together
from evaluating import numbers
from PIL import Image
from refusing import failed, refusal
from scenes import BoxedSquares, Squares

from patchloom.data.decode import Unreadable
from patchloom.data.source import Source
from patchloom.dense.annotations.base import AnnotatedData
from patchloom.dense.checkpoint import load_dense
from patchloom.errors import Stopped
from patchloom.estimate import LiveBytes
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.trainer import Trainer
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.results import store
from patchloom.results.claims import Claim

KINDS: dict[str, type[Squares | BoxedSquares]] = {"segment": Squares, "detect": BoxedSquares}
OPTIONS: dict[str, dict[str, Any]] = {
    "segment": {"steps": 2, "size": 16, "head_width": 8, "batch_size": 4},
    "detect": {"steps": 2, "size": 32, "head_width": 8, "batch_size": 4, "masks": False},
}
LINEAR = {"head": "linear", "steps": 2, "size": 16, "batch_size": 4}
COMMON = {"device": "cpu", "workers": 0}


def tiny(positions: str = "learned") -> tuple[torch.nn.Module, EncoderCard]:
    sizes = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    spec = EncoderSpec("nano", (16, 16), 4, positions=positions, options=sizes)
    torch.manual_seed(1)
    return build_encoder(spec), EncoderCard(spec, (0.4,) * 3, (0.2,) * 3, "mae", "tiny")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_encoder(*tiny(), tmp_path / "encoder.safetensors")
    return tmp_path


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes drawn images the data, whatever its name."""

    def install(train: int = 12, validation: int = 4, test: int = 5, **more: Any) -> None:
        for protocol, opener in (("segment", "open_label_maps"), ("detect", "open_boxes")):
            parts = {}
            for seed, (part, n) in enumerate((("train", train), ("validation", validation), ("test", test))):
                parts[part] = KINDS[protocol](n, seed=seed)
                parts[part].images.name = f"squares {part}"
            made = AnnotatedData(**parts, **more)
            monkeypatch.setattr(f"patchloom.dense.{protocol}.{opener}", lambda *_, made=made, **__: made)

    install()
    return install


def no_step(*_: Any) -> None:
    raise RuntimeError("a step was made")


@pytest.mark.parametrize(("protocol", "measure"), [("segment", "mIoU"), ("detect", "AP")])
def test_the_whole_of_it(run, squares, protocol, measure, capsys):
    squares(notes=("1 image was left out (a.png)",))
    options = {**OPTIONS[protocol], **COMMON, **({"masks": "auto"} if protocol == "detect" else {})}
    report = evaluate(protocol, run, "data", save=True, seeds=2, **options)
    out = capsys.readouterr().out
    assert out.count("1 image was left out (a.png).") == 1 and "tiny: saved as" in out
    assert [row.encoder for row in report.quoted] == ["tiny", "from scratch"]
    assert all(row.measure == measure for row in report.quoted)
    assert report.n_test == 5 and "on 5 test images" in report.headline
    (found,) = report.against
    assert found.control == "from scratch" and found.trained and found.trainings == 2 and found.n == 5
    assert found.claim is Claim.FEW  # whatever the interval
    assert "The data brings its own validation and test images." in report.method
    rows = store.load(run)
    assert [row.value for row in rows if row.seed == 1] == [row.value for row in report.results]
    folder = {"segment": "segmented", "detect": "detected"}[protocol]
    model, card = load_dense(run / folder / "squares-train-small-1.safetensors")
    assert card.classes == KINDS[protocol].classes and card.kind == protocol and not model.training
    assert (run / folder / "squares-train-small-0.safetensors").exists()
    with Image.open(report.drawings[0].out) as picture:
        assert min(picture.size) > 200
    if protocol == "detect":
        measures = [row.measure for row in report.results if row.encoder == "tiny"]
        assert {"AP", "AP50", "AP75", "AP of masks", "AP50 of masks", "AP red", "AP blue of masks"} <= {*measures}
        assert measures[0] == "AP" and len(measures) == len(set(measures))
        assert "reduced x2.0" in out and "--size 64" in out
    else:
        again = evaluate(protocol, run, "data", seed=1, control=False, **options | {"workers": 2})
        of_tiny = [[row for row in one.results if row.encoder == "tiny"] for one in (report, again)]
        assert numbers(of_tiny[0]) == numbers(of_tiny[1]), "whoever reads the images"


@pytest.mark.parametrize("protocol", OPTIONS)
def test_a_dry_run_writes_nothing(run: Path, squares: object, protocol: str) -> None:
    before = sorted(run.iterdir())
    report = evaluate(protocol, run, "data", save=True, dry_run=True, **OPTIONS[protocol], **COMMON)
    said = (
        "tiny and from scratch would be trained on 12 images, with 4 others to choose the step, for 2 steps of 4 "
        "images each, and tested on 5 others. Recipe small"
    )
    assert report.method.startswith(said) and report.results == [] and report.n_test == 5
    assert sorted(run.iterdir()) == before


def save_start(run: Path) -> Path:
    """Give a run a start with other statistics."""
    spec, path = load_encoder_file(run / "encoder.safetensors")[1].own_spec, run / "start.safetensors"
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.1,) * 3, (0.9,) * 3, "mae", "start"), path)
    return path


@pytest.mark.parametrize(
    ("protocol", "given", "controls"),
    [
        ("segment", {}, ["start"]),
        ("segment", {"head": "linear", "head_width": None}, ["start", "untrained", "raw pixels"]),
        # every box counts, else so short a training finds none
        ("detect", {"score": 0.0, "lr": 3e-3}, ["start"]),
    ],
)
def test_the_start_of_a_run_is_trained_alike(run, squares, protocol, given, controls):
    """Its rows are those of its file, which has other statistics than the run."""
    squares(test=12)
    start = save_start(run)
    given = {**OPTIONS[protocol], **given, **COMMON}
    report = evaluate(protocol, run, "data", **given)
    alone = evaluate(protocol, start, "data", control=False, **given)
    assert [row.encoder for row in report.quoted] == ["tiny", *controls]
    of_start = [[row for row in one.results if row.encoder == "start"] for one in (report, alone)]
    assert numbers(of_start[0]) == numbers(of_start[1])
    assert [row.value for row in report.results if row.encoder == "tiny"] != [row.value for row in alone.results]
    assert [row.encoder for row in alone.quoted] == ["start"]
    gain, ours, its = report.against[0], *report.quoted[:2]
    assert (gain.control, gain.trained, gain.n) == ("start", True, 12)
    assert gain.value == ours.value - its.value and gain.low < gain.value < gain.high
    assert "its start" in report.conclusion() and "own normalisation" in report.method
    assert "own normalisation" not in alone.method
    if protocol == "segment" and "head" not in given:  # after two steps neither side has learnt anything
        assert "no better than always answering ground" in report.conclusion() and gain.constant == "ground"
        scratch = evaluate(protocol, run, "data", from_scratch=True, **given)
        assert [row.encoder for row in scratch.quoted] == ["from scratch"]
    if given.get("head") == "linear":
        assert report.headline.startswith("Linear segmentation of the frozen encoder: ")
        assert [found.control for found in report.against] == controls
        constant = {row.measure: row.value for row in report.results if row.encoder == "best constant"}
        # by foreground IoU it answers the second most frequent class: two of three classes are in the foreground
        assert 0 < constant["foreground IoU"] < (1 - constant["aAcc"]) / 2
        assert constant["mIoU"] == pytest.approx(constant["aAcc"] / 3)  # of three classes, one is answered
        assert "head width" not in report.method and "layer_decay" not in report.results[0].settings
    assert store.load(run)[0].against[0] == gain


@pytest.mark.parametrize("protocol", OPTIONS)
def test_training_resumes_and_precedes_all_reading_of_test_images(run, squares, protocol, monkeypatch, capsys):
    seen: list[str] = []
    kind = type(Squares(1).images)
    read, step = kind.read, Trainer.update

    def watched(self: Source, i: int) -> torch.Tensor:
        seen.append(self.name)
        return read(self, i)

    def stepped(self: Trainer, *arguments: Any) -> torch.Tensor:
        seen.append("step")
        if seen.count("step") == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    monkeypatch.setattr(kind, "read", watched)
    monkeypatch.setattr(Trainer, "update", stepped)
    given = protocol, run / "encoder.safetensors", "data"
    stop_at = 0
    whole = evaluate(*given, **OPTIONS[protocol], **COMMON)
    assert seen.count("step") == 4 and "step" not in seen[seen.index("squares test") :]
    assert "squares validation" in seen
    stop_at = 4 + 3  # amid the control
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="run the same command to resume"):
        patch.setattr("patchloom.evaluate.trainer._SAVE_EVERY", 0.0)
        evaluate(*given, **OPTIONS[protocol], **COMMON)
    capsys.readouterr()
    again = evaluate(*given, **OPTIONS[protocol], **COMMON)
    assert "from scratch resumes at step 1 of 2." in capsys.readouterr().out
    assert numbers(again.results) == numbers(whole.results)


@pytest.mark.parametrize(
    ("protocol", "options", "said"),
    [
        ("segment", {"head": "linear", "recipe": "mae"}, "--recipe mae trains UPerNet"),
        ("segment", {"head": "linear", "from_scratch": True}, "no training from scratch"),
        ("segment", {"head": "linear", "layer_decay": 0.5}, "--layer_decay has no effect with --head linear"),
        ("segment", {"head": "linear", "positions": "learned"}, "leave out --positions"),
        ("segment", {"out": "model.pt"}, "ends in .safetensors"),
        ("segment", {"save": True, "from_scratch": True}, "--from_scratch saves no model"),
        ("detect", {"out": "a.safetensors", "seeds": 2}, "--out names one file, but --seeds 2"),
        ("detect", {"recipe": "mae"}, "there is no recipe mae: choose one of small, vitdet"),
        ("segment", {"size": 17}, "17x17: choose 16x16 or 20x20"),
    ],
)
def test_options_that_do_not_fit(run: Path, squares: object, protocol: str, options: dict[str, Any], said: str) -> None:
    assert said in refusal(evaluate, protocol, run, "data", **OPTIONS[protocol] | options, **COMMON)
    assert not (run / store.FILE).exists()


@pytest.mark.parametrize(
    ("protocol", "wrong"),
    [("segment", {"head": "liner"}), ("segment", {"control": "no"}), ("detect", {"masks": "some"})],
)
def test_python_calls_check_their_options(run, squares, monkeypatch, protocol, wrong):
    monkeypatch.setattr(Trainer, "update", no_step)
    (name,) = wrong
    said = refusal(evaluate, protocol, run, "data", **COMMON, **wrong)
    assert f"--{name} cannot be {wrong[name]}" in said


def test_a_missing_extra_is_named_before_training(run, squares, monkeypatch, capsys):
    for name in ("faster_coco_eval", "faster_coco_eval.core", "faster_coco_eval.core.mask"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(Trainer, "update", no_step)
    assert "pip install 'faster-coco-eval" in failed(capsys, "evaluate", "detect", run, "data", "--steps", "4")


def test_several_processes_are_refused_where_they_cannot_share(run, squares, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("patchloom.dense.study.world", lambda: 2)
        said = refusal(evaluate, "segment", run, "data", **OPTIONS["segment"] | {"batch_size": 3}, **COMMON)
    assert "--batch_size 3 cannot be shared by 2 processes" in said
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "knn is for one process" in refusal(evaluate, "knn", run, "digits", **COMMON)


@pytest.mark.slow
def test_two_processes_share_one_evaluation(run: Path, tmp_path: Path) -> None:
    options = {"steps": 4, "size": 16, "head_width": 8, "batch_size": 4, "drop_path": 0, "save": "true"}
    codes, out, err = segment_together(run, 2, tmp_path / "cache", **options)
    assert codes == [0, 0], err
    weights = [torch.load(run / f"{rank}.pt") for rank in range(2)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    assert out[0].count("mIoU") > 2 and not out[1].strip()
    assert "by 2 processes with the recipe small" in " ".join(out[0].split())
    rows = store.load(run)
    assert [row.encoder for row in rows if row.quoted] == ["tiny", "from scratch"]
    assert (run / "segmented" / "squares-small-0.safetensors").exists()
    codes, _, err = segment_together(run, 1, tmp_path / "other cache", **options)
    assert codes == [0], err
    alone = torch.load(run / "0.pt")
    statistics = [name for name in alone if "running_" in name]
    assert len(statistics) > 10  # those of each process's own batch would be far off
    for name in statistics:
        torch.testing.assert_close(weights[0][name], alone[name], rtol=0.01, atol=0.01, msg=name)


def test_a_saved_linear_model_keeps_its_encoder_and_is_none(run, squares):
    save_encoder(*tiny("none"), run / "free.safetensors")
    out = run / "model.safetensors"
    for _ in range(2):  # its own model is written again
        evaluate("segment", run / "free.safetensors", "data", control=False, out=str(out), **LINEAR, **COMMON)
    assert not [name for name in load_dense(out)[0].state_dict() if "pos" in name]
    assert "not encoder weights" in refusal(evaluate, "segment", out, "data", **LINEAR, **COMMON)


def test_a_file_of_something_else_is_never_written_over(run: Path, squares: object) -> None:
    (run / "folder.safetensors").mkdir()
    before = (run / "encoder.safetensors").read_bytes()
    for name in ("encoder", "folder"):
        options = {**LINEAR, **COMMON, "out": str(run / f"{name}.safetensors")}
        assert "is there already" in refusal(evaluate, "segment", run, "data", **options)
    assert (run / "encoder.safetensors").read_bytes() == before


@pytest.mark.parametrize("protocol", OPTIONS)
def test_the_plan_counts_validation_and_test(run, squares, protocol, monkeypatch, capsys):
    """A minute a step and image: 2 steps, the validation images after each, and the test images, per model."""
    models = {"segment": 2, "detect": 1}[protocol]
    monkeypatch.setattr("patchloom.evaluate.select._MEASURED_FROM", 1)
    monkeypatch.setattr(Trainer, "seconds_of_step", lambda _: 60.0)
    monkeypatch.setattr("patchloom.evaluate.select.time_steps", lambda *_, **__: [4 * 60.0])  # of 4 images
    monkeypatch.setattr(Trainer, "update", no_step)
    with pytest.raises(RuntimeError, match="a step was made"):
        evaluate(protocol, run, "data", control=models > 1, **OPTIONS[protocol], **COMMON)
    out = capsys.readouterr().out
    said = re.search(r"in total: (\d+) min 0 s of steps, and (?:(\d+) h )?(\d+) min (?:0 s )?of validation", out)
    held_out, tests = 4, 5
    assert said and int(said[1]) == models * 2
    assert 60 * int(said[2] or 0) + int(said[3]) == models * (2 * held_out + tests)


@pytest.mark.parametrize("protocol", OPTIONS)
def test_unreadable_test_images_are_refused(run, squares, protocol, monkeypatch):
    kind = type(Squares(1).images)
    read = kind.read

    def damaged(self: Source, i: int) -> torch.Tensor:
        if self.name == "squares test":
            raise Unreadable("gone")
        return read(self, i)

    monkeypatch.setattr(kind, "read", damaged)
    options = {**OPTIONS[protocol], **COMMON, "steps": 1, "control": False}
    said = refusal(evaluate, protocol, run, "data", **options)
    assert "none of the 5 test images" in said and "squares test #0" in said
    assert not (run / store.FILE).exists()


def test_lacking_masks_and_objects_are_refused_before_training(run, squares, monkeypatch):
    monkeypatch.setattr(Trainer, "update", no_step)
    truth = BoxedSquares.truth

    def crowds(self: BoxedSquares, i: int) -> Any:
        found = truth(self, i)
        return replace(found, crowd=~found.crowd) if self.images.name == "squares test" else found

    with monkeypatch.context() as patch:
        patch.setattr(BoxedSquares, "truth", crowds)
        said = refusal(evaluate, "detect", run, "data", **OPTIONS["detect"], **COMMON)
        assert "the 5 images to test on have no object" in said
    parts = AnnotatedData(BoxedSquares(6, masks=False), None, BoxedSquares(2, masks=False, seed=1))
    monkeypatch.setattr("patchloom.dense.detect.open_boxes", lambda *_: parts)
    said = refusal(evaluate, "detect", run, "data", **OPTIONS["detect"] | {"masks": True}, **COMMON)
    assert "boxes without masks: leave out --masks true" in said


def striped(n: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images of 512 pixels, and label maps: fields of stripes 2 pixels wide (1), and of their mean grey (0)."""
    rng = np.random.default_rng(seed)
    stripes = np.tile([60, 60, 180, 180], (512, 128))
    fields = [rng.permuted(np.arange(16) % 2).reshape(4, 4).repeat(128, 0).repeat(128, 1) for _ in range(n)]
    return [(np.where(one, stripes, 120).astype(np.uint8), one.astype(np.uint8)) for one in fields]


def test_native_windows_show_what_vanishes_in_reduced_images(tmp_path, capsys):
    spec = EncoderSpec("nano", (96, 96), 8, channels=1, options={"depth": 2, "embed_dim": 64, "num_heads": 2})
    torch.manual_seed(1)
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.47,), (0.2,), "mae", "tiny"), tmp_path / "e.safetensors")
    data = {"train": striped(4, 0), "test": striped(1, 1)}
    options = {"head": "linear", "steps": 40, "lr": 0.03, "scale": (1.0, 1.0), "batch_size": 4, "control": False}
    found = {}
    for side in ("auto", 144):
        report = evaluate("segment", tmp_path / "e.safetensors", data, side=side, **options, **COMMON)
        first = capsys.readouterr().out.splitlines()[0]
        found[side] = report.results[0].value
        if side == 144:
            assert "reduced x3.6, from 512 to 144 pixels" in first and "--side native" in first
        else:
            assert "own scale" in first and "25 windows of 144x144" in first
            assert report.results[0].settings["side"] == "native"
        assert first in report.method
    assert found["auto"] > 0.85 and found[144] < 0.6


@pytest.mark.parametrize("protocol", OPTIONS)
def test_too_little_memory_is_found_before_training_with_sizes_that_fit(run, squares, protocol, monkeypatch, capsys):
    counted: list[int] = []
    count = Trainer.bytes_of_step

    def counting(self: Trainer, images: int) -> int | None:
        counted.append(count(self, images))
        return counted[-1]

    monkeypatch.setattr(Trainer, "bytes_of_step", counting)
    monkeypatch.setattr(Trainer, "update", no_step)
    options = OPTIONS[protocol] | {"control": False, "size": 64, "validation": 0.0}
    with pytest.raises(RuntimeError, match="a step was made"):
        evaluate(protocol, run / "encoder.safetensors", "data", **options, **COMMON)
    assert re.search(r"needs about [\d.]+ of [\d.]+ GiB of memory", capsys.readouterr().out)
    share = {"segment": 0.4, "detect": 0.9}[protocol]  # of what is needed
    monkeypatch.setattr("patchloom.dense.memory.free_memory", lambda _: share * counted[0] / 2**30)
    said = refusal(evaluate, protocol, run / "encoder.safetensors", "data", **options, **COMMON)
    assert re.search("of memory, and .* are free: give --", said)
    less = {name: int(value) for name, value in re.findall(r"--(batch_size|size) (\d+)", said)}
    assert "batch_size" in less and ("size" in less) == (protocol == "segment")
    with pytest.raises(RuntimeError, match="a step was made"):
        evaluate(protocol, run / "encoder.safetensors", "data", **options | less, **COMMON)


@pytest.mark.parametrize("protocol", OPTIONS)
def test_a_counted_step_is_as_large_as_a_real_one(run, squares, protocol, monkeypatch):
    counted, real, step = [], [], Trainer.update
    count = Trainer.bytes_of_step

    def counting(self: Trainer, images: int) -> int | None:
        counted.append(count(self, images) - 3 * sum(one.nbytes for one in self.model.parameters()))
        return None  # no forecast

    def watched(self: Trainer, *arguments: Any) -> torch.Tensor:
        with LiveBytes() as live:
            loss = step(self, *arguments)
        real.append(live.peak)
        return loss

    monkeypatch.setattr(Trainer, "bytes_of_step", counting)
    monkeypatch.setattr(Trainer, "update", watched)
    options = OPTIONS[protocol] | {"size": 64, "steps": 2, "control": False, "head_width": 32}
    evaluate(protocol, run / "encoder.safetensors", "data", **options, **COMMON)
    assert counted[0] == pytest.approx(max(real), rel=0.2)
