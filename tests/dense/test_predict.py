"""predict writes label maps and objects that belong to the images, and nothing over what others wrote."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_models import CLASSES, DETECTOR, SEGMENTER, SIZES, a_model
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import patchloom
from patchloom.cli import main
from patchloom.data.decode import read_image
from patchloom.data.sources.open import open_data
from patchloom.dense.annotations.boxes import category_ids
from patchloom.dense.annotations.detection import open_boxes
from patchloom.dense.checkpoint import load_dense, save_dense
from patchloom.dense.metrics import DetectedObjects, average_precision, run_lengths
from patchloom.dense.pictures import class_colours
from patchloom.dense.predict import Predictions, coco_entries, label_png, name_images
from patchloom.dense.segmenter import Segmenter
from patchloom.dense.windows import detect_image, segment_image
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import Classifier, ClassifierCard, save_classifier
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.nets.finetune import at_size


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Four images of several sizes: two of one name in different formats, one turned by EXIF; and one that is none."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    (folder / "deep").mkdir()
    exif = Image.Exif()
    exif[274] = 6  # to be turned
    for name, size, about in (
        ("a.png", (40, 50), {}),
        ("a.jpg", (32, 32), {}),
        ("deep/b.jpg", (40, 64), {"exif": exif}),
    ):
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / name, **about)
    Image.fromarray(rng.integers(0, 256, (33, 48), np.uint8)).save(folder / "grey.png")
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


def test_label_maps_belong_to_their_images(segmenter, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(segmenter), str(photos), "--pictures", "2", "--device", "cpu"]) == 0
    said, out = capsys.readouterr().out, tmp_path / "predictions" / photos.name
    assert "4 label maps are in" in said and "The first 2 are drawn" in said and "Of all pixels: " in said
    assert "1 images could not be read" in said and "broken.jpg" in said
    maps = sorted(str(path.relative_to(out / "labels")) for path in out.rglob("labels/**/*.png"))
    assert maps == ["a.jpg.png", "a.png.png", "deep/b.png", "grey.png"]
    assert len([*out.rglob("pictures/**/*.png")]) == 2
    assert (out / "classes.txt").read_text().split() == list(CLASSES)
    model, card = load_dense(segmenter)
    image = read_image(photos / "deep" / "b.jpg")
    assert image.shape == (3, 64, 40)  # upright
    expected = segment_image(model, image, card.encoder.mean, card.encoder.std, card.side)
    with Image.open(out / "labels" / "deep" / "b.png") as page:
        assert page.mode == "P" and np.array_equal(np.asarray(page), expected)
        assert np.array_equal(np.array(page.getpalette()[:9]).reshape(3, 3), class_colours(3))


def test_maps_have_the_numbers_of_the_maps_that_were_learnt(segmenter, photos, tmp_path):
    model, card = load_dense(segmenter)
    save_dense(model, replace(card, ids=(0, 7, 255)), tmp_path / "numbered.safetensors")
    patchloom.predict(tmp_path / "numbered.safetensors", photos / "a.png", out=tmp_path / "out", pictures=0)
    patchloom.predict(segmenter, photos / "a.png", out=tmp_path / "plain", pictures=0)
    assert (tmp_path / "out" / "classes.txt").read_text().splitlines() == [
        f"{i} {name}" for i, name in zip((0, 7, 255), CLASSES, strict=True)
    ]
    found, plain = (Image.open(tmp_path / one / "labels" / "a.png") for one in ("out", "plain"))
    assert np.array_equal(np.asarray(found), np.array([0, 7, 255])[np.asarray(plain)])
    assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(plain.convert("RGB")))


def test_the_same_again_is_written_again_and_nothing_else_is_overwritten(segmenter, detector, photos, tmp_path):
    first = patchloom.predict(segmenter, photos / "a.png", out=tmp_path / "out", pictures=0)
    assert isinstance(first, Predictions) and (first.images, first.pictures) == (1, 0)
    assert sum(first.counts.values()) == 40 * 50 and [*first.counts.values()] == sorted(first.counts.values())[::-1]
    assert patchloom.predict(segmenter, photos / "a.png", out=tmp_path / "out", pictures=0) == first
    for other in ((detector, photos / "a.png"), (segmenter, photos)):
        with pytest.raises(PatchloomError, match="holds other files: give another folder with --out"):
            patchloom.predict(*other, out=tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    with pytest.raises(PatchloomError, match="holds other files"):
        patchloom.predict(segmenter, photos, out=tmp_path / "taken")
    assert [one.name for one in (tmp_path / "taken").iterdir()] == ["mine.txt"]


def noise(path: Path, seed: int = 0) -> None:
    """An image of 32 x 32 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)).save(path)


