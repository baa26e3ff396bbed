"""Sizes in the headers of compressed images, such as parts of a TIFF, whose decoders allocate what these say."""

from __future__ import annotations

import struct

# compressions in TIFF whose decoders obey the sizes in the data, as `part_size` reads them
SIZED = {7, 34892, 33003, 33004, 33005, 34712, 50002, 52546, 22610, 34934, 34927, 50001, 34933, 34887}
_RATIOS = ((1, 1), (6, 5), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # of width to height in JPEG XL


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


def part_size(data: bytes, compression: int) -> tuple[int, int]:
    """Return (h, w) that the header of a compressed part of a TIFF says, by the number of its compression."""
    if compression in (7, 34892):  # JPEG
        at = 2
        while data[at] == 0xFF:
            kind = data[at + 1]
            if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the head of a frame
                return struct.unpack(">HH", data[at + 5 : at + 9])
            alone = kind in (0x01, 0xFF) or 0xD0 <= kind <= 0xD8
            at += 2 if alone else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        raise ValueError("a part of it has no size")
    if compression in (33003, 33004, 33005, 34712):  # JPEG 2000
        at = data.index(b"\xff\x4f\xff\x51") + 8  # the markers that begin the image
        right, bottom, left, top = struct.unpack(">IIII", data[at : at + 16])
        return bottom - top, right - left
    if compression in (50002, 52546):
        return _jpeg_xl(data)
    if compression in (22610, 34934):  # JPEG XR
        at = int.from_bytes(data[4:8], "little")
        count = int.from_bytes(data[at : at + 2], "little")
        tags = struct.iter_unpack("<HHII", data[at + 2 : at + 2 + 12 * count])
        sizes = {tag: value for tag, _, _, value in tags}
        return sizes[0xBC81], sizes[0xBC80]
    if compression == 34933:  # PNG
        width, height = struct.unpack(">II", data[16:24])
        return height, width
    if compression == 34887:  # LERC
        if data[:6] != b"Lerc2 ":  # compressed once more, which bounds it by a thousand times
            return 0, 0
        at = 14 if int.from_bytes(data[6:10], "little") >= 3 else 10  # behind a checksum
        return struct.unpack("<II", data[at : at + 8])
    kind_of_webp = data[12:16]
    if kind_of_webp == b"VP8X":
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    if kind_of_webp == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    width, height = struct.unpack("<HH", data[26:30])
    return height & 0x3FFF, width & 0x3FFF
