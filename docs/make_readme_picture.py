"""Picture of README.md: three held-out photographs as original, visible patches, and reconstruction.

    for name in raccoon camvid; do python benchmarks/get_data.py $name data; done
    patchloom pretrain data/raccoon/images data/camvid/images --epochs 400 --threads 1 --seed 0 --out runs/photos
    python docs/make_readme_picture.py runs/photos data/raccoon/images 0 3 20

The second argument is the folder of the photographs; the numbers select three of its held-out images, which are listed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from patchloom.data.loader import plain_batches
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.look.sheet import to_pixels
from patchloom.runs.held_out import own_held_out
from patchloom.runs.task import load_task

TARGET = Path(__file__).parent / "_pictures" / "three-photographs.jpg"
COLUMNS = {"original": "original", "given": "seen", "guessed statistics": "recovered"}
TILE, GAP, HEAD = 144, 6, 30  # pixels


def main(run: str, folder: str, numbers: list[int]) -> None:
    """Draw the picture and print its size."""
    task, card, settings, run_folder, _ = load_task(run)
    train = open_data(settings.data).train
    held_out = own_held_out(run_folder, settings, train).parts(train)[1]
    own = [i for i in range(len(held_out)) if str(Path(folder)) in held_out.describe(i)]
    some = held_out.subset([own[i] for i in numbers])
    h, w = task.augment.size
    views = next(plain_batches(some, (h, w), len(some), channels=3)).views[0]
    with torch.inference_mode():
        sheet = task.draw(normalize(views, card.mean, card.std), torch.Generator().manual_seed(0))[0]
    wide = len(numbers) * len(COLUMNS) * TILE + (len(numbers) - 1) * 4 * GAP + (len(COLUMNS) - 1) * len(numbers) * GAP
    picture = Image.new("RGB", (wide, HEAD + TILE), "white")
    pen, font, x = ImageDraw.Draw(picture), ImageFont.load_default(18), 0
    for i in range(len(numbers)):
        for column, heading in COLUMNS.items():
            hidden = sheet.columns[column][i].isnan().any(0).numpy()
            pixels = to_pixels(sheet.columns[column][i : i + 1], card.mean, card.std)[0].copy()
            pixels[hidden] = 232
            picture.paste(Image.fromarray(pixels).resize((TILE, TILE), Image.Resampling.BICUBIC), (x, HEAD))
            pen.text((x + TILE / 2, HEAD / 2), heading, fill="#333", font=font, anchor="mm")
            x += TILE + GAP
        x += 3 * GAP
    picture.save(TARGET, quality=88)
    print(f"{TARGET}: {picture.width}x{picture.height}, {TARGET.stat().st_size / 1000:.0f} kB")
    print("held-out images of the folder:", *(f"{i} {Path(held_out.describe(j)).name}" for i, j in enumerate(own)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(word) for word in sys.argv[3:]] or [0, 1, 2])
