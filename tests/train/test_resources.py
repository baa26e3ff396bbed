"""Runs without disc space, permission or memory, with a killed worker, or with many broken files."""

import errno
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import draw_images, left_behind, typed
from PIL import Image

from patchloom.cli import main
from patchloom.data.workers import in_workers
from patchloom.errors import PatchloomError
from patchloom.runs.folder import RunFolder
from patchloom.train import loop as training

pytestmark = pytest.mark.usefixtures("quick_probe")

TASK = {"task": "mae", "epochs": 3}


@pytest.fixture(scope="module")
def undisturbed(images, tmp_path_factory):
    """Folder of an undisturbed run."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(typed(images, out, TASK)) == 0
    return out


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Write a checkpoint after every update."""
    monkeypatch.setattr(training, "_SAVE_EVERY", 0.0)


def refused(words: list, capfd, expected: int = 2) -> str:
    """Run a command that fails with the ``expected`` exit code, and return its message."""
    capfd.readouterr()
    code, err = main([str(word) for word in words]), capfd.readouterr().err
    assert code == expected and err.startswith("patchloom: ") and err.count("\n") == 1, err
    return err


@contextmanager
def limited(name: int, value: int) -> Iterator[None]:
    """Limit a resource of this process inside this block."""
    before = resource.getrlimit(name)
    resource.setrlimit(name, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(name, before)


@pytest.fixture
def small_disc(tmp_path):
    """Separate small file system, with a function that changes its size or makes it read-only."""
    place = tmp_path / "disc"
    place.mkdir()

    def mount(*options: str) -> bool:
        return subprocess.run(["mount", *options, str(place)], capture_output=True, check=False).returncode == 0

    if not shutil.which("mount") or not mount("-t", "tmpfs", "-o", "size=600k", "tmpfs"):
        pytest.skip("no file system can be mounted here")
    yield place, mount
    subprocess.run(["umount", "-l", str(place)], check=True)


def goes_on(images: Path, out: Path, undisturbed: Path) -> None:
    assert main(typed(images, out, TASK)) == 0
    assert left_behind(out) == left_behind(undisturbed)


def test_a_disc_that_is_too_small(images, small_disc, capfd):
    """The run is refused before the first step, not at the last checkpoint."""
    place, _ = small_disc
    said = refused(typed(images, place / "run", TASK), capfd, expected=75)
    assert re.search(
        r"the run needs \d\.\d MB for its checkpoints and the encoder, and the disc of .* has 0\.\d MB", said
    )
    assert not any(place.iterdir())


def test_a_disc_that_runs_full(images, undisturbed, small_disc, capfd, monkeypatch):
    """Others fill the disc during training."""
    place, mount = small_disc
    (place / "others").write_bytes(bytes(300_000))
    with monkeypatch.context() as patch:
        patch.setattr("patchloom.train.estimate.refuse_full_disc", lambda *_: 1e12)
        said = refused(typed(images, place / "run", TASK), capfd, expected=75)
    assert "could not be written" in said and "No space left on device" in said
    assert mount("-o", "remount,size=16m")
    goes_on(images, place / "run", undisturbed)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_files_that_may_not_grow_so_large(images, undisturbed, tmp_path, capfd, share):
    size = (undisturbed / "checkpoints" / "last.safetensors").stat().st_size
    with limited(resource.RLIMIT_FSIZE, int(share * size)):
        said = refused(typed(images, tmp_path / "run", TASK), capfd)
    assert "could not be written" in said and "File too large" in said
    goes_on(images, tmp_path / "run", undisturbed)


def test_a_disc_that_is_read_only(images, undisturbed, small_disc, capfd):
    place, mount = small_disc
    assert mount("-o", "remount,size=16m")
    shutil.copytree(undisturbed, place / "run")
    (place / "run" / "summary.txt").unlink()
    assert mount("-o", "remount,ro")
    for out in (place / "run", place / "new"):
        assert "Read-only file system" in refused(typed(images, out, TASK), capfd)
    assert main(["look", str(place / "run"), f"--out={place.parent / 'pictures'}"]) == 0
    assert mount("-o", "remount,rw")
    goes_on(images, place / "run", undisturbed)


@pytest.mark.parametrize("number", [1, 4, 9])
def test_permission_that_is_lost_on_the_way(images, undisturbed, tmp_path, monkeypatch, capfd, number):
    """Permission is lost when any of the run's files is renamed."""
    rename, seen = os.replace, []

    def replace(source, target):
        seen.append(target)
        if len(seen) >= number and str(target).startswith(str(tmp_path)):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(source), None, str(target))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        assert "could not be written (Permission denied)" in refused(typed(images, tmp_path / "run", TASK), capfd)
    goes_on(images, tmp_path / "run", undisturbed)


class Hostile:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain"])
def test_a_pickle_is_never_run(images, undisturbed, tmp_path, capfd, name, zipped):
    made, file = tmp_path / "made", tmp_path / name
    content = {"model": Hostile(made), "weight": torch.zeros(1)}
    torch.save(content, file) if zipped else file.write_bytes(pickle.dumps(content))
    out = tmp_path / "run"
    said = refused([*typed(images, out, TASK), f"--init={file}"], capfd)
    assert str(file) in said and not made.exists() and not out.exists()
    shutil.copytree(undisturbed, out)
    for place in [*(out / "checkpoints").iterdir(), out / "encoder.safetensors"]:
        shutil.copy(file, place)
    (out / "summary.txt").unlink()
    for words in (typed(images, out, TASK), ["look", out], ["export", out], ["evaluate", "knn", out, images]):
        refused(words, capfd)
    assert not made.exists()


