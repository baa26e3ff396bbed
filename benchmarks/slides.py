"""A slide of 40,000 x 40,000 pixels: memory, windows a second, and the seconds to the first step.

The slide is drawn: glass with islands of tissue, whose cells are dark discs, in a pyramid of JPEG tiles as scanners
write it. It is written by tifffile, in tiles of 256 pixels at 0.25 microns a pixel.

    python benchmarks/slides.py make /tmp/slides                # about two minutes on a core, 0.6 GB
    python benchmarks/slides.py measure /tmp/slides/slide.tif   # windows a second by patchloom, and by OpenSlide

`measure` prints, for windows of 256 pixels in a random order: the seconds of the first opening, in which blank windows
are found, and of the second, which finds them in the cache; windows a second of one process, in turns with OpenSlide
(the extra ``slides``); and the peak of memory.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SIDE, TILE, MICRONS = 40_000, 256, 0.25
REDUCED = (1, 4, 16)
ROUNDS = 9
PERIOD = 2048  # pixels after which the cells repeat
CELLS = 900  # in a period
GLASS, TISSUE, NUCLEUS = (242, 240, 243), (214, 150, 196), (92, 60, 132)


def cells() -> torch.Tensor:
    """Return one period of tissue, float32 [3 h w] in 0 to 255."""
    rng = np.random.default_rng(0)
    rows = torch.arange(PERIOD)
    colour = torch.tensor(TISSUE, dtype=torch.float32)[:, None, None].expand(3, PERIOD, PERIOD).clone()
    dark = torch.zeros(PERIOD, PERIOD)
    for y, x, radius in zip(*rng.uniform(40, PERIOD - 40, (2, CELLS)), rng.uniform(8, 24, CELLS), strict=True):
        near = slice(int(y) - 30, int(y) + 30), slice(int(x) - 30, int(x) + 30)
        far = (rows[near[0], None] - y) ** 2 + (rows[None, near[1]] - x) ** 2
        dark[near] = torch.maximum(dark[near], torch.sigmoid((radius**2 - far) / 40))
    colour += (torch.tensor(NUCLEUS)[:, None, None] - colour) * dark
    return colour + torch.from_numpy(rng.normal(0, 6, (3, PERIOD, PERIOD)).astype(np.float32))


def tissue() -> torch.Tensor:
    """Return where tissue is, float32 [1 1 625 625] in [0, 1]: smooth noise above a threshold."""
    rng = np.random.default_rng(1)
    noise = torch.from_numpy(rng.normal(size=(1, 1, 12, 12)).astype(np.float32))
    smooth = F.interpolate(noise, size=(625, 625), mode="bicubic")
    return torch.sigmoid((smooth - 0.3) * 20)


def tiles(reduced: int, texture: torch.Tensor, where: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield the tiles of one resolution, row by row, uint8 [256 256 3]."""
    side, rng = SIDE // reduced, np.random.default_rng(reduced)
    small = F.avg_pool2d(texture[None], reduced)[0] if reduced > 1 else texture
    mask = F.interpolate(where, size=(side // 8, side // 8), mode="bilinear")[0, 0]
    glass = torch.tensor(GLASS, dtype=torch.float32)[:, None, None]
    grain = torch.from_numpy(rng.normal(0, 1.5, (3, TILE, TILE)).astype(np.float32))
    blank = (glass + grain).to(torch.uint8).permute(1, 2, 0).numpy()
    period = small.shape[-1]
    for top in range(0, side, TILE):
        for left in range(0, side, TILE):
            rows, columns = (torch.arange(first, first + TILE) for first in (top, left))
            part = mask[(rows // 8).clamp(max=len(mask) - 1)][:, (columns // 8).clamp(max=len(mask) - 1)]
            if part.max() < 0.01:
                yield blank
                continue
            made = small[:, rows % period][:, :, columns % period]
            if part.min() < 0.99:
                made = glass + grain + (made - glass) * part
            yield made.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


def make(folder: Path) -> None:
    """Write the slide."""
    import tifffile

    folder.mkdir(parents=True, exist_ok=True)
    texture, where = cells(), tissue()
    with tifffile.TiffWriter(folder / "slide.tif", bigtiff=True) as writer:
        for number, reduced in enumerate(REDUCED):
            writer.write(
                tiles(reduced, texture, where),
                shape=(SIDE // reduced, SIDE // reduced, 3),
                dtype=np.uint8,
                tile=(TILE, TILE),
                photometric="rgb",
                compression="jpeg",
                compressionargs={"level": 80},
                resolution=(1e4 / MICRONS / reduced, 1e4 / MICRONS / reduced),
                resolutionunit="CENTIMETER",
                subifds=len(REDUCED) - 1 if not number else 0,
                subfiletype=1 if number else 0,
                metadata=None,
            )


def measure(slide: Path, windows: int) -> None:
    """Print the figures of the module's docstring."""
    from patchloom.data.sources.open import open_data

    for kind in ("first", "second"):
        began = time.perf_counter()
        opened = open_data(f"{slide}@tile=256")
        print(f"{kind} opening: {time.perf_counter() - began:.2f} s")
    print(opened.notes[-1])
    order = np.random.default_rng(0).permutation(len(opened.train))[:windows]
    began = time.perf_counter()
    opened.train.read(int(order[0]))
    print(f"first window: {time.perf_counter() - began:.3f} s")
    import openslide  # the extra slides

    other = openslide.OpenSlide(slide)
    rates: dict[str, list[float]] = {"patchloom": [], "OpenSlide": []}
    for some in np.array_split(order, ROUNDS):  # in turns, each on windows that it has not read before
        began = time.perf_counter()
        for i in some[::2].tolist():
            opened.train.read(i)
        rates["patchloom"].append(len(some[::2]) / (time.perf_counter() - began))
        began = time.perf_counter()
        for place in opened.train.parts[some[1::2]]:
            corner = int(place["left"]), int(place["top"])
            np.asarray(other.read_region(corner, 0, (TILE, TILE)).convert("RGB"))
        rates["OpenSlide"].append(len(some[1::2]) / (time.perf_counter() - began))
    for name, each in rates.items():
        print(f"{name}: {np.median(each):,.0f} windows a second [{min(each):,.0f}, {max(each):,.0f}], one process")
    ratios = np.divide(rates["patchloom"], rates["OpenSlide"])
    print(f"ratio {np.median(ratios):.2f} [{ratios.min():.2f}, {ratios.max():.2f}]")
    print(f"peak of memory, with imports: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "measure"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--windows", type=int, default=2000, help="windows to read")
    asked = parser.parse_args()
    if asked.what == "make":
        make(asked.path)
    else:
        measure(asked.path, asked.windows)


if __name__ == "__main__":
    main()
