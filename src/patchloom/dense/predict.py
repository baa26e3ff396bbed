"""``predict``: what a trained segmenter or detector says of images, as files that other programs read."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from patchloom.arguments import PathLike, plain_path, validate_arguments
from patchloom.data.source import Data, Source
from patchloom.data.sources.concat import ConcatSource
from patchloom.data.sources.glob import is_single, open_images
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.sources.open import open_data
from patchloom.data.stats import input_notes
from patchloom.dense.annotations.base import count_images
from patchloom.dense.annotations.coco import image_ids
from patchloom.dense.answers import Pictures, ReadPicture, answered
from patchloom.dense.checkpoint import DENSE_FORMAT, DenseCard, DenseTask, load_dense
from patchloom.dense.metrics import DetectedObjects, coco_tool
from patchloom.dense.pictures import class_colours, draw_label_map, draw_objects
from patchloom.dense.segmenter import Segmenter
from patchloom.dense.windows import detect_images, segment_images
from patchloom.display import Displayable, Verbatim
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classifier import CLASSIFIER_FORMAT
from patchloom.evaluate.features import runs_in_bfloat16
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.checkpoints.format import read_metadata
from patchloom.results.evaluation import note_unreadable
from patchloom.runs.folder import data_slug
from patchloom.system.files import make_folder, read_text, write_whole
from patchloom.system.hardware import float32_products

# Answers of models as files that other programs read: label maps as PNG, objects as COCO JSON.


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


_BY = "predicted-by.json"
_LISTS = ("classes.txt", "detections.json")
_NAMED = 8  # classes in a sentence


@dataclass(frozen=True, repr=False)
class Predictions(Displayable):
    """Result of `predict`.

    Attributes:
        kind: segment or detect.
        out: folder of the predictions.
        images: number of images with a prediction.
        counts: number of pixels or objects by class name, the largest first; classes without any are left out.
        pictures: number of pictures drawn.
        score: lowest score of the objects.
        notes: sentences on skipped images.
    """

    kind: DenseTask
    out: Path
    images: int
    counts: dict[str, int]
    pictures: int
    score: float
    notes: tuple[str, ...] = ()

    def parts(self, width: int) -> list[str]:
        """See `Displayable`."""
        return [*self.notes, *map(Verbatim, self.sentences())]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        written = self.out / ("labels" if self.kind == "segment" else "detections.json")
        names = ("kind", "images", "counts", "pictures", "score")
        values = {name: getattr(self, name) for name in names}
        return {"out": str(self.out), "written": str(written), **values, "notes": [*self.notes]}

    def sentences(self) -> list[str]:
        """Return sentences on the written files and the predictions."""
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
            f"{name} {100 * count / total:.1f} %" if self.kind == "segment" else f"{name} {count:,}"
            for name, count in self.counts.items()
        ]
        more = [f"{len(said) - _NAMED} other classes"] if len(said) > _NAMED + 1 else said[_NAMED:]
        return listing([*said[:_NAMED], *more], "and")


@validate_arguments
@float32_products()
def predict(
    model: PathLike,
    data: DataLike,
    *,
    out: str | Path | None = None,
    score: float = 0.5,
    pictures: int | Literal["all"] = 20,
    device: str = "auto",
) -> Predictions:
    """Write predictions of a trained model: label maps, or objects as COCO JSON, and pictures.

    A segmenter's label maps are PNG files of the images' original sizes, one number per pixel, with a palette for
    viewers (16 bits without a palette for more than 256 classes). A detector's objects are in one COCO JSON file, with
    scores and, if it predicts masks, run lengths.

    Args:
        model: file from `evaluate segment` or `evaluate detect` with ``--save``.
        data: images of any source, all splits, or one image file.
        out: folder for the predictions; default predictions/DATA. Files of other commands there are kept. The same
            model and data replace their earlier files, and remove predictions of deleted images.
        score: lowest score of the objects of a detector.
        pictures: number of images to draw with their predictions; all draws every image.
        device: device for computing: auto (a GPU if there is one), cpu, cuda, or another name of torch.

    Raises:
        PatchloomError: no such model or images, a folder that is taken, or no image that can be read.
    """
    if not 0 <= score <= 1:
        raise PatchloomError(f"--score must be from 0 to 1, not {score:g}")
    if pictures != "all" and pictures < 0:
        raise PatchloomError(f"--pictures must be 0 or more, or all, not {pictures}")
    settings = EvalSettings(device=device)
    at = settings.torch_device
    model = plain_path(model)
    _check_model(model)
    net, card = load_dense(model)
    opened = _opened(data)
    sources = [opened.train] if opened.test is None else [opened.train, opened.test]
    names = name_images(sources)
    folder = Path(out) if out is not None else Path("predictions") / data_slug(data)
    about = {"model": str(model), "weights": _checksum(Path(model)), "images": [one.name for one in sources]}
    half, drawn = runs_in_bfloat16(at, "auto"), len(names) if pictures == "all" else pictures
    outs = [name.out for name in names]
    before = _claim(folder, about, _files(card.kind, outs, outs if drawn else ()))
    net.to(at)
    read: list[str] = []
    about_ids: list[str] = []
    of_encoder = card.encoder.mean, card.encoder.std

    def answer(images: list[Tensor]) -> Sequence[Any]:
        if isinstance(net, Segmenter):
            return segment_images(net, images, *of_encoder, card.side, at, half)
        return detect_images(net, images, *of_encoder, at, half, score)

    to_answer = Pictures(ConcatSource("", sources).read_as, net.channels, range(len(names)))
    workers = settings.workers_for(sources[0], len(names))
    answers = answered(to_answer, answer, at, workers, f"{folder}: predicting")
    named = _named(answers, names, read)
    if isinstance(net, Segmenter):
        done = _write_maps(named, card, folder, drawn)
    else:
        found = ((name, image, fit.detected(boxes, score)) for name, image, (boxes, fit) in named)
        numbers, about_ids = _image_ids(names)
        done = _write_objects(found, card, folder, drawn, {name.out: name.place for name in names}, numbers)
    lost = {*outs} - {*read}
    unreadable = [name.source.describe(name.index) for name in names if name.out in lost]
    if not done[0]:
        raise PatchloomError(f"nothing in {sources[0].name} could be read, beginning with {unreadable[0]}")
    written = _files(card.kind, read, read[:drawn])
    old = _remove_old(folder, before, written)
    _record(folder, about, written)
    counts = {card.classes[k]: count for k, count in done[1].most_common() if count}
    gone = [f"{old:,} label maps of an earlier predict were removed: their images are no longer there."] if old else []
    seen = input_notes(sources[0], card.encoder.mean, card.encoder.std)
    notes = (*(f"{note}." for note in [*opened.notes, *about_ids, *seen]), *note_unreadable(unreadable), *gone)
    return Predictions(card.kind, folder, done[0], counts, min(drawn, done[0]), score, notes)


def _opened(data: DataLike) -> Data:
    """Images of any source, or a single image file."""
    if isinstance(data, str | Path) and is_single(str(data)) and (path := Path(data).expanduser()).is_file():
        return open_images([str(path)], str(data))
    return open_data(data)


@dataclass(frozen=True)
class NamedImage:
    """An image of a source.

    Attributes:
        source, index: where it is.
        place: its path within what was given, or a number. Different for different images.
        out: the same without suffix, below which its files are written. Different for different images.
    """

    source: Source
    index: int
    place: str
    out: str


def name_images(sources: Sequence[Source]) -> list[NamedImage]:
    """Give every image of several sources a unique path below the folder of the predictions.

    Images of several folders, such as train and test, keep their paths below the common parent folder.
    """
    found = [(source, i) for source in sources for i in range(len(source))]
    places = [source.place(i) or f"{number:06}" for number, (source, i) in enumerate(found)]
    below = _below([_root(source.describe(i), place) for (source, i), place in zip(found, places, strict=True)])
    # nothing is written outside of the folder, whatever a list of paths says
    paths = [
        PurePosixPath(*(part for part in PurePosixPath(start, place.lstrip("/")).parts if part not in ("..", ".")))
        for start, place in zip(below, places, strict=True)
    ]
    # without regard to case, which many file systems do not tell apart
    plain = Counter(str(path.with_suffix("")).casefold() for path in paths)
    seen: set[str] = set()
    used: set[str] = set()
    named = []
    for (source, i), start, place, path in zip(found, below, places, paths, strict=True):
        short = path.with_suffix("")  # a.jpg and a.png beside each other keep their suffixes
        out = _unique(str(short if plain[str(short).casefold()] == 1 else path), used)
        named.append(NamedImage(source, i, _unique(str(path) if start else place, seen), out))
    return named


def _unique(name: str, used: set[str]) -> str:
    """Add a number to a name that is used already, and note that it is used now."""
    one, number = name, 1
    while one.casefold() in used:
        number += 1
        one = f"{name}-{number}"
    used.add(one.casefold())
    return one


def _root(described: str, place: str) -> str:
    """Return the folder to which ``place`` is relative; "" if the image is no such file."""
    described = described.replace(os.sep, "/")
    return described[: -len(place) - 1] or "/" if described.endswith(f"/{place}") else ""


def _below(roots: Sequence[str]) -> list[str]:
    """Return each root's path below the folder that all of them share; "" where there is only one, or none."""
    folders = {root: os.path.abspath(root) for root in {*roots} if os.path.isdir(root)}
    if len(folders) < 2 or len(folders) < len({*roots}):
        return [""] * len(roots)
    shared = os.path.commonpath(folders.values())
    starts = {root: os.path.relpath(path, shared).replace(os.sep, "/") for root, path in folders.items()}
    return ["" if starts[root] == "." else starts[root] for root in roots]