def rubbish(folder: Path, good: Path) -> None:
    """Folder of a thousand files that are broken or no images."""
    rng, broken = random.Random(0), folder / "broken"
    broken.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 2**16, (40, 40, 3), dtype=np.uint16)
    whole = {path.suffix: path.read_bytes() for path in good.rglob("*.*")}
    for suffix in (".jpg", ".tif", ".gif", ".webp", ".bmp"):
        Image.fromarray((pixels >> 8).astype(np.uint8)).save(folder.parent / f"one{suffix}")
        whole[suffix] = (folder.parent / f"one{suffix}").read_bytes()
    bomb = whole[".png"][:16] + (60_000).to_bytes(4, "big") * 2 + whole[".png"][24:]
    deep = whole[".png"][:24] + b"\x10" + whole[".png"][25:]
    suffixes = [*whole, ".npy", ".tiff", ".jpeg"]
    for i in range(1000):
        content = rng.choice([*whole.values()])
        cut = content[: rng.randrange(len(content) // 2)]
        choices = [
            cut,
            cut,
            b"",
            b"hello",
            b"<!DOCTYPE html><html></html>",
            rng.randbytes(200),
            bytes(99),
            bomb,
            deep[:60],
        ]
        (broken / f"{i}{rng.choice(suffixes)}").write_bytes(choices[i % len(choices)])
    (broken / "folder.png").mkdir()
    (broken / "loop.png").symlink_to("loop.png")
    (broken / "up").symlink_to("..")
    (broken / "gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(broken / "pipe.png")
    shutil.copytree(good, folder / "good")


def test_a_thousand_broken_files(tmp_path, capfd):
    """With 6 images, the first sample may contain none; with 300, the run succeeds."""
    folder, out = tmp_path / "data", tmp_path / "run"
    rubbish(folder, draw_images(tmp_path / "good", 6))
    words = typed(folder, out, TASK | {"epochs": 1, "batch_size": 8, "workers": 1})
    said = refused(words, capfd)
    assert f"nothing could be read in {folder}: {folder / 'broken'}" in said and not out.exists()
    draw_images(folder / "more", 300)
    assert main(words) == 0
    printed, err = capfd.readouterr()
    names = (out / "unreadable.txt").read_text().splitlines()
    assert len(names) == len({*names}) and all("/broken/" in name for name in names)
    # many are empty: where one of these is held out, the others are not tried
    assert len(names) + len(RunFolder(out).read_data()["held_out_copies"]) > 700
    assert not err and f"{len(names)} files could not be read" in " ".join(printed.split())


def test_files_that_go_away_during_a_run(tmp_path, capfd, monkeypatch):
    folder = draw_images(tmp_path / "images", 60)
    save = training.save_checkpoint

    def save_and_delete(run, stepper, state, unreadable):
        saved = save(run, stepper, state, unreadable)
        for path in sorted(folder.rglob("*.png"))[::3] if state.step == 2 else ():
            path.unlink()
        return saved

    monkeypatch.setattr(training, "save_checkpoint", save_and_delete)
    assert main(typed(folder, tmp_path / "run", TASK)) == 0
    assert not capfd.readouterr().err
    names = (tmp_path / "run" / "unreadable.txt").read_text().splitlines()
    assert 10 <= len(names) <= 20 and not any(map(os.path.exists, names))


def test_too_little_memory(tmp_path, capfd):
    folder, more = draw_images(tmp_path / "images", 200), {"batch_size": 150, "img_size": 128, "patch_size": 4}
    held = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    with limited(resource.RLIMIT_AS, held + (1 << 30)):
        said = refused(typed(folder, tmp_path / "run", TASK | more), capfd)
    assert re.search(r"out of memory at 150 images per step \(\d\.\d GiB of \d+\.\d were in use, and", said)
    assert "GiB more were requested" in said and "halve --batch_size and double --accumulate" in said


@pytest.mark.parametrize("step", [1, 4])
def test_a_reading_process_that_is_killed(images, undisturbed, tmp_path, capfd, monkeypatch, step):
    save, out = training.save_checkpoint, tmp_path / "run"
    options, killed = TASK | {"workers": 1}, []

    def save_and_kill(run, stepper, state, unreadable):
        saved = save(run, stepper, state, unreadable)
        if state.step == step:
            killed.extend(child.pid for child in multiprocessing.active_children())
            for reader in killed:
                os.kill(reader, signal.SIGKILL)
        return saved

    with monkeypatch.context() as patch:
        patch.setattr(training, "save_checkpoint", save_and_kill)
        said = refused(typed(images, out, options), capfd, expected=75)
    assert killed and "a process that read images has died" in said
    assert main(typed(images, out, options)) == 0
    assert left_behind(out) == left_behind(undisturbed)


def test_a_reading_process_that_dies_with_a_tensor_under_way(monkeypatch):
    def lost(self):
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    monkeypatch.setattr("patchloom.data.workers.DataLoader.__iter__", lost)
    with pytest.raises(PatchloomError, match="a process that read images has died"):
        next(in_workers([1, 2], range(2), 1))
    with pytest.raises(ConnectionResetError):
        next(in_workers([1, 2], range(2), 0))
