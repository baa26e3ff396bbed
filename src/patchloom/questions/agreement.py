"""Agreement of parts of an image with the whole: a momentum teacher's output (ExtreMA, LUT), or the encoder's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.modality import IMAGES, Modality
from patchloom.nets.encode import encode
from patchloom.nets.geometry import Geometry
from patchloom.nets.heads import InstanceHead, Stem, represent
from patchloom.nets.swin import Encoder, PlainViT
from patchloom.nets.teacher import Teacher, no_grad_autocast
from patchloom.options.refusals import GAUSSIAN
from patchloom.options.tasks import Loss, Representation
from patchloom.questions.question import ROWS, Encoded, Measure, Outcome, Question, Sheet
from patchloom.system.distributed import averaged, gathered, gathered_with_gradient, rank, world
from patchloom.withhold.encoder_input import EncoderInput, all_patches

SHEET_NEIGHBOURS = 3


@dataclass(frozen=True)
class AgreementLoss:
    """Loss on the agreement of parts with the whole image.

    Attributes:
        name: byol, infonce with the other images of all processes as negatives, or sigreg or visreg, which have
            neither teacher nor negatives, but outputs that are distributed as a Gaussian.
        temperature: τ of infonce.
        gaussian_weight: λ of sigreg and visreg: weight of the test for a Gaussian; that of the agreement is 1 - λ.
        directions: number of random directions of that test, redrawn in every step.
    """

    name: Loss = "byol"
    temperature: float = 0.2
    gaussian_weight: float = 0.05
    directions: int = 1024

    @property
    def gaussian(self) -> bool:
        """Whether the loss has no teacher."""
        return self.name in GAUSSIAN


_POOLING: dict[Representation, Literal["class", "mean", "instance"]] = {
    "cait": "instance",
    "vit": "class",
    "mean": "mean",
}


class Agreement(Question):
    """Prediction of the output for the whole image, a momentum teacher's or the encoder's own, from a part of it.

    Args:
        encoder: the student; the teacher is a moving average of it, of the instance head and of the projection.
        projection, prediction: heads of the student, [b d] to [b out] and [b out] to [b out]; without a teacher there
            is no prediction.
        momentum: momentum of the teacher at the start; it rises to 1 along a half cosine.
        representation: image representation: a class token computed by ``instance_head`` after the encoder (cait), the
            encoder's own class token (vit), or the mean token of the patches with content (mean).
        instance_head: head for cait.
        loss: loss, which decides whether there is a teacher.
    """

    pictured = 200  # images that are searched for neighbours

    def __init__(
        self,
        encoder: Encoder,
        projection: nn.Sequential,
        prediction: nn.Module | None,
        momentum: float,
        representation: Representation = "mean",
        instance_head: InstanceHead | None = None,
        loss: AgreementLoss | None = None,
    ):
        super().__init__(Geometry.of(encoder))
        self.loss = loss or AgreementLoss()
        self.momentum, self.representation = momentum, representation
        self.instance_head, self.projection, self.prediction = instance_head, projection, prediction
        self.teacher = None if self.loss.gaussian else Teacher(**self._followed(encoder))

    def _followed(self, encoder: Encoder) -> dict[str, nn.Module]:
        """Return the modules that the teacher averages."""
        parts: dict[str, nn.Module] = {"encoder": encoder, "projection": self.projection}
        return parts if self.instance_head is None else parts | {"instance_head": self.instance_head}

    def represent(self, by: PlainViT | Teacher, given: EncoderInput) -> Tensor:
        """Return the representation [b d] of an input, by the teacher or by an encoder that needs no mask token."""
        if isinstance(by, Teacher):
            vit, head = by.encoder, cast(InstanceHead | None, getattr(by, "instance_head", None))
        else:
            vit, head = by, self.instance_head
        if head is not None:
            return represent(vit, head, encode(vit, given, norm=False))
        return self.summary(encode(vit, given), given)

    def represent_encoded(self, encoded: Encoded) -> Tensor:
        """Return the representation [b d] of an encoded batch, whose input may have mask tokens."""
        if self.instance_head is None:
            return self.summary(encoded.tokens, encoded.given)
        if encoded.unnormed is None:
            raise ValueError("an instance head needs tokens before the last norm: encode them, too")
        return represent(encoded.encoder, self.instance_head, encoded.unnormed)

    def summary(self, tokens: Tensor, given: EncoderInput) -> Tensor:
        """Reduce tokens [b prefix+k d] to the representation [b d]: class token, or mean of the patch tokens."""
        if self.instance_head is not None:
            raise ValueError("an instance head needs tokens before the last norm: use represent")
        if self.representation == "vit":
            return tokens[:, 0]
        return given.mean_patch_token(tokens)

    def target(self, encoder: PlainViT, images: Tensor) -> Tensor:
        """Return the target [b out] for whole images [b c h w], for training: a teacher's is perhaps in bfloat16."""
        if self.teacher is None:
            return self.whole_output(encoder, images)
        with no_grad_autocast(self.teacher, images):
            return self.whole_output(encoder, images)

    def whole_output(self, encoder: PlainViT, images: Tensor) -> Tensor:
        """Return the output [b out] for whole images in full precision, the teacher's or that of the ``encoder``."""
        projection = self.projection if self.teacher is None else self.teacher.projection
        return projection(self.represent(self.teacher or encoder, all_patches(images, self.geometry.n)))

    def predict(self, representation: Tensor) -> Tensor:
        """Predict the output for the whole image [b out]."""
        projected = self.projection(representation)
        return projected if self.prediction is None else self.prediction(projected)

    def disagreement(self, guess: Tensor, target: Tensor, generator: torch.Generator | None = None) -> Outcome:
        """Return the loss of predictions [v b out] of v masks, or [b out].

        Args:
            guess: the predictions.
            target: [b out] the same for all masks; sigreg and visreg also take those [g b out] of g whole views.
            generator: random generator of the directions, the same in all processes.
        """
        guess = guess.view(-1, *target.shape[-2:])
        if self.loss.gaussian:
            return gaussian_agreement(guess, target.view(-1, *target.shape[-2:]), self.loss, generator)
        if self.loss.name == "byol":
            return Outcome(byol_loss(guess, target), {})
        return Outcome(info_nce(guess, target, self.loss.temperature), {})

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the loss against the output for the same whole images."""
        target = self.target(cast(PlainViT, encoded.encoder), encoded.teacher_images)
        return self.disagreement(self.predict(self.represent_encoded(encoded)), target, encoded.generator)

    def after_step(self, progress: float, encoder: Encoder, applied: float | Tensor = 1.0) -> None:
        """Update the teacher after an update of the weights; the next step uses it (as in the authors' programs)."""
        if self.teacher is not None:
            self.teacher.follow(momentum_at(progress, self.momentum), applied, **self._followed(encoder))

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the agreement, beside that with the outputs for other images."""
        predicted = self.predict(self.represent_encoded(encoded))
        return self.measured(predicted, cast(PlainViT, encoded.encoder), encoded.teacher_images, encoded.modality)

    def measured(self, predicted: Tensor, encoder: PlainViT, images: Tensor, modality: Modality) -> Measure:
        """Measure the agreement of predictions [b out] with the outputs for whole images [b c h w]."""
        by = "teacher" if self.teacher is not None else f"whole {modality.item}"
        others, whole = f"on other {modality.noun}", self.whole_output(encoder, images)
        return Measure(
            f"agreement with the {by}",
            cosine(predicted, whole),
            {others: agreement_with_others(predicted, whole)},
            to_beat=others,
            higher_is_better=True,
            unit="",
            outputs=whole.float(),
        )

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw nearest neighbours by the teacher, or by the encoder."""
        return [self.neighbours(cast(PlainViT, encoded.encoder), encoded.images, {}, "", encoded.modality)]

    def neighbours(
        self,
        encoder: PlainViT,
        images: Tensor,
        student: dict[str, tuple[Tensor, Tensor]],
        seen: str,
        modality: Modality = IMAGES,
    ) -> Sheet:
        """Draw the nearest neighbours of the first images among all others, by whole images and perhaps by parts.

        Args:
            encoder: the encoder, which represents whole images if there is no teacher.
            images: [g c h w] the gallery; its first images are the queries.
            student: by heading, features [q d] of the queries and [g d] of the gallery.
            seen: a sentence on the parts of the queries that the student sees.
            modality: kind of data that the images show.
        """
        features = self.represent(self.teacher or encoder, all_patches(images, self.geometry.n))
        what = "mean patch tokens" if self.representation == "mean" else "instance representations"
        others = f"{len(images) - 1} other {modality.noun}"
        caption = f"The nearest of {others} by the cosine of their {what}. {seen}".rstrip()
        by = "encoder" if self.teacher is None else "teacher"
        return neighbours_sheet(images, {by: (features, features)} | student, caption, modality.item)

    def seen(self, modality: Modality, share: str) -> str:
        """Return a sentence for captions: one network sees the whole item, and one a ``share`` of its patches."""
        whole, part = ("teacher", "student") if self.teacher is not None else ("encoder", "student's part of it")
        sees = "has" if self.teacher is None else "sees"
        return f"The {whole} sees all of the {modality.item}, the {part} {sees} {share} of its patches."

    def extra_modules(self) -> dict[str, nn.Module]:
        """Return the instance head, if used, and the first layer of the projection, if it needs no batch statistics."""
        return self._beside(self.instance_head, self.projection)

    def teacher_modules(self) -> dict[str, nn.Module]:
        """Return the teacher's encoder, and its modules like those of the student; {} without a teacher."""
        if self.teacher is None:
            return {}
        head = cast(InstanceHead | None, getattr(self.teacher, "instance_head", None))
        return {"encoder": self.teacher.encoder, **self._beside(head, self.teacher.projection)}

    def _beside(self, head: InstanceHead | None, projection: nn.Sequential) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {} if head is None else {"instance_head": head}
        if isinstance(projection[1], nn.LayerNorm):
            found["projection"] = Stem(projection[:3], _POOLING[self.representation])
        return found


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the cosine [...] between outputs [... d], in float32."""
    return F.cosine_similarity(student.float(), teacher.float(), dim=-1)


def byol_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared distance of the normalised outputs [... d]: 2 - 2 cos (BYOL Eq. 2, ExtreMA section 3)."""
    return (2 - 2 * cosine(student, teacher)).mean()


def info_nce(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return InfoNCE as in MoCo v3 (times 2τ): each student output is matched to its teacher's among all processes.

    Args:
        student: [v b d]; only it receives gradients.
        teacher: [b d] of this process.
        temperature: τ.
    """
    q, k = F.normalize(student.float(), dim=-1), F.normalize(gathered(teacher).float(), dim=-1)
    right = torch.arange(len(teacher), device=q.device) + rank() * len(teacher)
    logits = q @ k.T / temperature
    return 2 * temperature * F.cross_entropy(logits.flatten(0, 1), right.repeat(len(q)))


_KNOTS, _LAST_KNOT = 17, 3.0


def gaussian_agreement(
    parts: Tensor, whole: Tensor, loss: AgreementLoss, generator: torch.Generator | None = None
) -> Outcome:
    """Return (1 - λ) · the squared distance of every view to the mean of the whole ones + λ · a test for a Gaussian.

    LeJEPA, section 5, with either test. The distance is a mean over the outputs, as in the authors' programs, not a
    sum. All of it is in float32, because the cosine and sine of a large angle are wrong in half precision.

    Args:
        parts: [v b k] outputs for parts of the images.
        whole: [g b k] outputs for whole views of them.
        loss: sigreg or visreg.
        generator: random generator of the directions, the same in all processes.
    """
    with torch.autocast(whole.device.type, enabled=False):
        whole = whole.float()
        views = torch.cat([whole, parts.float()])
        apart = (views - whole.mean(0)).square().mean()
        at = whole.device if generator is None else generator.device
        drawn = torch.randn(whole.shape[-1], loss.directions, generator=generator, device=at)
        directions = F.normalize(drawn.to(whole.device, non_blocking=True), dim=0)
        statistic = (sigreg if loss.name == "sigreg" else visreg)(views, directions)
        with torch.no_grad():
            centred = (whole - whole.mean(1, keepdim=True)).flatten(0, 1)
            covariance = centred.T @ centred / len(centred)
            variances = covariance.diagonal()
            # of the same spread in every direction it is k; unlike RankMe it needs no decomposition, which would wait
            ratio = variances.sum().square() / covariance.square().sum().clamp_min(1e-12)
        found = {"distance": apart, loss.name: statistic, "output_std": variances.sqrt().mean(), "output_rank": ratio}
        total = (1 - loss.gaussian_weight) * apart + loss.gaussian_weight * statistic
    return Outcome(total, {name: value.detach() for name, value in found.items()})


def sigreg(views: Tensor, directions: Tensor) -> Tensor:
    """Return the mean Epps-Pulley statistic of views [v b k] along unit ``directions`` [k m] (LeJEPA, SIGReg).

    ``B ∫ |φ_B(t) - exp(-t²/2)|² exp(-t²/2) dt`` with the empirical characteristic function φ_B of all B images of all
    processes, by the trapezoidal rule at 17 knots in [0, 3], doubled because the integrand is even. The variance of
    gradients does not depend on the batch, so λ does.
    """
    t = torch.linspace(0, _LAST_KNOT, _KNOTS, device=views.device)
    gauss = torch.exp(-t.square() / 2)
    rule = torch.full_like(t, 2 * _LAST_KNOT / (_KNOTS - 1))
    rule[:: _KNOTS - 1] /= 2
    angles = (views @ directions)[..., None] * t
    real, imaginary = averaged(torch.stack([angles.cos().mean(1), angles.sin().mean(1)]))
    error = (real - gauss).square() + imaginary.square()
    return views.shape[1] * world() * (error @ (rule * gauss)).mean()


def visreg(views: Tensor, directions: Tensor) -> Tensor:
    """Return the distance of views [v b k] from a Gaussian in location, scale and shape (VISReg).

    Per view: mean μ² + mean (σ - 1)² + the squared distance of the sorted projections of (z - μ) / σ, with σ taken as
    constant, from the quantiles of a Gaussian. The gradient of σ keeps its length when all outputs become equal, where
    that of `sigreg` vanishes.
    """
    views = gathered_with_gradient(views.transpose(0, 1)).transpose(0, 1)
    b = views.shape[1]
    mean = views.mean(1, keepdim=True)
    scale = (views - mean).norm(dim=1, keepdim=True) / math.sqrt(b) + 1e-6
    along = ((views - mean) / scale.detach() @ directions).sort(dim=1).values
    quantiles = torch.special.ndtri(torch.arange(1, b + 1, device=views.device) / (b + 1))
    shape = (along - quantiles[:, None]).square().mean()
    return mean.square().mean() + (scale - 1).square().mean() + shape


def momentum_at(progress: float, start: float) -> float:
    """Return the teacher's momentum: from ``start`` to 1 along a half cosine (BYOL)."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * progress)) / 2


def all_cosines(one: Tensor, two: Tensor) -> Tensor:
    """Return the cosine of each of ``one`` [n d] with each of ``two`` [m d], [n m].

    In float32 under autocast, too: in bfloat16 most cosines of features that are alike become equal.
    """
    with torch.autocast(one.device.type, enabled=False):
        return F.normalize(one.float(), dim=-1) @ F.normalize(two.float(), dim=-1).T


def agreement_with_others(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean cosine [b] of each student's output [b d] with the teacher's outputs [b d] of the other images.

    Agreement means nothing unless it is above this: a collapsed pair agrees on everything. A single image is compared
    with itself.
    """
    all_pairs = all_cosines(student, teacher)
    b = len(all_pairs)
    if b == 1:
        return all_pairs[:, 0]
    return (all_pairs.sum(1) - all_pairs.diagonal()) / (b - 1)


def nearest_by_cosine(queries: Tensor, gallery: Tensor, own: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return indices and cosines of the nearest neighbours in a gallery, nearest first.

    Args:
        queries: [q d].
        gallery: [g d].
        own: [q] index of each query in the gallery, which is excluded.
        count: number of neighbours; fewer if the gallery has fewer other items.

    Returns:
        Indices [q count] into the gallery and cosines [q count].
    """
    near = all_cosines(queries, gallery)
    near[torch.arange(len(near), device=near.device), own.to(near.device)] = -torch.inf
    cosines, places = near.topk(min(count, len(gallery) - 1), dim=1)
    return places, cosines


def neighbours_sheet(
    images: Tensor, found: dict[str, tuple[Tensor, Tensor]], caption: str, item: str = "image"
) -> Sheet:
    """Draw the nearest neighbours of the first images among all others.

    Args:
        images: [g c h w] the gallery; its first images are the queries.
        found: by heading, features [q d] of the queries and [g d] of the gallery.
        caption: caption of the sheet.
        item: heading of the queries.
    """
    shown = min(ROWS, len(images))
    columns = {item: images[:shown]}
    own = torch.arange(shown)
    for heading, (queries, gallery) in found.items():
        indices = nearest_by_cosine(queries[:shown], gallery, own, SHEET_NEIGHBOURS)[0]
        for place, which in enumerate(indices.unbind(1), start=1):
            columns[f"{heading}, {place}."] = images[which]
    return Sheet(
        "neighbours",
        caption,
        columns,
        page_title="Nearest neighbours during training",
        page_text=f"Each {item} with those whose features are most similar. If all rows show the same neighbours, the "
        "features have collapsed; if neighbours share only their colours, the encoder has learnt little else.",
    )
