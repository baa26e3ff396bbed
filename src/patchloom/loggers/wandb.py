"""Weights & Biases, online or offline."""

from __future__ import annotations

import netrc
import os
import uuid
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from PIL.Image import Image

from patchloom.loggers.base import PROJECT, FinalResult, RunLocation, Tracker, scores_of

_HOST = "https://api.wandb.ai"


class WandB(Tracker):
    """A run of Weights & Biases, with ``step`` as a number of its own by which the others are drawn.

    What was sent cannot be taken back there, so steps that a run does again are drawn twice.

    Args:
        place: of the run. Files lie in ``wandb/`` of its folder.
    """

    def __init__(self, place: RunLocation):
        super().__init__(place)
        import wandb

        self.wandb, sent = wandb, place.sent
        sent.id = sent.id or uuid.uuid4().hex[:8]
        place.keep()  # before there is anything under that name: a run that is killed now goes on there
        place.folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=place.name,
            id=sent.id,
            resume="allow",
            dir=str(place.folder),
            mode=None if "WANDB_MODE" in os.environ or has_key() else "offline",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="step")

    @property
    def where(self) -> str:
        """See `Tracker`."""
        return self.run.url or f"offline; wandb sync {self.place.folder}/wandb/offline-run-*-{self.version} sends it"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take numbers."""
        self.run.log({**metrics, "step": step})

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Take the settings."""
        self.run.config.update(dict(params), allow_val_change=True)

    def log_pictures(self, pictures: Mapping[str, Image], step: int) -> None:
        """See `Tracker`."""
        images = {f"pictures/{name}": self.wandb.Image(image) for name, image in pictures.items()}
        self.run.log({**images, "step": step})

    def log_result(self, result: FinalResult, step: int) -> None:
        """See `Tracker`."""
        self.run.summary.update({"verdict": result.verdict, "summary": result.summary} | scores_of(result))
        if result.rows:
            names = list(result.rows[0])
            table = self.wandb.Table(columns=names, data=[[row[name] for name in names] for row in result.rows])
            self.run.log({"results": table, "step": step})

    def finalize(self, status: str) -> None:
        """End the run there; one that was stopped can go on."""
        self.run.finish(exit_code=0 if status == "success" else 1)


def has_key() -> bool:
    """Whether somebody has logged in to Weights & Biases here; else it would ask, and nobody may be there to answer."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", _HOST)).hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False
