"""Pictures and recordings of runs as data URIs, within a budget for the size of the page."""

from __future__ import annotations

import base64
import io
import wave
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.decode import Unreadable, open_pillow
from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike, evenly_spaced, is_object_name
from patchloom.data.sources.open import absolute_name, open_data, open_stored
from patchloom.dense.pictures import pair_files
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.look.sheet import Caption, read_caption
from patchloom.report.page import Picture, Recording, Slider
from patchloom.runs.held_out import own_held_out
from patchloom.runs.past import RunData
from patchloom.system.files import read_bytes

# Images for the parts of a page that need some: those that the run held out, or others that the user gives.


class Images(NamedTuple):
    """Images for the page of a run.

    Attributes:
        shown: images to show, not trained on as far as is known; None without any.
        train: the run's own data, to search for copies; None if it cannot be opened or other data were given.
        what: description of ``shown``, such as "held-out images of the run"; without any, the reason as a sentence.
    """

    shown: Source | None
    train: Source | None
    what: str


def images_of(run: RunData, data: DataLike | None = None) -> Images:
    """Open images for a run's page; errors are returned as text."""
    try:
        if data is not None and (absolute_name(data) != run.settings.data or is_object_name(run.settings.data)):
            opened = with_encoder_sound(open_data(data), run.sound, run.name)
            return Images(opened.test or opened.train, None, f"images of {(opened.test or opened.train).name}")
        settings = run.settings
        stored = settings.data, run.name, "give it with --data"
        # with data, the user gave the same
        opened = (
            open_stored(*stored, group=settings.group) if data is None else open_data(stored[0], group=settings.group)
        )
        opened = with_encoder_sound(opened, run.sound, run.name)
        own = own_held_out(run.folder, run.settings, opened.train).parts(opened.train)[1]
        return Images(own, opened.train, f"held-out {own.noun} of {opened.train.name}")
    except PatchloomError as problem:
        return Images(None, None, str(problem))


# The pictures in a run's folder, with the captions beside them.


PICTURE_BUDGET = 2_400_000  # bytes of all pictures of a page as data URIs
# width in pixels and quality of WebP, tried in turn
_STEPS = ((1600, 85), (1400, 78), (1200, 72), (1000, 68), (800, 62), (640, 55), (480, 50))
_MOST_PIXELS = 10**8  # of a file


def collect_pictures(runs: Sequence[RunData], budget: int = PICTURE_BUDGET) -> tuple[list[list[Picture]], list[str]]:
    """Return the pictures of each run, compressed to a budget of bytes, and sentences on those that are left out."""
    captions = [captions_of(run) for run in runs]
    encoded, notes = _compress([path for its in captions for path in its], budget, _STEPS)
    pictures = [
        [
            Picture(title, text, f"{title}: {run.name}, {path.name}", *encoded[path])
            for path, (title, text, *_) in its.items()
            if path in encoded
        ]
        for run, its in zip(runs, captions, strict=True)
    ]
    return pictures, notes


def captions_of(run: RunData) -> dict[Path, Caption]:
    """Return the captions of the PNG files in a run's picture folders in the order of a page, without the curves.

    Those of the run's own images come first. Titles that would be equal end with the file's name.
    """
    found: dict[Path, Caption] = {}
    for folder in (run.folder.pictures, *sorted(run.folder.path.glob("pictures-*"))):
        files = [path for path in sorted(folder.rglob("*.png")) if path.is_file()]
        captions = {path: read_caption(path) for path in files if path != run.folder.pictures / "curves.png"}
        times = Counter(caption.title for caption in captions.values())
        for path, caption in sorted(captions.items(), key=lambda one: one[1].order):
            title = caption.title if times[caption.title] == 1 else f"{caption.title} ({path.stem})"
            of = "" if folder == run.folder.pictures else f", of {folder.name.removeprefix('pictures-')}"
            found[path] = caption._replace(title=f"{title}{of}")
    return found


def _compress(
    files: Sequence[Path], budget: int, steps: Sequence[tuple[int, int]]
) -> tuple[dict[Path, tuple[str, int, int]], list[str]]:
    """Compress pictures to the budget; return data URIs and sizes by file, and sentences on those left out.

    ``steps``: width in pixels and quality, tried in turn.
    """
    opened: dict[Path, Image.Image] = {}
    notes = []
    for path in files:
        try:
            with open_pillow(io.BytesIO(read_bytes(path))) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ValueError(f"it has {image.width}x{image.height} pixels")
                opened[path] = _reduced(image.convert("RGB"), steps[0][0])
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            notes.append(f"{path.name} could not be shown ({problem}).")
    made: dict[Path, tuple[str, int, int]] = {}
    for width, quality in steps:
        made = {path: webp(image, width, quality) for path, image in opened.items()}
        if sum(len(uri) for uri, *_ in made.values()) <= budget:
            return made, notes
    while sum(len(uri) for uri, *_ in made.values()) > budget:
        made.popitem()
    notes.append(f"{len(opened) - len(made)} of {len(opened)} pictures are left out to keep the page small.")
    return made, notes


