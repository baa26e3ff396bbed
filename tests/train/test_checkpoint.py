"""Checkpoints and the run folder: whole, strict, and clear about what is wrong."""

from dataclasses import replace

import pytest
import torch

from patchloom.data import Stats
from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.tasks import build_task
from patchloom.train.checkpoint import load_checkpoint, save_checkpoint
from patchloom.train.folder import MetricsFile, RunFolder
from patchloom.train.optim import build_optimizer
from patchloom.train.settings import Settings

SIZES = {"embed_dim": 32, "depth": 1, "num_heads": 2}


def make(seed=0, name="mae"):
    torch.manual_seed(seed)
    task = build_task({"name": name}, build_encoder(EncoderSpec("nano", (16, 16), 4, options=SIZES)))
    optimizer = build_optimizer(task, 0.05, "cpu")
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    return task, optimizer


def step(task, optimizer, number):
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(number))
    task(images, progress=0.0, generator=torch.Generator().manual_seed(number)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_going_on_is_the_same_as_never_having_stopped(tmp_path):
    task, optimizer = make()
    for number in range(3):
        step(task, optimizer, number)
    save_checkpoint(tmp_path / "last.safetensors", task, optimizer, {"step": 3})
    other, fresh = make(seed=9)
    assert load_checkpoint(tmp_path / "last.safetensors", other, fresh) == {"step": 3}
    for group in fresh.param_groups:
        group["lr"] = 1e-3
    for number in range(3, 6):
        step(task, optimizer, number)
        step(other, fresh, number)
    for (name, one), two in zip(task.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_a_cut_checkpoint_is_told(tmp_path, keep):
    task, optimizer = make()
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, task, optimizer, {"step": 0})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PatchloomError, match="damaged"):
        load_checkpoint(path, task, optimizer)


def test_another_tasks_checkpoint_is_refused(tmp_path):
    task, optimizer = make()
    save_checkpoint(tmp_path / "last.safetensors", task, optimizer, {"step": 0})
    with pytest.raises(PatchloomError, match="another task or model"):
        load_checkpoint(tmp_path / "last.safetensors", make(name="droppos")[0])


ASKED = Settings("photos/", {"name": "mae", "mask_ratio": 0.75}, {"name": "auto"})
RESOLVED = Settings("photos/", {"name": "mae"}, {"name": "nano"}, img_size=(32, 64), patch_size=4)
STATS = Stats((0.5, 0.4, 0.3), (0.2, 0.2, 0.2), 32, 64, 10, [])


def test_a_run_is_known_again_and_gives_back_its_settings(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.holds(ASKED)
    folder.begin(ASKED, RESOLVED, {"img_size": "as the images"}, STATS, "abc")
    assert folder.holds(ASKED)
    assert folder.read_config() == RESOLVED
    assert folder.read_data()["mean"] == [0.5, 0.4, 0.3] and folder.read_data()["fingerprint"] == "abc"
    assert "# img_size: as the images" in folder.config.read_text()


def test_other_settings_are_refused_with_the_difference(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(ASKED, RESOLVED, {}, STATS, "abc")
    other = Settings("photos/", {"name": "mae", "mask_ratio": 0.5}, {"name": "auto"}, epochs=9)
    with pytest.raises(PatchloomError, match="epochs: was auto, now 9; task.mask_ratio: was 0.75, now 0.5"):
        folder.holds(other)


def test_a_run_of_an_older_version_is_known_again(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(ASKED, RESOLVED, {}, STATS, "abc")
    for file in (folder.requested, folder.config):
        kept = [line for line in file.read_text().splitlines() if not line.startswith(("compile", "threads"))]
        file.write_text("\n".join(kept) + "\n")
    assert folder.holds(ASKED) and folder.read_config().compile == "auto"
    with pytest.raises(PatchloomError, match="compile: was auto, now True"):
        folder.holds(replace(ASKED, compile=True))


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(PatchloomError, match="holds no run of patchloom"):
        RunFolder(tmp_path).holds(ASKED)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_metrics_are_cut_to_the_resumed_step(tmp_path):
    file = MetricsFile(tmp_path / "metrics.csv", 0)
    for number in (10, 20, 30):
        file.add({"step": number, "loss": number / 7, **({"knn": 0.5} if number == 20 else {})})
    file.write()
    again = MetricsFile(tmp_path / "metrics.csv", 20)
    assert [row["step"] for row in again.rows] == ["10", "20"]
    again.add({"step": 30, "loss": 1.0})
    again.write()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,loss,knn",
        "10,1.42857,",
        "20,2.85714,0.5",
        "30,1,",
    ]
