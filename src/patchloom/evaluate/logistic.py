"""Linear probe: multinomial logistic regression on frozen features.

The objective is scikit-learn's: mean cross-entropy + strength / 2 · ‖weights‖², with biases not penalised; its ``C``
is 1 / (n · strength). This solver uses warm starts along the grid of strengths, in principal axes, and is many
times faster than separate fits of `sklearn.linear_model.LogisticRegression`; tests compare the two.
Test images take no part in any choice: `choose_strength` and `linear_probe` never receive them.
Letters: n images, d feature width, c classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.splits import pick, pick_groups
from patchloom.errors import PatchloomError
from patchloom.results.classes import score_of_choice

L2_STRENGTHS: tuple[float, ...] = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
CHOICE_VALIDATION_SHARE = 0.2

_SCORES = 2**26  # logits in memory at once; large, since each product has overhead
_ITERATIONS = 200
# Numbers of multiplications per step, n · d · c.
# Below the first, one thread is used, since threads on busy cores wait for one another: at 50,000 x 384 x 10 two took
# four times as long as one, at 1,800 x 64 x 10 fifty times.
_ONE_THREAD = 2**28
# Below the second, the CPU is used, whatever the device: in a step L-BFGS reads about 20 single numbers, for each of
# which a GPU waits, and calls 150 operations. A thread of a CPU needs as long for a step of this size (estimated).
_ON_CPU = 2**22


@dataclass(frozen=True)
class Probe:
    """Fitted linear classifier.

    Attributes:
        mean, scale: [d] standardisation from the training images.
        weights: [d c] for standardised features.
        biases: [c].
        classes: [c] label of each column.
    """

    mean: Tensor
    scale: Tensor
    weights: Tensor
    biases: Tensor
    classes: Tensor

    def predict(self, features: Tensor) -> Tensor:
        """Predict labels [m] of features [m d], on the CPU."""
        best = [logits.argmax(1) for logits in self._in_parts(features)]
        return self.classes.cpu()[torch.cat(best).cpu()]

    def scores(self, features: Tensor) -> Tensor:
        """Return logits [m k] of features [m d], on the CPU, for labels 0 ... k-1; of labels without training images
        -1e9."""
        logits = self.logits(features)
        found = logits.new_full((len(logits), int(self.classes.max()) + 1), -1e9)
        found[:, self.classes.cpu()] = logits
        return found

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [m c] of features [m d], on the CPU."""
        return torch.cat([*self._in_parts(features)]).cpu()

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return weights [d c] and biases [c] for features that are not standardised."""
        weights = self.weights / self.scale[:, None]
        return weights, self.biases - self.mean @ weights

    def _in_parts(self, features: Tensor) -> Iterator[Tensor]:
        weights, biases = self.folded()  # to avoid a copy of the features
        for part in features.split(_rows_for(len(biases))):
            yield part.to(weights) @ weights + biases

    def right(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return whether features [m d] are classified as their labels [m], which may have no training image."""
        return self.predict(features) == labels


@dataclass(frozen=True)
class Choice:
    """Chosen L2 strength.

    Attributes:
        strength: strength of the regularisation.
        accuracy: accuracy on held-out training images; balanced accuracy where `quoted_measure` says so.
        held_out: number of held-out images.
    """

    strength: float
    accuracy: float
    held_out: int


def fit_path(
    features: Tensor, labels: Tensor, strengths: Sequence[float], device: torch.device | str = "cpu"
) -> list[Probe]:
    """Fit one probe for each strength, initialised with the previous one.

    Args:
        features: [n d] float32.
        labels: [n] int64.
        strengths: positive; descending order is fastest.
        device: device for the products of a large problem; a small one is solved on the CPU.
    """
    threads, multiplications = torch.get_num_threads(), features.numel() * len(labels.unique())
    torch.set_num_threads(1 if multiplications < _ONE_THREAD else threads)
    try:
        chosen = torch.device("cpu" if multiplications < _ON_CPU else device)
        features, labels = features.to(chosen), labels.to(chosen)
        classes, targets = labels.unique(return_inverse=True)
        mean, scale = standardization(features)
        rotated, axes, moments = _principal((features - mean) / scale)
        variables = torch.zeros(rotated.shape[1] + 1, len(classes), dtype=torch.float64, device=features.device)
        probes = []
        for strength in strengths:
            variables = _descend(rotated, targets, moments, strength, variables)
            weights = (axes @ variables[:-1]).float()
            probes.append(Probe(mean, scale, weights, variables[-1].float(), classes))
        return probes
    finally:
        torch.set_num_threads(threads)


