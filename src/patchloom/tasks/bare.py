"""Bare losses as tasks: a module of one's own around an encoder, without a measure and pictures."""

from __future__ import annotations

import inspect
from functools import cache, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.swin import Encoder
from patchloom.questions.question import Measure, Outcome, Sheet
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches

_PASSED = ("progress", "generator", "indices")  # given to `forward` of a loss that takes them


def is_bare_loss(kind: object) -> bool:
    """Return whether a class is a module with a ``forward``, and no `Task`."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or issubclass(kind, Task):
        return False
    return kind.forward is not nn.Module.forward


class BareTask(Task):
    """Task of a bare loss: it trains, and measures and draws nothing.

    A subclass of it, made by `as_task`, has the options of the loss. The encoder is the task's, and no second part of
    the loss: each weight has one name in checkpoints.

    Attributes:
        kind: class of the loss.
        loss: the loss, which sees the encoder by the attribute that it gave it.
    """

    serves_swin: ClassVar[bool] = True
    measured: ClassVar[bool] = False
    kind: ClassVar[type[nn.Module]]

    def __init__(self, encoder: Encoder, **options: Any):
        super().__init__(encoder)
        loss = self.kind(encoder, **options)
        for name, child in list(loss.named_children()):
            if child is encoder:
                del loss._modules[name]
                loss.__dict__[name] = encoder
        if any(part is encoder for part in loss.modules()):
            raise PatchloomError(
                f"{self.kind.__name__} keeps the encoder inside another module: make it an attribute of its own, as in "
                "self.encoder = encoder"
            )
        self.loss = loss
        self.passed = [name for name in _PASSED if name in inspect.signature(loss.forward).parameters]

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return everything: what a bare loss withholds is not known."""
        return all_patches(images, self.geometry.n)

    def forward(  # type: ignore[override]  # no encoder input can be given
        self,
        *views: Tensor,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        indices: Tensor | None = None,
    ) -> Outcome:
        """Return the loss of ``views`` [b c h w], a scalar or an object with ``loss``, as an outcome."""
        known = {"progress": progress, "generator": generator, "indices": indices}
        found = self.loss(*views, **{name: known[name] for name in self.passed})
        loss = getattr(found, "loss", found)
        if not (isinstance(loss, Tensor) and loss.ndim == 0):
            what = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise PatchloomError(f"{self.kind.__name__} returned {what}: return the loss, a tensor of one number")
        return Outcome(loss, {})

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """Refuse: there is no measure."""
        raise PatchloomError(f"{self.kind.__name__} is a bare loss, without a measure: derive it from Task for one")

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Refuse: there are no pictures."""
        raise PatchloomError(f"{self.kind.__name__} is a bare loss, without pictures: derive it from Task for some")


@cache
def as_task(kind: type[nn.Module]) -> type[Task]:
    """Return the class of the task of a bare loss, with its name and options."""

    @wraps(kind.__init__)
    def build(self: BareTask, encoder: Encoder, **options: Any) -> None:
        BareTask.__init__(self, encoder, **options)

    uses = "indices" in inspect.signature(kind.forward).parameters
    members = {"__init__": build, "__doc__": kind.__doc__, "kind": kind, "uses_indices": uses}
    return type(kind.__name__, (BareTask,), members | {"__module__": kind.__module__})
