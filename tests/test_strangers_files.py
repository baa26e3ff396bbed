"""Files of strangers that once ended in a traceback: each is refused in a sentence, or read."""

import json
import os
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import draw_images
from PIL import Image
from safetensors.torch import save_file

from patchloom import cli
from patchloom.data.sources.open import open_data
from patchloom.dense.annotations.detection import open_boxes
from patchloom.dense.annotations.segmentation import open_label_maps
from patchloom.embed.formats import read_rows
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import checksum, read_weights
from patchloom.runs.checkpoint import Checkpoints
from patchloom.runs.checksummed import read_checksummed
from patchloom.system.documents import is_whole, parse_json, parse_number
from patchloom.train.checkpointing import TrainState


def refused(function, *given) -> str:
    """Return the sentence in which a call is refused."""
    with pytest.raises(PatchloomError) as caught:
        function(*given)
    assert str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


# Numbers.


@pytest.mark.parametrize("text", ["", "wide", "nan", "inf", "-inf", "1e999", "9" * 5000, "1_0x", "0x10", "\0"])
def test_numbers_are_finite(text):
    with pytest.raises(ValueError, match="is no (finite )?number"):
        parse_number(text)
    assert parse_number(" 2.5 ") == 2.5 and parse_number("1e3") == 1000


def test_whole_numbers_fit_into_64_bits():
    assert is_whole("0") and is_whole("9" * 18) and is_whole("007")
    assert not any(map(is_whole, ("", "-1", "1.5", "²", "9" * 19, "9" * 5000)))


# Annotations.


def voc(root: Path, content: bytes) -> Path:
    Image.new("RGB", (20, 16)).save(root / "a.png")
    (root / "a.xml").write_bytes(content)
    return root


BOX = "<xmin>2</xmin><ymin>2</ymin><xmax>9</xmax><ymax>9</ymax>"
SHEET = (
    '<?xml version="1.0" encoding="{}"?><annotation><size><width>{}</width><height>16</height></size><object>'
    f"<name>{{}}</name><bndbox>{BOX}</bndbox></object></annotation>"
)
FOREIGN = ["gb2312", "Shift_JIS", "utf-7", "idna", "rot13", "zlib", "punycode", "hex", "utf-32", "latin-1", "nothing"]


@pytest.mark.parametrize("encoding", FOREIGN)
def test_xml_in_another_encoding(tmp_path, encoding):
    said = refused(open_boxes, voc(tmp_path, SHEET.format(encoding, 20, "cat").encode()))
    assert f"a.xml cannot be read as XML: it is in the encoding {encoding}: save it as UTF-8" in said


@pytest.mark.parametrize("encoding", ["gb18030", "shift_jis", "utf-32"])
def test_xml_that_is_not_utf_8(tmp_path, encoding):
    said = refused(open_boxes, voc(tmp_path, SHEET.format("utf-8", 20, "黒猫と犬").encode(encoding)))
    assert "a.xml cannot be read as XML" in said


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_xml_in_unicode(tmp_path, encoding):
    data = open_boxes(voc(tmp_path, SHEET.format(encoding.replace("-sig", ""), 20, "猫").encode(encoding)))
    assert data.train.classes == ("猫",) and data.train.truth(0).boxes.tolist() == [[1, 1, 9, 9]]


@pytest.mark.parametrize("width", ["inf", "nan", "1e400", "9" * 5000, "-inf", "wide"])
def test_widths_that_are_no_numbers(tmp_path, width):
    assert "no number in size/width" in refused(open_boxes, voc(tmp_path, SHEET.format("utf-8", width, "cat").encode()))


@pytest.mark.parametrize("text", ["<a>" * 100_000, "<a/><b/>", "", "&x;", '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'])
def test_xml_that_is_none(tmp_path, text):
    assert "a.xml cannot be read as XML: " in refused(open_boxes, voc(tmp_path, text.encode()))


def coco(root: Path, change: str) -> Path:
    """Write images and COCO JSON, with a change to it."""
    Image.new("RGB", (20, 16)).save(root / "a.png")
    what = {
        "images": [{"id": 1, "file_name": "a.png", "width": 20, "height": 16}],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [2, 2, 9, 9]}],
    }
    image, category, one = (what[name][0] for name in ("images", "categories", "annotations"))
    exec(change, {"image": image, "category": category, "one": one})
    (root / "coco.json").write_text(json.dumps(what))
    return root


