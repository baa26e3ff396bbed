"""Prediction of positions: the place of every patch whose position was withheld (DropPos, MP3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.encode import encode
from patchloom.nets.geometry import Geometry
from patchloom.nets.teacher import no_grad_autocast
from patchloom.patches.partition import random_partition, share_of
from patchloom.patches.pictures import mark_wrong, mix_patches, put_together, scatter_places
from patchloom.patches.positions import Smoothing, distances, program_smoothed_positions, smoothed_positions
from patchloom.patches.tokens import gather_tokens
from patchloom.questions.question import Encoded, Measure, Outcome, Question, Sheet
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
        weights = loss_weights(predicted.dropped, predicted.visible, self.affinities(encoded))
        sigma = self.sigma_end + (self.sigma - self.sigma_end) * (1 - progress)
        loss = weighted_mean(self.cross_entropy(predicted, sigma), weights)
        with torch.no_grad():
            found = self.accuracies(predicted, encoded.given)
        return Outcome(loss, {f"{name}_accuracy": values.mean() for name, values in found.items()})

    def cross_entropy(self, predicted: PositionPrediction, sigma: float) -> Tensor:
        """Return the cross-entropy [b k] with labels smoothed by ``sigma``, in float32 (DropPos Eq. 6)."""
        if sigma <= 0:
            hard = F.cross_entropy(
                predicted.logits.flatten(0, 1).float(), predicted.visible.flatten(), reduction="none"
            )
            return hard.view_as(predicted.visible)
        labels = self.labels(sigma, predicted.logits.device)
        return -(labels[predicted.visible] * predicted.logits.float().log_softmax(-1)).sum(-1)

    def labels(self, sigma: float, device: torch.device) -> Tensor:
        """Return the smoothed labels [n n] for true places (rows)."""
        if self.smoothing == "program":
            return program_smoothed_positions(self.geometry.n, self.geometry.p[0], sigma, device)
        return smoothed_positions(self.geometry.grid, sigma, device)

    def affinities(self, encoded: Encoded) -> Tensor | None:
        """Return the weights [v*b n] of attentive reconstruction from features of the whole image, without gradient."""
        if self.temperature == float("inf"):
            return None
        encoder = encoded.encoder
        training = encoder.training
        encoder.eval()  # drop path would make the weights noisy
        with no_grad_autocast(self, encoded.images):
            features = encode(encoder, all_patches(encoded.images, self.geometry.n)).float()
        encoder.train(training)
        found = affinity(features, self.geometry.prefix, self.temperature, self.geometry.has_class_token)
        return found.repeat(len(encoded.given.visible) // len(found), 1)  # for each of several masks

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
        """Draw the correctly placed patches."""
        predicted = self.predict(encoded)
        given = self.given_picture(encoded.given)
        marked = mark_wrong(given, self.geometry.p, predicted.visible, predicted.places())
        caption = "Visible patches were placed correctly, or their position was given."
        return [Sheet("positions", caption, {"given": given, "placed": marked})]


def affinity(features: Tensor, prefix: int, temperature: float, has_class_token: bool = True) -> Tensor:
    """Return the weight of each patch for the whole image: attentive reconstruction's [b n] (DropPos Eq. 9).

    Softmax over all patches of cos(class token, patch) / τ. Without a class token the mean of the patch tokens takes
    its place.
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


def loss_weights(dropped: Tensor, visible: Tensor, affinities: Tensor | None = None) -> Tensor:
    """Return the weight [b k] of each visible patch in the loss: zero where its position was known.

    DropPos Eq. 8 takes the affinities as shares of all n patches; the authors' program, and this function, as shares of
    the visible ones.

    Args:
        dropped: [b k] True where the position was withheld.
        visible: [b k] patch indices.
        affinities: [b n] from `affinity`, renormalised here over the visible patches; None weighs all alike.
    """
    counted = dropped.float()
    if affinities is None:
        return counted
    among_visible = gather_tokens(affinities, visible)
    return counted * among_visible / among_visible.sum(1, keepdim=True)


