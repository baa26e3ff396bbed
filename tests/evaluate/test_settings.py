"""On which images is measured: none that was trained on, and it is said where that cannot be."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.settings import EvalSettings, parts_of
from patchloom.nets.checkpoints.format import save_encoder
from patchloom.runs.encoder import load_encoder
from patchloom.runs.folder import RunFolder
from patchloom.runs.training_set import digest_of_record, no_record, write_record


def draw(folder: Path, numbers: range) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in numbers:
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Two classes of 20 images each, 5 of which lie there twice, one by a link and one in the other class."""
    root = tmp_path / "images"
    for label, first in (("a", 0), ("b", 20)):
        draw(root / label, range(first, first + 20))
    for i in range(3):
        shutil.copy(root / "a" / f"{i}.png", root / "a" / f"copy of {i}.png")
    (root / "b" / "link.png").symlink_to("25.png")
    shutil.copy(root / "a" / "9.png", root / "b" / "9.png")
    return root


@pytest.mark.parametrize("labels", [True, False])
def test_copies_are_on_one_side_of_a_split(labelled: Path, labels: bool) -> None:
    left = set()
    for seed in range(12):
        parts = parts_of(labelled, EvalSettings(seed), labels=labels)
        assert not np.isin(parts.train.contents(), parts.test.contents()).any()
        count = 45 - len(parts.train) - len(parts.test)
        assert (f"{count} exact copies of test images were left out of training." in parts.story) == (count > 0)
        left.add(count)
    assert max(left) > 0


def test_test_images_of_the_datas_own_that_are_trained_on_are_counted(
    tmp_path: Path, tiny_encoder: Path, labelled: Path
) -> None:
    root = tmp_path / "split"
    shutil.copytree(labelled, root / "train")
    for label, first in (("a", 40), ("b", 60)):
        draw(root / "test" / label, range(first, first + 6))
    assert "copies" not in parts_of(root, EvalSettings()).story
    shutil.copy(root / "train" / "a" / "3.png", root / "test" / "a" / "3.png")
    (root / "test" / "b" / "30.png").symlink_to(root / "train" / "b" / "30.png")
    said = "2 of 14 test images are exact copies of training images"
    assert said in parts_of(root, EvalSettings()).story and said in parts_of(root, EvalSettings(), labels=False).story
    assert said in evaluate("knn", tiny_encoder, root, device="cpu").protocol
    # of the images that are used: with these seeds, both, one and none of the two that were copied
    counts = set()
    for seed in range(8):
        parts = parts_of(root, EvalSettings(seed, max_train=20))
        count = int(np.isin(parts.test.contents(), parts.train.contents()).sum())
        assert (f" {count} of 14 test images are exact copies" in parts.story) == (count > 0)
        counts.add(count)
    assert {0, 1} <= counts


def test_test_images_that_were_in_pre_training_are_counted(tmp_path: Path, tiny_encoder: Path, labelled: Path) -> None:
    for label, first in (("a", 40), ("b", 60)):
        draw(tmp_path / "split" / "test" / label, range(first, first + 6))
    shutil.copytree(labelled, tmp_path / "split" / "train")
    test = parts_of(tmp_path / "split", EvalSettings()).test
    vit, card = load_encoder(tiny_encoder)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    split_off = parts_of(tmp_path / "split/train", EvalSettings()).test  # that data has no test images of its own

    def said_of(data: str) -> str:
        return evaluate("knn", run.path, tmp_path / data, device="cpu").protocol

    for known in (0, 5):
        trained_on = np.concatenate([part.contents()[:known] for part in (test, split_off)])
        write_record(no_record().and_trained_on(trained_on, "photos"), run.trained_on)
        save_encoder(vit, replace(card, trained_on=digest_of_record(run.trained_on)), run.encoder)
        said = said_of("split")
        assert (
            (f" {known} of 12 test images were in pre-training" in said) == ("in pre-training" in said) == (known > 0)
        )
        seen = f": 5 of those {len(split_off)} images were in pre-training, without their labels."
        assert (seen if known else ": none of those images were in pre-training.") in said_of("split/train")
    run.trained_on.write_bytes(b"of another encoder")
    assert "were in pre-training" not in said_of("split")
    assert "pre-training may have seen those images, without their labels" in said_of("split/train")
