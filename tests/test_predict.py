"""predict writes label maps and objects that belong to the images, and nothing over what others wrote."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_models import CLASSES, DETECTOR, SEGMENTER, SIZES, a_model
from PIL import Image
from pycocotools.coco import COCO
from refusing import refusal

from patchloom import predict
from patchloom.cli import main
from patchloom.data.decode import read_image
from patchloom.data.naming import name_images
from patchloom.data.sources.open import open_data
from patchloom.dense.annotations.boxes import category_ids
from patchloom.dense.annotations.detection import open_boxes
from patchloom.dense.answers import detect_images, segment_image
from patchloom.dense.checkpoint import load_dense, save_dense
from patchloom.dense.metrics import DetectedObjects, run_lengths
from patchloom.dense.pictures import class_colours
from patchloom.dense.segmenter import Segmenter
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.nets.finetune import at_size
from patchloom.predict import Predictions, coco_entries, label_png


def noise(path: Path, seed: int = 0, size: tuple[int, ...] = (32, 32, 3), **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, size, np.uint8)).save(path, **options)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Four images of several sizes: two of one name in different formats, one turned by EXIF; and one that is none."""
    folder = tmp_path_factory.mktemp("photos")
    exif = Image.Exif()
    exif[274] = 6  # to be turned
    noise(folder / "a.png", 0, (40, 50, 3))
    noise(folder / "a.jpg", 1)
    noise(folder / "deep/b.jpg", 2, (40, 64, 3), exif=exif)
    noise(folder / "grey.png", 3, (33, 48))
    (folder / "broken.jpg").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "maps.safetensors"
    save_dense(*a_model("segment", (32, 32), **SEGMENTER), path)
    return path


@pytest.fixture(scope="module")
def detector(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "boxes.safetensors"
    save_dense(*a_model("detect", (64, 64), **DETECTOR), path)
    return path


def maps_in(out: Path, kind: str = "labels") -> list[str]:
    return sorted(str(path.relative_to(out / kind)) for path in (out / kind).rglob("*.png"))


def test_label_maps_belong_to_their_images(segmenter, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(segmenter), str(photos), "--pictures", "2", "--device", "cpu"]) == 0
    said, out = capsys.readouterr().out, tmp_path / "predictions" / photos.name
    for one in ("4 label maps", "The first 2 are drawn", "Of all pixels: ", "1 images could not be read", "broken.jpg"):
        assert one in said
    assert maps_in(out) == ["a.jpg.png", "a.png.png", "deep/b.png", "grey.png"] and len(maps_in(out, "pictures")) == 2
    assert (out / "classes.txt").read_text().split() == list(CLASSES)
    model, card = load_dense(segmenter)
    image = read_image(photos / "deep" / "b.jpg")
    assert image.shape == (3, 64, 40)  # upright
    expected = segment_image(model, image, card.encoder.mean, card.encoder.std, card.side)
    with Image.open(out / "labels" / "deep" / "b.png") as page:
        assert page.mode == "P" and np.array_equal(np.asarray(page), expected)
        assert np.array_equal(np.array(page.getpalette()[:9]).reshape(3, 3), class_colours(3))


def test_maps_have_the_numbers_of_the_training_maps(segmenter, photos, tmp_path):
    model, card = load_dense(segmenter)
    save_dense(model, replace(card, ids=(0, 7, 255)), tmp_path / "numbered.safetensors")
    predict(tmp_path / "numbered.safetensors", photos / "a.png", out=tmp_path / "out", pictures=0)
    predict(segmenter, photos / "a.png", out=tmp_path / "plain", pictures=0)
    assert (tmp_path / "out" / "classes.txt").read_text().splitlines() == ["0 sky", "7 road", "255 tree"]
    found, plain = (Image.open(tmp_path / one / "labels" / "a.png") for one in ("out", "plain"))
    assert np.array_equal(np.asarray(found), np.array([0, 7, 255])[np.asarray(plain)])
    assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(plain.convert("RGB")))


