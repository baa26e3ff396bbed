"""Prediction of positions: the place of every patch whose position was withheld (DropPos, MP3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.compiling import compilable
from patchloom.nets.encode import encode, encode_asked
from patchloom.nets.geometry import Geometry
from patchloom.nets.teacher import no_grad_autocast
from patchloom.options.tasks import Smoothing
from patchloom.patches.pictures import mark_wrong, mix_patches, put_together, scatter_places
from patchloom.patches.positions import distances, program_smoothed_positions, smoothed_positions
from patchloom.patches.tokens import gather_tokens
from patchloom.questions.question import Encoded, Measure, Outcome, Question, Sheet
from patchloom.sizes import share_of
from patchloom.system.distributed import total, world
from patchloom.withhold.encoder_input import EncoderInput, all_patches

# ratios for the measures: DropPos' Tables S3-S5, MP3's curve
DROPPOS_RATIOS: dict[str, tuple[float, ...]] = {
    "mask_ratio": (0.0, 0.25, 0.5, 0.75),
    "position_mask_ratio": (0.25, 0.5, 0.75, 0.95),
}
MP3_RATIOS = {"context_mask_ratio": (0.0, 0.25, 0.5, 0.75, 0.9)}


class PositionPrediction(NamedTuple):
    """Predicted and true places of patches whose positions were withheld.

    Attributes:
        visible: [b k] true places.
        dropped: [b k] True where the position was withheld and is predicted.
        logits: [b k n] over the n places.
    """

    visible: Tensor
    dropped: Tensor
    logits: Tensor

    def places(self) -> Tensor:
        """Return the most likely place of each patch [b k], and the true one where the position was given."""
        return torch.where(self.dropped, self.logits.argmax(-1), self.visible)

    def assigned(self) -> Tensor:
        """Return places [b k], each of a single patch: the likeliest assignment of withheld patches to free places.

        It maximises the sum of the log-probabilities. Given positions are taken.
        """
        from scipy.optimize import linear_sum_assignment  # takes long to import, and only pictures need it

        found, chances = self.visible.clone(), self.logits.detach().float().log_softmax(-1).double().cpu().numpy()
        for image, (visible, asked) in enumerate(zip(self.visible.cpu(), self.dropped.cpu(), strict=True)):
            free = np.setdiff1d(np.arange(chances.shape[-1]), visible[~asked].numpy())
            # places that a poor encoder gives no probability at all would be an infeasible assignment
            scored = np.nan_to_num(chances[image][asked.numpy()][:, free], neginf=-1e9)
            _, chosen = linear_sum_assignment(scored, maximize=True)
            found[image, asked.to(found.device)] = torch.from_numpy(free[chosen]).to(found.device)
        return found

    def accuracy(self) -> Tensor:
        """Return the fraction of the withheld positions that are predicted correctly [b]."""
        right = (self.places() == self.visible) & self.dropped
        return right.sum(1) / self.dropped.sum(1).clamp_min(1)

    def known(self) -> Tensor:
        """Return the number of positions that were given [b]."""
        return (~self.dropped).sum(1)


def scores(placed: PositionPrediction, grid: tuple[int, int]) -> dict[str, Tensor]:
    """Return top-1, top-5 and distance in patches [b k] of every visible patch, with or without its position."""
    best = placed.logits.topk(min(5, placed.logits.shape[-1]), dim=-1).indices
    right = best == placed.visible[..., None]
    apart = distances(grid, best.device)[placed.visible, best[..., 0]]
    return {"top-1": right[..., 0].float(), "top-5": right.any(-1).float(), "distance": apart}


@overload
def chance_accuracy(n: int, known: int) -> float: ...


@overload
def chance_accuracy(n: int, known: Tensor) -> Tensor: ...


def chance_accuracy(n: int, known: int | Tensor) -> float | Tensor:
    """Return the exact chance level of guesses that exclude the ``known`` positions of other patches."""
    return 1 / (n - known)


class Positions(Question):
    """Prediction of the place of each visible patch whose position was withheld.

    Args:
        geometry: geometry of the encoder.
        decoder: decoder with n logits per patch token.
        ratios: by name, the ratios at which a task with this question can be measured.
        sigma: σ of position smoothing at the start (DropPos Eq. 5).
        sigma_end: σ at the end of the training; it changes linearly (Eq. 7); equal to ``sigma``: constant.
        smoothing: labels of DropPos Eq. 5 (paper), or of the authors' program, for square grids of square patches.
        temperature: τ of attentive reconstruction (DropPos Eq. 9); inf weighs all patches alike.
        by_context: separate accuracies, with top-5, of the patches that are keys and values and of the others (MP3).
    """

    pictured: ClassVar[int] = 1  # the caption is about the images that are shown

    def __init__(
        self,
        geometry: Geometry,
        decoder: nn.Module,
        ratios: Mapping[str, tuple[float, ...]],
        sigma: float = 0.0,
        sigma_end: float = 0.0,
        smoothing: Smoothing = "paper",
        temperature: float = float("inf"),
        by_context: bool = False,
    ):
        super().__init__(geometry)
        self.decoder, self.ratios, self.by_context = decoder, ratios, by_context
        self.sigma, self.sigma_end = sigma, sigma_end
        self.smoothing, self.temperature = smoothing, temperature
        if temperature < float("inf"):
            self.half_no_grad = False  # marks a module with passes without gradient for `use_half_without_grad`

    def predict(self, encoded: Encoded) -> PositionPrediction:
        """Predict the places of the visible patches."""
        assert encoded.given.dropped is not None  # set by tasks with this question
        return PositionPrediction(encoded.given.visible, encoded.given.dropped, self.decoder(encoded.tokens))

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the cross-entropy over the patches whose position was withheld (DropPos Eq. 8, MP3 section 3)."""
        predicted = self.predict(encoded)
        weights = loss_weights(predicted.dropped, self.affinities(encoded))
        sigma = self.sigma_end + (self.sigma - self.sigma_end) * (1 - progress)
        loss = weighted_mean(self.cross_entropy(predicted, sigma), weights)
        with torch.no_grad():
            found = self.accuracies(predicted, encoded.given)
        return Outcome(loss, {f"{name}_accuracy": values.mean() for name, values in found.items()})

    def cross_entropy(self, predicted: PositionPrediction, sigma: float) -> Tensor:
        """Return the cross-entropy [b k] with labels smoothed by ``sigma``, in float32 (DropPos Eq. 6)."""
        labels = self.labels(sigma, predicted.logits.device) if sigma > 0 else None
        return _cross_entropy(predicted.logits, predicted.visible, labels)

    def labels(self, sigma: float, device: torch.device) -> Tensor:
        """Return the smoothed labels [n n] for true places (rows)."""
        if self.smoothing == "program":
            return program_smoothed_positions(self.geometry.n, self.geometry.p[0], sigma, device)
        return smoothed_positions(self.geometry.grid, sigma, device)

    def affinities(self, encoded: Encoded) -> Tensor | None:
        """Return the weights [v*b k] of attentive reconstruction, from features of the whole image, without gradient.

        DropPos Eq. 9 takes shares of all n patches; the authors' program, and this method, shares of the visible ones.
        """
        if self.temperature == float("inf"):
            return None
        encoder, images, visible, g = encoded.encoder, encoded.images, encoded.given.visible, self.geometry
        training = encoder.training
        encoder.eval()  # drop path would make the weights noisy
        with no_grad_autocast(self, images):
            if g.has_class_token and len(visible) == len(images):  # the other patches count in no weight
                found = affinity(encode_asked(encoder, images, visible).float(), g.prefix, self.temperature)
            else:
                features = encode(encoder, all_patches(images, g.n)).float()
                every = affinity(features, g.prefix, self.temperature, g.has_class_token)
                found = gather_tokens(every.repeat(len(visible) // len(every), 1), visible)  # for each of several masks
        encoder.train(training)
        return found / found.sum(1, keepdim=True)

    def accuracies(self, predicted: PositionPrediction, given: EncoderInput) -> dict[str, Tensor]:
        """Return accuracies [b] of the asked patches; with ``by_context``, of context and other patches separately."""
        if not self.by_context:
            return {"position": predicted.accuracy()}
        best = predicted.logits.topk(min(5, self.geometry.n), dim=-1).indices == predicted.visible[..., None]
        among = torch.ones_like(predicted.dropped)
        if given.context is not None:
            among = torch.zeros_like(predicted.dropped).scatter(1, given.context, True)
        found = {}
        for kind, those in {"context": among, "other": ~among}.items():
            if kind == "other" and given.context is None:
                continue
            counted = predicted.dropped & those
            for name, right in {f"{kind}_top1": best[..., 0], f"{kind}_top5": best.any(-1)}.items():
                # an image without a withheld position of this kind counts 0
                found[name] = (right & counted).sum(1) / counted.sum(1).clamp_min(1)
        return found

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the fraction of withheld positions that are found, beside the exact chance level."""
        predicted = self.predict(encoded)
        chance = {"chance": chance_accuracy(self.geometry.n, predicted.known())}
        details = self.accuracies(predicted, encoded.given) if self.by_context else {}
        return Measure(
            "position accuracy", predicted.accuracy(), chance, to_beat="chance", higher_is_better=True, details=details
        )

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw images rebuilt from the predicted positions, with as much withheld as in training."""
        predicted, g, generator = self.predict(encoded), self.geometry, encoded.generator
        placed, visible, asked = predicted.assigned(), predicted.visible, predicted.dropped
        shown = self.given_picture(encoded.given)
        columns = {
            "original": encoded.images,
            "given": put_together(shown, g.p, visible, scatter_places(visible, asked, generator)),
            "rebuilt": put_together(shown, g.p, visible, placed),
            "at the true place": mark_wrong(shown, g.p, visible, placed),
        }
        k, withheld = visible.shape[1], asked.sum(1).float().mean().item()
        noun = "frames" if encoded.modality.column_seconds and g.grid[0] == g.p[1] == 1 else "patches"
        removed = f"{g.n - k} of {g.n} {noun} are removed, and " if k < g.n else ""
        right = ((placed == visible) & asked).sum() / asked.sum()
        top, five, apart = (values[asked].mean().item() for values in scores(predicted, g.grid).values())
        far = f"{apart:.1f} patches"
        if (seconds := encoded.modality.column_seconds) and g.grid[0] == 1:
            frames = apart * g.p[1]
            far = f"{frames:.1f} frames ({1000 * frames * seconds:.0f} ms)"
        caption = (
            f"As in training, {removed}the positions of {round(withheld)} of {k} {noun} are withheld. Given: these "
            f"{noun} in random order. Rebuilt: each at a place of its own, by the likeliest assignment of all, which "
            f"puts {right:.1%} at their true place. Each by itself: of the withheld positions, {top:.1%} are predicted "
            f"correctly (top-1), and {five:.1%} are among the five likeliest (top-5); the mean distance is {far}."
        )
        modality = encoded.modality
        return [
            Sheet(
                "rebuilt",
                f"{caption}{shift_note(whole_shifts(placed, visible, asked, g.grid))}",
                columns,
                _NOTHING,
                f"{modality.noun.capitalize()} reassembled from patches",
                "With as much withheld as in training, every patch is drawn at a place of its own where the model put "
                f"it. {modality.an_item.capitalize()} that is right except for a shift or a reflection means that the "
                "model knows the relative but not the absolute positions of its parts.",
            )
        ]


@compilable
def _cross_entropy(logits: Tensor, places: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return F.cross_entropy(logits.flatten(0, 1).float(), places.flatten(), reduction="none").view_as(places)
    return -(labels[places] * logits.float().log_softmax(-1)).sum(-1)


def affinity(features: Tensor, prefix: int, temperature: float, has_class_token: bool = True) -> Tensor:
    """Return the weight of each patch for the image: attentive reconstruction's [b n] (DropPos Eq. 9).

    Softmax over the patches of ``features`` [b prefix+n d] of cos(class token, patch) / τ. Without a class token the
    mean of the patch tokens takes its place.
    """
    patches = features[:, prefix:]
    query = features[:, :1] if has_class_token else patches.mean(1, keepdim=True)
    return (F.cosine_similarity(query, patches, dim=-1) / temperature).softmax(dim=-1)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return Σ weights · values / Σ weights over all patches of all images and processes (DropPos Eq. 8, normalised).

    Each process returns its part times the number of processes, so that the mean over processes, as in gradient
    averaging, equals the value of a single process with all images.
    """
    return (values * weights).sum() / (total(weights.sum()) / world())


def loss_weights(dropped: Tensor, affinities: Tensor | None = None) -> Tensor:
    """Return the weight [b k] of each visible patch in the loss: zero where its position was known (DropPos Eq. 8).

    Args:
        dropped: [b k] True where the position was withheld.
        affinities: [b k] weights of attentive reconstruction; None weighs all alike.
    """
    counted = dropped.float()
    return counted if affinities is None else counted * affinities


# Pictures of predicted positions: DropPos Fig. 3, and MP3's rebuilt and mixed images (Figs. 14-15).


_NOTHING = "no patch placed here"


def whole_shifts(placed: Tensor, visible: Tensor, asked: Tensor, grid: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """Return the images of which most withheld patches are off by one common step: rows down and columns right.

    Their parts are arranged correctly, but not where they belong.

    Args:
        placed, visible: [b k] predicted and true places.
        asked: [b k] True where the position was withheld.
        grid: rows and columns of patches.

    Returns:
        Steps by the index of the image, in images without such a shift none.
    """
    found = {}
    for image in range(len(placed)):
        to, of = placed[image][asked[image]], visible[image][asked[image]]
        steps = torch.stack([to // grid[1] - of // grid[1], to % grid[1] - of % grid[1]], dim=1)
        kinds, times = steps.unique(dim=0, return_counts=True)
        down, right = kinds[times.argmax()].tolist()
        if (down or right) and 2 * times.max() > len(steps) > 1:
            found[image] = down, right
    return found


def shift_note(shifts: Mapping[int, tuple[int, int]]) -> str:
    """Return a sentence for a caption that names images that are shifted as a whole; empty without any."""
    if not shifts:
        return ""
    said = []
    for image, steps in shifts.items():
        ways = [(step, way) for step, way in zip(steps, (("up", "down"), ("left", "right")), strict=True) if step]
        said.append(f"row {image + 1} by {' and '.join(f'{abs(step)} {way[step > 0]}' for step, way in ways)}")
    return f" Shifted as a whole (most patches by the same step): {', '.join(said)}."


def figure_3(
    geometry: Geometry,
    images: Tensor,
    predict: Callable[[float], PositionPrediction],
    generator: torch.Generator,
    mask_ratios: Sequence[float] = DROPPOS_RATIOS["mask_ratio"],
) -> list[Sheet]:
    """Draw Fig. 3 as two sheets over mask ratios: correctly placed patches, and images rebuilt from predictions.

    ``predict`` predicts the places of the images' patches at a mask ratio; ``mask_ratios`` differ from the figure's if
    the encoder cannot have those.
    """
    n, p = geometry.n, geometry.p
    marked, placed = {"original": images}, {}
    dropped, right = n, []
    for ratio in mask_ratios:
        if share_of(n, 1 - ratio) < 2:  # two patches or more are needed
            continue
        answer = predict(ratio)
        if ratio == 0:
            dropped = n - int(answer.known()[0])
        right.append(f"{answer.accuracy().mean().item():.1%} at γ = {ratio}")
        marked[f"γ = {ratio}"] = mark_wrong(images, p, answer.visible, answer.places())
        placed[f"γ = {ratio}"] = answer
    asked = f"At γ = 0 the places of {dropped} of {n} patches were withheld; γ is the fraction masked."
    caption = (
        f"{asked} Visible patches were placed correctly, or their place was given. Right, of the places "
        f"withheld here: {', '.join(right)}."
    )
    positions = Sheet(
        "positions",
        caption,
        marked,
        "masked",
        "Patches whose position was found",
        "Patches whose position was hidden are shown at their true place if the model found it, and are hatched "
        "otherwise. The more patches are shown, the better the model knows how they fit together.",
    )
    return [positions, ratios_sheet(geometry, images, placed, generator, asked)]


def ratios_sheet(
    geometry: Geometry,
    images: Tensor,
    answers: Mapping[str, PositionPrediction],
    generator: torch.Generator,
    withheld: str,
) -> Sheet:
    """Draw images rebuilt from predictions at several ratios, by heading; ``withheld`` is the caption's beginning."""
    first = next(iter(answers.values()))
    columns = {
        "original": images,
        "given": put_together(
            images, geometry.p, first.visible, scatter_places(first.visible, first.dropped, generator)
        ),
    }
    shifts = ""
    for heading, answer in answers.items():
        placed = answer.assigned()
        columns[heading] = put_together(images, geometry.p, answer.visible, placed)
        if note := shift_note(whole_shifts(placed, answer.visible, answer.dropped, geometry.grid)):
            shifts += f" {heading}:{note}"
    caption = (
        f"{withheld} Given: the input of the first of these columns, patches without a place in random order. Then: "
        f"each patch at a place of its own, by the likeliest assignment.{shifts}"
    )
    return Sheet(
        "ratios",
        caption,
        columns,
        _NOTHING,
        "Reassembled with more and less withheld",
        "Every patch is drawn at a place of its own where the model put it. The columns differ in how much was "
        "withheld, so that they need not be what was trained.",
    )


def mixed_sheet(
    geometry: Geometry, images: Tensor, place: Callable[[Tensor], Tensor], generator: torch.Generator
) -> Sheet:
    """Draw pairs of images whose patches were shuffled together, and each half of them rebuilt (MP3 Figs. 14-15).

    ``place`` returns a place of its own [b n] for each patch of images [b c h w]. Each image is mixed with the one
    before it.
    """
    others = images.roll(1, 0)
    everywhere = torch.arange(geometry.n, device=images.device).expand(len(images), -1)
    columns = {"image": images, "another": others}
    for name, mixed in zip(("first", "second"), mix_patches(images, others, geometry.p, generator), strict=True):
        columns[f"{name} set"] = mixed
        columns[f"{name} rebuilt"] = put_together(mixed, geometry.p, everywhere, place(mixed))
    caption = (
        "The patches of both images were shuffled together and dealt into two sets. Each set was the input as if it "
        "were one image, without places; its keys and values come from its own context only. Rebuilt: each patch at "
        "a place of its own, by the likeliest assignment."
    )
    return Sheet(
        "mixed",
        caption,
        columns,
        _NOTHING,
        "Two inputs, shuffled together",
        "Patches of two inputs were divided into two sets and placed by the model. The model separates the two well if "
        "each result shows the patches of only one input.",
    )
