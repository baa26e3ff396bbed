import shutil
from collections.abc import Callable
from pathlib import Path

import pages
import pytest

from patchloom.report.embedding_map import make_embedding_map


@pytest.fixture(scope="session")
def finished(small_run: Callable[[str], Path]) -> Path:
    return small_run("droppos")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "mine")


@pytest.fixture(autouse=True)
def quick_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put small pictures and a ready map of embeddings on pages: WebP and t-SNE take seconds."""
    monkeypatch.setattr("patchloom.report.pictures._STEPS", ((200, 60),))
    cloud = pages.cloud(12, classes=["a", "b"])
    monkeypatch.setattr("patchloom.report.report.make_embedding_map", lambda *_: cloud)


@pytest.fixture
def real_map(quick_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchloom.report.report.make_embedding_map", make_embedding_map)
