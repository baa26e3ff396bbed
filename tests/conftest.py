import os
from collections.abc import Iterator

import matplotlib
import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``gpu`` is skipped where there is none; ``pytest -m gpu`` runs it alone."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the user's cache, or finds what another one left there; in processes it starts, too."""
    fonts = matplotlib.get_cachedir()  # this one may be shared: it takes seconds to make
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if "MPLCONFIGDIR" not in os.environ:
            patch.setenv("MPLCONFIGDIR", fonts)
        yield
