"""Rows, pictures and result of a run for trackers, and a reader of W&B's offline files."""

import io
import json
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image
from resolved import resolved_settings

from patchloom.loggers.base import FinalResult
from patchloom.loggers.queue import TrackerSet
from patchloom.results.result import Result
from patchloom.runs.folder import RunFolder

SETTINGS = resolved_settings(
    "photos",
    task={"name": "mae", "mask_ratio": 0.75},
    model={"name": "nano", "depth": 2},
    img_size=(32, 32),
    patch_size=8,
)
ROWS = [
    {"step": "0", "epoch": "0", "held_out": "1.5", "baseline:flat patches": "1", "images:apart": "0.9", "images": "0"},
    {"step": "4", "epoch": "0.5", "loss": "1.25", "lr": "0.004", "images": "64"},
    {"step": "8", "epoch": "1", "loss": "nan", "lr": "0.003", "images": "128", "held_out": "0.75", "knn": ""},
]
QUOTED = [
    Result("accuracy", 0.5, 0.4, 0.6, 100, "run", "knn", quoted=True),
    Result("accuracy", 0.25, 0.2, 0.3, 100, "raw pixels", "knn", quoted=True),
]
RESULT = FinalResult(8, "healthy: half of the way.", "The task is clearly being learnt.", QUOTED, ["recovered.png"])


def png(path: Path, grey: int) -> Path:
    Image.new("RGB", (4, 2), (grey, grey, grey)).save(path)
    return path


def shade(data: bytes) -> int:
    """Return the grey value of a picture from `png`."""
    return Image.open(io.BytesIO(data)).convert("L").getpixel((0, 0))


def whole_run(names: list[str], run: Path, said: list[str]) -> None:
    """Track a run of two starts: the first stops after its second row, the second finishes."""
    (run / "pictures").mkdir(parents=True)
    first = TrackerSet(names, RunFolder(run), said.append)
    first.start(SETTINGS, [])
    first.log_row(ROWS[0])
    first.log_images([png(run / "pictures" / "recovered.png", 10)], 0)
    first.log_row(ROWS[1])
    first.close("aborted")
    second = TrackerSet(names, RunFolder(run), said.append)
    second.start(SETTINGS, ROWS[:2])
    second.log_row(ROWS[2])
    png(run / "pictures" / "recovered.png", 200)
    second.log_result(RESULT)
    second.close("success")


def kept_by_wandb(file: Path) -> Iterator[Any]:
    """Yield the records of an offline file of W&B: a LevelDB log of protocol buffers.

    After 7 bytes come blocks of 32 KiB, with records of 4 bytes of checksum, 2 of length, 1 of type (1 whole; 2, 3, 4
    first, middle and last part), and data; fewer than 7 bytes at the end of a block are empty.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def whole_by_wandb(file: Path, seconds: float = 30) -> list[Any]:
    """Return `kept_by_wandb` when the run's end is there: W&B's process still writes after ``finish``."""
    from google.protobuf.message import DecodeError

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(DecodeError, struct.error):  # half a record
            records = list(kept_by_wandb(file))
            if records and records[-1].WhichOneof("record_type") == "exit":
                return records
        time.sleep(0.05)
    raise TimeoutError(f"W&B did not end {file} within {seconds} s")


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    """Return the rows that W&B received."""
    found = [one.history for one in records if one.WhichOneof("record_type") == "history"]
    return [{(item.key or item.nested_key[0]): json.loads(item.value_json) for item in one.item} for one in found]
