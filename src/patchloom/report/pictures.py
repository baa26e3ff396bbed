"""Picture sheets of runs as data URIs, so small that a page with all of them stays small."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from patchloom.data.read import open_pillow
from patchloom.report.captions import caption_of
from patchloom.report.content import Picture
from patchloom.report.gather import Gathered

BUDGET = 2_400_000  # bytes of all pictures of a page, as they are written
_LIVE = ("curves",)  # what the page draws itself
# width in pixels and quality of WebP, tried in turn until all pictures fit
_STEPS = ((1600, 85), (1400, 78), (1200, 72), (1000, 68), (800, 62), (640, 55), (480, 50))
_MOST_PIXELS = 10**8  # of a file that is opened


def sheets_of(run: Gathered) -> list[Path]:
    """The PNG files in a run's folders of pictures, of its own images first, but for what the page draws itself."""
    folders = [run.folder.pictures, *sorted(run.folder.path.glob("pictures-*"))]
    found = [path for folder in folders for path in sorted(folder.rglob("*.png")) if path.is_file()]
    return [path for path in found if path.stem not in _LIVE]


def encoded(sheets: Mapping[Path, tuple[Gathered, str]], budget: int = BUDGET) -> tuple[dict[Path, Picture], list[str]]:
    """Pictures by file, and a sentence for what cannot be shown.

    Args:
        sheets: files with the run of each and, where it is no picture of the run's own images, of which ones.
        budget: bytes of all of them as data URIs; where even the smallest do not fit, the last ones are left out.
    """
    opened: dict[Path, Image.Image] = {}
    said = []
    for path in sheets:
        try:
            with open_pillow(path) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ValueError(f"it has {image.width}x{image.height} pixels")
                opened[path] = _reduced(image.convert("RGB"), _STEPS[0][0])
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            said.append(f"{path.name} could not be shown ({problem}).")
    made: dict[Path, tuple[str, int, int]] = {}
    for width, quality in _STEPS:
        made = {path: webp(image, width, quality) for path, image in opened.items()}
        if sum(len(uri) for uri, *_ in made.values()) <= budget:
            break
    else:
        left = [path for path in reversed(made)]
        for path in left:
            if sum(len(uri) for uri, *_ in made.values()) <= budget:
                break
            del made[path]
        said.append(f"{len(opened) - len(made)} of {len(opened)} pictures are left out, so that the page stays small.")
    found = {}
    for path, (uri, width, height) in made.items():
        run, of = sheets[path]
        title, text = caption_of(path.stem, run.sound)
        title = f"{title}, of {of}" if of else title
        found[path] = Picture(title, text, f"{title}: {run.name}, {path.name}", uri, width, height)
    return found, said


def pictures_of(runs: Sequence[Gathered], budget: int = BUDGET) -> tuple[list[list[Picture]], list[str]]:
    """The pictures of each run, and sentences on what cannot be shown."""
    sheets = [sheets_of(run) for run in runs]
    owners = {path: (run, _images(path, run)) for run, paths in zip(runs, sheets, strict=True) for path in paths}
    found, said = encoded(owners, budget)
    return [[found[path] for path in paths if path in found] for paths in sheets], said


def webp(image: Image.Image, width: int, quality: int) -> tuple[str, int, int]:
    """An image as the data URI of a WebP that is at most so wide, and twice as high; its width and its height."""
    image = _reduced(image, width)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=4)
    return data_uri("image/webp", buffer.getvalue()), image.width, image.height


def _reduced(image: Image.Image, width: int) -> Image.Image:
    """At most so wide, and twice as high; the image itself where it is."""
    scale = min(1.0, width / image.width, 2 * width / image.height)
    if scale == 1:
        return image
    smaller = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(smaller, Image.Resampling.LANCZOS)


def data_uri(kind: str, content: bytes) -> str:
    """Bytes as an address that holds them."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _images(path: Path, run: Gathered) -> str:
    """Of which images a sheet in ``pictures-IMAGES`` is, as its folder says; "" of the run's own."""
    folder = path.relative_to(run.folder.path).parts[0]
    return folder.removeprefix("pictures-") if folder.startswith("pictures-") else ""
