"""A run synchronises with the GPU once per update. Without a GPU, synchronising operations are counted on the CPU."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from killing import SMALL, draw_images
from options_swept import OPTION_SETS
from sweep import asked_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from patchloom.data.loader import Prefetcher
from patchloom.train import loop as training
from patchloom.train import metrics
from patchloom.train.final_evaluation import FinalEvaluation
from patchloom.train.loop import pretrain
from patchloom.train.step import Stepper
from patchloom.train.validation import Validation

# what needs a tensor's numbers on the CPU
READS = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.__contains__),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__format__, Tensor.__repr__),
    *(Tensor.nonzero, torch.nonzero, torch.argwhere, torch.where, torch.unique, Tensor.unique),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero),
    *(Tensor.masked_select, torch.masked_select, Tensor.repeat_interleave, torch.bincount, Tensor.bincount),
}
ALSO = [("droppos", {"accumulate": 3, "precision": "float16"}), ("mae", {"precision": "float32", "clip": 0.0})]
PICKS = {Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put, Tensor.index_put_}


class Counter(TorchFunctionMode):
    """Counter of operations that would synchronise with a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.seen = True, []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.on and self.waits(func, args, kwargs or {}):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))

    def waits(self, func: Callable, args: tuple, kwargs: dict) -> bool:
        if func is torch.where:
            return len(args) == 1  # the places where something is true
        if func in PICKS:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in places)
        if func in (torch.tensor, torch.as_tensor):  # numbers that are copied, and waited for
            return kwargs.get("device") is not None
        return func in READS

    def take(self) -> list[str]:
        """Return the count since the last call."""
        found, self.seen = self.seen, []
        return found


class Warned:
    """Counter of torch's own warnings about synchronisation with a GPU."""

    @property
    def on(self) -> bool:
        return torch.cuda.get_sync_debug_mode() > 0

    @on.setter
    def on(self, wanted: bool) -> None:
        torch.cuda.set_sync_debug_mode("warn" if wanted else "default")

    def __enter__(self) -> None:
        self.catcher = warnings.catch_warnings(record=True)
        self.caught = self.catcher.__enter__()
        warnings.simplefilter("always")
        self.on = True

    def __exit__(self, *problem: Any) -> None:
        self.on = False
        self.catcher.__exit__(*problem)

    def take(self) -> list[str]:
        """Return the count since the last call."""
        found = ["tolist" for one in self.caught if "synchronizing CUDA operation" in str(one.message)]
        self.caught.clear()
        return found


def aside(counter: Counter | Warned, of: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """Exclude a method from the counts: it does not run at every update, or uses no tensor on the device."""
    method = getattr(of, name)

    def uncounted(*args: Any, **more: Any) -> Any:
        counter.on, before = False, counter.on
        try:
            return method(*args, **more)
        finally:
            counter.on = before

    patch.setattr(of, name, uncounted)


@pytest.fixture(params=[Counter, pytest.param(Warned, marks=pytest.mark.gpu)])
def counted(request, monkeypatch):
    """Return the device and the synchronisations of each update, then those after the last one."""
    counter, each = request.param(), []
    asides = [
        (Validation, "run"),
        (metrics, "measure_forms"),
        (metrics, "each_result"),
        (metrics, "health_of"),
        (training, "save_checkpoint"),
    ]
    if request.param is Counter:  # reading is done on the CPU, there as here
        asides += [(Prefetcher, "__next__"), (Prefetcher, "send")]
    for of, name in asides:
        aside(counter, of, name, monkeypatch)
    train, update, save = training.train, Stepper.update, training.save_checkpoint

    def counted_update(*args, **kwargs):
        moved = update(*args, **kwargs)
        each.append(counter.take())
        return moved

    def counted_train(*args):
        with counter:
            ended = train(*args)
            each.append(counter.take())
        return ended

    def counted_save(*args):
        saved = save(*args)
        if not each:  # before the first step: from now on
            counter.take()
        return saved

    monkeypatch.setattr(FinalEvaluation, "run", lambda *_: "")
    monkeypatch.setattr(Stepper, "update", counted_update)
    monkeypatch.setattr(training, "train", counted_train)
    monkeypatch.setattr(training, "save_checkpoint", counted_save)
    return "cpu" if request.param is Counter else "cuda", each


@pytest.mark.parametrize(("name", "how"), [*((name, {"precision": "bfloat16"}) for name in OPTION_SETS), *ALSO])
def test_one_synchronisation_per_update(name, how, counted, tmp_path):
    device, each = counted
    images = draw_images(tmp_path / "images")
    pretrain(images, asked_of(name), out=tmp_path / "run", **SMALL | {"epochs": 2, "device": device} | how)
    *updates, after = each
    assert updates == [["tolist"]] * -(-6 // how.get("accumulate", 1))
    assert after == []


def test_synchronising_operations_are_counted():
    with Counter() as counter:
        x = torch.arange(4.0)
        x.sum().item()
        x[x > 1]
        if x.any():
            x[x > 1] = 0.0
        torch.tensor([1.0], device="cpu")
        torch.where(x > 0)
        float(x[0])
        assert len(counter.seen) == 7
        x.clamp(min=1)[torch.tensor([0])] + torch.where(x > 0, x, 1.0)
        assert len(counter.seen) == 7