def _check_model(model: str | Path) -> None:
    """Raise an error if a file is not a segmenter or detector."""
    path = Path(model)
    makes = f"patchloom evaluate segment {model} LABELLED --save true (or detect) makes a model of it"
    if str(model).startswith("timm:"):
        raise PatchloomError(
            f"{model} is an encoder, which has no classes: patchloom evaluate segment {model} LABELLED --out "
            "model.safetensors (or detect) makes a model of it"
        )
    if path.is_dir():
        saved = [str(file) for kind in ("segmented", "detected") for file in sorted(path.glob(f"{kind}/*.safetensors"))]
        if saved:
            raise PatchloomError(f"{model} is a folder: give one of its models, {listing(saved)}")
        if tuned := sorted(path.glob("finetuned/*.safetensors")):
            raise PatchloomError(
                f"{model} is a folder with a classifier, and predict takes segmenters and detectors: in Python, "
                f"patchloom.evaluate.classifier.load_classifier({str(tuned[0])!r}) loads it with its classes"
            )
        raise PatchloomError(f"{model} is no model but a folder: if it is a run, {makes}")
    if path.is_file() and DENSE_FORMAT not in read_metadata(path, "a model"):
        if CLASSIFIER_FORMAT in read_metadata(path, "a model"):
            raise PatchloomError(
                f"{model} is a classifier, and predict takes segmenters and detectors: in Python, "
                f"patchloom.evaluate.classifier.load_classifier({str(model)!r}) loads it with its classes"
            )
        raise PatchloomError(f"{model} is no segmenter or detector: if it is an encoder, {makes}")


