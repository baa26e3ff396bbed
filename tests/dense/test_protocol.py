"""Segmentation and detection end to end: candidates, order of reading, rejected options."""

import math
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
from patchloom.dense import answers
from patchloom.dense.annotations.base import IGNORED, AnnotatedData
from patchloom.dense.annotations.segmentation import image_class_pixels
from patchloom.dense.answers import Pictures, mask_padding, predict_images
from patchloom.dense.augment import PixelAugment
from patchloom.dense.checkpoint import load_dense
from patchloom.dense.metrics import constant_overlaps, foreground_iou, mean_iou, overlaps
from patchloom.dense.recipes import (
    DETECT,
    FOR_RARE,
    PROBE,
    SEGMENT,
    ResolvedDenseRecipe,
    SegmentRecipe,
    dense_recipe,
    usual_crops,
)
from patchloom.dense.segment import (
    batch_overlaps,
    begin_segmenter,
    class_weights,
    dice_loss,
    for_rare_classes,
    joined,
    pixel_loss,
    predict_overlaps,
    rare_crops,
    segment_score,
)
from patchloom.dense.segmenter import Segmenter
from patchloom.dense.study import annotated_parts, best_and_worst, native_or_reduced, window_count
from patchloom.errors import PatchloomError, Stopped
from patchloom.estimate import LiveBytes
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.evaluate.trainer import Trainer
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.nets.finetune import at_size
from patchloom.pace import Pace
from patchloom.results import store
from patchloom.results.claims import Claim
from patchloom.runs import held_out
from patchloom.runs.training_set import no_record

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
def test_unreadable_test_images_count_for_nothing_and_are_refused_if_all_are(run, squares, protocol, monkeypatch):
    kind = type(Squares(1).images)
    read = kind.read
    broken = {2}

    def damaged(self: Source, i: int) -> torch.Tensor:
        if self.name == "squares test" and i in broken:
            raise Unreadable("gone")
        return read(self, i)

    monkeypatch.setattr(kind, "read", damaged)
    options = {**OPTIONS[protocol], **COMMON, "steps": 1, "control": False}
    found = evaluate(protocol, run, "data", **options)
    assert found.n_test == 4 and {row.n for row in found.results} == {4}
    (run / store.FILE).unlink()
    broken.update(range(5))
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
    monkeypatch.setattr("patchloom.dense.study.free_memory", lambda _: share * counted[0] / 2**30)
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


def scenes_of(images: Squares) -> list[int]:
    found = list(range(len(images)))
    while hasattr(images, "whole"):
        found, images = [int(images.indices[i]) for i in found], images.whole
    return found


def parted(train: int | Squares, validation=None, test=None, run=None, **settings: Any) -> Parts:
    images = Squares(train) if isinstance(train, int) else train
    return annotated_parts(AnnotatedData(images, validation, test), EvalSettings(**settings), "Note.", run)


def trained_on(parts: Parts, validation: float, seed: int = 0) -> tuple[Squares, Squares | None]:
    recipe = replace(SEGMENT["small"], validation=validation).settled(len(parts.train), "cpu", 0, 16, 4, 32)
    return parts.trained_on(recipe, EvalSettings(seed=seed))


def test_a_missing_test_is_a_fifth_and_no_image_is_in_two_parts() -> None:
    parts = parted(40, seed=3)
    train, held = trained_on(parts, 0.25, 3)
    found = [set(scenes_of(one)) for one in (train, held, parts.test)]
    assert list(map(len, found)) == [24, 8, 8] and len(set.union(*found)) == 40
    assert "a fifth was split off for the test (seed 3)" in parts.story
    assert set(scenes_of(parted(40, seed=4).test)) != found[2]


def test_few_labels_are_few_for_validation_too() -> None:
    given = 20, Squares(5, seed=1), Squares(6, seed=2)
    parts = parted(*given, max_train=10)
    train, held = trained_on(parts, 0.2)
    assert (len(train), len(held), len(parts.test)) == (8, 2, 6) and set(scenes_of(held)).isdisjoint(scenes_of(train))
    assert "only 10 of 20 training images" in parts.story and "none of the data's own validation images" in parts.story
    assert len(parted(*given, max_train=20).train) == 20
    assert "use --validation 0" in refusal(trained_on, parted(1, None, Squares(2)), 0.15)


