"""Predictions of segmenters and detectors, as files that other programs read: label maps as PNG, objects as COCO JSON.

Letters: c channels, h w height and width.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from patchloom.data.naming import NamedImage
from patchloom.data.notes import count_of
from patchloom.data.source import Source
from patchloom.dense.annotations.coco import image_ids
from patchloom.dense.answers import Pictures, ReadPicture, answered
from patchloom.dense.checkpoint import DenseCard, DenseTask
from patchloom.dense.detector import Detector
from patchloom.dense.metrics import DetectedObjects, coco_tool
from patchloom.dense.pictures import class_colours, draw_label_map, draw_objects
from patchloom.dense.segmenter import Segmenter
from patchloom.dense.windows import detect_images, segment_images
from patchloom.errors import listing
from patchloom.evaluate.features import runs_in_bfloat16
from patchloom.evaluate.predictions import Written
from patchloom.evaluate.settings import EvalSettings
from patchloom.system.files import write_whole


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


def dense_files(kind: DenseTask, outs: Sequence[str], drawn: Sequence[str]) -> set[str]:
    """Return the files of predictions, relative to their folder, where ``drawn`` are those with pictures."""
    pictures = {f"pictures/{out}.png" for out in drawn}
    if kind == "detect":
        return {"detections.json", *pictures}
    return {"classes.txt", *pictures, *(f"labels/{out}.png" for out in outs)}


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

    pictures = Pictures(images.read_as, net.channels, range(len(names)))
    workers = settings.workers_for(names[0].source, len(names))
    named = _named(answered(pictures, answer, at, workers, f"{folder}: predicting"), names, read)
    if isinstance(net, Segmenter):
        return Written(read, _write_maps(named, card, folder, drawn))
    found = ((name, image, fit.detected(boxes, score)) for name, image, (boxes, fit) in named)
    numbers, notes = _image_ids(names)
    counts = _write_objects(found, card, folder, drawn, {name.out: name.place for name in names}, numbers)
    return Written(read, counts, notes)


def _named(
    answers: Iterator[tuple[ReadPicture, Any]], names: Sequence[NamedImage], read: list[str]
) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield name, image [c h w] and answer of each picture, and list the names."""
    for picture, answer in answers:
        assert picture.image is not None  # `answered` leaves out what cannot be read
        read.append(names[picture.number].out)
        yield read[-1], picture.image, answer


def _write_maps(
    answered: Iterator[tuple[str, Tensor, Tensor]], card: DenseCard, folder: Path, drawn: int
) -> Counter[int]:
    """Write label maps and pictures; return the number of pixels of each class."""
    plain = card.ids == tuple(range(len(card.ids)))
    lines = card.classes if plain else (f"{i} {name}" for i, name in zip(card.ids, card.classes, strict=True))
    write_whole(folder / "classes.txt", "".join(f"{line}\n" for line in lines))
    counts, n = np.zeros(len(card.classes), np.int64), 0
    for name, image, labels in answered:
        counts += np.bincount(labels.numpy().ravel(), minlength=len(counts))
        write_whole(folder / "labels" / f"{name}.png", label_png(labels, card.ids))
        if n < drawn:
            draw_label_map(image, labels, card.classes, folder / "pictures" / f"{name}.png")
        n += 1
    return Counter(dict(enumerate(counts.tolist())))


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


def _write_objects(
    found: Iterator[tuple[str, Tensor, DetectedObjects]],
    card: DenseCard,
    folder: Path,
    drawn: int,
    places: dict[str, str],
    numbers: dict[str, int],
) -> Counter[int]:
    """Write objects as COCO JSON, and pictures; return the number of objects of each class."""
    ids = card.ids or tuple(range(1, len(card.classes) + 1))
    images: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    counts: Counter[int] = Counter()
    for name, image, answer in found:
        h, w = image.shape[1:]
        images.append({"id": numbers[name], "file_name": places[name], "width": w, "height": h})
        counts.update(answer.labels.tolist())
        objects += [
            {"id": len(objects) + number + 1, "image_id": numbers[name], **one}
            for number, one in enumerate(coco_entries(answer, ids))
        ]
        if len(images) <= drawn:
            out = folder / "pictures" / f"{name}.png"
            draw_objects(image, answer.objects((h, w)), answer.scores, card.classes, out)
    categories = [{"id": number, "name": one} for number, one in zip(ids, card.classes, strict=True)]
    whole = {"images": images, "categories": categories, "annotations": objects}
    if images:
        write_whole(folder / "detections.json", json.dumps(whole, ensure_ascii=False) + "\n")
    return counts
