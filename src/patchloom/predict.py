"""``predict``: what a trained classifier, segmenter or detector says of images, as files that other programs read."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from patchloom.arguments import plain_path
from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.naming import name_images
from patchloom.data.source import Data
from patchloom.data.sources.concat import ConcatSource
from patchloom.data.sources.glob import is_single, open_images
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.sources.open import open_data
from patchloom.data.stats import input_notes
from patchloom.dense.checkpoint import DenseCard, load_dense
from patchloom.dense.predictions import dense_files, write_dense
from patchloom.display import Displayable, Verbatim
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.calibration import Calibration, describe_calibration
from patchloom.evaluate.classifier import ClassifierCard, load_classifier
from patchloom.evaluate.predictions import CLASS_FILES, PAGE, TABLE, write_classes
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.checkpoints.format import CLASSIFIER_FORMAT, DENSE_FORMAT, is_model
from patchloom.nets.checkpoints.read import read_metadata
from patchloom.options.declare import verb
from patchloom.options.verbs import Predict
from patchloom.results.evaluation import note_unreadable
from patchloom.runs.folder import data_slug
from patchloom.system.device import float32_products
from patchloom.system.files import make_folder, read_text, write_whole

_BY = "predicted-by.json"
_LISTS = ("classes.txt", "detections.json", *CLASS_FILES)
_NAMED = 8  # classes in a sentence
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
    """

    kind: Literal["classify", "segment", "detect"]
    out: Path
    images: int
    counts: dict[str, int]
    pictures: int
    score: float
    notes: tuple[str, ...] = ()
    calibration: Calibration | None = None

    def parts(self, width: int) -> list[str]:
        """See `Displayable`."""
        return [*self.notes, *map(Verbatim, self.sentences())]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        written = {"classify": TABLE, "segment": "labels", "detect": "detections.json"}[self.kind]
        names = ("kind", "images", "counts", "pictures", "score")
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
            return [f"{written}{page}", f"Of all images: {self._most()}. Probabilities are {calibrated}."]
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
    classifies = CLASSIFIER_FORMAT in read_metadata(path, "a model")
    net: Any
    card: ClassifierCard | DenseCard
    net, card = load_classifier(path) if classifies else load_dense(path)
    if top is not None and not classifies:
        raise PatchloomError(f"--top is for classifiers, and {path} is a segmenter or detector: leave it out")
    if top is not None and top > len(card.classes):
        raise PatchloomError(f"--top {top} is more than the {len(card.classes)} classes of {path}: give fewer")
    opened = _opened(options.data)
    if classifies:
        opened = with_encoder_sound(opened, card.encoder.sound, card.encoder.name)
    sources = [opened.train] if opened.test is None else [opened.train, opened.test]
    names = name_images(sources)
    folder = Path(options.out) if options.out is not None else Path("predictions") / data_slug(options.data)
    about: dict[str, Any] = {"model": str(path), "weights": _checksum(path), "images": [one.name for one in sources]}
    if top is not None:
        about["top"] = top
    drawn = len(names) if options.pictures == "all" else options.pictures
    outs = [name.out for name in names]

    def files(written: Sequence[str]) -> set[str]:
        if isinstance(card, ClassifierCard):
            return {TABLE, *[PAGE] * bool(drawn)}
        return dense_files(card.kind, written, written[:drawn])

    before = _claim(folder, about, files(outs))
    images = ConcatSource(sources[0].name, sources)
    if isinstance(card, ClassifierCard):
        done = write_classes(net, card, images, names, settings, folder, drawn, top)
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
        return Predictions("classify", *about_all, card.calibrated)
    return Predictions(card.kind, *about_all)


def _opened(data: DataLike) -> Data:
    """Images of any source, or a single image file."""
    if isinstance(data, str | Path) and is_single(str(data)) and (path := Path(data).expanduser()).is_file():
        return open_images([str(path)], str(data))
    return open_data(data)


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


def _checksum(path: Path) -> str:
    about = read_metadata(path, "a model")
    return str(json.loads(about.get(DENSE_FORMAT) or about[CLASSIFIER_FORMAT]).get("sha256", ""))


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
