"""Predictions of classifiers as files: a table of all images, and a page of the least certain ones.

Letters: n images, c classes.
"""

from __future__ import annotations

import base64
import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from patchloom.data.naming import NamedImage
from patchloom.data.source import Source
from patchloom.evaluate.calibration import apply_temperature, describe_calibration
from patchloom.evaluate.classification import logits_of
from patchloom.evaluate.classifier import Classifier, ClassifierCard
from patchloom.evaluate.settings import EvalSettings
from patchloom.look.sheet import SIDES, brightness, resize, tile_size, to_pixels
from patchloom.system.files import write_whole

TABLE, PAGE = "predictions.csv", "least-certain.html"
CLASS_FILES = (TABLE, PAGE)
_CLASSES_SHOWN = 3  # on the page


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
    settings: EvalSettings,
    folder: Path,
    drawn: int,
    top: int | None = None,
) -> Written:
    """Write the table of a classifier's predictions, and the page of the ``drawn`` least certain images.

    Args:
        images: the images of ``names``.
        top: number of classes in the table; None: all, in a column each.
    """
    what = f"{folder}: predicting"
    logits, indices, _ = logits_of(model, images, card.encoder, settings, what=what, test_crop=card.test_crop)
    known = card.calibrated
    probabilities = apply_temperature(logits, 1.0 if known is None else known.temperature)
    paths = [names[i].place for i in indices.tolist()]
    write_whole(folder / TABLE, class_table(paths, probabilities, card.classes, top))
    if drawn:
        page = _page(card, images, paths, indices, probabilities, drawn)
        write_whole(folder / PAGE, page)
    counts = Counter(probabilities.argmax(1).tolist())
    return Written([names[i].out for i in indices.tolist()], counts)


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
    head = ["path", "class", "confidence"]
    ordered, places = probabilities.sort(dim=1, descending=True, stable=True)
    if top is None:
        table.writerow([*head, *(f"p_{name}" for name in classes)])
    else:
        table.writerow([*head, *(f"{what}_{i}" for i in range(2, top + 1) for what in head[1:])])
    each = zip(paths, places.tolist(), ordered.tolist(), probabilities.tolist(), strict=True)
    for path, order, best, own in each:
        first = [path, classes[order[0]], _format(best[0])]
        if top is None:
            table.writerow([*first, *map(_format, own)])
        else:
            more = zip(order[1:top], best[1:top], strict=True)
            table.writerow([*first, *(value for k, p in more for value in (classes[k], _format(p)))])
    return text.getvalue()


def _format(probability: float) -> str:
    return f"{probability:.6f}"


def _page(
    card: ClassifierCard, images: Source, paths: Sequence[str], indices: Tensor, probabilities: Tensor, drawn: int
) -> str:
    """Return the page of the least certain images as HTML, with their pictures in it."""
    import jinja2  # takes 0.1 s to import

    ordered, places = probabilities.sort(dim=1, descending=True, stable=True)
    least = torch.argsort(ordered[:, 0], stable=True)[:drawn].tolist()
    rows = [
        {
            "path": paths[i],
            "picture": "" if images.sound is not None else _picture(images, int(indices[i])),
            "classes": [
                (card.classes[k], f"{100 * p:.1f}")
                for k, p in zip(places[i, :_CLASSES_SHOWN].tolist(), ordered[i].tolist(), strict=False)
            ],
        }
        for i in least
    ]
    about: dict[str, Any] = {
        "data": images.name,
        "model": f"{card.encoder.name}, trained on {card.data}",
        "images": f"{len(paths):,}",
        "shown": f"{len(rows):,}",
        "noun": images.noun,
        "calibrated": describe_calibration(card.calibrated),
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("patchloom.evaluate"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(PAGE).render(**about, rows=rows)
    # names of files that are not UTF-8 have lone surrogates, which cannot be encoded
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _picture(images: Source, i: int) -> str:
    """Return a small copy of an image, as a data URI."""
    image = images.read(i)
    channels = len(image)
    shown = (image.float() / 255 if image.dtype == torch.uint8 else image)[None]
    plain = (0.0,) * channels, (1.0,) * channels
    pixels = to_pixels(shown, *plain, brightness(shown, *plain))[0]
    h, w = tile_size(pixels.shape[0], pixels.shape[1], SIDES[0])
    buffer = io.BytesIO()
    Image.fromarray(resize(pixels, h, w)).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
