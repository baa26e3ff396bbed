"""How long each picture of an encoder takes: `patchloom look --what NAME` for 8 images at ViT-S/16, 224 px.

    python benchmarks/pictures.py FOLDER_OF_IMAGES [NAME ...]

Weights are as they begin: time does not depend on them. The time is that of the process's CPU on one thread, from an
encoder that is loaded to files that are written, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from patchloom.data.sources.open import open_data
from patchloom.look.context import LookRequest, NamedEncoder
from patchloom.look.look import PICTURES, draw_pictures, untrained_encoder
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard

SPEC = EncoderSpec("vit_small_patch16_224", (224, 224), 16, 3, "learned")
ROUNDS, SLOW = 3, ("retrieval", "inversion")  # once
STEPS = 20  # of the fit of inversion, whose time is proportional to them


def seconds(name: str, asked: LookRequest) -> float:
    """CPU seconds that one picture takes."""
    start = time.process_time()
    draw_pictures([name], asked, lenient=False)
    return time.process_time() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="a folder of images")
    parser.add_argument("names", nargs="*", default=[*PICTURES], help="of pictures; all")
    given = parser.parse_args()
    source = open_data(given.images).train
    torch.set_num_threads(1)
    encoder = NamedEncoder("vit-s", build_encoder(SPEC), EncoderCard(SPEC, (0.5,) * 3, (0.25,) * 3, "mae", "vit-s"))
    beside = (untrained_encoder(encoder, 0, torch.device("cpu")),)
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names:
            asked = LookRequest(encoder, source, Path(folder), beside, steps=STEPS)
            taken = [seconds(name, asked) for _ in range(1 if name in SLOW else ROUNDS)]
            print(f"{name:12} {statistics.median(taken):7.1f} s of CPU (of {len(taken)})", flush=True)
