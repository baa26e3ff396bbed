"""Truth and answer of segmentation and detection, as pictures between which a slider moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from patchloom.data.read import open_pillow
from patchloom.look.apart import INDEX, PairFiles, kept_apart
from patchloom.report.captions import caption_of
from patchloom.report.content import Picture, Slider
from patchloom.report.gather import Gathered
from patchloom.report.pictures import webp

BUDGET = 700_000  # bytes of all of a page
_STEPS = ((640, 75), (480, 65), (360, 55), (240, 50))  # width in pixels and quality, tried in turn


def sliders_of(run: Gathered, budget: int = BUDGET) -> list[Slider]:
    """What `patchloom evaluate segment` and ``detect`` have drawn of a run; what cannot be read is left out.

    Of several evaluations of one kind each slider says of which it is.

    Args:
        run: whose.
        budget: bytes of all pictures; where the smallest do not fit, the last ones are left out.
    """
    pairs = [(place.parent, pair) for place in _places(run) for pair in kept_apart(place.parent)]
    kinds = Counter(caption_of(folder.name).text for folder in dict.fromkeys(folder for folder, _ in pairs))
    several = {kind for kind, count in kinds.items() if count > 1}
    found = list[Slider]()
    for width, quality in _STEPS:
        found = [
            one._replace(name=f"{folder.name}: {one.name}") if one.caption in several else one
            for folder, pair in pairs
            if (one := _slider(folder, pair, width, quality)) is not None
        ]
        if _bytes(found) <= budget:
            return found
    while found and _bytes(found) > budget:
        found.pop()
    return found


def _places(run: Gathered) -> list[Path]:
    return sorted(run.folder.pictures.glob(f"*/{INDEX}"))


def _bytes(sliders: Sequence[Slider]) -> int:
    return sum(len(one.truth.uri) + len(one.answer.uri) for one in sliders)


def _slider(folder: Path, pair: PairFiles, width: int, quality: int) -> Slider | None:
    made = []
    for kind, path in (("truth", pair.truth), ("answer", pair.answer)):
        try:
            with open_pillow(path) as image:
                uri, wide, high = webp(image.convert("RGB"), width, quality)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None
        made.append(Picture(kind, "", f"{pair.title}: {kind}", uri, wide, high))
    truth, answer = made
    if (truth.width, truth.height) != (answer.width, answer.height):
        return None
    return Slider(pair.title, caption_of(folder.name).text, truth, answer)