COCO = [
    *("one.update(bbox=[10**400, 1, 2, 3])", "one.update(bbox=[1, 1, -10**5000 // 10**4000, 3])"),
    *("image.update(id=10**400)", "image.update(width=10**400)", "one.update(image_id=10**30)"),
    *("one.update(bbox=[[1], 1, 2, 3])", "one.update(bbox=[{}, 1, 2, 3])", "one.update(bbox=[None] * 4)"),
    *("image.update(id=[1])", "image.update(id={})", "category.update(id=[1])", "one.update(category_id={})"),
    *("image.update(file_name='\\ud83d.png')", "category.update(name='\\udc00')", "image.update(file_name=5)"),
    *("image.update(file_name='a\\0b.png')", "image.update(file_name='a' * 10_000)", "category.update(name=None)"),
]


@pytest.mark.parametrize("change", COCO)
def test_coco_with_values_of_other_kinds(tmp_path, change):
    said = refused(open_boxes, coco(tmp_path, change))
    assert "coco.json" in said or "file_name" in change


@pytest.mark.parametrize("change", ["one.update(id=[1])", "one.update(id={})", "one.update(iscrowd=[])", "pass"])
def test_fields_of_coco_that_are_not_needed(tmp_path, change):
    assert len(open_boxes(coco(tmp_path, change)).train) == 1


def test_json_is_of_plain_values():
    assert parse_json(b'{"a": [1, -123456789012345678, 0.12345678901234567890123], "b": "\\ud83d\\ude00"}')["b"] == "😀"
    for text in (b"[1234567890123456789]", b"[" * 10**5, b'"\\ud83d"', b"[1", b"\xff"):
        with pytest.raises((ValueError, RecursionError)):
            parse_json(text)


