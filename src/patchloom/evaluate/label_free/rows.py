"""All measures without labels of one encoder, as rows of a report."""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer

from patchloom.data import Source
from patchloom.evaluate.label_free.crops import own_crop_found
from patchloom.evaluate.label_free.encoded import AREAS, SHARES, LabelFreeFeatures, drawn_images, encoded
from patchloom.evaluate.label_free.kept import neighbours_kept
from patchloom.evaluate.label_free.lidar import lidar
from patchloom.evaluate.label_free.spectrum import LEAST_WIDTH, alpha_req, rankme
from patchloom.evaluate.report import Row
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.weights import EncoderCard

PROTOCOL = "label-free"
IMAGES = 1000
NEIGHBOURS = 10
RANKME, ALPHA, LIDAR = "RankMe", "α-ReQ", "LiDAR"
CHANCE = "chance"
_DIMENSIONS = "dimensions"


def own_crop(area: float) -> str:
    """The name of the measure of two crops of an ``area``."""
    return f"own crop {100 * area:g} %"


def kept(share: float) -> str:
    """The name of the measure where a ``share`` of the patches enters."""
    return f"neighbours at {100 * share:g} %"


MEASURES = (RANKME, ALPHA, LIDAR, *map(own_crop, AREAS), *map(kept, SHARES))


def label_free_rows(
    name: str,
    vit: VisionTransformer,
    card: EncoderCard,
    source: Source,
    settings: EvalSettings,
    *,
    images: int = IMAGES,
) -> list[Row]:
    """All measures of an encoder that need no labels, a row each, with the names of `MEASURES` as setting "measure".

    What is drawn depends on the seed of the settings alone, and is the same for every encoder of one size and grid: the
    images, their crops, and which patches enter. Rows of shares have an interval over images, and those of crops each
    image's result (``right``) for `compared`. RankMe, α-ReQ and LiDAR are one number of all images. Recordings have no
    rows of crops, nor of LiDAR, which is of crops; a Swin has none of patches; features of fewer than 16 numbers have
    no α-ReQ.

    Args:
        name: of the encoder in the rows.
        vit, card: the encoder.
        source: images that it was not trained on, best; labels are not looked at.
        settings: the seed, device and reading.
        images: measure on at most so many of them.

    Raises:
        PatchloomError: fewer than 32 images, none that can be read, or features that are not finite.
    """
    return rows_of(name, encoded(name, vit, card, drawn_images(source, images, settings.seed), settings))


def rows_of(name: str, found: LabelFreeFeatures) -> list[Row]:
    """The rows of what an encoder made of the images; of raw pixels those of crops."""
    rows: list[Row] = []
    if found.whole is not None:
        rows.append(_exact(name, RANKME, rankme(found.whole), _DIMENSIONS))
        if min(found.n - 1, found.whole.shape[1]) >= LEAST_WIDTH:
            rows.append(_exact(name, ALPHA, alpha_req(found.whole), ""))
    if found.many is not None:
        rows.append(_exact(name, LIDAR, lidar(found.many), _DIMENSIONS))
    for area, pair in found.pairs.items():
        rows.append(Row.of_images(name, "-", PROTOCOL, {"measure": own_crop(area)}, own_crop_found(*pair)))
    if found.whole is not None:
        for share, part in found.parts.items():
            shares = neighbours_kept(found.whole, part, NEIGHBOURS).tolist()
            rows.append(Row.of_means(name, PROTOCOL, {"measure": kept(share)}, shares))
    return rows


def chance_rows(found: LabelFreeFeatures) -> list[Row]:
    """What guessing gives where a measure is a share; the same for every encoder of the images."""
    rows = [_exact(CHANCE, own_crop(area), 1 / found.n) for area in found.pairs]
    return rows + [_exact(CHANCE, kept(share), NEIGHBOURS / (found.n - 1)) for share in found.parts]


def _exact(name: str, measure: str, value: float, unit: str = "%") -> Row:
    return Row.exact(name, PROTOCOL, {"measure": measure}, value, unit)
