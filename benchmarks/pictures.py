"""Time of each picture of an encoder: `patchloom look --what NAME` for 8 images at ViT-S/16, 224 px.

    python benchmarks/get_data.py camvid /tmp/data
    python benchmarks/pictures.py /tmp/data/camvid/images/test [NAME ...]

Any folder of images will do. The weights are random, because the time does not depend on them. Measured is the
process's CPU time on one thread, from the loaded encoder to the written files, so other work on the machine matters
little.
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
STEPS = 20  # steps of the fit of inversion; its time is proportional to them


def seconds(name: str, asked: LookRequest) -> float:
    """Return the CPU seconds of one picture."""
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
