"""Crop retrieval: whether features encode the content and the location of a crop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.augment import CentreCrop
from patchloom.data.decode import read_image, to_channels
from patchloom.data.sources.in_memory import evenly_spaced
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.look.charts import write_table
from patchloom.look.context import LookRequest, NamedEncoder, check_finite, full_caption, to_pictures
from patchloom.look.sheet import MARK, Box, Caption, Page, Tile, draw_tiles
from patchloom.nets.encode import encode, final_norm, input_channels, input_size, patch_count, prefix_count
from patchloom.nets.heads import pool
from patchloom.results.claims import MIN_VERDICT_IMAGES, UNTRAINED
from patchloom.results.result import Result
from patchloom.results.shares import share_of_way
from patchloom.withhold.encoder_input import all_patches

# sides of the crops as fractions of the image's: each is a quarter larger than the one before
SCALES = 0.3, 0.38, 0.48, 0.6, 0.75
# positions of the crops as fractions of the free space, from the top and from the left
PLACES = {
    "top left": (0.0, 0.0),
    "top right": (0.0, 1.0),
    "centre": (0.5, 0.5),
    "bottom left": (1.0, 0.0),
    "bottom right": (1.0, 1.0),
}
CROP_COUNT = len(PLACES) * len(SCALES)
MAX_RETRIEVAL_IMAGES = 16  # images whose crops are searched; fewer may be drawn
_LARGER = 2  # size of the images relative to the encoder's input, so that small crops are not blurred
_RIGHT, _HALF = "#0072b2", "#e69f00"
_SIDE = 150  # pixels of a tile
_CALLED = {
    "instance": "the instance token",
    "class": "the class token",
    "mean": "the mean patch token",
    "prefix": "the mean of class token and registers",
    "patches": "all patch tokens",
}
_ALIKE = {"place": "place", "scale": "scale", "both": "place and scale"}


class CropKind(NamedTuple):
    """Kind of a crop: indices into `PLACES` and `SCALES`."""

    place: int
    scale: int

    def words(self) -> str:
        """Return the text above its tile."""
        return f"{[*PLACES][self.place]}, {SCALES[self.scale]:g}"


def crop_kind(crop: int) -> CropKind:
    """Return the kind of a crop, by its number among the `CROP_COUNT` crops of an image."""
    return CropKind(*divmod(crop, len(SCALES)))


def crop_of(images: Tensor, crop: int, size: tuple[int, int]) -> Tensor:
    """Cut the crop with a number from each image [b c h w] and resize it to ``size`` (height, width).

    The crop has the aspect ratio of the image. Resizing is bilinear and antialiased.
    """
    place, scale = crop_kind(crop)
    whole = images.shape[-2:]
    tall, wide = (max(1, round(SCALES[scale] * side)) for side in whole)
    down, along = [*PLACES.values()][place]
    top, left = round(down * (whole[0] - tall)), round(along * (whole[1] - wide))
    part = images[:, :, top : top + tall, left : left + wide]
    # torch does not support half precision here
    return F.interpolate(part.float(), size, mode="bilinear", antialias=True).to(images.dtype)


@dataclass(frozen=True)
class Retrieval:
    """Nearest crops to each crop of b images, by one representation.

    Attributes:
        own: [b 25] number of the nearest other crop of the same image.
        picture: [b 25] index of the other image with the nearest crop.
        other: [b 25] number of that crop.
    """

    own: Tensor
    picture: Tensor
    other: Tensor

    def hits(self, within: bool) -> dict[str, Tensor]:
        """Return the fraction [b] of each image's crops whose nearest crop has the same place, scale, or both."""
        query, found = torch.arange(CROP_COUNT), self.own if within else self.other
        place = found // len(SCALES) == query // len(SCALES)
        apart = (found % len(SCALES) - query % len(SCALES)).abs()
        both = place & (apart == int(within))
        return {"place": place.double().mean(1), "scale": (apart == 0).double().mean(1), "both": both.double().mean(1)}


