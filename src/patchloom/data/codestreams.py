"""Sizes in the headers of compressed images, such as parts of a TIFF, whose decoders allocate what these say."""

from __future__ import annotations

import struct
from collections.abc import Callable

_RATIOS = ((1, 1), (6, 5), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # of width to height in JPEG XL


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    while data[at] == 0xFF:
        kind = data[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the head of a frame
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return height, width
        at += 2 if kind in (0x01, 0xFF) or 0xD0 <= kind <= 0xD8 else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise ValueError("a part of it has no size")


def _jpeg_2000(data: bytes) -> tuple[int, int]:
    at = data.index(b"\xff\x4f\xff\x51") + 8  # the markers that begin the image
    right, bottom, left, top = struct.unpack(">IIII", data[at : at + 16])
    return bottom - top, right - left


def _jpeg_xl(data: bytes) -> tuple[int, int]:
    box = 0 if data[:1] == b"\xff" else data.index(b"jxl", 16)  # jxlc or jxlp, behind the boxes of the file's type
    at = data.index(b"\xff\x0a", box) + 2
    bits = int.from_bytes(data[at : at + 16], "little")

    def take(count: int) -> int:
        nonlocal bits
        taken, bits = bits & (1 << count) - 1, bits >> count
        return taken

    small = take(1)

    def side() -> int:
        return 8 * (take(5) + 1) if small else take((9, 13, 18, 30)[take(2)]) + 1

    height = side()
    if ratio := take(3):
        over, under = _RATIOS[ratio - 1]
        return height, height * over // under
    return height, side()


def _jpeg_xr(data: bytes) -> tuple[int, int]:
    at = int.from_bytes(data[4:8], "little")
    count = int.from_bytes(data[at : at + 2], "little")
    tags = struct.iter_unpack("<HHII", data[at + 2 : at + 2 + 12 * count])
    sizes = {tag: value for tag, _, _, value in tags}
    return sizes[0xBC81], sizes[0xBC80]


def _png(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack(">II", data[16:24])
    return height, width


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    width, height = struct.unpack("<HH", data[26:30])
    return height & 0x3FFF, width & 0x3FFF


def _lerc(data: bytes) -> tuple[int, int]:
    if data[:6] != b"Lerc2 ":  # compressed once more, which bounds it by a thousand times
        return 0, 0
    at = 14 if int.from_bytes(data[6:10], "little") >= 3 else 10  # behind a checksum
    height, width = struct.unpack("<II", data[at : at + 8])
    return height, width


# by the number of a compression in TIFF
_SIZES: dict[int, Callable[[bytes], tuple[int, int]]] = {
    **dict.fromkeys((7, 34892), _jpeg),
    **dict.fromkeys((33003, 33004, 33005, 34712), _jpeg_2000),
    **dict.fromkeys((50002, 52546), _jpeg_xl),
    **dict.fromkeys((22610, 34934), _jpeg_xr),
    **dict.fromkeys((34927, 50001), _webp),
    **{34933: _png, 34887: _lerc},
}


def has_size(compression: int) -> bool:
    """Return whether `part_size` reads the headers of a TIFF's compression."""
    return compression in _SIZES


def part_size(data: bytes, compression: int) -> tuple[int, int]:
    """Return (h, w) that the header of a compressed part of a TIFF says."""
    return _SIZES[compression](data)
