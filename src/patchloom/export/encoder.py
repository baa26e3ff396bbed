"""Input and result of ``export``: an exportable encoder, and a description of the exported files."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchloom.audio.config import Sound
from patchloom.data.augment import CentreCrop
from patchloom.data.decode import to_channels
from patchloom.data.stats import normalize
from patchloom.display import Displayable, Snippet, Verbatim
from patchloom.errors import PatchloomError, listing
from patchloom.export.without_positions import PositionRemoval
from patchloom.nets.build import build_encoder, spec_of_stock
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.heads import InstanceHead, pooled_tokens, poolings_of, select_pooling, tokens_of
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.options.verbs import ExportPooling
from patchloom.runs.encoder import load_blend, load_encoder, named_extra_module


@dataclass(frozen=True)
class Exportable:
    """Encoder to export.

    Attributes:
        vit: the encoder, in eval mode.
        card: its origin and the normalisation of images; its ``spec`` is not None.
        pooling: pooling of its tokens to the vector of an image.
        head: its instance head, if there is one.
        head_file: name of the file of that head; "" without one.
        blend: share of the adapted weights, if they are blended with those that the run began with.
        removal: map that removes the place from its patch tokens, or None.
    """

    vit: Encoder
    card: EncoderCard
    pooling: ExportPooling
    head: InstanceHead | None = None
    head_file: str = ""
    blend: float | None = None
    removal: PositionRemoval | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments with which timm builds the encoder."""
        return self.card.own_spec.timm_arguments()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width (h, w) of its input in pixels."""
        return self.card.own_spec.img_size

    @property
    def channels(self) -> int:
        """Number c of input channels."""
        return self.card.own_spec.channels

    @property
    def hierarchical(self) -> bool:
        """Whether its tokens are a map [b rows columns d], as for a Swin."""
        return is_hierarchical(self.vit)

    def normalized(self, given: Tensor) -> Tensor:
        """Return the encoder's input [b c h w] for images [b c h w] (8 bits or in [0, 1]) or waveforms [b n]."""
        return normalize(self.card.modality.pictures(given), self.card.mean, self.card.std)

    def vectors(self, given: Tensor) -> Tensor:
        """Return vectors [b d] ([b 2d] for "both"), as in evaluations, for the same inputs as `normalized`."""
        with torch.inference_mode():
            weight = None if self.removal is None else self.removal.weight
            return select_pooling(self.pooling, pooled_tokens(self.vit, self.normalized(given), self.head, weight))

    def vector_of(self, image: Tensor) -> Tensor:
        """Return the vector [d] of a whole image [c h w] from `patchloom.data.decode.read_image`."""
        return self.vectors(CentreCrop(self.size)(to_channels(image, self.channels))[0][None])[0]

    @property
    def pooled_norm(self) -> bool:
        """Whether pooled tokens have a separate norm."""
        return not self.hierarchical and not isinstance(self.vit.fc_norm, nn.Identity)


def load_exportable(
    run: str | Path, pooling: ExportPooling, model: str | None = None, blend: float | None = None
) -> Exportable:
    """Load the encoder of a run or a file for export.

    Args:
        run: folder or file.
        pooling: vector of an image.
        model: timm's name if the file has only weights.
        blend: share of the run's weights in a blend with those that it began with.
    """
    vit, card = load_encoder(run, model) if blend is None else load_blend(run, blend)
    if card.spec is None and model is not None:  # a file of weights only lacks the sizes to build it
        spec = spec_of_stock(vit, model)
        built = build_encoder(spec)
        try:
            built.load_state_dict(vit.state_dict(), strict=True)
        except RuntimeError as problem:
            raise PatchloomError(f"{model} has parts that export does not support: load it with timm") from problem
        vit, card = built.eval(), replace(card, spec=spec)
    if card.spec is None:
        raise PatchloomError(f"{card.name} is a model of timm: load it with timm")
    beside = None if blend is not None else named_extra_module(run, "pooling")
    head_file, head = ("", None) if beside is None else (beside[0], cast(InstanceHead, beside[1]))
    known = poolings_of(tokens_of(vit, head))
    if pooling not in known:
        raise PatchloomError(f"this encoder has no {pooling} vectors: use --pooling {listing(known)}")
    return Exportable(vit, card, pooling, head, head_file, blend)


def default_out(run: str | Path, name: str, blend: float | None = None) -> Path:
    """Return the default path of a file or folder called ``name``: in the run, or beside the encoder's file."""
    if str(run).startswith("timm:"):
        raise PatchloomError(f"{run} has no folder for an export: give --out")
    place = Path(run)
    before = "" if blend is None else "start-" if blend == 0 else f"blend-{blend:g}-"
    return (place if place.is_dir() else place.parent) / f"{before}{name}"


@dataclass(frozen=True, repr=False)
class Export(Displayable):
    """Result of an export.

    Attributes:
        weights: path of the safetensors file with timm's names, of the folder for the Hub, or of the ONNX file.
        head: path of the instance head's file; None without one.
        removal_file: path of the map that removes the place; None without one.
        removal: that map and its scores; None without one.
        difference: largest absolute difference between the features of patchloom (including the instance
            representation) and those of the other library.
        images: number of images or recordings compared.
        snippet: code that loads the export without patchloom and computes features of images or waveforms.
        compared_on: "images" or "recordings", or "images of noise" or "recordings of noise" if those of the run are
            unavailable.
        notes: sentences on that, and on a run that is not finished.
        sound: spectrogram settings; None for an encoder of images.
        by: owner of the compared features, such as "timm's".
        checks: further sentences, each with a largest difference.
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
    removal_file: Path | None = None
    removal: PositionRemoval | None = None

    def parts(self, width: int) -> list[str]:
        removed = () if self.removal is None else (Verbatim(f"{self.removal_file}: {self.removal.sentence()}"),)
        said = (Verbatim(self.sentence()), *map(Verbatim, self.checks), *removed, *self.notes)
        return [*said, "", Snippet(self.snippet)]

    def plain(self) -> dict[str, Any]:
        return {
            "weights": str(self.weights),
            "head": None if self.head is None else str(self.head),
            "without_positions": None
            if self.removal is None
            else {"file": str(self.removal_file), **self.removal.plain()},
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
        """Return a sentence on the files and the comparison."""
        files, what = f"{self.weights}", "features"
        if self.head is not None:
            files, what = f"{files} and {self.head}", "features, including the instance representation,"
        done = f"{files}: {self.by} {what} differ by at most {self.difference:.1e} on {self.images} {self.compared_on}."
        if self.sound is None:
            return done
        return f"{done} Its input is {self.sound.seconds:g} s at {self.sound.rate:,} samples per second, one channel."


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Suppress prints, logging and warnings of other libraries inside this block.

    The progress messages of torch's exporter and transformers are of no use here; failures still raise.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
