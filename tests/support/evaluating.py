"""Fixtures shared by the tests of evaluations."""

from collections.abc import Callable
from pathlib import Path

import pytest

from patchloom.evaluate import features


def empty_cache(tmp_path_factory: pytest.TempPathFactory, cache_in: Callable[[Path], None]) -> Path:
    """Create an empty cache of features for one test; return its folder, which does not exist yet."""
    home = tmp_path_factory.mktemp("cache")
    cache_in(home)
    return home / "patchloom" / "features"


def float32_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in float32 by default, so that no test measures the machine."""
    monkeypatch.setattr(features, "bfloat16_pays", lambda: (False, "as the test says"))