def _checksum(path: Path) -> str:
    about = json.loads(read_metadata(path, "a model")[DENSE_FORMAT])
    return str(about.get("sha256", ""))


def _claim(folder: Path, about: dict[str, Any], files: Collection[str]) -> list[str]:
    """Take a folder, unless it holds anything but what the same model wrote for the same images."""
    if folder.exists() and not folder.is_dir():
        raise PatchloomError(f"{folder} is a file: give another folder with --out")
    taken = PatchloomError(f"{folder} holds other files: give another folder with --out, or move them away")
    before: list[str] = []
    if folder.is_dir() and any(one.name[0] != "." for one in folder.iterdir()):
        before = _written_by(folder / _BY, about)
        if not before or any(os.path.lexists(folder / one) for one in {*files} - {*before}):
            raise taken
    make_folder(folder)
    _record(folder, about, {*before, *files})  # all of them, in case that this is stopped
    return before


def _record(folder: Path, about: dict[str, Any], files: Collection[str]) -> None:
    """Write down which model wrote which files for which images."""
    write_whole(folder / _BY, json.dumps({**about, "files": sorted(files)}, indent=1, ensure_ascii=False) + "\n")


def _written_by(record: Path, about: dict[str, Any]) -> list[str]:
    """Return the files that an earlier predict wrote, by its record; none if it was of another model or images."""
    try:
        found = json.loads(read_text(record, errors="surrogateescape"))
        files = [str(one) for one in found.pop("files")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return files if found == about else []


def _remove_old(folder: Path, before: Sequence[str], written: Collection[str]) -> int:
    """Remove label maps, pictures and lists of an earlier predict that this one did not write; the number of maps."""
    old = 0
    for one in sorted({*before} - {*written}):
        path, parts = folder / one, PurePosixPath(one).parts
        ours = one in _LISTS or (parts[0] in ("labels", "pictures") and path.suffix == ".png")
        inside = path.parent.resolve().is_relative_to(folder.resolve())
        if ours and inside and ".." not in parts and path.is_file():
            path.unlink()
            old += parts[0] == "labels"
    return old


def _files(kind: DenseTask, outs: Sequence[str], drawn: Sequence[str]) -> set[str]:
    """Return the files of predictions, relative to their folder, where ``drawn`` are those with pictures."""
    pictures = {f"pictures/{out}.png" for out in drawn}
    if kind == "detect":
        return {"detections.json", *pictures}
    return {"classes.txt", *pictures, *(f"labels/{out}.png" for out in outs)}


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
) -> tuple[int, Counter[int]]:
    """Write label maps and pictures; the number of images, and of pixels of each class."""
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
    return n, Counter(dict(enumerate(counts.tolist())))


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
        others = f", and {count_images(more)} without one there {'has' if more == 1 else 'have'} larger ones" * (
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
) -> tuple[int, Counter[int]]:
    """Write objects as COCO JSON, and pictures; the number of images, and of objects of each class."""
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
    return len(images), counts
