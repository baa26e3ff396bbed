"""Which crop of a picture, and of others, is nearest to one: whether features tell what is there, and where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.claims import MIN_VERDICT_IMAGES, Effect, effect_of
from patchloom.data.decode import read_image, to_channels
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.look.charts import write_table
from patchloom.look.context import UNTRAINED, LookRequest, NamedEncoder, check_finite, full_caption, to_pictures
from patchloom.look.image_grid import Tile, draw_tiles
from patchloom.nets.encode import encode, final_norm, input_channels, input_size, patch_count, prefix_count
from patchloom.nets.heads import pool
from patchloom.withhold.encoder_input import all_patches

# sides of the crops, as shares of the picture's: each is a quarter larger than the one before
SCALES = 0.3, 0.38, 0.48, 0.6, 0.75
# where their middles lie in the room that they have, from the top and from the left
PLACES = {
    "top left": (0.0, 0.0),
    "top right": (0.0, 1.0),
    "centre": (0.5, 0.5),
    "bottom left": (1.0, 0.0),
    "bottom right": (1.0, 1.0),
}
CROP_COUNT = len(PLACES) * len(SCALES)
MAX_RETRIEVAL_IMAGES = 16  # pictures whose crops are counted; as many as `LookRequest` may have are drawn
_LARGER = 2  # times the encoder's size at which pictures are cut, so that small crops are no blur
_RIGHT, _HALF = "#0072b2", "#e69f00"
_SIDE = 1.0  # inches of a tile
_CALLED = {
    "instance": "the instance token",
    "class": "the class token",
    "mean": "the mean patch token",
    "prefix": "the mean of class token and registers",
    "patches": "all patch tokens",
}
_ALIKE = {"place": "place", "scale": "scale", "both": "place and scale"}


class CropKind(NamedTuple):
    """What a crop is: which of `PLACES`, and which of `SCALES`."""

    place: int
    scale: int

    def words(self) -> str:
        """Above its tile."""
        return f"{[*PLACES][self.place]}, {SCALES[self.scale]:g}"


def crop_kind(crop: int) -> CropKind:
    """What the crop of a number is, of the `CROP_COUNT` of a picture; in others, crops of the same number are alike."""
    return CropKind(*divmod(crop, len(SCALES)))


def crop_of(images: Tensor, crop: int, size: tuple[int, int]) -> Tensor:
    """The crop of a number of each image [b c h w], resized to ``size`` (height, width).

    It has the shape of the image, and bilinear, antialiased pixels.
    """
    place, scale = crop_kind(crop)
    whole = images.shape[-2:]
    tall, wide = (max(1, round(SCALES[scale] * side)) for side in whole)
    down, along = [*PLACES.values()][place]
    top, left = round(down * (whole[0] - tall)), round(along * (whole[1] - wide))
    part = images[:, :, top : top + tall, left : left + wide]
    # torch has none in half precision
    return F.interpolate(part.float(), size, mode="bilinear", antialias=True).to(images.dtype)


@dataclass(frozen=True)
class Retrieval:
    """Which crop is nearest to each crop of b pictures, by one representation.

    Attributes:
        own: [b 25] number of the nearest other crop of the same picture.
        picture: [b 25] the other picture that has the nearest crop of all others.
        other: [b 25] number of that crop.
    """

    own: Tensor
    picture: Tensor
    other: Tensor

    def hits(self, within: bool) -> dict[str, Tensor]:
        """[b] share of each picture's crops whose nearest one is alike: in place, in scale, in both."""
        query, found = torch.arange(CROP_COUNT), self.own if within else self.other
        place = found // len(SCALES) == query // len(SCALES)
        apart = (found % len(SCALES) - query % len(SCALES)).abs()
        both = place & (apart == int(within))
        return {"place": place.double().mean(1), "scale": (apart == 0).double().mean(1), "both": both.double().mean(1)}


def chances(within: bool) -> dict[str, float]:
    """What `Retrieval.hits` has on average if the nearest crop is drawn by lot."""
    others = CROP_COUNT - within
    both = 2 * (len(SCALES) - 1) / len(SCALES) if within else 1
    place, scale = len(SCALES) - within, len(PLACES) - within
    return {"place": place / others, "scale": scale / others, "both": both / others}


