"""A classifier's table and its page of the least certain images, and classifiers made of probes."""

import csv
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from refusing import refusal
from running import csv_rows

import patchloom
from patchloom import predict
from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.evaluate.classification import predict_classes
from patchloom.evaluate.classifier import (
    Calibration,
    Classifier,
    ClassifierCard,
    calibrate,
    calibration_error,
    load_classifier,
    save_classifier,
)
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.nets.heads import InstanceHead, Stem
from patchloom.predict import class_table

SIZES = {"embed_dim": 16, "depth": 2, "num_heads": 2}
CLASSES = ('a "cat"', "dog, wild", "fish")
TEMPERATURE = Calibration(2.0, 30, 0.5, 0.4, 0.2, 0.1)


def a_classifier(path: Path, calibrated: bool = True, channels: int = 3, size: int = 16) -> Classifier:
    torch.manual_seed(0)
    spec = EncoderSpec("nano", (size, size), 8, channels, options=SIZES)
    card = EncoderCard(spec, (0.5,) * channels, (0.25,) * channels, "mae", "small")
    model = Classifier(build_encoder(spec), 3, "mean").eval()
    torch.nn.init.normal_(model.head.weight)
    calibration = TEMPERATURE.plain() if calibrated else {}
    about = ("keep", "mean", CLASSES, "photos", "0" * 16, 0, {})
    save_classifier(model, ClassifierCard(card, *about, calibration=calibration), path)
    return model


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i, name in enumerate(["b,1.png", 'q"2.png', "deep.png", "line\nbreak.png"]):
        pixels = np.random.default_rng(i).integers(0, 256, (24, 20, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "broken.jpg").write_bytes(b"no image")
    return folder


def test_the_table_has_the_calibrated_probabilities_of_every_image(photos, tmp_path, capsys):
    model = a_classifier(tmp_path / "run" / "finetuned" / "photos-small-0.safetensors")
    words = ["predict", str(tmp_path / "run"), str(photos), "--out", str(tmp_path / "out"), "--pictures", "2"]
    assert main([*words, "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for one in ("broken.jpg", "of 4 images", "the 2 least certain", "by the temperature 2, fitted to 30 validation"):
        assert one in said
    rows = csv_rows(tmp_path / "out" / "predictions.csv")
    assert {row["path"] for row in rows} == {path.name for path in photos.glob("*.png")}
    source = open_data(photos).train
    good = [i for i in range(len(source)) if source.place(i) != "broken.jpg"]
    images = torch.stack([source.read(i) for i in good])[:, :, 2:22] / 255  # the largest square
    resized = torch.nn.functional.interpolate(images, (16, 16), mode="bicubic", antialias=True).clamp(0, 1)
    with torch.inference_mode():
        expected = (model((resized - 0.5) / 0.25) / 2).softmax(1)
    found = torch.tensor([[float(row[f"p_{name}"]) for name in CLASSES] for row in rows])
    assert [row["path"] for row in rows] == [source.place(i) for i in good]
    assert (found - expected).abs().max() < 0.01  # pixels of 8 bits are rounded
    for row, own in zip(rows, found, strict=True):
        assert row["class"] == CLASSES[int(own.argmax())] and float(row["confidence"]) == pytest.approx(
            own.max().item()
        )
    page = (tmp_path / "out" / "least-certain.html").read_text()
    least = sorted(rows, key=lambda row: float(row["confidence"]))[:2]
    paths = re.findall(r'alt="([^"]+)"', page)
    assert [path.replace("&#34;", '"') for path in paths] == [row["path"] for row in least]
    assert page.count("data:image/jpeg;base64,") == 2 and "a &#34;cat&#34;" in page


def test_top_keeps_the_most_probable_classes():
    found = class_table(["a", "b"], torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]]), CLASSES, top=2)
    head, *rows = csv.reader(io.StringIO(found))
    assert head == ["path", "class", "confidence", "class_2", "confidence_2"]
    assert rows == [
        ["a", "dog, wild", "0.500000", "fish", "0.300000"],
        ["b", 'a "cat"', "0.700000", "dog, wild", "0.200000"],
    ]


