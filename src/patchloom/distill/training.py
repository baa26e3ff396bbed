"""Training of a student on a frozen teacher's features, by the loop of the evaluations.

`patchloom.train.loop` trains tasks around a ViT or Swin, whose card, measures and pictures a student cannot have. The
loop used here has the same exact resuming.

Letters: b batch, n patches of the teacher's grid, d width of the teacher.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.scheduler import CosineLRScheduler
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.augment import ColoredCrop
from patchloom.data.loader import Batch, steps_of, steps_per_epoch, training_batches
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import BestEpoch, EpochScore, Loop, training_identity
from patchloom.nets.encode import grid_size
from patchloom.nets.student import Student
from patchloom.nets.teacher import FrozenTeacher
from patchloom.train.step import parameter_groups

_SCALE = (0.14, 1.0)  # area of a crop, as lightly-train's
_WARMUP = 0.05  # share of the steps
_CLIP = 1.0


class Distillation(Loop):
    """Training of a student: one view of an image for both, and the cosine distance of their features.

    Args:
        student: trained in place.
        teacher: frozen.
        source: training images.
        size: height and width of the views.
        epochs, lr, weight_decay, batch: length, peak learning rate, weight decay and images per step.
        dense: weight of the loss on the dense features, beside 1 for the pooled ones.
        settings: seed, device and workers.
    """

    def __init__(
        self,
        student: Student,
        teacher: FrozenTeacher,
        source: Source,
        size: tuple[int, int],
        *,
        epochs: float,
        lr: float,
        weight_decay: float,
        batch: int,
        dense: float,
        settings: EvalSettings,
    ) -> None:
        self.source, self.settings, self.dense, self.lr = source, settings, dense, lr
        self.device, self.seed, self.clip = settings.torch_device, settings.seed, _CLIP
        self.channels, self.batch = len(teacher.mean), min(batch, len(source))
        self.statistics = teacher.mean.flatten().tolist(), teacher.std.flatten().tolist()
        self.augment = ColoredCrop(size, scale=_SCALE)
        recipe: dict[str, Any] = {
            "epochs": epochs,
            "lr": lr,
            "decay": weight_decay,
            "batch": self.batch,
            "dense": dense,
        }
        recipe |= {"size": size, "images": source.fingerprint(), "teacher": teacher.digest.tolist()}
        self.about = training_identity(student, recipe, [self.seed], [self.device.type], settings.accumulate)
        self.teacher, self.grid = teacher.to(self.device), grid_size(teacher.encoder)
        self.student = self.model = student.to(self.device).train()
        self._share()
        self.steps, self.per_epoch = steps_of(epochs, len(source), batch), steps_per_epoch(len(source), batch)
        self.best = BestEpoch(0, self.steps, self.per_epoch, 1.0)
        self.optimizer = torch.optim.AdamW(parameter_groups(student, weight_decay), lr=lr)
        warmup = min(round(_WARMUP * self.steps), self.steps - 1)
        # updates count from 1; the rate reaches 0 one step after the last
        self.schedule = CosineLRScheduler(
            self.optimizer, self.steps + 1 - warmup, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False
        )
        self.unreadable: set[str] = set()

    def _batches(self, steps: int, workers: int) -> Any:
        reading = self.batch, self.seed, self.step, steps, workers, self.channels
        return training_batches(self.source, self.augment, *reading, device=self.device)

    def _loss(self, batch: Batch) -> Tensor:
        pooled, dense = self.parallel(normalize(batch.views[0], *self.statistics), self.grid)
        images = batch.views[0] if batch.views[0].is_floating_point() else batch.views[0].float() / 255
        one, each = feature_cosines(pooled, dense, self.teacher(images))
        return 1 - one + self.dense * (1 - each)

    def _validated(self) -> EpochScore:
        raise NotImplementedError  # there are no validation images

    def _position(self) -> str:
        return f"epoch {self.epoch:.1f} of {self.steps / self.per_epoch:g}"

    def _progress_text(self, loss: float) -> str:
        return f"{self._position()} · loss {loss:.3f}"

    def _outcome(self, chosen: dict[str, Any]) -> str:
        return f"trained for {self.steps:,} steps"

    def _rate_option(self) -> str:
        return f"--lr (now {self.lr:g})"


def feature_cosines(pooled: Tensor, dense: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cosines with a teacher's features [b n d], of pooled features [b d] and of dense ones [b n d]."""
    whole = F.cosine_similarity(pooled.float(), features.mean(1), dim=-1).mean()
    return whole, F.cosine_similarity(dense.float(), features, dim=-1).mean()
