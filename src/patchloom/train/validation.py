"""Validation during training: measures on held-out images, each beside what needs no learning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from patchloom.data import Source, normalize, plain_batches
from patchloom.evaluate import ImageFeatures, classes_of, extract, has_labels, knn_accuracies, pixel_features
from patchloom.launch import gathered_weights
from patchloom.nets.encode import input_size
from patchloom.nets.heads import InstanceHead
from patchloom.nets.hierarchical import Encoder
from patchloom.nets.weights import EncoderCard, untrained_twin
from patchloom.questions.measure import Measure
from patchloom.runs.settings import Settings
from patchloom.tasks.task import Task
from patchloom.waiting import Waiting

_K = 20
_GALLERY = 2000
_BATCH = 250


class Validation:
    """Measures a task during its training.

    Args:
        task: the task.
        card: mean, std and sizes with which images become its input.
        held_out: images that are not trained on; with labels, they also ask the kNN.
        training: the training images, of which at most 2,000 answer the kNN.
        settings: seed of the draws, which are the same at every point of the training; batch size and workers.
    """

    def __init__(self, task: Task, card: EncoderCard, held_out: Source, training: Source, settings: Settings):
        self.task, self.card, self.held_out, self.seed = task, card, held_out, settings.seed
        self.unreadable: set[str] = set()  # names of held-out images that could not be read
        self.fresh = settings.from_run is None and settings.init is None
        self.batch_size, self.workers = min(_BATCH, 2 * settings.batch_size), settings.workers
        self.size = input_size(task.encoder)
        self.gallery = None
        if has_labels(held_out) and classes_of(training) > 1:
            with_label = np.flatnonzero(training.labels >= 0)
            self.gallery = training.subset(np.random.default_rng(self.seed).permutation(with_label)[:_GALLERY])

    def run(
        self, device: torch.device, precision: Callable[[], AbstractContextManager[Any]], first: bool = False
    ) -> tuple[Measure, dict[str, float]]:
        """Measure now. Every process must call it, since each may have a part of the weights only.

        Args:
            device: where the task is.
            precision: gives the context in which the task computes its own measure.
            first: before the first step: also the kNN accuracy of fresh weights and of raw pixels.

        Returns:
            The task's measure, and columns for ``metrics.csv``.
        """
        with Waiting("measuring on held-out images"), gathered_weights(self.task):
            self.task.eval()
            with torch.inference_mode(), precision():
                measure = self._measure(device)
            row = self._columns(measure, device)
            self.task.train()
        if first and self.gallery is not None:
            with Waiting("measuring what needs no training"):
                pixels = self._raw_pixel_knn()
                for name, untrained in self._untrained_knn(device, row).items():
                    row |= {f"{name}:untrained": untrained, f"{name}:raw pixels": pixels}
        return measure, row

    def _columns(self, measure: Measure, device: torch.device) -> dict[str, float]:
        row = {"held_out": measure.value} | {f"baseline:{name}": value for name, value in measure.means().items()}
        row |= {f"held_out:{name}": values.mean().item() for name, values in measure.details.items()}
        row |= {f"teacher:{name}": value for name, value in measure.diversity.items()}
        if self.gallery is not None:
            row |= self._knn_of(self.task.encoder, instance_head(self.task), device)
        return row

    def _knn_of(self, vit: Encoder, head: InstanceHead | None, device: torch.device) -> dict[str, float]:
        """kNN accuracy of an encoder by mean patch tokens, and by what represents an image where that is another."""
        reading, pooling = self._reading(), instance_pooling(self.task)
        poolings = {"knn": "mean"} if pooling == "mean" else {"knn": "mean", "instance_knn": pooling}
        found = self._knn(
            lambda source: extract(vit, self.card, source, device=device, head=head, **reading), poolings.values()
        )
        return {name: found[pooling] for name, pooling in poolings.items()}

    def _untrained_knn(self, device: torch.device, now: Mapping[str, float]) -> dict[str, float]:
        """That of fresh weights on the same images; ``now`` has the encoder's, which may begin with such."""
        if self.fresh:
            return {name: now[name] for name in ("knn", "instance_knn") if name in now}
        return self._knn_of(*untrained_twin(self.card, instance_head(self.task), self.seed), device)

    def _raw_pixel_knn(self) -> float:
        """kNN accuracy of raw pixels on the same images."""
        card, reading = self.card, self._reading()
        pixels = self._knn(lambda source: pixel_features(source, self.size, card.mean, card.std, **reading), ["pixels"])
        return pixels["pixels"]

    def _reading(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "workers": self.workers}

    def _measure(self, device: torch.device) -> Measure:
        """The task's measure on all held-out images."""
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        size = tuple(self.task.augment.size)  # larger than the encoder's where a task sees a part of its images
        batches = plain_batches(self.held_out, size, self.batch_size, self.workers, self.card.spec.channels, device)
        for batch in batches:
            self.unreadable.update(batch.unreadable)
            images = normalize(batch.views[0], self.card.mean, self.card.std)
            found.append(self.task.measure(images, generator))
        return Measure.joined(found)

    def _knn(self, features_of: Callable[[Source], ImageFeatures], poolings: Collection[str]) -> dict[str, float]:
        """Accuracy on held-out images by each of these poolings of their features."""
        gallery, queries = features_of(self.gallery), features_of(self.held_out)
        k = min(_K, len(gallery.labels))
        found = {}
        for name in poolings:
            pooled = gallery.pooled(name), gallery.labels, queries.pooled(name), queries.labels
            found[name] = knn_accuracies(*pooled, ks=(k,))[k]
        return found


def instance_head(task: Task) -> InstanceHead | None:
    """The head beside a task's encoder that represents an image, if there is one."""
    return next((module for module in task.extra_modules().values() if module.use == "pooling"), None)


def instance_pooling(task: Task) -> str:
    """The pooling by which a task represents an image (ExtreMA Figs. 4-5): what its projection is of, else mean."""
    return next((module.pooling for module in task.extra_modules().values() if module.use == "stem"), "mean")
