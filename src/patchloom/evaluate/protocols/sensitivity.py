"""Position sensitivity: prediction of positions with most position embeddings masked (DropPos Table 7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.loader import Batch, plain_batches, steps_per_epoch, training_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.display import track_progress
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classifier import load_classifier
from patchloom.evaluate.course import Course
from patchloom.evaluate.protocols.positions import Cell, describe_measures, measure_positions, normalized, position_rows
from patchloom.evaluate.settings import EvalSettings, parts_of
from patchloom.evaluate.subjects import Subject, open_subjects
from patchloom.evaluate.trainer import Forward, Trainer, temporary_seed
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import (
    attention_heads,
    encode,
    entry_width,
    grid_size,
    has_positions,
    has_rotations,
    input_channels,
    input_size,
    patch_count,
    prefix_count,
    rotations_at,
    width,
)
from patchloom.nets.optimizer import parameter_groups
from patchloom.nets.swin import Encoder
from patchloom.options.protocols import PositionPlaceholder, PositionSensitivity
from patchloom.pace import Pace
from patchloom.patches.partition import random_dropped
from patchloom.questions.positions import PositionPrediction
from patchloom.results.evaluation import Evaluation, as_control, note_unreadable
from patchloom.runs.encoder import load_encoder
from patchloom.withhold.encoder_input import all_patches, drop_positions

_FINETUNED = "fine-tuned"
_BATCH, _RATE = 64, 1e-2


def position_sensitivity(
    run: str | Path, data: DataLike, settings: EvalSettings, options: PositionSensitivity
) -> Evaluation:
    """Mask most position embeddings of a frozen encoder, and predict positions by a linear layer.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`; labels are not needed.

    Raises:
        PatchloomError: unknown encoder or data, or an encoder without position embeddings.
    """
    finetuned, ratio, steps, placeholder = options.finetuned, options.ratio, options.steps, options.placeholder
    opened = open_subjects(run, settings)
    ours, grid = opened.ours, grid_size(opened.ours.vit)
    subjects, tuned_for = [ours], ""  # fingerprint of the test images of the classifier
    if finetuned is not None:
        tuned, tuned_for = _open_finetuned(finetuned)
        subjects.append(tuned)
    for subject in subjects:
        if not has_positions(subject.vit):
            raise PatchloomError(
                f"{subject.name} has no position embeddings to mask: if its task predicts positions, use "
                "`patchloom evaluate positions`"
            )
        if grid_size(subject.vit) != grid:
            raise PatchloomError(
                f"{subject.name} has another patch grid than {ours.name}: give encoders of the same grid"
            )
    subjects += opened.controls
    parts = parts_of(data, settings, labels=False, card=ours.card, run=run)
    test, noun, story = parts.test, parts.test.noun, parts.story
    if tuned_for and tuned_for != test.fingerprint():
        story += f" {finetuned} was fine-tuned with another split, perhaps on some of the test {noun}."
    names = listing([subject.name for subject in subjects], "and")
    settings.end_if_dry(test, f"position-sensitivity would train {steps:,} steps on each of {names}.", story)

    # ---- a probe of each encoder
    cells: dict[str, list[Cell]] = {}
    unreadable: dict[str, None] = {}
    pace = Pace(steps * len(subjects))
    for name, vit, card, *_ in subjects:
        with temporary_seed(settings):
            probe = PositionProbe(vit, placeholder, options.standardize)
            trainer = begin_position_probe(probe, card, parts.train, ratio=ratio, steps=steps, settings=settings)
            probe = trainer.fit(name, pace).model
        lost, size, channels, device = list[str](), input_size(vit), input_channels(vit), settings.torch_device
        read = plain_batches(test, size, **settings.reading(test), channels=channels, device=device)
        shown = track_progress(read, settings.batches(test), f"{name}: test {noun}")
        images = normalized(shown, card, lost)
        cells[name] = measure_positions(probe, {"ratio": (ratio,)}, grid, images, settings.seed)
        unreadable |= dict.fromkeys([*sorted(trainer.unreadable), *lost])

    # ---- the report
    rows = position_rows("position-sensitivity", cells, grid)
    quoted = tuple(row for row in rows if row.measure == "top-1")
    found, *others = quoted
    n, n_test = len(parts.train), len(cells[ours.name][0].values["top-1"])
    against = ", ".join(as_control(row) for row in others)
    stand_in, trained = "zeros", "a linear layer"
    if placeholder == "learned":
        stand_in, trained = "a learned vector", "that vector and a linear layer"
    features = "standardised features" if options.standardize else "features"
    done = (
        f"Position sensitivity: {100 * ratio:g} % of the position embeddings were replaced by {stand_in}. The "
        f"places of these patches, among {grid[0] * grid[1]}, were predicted from their {features} by {trained}, "
        f"trained on centre crops of {n:,} {noun} in {steps:,} steps of {_BATCH} (Adam, rate {_RATE:g} with "
        f"cosine decay to 0) and tested on {n_test:,} others. The encoders stayed frozen, and nothing was chosen."
    )
    return Evaluation.of_test(
        test,
        settings.seed,
        n_test,
        results=rows,
        method=" ".join([done, describe_measures(noun), story, *note_unreadable(list(unreadable), noun)]),
        headline=f"Position sensitivity: {found.text()} against {against} on {n_test:,} test {noun}.",
        quoted=quoted,
        across="measure",
    )


def _open_finetuned(path: str | Path) -> tuple[Subject, str]:
    """Load the encoder from the file of a classifier, with the fingerprint of its test images, or of an encoder."""
    try:
        model, card = load_classifier(path)
    except PatchloomError:
        return Subject(_FINETUNED, *load_encoder(path)), ""
    return Subject(_FINETUNED, model.encoder, card.encoder), card.test


class PositionProbe(nn.Module):
    """Frozen encoder, a vector or place that replaces masked positions, and a linear layer on the features."""

    def __init__(self, vit: Encoder, placeholder: PositionPlaceholder, standardize: bool = False) -> None:
        super().__init__()
        self.vit = vit.requires_grad_(False).eval()
        self.n, d = patch_count(vit), width(vit)
        self.token = nn.Parameter(torch.zeros(entry_width(vit)), requires_grad=placeholder == "learned")
        # a place in the encoder's coordinates; at zero a patch is not rotated
        origin = nn.Parameter(torch.zeros(1, 2), requires_grad=placeholder == "learned")
        self.origin = origin if has_rotations(vit) else None
        self.standardize = nn.BatchNorm1d(d, affine=False) if standardize else nn.Identity()
        self.layer = nn.Linear(d, self.n)
        for weight in self.layer.parameters():
            nn.init.zeros_(weight)

    def train(self, mode: bool = True) -> PositionProbe:
        """Set the mode; the encoder stays in eval mode."""
        super().train(mode)
        self.vit.eval()
        return self

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Return parameter groups for an optimiser; no layer of the encoder is trained."""
        assert layer_decay == 1
        return parameter_groups(self, weight_decay)

    def forward(self, images: Tensor, generator: torch.Generator, ratio: float) -> PositionPrediction:
        """Predict positions of patches of images [b c h w] with a fraction ``ratio`` of the embeddings masked."""
        dropped = random_dropped(len(images), self.n, ratio, generator, images.device)
        given = drop_positions(all_patches(images, self.n), dropped)
        turned = None if self.origin is None else rotations_at(self.vit, self.origin)[:, None]
        tokens = encode(self.vit, given, position_token=self.token, rotation=turned)[:, prefix_count(self.vit) :]
        features = self.standardize(tokens.flatten(0, 1)).view_as(tokens)
        assert given.dropped is not None  # set by `drop_positions`
        return PositionPrediction(given.visible, given.dropped, self.layer(features))


def begin_position_probe(
    probe: PositionProbe, card: EncoderCard, train: Source, *, ratio: float, steps: int, settings: EvalSettings
) -> Trainer:
    """Return the training of a probe on centre crops, with a fraction ``ratio`` of the position embeddings masked."""
    size, channels = input_size(probe.vit), input_channels(probe.vit)
    centre = train.modality.centre(size, name=train.name)
    course = Course(
        steps=steps,
        per_epoch=steps_per_epoch(len(train), _BATCH),
        unit="step",
        batch=_BATCH,
        peak=_RATE,
        rate_option="the scale of the features by --standardize",  # the rate is fixed
    )
    identity = {
        "ratio": ratio,
        "course": asdict(course),
        "images": train.fingerprint(),
        "numbers": [card.mean, card.std],
        "sizes": [attention_heads(probe.vit), size],  # which the weights do not show
        "sound": train.modality.plain(),
    }

    def batches(first: int, stop: int, workers: int) -> Iterator[Batch]:
        seed, device = settings.seed, settings.torch_device
        return training_batches(train, centre, _BATCH, seed, first, stop, workers, channels, device=device)

    def loss(forward: Forward, batch: Batch) -> Tensor:
        # the trainer seeds this generator by seed and step, so a resumed training masks the same positions
        generator = torch.default_generator
        placed = forward(normalize(batch.views[0], card.mean, card.std), generator, ratio)
        return F.cross_entropy(placed.logits[placed.dropped], placed.visible[placed.dropped])

    return Trainer(
        probe,
        loss,
        batches,
        course,
        settings=settings,
        identity=identity,
        noun=train.noun,
        workers=partial(settings.workers_for, train),
    )
