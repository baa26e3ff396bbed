"""Pages of small pictures with a few words each, as HTML files that need no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image

from patchloom.data.source import Source
from patchloom.look.sheet import SIDES, brightness, resize, tile_size, to_pixels
from patchloom.system.templates import environment, render_page


class PageItem(NamedTuple):
    """A picture of a page.

    Attributes:
        name: name below it, such as its path.
        picture: data URI of the picture; "" for a recording.
        text: words below the name.
        shares: names with a number from 0 to 1 each, drawn as bars.
    """

    name: str
    picture: str
    text: str = ""
    shares: Sequence[tuple[str, float]] = ()


class PageSection(NamedTuple):
    """Pictures of a page that belong together, below a heading and a paragraph."""

    title: str
    text: str
    items: Sequence[PageItem]


def picture_page(sections: Sequence[PageSection], data: str) -> str:
    """Return a page as HTML; the title of the first section and the name of the data are its title."""
    return render_page(environment("patchloom.look", html=True), "picture-page.html", sections=sections, data=data)


def data_uri(images: Source, i: int) -> str:
    """Return a small copy of an image as a data URI; "" for a recording."""
    if images.sound is not None:
        return ""
    image = images.read(i)
    channels = len(image)
    shown = (image.float() / 255 if image.dtype == torch.uint8 else image)[None]
    plain = (0.0,) * channels, (1.0,) * channels
    pixels = to_pixels(shown, *plain, brightness(shown, *plain))[0]
    h, w = tile_size(pixels.shape[0], pixels.shape[1], SIDES[0])
    buffer = io.BytesIO()
    Image.fromarray(resize(pixels, h, w)).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
