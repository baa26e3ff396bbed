"""Trackio: Hugging Face's tracker, which keeps all runs of a user in one database on the machine."""

from __future__ import annotations

import os
import uuid
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from PIL.Image import Image

from patchloom.loggers.base import PROJECT, FinalResult, RunLocation, Tracker, scores_of


class Trackio(Tracker):
    """A run of trackio, in its own database (``TRACKIO_DIR``), or where ``TRACKIO_SPACE_ID`` says.

    It knows runs by their names alone, so these end with letters that no other run has. What was sent cannot be taken
    back there, so steps that a run does again have two values.

    Args:
        place: of the run.
    """

    def __init__(self, place: RunLocation):
        super().__init__(place)
        import trackio

        self.trackio, sent = trackio, place.sent
        sent.id = sent.id or f"{place.name}-{uuid.uuid4().hex[:6]}"
        place.keep()
        self.project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        # of the machine nothing is asked: it would be sent every 10 seconds
        own = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self.run = trackio.init(self.project, sent.id, resume="allow", **own)

    @property
    def where(self) -> str:
        """See `Tracker`."""
        return f"trackio show --project {self.project}, run {self.version}"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take numbers."""
        self.run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Take the settings, which go with the first numbers."""
        self.run.config.update({name: str(value) for name, value in dict(params).items()})

    def log_pictures(self, pictures: Mapping[str, Image], step: int) -> None:
        """See `Tracker`."""
        images = {f"pictures/{name}": self.trackio.Image(image) for name, image in pictures.items()}
        self.run.log(images, step=step)

    def log_result(self, result: FinalResult, step: int) -> None:
        """See `Tracker`."""
        texts = {"verdict": result.verdict, "summary": result.summary}
        self.run.log({**texts, **scores_of(result)}, step=step)

    def finalize(self, status: str) -> None:
        """Send what waits, and end the run there; one that was stopped can go on."""
        self.run.finish()
