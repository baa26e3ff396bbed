import shutil
from pathlib import Path

import pytest
from killing import PROBE_STEPS, SMALL, draw_images

from patchloom.train.loop import pretrain


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def finished(photos, tmp_path_factory) -> Path:
    """The folder of a finished run; nobody may change it."""
    from patchloom.evaluate import logistic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logistic, "_ITERATIONS", PROBE_STEPS)
        return pretrain(photos, "droppos", out=tmp_path_factory.mktemp("runs") / "one", **SMALL | {"epochs": 2}).folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of a finished run, to be changed."""
    return shutil.copytree(finished, tmp_path / "mine")