def test_the_same_again_is_written_again_and_nothing_else_is_overwritten(segmenter, detector, photos, tmp_path):
    first = predict(segmenter, photos / "a.png", out=tmp_path / "out", pictures=0)
    assert isinstance(first, Predictions) and (first.images, first.pictures) == (1, 0)
    assert sum(first.counts.values()) == 40 * 50 and [*first.counts.values()] == sorted(first.counts.values())[::-1]
    assert predict(segmenter, photos / "a.png", out=tmp_path / "out", pictures=0) == first
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    for model, data, out in (
        (detector, photos / "a.png", "out"),
        (segmenter, photos, "out"),
        (segmenter, photos, "taken"),
        (segmenter, photos, "taken/mine.txt"),
    ):
        assert "give another folder with --out" in refusal(predict, model, data, out=tmp_path / out)
    assert [one.name for one in (tmp_path / "taken").iterdir()] == ["mine.txt"]


def test_images_of_several_folders_never_overwrite_each_other(segmenter, tmp_path):
    for number, name in enumerate(["train/a.jpg", "train/a.png", "train/b.png", "test/a.png", "test/c.png"]):
        noise(tmp_path / "parted" / name, number)
    for name in ("a.png", "a.jpg.png", "x/A.png"):
        noise(tmp_path / "other" / name)
    done = predict(segmenter, tmp_path / "parted", out=tmp_path / "one", pictures="all")
    expected = ["test/a.png", "test/c.png", "train/a.jpg.png", "train/a.png.png", "train/b.png"]
    assert maps_in(tmp_path / "one") == expected == maps_in(tmp_path / "one", "pictures") and done.images == 5
    done = predict(segmenter, [tmp_path / "parted/test", tmp_path / "other"], out=tmp_path / "two", pictures=0)
    assert len(maps_in(tmp_path / "two")) == done.images == 5 and "parted/test/a.png" in maps_in(tmp_path / "two")


def test_names_that_meet_are_numbered(tmp_path):
    for name in ("a.jpg", "a.png", "a.jpg.png", "b/c.png", "B/C.jpg"):
        noise(tmp_path / "images" / name)
    source = open_data(tmp_path / "images").train
    for sources, n in (([source], 5), ([source, source], 10)):  # such as a shard of each of two places
        named = name_images(sources)
        assert len({one.out.casefold() for one in named}) == len({one.place for one in named}) == n


def test_predictions_of_images_that_are_gone_do_not_stay_and_nothing_else_goes(segmenter, tmp_path):
    images, out = tmp_path / "images", tmp_path / "out"
    for number, name in enumerate("abc"):
        noise(images / f"{name}.png", number)
    predict(segmenter, images, out=out)
    (out / "labels" / "mine.png").write_bytes(b"mine")
    (images / "b.png").unlink()
    done = predict(segmenter, images, out=out)
    assert maps_in(out) == ["a.png", "c.png", "mine.png"] and "1 label maps" in done.notes[-1]
    assert maps_in(out, "pictures") == ["a.png", "c.png"]
    noise(images / "mine.png")  # whose label map would replace what predict did not write
    assert "other files" in refusal(predict, segmenter, images, out=out)
    record = json.loads((out / "predicted-by.json").read_text())
    record["files"] += ["../images/a.png", "labels/../../images/c.png"]
    (out / "predicted-by.json").write_text(json.dumps(record))
    (images / "mine.png").unlink()
    predict(segmenter, images, out=out)
    assert {one.name for one in images.iterdir()} == {"a.png", "c.png"}


def test_objects_are_cocos(detector, photos, tmp_path):
    done = predict(detector, photos, out=tmp_path / "out", score=0.3, pictures="all")
    found = COCO(tmp_path / "out" / "detections.json")
    assert {one["file_name"] for one in found.imgs.values()} == {"a.jpg", "a.png", "deep/b.jpg", "grey.png"}
    assert [one["name"] for one in found.loadCats(found.getCatIds())] == list(CLASSES)
    assert sum(done.counts.values()) == len(found.anns) and done.pictures == 4
    assert len(maps_in(tmp_path / "out", "pictures")) == 4
    model, card = load_dense(detector)
    image = read_image(photos / "a.png")
    ((canvas, fit),) = detect_images(model, [image], card.encoder.mean, card.encoder.std, score=0.3)
    expected = fit.detected(canvas, 0.3)
    (number,) = (i for i, one in found.imgs.items() if one["file_name"] == "a.png")
    assert (found.imgs[number]["height"], found.imgs[number]["width"]) == (40, 50)
    mine = found.loadAnns(found.getAnnIds(imgIds=[number]))
    assert [one["category_id"] - 1 for one in mine] == expected.labels.tolist()
    assert "1 images could not be read" in str(done) and str(tmp_path / "out" / "detections.json") in str(done)


