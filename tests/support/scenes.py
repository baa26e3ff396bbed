"""Small drawn images with label maps, or with boxes and masks."""

import numpy as np
import torch
from torch import Tensor

from patchloom.data.duplicates import PIXEL_KIND, contents_of
from patchloom.data.source import Source, digest
from patchloom.dense.annotations.base import IGNORED, Annotated, Objects

CLASSES = ("ground", "red", "blue")


class _Drawn(Source):
    def __init__(self, count: int, size: tuple[int, int], seed: int) -> None:
        self.count, self.size, self.seed, self.name = count, size, seed, "squares"

    def __len__(self) -> int:
        return self.count

    def scene(self, i: int) -> tuple[Tensor, Tensor]:
        """Return an image uint8 [3 h w] with a red and a blue square on noise, and its label map int16 [h w]."""
        rng = np.random.default_rng((self.seed, i))
        h, w = self.size
        image, labels = rng.integers(90, 120, (3, h, w)).astype(np.uint8), np.zeros((h, w), np.int16)
        for number, channel in ((1, 0), (2, 2)):
            side = int(rng.integers(h // 4, h // 2))
            top, left = int(rng.integers(h - side)), int(rng.integers(w - side))
            image[:, top : top + side, left : left + side] = 20
            image[channel, top : top + side, left : left + side] = 220
            labels[top : top + side, left : left + side] = number
        labels[0] = IGNORED
        return torch.from_numpy(image), torch.from_numpy(labels)

    def read(self, i: int) -> Tensor:
        return self.scene(i)[0]

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray:
        which = range(self.count) if chosen is None else chosen.tolist()
        return contents_of(PIXEL_KIND, ([f"{self.size} {self.seed} {i}".encode()] for i in which))

    def fingerprint(self) -> str:
        return digest([str(self.__dict__)])


class Squares(Annotated[Tensor]):
    """Return images of `CLASSES` with label maps, whose first row is ignored."""

    classes = CLASSES

    def __init__(self, count: int, size: tuple[int, int] = (24, 32), seed: int = 0) -> None:
        self.images = _Drawn(count, size, seed)

    def truth(self, i: int) -> Tensor:
        return self.images.scene(i)[1]

    def fingerprint(self) -> str:
        return self.images.fingerprint()


class BoxedSquares(Annotated[Objects]):
    """Return the same images with boxes around the visible parts of the squares, and masks if requested."""

    classes = CLASSES[1:]

    def __init__(self, count: int, size: tuple[int, int] = (48, 64), seed: int = 0, masks: bool = True) -> None:
        self.images, self.masks = _Drawn(count, size, seed), masks

    def truth(self, i: int) -> Objects:
        labels = self.images.scene(i)[1]
        there = [number for number in (1, 2) if (labels == number).any()]
        masks = torch.stack([labels == number for number in there])
        boxes = []
        for mask in masks:
            rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
            boxes.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        found = torch.tensor(boxes, dtype=torch.float32), torch.tensor(there) - 1
        return Objects(*found, masks if self.masks else None, torch.zeros(len(there), dtype=torch.bool))

    def fingerprint(self) -> str:
        return self.images.fingerprint()
