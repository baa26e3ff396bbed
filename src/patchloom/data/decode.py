"""Decoding of an image file, or its bytes, into a tensor."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from html import unescape
from importlib.util import find_spec
from io import BytesIO
from math import inf, prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps
from torch import Tensor

from patchloom.data.codestreams import SIZED, part_size
from patchloom.data.conversions import is_collecting, record_conversion, record_missing, record_names
from patchloom.errors import PatchloomError, one_line
from patchloom.system.files import regular

if TYPE_CHECKING:
    import tifffile

# Conversion of decoded arrays to images: depth, orientation, transparency.


def channels_first(array: np.ndarray) -> Tensor:
    """Return an array [h w] or [h w c] as a tensor [c h w]."""
    # A view, not a copy: memory stays channels-last, for which torchvision's uint8 resize is fastest.
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)


def refuse_bomb(height: int, width: int, each: int = 1, stored: int | None = None) -> None:
    """Refuse an image that may be a decompression bomb; called with the numbers of its header, before decoding.

    Args:
        height, width: pixels.
        each: bytes of a decoded pixel, all channels together.
        stored: bytes of the file; None for pixels that are in memory already.
    """
    # PIL refuses at the same size; this serves the formats that do not pass through PIL.
    if Image.MAX_IMAGE_PIXELS is not None and height * width > 2 * Image.MAX_IMAGE_PIXELS:
        raise ValueError(f"{height} x {width} pixels could be a decompression bomb; cut it into smaller images")
    if stored is not None:
        check_decoded_size(height * width * each, stored, "cut it into smaller images")


def check_decoded_size(decoded: int, stored: int, remedy: str) -> None:
    """Refuse a file that would decode to more bytes than any is given, and than its own size explains.

    The first limit is that of Pillow's largest 8-bit RGB image, 512 MiB. Honest files are beyond it only if they are
    large themselves: an image of 16 bits becomes 32, and lossless compression halves it, so that a factor of 8 is
    common; an MP3 at 128 kbit/s becomes one channel of 16 bits a sample, which is a factor of 5.5.
    """
    most = inf if Image.MAX_IMAGE_PIXELS is None else max(2 * 3 * Image.MAX_IMAGE_PIXELS, _MOST_EXPANSION * stored)
    if decoded > most:
        raise ValueError(f"its {stored:,} bytes would become {decoded:,}, and could be a decompression bomb; {remedy}")


def refuse_scans(content: bytes) -> None:
    """Refuse a JPEG of very many scans: each of them, however small, passes over the whole image."""
    scans, at = 0, 2
    while (found := _MARKER.search(content, at)) and found[0] != b"\xff\xd9":  # a film may follow, as on phones
        at = found.end() + int.from_bytes(content[found.end() : found.end() + 2], "big")
        scans += found[0] == b"\xff\xda"
    if scans > _MOST_SCANS:
        raise ValueError(f"it has {scans:,} scans where JPEGs have up to about 10; save it anew")


def read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, of an image that PIL has opened; very large EXIF data is refused."""
    if image.format == "PNG" and "exif" not in image.info:
        image.load()  # the data may be behind the pixels, where PIL would look for it, too
    _refuse_exif(max(len(image.info.get(key) or "") for key in ("exif", "Raw profile type exif")))
    found = image.getexif().get(_ORIENTATION, 1)
    return int(found) if found in range(1, 9) else 1  # malformed tags are of other types, and ignored by PIL, too


def _refuse_exif(size: int) -> None:
    if size > _MOST_EXIF:
        raise ValueError(f"its EXIF data has {size:,} bytes, and at most {_MOST_EXIF:,} are read; remove it")