def maps_in(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out / "labels")) for path in (out / "labels").rglob("*.png"))


def test_images_of_several_folders_never_overwrite_each_other(segmenter, detector, tmp_path):
    for number, name in enumerate(["train/a.jpg", "train/a.png", "train/b.png", "test/a.png", "test/c.png"]):
        noise(tmp_path / "parted" / name, number)
    for name in ("a.png", "a.jpg.png", "x/A.png"):
        noise(tmp_path / "other" / name)
    done = patchloom.predict(segmenter, tmp_path / "parted", out=tmp_path / "one", pictures="all")
    expected = ["test/a.png", "test/c.png", "train/a.jpg.png", "train/a.png.png", "train/b.png"]
    assert maps_in(tmp_path / "one") == expected and done.images == 5
    assert len([*(tmp_path / "one" / "pictures").rglob("*.png")]) == 5
    folders = [tmp_path / "parted" / "test", tmp_path / "other"]
    done = patchloom.predict(segmenter, folders, out=tmp_path / "two", pictures=0)
    assert len(maps_in(tmp_path / "two")) == done.images == 5
    assert "parted/test/a.png" in maps_in(tmp_path / "two")
    patchloom.predict(detector, tmp_path / "parted", out=tmp_path / "boxes", pictures=0)
    names = [one["file_name"] for one in json.loads((tmp_path / "boxes" / "detections.json").read_text())["images"]]
    assert len({*names}) == 5 and "test/a.png" in names


def test_names_that_meet_are_numbered(tmp_path):
    for name in ("a.jpg", "a.png", "a.jpg.png", "b/c.png", "B/C.jpg"):
        noise(tmp_path / "images" / name)
    (tmp_path / "list.txt").write_text("images/a.png\n../images/a.png\n")
    named = name_images([open_data(tmp_path / "images").train])
    assert len({one.out.casefold() for one in named}) == 5
    source = open_data(tmp_path / "images").train
    twice = name_images([source, source])  # such as a shard of each of two places
    assert len({one.out.casefold() for one in twice}) == len({one.place for one in twice}) == 10


def test_predictions_of_images_that_are_gone_do_not_stay_and_nothing_else_goes(segmenter, tmp_path):
    for number, name in enumerate("abc"):
        noise(tmp_path / "images" / f"{name}.png", number)
    out = tmp_path / "out"
    patchloom.predict(segmenter, tmp_path / "images", out=out)
    (out / "labels" / "mine.png").write_bytes(b"mine")
    (tmp_path / "images" / "b.png").unlink()
    done = patchloom.predict(segmenter, tmp_path / "images", out=out)
    assert maps_in(out) == ["a.png", "c.png", "mine.png"] and "1 label maps" in done.notes[-1]
    assert not (out / "pictures" / "b.png").exists()
    noise(tmp_path / "images" / "mine.png")  # whose label map would replace what predict did not write
    with pytest.raises(PatchloomError, match="other files"):
        patchloom.predict(segmenter, tmp_path / "images", out=out)
    record = json.loads((out / "predicted-by.json").read_text())
    record["files"] += ["../images/a.png", "labels/../../images/c.png"]
    (out / "predicted-by.json").write_text(json.dumps(record))
    (tmp_path / "images" / "mine.png").unlink()
    patchloom.predict(segmenter, tmp_path / "images", out=out)
    assert {one.name for one in (tmp_path / "images").iterdir()} == {"a.png", "c.png"}


def test_objects_are_cocos(detector, photos, tmp_path):
    done = patchloom.predict(detector, photos, out=tmp_path / "out", score=0.3, pictures="all")
    found = COCO(tmp_path / "out" / "detections.json")
    assert {one["file_name"] for one in found.imgs.values()} == {"a.jpg", "a.png", "deep/b.jpg", "grey.png"}
    assert [one["name"] for one in found.loadCats(found.getCatIds())] == list(CLASSES)
    assert sum(done.counts.values()) == len(found.anns) and done.pictures == 4
    assert len([*(tmp_path / "out" / "pictures").rglob("*.png")]) == 4
    model, card = load_dense(detector)
    image = read_image(photos / "a.png")
    expected = detect_image(model, image, card.encoder.mean, card.encoder.std, score=0.3)
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


