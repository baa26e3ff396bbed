"""Checkpoints: round trips, damaged and foreign ones, and writing behind a GPU."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudo_cuda import pseudo_cuda
from refusing import refusal
from safetensors.torch import save_file

from patchloom.errors import PatchloomError, TemporaryError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.read import checksum
from patchloom.runs import checkpoint
from patchloom.runs.checkpoint import _MARGIN, _ROUNDED, Checkpoints, SaveTimer, all_finite, restore, tensors_of
from patchloom.tasks import build_task
from patchloom.train.step import pretraining_optimizer

SIZES = {"embed_dim": 32, "depth": 1, "num_heads": 2}


def make(seed=0, name="mae"):
    torch.manual_seed(seed)
    task = build_task({"name": name}, build_encoder(EncoderSpec("nano", (16, 16), 4, options=SIZES)))
    optimizer = pretraining_optimizer(task, 0.05, "cpu")
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    return task, optimizer


def step(task, optimizer, number):
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(number))
    task(images, progress=0.0, generator=torch.Generator().manual_seed(number)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save(folder, task, optimizer, number):
    kept = Checkpoints(folder)
    kept.save(tensors_of(task, optimizer), {"step": number})
    return kept


def test_weights_that_are_not_finite_are_found_by_one_wait_for_a_gpu():
    task, _ = make()
    with pseudo_cuda() as waits:
        weights = [*task.to("cuda").parameters()]
        waits.clear()
        assert all_finite(weights)
        assert sum(waits.values()) == 1
        with torch.no_grad():
            weights[-1][0] = float("nan")
        assert not all_finite(weights)


def test_checkpoints_are_readable_by_others(tmp_path):
    (tmp_path / "plain").write_text("")
    kept = save(tmp_path, *make(), 0)
    assert kept.last.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    "about", ["[]", '{"best": "x"}', '{"step": "3"}', '{"step": 2.5}', '{"step": -1}', '{"step": NaN}', "[" * 10**5]
)
def test_values_of_a_stranger_are_checked(about, tmp_path):
    kept = save(tmp_path / "checkpoints", *make(), 0)
    tensors, _, _ = kept.read()
    save_file(tensors, kept.last, {"about": about, "sha256": checksum(tensors, about)})
    assert "is damaged" in refusal(kept.newest)
    assert kept.about() == {} and kept.progress() == (0, 0.0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda own: tensors_of(*make(name="droppos")), "another task or model"),
        (lambda own: {name.replace("pixels.", ""): one for name, one in own.items()}, "it has .* it lacks"),
        (lambda own: {name: one for name, one in own.items() if "decoder" not in name}, "it lacks questions.pixels"),
        (lambda own: {name: torch.cat([one, one]) if one.ndim else one for name, one in own.items()}, "size mismatch"),
    ],
)
def test_a_checkpoint_of_another_task_or_size_is_refused(changed, said):
    task, optimizer = make()
    with pytest.raises(PatchloomError, match=f"another task or model.*{said}|{said}.*--from"):
        restore(changed(tensors_of(task, optimizer)), task)


@pytest.mark.parametrize(
    ("limits", "took", "pauses"),
    [
        ((5, 60, 600), 0.0, [5, 10, 20, 40, 60, 60]),  # a run
        ((5, 60, 600), 2.0, [5, 40, 60, 60, 60, 60]),
        ((5, 60, 600), 9.0, [5, 180, 180, 180, 180, 180]),
        ((5, 60, 600), 40.0, [5, 600, 600, 600, 600, 600]),
        ((30, 30), 0.0, [30] * 6),  # a training of an evaluation
        ((30, 30), 9.0, [30] + [180] * 5),
    ],
)
def test_seconds_between_checkpoints(monkeypatch, limits, took, pauses) -> None:
    now = [100.0]
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: now[0])
    timer, found = SaveTimer(*limits), []
    for _ in range(6):
        begun = now[0]
        while not timer.due:
            now[0] += 1
        found.append(now[0] - begun - 1)  # due once more than the pause has passed
        timer.saved(took)
    assert found == pauses


class Held:
    """Writing of checkpoints that waits until it may go on, in `Checkpoints`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may, write = threading.Event(), Checkpoints._write

        def held(this, *what):
            assert self.may.wait(60)
            write(this, *what)

        monkeypatch.setattr(Checkpoints, "_write", held)