def from_array(array: np.ndarray, window: tuple[float, float] | None = None) -> Tensor:
    """Convert an array [h w] or [h w c] to a tensor [c h w]; NaN is filled.

    Args:
        array: uint8, uint16 or floats in [0, 1]; with a ``window``, numbers of any type.
        window: values that become 0 and 1; those beyond are clipped.
    """
    if array.size == 0:
        raise ValueError("it holds no pixels")
    refuse_bomb(*array.shape[:2])
    if window is not None:
        low, high = window
        units = (fill_missing(array).astype(np.float32) - low) / np.float32(high - low)
        return channels_first(units.clip(0, 1))
    if array.dtype == np.uint8:
        return channels_first(np.array(array))
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:  # of either byte order
        record_conversion("deep")
        return channels_first(array.astype(np.float32) / np.float32(65535))
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())  # NaN anywhere makes both NaN
        if math.isnan(low):
            array = fill_missing(array)
            low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):
            raise ValueError(f"its values run from {low:g} to {high:g}; {_CHOOSE_WINDOW}, or scale it to [0, 1]")
        return channels_first(array.astype(np.float32))
    raise ValueError(f"its values are of type {array.dtype}; {_CHOOSE_WINDOW}, or save it as uint8 or uint16")


def fill_missing(array: np.ndarray, nodata: float | None = None) -> np.ndarray:
    """Fill missing values of an array [h w] or [h w c], NaN or ``nodata``, with the mean of the channel's others.

    A channel that has no others becomes 0.
    """
    missing = np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
    if nodata is not None:
        missing |= array == nodata
    if not missing.any():
        return array
    record_conversion("missing")
    record_missing(missing if missing.ndim == 3 else missing[..., None])
    counts = np.sum(~missing, (0, 1))
    if np.any(counts == 0):
        record_conversion("no values")
    mean = np.where(missing, 0, array).sum((0, 1), dtype=np.float64) / np.maximum(counts, 1)
    return np.where(missing, (mean if array.dtype.kind == "f" else np.rint(mean)).astype(array.dtype), array)


def over_white(array: np.ndarray, premultiplied: bool) -> np.ndarray:
    """Composite [h w c+1] in [0, 1], alpha last, over white: [h w c]."""
    colour, alpha = array[..., :-1], array[..., -1:]
    over = colour.copy() if premultiplied else colour * alpha
    over += 1 - alpha
    return np.clip(over, 0, 1, out=over)


