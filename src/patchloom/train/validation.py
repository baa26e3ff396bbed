"""Validation during training: measures on held-out images, each beside what needs no learning."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from patchloom.claims import Effect
from patchloom.data.augment import cuts_natively
from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.display import StatusMessage
from patchloom.evaluate.features import ImageFeatures, count_classes, extract, has_labels, known_labels, pixel_features
from patchloom.evaluate.protocols.knn import knn_accuracies
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.encode import input_size
from patchloom.nets.heads import InstanceHead, pooled_tokens
from patchloom.nets.swin import Encoder
from patchloom.questions.collapse import centred_rank, deviation, distance_from_mean, effective_rank, output_spread
from patchloom.questions.question import Measure
from patchloom.runs.settings import ResolvedSettings
from patchloom.system.distributed import gathered_weights
from patchloom.tasks.task import Task

_BATCH = 250
_FEATURED = 500  # held-out images whose features tell whether the encoder tells images apart
_BESIDE_UNTRAINED = ("features:effective rank", "features:centred rank", "features:deviation")


class Validation:
    """Measures a task during its training.

    Args:
        task: the task.
        card: mean, std and sizes with which images become its input.
        held_out: images that are not trained on; with labels, they also ask the kNN.
        training: the training images, of which at most ``knn_gallery`` answer the kNN.
        settings: seed of the draws, which are the same at every point of the training; batch size and workers.
        doubt: what keeps the held-out images from being new to the run, as `patchloom.runs.held_out.HeldOut` has it.
    """

    def __init__(
        self,
        task: Task,
        card: EncoderCard,
        held_out: Source,
        training: Source,
        settings: ResolvedSettings,
        doubt: str = "",
    ):
        self.task, self.card, self.held_out, self.seed, self.doubt = task, card, held_out, settings.seed, doubt
        self.unreadable: set[str] = set()  # names of held-out images that could not be read
        self.fresh = settings.from_run is None and settings.init is None
        self.batch_size, self.workers = min(_BATCH, 2 * settings.batch_size), settings.workers
        self.size, self.k = input_size(task.encoder), settings.knn_k
        self.gallery = None
        if has_labels(held_out) and count_classes(training) > 1:
            assert training.labels is not None  # of several classes
            with_label = np.flatnonzero(training.labels >= 0)
            order = np.random.default_rng(self.seed).permutation(with_label)
            self.gallery = training.subset(order[: settings.knn_gallery])

    def run(
        self, device: torch.device, precision: Callable[[], AbstractContextManager[Any]], first: bool = False
    ) -> tuple[Measure, dict[str, float]]:
        """Measure now. Every process must call it, since each may have a part of the weights only."""
        with StatusMessage("measuring on held-out images"), gathered_weights(self.task):
            self.task.eval()
            with torch.inference_mode(), precision():
                measure = self._measure(device)
            row = self._columns(measure, device)
            self.task.train()
        if first:
            with StatusMessage("measuring what needs no training"):
                row |= self._without_training(row, device)
        return measure, row

    @property
    def labelled(self) -> int:
        """How many held-out images have a label, and so ask the kNN."""
        return 0 if self.gallery is None else len(known_labels(self.held_out))

    def _without_training(self, now: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """Columns of what needs no training; ``now`` has those of the encoder, which may begin with fresh weights."""
        row = {"images:apart": self._apart(device)}
        pixels = None if self.gallery is None else self._raw_pixel_knn()
        for name, untrained in (now if self.fresh else self._untrained(device)).items():
            if name in _BESIDE_UNTRAINED:
                row[f"{name}:untrained"] = untrained
            elif name in ("knn", "instance_knn"):
                assert pixels is not None  # the kNN has a gallery
                row |= {f"{name}:untrained": untrained, f"{name}:raw pixels": pixels}
        return row

    def _columns(self, measure: Measure, device: torch.device) -> dict[str, float]:
        result = measure.result
        row = {"held_out": result.value} | {f"baseline:{name}": value for name, value in result.baselines.items()}
        row |= _share_columns(result.effect)
        row |= {f"held_out:{name}": values.mean().item() for name, values in measure.details.items()}
        row |= {f"teacher:{name}": value for name, value in result.outputs.items()}
        row |= self._features_of(self.task.encoder, device)
        if self.gallery is not None:
            row |= self._knn_of(self.task.encoder, instance_head(self.task), device)
        return row

    def _featured(self, device: torch.device) -> Iterator[Tensor]:
        """Batches [b c h w] of whole held-out images, normalised, spread over all of them: at most 500."""
        places = np.unique(np.linspace(0, len(self.held_out) - 1, _FEATURED).round().astype(int))
        some, channels = self.held_out.subset(places), self.card.own_spec.channels
        for batch in plain_batches(some, self.size, self.batch_size, self.workers, channels, device):
            yield normalize(batch.views[0], self.card.mean, self.card.std)

    @torch.inference_mode()
    def _features_of(self, vit: Encoder, device: torch.device) -> dict[str, float]:
        """Figures of an encoder's features of whole images, means of its patch tokens; nan where these are not finite.

        Spread and effective rank are of the features as they are. A vector that all images have in common makes both
        small, so whether images are told apart is judged by the other two, which it does not move.
        """
        training = vit.training
        vit.eval()
        features = torch.cat([pooled_tokens(vit, images)["mean"] for images in self._featured(device)])
        vit.train(training)
        known = bool(features.isfinite().all())
        figures = {
            "features:spread": output_spread,
            "features:effective rank": effective_rank,
            "features:deviation": deviation,
            "features:centred rank": centred_rank,
        }
        return {name: figure(features) if known else math.nan for name, figure in figures.items()}

    @torch.inference_mode()
    def _apart(self, device: torch.device) -> float:
        """How far the held-out images are from their mean image, as a share of how much their pixels differ at all."""
        return distance_from_mean(torch.cat([images.flatten(1) for images in self._featured(device)]))

    def _knn_of(self, vit: Encoder, head: InstanceHead | None, device: torch.device) -> dict[str, float]:
        """kNN accuracy of an encoder by mean patch tokens, and by what represents an image where that is another."""
        reading, pooling = self._reading(), instance_pooling(self.task)
        poolings = {"knn": "mean"} if pooling == "mean" else {"knn": "mean", "instance_knn": pooling}
        found = self._knn(
            lambda source: extract(vit, self.card, source, device=device, head=head, **reading), poolings.values()
        )
        return {name: found[pooling] for name, pooling in poolings.items()}

    def _untrained(self, device: torch.device) -> dict[str, float]:
        """The columns of fresh weights' features, and their kNN, on the same images."""
        twin, head = untrained_twin(self.card, instance_head(self.task), self.seed)
        row = self._features_of(twin.to(device), device)
        return row | (self._knn_of(twin, head, device) if self.gallery is not None else {})

    def _raw_pixel_knn(self) -> float:
        """kNN accuracy of raw pixels on the same images."""
        card, reading = self.card, self._reading()
        pixels = self._knn(lambda source: pixel_features(source, self.size, card.mean, card.std, **reading), ["pixels"])
        return pixels["pixels"]

    def _reading(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "workers": self.workers}

    def _measure(self, device: torch.device) -> Measure:
        """The task's measure on all held-out images."""
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        h, w = self.task.augment.size  # larger than the encoder's where a task sees a part of its images
        reading = self.batch_size, self.workers, self.card.own_spec.channels, device
        batches = plain_batches(self.held_out, (h, w), *reading, native=cuts_natively(self.task.augment))
        for batch in batches:
            self.unreadable.update(batch.unreadable)
            images = normalize(batch.views[0], self.card.mean, self.card.std)
            found.append(self.task.measure(images, generator))
        return Measure.joined(found)

    def _knn(self, features_of: Callable[[Source], ImageFeatures], poolings: Collection[str]) -> dict[str, float]:
        """Accuracy on held-out images by each of these poolings of their features."""
        assert self.gallery is not None  # asked for of labelled images alone
        gallery, queries = features_of(self.gallery), features_of(self.held_out)
        k = min(self.k, len(gallery.labels))
        found = {}
        for name in poolings:
            pooled = gallery.pooled(name), gallery.labels, queries.pooled(name), queries.labels
            found[name] = knn_accuracies(*pooled, ks=(k,))[k]
        return found


def _share_columns(effect: Effect) -> dict[str, float]:
    """Columns of the share of the way to perfect and its interval; of few images there is none."""
    columns = {"share": effect.share, "share:low": effect.low, "share:high": effect.high}
    return {name: value for name, value in columns.items() if math.isfinite(value)}


def instance_head(task: Task) -> InstanceHead | None:
    """The head beside a task's encoder that represents an image, if there is one."""
    found = next((module for module in task.extra_modules().values() if module.use == "pooling"), None)
    return cast(InstanceHead | None, found)


def instance_pooling(task: Task) -> str:
    """The pooling by which a task represents an image (ExtreMA Figs. 4-5): what its projection is of, else mean."""
    return str(next((module.pooling for module in task.extra_modules().values() if module.use == "stem"), "mean"))