def choose_strength(
    features: Tensor,
    labels: Tensor,
    *,
    seed: int = 0,
    strengths: Sequence[float] = L2_STRENGTHS,
    device: torch.device | str = "cpu",
    groups: Tensor | None = None,
) -> Choice:
    """Choose the strength with the best accuracy on a stratified fifth of the training images, held out from the fit.

    With a rare class it is balanced accuracy (`score_of_choice`). Ties go to the strongest. The only image of a class
    is not held out.

    Args:
        features: [n d] features of training images only.
        labels: [n] int64.
        seed: seed of the held-out draw.
        strengths: grid of strengths.
        device: device for the products of a large problem.
        groups: [n] int64, groups of images that the draw keeps together.
    """
    if len(labels.unique()) < 2:
        raise PatchloomError("a linear probe needs training images of two classes: add images of another class")
    rest, held = hold_out_for_choice(labels, seed, groups)
    ordered = sorted(strengths, reverse=True)
    probes = fit_path(features[rest], labels[rest], ordered, device)
    truth, rule = labels[held].numpy(), labels.numpy()
    right = [probe.right(features[held], labels[held]).double().numpy() for probe in probes]
    accuracies = [score_of_choice(one, truth, rule) for one in right]
    best = int(np.argmax(accuracies))
    return Choice(ordered[best], accuracies[best], len(held))


def hold_out_for_choice(labels: Tensor, seed: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return indices of the kept and of the held-out training images, a stratified fifth; ``labels`` [n], n >= 2.

    Whole groups are held out if ``groups`` [n] has two or more groups and the kept images have two classes or more.
    """
    n = len(labels)
    count = min(max(1, round(CHOICE_VALIDATION_SHARE * n)), n - 1)
    if groups is not None and len(groups.unique()) > 1:
        held = pick_groups(labels.numpy(), groups.numpy(), count, seed)
        rest = np.setdiff1d(np.arange(n), held)
        if len(labels[rest].unique()) > 1:
            return torch.from_numpy(rest), torch.from_numpy(held)
    held = pick(labels.numpy(), count, seed)
    return torch.from_numpy(np.setdiff1d(np.arange(n), held)), torch.from_numpy(held)


def linear_probe(
    features: Tensor,
    labels: Tensor,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    groups: Tensor | None = None,
) -> tuple[Probe, Choice]:
    """Choose the strength on held-out training images, then fit on all; arguments as in `choose_strength`."""
    choice = choose_strength(features, labels, seed=seed, device=device, groups=groups)
    path = [strength for strength in L2_STRENGTHS if strength >= choice.strength]
    return fit_path(features, labels, path, device)[-1], choice


def _rows_for(numbers: int) -> int:
    return max(1, _SCORES // numbers)


def standardization(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation [d] of features [n d]; 1 instead of 0 for constant features."""
    mean = features.mean(0, dtype=torch.float64)
    # in blocks, since float64 doubles the memory
    parts = features.split(_rows_for(features.shape[1]))
    scale = (sum((part - mean).square().sum(0) for part in parts) / len(features)).sqrt()
    constant = scale <= 1e-7 * mean.abs().clamp(min=1e-30)
    return mean.float(), torch.where(constant, 1.0, scale).float()


def _principal(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate features [n d] into their principal axes: (rotated [n r], axes [d r], variances [r]).

    With n < d, r is the rank of the features: along other axes the penalty keeps the weights at 0.
    """
    n, d = features.shape
    if n >= d:
        moments, axes = torch.linalg.eigh((features.T @ features).double() / n)
        return features @ axes.float(), axes, moments.clamp(min=0)
    wide = features.double()
    moments, images = torch.linalg.eigh(wide @ wide.T / n)
    there = moments > 1e-10 * moments[-1]
    moments, images = moments[there], images[:, there]
    axes = wide.T @ images / (n * moments).sqrt()
    return features @ axes.float(), axes, moments


def _descend(features: Tensor, targets: Tensor, moments: Tensor, strength: float, start: Tensor) -> Tensor:
    """Minimise by L-BFGS from ``start`` [d+1 c], whose last row holds the biases; features [n d] in principal axes.

    A rotation does not change the penalty, and along principal axes the curvature at zero weights is known: variance /
    c + strength. Scaling by its square root preconditions the problem, so few iterations suffice.
    """
    n, c = len(features), start.shape[1]
    rows = _rows_for(c)
    penalty = torch.full((len(start), 1), strength, dtype=torch.float64, device=start.device)
    penalty[-1] = 0.0
    ones = torch.ones(1, dtype=torch.float64, device=start.device)
    unit = (torch.cat([moments, ones])[:, None] / c + penalty).sqrt()
    scaled = torch.nn.Parameter(start * unit)
    solver = torch.optim.LBFGS(
        [scaled],
        max_iter=_ITERATIONS,
        tolerance_grad=1e-6,
        tolerance_change=1e-8,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()
    def closure() -> Tensor:
        variables = scaled / unit
        weights = variables.float()
        loss = (penalty * variables.square()).sum() / 2
        slope = penalty * variables
        for part, target in zip(features.split(rows), targets.split(rows), strict=True):
            logs = F.log_softmax(part @ weights[:-1] + weights[-1], dim=1)
            loss = loss - logs.gather(1, target[:, None]).sum(dtype=torch.float64) / n
            wrong = logs.exp_()
            wrong[torch.arange(len(part), device=part.device), target] -= 1
            slope[:-1] += (wrong.T @ part).T.double() / n
            slope[-1] += wrong.sum(0, dtype=torch.float64) / n
        scaled.grad = slope / unit
        return loss

    solver.step(closure)
    return scaled.detach() / unit
