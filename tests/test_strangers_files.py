"""Files of strangers that once ended in a traceback: each is refused in a sentence, or read."""

import json
import os
import struct
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from labelled import write_noise
from PIL import Image
from refusing import refusal
from safetensors.torch import save_file

from patchloom import cli
from patchloom.data.sources.open import open_data
from patchloom.dense.annotations.detection import open_boxes
from patchloom.dense.annotations.segmentation import open_label_maps
from patchloom.embed.formats import read_rows
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.read import checksum, read_weights
from patchloom.runs.checkpoint import Checkpoints
from patchloom.system.checksummed import read_checksummed
from patchloom.system.documents import is_whole, parse_json, parse_number
from patchloom.train.checkpointing import TrainState


def test_numbers_are_finite_and_whole_ones_fit_into_64_bits():
    for text in ("", "wide", "nan", "inf", "-inf", "1e999", "9" * 5000, "1_0x", "0x10", "\0"):
        with pytest.raises(ValueError, match="is no (finite )?number"):
            parse_number(text)
    assert parse_number(" 2.5 ") == 2.5 and parse_number("1e3") == 1000
    assert is_whole("0") and is_whole("9" * 18) and is_whole("007")
    assert not any(map(is_whole, ("", "-1", "1.5", "²", "9" * 19, "9" * 5000)))


def voc(root: Path, content: bytes) -> Path:
    root.mkdir(exist_ok=True)
    Image.new("RGB", (20, 16)).save(root / "a.png")
    (root / "a.xml").write_bytes(content)
    return root


BOX = "<xmin>2</xmin><ymin>2</ymin><xmax>9</xmax><ymax>9</ymax>"
SHEET = (
    '<?xml version="1.0" encoding="{}"?><annotation><size><width>{}</width><height>16</height></size><object>'
    f"<name>{{}}</name><bndbox>{BOX}</bndbox></object></annotation>"
)
FOREIGN = ["gb2312", "Shift_JIS", "utf-7", "idna", "rot13", "zlib", "punycode", "hex", "utf-32", "latin-1", "nothing"]


def test_xml_is_in_unicode(tmp_path):
    for encoding in FOREIGN:
        said = refusal(open_boxes, voc(tmp_path, SHEET.format(encoding, 20, "cat").encode()))
        assert f"a.xml cannot be read as XML: it is in the encoding {encoding}" in said and "UTF-8" in said
    for encoding in ("gb18030", "shift_jis", "utf-32"):
        said = refusal(open_boxes, voc(tmp_path, SHEET.format("utf-8", 20, "黒猫と犬").encode(encoding)))
        assert "a.xml cannot be read as XML" in said
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        data = open_boxes(voc(tmp_path, SHEET.format(encoding.replace("-sig", ""), 20, "猫").encode(encoding)))
        assert data.train.classes == ("猫",) and data.train.truth(0).boxes.tolist() == [[1, 1, 9, 9]]


def test_xml_that_is_none_or_has_no_numbers(tmp_path):
    for width in ("inf", "nan", "1e400", "9" * 5000, "-inf", "wide"):
        sheet = SHEET.format("utf-8", width, "cat").encode()
        assert "no number in size/width" in refusal(open_boxes, voc(tmp_path, sheet))
    for text in ("<a>" * 100_000, "<a/><b/>", "", "&x;", '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'):
        assert "a.xml cannot be read as XML: " in refusal(open_boxes, voc(tmp_path, text.encode()))


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


COCO = (
    *("one.update(bbox=[10**400, 1, 2, 3])", "one.update(bbox=[1, 1, -10**5000 // 10**4000, 3])"),
    *("image.update(id=10**400)", "image.update(width=10**400)", "one.update(image_id=10**30)"),
    *("one.update(bbox=[[1], 1, 2, 3])", "one.update(bbox=[{}, 1, 2, 3])", "one.update(bbox=[None] * 4)"),
    *("image.update(id=[1])", "image.update(id={})", "category.update(id=[1])", "one.update(category_id={})"),
    *("image.update(file_name='\\ud83d.png')", "category.update(name='\\udc00')", "image.update(file_name=5)"),
    *("image.update(file_name='a\\0b.png')", "image.update(file_name='a' * 10_000)", "category.update(name=None)"),
)


@pytest.mark.parametrize("change", COCO)
def test_coco_with_values_of_other_kinds(tmp_path, change):
    said = refusal(open_boxes, coco(tmp_path, change))
    assert "coco.json" in said or "file_name" in change


