"""``export``: an encoder goes home to timm, and proves that it arrived."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from safetensors.torch import load, save

from patchloom.data import normalize, open_data, plain_batches
from patchloom.errors import PatchloomError
from patchloom.files import write_whole
from patchloom.nets.encode import encode
from patchloom.nets.weights import load_encoder
from patchloom.train.folder import RunFolder
from patchloom.views.view import whole

_IMAGES = 16


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        weights: a safetensors file of timm's names.
        difference: largest absolute difference between our features and those of a fresh timm model.
        images: real images on which they were compared.
        snippet: code that loads the weights with timm alone.
    """

    weights: Path
    difference: float
    images: int
    snippet: str


def export(run: str | Path, *, to: str = "timm", data: str | None = None, out: str | Path | None = None) -> Export:
    """Write an encoder for use without patchloom, load it back into a fresh model, and compare on real images.

    Args:
        run: a run's folder, or an encoder's ``.safetensors`` file.
        to: the library: timm.
        data: images to compare on; those of the run, if absent.
        out: the file to write; ``RUN/timm.safetensors`` if absent.

    Raises:
        PatchloomError: an unknown library, no encoder there, or features that differ after loading.
    """
    if to != "timm":
        raise PatchloomError(f"patchloom exports to timm, not to {to}: use --to timm")
    vit, card = load_encoder(run)
    if card.spec is None:
        raise PatchloomError(f"{card.name} comes from timm already: load it there")
    path = Path(out) if out else (Path(run) if Path(run).is_dir() else Path(run).parent) / "timm.safetensors"
    images = _real_images(run, data, card)
    weights = save(vit.state_dict())

    arguments = card.spec.timm_arguments()
    fresh = timm.create_model(**arguments).eval()
    fresh.load_state_dict(load(weights), strict=True)
    with torch.inference_mode():
        ours = encode(vit, whole(images, vit.patch_embed.num_patches))
        difference = (fresh.forward_features(images) - ours).abs().max().item()
    if difference > 1e-3 * ours.abs().max().item():
        raise PatchloomError(
            f"features after loading into timm differ by {difference:.2e}: this is a bug, please report it"
        )
    write_whole(path, weights)
    return Export(path, difference, len(images), _snippet(arguments, path, card.mean, card.std))


def _real_images(run: str | Path, data: str | None, card) -> torch.Tensor:
    if data is None:
        if not Path(run).is_dir():
            raise PatchloomError(f"{run} does not tell which images to compare on: name them with --data")
        data = RunFolder(run).read_config().data
    source = open_data(data).train
    batch = next(plain_batches(source, card.spec.img_size, _IMAGES, channels=card.spec.channels))
    return normalize(batch.views[0], card.mean, card.std)


def _snippet(arguments: dict, path: Path, mean: tuple, std: tuple) -> str:
    name = arguments["model_name"]
    options = "".join(f"    {key}={value!r},\n" for key, value in arguments.items() if key != "model_name")
    h, w = arguments["img_size"]
    numbers = [tuple(round(value, 4) for value in values) for values in (mean, std)]
    return (
        "import timm\n"
        "from safetensors.torch import load_file\n\n"
        f"encoder = timm.create_model(\n    {name!r},\n{options})\n"
        f"encoder.load_state_dict(load_file({str(path)!r}))\n"
        "encoder.eval()\n"
        f"# images [b {arguments['in_chans']} {h} {w}] in [0, 1], normalised per channel by\n"
        f"# mean {numbers[0]} and std {numbers[1]}\n"
        "# tokens = encoder.forward_features(images)\n"
    )
