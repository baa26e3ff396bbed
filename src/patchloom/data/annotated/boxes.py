"""Opening images with boxes: the format is known by what lies there."""

from __future__ import annotations

import os
from pathlib import Path

from patchloom.data.annotated.base import AnnotatedData, Objects
from patchloom.data.annotated.boxed import Found
from patchloom.data.annotated.checks import examined
from patchloom.data.annotated.drawn import DrawnObjects
from patchloom.data.annotated.voc import find_voc, xml_files
from patchloom.data.sources.builtin import is_builtin, open_builtin
from patchloom.data.sources.listing import list_files
from patchloom.data.sources.objects import DataLike, is_object
from patchloom.data.sources.shapes import Shapes
from patchloom.errors import PatchloomError
from patchloom.files import similar
from patchloom.waiting import Waiting

_LAYOUTS = (
    "COCO JSON, Pascal VOC XML or YOLO text, such as images/ beside annotations/ or labels/, or the JSON or data.yaml"
)


def open_boxes(data: DataLike, seed: int = 0) -> AnnotatedData[Objects]:
    """Open images with boxes and, where the data has them, masks.

    Args:
        data: a folder with annotations as COCO JSON (`find_coco`), Pascal VOC XML (`find_voc`) or YOLO text
            (`find_yolo`); or the JSON file or ``data.yaml`` of one; ``hf:FOLDER`` or ``hf:NAME``, a Hugging Face data
            set (`find_hub`); or the built-in ``shapes`` or ``shapes:N``.
        seed: of the built-in shapes.

    Raises:
        PatchloomError: nothing of this kind lies there, two formats do, or annotations do not fit their images.
    """
    if is_object(data) or not isinstance(data, str | os.PathLike):
        raise PatchloomError(
            f"boxes are read from one place, and not from objects or a list: give a folder with {_LAYOUTS}"
        )
    name = os.fspath(data)
    if isinstance(data, str) and is_builtin(name):
        opened = open_builtin(name, seed)
        if opened is None or not isinstance(opened.train, Shapes) or not isinstance(opened.test, Shapes):
            raise PatchloomError(f"{name} has no boxes: of the built-in data, only shapes has")
        return AnnotatedData(DrawnObjects(opened.train), None, DrawnObjects(opened.test))
    with Waiting(f"looking for the boxes of {name}"):
        return examined(_found(name))


def _found(name: str) -> Found:
    path = Path(name).expanduser()
    if not path.is_dir():
        beside = similar(path)
        hint = f"did you mean {beside}?" if beside else f"give a folder with {_LAYOUTS}, or shapes"
        raise PatchloomError(f"{name} does not exist: {hint}")
    listed = list_files(path)
    if files := xml_files(path, listed):
        return find_voc(name, path, listed, files)
    raise PatchloomError(f"{name} holds no annotations that are known: give a folder with {_LAYOUTS}")