def test_groups_stay_whole_and_the_story_says_so() -> None:
    squares, own = Squares(20), Squares(10)
    squares.images.place = lambda i: f"film{i // 5}/{i}.png"
    own.images.place = lambda i: f"film{i // 5 + 7}/{i}.png"
    parts = parted(squares, group=r"film\d")
    films = [{i // 5 for i in scenes_of(part)} for part in (parts.train, parts.test)]
    assert not films[0] & films[1] and "whole groups" in parts.story and "intervals are over groups" in parts.story
    parts = parted(squares, None, own, group=r"film\d")
    assert parts.test.images.groups.tolist() == [0] * 5 + [1] * 5 and "Intervals are over its groups." in parts.story


def test_copies_of_test_images_are_left_out_or_counted() -> None:
    few = parted(20, None, Squares(6), max_train=10)  # squares of one seed are the same images
    count = len({*scenes_of(few.train)} & {*range(6)})
    assert 0 < count < 6 and f" {count} of 6 test images are exact copies" in few.story  # of the images that are used
    whole = Squares(40)  # 10 images, four times each
    contents = whole.images.contents
    whole.images.contents = lambda chosen=None: contents(np.arange(40) % 10 if chosen is None else chosen % 10)
    parts = parted(whole)
    left = 40 - len(parts.train) - len(parts.test)
    assert left and f"{left} exact copies of test images were left out of training" in parts.story


def test_test_images_of_the_pre_training_are_counted(monkeypatch) -> None:
    test = Squares(6, seed=1)
    seen = no_record().and_trained_on(test.images.contents(np.arange(4)), "photos")
    monkeypatch.setattr(held_out, "record_of", lambda source: {"run": seen}.get(source))
    assert "4 of 6 test images were in pre-training" in parted(20, None, test, run="run").story
    assert "pre-training" not in parted(20, None, test, run="other").story


def test_the_two_best_and_the_two_worst_images_are_drawn() -> None:
    assert best_and_worst([0.5, float("nan"), 0.9, 0.1, 0.7, 0.3]) == [2, 4, 5, 3]
    assert best_and_worst([0.5, 0.9, float("nan")]) == [1, 0]


# Training of maps: it learns, and one that was stopped ends as one that was not.

SPEC = EncoderSpec("nano", (16, 16), 4, options={"depth": 2, "embed_dim": 32, "num_heads": 2})
CARD = EncoderCard(SPEC, (0.4,) * 3, (0.2,) * 3, "mae", "tiny")
SETTINGS = EvalSettings(device="cpu", workers=0)
RECIPE = replace(SEGMENT["small"], steps=6, batch=4, size=16, head_width=16, color=False, validation=0.2)


def recipe(**changes: object) -> SegmentRecipe:
    return replace(RECIPE, **changes).settled(20, "cpu", 0, 16, 4, 32)


def held_images(values: SegmentRecipe) -> Squares:
    return Squares(4, (values.size, values.size + 8), seed=1)


def begun(values: SegmentRecipe, head: str = "upernet", seed: int = 0, train: Squares | None = None) -> Trainer:
    torch.manual_seed(0)
    size, shape = (values.size, values.size), (values.size, values.size + 8)
    train = train or Squares(20, shape, seed=seed)
    model = Segmenter(at_size(build_encoder(SPEC), CARD, size), len(train.classes), head=head, head_width=16)
    held = held_images(values) if values.validation else None
    return begin_segmenter(model, CARD, values, train, held, settings=SETTINGS)


@pytest.mark.parametrize(("head", "steps"), [("upernet", 50), ("linear", 30)])
def test_it_learns(head: str, steps: int) -> None:
    values = recipe(steps=steps, size=32, lr=5e-3, layer_decay=1.0, scale=(1.0, 1.0))
    training = begun(values, head)

    def score() -> float:
        return segment_score(training.tested, CARD, held_images(values), recipe=values, settings=SETTINGS, half=False)

    before = score()
    training.model.train()
    done = training.fit("tiny", Pace(steps))
    assert done.chosen["validation_score"] > max(before, 0.25) + 0.1  # a quarter is what the ground alone gives
    assert score() == done.chosen["validation_score"]  # the best weights are tested


def test_other_recipes_or_labels_are_another_training() -> None:
    first = begun(recipe()).about
    assert begun(recipe()).about == first
    assert begun(recipe(lr=2e-3)).about != first != begun(recipe(), seed=3).about


def test_ties_of_validation_scores_go_to_the_last_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchloom.dense.segment.segment_score", lambda *_, **__: 0.25)
    done = begun(recipe()).fit("tiny", Pace(6))
    assert done.chosen == {"best_step": 6, "validation_score": 0.25, "validation_images": 4}


def test_losses_by_hand() -> None:
    logits, truth = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 8, 8))
    truth[0, :5] = -1
    whole = torch.nn.functional.interpolate(logits, (8, 8), mode="bilinear")
    counted = truth != -1
    expected = -whole.log_softmax(1).gather(1, truth.clamp_min(0)[:, None])[:, 0][counted].mean()
    assert torch.allclose(pixel_loss(logits, truth), expected)
    assert pixel_loss(logits, torch.full((2, 8, 8), -1)) == 0
    # two pixels, one of each class, with losses ln 2 and ln 4
    logits = torch.log(torch.tensor([[[[0.5, 0.75]], [[0.5, 0.25]]]]))
    truth, weights = torch.tensor([[[0, 1]]]), torch.tensor([1.0, 3.0])
    expected = (math.log(2) + 3 * math.log(4)) / 4
    assert pixel_loss(logits, truth, weights).item() == pytest.approx(expected)
    ignored = torch.tensor([[[0, IGNORED]]])
    assert pixel_loss(logits, ignored, weights).item() == pytest.approx(math.log(2))
    assert pixel_loss(logits, torch.full((1, 1, 2), IGNORED), weights, dice=True) == 0
    # 1 / ln(1.02 + p), ENet (Paszke et al. 2016), for fractions of 0.98, 0.02 and none
    weights = class_weights(np.array([[90, 2, 0], [8, 0, 0]]))
    expected = [1 / math.log(2.0), 1 / math.log(1.04), 1 / math.log(1.02)]
    assert weights.tolist() == pytest.approx(expected) and expected[1] > 25
    # three pixels, the last of which does not count: Dice 2 * 0.5 / (1 + 0.75) and 2 * 0.75 / (1 + 1.25)
    chances = torch.tensor([[[[0.5, 0.25, 0.9]], [[0.5, 0.75, 0.1]], [[0.0, 0.0, 0.0]]]])
    truth = torch.tensor([[[0, 1, IGNORED]]])
    expected = 1 - (2 * 0.5 / (1 + 0.75) + 2 * 0.75 / (1 + 1.25)) / 2  # the third class is not shown
    assert dice_loss(torch.log(chances), truth).item() == pytest.approx(expected, rel=1e-5)
    right = torch.tensor([[[[40.0, -40.0]], [[-40.0, 40.0]]]])
    assert dice_loss(right, torch.tensor([[[0, 1]]])) < 1e-5 < 0.99 < dice_loss(right, torch.tensor([[[1, 0]]]))


