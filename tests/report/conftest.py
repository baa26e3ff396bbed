import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def finished(small_run: Callable[[str], Path]) -> Path:
    """Folder of a finished run; tests must not change it."""
    return small_run("droppos")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Copy of a finished run that tests may change."""
    return shutil.copytree(finished, tmp_path / "mine")
