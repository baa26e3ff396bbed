"""Small folders of images with classes, label maps or boxes, for tests."""

from pathlib import Path

import numpy as np
from PIL import Image


def image(height=8, width=10, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ids(*numbers, height=8, width=10):
    """Return a label map whose columns have the numbers in turn."""
    row = np.array(numbers)[np.arange(width) * len(numbers) // width]
    return np.tile(row, (height, 1)).astype(np.uint8 if row.max() < 256 else np.uint16)


def picture(path: Path, size=(20, 16), **options):
    """Write a grey image of (w, h) pixels, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), 90, np.uint8)).save(path, **options)


def write(folder: Path, files):
    """Write files by their paths in a folder: a text, an array, or None for an image."""
    for seed, (path, content) in enumerate(files.items()):
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            place.write_text(content)
        else:
            Image.fromarray(image(seed=seed) if content is None else content).save(place)
    return folder


def labelled(folder: Path, maps, form="{kind}/{name}", **others):
    """Write a folder of label maps (by name, such as ``train/a``) with an image for each, and other files."""
    files = {}
    for name, content in maps.items():
        files[form.format(kind="images", name=name) + ".jpg"] = None
        files[form.format(kind="labels", name=name) + ".png"] = content
    return write(folder, files | others)


def two_tones(folder: Path) -> Path:
    """Write 12 dark and 12 light images of 20 by 26 pixels, in a folder per class, and a truncated light one."""
    rng = np.random.default_rng(0)
    for label, tone in (("dark", 40), ("light", 200)):
        (folder / label).mkdir(parents=True)
        for i in range(12):
            pixels = np.clip(rng.normal(tone, 30, (20, 26, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{i}.jpg")
    (folder / "light" / "broken.jpg").write_bytes((folder / "dark" / "0.jpg").read_bytes()[:300])
    return folder


def write_noise(folder: Path, count: int = 60, side: int = 32, mode: str = "RGB") -> Path:
    """Write images of noise in the classes a and b in turn; return the folder."""
    rng = np.random.default_rng(0)
    for i in range(count):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (side, side) if mode == "L" else (side, side, 3)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)
    return folder