def test_an_object_in_cocos_form():
    masks = torch.zeros(1, 20, 30, dtype=torch.bool)
    masks[0, 4:9, 10:20] = True
    box, about = torch.tensor([[10.0, 4, 20, 9]]), (torch.tensor([2]), torch.tensor([0.75]))
    (entry,) = coco_entries(DetectedObjects(box, *about, run_lengths(masks)), (1, 2, 90))
    counts = entry.pop("segmentation")
    assert entry == {"category_id": 90, "bbox": [10, 4, 10, 5], "score": 0.75, "iscrowd": 0, "area": 50}
    tools = COCO()
    tools.imgs = {1: {"height": 20, "width": 30}}
    assert np.array_equal(tools.annToMask({"image_id": 1, "segmentation": json.loads(json.dumps(counts))}), masks[0])
    (plain,) = coco_entries(DetectedObjects(box, *about), (1, 2, 3))
    assert plain["area"] == 50 and "segmentation" not in plain


def test_more_classes_than_a_palette_has(tmp_path):
    labels = torch.tensor([[0, 300], [255, 256]]).short()
    (tmp_path / "map.png").write_bytes(label_png(labels, range(301)))
    with Image.open(tmp_path / "map.png") as page:
        assert np.asarray(page).tolist() == labels.tolist()


def test_shares_of_pixels_and_numbers_of_objects():
    def last(kind, counts):
        return Predictions(kind, Path("out"), 3, counts, 0, 0.5).sentences()[-1]

    assert last("segment", {"road": 700, "sky": 200, "tree": 100}).endswith("road 70.0 %, sky 20.0 % and tree 10.0 %.")
    assert last("segment", {f"c{i}": 10 for i in range(12)}).endswith("c7 8.3 % and 4 other classes.")
    assert "has 1,007 objects with a score of at least 0.5 in 3 images: cat 1,000 and dog 7" in last(
        "detect", {"cat": 1000, "dog": 7}
    )


def test_files_that_are_no_model_are_refused_with_the_command_that_makes_one(segmenter, photos, tmp_path):
    def said(model, data=photos):
        return refusal(predict, model, data, out=tmp_path / "out")

    model, card = load_dense(segmenter)
    run = tmp_path / "run"
    save_encoder(model.maps.encoder, card.encoder, run / "encoder.safetensors")
    for given in (run, run / "encoder.safetensors"):
        assert f"patchloom evaluate finetune {given} LABELLED" in said(given)
    for name in ("photos-0", "photos-1"):
        save_dense(model, card, run / "segmented" / f"{name}.safetensors")
    assert "has 2 models: give one of them" in said(run) and "photos-1.safetensors" in said(run)
    (run / "segmented" / "photos-1.safetensors").unlink()
    assert predict(run, photos / "a.png", out=tmp_path / "of-run", pictures=0).images == 1
    assert "--top is for classifiers" in refusal(predict, segmenter, photos, top=1)
    assert "timm:vit_tiny is an encoder" in said("timm:vit_tiny")
    assert "broken.jpg" in said(segmenter, photos / "broken.jpg")
    np.save(tmp_path / "five.npy", np.zeros((32, 32, 5), np.uint8))
    said_of_five = refusal(predict, segmenter, tmp_path / "five.npy", out=tmp_path / "five")
    assert "five.npy has 5 channels where 3 are expected" in said_of_five