def apply_orientation(array: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an EXIF orientation (1 to 8) of an array [h w ...]."""
    if orientation in (5, 6, 7, 8):
        array = array.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    if orientation not in range(2, 9):
        return array
    record_conversion("turned")
    return array.copy()  # np.ascontiguousarray would leave negative strides, which torch refuses, to sides of one pixel


def record_alpha(alpha: np.ndarray, tiff: bool) -> None:
    """Record an alpha channel in [0, 1] that is not opaque everywhere; in a TIFF, also one that may be data."""
    if (alpha < 1).any():
        between = ((alpha > 0) & (alpha < 1)).mean()
        record_conversion("doubtful alpha" if tiff and between > 0.5 else "alpha")


# Suffixes of the files of images and recordings.


_ALWAYS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".npy"})
HEIF = frozenset({".heic", ".heif", ".hif"})
DICOM = frozenset({".dcm", ".dicom"})
SOUND = frozenset({".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3"})
# extras for reading some formats, and the module that each installs
_MODULES = {"heic": "pillow_heif", "dicom": "pydicom", "audio": "soundfile"}
EXTRAS = dict.fromkeys(HEIF, "heic") | dict.fromkeys(DICOM, "dicom") | dict.fromkeys(SOUND, "audio")
_READ = {suffix for suffix, extra in EXTRAS.items() if find_spec(_MODULES[extra]) is not None}

SOUND_SUFFIXES = SOUND & _READ
IMAGE_SUFFIXES = _ALWAYS | _READ - SOUND

FILMS = frozenset(".mp4 .mov .m4v .avi .mkv .webm .mpg .mpeg .wmv .3gp .mts".split())
# formats that are not read although a user may expect it: such files are counted
LOOK_ALIKES = FILMS.union(
    """.avif .jxl .jp2 .j2k .jpx .jpf .jfif .jpe .apng .svg .psd .xcf .ico .tga .ppm .pgm .pbm .pnm .pfm .exr .hdr .pcx
    .sgi .qoi .dds
    .raw .dng .cr2 .cr3 .nef .arw .orf .rw2 .raf .srw .pef
    .nii .mha .mhd .nrrd .svs .ndpi .mrxs .scn .bif .czi .lif .nd2 .vsi .oib .oir .ims .fits .fit .h5 .hdf5 .npz
    .m4a .aac .wma .amr .aif .aiff .au .caf .sph .ape .wv""".split()
)

logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # it logs broken files, which are reported by name here

_ORIENTATION, _DESCRIPTION = 274, 270  # tags, in EXIF as in TIFF
_GDAL_METADATA, _GDAL_NODATA = 42112, 42113  # tags
_MOST_EXPANSION = 16  # decoded bytes for each of a file's, beyond 512 MiB
_MOST_SCANS = 64  # of a JPEG; Pillow and others write 10
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # of a JPEG's segment; compressed data cannot hold it
_BLOCK = 2**20  # bytes
_MOST_EXIF = 2**20  # bytes; a JPEG's segment holds 2**16
_CHOOSE_WINDOW = "give the values that become 0 and 1 behind the name of the data, as @window=-1000:4000"
HOUNSFIELD = -1024, 3071  # units of CT: the 12 bits from air to beyond bone
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
# the first bytes of formats that are read without PIL, or with more than PIL alone
_BEGINNINGS = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG": ".png",
    b"\x93NUMPY": ".npy",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
    b"II+\0": ".tif",
    b"MM\0+": ".tif",
}


# formats that Pillow may open; it detects others by content, whatever the suffix, and runs other programs for some
_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "MPO", "DIB", "HEIF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO")

# compressions of TIFF that Pillow decodes, and colours that it converts; tifffile decodes all other compressions
_PILLOW_COMPRESSIONS = {1, 2, 3, 4, 5, 6, 7, 8, 32773, 32946, 34925, 50000}  # none, CCITT, LZW, JPEG, deflate ...
_PILLOW_COLOURS = {3, 5, 6, 8}  # palette, CMYK, YCbCr, CIE L*a*b*
_MOST_PAGES = 2**14
_HARMLESS = 2**22  # pixels of a part of a TIFF that may be larger than it should be
# names of channels, and their attributes; bounded, since a file may hold megabytes that begin like one
_GDAL_ITEM = re.compile(r"<Item\b([^<>]{0,500})>([^<]{0,500})</Item>")
_GDAL_BAND = re.compile(r"\bsample=[\"'](\d{1,5})[\"']")
_OME_CHANNEL = re.compile(r"<Channel\b[^<>]{0,2000}>")
_OME_NAME = re.compile(r"\sName=[\"']([^\"']*)[\"']")
_OME_SIZES = re.compile(r"(?:Size[CZT]|PlaneCount|NumPlanes|SamplesPerPixel)\s*=\s*[\"'](\d+)")


# exceptions of decoders on broken bytes, whose messages are on the decoder's own variables
_DECODER_BUGS = (LookupError, struct.error, UnicodeDecodeError, ArithmeticError, TypeError, AttributeError)


class Unreadable(PatchloomError):
    """Error for an image that cannot be decoded; the message begins with its path."""


def read_image(path: str | Path) -> Tensor:
    """Decode an image file: JPEG, PNG, WebP, BMP, TIFF, the first frame of a GIF, or a ``.npy`` array [h w (c)].

    HEIC and DICOM need their extras. The EXIF orientation is applied, and transparency is composited over white. A grey
    image has 1 channel. Pages of a TIFF are channels where its metadata says so; otherwise the first page is the image.
    `patchloom.data.conversions` records which of these conversions were made.

    Returns:
        [c h w], uint8 for 8-bit files, float32 in [0, 1] for deeper ones (16 bits are divided by 65535).
    """
    with unreadable(str(path), "an image"), silence_decoders(), regular(path, follow=True).open("rb") as file:
        return _decoded(file, Path(path).suffix.lower())


def decode_image(content: bytes, name: str) -> Tensor:
    """Decode the bytes of an image file; the format is recognised by the first bytes."""
    suffix = next((suffix for begin, suffix in _BEGINNINGS.items() if content.startswith(begin)), "")
    if content[4:8] == b"ftyp":  # a container of many formats: the next four letters say which
        suffix = ".heic"
    elif content[128:132] == b"DICM":
        suffix = ".dcm"
    with unreadable(name, "an image"), silence_decoders():
        return _decoded(BytesIO(content), suffix)


@contextmanager
def unreadable(name: str, kind: str) -> Iterator[None]:
    """Convert all exceptions to `Unreadable`: the file ``name`` cannot be read as ``kind``, such as "an image"."""
    try:
        yield
    except Exception as error:  # decoders raise nearly anything on broken bytes: OSError, SyntaxError, struct.error...
        said = getattr(error, "strerror", None) or one_line(error, name)
        reason = said.replace("image file it", "it").rstrip(".")
        if isinstance(error, _DECODER_BUGS):
            reason = "it is damaged, or of a kind that is not supported"
        raise Unreadable(f"{name} cannot be read as {kind}: {reason}") from error


@contextmanager
def silence_decoders() -> Iterator[None]:
    """Suppress the warnings of decoders, which name no file; broken files are reported by name elsewhere."""
    _silence_libtiff()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def _silence_libtiff() -> None:
    """Suppress what the libtiff inside Pillow's wheel prints itself; a libtiff of the system is left alone."""
    wheel = Path(Image.__file__).parents[1]
    for path in (*wheel.glob("[Pp]illow.libs/libtiff-*.so*"), *wheel.glob("PIL/.dylibs/libtiff*.dylib")):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(os.fspath(path))
            library.TIFFSetErrorHandler(None)
            library.TIFFSetWarningHandler(None)


def open_pillow(source: Path | BinaryIO) -> ImageFile.ImageFile:
    """Open an image file with Pillow, but only in formats that are safe to decode: PostScript would be executed."""
    Image.init()
    if not isinstance(source, Path):
        _refuse_exif_segments(source)
    elif source.stat().st_size > _MOST_EXIF:  # opening each file once more would take time
        with source.open("rb") as file:
            _refuse_exif_segments(file)
    return Image.open(source, formats=[name for name in _FORMATS if name in Image.OPEN])


def _refuse_exif_segments(file: BinaryIO) -> None:
    """Refuse a JPEG with much EXIF data before Pillow joins its segments, in a time of the square of their number."""
    if _size_of(file) <= _MOST_EXIF:
        return
    file.seek(0)
    at, size, jpeg = 2, 0, file.read(2) == b"\xff\xd8"
    while jpeg:
        file.seek(at)
        head = file.read(10)
        if len(head) < 4 or head[0] != 0xFF or head[1] in (0xD9, 0xDA):  # the picture follows
            break
        if head[1] == 0xFF:  # padding
            at += 1
            continue
        length = 0 if head[1] == 0x01 or 0xD0 <= head[1] <= 0xD8 else int.from_bytes(head[2:4], "big")
        size += length * (head[1] == 0xE1 and head[4:] == b"Exif\0\0")
        at += 2 + length
    _refuse_exif(size)


def _size_of(file: IO[bytes]) -> int:
    """Return the number of bytes of an open file, whose position stays."""
    at = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(at)
    return size


def load_npy(file: BinaryIO | Path, mmap: Literal["r"] | None = None) -> np.ndarray:
    """Load an array [h w] or [h w c] of NumPy's format; with ``mmap`` its values are read when they are used."""
    array: np.ndarray = np.load(file, mmap, allow_pickle=False)
    if array.ndim not in (2, 3):
        raise ValueError(f"an array of {array.ndim} dimensions is not an image; save it as [h w] or [h w c]")
    return array


def _decoded(file: BinaryIO, suffix: str) -> Tensor:
    """Decode an open file, which is at its beginning."""
    if suffix == ".npy":
        return record_bands(from_array(load_npy(file)))
    if suffix in (".tif", ".tiff"):
        return _read_tiff(file)
    if suffix in DICOM:
        return from_array(read_dicom(file))
    if suffix in HEIF:
        from pillow_heif import register_heif_opener  # an extra

        register_heif_opener()
    head = file.read(25)
    if suffix == ".png" and head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR" and head[24:] == b"\x10":
        # PIL would silently drop the low byte of 16-bit colour
        with open_pillow(file) as image:  # reads the head alone, and refuses bombs
            refuse_bomb(image.height, image.width, 4 * len(image.getbands()), _size_of(file))
            orientation = read_orientation(image)
        import imagecodecs  # few formats need it

        file.seek(0)
        array = np.divide(imagecodecs.png_decode(file.read()), np.float32(65535), dtype=np.float32)
        record_conversion("deep")
        if array.ndim == 3 and array.shape[2] in (2, 4):
            record_alpha(array[..., -1], tiff=False)
            array = over_white(array, premultiplied=False)
        return channels_first(apply_orientation(array, orientation))
    quick = _read_jpeg(file) if suffix in (".jpg", ".jpeg") else None
    if quick is not None:
        return quick
    with open_checked(file) as image:
        return from_pil(image)


def open_checked(source: Path | BinaryIO) -> Image.Image:
    """Open an image file with Pillow; refuse one that would take too much memory or time, or that was cut short."""
    image = open_pillow(source)
    file = image.fp
    assert file is not None  # it has just been opened
    at, channels = file.tell(), 4 if image.mode in ("P", "PA") else len(image.getbands())
    refuse_bomb(image.height, image.width, channels, _size_of(file))
    file.seek(0)
    if "progressive" in image.info:
        refuse_scans(file.read())
    if image.format == "GIF":
        _refuse_cut_gif(file.read())
    file.seek(at)
    return image


def from_pil(image: Image.Image) -> Tensor:
    """Convert an 8-bit PIL image to uint8 [c h w] with c 1 or 3, with orientation applied and composited over white."""
    if read_orientation(image) in range(2, 9):
        record_conversion("turned")
    if image.mode in ("P", "PA") and image.format != "GIF":
        record_conversion("palette")
    elif image.mode not in ("1", "L", "LA", "La", "RGB", "RGBA", "RGBa", "P", "PA"):
        record_conversion("colours")
    if is_collecting() and image.format not in ("TIFF", "MPO") and getattr(image, "is_animated", False):
        record_conversion("frames")
    ImageOps.exif_transpose(image, in_place=True)
    if image.has_transparency_data:
        grey = image.mode in ("L", "LA")
        tiff, image = image.format == "TIFF", image.convert("RGBA")
        if is_collecting():
            record_alpha(np.asarray(image.getchannel("A")) / np.float32(255), tiff)
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("L" if grey else "RGB")
    elif image.mode == "1":
        image = image.convert("L")
    elif image.mode not in ("L", "RGB"):
        if image.mode == "F" or image.mode.startswith("I"):
            raise ValueError(f"pixels of mode {image.mode} are not supported; save it as 8 or 16-bit PNG or TIFF")
        image = image.convert("RGB")
    return channels_first(np.array(image))


def _refuse_cut_gif(content: bytes) -> None:
    """Refuse a GIF that ends within a block: PIL would read its first frame as if it were whole."""
    at = 13 + _gif_colours(content[10])
    try:
        while at < len(content) and content[at] != 0x3B:  # the end
            if content[at] == 0x2C:  # a frame: its place and colours, a number, and its data
                at += 11 + _gif_colours(content[at + 9])
            elif content[at] == 0x21:  # an extension: its kind, and its data
                at += 2
            else:  # what PIL skips, too
                at += 1
                continue
            while size := content[at]:  # blocks of up to 255 bytes
                at += 1 + size
            at += 1
    except IndexError:
        raise ValueError("it is cut short: its last frame is not whole") from None


def _gif_colours(flags: int) -> int:
    """Return the bytes of a GIF's list of colours."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def to_channels(image: Tensor, channels: int) -> Tensor:
    """Convert an image [c h w] to ``channels`` channels: grey is repeated, colour becomes its luma (ITU-R BT.601)."""
    have = image.shape[0]
    if have == channels:
        return image
    if have == 1 and channels == 3:
        return image.expand(3, -1, -1)
    if have == 3 and channels == 1:
        luma = torch.einsum("chw,c->hw", image.float(), torch.tensor(_LUMA))[None]
        return luma.round_().to(torch.uint8) if image.dtype == torch.uint8 else luma.clamp_(0, 1)
    raise PatchloomError(
        f"an image has {have} channels where {channels} are expected: only 1 and 3 can be converted to each other; "
        f"leave out --channels, or use an encoder for {have} channels, such as one adapted to them by pretrain --init"
    )


def has_colours(image: Tensor) -> bool:
    """Return whether an image [c h w] is not grey."""
    return len(image) == 3 and not (torch.equal(image[0], image[1]) and torch.equal(image[1], image[2]))


def _read_jpeg(file: BinaryIO) -> Tensor | None:
    """Decode a baseline grey or RGB JPEG to the same pixels as PIL, in 0.6 of its time; None: PIL has to decode it."""
    try:
        with open_pillow(file) as image:  # reads the header, and refuses decompression bombs
            if image.format not in ("JPEG", "MPO") or image.mode not in ("L", "RGB"):
                return None
            if "progressive" in image.info:  # little to gain, and only PIL notices missing scans
                return None
            orientation, (width, height) = read_orientation(image), image.size
        file.seek(0)
        content = file.read()
        if not content.endswith(b"\xff\xd9"):  # no end: this decoder would fill the missing part with grey
            return None
        import imagecodecs  # 28 MB on disc, which other formats do not need; without it PIL decodes this one

        array = imagecodecs.jpeg8_decode(content)
    except Exception:  # PIL will fail too, and its message is the one to show
        return None
    if array.dtype != np.uint8 or array.shape[:2] != (height, width) or array.shape[2:] not in ((), (3,)):
        return None
    return channels_first(apply_orientation(array, orientation))


def read_dicom(file: BinaryIO) -> np.ndarray:
    """Decode the first frame of an open DICOM file; pydicom is the extra ``dicom``.

    CT is converted to Hounsfield units by the rescale slope and intercept, and -1,024 to 3,071 are mapped to 0 to 1, so
    that scanners agree. Other stored values are divided by the largest that their bits can hold; the window is not
    applied, since it is made for viewing. White is 1, even if it is stored as 0 (MONOCHROME1).

    Returns:
        [h w] or [h w 3], uint8 for 8 bits, otherwise float32 in [0, 1].
    """
    import pydicom  # an extra
    from pydicom.filereader import read_dataset, read_preamble
    from pydicom.pixels import apply_color_lut, apply_rescale, pixel_array
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    stored = _size_of(file)
    read_preamble(file, force=False)
    head = read_dataset(file, False, True, stop_when=lambda tag, *_: tag.group != 2)  # which is never deflated
    if head.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:  # pydicom would inflate all of it
        inflater, size = zlib.decompressobj(-zlib.MAX_WBITS), 0
        while not inflater.eof and (piece := inflater.unconsumed_tail or file.read(_BLOCK)):
            size += len(inflater.decompress(piece, _BLOCK))
            check_decoded_size(size, stored, "save it without deflation")
    file.seek(0)
    data = pydicom.dcmread(file)
    if "Rows" not in data or "Columns" not in data:
        raise ValueError("it is a DICOM file without pixels")
    kind = str(data.get("PhotometricInterpretation", ""))
    channels = 3 if kind == "PALETTE COLOR" else int(data.get("SamplesPerPixel") or 1)
    each = channels * (1 if int(data.BitsStored) == 8 else 4)
    refuse_bomb(int(data.Rows), int(data.Columns), each, stored)
    if int(data.get("NumberOfFrames") or 1) > 1:
        record_conversion("frames")
    array = pixel_array(data, index=0)
    if kind == "PALETTE COLOR":
        record_conversion("palette")
        array = apply_color_lut(array, data)
        top = np.iinfo(array.dtype).max
        return array if top == 255 else (array / np.float32(top)).astype(np.float32)
    if data.get("Modality") == "CT" and array.ndim == 2:
        record_conversion("CT")
        air, dense = HOUNSFIELD
        units = apply_rescale(array, data).astype(np.float32)
        image = np.clip((units - air) / np.float32(dense - air), 0, 1)
    elif array.dtype == np.uint8 and int(data.BitsStored) == 8:
        image = array
    else:
        record_conversion("bits")
        least = -(2 ** (int(data.BitsStored) - 1)) if int(data.PixelRepresentation) else 0
        most = np.float32(2 ** int(data.BitsStored) - 1)
        image = np.clip((array.astype(np.float32) - least) / most, 0, 1)
    if kind == "MONOCHROME1":
        record_conversion("inverted")
        image = (255 if image.dtype == np.uint8 else np.float32(1)) - image
    return image


def _read_tiff(file: BinaryIO) -> Tensor:
    import tifffile  # it imports imagecodecs, which few formats need

    with tifffile.TiffFile(file) as tiff:
        page, series = tiff.pages.first, read_series(tiff)
        alpha = [int(kind) for kind in page.extrasamples][-1:] in ([1], [2])
        plain = page.samplesperpixel - alpha in (1, 3) or page.photometric in _PILLOW_COLOURS
        channel_pages = len(series.axes) == 3 and series.axes[0] in "CQ"
        check_page(page, _size_of(file), series.shape if channel_pages else None)
        if channel_pages:
            record_conversion("channel pages")
        elif len(series.pages) > 1:
            record_conversion("pages")
        if _is_inverted(page):
            record_conversion("inverted")
        refuse_signed(page)
        stated = page.photometric not in _PILLOW_COLOURS and _nodata(page) is not None
        simple = page.bitspersample <= 8 and plain and not channel_pages and not stated
        if simple and page.compression in _PILLOW_COMPRESSIONS:
            if page.compression == tifffile.COMPRESSION.JPEG:
                for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
                    tiff.filehandle.seek(offset)
                    refuse_scans(tiff.filehandle.read(count))
            # PIL knows palettes, CMYK and transparency. It gets an open file, since from a path it would map the pixels
            # into memory and, as of Pillow 13, scramble those of a file whose orientation tag swaps its sides.
            with open_pillow(file) as image:
                return from_pil(image)
        if simple and page.photometric in _PILLOW_COLOURS:
            kind, packed = (getattr(one, "name", one) for one in (page.photometric, page.compression))
            raise ValueError(f"colours of kind {kind} compressed by {packed} are not supported; save it as RGB")
        array = series.asarray() if channel_pages else page.asarray()
        if channel_pages or (page.planarconfig == tifffile.PLANARCONFIG.SEPARATE and page.samplesperpixel > 1):
            array = np.moveaxis(array, 0, -1)
        if array.ndim not in (2, 3):
            raise ValueError(f"axes {series.axes} are not an image; save it as [h w] or [h w c]")
        decoded = from_tiff(page, array, bool(alpha) and not channel_pages)
        record_names(lambda: channel_names(tiff, len(decoded)))
        return decoded


def refuse_signed(page: tifffile.TiffPage) -> None:
    """Refuse a page of a TIFF file with signed values, for which no window was given."""
    import tifffile  # as in _read_tiff

    if page.sampleformat == tifffile.SAMPLEFORMAT.INT:
        raise ValueError(f"its values are signed; {_CHOOSE_WINDOW}, or save it as uint8 or uint16")


def from_tiff(
    page: tifffile.TiffPage, array: np.ndarray, alpha: bool, window: tuple[float, float] | None = None
) -> Tensor:
    """Convert values [h w] or [h w c] of a TIFF page, or of a window of it, to an image [c h w].

    Args:
        page: page whose tags say what the values mean.
        array: decoded values.
        alpha: whether the last channel is transparency.
        window: as in `from_array`; then the values are data, and nothing is inverted or transparent.
    """
    top = 2**page.bitspersample - 1
    if (nodata := _nodata(page)) is not None:
        array = fill_missing(array, nodata)
    if window is not None:
        return from_array(apply_orientation(array, int(page.tags.valueof(_ORIENTATION, 1))), window)
    if _is_inverted(page):
        record_conversion("inverted")
        array = top - array if array.dtype.kind == "u" else array
    if array.dtype.kind in "bu" and page.bitspersample < 8 * array.dtype.itemsize:  # its full range, as of DICOM
        record_conversion("bits")
        array = array / np.float32(top)
    decoded = from_array(apply_orientation(array, int(page.tags.valueof(_ORIENTATION, 1))))
    if alpha:
        deep = decoded.is_floating_point()
        unit = decoded.permute(1, 2, 0).numpy() / np.float32(1 if deep else 255)
        record_alpha(unit[..., -1], tiff=True)
        over = over_white(unit, premultiplied=int(page.extrasamples[-1]) == 1)
        decoded = channels_first(over if deep else np.round(over * 255).astype(np.uint8))
    return record_bands(decoded)


def _nodata(page: tifffile.TiffPage) -> float | None:
    """Return the value that stands for missing pixels, by GDAL's tag; None without, for NaN, and for masks."""
    try:
        value = float(page.tags.valueof(_GDAL_NODATA, "nan"))
    except (TypeError, ValueError):
        return None
    return None if math.isnan(value) or page.bitspersample < 8 else value


def channel_names(tiff: tifffile.TiffFile, channels: int) -> tuple[str, ...]:
    """Return the names of the ``channels`` of a TIFF, by the metadata of OME or GDAL; empty if not all have one."""
    first = (tiff.ome_metadata or "").partition("</Pixels>")[0]
    found = [_OME_NAME.search(one) for one in _OME_CHANNEL.findall(first)]
    names = [unescape(one[1]).strip() if one else "" for one in found]
    if not names:
        items = _GDAL_ITEM.findall(str(tiff.pages.first.tags.valueof(_GDAL_METADATA, "")))
        described = [(_GDAL_BAND.search(about), name) for about, name in items if "description" in about]
        by_band = {int(band[1]): unescape(name).strip() for band, name in described if band}
        names = [by_band.get(number, "") for number in range(channels)]
    return tuple(names) if len(names) == channels and all(names) else ()


def _is_inverted(page: tifffile.TiffPage) -> bool:
    """Return whether white is stored as 0; masks of one bit are left as they are."""
    return bool(page.photometric == 0 and page.bitspersample > 1)


def read_series(tiff: tifffile.TiffFile) -> tifffile.TiffPageSeries:
    """Return the first series of a TIFF file: its pages, or the channels that its metadata makes of them.

    A file that was cut short is refused, since its first page may be whole, and then seems to be all of it.
    """
    file, form, page = tiff.filehandle, tiff.tiff, tiff.pages.first
    file.seek(tiff.pages.next_page_offset or 0)  # where the offset of the next page is, which is 0 behind the last one
    if file.read(form.offsetsize) != bytes(form.offsetsize):
        raise ValueError("it is cut short: its list of pages leads beyond its end")
    file.seek(page.offset)
    (count,) = struct.unpack(form.tagnoformat, file.read(form.tagnosize))
    codes = [
        code
        for code, *_ in struct.iter_unpack(f"{form.byteorder}H{form.tagsize - 2}x", file.read(count * form.tagsize))
    ]
    if _DESCRIPTION in codes and _DESCRIPTION not in page.tags:  # with it, pages may be channels
        raise ValueError("it is cut short: its description is beyond its end")
    # tifffile makes a list of as many pages as OME's metadata says
    sizes = [int(size[:10]) for size in _OME_SIZES.findall(tiff.ome_metadata or "")]
    if prod(sizes[:3]) > _MOST_PAGES or max(sizes, default=0) > _MOST_PAGES:
        raise ValueError(f"its metadata says that it has more than {_MOST_PAGES:,} pages; save it as [h w] or [h w c]")
    series = tiff.series[0]
    pages = [one for one in series.pages if one is not None]
    if len(pages) < len(series.pages):
        raise ValueError("it is cut short: pages that its metadata lists are missing")
    for one in pages:
        ends = map(sum, zip(one.dataoffsets, one.databytecounts, strict=False))
        if one.parent is tiff and max(ends, default=0) > file.size:
            raise ValueError("it is cut short: its pixels are beyond its end")
    return series


def check_page(page: tifffile.TiffPage, stored: int, shape: tuple[int, ...] | None = None) -> None:
    """Refuse a page of a TIFF file of ``stored`` bytes that may be a decompression bomb, before it is decoded.

    ``shape`` is that of all pages that are read, if there are several.
    """
    width = 1 if page.bitspersample <= 8 else 4
    tile = page.tilelength * page.tilewidth * page.tiledepth * page.samplesperpixel
    values = max(prod(shape or page.shape), tile)
    refuse_bomb(page.imagelength, page.imagewidth)
    check_decoded_size(values * width, stored, "cut it into smaller images")
    if page.compression in SIZED:  # their decoders obey the sizes in the data, and not those of the page
        most = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, page.imagewidth)
        file = page.parent.filehandle
        for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
            file.seek(offset)
            if data := file.read(count):
                inside = part_size(data, page.compression)
                # some writers fill the last part up
                if prod(inside) > _HARMLESS and (inside[0] > most[0] or inside[1] > most[1]):
                    raise ValueError(
                        f"it is damaged: parts of {most[0]} x {most[1]} pixels hold {inside[0]} x {inside[1]}"
                    )


def record_bands(image: Tensor) -> Tensor:
    """Record that an image [c h w] has bands of data, or seems to have its channels first; return it."""
    c, h, w = image.shape
    if c == 4:
        record_conversion("bands")
    elif c > 4 and c >= min(h, w):
        record_conversion("many channels")
    return image
