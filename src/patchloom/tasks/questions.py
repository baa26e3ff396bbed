"""The three questions that a mixture can ask: pixels, positions, agreement with a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from patchloom.nets.decode import Decoder
from patchloom.nets.encode import encode
from patchloom.nets.heads import mlp
from patchloom.nets.teacher import Teacher, aside
from patchloom.objectives.agreement import byol_loss
from patchloom.objectives.pixels import paint_patches, spread
from patchloom.objectives.positions import position_cross_entropy, weighted_mean
from patchloom.objectives.restoration import answer_of, restoration_targets
from patchloom.tasks.degradations import Degrader
from patchloom.tasks.mae import pixel_decoder
from patchloom.tasks.measure import Measure
from patchloom.tasks.positions_drawn import mark_wrong, position_measure
from patchloom.tasks.siamese import ROWS, agreement_measure, head_sizes, hidden, neighbours_sheet
from patchloom.tasks.task import WITHHELD, Sheet, Size, Task
from patchloom.views.positions import Placed, smoothed_positions
from patchloom.views.tokens import patch_channel_statistics, patchify, put, take, unpatchify
from patchloom.views.view import View, whole


@dataclass(frozen=True)
class Seen:
    """A batch as a mixture sees it.

    Attributes:
        images: [b c h w] clean and normalised; what is asked for.
        others: [b c h w] what a teacher sees: the same images, or a second view of them.
        view: what the encoder knows.
        share: [b] of the side that zoom_in shows, or None.
        tokens: [b prefix+k d] from the encoder.
        masked: [b n-k] patches that did not enter.
        mean, std: [c 1 1] by which the images are normalised.
    """

    images: Tensor
    others: Tensor
    view: View
    share: Tensor | None
    tokens: Tensor
    masked: Tensor
    mean: Tensor
    std: Tensor

    def plain(self, images: Tensor) -> Tensor:
        """Normalised images [b c h w] in [0, 1]."""
        return images * self.std + self.mean

    def shows(self) -> Tensor:
        """[b k] True where a visible patch kept its content."""
        view = self.view
        return torch.ones_like(view.visible, dtype=torch.bool) if view.blank is None else ~view.blank


class Question(Protocol):
    """What is asked of a batch. It is a module; parts that only it needs are its own."""

    def loss(self, seen: Seen, progress: float) -> Tensor: ...
    def measure(self, seen: Seen) -> Measure: ...
    def draw(self, seen: Seen) -> list[Sheet]: ...


class Pixels(nn.Module):
    """The clean pixels of what was masked or blanked; of every patch where the picture was degraded.

    Args:
        task: of whose patches.
        degrader: of the picture.
        counts: `Mixture.counts`, patches that are visible (mask) or lose their content (blank).
        sizes: width, depth and heads of the decoder.
    """

    def __init__(self, task: Task, degrader: Degrader, counts: Mapping[str, int], sizes: tuple[Size, Size, Size]):
        super().__init__()
        task.check_normalizable(each_channel=True)
        self.p, self.grid, self.channels, self.prefix = task.p, task.grid, task.channels, task.prefix
        self.degrader = degrader
        self.blank = counts.get("blank", 0)
        visible = counts.get("mask", task.patches)
        asked = self.blank if degrader.kind in ("masked", "none") else visible
        self.decoder = pixel_decoder(task, *sizes, refills="mask" in counts, visible_asked=asked)

    def shown_first(self, seen: Seen) -> Tensor:
        """[b k] places among the visible patches: those whose content was seen, then the blank ones."""
        return seen.shows().byte().argsort(dim=1, descending=True, stable=True)

    def answer(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """Which patches are asked [b j], and their predicted pixels [b j f], normalised in each of their channels."""
        tokens, visible, asked = seen.tokens, seen.view.visible, self.decoder.visible_asked
        if 0 < asked < visible.shape[1]:
            order = self.shown_first(seen)
            visible = take(visible, order)
            tokens = torch.cat([tokens[:, : self.prefix], take(tokens[:, self.prefix :], order)], dim=1)
        answers = self.decoder(tokens, visible, seen.masked).float()
        return torch.cat([visible[:, visible.shape[1] - asked :], seen.masked], dim=1), answers

    def errors(self, answer: Tensor, asked: Tensor, seen: Seen) -> Tensor:
        """Squared error [b j] of an answer [b j f] for each of the patches ``asked`` [b j]."""
        return (answer - restoration_targets(seen.plain(seen.images), self.p, asked, True)).square().mean(-1)

    def loss(self, seen: Seen, progress: float) -> Tensor:
        """Mean squared error of the patches asked."""
        asked, answer = self.answer(seen)
        return self.errors(answer, asked, seen).mean()

    def measure(self, seen: Seen) -> Measure:
        """The error beside those of patches of one colour and of what was given, holes blurred over."""
        asked, answer = self.answer(seen)
        given = take(answer_of(self.given(seen), seen.plain(seen.images), self.p, True), asked)
        answers = {"": answer, "flat patches": torch.zeros_like(given), "what was given": given}
        found = {name: self.errors(one, asked, seen).mean(1) for name, one in answers.items()}
        return Measure("pixel error", found.pop(""), found, tuple(found), higher_is_better=False, form=".3f")

    def given(self, seen: Seen) -> Tensor:
        """What was seen [b c h w] in [0, 1] at its place in the picture, with the holes blurred over."""
        images = seen.view.images
        if seen.masked.shape[1] or seen.view.blank is not None:
            images = spread(images, self.p, self.shown(seen))
        return self.degrader.placed(seen.plain(images), seen.share)

    def shown(self, seen: Seen) -> Tensor:
        """[b j] the patches whose content was seen; as many for every image."""
        return take(seen.view.visible, self.shown_first(seen))[:, : seen.view.visible.shape[1] - self.blank]

    def draw(self, seen: Seen) -> list[Sheet]:
        """Original | given | recovered."""
        truth, p = seen.plain(seen.images), self.p
        columns = {"original": seen.images}
        columns["given"] = paint_patches(
            seen.view.images, p, hidden(self.shown(seen), self.grid[0] * self.grid[1]), WITHHELD
        )
        asked, predicted = self.answer(seen)
        for heading, source in {"recovered, own statistics": truth, "guessed statistics": self.given(seen)}.items():
            own, deviation = patch_channel_statistics(patchify(source, p, asked), self.channels)
            answer = put(predicted * deviation + own, asked, patchify(truth, p))
            columns[heading] = (unpatchify(answer, p, self.grid) - seen.mean) / seen.std
        caption = (
            "Pixels are predicted normalised in each patch. Own statistics: each patch's mean and deviation come from "
            "the original. Guessed: from what was given, so nothing withheld is shown."
        )
        return [Sheet("recovered", caption, {name: images[:ROWS] for name, images in columns.items()})]


class Positions(nn.Module):
    """Where each visible patch without a position was, with labels softened as DropPos does."""

    def __init__(self, task: Task, sigma: float, sizes: tuple[Size, Size, Size]):
        super().__init__()
        self.p, self.grid, self.sigma = task.p, task.grid, sigma
        sizes = task.decoder_sizes(*sizes, (512, 2, 16), depth_option="position_depth")
        self.decoder = Decoder(task.encoder.embed_dim, task.patches, *sizes, task.prefix)

    def loss(self, seen: Seen, progress: float) -> Tensor:
        """Cross-entropy over the patches whose position was dropped."""
        labels = smoothed_positions(self.grid, self.sigma * (1 - progress), device=seen.tokens.device)
        entropy = position_cross_entropy(self.decoder(seen.tokens), labels[seen.view.visible])
        return weighted_mean(entropy, seen.view.dropped.float())

    def measure(self, seen: Seen) -> Measure:
        """Share of the dropped positions that are found, beside the exact chance level."""
        return position_measure(self.place(seen))

    def place(self, seen: Seen) -> Placed:
        """Where the visible patches are placed."""
        return Placed(seen.view.visible, seen.view.dropped, self.decoder(seen.tokens))

    def draw(self, seen: Seen) -> list[Sheet]:
        """Which patches are placed rightly."""
        marked = mark_wrong(seen.view.images, self.p, seen.view.visible, self.place(seen).places())
        caption = "Black: masked. White: placed wrongly. The rest: placed rightly, or told."
        columns = {"given": seen.view.images, "placed": marked}
        return [Sheet("positions", caption, {name: images[:ROWS] for name, images in columns.items()})]


class Agreement(nn.Module):
    """The output of a momentum teacher that sees everything, from the mean of the tokens that kept their content."""

    def __init__(self, task: Task, width: Size, out: Size):
        super().__init__()
        self.n, self.prefix = task.patches, task.prefix
        d = task.encoder.embed_dim
        hidden_width, out = head_sizes(task, width, out)
        self.projection = mlp((d, hidden_width, hidden_width, out), "layer")
        self.prediction = mlp((out, hidden_width, out), "layer")
        self.teacher = Teacher(encoder=task.encoder, projection=self.projection)

    def student(self, seen: Seen) -> Tensor:
        """Mean [b d] of the tokens of patches that kept their content."""
        counted = seen.shows()[..., None]
        return (seen.tokens[:, self.prefix :] * counted).sum(1) / counted.sum(1)

    def describe(self, encoder: nn.Module, images: Tensor) -> Tensor:
        """Mean of the patch tokens [b d] of whole images."""
        return encode(encoder, whole(images, self.n))[:, self.prefix :].mean(1)

    def pair(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """What the student guesses and what the teacher says, [b d] each."""
        with aside(self.teacher, seen.others):
            target = self.teacher.projection(self.describe(self.teacher.encoder, seen.others))
        return self.prediction(self.projection(self.student(seen))), target

    def loss(self, seen: Seen, progress: float) -> Tensor:
        """Squared distance of the normalised outputs."""
        return byol_loss(*self.pair(seen))

    def measure(self, seen: Seen) -> Measure:
        """Agreement beside that with the teacher's outputs for other images."""
        return agreement_measure(*self.pair(seen))

    def draw(self, seen: Seen) -> list[Sheet]:
        """Nearest neighbours by the teacher."""
        features = self.describe(self.teacher.encoder, seen.images)
        caption = f"The nearest of {len(features) - 1} other images by the cosine of the teacher's mean patch tokens."
        return [neighbours_sheet(seen.images, {"teacher": (features, features)}, caption)]