def webp(image: Image.Image, width: int, quality: int) -> tuple[str, int, int]:
    """Encode an image as WebP, at most ``width`` wide and twice as high; return data URI, width and height."""
    image = _reduced(image, width)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=4)
    return data_uri("image/webp", buffer.getvalue()), image.width, image.height


def _reduced(image: Image.Image, width: int) -> Image.Image:
    """Shrink an image to at most ``width``, and twice that in height."""
    scale = min(1.0, width / image.width, 2 * width / image.height)
    if scale == 1:
        return image
    smaller = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(smaller, Image.Resampling.LANCZOS)


def data_uri(kind: str, content: bytes) -> str:
    """Encode bytes as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


# Ground truth and prediction of segmentation and detection, with a slider between them.


SLIDER_BUDGET = 700_000  # bytes of all sliders of a page
_SLIDER_STEPS = ((640, 75), (480, 65), (360, 55), (240, 50))  # width in pixels and quality, tried in turn


def sliders_of(run: RunData, budget: int = SLIDER_BUDGET) -> list[Slider]:
    """Return the pairs that `patchloom evaluate segment` and ``detect`` drew; unreadable ones are left out.

    If there are several evaluations of one kind, the name of each slider includes the evaluation.
    """
    captions = {path: caption for path, caption in captions_of(run).items() if caption.pairs}
    times = Counter(caption.text for caption in captions.values())
    pairs = []
    for path, caption in captions.items():
        of = f"{path.stem}: " if times[caption.text] > 1 else ""
        for number, title in enumerate(caption.pairs, start=1):
            pairs.append((f"{of}{title}", caption.text, pair_files(path, number)))
    encoded, _ = _compress([file for *_, files in pairs for file in files], budget, _SLIDER_STEPS)
    found = []
    for name, text, (truth, answer) in pairs:
        if truth in encoded and answer in encoded and encoded[truth][1:] == encoded[answer][1:]:
            drawn = (("ground truth", truth), ("prediction", answer))
            found.append(Slider(name, text, *(Picture(of, "", f"{name}: {of}", *encoded[file]) for of, file in drawn)))
    return found


# Recordings of a run on sound: spectrograms and the sound to play.


COUNT = 12
RECORDING_BUDGET = 1_000_000  # bytes of all sounds as data URIs
_QUALITY = 80
_WORD = 2  # bytes per sample
_AS_TEXT = 4 / 3  # bytes of a data URI per byte of content


def recordings_of(source: Source, count: int = COUNT, budget: int = RECORDING_BUDGET) -> list[Recording]:
    """Return recordings evenly spread over a source; unreadable ones are left out."""
    sound = source.sound
    if sound is None:
        raise PatchloomError(f"{source.name} holds images, not recordings")
    some = source.subset(evenly_spaced(len(source), count))
    most = int(budget / len(some) / _AS_TEXT / _WORD)
    found = []
    with StatusMessage(f"reading {len(some)} recordings"):
        for batch in plain_batches(some, sound.size, len(some), channels=1):
            colours = source.modality.colours(batch.views[0], (0.0,), (1.0,))[0]
            pixels = (colours.permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)
            for i, shown in zip(batch.indices.tolist(), pixels, strict=True):
                try:
                    samples = some.read(i).flatten().numpy()
                except Unreadable:  # the file changed meanwhile
                    continue
                name = some.place(i) or some.describe(i)
                label = -1 if some.labels is None else int(some.labels[i])
                caption = f"{some.classes[label]}. " if label >= 0 else ""
                caption += f"{len(samples) / sound.rate:.3g} s. "
                if len(samples) > most:
                    caption += f"Only the first {most / sound.rate:.3g} s are included. "
                drawn = webp(Image.fromarray(shown), max(shown.shape), _QUALITY)
                picture = Picture(name, "", f"Spectrogram of {name}", *drawn)
                uri = data_uri("audio/wav", wav(samples[:most], sound.rate))
                found.append(Recording(name, f"{caption}{source.modality.axes}", picture, uri))
    return found


def wav(samples: np.ndarray, rate: int) -> bytes:
    """Encode int16 samples [n] as a WAV file with one channel and ``rate`` samples per second."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(_WORD)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()
