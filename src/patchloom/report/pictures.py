"""Pictures and recordings of runs as data URIs, within a budget for the size of the page."""

from __future__ import annotations

import base64
import io
import wave
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.decode import Unreadable, open_pillow
from patchloom.data.loader import plain_batches
from patchloom.data.modality import IMAGES, Modality
from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import DataLike, is_object_name
from patchloom.data.sources.open import absolute_name, open_data, open_stored
from patchloom.dense.pictures import INDEX, PairFiles, load_pairs
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.report.load_run import RunData
from patchloom.report.page import Picture, Recording, Slider
from patchloom.runs.held_out import own_held_out
from patchloom.system.files import read_bytes

# Captions of the kinds of pictures that a run's folder may hold.


class Caption(NamedTuple):
    """Title of a few words, and one or two sentences on what a picture shows and what to look for."""

    title: str
    text: str


# by the beginning of the file's name, the longest match first; docs/how-to/look.md has the details
_CAPTIONS = {
    "recovered": Caption(
        "Withheld patches and their reconstruction",
        "Hatched patches were hidden from the encoder; the columns beside them show the model's prediction. Edges and "
        "objects that continue across the holes are a good sign; a hole filled with the texture around it is not.",
    ),
    "rebuilt": Caption(
        "{Noun} reassembled from patches",
        "With as much withheld as in training, every patch is drawn at a place of its own where the model put it. "
        "{An_item} that is right except for a shift or a reflection means that the model knows the relative but not "
        "the absolute positions of its parts.",
    ),
    "positions": Caption(
        "Patches whose position was found",
        "Patches whose position was hidden are shown at their true place if the model found it, and are hatched "
        "otherwise. The more patches are shown, the better the model knows how {noun} are composed.",
    ),
    "ratios": Caption(
        "{Noun} reassembled with more and less withheld",
        "Every patch is drawn at a place of its own where the model put it. The columns differ in how much was "
        "withheld, so that they need not be what was trained.",
    ),
    "mixed": Caption(
        "Two {noun}, shuffled together",
        "Patches of two {noun} were divided into two sets and placed by the model. The model separates the two well "
        "if each result shows the patches of only one {item}.",
    ),
    "views": Caption(
        "Views of a training step",
        "Views of the same {item} as the network gets them, with masked patches hatched. If you cannot recognise that "
        "they show the same {item}, the augmentation or the masking is probably too strong.",
    ),
    "neighbours": Caption(
        "Nearest {noun} during training",
        "Each {item} with the {noun} whose features are most similar. If all rows show the same {noun}, the features "
        "have collapsed; if neighbours share only their colours, the encoder has learnt little else.",
    ),
    "features": Caption(
        "The teacher's features and their prediction",
        "Patches of the same colour have similar features. If the predictions look the same in all rows, the model "
        "has learnt only the mean feature.",
    ),
    "components": Caption(
        "Three principal components of the patch features",
        "Patches of the same colour have similar features. It is a good sign if the same kind of object has the same "
        "colour in different {noun}, and a bad one if the colours depend mainly on position.",
    ),
    "attention": Caption(
        "Attention of single patches",
        "One map per block and head: the redder a patch, the more the marked patch attends to it. Look for heads that "
        "follow an object or a part of it; a uniform map has no preference.",
    ),
    "attention-mean": Caption(
        "Attention of single patches, averaged over heads",
        "One map per marked patch, framed in its colour. Look whether the attention stays on the object that the "
        "patch belongs to.",
    ),
    "relative": Caption(
        "Attention by relative position",
        "One map per head of the attention that patches pay to others at each offset. A red dot near the middle is a "
        "local head; a uniform map is a global one.",
    ),
    "distances": Caption(
        "Mean attention distance",
        "The mean distance between a patch and the patches it attends to, for each block, compared with the untrained "
        "encoder.",
    ),
    "correlation": Caption(
        "Similarity to one patch",
        "The similarity of the marked patch to all patches of its own {item} and of the next. Look whether similar "
        "patches show the same kind of thing, or only the same brightness.",
    ),
    "correlation-positions": Caption(
        "Similarity between positions",
        "The mean similarity of the features at each pair of positions, within {an_item} and between two. Maps that "
        "are bright around their own position show that features encode position; higher values within than between "
        "{noun} show that they encode content.",
    ),
    "depth": Caption(
        "Features by block",
        "Frequency content, effective rank and similarity of the features after each block, compared with the "
        "untrained encoder. A rank that falls towards 1 is a collapse.",
    ),
    "nearest": Caption(
        "Nearest {noun}",
        "Each {item} with its nearest neighbours. Look whether they show the same kind of thing, or share only colour "
        "and brightness, which the untrained encoder finds as well.",
    ),
    "retrieval": Caption(
        "Nearest crops",
        "The crops of several {noun} that are nearest to one crop. Look whether those from other {noun} have the same "
        "place and scale.",
    ),
    "exemplar": Caption(
        "Nearest crops to your {item}",
        "The crop of each {item} that is most similar to yours. Look whether it shows the same thing, and whether the "
        "frame fits.",
    ),
    "inversion": Caption(
        "{Noun} with the same features",
        "{Noun} generated so that the encoder computes the same features from a part of their patches. They show "
        "what the features retain.",
    ),
    "position_map": Caption(
        "Accuracy of predicted positions",
        "How often the position of a patch is predicted correctly at each place, and how far wrong predictions are "
        "off. If only the borders are bright, the model has learnt mainly what {noun} look like at their edges.",
    ),
    "layers": Caption(
        "kNN accuracy by layer",
        "kNN accuracy of the features of each layer, compared with the untrained encoder, and with the start of "
        "an adapted one. A drop in the last blocks means that these are specialised in the pretext task.",
    ),
    "segment": Caption(
        "Segmentation: the best and the worst test {noun}",
        "The {item}, its true label map and the predicted one. Look which classes are confused, and whether borders "
        "are sharp.",
    ),
    "detect": Caption(
        "Detection: the best and the worst test {noun}",
        "True and predicted objects. Look for objects that are missed, and for boxes without an object.",
    ),
    "keywords": Caption(
        "Confusion matrix of words",
        "Rows are the spoken words, columns the predictions. Red cells off the diagonal are words that are confused.",
    ),
    "confusion": Caption(
        "Confusion matrix",
        "Rows are the true classes, columns the predictions. Red cells off the diagonal are classes that are confused.",
    ),
}