def test_an_uncalibrated_classifier_says_so_and_pages_are_left_out(photos, tmp_path):
    path = tmp_path / "plain.safetensors"
    a_classifier(path, calibrated=False)
    done = predict(path, photos, out=tmp_path / "out", pictures=0, top=1)
    assert done.kind == "classify" and done.calibration is None and "not calibrated" in done.sentences()[-1]
    assert not (tmp_path / "out" / "least-certain.html").exists()
    assert csv_rows(tmp_path / "out" / "predictions.csv")[0].keys() == {"path", "class", "confidence"}
    assert sum(done.counts.values()) == done.images == 4
    assert "--top 4 is more than the 3 classes" in refusal(predict, path, photos, out=tmp_path / "no", top=4)
    assert "--top must be 1 or more" in refusal(predict, path, photos, out=tmp_path / "no", top=0)


def test_other_verbs_say_what_a_classifier_is(photos, tmp_path):
    path = tmp_path / "finetuned" / "plain.safetensors"
    a_classifier(path)
    said = refusal(patchloom.embed, path, photos, to=tmp_path / "a.npz")
    assert "is a classifier" in said and "patchloom predict" in said
    assert patchloom.load_classifier(path)[1].classes == CLASSES


@pytest.fixture
def run(tmp_path: Path) -> Path:
    spec = EncoderSpec("nano", (8, 8), 4, 1, options=SIZES)
    torch.manual_seed(0)
    card = EncoderCard(spec, (0.5,), (0.25,), "mae", "small")
    save_encoder(build_encoder(spec), card, tmp_path / "run" / "encoder.safetensors")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "options", [{"pooling": "mean"}, {"pooling": "both", "last_norm": False}, {"pooling": "class", "test_crop": 0.875}]
)
def test_a_saved_probe_is_the_probe(run, options):
    report = evaluate("linear", run, "digits", device="cpu", save=True, **options)
    model, card = load_classifier(run / "probed" / "digits-linear-0.safetensors")
    data = open_data("digits")
    found = predict_classes(model, data.test, card.encoder, EvalSettings(device="cpu"), test_crop=card.test_crop)
    assert abs(found.accuracy() - report.results[0].value) <= 1 / len(data.test)  # a tie may round to another class
    assert card.pooling == options["pooling"] and card.calibrated is not None and card.calibrated.images == 287
    assert card.calibrated.nll <= card.calibrated.nll_before


def test_what_cannot_be_saved_is_refused(run):
    said = refusal(evaluate, "linear", run, "digits", recipe="mae", save=True)
    assert "--save and --out apply to --recipe logistic only" in said
    assert "has no folder" in refusal(evaluate, "linear", "timm:vit_tiny_patch16_224", "digits", save=True)
    assert "use --save true" in refusal(evaluate, "linear", run, "digits", out="a.safetensors", seeds=2)


@pytest.mark.parametrize("validation", [0.15, 0.0])
def test_finetune_fits_the_temperature_to_what_it_holds_out(run, capsys, validation):
    quick = {"epochs": 1, "max_train": 80, "control": False, "device": "cpu"}
    evaluate("finetune", run, "digits", validation=validation, **quick)
    model, card = load_classifier(run / "finetuned" / "digits-small-0.safetensors")
    said = " ".join(capsys.readouterr().out.split())
    assert "calibration" not in card.settings
    if not validation:
        assert card.calibrated is None and "not calibrated, as no validation images were held out" in said
        return
    assert card.calibrated is not None and card.calibrated.images == 12
    assert f"{card.calibrated.nll_before:.3f} before" in said and "on the same images" in said


def test_a_classifier_on_an_instance_head_and_a_stem_is_loaded_again(tmp_path):
    spec = EncoderSpec("nano", (16, 16), 8, options=SIZES)
    card = EncoderCard(spec, (0.5,) * 3, (0.25,) * 3, "extrema", "small")
    torch.manual_seed(0)
    head, stem = InstanceHead(16, 2), Stem.fresh(16, 24, "instance")
    model = Classifier(build_encoder(spec), 3, "instance", instance=head, stem=stem).eval()
    about = ("keep", "instance", CLASSES, "photos", "0" * 16, 0, {})
    save_classifier(
        model, ClassifierCard(card, *about, instance=head.sizes, stem=stem.sizes), tmp_path / "a.safetensors"
    )
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(load_classifier(tmp_path / "a.safetensors")[0](images), model(images))


