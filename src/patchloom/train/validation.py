"""Validation during training: held-out measures and features, with their baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from patchloom.data.augment import cuts_natively
from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import evenly_spaced
from patchloom.data.stats import normalize
from patchloom.display import StatusMessage
from patchloom.evaluate.features import (
    ImageFeatures,
    count_classes,
    extract,
    groups_of,
    has_labels,
    only_labelled,
    pixel_features,
)
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.encode import input_size
from patchloom.nets.heads import InstanceHead, pooled_tokens
from patchloom.nets.performance import use_kernels
from patchloom.nets.swin import Encoder
from patchloom.options.evaluate import Precision
from patchloom.questions.collapse import centred_rank, deviation, distance_from_mean, effective_rank, output_spread
from patchloom.questions.question import Measure
from patchloom.results.claims import START
from patchloom.runs.settings import ResolvedSettings
from patchloom.system.device import float32_products
from patchloom.system.distributed import gathered_weights, without_collectives
from patchloom.tasks.task import Task

_BATCH = 250
_FEATURED = 500  # held-out images for the statistics of features
_BESIDE_UNTRAINED = ("features:effective rank", "features:centred rank", "features:deviation")


class Validation:
    """Validation of a task during training.

    Args:
        task: the task.
        card: mean, std and sizes of the input.
        held_out: held-out images; labelled ones are also kNN queries.
        training: training images; up to ``knn_gallery`` labelled ones form the kNN gallery.
        settings: seed of the random draws, the same at every evaluation; batch size and workers.
        doubt: whether the held-out images may be known to the initial weights (`patchloom.runs.held_out.HeldOut`).
        start: loads the initial weights of an adaptation and their card, the control of its kNN accuracy; None for
            a run from random weights.
    """

    def __init__(
        self,
        task: Task,
        card: EncoderCard,
        held_out: Source,
        training: Source,
        settings: ResolvedSettings,
        doubt: str = "",
        start: Callable[[], tuple[Encoder, EncoderCard] | None] = lambda: None,
    ):
        self.task, self.card, self.held_out, self.seed, self.doubt = task, card, held_out, settings.seed, doubt
        self.start = start
        self.unreadable: set[str] = set()  # names of held-out images that could not be read
        self.fresh = settings.from_run is None and settings.init is None
        self.batch_size, self.workers = min(_BATCH, 2 * settings.batch_size), settings.workers
        self.size, self.k = input_size(task.encoder), settings.knn_k
        # as in training, which is two to three times as fast on a CPU as float32
        self.precision: Precision = "bfloat16" if settings.precision == "bfloat16" else "auto"
        self.kernels = settings.kernels
        self.gallery: Source | None = None
        self.queries: Source | None = None
        if has_labels(held_out) and count_classes(training) > 1:
            assert training.labels is not None  # there are several classes
            with_label = np.flatnonzero(training.labels >= 0)
            order = np.random.default_rng(self.seed).permutation(with_label)
            self.gallery, self.queries = training.subset(order[: settings.knn_gallery]), only_labelled(held_out)

    def run(
        self, device: torch.device, precision: Callable[[], AbstractContextManager[Any]], first: bool = False
    ) -> tuple[Measure, dict[str, float]]:
        """Take all measures, or the ``first`` time only that of the task: see `baselines` for the others.

        Every process must call this, because the weights may be sharded. Each measures all images without the others.
        """
        with self._evaluating("measuring on held-out images"):
            with torch.inference_mode(), precision():
                measure = self._measure(device)
            row = _columns(measure)
            return measure, row if first else row | self._own_columns(device)

    def baselines(self, device: torch.device) -> dict[str, float]:
        """Return the columns of features and kNN before training, with those of the baselines.

        Every process must call this, with the initial weights.
        """
        with self._evaluating("measuring baselines"):
            row = self._own_columns(device)
        with StatusMessage("measuring baselines"):
            return row | self._without_training(row, device)

    @contextmanager
    def _evaluating(self, said: str) -> Iterator[None]:
        """Show a status while the task is in evaluation mode, with all weights in each process."""
        with StatusMessage(said), gathered_weights(self.task), without_collectives():
            self.task.eval()
            try:
                yield
            finally:
                self.task.train()

    @property
    def labelled(self) -> int:
        """Number of labelled held-out images, which are the kNN queries."""
        return 0 if self.queries is None else len(self.queries)

    @cached_property
    def featured(self) -> Source:
        """At most 500 held-out images, evenly spread; the same object in every pass, so that its workers live on."""
        return self.held_out.subset(evenly_spaced(len(self.held_out), _FEATURED))

    def _without_training(self, now: Mapping[str, float], device: torch.device) -> dict[str, float]:
        """Return the columns of the baselines; ``now`` has those of the encoder, which may be untrained."""
        with torch.inference_mode():
            row = {"images:apart": distance_from_mean(torch.cat([one.flatten(1) for one in self._featured(device)]))}
        untrained, pixels = now, dict[str, float]()
        if self.gallery is not None:
            scale = self.card.mean, self.card.std
            pixels = self._knn(
                lambda source: pixel_features(source, self.size, *scale, **self._reading(source)), ["pixels"], device
            )
        if not self.fresh:
            twin, head = untrained_twin(self.card, instance_head(self.task), self.seed)
            untrained = self._features_of(twin.to(device), device)
            untrained |= {} if self.gallery is None else self._knn_of(twin, self.card, head, device)
        for name, value in untrained.items():
            if name in _BESIDE_UNTRAINED:
                row[f"{name}:untrained"] = value
            elif name in ("knn", "instance_knn"):
                row |= {f"{name}:untrained": value, f"{name}:raw pixels": pixels["pixels"]}
        if self.gallery is not None and (start := self.start()) is not None:
            found = self._knn_of(*start, None, device)
            row |= {f"{name}:{START}": value for name, value in found.items()}
        return row

    def _own_columns(self, device: torch.device) -> dict[str, float]:
        """Return the columns of the encoder's features, and of its kNN if there are labels."""
        row = self._features_of(self.task.encoder, device)
        if self.gallery is not None:
            row |= self._knn_of(self.task.encoder, self.card, instance_head(self.task), device)
        return row

    def _featured(self, device: torch.device) -> Iterator[Tensor]:
        """Yield normalised batches [b c h w] of `featured` images."""
        reading: dict[str, Any] = {"channels": self.card.own_spec.channels, "device": device}
        for batch in plain_batches(self.featured, self.size, **reading, **self._reading(self.featured)):
            yield normalize(batch.views[0], self.card.mean, self.card.std)

    @torch.inference_mode()
    def _features_of(self, vit: Encoder, device: torch.device) -> dict[str, float]:
        """Compute statistics of an encoder's features (means of patch tokens); nan if they are not finite.

        Spread and effective rank use the raw features, so a vector that all images share makes both small. Deviation
        and centred rank do not depend on it, and so show whether the features distinguish images.
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

    def _knn_of(
        self, vit: Encoder, card: EncoderCard, head: InstanceHead | None, device: torch.device
    ) -> dict[str, float]:
        """Return the kNN accuracy of mean patch tokens, and of the task's own pooling if there is another.

        The pooling "instance" needs a ``head``.
        """
        stems = (str(module.pooling) for module in self.task.extra_modules().values() if module.use == "stem")
        pooling, poolings = next(stems, "mean"), {"knn": "mean"}  # the pooling before a projection (ExtreMA Figs. 4-5)
        if pooling != "mean" and (head is not None or pooling != "instance"):
            poolings["instance_knn"] = pooling
        use_kernels(vit, self.kernels)  # those of the task's encoder, also for its controls
        asked: dict[str, Any] = {"device": device, "precision": self.precision, "head": head}
        found = self._knn(
            lambda source: extract(vit, card, source, **asked, **self._reading(source)), poolings.values(), device
        )
        return {name: found[pooling] for name, pooling in poolings.items()}

    def _reading(self, source: Source) -> dict[str, Any]:
        """Return batch size and worker processes for one pass."""
        return {"batch_size": self.batch_size, "workers": 0 if source.in_memory else self.workers}

    def _measure(self, device: torch.device) -> Measure:
        generator = torch.Generator().manual_seed(self.seed)
        found, indices = [], []
        h, w = self.task.augment.size  # larger than the encoder's input if the task shows it a part of the image
        reading: dict[str, Any] = {"channels": self.card.own_spec.channels, "native": cuts_natively(self.task.augment)}
        reading |= self._reading(self.held_out)
        batches = plain_batches(self.held_out, (h, w), device=device, **reading)
        for batch in batches:
            self.unreadable.update(batch.unreadable)
            images = normalize(batch.views[0], self.card.mean, self.card.std)
            found.append(self.task.measure(images, generator))
            indices.append(batch.indices)
        return replace(Measure.joined(found), groups=groups_of(self.held_out, torch.cat(indices)))

    def _knn(
        self, features_of: Callable[[Source], ImageFeatures], poolings: Collection[str], device: torch.device
    ) -> dict[str, float]:
        """Return the kNN accuracy on held-out images for each pooling of their features."""
        from patchloom.evaluate.protocols.knn import knn_accuracies  # the first step does not wait for the protocols

        assert self.gallery is not None and self.queries is not None  # only called with labels
        gallery, queries = features_of(self.gallery), features_of(self.queries)
        k = min(self.k, len(gallery.labels))
        found = {}
        for name in poolings:
            pooled = gallery.pooled(name), gallery.labels, queries.pooled(name), queries.labels
            with float32_products():  # as in evaluations, also of a run in TF32
                found[name] = knn_accuracies(*pooled, ks=(k,), device=device)[k]
        return found


def _columns(measure: Measure) -> dict[str, float]:
    result = measure.result
    row = {"held_out": result.value} | {f"baseline:{one.name}": one.value for one in result.baselines}
    share = result.to_beat.share
    columns = {"share": share.value, "share:low": share.low, "share:high": share.high}
    row |= {name: value for name, value in columns.items() if math.isfinite(value)}  # too few images have none
    row |= {f"held_out:{name}": values.mean().item() for name, values in measure.details.items()}
    return row | {f"teacher:{name}": value for name, value in result.also.items()}


def instance_head(task: Task) -> InstanceHead | None:
    """Return the task's head that pools an image, if it has one."""
    found = next((module for module in task.extra_modules().values() if module.use == "pooling"), None)
    return cast(InstanceHead | None, found)
