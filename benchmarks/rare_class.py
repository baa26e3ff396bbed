"""A set with a rare class, on which accuracy misleads: one class of CIFAR-10 against the others, 5 % of the images.

python benchmarks/rare_class.py draw CIFAR10 /tmp/rare      # the images, drawn by a seed
patchloom evaluate linear RUN /tmp/rare --measures all      # or knn, finetune
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np

SHARE = 0.05  # of the rare class


def draw(source: Path, out: Path, rare: str, counts: dict[str, int], seed: int) -> None:
    """Copy images of each part into folders of two classes, ``rare`` and other, drawn by a seed.

    Args:
        source: folder with a folder per part, and in it one per class.
        out: folder to write.
        rare: name of the rare class.
        counts: number of images of each part.
        seed: random seed.
    """
    rng = np.random.default_rng(seed)
    for part, count in counts.items():
        few = round(SHARE * count)
        files = {True: sorted((source / part / rare).iterdir())}
        files[False] = sorted(file for file in (source / part).glob("*/*") if file.parent.name != rare)
        for is_rare, wanted in ((True, few), (False, count - few)):
            folder = out / part / (rare if is_rare else "other")
            folder.mkdir(parents=True, exist_ok=True)
            for place in rng.permutation(len(files[is_rare]))[:wanted]:
                file = files[is_rare][place]
                shutil.copy2(file, folder / f"{file.parent.name}-{file.name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw",))
    parser.add_argument("source", type=Path, help="CIFAR-10 as images in folders: train/CLASS, test/CLASS")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rare", default="cat", help="rare class")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw(given.source, given.out, given.rare, {"train": 4000, "test": 1000}, given.seed)
