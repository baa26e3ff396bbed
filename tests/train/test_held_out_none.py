"""--held_out 0 trains on all images: nothing is measured, and everything that would need it says so."""

import csv
from pathlib import Path

import numpy as np
import pytest
from killing import SMALL

from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate.protocols import evaluate
from patchloom.look.look import look
from patchloom.report.report import report
from patchloom.runs.folder import RunFolder
from patchloom.runs.held_out import count_seen
from patchloom.train.loop import pretrain

ALL = SMALL | {"epochs": 2, "held_out": 0.0}


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrain(images, "mae", out=tmp_path_factory.mktemp("all") / "run", **ALL).folder


def test_all_images_are_trained_on(run: Path, images: Path) -> None:
    said = (run / "log.txt").read_text()
    assert "60 images to train on, 0 held out: nothing is measured, and there is no verdict" in said
    assert RunFolder(run).read_summary() == "Trained on all 60 images, so nothing was measured on others."
    assert count_seen(run, open_data(images).train) == 60
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert not any(name.startswith(("held_out", "baseline", "knn", "features")) for name in rows[0])
    assert len(rows) > 3 and all(np.isfinite(float(row["loss"])) for row in rows[1:])
    assert not (run / "verdict.yaml").exists() and (run / "encoder.safetensors").is_file()
    assert pretrain(images, "mae", out=run, **ALL).plain()["verdict"] is None  # finished: nothing is done again


def test_whole_groups(images: Path, tmp_path: Path) -> None:
    run = pretrain(images, "mae", out=tmp_path / "run", group="parent", **ALL).folder
    assert "60 images to train on, 0 held out" in (run / "log.txt").read_text()


def test_an_interrupted_run_goes_on(run: Path, images: Path, tmp_path: Path) -> None:
    first = pretrain(images, "mae", out=tmp_path / "run", **ALL).folder
    for name in ("summary.txt", "encoder.safetensors"):
        (first / name).unlink()
    again = pretrain(images, "mae", out=first, **ALL)
    assert "Trained on all 60 images" in again.summary
    assert (first / "encoder.safetensors").read_bytes()[-1000:] == (run / "encoder.safetensors").read_bytes()[-1000:]


def test_what_needs_held_out_images_says_so(run: Path, images: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="was trained on all of its images .* as in patchloom look RUN IMAGES"):
        look(run)
    look(run, "shapes", images=4)
    page = report(run, out=tmp_path / "page.html").read_text("utf-8")
    assert "No images were held out (--held_out 0)" in page
    with pytest.raises(PatchloomError, match="images: leave out --patience or --held_out 0"):
        pretrain(images, "mae", out=tmp_path / "other", patience=2, **ALL)
    with pytest.raises(PatchloomError, match="--held_out must be a fraction between 0 and 1, or 0, not -0.1"):
        pretrain(images, "mae", out=tmp_path / "other", **SMALL | {"held_out": -0.1})
    knn = evaluate("knn", run, images, device="cpu", ks=(5,), pooling="mean")
    assert "12 of those 12 images were in pre-training" in knn.protocol


def test_a_run_that_begins_with_it_knows_what_it_saw(run: Path, images: Path, tmp_path: Path) -> None:
    after = pretrain(images, "mae", out=tmp_path / "run", **SMALL | {"epochs": 1, "from_run": str(run)}).folder
    assert RunFolder(after).read_data()["held_out_doubt"] == "trained"
