"""Prediction of the output of a momentum teacher that sees the whole image (ExtreMA, LUT)."""

from __future__ import annotations

import math
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
from patchloom.questions.question import ROWS, Encoded, Measure, Outcome, Question, Sheet
from patchloom.system.distributed import gathered, rank
from patchloom.withhold.encoder_input import EncoderInput, all_patches

SHEET_NEIGHBOURS = 3

Representation = Literal["cait", "vit", "mean"]
Loss = Literal["byol", "infonce"]


_POOLING: dict[Representation, Literal["class", "mean", "instance"]] = {
    "cait": "instance",
    "vit": "class",
    "mean": "mean",
}


class Agreement(Question):
    """Prediction of a momentum teacher's output for the whole image from the student's input.

    Args:
        encoder: the student; the teacher is a moving average of it, of the instance head and of the projection.
        projection, prediction: heads of the student, [b d] to [b out] and [b out] to [b out].
        momentum: momentum of the teacher at the start; it rises to 1 along a half cosine.
        representation: image representation: a class token computed by ``instance_head`` after the encoder (cait), the
            encoder's own class token (vit), or the mean token of the patches with content (mean).
        instance_head: head for cait.
        loss: byol, or infonce with the other images of all processes as negatives.
        temperature: τ of infonce.
    """

    pictured = 200  # images that are searched for neighbours

    def __init__(
        self,
        encoder: Encoder,
        projection: nn.Sequential,
        prediction: nn.Module,
        momentum: float,
        representation: Representation = "mean",
        instance_head: InstanceHead | None = None,
        loss: Loss = "byol",
        temperature: float = 0.2,
    ):
        super().__init__(Geometry.of(encoder))
        self.momentum, self.representation, self.loss, self.temperature = momentum, representation, loss, temperature
        self.instance_head, self.projection, self.prediction = instance_head, projection, prediction
        self.teacher = Teacher(**self._followed(encoder))

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

    def summary(self, tokens: Tensor, given: EncoderInput) -> Tensor:
        """Reduce tokens [b prefix+k d] to the representation [b d]: class token, or mean of the patch tokens."""
        if self.instance_head is not None:
            raise ValueError("an instance head needs tokens before the last norm: use represent")
        if self.representation == "vit":
            return tokens[:, 0]
        return given.mean_patch_token(tokens)

    def target(self, images: Tensor) -> Tensor:
        """Return the teacher's output [b out] for whole images [b c h w], for training, perhaps in bfloat16."""
        with no_grad_autocast(self.teacher, images):
            return self.teacher_output(images)

    def teacher_output(self, images: Tensor) -> Tensor:
        """Return the teacher's output [b out] in full precision, for measures."""
        return self.teacher.projection(self.represent(self.teacher, all_patches(images, self.geometry.n)))

    def predict(self, representation: Tensor) -> Tensor:
        """Predict the teacher's output [b out]."""
        return self.prediction(self.projection(representation))

    def disagreement(self, guess: Tensor, target: Tensor) -> Tensor:
        """Return the loss of predictions [v b out] of v masks, or [b out]."""
        if self.loss == "byol":
            return byol_loss(guess, target)
        return info_nce(guess.view(-1, *target.shape), target, self.temperature)

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the loss against the teacher's output for the same images."""
        target = self.target(encoded.teacher_images)
        return Outcome(self.disagreement(self.predict(self.summary(encoded.tokens, encoded.given)), target), {})

    def after_step(self, progress: float, encoder: Encoder) -> None:
        """Update the teacher after an update of the weights; the next step uses it (as in the authors' programs)."""
        self.teacher.follow(momentum_at(progress, self.momentum), **self._followed(encoder))

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the agreement, beside that with the teacher's outputs for other images."""
        predicted = self.predict(self.summary(encoded.tokens, encoded.given))
        return agreement_measure(predicted, self.teacher_output(encoded.teacher_images), encoded.modality)

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw nearest neighbours by the teacher."""
        return [self.neighbours(encoded.images, {}, "", encoded.modality)]

    def neighbours(
        self, images: Tensor, student: dict[str, tuple[Tensor, Tensor]], seen: str, modality: Modality = IMAGES
    ) -> Sheet:
        """Draw the nearest neighbours of the first images among all others, by the teacher and perhaps the student.

        Args:
            images: [g c h w] the gallery; its first images are the queries.
            student: by heading, features [q d] of the queries and [g d] of the gallery.
            seen: a sentence on the parts of the queries that teacher and student see.
            modality: kind of data that the images show.
        """
        features = self.represent(self.teacher, all_patches(images, self.geometry.n))
        what = "mean patch tokens" if self.representation == "mean" else "instance representations"
        others = f"{len(images) - 1} other {modality.noun}"
        caption = f"The nearest of {others} by the cosine of their {what}. {seen}".rstrip()
        return neighbours_sheet(images, {"teacher": (features, features)} | student, caption, modality.item)

    def extra_modules(self) -> dict[str, nn.Module]:
        """Return the instance head, if used, and the first layer of the projection, if it needs no batch statistics."""
        found: dict[str, nn.Module] = {} if self.instance_head is None else {"instance_head": self.instance_head}
        if isinstance(self.projection[1], nn.LayerNorm):
            pooling = _POOLING[self.representation]
            found["projection"] = Stem(self.projection[:3], pooling)
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


def momentum_at(progress: float, start: float) -> float:
    """Return the teacher's momentum: from ``start`` to 1 along a half cosine (BYOL)."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * progress)) / 2


def agreement_with_others(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean cosine [b] of each student's output [b d] with the teacher's outputs [b d] of the other images.

    Agreement means nothing unless it is above this: a collapsed pair agrees on everything. A single image is compared
    with itself.
    """
    all_pairs = F.normalize(student.float(), dim=-1) @ F.normalize(teacher.float(), dim=-1).T
    b = len(all_pairs)
    if b == 1:
        return all_pairs[:, 0]
    return (all_pairs.sum(1) - all_pairs.diagonal()) / (b - 1)


def agreement_measure(student: Tensor, teacher: Tensor, modality: Modality = IMAGES) -> Measure:
    """Measure the cosine of student [b d] and teacher [b d] on the same image, beside that with other images."""
    others = f"on other {modality.noun}"
    return Measure(
        "agreement with the teacher",
        cosine(student, teacher),
        {others: agreement_with_others(student, teacher)},
        to_beat=others,
        higher_is_better=True,
        form=".3f",
        outputs=teacher.float(),
    )


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
    near = F.normalize(queries.float(), dim=-1) @ F.normalize(gallery.float(), dim=-1).T
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
    return Sheet("neighbours", caption, columns)
