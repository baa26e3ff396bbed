import pytest

from patchloom.look import attention, attention_distance, correlation, neighbours, pca, retrieval
from patchloom.look.sheet import write_picture


@pytest.fixture
def pages(monkeypatch):
    """Record the pages of tiles instead of drawing them, which takes most of the time of a picture."""
    found = []

    def draw_tiles(page, size, out, caption=None, side=0):
        found.append(page)
        return write_picture(out, b"", caption)

    for module in (attention, attention_distance, correlation, neighbours, pca, retrieval):
        monkeypatch.setattr(module, "draw_tiles", draw_tiles)
    return found
