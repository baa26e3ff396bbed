"""Prediction of pixels: of withheld patches (MAE, SimMIM), or of the original of a degraded image (Beyond Masking)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from patchloom.errors import PatchloomError, listing
from patchloom.nets.compiling import compilable
from patchloom.nets.decoders import CrossDecoder, MAEDecoder, PatchHead
from patchloom.nets.geometry import Geometry
from patchloom.options.tasks import BandTarget, TargetNorm
from patchloom.patches.pictures import fill_holes
from patchloom.patches.tokens import (
    gather_tokens,
    in_grid_order,
    normalize_channels,
    patch_channel_statistics,
    patch_statistics,
    patchify,
    scatter_tokens,
    unpatchify,
)
from patchloom.questions.question import Encoded, Measure, Outcome, Question, Sheet
from patchloom.system.device import rows_at_once
from patchloom.withhold.canvas import central_corner, centre_crop, crop_at, enlarged_squares, resize_area
from patchloom.withhold.degradation import Degradation
from patchloom.withhold.encoder_input import EncoderInput

# Base class of questions about withheld content, for pixels and features.


class PatchQuestion(Question):
    """Question that is answered patch by patch, for masked, blank or degraded patches.

    Args:
        geometry: geometry of the encoder.
        decoder: decoder of the answers; its ``visible_asked`` is the number of visible patches that it predicts
            besides the masked ones: the blank ones, or all of them if the image is degraded.
        blank: number of visible patches that are blank, in every image.

    Raises:
        PatchloomError: in use, if the input has another number of blank patches, or nothing to predict.
    """

    def __init__(self, geometry: Geometry, decoder: MAEDecoder | CrossDecoder | PatchHead, blank: int = 0):
        super().__init__(geometry)
        self.decoder, self.blank = decoder, blank

    def answer(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Return the predicted patches [b j] and the predictions [b j f] for them, in float32."""
        asked, answers = self.predict(encoded)
        return asked, answers.float()

    def predict(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Return the same in the precision of the decoder, for the loss, which converts them on the fly."""
        given, tokens, prefix = encoded.given, encoded.tokens, self.geometry.prefix
        visible, masked = given.visible, given.masked
        if masked is None:
            raise PatchloomError(
                f"{type(self).__name__} needs the indices of masked patches: begin with all_patches in the task's given"
            )
        if (given.blank is None) != (self.blank == 0):  # without reading the tensor, which would wait for a GPU
            raise self._wrong_blank("none" if given.blank is None else "some")
        k = visible.shape[1]
        visible_asked = k if self.decoder.visible_asked is None else self.decoder.visible_asked
        if visible_asked + masked.shape[1] == 0:
            raise PatchloomError(
                f"the decoder of {type(self).__name__} predicts nothing, because no patch is masked and its "
                f"visible_asked is 0: build it with visible_asked={self.blank or k}"
            )
        if 0 < visible_asked < k:  # the decoder predicts the last ones
            order = _content_first(given)
            visible = gather_tokens(visible, order)
            tokens = torch.cat([tokens[:, :prefix], gather_tokens(tokens, order + prefix)], dim=1)
        answers = self.decoder(tokens, visible, masked)
        return torch.cat([visible[:, k - visible_asked :], masked], dim=1), answers

    def check_blank(self, given: EncoderInput) -> None:
        """Raise an error if any image has another number of blank patches than ``blank``; waits for a GPU."""
        counts = (~given.has_content()).sum(1)
        least, most = int(counts.min()), int(counts.max())
        if least != self.blank or most != self.blank:
            raise self._wrong_blank(f"{least}" if least == most else f"{least} to {most}")

    def _wrong_blank(self, found: str) -> PatchloomError:
        return PatchloomError(
            f"{type(self).__name__} was built with blank={self.blank}, but {found} of an image's patches are blank: "
            "blank the same number k of patches in every image, and build the question with blank=k and its decoder "
            "with visible_asked=k"
        )

    def with_content(self, given: EncoderInput) -> Tensor:
        """Return the patches [b j] whose content the encoder saw, equally many per image."""
        self.check_blank(given)
        if not self.blank:
            return given.visible
        return gather_tokens(given.visible, _content_first(given))[:, : given.visible.shape[1] - self.blank]

    def withheld(self, given: EncoderInput, removed: str = "masked") -> str:
        """Return the fractions of patches that did not enter (``removed``) and of blank ones, for a caption."""
        n = self.geometry.n
        fractions = {removed: 1 - given.visible.shape[1] / n, "replaced by a mask token": self.blank / n}
        found = [f"{fraction:.0%} of the patches are {how}" for how, fraction in fractions.items() if fraction]
        return listing(found, "and") if found else f"no patches are {removed}"


def _content_first(given: EncoderInput) -> Tensor:
    """Sort the visible patches [b k]: indices of those with content, then of the blank ones."""
    return given.has_content().byte().argsort(dim=1, descending=True, stable=True)


Statistics = tuple[Tensor, Tensor]


class Pixels(PatchQuestion):
    """Prediction of the pixels of masked or blank patches (MAE section 3, SimMIM section 3.3).

    Args:
        geometry: geometry of the encoder.
        decoder: decoder with c·p·p outputs per patch.
        normalized: target pixels normalised within each patch.
        absolute: mean absolute error as the loss (SimMIM), not mean squared error (MAE).
        blank: number of visible patches that are blank, in every image.
    """

    def __init__(
        self,
        geometry: Geometry,
        decoder: MAEDecoder | CrossDecoder | PatchHead,
        normalized: bool = True,
        absolute: bool = False,
        blank: int = 0,
    ):
        super().__init__(geometry, decoder, blank)
        self.normalized, self.absolute = normalized, absolute

    def truth(self, encoded: Encoded) -> Tensor:
        """Return the target images [b c h w], in the units of the loss."""
        return encoded.images

    def statistics(self, patches: Tensor) -> Statistics:
        """Return mean and deviation that normalise patches [b j f], broadcastable to them."""
        return patch_statistics(patches)

    def targets(self, images: Tensor, asked: Tensor) -> Tensor:
        """Return the targets [b j f] of the patches ``asked`` [b j] of target images [b c h w]."""
        return self.normalize(patchify(images, self.geometry.p, asked))

    def normalize(self, patches: Tensor) -> Tensor:
        """Normalise patches [b j f] of the target images, if the question does."""
        if not self.normalized:
            return patches
        mean, deviation = self.statistics(patches)
        return (patches - mean) / deviation

    def errors(self, encoded: Encoded, asked: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """Return the errors [b] of predictions [b j f]: "loss", and its parts if it has several."""
        return {"loss": self._errors_of_images(answers, self.truth(encoded), asked)}

    @compilable
    def _errors_of_images(self, answers: Tensor, images: Tensor, asked: Tensor) -> Tensor:
        apart = answers.float() - self.targets(images, asked)
        return (apart.abs() if self.absolute else apart.square()).mean((1, 2))

    @compilable
    def _mean_error(self, answers: Tensor, images: Tensor, asked: Tensor) -> Tensor:
        loss = F.l1_loss if self.absolute else F.mse_loss  # one fused pass keeps no differences for backward
        return loss(answers.float(), self.targets(images, asked))

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the mean error over the predicted patches."""
        asked, answers = self.predict(encoded)
        return Outcome(self._mean_error(answers, self.truth(encoded), asked), {})

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the error, beside those of flat patches and of a blurred copy.

        The network does not know the mean of a masked patch, so the baseline to beat is the blurred copy. With
        normalised targets it is also the prediction zero, which needs no image.
        """
        found = self._errors_of(encoded, self.baselines(encoded))
        name = "absolute error" if self.absolute else "reconstruction error"
        to_beat = ("blurred copy", "flat patches") if self.normalized else "blurred copy"
        return Measure(name, found.pop(""), found, to_beat=to_beat, higher_is_better=False, unit="")

    def baselines(self, encoded: Encoded) -> dict[str, Tensor]:
        """Return pictures [b c h w] that need no learning, by name.

        ``mean colour`` (``patch mean`` for recordings, and with two or more than three channels): every patch has its
        true mean in each channel. ``blurred copy``: the
        holes are filled by a Gaussian blur of the visible patches, as wide as a patch. ``flat patches``, for normalised
        targets: every patch has one value, the mean of all its numbers, which becomes the prediction zero; with one
        channel it equals the mean colour.
        """
        g, found = self.geometry, dict[str, Tensor]()
        if not self.normalized or g.channels > 1:
            mean = patch_channel_statistics(patchify(encoded.images, g.p), g.channels)[0]
            flat = encoded.modality.flat if g.channels in (1, 3) else "patch mean"  # other channels are no colours
            found[flat] = unpatchify(mean, g.p, g.grid)
        found["blurred copy"] = fill_holes(encoded.images, g.p, self.with_content(encoded.given))
        if self.normalized:
            found["flat patches"] = self.flat(encoded)
        return found

    def flat(self, encoded: Encoded) -> Tensor:
        """Return the target images [b c h w] with every patch replaced by its mean."""
        g, patches = self.geometry, patchify(self.truth(encoded), self.geometry.p)
        return unpatchify(self.statistics(patches)[0].expand_as(patches), g.p, g.grid)

    def _errors_of(self, encoded: Encoded, guesses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return errors [b] of the network, under "", and of pictures [b c h w] as predictions."""
        asked, answers = self.answer(encoded)
        truth = patchify(self.truth(encoded), self.geometry.p, asked)
        found = {"": answers} | {name: self.as_answer(one, truth, asked) for name, one in guesses.items()}
        return {name: self.errors(encoded, asked, one)["loss"] for name, one in found.items()}

    def as_answer(self, guess: Tensor, truth: Tensor, asked: Tensor) -> Tensor:
        """Convert a picture [b c h w] into the predictions [b j f] that a network would have to make.

        With normalised targets a patch is divided by at least the deviation of the ``truth`` [b j f], so that a smooth
        picture is not amplified to noise.
        """
        patches = patchify(guess, self.geometry.p, asked)
        if not self.normalized:
            return patches
        (mean, deviation), (_, scale) = self.statistics(patches), self.statistics(truth)
        return (patches - mean) / torch.maximum(deviation, scale)

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw original | input | recovered."""
        self.check_blank(encoded.given)
        asked, answers = self.answer(encoded)
        truth = patchify(self.truth(encoded), self.geometry.p, asked)
        columns = {"original": encoded.images, "given": self.given_picture(encoded.given)}
        if self.normalized:
            own, guessed = self.statistics(truth), self.guessed_statistics(encoded, asked)
            recovered = columns["recovered, own statistics"] = self.picture(encoded, asked, answers * own[1] + own[0])
            columns["guessed statistics"] = self.picture(encoded, asked, answers * guessed[1] + guessed[0])
        else:
            recovered = columns["recovered"] = self.picture(encoded, asked, answers)
        caption = self.caption(encoded, recovered, self.errors(encoded, asked, answers)["loss"].mean())
        if self.normalized:
            caption += (
                f" {encoded.modality.values.capitalize()} are predicted normalised within each patch. Own "
                "statistics: each patch's mean and deviation "
                "come from the original. Guessed: from what was given, so nothing withheld is shown."
            )
        return [
            Sheet(
                "recovered",
                caption,
                columns,
                page_title="Withheld patches and their reconstruction",
                page_text="Hatched patches were hidden from the encoder; the columns beside them show the model's "
                "prediction. Edges and objects that continue across the holes are a good sign; a hole filled with the "
                "texture around it is not.",
            )
        ]

    def picture(self, encoded: Encoded, asked: Tensor, pixels: Tensor) -> Tensor:
        """Return the normalised picture [b c h w] with ``pixels`` [b j f] at the patches ``asked``."""
        g = self.geometry
        return unpatchify(scatter_tokens(pixels, asked, patchify(encoded.images, g.p)), g.p, g.grid)

    def guessed_statistics(self, encoded: Encoded, asked: Tensor) -> Statistics:
        """Guess mean and deviation [b j 1] of the predicted patches by blurring those of the visible ones."""
        g, seen = self.geometry, self.with_content(encoded.given)
        patches = patchify(encoded.images, g.p)
        painted = (unpatchify(one.expand_as(patches), g.p, g.grid) for one in patch_statistics(patches))
        mean, deviation = (patchify(fill_holes(one, g.p, seen), g.p, asked) for one in painted)
        return mean.mean(-1, keepdim=True), deviation.mean(-1, keepdim=True)

    def caption(self, encoded: Encoded, recovered: Tensor, error: Tensor) -> str:
        """Return the caption; ``recovered`` [b c h w] are the predictions, and ``error`` is their mean loss."""
        return f"{self.withheld(encoded.given)}; the other patches are the original's."


class Restoration(Pixels):
    """Restoration of a degraded image (Beyond Masking section 3), in [0, 1], normalised per channel of a patch.

    Args:
        geometry: geometry of the encoder.
        decoder: decoder with c·p·p outputs per patch.
        degradation: degradation of the image.
        normalized: normalised target pixels.
        target_norm: statistics of the normalisation: those of each channel of a patch, of pixels in [0, 1], as in the
            authors' program (channel); or of the whole patch, of normalised images, as in MAE and the paper's text
            (patch).
        blank: number of visible patches that are blank, in every image.
        band_weight: fraction of the loss on the band around the input, with masks and zoom_in on a canvas; the rest is
            on the masked patches (m + a). None: one loss on all predicted patches.
        band_target: target of the band: the canvas reduced to the input's size, normalised and enlarged again, as in
            the authors' program (``grown``), or the canvas itself, as in appendix A.2 (``original``).
    """

    pictured = 100  # the paper averages the error over 100 images

    def __init__(
        self,
        geometry: Geometry,
        decoder: MAEDecoder,
        degradation: Degradation,
        normalized: bool = True,
        blank: int = 0,
        band_weight: float | None = None,
        target_norm: TargetNorm = "channel",
        band_target: BandTarget = "grown",
    ):
        super().__init__(geometry, decoder, normalized, blank=blank)
        self.degradation, self.band_weight, self.band_target = degradation, band_weight, band_target
        self.whole_patch = normalized and target_norm == "patch"

    def truth(self, encoded: Encoded) -> Tensor:
        """Return the clean target images [b c h w], in the units of the loss."""
        return self.in_units(encoded, self.degradation.frame(encoded.images))

    def in_units(self, encoded: Encoded, images: Tensor) -> Tensor:
        """Convert normalised images [b c h w] to the units of the loss; unchanged for whole-patch statistics."""
        return images if self.whole_patch else encoded.plain(images)

    def statistics(self, patches: Tensor) -> Statistics:
        """Return the statistics of each channel of each patch, or of each whole patch."""
        return (
            patch_statistics(patches) if self.whole_patch else patch_channel_statistics(patches, self.geometry.channels)
        )

    def normalize(self, patches: Tensor) -> Tensor:
        """Normalise patches [b j f] of the target images, if the question does."""
        if self.whole_patch or not self.normalized:
            return super().normalize(patches)
        return normalize_channels(patches, self.geometry.channels)

    def errors(self, encoded: Encoded, asked: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """Return the squared error [b], or those of masking and zooming in, and their weighted sum."""
        if self.band_weight is None:
            return super().errors(encoded, asked, answers)
        images, given, share = encoded.images, encoded.given, self.band_weight

        def canvas_loss(
            answers: Tensor, images: Tensor, asked: Tensor, masked: Tensor, *corner: Tensor
        ) -> list[Tensor]:
            part = replace(given, masked=masked, corner=next(iter(corner), None))
            mask, band = self.canvas_errors(replace(encoded, images=images, given=part), in_grid_order(answers, asked))
            return [(1 - share) * mask + share * band, mask, band]

        rest = images, asked, given.masked, *(() if given.corner is None else (given.corner,))
        if (at_once := rows_at_once(images)) < len(images):
            found = _InParts.apply(canvas_loss, at_once, answers, *rest)
        else:
            found = canvas_loss(answers, *rest)
        return dict(zip(("loss", "mask_loss", "band_loss"), found, strict=True))

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the mean error over the predicted patches, or the weighted sum of two errors, which are metrics."""
        errors = self.errors(encoded, *self.answer(encoded))
        loss = errors.pop("loss").mean()
        return Outcome(loss, {name: values.detach().mean() for name, values in errors.items()})

    def canvas_errors(self, encoded: Encoded, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the errors [b] of masking and of zooming in (m + a), for predictions [b n f] of the whole image.

        The predictions show the whole canvas at the size of the input and are enlarged to the canvas's size. Their part
        at the input's place, by default the centre, predicts the masked patches of the input; the band around it
        predicts the rest. The band is four strips; their mean squared errors are added, as in the authors' program.
        """
        g, masked, canvas = self.geometry, encoded.given.masked, encoded.images
        whole, corner = (canvas.shape[2], canvas.shape[3]), encoded.given.corner
        picture = unpatchify(answers, g.p, g.grid)
        if corner is None:
            corner = central_corner(canvas[:1], g.size)
            top, left = ((along - seen) // 2 for along, seen in zip(whole, g.size, strict=True))
            window = (top, top + g.size[0]), (left, left + g.size[1])
            inside, truth = resize_area(picture, whole, window), centre_crop(canvas, g.size)
        else:
            inside, truth = (crop_at(one, g.size, corner) for one in (resize_area(picture, whole), canvas))
        apart = patchify(inside, g.p, masked) - self.normalize(patchify(self.in_units(encoded, truth), g.p, masked))
        return apart.square().mean((1, 2)), self._band_error(encoded, picture, corner)

    def _band_error(self, encoded: Encoded, picture: Tensor, corner: Tensor) -> Tensor:
        """Return the error [b] on the band of the predicted ``picture`` [b c h w], before it is enlarged."""
        canvas, p, grid = encoded.images, self.geometry.p, self.geometry.grid
        frame, whole = patchify(self.truth(encoded), p), (canvas.shape[2], canvas.shape[3])
        # weights of rows [b H] and columns [b W]: 1 / area in the strips around the input's part, and 0 in its own rows
        # and columns; the strips above and below it are as wide as the canvas, those beside it as high as the part
        shares, size = list[Tensor](), self.geometry.size
        for axis, along in enumerate((whole[1], size[0])):  # the other side of a strip
            place, start = torch.arange(whole[axis], device=corner.device), corner[:, axis, None]
            end = start + size[axis]
            before, after = (place < start) / (start * along), (place >= end) / ((whole[axis] - end) * along)
            shares.append(torch.where(place < start, before, torch.where(place >= end, after, 0)))
        rows, columns = shares
        if self.band_target == "grown":
            beside = (rows == 0).to(rows.dtype), columns
            apart = picture - unpatchify(self.normalize(frame), p, grid)
            return enlarged_squares(apart, (rows, torch.ones_like(columns)), beside) / canvas.shape[1]
        target = self.in_units(encoded, canvas)
        if self.normalized:
            # the band has no whole patches at its own size: use the statistics of the patches that predict it
            every = (unpatchify(one.expand_as(frame), p, grid) for one in self.statistics(frame))
            mean, deviation = (resize_area(one, whole) for one in every)
            target = (target - mean) / deviation
        weights = torch.where(rows[:, None, :, None] > 0, rows[:, None, :, None], columns[:, None, None])
        return ((resize_area(picture, whole) - target).square() * weights).sum((1, 2, 3)) / canvas.shape[1]

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the error, beside those of flat patches and of the input, put at its place with holes blurred."""
        found = self._errors_of(encoded, self.baselines(encoded))
        value = found.pop("")
        return Measure(encoded.modality.error, value, found, to_beat=tuple(found), higher_is_better=False, unit="")

    def baselines(self, encoded: Encoded) -> dict[str, Tensor]:
        """Return pictures [b c h w] that need no learning, by name, in the units of the loss."""
        return {"flat patches": self.flat(encoded), "what was given": self.filled_in_frame(encoded)}

    def filled_in_frame(self, encoded: Encoded) -> Tensor:
        """Return the input [b c h w], holes blurred, at its place in the target images, in the units of the loss."""
        seen, images = self.with_content(encoded.given), encoded.given.images
        filled = images if seen.shape[1] == self.geometry.n else fill_holes(images, self.geometry.p, seen)
        given = encoded.given
        return self.degradation.in_frame(self.in_units(encoded, filled), given.side_share, given.corner)

    def picture(self, encoded: Encoded, asked: Tensor, pixels: Tensor) -> Tensor:
        """Return the normalised picture [b c h w] with predicted ``pixels`` [b j f] at the patches ``asked``."""
        g = self.geometry
        patches = scatter_tokens(pixels, asked, patchify(self.truth(encoded), g.p))
        whole = unpatchify(patches, g.p, g.grid)
        return whole if self.whole_patch else encoded.normalized(whole)

    def guessed_statistics(self, encoded: Encoded, asked: Tensor) -> Statistics:
        """Return the statistics of the input."""
        return self.statistics(patchify(self.filled_in_frame(encoded), self.geometry.p, asked))

    def caption(self, encoded: Encoded, recovered: Tensor, error: Tensor) -> str:
        """Return the caption, with the mean errors over all images."""
        off = (encoded.plain(recovered) - self.degradation.frame(encoded.plain(encoded.images))).square().mean()
        withheld = self.withheld(encoded.given, "masked" if self.degradation.padded else "not given")
        modality = encoded.modality
        return (
            f"Degradation: {self.degradation.title}; {withheld}. Mean over "
            f"{len(encoded.images)} {modality.noun}: loss {error:.3f}, mean squared error {off:.4f} in "
            f"{modality.values} from 0 to 1, with each patch's own statistics where {modality.values} are normalised."
        )


class _InParts(torch.autograd.Function):
    """Losses of images, a few images at a time, each part with its gradient right after it.

    The tensors of a part are freed with it, so that none of the canvases waits for the backward pass of the network.

    Args:
        losses: function of answers and further tensors, of some images each, that returns several losses [b]; only the
            first one has a gradient.
        at_once: number of images of a part.
        answers: [b n f].
        others: further tensors [b ...], which get no gradient.

    Returns:
        The losses [b].
    """

    @staticmethod
    def forward(
        ctx: Any, losses: Callable[..., list[Tensor]], at_once: int, answers: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        learns = answers.requires_grad
        found, slopes = list[list[Tensor]](), list[Tensor]()
        for own, *rest in zip(*(one.split(at_once) for one in (answers, *others)), strict=True):
            with torch.set_grad_enabled(learns):
                answer = own.detach().requires_grad_(learns)
                part = losses(answer, *rest)
                if learns:
                    slopes += torch.autograd.grad(part[0].sum(), answer)
            found.append([one.detach() for one in part])
        losses_of_all = tuple(map(torch.cat, zip(*found, strict=True)))
        ctx.mark_non_differentiable(*losses_of_all[1:])
        ctx.save_for_backward(*([torch.cat(slopes)] if learns else []))
        return losses_of_all

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return None, None, own * slopes[0][:, None, None], *[None] * (len(ctx.needs_input_grad) - 3)