def find_caption(stem: str, modality: Modality = IMAGES) -> Caption:
    """Return the caption of a picture by its file's name without suffix, which is the title of an unknown kind."""
    begins = [name for name in _CAPTIONS if stem == name or stem.startswith((f"{name}-", f"{name}_"))]
    if not begins:
        return Caption(stem, "")
    known = max(begins, key=len)
    rest = stem.removeprefix(known).strip("-_")
    title, text = map(modality.words, _CAPTIONS[known])
    return Caption(f"{title} ({rest})" if rest else title, text)


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
        opened = _own(run, data)
        opened = with_encoder_sound(opened, run.sound, run.name)
        own = own_held_out(run.folder, run.settings, opened.train).parts(opened.train)[1]
        return Images(own, opened.train, f"held-out {own.noun} of {opened.train.name}")
    except PatchloomError as problem:
        return Images(None, None, str(problem))


def _own(run: RunData, data: DataLike | None) -> Data:
    """Open the run's own data."""
    if data is not None:  # the user gave the same data
        return open_data(run.settings.data, group=run.settings.group)
    return open_stored(run.settings.data, run.name, "give it with --data", group=run.settings.group)


PICTURE_BUDGET = 2_400_000  # bytes of all pictures of a page as data URIs
_LIVE = ("curves",)  # pictures that the page draws itself
# width in pixels and quality of WebP, tried in turn until all pictures fit
_STEPS = ((1600, 85), (1400, 78), (1200, 72), (1000, 68), (800, 62), (640, 55), (480, 50))
_MOST_PIXELS = 10**8  # of a file


def sheets_of(run: RunData) -> list[Path]:
    """Return the PNG files in a run's picture folders, those of its own images first, without the curves."""

    def in_order(path: Path) -> tuple[int, Path]:
        kind = next((i for i, name in enumerate(_CAPTIONS) if path.stem == name), len(_CAPTIONS))
        return kind, path

    folders = [run.folder.pictures, *sorted(run.folder.path.glob("pictures-*"))]
    found = [path for folder in folders for path in sorted(folder.rglob("*.png"), key=in_order) if path.is_file()]
    return [path for path in found if path.stem not in _LIVE]


def encode_sheets(
    sheets: Mapping[Path, tuple[RunData, str]], budget: int = PICTURE_BUDGET
) -> tuple[dict[Path, Picture], list[str]]:
    """Compress pictures to the budget; return them by file, with sentences on those that are left out."""
    opened: dict[Path, Image.Image] = {}
    notes = []
    for path in sheets:
        try:
            with open_pillow(io.BytesIO(read_bytes(path))) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ValueError(f"it has {image.width}x{image.height} pixels")
                opened[path] = _reduced(image.convert("RGB"), _STEPS[0][0])
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            notes.append(f"{path.name} could not be shown ({problem}).")
    made: dict[Path, tuple[str, int, int]] = {}
    for width, quality in _STEPS:
        made = {path: webp(image, width, quality) for path, image in opened.items()}
        if sum(len(uri) for uri, *_ in made.values()) <= budget:
            break
    else:
        left = [path for path in reversed(made)]
        for path in left:
            if sum(len(uri) for uri, *_ in made.values()) <= budget:
                break
            del made[path]
        notes.append(f"{len(opened) - len(made)} of {len(opened)} pictures are left out to keep the page small.")
    found = {}
    for path, (uri, width, height) in made.items():
        run, of = sheets[path]
        title, text = find_caption(path.stem, run.modality)
        title = f"{title}, of {of}" if of else title
        found[path] = Picture(title, text, f"{title}: {run.name}, {path.name}", uri, width, height)
    return found, notes


