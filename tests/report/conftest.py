import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def finished(small_run: Callable[[str], Path]) -> Path:
    """The folder of a finished run; no test may change it."""
    return small_run("droppos")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to be changed."""
    return shutil.copytree(finished, tmp_path / "mine")
