"""Files of every format that patchloom reads, damaged at random: read, or refused in a sentence, within limits.

python benchmarks/fuzz.py [--files 2000] [--seed 1] [--formats png,voc] [--keep FOLDER]

Each file is tried in a child process. A file fails if it ends in an exception that is no `PatchloomError`, kills the
process, or takes more memory or time than the limits; failures are kept with ``--keep``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tifffile
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from patchloom.audio.decode import read_recording
from patchloom.data.decode import Unreadable, read_image
from patchloom.data.sources.open import open_data
from patchloom.dense.annotations.detection import open_boxes
from patchloom.dense.annotations.segmentation import read_ids
from patchloom.embed.formats import read_card, read_rows
from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.nets.checkpoints.read import checksum
from patchloom.results import store
from patchloom.results.result import Result
from patchloom.runs.checkpoint import Checkpoints
from patchloom.runs.folder import RunFolder
from patchloom.train.checkpointing import TrainState

MEMORY = 3 * 2**30  # bytes that one file may add at its peak: a few times the limit of decoded values
SECONDS = 20.0  # of CPU time for one file
_WALL = 120.0  # seconds until a child that does not answer is killed
_ROOM = 2**35  # bytes of address space of a child, so that the machine survives it
OUTCOMES = ("read", "refused", "traceback", "killed", "over memory", "over time")


class Format(NamedTuple):
    """A format of files.

    Attributes:
        write: writes a small valid file, and others that it needs, into a folder.
        file: name of the file that is damaged.
        read: reads the file, as patchloom's verbs do; gets its path.
        seal: makes the checksums of a damaged file right, so that what is behind them is tried, too.
    """

    write: Callable[[Path], object]
    file: str
    read: Callable[[Path], object]
    seal: Callable[[bytes], bytes] = bytes


RNG = np.random.default_rng(0)
_RGB, _GREY = RNG.integers(0, 256, (24, 32, 3), dtype=np.uint8), RNG.integers(0, 256, (24, 32), dtype=np.uint8)
_CHANNELS = RNG.integers(0, 2**16, (5, 24, 32)).astype(np.uint16)


def _picture(name: str, array: np.ndarray = _RGB, **options: object) -> Callable[[Path], object]:
    return lambda folder: Image.fromarray(array).save(folder / name, **options)


def _frames(folder: Path) -> None:
    frames = [Image.fromarray(np.roll(_RGB, i, 0)) for i in range(3)]
    frames[0].save(folder / "a.gif", save_all=True, append_images=frames[1:])


def _tiff(array: np.ndarray, **options: object) -> Callable[[Path], object]:
    return lambda folder: tifffile.imwrite(folder / "a.tif", array, **options)


def _dicom(folder: Path) -> None:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import DeflatedExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    data, about = Dataset(), FileMetaDataset()
    about.TransferSyntaxUID, about.MediaStorageSOPClassUID = (
        DeflatedExplicitVRLittleEndian,
        SecondaryCaptureImageStorage,
    )
    about.MediaStorageSOPInstanceUID = generate_uid()
    data.file_meta, data.Modality, data.PhotometricInterpretation = about, "CT", "MONOCHROME2"
    data.Rows, data.Columns, data.SamplesPerPixel, data.PixelRepresentation = 24, 32, 1, 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 12, 11
    data.RescaleSlope, data.RescaleIntercept = "1", "-1024"
    data.PixelData = (_CHANNELS[0] % 4096).tobytes()
    data.save_as(folder / "a.dcm", enforce_file_format=True)


def _sound(name: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        import soundfile

        soundfile.write(folder / name, RNG.uniform(-1, 1, (3000, 2)), 8000)

    return write


def _shard(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i in range(3):
            picture = BytesIO()
            Image.fromarray(_RGB).save(picture, "PNG")
            for suffix, content in ((".png", picture.getvalue()), (".cls", str(i % 2).encode())):
                member = tarfile.TarInfo(f"image{i}{suffix}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))


def _images(folder: Path) -> None:
    (folder / "images").mkdir()
    for stem in "abc":
        Image.fromarray(_RGB).save(folder / f"images/{stem}.png")


def _csv(folder: Path) -> None:
    _images(folder)
    rows = ["path,label,split", *(f"images/{stem}.png,{i},train" for i, stem in enumerate("abc"))]
    (folder / "a.csv").write_text("\n".join(rows))


def _coco(folder: Path) -> None:
    _images(folder)
    images = [{"id": i, "file_name": f"{stem}.png", "width": 32, "height": 24} for i, stem in enumerate("abc")]
    box = {"category_id": 1, "bbox": [2, 3, 9.5, 8], "iscrowd": 0, "segmentation": [[2, 3, 9, 3, 9, 8]]}
    boxes = [{"id": i, "image_id": i, **box} for i in range(3)]
    found = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]}
    (folder / "a.json").write_text(json.dumps(found))


def _voc(folder: Path) -> None:
    _images(folder)
    box = "<bndbox><xmin>3</xmin><ymin>4</ymin><xmax>9</xmax><ymax>12</ymax></bndbox>"
    (folder / "a.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?><annotation><filename>a.png</filename><size><width>32</width>'
        f"<height>24</height><depth>3</depth></size><object><name>cat</name>{box}</object></annotation>"
    )


def _yolo(folder: Path) -> None:
    _images(folder)
    (folder / "labels").mkdir()
    for stem in "abc":
        (folder / f"labels/{stem}.txt").write_text("0 0.5 0.5 0.2 0.3\n1 0.1 0.1 0.4 0.1 0.4 0.4\n")
    (folder / "data.yaml").write_text("train: images\nnc: 2\nnames:\n  0: cat\n  1: dog\n")


def _labels(folder: Path) -> None:
    _yolo(folder)
    (folder / "labels/a.txt").rename(folder / "a.txt")
    (folder / "labels/a.txt").symlink_to(folder / "a.txt")


def _encoder(folder: Path) -> None:
    spec = EncoderSpec("nano", (16, 16), 8, options={"embed_dim": 16, "depth": 1, "num_heads": 2})
    card = EncoderCard(spec, (0.5,) * 3, (0.25,) * 3, "mae", "small")
    save_encoder(build_encoder(spec), card, folder / "a.safetensors")


def _checkpoint(folder: Path) -> None:
    state = TrainState(step=3, steps=9, seconds=1.5, rows=[{"epoch": "1", "loss": "0.5"}], sums={"loss": 0.5})
    tensors, about = {"a": torch.zeros(4)}, json.dumps(state.plain())
    (folder / "last.safetensors").parent.mkdir(exist_ok=True)
    save_file(tensors, folder / "last.safetensors", {"about": about, "sha256": checksum(tensors, about)})


def _values(folder: Path) -> None:
    _checkpoint(folder)
    with safe_open(folder / "last.safetensors", "pt") as file:
        (folder / "about.json").write_text(file.metadata()["about"])


def _resealed(path: Path) -> None:
    about = path.read_text("utf-8", "replace")
    tensors = {"a": torch.zeros(4)}
    save_file(tensors, path.with_name("last.safetensors"), {"about": about, "sha256": checksum(tensors, about)})
    _resumed(path)


def _chunks(content: bytes) -> bytes:
    """Return a PNG whose chunks have the checksums of what they hold."""
    sealed, at = bytearray(content), 8
    while at + 12 <= len(sealed):
        end = at + 8 + int.from_bytes(sealed[at : at + 4], "big")
        if end + 4 > len(sealed):
            break
        sealed[end : end + 4] = struct.pack(">I", zlib.crc32(sealed[at + 4 : end]))
        at = end + 4
    return bytes(sealed)


def _vectors(folder: Path) -> None:
    card = {"rows": 2, "unreadable": 0, "classes": ["a"], **{name: {} for name in _NESTED}}
    texts = {"paths": np.array(["a", "b"]), "splits": np.array(["train"] * 2), "classes": np.array(["a"])}
    columns = {"card": np.array(json.dumps(card)), "labels": np.zeros(2, np.int64), **texts}
    with open(folder / "a.npz", "wb") as file:
        np.savez(file, **columns, vectors=np.zeros((2, 3), np.float32))


_NESTED = ("encoder", "preprocessing", "computed", "data")


def _run(folder: Path) -> None:
    stats = {"mean": [0.5] * 3, "std": [0.2] * 3, "height": 32, "width": 32, "sampled": 10, "fingerprint": "f" * 16}
    stats |= {"held_out": [1], "held_out_copies": [], "held_out_doubt": "", "held_out_looked": True}
    (folder / "data.yaml").write_text(yaml.dump(stats))
    asked = {"task": {"name": "mae", "mask_ratio": 0.75}, "model": {"name": "nano"}, "epochs": 5.0, "seed": 0}
    (folder / "requested.yaml").write_text(yaml.dump(asked))
    settings = {**asked, "data": "shapes", "img_size": [32, 32], "patch_size": 8, "positions": "sincos", "channels": 3}
    settings |= {"batch_size": 16, "blr": 1e-3, "weight_decay": 0.05, "layer_decay": 1.0, "warmup_epochs": 1.0}
    settings |= {"crop_scale": 0.2, "held_out": 0.1, "normalization": "data", "workers": 0, "device": "cpu"}
    settings |= {"precision": "float32", "attention": "fused", "kernels": "torch", "compile": False, "threads": 1}
    settings |= {"adapt": "all", "heads_first": 0.0, "devices": 1, "cache": "none"}
    (folder / "config.yaml").write_text(yaml.dump(settings))


def _results(folder: Path) -> None:
    right = np.array([True, False] * 10)
    store.append(folder, [Result.of_images("mae", "knn", {"k": 20}, right, np.arange(20) // 2)])


def _all_of(path: Path) -> None:
    """Open data, and read its images, some of which may be unreadable."""
    data = open_data(path)
    data.train.fingerprint()
    for i in range(len(data.train)):
        with suppress(Unreadable):
            data.train.read(i)


def _boxes(path: Path) -> None:
    data = open_boxes(path.parent)
    for i in range(len(data.train)):
        data.train.truth(i)


def _resumed(path: Path) -> None:
    tensors, about, _ = Checkpoints(path.parent).read(unsealed=True)
    TrainState.of(about, tensors)


def _rows(path: Path) -> None:
    read_rows(path)
    read_card(path)


def _recording(path: Path) -> None:
    read_recording(path, 16_000)


def _weights(path: Path) -> None:
    load_encoder_file(path)


FORMATS = {
    "png": Format(_picture("a.png"), "a.png", read_image, _chunks),
    "png 16 bits": Format(_picture("a.png", _CHANNELS[0]), "a.png", read_image, _chunks),
    "label map": Format(_picture("a.png", _GREY), "a.png", lambda path: read_ids(path, path.name), _chunks),
    "jpeg": Format(_picture("a.jpg", exif=Image.Exif()), "a.jpg", read_image),
    "jpeg progressive": Format(_picture("a.jpg", progressive=True), "a.jpg", read_image),
    "webp": Format(_picture("a.webp"), "a.webp", read_image),
    "gif": Format(_frames, "a.gif", read_image),
    "bmp": Format(_picture("a.bmp"), "a.bmp", read_image),
    "tiff": Format(_tiff(_RGB, compression="zlib", photometric="rgb"), "a.tif", read_image),
    "tiff jpeg 2000": Format(_tiff(_RGB, compression="jpeg2000", photometric="rgb"), "a.tif", read_image),
    "tiff ome": Format(_tiff(_CHANNELS, ome=True, metadata={"axes": "CYX"}), "a.tif", read_image),
    "tiff imagej": Format(_tiff(_CHANNELS, imagej=True, metadata={"axes": "CYX"}), "a.tif", read_image),
    "npy": Format(lambda folder: np.save(folder / "a.npy", _RGB), "a.npy", read_image),
    "dicom": Format(_dicom, "a.dcm", read_image),
    "wav": Format(_sound("a.wav"), "a.wav", _recording),
    "flac": Format(_sound("a.flac"), "a.flac", _recording),
    "ogg": Format(_sound("a.ogg"), "a.ogg", _recording),
    "tar": Format(_shard, "a.tar", _all_of),
    "csv": Format(_csv, "a.csv", _all_of),
    "coco": Format(_coco, "a.json", _boxes),
    "voc": Format(_voc, "a.xml", _boxes),
    "yolo": Format(_yolo, "data.yaml", _boxes),
    "yolo labels": Format(_labels, "a.txt", _boxes),
    "encoder": Format(_encoder, "a.safetensors", _weights),
    "checkpoint": Format(_checkpoint, "last.safetensors", _resumed),
    "checkpoint values": Format(_values, "about.json", _resealed),
    "vectors": Format(_vectors, "a.npz", _rows),
    "config.yaml": Format(_run, "config.yaml", lambda path: RunFolder(path.parent).read_config()),
    "requested.yaml": Format(_run, "requested.yaml", lambda path: RunFolder(path.parent).read_requested()),
    "results.jsonl": Format(_results, store.FILE, lambda path: store.load(path.parent, outcomes=True)),
    "data.yaml": Format(_run, "data.yaml", lambda path: RunFolder(path.parent).read_stats()),
}
_NEEDED = {"dicom": "pydicom", "wav": "soundfile", "flac": "soundfile", "ogg": "soundfile"}  # extras
FORMATS = {name: one for name, one in FORMATS.items() if name not in _NEEDED or find_spec(_NEEDED[name])}

_WORDS = [b"-1", b"0", b"1e999", b"nan", b"inf", b"9" * 30, b"9" * 5000, b"null", b"[]", b"{}", b'"x"', b"true", b""]
_WORDS += [b"\\ud83d", b"2026-11-26", b"gb2312", b"utf-7", b"../../x", b"a" * 5000, b"\0", "é".encode("latin-1")]
_WORD = re.compile(rb"[A-Za-z_]+|-?\d+(?:\.\d+)?")
_EXTREMES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Damage a file in one to three ways: bits, bytes, numbers of its header, cuts and repetitions; words of a text."""
    changed, kinds = bytearray(content), 6 if b"\0" in content else 24
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not changed:
            break
        # headers are near the beginning, and of some formats at the end
        place = min(
            int(rng.expovariate(6 / len(changed))) if rng.random() < 0.6 else rng.randrange(len(changed)),
            len(changed) - 1,
        )
        kind = rng.randrange(kinds)
        if kind == 0:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[place : place + rng.randint(1, 8)] = rng.randbytes(rng.randint(1, 8))
        elif kind == 2:
            form = rng.choice(("<H", ">H", "<I", ">I"))
            number = struct.pack(form, rng.choice(_EXTREMES) % 2 ** (8 * struct.calcsize(form)))
            changed[place : place + len(number)] = number
        elif kind == 3:
            del changed[int(len(changed) * rng.random()) :]
        elif kind == 4:
            del changed[place : place + rng.randint(1, 64)]
        elif kind == 5:
            changed[place:place] = changed[place : place + rng.randint(1, 64)] * rng.choice((1, 2, 100))
        else:
            words = [*_WORD.finditer(bytes(changed))]
            if words:
                word = rng.choice(words)
                changed[word.start() : word.end()] = rng.choice(_WORDS)
    return bytes(changed)


