"""What is typed wrongly, and what does not go together: one sentence and exit code 2, before anything is written."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import write_encoder
from PIL import Image
from refusing import failed, refusal
from safetensors.torch import save

from patchloom.evaluate.protocols import evaluate


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("knnn RUN digits", "did you mean knn?"),
        ("knn:3 RUN digits", "knn:3"),
        ("knn RUN digits --galery 0.1", "did you mean --gallery?"),
        ("linear RUN digits --ks 5", "--ks is an option of patchloom evaluate knn"),
        ("knn RUN digits --epochs 5", "--epochs is an option of patchloom pretrain and patchloom evaluate finetune"),
        ("linear RUN digits --epochs 5", "--epochs applies to --recipe mae or extrema"),
        ("layers RUN digits --k many", "--k cannot be many"),
        ("knn RUN digit", "did you mean the built-in data digits?"),
        ("knn RUN", "needs DATA"),
    ],
)
def test_what_is_typed_wrongly(tiny_encoder: Path, words: str, near: str, capsys: pytest.CaptureFixture) -> None:
    assert near in failed(capsys, "evaluate", *words.replace("RUN", str(tiny_encoder)).split())


MAE, SHORT = {"recipe": "mae"}, {"epochs": 2}
BAD_OPTIONS = {
    "svm": [({}, "no protocol svm")],
    "knn": [
        ({"device": "abacus"}, "device abacus"),
        ({"max_train": 1}, "--max_train must be 2 or more"),
        ({"seeds": 0}, "--seeds must be 1 or more"),
        ({"seeds": 2.0}, "--seeds cannot be 2.0"),
        ({"cache": "false"}, "--cache cannot be false"),
        ({"galery": 0.1}, "did you mean --gallery?"),
        ({"gallery": 0.0}, "--gallery must be above 0 and at most 1"),
        ({"gallery": -0.1}, "--gallery must be above 0 and at most 1"),
        ({"gallery": 1.01}, "--gallery must be above 0 and at most 1"),
        ({"pooling": "median"}, "--pooling cannot be median"),
        ({"test_crop": 0.0}, "--test_crop must be"),
        ({"devices": 2}, "one process: leave out --devices 2"),
        ({"accumulate": 2}, "no training steps: leave out --accumulate 2"),
    ],
    "layers": [({"k": 0}, "--k must be 1 or more"), ({"k": 90, "max_train": 100}, "gallery of 80 images")],
    "order": [({"k": 0}, "--k must be 1 or more"), ({"pooling": "instance"}, "--pooling cannot be instance")],
    "linear": [
        (SHORT, "--epochs applies to --recipe mae or extrema"),
        ({"control": False}, "--control applies to --recipe mae or extrema"),
        ({"devices": 2}, "--recipe logistic is for one process"),
        ({"recipe": "droppos"}, "choose one of logistic, mae, extrema"),
        ({"recipe": "extrema"}, "no module beside it for instance features"),
        (MAE | {"accumulate": 2}, "--accumulate has no effect"),
        (MAE | {"pooling": "both"}, "--pooling both applies to --recipe logistic"),
        (MAE | {"pooling": "prefix"}, "--pooling prefix applies to --recipe logistic"),
        (MAE | {"momentum": 1.5}, "--momentum must be 0 to 0.9999"),
        (MAE | {"mixup": 0.8}, "there is no option --mixup"),
        (MAE | {"blr": 0.0}, "--blr must be above 0"),
        (MAE | {"batch_size": 1}, "use --batch_size 2 or more"),
    ],
    "attentive": [
        ({"recipe": "mae"}, "choose one of small, ep"),
        ({"queries": 7}, "--queries and --reduce that divide"),
        ({"accumulate": 2}, "--accumulate has no effect"),
        ({"form": "cross", "reduce": 2}, "leave out --reduce"),
    ],
    "regress": [
        ({}, "needs --column: give a table"),
        ({"column": "age"}, "digits has no column age"),
        ({"column": "age", "accumulate": 2}, "no training steps: leave out --accumulate 2"),
    ],
    "blocks:0": [(SHORT, "blocks:0 trains no block")],
    "blocks:2": [({"layer_decay": 0.5}, "--layer_decay has no effect")],
    "few-shot": [
        ({"method": "linear", "devices": 2}, "--method linear is for one process"),
        *(
            ({"method": "linear", **option}, f"--{next(iter(option))}.* applies to --method finetune")
            for option in (SHORT, {"head_on": "projection"}, MAE, {"positions": "none"})
        ),
        ({"head_on": "projection"}, "task mae saved no projection"),
    ],
    "finetune": [
        ({"max_train": 9}, "too few for 10 classes"),
        ({"devices": 0}, "--devices must be 1 or more"),
        ({"positions": "rotary"}, "--positions cannot be rotary"),
        ({"control": "no"}, "--control cannot be no"),
        ({"from_scratch": True, "out": "here"}, "--from_scratch saves no classifier"),
        ({"blr": []}, "--blr has no rate"),
        ({"blr": [1e-3, -1.0]}, "--blr must be"),
        ({"recipe": "dino"}, "no recipe dino"),
        ({"out": "here", "seeds": 2}, "--out names one file"),
        ({"train_positions": True, "positions": "fixed"}, "--positions fixed .* leave out --train_positions"),
        ({"epochz": 1}, "did you mean --epochs"),
        ({"shift": 0.1}, "--shift is for recordings, and digits holds images"),
        ({"mixup": 0.8, "batch_size": 7}, "use --batch_size 8"),
    ],
}


@pytest.mark.parametrize("protocol", BAD_OPTIONS)
def test_bad_options_are_refused(run: Path, protocol: str) -> None:
    for options, said in BAD_OPTIONS[protocol]:
        assert re.search(said, refusal(evaluate, protocol, run, "digits", **{"device": "cpu", **options}))
    assert [path.name for path in run.iterdir()] == ["encoder.safetensors"]


@pytest.mark.parametrize("protocol", ["knn", "linear", "layers", "order", "finetune"])
def test_what_does_not_go_together(
    run: Path, protocol: str, tmp_path: Path, empty_cache: Path, capsys: pytest.CaptureFixture
) -> None:
    for i in range(8):
        folder = tmp_path / "deep" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{i}.npy", np.full((8, 8, 5), i, np.uint8))
    (tmp_path / "plain").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "plain" / "1.png")
    whole = (run / "encoder.safetensors").read_bytes()
    if protocol != "finetune":
        assert "has 5 channels where 1 are expected" in failed(capsys, "evaluate", protocol, run, tmp_path / "deep")
    assert re.search("has no labels: .* sub-folder", failed(capsys, "evaluate", protocol, run, tmp_path / "plain"))
    strange = save({"a": torch.zeros(1)})
    others = {"half": whole[: len(whole) // 2], "text": b"not weights", "empty": b"", "strange": strange}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
        said = "holds weights alone" if name == "strange" else "cannot be read as encoder weights"
        assert f"{tmp_path / name} {said}" in failed(capsys, "evaluate", protocol, tmp_path / name, "digits")
    assert "there is no encoder at" in failed(capsys, "evaluate", protocol, tmp_path / "deep", "digits")
    assert [path.name for path in run.iterdir()] == ["encoder.safetensors"] and not empty_cache.exists()


@pytest.mark.parametrize(
    ("protocol", "encoder", "options", "said"),
    [
        ("finetune", {"channels": 5}, {}, "1 channel where 5 are expected"),
        ("finetune", {"model": "swin-nano", "size": (32, 32), "p": 4}, {"train_positions": True}, "no position embed"),
        ("blocks:2", {"class_token": False}, {"pooling": "class"}, "no class token .*--pooling mean"),
        ("linear", {"class_token": False}, MAE | {"pooling": "class"}, "no class token .*--pooling mean"),
    ],
)
def test_encoders_that_a_protocol_cannot_take_are_refused(tmp_path: Path, protocol, encoder, options, said) -> None:
    file = write_encoder(tmp_path / "e.safetensors", positions="none", **encoder)
    assert re.search(said, refusal(evaluate, protocol, file, "digits", device="cpu", max_train=40, **options))