def test_sentences():
    counts = {"road": 700, "sky": 200, "tree": 100}
    done = Predictions("segment", Path("out"), 3, counts, 0, 0.5)
    assert done.sentences()[1] == "Of all pixels: road 70.0 %, sky 20.0 % and tree 10.0 %."
    many = {f"c{i}": 10 for i in range(12)}
    assert Predictions("segment", Path("out"), 3, many, 0, 0.5).sentences()[1].endswith("and 4 other classes.")
    done = Predictions("detect", Path("out"), 3, {}, 0, 0.5)
    assert done.sentences() == ["out/detections.json has 0 objects with a score of at least 0.5 in 3 images."]


def test_what_is_no_model_is_told_what_makes_one(segmenter, photos, tmp_path):
    model, card = load_dense(segmenter)
    save_encoder(model.maps.encoder, card.encoder, tmp_path / "run" / "encoder.safetensors")
    makes = r"patchloom evaluate segment {} LABELLED --save true \(or detect\) makes a model of it"
    for given in (tmp_path / "run", tmp_path / "run" / "encoder.safetensors"):
        with pytest.raises(PatchloomError, match=makes.format(given)):
            patchloom.predict(given, photos, out=tmp_path / "out")
    save_dense(model, card, tmp_path / "run" / "segmented" / "photos-0.safetensors")
    with pytest.raises(PatchloomError, match="give one of its models, .*photos-0.safetensors"):
        patchloom.predict(tmp_path / "run", photos, out=tmp_path / "out")
    with pytest.raises(PatchloomError, match="timm:vit_tiny is an encoder"):
        patchloom.predict("timm:vit_tiny", photos, out=tmp_path / "out")
    with pytest.raises(PatchloomError, match="could be read, beginning with .*broken.jpg"):
        patchloom.predict(segmenter, photos / "broken.jpg", out=tmp_path / "out")
    np.save(tmp_path / "five.npy", np.zeros((32, 32, 5), np.uint8))
    with pytest.raises(PatchloomError, match="five.npy has 5 channels where 3 are expected"):
        patchloom.predict(segmenter, tmp_path / "five.npy", out=tmp_path / "five")


def test_a_classifier_is_refused_with_a_function_that_there_is(photos, tmp_path):
    card = EncoderCard(EncoderSpec("nano", (32, 32), 8, 3, options=SIZES), (0.0,) * 3, (1.0,) * 3, "mae", "a")
    model = Classifier(build_encoder(card.spec), 2, "mean")
    path = tmp_path / "run" / "finetuned" / "photos-small-0.safetensors"
    save_classifier(model, ClassifierCard(card, "keep", "mean", ("a", "b"), "photos", "0" * 16, 0, {}), path)
    for given in (path, tmp_path / "run"):
        with pytest.raises(PatchloomError, match="a classifier, and predict takes segmenters and detectors") as said:
            patchloom.predict(given, photos, out=tmp_path / "out")
        module, name, file = re.search(r"(patchloom[.\w]+)\.(\w+)\('(.+)'\)", str(said.value)).groups()
        assert getattr(importlib.import_module(module), name)(file)[1].classes == ("a", "b")


def test_a_model_of_grey_images_says_that_it_drops_colours(photos, tmp_path):
    spec = EncoderSpec("nano", (32, 32), 8, 1, positions="sincos", options=SIZES)
    about = EncoderCard(spec, (0.5,), (0.25,), "mae", "grey")
    net = Segmenter(at_size(build_encoder(spec), about, (32, 32), "learned"), 3, **SEGMENTER)
    _, card = a_model("segment", (32, 32), **SEGMENTER)
    save_dense(net, replace(card, encoder=about), tmp_path / "grey.safetensors")
    told = [
        "colours are dropped"
        in " ".join(patchloom.predict(tmp_path / "grey.safetensors", data, out=tmp_path / out).notes)
        for data, out in ((photos, "colour"), (photos / "grey.png", "grey"))
    ]
    assert told == [True, False]


IDS = (3, 17, 900_000)  # of the categories