def locality_retrieval(one: NamedEncoder, images: Tensor) -> dict[str, Retrieval]:
    """The nearest crop to each of 25 crops, in the same picture and in others (ExtreMA, Figs. 3, 6).

    A picture has crops at five places, its corners and its centre, of five scales; all are resized to what the encoder
    takes. Nearest is what has the largest cosine. The paper does not say how patch tokens are compared: here all are
    put one after the other, so that their layout counts. The places and scales are this project's.

    Args:
        one: an encoder; with the class attention beside it, of ExtreMA.
        images: [b c h w] normalised, of any size: best larger than the encoder's, since small crops are enlarged.
    """
    if len(images) < 2:
        raise PatchloomError("retrieval looks for crops of one image among those of others, and there is one: give two")
    features: dict[str, list[Tensor]] = {}
    size = input_size(one.vit)
    with torch.inference_mode(), StatusMessage("encoding crops", CROP_COUNT) as waiting:
        for crop in range(CROP_COUNT):
            for name, each in _representations(one, crop_of(images, crop, size)).items():
                features.setdefault(name, []).append(check_finite(one, each.float().cpu()))
            waiting.advance()
        return {name: _nearest(torch.stack(each, 1)) for name, each in features.items()}


def _representations(one: NamedEncoder, crops: Tensor) -> dict[str, Tensor]:
    vit = one.vit
    unnormed = encode(vit, all_patches(crops, patch_count(vit)), norm=False)
    tokens = final_norm(vit, unnormed)[:, prefix_count(vit) :]
    return pool(vit, unnormed, one.head) | {"patches": tokens.flatten(1)}