# Pictures of predicted positions: DropPos Fig. 3, and MP3's rebuilt and mixed images (Figs. 14-15).


_NOTHING = "no patch placed here"


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
    marked, rebuilt = {"original": images}, {"original": images}
    dropped = n
    for ratio in mask_ratios:
        if share_of(n, 1 - ratio) < 2:  # two patches or more are needed
            continue
        answer = predict(ratio)
        visible, placed = answer.visible, answer.places()
        if ratio == 0:
            dropped = n - int(answer.known()[0])
            rebuilt["given"] = put_together(images, p, visible, scatter_places(visible, answer.dropped, generator))
        marked[f"γ = {ratio}"] = mark_wrong(images, p, visible, placed)
        rebuilt[f"γ = {ratio}"] = put_together(images, p, visible, placed)
    asked = f"At γ = 0 the places of {dropped} of {n} patches were withheld; γ is the fraction masked."
    return [
        Sheet(
            "positions",
            f"{asked} Visible patches were placed correctly, or their place was given.",
            marked,
            "masked",
        ),
        Sheet(
            "rebuilt",
            f"{asked} Given: patches without a place, in random order. Then: each patch at its predicted place; the "
            "mean where several share a place.",
            rebuilt,
            _NOTHING,
        ),
    ]


def rebuilt_sheet(geometry: Geometry, images: Tensor, placed: dict[str, Tensor], generator: torch.Generator) -> Sheet:
    """Draw images rebuilt from all their patches at predicted places [b n], by heading."""
    n, p = geometry.n, geometry.p
    everywhere = torch.arange(n, device=images.device).expand(len(images), -1)
    (order,) = random_partition(len(images), n, (n,), generator, images.device)
    columns = {"original": images, "given": put_together(images, p, everywhere, order)}
    columns |= {name: put_together(images, p, everywhere, places) for name, places in placed.items()}
    caption = (
        "Given: the patches without their places, in random order. Then: each patch at its predicted place, when a "
        "fraction η of the patches was barred from keys and values; the mean where several share a place."
    )
    return Sheet("rebuilt", caption, columns, _NOTHING)


def frames_sheet(
    geometry: Geometry, images: Tensor, answer: PositionPrediction, seconds: float, generator: torch.Generator
) -> Sheet:
    """Draw images with columns of ``seconds`` each, shuffled and rebuilt from the predicted places, with scores."""
    p, visible, asked = geometry.p, answer.visible, answer.dropped
    columns = {
        "original": images,
        "in disorder": put_together(images, p, visible, scatter_places(visible, asked, generator)),
        "as put back": put_together(images, p, visible, answer.places()),
    }
    top, five, apart = (values[asked].mean().item() for values in scores(answer, geometry.grid).values())
    far = f"{apart:.1f} patches"
    if geometry.grid[0] == 1:
        frames = apart * p[1]
        far = f"{frames:.1f} frames ({1000 * frames * seconds:.0f} ms)"
    noun = "frames" if geometry.grid[0] == p[1] == 1 else "patches"
    share, k = asked.float().mean().item(), visible.shape[1]
    caption = (
        f"In disorder: {round(share * k)} of {k} {noun}, whose positions were withheld, in random order. As put back: "
        f"each at its predicted place; the mean where several share a place. Of the withheld positions, {top:.1%} are "
        f"predicted correctly (top-1), and {five:.1%} are among the five likeliest (top-5); the mean distance is {far}."
    )
    return Sheet("rebuilt", caption, columns, _NOTHING)


def mixed_sheet(
    geometry: Geometry, images: Tensor, place: Callable[[Tensor], Tensor], generator: torch.Generator
) -> Sheet:
    """Draw pairs of images whose patches were shuffled together, and each half of them rebuilt (MP3 Figs. 14-15).

    ``place`` predicts the place [b n] of each patch of images [b c h w]. Each image is mixed with the one before it.
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
        "its predicted place; the mean where several share a place."
    )
    return Sheet("mixed", caption, columns, _NOTHING)
