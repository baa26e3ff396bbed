"""Segmentation and detection, whole: what is trained beside what, which images are read when, and what is refused."""

import csv
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_together import segment_together
from PIL import Image
from scenes import BoxedSquares, Squares

from patchloom.cli import main
from patchloom.data.annotated.base import Annotated, AnnotatedData
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate import evaluate
from patchloom.evaluate.dense.models import load_dense
from patchloom.evaluate.loop import Loop
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.weights import EncoderCard, save_encoder

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
            monkeypatch.setattr(
                f"patchloom.evaluate.protocols.{module}.{name}", lambda *_, made=made: AnnotatedData(**made)
            )

    install()
    return install


@pytest.mark.parametrize("protocol", OPTIONS)
def test_the_whole_of_it(run: Path, squares: object, protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = evaluate(protocol, run, "data", save=True, seeds=2, **OPTIONS[protocol], **COMMON)
    assert [row.encoder for row in report.quoted] == ["tiny", "from scratch"]
    assert all(row.settings["measure"] == MEASURES[protocol] for row in report.quoted)
    assert report.n_test == 5 and "on 5 test images" in report.headline
    assert re.search(r"(better|worse) than training from scratch|told apart from training from", report.headline)
    assert "The data brings its own validation and test images." in report.protocol
    rows = list(csv.DictReader((run / "results.csv").open()))
    assert [float(row["value"]) for row in rows if row["seed"] == "1"] == [row.value for row in report.rows]
    folder = {"segment": "segmented", "detect": "detected"}[protocol]
    model, card = load_dense(run / folder / "squares-train-1.safetensors")
    assert card.classes == model_classes(protocol) and card.kind == protocol and not model.training
    assert (run / folder / "squares-train-0.safetensors").exists()
    with Image.open(report.drawings[0].out) as picture:
        assert min(picture.size) > 200
    assert "tiny: saved as" in capsys.readouterr().out
    again = evaluate(protocol, run, "data", seed=1, **OPTIONS[protocol], **COMMON)
    assert again.rows == report.rows


def model_classes(protocol: str) -> tuple[str, ...]:
    return (Squares if protocol == "segment" else BoxedSquares).classes


def test_a_linear_layer_has_an_untrained_encoder_and_pixels_beside_it(run: Path, squares: object) -> None:
    report = evaluate("segment", run, "data", head="linear", steps=3, size=16, batch_size=4, **COMMON)
    assert [row.encoder for row in report.quoted] == ["tiny", "untrained", "raw pixels"]
    assert report.headline.startswith("Linear segmentation of the frozen encoder: ")
    assert re.search("(than|told apart from) the untrained one", report.headline)


@pytest.mark.parametrize("protocol", OPTIONS)
def test_test_images_are_read_after_all_training(
    run: Path, squares: object, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    kind = Squares if protocol == "segment" else BoxedSquares
    truth, step = kind.truth, Loop._step

    def watched(self: Annotated[Any], i: int) -> Any:
        seen.append(self.images.name)
        return truth(self, i)

    def stepped(self: Loop, *arguments: Any) -> torch.Tensor:
        seen.append("step")
        return step(self, *arguments)

    monkeypatch.setattr(kind, "truth", watched)
    monkeypatch.setattr(Loop, "_step", stepped)
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
    step, done = Loop._step, [0]

    def stopped(self: Loop, *arguments: Any) -> torch.Tensor:
        done[0] += 1
        if done[0] == 6:  # amid the control
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("patchloom.evaluate.unfinished._SAVE_EVERY", 0.0)
        patch.setattr(Loop, "_step", stopped)
        with pytest.raises(Stopped, match="the same command goes on from there"):
            evaluate(protocol, run / "encoder.safetensors", "data", **OPTIONS[protocol], **COMMON)
    capsys.readouterr()
    done[0] = -1000
    again = evaluate(protocol, run / "encoder.safetensors", "data", **OPTIONS[protocol], **COMMON)
    assert "from scratch goes on at step 2 of 4." in capsys.readouterr().out
    assert again.rows == whole.rows


@pytest.mark.parametrize(
    ("protocol", "options", "said"),
    [
        (
            "segment",
            {"head": "linear", "recipe": "mae"},
            "--recipe mae trains UPerNet: leave it out with --head linear",
        ),
        ("segment", {"head": "linear", "from_scratch": True}, "nothing is trained from scratch"),
        ("segment", {"head": "linear", "layer_decay": 0.5}, "--layer_decay has no effect with --head linear"),
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
    monkeypatch.setattr("patchloom.evaluate.protocols.detect.open_boxes", lambda *_: parts)
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
    assert "pip install 'patchloom[dense]'" in told.err and "trained" not in told.out


def test_what_one_process_does_is_not_for_several(run: Path, squares: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PatchloomError, match="knn is for one process: start it without torchrun"):
        evaluate("knn", run, "digits", **COMMON)


def test_two_processes_share_one_evaluation(run: Path, tmp_path: Path) -> None:
    options = {"steps": 4, "size": 16, "head_width": 8, "batch_size": 4, "save": "true"}
    codes, out, err = segment_together(run, 2, tmp_path / "cache", **options)
    assert codes == [0, 0], err
    weights = [torch.load(run / f"{rank}.pt") for rank in range(2)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    assert out[0].count("mIoU") > 2 and not out[1].strip()
    assert "by 2 processes by the recipe small" in " ".join(out[0].split())
    rows = list(csv.DictReader((run / "results.csv").open()))
    assert [row["encoder"] for row in rows if row["quoted"] == "True"] == ["tiny", "from scratch"]
    assert (run / "segmented" / "squares-0.safetensors").exists()


def test_a_batch_that_processes_cannot_share_is_refused_once(run: Path, tmp_path: Path) -> None:
    codes, _, err = segment_together(run, 2, tmp_path / "cache", steps=4, size=16, batch_size=3)
    assert 0 not in codes and "--batch_size 3 cannot be shared by 2 processes: give a multiple" in "".join(err)