def test_padding_becomes_zero() -> None:
    images = mask_padding(torch.ones(2, 3, 4, 5), [(4, 2), (1, 5)])
    assert images[0, 0].tolist() == [[1, 1, 0, 0, 0]] * 4 and images[1, 0].tolist() == [[1] * 5, *[[0] * 5] * 3]
    assert (images == images[:, :1]).all()


def test_a_loss_that_is_not_finite_names_the_remedy() -> None:
    training = begun(recipe(lr=1e30, clip=0.0, steps=30, validation=0.0))
    with pytest.raises(PatchloomError, match=r"not finite after \d+ steps: lower --lr \(now 1e\+30\)"):
        training.fit("tiny", Pace(30))


class Holed:
    """Images of a number and annotations; image 3 cannot be read, nor can annotation 5; images from 8 are floats."""

    @staticmethod
    def read_as(i: int, channels: int) -> torch.Tensor:
        if i == 3:
            raise Unreadable("3 is broken")
        image = torch.full((channels, 2 + i, 3), i, dtype=torch.uint8)
        return image / 255 if i >= 8 else image

    @staticmethod
    def truth(i: int) -> torch.Tensor:
        if i == 5:
            raise PatchloomError("annotation 5 is broken")
        return torch.tensor(i)


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_are_read_ahead_and_answered_in_groups(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []

    def answer(images: list[torch.Tensor]) -> list[torch.Tensor]:
        groups.append(len(images))
        return [one[0, 0, 0] for one in images]

    def found(truth: object, numbers: range) -> list[tuple[int, object]]:
        groups.clear()
        pictures = Pictures(Holed.read_as, 1, numbers, truth)
        each = list(answers.answered(pictures, answer, torch.device("cpu"), workers))
        assert all(one.image.shape == (1, 2 + one.number, 3) for one, _ in each)
        assert all(round(255 * float(value)) == 8 if one.number == 8 else value == one.number for one, value in each)
        return [(one.number, one.truth) for one, _ in each]

    assert found(None, range(9)) == [(i, None) for i in (0, 1, 2, 4, 5, 6, 7, 8)] and groups == [1] * 8
    assert found(None, range(1, 1)) == [], "one of several processes may have none"
    assert found(Holed.truth, range(0, 5, 2)) == [(i, i) for i in (0, 2, 4)]
    with pytest.raises(PatchloomError, match="annotation 5 is broken"):
        found(Holed.truth, range(9))
    whole = answers._groups
    monkeypatch.setattr(answers, "_groups", lambda pictures, most: whole(pictures, 4))
    assert len(found(None, range(9))) == 8 and groups == [4, 3, 1], "of one dtype"


def test_several_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "rank", lambda: 1)
    monkeypatch.setattr(answers, "world", lambda: 3)
    model = begun(recipe()).model
    found = predict_images(
        model, Squares(6), SETTINGS, lambda some, *_: [len(some)], lambda picture, answer: (picture.number, answer)
    )
    assert found == [None, (1, 1), None, None, (4, 1), None]


