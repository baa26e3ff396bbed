"""``--to timm``: the encoder's weights with timm's names, and code that embeds images or recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save

from patchloom.audio.config import Sound
from patchloom.export.encoder import Export, Exportable
from patchloom.export.examples import Examples, describe_files, largest_difference, vectors_of_files
from patchloom.export.preprocessing import READING, code_of_pictures, pooling_code, preparing_by_torch
from patchloom.nets.checkpoints.format import encoder_bytes
from patchloom.nets.encode import encode, final_norm, patch_count, prefix_count
from patchloom.nets.heads import POOLED, represent
from patchloom.system.files import write_whole
from patchloom.withhold.encoder_input import all_patches

# Code that ``export --to timm`` prints: timm's model with its weights, features, and vectors.


def usage_code(one: Exportable, weights: Path, head: Path | None, by_file: bool, removal: Path | None = None) -> str:
    """Return the complete code."""
    arguments, sound = one.arguments, one.card.sound
    parts = [
        features_of_images(arguments, weights, one.card.mean, one.card.std, by_file and sound is None)
        if sound is None
        else features_of_waves(arguments, weights, sound)
    ]
    if one.head is not None and head is not None:
        parts.append(_representing(head, sound is not None, **one.head.sizes))
    if removal is not None:
        parts.append(_without_positions(removal, one.card.sound is not None, prefix_count(one.vit)))
    parts.append(_vectors(one))
    if sound is None:
        parts += [READING] * by_file + [preparing_by_torch(one.size, one.channels, by_file), _embedding(by_file)]
    return "\n\n".join(parts)


def features_of_images(
    arguments: dict[str, Any], path: Path, mean: tuple[float, ...], std: tuple[float, ...], by_file: bool
) -> str:
    """Return code of the encoder and a function from images to features."""
    h, w = arguments["img_size"]
    # with all digits: dark images have small statistics, and rounding errors are divided by the deviation
    return (
        f"{_loading(arguments, path, by_file)}"
        "# statistics of each channel for pixels in [0, 1]\n"
        f"mean = torch.tensor({list(mean)}).view(-1, 1, 1)\n"
        f"std = torch.tensor({list(std)}).view(-1, 1, 1)\n\n\n"
        "def features(images):\n"
        f'    """Return {_tokens(arguments)} of images [b {arguments["in_chans"]} {h} {w}] in [0, 1]."""\n'
        "    return encoder.forward_features((images - mean) / std)\n"
    )


def features_of_waves(arguments: dict[str, Any], path: Path, sound: Sound) -> str:
    """Return code of the encoder, of spectrograms, and of a function from waveforms to features."""
    length = f"{sound.seconds:g} s at {sound.rate:,} Hz"
    return (
        f"{_loading(arguments, path, False)}\n"
        f"{code_of_pictures(sound)}\n\n"
        "def features(waves):\n"
        f'    """Return {_tokens(arguments)} of waveforms [b {sound.samples}] in [-1, 1]: {length}."""\n'
        "    return encoder.forward_features(pictures(waves))\n"
    )


def _loading(arguments: dict[str, Any], path: Path, by_file: bool) -> str:
    # timm's default is None for omitted ones; all names are parameters of timm, so a file cannot inject code
    given = {key: value for key, value in arguments.items() if key != "model_name" and value is not None}
    options = "".join(f"    {key}={value!r},\n" for key, value in given.items())
    numpy, pillow = ("import numpy as np\n", "from PIL import Image, ImageOps\n") if by_file else ("", "")
    return (
        f"{numpy}import timm\n"
        "import torch\n"
        f"{pillow}from safetensors.torch import load_file\n\n"
        f"encoder = timm.create_model(\n    {arguments['model_name']!r},\n{options})\n"
        f"encoder.load_state_dict(load_file({str(path)!r}))\n"
        "encoder.eval()\n"
    )


def _tokens(arguments: dict[str, Any]) -> str:
    return "maps [b rows columns d]" if "depths" in arguments or "swin" in arguments["model_name"] else "tokens [b n d]"


def _representing(path: Path, of_sound: bool, width: int, heads: int, depth: int) -> str:
    argument, given = ("waves", "pictures(waves)") if of_sound else ("images", "(images - mean) / std")
    return (
        "from functools import partial\n\n"
        "from timm.models.cait import LayerScaleBlockClassAttn\n\n"
        "norm = partial(torch.nn.LayerNorm, eps=1e-6)\n"
        f"weights = load_file({str(path)!r})\n"
        'class_token = weights.pop("token")\n'
        "blocks = torch.nn.ModuleList(\n"
        f"    LayerScaleBlockClassAttn({width}, {heads}, qkv_bias=True, norm_layer=norm) for _ in range({depth})\n"
        ")\n"
        'blocks.load_state_dict({name.removeprefix("layers."): value for name, value in weights.items()})\n'
        "blocks.eval()\n\n\n"
        f"def represent({argument}):\n"
        '    """Return the instance representation [b d]: class attention over unnormed patch tokens."""\n'
        f"    given = {given}\n"
        '    patches = encoder.forward_intermediates(given, indices=1, output_fmt="NLC", intermediates_only=True)[0]\n'
        "    token = class_token.expand(len(given), -1, -1)\n"
        "    for block in blocks:\n"
        "        token = block(patches, token)\n"
        "    return encoder.norm(token)[:, 0]\n"
    )


def _without_positions(path: Path, of_sound: bool, prefix: int) -> str:
    argument = "waves" if of_sound else "images"
    patches = "mapped" if not prefix else f"torch.cat([tokens[:, :{prefix}], mapped], dim=1)"
    return (
        "# the weight of a torch.nn.Linear(d, d, bias=False) for patch tokens; a linear layer on them can absorb it\n"
        f'removal = load_file({str(path)!r})["weight"]\n\n\n'
        f"def features_without_positions({argument}):\n"
        '    """Return the tokens of features, with the place removed from patch tokens."""\n'
        f"    tokens = features({argument})\n"
        f"    mapped = tokens[:, {prefix}:] @ removal.T\n"
        f"    return {patches}\n"
    )


def _vectors(one: Exportable) -> str:
    argument = "images" if one.card.sound is None else "waves"
    about = f'    """Return vectors [b d] ({POOLED[one.pooling]}) for the input of features."""\n'
    if one.pooling == "instance":
        return f"def vectors({argument}):\n{about}    return represent({argument})\n"
    called = "features" if one.removal is None else "features_without_positions"
    return f"def vectors({argument}):\n{about}    tokens = {called}({argument})\n    return {pooling_code(one)}\n"


def _embedding(by_file: bool) -> str:
    name, what, made = ("file", "an image file", "read(file)") if by_file else ("image", "an image [c h w]", "image")
    return (
        "@torch.inference_mode()\n"
        f"def embed({name}):\n"
        f'    """Return the vector [d] of {what}."""\n'
        f"    return vectors(prepare({made}))[0]\n"
    )


def to_timm(one: Exportable, examples: Examples, path: Path) -> Export:
    """Write the encoder, and its instance head to a file whose name begins with the encoder's."""
    vit, head, head_file = one.vit, one.head, path.with_name(f"{path.stem}-{one.head_file}")
    # the file lies apart from the run's others, and may be published: a start's task is the path of its source
    alone = replace(one.card, trained_on="", extra_modules={}, task=Path(one.card.task).name)
    if one.blend == 0:
        alone = replace(alone, note=f"{alone.note} These are the weights that an adaptation began with.".strip())
    files = {path: encoder_bytes(vit, alone)}  # timm ignores the card
    removal_file = None if one.removal is None else path.with_name(f"{path.stem}-without_positions.safetensors")
    if one.removal is not None and removal_file is not None:
        files[removal_file] = save({"weight": one.removal.weight})
    if head is not None:
        files[head_file] = save(head.state_dict())  # its name is unique per encoder in the folder
    by_file = examples.by_file() and one.channels in (1, 3)

    def code(folder: Path) -> str:
        removal = None if removal_file is None else folder / removal_file.name
        return usage_code(one, folder / path.name, None if head is None else folder / head_file.name, by_file, removal)

    pasted: dict[str, Any] = {}
    with TemporaryDirectory() as folder:  # existing files are replaced only after the comparison
        for file, content in files.items():
            Path(folder, file.name).write_bytes(content)
        exec(code(Path(folder)), pasted)  # the comparison includes its normalisation
    with torch.inference_mode():
        given = all_patches(one.normalized(examples.given), patch_count(vit))
        tokens = encode(vit, given, norm=False)
        found = largest_difference(
            "features", final_norm(vit, tokens), pasted["features"](examples.given).view_as(tokens)
        )
        if head is not None:
            theirs = pasted["represent"](examples.given)
            found = max(found, largest_difference("instance features", represent(vit, head, tokens), theirs))
    checks = (_compared_vectors(one, examples, by_file, pasted),)
    for file, content in files.items():
        write_whole(file, content)
    written = None if head is None else head_file
    compared_on = f"{one.card.modality.noun}{' of noise' * bool(examples.why_noise)}"
    notes = tuple(filter(None, (one.card.note, examples.why_noise)))
    return Export(
        path,
        written,
        found,
        len(examples.given),
        code(path.parent),
        compared_on,
        notes,
        one.card.sound,
        checks=checks,
        removal_file=removal_file,
        removal=one.removal,
    )


def _compared_vectors(one: Exportable, examples: Examples, by_file: bool, pasted: dict[str, Any]) -> str:
    """Return a sentence with the largest difference of vectors by the printed code."""
    with torch.inference_mode(), TemporaryDirectory() as folder:
        if not examples.whole:
            both = one.vectors(examples.given), pasted["vectors"](examples.given)
            how = f"vectors(waves) ({one.pooling} tokens) differ by at most {{:.1e}}."
        elif by_file:
            both = vectors_of_files(examples, Path(folder), one.vector_of, pasted["embed"])
            how = f"embed(file) ({one.pooling} tokens) differ by at most {{:.1e}} on {describe_files(examples)}."
        else:
            whole = examples.whole
            both = torch.stack(list(map(one.vector_of, whole))), torch.stack(list(map(pasted["embed"], whole)))
            how = f"embed(image) ({one.pooling} tokens) differ by at most {{:.1e}} on {len(whole)} whole images."
        return f"Vectors by its {how.format(largest_difference('vectors', *both))}"
