"""Runs whose images are cached on the disc, or cropped on the device."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import SMALL
from PIL import Image
from pseudo_cuda import pseudo_cuda
from resolved import resolved_settings
from running import rows
from safetensors.torch import load_file
from sweep import build

import patchloom
from patchloom.data.augment import RandomCrop
from patchloom.data.loader import training_batches
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.runs.folder import RunFolder
from patchloom.runs.task import augment_of_readers
from patchloom.system.files import cache_root
from patchloom.tasks import TASKS
from patchloom.tasks.mae import MAE
from patchloom.train.resolve import default_cache

pytestmark = pytest.mark.usefixtures("quick_probe")

HOW = {
    "task": "mae",
    "model": {"name": "nano", "embed_dim": 32, "depth": 1},
    "epochs": 1,
    "img_size": 16,
    "batch_size": 8,
    "device": "cpu",
}
HOW |= {"precision": "float32", "attention": "explicit", "threads": 1}

LONG = HOW | {"epochs": 4}  # enough for --cache auto


def draw_jpegs(folder: Path, height: int, width: int) -> np.random.Generator:
    """Save JPEG files of growing height, one of them broken; return the generator of their pixels."""
    rng = np.random.default_rng(0)
    for i in range(30):
        Image.fromarray(rng.integers(0, 256, (height + i, width, 3), dtype=np.uint8)).save(folder / f"{i:02}.jpg")
    (folder / "29.jpg").write_bytes(b"broken")
    return rng


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Unlabelled images, which need no evaluation; one is broken."""
    folder = tmp_path_factory.mktemp("photos")
    draw_jpegs(folder, 24, 30)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that are worth storing; one is broken, and one has 16 bits."""
    folder = tmp_path_factory.mktemp("large")
    rng = draw_jpegs(folder, 130, 150)
    np.save(folder / "deep.npy", rng.integers(0, 2**16, (130, 140, 3), dtype=np.uint16))
    return folder


def result(run: Path) -> tuple[bytes, list[dict[str, str]]]:
    return (run / "encoder.safetensors").read_bytes(), rows(run)


def test_stored_images_train_the_same_encoder(large, tmp_path, monkeypatch, capsys):
    """Also while they are being stored, which a short run may be for the most part."""
    found = []
    ways = {"none": {"cache": "none"}, "auto": {}, "again": {}, "whole": {"cache": "whole", "workers": 1}}
    for name, more in ways.items():
        if name != "again":
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache of {name}"))
        run = patchloom.pretrain(large, out=tmp_path / name / "run", randaugment=9.0, **LONG, **more)
        found.append(result(run.folder))
        said = capsys.readouterr().out
        assert ("31 decoded images need" in said) == (name in ("auto", "again"))
        assert (run.folder / "unreadable.txt").read_text().split() == [str(large / "29.jpg")]
        assert bool(list((cache_root() / "images").glob("*/*.part"))) == (name != "none")
    assert all(one == found[0] for one in found[1:])


def test_a_run_that_is_resumed_asks_for_room_again(large, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = LONG | {"out": tmp_path / "run"}
    run = patchloom.pretrain(large, **given).folder
    assert RunFolder(run).read_config().cache == "whole"
    (run / "summary.txt").unlink()
    monkeypatch.setattr("patchloom.data.cache.free_memory", lambda device: 0)
    planned = patchloom.pretrain(large, dry_run=True, **given).planned
    assert planned["settings"]["cache"] == "none" and "more than half of" in planned["reasons"]["cache"]


def test_auto_stores_images_that_are_much_work_to_decode(draw):
    files, memory = open_data(draw("in/0.png").parent).train, open_data("shapes:20").train

    def chosen(side, epochs=4, size=16, source=files):
        stats = Stats((0.5,) * 3, (0.2,) * 3, side, side, 10, [])
        return default_cache(epochs, (size, size), stats, source)

    assert chosen(128)[0] == "whole" and chosen(127) == ("none", "images of 127x127 are decoded fast enough")
    assert chosen(160, size=113)[0] == "whole" and chosen(160, size=114)[0] == "none"
    assert chosen(160, epochs=3) == ("none", "images are decoded too seldom in 3 epochs")
    assert chosen(160, source=memory) == ("none", "the images are in memory")


ZOOMED = {"name": "restore"}  # its canvas is 10/7 of the image: 22 for 16
BENT = {"name": "restore", "degradation": "fisheye", "canvas": 20, "mask_ratio": 0.5}
ENLARGED = {"name": "restore", "scale": 0.714}  # crops of the usual size


@pytest.mark.parametrize(
    ("task", "size", "needed"), [("mae", (24, 16), 24), (ZOOMED, (16, 32), 44), (BENT, 16, 20), (ENLARGED, 16, 16)]
)
def test_fewer_pixels_than_the_tasks_crops_have_are_refused(photos, tmp_path, monkeypatch, task, size, needed):
    """The size that the message proposes is the smallest that enlarges no crop."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    how = HOW | {"task": task, "img_size": size, "patch_size": 4, "out": tmp_path / "run"}
    with pytest.raises(
        PatchloomError, match=rf"--cache {needed - 1} keeps too few pixels.*: give {needed} or more, or"
    ):
        patchloom.pretrain(photos, cache=needed - 1, **how)
    assert not (tmp_path / "run").exists() and not (cache_root() / "images").exists()
    assert patchloom.pretrain(photos, cache=needed, dry_run=True, **how).planned["settings"]["cache"] == needed


