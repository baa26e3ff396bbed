"""The cores of a machine are shared by its training processes and their workers."""

import multiprocessing
import platform
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from torch import distributed as dist

from patchloom.data.stats import Stats
from patchloom.runs.settings import Settings
from patchloom.system import distributed
from patchloom.system.distributed import cores_here
from patchloom.system.hardware import Cores, cores
from patchloom.train import resolve as defaults
from patchloom.train.loop import pretrain
from patchloom.train.resolve import resolve
from patchloom.train.validation import Validation

pytestmark = pytest.mark.usefixtures("quick_probe", "default_workers")

STATS = Stats((0.5,) * 3, (0.2,) * 3, 480, 640, 100, [])
SMALL = {"model": {"name": "nano", "embed_dim": 32, "depth": 1}, "batch_size": 8, "precision": "float32", "epochs": 1}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i in range(24):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize(("device", "least"), [("cpu", 1), ("cuda", 1), ("mps", 1)])
def test_all_of_a_machine_together_have_no_more_than_its_cores(device: str, least: int, processes: int) -> None:
    number, why = defaults.default_workers(device, Cores(64, processes))
    assert processes * (number + 1) <= 64 and number >= least
    assert ("processes share 64" in why) == (processes > 1)
    assert defaults.default_workers(device, Cores(2, 8))[0] == 1  # one, even where there are more processes than cores


def test_eight_gpus_of_a_machine_with_64_cores() -> None:
    assert defaults.default_workers("cuda", Cores(64, 8)) == (
        7,
        "one for each of 8 cores but one, since 8 processes share 64",
    )
    assert defaults.default_workers("cuda", Cores(64)) == (16, "one for each of 64 cores but one")


ALL, HERE = set(range(64)), platform.node()


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ([(HERE, ALL, 64)] * 8, Cores(64, 8)),  # torchrun: every process may use every core
        ([(HERE, set(range(8 * i, 8 * i + 8)), 8) for i in range(8)], Cores(64, 8)),  # SLURM: each has its own
        ([("another", ALL, 64)] * 8 + [(HERE, set(range(16)), 16)] * 4, Cores(16, 4)),  # another machine's do not count
        ([(HERE, ALL, 16)] * 4, Cores(16, 4)),  # a container that gives the time of 16
    ],
)
def test_cores_are_counted_however_they_are_shared(known: list, found: Cores, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(distributed, "collected", lambda own: asked.append(own) or known)
    assert cores_here() == found and found.each in (8, 4)
    assert [machine for machine, *_ in asked[0]] == [HERE]


def test_settings_have_this_processs_share() -> None:
    asked = Settings("x", {"name": "mae"}, {"name": "auto"}, device="cpu", kernels="torch", attention="fused")
    for here, workers in ((Cores(64), 16), (Cores(64, 2), 8), (Cores(64, 8), 2), (Cores(4, 8), 1)):
        settings, reasons = resolve(asked, 900, 3, STATS, 8 * here.processes, here)
        assert (settings.workers, settings.devices) == (workers, here.processes)
        assert reasons["workers"].startswith("most of" if here.each > 1 else "there is one core")


def ask(rank: int, folder: Path, found: multiprocessing.Queue) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meeting", timedelta(seconds=60), 2, rank)
    found.put(cores_here())


def test_two_processes_on_this_machine(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    each = [context.Process(target=ask, args=(rank, tmp_path, found)) for rank in range(2)]
    for process in each:
        process.start()
    assert [found.get(timeout=60) for _ in each] == [Cores(cores(), 2)] * 2
    for process in each:
        process.join()
    assert cores_here() == Cores(cores(), 1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_run_that_goes_on_elsewhere_reads_as_suits_there(images: Path, tmp_path: Path, monkeypatch) -> None:
    run, used = tmp_path / "run", []

    class Noted(Validation):
        def __init__(self, *rest):
            super().__init__(*rest)
            used.append(self.workers)

    monkeypatch.setattr("patchloom.train.loop.Validation", Noted)
    for here in (Cores(12), Cores(12, 6), Cores(12)):
        monkeypatch.setattr("patchloom.train.loop.cores_here", lambda here=here: here)
        pretrain(images, task="mae", device="cpu", workers="auto", out=run, **SMALL)
        (run / "summary.txt").unlink()
    assert used == [3, 1, 3]
    assert yaml.safe_load((run / "config.yaml").read_text())["workers"] == 3
    assert "(most of 2 cores are for computing, since 6 processes share 12)" in (run / "log.txt").read_text()
