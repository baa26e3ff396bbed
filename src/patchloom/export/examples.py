"""Example images or recordings for comparing features: those of the run, or noise if they are unavailable."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from patchloom.audio.compatibility import first_waves, with_encoder_sound
from patchloom.data.decode import read_image
from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.sources.open import open_data, open_stored
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.origin import kind_of
from patchloom.runs.folder import RunFolder

_IMAGES = 16
_WHOLE = 4  # number of these also kept at full size, which may be large
# formats that Pillow and patchloom read identically; patchloom reads TIFF with other libraries, and more bits
_BY_PILLOW = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"}


@dataclass(frozen=True)
class Examples:
    """Example images or recordings.

    Attributes:
        given: images [b c h w] in [0, 1] of the encoder's size, or waveforms [b n] in [-1, 1].
        whole: a few of the images [c h w] before cropping and resizing, uint8 or in [0, 1]; () for recordings.
        files: paths of those, if Pillow and patchloom read all of them identically; else ().
        why_noise: a sentence with the reason if they are noise; else "".
    """

    given: Tensor
    whole: Sequence[Tensor] = ()
    files: Sequence[Path] = ()
    why_noise: str = ""

    def called(self, noun: str) -> str:
        """Return "images" or "recordings", whichever ``noun`` is, or "images of noise"."""
        return f"{noun} of noise" if self.why_noise else noun

    def by_file(self) -> bool:
        """Return whether Pillow can store them: 8 bits, grey or colour."""
        return bool(self.whole) and all(one.dtype == torch.uint8 and len(one) in (1, 3) for one in self.whole)

    def in_files(self, folder: Path) -> Sequence[Path]:
        """Return the files of `whole`: their own, or PNG files that are written to ``folder``."""
        if self.files:
            return self.files
        written = [folder / f"{i}.png" for i in range(len(self.whole))]
        for path, image in zip(written, self.whole, strict=True):
            pixels = image.permute(1, 2, 0).contiguous().numpy()
            Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels).save(path)
        return written


def open_run_images(run: str | Path, data: DataLike | None, card: EncoderCard) -> tuple[Source | None, str]:
    """Open the given data or the run's; without either return None and the reason."""
    noun = card.modality.noun
    if data is not None:
        opened = with_encoder_sound(open_data(data), card.sound, card.name)
    elif not Path(run).is_dir() or kind_of(run) == "hub":
        return None, f"{run} does not record which {noun} it was trained on"
    else:
        stored = RunFolder(run).read_config().data
        try:
            opened = with_encoder_sound(
                open_stored(stored, os.fspath(run), f"--data {noun.upper()}"), card.sound, card.name
            )
        except PatchloomError as problem:
            return None, f"the {noun} of the run are unavailable ({problem})"
    return opened.train, ""


def make_examples(run: str | Path, data: DataLike | None, card: EncoderCard) -> Examples:
    """Load examples from the given data or the run's data; otherwise draw noise."""
    noun, channels = card.modality.noun, card.own_spec.channels
    source, why = open_run_images(run, data, card)
    if source is not None:
        try:
            if card.sound is not None:
                return Examples(first_waves(source, _IMAGES))
            batch = next(plain_batches(source, card.own_spec.img_size, _IMAGES, channels=channels))
            given = normalize(batch.views[0], (0.0,) * channels, (1.0,) * channels)
            chosen = batch.indices[:_WHOLE].tolist()
            own = tuple(
                path for i in chosen if source.place(i) is not None and (path := Path(source.describe(i))).is_file()
            )
            # Pillow and patchloom read them identically
            alike = all(path.suffix.lower() in _BY_PILLOW and read_image(path).dtype == torch.uint8 for path in own)
            if len(own) == len(chosen) and alike:
                return Examples(given, tuple(map(read_image, own)), own)
            # converted to the encoder's channels, so that reading the written files changes nothing
            return Examples(given, tuple(source.read_as(i, channels).contiguous() for i in chosen))
        except PatchloomError as problem:
            if data is not None:
                raise
            why = f"the {noun} of the run are unavailable ({problem})"
    generator = torch.Generator().manual_seed(0)
    if card.sound is not None:
        said = f"Compared on noise, because {why}: --data RECORDINGS compares on recordings."
        waves = (0.1 * torch.randn(_IMAGES, card.sound.samples, generator=generator)).clamp(-1, 1)
        return Examples(waves, why_noise=said)
    said = f"Compared on noise, because {why}: --data PHOTOS compares on images."
    h, w = card.own_spec.img_size
    # larger and of another shape, so that cropping and resizing are compared, too
    whole = (_noise(card, _WHOLE, (h + h // 2, 2 * w), generator) * 255).round().to(torch.uint8)
    return Examples(_noise(card, _IMAGES, (h, w), generator), tuple(whole), why_noise=said)


def _noise(card: EncoderCard, count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw images [count c h w] in [0, 1] with the statistics of the data, so that values are in the usual range.

    They consist of uniform squares of 4 pixels, which resizing does not average away.
    """
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    coarse = torch.randn(count, card.own_spec.channels, *(-(-side // 4) for side in size), generator=generator)
    noise = coarse.repeat_interleave(4, 2).repeat_interleave(4, 3)[..., : size[0], : size[1]]
    return (mean + std * noise).clamp(0, 1)


def largest_difference(what: str, ours: Tensor, theirs: Tensor, by: str = "the code that uses timm") -> float:
    """Return the largest absolute difference of features; raise if it exceeds 0.1 % of the largest feature."""
    found = (theirs - ours).abs().max().item()
    if not found <= 1e-3 * ours.abs().max().item():  # also true for NaN
        raise PatchloomError(f"{what} by {by} differ by {found:.2e}: this is a bug, please report it")
    return found


def vectors_of_files(
    examples: Examples, folder: Path, ours: Callable[[Tensor], Tensor], embed: Callable[[str], Tensor]
) -> tuple[Tensor, Tensor]:
    """Compute the vectors [n d] of image files with patchloom and with ``embed``.

    Args:
        examples: images with files, or for which files are written to ``folder``.
        folder: an empty folder.
        ours: function from a decoded image [c h w] to its vector [d].
        embed: function from a file's name to its vector [d].
    """
    paths = examples.in_files(folder)
    theirs = [torch.as_tensor(embed(str(path))) for path in paths]
    return torch.stack([ours(read_image(path)) for path in paths]), torch.stack(theirs)


def describe_files(examples: Examples) -> str:
    """Describe the files of `vectors_of_files`."""
    count = len(examples.whole)
    return f"{count} of its files" if examples.files else f"{count} images in PNG files"