def collect_pictures(runs: Sequence[RunData], budget: int = PICTURE_BUDGET) -> tuple[list[list[Picture]], list[str]]:
    """Return the pictures of each run, and sentences on those that are left out."""
    sheets = [sheets_of(run) for run in runs]
    owners = {path: (run, _images(path, run)) for run, paths in zip(runs, sheets, strict=True) for path in paths}
    found, notes = encode_sheets(owners, budget)
    return [[found[path] for path in paths if path in found] for paths in sheets], notes


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


def _images(path: Path, run: RunData) -> str:
    """Return IMAGES for a picture in ``pictures-IMAGES``; "" for the run's own images."""
    folder = path.relative_to(run.folder.path).parts[0]
    return folder.removeprefix("pictures-") if folder.startswith("pictures-") else ""


# Ground truth and prediction of segmentation and detection, with a slider between them.


SLIDER_BUDGET = 700_000  # bytes of all sliders of a page
_SLIDER_STEPS = ((640, 75), (480, 65), (360, 55), (240, 50))  # width in pixels and quality, tried in turn


def sliders_of(run: RunData, budget: int = SLIDER_BUDGET) -> list[Slider]:
    """Return the pictures that `patchloom evaluate segment` and ``detect`` drew; unreadable ones are left out.

    If there are several evaluations of one kind, the name of each slider includes the evaluation.
    """
    pairs = [(place.parent, pair) for place in _places(run) for pair in load_pairs(place.parent)]
    kinds = Counter(find_caption(folder.name).text for folder in dict.fromkeys(folder for folder, _ in pairs))
    several = {kind for kind, count in kinds.items() if count > 1}
    found = list[Slider]()
    for width, quality in _SLIDER_STEPS:
        found = [
            one._replace(name=f"{folder.name}: {one.name}") if one.caption in several else one
            for folder, pair in pairs
            if (one := _slider(folder, pair, width, quality)) is not None
        ]
        if _bytes(found) <= budget:
            return found
    while found and _bytes(found) > budget:
        found.pop()
    return found


def _places(run: RunData) -> list[Path]:
    return sorted(run.folder.pictures.glob(f"*/{INDEX}"))


def _bytes(sliders: Sequence[Slider]) -> int:
    return sum(len(one.truth.uri) + len(one.answer.uri) for one in sliders)


def _slider(folder: Path, pair: PairFiles, width: int, quality: int) -> Slider | None:
    made = []
    for kind, path in (("truth", pair.truth), ("answer", pair.answer)):
        try:
            with open_pillow(io.BytesIO(read_bytes(path))) as image:
                uri, wide, high = webp(image.convert("RGB"), width, quality)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None
        title = {"truth": "ground truth", "answer": "prediction"}[kind]
        made.append(Picture(title, "", f"{pair.title}: {title}", uri, wide, high))
    truth, answer = made
    if (truth.width, truth.height) != (answer.width, answer.height):
        return None
    return Slider(pair.title, find_caption(folder.name).text, truth, answer)


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
    places = np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int))
    some = source.subset(places)
    most = int(budget / len(places) / _AS_TEXT / _WORD)
    found = []
    with StatusMessage(f"reading {len(some)} recordings"):
        for batch in plain_batches(some, sound.size, len(some), channels=1):
            drawn = source.modality.colours(batch.views[0], (0.0,), (1.0,))[0]
            pixels = (drawn.permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)
            for i, shown in zip(batch.indices.tolist(), pixels, strict=True):
                try:
                    samples = some.read(i).flatten().numpy()
                except Unreadable:  # the file changed meanwhile
                    continue
                found.append(_recording(some, i, shown, samples[:most], len(samples), sound.rate))
    return [one._replace(caption=f"{one.caption} {source.modality.axes}") for one in found]


def _recording(source: Source, i: int, shown: np.ndarray, samples: np.ndarray, length: int, rate: int) -> Recording:
    name = source.place(i) or source.describe(i)
    label = -1 if source.labels is None else int(source.labels[i])
    caption = [f"{source.classes[label]}." if label >= 0 else "", f"{length / rate:.3g} s."]
    if len(samples) < length:
        caption.append(f"Only the first {len(samples) / rate:.3g} s are included.")
    uri, width, height = webp(Image.fromarray(shown), max(shown.shape), _QUALITY)
    picture = Picture(name, "", f"Spectrogram of {name}", uri, width, height)
    return Recording(name, " ".join(filter(None, caption)), picture, data_uri("audio/wav", wav(samples, rate)))


def wav(samples: np.ndarray, rate: int) -> bytes:
    """Encode int16 samples [n] as a WAV file with one channel and ``rate`` samples per second."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(_WORD)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()
