from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import empty_cache, float32_by_auto, folder_of, write_encoder
from threads import one_thread

from patchloom.data.source import Data, Source
from patchloom.data.sources.open import open_data
from patchloom.evaluate import settings

one_thread = pytest.fixture(autouse=True, scope="package")(one_thread)
empty_cache = pytest.fixture(autouse=True)(empty_cache)
float32_by_auto = pytest.fixture(autouse=True)(float32_by_auto)


@pytest.fixture(scope="package")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("tiny") / "encoder.safetensors", depth=3)


@pytest.fixture
def run(tiny_encoder: Path, tmp_path: Path) -> Path:
    return folder_of(tiny_encoder, tmp_path / "run")


class Recorded(Source):
    """Some images of another source that keep a record of what is read."""

    def __init__(self, source: Source, name: str, record: list[str]) -> None:
        self.source, self.labels, self.classes = source, source.labels, source.classes
        self.name, self.record = name, record

    def __len__(self) -> int:
        return len(self.source)

    def read(self, i: int) -> torch.Tensor:
        self.record.append(self.name)
        return self.source.read(i)

    def fingerprint(self) -> str:
        return self.source.fingerprint()


@pytest.fixture
def record_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Makes digits, some of them, a source that records reads; with other labels for the test images, if given."""

    def install(n_train: int = 120, n_test: int = 60, test_labels: np.ndarray | None = None) -> list[str]:
        digits, record = open_data("digits"), []
        train, test = digits.train.subset(range(n_train)), digits.test.subset(range(n_test))
        test.labels = test.labels if test_labels is None else test_labels
        both = Data(Recorded(train, "train", record), Recorded(test, "test", record))
        monkeypatch.setattr(settings, "open_data", lambda data, **options: both)
        return record

    return install