def yolo(root: Path, **more) -> Path:
    (root / "images").mkdir(parents=True)
    (root / "labels").mkdir()
    for stem in "ab":
        Image.new("RGB", (20, 16)).save(root / f"images/{stem}.png")
        (root / f"labels/{stem}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (root / "data.yaml").write_text(json.dumps({"train": "images", "val": "images", "names": ["cat"]} | more))
    return root


@pytest.mark.parametrize("key", ["train", "val", "path"])
@pytest.mark.parametrize("place", ["a" * 10_000, "a/" * 5000, "a\0b"], ids=["long", "deep", "nul"])
def test_paths_of_yolo_that_no_folder_can_have(tmp_path, key, place):
    try:
        open_boxes(yolo(tmp_path, **{key: place}))
    except PatchloomError as error:
        assert "\n" not in str(error)


def test_many_names_of_yolo(tmp_path):
    names = [f"class {i}" for i in range(20_000)]
    data = open_boxes(yolo(tmp_path / "many", names=names, val=""))
    assert len(data.train.classes) == 20_000
    said = refused(open_boxes, yolo(tmp_path / "more", names=[*names, *map(str, range(20_000))]))
    assert "40,000 names of classes: give up to 32,767" in said
    assert "the class b more than once" in refused(open_boxes, yolo(tmp_path / "twice", names=["a", "b", "b"]))


@pytest.mark.parametrize("line", ["1e400 .5 .5 .2 .2", "0 inf .5 .2 .2", "9" * 5000 + " .5 .5 .2 .2", "0 1_x 0 0 0"])
def test_labels_of_yolo_that_are_no_numbers(tmp_path, line):
    root = yolo(tmp_path)
    (root / "labels" / "a.txt").write_text(line)
    assert "a.txt, line 1, " in refused(open_boxes, root)


# Lists, tables and shards.


LISTS = {
    "nul.txt": b"a\0b.png\nimages/0.png\n",
    "nul.csv": b"path,label\na\0b.png,1\nimages/0.png,2\n",
    "latin.txt": "images/é.png".encode("latin-1"),
    "binary.txt": bytes(range(256)) * 20,
    "empty.txt": b"",
    "long.txt": b"images/" + b"a" * 10_000 + b".png\n",
    "deep.txt": b"a/" * 5000 + b"b.png\n",
    "cell.csv": b"path,label\nimages/0.png," + b"x" * 200_000 + b"\n",
    "missing.csv": b"path,label\n" + b"a" * 10_000 + b".png,1\n",
    "quote.csv": b'path,label\n"images/0.png,1\n',
}


@pytest.mark.parametrize("name", LISTS)
def test_bad_lists(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_images(tmp_path / "images", 2)
    (tmp_path / name).write_bytes(LISTS[name])
    assert name in refused(open_data, name)


@pytest.mark.parametrize(
    "data",
    [["a\0b.png"], "a\0b", "a" * 10_000, ["a" * 10_000 + ".png"], ["\ud83d"], [""], [], [5], "x\0*.png", "hf:\0"],
)
def test_names_that_no_data_has(data):
    refused(open_data, data)
    for function in (open_boxes, open_label_maps):
        if isinstance(data, str):
            refused(function, data)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_list_that_may_not_be_read(tmp_path):
    (tmp_path / "a.txt").write_text("b.png")
    (tmp_path / "a.txt").chmod(0)
    assert "a.txt cannot be read" in refused(open_data, tmp_path / "a.txt")


def test_labels_of_more_digits_than_int_reads(tmp_path):
    draw_images(tmp_path / "images", 2)
    paths = sorted(str(path.relative_to(tmp_path / "images")) for path in (tmp_path / "images").rglob("*.*"))
    rows = [f"images/{path},{digits}" for path, digits in zip(paths, ("9" * 4301, "1" * 5000), strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["path,label", *rows]))
    assert open_data(tmp_path / "a.csv").train.classes == ("1" * 5000, "9" * 4301)
    import tarfile
    from io import BytesIO

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i, path in enumerate(paths):
            for suffix, content in (
                (".png", (tmp_path / "images" / path).read_bytes()),
                (".cls", str(i).encode() * 5000),
            ):
                member = tarfile.TarInfo(f"{i}{suffix}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
    assert open_data(tmp_path / "a.tar").train.classes == ("0" * 5000, "1" * 5000)


# Runs, checkpoints, weights and vectors.


@pytest.mark.parametrize("line", ["seed: 2026-11-20", "task: {name: mae, x: 2026-11-20T10:00:00}", "1.5: !!set {a}"])
def test_dates_in_the_settings_of_a_run(tmp_path, line):
    (tmp_path / "requested.yaml").write_text(f"epochs: 5\n{line}\n")
    assert "requested.yaml cannot be read" in refused(read_checksummed, tmp_path / "requested.yaml")


FORGED = [
    *({"rows": None}, {"rows": "word"}, {"rows": [1]}, {"rows": [{"loss": 1}]}, {"rows": {}}, {"sums": {"loss": "a"}}),
    *({"scale": "x"}, {"scale": None}, {"counted": -1}, {"setbacks": 1.5}, {"skipped": [1]}, {"results": [1]}),
    *({"results": {"1": 2}}, {"best": {"step": 5, "more": 1}}, {"best": {"failed": "x"}}, {"began": 10**400}),
]


@pytest.mark.parametrize("about", FORGED, ids=str)
def test_forged_values_of_a_checkpoint(about):
    assert "the checkpoint holds values that no run writes" in refused(TrainState.of, {"step": 1} | about, {})


def test_the_values_of_a_checkpoint_that_a_run_writes():
    state = TrainState(step=3, rows=[{"loss": "1"}], results={"3": [float("nan"), 1.0]}, sums={"loss": 1.0})
    assert TrainState.of(json.loads(json.dumps(state.plain())), {}).plain()["rows"] == state.rows


BEST = [{"step": "x"}, {"step": -1}, {"step": None}, {"chosen": True}, {"chosen": "x"}, [], 5, "word"]


@pytest.mark.parametrize("best", BEST, ids=str)
def test_a_forged_best_measure(tmp_path, best):
    text, tensors = json.dumps({"step": 1, "best": best}), {"a": torch.zeros(2)}
    (tmp_path / "checkpoints").mkdir()
    save_file(tensors, tmp_path / "checkpoints/last.safetensors", {"about": text, "sha256": checksum(tensors, text)})
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert "last.safetensors is damaged" in refused(checkpoints.read)
    assert checkpoints.about() == {}


def packed(path: Path, dtype: str, size: int, **metadata: str) -> Path:
    """Write a safetensors file of one tensor of two numbers."""
    head = json.dumps({"a": {"dtype": dtype, "shape": [2], "data_offsets": [0, size]}, "__metadata__": metadata})
    path.write_bytes(struct.pack("<Q", len(head)) + head.encode() + bytes(size))
    return path


@pytest.mark.parametrize("dtype, size", [("F4", 1), ("F8_E4M3", 2), ("F8_E5M2", 2), ("C64", 16), ("XX", 2), ("U16", 4)])
def test_tensors_of_types_without_arithmetic(tmp_path, dtype, size):
    path = packed(tmp_path / "a.safetensors", dtype, size)
    assert "a.safetensors cannot be read as weights" in refused(read_weights, path)
    assert "cannot be read as vectors" in refused(read_rows, path)
    (tmp_path / "checkpoints").mkdir()
    packed(tmp_path / "checkpoints/last.safetensors", dtype, size, about="{}", sha256="x")
    assert "is damaged" in refused(Checkpoints(tmp_path / "checkpoints").read)


def test_tensors_of_types_with_arithmetic(tmp_path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
    for kind in kinds:
        save_file({"a": torch.zeros(2, dtype=kind)}, tmp_path / "a.safetensors")
        assert read_weights(tmp_path / "a.safetensors")["a"].dtype == kind


VECTORS = [
    np.array(["a", "b"]),
    np.array([1.0, 2.0]),
    np.array([[1, 2]]),
    np.array([b"x"]),
    np.array([[True]]),
    np.array(5.0),
    np.zeros((3, 4)),
]


@pytest.mark.parametrize("vectors", VECTORS, ids=lambda one: f"{one.dtype}{one.shape}")
def test_columns_of_vectors_of_other_kinds(tmp_path, vectors):
    columns = {"labels": np.zeros(2, np.int64), "classes": np.array(["a"]), "paths": np.array(["a", "b"])}
    np.savez(tmp_path / "a.npz", **columns, splits=columns["paths"], vectors=vectors)
    assert "a.npz cannot be read as vectors" in refused(read_rows, tmp_path / "a.npz")


def test_columns_of_parquet_of_other_kinds(tmp_path):
    arrow = pytest.importorskip("pyarrow")

    texts = {name: ["a", "b"] for name in ("path", "split", "label")}
    for vector in (["a", "b"], [1, 2], [[1.0], [2.0, 3.0]], [None, None], [{"a": 1}, {"a": 2}], [b"x", b"y"]):
        arrow.parquet.write_table(arrow.table({**texts, "vector": vector}), tmp_path / "a.parquet")
        assert "cannot be read as vectors" in refused(read_rows, tmp_path / "a.parquet")
    arrow.parquet.write_table(arrow.table({"path": ["a"], "vector": [[1.0]]}), tmp_path / "a.parquet")
    assert "cannot be read as vectors" in refused(read_rows, tmp_path / "a.parquet")


def test_every_flag_bit_of_a_zip(tmp_path):
    columns = {"labels": np.zeros(1, np.int64), "classes": np.array(["a"]), "paths": np.array(["a"])}
    np.savez(tmp_path / "a.npz", **columns, splits=columns["paths"], vectors=np.zeros((1, 2), np.float32))
    content = (tmp_path / "a.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as file:
        heads = [one.header_offset for one in file.infolist()]
    places = [heads[0] + i for i in range(4, 30)] + [content.index(b"PK\1\2") + i for i in range(4, 46)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place in places:
            for bit in range(8):
                changed = bytearray(content)
                changed[place] ^= 1 << bit
                (tmp_path / "b.npz").write_bytes(changed)
                try:
                    rows = read_rows(tmp_path / "b.npz")
                    assert rows.vectors.shape == (1, 2)
                except PatchloomError as error:
                    assert "cannot be read as vectors" in str(error)


# The command line.


def run_command(words: list[str], **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "patchloom.cli", *words], capture_output=True, env=os.environ | environment, timeout=120
    )


def test_a_terminal_without_the_letters():
    done = run_command(["recipes"], PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0 and not done.stderr and done.stdout.isascii()
    done = run_command(["check", "/tmp/größe/nowhere"], PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 2 and b"/tmp/gr\\" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5"])
def test_numbers_of_processes_that_are_none(name, value, monkeypatch, capfd):
    monkeypatch.setenv(name, value)
    assert cli.main(["tasks"]) == 2
    assert f"the environment has {name}={value}, and a whole number is needed" in capfd.readouterr().err
