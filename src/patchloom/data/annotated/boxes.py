"""Opening images with boxes: the format is known by what lies there."""

from __future__ import annotations

import os
from pathlib import Path

from patchloom.data.annotated.base import AnnotatedData, Objects
from patchloom.data.annotated.boxed import Annotations
from patchloom.data.annotated.checks import examined
from patchloom.data.annotated.coco import find_coco, json_files, read_json
from patchloom.data.annotated.drawn import DrawnObjects
from patchloom.data.annotated.hub_boxes import find_hub
from patchloom.data.annotated.layout import is_role
from patchloom.data.annotated.voc import find_voc, xml_files
from patchloom.data.annotated.yolo import find_yaml, find_yolo, text_files, yaml_files
from patchloom.data.sources.builtin import is_builtin, open_builtin
from patchloom.data.sources.hub import is_hub
from patchloom.data.sources.listing import list_files
from patchloom.data.sources.objects import DataLike, is_object
from patchloom.data.sources.shapes import Shapes
from patchloom.errors import PatchloomError
from patchloom.files import similar
from patchloom.hints import listing
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
        if name.partition(":")[0] != "shapes":
            raise PatchloomError(f"{name} has no boxes: of the built-in data, only shapes has")
        opened = open_builtin(name, seed)
        assert opened is not None and isinstance(opened.train, Shapes) and isinstance(opened.test, Shapes)
        return AnnotatedData(DrawnObjects(opened.train), None, DrawnObjects(opened.test))
    with Waiting(f"looking for the boxes of {name}"):
        return examined(find_hub(name) if is_hub(name) else _found(name))


def _found(name: str) -> Annotations:
    path = Path(name).expanduser()
    if path.is_file():
        return _of_file(name, path)
    if not path.is_dir():
        beside = similar(path)
        hint = f"did you mean {beside}?" if beside else f"give a folder with {_LAYOUTS}, or shapes"
        raise PatchloomError(f"{name} does not exist: {hint}")
    listed = list_files(path)
    read = {file: read_json(path / file) for file in json_files(path, listed)}
    coco = {file: content for file, content in read.items() if content is not None}
    voc, yamls = xml_files(path, listed), yaml_files(path)
    text = [] if yamls else text_files(path, listed)
    there = {"COCO JSON": [*coco], "Pascal VOC XML": voc, "YOLO text": yamls or text}
    there = {kind: files for kind, files in there.items() if files}
    if len(there) > 1:
        which = listing([f"{kind} ({files[0]})" for kind, files in there.items()], "and")
        raise PatchloomError(
            f"{name} holds {which}: move all but one away, or give the JSON or data.yaml instead of the folder"
        )
    if len(yamls) > 1:
        raise PatchloomError(f"{name} holds {listing(yamls, 'and')}: give one of them instead of the folder")
    if coco:
        return find_coco(name, path, listed, coco)
    if voc:
        return find_voc(name, path, listed, voc)
    if yamls:
        return find_yaml(name, path / yamls[0])
    if text:
        return find_yolo(name, path, listed, text)
    strange = next(iter(read), None)
    if strange is not None:
        raise PatchloomError(
            f"{path / strange} is no COCO JSON, as it has no list of images: give a folder with {_LAYOUTS}"
        )
    raise PatchloomError(f"{name} holds no annotations that are known: give a folder with {_LAYOUTS}")


def _of_file(name: str, path: Path) -> Annotations:
    """The images that a JSON or YAML file names; those of a JSON lie in its folder, or beside it."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return find_yaml(name, path)
    if path.suffix.lower() != ".json":
        raise PatchloomError(f"{name} is no JSON and no YAML file: give a folder with {_LAYOUTS}")
    content = read_json(path)
    if content is None:
        raise PatchloomError(f"{name} is no COCO JSON, as it has no list of images")
    root = path.absolute().parent
    root = root.parent if is_role(root.name) else root
    return find_coco(name, root, list_files(root), {path.absolute().relative_to(root).as_posix(): content}, alone=True)
