"""The built-in shapes with box and mask: one object an image."""

from __future__ import annotations

import torch

from patchloom.data.annotated.base import Annotated, Objects
from patchloom.data.sources.base import digest
from patchloom.data.sources.shapes import Shapes


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
