"""The built-in shapes with box and mask, one object an image, and with label maps."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from patchloom.data.source import digest
from patchloom.data.sources.synthetic import SHAPES, Shapes
from patchloom.dense.annotations.base import Annotated, Objects


class DrawnObjects(Annotated[Objects]):
    """Drawn shapes, each with its box and its mask."""

    def __init__(self, images: Shapes) -> None:
        self.shapes, self.images, self.classes = images, images, images.classes

    def truth(self, i: int) -> Objects:
        label, box, mask = self.shapes.annotation(i)
        return Objects(
            torch.tensor([box], dtype=torch.float32),
            torch.tensor([label]),
            torch.from_numpy(mask)[None],
            torch.zeros(1, dtype=torch.bool),
        )

    def size(self, i: int) -> tuple[int, int]:
        return self.shapes.size, self.shapes.size

    def fingerprint(self) -> str:
        return digest(["objects", self.shapes.fingerprint()])


class DrawnMaps(Annotated[Tensor]):
    """Drawn shapes on a background, which is a class, too."""

    classes = ("background", *SHAPES)

    def __init__(self, images: Shapes) -> None:
        self.shapes, self.images = images, images

    def truth(self, i: int) -> Tensor:
        drawn = self.shapes.annotation(i)
        return torch.from_numpy(drawn.mask.astype(np.int16) * np.int16(drawn.label + 1))

    def size(self, i: int) -> tuple[int, int]:
        return self.shapes.size, self.shapes.size

    def fingerprint(self) -> str:
        return digest(["label maps", self.shapes.fingerprint()])