ON = SMALL | {"crop_on": "device", "epochs": 1}


class OwnCrop(RandomCrop):
    pass


class Own(MAE):
    def __init__(self, encoder):
        super().__init__(encoder)
        self.augment = OwnCrop(self.geometry.size)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_runs_are_those_of_the_readers_crops_up_to_rounding(device, large, tmp_path):
    """Their crops are nearly always equal to the bit, so that even the weights are."""
    found = []
    with pseudo_cuda() if device == "cuda" else nullcontext():
        for crop_on in ("workers", "device"):
            given = ON | {"crop_on": crop_on, "device": device, "out": tmp_path / crop_on}
            run = patchloom.pretrain(large, "mae", **given).folder
            found.append(torch.cat([one.flatten() for one in load_file(run / "encoder.safetensors").values()]))
    assert (found[0] - found[1]).abs().mean() < 1e-4 * found[0].abs().mean()


@pytest.mark.parametrize("name", TASKS)
def test_every_task_gets_the_same_views(name):
    task, settings = build(name), resolved_settings(crop_on="device")
    expected, found = (
        next(training_batches(Shapes(12, size=40), augment, 6, 0, 0, 1, device="cpu"))
        for augment in (task.augment, augment_of_readers(task, settings))
    )
    assert len(found.views) == len(expected.views)
    for mine, its in zip(expected.views, found.views, strict=True):
        assert (mine.float() - its.float()).abs().mean() < 1e-3 * (1 if mine.is_floating_point() else 255)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"randaugment": 9.0}, "--randaugment 9.0 changes crops after they are resized, in the workers: leave out"),
        ({"crop_scale": "padded"}, "--crop_scale padded changes crops after they are resized"),
        ({"task": Own}, "--crop_on device has no effect on .*Own, whose augment is none of RandomCrop, "),
        ({"crop_on": "gpu"}, "--crop_on cannot be gpu: it takes workers or device"),
    ],
)
def test_what_cannot_be_cropped_on_the_device_is_refused(how, said, images, tmp_path):
    given = ON | {"task": "mae"} | how
    with pytest.raises(PatchloomError, match=said):
        patchloom.pretrain(images, given.pop("task"), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
    with pytest.raises(PatchloomError, match="--crop_on is for images, and tones holds recordings: leave it out"):
        patchloom.pretrain("tones", "mp3", out=tmp_path / "run", crop_on="device")
