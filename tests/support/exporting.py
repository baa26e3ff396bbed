"""Small encoders and runs to export."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from perturbing import perturbed
from PIL import Image
from resolved import resolved_settings
from safetensors import safe_open
from safetensors.torch import save

from patchloom.data.sources.open import open_data
from patchloom.data.stats import channels_of, statistics_of
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.nets.checkpoints.read import checksum
from patchloom.results import store
from patchloom.results.result import Result
from patchloom.runs.folder import RunFolder
from patchloom.system.checksummed import write_checksummed

SMALL = {"embed_dim": 32, "depth": 2}


def an_encoder(folder: Path, photos: Path, size=(16, 16), model="nano", p=4, **options) -> Path:
    """Write an encoder with perturbed weights and the statistics of those images; return its file."""
    source = open_data(str(photos)).train
    stats = statistics_of(source, channels_of(source))
    positions = options.pop("positions", "none" if model.startswith("swin") else "sincos")
    own = options if model.startswith("swin") else SMALL | options
    spec = EncoderSpec(model, size, p, len(stats.mean), positions=positions, options=own)
    torch.manual_seed(0)
    vit = build_encoder(spec)
    perturbed(vit)  # biases of zero would hide mistakes
    folder.mkdir(parents=True, exist_ok=True)
    save_encoder(vit, EncoderCard(spec, stats.mean, stats.std, "mae", folder.name), folder / "e.safetensors")
    return folder / "e.safetensors"


def with_card(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the card of a file, with a valid checksum, like a malicious author could."""
    with safe_open(path, "pt") as file:
        ((key, text),) = file.metadata().items()
        weights = {name: file.get_tensor(name) for name in file.keys()}
    about = {name: value for name, value in json.loads(text).items() if name != "sha256"}
    change(about)
    sealed = about | {"sha256": checksum(weights, json.dumps(about))}
    path.write_bytes(save(weights, metadata={key: json.dumps(sealed)}))
    return path


def a_run(folder: Path, photos: Path, results: Sequence[Result] = (), **options) -> Path:
    """Write the folder of a finished run on those images, with results of evaluations."""
    path = an_encoder(folder, photos, **options)
    run = RunFolder(folder)
    path.rename(run.encoder)
    settings = resolved_settings(str(photos))
    write_checksummed(run.config, settings.plain())
    store.append(folder, results)
    run.summary.write_text("It is done.\n")
    return folder


def photographs(folder: Path) -> Path:
    """Write ten 8-bit images in several formats and shapes: one rotated, one transparent, one grey."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i, (h, w) in enumerate([(20, 30), (40, 17), (16, 16), (50, 50), (9, 12), (33, 61), *[(24, 24)] * 4]):
        coarse = rng.integers(0, 256, (h, w, 3), dtype=np.uint8)[:: 1 + i % 3, :: 1 + i % 3]
        image = Image.fromarray(coarse)
        if i == 0:
            image.putalpha(Image.fromarray(rng.integers(0, 256, coarse.shape[:2], dtype=np.uint8)))
        if i == 2:
            image = image.convert("L")
        exif = Image.Exif()
        if i == 1:
            exif[274] = 6  # lies on its side
        kind = ("png", "jpg", "png", "webp")[i % 4]
        image.save(folder / f"{i}.{kind}", **({"exif": exif} if i == 1 else {}))
    return folder
