"""``predict``: what a trained classifier, segmenter or detector says of images, as files that other programs read."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.arguments import plain_path
from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.naming import NamedImage, name_images
from patchloom.data.notes import count_of
from patchloom.data.source import Source
from patchloom.data.sources.concat import ConcatSource
from patchloom.data.sources.glob import is_single, open_images
from patchloom.data.sources.open import open_data
from patchloom.data.sources.parts import Parts
from patchloom.data.sources.stitching import stitch, write_map
from patchloom.data.stats import input_notes
from patchloom.dense.annotations.coco import image_ids
from patchloom.dense.answers import Pictures, answered, detect_images, segment_images
from patchloom.dense.checkpoint import DenseCard, load_dense
from patchloom.dense.detector import Detector
from patchloom.dense.metrics import DetectedObjects, coco_tool
from patchloom.dense.pictures import class_colours, draw_label_map, draw_objects
from patchloom.dense.segmenter import Segmenter
from patchloom.display import Displayable, Verbatim
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classification import logits_of
from patchloom.evaluate.classifier import (
    Calibration,
    Classifier,
    ClassifierCard,
    describe_calibration,
    load_classifier,
)
from patchloom.evaluate.features import runs_in_bfloat16
from patchloom.evaluate.settings import EvalSettings
from patchloom.look.picture_page import PageItem, PageSection, data_uri, picture_page
from patchloom.nets.checkpoints.format import CLASSIFIER_FORMAT, DENSE_FORMAT, is_model
from patchloom.nets.checkpoints.read import read_metadata
from patchloom.options.declare import verb
from patchloom.options.verbs import Predict
from patchloom.results.evaluation import note_unreadable
from patchloom.runs.folder import data_slug
from patchloom.system.device import float32_products
from patchloom.system.files import make_folder, read_text, write_whole

_BY = "predicted-by.json"
TABLE, PAGE, WHOLE, MAPS = "predictions.csv", "least-certain.html", "files.csv", "maps"
_LISTS = ("classes.txt", "detections.json", TABLE, PAGE, WHOLE)
_WRITTEN = {("labels", ".png"), ("pictures", ".png"), (MAPS, ".tif")}  # folders, and what is in them
_NAMED = 8  # classes in a sentence
_CLASSES_SHOWN = 3  # on the page
_FOLDERS = ("finetuned", "probed", "segmented", "detected")  # of a run's models


@dataclass(frozen=True, repr=False)
class Predictions(Displayable):
    """Result of `predict`.

    Attributes:
        kind: classify, segment or detect.
        out: folder of the predictions.
        images: number of images with a prediction.
        counts: number of images, pixels or objects by class name, the largest first; classes without any are left out.
        pictures: number of pictures drawn, or of images on the page of the least certain.
        score: lowest score of the objects of a detector.
        notes: sentences on skipped images.
        calibration: calibration of a classifier's probabilities; None without one.
        files: number of files whose parts are the images, for a classifier.
        maps: number of maps of windows.
    """

    kind: Literal["classify", "segment", "detect"]
    out: Path
    images: int
    counts: dict[str, int]
    pictures: int
    score: float
    notes: tuple[str, ...] = ()
    calibration: Calibration | None = None
    files: int = 0
    maps: int = 0

    def parts(self, width: int) -> list[str]:
        return [*self.notes, *map(Verbatim, self.sentences())]

    def plain(self) -> dict[str, Any]:
        written = {"classify": TABLE, "segment": "labels", "detect": "detections.json"}[self.kind]
        names = ("kind", "images", "counts", "pictures", "score", "files", "maps")
        values = {name: getattr(self, name) for name in names}
        values["calibration"] = None if self.calibration is None else self.calibration.plain()
        return {"out": str(self.out), "written": str(self.out / written), **values, "notes": [*self.notes]}

    def sentences(self) -> list[str]:
        """Return sentences on the written files and the predictions."""
        if self.kind == "classify":
            page = f" {self.out / PAGE} shows the {self.pictures:,} least certain." if self.pictures else ""
            written = (
                f"{self.out / TABLE} has the class, the confidence and the probabilities of {self.images:,} images."
            )
            calibrated = describe_calibration(self.calibration)
            whole = f" {self.out / WHOLE} has their means for {count_of(self.files, 'file')}." * bool(self.files)
            whole += f" {self.out / MAPS} has {count_of(self.maps, 'map')}, a page for each class." * bool(self.maps)
            return [f"{written}{whole}{page}", f"Of all images: {self._most()}. Probabilities are {calibrated}."]
        drawn = f" The first {self.pictures:,} are drawn in {self.out / 'pictures'}." if self.pictures else ""
        if self.kind == "segment":
            written = (
                f"{self.images:,} label maps are in {self.out / 'labels'}: one number a pixel, as classes.txt "
                f"says, in the size of the image as it is read, upright.{drawn}"
            )
            return [written, f"Of all pixels: {self._most()}."]
        total = sum(self.counts.values())
        found = f": {self._most()}" if total else ""
        at_least = f"with a score of at least {self.score:g} in {self.images:,} images"
        return [f"{self.out / 'detections.json'} has {total:,} objects {at_least}{found}.{drawn}"]

    def _most(self) -> str:
        total = sum(self.counts.values())
        said = [
            f"{name} {count:,}" if self.kind == "detect" else f"{name} {100 * count / total:.1f} %"
            for name, count in self.counts.items()
        ]
        more = [f"{len(said) - _NAMED} other classes"] if len(said) > _NAMED + 1 else said[_NAMED:]
        return listing([*said[:_NAMED], *more], "and")


@verb(Predict)
@float32_products()
def predict(options: Predict) -> Predictions:
    """Write predictions of a trained model: a table of classes, label maps, or objects as COCO JSON, and pictures.

    A classifier's table is predictions.csv: path, class, confidence and the probability of each class, of every image;
    the least certain images are on a page, least-certain.html. A segmenter's label maps are PNG files of the images'
    original sizes, one number per pixel, with a palette for viewers (16 bits without a palette for more than 256
    classes). A detector's objects are in one COCO JSON file, with scores and, if it predicts masks, run lengths.

    Raises:
        PatchloomError: no such model or images, a folder that is taken, or no image that can be read.
    """
    top = options.top
    settings = EvalSettings(device=options.device)
    settings.torch_device  # noqa: B018  # refuse an unknown device first
    path = _find_model(plain_path(options.model))
    metadata = read_metadata(path, "a model")
    classifies = CLASSIFIER_FORMAT in metadata
    net: Any
    card: ClassifierCard | DenseCard
    net, card = load_classifier(path) if classifies else load_dense(path)
    if top is not None and not classifies:
        raise PatchloomError(f"--top is for classifiers, and {path} is a segmenter or detector: leave it out")
    if top is not None and top > len(card.classes):
        raise PatchloomError(f"--top {top} is more than the {len(card.classes)} classes of {path}: give fewer")
    data = options.data
    if isinstance(data, str | Path) and is_single(str(data)) and Path(data).expanduser().is_file():
        opened = open_images([str(Path(data).expanduser())], str(data))
    else:
        opened = open_data(data)
    if classifies:
        opened = with_encoder_sound(opened, card.encoder.sound, card.encoder.name)
    sources = [opened.train] if opened.test is None else [opened.train, opened.test]
    names = name_images(sources)
    folder = Path(options.out) if options.out is not None else Path("predictions") / data_slug(options.data)
    weights = str(json.loads(metadata.get(DENSE_FORMAT) or metadata[CLASSIFIER_FORMAT]).get("sha256", ""))
    about: dict[str, Any] = {"model": str(path), "weights": weights, "images": [one.name for one in sources]}
    if top is not None:
        about["top"] = top
    drawn = len(names) if options.pictures == "all" else options.pictures
    outs = [name.out for name in names]

    divided = _divided(sources)

    def files(written: Sequence[str]) -> set[str]:
        if isinstance(card, ClassifierCard):
            maps = (path for one in divided for path in one.maps.values())
            return {TABLE, *[PAGE] * bool(drawn), *[WHOLE] * bool(divided), *maps}
        pictures = {f"pictures/{out}.png" for out in written[:drawn]}
        if card.kind == "detect":
            return {"detections.json", *pictures}
        return {"classes.txt", *pictures, *(f"labels/{out}.png" for out in written)}

    before = _claim(folder, about, files(outs))
    images = ConcatSource(sources[0].name, sources)
    if isinstance(card, ClassifierCard):
        done = write_classes(net, card, images, names, divided, settings, folder, drawn, top)
    else:
        done = write_dense(net, card, images, names, settings, folder, drawn, options.score)
    lost = {*outs} - {*done.read}
    unreadable = [name.source.describe(name.index) for name in names if name.out in lost]
    if not done.read:
        raise PatchloomError(f"nothing in {sources[0].name} could be read, beginning with {unreadable[0]}")
    written = files(done.read)
    old = _remove_old(folder, before, written)
    _record(folder, about, written)
    counts = {card.classes[k]: count for k, count in done.counts.most_common() if count}
    gone = [f"{old:,} label maps of an earlier predict were removed: their images are no longer there."] if old else []
    seen = input_notes(sources[0], card.encoder.mean, card.encoder.std)
    notes = (*(f"{note}." for note in [*opened.notes, *done.notes, *seen]), *note_unreadable(unreadable), *gone)
    about_all = folder, len(done.read), counts, min(drawn, len(done.read)), options.score, notes
    if isinstance(card, ClassifierCard):
        maps = sum(len(one.maps) for one in divided)
        return Predictions("classify", *about_all, card.calibrated, len(divided), maps)
    return Predictions(card.kind, *about_all)


def _find_model(model: str | Path) -> Path:
    """Return the file of a model: the given one, or the single one of a run; raise an error if there is none."""
    path = Path(model)
    makes = (
        f"patchloom evaluate finetune {model} LABELLED makes a classifier of it, and patchloom evaluate segment "
        f"{model} LABELLED --save true (or detect) another model"
    )
    if str(model).startswith("timm:"):
        raise PatchloomError(
            f"{model} is an encoder, which has no classes: patchloom evaluate finetune {model} LABELLED --out "
            "model.safetensors (or segment, or detect) makes a model of it"
        )
    if path.is_dir():
        saved = [file for kind in _FOLDERS for file in sorted(path.glob(f"{kind}/*.safetensors"))]
        if not saved:
            raise PatchloomError(f"{model} is no model but a folder: if it is a run, {makes}")
        if len(saved) > 1:
            raise PatchloomError(f"{model} has {len(saved)} models: give one of them, {listing(saved)}")
        return saved[0]
    if not path.is_file():
        raise PatchloomError(
            f"there is no model at {path}: patchloom evaluate finetune writes one, and segment, detect or linear with "
            "--save true"
        )
    if not is_model(path):
        raise PatchloomError(f"{model} is no classifier, segmenter or detector: if it is an encoder, {makes}")
    return path


def _claim(folder: Path, about: dict[str, Any], files: Collection[str]) -> list[str]:
    """Take a folder, unless it holds anything but what the same model wrote for the same images."""
    if folder.exists() and not folder.is_dir():
        raise PatchloomError(f"{folder} is a file: give another folder with --out")
    taken = PatchloomError(f"{folder} holds other files: give another folder with --out, or move them away")
    before: list[str] = []
    if folder.is_dir() and any(one.name[0] != "." for one in folder.iterdir()):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # no record, or a damaged one
            found = json.loads(read_text(folder / _BY, errors="surrogateescape"))
            files_of_it = [str(one) for one in found.pop("files")]
            before = files_of_it if found == about else []
        if not before or any(os.path.lexists(folder / one) for one in {*files} - {*before}):
            raise taken
    make_folder(folder)
    _record(folder, about, {*before, *files})  # all of them, in case that this is stopped
    return before


def _record(folder: Path, about: dict[str, Any], files: Collection[str]) -> None:
    write_whole(folder / _BY, json.dumps({**about, "files": sorted(files)}, indent=1, ensure_ascii=False) + "\n")


def _remove_old(folder: Path, before: Sequence[str], written: Collection[str]) -> int:
    """Remove label maps, pictures and lists of an earlier predict that this one did not write; the number of maps."""
    old = 0
    for one in sorted({*before} - {*written}):
        path, parts = folder / one, PurePosixPath(one).parts
        ours = one in _LISTS or (parts[0], path.suffix) in _WRITTEN
        inside = path.parent.resolve().is_relative_to(folder.resolve())
        if ours and inside and ".." not in parts and path.is_file():
            path.unlink()
            old += parts[0] == "labels"
    return old


# Predictions of classifiers as files: a table of all images, and a page of the least certain ones.


@dataclass(frozen=True)
class Written:
    """What a model's predictions were written for.

    Attributes:
        read: `NamedImage.out` of the images that could be read, in order.
        counts: number of images, pixels or objects of each class.
        notes: further remarks, without full stop.
    """

    read: Sequence[str]
    counts: Counter[int]
    notes: Sequence[str] = ()


def write_classes(
    model: Classifier,
    card: ClassifierCard,
    images: Source,
    names: Sequence[NamedImage],
    divided: Sequence[DividedFile],
    settings: EvalSettings,
    folder: Path,
    drawn: int,
    top: int | None = None,
) -> Written:
    """Write the table of a classifier's predictions, and the page of the ``drawn`` least certain images.

    Of files that are divided into images, the means of their probabilities are in a table of their own, and those of
    windows are maps.

    Args:
        images: the images of ``names``.
        divided: the files that they are parts of; () if they are whole files.
        top: number of classes in the table; None: all, in a column each.
    """
    what = f"{folder}: predicting"
    logits, indices, _ = logits_of(model, images, card.encoder, settings, what=what, test_crop=card.test_crop)
    known = card.calibrated
    probabilities = (logits.double() / (1.0 if known is None else known.temperature)).softmax(1)
    paths = [names[i].place for i in indices.tolist()]
    write_whole(folder / TABLE, class_table(paths, probabilities, card.classes, top))
    if divided:
        each = torch.full((len(names), len(card.classes)), math.nan, dtype=torch.float64)  # nan: unreadable
        each[indices] = probabilities
        means = torch.stack([each[one.rows].nanmean(0) for one in divided])
        kept = [i for i, known in enumerate(means.isfinite().all(1).tolist()) if known]
        write_whole(folder / WHOLE, class_table([divided[i].name for i in kept], means[kept], card.classes, top))
    for one in divided:
        values = np.full((len(one.source), len(card.classes)), np.nan)
        values[one.source.parts["unit"] == one.number] = each[one.rows].numpy()
        for plane, path in one.maps.items():
            write_map(folder / path, stitch(one.source, one.number, plane, values))
    if drawn:
        write_whole(folder / PAGE, _page(card, images, paths, indices, probabilities, drawn))
    counts = Counter(probabilities.argmax(1).tolist())
    return Written([names[i].out for i in indices.tolist()], counts)


class DividedFile(NamedTuple):
    """A file whose windows, slices or frames are the images of a source.

    Attributes:
        source: the source.
        number: number of the file in it.
        rows: numbers of its images among those of all sources, int64 [n].
        name: its path within what was given.
        maps: path of the map of each plane, by its number, below the folder of the predictions; empty without windows.
    """

    source: Parts
    number: int
    rows: np.ndarray
    name: str
    maps: Mapping[int, str]


def _divided(sources: Sequence[Source]) -> list[DividedFile]:
    """Return the files of sources that are divided into images."""
    found, starts = list[DividedFile](), np.cumsum([0, *map(len, sources)]).tolist()
    parted = [(source, start) for source, start in zip(sources, starts, strict=False) if isinstance(source, Parts)]
    names = iter(name_images([one.source.subset([unit.file for unit in one.units]) for one, _ in parted]))
    for source, start in parted:
        for number in range(len(source.units)):
            name, own = next(names), np.flatnonzero(source.parts["unit"] == number)
            planes = np.unique(source.parts["plane"][own]).tolist() if source.division.tile is not None else []
            ends = {plane: f"-{plane}" if len(planes) > 1 else "" for plane in planes}
            maps = {plane: f"{MAPS}/{name.out}{end}.tif" for plane, end in ends.items()}
            found.append(DividedFile(source, number, own + start, name.place, maps))
    return found


def class_table(paths: Sequence[str], probabilities: Tensor, classes: Sequence[str], top: int | None = None) -> str:
    """Return a table of predictions as CSV: path, class, confidence, and more classes with their probabilities.

    Args:
        paths: path of each image.
        probabilities: [n c].
        classes: name of each class.
        top: number of classes, the most probable first, as class, confidence, class_2, confidence_2 and so on; None:
            all, each in a column whose name is that of the class behind ``p_``.
    """
    text = io.StringIO()
    # fields with commas, quotes or line breaks are quoted; a path may be of any bytes
    table = csv.writer(text, lineterminator="\n")
    head, ranks = ["class", "confidence"], range(1 if top is None else top)
    titles = [f"{what}_{i + 1}" if i else what for i in ranks for what in head]
    table.writerow(["path", *titles, *(f"p_{name}" for name in classes if top is None)])
    ordered, places = probabilities.sort(dim=1, descending=True, stable=True)
    for path, order, best, own in zip(paths, places.tolist(), ordered.tolist(), probabilities.tolist(), strict=True):
        cells = [cell for i in ranks for cell in (classes[order[i]], f"{best[i]:.6f}")]
        table.writerow([path, *cells, *(f"{p:.6f}" for p in own if top is None)])
    return text.getvalue()


def _page(
    card: ClassifierCard, images: Source, paths: Sequence[str], indices: Tensor, probabilities: Tensor, drawn: int
) -> str:
    """Return the page of the least certain images as HTML, with their pictures in it."""
    ordered, places = probabilities.sort(dim=1, descending=True, stable=True)
    least = torch.argsort(ordered[:, 0], stable=True)[:drawn].tolist()

    def item(i: int) -> PageItem:
        best = zip(places[i, :_CLASSES_SHOWN].tolist(), ordered[i].tolist(), strict=False)
        return PageItem(paths[i], data_uri(images, int(indices[i])), shares=[(card.classes[k], p) for k, p in best])

    text = (
        f"{len(least):,} of {len(paths):,} {images.noun} of {images.name}, ordered by confidence, the probability of "
        f"the predicted class. Model: {card.encoder.name}, trained on {card.data}. Probabilities are "
        f"{describe_calibration(card.calibrated)}."
    )
    return picture_page([PageSection("Least certain", text, [*map(item, least)])], images.name)


# Predictions of segmenters and detectors, as files that other programs read: label maps as PNG, objects as COCO JSON.


def label_png(labels: Tensor, ids: Sequence[int]) -> bytes:
    """A label map [h w] as a PNG: 8 bits with a palette, or 16 bits where a number is above 255."""
    deep = max(ids) > 255
    stored = np.array(ids, np.uint16 if deep else np.uint8)[labels.numpy()]
    page = Image.fromarray(stored)
    if not deep:
        palette = np.zeros((256, 3), np.uint8)
        palette[list(ids)] = class_colours(len(ids))
        page.putpalette(palette.tobytes())
    buffer = io.BytesIO()
    page.save(buffer, "PNG")
    return buffer.getvalue()


def coco_entries(found: DetectedObjects, ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the detections of an image as COCO JSON entries, without object and image ids.

    Args:
        found: the detections.
        ids: category id of each class.
    """
    for i, (box, label, score) in enumerate(
        zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist(), strict=True)
    ):
        x0, y0, x1, y1 = (round(side, 2) for side in box)
        w, h = round(x1 - x0, 2), round(y1 - y0, 2)
        about = {"category_id": ids[label], "bbox": [x0, y0, w, h], "score": round(score, 6), "iscrowd": 0}
        if found.masks is None:
            yield about | {"area": round(w * h, 2)}
        else:
            mask = found.masks[i]
            lengths = {"size": [int(side) for side in mask["size"]], "counts": mask["counts"].decode()}
            yield about | {"area": int(coco_tool("mask").area(mask)), "segmentation": lengths}


