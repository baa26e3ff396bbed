"""Stacks of microscopes: ND2 of Nikon (the extra ``nd2``) and CZI of Zeiss (the extra ``czi``)."""

from __future__ import annotations

from itertools import product
from math import prod
from pathlib import Path

import numpy as np
from torch import Tensor

from patchloom.data.containers.base import Box, Container
from patchloom.data.decode import from_array

ND2, CZI = frozenset({".nd2"}), frozenset({".czi"})


class Nd2Container(Container):
    """An open file of NIS-Elements: a plane for each position, time and depth; channels as channels.

    Args:
        path: path of the file.
        window: values that become 0 and 1; None for the range of their type.
    """

    def __init__(self, path: Path, window: tuple[float, float] | None = None) -> None:
        import nd2  # an extra

        self.window = window
        self._file = nd2.ND2File(path)
        sizes = dict(self._file.sizes)
        self.planes = prod(count for axis, count in sizes.items() if axis not in "YXCS")
        self.sizes = ((sizes["Y"], sizes["X"]),)
        self.microns = float(self._file.voxel_size().x) or None
        self.channels = sizes.get("C", 1) * sizes.get("S", 1)
        named = [str(one.channel.name) for one in getattr(self._file.metadata, "channels", None) or ()]
        self.names = tuple(named) if len(named) == self.channels and all(named) else ()

    def read(self, box: Box) -> Tensor:
        frame = np.asarray(self._file.read_frame(box.plane))  # [y x] or [c y x] or [y x s]
        if frame.ndim == 3 and frame.shape[:2] != self.sizes[0]:
            frame = np.moveaxis(frame, 0, -1)
        part = frame[box.top : box.top + box.height, box.left : box.left + box.width]
        return from_array(part if part.ndim == 2 else part[..., self.bands], self.window)

    def close(self) -> None:
        self._file.close()


class CziContainer(Container):
    """An open file of ZEN: a plane for each time, depth and other axis; channels as channels.

    Args:
        path: path of the file.
        window: values that become 0 and 1; None for the range of their type.
    """

    def __init__(self, path: Path, window: tuple[float, float] | None = None) -> None:
        from pylibCZIrw import czi  # an extra

        self.window = window
        self._reader = czi.CziReader(str(path))
        bounds = self._reader.total_bounding_box
        (left, right), (top, bottom) = bounds["X"], bounds["Y"]
        self._corner, self.sizes = (left, top), ((bottom - top, right - left),)
        first, last = bounds.get("C", (0, 1))
        self._channels = range(first, last)
        axes = {axis: range(*ends) for axis, ends in bounds.items() if axis not in "XYC"}
        self._planes = [dict(zip(axes, each, strict=True)) for each in product(*axes.values())]
        self.planes = len(self._planes)
        about = self._reader.metadata["ImageDocument"]["Metadata"]
        self.channels = sum(3 if str(kind).startswith("Bgr") else 1 for kind in self._reader.pixel_types.values())
        image = about.get("Information", {}).get("Image", {})
        listed = _listed(image.get("Dimensions", {}).get("Channels", {}).get("Channel"))
        named = [str(one.get("@Name") or "") for one in listed]
        self.names = tuple(named) if len(named) == self.channels and all(named) else ()
        scaling = about.get("Scaling", {})
        sides = {one.get("@Id"): one.get("Value") for one in _listed(scaling.get("Items", {}).get("Distance"))}
        side = sides.get("X")
        self.microns = float(side) * 1e6 if side else None

    def read(self, box: Box) -> Tensor:
        where = box.left + self._corner[0], box.top + self._corner[1], box.width, box.height
        each = [
            np.asarray(self._reader.read(roi=where, plane={**self._planes[box.plane], "C": channel}))
            for channel in self._channels
        ]
        whole = np.concatenate(each, axis=-1)
        # colours are stored as blue, green, red
        whole = whole[..., ::-1] if len(each) == 1 and whole.shape[-1] == 3 else whole
        return from_array(whole[..., self.bands], self.window)

    def close(self) -> None:
        self._reader.close()


def _listed(found: object) -> list[dict[str, str]]:
    """Return the elements of XML, which are no list if there is one only."""
    return found if isinstance(found, list) else [found] if isinstance(found, dict) else []
