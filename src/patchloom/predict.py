"""``predict``: what a trained segmenter or detector says of images, as files that other programs read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from torch import Tensor

from patchloom.calls import PathLike, checked
from patchloom.data import Data, DataLike, Source, Unreadable, open_data, to_channels
from patchloom.data.sources.pattern import is_single, open_images
from patchloom.errors import PatchloomError
from patchloom.evaluate.dense.files import coco_entries, label_png
from patchloom.evaluate.dense.found import Found
from patchloom.evaluate.dense.models import FORMAT, DenseCard, Kind, load_dense
from patchloom.evaluate.dense.sliding import detect_image, segment_image
from patchloom.evaluate.features import runs_in_bfloat16
from patchloom.evaluate.pace import watched
from patchloom.evaluate.report import lost_images
from patchloom.evaluate.settings import EvalSettings
from patchloom.files import make_folder, write_whole
from patchloom.hints import listing
from patchloom.look.dense import draw_label_map, draw_objects
from patchloom.nets.weights import read_metadata
from patchloom.runs.folder import plain_name
from patchloom.shown import Shown, Verbatim

_BY = "predicted-by.json"
_NAMED = 8  # classes in a sentence


@dataclass(frozen=True, repr=False)
class Predictions(Shown):
    """What was written.

    Attributes:
        kind: segment or detect.
        out: the folder.
        images: how many were answered for.
        counts: pixels of each class, or objects, by its name, the most first; classes without any are left out.
        pictures: how many were drawn.
        score: lowest of the objects.
        notes: sentences on what was left out.
    """

    kind: Kind
    out: Path
    images: int
    counts: dict[str, int]
    pictures: int
    score: float
    notes: tuple[str, ...] = ()

    def parts(self, width: int) -> list[str]:
        """See `Shown`."""
        return [*self.notes, *map(Verbatim, self.sentences())]

    def sentences(self) -> list[str]:
        """What was written and where, and what was found."""
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


@checked
def predict(
    model: PathLike,
    data: DataLike,
    *,
    out: str | Path | None = None,
    score: float = 0.5,
    pictures: int | Literal["all"] = 20,
    device: str = "auto",
) -> Predictions:
    """Write what a trained model says of images: label maps, or objects as COCO JSON, and pictures.

    A segmenter's label maps are PNG files of the images' own sizes, one number a pixel, with a palette so that viewers
    show colours (16 bits without one where there are more than 256 classes). A detector's objects are in one file of
    COCO's form, with scores and, where it has masks, run lengths.

    Args:
        model: what the protocol segment or detect wrote with ``--save``.
        data: images of any source, all of its splits, or one image file.
        out: folder for what is written; predictions/DATA if absent. What another command wrote there stays.
        score: lowest score of the objects of a detector.
        pictures: how many images are drawn with what was found in them; all draws every one.
        device: what computes: auto (a GPU where there is one), cpu, cuda, or another name that torch has for it.

    Raises:
        PatchloomError: no such model or images, a folder that is taken, or no image that can be read.
    """
    if not 0 <= score <= 1:
        raise PatchloomError(f"--score must be from 0 to 1, not {score:g}")
    if pictures != "all" and pictures < 0:
        raise PatchloomError(f"--pictures must be 0 or more, or all, not {pictures}")
    at = EvalSettings(device=device).at
    _check_model(model)
    net, card = load_dense(model)
    opened = _opened(data)
    sources = [opened.train] if opened.test is None else [opened.train, opened.test]
    names = names_of(sources)
    folder = Path(out) if out is not None else Path("predictions") / plain_name(data)
    _claim(folder, {"model": str(model), "weights": _checksum(Path(model)), "images": [one.name for one in sources]})
    net.to(at)
    half, drawn = runs_in_bfloat16(at, "auto"), len(names) if pictures == "all" else pictures
    unreadable: list[str] = []
    images = _read(sources, names, net.channels, unreadable, f"{folder}: predicting")
    if card.kind == "segment":
        answered = (
            (name, image, segment_image(net, image, card.encoder.mean, card.encoder.std, card.side, at, half))
            for name, image in images
        )
        done = _write_maps(answered, card, folder, drawn)
    else:
        found = (
            (name, image, detect_image(net, image, card.encoder.mean, card.encoder.std, at, half, score))
            for name, image in images
        )
        done = _write_objects(found, card, folder, drawn, {name.out: name.place for name in names})
    if not done[0]:
        raise PatchloomError(f"nothing in {sources[0].name} could be read, beginning with {unreadable[0]}")
    counts = {card.classes[k]: count for k, count in done[1].most_common() if count}
    notes = (*(f"{note}." for note in opened.notes), *lost_images(unreadable))
    return Predictions(card.kind, folder, done[0], counts, min(drawn, done[0]), score, notes)


def _opened(data: DataLike) -> Data:
    """Images of any source, or a single image file."""
    if isinstance(data, str | Path) and is_single(str(data)) and (path := Path(data).expanduser()).is_file():
        return open_images([str(path)], str(data))
    return open_data(data)


@dataclass(frozen=True)
class Named:
    """An image of a source.

    Attributes:
        source, index: where it is.
        place: its path within what was given, or a number.
        out: the same without suffix, below which its files are written.
    """

    source: Source
    index: int
    place: str
    out: str


def names_of(sources: Sequence[Source]) -> list[Named]:
    """The images of several sources, each with a name of its own below the folder where answers are written."""
    found = []
    for source in sources:
        for i in range(len(source)):
            place = source.place(i) or f"{len(found):06}"
            # nothing is written outside of the folder, whatever a list of paths says
            parts = [part for part in PurePosixPath(place).parts if part not in ("/", "..", ".")]
            found.append((source, i, place, PurePosixPath(*parts)))
    plain = Counter(str(path.with_suffix("")) for *_, path in found)
    return [
        # a.jpg and a.png beside each other keep their suffixes
        Named(source, i, place, str(path.with_suffix("") if plain[str(path.with_suffix(""))] == 1 else path))
        for source, i, place, path in found
    ]


def _check_model(model: str | Path) -> None:
    """Refuse what is no segmenter or detector, and say what makes one.

    Raises:
        PatchloomError: it is a run, an encoder, or anything else.
    """
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
        raise PatchloomError(f"{model} is no model but a folder: if it is a run, {makes}")
    if path.is_file() and FORMAT not in read_metadata(path, "a model"):
        raise PatchloomError(f"{model} is no segmenter or detector: if it is an encoder, {makes}")


def _checksum(path: Path) -> str:
    about = json.loads(read_metadata(path, "a model")[FORMAT])
    return str(about.get("sha256", ""))


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Take a folder, unless something else is in it than what the same model wrote of the same images.

    Raises:
        PatchloomError: it is taken, or cannot be written.
    """
    text, mine = json.dumps(about, indent=1, ensure_ascii=False) + "\n", folder / _BY
    if folder.exists() and not folder.is_dir():
        raise PatchloomError(f"{folder} is a file: give another folder with --out")
    if folder.is_dir() and any(one.name[0] != "." for one in folder.iterdir()):
        if not mine.is_file() or mine.read_text("utf-8", "surrogateescape") != text:
            raise PatchloomError(f"{folder} holds other files: give another folder with --out, or move them away")
    make_folder(folder)
    write_whole(mine, text)


