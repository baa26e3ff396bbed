"""MLflow: a server, or files in the run's folder."""

from __future__ import annotations

import json
import os
import re
import time
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from PIL.Image import Image

from patchloom.loggers.base import PROJECT, FinalResult, RunLocation, Tracker, scores_of

# what names may not have there; to its files, images/apart would be in a folder images
_OTHER = re.compile(r"[^\w\-. ]")
_LONGEST = 500  # letters of a setting's value that every version takes
_STATUS = {"success": "FINISHED", "aborted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """A run of MLflow, at ``MLFLOW_TRACKING_URI``, or in ``mlruns/`` of the folder of logs.

    What was sent cannot be taken back there, so steps that a run does again have two values.

    Args:
        place: of the run.
    """

    def __init__(self, place: RunLocation):
        super().__init__(place)
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or (place.folder / "mlruns").absolute().as_uri()
        if self.uri.startswith("file:"):  # which MLflow 3 asks to allow; its databases need the whole of MLflow
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.metric, self.param = Metric, Param
        self.client = MlflowClient(tracking_uri=self.uri)
        if place.sent.id:
            self.client.update_run(place.sent.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        place.sent.id = self.client.create_run(experiment, run_name=place.name).info.run_id
        place.keep()

    @property
    def where(self) -> str:
        """See `Tracker`."""
        return f"{self.uri}, run {self.version}"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take numbers."""
        now = int(time.time() * 1000)
        found = [
            self.metric(_OTHER.sub("_", name.replace("/", ".")), value, now, step or 0)
            for name, value in metrics.items()
        ]
        self.client.log_batch(self.version, metrics=found)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Take the settings that the run does not have there: what it has cannot be changed.

        The server is asked for these. It knows them best: a start may have failed, or been killed, before it sent them.
        """
        known = self.client.get_run(self.version).data.params
        found = [self.param(name, str(value)[:_LONGEST]) for name, value in dict(params).items() if name not in known]
        if found:
            self.client.log_batch(self.version, params=found)

    def log_pictures(self, pictures: Mapping[str, Image], step: int) -> None:
        """See `Tracker`."""
        for name, image in pictures.items():
            self.client.log_image(self.version, image, artifact_file=f"pictures/{name}-{step:08}.png")

    def log_result(self, result: FinalResult, step: int) -> None:
        """See `Tracker`."""
        self.client.set_tag(self.version, "verdict", result.verdict)
        self.client.set_tag(self.version, "mlflow.note.content", result.summary)
        self.client.log_text(self.version, result.summary + "\n", "summary.txt")
        self.client.log_text(self.version, json.dumps(list(map(dict, result.rows)), indent=1) + "\n", "results.json")
        if result.rows:
            self.log_metrics(scores_of(result), step)

    def finalize(self, status: str) -> None:
        """End the run there; one that was stopped can go on."""
        self.client.set_terminated(self.version, _STATUS[status])
