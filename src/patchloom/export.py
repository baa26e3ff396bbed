"""``export``: an encoder goes home to timm, and proves that it arrived."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import timm
import torch
from safetensors.torch import load, save
from timm.models.cait import LayerScaleBlockClassAttn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.data import normalize, open_data, plain_batches
from patchloom.errors import PatchloomError
from patchloom.files import write_whole
from patchloom.nets.encode import encode, final_norm
from patchloom.nets.heads import represent
from patchloom.nets.weights import load_encoder, load_instance_head
from patchloom.train.folder import RunFolder
from patchloom.views.view import whole

_IMAGES = 16


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        weights: a safetensors file of timm's names.
        head: that of the instance head, or None if there is none beside the encoder.
        difference: largest absolute difference between our features, instance representation among them, and those of
            fresh timm modules.
        images: real images on which they were compared.
        snippet: code that loads the weights with timm alone.
    """

    weights: Path
    head: Path | None
    difference: float
    images: int
    snippet: str


def export(run: str | Path, *, to: str = "timm", data: str | None = None, out: str | Path | None = None) -> Export:
    """Write an encoder for use without patchloom, load it back into a fresh model, and compare on real images.

    An instance head beside the encoder goes with it, into a file whose name begins with the encoder's.

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
    files = {path: save(vit.state_dict())}

    arguments = card.spec.timm_arguments()
    fresh = timm.create_model(**arguments).eval()
    fresh.load_state_dict(load(files[path]), strict=True)
    snippet = _snippet(arguments, path, card.mean, card.std)
    head, beside = load_instance_head(run), None
    with torch.inference_mode():
        tokens = encode(vit, whole(images, vit.patch_embed.num_patches), norm=False)
        difference = _difference("features", final_norm(vit, tokens), fresh.forward_features(images))
        if head is not None:
            beside = path.with_name(f"{path.stem}-instance_head.safetensors")  # two encoders in a folder keep theirs
            files[beside] = save(head.state_dict())
            theirs = _instance(fresh, load(files[beside]), images, **head.sizes)
            difference = max(difference, _difference("instance features", represent(vit, head, tokens), theirs))
            snippet += _head_snippet(beside, **head.sizes)
    for file, content in files.items():
        write_whole(file, content)
    return Export(path, beside, difference, len(images), snippet)


def _difference(what: str, ours: Tensor, theirs: Tensor) -> float:
    difference = (theirs - ours).abs().max().item()
    if not difference <= 1e-3 * ours.abs().max().item():  # true of nan too
        raise PatchloomError(
            f"{what} after loading into timm differ by {difference:.2e}: this is a bug, please report it"
        )
    return difference


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


def _instance(
    encoder: VisionTransformer, weights: dict[str, Tensor], images: Tensor, width: int, heads: int, depth: int
) -> Tensor:
    """The instance representation [b d] as `_head_snippet` tells to make it."""
    norm = partial(nn.LayerNorm, eps=1e-6)
    token = weights.pop("token").expand(len(images), -1, -1)
    blocks = nn.ModuleList(LayerScaleBlockClassAttn(width, heads, qkv_bias=True, norm_layer=norm) for _ in range(depth))
    blocks.load_state_dict({name.removeprefix("layers."): value for name, value in weights.items()})
    patches = encoder.forward_intermediates(images, indices=1, output_fmt="NLC", intermediates_only=True)[0]
    for block in blocks.eval():
        token = block(patches, token)
    return encoder.norm(token)[:, 0]


def _head_snippet(path: Path, width: int, heads: int, depth: int) -> str:
    return (
        "\n# The instance representation: a class token asks the patch tokens, which are not normed yet.\n"
        "from functools import partial\n\n"
        "import torch\n"
        "from timm.models.cait import LayerScaleBlockClassAttn\n\n"
        "norm = partial(torch.nn.LayerNorm, eps=1e-6)\n"
        f"weights = load_file({str(path)!r})\n"
        'class_token = weights.pop("token")\n'
        "blocks = torch.nn.ModuleList(\n"
        f"    LayerScaleBlockClassAttn({width}, {heads}, qkv_bias=True, norm_layer=norm) for _ in range({depth})\n"
        ")\n"
        'blocks.load_state_dict({name.removeprefix("layers."): value for name, value in weights.items()})\n'
        "blocks.eval()\n\n\n"
        "def represent(images):\n"
        '    patches = encoder.forward_intermediates(images, indices=1, output_fmt="NLC", intermediates_only=True)[0]\n'
        "    token = class_token.expand(len(images), -1, -1)\n"
        "    for block in blocks:\n"
        "        token = block(patches, token)\n"
        "    return encoder.norm(token)[:, 0]\n"
    )