def _read(
    sources: Sequence[Source], names: Sequence[Named], channels: int, unreadable: list[str], what: str
) -> Iterator[tuple[str, Tensor]]:
    """Names and images [channels h w]; those that cannot be read are left out, and named."""
    for name in watched(names, len(names), what):
        described = name.source.describe(name.index)
        try:
            image = name.source.read(name.index)
        except Unreadable:
            unreadable.append(described)
            continue
        try:
            yield name.out, to_channels(image, channels)
        except PatchloomError as problem:
            raise PatchloomError(f"{described}: {problem}") from problem


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


def _write_objects(
    found: Iterator[tuple[str, Tensor, Found]], card: DenseCard, folder: Path, drawn: int, places: dict[str, str]
) -> tuple[int, Counter[int]]:
    """Write objects as COCO JSON, and pictures; the number of images, and of objects of each class."""
    images: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    counts: Counter[int] = Counter()
    for name, image, answer in found:
        h, w = image.shape[1:]
        images.append({"id": len(images) + 1, "file_name": places[name], "width": w, "height": h})
        counts.update(answer.labels.tolist())
        objects += [
            {"id": len(objects) + number + 1, "image_id": len(images), **one}
            for number, one in enumerate(coco_entries(answer))
        ]
        if len(images) <= drawn:
            out = folder / "pictures" / f"{name}.png"
            draw_objects(image, answer.objects((h, w)), answer.scores, card.classes, out)
    categories = [{"id": k + 1, "name": one} for k, one in enumerate(card.classes)]
    whole = {"images": images, "categories": categories, "annotations": objects}
    if images:
        write_whole(folder / "detections.json", json.dumps(whole, ensure_ascii=False) + "\n")
    return len(images), counts