def annotated(root: Path, file: str, images: dict[str, int], boxes: dict[int, list] | None = None) -> Path:
    """Write images by their paths and ids, and a COCO JSON file with the names below its part's folder."""
    for name, number in images.items():
        noise(root / name, number)
    objects = [(number, box) for number, some in (boxes or {}).items() for box in some]
    content = {
        "images": [
            {"id": number, "file_name": name.rpartition("/")[2], "width": 32, "height": 32}
            for name, number in images.items()
        ],
        "categories": [{"id": number, "name": name} for number, name in zip(IDS, CLASSES, strict=True)],
        "annotations": [
            {"id": i + 1, "image_id": number, "category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            for i, (number, (label, *box)) in enumerate(objects)
        ],
    }
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(json.dumps(content))
    return root / file


@pytest.mark.parametrize("given", ["coco", "coco/val2017", "coco/*/*.png"])
def test_pycocotools_finds_the_same_precision_by_the_own_annotations(detector, tmp_path, given):
    """The detections of a model as truth, some of them shifted: pycocotools has to find the same AP as evaluate."""
    numbers = dict(zip((f"val2017/{i:03}.png" for i in range(6)), (900, 42, 7, 8, 5, 301), strict=True))
    truth = annotated(tmp_path / "coco", "annotations/instances_val2017.json", numbers)
    model, card = load_dense(detector)
    save_dense(model, replace(card, ids=IDS), tmp_path / "own.safetensors")
    answers = [
        detect_image(model, read_image(tmp_path / "coco" / name), card.encoder.mean, card.encoder.std, score=0.0)
        for name in numbers
    ]
    boxes = {
        number: [
            [IDS[label], x0 + i % 3, y0, x1 - x0, y1 - y0]
            for i, (label, (x0, y0, x1, y1)) in enumerate(
                zip(answer.labels.tolist(), answer.boxes.tolist(), strict=True)
            )
            if i % 4
        ]
        for number, answer in zip(numbers.values(), answers, strict=True)
    }
    annotated(tmp_path / "coco", "annotations/instances_val2017.json", numbers, boxes)
    done = patchloom.predict(
        tmp_path / "own.safetensors", str(tmp_path / given), out=tmp_path / "out", score=0.0, pictures=0
    )
    assert any(f"image ids are those of {truth}" in note for note in done.notes)
    tool = COCO(truth)
    found = json.loads((tmp_path / "out" / "detections.json").read_text())["annotations"]
    scored = COCOeval(tool, tool.loadRes(found), "bbox")
    scored.evaluate(), scored.accumulate(), scored.summarize()
    test = open_boxes(str(truth)).train
    places = {test.images.place(i).rpartition("/")[2]: i for i in range(len(test))}
    assert category_ids(test.subset([0])) == IDS
    images = test.subset([places[name.rpartition("/")[2]] for name in numbers])
    ap = average_precision(images, answers, test.classes, "bbox").ap
    assert 0.05 < ap < 0.95 and scored.stats[0] == pytest.approx(ap, abs=1e-3)


def ids_in(out: Path) -> dict[str, int]:
    return {one["file_name"]: one["id"] for one in json.loads((out / "detections.json").read_text())["images"]}


def test_ids_of_images_that_annotations_do_not_tell(detector, tmp_path):
    annotated(tmp_path, "photos/_annotations.coco.json", {"photos/a.png": 7})
    noise(tmp_path / "photos" / "b.png")
    done = patchloom.predict(detector, tmp_path / "photos", out=tmp_path / "out", score=0.9, pictures=0)
    assert ids_in(tmp_path / "out") == {"a.png": 7, "b.png": 8} and "1 image without one there has" in done.notes[0]
    for part in ("train", "valid"):  # each file counts its own images, as Roboflow's do
        annotated(tmp_path, f"two/{part}/_annotations.coco.json", {f"two/{part}/{part}.png": 0})
    done = patchloom.predict(detector, tmp_path / "two", out=tmp_path / "both", score=0.9, pictures=0)
    assert sorted(ids_in(tmp_path / "both").values()) == [1, 2] and "each separately" in done.notes[-1]
    for part, number in (("train", 5), ("val", 9)):  # with the same names in both
        annotated(tmp_path, f"both/annotations/instances_{part}.json", {f"both/{part}/a.png": number})
    done = patchloom.predict(detector, tmp_path / "both", out=tmp_path / "parts", score=0.9, pictures=0)
    assert ids_in(tmp_path / "parts") == {"train/a.png": 5, "val/a.png": 9} and "instances_val.json" in str(done)
    (tmp_path / "photos" / "_annotations.coco.json").write_text("{")  # broken, and of no use
    patchloom.predict(detector, tmp_path / "photos", out=tmp_path / "none", score=0.9, pictures=0)
    assert ids_in(tmp_path / "none") == {"a.png": 1, "b.png": 2}
