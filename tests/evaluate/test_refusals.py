"""What is typed wrongly, and what does not go together: one sentence and exit code 2, before anything is written."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.evaluate.protocols import evaluate

PROTOCOLS = ("knn", "linear", "layers")


def failed(capsys: pytest.CaptureFixture, *words) -> str:
    capsys.readouterr()
    assert main(["evaluate", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("patchloom: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("knnn RUN digits", "did you mean knn?"),
        ("layer RUN digits", "did you mean layers?"),
        ("liner RUN digits", "did you mean linear?"),
        ("knn:3 RUN digits", "there is no protocol knn:3"),
        ("knn RUN digits --poolin mean", "did you mean --pooling?"),
        ("knn RUN digits --galery 0.1", "did you mean --gallery?"),
        ("knn RUN digits --seed_s 3", "did you mean --seeds?"),
        ("linear RUN digits --chache false", "did you mean --cache?"),
        ("linear RUN digits --ks 5", "--ks is an option of patchloom evaluate knn"),
        ("knn RUN digits --epochs 5", "--epochs is an option of patchloom pretrain and patchloom evaluate finetune"),
        ("linear RUN digits --mixup 0.8", "--mixup is an option of patchloom evaluate finetune"),
        ("linear RUN digits --epochs 5", "--epochs applies to --recipe mae or extrema"),
        ("layers RUN digits --kk 5", "did you mean --k?"),
        ("layers RUN digits --k 0", "--k must be 1 or more"),
        ("layers RUN digits --k many", "--k cannot be many: it takes a whole number"),
        ("knn RUN digits --gallery 2", "--gallery must be a fraction above 0 and up to 1"),
        ("knn RUN digits --cache perhaps", "--cache cannot be perhaps: it takes true or false"),
        ("knn RUN digits --seeds 0", "--seeds must be 1 or more"),
        ("knn RUN digits --pooling median", "--pooling cannot be median"),
        ("knn RUN digit", "did you mean the built-in data digits?"),
        ("knn RUN", "needs DATA"),
    ],
)
def test_what_is_typed_wrongly(tiny_encoder: Path, words: str, near: str, capsys: pytest.CaptureFixture) -> None:
    assert near in failed(capsys, *words.replace("RUN", str(tiny_encoder)).split())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_does_not_go_together(
    tiny_encoder: Path, protocol: str, tmp_path: Path, empty_cache: Path, capsys: pytest.CaptureFixture
) -> None:
    for i in range(8):
        folder = tmp_path / "deep" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{i}.npy", np.full((8, 8, 5), i, np.uint8))
    (tmp_path / "plain").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "plain" / "1.png")
    run = tmp_path / "run"
    run.mkdir()
    whole = tiny_encoder.read_bytes()
    (run / "encoder.safetensors").write_bytes(whole)
    assert "has 5 channels where 1 are expected" in failed(capsys, protocol, run, tmp_path / "deep")
    labels = f"{tmp_path / 'plain'} has no labels: put the images of each class in a separate sub-folder, or give a "
    labels += "table with a column of labels\n"
    assert failed(capsys, protocol, run, tmp_path / "plain").endswith(labels)
    strange = save({"a": torch.zeros(1)})
    others = {"half": whole[: len(whole) // 2], "text": b"not weights", "empty": b"", "strange": strange}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
        said = "holds weights alone" if name == "strange" else "cannot be read as encoder weights"
        assert f"{tmp_path / name} {said}" in failed(capsys, protocol, tmp_path / name, "digits")
    assert "there is no encoder at" in failed(capsys, protocol, tmp_path / "deep", "digits")
    assert [path.name for path in run.iterdir()] == ["encoder.safetensors"] and not empty_cache.exists()


def test_python_is_as_strict(tiny_encoder: Path) -> None:
    for options, message in (
        ({"cache": "false"}, "--cache cannot be false: it takes true or false"),
        ({"seeds": 2.0}, "--seeds cannot be 2.0: it takes a whole number"),
        ({"galery": 0.1}, "there is no option --galery; did you mean --gallery?"),
    ):
        with pytest.raises(PatchloomError, match=re.escape(message)):
            evaluate("knn", tiny_encoder, "digits", **options)
