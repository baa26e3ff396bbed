"""Segmentation and detection end to end: candidates, order of reading, rejected options."""

import csv
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_together import segment_together
from PIL import Image
from scenes import BoxedSquares, Squares

from patchloom.claims import Claim
from patchloom.cli import main
from patchloom.data.decode import Unreadable
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.dense.annotations.base import AnnotatedData
from patchloom.dense.checkpoint import load_dense
from patchloom.dense.training import DenseTraining
from patchloom.dense.windows import detect_image
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.trainer import Loop
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.system.hardware import LiveBytes

OPTIONS: dict[str, dict[str, Any]] = {
    "segment": {"steps": 4, "size": 16, "head_width": 8, "batch_size": 4},
    "detect": {"steps": 4, "size": 32, "head_width": 8, "batch_size": 4, "masks": False},
}
MEASURES = {"segment": "mIoU", "detect": "AP"}
COMMON = {"device": "cpu", "workers": 0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    spec = EncoderSpec("nano", (16, 16), 4, options={"depth": 4, "embed_dim": 16, "num_heads": 2})
    torch.manual_seed(1)
    card = EncoderCard(spec, (0.4,) * 3, (0.2,) * 3, "mae", "tiny")
    save_encoder(build_encoder(spec), card, tmp_path / "encoder.safetensors")
    return tmp_path


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes drawn images the data, whatever its name."""

    def install(**parts: int) -> None:
        for module, name, kind in (
            ("segment", "open_label_maps", Squares),
            ("detect", "open_boxes", BoxedSquares),
        ):
            sizes = {"train": 12, "validation": 4, "test": 5} | parts
            seeds = {"train": 0, "validation": 1, "test": 2}
            made = {part: kind(n, seed=seeds[part]) if n else None for part, n in sizes.items()}
            for part, images in made.items():
                if images is not None:
                    images.images.name = f"squares {part}"
            monkeypatch.setattr(f"patchloom.dense.{module}.{name}", lambda *_, made=made, **__: AnnotatedData(**made))

    install()
    return install


@pytest.mark.parametrize("protocol", OPTIONS)
def test_the_whole_of_it(run: Path, squares: object, protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = evaluate(protocol, run, "data", save=True, seeds=2, **OPTIONS[protocol], **COMMON)
    assert [row.encoder for row in report.quoted] == ["tiny", "from scratch"]
    assert all(row.settings["measure"] == MEASURES[protocol] for row in report.quoted)
    assert report.n_test == 5 and "on 5 test images" in report.headline
    (found,) = report.against
    assert found.control == "from scratch" and found.trained and found.trainings == 2 and found.n == 5
    assert found.claim is Claim.FEW  # whatever the interval
    assert "The data brings its own validation and test images." in report.protocol
    rows = list(csv.DictReader((run / "results.csv").open()))
    assert [float(row["value"]) for row in rows if row["seed"] == "1"] == [row.value for row in report.rows]
    folder = {"segment": "segmented", "detect": "detected"}[protocol]
    model, card = load_dense(run / folder / "squares-train-small-1.safetensors")
    assert card.classes == model_classes(protocol) and card.kind == protocol and not model.training
    assert (run / folder / "squares-train-small-0.safetensors").exists()
    with Image.open(report.drawings[0].out) as picture:
        assert min(picture.size) > 200
    assert "tiny: saved as" in capsys.readouterr().out
    again = evaluate(protocol, run, "data", seed=1, **OPTIONS[protocol], **COMMON)
    assert again.rows == report.rows


@pytest.mark.parametrize("protocol", OPTIONS)
def test_a_dry_run_writes_nothing(run: Path, squares: object, protocol: str) -> None:
    before = sorted(run.iterdir())
    report = evaluate(protocol, run, "data", save=True, dry_run=True, **OPTIONS[protocol], **COMMON)
    said = "tiny and from scratch would be trained on 12 images in 4 steps of 4, and tested on 5 others. Recipe small"
    assert report.protocol.startswith(said) and report.rows == [] and report.n_test == 5
    assert sorted(run.iterdir()) == before


def model_classes(protocol: str) -> tuple[str, ...]:
    return (Squares if protocol == "segment" else BoxedSquares).classes


def test_a_linear_layer_has_an_untrained_encoder_and_pixels_beside_it(run: Path, squares: object) -> None:
    report = evaluate("segment", run, "data", head="linear", steps=3, size=16, batch_size=4, **COMMON)
    assert [row.encoder for row in report.quoted] == ["tiny", "untrained", "raw pixels"]
    assert report.headline.startswith("Linear segmentation of the frozen encoder: ")
    assert [found.control for found in report.against] == ["untrained", "raw pixels"]
    constant = {row.settings["measure"]: row.value for row in report.rows if row.encoder == "best constant"}
    # the best one by foreground IoU answers the second most frequent class: two of three classes are in the foreground
    assert (
        0 < constant["foreground IoU"] < (1 - constant["aAcc"]) / 2 and "by always answering ground" in report.headline
    )
    assert constant["mIoU"] == pytest.approx(constant["aAcc"] / 3)  # of three classes, one is answered
    assert "head width" not in report.protocol and "layer_decay" not in report.rows[0].settings


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
def test_the_start_of_a_run_is_trained_alike(
    run: Path, squares: object, protocol: str, given: dict[str, Any], controls: list[str]
) -> None:
    """Its rows are those of its file, which has other statistics than the run."""
    squares(test=12)
    start = save_start(run)
    given = {**OPTIONS[protocol], **given, **COMMON}
    report = evaluate(protocol, run, "data", **given)
    alone = evaluate(protocol, start, "data", control=False, **given)
    assert [row.encoder for row in report.quoted] == ["tiny", *controls]
    assert [row for row in report.rows if row.encoder == "start"] == [
        row for row in alone.rows if row.encoder == "start"
    ]
    assert [row.value for row in report.rows if row.encoder == "tiny"] != [row.value for row in alone.rows]
    assert [row.encoder for row in alone.quoted] == ["start"]
    gain, ours, its = report.against[0], *report.quoted[:2]
    assert (gain.control, gain.trained, gain.n) == ("start", True, 12)
    assert gain.value == ours.value - its.value and gain.low < gain.value < gain.high
    assert "at its start" in report.headline and "its start" in report.conclusion()
    assert "with their own normalisation" in report.protocol and "own normalisation" not in alone.protocol
    if protocol == "segment" and "head" not in given:  # after four steps neither side has learnt anything
        assert "no better than always answering ground (25.9 %)" in report.conclusion()
        assert gain.constant == "ground" and gain.short().endswith("no better than always answering ground")
    stored = report.plain()["against"][0]
    assert (stored["control"], stored["low"], stored["high"]) == ("start", gain.low, gain.high)
    if given.get("head") != "linear":
        scratch = evaluate(protocol, run, "data", from_scratch=True, **given)
        assert [row.encoder for row in scratch.quoted] == ["from scratch"]


def test_detection_normalises_for_each_encoder(run: Path, squares: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spied on in training, validation and test: too short a training gives no AP that would show it."""
    save_start(run)
    trained, tested = list[float](), list[float]()

    def normalized(images: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
        trained.append(mean[0])
        return normalize(images, mean, std)

    def detected(model: Any, image: torch.Tensor, mean: tuple[float, ...], *others: Any) -> Any:
        tested.append(mean[0])
        return detect_image(model, image, mean, *others)

    monkeypatch.setattr("patchloom.dense.detect.normalize", normalized)
    monkeypatch.setattr("patchloom.dense.detect.detect_image", detected)
    evaluate("detect", run, "data", **OPTIONS["detect"], **COMMON)
    assert [mean for mean, _ in groupby(trained)] == [0.4, 0.1]
    assert [mean for mean, _ in groupby(tested)] == [0.4, 0.1, 0.4, 0.1]  # each validates, then each is tested


@pytest.mark.parametrize("protocol", OPTIONS)
def test_test_images_are_read_after_all_training(
    run: Path, squares: object, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    kind = type(Squares(1).images)
    read, step = kind.read, Loop.update

    def watched(self: Source, i: int) -> torch.Tensor:
        seen.append(self.name)
        return read(self, i)

    def stepped(self: Loop, *arguments: Any) -> torch.Tensor:
        seen.append("step")
        return step(self, *arguments)

    monkeypatch.setattr(kind, "read", watched)
    monkeypatch.setattr(Loop, "update", stepped)
    evaluate(protocol, run, "data", **OPTIONS[protocol], **COMMON)
    assert seen.count("step") == 8 and seen.index("squares test") > max(
        i for i, one in enumerate(seen) if one == "step"
    )
    assert "squares validation" in seen


@pytest.mark.parametrize("protocol", OPTIONS)
def test_an_evaluation_that_was_stopped_goes_on(
    run: Path, squares: object, protocol: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = evaluate(protocol, run / "encoder.safetensors", "data", **OPTIONS[protocol], **COMMON)
    step, done = Loop.update, [0]

    def stopped(self: Loop, *arguments: Any) -> torch.Tensor:
        done[0] += 1
        if done[0] == 6:  # amid the control
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("patchloom.evaluate.trainer._SAVE_EVERY", 0.0)
        patch.setattr(Loop, "update", stopped)
        with pytest.raises(Stopped, match="run the same command to resume"):
            evaluate(protocol, run / "encoder.safetensors", "data", **OPTIONS[protocol], **COMMON)
    capsys.readouterr()
    done[0] = -1000
    again = evaluate(protocol, run / "encoder.safetensors", "data", **OPTIONS[protocol], **COMMON)
    assert "from scratch resumes at step 2 of 4." in capsys.readouterr().out
    assert again.rows == whole.rows


@pytest.mark.parametrize(
    ("protocol", "options", "said"),
    [
        (
            "segment",
            {"head": "linear", "recipe": "mae"},
            "--recipe mae trains UPerNet: leave it out with --head linear",
        ),
        ("segment", {"head": "linear", "from_scratch": True}, "no training from scratch"),
        ("segment", {"head": "linear", "layer_decay": 0.5}, "--layer_decay has no effect with --head linear"),
        ("segment", {"head": "linear", "positions": "learned"}, "does not train the encoder: leave out --positions"),
        ("segment", {"out": "model.pt"}, "its name ends in .safetensors, which model.pt does not"),
        ("segment", {"save": True, "from_scratch": True}, "--from_scratch saves no model"),
        ("detect", {"out": "a.safetensors", "seeds": 2}, "--out names one file, but --seeds 2 gives several"),
        ("detect", {"recipe": "mae"}, "there is no recipe mae: choose one of small, vitdet"),
        ("segment", {"size": 17}, "patches of 4 pixels do not divide images of 17x17: choose 16x16 or 20x20"),
    ],
)
def test_what_is_refused(run: Path, squares: object, protocol: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PatchloomError, match=re.escape(said)):
        evaluate(protocol, run, "data", **OPTIONS[protocol] | options, **COMMON)
    assert not (run / "results.csv").exists()


def test_masks_that_the_data_does_not_have(run: Path, squares: object, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = AnnotatedData(BoxedSquares(6, masks=False), None, BoxedSquares(2, masks=False, seed=1))
    monkeypatch.setattr("patchloom.dense.detect.open_boxes", lambda *_: parts)
    with pytest.raises(PatchloomError, match="squares has boxes without masks: leave out --masks true"):
        evaluate("detect", run, "data", **OPTIONS["detect"] | {"masks": True}, **COMMON)


def test_masks_are_scored_beside_boxes(run: Path, squares: object) -> None:
    report = evaluate("detect", run, "data", control=False, **OPTIONS["detect"] | {"masks": "auto"}, **COMMON)
    measures = [row.settings["measure"] for row in report.rows]
    assert {"AP", "AP50", "AP75", "AP of masks", "AP50 of masks", "AP red", "AP blue of masks"} <= {*measures}
    assert measures[0] == "AP" and len(measures) == len(set(measures))


def test_without_the_extra_nothing_is_trained(
    run: Path, squares: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core", None)
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core.mask", None)
    assert main(["evaluate", "detect", str(run), "data", "--steps", "4"]) == 2
    told = capsys.readouterr()
    assert "pip install 'faster-coco-eval" in told.err and "trained" not in told.out


def test_what_one_process_does_is_not_for_several(run: Path, squares: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PatchloomError, match="knn is for one process: start it without torchrun"):
        evaluate("knn", run, "digits", **COMMON)


def test_two_processes_share_one_evaluation(run: Path, tmp_path: Path) -> None:
    options = {"steps": 4, "size": 16, "head_width": 8, "batch_size": 4, "drop_path": 0, "save": "true"}
    codes, out, err = segment_together(run, 2, tmp_path / "cache", **options)
    assert codes == [0, 0], err
    weights = [torch.load(run / f"{rank}.pt") for rank in range(2)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    assert out[0].count("mIoU") > 2 and not out[1].strip()
    assert "by 2 processes by the recipe small" in " ".join(out[0].split())
    rows = list(csv.DictReader((run / "results.csv").open()))
    assert [row["encoder"] for row in rows if row["quoted"] == "True"] == ["tiny", "from scratch"]
    assert (run / "segmented" / "squares-small-0.safetensors").exists()
    codes, _, err = segment_together(run, 1, tmp_path / "other cache", **options)
    assert codes == [0], err
    alone = torch.load(run / "0.pt")
    statistics = [name for name in alone if "running_" in name]
    assert len(statistics) > 10  # those of each process's own batch would be far off
    for name in statistics:
        torch.testing.assert_close(weights[0][name], alone[name], rtol=0.01, atol=0.01, msg=name)


def test_a_batch_that_processes_cannot_share_is_refused_once(run: Path, tmp_path: Path) -> None:
    codes, _, err = segment_together(run, 2, tmp_path / "cache", steps=4, size=16, batch_size=3)
    assert 0 not in codes and "--batch_size 3 cannot be shared by 2 processes: give a multiple" in "".join(err)


def test_a_frozen_encoder_without_positions_gets_none(run: Path, squares: object) -> None:
    spec = EncoderSpec("nano", (16, 16), 4, positions="none", options={"depth": 2, "embed_dim": 16, "num_heads": 2})
    card = EncoderCard(spec, (0.4,) * 3, (0.2,) * 3, "mp3", "free")
    save_encoder(build_encoder(spec), card, run / "free.safetensors")
    options = {"head": "linear", "steps": 2, "size": 16, "batch_size": 4, "out": str(run / "model.safetensors")}
    evaluate("segment", run / "free.safetensors", "data", **options, **COMMON)
    model, _ = load_dense(run / "model.safetensors")
    assert not [name for name in model.state_dict() if "pos" in name]


@pytest.mark.parametrize("protocol", OPTIONS)
def test_of_equal_validation_scores_the_last_weights_are_tested(
    run: Path, squares: object, protocol: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("segment.SegmentTraining", "detect.DetectTraining"):
        monkeypatch.setattr(f"patchloom.dense.{kind}.score", lambda *_: 0.25)
    evaluate(protocol, run, "data", control=False, **OPTIONS[protocol], **COMMON)
    assert "step 4 of 4 was best" in capsys.readouterr().out


@pytest.mark.parametrize("protocol", OPTIONS)
def test_the_plan_counts_validation_and_test(
    run: Path, squares: object, protocol: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each scored image takes a minute: 2 models, 10 times the validation images and once the test images."""
    monkeypatch.setattr("patchloom.dense.protocol._MEASURED_FROM", 1)
    monkeypatch.setattr("patchloom.dense.training.DenseTraining.seconds_of_image", lambda *_: 60.0)
    evaluate(protocol, run, "data", **OPTIONS[protocol], **COMMON)
    said = re.search(r"in total: .* of steps, and (\d+) h (\d+) min of validation and test", capsys.readouterr().out)
    held_out, tests = 4, 5
    assert said and 60 * int(said[1]) + int(said[2]) == 2 * (10 * held_out + tests)


@pytest.mark.parametrize("protocol", OPTIONS)
def test_a_test_that_cannot_be_read_is_a_sentence(
    run: Path, squares: object, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(Squares(1).images)
    read = kind.read

    def damaged(self: Source, i: int) -> torch.Tensor:
        if self.name == "squares test":
            raise Unreadable("gone")
        return read(self, i)

    monkeypatch.setattr(kind, "read", damaged)
    with pytest.raises(PatchloomError, match="none of the 5 test images could be read, beginning with squares test #0"):
        evaluate(protocol, run, "data", **OPTIONS[protocol], **COMMON)
    assert not (run / "results.csv").exists()


def test_nothing_to_find_in_the_test_is_said_before_training(
    run: Path, squares: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = BoxedSquares.truth

    def crowds(self: BoxedSquares, i: int) -> Any:
        found = truth(self, i)
        return replace(found, crowd=~found.crowd) if self.images.name == "squares test" else found

    monkeypatch.setattr(BoxedSquares, "truth", crowds)
    with pytest.raises(PatchloomError, match="the 5 images to test on have no object: annotate some of them"):
        evaluate("detect", run, "data", **OPTIONS["detect"], **COMMON)
    assert "trained" not in capsys.readouterr().out


def test_what_the_data_left_out_is_told_once(
    run: Path, squares: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = AnnotatedData(Squares(6), None, Squares(3, seed=1), ("1 image was left out, without a label map (a.png)",))
    monkeypatch.setattr("patchloom.dense.segment.open_label_maps", lambda *_, **__: parts)
    evaluate("segment", run, "data", seeds=2, control=False, **OPTIONS["segment"], **COMMON)
    assert capsys.readouterr().out.count("1 image was left out, without a label map (a.png).") == 1


def test_a_file_of_something_else_is_never_written_over(run: Path, squares: object) -> None:
    before = (run / "encoder.safetensors").read_bytes()
    options = {**OPTIONS["segment"], "out": str(run / "encoder.safetensors")}
    with pytest.raises(PatchloomError, match="is there already, and no model of segment or detect: give --out another"):
        evaluate("segment", run, "data", **options, **COMMON)
    assert (run / "encoder.safetensors").read_bytes() == before
    (run / "folder.safetensors").mkdir()
    with pytest.raises(PatchloomError, match="is there already"):
        evaluate("segment", run, "data", **options | {"out": str(run / "folder.safetensors")}, **COMMON)


def test_a_model_is_no_encoder(run: Path, squares: object) -> None:
    options = {**OPTIONS["segment"], "control": False, "out": str(run / "model.safetensors")}
    evaluate("segment", run, "data", **options, **COMMON)
    evaluate("segment", run, "data", **options, **COMMON)  # its own model is written again
    with pytest.raises(PatchloomError, match="was written by patchloom, but is not encoder weights"):
        evaluate("segment", run / "model.safetensors", "data", **OPTIONS["segment"], **COMMON)


def striped(n: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images of 512 pixels, and label maps: fields of stripes 2 pixels wide (1), and of their mean grey (0)."""
    rng = np.random.default_rng(seed)
    stripes = np.tile([60, 60, 180, 180], (512, 128))
    fields = [rng.permuted(np.arange(16) % 2).reshape(4, 4).repeat(128, 0).repeat(128, 1) for _ in range(n)]
    return [(np.where(one, stripes, 120).astype(np.uint8), one.astype(np.uint8)) for one in fields]


def test_what_vanishes_in_reduced_images_is_seen_in_native_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = EncoderSpec("nano", (96, 96), 8, channels=1, options={"depth": 2, "embed_dim": 64, "num_heads": 2})
    torch.manual_seed(1)
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.47,), (0.2,), "mae", "tiny"), tmp_path / "e.safetensors")
    data = {"train": striped(4, 0), "test": striped(1, 1)}
    options = {
        "head": "linear",
        "steps": 60,
        "lr": 0.02,
        "scale": (1.0, 1.0),
        "batch_size": 4,
        "control": False,
    }
    found = {}
    for side in ("auto", 144):
        report = evaluate("segment", tmp_path / "e.safetensors", data, side=side, **options, **COMMON)
        first = capsys.readouterr().out.splitlines()[0]
        found[side] = report.rows[0].value
        if side == 144:
            assert "reduced x3.6, from 512 to 144 pixels" in first and "--side native" in first
        else:
            assert "own scale" in first and "25 windows of 144x144" in first
            assert report.rows[0].settings["side"] == "native"
        assert first in report.protocol
    assert found["auto"] > 0.85 and found[144] < 0.6


def test_a_detector_says_by_how_much_images_are_reduced(
    run: Path, squares: object, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate("detect", run, "data", control=False, **OPTIONS["detect"], **COMMON)
    first = capsys.readouterr().out.splitlines()[0]
    assert "reduced x2.0" in first and "--size 64" in first


@pytest.mark.parametrize("protocol", OPTIONS)
def test_memory_that_does_not_suffice_is_told_before_training_with_sizes_that_fit(
    run: Path, squares: object, protocol: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_step(*_: Any) -> None:
        raise RuntimeError("a step was made")

    counted: list[int] = []
    count = DenseTraining.bytes_of_step

    def counting(self: DenseTraining, images: int) -> int | None:
        counted.append(count(self, images))
        return counted[-1]

    monkeypatch.setattr(DenseTraining, "bytes_of_step", counting)
    monkeypatch.setattr(Loop, "update", no_step)
    options = OPTIONS[protocol] | {"control": False, "size": 64, "validation": 0.0}
    with pytest.raises(RuntimeError, match="a step was made"):
        evaluate(protocol, run / "encoder.safetensors", "data", **options, **COMMON)
    assert re.search(r"needs about [\d.]+ of [\d.]+ GiB of memory", capsys.readouterr().out)
    named = []
    for share in (0.9, 0.4) if protocol == "segment" else (0.9,):
        free = share * counted[0] / 2**30
        monkeypatch.setattr("patchloom.dense.protocol.free_memory", lambda _, free=free: free)
        with pytest.raises(PatchloomError, match="of memory, and .* are free: give --") as refused:
            evaluate(protocol, run / "encoder.safetensors", "data", **options, **COMMON)
        less = {name: int(value) for name, value in re.findall(r"--(batch_size|size) (\d+)", str(refused.value))}
        named.append({*less})
        with pytest.raises(RuntimeError, match="a step was made"):
            evaluate(protocol, run / "encoder.safetensors", "data", **options | less, **COMMON)
    assert named[0] == {"batch_size"} and all(named)


@pytest.mark.parametrize("protocol", OPTIONS)
def test_a_counted_step_is_as_large_as_a_real_one(
    run: Path, squares: object, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, real, step = [], [], Loop.update
    count = DenseTraining.bytes_of_step

    def counting(self: DenseTraining, images: int) -> int | None:
        counted.append(count(self, images) - 3 * sum(one.nbytes for one in self.model.parameters()))
        return None  # no forecast

    def watched(self: Loop, *arguments: Any) -> torch.Tensor:
        with LiveBytes() as live:
            loss = step(self, *arguments)
        real.append(live.peak)
        return loss

    monkeypatch.setattr(DenseTraining, "bytes_of_step", counting)
    monkeypatch.setattr(Loop, "update", watched)
    options = OPTIONS[protocol] | {"size": 64, "steps": 2, "control": False, "head_width": 32}
    evaluate(protocol, run / "encoder.safetensors", "data", **options, **COMMON)
    assert counted[0] == pytest.approx(max(real), rel=0.2)