def chances(within: bool) -> dict[str, float]:
    """Return the expected `Retrieval.hits` if the nearest crop is drawn at random."""
    others = CROP_COUNT - within
    both = 2 * (len(SCALES) - 1) / len(SCALES) if within else 1
    place, scale = len(SCALES) - within, len(PLACES) - within
    return {"place": place / others, "scale": scale / others, "both": both / others}


def locality_retrieval(one: NamedEncoder, images: Tensor) -> dict[str, Retrieval]:
    """Find the nearest crop to each of 25 crops, in the same image and in others (ExtreMA, Figs. 3, 6).

    An image has crops at five places, its corners and its centre, in five scales; all are resized to the encoder's
    input. The nearest crop has the largest cosine similarity. The paper does not say how patch tokens are compared:
    here they are concatenated, so that their layout counts. The places and scales are this project's.

    Args:
        one: encoder, with the class attention of ExtreMA if it has one.
        images: normalised images [b c h w] of any size, preferably larger than the encoder's input.
    """
    if len(images) < 2:
        raise PatchloomError("retrieval compares crops of different images, and there is only one: give two or more")
    features: dict[str, list[Tensor]] = {}
    size = input_size(one.vit)
    with torch.inference_mode(), StatusMessage("encoding crops", CROP_COUNT) as waiting:
        for crop in range(CROP_COUNT):
            for name, each in _representations(one, crop_of(images, crop, size)).items():
                features.setdefault(name, []).append(check_finite(one, each.float().cpu()))
            waiting.advance()
        found, b = dict[str, Retrieval](), len(images)
        itself = torch.arange(b)
        for name, vectors in features.items():
            flat = F.normalize(torch.stack(vectors, 1).flatten(0, 1), dim=1)
            alike = (flat @ flat.T).view(b, CROP_COUNT, b, CROP_COUNT)
            mine = alike[itself, :, itself].clone()  # [b 25 25]
            mine.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
            alike[itself, :, itself] = -torch.inf
            best = alike.flatten(2).argmax(2)
            found[name] = Retrieval(mine.argmax(2), best // CROP_COUNT, best % CROP_COUNT)
    return found


def _representations(one: NamedEncoder, crops: Tensor) -> dict[str, Tensor]:
    vit = one.vit
    unnormed = encode(vit, all_patches(crops, patch_count(vit)), norm=False)
    tokens = final_norm(vit, unnormed)[:, prefix_count(vit) :]
    return pool(vit, unnormed, one.head) | {"patches": tokens.flatten(1)}


def draw_retrieval(asked: LookRequest) -> list[Path]:
    """Draw some crops with their nearest, ``retrieval.png``; ``retrieval.csv`` has all results."""
    one = asked.encoder
    if one.card.sound is not None:
        raise PatchloomError(
            "retrieval is only for images: it enlarges crops, and an enlarged part of a recording is another sound; "
            "leave it out"
        )
    if asked.exemplar is not None:
        return _draw_exemplar(asked, asked.exemplar)
    found: list[tuple[str, dict[str, Retrieval]]] = []
    rows, images = [], asked.pictures(MAX_RETRIEVAL_IMAGES, one, _LARGER)
    for other in (asked.encoder, *asked.beside):
        results = locality_retrieval(
            other, images if other is one else asked.pictures(MAX_RETRIEVAL_IMAGES, other, _LARGER)
        )
        found.append((other.name, results))
        rows += _rows(other, results)
    shown = {name: found[0][1][name] for name in _drawn(found[0][1])}
    lots = torch.Generator().manual_seed(asked.seed)
    lines = []  # image and number of each crop of a row, the query first
    for i in evenly_spaced(len(images), asked.images):
        query = int(torch.randint(CROP_COUNT, (), generator=lots))
        line = [(i, query)]
        for each in shown.values():
            line += [(i, int(each.own[i, query])), (int(each.picture[i, query]), int(each.other[i, query]))]
        lines.append(line)
    needed = sorted({crop for line in lines for crop in line})
    cut = torch.cat([crop_of(images[i : i + 1], crop, input_size(one.vit)) for i, crop in needed])
    crops, wholes = dict(zip(needed, to_pictures(one, cut, images), strict=True)), to_pictures(one, images)
    tiles = []
    for line in lines:
        (i, query), *nearest = line
        row = [Tile(wholes[i], marks=[(mark_of_crop(query), MARK)]), Tile(crops[i, query], crop_kind(query).words())]
        for (picture, crop), apart in zip(nearest, (1, 0) * len(shown), strict=True):
            row.append(Tile(crops[picture, crop], crop_kind(crop).words(), frame=_frame(query, crop, apart)))
        tiles.append(row)
    page_caption = Caption(
        "Nearest crops",
        "The crops of several images that are nearest to one crop. Look whether those from other images have the same "
        "place and scale.",
        160,
    )
    out = asked.folder / "retrieval.png"
    page = Page(
        tiles,
        ["image", "query", *["in the same image", "in other images"] * len(shown)],
        asked.title("the nearest crops"),
        full_caption(one, _caption(asked, len(images), found), images),
        [("", 2), *((_CALLED[name], 2) for name in shown)],
    )
    draw_tiles(page, input_size(one.vit), out, page_caption, _SIDE)
    heading = ("encoder", "representation", "within", "alike", "share", "low", "high", "chance", "images", "crops")
    return [out, write_table(heading, rows, out.with_suffix(".csv"))]


def _draw_exemplar(asked: LookRequest, file: Path) -> list[Path]:
    """Draw the crop of each image that is most similar to the image ``file``: ``exemplar.png``; write all cosines."""
    one, images = asked.encoder, asked.pictures(times=_LARGER)
    size, card = input_size(one.vit), one.card
    (pixels,) = CentreCrop(size)(to_channels(read_image(file), input_channels(one.vit)))
    pixels = pixels / 255 if pixels.dtype == torch.uint8 else pixels
    mean, std = (torch.tensor(values)[:, None, None] for values in (card.mean, card.std))
    exemplar = ((pixels - mean) / std)[None].to(asked.device)
    with torch.inference_mode(), StatusMessage("encoding crops", CROP_COUNT) as waiting:
        queries = {
            name: check_finite(one, each.float().cpu()) for name, each in _representations(one, exemplar).items()
        }
        alike: dict[str, list[Tensor]] = {}
        for crop in range(CROP_COUNT):
            for name, each in _representations(one, crop_of(images, crop, size)).items():
                query = F.normalize(queries[name].flatten(1), dim=1)
                keys = F.normalize(check_finite(one, each.float().cpu()).flatten(1), dim=1)
                alike.setdefault(name, []).append(keys @ query.T)
            waiting.advance()
    cosines = {name: torch.cat(each, 1) for name, each in alike.items()}  # [b 25]
    called = [name for name in ("instance", "class", "mean") if name in cosines][:1] + ["patches"]
    wholes, asking = to_pictures(one, images), to_pictures(one, exemplar, images)[0]
    rows = []
    for i, whole in enumerate(wholes):
        row = [Tile(asking)]
        for name in called:
            best = int(cosines[name][i].argmax())
            row.append(Tile(whole, f"{cosines[name][i, best]:.3f}", [(mark_of_crop(best), MARK)]))
        rows.append(row)
    text = (
        f"The crop of each image that is most similar to the centre of {file.name}, of 25 crops at five places in five "
        "scales. The cosine similarity is written above. Look whether the crop shows the same thing and has the right "
        "size (ExtreMA, Wu et al. 2022, Fig. 3). All cosines are in exemplar.csv."
    )
    page_caption = Caption(
        "Nearest crops to your image",
        "The crop of each image that is most similar to yours. Look whether it shows the same thing, and whether the "
        "frame fits.",
        161,
    )
    out = asked.folder / "exemplar.png"
    headings = ["exemplar", *(f"by {_CALLED[name]}" for name in called)]
    title = asked.title(f"nearest crops to {file.name}")
    draw_tiles(Page(rows, headings, title, full_caption(one, text, images)), size, out, page_caption)
    table = [
        (i + 1, name, [*PLACES][crop_kind(crop).place], SCALES[crop_kind(crop).scale], f"{cosine:.6f}")
        for name, each in cosines.items()
        for i, of_image in enumerate(each.tolist())
        for crop, cosine in enumerate(of_image)
    ]
    return [out, write_table(("image", "representation", "place", "scale", "cosine"), table, out.with_suffix(".csv"))]


def mark_of_crop(crop: int) -> Box:
    """Return top, left, height and width of a crop as fractions of the image."""
    place, scale = crop_kind(crop)
    side, (down, along) = SCALES[scale], [*PLACES.values()][place]
    return down * (1 - side), along * (1 - side), side, side


def _drawn(found: dict[str, Retrieval]) -> tuple[str, str]:
    """Return the names of the representations drawn: the best one of the whole image, and the patches."""
    return next(name for name in ("instance", "class", "mean") if name in found), "patches"


def _frame(query: int, found: int, apart: int) -> str | None:
    (place, scale), (other, next_scale) = crop_kind(query), crop_kind(found)
    if place == other and abs(scale - next_scale) == apart:
        return _RIGHT
    return _HALF if place == other or scale == next_scale else None


def _share(hits: Tensor) -> Result:
    """Return the mean over images of fractions [b] with its interval; crops of the same image are dependent."""
    found = share_of_way(hits.tolist(), [0.0] * len(hits), 1.0)
    return replace(found, low=max(0.0, found.low), high=min(1.0, found.high))


def _rows(one: NamedEncoder, found: dict[str, Retrieval]) -> list[tuple[str | int, ...]]:
    rows: list[tuple[str | int, ...]] = []
    for name, each in found.items():
        for within, where in ((True, "the same image"), (False, "other images")):
            for alike, hits in each.hits(within).items():
                called = "place, next scale" if within and alike == "both" else _ALIKE[alike]
                share = _share(hits)
                numbers = (f"{x:.4f}" for x in (share.value, share.low, share.high, chances(within)[alike]))
                rows.append((one.name, name, where, called, *numbers, share.n, share.n * CROP_COUNT))
    return rows


def _caption(asked: LookRequest, n: int, found: Sequence[tuple[str, dict[str, Retrieval]]]) -> str:
    text = (
        f"Each of {n} images has 25 crops: at five places in five scales (sides as fractions of the image's). Shown is "
        "the nearest crop to the query by cosine similarity, in the same image and in all others. Blue frames: the "
        "same place and scale (in the same image: the same place and the next scale); orange: only one of them. "
    )
    for within, where in (
        (True, "In the same image the nearest crop has the same place and the next scale"),
        (False, "In other images it has the same place and scale"),
    ):
        shares = []
        for name, each in found:
            said = (f"{_share(each[one].hits(within)['both']).text()} by {_CALLED[one]}" for one in _drawn(each))
            shares.append(f"{name} {' and '.join(said)}")
        text += f"{where}: {'; '.join(shares)}; by chance {100 * chances(within)['both']:.0f} %. "
    text += "Similar crops at other places mean that features encode content; those at the same place, layout. "
    if n < MIN_VERDICT_IMAGES:
        text += "With so few images, these numbers are unreliable. "
    if any(one.name == UNTRAINED for one in asked.beside):
        text += "Results that the untrained encoder reaches as well were not learnt. "
    return f"{text}All results are in retrieval.csv. As in ExtreMA, Figs. 3 and 6."