def test_a_model_of_grey_images_notes_that_it_drops_colours(photos, tmp_path):
    spec = EncoderSpec("nano", (32, 32), 8, 1, positions="sincos", options=SIZES)
    about = EncoderCard(spec, (0.5,), (0.25,), "mae", "grey")
    net = Segmenter(at_size(build_encoder(spec), about, (32, 32), "learned"), 3, **SEGMENTER)
    _, card = a_model("segment", (32, 32), **SEGMENTER)
    save_dense(net, replace(card, encoder=about), tmp_path / "grey.safetensors")
    for data, dropped in ((photos, True), (photos / "grey.png", False)):
        done = predict(tmp_path / "grey.safetensors", data, out=tmp_path / data.name)
        assert ("colours are dropped" in " ".join(done.notes)) == dropped


IDS = (3, 17, 900_000)  # of the categories


def annotated(root: Path, file: str, images: dict[str, int]) -> Path:
    """Write images by their paths and ids, and a COCO JSON file with the names below its part's folder."""
    about = []
    for name, number in images.items():
        noise(root / name, number)
        about.append({"id": number, "file_name": name.rpartition("/")[2], "width": 32, "height": 32})
    categories = [{"id": number, "name": name} for number, name in zip(IDS, CLASSES, strict=True)]
    one = {"id": 1, "image_id": about[0]["id"], "category_id": IDS[0], "bbox": [1, 2, 9, 8]}
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(json.dumps({"images": about, "categories": categories, "annotations": [one]}))
    return root / file


def ids_in(out: Path) -> dict[str, int]:
    return {one["file_name"]: one["id"] for one in json.loads((out / "detections.json").read_text())["images"]}


@pytest.mark.parametrize("given", ["coco", "coco/val2017", "coco/*/*.png"])
def test_ids_are_those_of_the_annotations(detector, tmp_path, given):
    numbers = dict(zip((f"val2017/{i:03}.png" for i in range(6)), (900, 42, 7, 8, 5, 301), strict=True))
    truth = annotated(tmp_path / "coco", "annotations/instances_val2017.json", numbers)
    model, card = load_dense(detector)
    save_dense(
        model, replace(card, ids=category_ids(open_boxes(truth).train.subset([0]))), tmp_path / "own.safetensors"
    )
    out = tmp_path / "out"
    done = predict(tmp_path / "own.safetensors", str(tmp_path / given), out=out, score=0.0, pictures=0)
    assert any(f"image ids are those of {truth}" in note for note in done.notes)
    by_name, expected = ({Path(name).name: number for name, number in ids.items()} for ids in (ids_in(out), numbers))
    assert by_name == expected
    tool = COCO(truth)
    found = json.loads((out / "detections.json").read_text())
    assert {one["id"]: one["name"] for one in found["categories"]} == dict(zip(IDS, CLASSES, strict=True))
    assert len(tool.loadRes(found["annotations"]).anns) == sum(done.counts.values()) > 0
    counts = Counter(one["category_id"] for one in found["annotations"])
    assert {CLASSES[IDS.index(number)]: count for number, count in counts.items()} == done.counts


def test_ids_of_images_without_clear_annotations(detector, tmp_path):
    def predicted(data):
        out = tmp_path / f"out-{len([*tmp_path.iterdir()])}"
        done = predict(detector, tmp_path / data, out=out, score=0.9, pictures=0)
        return ids_in(out), " ".join(done.notes)

    annotated(tmp_path, "photos/_annotations.coco.json", {"photos/a.png": 7})
    noise(tmp_path / "photos" / "b.png")
    ids, notes = predicted("photos")
    assert ids == {"a.png": 7, "b.png": 8} and "1 image without one there" in notes
    (tmp_path / "photos" / "_annotations.coco.json").write_text("{")  # broken, and of no use
    assert predicted("photos")[0] == {"a.png": 1, "b.png": 2}
    for part in ("train", "valid"):  # each file counts its own images, as Roboflow's do
        annotated(tmp_path, f"two/{part}/_annotations.coco.json", {f"two/{part}/{part}.png": 0})
    ids, notes = predicted("two")
    assert sorted(ids.values()) == [1, 2] and "each separately" in notes
    for part, number in (("train", 5), ("val", 9)):  # with the same names in both
        annotated(tmp_path, f"both/annotations/instances_{part}.json", {f"both/{part}/a.png": number})
    ids, notes = predicted("both")
    assert ids == {"train/a.png": 5, "val/a.png": 9} and "instances_val.json" in notes
