"""Reader of drawn sheets."""

import numpy as np

from patchloom.look.sheet import FRAME_GREY


def tiles(page: np.ndarray) -> list[list[np.ndarray]]:
    """Find rows of tiles [h w 3] by their frames."""
    frame = (page == FRAME_GREY).all(-1)
    top_edges = [y for y in range(len(frame)) if frame[y].sum() > 50]
    found = []
    for top, bottom in zip(top_edges[::2], top_edges[1::2], strict=True):
        left_edges = [x for x in range(page.shape[1]) if frame[top : bottom + 1, x].all()]
        pairs = zip(left_edges[::2], left_edges[1::2], strict=True)
        found.append([page[top + 1 : bottom, left + 1 : right] for left, right in pairs])
    return found
