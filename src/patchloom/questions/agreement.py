"""Asking for agreement with a momentum teacher that sees everything (ExtreMA, LUT)."""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.modality import IMAGES, Modality
from patchloom.nets.encode import encode
from patchloom.nets.geometry import Geometry
from patchloom.nets.heads import InstanceHead, Stem, represent
from patchloom.nets.swin import Encoder
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
    """The output of a momentum teacher that sees the whole image, from what the student was given.

    Args:
        encoder: the student; the teacher is a moving average of it, of the instance head and of the projection.
        projection, prediction: heads of the student, [b d] to [b out] and [b out] to [b out].
        momentum: of the teacher at the start; it rises to 1 along a half cosine.
        representation: what stands for an image: a class token after the encoder that ``instance_head`` computes
            (cait), the encoder's own (vit), or the mean of the tokens of patches whose content was given (mean).
        instance_head: for cait.
        loss: byol, or infonce with the other images of all processes as negatives.
        temperature: τ of infonce.
    """

    pictured = 200  # images among which neighbours are looked for

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
        """What the teacher is a moving average of."""
        parts: dict[str, nn.Module] = {"encoder": encoder, "projection": self.projection}
        return parts if self.instance_head is None else parts | {"instance_head": self.instance_head}

    def represent(self, by: VisionTransformer | Teacher, given: EncoderInput) -> Tensor:
        """Representation [b d] of what is given, by the teacher or by a student's encoder that needs no mask token."""
        if isinstance(by, Teacher):
            vit, head = by.encoder, cast(InstanceHead | None, getattr(by, "instance_head", None))
        else:
            vit, head = by, self.instance_head
        if head is not None:
            return represent(vit, head, encode(vit, given, norm=False))
        return self.summary(encode(vit, given), given)

    def summary(self, tokens: Tensor, given: EncoderInput) -> Tensor:
        """What of tokens [b prefix+k d] stands for the image [b d]: the class token, or a mean of the patches'."""
        if self.instance_head is not None:
            raise ValueError("an instance head represents what was encoded without the last norm: use represent")
        if self.representation == "vit":
            return tokens[:, 0]
        return given.mean_patch_token(tokens)

    def target(self, images: Tensor) -> Tensor:
        """The teacher's output [b out] for whole images [b c h w], for training: perhaps in bfloat16."""
        with no_grad_autocast(self.teacher, images):
            return self.teacher_output(images)

    def teacher_output(self, images: Tensor) -> Tensor:
        """The same in full, for measures."""
        return self.teacher.projection(self.represent(self.teacher, all_patches(images, self.geometry.n)))

    def predict(self, representation: Tensor) -> Tensor:
        """The student's guess [b out] of the teacher's output."""
        return self.prediction(self.projection(representation))

    def disagreement(self, guess: Tensor, target: Tensor) -> Tensor:
        """The loss of guesses [v b out], of v masks, or [b out]."""
        if self.loss == "byol":
            return byol_loss(guess, target)
        return info_nce(guess.view(-1, *target.shape), target, self.temperature)

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Disagreement with the teacher about what it sees of the same images."""
        target = self.target(encoded.teacher_images)
        return Outcome(self.disagreement(self.predict(self.summary(encoded.tokens, encoded.given)), target), {})

    def after_step(self, progress: float, encoder: Encoder) -> None:
        """The teacher follows; the next step sees it updated (as in the authors' programs)."""
        self.teacher.follow(momentum_at(progress, self.momentum), **self._followed(encoder))

    def measure(self, encoded: Encoded) -> Measure:
        """Agreement beside that with the teacher's outputs for other images."""
        predicted = self.predict(self.summary(encoded.tokens, encoded.given))
        return agreement_measure(predicted, self.teacher_output(encoded.teacher_images), encoded.modality)

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Nearest neighbours by the teacher."""
        return [self.neighbours(encoded.images, {}, "", encoded.modality)]

    def neighbours(
        self, images: Tensor, student: dict[str, tuple[Tensor, Tensor]], seen: str, modality: Modality = IMAGES
    ) -> Sheet:
        """The nearest neighbours of the first images among all others, by the teacher and perhaps by the student.

        Args:
            images: [g c h w] the gallery; its first images are the queries.
            student: by heading, features [q d] of the queries and [g d] of the gallery.
            seen: a sentence on what of the queries each saw.
            modality: what the images are pictures of.
        """
        features = self.represent(self.teacher, all_patches(images, self.geometry.n))
        what = "mean patch tokens" if self.representation == "mean" else "instance representations"
        others = f"{len(images) - 1} other {modality.noun}"
        caption = f"The nearest of {others} by the cosine of their {what}. {seen}".rstrip()
        return neighbours_sheet(images, {"teacher": (features, features)} | student, caption, modality.item)

    def extra_modules(self) -> dict[str, nn.Module]:
        """The instance head, if it gives the representation; and the projection's first layer, if it needs no batch."""
        found: dict[str, nn.Module] = {} if self.instance_head is None else {"instance_head": self.instance_head}
        if isinstance(self.projection[1], nn.LayerNorm):
            pooling = _POOLING[self.representation]
            found["projection"] = Stem(self.projection[:3], pooling)
        return found


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """Cosine [...] between outputs [... d], in float32."""
    return F.cosine_similarity(student.float(), teacher.float(), dim=-1)


def byol_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared distance of the normalised outputs [... d], averaged: 2 - 2 cos (BYOL Eq. 2, ExtreMA section 3)."""
    return (2 - 2 * cosine(student, teacher)).mean()


def info_nce(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """InfoNCE as MoCo v3 writes it (times 2τ): each student finds its teacher among those of all processes.

    Args:
        student: [v b d], gradients flow here only.
        teacher: [b d] of this process.
        temperature: τ.
    """
    q, k = F.normalize(student.float(), dim=-1), F.normalize(gathered(teacher).float(), dim=-1)
    right = torch.arange(len(teacher), device=q.device) + rank() * len(teacher)
    logits = q @ k.T / temperature
    return 2 * temperature * F.cross_entropy(logits.flatten(0, 1), right.repeat(len(q)))


def momentum_at(progress: float, start: float) -> float:
    """The teacher's momentum: ``start`` at the beginning, 1 at the end, a half cosine between (BYOL)."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * progress)) / 2


def agreement_with_others(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean cosine [b] of each student's output [b d] with the teacher's outputs [b d] of the other images.

    What agreement is worth nothing below: a collapsed pair agrees on everything. A single image is compared with
    itself.
    """
    all_pairs = F.normalize(student.float(), dim=-1) @ F.normalize(teacher.float(), dim=-1).T
    b = len(all_pairs)
    if b == 1:
        return all_pairs[:, 0]
    return (all_pairs.sum(1) - all_pairs.diagonal()) / (b - 1)


def agreement_measure(student: Tensor, teacher: Tensor, modality: Modality = IMAGES) -> Measure:
    """Cosine of student [b d] and teacher [b d] on the same image, beside that with the teacher on other images."""
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
    """The nearest others of a gallery by the cosine of their features, the nearest first.

    Args:
        queries: [q d].
        gallery: [g d].
        own: [q] the place of each query in the gallery, where it is not looked for.
        count: how many are looked for; fewer where the gallery has fewer others.
    """
    near = F.normalize(queries.float(), dim=-1) @ F.normalize(gallery.float(), dim=-1).T
    near[torch.arange(len(near), device=near.device), own.to(near.device)] = -torch.inf
    cosines, places = near.topk(min(count, len(gallery) - 1), dim=1)
    return places, cosines


def neighbours_sheet(
    images: Tensor, found: dict[str, tuple[Tensor, Tensor]], caption: str, item: str = "image"
) -> Sheet:
    """The nearest neighbours of the first images among all others.

    Args:
        images: [g c h w] the gallery; its first images are the queries.
        found: by heading, features [q d] of the queries and [g d] of the gallery.
        caption: what was compared.
        item: the heading of the queries.
    """
    shown = min(ROWS, len(images))
    columns = {item: images[:shown]}
    own = torch.arange(shown)
    for heading, (queries, gallery) in found.items():
        indices = nearest_by_cosine(queries[:shown], gallery, own, SHEET_NEIGHBOURS)[0]
        for place, which in enumerate(indices.unbind(1), start=1):
            columns[f"{heading}, {place}."] = images[which]
    return Sheet("neighbours", caption, columns)