class Defects(Squares):
    """Images of noise, every fourth with a bright square of 1 % of the pixels."""

    classes = ("ground", "defect")

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__(count, (40, 40), seed)
        self.images.scene = self.scene

    def scene(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng((self.images.seed, i, 1))
        image, labels = rng.integers(90, 120, (3, 40, 40)).astype(np.uint8), np.zeros((40, 40), np.int16)
        if i % 4 == 0:
            top, left = rng.integers(36, size=2)
            image[:, top : top + 4, left : left + 4], labels[top : top + 4, left : left + 4] = 220, 1
        return torch.from_numpy(image), torch.from_numpy(labels)


def test_a_rare_defect_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Without care for rare classes, the answer is ground everywhere, which is said; by auto, the defect is found."""

    def trained(**changes: object) -> float:
        values = {"steps": 60, "side": "native", "validation": 0.0, "layer_decay": 1.0, "lr": 5e-3}
        asked, data = replace(RECIPE, **values, **changes), Defects(24)
        pixels = image_class_pixels(data).sum(0)
        settled, _ = for_rare_classes(asked, asked.settled(24, "cpu", 0, 16, 4, 32), pixels, data.classes)
        done = begun(settled, train=data).fit("tiny", Pace(60)).model
        found = predict_overlaps(done, Defects(16, 1), CARD, SETTINGS, None, precision="float32")
        return foreground_iou(joined(found, 2).sum(0)).item()

    lost, found = trained(class_weights=False, rare_crops=0.0), trained()
    before, after = capsys.readouterr().out.splitlines()
    assert lost == 0 and "nothing but ground found in training" in before
    assert found > 0.1 and "nothing but" not in after


# Rare classes: weights, Dice, crops that hold them, and the rule by which auto takes them.


def crops_of(augment: PixelAugment, truths: list[torch.Tensor]) -> list[torch.Tensor]:
    rng, image = np.random.default_rng(0), torch.zeros(1, 64, 64, dtype=torch.uint8)
    return [augment(image, truth, rng)[1] for truth in truths]


def test_every_second_crop_holds_the_rare_class() -> None:
    """A quarter of the images have one rare pixel in a corner, which hardly any crop of a sixteenth would show."""
    truths = torch.zeros(40, 64, 64, dtype=torch.int16)
    truths[::4, 1, 62] = 1
    pixels = np.stack([np.bincount(one.numpy().ravel(), minlength=2) for one in truths])
    crops = rare_crops(pixels, 0.5)
    assert len(crops.images) == 60 and (np.bincount(crops.images) == [3, 1, 1, 1] * 10).all()
    augment = PixelAugment((16, 16), None, (1.0, 1.0), flip=False, rare=crops.classes, aimed=crops.aimed)
    held = [bool((crop == 1).any()) for crop in crops_of(augment, [*truths[crops.images]] * 4)]
    assert 0.4 < np.mean(held) < 0.6
    plain = PixelAugment((16, 16), None, (1.0, 1.0), flip=False)
    assert np.mean([bool((crop == 1).any()) for crop in crops_of(plain, [*truths] * 10)]) < 0.05


def test_each_rare_class_of_an_image_is_aimed_at_alike() -> None:
    truth = torch.zeros(64, 64, dtype=torch.int16)
    truth[:3, :60], truth[63, 63] = 1, 2
    seen = crops_of(PixelAugment((8, 8), None, (1.0, 1.0), flip=False, rare=(1, 2), aimed=1.0), [truth] * 400)
    assert all((one > 0).any() for one in seen) and 0.4 < np.mean([bool((one == 2).any()) for one in seen]) < 0.6


def test_nothing_is_drawn_for_rare_crops_that_are_off() -> None:
    """So that views, and all numbers, are as they were."""
    image, truth = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8), torch.zeros(40, 50, dtype=torch.int16)
    truth[20, 20] = 1
    augments = PixelAugment((16, 16), 32), PixelAugment((16, 16), 32, rare=(1,), aimed=0.0)
    one, other = (augment(image, truth, np.random.default_rng(3)) for augment in augments)
    assert torch.equal(one[0][0], other[0][0]) and torch.equal(one[1], other[1])
    assert rare_crops(np.array([[99, 1]]), 0.0).aimed == 0 and rare_crops(np.array([[50, 50]]), 0.5).aimed == 0


@pytest.mark.parametrize(
    ("pixels", "acts"),
    [
        ([9975, 25], True),
        ([9501, 299, 200], True),  # all the rest under 5 % together
        ([9400, 300, 300], False),  # each under 5 %, but not together: CamVid is of that kind
        ([50, 50], False),
        ([100, 0], False),
    ],
)
def test_auto_acts_where_a_constant_answer_is_nearly_right(pixels: list[int], acts: bool) -> None:
    asked = SEGMENT["small"]
    recipe = asked.settled(20, "cpu", 0, 16, 4, 32)
    assert (recipe.class_weights, recipe.rare_crops, recipe.loss) == (False, 0.0, "cross-entropy")
    found, said = for_rare_classes(asked, recipe, np.array(pixels), ("ground", "scratch", "hole"))
    assert found == (replace(recipe, **FOR_RARE) if acts else recipe) and bool(said) == acts
    assert not acts or "are not ground" in said and "--class_weights true and --rare_crops 0.5" in said
    for other in (replace(asked, class_weights=False, rare_crops=0.0), SEGMENT["mae"], PROBE):
        plain = other.settled(20, "cpu", 0, 16, 4, 32)
        assert for_rare_classes(other, plain, np.array(pixels), ("a", "b", "c")) == (plain, "")


def test_the_constant_answer_and_the_foreground() -> None:
    truth = torch.tensor([[6, 2, 0], [5, 3, 0]])
    matrices = torch.stack([torch.diag(row) for row in truth])
    best, constant = constant_overlaps(overlaps(matrices))
    assert best == 0 and constant.sum(0).tolist() == [[11, 0, 0], [16, 5, 0], [11, 5, 0]]
    assert mean_iou(constant.sum(0)).item() == pytest.approx(11 / 16 / 2) and foreground_iou(constant.sum(0)) == 0
    second, other = constant_overlaps(overlaps(matrices), 1)
    assert second == 1 and foreground_iou(other.sum(0)).item() == pytest.approx(5 / 16)  # the third class is nowhere
    half = torch.tensor([[[9, 1, 0], [2, 2, 0], [0, 0, 0]]])
    assert foreground_iou(overlaps(half)[0]).item() == pytest.approx(2 / 5)  # of the second class alone


def test_overlaps_of_a_batch_are_those_of_its_confusion() -> None:
    logits, truth = torch.randn(2, 3, 4, 4), torch.randint(-1, 3, (2, 4, 4))
    matrix = torch.zeros(3, 3, dtype=torch.int64)
    for real, answer in zip(truth.flatten().tolist(), logits.argmax(1).flatten().tolist(), strict=True):
        matrix[real, answer] += real >= 0
    assert torch.equal(batch_overlaps(logits, truth), overlaps(matrix).float())


@pytest.mark.parametrize("name", [*SEGMENT, *DETECT])
def test_every_recipe_is_sound_and_resolves(name: str) -> None:
    recipe = dense_recipe(name, {**SEGMENT, **DETECT}, {})
    for device, n in (("cpu", 300), ("cuda", 20_000)):
        settled = recipe.settled(n, device, 0, 224, 16, 768)
        assert "auto" not in [value for name, value in settled.plain().items() if name != "window"]
        assert settled.size % 16 == 0 and settled.batch <= 32


STATED = {  # what each paper states, with the place; what it does not state is pinned by no row
    # MAE, appendix A.4 (with BEiT's) and LUT, Table E
    "mae": {"steps": 160_000, "batch": 16, "lr": 1e-4, "layer_decay": 0.65, "size": 512, "weight_decay": 0.05},
    "lut": {
        **{"steps": 160_000, "batch": 16, "lr": 1e-4, "layer_decay": 0.65, "size": 512, "weight_decay": 0.05},
        **{"warmup_steps": 1_500, "betas": (0.9, 0.999), "drop_path": 0.1, "decay": "linear"},
    },
    # DropPos, appendix A.3
    "droppos": {
        **{"steps": 80_000, "batch": 16, "lr": 7e-4, "size": 512, "weight_decay": 0.05, "warmup_steps": 1_500},
        "decay": "linear",
    },
    # Beyond Masking, section 4.4: the better of two rates
    "restore": {"steps": 160_000, "batch": 16, "lr": 3e-4, "size": 512},
    "restore-4e-4": {"steps": 160_000, "batch": 16, "lr": 4e-4, "size": 512},
    # ExtreMA, section 5.3
    "extrema": {"steps": 80_000, "batch": 16, "lr": 1e-4, "layer_decay": 0.85, "weight_decay": 0.05},
}
STATED_OF_DETECTION = {
    # DropPos, appendix A.2; the decay by layer is ViTDet's for ViT-B, whose configuration it follows
    "vitdet": {"steps": 88_750, "batch": 16, "lr": 3e-4, "size": 1024, "layer_decay": 0.7, "decay": "steps"},
    # Beyond Masking, section 4.4
    "restore": {"lr": 3e-4, "layer_decay": 0.75, "decay": "steps", "shorter": (480, 800), "longer": 1333},
    # ExtreMA's program follows CAE's (detection, Mask R-CNN, ViT-B, 1x)
    "extrema": {
        **{"lr": 3e-4, "layer_decay": 0.75, "decay": "steps", "shorter": (480, 800), "longer": 1333, "batch": 32},
        **{"weight_decay": 0.05, "drop_path": 0.2, "betas": (0.9, 0.999), "drops": (9 / 12, 11 / 12)},
    },
}


def test_values_of_the_papers() -> None:
    assert {*STATED, "small"} == {*SEGMENT} and {*STATED_OF_DETECTION, "small"} == {*DETECT}
    for known, papers in ((SEGMENT, STATED), (DETECT, STATED_OF_DETECTION)):
        for name, stated in papers.items():
            assert {field: getattr(known[name], field) for field in stated} == stated, name
    assert SEGMENT["mae"].settled(20_210, "cuda", 0, 224, 16, 768).head_width == 512
    for twelve in (DETECT["restore"], DETECT["extrema"]):  # epochs of COCO's training images
        assert twelve.steps == 12 * (118_287 // twelve.batch) and twelve.size >= 1333


DROPS = {"vitdet": (78_889, 85_463), "restore": (9 * 7_392, 11 * 7_392), "extrema": (9 * 3_696, 11 * 3_696)}


@pytest.mark.parametrize(("name", "drops"), DROPS.items())
def test_the_rate_of_detection_drops_where_the_papers_say(name: str, drops: tuple[int, int]) -> None:
    recipe = DETECT[name].settled(118_287, "cuda", 0, 224, 16, 768)
    course = recipe.course(118_287)

    def rate(update: int) -> float:  # the first one is 1
        return course.rate(update - 1)

    assert rate(1) < rate(recipe.warmup_steps - 1) < rate(recipe.warmup_steps) == pytest.approx(3e-4)
    for drop, before in zip(drops, (3e-4, 3e-5), strict=True):
        assert [rate(drop), rate(drop + 1)] == pytest.approx([before, before / 10])


def test_sides_that_do_not_act_are_left_out() -> None:
    assert {"shorter", "longer", "drops"}.isdisjoint(dense_recipe("small", DETECT, {}).plain())
    plain = dense_recipe("restore", DETECT, {}).plain()
    assert "scale" not in plain and (plain["shorter"], plain["longer"]) == ([480, 800], 1333)
    assert dense_recipe("small", DETECT, {"shorter": [64, 96]}).sides == (64, 96, 2**14)
    for changes, said in (
        ({"shorter": [96, 64]}, "larger number first"),
        ({"shorter": [0, 64]}, "0 pixels"),
        ({"longer": 64}, "without --shorter"),
    ):
        assert said in refusal(dense_recipe, "small", DETECT, changes)


def test_auto_depends_on_the_data_and_the_encoder() -> None:
    small = SEGMENT["small"].settled(300, "cpu", 0, 128, 8, 128)
    assert (small.steps, small.warmup_steps, small.batch, small.size, small.side) == (1_000, 100, 8, 192, 192)
    assert small.validation == 0.15 and small.head_width == 128
    assert SEGMENT["small"].settled(40, "cpu", 0, 128, 8, 128).validation == 0  # six images would say nothing
    assert SEGMENT["small"].settled(40, "cpu", 101, 128, 8, 128).validation == 0.15  # the data brings its own
    assert SEGMENT["small"].settled(5, "cpu", 0, 128, 8, 128).batch == 5
    assert DETECT["small"].settled(100, "cpu", 0, 100, 16, 32).size == 144  # a multiple of the patch
    assert PROBE.layer_decay == 1 and PROBE.auxiliary == 0
    assert SEGMENT["mae"].settled(20_210, "cuda", 0, 224, 16, 768).side == 512  # as papers resize
    assert dense_recipe("mae", SEGMENT, {"size": 256}).settled(20_210, "cuda", 0, 224, 16, 768).side == 256
    assert dense_recipe("mae", SEGMENT, {"steps": 16_000}).warmup_steps == 150
    assert dense_recipe("mae", SEGMENT, {"steps": 16_000, "warmup_steps": 7}).warmup_steps == 7


def test_windows_of_an_image() -> None:
    assert [window_count(one, None, 144) for one in ((144, 144), (145, 100), (512, 512), (360, 480))] == [1, 2, 25, 20]
    assert window_count((512, 1024), 144, 144) == 3


@pytest.mark.parametrize(
    ("image", "tests", "side", "said"),
    [
        ((96, 120), 1_000, 144, ""),  # smaller images are enlarged, as training was on crops of that size
        ((145, 150), 1_000, "native", ""),
        ((512, 512), 1_000, "native", ""),
        ((512, 512), 4_000, 336, "100,000 windows"),
        ((576, 576), 10, "native", ""),
        ((2048, 2048), 10, 576, "less than 1/16"),
        ((2048, 2048), 10**6, 144, "less than 1/16"),
    ],
)
def test_images_are_reduced_no_further_than_time_asks(
    image: tuple[int, int], tests: int, side: int | str, said: str
) -> None:
    found, why = native_or_reduced(image, 144, tests, usual_crops("cpu"), 8)
    assert found == side and said in why and bool(said) == bool(why)
    if isinstance(found, int) and found > 144:
        assert window_count(image, found, 144) * tests <= 6 * usual_crops("cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale": [2.0, 0.5]}, "--scale [2.0, 0.5] has the larger number first"),
        ({"drops": [0.9, 0.8]}, "--drops [0.9, 0.8] has the larger number first"),
        ({"scale": [0.0, 1.0]}, "--scale must be 0.01 to 100"),
        ({"steps": 10, "warmup_steps": 20}, "--warmup_steps 20 is more than --steps 10"),
        ({"side": 2}, "--side must be 8 to 16,384"),
        ({"size": "large"}, "size"),
    ],
)
def test_bad_values_are_rejected(changes: dict[str, object], said: str) -> None:
    assert said in refusal(dense_recipe, "small", SEGMENT, changes)


@pytest.mark.parametrize("recipe", [SEGMENT["small"], DETECT["small"]])
def test_auto_cannot_stand_in_a_resolved_recipe(recipe):
    settled = recipe.settled(300, "cpu", 0, 128, 8, 128)
    assert isinstance(settled, ResolvedDenseRecipe) and settled.plain().keys() == recipe.plain().keys()
    for name in ("steps", "warmup_steps", "batch", "size", "validation", "head_width"):
        with pytest.raises(ValueError, match=f"{name} is auto"):
            replace(settled, **{name: "auto"})