class Attempt(NamedTuple):
    """Outcome of reading a file, one of `OUTCOMES`, with seconds of CPU time, bytes at the peak, and the reason."""

    outcome: str
    seconds: float = 0.0
    peak: int = 0
    reason: str = ""


def attempt(form: Format, path: Path) -> Attempt:
    """Read a file in this process."""
    before, begin = _memory("VmRSS"), time.process_time()
    _reset_peak()
    outcome, reason = "read", ""
    try:
        form.read(path)
    except PatchloomError as error:
        outcome, reason = (
            ("traceback", f"an empty message: {error!r}") if not str(error).strip() else ("refused", str(error))
        )
    except Exception:  # a fault to find: a reader may raise PatchloomError alone
        outcome, reason = "traceback", traceback.format_exc()
    seconds, peak = time.process_time() - begin, max(0, _memory("VmHWM") - before)
    if seconds > SECONDS:
        outcome = "over time"
    elif peak > MEMORY:
        outcome = "over memory"
    return Attempt(outcome, seconds, peak, reason)


def _memory(name: str) -> int:
    """Return a number of bytes of this process by its name in Linux; 0 elsewhere."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def child(name: str, seed: int, numbers: range, folder: str, to: Connection) -> None:
    """Try the files of ``numbers`` of a format, and send what became of each."""
    resource.setrlimit(resource.RLIMIT_AS, (_ROOM, _ROOM))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders print lines
    torch.set_num_threads(1)
    form = FORMATS[name]
    for number in numbers:
        path = damaged(name, seed, number, Path(folder))
        to.send((number, None))
        to.send((number, attempt(form, path)))


def damaged(name: str, seed: int, number: int, folder: Path) -> Path:
    """Write the damaged file of a number into a folder of its own, with the files that it needs."""
    form, rng = FORMATS[name], random.Random(f"{seed} {name} {number}")
    place = folder / f"{name.replace(' ', '-')}-{number}"
    place.mkdir()
    form.write(place)
    path = place / form.file
    path.write_bytes(form.seal(mutate(path.read_bytes(), rng)))
    return path


def try_format(name: str, seed: int, count: int, folder: Path) -> list[Attempt]:
    """Try ``count`` damaged files of a format; a child that dies or hangs is replaced by another."""
    context, found = multiprocessing.get_context("fork"), list[Attempt]()
    while len(found) < count:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(name, seed, range(len(found), count), str(folder), theirs))
        process.start()
        theirs.close()
        with suppress(EOFError):
            while len(found) < count:
                if not mine.poll(_WALL):
                    found.append(Attempt("over time", _WALL, 0, "no answer"))
                    process.kill()
                    break
                _, outcome = mine.recv()
                if outcome is not None:
                    found.append(outcome)
        process.join(5)
        if len(found) < count and process.exitcode not in (0, None) and not (found and found[-1].reason == "no answer"):
            found.append(Attempt("killed", 0, 0, f"exit code {process.exitcode}"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000, help="damaged files, of all formats together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--keep", type=Path, help="folder for the files that failed, and the reasons")
    arguments = parser.parse_args()
    names, failed, begin = arguments.formats.split(","), 0, time.perf_counter()
    total: Counter[str] = Counter()
    print("| format | files |", " | ".join(OUTCOMES), "| slowest, CPU s | largest, MiB |")
    print("| --- " * (4 + len(OUTCOMES)) + "|", flush=True)
    for place, name in enumerate(names):
        count = arguments.files // len(names) + (place < arguments.files % len(names))
        with tempfile.TemporaryDirectory() as folder:
            found = try_format(name, arguments.seed, count, Path(folder))
            for number, one in enumerate(found):
                if one.outcome not in ("read", "refused"):
                    failed += 1
                    print(f"{name} {number}: {one.outcome}: {one.reason.strip()[-300:]}", file=sys.stderr, flush=True)
                    if arguments.keep:
                        to = arguments.keep / f"{name.replace(' ', '-')}-{number}"
                        to.mkdir(parents=True, exist_ok=True)
                        path = Path(folder, to.name, FORMATS[name].file)
                        (to / path.name).write_bytes(path.read_bytes())
                        (to / "reason.txt").write_text(one.reason)
        counts = Counter(one.outcome for one in found)
        total += counts
        slowest, largest = max(one.seconds for one in found), max(one.peak for one in found) / 2**20
        numbers = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
        print(f"| {name} | {count} | {numbers} | {slowest:.2f} | {largest:.0f} |", flush=True)
    print(f"| all | {sum(total.values())} | {' | '.join(str(total[outcome]) for outcome in OUTCOMES)} | | |")
    print(f"seed {arguments.seed}, {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
