"""TensorBoard: event files in the run's folder, by lightning-fabric's own logger."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning_fabric.loggers import TensorBoardLogger
from PIL.Image import Image

from patchloom.loggers.base import FinalResult, RunLocation, Tracker, markdown_table, scores_of

_FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Event files in ``tensorboard/`` of the folder of logs.

    Every start has a file of its own, which tells TensorBoard to forget what those before it have beyond the last step
    that is known to have been written.

    Args:
        place: of the run.
    """

    def __init__(self, place: RunLocation):
        super().__init__(place)
        place.sent.id = place.sent.id or _FOLDER
        self.logger = self._begun(place.sent.step)

    def _begun(self, step: int) -> TensorBoardLogger:
        # of a first start, too: one that was killed may have written the first row, and not the note of it
        logger = TensorBoardLogger(self.place.folder, _FOLDER, "", default_hp_metric=False, purge_step=step + 1)
        logger.experiment.flush()  # makes its file now
        return logger

    @property
    def where(self) -> str:
        """See `Tracker`."""
        return f"tensorboard --logdir {self.place.folder / _FOLDER}"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take numbers, and write them to the disc."""
        self.logger.log_metrics(metrics, step)
        self.logger.experiment.flush()

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Take the settings, as a text: TensorBoard's own table of them needs results."""
        rows = [{"setting": name, "value": value} for name, value in dict(params).items()]
        self.logger.experiment.add_text("settings", markdown_table(rows), 0)
        self.logger.experiment.flush()

    def log_pictures(self, pictures: Mapping[str, Image], step: int) -> None:
        """See `Tracker`."""
        for name, image in pictures.items():
            self.logger.experiment.add_image(f"pictures/{name}", np.asarray(image), step, dataformats="HWC")
        self.logger.experiment.flush()

    def log_result(self, result: FinalResult, step: int) -> None:
        """See `Tracker`."""
        for name, text in (
            ("verdict", result.verdict),
            ("summary", result.summary),
            ("results", markdown_table(result.rows)),
        ):
            if text:
                self.logger.experiment.add_text(name, text, step)
        self.log_metrics(scores_of(result), step)

    def rewind(self, step: int) -> None:
        """Begin a file that has TensorBoard forget later steps."""
        self.logger.finalize("success")
        self.logger = self._begun(step)

    def finalize(self, status: str) -> None:
        """Close the file."""
        self.logger.finalize(status)
