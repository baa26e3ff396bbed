"""Films as frames at equal distances in time, decoded by PyAV: the extra ``film``."""

from __future__ import annotations

from math import floor
from pathlib import Path

import numpy as np
from torch import Tensor

from patchloom.data.containers.base import Box, Container
from patchloom.data.decode import channels_first

_FORMATS = {  # FFmpeg's names
    **dict.fromkeys((".mp4", ".mov", ".m4v", ".3gp"), "mov"),
    **dict.fromkeys((".mkv", ".webm"), "matroska"),
    **dict.fromkeys((".mpg", ".mpeg"), "mpeg"),
    **{".avi": "avi", ".wmv": "asf", ".mts": "mpegts"},
}


class FilmContainer(Container):
    """An open film; plane i is the frame that is shown at i / fps seconds.

    Args:
        path: path of the film.
        fps: frames to take a second.
    """

    def __init__(self, path: Path, fps: float) -> None:
        import av  # an extra

        # by its name: a playlist, which FFmpeg would recognise by its content, names other files and addresses
        self._film = av.open(str(path), format=_FORMATS[path.suffix.lower()], options={"protocol_whitelist": "file"})
        if not self._film.streams.video:
            self._film.close()
            raise ValueError("it holds no pictures, only sound")
        stream = self._stream = self._film.streams.video[0]
        stream.thread_type = "AUTO"
        self._tick = float(stream.time_base or 1)  # seconds
        seconds = (stream.duration or 0) * self._tick or (self._film.duration or 0) / av.time_base
        if not seconds:
            raise ValueError("it does not say how long it is; save it anew (ffmpeg -i FILM -c copy NEW.mp4)")
        self._fps, self._start = fps, (stream.start_time or 0) * self._tick
        self.planes = max(1, floor(seconds * fps + 1e-6))
        self.sizes = ((stream.height, stream.width),)

    def read(self, box: Box) -> Tensor:
        stream = self._stream
        wanted = self._start + box.plane / self._fps
        # from the key frame before it; times are rounded to ticks, so half a frame too late is still in time
        self._film.seek(floor(wanted / self._tick), stream=stream)
        tolerance = 0.5 / float(stream.average_rate or 25)
        last = None
        for frame in self._film.decode(stream):
            if frame.pts is not None and frame.pts * self._tick > wanted + tolerance and last is not None:
                break
            last = frame
        if last is None:
            raise ValueError(f"it ends before {box.plane / self._fps:.1f} s")
        picture = np.asarray(last.to_ndarray(format="rgb24"))
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        return channels_first(np.array(picture[rows, columns, self.bands]))

    def close(self) -> None:
        self._film.close()
