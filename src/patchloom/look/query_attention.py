"""Attention of an attentive probe's queries to the patches of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from patchloom.look.attention import ATTENTION_SCALE, overlay
from patchloom.look.captions import Caption
from patchloom.look.image_grid import Tile, draw_tiles

_SHOWN = 6  # queries


def draw_queries(pictures: np.ndarray, maps: np.ndarray, title: str, out: Path) -> Path:
    """Draw where queries look, as a PNG file: a row per image, with the mean of all queries and the narrowest ones.

    Args:
        pictures: images uint8 [k h w 3].
        maps: attention [k m rows columns] of each of m queries, which sums to 1 over the patches.
        title: title of the page.
        out: file.
    """
    spread = np.exp(-(maps * np.log(np.maximum(maps, 1e-12))).sum((2, 3))).mean(0)  # patches that a query looks at
    chosen = spread.argsort(kind="stable")[:_SHOWN]
    rows = []
    for picture, its in zip(pictures, maps, strict=True):
        shown = [its.mean(0), *its[chosen]]
        rows.append([Tile(picture), *(Tile(overlay(picture, one), f"{one.max():.1%}") for one in shown)])
    headings = ["image", f"mean of {maps.shape[1]}", *(f"query {i + 1}: {spread[i]:.1f} patches" for i in chosen)]
    caption = (
        "Attention of the queries of an attentive probe to the patches of test images. Each map has its own scale, "
        "from white (no attention) to its maximum, which is written above it. A heading says at how many patches a "
        "query looks (exponential of the entropy, mean over the images shown); the narrowest queries are shown."
    )
    page_caption = Caption(
        "Where the queries of the attentive probe look",
        "Each column is a learned query. Queries that follow parts of objects show that the patch tokens tell them "
        "apart; equal maps in all columns show that one query would do.",
        210,
    )
    size = pictures.shape[1], pictures.shape[2]
    return draw_tiles(rows, headings, size, title, caption, out, [ATTENTION_SCALE], page_caption=page_caption)
