"""What ``export`` takes and returns: an encoder with all that its export needs, and what was written of it."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from patchloom.audio.config import Sound
from patchloom.data.augment import CentreCrop
from patchloom.data.decode import to_channels
from patchloom.data.stats import normalize
from patchloom.display import Displayable, Verbatim
from patchloom.errors import PatchloomError, listing, pip_install
from patchloom.nets.build import build_encoder, spec_of_stock
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.heads import InstanceHead, pooled_tokens, poolings_of, select_pooling, tokens_of
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.runs.encoder import load_encoder, named_extra_module

ExportPooling = Literal["class", "mean", "prefix", "both", "instance"]


@dataclass(frozen=True)
class Exportable:
    """An encoder that is to be exported.

    Attributes:
        vit: the encoder, in eval mode.
        card: how it was made and how images are normalised for it; its ``spec`` is there.
        pooling: how its tokens become the vector of an image.
        head: the instance head beside it, if there is one.
        head_file: what the file of that head is called; "" without one.
    """

    vit: Encoder
    card: EncoderCard
    pooling: ExportPooling
    head: InstanceHead | None = None
    head_file: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments with which timm builds the encoder."""
        return self.card.own_spec.timm_arguments()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width (h, w) of its images in pixels."""
        return self.card.own_spec.img_size

    @property
    def channels(self) -> int:
        """Channels c of its images."""
        return self.card.own_spec.channels

    @property
    def hierarchical(self) -> bool:
        """Whether its tokens come as a map [b rows columns d], as a Swin's do."""
        return is_hierarchical(self.vit)

    def normalized(self, given: Tensor) -> Tensor:
        """What the encoder is given [b c h w], of images [b c h w], 8 bits or in [0, 1], or of waveforms [b n]."""
        return normalize(self.card.modality.pictures(given), self.card.mean, self.card.std)

    def vectors(self, given: Tensor) -> Tensor:
        """Vectors [b d] of what `normalized` takes, which are those that evaluations see; [b 2d] for "both"."""
        with torch.inference_mode():
            return select_pooling(self.pooling, pooled_tokens(self.vit, self.normalized(given), self.head))

    def vector_of(self, image: Tensor) -> Tensor:
        """The vector [d] of a whole image [c h w] as `patchloom.data.decode.read_image` gives it."""
        return self.vectors(CentreCrop(self.size)(to_channels(image, self.channels))[0][None])[0]

    @property
    def pooled_norm(self) -> bool:
        """Whether pooled tokens go through a norm of their own."""
        return not self.hierarchical and not isinstance(self.vit.fc_norm, nn.Identity)


def load_exportable(run: str | Path, pooling: ExportPooling, model: str | None = None) -> Exportable:
    """The encoder of a run or a file, if it can be exported; ``model`` is timm's name for a file of weights alone."""
    vit, card = load_encoder(run, model)
    if card.spec is None and model is not None:
        vit, card = _specified(vit, card, model)
    if card.spec is None:
        raise PatchloomError(f"{card.name} comes from timm already: load it there")
    beside = named_extra_module(run, "pooling")
    head_file, head = ("", None) if beside is None else (beside[0], cast(InstanceHead, beside[1]))
    known = poolings_of(tokens_of(vit, head))
    if pooling not in known:
        raise PatchloomError(f"this encoder has no {pooling} vectors: use --pooling {listing(known)}")
    return Exportable(vit, card, pooling, head, head_file)


def _specified(vit: Encoder, card: EncoderCard, model: str) -> tuple[Encoder, EncoderCard]:
    """The same encoder of a file of weights alone, and its card, with the sizes that build it again."""
    spec = spec_of_stock(vit, model)
    built = build_encoder(spec)
    try:
        built.load_state_dict(vit.state_dict(), strict=True)
    except RuntimeError as problem:
        raise PatchloomError(f"{model} has parts of its own, and cannot be exported: load it by timm") from problem
    return built.eval(), replace(card, spec=spec)


def default_out(run: str | Path, name: str) -> Path:
    """Where a file or folder called ``name`` is written if nobody says so: in the run, or beside the encoder's file."""
    place = Path(run)
    return (place if place.is_dir() else place.parent) / name


@dataclass(frozen=True, repr=False)
class Export(Displayable):
    """What was written.

    Attributes:
        weights: what was written: a safetensors file of timm's names, a folder for the Hub, or an ONNX file.
        head: that of the instance head, or None if there is none beside the encoder.
        difference: largest absolute difference between our features, instance representation among them, and those
            that the other library computes.
        images: on how many images, or recordings, they were compared.
        snippet: code that loads what was written without patchloom, and makes features of images or waveforms.
        compared_on: "images" or "recordings", or "images of noise" or "recordings of noise" where those of the run were
            not to be had.
        notes: sentences about that, and about a run that is not finished.
        sound: how recordings become its pictures; None of an encoder of images.
        by: whose features were compared, such as "timm's".
        checks: further sentences, each with its largest difference.
    """

    weights: Path
    head: Path | None
    difference: float
    images: int
    snippet: str
    compared_on: str = "images"
    notes: tuple[str, ...] = ()
    sound: Sound | None = None
    by: str = "timm's"
    checks: tuple[str, ...] = ()

    def parts(self, width: int) -> list[str]:
        """See `Displayable`."""
        return [Verbatim(self.sentence()), *map(Verbatim, self.checks), *self.notes, "", Verbatim(self.snippet)]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        return {
            "weights": str(self.weights),
            "head": None if self.head is None else str(self.head),
            "difference": self.difference,
            "compared": self.images,
            "compared_on": self.compared_on,
            "by": self.by,
            "checks": [*self.checks],
            "sound": None if self.sound is None else asdict(self.sound),
            "snippet": self.snippet,
            "notes": [*self.notes],
        }

    def sentence(self) -> str:
        """What was written, and how it was compared."""
        files, what = f"{self.weights}", "features"
        if self.head is not None:
            files, what = f"{files} and {self.head}", "features, the instance representation among them,"
        done = f"{files}: {self.by} {what} differ by at most {self.difference:.1e} on {self.images} {self.compared_on}."
        if self.sound is None:
            return done
        return f"{done} It takes {self.sound.seconds:g} s at {self.sound.rate:,} samples a second, one channel."


# Libraries that a form of export needs: whether they are there, as they are extras, and that they do not chatter.


def require_packages(to: str, *libraries: str) -> None:
    """Refuse to go on without them, before anything takes time."""
    if absent := [name for name in libraries if find_spec(name) is None]:
        raise PatchloomError(f"--to {to} needs {listing(absent, 'and')}: {pip_install(to)}")


@contextmanager
def silence_libraries() -> Iterator[None]:
    """While entered, what other libraries say of their progress is not heard: prints, logging and warnings.

    torch's exporter and transformers print lines of which none is for whoever exports; what fails raises all the same.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
