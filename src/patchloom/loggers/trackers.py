"""TensorBoard, Weights & Biases, MLflow and trackio. Each imports its package when it is made."""

from __future__ import annotations

import json
import netrc
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from lightning_fabric.loggers import TensorBoardLogger
from PIL.Image import Image

from patchloom.errors import PatchloomError, listing, pip_install, suggestion
from patchloom.loggers import TRACKERS
from patchloom.loggers.base import FinalResult, Tracker
from patchloom.runs.folder import RunFolder

_PROJECT = "patchloom"  # project of the runs, unless the tracker's own environment variable names another


class TensorBoard(Tracker):
    """Event files in ``logs/tensorboard``, written by lightning-fabric's ``TensorBoardLogger``.

    Each start writes a new file, which makes TensorBoard discard earlier events after the last recorded step.
    """

    def __init__(self, folder: RunFolder, kind: str):
        super().__init__(folder, kind)
        self.location = f"tensorboard --logdir {self.logs / 'tensorboard'}"
        self._open(self.sent.step)

    def _open(self, step: int) -> None:
        self.logger = TensorBoardLogger(self.logs, "tensorboard", "", default_hp_metric=False, purge_step=step + 1)
        self.logger.save()  # creates the file

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.logger.log_metrics(metrics, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        # as text: TensorBoard's own table of hyperparameters needs results
        self._log_table("settings", [{"setting": name, "value": value} for name, value in params.items()], 0)

    def log_images(self, images: Mapping[str, Image], step: int) -> None:
        for name, image in images.items():
            self.logger.experiment.add_image(f"pictures/{name}", np.asarray(image), step, dataformats="HWC")

    def log_result(self, result: FinalResult) -> None:
        self.logger.experiment.add_text("verdict", result.verdict, result.step)
        self.logger.experiment.add_text("summary", result.summary, result.step)
        self._log_table("results", result.table(), result.step)
        self.log_metrics(result.scores(), result.step)

    def _log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log rows with the same columns as a table of Markdown."""
        if rows:
            lines = [[*rows[0]], ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
            text = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
            self.logger.experiment.add_text(name, text, step)

    def rewind(self, step: int) -> None:
        self.logger.finalize("success")
        self._open(step)

    def save(self) -> None:
        self.logger.save()
        super().save()

    def finalize(self, status: str) -> None:
        self.logger.finalize(status)


class WandB(Tracker):
    """Run of Weights & Biases, with files in ``logs/wandb``; the metric ``step`` is the x-axis of the others.

    Nothing that was sent can be discarded there: repeated steps are drawn twice.
    """

    def __init__(self, folder: RunFolder, kind: str):
        super().__init__(folder, kind)
        import wandb

        self.wandb, self.sent.id = wandb, self.sent.id or uuid.uuid4().hex[:8]
        self.save()  # before the run exists there: a start that is killed now is resumed under this name
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=self.name,
            id=self.sent.id,
            resume="allow",
            dir=str(self.logs),
            mode=None if "WANDB_MODE" in os.environ or has_wandb_key() else "offline",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="step")
        offline = f"offline; wandb sync {self.logs}/wandb/offline-run-*-{self.sent.id} sends it"
        self.location = self.run.url or offline

    @classmethod
    def server(cls) -> str:
        online = has_wandb_key() and os.environ.get("WANDB_MODE", "online") == "online"
        return _wandb_url() if online else ""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.run.log({**metrics, "step": step})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.run.config.update(dict(params), allow_val_change=True)

    def log_images(self, images: Mapping[str, Image], step: int) -> None:
        self.log_metrics({f"pictures/{name}": self.wandb.Image(image) for name, image in images.items()}, step)

    def log_result(self, result: FinalResult) -> None:
        words = {"verdict": result.verdict, "summary": result.summary} | result.tags()
        self.run.summary.update(words | result.scores())
        if rows := result.table():
            table = self.wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
            self.log_metrics({"results": table}, result.step)

    def finalize(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "success" else 1)


def has_wandb_key() -> bool:
    """Return whether this user is logged in to Weights & Biases. If not, wandb would prompt for a key and wait."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(_wandb_url()).hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


def _wandb_url() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


class MLflow(Tracker):
    """Run of MLflow, at ``MLFLOW_TRACKING_URI`` or in ``logs/mlruns``.

    Nothing that was sent can be discarded there: repeated steps have two values.
    """

    def __init__(self, folder: RunFolder, kind: str):
        super().__init__(folder, kind)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (self.logs / "mlruns").absolute().as_uri()
        if uri.startswith("file:"):  # MLflow 3 asks for this; its databases need more than mlflow-skinny
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient, entities

        self.entities, self.client = entities, MlflowClient(tracking_uri=uri)
        if self.sent.id:
            self.client.update_run(self.sent.id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            known = self.client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self.client.create_experiment(name)
            self.sent.id = self.client.create_run(experiment, run_name=self.name).info.run_id
            self.save()
        self.location = f"{uri}, run {self.sent.id}"

    @classmethod
    def server(cls) -> str:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        return uri if uri.startswith(("http://", "https://")) else ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        now = int(time.time() * 1000)
        # dots, not slashes: with slashes, the file of a metric images and the folder of images/apart would collide
        names = {name: re.sub(r"[^\w\-. ]", "_", name.replace("/", ".")) for name in metrics}
        batch = [self.entities.Metric(names[name], value, now, step or 0) for name, value in metrics.items()]
        self.client.log_batch(self.sent.id, metrics=batch)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        known = self.client.get_run(self.sent.id).data.params  # those cannot be changed
        batch = [self.entities.Param(name, str(value)) for name, value in params.items() if name not in known]
        self.client.log_batch(self.sent.id, params=batch)

    def log_images(self, images: Mapping[str, Image], step: int) -> None:
        for name, image in images.items():
            self.client.log_image(self.sent.id, image, artifact_file=f"pictures/{name}-{step:08}.png")

    def log_result(self, result: FinalResult) -> None:
        for name, value in {"verdict": result.verdict, **result.tags()}.items():
            self.client.set_tag(self.sent.id, name, value)
        self.client.set_tag(self.sent.id, "mlflow.note.content", result.summary)
        self.client.log_text(self.sent.id, result.summary + "\n", "summary.txt")
        self.client.log_text(self.sent.id, json.dumps(result.plain()["results"], indent=1) + "\n", "results.json")
        self.log_metrics(result.scores(), result.step)

    def finalize(self, status: str) -> None:
        statuses = {"success": "FINISHED", "aborted": "KILLED", "failed": "FAILED"}
        self.client.set_terminated(self.sent.id, statuses[status])


class Trackio(Tracker):
    """Run of trackio, in its database on this machine (``TRACKIO_DIR``) or in the space ``TRACKIO_SPACE_ID``.

    Runs are identified by name, so a suffix makes the name unique. Nothing that was sent can be discarded there:
    repeated steps have two values.
    """

    def __init__(self, folder: RunFolder, kind: str):
        super().__init__(folder, kind)
        import trackio

        self.trackio, self.sent.id = trackio, self.sent.id or f"{self.name}-{uuid.uuid4().hex[:6]}"
        self.save()
        project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
        # no measurements of the machine: they would be sent every 10 seconds
        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self.run = trackio.init(project, self.sent.id, resume="allow", **options)
        self.location = f"trackio show --project {project}, run {self.sent.id}"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.run.config.update({name: str(value) for name, value in params.items()})  # sent with the first metrics

    def log_images(self, images: Mapping[str, Image], step: int) -> None:
        self.log_metrics({f"pictures/{name}": self.trackio.Image(image) for name, image in images.items()}, step)

    def log_result(self, result: FinalResult) -> None:
        words = {"verdict": result.verdict, "summary": result.summary} | result.tags()
        self.log_metrics(words | result.scores(), result.step)

    def finalize(self, status: str) -> None:
        self.run.finish()


def tracker_class(kind: str) -> type[Tracker]:
    return {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}[kind]


def parse_trackers(log: str | Sequence[str] | None) -> list[str]:
    """Return the trackers that ``--log`` names, each once.

    Raises:
        PatchloomError: if there is no such tracker.
    """
    words = log.split(",") if isinstance(log, str) else log or ()
    names = list(dict.fromkeys(word.strip() for word in words if word.strip()))
    for name in names:
        if name not in TRACKERS:
            hint = suggestion(name, TRACKERS, f": there are {listing(TRACKERS, 'and')}")
            raise PatchloomError(f"there is no tracker called {name}{hint}")
    return names


def check_installed(names: Sequence[str]) -> None:
    """Raise a PatchloomError if the package of a tracker is not installed."""
    missing = []
    for name in names:
        with suppress(ValueError):  # of a module without a spec, which is there
            spec = find_spec(name)
            if spec is None or spec.origin is None:  # a folder such as wandb/, left by a run, is not a package
                missing.append(name)
    if missing:
        remedy = pip_install(*("track" if name == "tensorboard" else name for name in missing))
        are = "is" if len(missing) == 1 else "are"
        raise PatchloomError(f"{listing(missing, 'and')} {are} not installed: {remedy}, or give another --log")