def _nearest(features: Tensor) -> Retrieval:
    """Of features [b 25 d]."""
    b = len(features)
    flat = F.normalize(features.flatten(0, 1), dim=1)
    alike = (flat @ flat.T).view(b, CROP_COUNT, b, CROP_COUNT)
    itself = torch.arange(b)
    mine = alike[itself, :, itself].clone()  # [b 25 25]
    mine.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    alike[itself, :, itself] = -torch.inf
    best = alike.flatten(2).argmax(2)
    return Retrieval(mine.argmax(2), best // CROP_COUNT, best % CROP_COUNT)


def draw_retrieval(asked: LookRequest) -> list[Path]:
    """Draw some crops beside their nearest, ``retrieval.png``; with all shares, also of others, ``retrieval.csv``."""
    one = asked.encoder
    if one.card.sound is not None:
        raise PatchloomError(
            "retrieval is of crops that are enlarged, and an enlarged part of a recording would be another sound: it "
            "is for images"
        )
    if asked.exemplar is not None:
        return _draw_exemplar(asked, asked.exemplar)
    found: list[tuple[str, dict[str, Retrieval]]] = []
    rows, images = [], asked.pictures(MAX_RETRIEVAL_IMAGES, one, _LARGER)
    for other in asked.all_encoders():
        results = locality_retrieval(
            other, images if other is one else asked.pictures(MAX_RETRIEVAL_IMAGES, other, _LARGER)
        )
        found.append((other.name, results))
        rows += _rows(other, results)
    shown = {name: found[0][1][name] for name in _drawn(found[0][1])}
    lots = torch.Generator().manual_seed(asked.seed)
    lines = []  # of the sheet: image and number of each crop, the query first
    for i in torch.linspace(0, len(images) - 1, min(asked.images, len(images))).round().long().unique().tolist():
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
        row = [Tile(wholes[i], mark=mark_of_crop(query)), Tile(crops[i, query], crop_kind(query).words())]
        for (picture, crop), apart in zip(nearest, (1, 0) * len(shown), strict=True):
            row.append(Tile(crops[picture, crop], crop_kind(crop).words(), frame=_frame(query, crop, apart)))
        tiles.append(row)
    out = asked.folder / "retrieval.png"
    draw_tiles(
        tiles,
        ["image", "query", *["in the same image", "in the others"] * len(shown)],
        input_size(one.vit),
        asked.title("the nearest crops").name,
        full_caption(one, _caption(asked, len(images), found), images),
        out,
        groups=[("", 2), *((_CALLED[name], 2) for name in shown)],
        side=_SIDE,
    )
    heading = ("encoder", "representation", "within", "alike", "share", "low", "high", "chance", "images", "crops")
    return [out, write_table(heading, rows, out.with_suffix(".csv"))]


def _draw_exemplar(asked: LookRequest, file: Path) -> list[Path]:
    """Draw in each image the crop that is most like the image ``file``: ``exemplar.png``; with all cosines as CSV."""
    one, images = asked.encoder, asked.pictures(times=_LARGER)
    size, card = input_size(one.vit), one.card
    pixels = to_channels(read_image(file), input_channels(one.vit))
    pixels = pixels / 255 if pixels.dtype == torch.uint8 else pixels
    mean, std = (torch.tensor(values)[:, None, None] for values in (card.mean, card.std))
    exemplar = F.interpolate(((pixels - mean) / std)[None], size, mode="bilinear", antialias=True).to(asked.device)
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
            row.append(Tile(whole, f"{cosines[name][i, best]:.3f}", mark=mark_of_crop(best)))
        rows.append(row)
    text = (
        f"In each image the crop of 25, at five places of five scales, that is most like {file.name}, by the cosine of "
        "what the encoder gives for both; it stands above. Look whether the thing is found, and whether the frame fits "
        "its size (ExtreMA, Wu et al. 2022, Fig. 3). All cosines are in exemplar.csv."
    )
    out = asked.folder / "exemplar.png"
    headings = ["exemplar", *(f"by {_CALLED[name]}" for name in called)]
    draw_tiles(
        rows, headings, size, asked.title(f"what is like {file.name}").name, full_caption(one, text, images), out
    )
    table = [
        (i + 1, name, [*PLACES][crop_kind(crop).place], SCALES[crop_kind(crop).scale], f"{cosine:.6f}")
        for name, each in cosines.items()
        for i, of_image in enumerate(each.tolist())
        for crop, cosine in enumerate(of_image)
    ]
    return [out, write_table(("image", "representation", "place", "scale", "cosine"), table, out.with_suffix(".csv"))]


def mark_of_crop(crop: int) -> tuple[float, float, float, float]:
    """Top, left, height and width of a crop, as shares of the picture."""
    place, scale = crop_kind(crop)
    side, (down, along) = SCALES[scale], [*PLACES.values()][place]
    return down * (1 - side), along * (1 - side), side, side


def _drawn(found: dict[str, Retrieval]) -> tuple[str, str]:
    """What stands for a whole image, as good as there is one, and the patches."""
    return next(name for name in ("instance", "class", "mean") if name in found), "patches"


def _frame(query: int, found: int, apart: int) -> str | None:
    (place, scale), (other, next_scale) = crop_kind(query), crop_kind(found)
    if place == other and abs(scale - next_scale) == apart:
        return _RIGHT
    return _HALF if place == other or scale == next_scale else None


def _share(hits: Tensor) -> Effect:
    """A share over images, from each one's [b], with the interval of its mean: crops of an image are dependent."""
    found = effect_of(hits.tolist(), [0.0] * len(hits), 1.0)
    return found._replace(low=max(0.0, found.low), high=min(1.0, found.high))


def _rows(one: NamedEncoder, found: dict[str, Retrieval]) -> list[tuple[str | int, ...]]:
    rows: list[tuple[str | int, ...]] = []
    for name, each in found.items():
        for within, where in ((True, "the same image"), (False, "other images")):
            for alike, hits in each.hits(within).items():
                called = "place, next scale" if within and alike == "both" else _ALIKE[alike]
                *shares, n = _share(hits)
                numbers = (f"{share:.4f}" for share in (*shares, chances(within)[alike]))
                rows.append((one.name, name, where, called, *numbers, n, n * CROP_COUNT))
    return rows


def _caption(asked: LookRequest, n: int, found: Sequence[tuple[str, dict[str, Retrieval]]]) -> str:
    text = (
        f"Each of {n} images has 25 crops: at five places, of five scales (sides as shares of the image's). The crop "
        "that is nearest to the query by cosine, in the query's own image and in all others. Blue frames: the same "
        "place and scale (in the same image: the same place, the next scale); orange: one of both. "
    )
    for within, where in (
        (True, "In the query's own image the nearest has the same place and the next scale"),
        (False, "In others it has the same place and scale"),
    ):
        shares = []
        for name, each in found:
            said = (f"{_share(each[one].hits(within)['both']).text()} by {_CALLED[one]}" for one in _drawn(each))
            shares.append(f"{name} {' and '.join(said)}")
        text += f"{where}: {'; '.join(shares)}; by chance {100 * chances(within)['both']:.0f} %. "
    text += "Alike crops of other images that lie elsewhere tell of content; those of the same place, of layout. "
    if n < MIN_VERDICT_IMAGES:
        text += "So few images tell little. "
    if any(one.name == UNTRAINED for one in asked.beside):
        text += "What the untrained encoder finds as well was not learnt. "
    return f"{text}All shares are in retrieval.csv. As in ExtreMA, Figs. 3 and 6."
