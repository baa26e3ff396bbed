"""Position sensitivity: prediction of positions with most position embeddings masked (DropPos Table 7)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.loader import plain_batches, training_batches
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import track_progress
from patchloom.errors import PatchloomError, check_type, listing
from patchloom.evaluate.classifier import load_classifier
from patchloom.evaluate.protocols.positions import Cell, describe_measures, measure_positions, normalized, position_rows
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.encode import (
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
from patchloom.nets.swin import Encoder
from patchloom.patches.partition import random_dropped
from patchloom.questions.positions import PositionPrediction
from patchloom.results.claims import START, UNTRAINED
from patchloom.results.evaluation import Evaluation, as_control, note_unreadable
from patchloom.runs.encoder import load_encoder, load_start
from patchloom.withhold.encoder_input import all_patches, drop_positions

PositionPlaceholder = Literal["learned", "zeros"]

_FINETUNED = "fine-tuned"
_BATCH, _RATE = 64, 1e-2


def position_sensitivity(
    run: str | Path,
    data: DataLike,
    settings: EvalSettings,
    *,
    finetuned: str | Path | None = None,
    ratio: float = 0.75,
    placeholder: PositionPlaceholder = "zeros",
    standardize: bool = False,
    steps: int = 1000,
) -> Evaluation:
    """Mask most position embeddings of a frozen encoder, and predict positions by a linear layer.

    Args:
        run: folder of a run, an encoder's ``.safetensors`` file, or ``timm:NAME``.
        data: images, as for `patchloom.data.sources.open.open_data`; labels are not needed.
        settings: common settings of all protocols.
        finetuned: file of a classifier or encoder fine-tuned from it, to evaluate as well.
        ratio: fraction of the position embeddings to mask.
        placeholder: replacement of masked embeddings: zeros (only a linear layer is trained) or learned.
        standardize: features with mean 0 and deviation 1 for the linear layer, so that encoders of different scales
            learn equally fast.
        steps: training steps of the linear layer, with 64 images each.

    Raises:
        PatchloomError: unknown encoder or data, or an encoder without position embeddings.
    """
    check_type("placeholder", placeholder, PositionPlaceholder)
    if not 0 < ratio <= 1:
        raise PatchloomError(f"--ratio must be a fraction above 0 and up to 1, not {ratio:g}")
    if steps < 1:
        raise PatchloomError(f"--steps must be 1 or more, not {steps}")
    vit, card = settings.encoder(run)
    encoders = {card.name: (vit, card)}
    tuned_for = ""  # fingerprint of the test images of the classifier
    if finetuned is not None:
        tuned, of_tuned, tuned_for = _load_finetuned(finetuned)
        encoders[_FINETUNED] = tuned, of_tuned
    for name, (one, _) in encoders.items():
        if not has_positions(one):
            raise PatchloomError(
                f"{name} has no position embeddings to mask: if its task predicts positions, use "
                "`patchloom evaluate positions`"
            )
        if grid_size(one) != grid_size(vit):
            raise PatchloomError(f"{name} has another patch grid than {card.name}: give encoders of the same grid")
    if (start := load_start(run)) is not None:
        encoders[START] = start
    encoders[UNTRAINED] = untrained_twin(card, seed=settings.seed)[0], card
    parts, grid = parts_of(data, settings, labels=False, card=card, run=run), grid_size(vit)
    story = parts.story
    if tuned_for and tuned_for != parts.test.fingerprint():
        story += f" {finetuned} was fine-tuned with another split, perhaps on some of the test {parts.test.noun}."
    names = listing(encoders, "and")
    settings.end_if_dry(parts.test, f"position-sensitivity would train {steps:,} steps on each of {names}.", story)
    unreadable: dict[str, None] = {}
    cells = {}
    for name, encoder in encoders.items():
        cells[name], lost = _measure(name, *encoder, parts, settings, placeholder, standardize, ratio, steps)
        unreadable |= dict.fromkeys(lost)
    rows = position_rows("position-sensitivity", cells, grid)
    quoted = tuple(row for row in rows if row.measure == "top-1")
    ours, *others = quoted
    n, n_test = len(parts.train), len(cells[card.name][0].values["top-1"])
    against = ", ".join(as_control(row) for row in others)
    done = _sentences(ratio, placeholder, standardize, steps, grid, n, n_test, parts.test.noun)
    return Evaluation.of_test(
        parts.test,
        settings.seed,
        n_test,
        results=rows,
        method=" ".join(
            [done, describe_measures(parts.test.noun), story, *note_unreadable(list(unreadable), parts.test.noun)]
        ),
        headline=f"Position sensitivity: {ours.text()} against {against} on {n_test:,} test {parts.test.noun}.",
        quoted=quoted,
        across="measure",
    )


def _sentences(
    ratio: float,
    placeholder: PositionPlaceholder,
    standardize: bool,
    steps: int,
    grid: tuple[int, int],
    n: int,
    n_test: int,
    noun: str,
) -> str:
    stand_in, trained = "zeros", "a linear layer"
    if placeholder == "learned":
        stand_in, trained = "a learned vector", "that vector and a linear layer"
    features = "standardised features" if standardize else "features"
    return (
        f"Position sensitivity: {100 * ratio:g} % of the position embeddings were replaced by {stand_in}. The "
        f"places of these patches, among {grid[0] * grid[1]}, were predicted from their {features} by {trained}, "
        f"trained on centre crops of {n:,} {noun} in {steps:,} steps of {_BATCH} (Adam, rate {_RATE:g} with cosine "
        f"decay to 0) and tested on {n_test:,} others. The encoders stayed frozen, and "
        "nothing was chosen."
    )


def _load_finetuned(path: str | Path) -> tuple[Encoder, EncoderCard, str]:
    """Load the encoder from the file of a classifier, with the fingerprint of its test images, or of an encoder."""
    try:
        model, card = load_classifier(path)
    except PatchloomError:
        return *load_encoder(path), ""
    return model.encoder, card.encoder, card.test


class PositionProbe(nn.Module):
    """Frozen encoder, a vector or place that replaces masked positions, and a linear layer on the features.

    Args:
        vit: encoder, which is frozen and set to eval mode.
        placeholder: whether the vector is learned; initialised with zeros.
        standardize: whether to scale features to mean 0 and deviation 1.
    """

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

    def place(self, images: Tensor, generator: torch.Generator, ratio: float) -> PositionPrediction:
        """Predict positions of patches of images [b c h w] with a fraction ``ratio`` of the embeddings masked."""
        dropped = random_dropped(len(images), self.n, ratio, generator, images.device)
        given = drop_positions(all_patches(images, self.n), dropped)
        turned = None if self.origin is None else rotations_at(self.vit, self.origin)[:, None]
        tokens = encode(self.vit, given, position_token=self.token, rotation=turned)[:, prefix_count(self.vit) :]
        features = self.standardize(tokens.flatten(0, 1)).view_as(tokens)
        assert given.dropped is not None  # set by `drop_positions`
        return PositionPrediction(given.visible, given.dropped, self.layer(features))


def train_probe(
    probe: PositionProbe, batches: Iterable[Tensor], ratio: float, generator: torch.Generator, steps: int
) -> PositionProbe:
    """Train the parts that are not frozen on ``steps`` batches of normalised images [b c h w], then set eval mode."""
    optimizer = torch.optim.Adam([weight for weight in probe.parameters() if weight.requires_grad], lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    probe.standardize.train()
    for images in batches:
        placed = probe.place(images, generator, ratio)
        loss = F.cross_entropy(placed.logits[placed.dropped], placed.visible[placed.dropped])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return probe.eval()


def _measure(
    name: str,
    vit: Encoder,
    card: EncoderCard,
    parts: Parts,
    settings: EvalSettings,
    placeholder: PositionPlaceholder,
    standardize: bool,
    ratio: float,
    steps: int,
) -> tuple[list[Cell], list[str]]:
    """Train and test one encoder; return results on the test images and names of unreadable images."""
    size, channels = input_size(vit), input_channels(vit)
    unreadable: list[str] = []
    probe = PositionProbe(vit, placeholder, standardize).to(settings.torch_device)
    reading = settings.seed, 0, steps, settings.workers_for(parts.train, steps), channels
    centre = parts.train.modality.centre(size, name=parts.train.name)
    drawn = training_batches(parts.train, centre, _BATCH, *reading, device=settings.torch_device)
    seen = normalized(track_progress(drawn, steps, f"{name}: steps of training"), card, unreadable)
    train_probe(probe, seen, ratio, torch.Generator().manual_seed(settings.seed), steps)
    tested = plain_batches(
        parts.test, size, **settings.reading(parts.test), channels=channels, device=settings.torch_device
    )
    count = settings.batches(parts.test)
    asked = normalized(track_progress(tested, count, f"{name}: test {parts.test.noun}"), card, unreadable)

    def place(images: Tensor, generator: torch.Generator, **ratios: float) -> PositionPrediction:
        return probe.place(images, generator, ratios["ratio"])

    return measure_positions(place, {"ratio": (ratio,)}, grid_size(vit), asked, settings.seed), unreadable