def test_json_is_of_plain_values(tmp_path):
    for change in ("one.update(id=[1])", "one.update(id={})", "one.update(iscrowd=[])", "pass"):  # are not needed
        assert len(open_boxes(coco(tmp_path, change)).train) == 1
    assert parse_json(b'{"a": [1, -123456789012345678, 0.12345678901234567890123], "b": "\\ud83d\\ude00"}')["b"] == "😀"
    for text in (b"[1234567890123456789]", b"[" * 10**5, b'"\\ud83d"', b"[1", b"\xff"):
        with pytest.raises((ValueError, RecursionError)):
            parse_json(text)


def yolo(root: Path, **more) -> Path:
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for stem in "ab":
        Image.new("RGB", (20, 16)).save(root / f"images/{stem}.png")
        (root / f"labels/{stem}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (root / "data.yaml").write_text(json.dumps({"train": "images", "val": "images", "names": ["cat"]} | more))
    return root


def test_paths_of_yolo_that_no_folder_can_have(tmp_path):
    for place in ("a" * 10_000, "a/" * 5000, "a\0b"):
        for key in ("train", "val", "path"):
            try:
                open_boxes(yolo(tmp_path, **{key: place}))
            except PatchloomError as error:
                assert "\n" not in str(error)


def test_names_of_yolo_are_single_and_not_too_many(tmp_path):
    assert len(open_boxes(yolo(tmp_path, names=[f"class {i}" for i in range(5000)], val="")).train.classes) == 5000
    assert "32,767" in refusal(open_boxes, yolo(tmp_path, names=[*map(str, range(40_000))]))
    assert "several classes with the name b" in refusal(open_boxes, yolo(tmp_path, names=["a", "b", "b"]))


def test_labels_of_yolo_that_are_no_numbers(tmp_path):
    for line in ("1e400 .5 .5 .2 .2", "0 inf .5 .2 .2", "9" * 5000 + " .5 .5 .2 .2", "0 1_x 0 0 0"):
        (yolo(tmp_path) / "labels" / "a.txt").write_text(line)
        assert "a.txt, line 1, " in refusal(open_boxes, tmp_path)


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


def test_lists_and_names_that_no_data_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_noise(tmp_path / "images", 2)
    for name, content in LISTS.items():
        (tmp_path / name).write_bytes(content)
        assert name in refusal(open_data, name)
    for data in ("a\0b", "a" * 10_000, "x\0*.png", "hf:\0"):
        for function in (open_data, open_boxes, open_label_maps):
            refusal(function, data)
    for data in (["a\0b.png"], ["a" * 10_000 + ".png"], ["\ud83d"], ["\ud83d", "b"], [""], [], [5]):
        refusal(open_data, data)
    if os.geteuid():  # root may read everything
        (tmp_path / "a.txt").write_text("b.png")
        (tmp_path / "a.txt").chmod(0)
        assert "a.txt cannot be read" in refusal(open_data, tmp_path / "a.txt")


def test_labels_of_more_digits_than_int_reads(tmp_path):
    write_noise(tmp_path / "images", 2)
    paths = sorted((tmp_path / "images").rglob("*.*"))
    rows = [f"{path},{digits}" for path, digits in zip(paths, ("9" * 4301, "1" * 5000), strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["path,label", *rows]))
    assert open_data(tmp_path / "a.csv").train.classes == ("1" * 5000, "9" * 4301)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i, path in enumerate(paths):
            (tmp_path / "label").write_text(str(i) * 5000)
            tar.add(path, f"{i}.png")
            tar.add(tmp_path / "label", f"{i}.cls")
    assert open_data(tmp_path / "a.tar").train.classes == ("0" * 5000, "1" * 5000)


def test_dates_in_the_settings_of_a_run(tmp_path):
    for line in ("seed: 2026-11-20", "task: {name: mae, x: 2026-11-20T10:00:00}", "1.5: !!set {a}"):
        (tmp_path / "requested.yaml").write_text(f"epochs: 5\n{line}\n")
        assert "requested.yaml cannot be read" in refusal(read_checksummed, tmp_path / "requested.yaml")


FORGED = (
    *({"rows": None}, {"rows": "word"}, {"rows": [1]}, {"rows": [{"loss": 1}]}, {"rows": {}}, {"sums": {"loss": "a"}}),
    *({"scale": "x"}, {"scale": None}, {"counted": -1}, {"setbacks": 1.5}, {"skipped": [1]}, {"results": [1]}),
    *({"results": {"1": 2}}, {"best": {"step": 5, "more": 1}}, {"best": {"failed": "x"}}, {"began": 10**400}),
)
BEST = ({"step": "x"}, {"step": -1}, {"step": None}, {"chosen": True}, {"chosen": "x"}, [], 5, "word")


def test_forged_values_of_a_checkpoint(tmp_path):
    for about in FORGED:
        assert "the checkpoint holds values that no run writes" in refusal(TrainState.of, {"step": 1} | about, {})
    state = TrainState(step=3, rows=[{"loss": "1"}], results={"3": [float("nan"), 1.0]}, sums={"loss": 1.0})
    assert TrainState.of(json.loads(json.dumps(state.plain())), {}).plain()["rows"] == state.rows
    for best in BEST:
        text, tensors = json.dumps({"step": 1, "best": best}), {"a": torch.zeros(2)}
        save_file(tensors, tmp_path / "last.safetensors", {"about": text, "sha256": checksum(tensors, text)})
        checkpoints = Checkpoints(tmp_path)
        assert "last.safetensors is damaged" in refusal(checkpoints.read) and checkpoints.about() == {}


def packed(path: Path, dtype: str, size: int, **metadata: str) -> Path:
    """Write a safetensors file of one tensor of two numbers."""
    head = json.dumps({"a": {"dtype": dtype, "shape": [2], "data_offsets": [0, size]}, "__metadata__": metadata})
    path.write_bytes(struct.pack("<Q", len(head)) + head.encode() + bytes(size))
    return path


def test_tensors_of_types_without_arithmetic(tmp_path):
    for dtype, size in (("F4", 1), ("F8_E4M3", 2), ("F8_E5M2", 2), ("C64", 16), ("XX", 2), ("U16", 4)):
        path = packed(tmp_path / "last.safetensors", dtype, size, about="{}", sha256="x")
        assert "last.safetensors cannot be read as weights" in refusal(read_weights, path)
        assert "cannot be read as vectors" in refusal(read_rows, path)
        assert "is damaged" in refusal(Checkpoints(tmp_path).read)
    for kind in ("float64", "float32", "float16", "bfloat16", "int64", "bool", "uint8"):
        tensor = torch.zeros(2, dtype=getattr(torch, kind))
        save_file({"a": tensor}, tmp_path / "a.safetensors")
        assert read_weights(tmp_path / "a.safetensors")["a"].dtype == tensor.dtype


COLUMNS = {"labels": np.zeros(2, np.int64), "classes": np.array(["a"]), "paths": np.array(["a", "b"])}


def test_columns_of_vectors_of_other_kinds(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    for vectors in (["a", "b"], [1.0, 2.0], [[1, 2]], [b"x"], [[True]], 5.0, np.zeros((3, 4))):
        np.savez(tmp_path / "a.npz", **COLUMNS, splits=COLUMNS["paths"], vectors=np.array(vectors))
        assert "a.npz cannot be read as vectors" in refusal(read_rows, tmp_path / "a.npz")
    texts = {name: ["a", "b"] for name in ("path", "split", "label")}
    tables = [
        {**texts, "vector": vector}
        for vector in (["a", "b"], [1, 2], [[1.0], [2.0, 3.0]], [None, None], [{"a": 1}, {"a": 2}], [b"x", b"y"])
    ]
    for table in (*tables, {"path": ["a"], "vector": [[1.0]]}):
        arrow.parquet.write_table(arrow.table(table), tmp_path / "a.parquet")
        assert "cannot be read as vectors" in refusal(read_rows, tmp_path / "a.parquet")


def test_every_flag_bit_of_a_zip(tmp_path):
    columns = COLUMNS | {"labels": np.zeros(1, np.int64), "paths": np.array(["a"]), "splits": np.array(["a"])}
    np.savez(tmp_path / "a.npz", **columns, vectors=np.zeros((1, 2), np.float32))
    content = (tmp_path / "a.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as file:
        head = file.infolist()[0].header_offset
    places = [head + i for i in range(4, 30)] + [content.index(b"PK\1\2") + i for i in range(4, 46)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, bit in ((place, bit) for place in places for bit in range(8)):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            (tmp_path / "b.npz").write_bytes(changed)
            try:
                assert read_rows(tmp_path / "b.npz").vectors.shape == (1, 2)
            except PatchloomError as error:
                assert "cannot be read as vectors" in str(error)


def test_a_terminal_without_the_letters():
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}

    def printed(*words: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "patchloom.cli", *words]
        return subprocess.run(command, capture_output=True, env=ascii_only, timeout=120)

    done = printed("recipes")
    assert done.returncode == 0 and not done.stderr and done.stdout.isascii()
    done = printed("check", "/tmp/größe/nowhere")
    assert done.returncode == 2 and b"/tmp/gr\\" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "MASTER_PORT"])
def test_numbers_of_processes_that_are_none(name, monkeypatch, capfd):
    for value in ("abc", "", "-1", "1.5"):
        monkeypatch.setenv(name, value)
        assert cli.main(["tasks"]) == 2
        assert f"the environment has {name}={value}, and a whole number is needed" in capfd.readouterr().err