def write_dense(
    net: Segmenter | Detector,
    card: DenseCard,
    images: Source,
    names: Sequence[NamedImage],
    settings: EvalSettings,
    folder: Path,
    drawn: int,
    score: float,
) -> Written:
    """Write the predictions of a segmenter or detector, and pictures of the first ``drawn`` images.

    Args:
        images: the images of ``names``.
        score: lowest score of objects.
    """
    at, read = settings.torch_device, list[str]()
    half = runs_in_bfloat16(at, "auto")
    net.to(at)
    of_encoder = card.encoder.mean, card.encoder.std

    def answer(some: list[Tensor]) -> Sequence[Any]:
        if isinstance(net, Segmenter):
            return segment_images(net, some, *of_encoder, card.side, at, half)
        return detect_images(net, some, *of_encoder, at, half, score)

    pictures, counts = Pictures(images.read_as, net.channels, range(len(names))), Counter[int]()
    workers = settings.workers_for(names[0].source, len(names))
    answers = answered(pictures, answer, at, workers, f"{folder}: predicting")
    if isinstance(net, Segmenter):
        plain = card.ids == tuple(range(len(card.ids)))
        lines = card.classes if plain else (f"{i} {name}" for i, name in zip(card.ids, card.classes, strict=True))
        write_whole(folder / "classes.txt", "".join(f"{line}\n" for line in lines))
        for picture, labels in answers:
            assert picture.image is not None  # `answered` leaves out what cannot be read
            name = names[picture.number].out
            pixels = np.bincount(labels.numpy().ravel(), minlength=len(card.classes))
            counts.update(dict(enumerate(pixels.tolist())))
            write_whole(folder / "labels" / f"{name}.png", label_png(labels, card.ids))
            if len(read) < drawn:
                draw_label_map(picture.image, labels, card.classes, folder / "pictures" / f"{name}.png")
            read.append(name)
        return Written(read, counts)

    # ---- objects
    ids, (numbers, notes) = card.ids or tuple(range(1, len(card.classes) + 1)), _image_ids(names)
    described, objects = list[dict[str, Any]](), list[dict[str, Any]]()
    for picture, (boxes, fit) in answers:
        assert picture.image is not None
        h, w = picture.image.shape[1:]
        named, found = names[picture.number], fit.detected(boxes, score)
        described.append({"id": numbers[named.out], "file_name": named.place, "width": w, "height": h})
        counts.update(found.labels.tolist())
        objects += [
            {"id": len(objects) + number, "image_id": numbers[named.out], **one}
            for number, one in enumerate(coco_entries(found, ids), 1)
        ]
        if len(read) < drawn:
            out = folder / "pictures" / f"{named.out}.png"
            draw_objects(picture.image, found.objects((h, w)), found.scores, card.classes, out)
        read.append(named.out)
    categories = [{"id": number, "name": one} for number, one in zip(ids, card.classes, strict=True)]
    whole = {"images": described, "categories": categories, "annotations": objects}
    if read:
        write_whole(folder / "detections.json", json.dumps(whole, ensure_ascii=False) + "\n")
    return Written(read, counts, notes)


def _image_ids(names: Sequence[NamedImage]) -> tuple[dict[str, int], list[str]]:
    """Return the id of each image by its `NamedImage.out`, and a note if they come from COCO JSON files."""
    paths = {name.out: Path(os.path.abspath(name.source.describe(name.index))) for name in names}
    known, files = image_ids([path for path in paths.values() if path.is_file()])
    ids = {out: known[path] for out, path in paths.items() if path in known}
    notes = []
    if len(set(ids.values())) < len(ids):
        notes.append(
            f"image ids are counted from 1, as {listing(files, 'and')} use the same ones for different images: predict "
            "the images of each separately to keep them"
        )
        ids = {}
    elif ids:
        more = len(names) - len(ids)
        others = f", and {count_of(more, 'image')} without one there {'has' if more == 1 else 'have'} larger ones" * (
            more > 0
        )
        notes.append(f"image ids are those of {listing(files, 'and')}{others}")
    rest = count(max(ids.values(), default=0) + 1)
    return {name.out: ids[name.out] if name.out in ids else next(rest) for name in names}, notes
