"""Measures without labels: rows beside their controls, which no label, batch size or other encoder changes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from spoken import Tones, encoder_of_sound
from swins import spec_of

from patchloom.cli import main
from patchloom.data.source import Data
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import settings
from patchloom.evaluate.features import extract
from patchloom.evaluate.label_free import (
    ALPHA,
    AREAS,
    LIDAR,
    MEASURES,
    RANKME,
    SHARES,
    drawn_images,
    label_free_rows,
    overlap_measure,
    own_crop,
    rankme,
)
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.results import Report
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.build import build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder, untrained_twin

ON = EvalSettings(device="cpu", workers=0)


def values(report: Report, encoder: str) -> dict[str, float]:
    return {row.settings["measure"]: row.value for row in report.rows if row.encoder == encoder}


@pytest.fixture(scope="module")
def report(tiny_encoder: Path) -> Report:
    return evaluate("label-free", tiny_encoder, "digits", device="cpu", images=100)


def test_the_whole_of_it_on_digits(report: Report) -> None:
    assert tuple(values(report, "tiny")) == tuple(values(report, "untrained")) == MEASURES
    assert tuple(values(report, "raw pixels")) == tuple(map(own_crop, AREAS))
    chances = dict.fromkeys(map(own_crop, AREAS), 1 / 100) | dict.fromkeys(map(overlap_measure, SHARES), 10 / 99)
    assert values(report, "chance") == pytest.approx(chances)
    for row in report.rows:
        if row.unit == "%" and row.encoder != "chance":
            assert 0 <= row.low <= row.value <= row.high <= 1
            if row.right is not None:  # of crops, which weights at random find as well
                assert row.low > chances[row.settings["measure"]]
        else:
            assert row.low == row.value == row.high
    ours = values(report, "tiny")
    assert 1 < ours[RANKME] < 32 and 1 < ours[LIDAR] < 32 and ours[ALPHA] > 0
    # the less is seen, the less is known again
    for names in (map(own_crop, AREAS), map(overlap_measure, SHARES)):
        shares = [ours[name] for name in names]
        assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    assert [row.encoder for row in report.quoted] == ["tiny", "untrained", "raw pixels"]
    said = " ".join(report.text(200).split())
    assert report.n_test == 100 and "100 of 360 test images were drawn" in said
    assert re.search(r"the untrained one [\[(]", said) and re.search(r"raw pixels [\[(]", said)


def test_the_rows_are_those_of_the_function_and_of_what_extract_gives(report: Report, tiny_encoder: Path) -> None:
    vit, card = load_encoder_file(tiny_encoder)
    test = open_data("digits").test
    rows = label_free_rows("tiny", vit, card, test, ON, images=100)
    assert rows == [row for row in report.rows if row.encoder == "tiny"]
    twin = label_free_rows("untrained", untrained_twin(card, seed=0)[0], card, test, ON, images=100)
    assert twin == [row for row in report.rows if row.encoder == "untrained"]
    some = drawn_images(test, 100, 0)
    assert values(report, "tiny")[RANKME] == rankme(extract(vit, card, some, device="cpu").pooled("mean"))


def test_neither_labels_nor_the_batch_size_count_and_the_seed_does(tiny_encoder: Path) -> None:
    vit, card = load_encoder_file(tiny_encoder)
    test = open_data("digits").test.subset(range(60))
    rows = label_free_rows("tiny", vit, card, test, ON)
    test.labels = None
    for row, other in zip(
        rows, label_free_rows("tiny", vit, card, test, EvalSettings(device="cpu", batch_size=7)), strict=True
    ):
        assert row.value == pytest.approx(other.value, rel=1e-4) and row.settings == other.settings
    other = label_free_rows("tiny", vit, card, test, EvalSettings(device="cpu", seed=1))
    assert rows[0].value == other[0].value  # the same 60 whole images
    assert all(row.value != again.value for row, again in zip(rows[2:], other[2:], strict=True) if row.value < 0.9)


def test_what_cannot_be_read_is_left_out(tiny_encoder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(40):
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f"{i:02}.png")
    (tmp_path / "20.png").write_bytes(b"broken")
    vit, card = load_encoder_file(tiny_encoder)
    rows = label_free_rows("tiny", vit, card, open_data(str(tmp_path)).train, ON)
    assert {len(row.right) for row in rows if row.right is not None} == {39}
    assert {row.settings["measure"]: row.value for row in rows}[own_crop(0.9)] > 0.5  # crops and images still agree


def test_recordings_have_no_crops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(Tones(4), Tones(12, first=1000)))
    report = evaluate("label-free", encoder_of_sound(tmp_path / "ear"), "tones", device="cpu")
    assert (
        tuple(values(report, "ear"))
        == tuple(values(report, "untrained"))
        == (RANKME, ALPHA, *map(overlap_measure, SHARES))
    )
    assert tuple(values(report, "chance")) == tuple(map(overlap_measure, SHARES))
    said = " ".join(report.text(200).split())
    assert "a crop of a recording would be a different sound" in said and "on 36 test recordings" in said
    assert not re.search(r"\bimages?\b|pixels", said), said


def test_a_swin_has_no_row_of_patches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec, path = spec_of(channels=1), tmp_path / "swin.safetensors"
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.3,), (0.37,), "mae", "windows"), path)
    report = evaluate("label-free", path, "digits", device="cpu", images=40)
    assert tuple(values(report, "windows")) == (RANKME, ALPHA, LIDAR, *map(own_crop, AREAS))
    assert "a Swin cannot leave out any of its patches" in " ".join(report.text(200).split())


def test_too_few_images_are_refused(tiny_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(PatchloomError, match="31 test images of digits are too few .* 32 or more"):
        evaluate("label-free", tiny_encoder, "digits", device="cpu", images=31)
    for i in range(34):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / f"{i}.png")
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(b"broken")
    vit, card = load_encoder_file(tiny_encoder)
    with pytest.raises(PatchloomError, match="30 test images of .* are too few"):
        label_free_rows("tiny", vit, card, open_data(str(tmp_path)).train, ON)
    assert main(["evaluate", "label-free", str(tiny_encoder), "digits", "--images", "5"]) == 2
    assert "5 test images of digits are too few" in capsys.readouterr().err
