from typing import NamedTuple

import pytest

from patchloom.look import attention, correlation, neighbours, pca, retrieval
from patchloom.look.captions import write_picture


class Page(NamedTuple):
    """Arguments of a page of tiles."""

    rows: list
    headings: list
    caption: str
    groups: list


@pytest.fixture
def pages(monkeypatch):
    """Record the pages of tiles instead of drawing them, which takes most of the time of a picture."""
    found = []

    def draw_tiles(rows, headings, size, title, caption, out, scales=(), groups=(), side=1.0, page_caption=None):
        found.append(Page(rows, headings, caption, groups))
        return write_picture(out, b"", page_caption)

    for module in (attention, correlation, neighbours, pca, retrieval):
        monkeypatch.setattr(module, "draw_tiles", draw_tiles)
    return found
