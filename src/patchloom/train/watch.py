"""Is it learning? Measures on held-out images, each beside what needs no learning."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from patchloom.data import Source, normalize, plain_batches
from patchloom.evaluate import knn_accuracies, raw_pixels
from patchloom.evaluate.features import pool
from patchloom.nets.encode import encode
from patchloom.tasks.task import Measure, Task
from patchloom.views.view import whole

K = 20
_GALLERY = 2000


class Watch:
    """Measures a task during its training.

    Args:
        task: the task.
        held_out: images that are never trained on; with labels, they also ask the kNN.
        training: the training images, of which at most 2,000 answer the kNN.
        stats: mean and standard deviation per channel.
        seed: of the draws, which are the same at every point of the training.
    """

    def __init__(self, task: Task, held_out: Source, training: Source, stats: tuple, channels: int, seed: int):
        self.task, self.held_out, self.stats, self.channels, self.seed = task, held_out, stats, channels, seed
        self.gallery = None
        if training.labels is not None and held_out.labels is not None:
            some = np.random.default_rng(seed).permutation(len(training))[:_GALLERY]
            self.gallery = training.subset(some)

    def look(self, device: torch.device, context) -> tuple[Measure, dict[str, float]]:
        """Measure now.

        Args:
            device: where the task is.
            context: a function that gives the context (precision) to run in.

        Returns:
            The task's measure, and columns for ``metrics.csv``.
        """
        self.task.eval()
        with torch.inference_mode(), context():
            measure = self._measure(device)
            row = {"held_out": measure.value} | {
                f"yardstick:{name}": value for name, value in measure.yardsticks.items()
            }
            if self.gallery is not None:
                row["knn"] = self._knn(device)
        self.task.train()
        return measure, row

    def raw_pixel_knn(self) -> float | None:
        """kNN accuracy of raw pixels on the same images; None without labels."""
        if self.gallery is None:
            return None
        size = tuple(self.task.encoder.patch_embed.img_size)
        gallery, queries = (raw_pixels(source, size, self.channels) for source in (self.gallery, self.held_out))
        return self._nearest(gallery, queries)

    def _batches(self, source: Source, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        size = tuple(self.task.encoder.patch_embed.img_size)
        for batch in plain_batches(source, size, 250, channels=self.channels):
            yield normalize(batch.views[0].to(device), *self.stats), batch.indices

    def _measure(self, device: torch.device) -> Measure:
        """The task's measure, averaged over the held-out images."""
        generator = torch.Generator().manual_seed(self.seed)
        found, sizes = [], []
        for images, _ in self._batches(self.held_out, device):
            found.append(self.task.measure(images, generator))
            sizes.append(len(images))
        total = sum(sizes)
        value = sum(m.value * size for m, size in zip(found, sizes, strict=True)) / total
        yardsticks = {
            name: sum(m.yardsticks[name] * size for m, size in zip(found, sizes, strict=True)) / total
            for name in found[0].yardsticks
        }
        return found[0]._replace(value=value, yardsticks=yardsticks)

    def _knn(self, device: torch.device) -> float:
        return self._nearest(*(self._features(source, device) for source in (self.gallery, self.held_out)))

    def _features(self, source: Source, device: torch.device) -> tuple[Tensor, Tensor]:
        features, indices = [], []
        for images, where in self._batches(source, device):
            tokens = encode(self.task.encoder, whole(images, self.task.patches))
            features.append(pool(self.task.encoder, tokens, "mean").float().cpu())
            indices.append(where)
        return torch.cat(features), torch.from_numpy(source.labels)[torch.cat(indices)]

    @staticmethod
    def _nearest(gallery: tuple[Tensor, Tensor], queries: tuple[Tensor, Tensor]) -> float:
        k = min(K, len(gallery[0]))
        return knn_accuracies(*gallery, *queries, ks=(k,))[k]


def verdict(measure: Measure, images: int, knn: dict[str, float] | None) -> str:
    """One sentence on what the numbers mean.

    Args:
        measure: the task's measure at the end.
        images: how many held-out images it was taken on.
        knn: kNN accuracies by encoder ("trained", "untrained", "raw pixels"), or None without labels.
    """
    sign = 1 if measure.higher_is_better else -1
    hardest, bar = max(measure.yardsticks.items(), key=lambda item: sign * item[1])
    better = sign * (measure.value - bar) > 0.05 * bar
    others = ", ".join(f"{name} {_number(measure, value)}" for name, value in measure.yardsticks.items())
    head = "The task is being learnt" if better else f"The task is not learnt yet (compare {hardest})"
    text = f"{head}: {measure.name} {_number(measure, measure.value)} on {images:,} held-out images, against {others}"
    if knn is None:
        return text + "; the images have no labels, so what the features are good for was not measured."
    controls = {name: value for name, value in knn.items() if name != "trained"}
    best = max(controls.values())
    # half the width of a 95 % interval of the difference of two accuracies on so many images
    noise = 1.96 * (2 * best * (1 - best) / images) ** 0.5
    gain = knn["trained"] - best
    meaning = "clearly better" if gain > noise else "no clear gain" if gain > -noise else "worse"
    beside = ", ".join(f"{name} {value:.1%}" for name, value in controls.items())
    return f"{text}; and kNN finds the class of {knn['trained']:.1%}, against {beside}: {meaning}."


def _number(measure: Measure, value: float) -> str:
    return f"{value:.1%}" if measure.higher_is_better else f"{value:.3f}"
