"""Runs without disc space, permission or memory, with a killed worker, broken files, or a folder that has moved."""

import errno
import fcntl
import multiprocessing
import os
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
from killing import SMALL, left_behind, typed
from labelled import write_noise
from PIL import Image
from refusing import refusal

from patchloom.cli import main
from patchloom.errors import TemporaryError
from patchloom.runs import folder as folders
from patchloom.runs.folder import RunFolder
from patchloom.train import loop as training
from patchloom.train.checkpointing import TrainState
from patchloom.train.final_evaluation import FinalEvaluation
from patchloom.train.loop import pretrain
from patchloom.train.validation import Validation

pytestmark = pytest.mark.usefixtures("quick_probe")

TASK = {"task": "mae", "epochs": 2}


@pytest.fixture
def undisturbed(small_run):
    """Folder of an undisturbed run; others need its name to end with the same texts."""
    return small_run("mae")


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Write a checkpoint after every update."""
    monkeypatch.setattr(training, "_SAVE_EVERY", 0.0)


@pytest.fixture
def on_save(monkeypatch):
    """Return a function that has something done after the checkpoint of a step."""
    save = training.save_checkpoint

    def after(step, do):
        def saved(folder, stepper, state, unreadable):
            done = save(folder, stepper, state, unreadable)
            if state.step == step:
                do()
            return done

        monkeypatch.setattr(training, "save_checkpoint", saved)

    yield after
    monkeypatch.setattr(training, "save_checkpoint", save)


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


def goes_on(images: Path, out: Path, undisturbed: Path) -> None:
    assert main(typed(images, out, TASK)) == 0
    assert left_behind(out) == left_behind(undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="no file system can be mounted here")
def test_a_disc_that_runs_full(images, undisturbed, tmp_path, capfd, monkeypatch):
    """Others fill the disc during training."""
    place = tmp_path / "disc"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], check=True)
    try:
        (place / "others").write_bytes(bytes(300_000))
        with monkeypatch.context() as patch:
            patch.setattr("patchloom.train.estimate.refuse_full_disc", lambda *_: 1e12)
            said = refused(typed(images, place / "mae", TASK), capfd, expected=75)
        assert "could not be written" in said and "No space left on device" in said
        subprocess.run(["mount", "-o", "remount,size=16m", str(place)], check=True)
        goes_on(images, place / "mae", undisturbed)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_files_that_may_not_grow_so_large(images, undisturbed, tmp_path, capfd):
    size = (undisturbed / "checkpoints" / "last.safetensors").stat().st_size
    with limited(resource.RLIMIT_FSIZE, size // 2):
        said = refused(typed(images, tmp_path / "mae", TASK), capfd)
    assert "could not be written" in said and "File too large" in said
    goes_on(images, tmp_path / "mae", undisturbed)


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
        texts = [b"", b"hello", b"<!DOCTYPE html><html></html>"]
        choices = [cut, cut, *texts, rng.randbytes(200), bytes(99), bomb, deep[:60]]
        (broken / f"{i}{rng.choice(suffixes)}").write_bytes(choices[i % len(choices)])
    (broken / "folder.png").mkdir()
    (broken / "loop.png").symlink_to("loop.png")
    (broken / "up").symlink_to("..")
    (broken / "gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(broken / "pipe.png")
    shutil.copytree(good, folder / "good")


@pytest.mark.slow
def test_a_thousand_broken_files(tmp_path, capfd):
    """With 6 images, the first sample may contain none; with 300, the run succeeds."""
    folder, out = tmp_path / "data", tmp_path / "mae"
    rubbish(folder, write_noise(tmp_path / "good", 6))
    words = typed(folder, out, TASK | {"epochs": 1, "batch_size": 8, "workers": 1})
    said = refused(words, capfd)
    assert f"nothing could be read in {folder}: {folder / 'broken'}" in said and not out.exists()
    write_noise(folder / "more", 300)
    assert main(words) == 0
    printed, err = capfd.readouterr()
    names = (out / "unreadable.txt").read_text().splitlines()
    assert len(names) == len({*names}) and all("/broken/" in name for name in names)
    # many are empty: where one of these is held out, the others are not tried
    assert len(names) + len(RunFolder(out).read_data()["held_out_copies"]) > 700
    assert not err and f"{len(names)} files could not be read" in " ".join(printed.split())


def test_files_that_go_away_during_a_run(tmp_path, capfd, on_save):
    folder = write_noise(tmp_path / "images", 60)
    on_save(2, lambda: [path.unlink() for path in sorted(folder.rglob("*.png"))[::3]])
    assert main(typed(folder, tmp_path / "mae", TASK)) == 0
    assert not capfd.readouterr().err
    names = (tmp_path / "mae" / "unreadable.txt").read_text().splitlines()
    assert 10 <= len(names) <= 20 and not any(map(os.path.exists, names))


@pytest.mark.slow
def test_too_little_memory(tmp_path, capfd):
    folder, more = write_noise(tmp_path / "images", 200), {"batch_size": 150, "img_size": 128, "patch_size": 4}
    held = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    with limited(resource.RLIMIT_AS, held + (1 << 30)):
        said = refused(typed(folder, tmp_path / "mae", TASK | more), capfd)
    assert re.search(r"out of memory at 150 images per step \(\d\.\d GiB of \d+\.\d were in use, and", said)
    assert "GiB more were requested" in said and "halve --batch_size and double --accumulate" in said


@pytest.mark.slow
def test_a_reading_process_that_is_killed(images, undisturbed, tmp_path, capfd, on_save):
    out, killed = tmp_path / "mae", []

    def kill():
        killed.extend(child.pid for child in multiprocessing.active_children())
        for reader in killed:
            os.kill(reader, signal.SIGKILL)

    on_save(1, kill)  # before the last batches are read
    said = refused(typed(images, out, TASK | {"workers": 1}), capfd, expected=75)
    assert killed and "a process that read images has died" in said
    on_save(1, lambda: None)
    assert main(typed(images, out, TASK | {"workers": 1})) == 0
    assert left_behind(out) == left_behind(undisturbed)


SHORT = SMALL | {"task": "mae", "epochs": 1}
EVENTS = {
    "the checkpoint": (training, "save_checkpoint"),
    "an update": (TrainState, "count"),
    "the held-out measures": (Validation, "run"),
    "the evaluation": (FinalEvaluation, "_evaluate"),
}


def remove(run: Path) -> None:
    shutil.rmtree(run)


def remove_lock(run: Path) -> None:
    (run / ".lock").unlink()


def replace(run: Path) -> None:
    """Replace the folder by one in which another process trains."""
    run.rename(run.with_name("moved"))
    (run / "checkpoints").mkdir(parents=True)
    for name in (".lock", "requested.yaml", "log.txt", "checkpoints/last.safetensors"):
        (run / name).write_text("of another run")


def empty(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


def held(path: Path) -> dict[str, bytes] | None:
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.exists() else None
    return files and {str(one.relative_to(path)): one.read_bytes() for one in files}


@pytest.mark.parametrize("event", EVENTS)
def test_another_folder_at_the_same_path_is_left_alone(event, images, tmp_path, monkeypatch):
    out, there = tmp_path / "run", []
    owner, name = EVENTS[event]
    method, calls = getattr(owner, name), []

    def changed(*arguments, **named):
        calls.append(name)
        if len(calls) == (1 if owner is FinalEvaluation else 2):
            replace(out)
            there.append(held(out))
        return method(*arguments, **named)

    monkeypatch.setattr(owner, name, changed)
    assert f"{out} was removed, moved or replaced" in refusal(pretrain, images, out=out, **SHORT)
    assert held(out) == there[0]


@pytest.mark.parametrize("change", [remove, remove_lock, empty, replace])
def test_a_folder_that_has_changed_is_not_written_to(change, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.lock()
    run.check_lock()
    change(run.path)
    there = held(run.path)
    for write in (run.check_lock, lambda: run.write_metrics([]), lambda: run.checkpoints.save({}, {"step": 1})):
        assert "was removed, moved or replaced" in refusal(write)
    assert held(run.path) == there


def test_one_that_was_moved_goes_on_when_it_is_back(images, undisturbed, tmp_path, on_save, capfd):
    out = tmp_path / "mae"
    on_save(4, lambda: out.rename(tmp_path / "elsewhere"))
    assert "was removed, moved or replaced" in refused(typed(images, out, TASK), capfd)
    (tmp_path / "elsewhere").rename(out)
    on_save(4, lambda: None)
    goes_on(images, out, undisturbed)
    assert "Resuming after step 4 of" in capfd.readouterr().out


def refusing(call, number: int, end: str = ""):
    """Return ``call`` of a system that refuses it for files whose names have that end."""

    def refused(file, *arguments, **more):
        if str(file).endswith(end):
            raise OSError(number, os.strerror(number))
        return call(file, *arguments, **more)

    return refused


SYSTEMS = {
    "no locks": (fcntl, "lockf", refusing(fcntl.lockf, errno.ENOLCK)),
    "no lock file": (folders, "open", refusing(open, errno.EOPNOTSUPP, ".lock")),
    "no module": (folders, "fcntl", None),
    "no answer": (os, "stat", refusing(os.stat, errno.EIO, ".lock")),  # for a while
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_file_systems_without_locks_are_served(system, tmp_path, monkeypatch):
    monkeypatch.setattr(*SYSTEMS[system], raising=False)
    run = RunFolder(tmp_path)
    run.lock()
    run.write_metrics([{"step": "0"}])
    run.checkpoints.save({}, {"step": 1})
    assert run.metrics.exists() and run.checkpoints.there()


def test_two_that_begin_at_once(unlabelled_images, tmp_path, monkeypatch):
    """The second process checks before the first one begins, and starts after it has ended."""
    out, begin, calls = tmp_path / "run", RunFolder.begin, []

    def begin_after(self, *arguments):
        if not calls:
            calls.append(1)
            pretrain(unlabelled_images, out=out, **SHORT)
            calls.append(held(out))
        return begin(self, *arguments)

    monkeypatch.setattr(RunFolder, "begin", begin_after)
    with pytest.raises(TemporaryError, match="another process has begun a run in .* run the same command again"):
        pretrain(unlabelled_images, out=out, **SHORT)
    assert held(out) == calls[1]
