"""ExtreMA: extreme masking for learning instance and distributed visual representations (Wu et al., TMLR 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.data import TwoViews
from patchloom.errors import PatchloomError
from patchloom.hints import check
from patchloom.nets.encode import attention_heads, encode
from patchloom.nets.heads import InstanceHead, Stem, mlp, represent
from patchloom.nets.teacher import Teacher, aside
from patchloom.objectives.agreement import byol_loss, info_nce, momentum
from patchloom.tasks.measure import Measure
from patchloom.tasks.siamese import (
    GALLERY,
    ROWS,
    agreement_measure,
    check_momentum,
    head_sizes,
    neighbours_sheet,
    views_sheet,
)
from patchloom.tasks.task import Outcome, Sheet, Size, Task
from patchloom.views.tokens import deal
from patchloom.views.view import View, mask_patches, whole

ClassToken = Literal["cait", "vit", "mean"]
Loss = Literal["byol", "infonce"]
Which = Literal["none", "shared", "own"]


class ExtreMA(Task):
    """Almost all patches are removed, several times over; agreement with a teacher that sees all is asked.

    Args:
        encoder: the ViT to train; without a class token, unless ``class_token`` is vit.
        mask_ratio: share γ of the patches that is removed.
        masks: disjoint masks of one image, 1 to 8; the teacher runs once for all of them.
        loss: byol, or infonce with the other images of all processes as negatives.
        temperature: τ of infonce; auto: 0.2.
        class_token: what represents the image: a class token in two blocks of class attention after the encoder
            (cait), the encoder's own class token (vit), or the mean of its patch tokens (mean).
        crop: student and teacher see the centre (none), one random crop, or a crop of their own each.
        color: colours are changed not at all, alike for both, or for each on its own.
        momentum: of the teacher at the start; it rises to 1 along a half cosine.
        head_width: hidden width of projection and prediction heads; auto: 4096, or 4 encoder widths below ViT-S.
        head_out: width of their output; auto: 256, or the encoder's below ViT-S.

    Raises:
        PatchloomError: a mask ratio or number of masks that cannot be dealt, or an encoder without the token asked.
    """

    pictured = GALLERY

    def __init__(
        self,
        encoder: VisionTransformer,
        mask_ratio: float = 0.8,
        masks: int | Literal["auto"] = "auto",
        loss: Loss = "byol",
        temperature: float | Literal["auto"] = "auto",
        class_token: ClassToken = "cait",
        crop: Which = "shared",
        color: Which = "own",
        momentum: float = 0.996,
        head_width: Size = "auto",
        head_out: Size = "auto",
    ):
        super().__init__(encoder)
        for name, value, kinds in (("loss", loss, Loss), ("class_token", class_token, ClassToken)):
            check(f"task.{name}", value, kinds)
        visible = self.visible_of(mask_ratio)
        most = min(8, self.patches // visible)
        masks = self.choose(
            "masks", masks, min(4, most), f"{min(4, most)} hands of {visible} of {self.patches} patches"
        )
        if not 1 <= masks <= most:
            raise PatchloomError(
                f"{masks} disjoint masks of {visible} visible patches each cannot be dealt from {self.patches}: give "
                f"--task.masks 1 to {most}, or raise --task.mask_ratio"
            )
        if loss == "byol":
            self.refuse_unused("byol has no temperature", temperature=temperature)
        else:
            temperature = self.choose("temperature", temperature, 0.2, "the paper's")
            if temperature <= 0:
                raise PatchloomError(f"--task.temperature must be above 0, not {temperature}")
        check_momentum(momentum)
        if class_token == "vit" and not encoder.has_class_token:
            raise PatchloomError("--task.class_token vit needs an encoder that has one: give --model.class_token true")
        self.augment = TwoViews(self.augment.size, crop=crop, color=color)
        self.hands = (visible,) * masks
        self.loss, self.temperature, self.class_token, self.momentum = loss, temperature, class_token, momentum
        d = encoder.embed_dim
        hidden, out = head_sizes(self, head_width, head_out)
        self.instance_head = InstanceHead(d, attention_heads(encoder)) if class_token == "cait" else nn.Identity()
        self.projection = mlp((d, hidden, hidden, out), "layer")
        self.prediction = mlp((out, hidden, out), "layer")
        self.teacher = Teacher(**self.followed())

    @classmethod
    def encoder_wishes(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """A class token only for the design that asks the encoder's own."""
        if options["class_token"] == "vit":
            return {"class_token": (True, "--task.class_token vit asks for it")}
        return {"class_token": (False, f"--task.class_token {options['class_token']} needs none in the encoder")}

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Two with InfoNCE, which asks one image's teacher among those of others: alone, its loss is 0."""
        if options["loss"] == "infonce":
            return 2, "infonce tells the images of a step from one another"
        return super().images_needed(options)

    def beside(self) -> dict[str, nn.Module]:
        """The projection's first layer; and the class attention, if that gives the instance representation."""
        stem = Stem(self.projection[:3], {"cait": "instance", "vit": "class"}.get(self.class_token, "mean"))
        head = {"instance_head": self.instance_head} if self.class_token == "cait" else {}
        return head | {"projection": stem}

    def followed(self) -> dict[str, nn.Module]:
        """What the teacher is a moving average of."""
        return {"encoder": self.encoder, "instance_head": self.instance_head, "projection": self.projection}

    def forward(
        self, student: Tensor, teacher: Tensor, *, progress: float = 0.0, generator=None, hands=None
    ) -> Outcome:
        """The loss on a batch of two views; ``hands`` fixes the visible patches ([b k] a mask) instead of drawing."""
        hands = hands or self.deal(len(student), generator, student.device)
        with aside(self.teacher, teacher):
            target = self.project(self.teacher, whole(teacher, self.patches))
        guesses = self.predict(student, hands)
        loss = byol_loss(guesses, target) if self.loss == "byol" else info_nce(guesses, target, self.temperature)
        return Outcome(loss, {})

    def after_step(self, progress: float) -> None:
        """The teacher follows; the next step sees it updated (as in the authors' program)."""
        self.teacher.follow(momentum(progress, self.momentum), **self.followed())

    def deal(self, b: int, generator, device) -> tuple[Tensor, ...]:
        """Draw what each mask leaves visible: one [b k] for each, no patch in two of them."""
        return deal(b, self.patches, self.hands, generator, device)

    def predict(self, images: Tensor, hands: tuple[Tensor, ...]) -> Tensor:
        """The student's guesses [v b d] of the teacher's output, all masks in one batch."""
        guesses = self.prediction(self.project(self, View(images, torch.cat(hands))))  # the views share the images
        return guesses.unflatten(0, (len(hands), len(images)))

    def project(self, of: ExtreMA | Teacher, view: View) -> Tensor:
        """Projected instance representation [b d] of a view by the student (this task) or the teacher."""
        return of.projection(self.represent(of, view))

    def represent(self, of: ExtreMA | Teacher, view: View) -> Tensor:
        """Instance representation [b d]: what the linear probe and kNN of the paper use."""
        if self.class_token == "cait":
            return represent(of.encoder, of.instance_head, encode(of.encoder, view, norm=False))
        tokens = encode(of.encoder, view)
        return tokens[:, 0] if self.class_token == "vit" else tokens[:, self.prefix :].mean(1)

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """Agreement with the teacher from one mask, beside that with the teacher's outputs for other images."""
        hands = self.deal(len(images), generator, images.device)[:1]
        target = self.project(self.teacher, whole(images, self.patches))
        return agreement_measure(self.predict(images, hands)[0], target)

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """The views and masks of a step; and the images that teacher and student hold to be nearest to some."""
        student, teacher = self.augmented(images[:ROWS], generator)
        hands = self.deal(len(images), generator, images.device)
        views = {"image": (images[:ROWS], None), "teacher": (teacher, None)}
        views |= {f"student, mask {i}": (student, hand[:ROWS]) for i, hand in enumerate(hands, start=1)}
        seen = f"{hands[0].shape[1] / self.patches:.0%}"
        caption = f"What a training step sees. Each mask shows the student {seen} of the patches, none of them twice."
        everything = whole(images, self.patches)
        masked = mask_patches(whole(images[:ROWS], self.patches), hands[0][:ROWS])
        found = {
            "teacher": (self.represent(self.teacher, everything),) * 2,
            "student": (self.represent(self, masked), self.represent(self, everything)),
        }
        told = (
            f"The nearest of {len(images) - 1} other images by the cosine of their instance representations. "
            f"The teacher sees all of the image, the student {seen} of its patches."
        )
        return [views_sheet(self, views, caption), neighbours_sheet(images, found, told)]
