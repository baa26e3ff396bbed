"""How many processes read images for an evaluation, and that nothing else depends on it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import settings
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.settings import EvalSettings
from patchloom.system import hardware
from patchloom.system.hardware import cores

pytestmark = pytest.mark.usefixtures("quick_probe")


class On(EvalSettings):
    """On a device that is not there."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(60):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 128 + 64 * (i % 2), (8, 8), dtype=np.uint8)).save(path)
    return tmp_path / "photos"


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "cores", lambda: 64)


def test_auto_goes_by_the_device(photos: Path, many: None) -> None:
    source = open_data(str(photos)).train
    for device, most in (("cuda", 16), ("cpu", 16)):
        assert On(device=device).workers_for(source, 1000) == On(device=device).workers_for(source, 1000, True) == most
    assert On(device="cuda").readers == (16, "one for each of 64 cores but one")
    assert On(device="cpu").readers == (16, "most of 64 cores are for computing")


def test_few_cores_of_a_cpu_are_for_computing(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_data(str(photos)).train
    for number, on_a_cpu, on_a_gpu in ((1, 0, 1), (2, 0, 1), (4, 1, 3), (16, 4, 15)):
        monkeypatch.setattr(settings, "cores", lambda number=number: number)
        assert On(device="cpu").workers_for(source, 1000) == on_a_cpu
        assert On(device="cuda").workers_for(source, 1000) == on_a_gpu


def test_none_is_started_where_it_does_not_pay(photos: Path, many: None) -> None:
    source, digits = open_data(str(photos)).train, open_data("digits").train
    assert [On(device="cuda").workers_for(source, batches) for batches in (1, 2, 5)] == [0, 1, 4]
    assert [On(device="cpu").workers_for(source, batches) for batches in (1, 7, 8)] == [0, 0, 7]
    for device in ("cpu", "cuda"):
        assert On(device=device).workers_for(digits, 1000) == 0
        assert On(device=device).workers_for(digits.subset(range(99)).subset(range(50)), 1000) == 0
        assert On(device=device).workers_for(digits, 1000, trained=True) == 16  # crops are made of them
    assert On(device="cuda", batch_size=20).reading(source) == {"batch_size": 20, "workers": 2}


def test_what_is_asked_for_is_kept(photos: Path, many: None) -> None:
    source = open_data(str(photos)).train
    for number in (0, 3):
        assert On(device="cpu", workers=number).workers_for(source, 1) == number
    with pytest.raises(PatchloomError, match="--workers must be 0 or more, not -1"):
        EvalSettings(workers=-1).check()
    with pytest.raises(PatchloomError, match="--workers cannot be many: it takes a whole number or auto"):
        EvalSettings(workers="many").check()


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("knn", {"ks": (1,)}), ("finetune", {"epochs": 6, "batch_size": 8, "blr": 0.01, "control": False})],
)
def test_no_result_depends_on_it(tiny_encoder: Path, photos: Path, monkeypatch, protocol: str, options: dict) -> None:
    monkeypatch.setattr(settings, "cores", lambda: 8)
    monkeypatch.setattr(settings, "_FEW_BATCHES", 2)
    started, real = [], EvalSettings.workers_for
    monkeypatch.setattr(
        EvalSettings, "workers_for", lambda *rest, **more: started.append(real(*rest, **more)) or started[-1]
    )
    found = []
    for workers in (0, 1, "auto"):
        started.clear()
        asked = {"device": "cpu", "workers": workers, "batch_size": 10, "cache": False}
        report = evaluate(protocol, tiny_encoder, photos, **asked | options)
        assert max(started) == (2 if workers == "auto" else workers)
        found.append([(row.value, row.low, row.high) for row in report.rows])
        given = "p to 2 processes read the data (--workers auto: most of 8 cores" in report.protocol
        assert given == (workers == "auto")
    assert found[0] == found[1] == found[2]


def test_the_command_line_tells_what_auto_became(tiny_encoder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", "knn", str(tiny_encoder), "digits", "--device", "cpu", "--max_train", "50"]) == 0
    given = " ".join(capsys.readouterr().out.split())
    by, many = (
        "processes read" if cores() >= 8 else "process reads" if cores() >= 4 else "main process reads",
        cores() > 1,
    )
    why = f"most of {cores()} cores" if many else "there is one core"
    assert f"{by} the data (--workers auto: {why}" in " ".join(given.split())


def test_a_single_core_is_told_without_a_plural() -> None:
    assert hardware.choose_workers("cpu", hardware.Cores(1), least=1) == (1, "there is one core")
    assert hardware.choose_workers("cuda", hardware.Cores(1))[0] == 1