def test_temperatures_and_calibration_errors_by_hand():
    """Of n images with the logits (a, 0), a share p is right: the best a / T is log(p / (1 - p))."""
    logits = torch.tensor([[4.0, 0.0]]).expand(8, 2)
    labels = torch.tensor([0] * 6 + [1] * 2)
    found = calibrate(logits, labels)
    assert found.temperature == pytest.approx(4 / math.log(3), rel=1e-4) and found.images == 8
    assert found.nll == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert found.nll_before == pytest.approx(math.log(1 + math.exp(-4)) + 1)
    assert found.ece == pytest.approx(0, abs=1e-4)
    assert found.ece_before == pytest.approx(1 / (1 + math.exp(-4)) - 0.75)
    assert "NLL 1.018 before, 0.562 after; ECE 23.2 % before, 0.0 % after" in found.sentence()
    found = calibrate(torch.eye(3), torch.arange(3))
    assert 0.02 <= found.temperature < 0.05 and found.nll < 1e-6
    probabilities = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 1])
    # of 5 bins, 0.6 ends the third: accuracy 0.5 of two; the fifth has accuracy 1 and confidence 0.9
    assert calibration_error(probabilities, labels, bins=5) == pytest.approx(0.5 * 0.1 + 0.5 * 0.1)


def test_a_calibration_of_a_file_is_checked():
    found = calibrate(torch.eye(3), torch.tensor([0, 1, 1]))
    assert Calibration.of(found.plain()) == found
    for wrong in ({"temperature": 0.0}, {"ece": "high"}, {"images": math.nan}, {"more": 1}):
        with pytest.raises(ValueError):
            Calibration.of(found.plain() | wrong)
    with pytest.raises(ValueError, match="lacks"):
        Calibration.of({"temperature": 1.0})


def test_windows_of_slides_get_a_map_and_a_row_for_each_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a_classifier(tmp_path / "model.safetensors")
    for seed, name in enumerate(("one", "two")):
        pixels = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), np.uint8)
        (tmp_path / "slides").mkdir(exist_ok=True)
        tifffile.imwrite(tmp_path / "slides" / f"{name}.tif", pixels, photometric="rgb")
    words = ["predict", tmp_path / "model.safetensors", f"{tmp_path}/slides@tile=16", "--out", tmp_path / "out"]
    assert main([str(word) for word in words]) == 0
    assert "files.csv has their means for 2 files" in " ".join(capsys.readouterr().out.split())
    windows, files = (csv_rows(tmp_path / "out" / f"{name}.csv") for name in ("predictions", "files"))
    assert len(windows) == 2 * 12 and [row["path"] for row in files] == ["one.tif", "two.tif"]
    column = "p_fish"
    own = [float(row[column]) for row in windows if row["path"].startswith("two.tif#")]
    assert float(files[1][column]) == pytest.approx(np.mean(own), abs=2e-6)
    found = tifffile.imread(tmp_path / "out" / "maps" / "two.tif")
    assert found.shape == (3, 3, 4) and np.abs(found[2].ravel() - own).max() < 1e-6
    assert np.abs(found.sum(0) - 1).max() < 1e-5


def test_slices_get_a_row_for_each_file_and_no_map(tmp_path: Path) -> None:
    a_classifier(tmp_path / "model.safetensors", channels=1)
    stack = np.random.default_rng(0).integers(0, 65536, (5, 20, 24), np.uint16)
    tifffile.imwrite(tmp_path / "stack.tif", stack, imagej=True, metadata={"axes": "ZYX"})
    found = predict(tmp_path / "model.safetensors", f"{tmp_path}/stack.tif@slices=1", out=tmp_path / "out")
    assert (found.images, found.files, found.maps) == (5, 1, 0) and not (tmp_path / "out" / "maps").exists()
    assert len((tmp_path / "out" / "files.csv").read_text().splitlines()) == 2
