import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import joblib
import numpy as np
import pytest
from hypothesis import HealthCheck
from PIL import Image

# Tests run on all cores in parallel, so each process has one thread. Tests of threads set their number explicitly. This
# must precede the import of torch, which reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A background shell ignores SIGINT and nohup ignores SIGHUP, and child processes inherit this. Tests send both signals,
# so their default handlers are restored.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Hypothesis limits seconds by default, of examples and of draws, which a loaded machine exceeds.
hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis.settings.load_profile("any machine")

_MAX_WORKERS = 4  # each needs 2 GB of memory and 10 seconds for imports


def _files_by_name(config: pytest.Config) -> bool:
    """Return whether all arguments are test files or single tests, not folders or the whole suite."""
    return all(Path(str(argument).partition("::")[0]).suffix == ".py" for argument in config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return a worker per core for the suite and its folders, and none for files by name, which import less."""
    cores = joblib.cpu_count()
    return min(cores, _MAX_WORKERS) if cores > 1 and not _files_by_name(config) else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests of the suite and its folders unless ``-m`` decides, and skip tests of a GPU without one."""
    import torch  # not needed by the process that distributes tests

    if not config.option.markexpr and not _files_by_name(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Exclude loaded modules from garbage collection, which is slow with many objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a separate cache directory for tests and the processes they start."""
    import matplotlib

    fonts = matplotlib.get_cachedir()  # shared, because it takes seconds to create
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if "MPLCONFIGDIR" not in os.environ:
            patch.setenv("MPLCONFIGDIR", fonts)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_plain_lines() -> Iterator[None]:
    """Disable status lines that depend on the load of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchloom.display._FIRST", float("inf"))
        yield


@pytest.fixture(autouse=True, scope="session")
def quiet_machine() -> Iterator[None]:
    """Let the load by other programs be unknown: lines on a busy machine depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patchloom.system.load._ticks", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_flushes() -> Iterator[None]:
    """Leave out flushes to the disc, for which a run of a few steps waits a second: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


_DEFAULT_WORKERS = ("patchloom.train.plan.default_workers", "patchloom.train.resolve.default_workers")


@pytest.fixture(autouse=True, scope="session")
def no_default_workers() -> Iterator[None]:
    """Set the default number of reading processes to 0: forking this large process takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        for place in _DEFAULT_WORKERS:
            patch.setattr(place, lambda *_: (0, "tests start none"))
        yield


@pytest.fixture(scope="module")
def default_workers(no_default_workers: None) -> Iterator[None]:
    """Restore the default number of reading processes."""
    from patchloom.system.device import choose_workers

    with pytest.MonkeyPatch.context() as patch:
        for place in _DEFAULT_WORKERS:
            patch.setattr(place, functools.partial(choose_workers, least=1))
        yield


@pytest.fixture(scope="module")
def quick_probe() -> Iterator[None]:
    """Shorten the ends of runs, for tests that do not need them whole."""
    from killing import shorten_ends

    with pytest.MonkeyPatch.context() as patch:
        shorten_ends(patch.setattr)
        yield


@pytest.fixture
def draw(tmp_path: Path) -> Callable[..., Path]:
    """Write a small random PNG under tmp_path and return its path; numbered files differ."""

    def write(name: str, height: int = 8, width: int = 10, grey: bool = False) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(list(name.encode()))
        Image.fromarray(rng.integers(0, 256, (height, width) if grey else (height, width, 3), dtype=np.uint8)).save(
            path
        )
        return path

    return write


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the cache of Hugging Face datasets in a folder per module, and disable progress bars."""
    datasets = pytest.importorskip("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a new recording and returns its path as text."""
    soundfile = pytest.importorskip("soundfile")
    rng = np.random.default_rng(0)

    def write(path: str, rate: int = 16_000, seconds: float = 0.1, loud: float = 0.9, **how: Any) -> str:
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(place, loud * rng.uniform(-1, 1, round(rate * seconds)), rate, **how)
        return str(place)

    return write


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of noise in two classes, 32 by 32; tests must not change them."""
    from labelled import write_noise

    return write_noise(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def unlabelled_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of noise without labels, which need no evaluation; tests must not change them."""
    from labelled import write_noise

    return write_noise(tmp_path_factory.mktemp("images"), 120) / "a"


@pytest.fixture(scope="session")
def small_run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a finished run of two epochs of a task, trained once a session; copy it to change it."""
    from killing import SMALL, shorten_ends

    from patchloom.train.loop import pretrain

    runs = tmp_path_factory.mktemp("runs")

    @functools.cache
    def trained(task: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            shorten_ends(patch.setattr)
            return pretrain(images, task, out=runs / task, **SMALL | {"epochs": 2}).folder

    return trained


@pytest.fixture
def ends():
    """Fail after 30 seconds, also in a call that waits for a pipe."""

    def ring(*given: object) -> None:
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