@pytest.fixture
def held(monkeypatch):
    """Let a GPU be imitated, and writing wait."""
    with pseudo_cuda():
        yield Held(monkeypatch)


def content(path: Path) -> tuple[Any, bytes]:
    """Return the header of a file, whose entries safetensors writes in any order, and its other bytes."""
    read = path.read_bytes()
    end = 8 + int.from_bytes(read[:8], "little")
    return json.loads(read[8:end]), read[end:]


def on_gpu(number=1):
    """Return a task on the imitated GPU, trained for some steps, and its optimiser."""
    task, optimizer = make()
    for i in range(number):
        step(task, optimizer, i)
    state = optimizer.state_dict()
    task = task.to("cuda")
    optimizer = pretraining_optimizer(task, 0.05, "cuda")
    optimizer.load_state_dict(state)
    return task, optimizer


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, held):
    task, optimizer = on_gpu()
    tensors = tensors_of(task, optimizer)
    plain = {name: one.cpu().contiguous() for name, one in tensors.items()}
    assert all(one.is_cuda for one in tensors.values()) and any(name.startswith("optimizer.") for name in tensors)
    kept = Checkpoints(tmp_path / "cuda")
    kept.save(tensors, {"step": 1})
    del tensors
    assert not kept.there()
    with torch.no_grad():
        for weight in task.parameters():
            weight += 1
    kept.wait(only_if_done=True)
    assert not kept.there()
    held.may.set()
    kept.wait()
    Checkpoints(tmp_path / "cpu").save(plain, {"step": 1})
    assert content(kept.last) == content(tmp_path / "cpu" / "last.safetensors")


def test_the_next_checkpoint_and_reading_wait_for_the_last_one(tmp_path, held):
    task, optimizer = on_gpu()
    kept, begun = Checkpoints(tmp_path), time.monotonic()
    for number in (1, 2):
        threading.Timer(0.3 * number, held.may.set).start()
        kept.save(tensors_of(task, optimizer), {"step": number})
    assert kept.read()[1] == {"step": 2} and time.monotonic() - begun > 0.3
    assert Checkpoints(tmp_path).about() == {"step": 2}


def test_a_failure_of_writing_is_raised_once_it_is_known(tmp_path, monkeypatch):
    def full(*what):
        raise TemporaryError("no space")

    monkeypatch.setattr(Checkpoints, "_write", full)
    with pseudo_cuda():
        task, optimizer = on_gpu()
        for ask in (
            lambda kept: kept.wait(),
            lambda kept: kept.save(tensors_of(task, optimizer), {"step": 2}),
            lambda kept: kept.read(),
            lambda kept: [time.sleep(0.02) or kept.wait(only_if_done=True) for _ in range(500)],
        ):
            kept = Checkpoints(tmp_path)
            kept.save(tensors_of(task, optimizer), {"step": 1})
            with pytest.raises(TemporaryError, match="no space"):
                ask(kept)
        kept.save(tensors_of(task, optimizer), {"step": 1})
        with pytest.raises(ZeroDivisionError), kept.finished():
            raise ZeroDivisionError


def test_an_error_waits_for_the_checkpoint_and_ctrl_c_does_not(tmp_path, held):
    task, optimizer = on_gpu()
    kept = Checkpoints(tmp_path)
    kept.save(tensors_of(task, optimizer), {"step": 1})
    with pytest.raises(KeyboardInterrupt), kept.finished():
        raise KeyboardInterrupt
    assert not kept.there()
    threading.Timer(0.3, held.may.set).start()
    with pytest.raises(ZeroDivisionError), kept.finished():
        raise ZeroDivisionError
    assert kept.there()


def test_a_gpu_without_room_for_copies_waits(tmp_path, monkeypatch):
    with pseudo_cuda():
        task, optimizer = on_gpu()
        size = sum(one.nbytes for one in tensors_of(task, optimizer).values())
        enough = int(_ROUNDED * size) + _MARGIN + 1
        for free in (size, enough):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, 2**40))
            tensors = tensors_of(task, optimizer)
            assert {one.is_cuda for one in tensors.values()} == {free == enough}
            kept = Checkpoints(tmp_path / str(free))
            kept.save(tensors, {"step": 1})
            kept.wait()
        read = [content(Checkpoints(tmp_path / str(free)).last) for free in (size, enough)]
    assert read[0] == read[1]
