"""Asking for pixels: of the patches that were withheld (MAE, SimMIM), or of a degraded picture (Beyond Masking)."""

from __future__ import annotations

from functools import reduce
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.nets.decoders import MAEDecoder, PatchHead
from patchloom.nets.geometry import Geometry
from patchloom.patches.pictures import fill_holes
from patchloom.patches.tokens import (
    gather_tokens,
    in_grid_order,
    patch_channel_statistics,
    patch_statistics,
    patchify,
    scatter_tokens,
    unpatchify,
)
from patchloom.questions.question import Encoded, Measure, Outcome, Question, Sheet
from patchloom.withhold.canvas import central_corner, crop_at
from patchloom.withhold.degradation import Degradation
from patchloom.withhold.encoder_input import EncoderInput

# Asking something of every patch whose content was withheld: the part that pixels and features share.


class PatchQuestion(Question):
    """A question that is answered patch by patch: for the masked, the blank, and the degraded ones.

    Args:
        geometry: of the encoder.
        decoder: gives the answers; its ``visible_asked`` says how many visible patches answer beside the masked ones:
            the blank ones, or all of them where the picture was degraded.
        blank: visible patches that are blank, in every image.
    """

    def __init__(self, geometry: Geometry, decoder: MAEDecoder | PatchHead, blank: int = 0):
        super().__init__(geometry)
        self.decoder, self.blank = decoder, blank

    def answer(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Which patches are asked [b j], and the answers [b j f] for them, in float32."""
        given, tokens, prefix = encoded.given, encoded.tokens, self.geometry.prefix
        visible, masked = given.visible, given.masked
        if masked is None:
            raise ValueError("what is asked of patches needs an input that says which of them are masked")
        k = visible.shape[1]
        visible_asked = k if self.decoder.visible_asked is None else self.decoder.visible_asked
        if 0 < visible_asked < k:  # the decoder answers for the last ones
            order = _content_first(given)
            visible = gather_tokens(visible, order)
            tokens = torch.cat([tokens[:, :prefix], gather_tokens(tokens[:, prefix:], order)], dim=1)
        answers = self.decoder(tokens, visible, masked).float()
        return torch.cat([visible[:, k - visible_asked :], masked], dim=1), answers

    def with_content(self, given: EncoderInput) -> Tensor:
        """[b j] the patches whose content the encoder saw; as many for every image."""
        if not self.blank:
            return given.visible
        return gather_tokens(given.visible, _content_first(given))[:, : given.visible.shape[1] - self.blank]


def _content_first(given: EncoderInput) -> Tensor:
    """[b k] places among the visible patches: those with content, then the blank ones."""
    return given.has_content().byte().argsort(dim=1, descending=True, stable=True)


Statistics = tuple[Tensor, Tensor]
TargetNorm = Literal["channel", "patch"]
BandTarget = Literal["grown", "original"]


class Pixels(PatchQuestion):
    """The pixels of the patches that were masked or blank (MAE section 3, SimMIM section 3.3).

    Args:
        geometry: of the encoder.
        decoder: gives c·p·p numbers a patch.
        normalized: ask for pixels normalised within each patch instead of plain ones.
        absolute: the mean absolute error is the loss (SimMIM), not the mean squared one (MAE).
        blank: visible patches that are blank, in every image.
    """

    def __init__(
        self,
        geometry: Geometry,
        decoder: MAEDecoder | PatchHead,
        normalized: bool = True,
        absolute: bool = False,
        blank: int = 0,
    ):
        super().__init__(geometry, decoder, blank)
        self.normalized, self.absolute = normalized, absolute

    def truth(self, encoded: Encoded) -> Tensor:
        """The picture [b c h w] whose pixels are asked, in the units in which they are."""
        return encoded.images

    def statistics(self, patches: Tensor) -> Statistics:
        """Mean and deviation by which patches [b j f] are normalised, each broadcast to them."""
        return patch_statistics(patches)

    def targets(self, encoded: Encoded, asked: Tensor) -> Tensor:
        """What the patches ``asked`` [b j] should be answered with [b j f]."""
        return self.normalize(patchify(self.truth(encoded), self.geometry.p, asked))

    def normalize(self, patches: Tensor) -> Tensor:
        """Patches [b j f] of the truth as they are asked."""
        if not self.normalized:
            return patches
        mean, deviation = self.statistics(patches)
        return (patches - mean) / deviation

    def errors(self, encoded: Encoded, asked: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """How wrong answers [b j f] are for each image [b]: "loss", and its parts where it has any."""
        apart = answers - self.targets(encoded, asked)
        return {"loss": (apart.abs() if self.absolute else apart.square()).mean((1, 2))}

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """The mean error over the patches asked."""
        asked, answers = self.answer(encoded)
        loss = F.l1_loss if self.absolute else F.mse_loss  # in one pass: no differences are kept for the way back
        return Outcome(loss(answers, self.targets(encoded, asked)), {})

    def measure(self, encoded: Encoded) -> Measure:
        """The error beside those of patches of one colour and of a blurred copy.

        The mean of a masked patch is nothing that the network is given, so it is the blurred copy that counts; and,
        where a patch's own mean is taken off its target, the answer zero, which needs no picture at all.
        """
        found = self._errors_of(encoded, self.baselines(encoded))
        name = "absolute error" if self.absolute else "reconstruction error"
        to_beat = ("blurred copy", "flat patches") if self.normalized else "blurred copy"
        return Measure(name, found.pop(""), found, to_beat=to_beat, higher_is_better=False, form=".3f")

    def baselines(self, encoded: Encoded) -> dict[str, Tensor]:
        """Pictures [b c h w] that need no learning, by name.

        ``mean colour``, of recordings ``patch mean``: every patch is painted in its true mean colour. ``blurred copy``:
        a Gaussian blur of the visible patches, as wide as a patch, spreads into the holes. ``flat patches``, of
        normalised targets: every patch has one value, the mean of all its numbers, which makes the answer zero; with
        one channel that is its mean colour, too.
        """
        g, found = self.geometry, dict[str, Tensor]()
        if not self.normalized or g.channels > 1:
            mean = patch_channel_statistics(patchify(encoded.images, g.p), g.channels)[0]
            found[encoded.modality.flat] = unpatchify(mean, g.p, g.grid)
        found["blurred copy"] = fill_holes(encoded.images, g.p, self.with_content(encoded.given))
        if self.normalized:
            found["flat patches"] = self.flat(encoded)
        return found

    def flat(self, encoded: Encoded) -> Tensor:
        """The picture [b c h w] that is asked, every patch at the mean by which it is normalised."""
        g, patches = self.geometry, patchify(self.truth(encoded), self.geometry.p)
        return unpatchify(self.statistics(patches)[0].expand_as(patches), g.p, g.grid)

    def _errors_of(self, encoded: Encoded, guesses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Errors [b] of the network, under "", and of guessed pictures [b c h w]."""
        asked, answers = self.answer(encoded)
        truth = patchify(self.truth(encoded), self.geometry.p, asked)
        found = {"": answers} | {name: self.as_answer(one, truth, asked) for name, one in guesses.items()}
        return {name: self.errors(encoded, asked, one)["loss"] for name, one in found.items()}

    def as_answer(self, guess: Tensor, truth: Tensor, asked: Tensor) -> Tensor:
        """A guessed picture [b c h w] as the answers [b j f] that a network would have to give.

        With normalised targets a patch's deviation is held down to that of the ``truth`` [b j f], so that a smooth
        guess is not blown up to noise.
        """
        patches = patchify(guess, self.geometry.p, asked)
        if not self.normalized:
            return patches
        (mean, deviation), (_, scale) = self.statistics(patches), self.statistics(truth)
        return (patches - mean) / torch.maximum(deviation, scale)

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Original | given | recovered."""
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
        return [Sheet("recovered", caption, columns)]

    def picture(self, encoded: Encoded, asked: Tensor, pixels: Tensor) -> Tensor:
        """The picture [b c h w], normalised, with ``pixels`` [b j f] at the patches ``asked``."""
        g = self.geometry
        return unpatchify(scatter_tokens(pixels, asked, patchify(encoded.images, g.p)), g.p, g.grid)

    def guessed_statistics(self, encoded: Encoded, asked: Tensor) -> Statistics:
        """Mean and deviation [b j 1] of the patches asked, guessed from those of the visible ones by spreading them."""
        g, seen = self.geometry, self.with_content(encoded.given)
        patches = patchify(encoded.images, g.p)
        painted = (unpatchify(one.expand_as(patches), g.p, g.grid) for one in patch_statistics(patches))
        mean, deviation = (patchify(fill_holes(one, g.p, seen), g.p, asked) for one in painted)
        return mean.mean(-1, keepdim=True), deviation.mean(-1, keepdim=True)

    def caption(self, encoded: Encoded, recovered: Tensor, error: Tensor) -> str:
        """What the sheet shows; ``recovered`` [b c h w] are its answers, and ``error`` is their mean loss."""
        withheld = 1 - self.with_content(encoded.given).shape[1] / self.geometry.n
        return f"{withheld:.0%} of the patches are masked; visible patches are the original's."


class Restoration(Pixels):
    """The original of a degraded picture (Beyond Masking section 3), in [0, 1], normalised in each channel of a patch.

    Args:
        geometry: of the encoder.
        decoder: gives c·p·p numbers a patch.
        degradation: of the picture.
        normalized: ask for normalised pixels instead of plain ones.
        target_norm: with normalised pixels: by the statistics of each channel of a patch, of pixels in [0, 1], as the
            authors' program does; or by those of the whole patch, of normalised images, as in MAE (the paper's text).
        blank: visible patches that are blank, in every image.
        band_weight: with masks and zooming in on a canvas: share of the loss on the band around what was seen, the
            rest is on the masked patches (m + a). None: one loss on all patches that are asked.
        band_target: target of the band: the canvas reduced to the input's size, normalised and grown again (``grown``,
            as the authors' program has it), or the canvas itself (``original``, as appendix A.2 has it).
    """

    pictured = 100  # the paper's number of images for the mean error

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
        """The clean picture [b c h w] in the units in which it is asked."""
        return self.degradation.frame(self.in_units(encoded, encoded.images))

    def in_units(self, encoded: Encoded, images: Tensor) -> Tensor:
        """Normalised images [b c h w] in [0, 1], or as they are where they are asked normalised by whole patches."""
        return images if self.whole_patch else encoded.plain(images)

    def statistics(self, patches: Tensor) -> Statistics:
        """Those of each channel of each patch, or of each whole patch."""
        return (
            patch_statistics(patches) if self.whole_patch else patch_channel_statistics(patches, self.geometry.channels)
        )

    def errors(self, encoded: Encoded, asked: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """The squared error [b], or the two of masking and zooming in and their weighted sum."""
        if self.band_weight is None:
            return super().errors(encoded, asked, answers)
        mask, band = self.canvas_errors(encoded, in_grid_order(answers, asked))
        loss = (1 - self.band_weight) * mask + self.band_weight * band
        return {"loss": loss, "mask_loss": mask, "band_loss": band}

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """The mean error over the patches asked, or the weighted sum of the two, which are metrics."""
        errors = self.errors(encoded, *self.answer(encoded))
        loss = errors.pop("loss").mean()
        return Outcome(loss, {name: values.detach().mean() for name, values in errors.items()})

    def canvas_errors(self, encoded: Encoded, answers: Tensor) -> tuple[Tensor, Tensor]:
        """The two errors [b] of masking and zooming in (m + a), of answers [b n f] for the whole picture.

        They show the whole canvas at the size of the input. Grown to the canvas's size, the part that was seen, its
        centre by default, answers for the masked patches of the input, and the band around it for what the input did
        not show. The band is four strips, whose mean squared errors are added up, as the authors' program does.
        """
        g, masked, canvas = self.geometry, encoded.given.masked, self.in_units(encoded, encoded.images)
        corner, whole = encoded.given.corner, tuple(canvas.shape[2:])
        if corner is None:
            corner = central_corner(canvas, g.size)
        grown = self._grown(answers, whole)
        inside = patchify(crop_at(grown, g.size, corner), g.p, masked)
        hole = self.normalize(patchify(crop_at(canvas, g.size, corner), g.p, masked))
        apart = (grown - self._band_of(canvas)).square()
        # weighted rather than cut out: on the way back each cut would be a canvas of zeros
        band = (apart * _strips(whole, g.size, corner)).sum((1, 2, 3)) / apart.shape[1]
        return (inside - hole).square().mean((1, 2)), band

    def _band_of(self, canvas: Tensor) -> Tensor:
        """Return the target [b c H W] of the band, of the ``canvas`` [b c H W] in its units."""
        frame, whole = patchify(self.degradation.frame(canvas), self.geometry.p), tuple(canvas.shape[2:])
        if self.band_target == "grown":
            return self._grown(self.normalize(frame), whole)
        if not self.normalized:
            return canvas
        # the band has no whole patches at its own size: those that answer for it say by what it is normalised
        mean, deviation = (self._grown(one.expand_as(frame), whole) for one in self.statistics(frame))
        return (canvas - mean) / deviation

    def _grown(self, patches: Tensor, whole: tuple[int, ...]) -> Tensor:
        """Return patches [b n f] as a picture of the canvas's size."""
        return F.interpolate(unpatchify(patches, self.geometry.p, self.geometry.grid), whole, mode="area")

    def measure(self, encoded: Encoded) -> Measure:
        """The error beside those of patches of one colour and of what was given, put at its place, holes blurred."""
        found = self._errors_of(encoded, self.baselines(encoded))
        value = found.pop("")
        return Measure(encoded.modality.error, value, found, to_beat=tuple(found), higher_is_better=False, form=".3f")

    def baselines(self, encoded: Encoded) -> dict[str, Tensor]:
        """Pictures [b c h w] that need no learning, by name, in the units in which they are asked."""
        return {"flat patches": self.flat(encoded), "what was given": self.filled_in_frame(encoded)}

    def filled_in_frame(self, encoded: Encoded) -> Tensor:
        """What was given [b c h w], holes blurred over, at its place in the picture that is asked, in its units."""
        seen, images = self.with_content(encoded.given), encoded.given.images
        filled = images if seen.shape[1] == self.geometry.n else fill_holes(images, self.geometry.p, seen)
        given = encoded.given
        return self.degradation.in_frame(self.in_units(encoded, filled), given.side_share, given.corner)

    def picture(self, encoded: Encoded, asked: Tensor, pixels: Tensor) -> Tensor:
        """The picture [b c h w], normalised, with ``pixels`` [b j f], as they are asked, at the patches ``asked``."""
        g = self.geometry
        patches = scatter_tokens(pixels, asked, patchify(self.truth(encoded), g.p))
        whole = unpatchify(patches, g.p, g.grid)
        return whole if self.whole_patch else encoded.normalized(whole)

    def guessed_statistics(self, encoded: Encoded, asked: Tensor) -> Statistics:
        """Those of what was given."""
        return self.statistics(patchify(self.filled_in_frame(encoded), self.geometry.p, asked))

    def caption(self, encoded: Encoded, recovered: Tensor, error: Tensor) -> str:
        """What the sheet shows, with the mean errors over all images given."""
        off = (encoded.plain(recovered) - self.degradation.frame(encoded.plain(encoded.images))).square().mean()
        masked = 1 - self.with_content(encoded.given).shape[1] / self.geometry.n
        lacking = "masked" if self.degradation.padded else "not given"
        share = f"{masked:.0%} of the" if masked else "no"
        modality = encoded.modality
        return (
            f"Degradation: {self.degradation.title}, {share} patches {lacking}. Mean over "
            f"{len(encoded.images)} {modality.noun}: loss {error:.3f}, mean squared error {off:.4f} in "
            f"{modality.values} from 0 to 1, with each patch's own statistics where {modality.values} are normalised."
        )


def _strips(whole: tuple[int, ...], size: tuple[int, int], corner: Tensor) -> Tensor:
    """[b 1 H W]: one over its area in each of the four strips around the part of ``size`` at ``corner`` [b 2], 0 in it.

    Above and below they are as wide as the canvas, at the sides as high as the part.
    """
    top, left = corner[:, :, None, None].unbind(1)
    rows, columns = (torch.arange(side, device=corner.device) for side in whole)
    rows, columns = rows[:, None].expand(whole), columns.expand(whole)
    upper, lower = rows < top, rows >= top + size[0]
    beside = ~(upper | lower)
    strips = upper, lower, beside & (columns < left), beside & (columns >= left + size[1])
    shares = (strip / strip.sum((1, 2), keepdim=True).clamp(min=1) for strip in strips)
    return reduce(torch.add, shares)[:, None]
