"""Trackers that record their calls."""

import threading

from patchloom.loggers.base import Tracker


class Noting(Tracker):
    """Tracker that records its calls and fails on request."""

    calls: list = []
    fails: dict = {}
    let_go = threading.Event()

    location = "here"

    def __init__(self, folder, kind):
        super().__init__(folder, kind)
        self._note("init")

    @staticmethod
    def forget():
        Noting.calls, Noting.fails, Noting.let_go, Other.calls, Other.fails = [], {}, threading.Event(), [], {}

    def _note(self, name, *values):
        if problem := self.fails.get((name, *values[:1]), self.fails.get((name,))):
            raise problem
        if name == "stuck":
            self.let_go.wait(30)
        self.calls.append((name, *values))

    def log_metrics(self, metrics, step=None):
        self._note("stuck" if metrics.get("stuck") else "row", step)

    def log_hyperparams(self, params, *args, **kwargs):
        self._note("settings", params["task.name"])

    def log_images(self, images, step):
        self._note("pictures", step, {name: (one.mode, one.getpixel((0, 0))) for name, one in images.items()})

    def log_result(self, result):
        self._note("result", result.step)

    def rewind(self, step):
        self._note("back", step)

    def finalize(self, status):
        self._note("end", status)


class Other(Noting):
    """Second tracker with separate calls and failures."""

    calls: list = []
