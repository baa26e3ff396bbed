"""Picture sheets of runs as data URIs, so small that a page with all of them stays small."""

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

# What is seen on each kind of picture that a run's folder may hold, and what to look for.


class Caption(NamedTuple):
    """A title of a few words, and one or two sentences: what is seen, and what to look for."""

    title: str
    text: str


# by the beginning of the file's name, the longest first that fits; docs/look.md tells more of each
_CAPTIONS = {
    "recovered": Caption(
        "What was withheld, and what came back",
        "Hatched patches were hidden from the encoder. Look whether edges go on across holes and things are completed; "
        "where a hole has the texture of its neighbours alone, a blurred copy would do as well.",
    ),
    "positions": Caption(
        "Patches that were put where they belong",
        "Patches whose position was withheld stand at their true place where it was found; where it was not, it is "
        "hatched. The more is there, the more of the parts was understood.",
    ),
    "rebuilt": Caption(
        "{Noun} put together again",
        "Every patch stands where the network placed it. {An_item} that is right up to a shift, or mirrored, tells "
        "that its parts were understood and their absolute place was not.",
    ),
    "mixed": Caption(
        "Two {noun}, shuffled together",
        "Patches of two {noun} are dealt into two sets and placed. If what belongs to one {item} comes together, its "
        "patches leave the stranger's out.",
    ),
    "views": Caption(
        "What a training step sees",
        "The teacher's view of {an_item}, and the student's with masked patches hatched. You, too, should be able to "
        "tell that they belong together; else the setting is too hard.",
    ),
    "neighbours": Caption(
        "Nearest {noun} in training",
        "Beside each {item} those that its features are nearest to. If all rows show the same, the features have "
        "collapsed; if they share colour alone, colour is what was learnt.",
    ),
    "features": Caption(
        "The teacher's features, and the answer",
        "Patches of one colour are alike to the teacher. Where the answers are the same in all rows, only the mean "
        "feature was learnt.",
    ),
    "components": Caption(
        "Three principal components of features",
        "Patches of one colour are alike to the encoder. Look whether things keep their colour from {item} to "
        "{item}, or colours tell above all where a patch is.",
    ),
    "attention": Caption(
        "What patches attend to",
        "A map for each block and head of what the marked patch attends to. Look for heads that keep to a thing or a "
        "part; flat maps tell nothing.",
    ),
    "attention-mean": Caption(
        "What patches attend to, by the mean of heads",
        "A map for each marked patch, framed in its colour. Look whether it keeps to the thing on which the patch "
        "lies.",
    ),
    "relative": Caption(
        "Attention by offset",
        "How much patches attend to others by the way from one to the other, a map for each head. A dot is a local "
        "head; an even map looks everywhere.",
    ),
    "distances": Caption(
        "How far attention reaches",
        "The mean distance of what is attended to, from block to block, beside the untrained encoder.",
    ),
    "correlation": Caption(
        "What is like a patch",
        "How alike the marked patch is to all others, in its {item} and in the next. Look whether it finds its kind, "
        "or only its brightness.",
    ),
    "correlation-positions": Caption(
        "Every pair of positions",
        "How alike features at two positions are, averaged over {noun}: within {an_item}, and across two. Maps that "
        "are bright around their own position tell of position; more within than across tells of content.",
    ),
    "depth": Caption(
        "Features from block to block",
        "Frequencies, effective rank and likeness of features along the blocks, beside the untrained encoder. A rank "
        "that falls towards 1 is a collapse.",
    ),
    "nearest": Caption(
        "Nearest {noun} by the encoder",
        "Beside each {item} its nearest others. Look what they have in common: the kind of thing, or colour and "
        "brightness alone. What the untrained encoder finds as well was not learnt.",
    ),
    "retrieval": Caption(
        "Nearest crops",
        "Of crops of several {noun} those that are nearest to one. Look whether place and scale are found again in "
        "other {noun}.",
    ),
    "exemplar": Caption(
        "What is like {an_item} of your own",
        "In each {item} the crop that is most like it. Look whether the thing is found, and whether the frame fits.",
    ),
    "inversion": Caption(
        "{Noun} that the encoder takes for these",
        "Pictures made to give the same features from a part of the patches. What comes back is what the "
        "features keep.",
    ),
    "position_map": Caption(
        "Where positions are found",
        "How often patches at each place are found, and by how far they are missed. Bright borders alone tell that "
        "frames, skies and floors are what was learnt.",
    ),
    "layers": Caption(
        "What each layer is good for",
        "Accuracy of a linear probe on each layer. A fall in the last blocks tells that these serve the pretext task.",
    ),
    "segment": Caption(
        "Label maps: the best and the worst test {noun}",
        "The {item}, its label map and the model's. Look what is confused with what, and whether borders are kept.",
    ),
    "detect": Caption(
        "Objects: the best and the worst test {noun}",
        "What is there, and what the model finds. Look for things that are missed, and for boxes around nothing.",
    ),
    "keywords": Caption(
        "Which words are taken for which",
        "Rows are the words that were said, columns the answers. Look for pairs off the diagonal.",
    ),
    "confusion": Caption(
        "Which classes are taken for which", "Rows are the true classes, columns the answers. Look for pairs off it."
    ),
}


def find_caption(stem: str, modality: Modality = IMAGES) -> Caption:
    """The caption of a picture by its file's name without suffix; one that is not known is called by its name."""
    begins = [name for name in _CAPTIONS if stem == name or stem.startswith((f"{name}-", f"{name}_"))]
    if not begins:
        return Caption(stem, "")
    known = max(begins, key=len)
    rest = stem.removeprefix(known).strip("-_")
    title, text = map(modality.words, _CAPTIONS[known])
    return Caption(f"{title} ({rest})" if rest else title, text)


# Images that a run did not train on, for the parts of a page that need some: its own, or others that are given.


class Images(NamedTuple):
    """Images for a run.

    Attributes:
        shown: that are shown, and not trained on as far as is known; None where there are none.
        train: the run's own data, to look for faults in; None where it cannot be opened, or was not asked for.
        what: what ``shown`` is, such as "held-out images of the run"; else why there are none, as a sentence.
    """

    shown: Source | None
    train: Source | None
    what: str


def images_of(run: RunData, data: DataLike | None = None) -> Images:
    """Images for a run's page; never an error."""
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
    """The run's own data, as it is today."""
    if data is not None:  # it was typed, and is the same
        return open_data(run.settings.data, group=run.settings.group)
    return open_stored(run.settings.data, run.name, "give it with --data", group=run.settings.group)


PICTURE_BUDGET = 2_400_000  # bytes of all pictures of a page, as they are written
_LIVE = ("curves",)  # what the page draws itself
# width in pixels and quality of WebP, tried in turn until all pictures fit
_STEPS = ((1600, 85), (1400, 78), (1200, 72), (1000, 68), (800, 62), (640, 55), (480, 50))
_MOST_PIXELS = 10**8  # of a file that is opened


def sheets_of(run: RunData) -> list[Path]:
    """The PNG files in a run's folders of pictures, of its own images first, but for what the page draws itself."""
    folders = [run.folder.pictures, *sorted(run.folder.path.glob("pictures-*"))]
    found = [path for folder in folders for path in sorted(folder.rglob("*.png")) if path.is_file()]
    return [path for path in found if path.stem not in _LIVE]


def encode_sheets(
    sheets: Mapping[Path, tuple[RunData, str]], budget: int = PICTURE_BUDGET
) -> tuple[dict[Path, Picture], list[str]]:
    """Pictures by file, and a sentence for what cannot be shown."""
    opened: dict[Path, Image.Image] = {}
    said = []
    for path in sheets:
        try:
            with open_pillow(path) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ValueError(f"it has {image.width}x{image.height} pixels")
                opened[path] = _reduced(image.convert("RGB"), _STEPS[0][0])
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            said.append(f"{path.name} could not be shown ({problem}).")
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
        said.append(f"{len(opened) - len(made)} of {len(opened)} pictures are left out, so that the page stays small.")
    found = {}
    for path, (uri, width, height) in made.items():
        run, of = sheets[path]
        title, text = find_caption(path.stem, run.modality)
        title = f"{title}, of {of}" if of else title
        found[path] = Picture(title, text, f"{title}: {run.name}, {path.name}", uri, width, height)
    return found, said


def collect_pictures(runs: Sequence[RunData], budget: int = PICTURE_BUDGET) -> tuple[list[list[Picture]], list[str]]:
    """The pictures of each run, and sentences on what cannot be shown."""
    sheets = [sheets_of(run) for run in runs]
    owners = {path: (run, _images(path, run)) for run, paths in zip(runs, sheets, strict=True) for path in paths}
    found, said = encode_sheets(owners, budget)
    return [[found[path] for path in paths if path in found] for paths in sheets], said


def webp(image: Image.Image, width: int, quality: int) -> tuple[str, int, int]:
    """An image as the data URI of a WebP that is at most so wide, and twice as high; its width and its height."""
    image = _reduced(image, width)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=4)
    return data_uri("image/webp", buffer.getvalue()), image.width, image.height


def _reduced(image: Image.Image, width: int) -> Image.Image:
    """At most so wide, and twice as high; the image itself where it is."""
    scale = min(1.0, width / image.width, 2 * width / image.height)
    if scale == 1:
        return image
    smaller = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(smaller, Image.Resampling.LANCZOS)


def data_uri(kind: str, content: bytes) -> str:
    """Bytes as an address that holds them."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _images(path: Path, run: RunData) -> str:
    """Of which images a sheet in ``pictures-IMAGES`` is, as its folder says; "" of the run's own."""
    folder = path.relative_to(run.folder.path).parts[0]
    return folder.removeprefix("pictures-") if folder.startswith("pictures-") else ""


# Truth and answer of segmentation and detection, as pictures between which a slider moves.


SLIDER_BUDGET = 700_000  # bytes of all of a page
_SLIDER_STEPS = ((640, 75), (480, 65), (360, 55), (240, 50))  # width in pixels and quality, tried in turn


def sliders_of(run: RunData, budget: int = SLIDER_BUDGET) -> list[Slider]:
    """What `patchloom evaluate segment` and ``detect`` have drawn of a run; what cannot be read is left out.

    Of several evaluations of one kind each slider says of which it is.
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
            with open_pillow(path) as image:
                uri, wide, high = webp(image.convert("RGB"), width, quality)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None
        made.append(Picture(kind, "", f"{pair.title}: {kind}", uri, wide, high))
    truth, answer = made
    if (truth.width, truth.height) != (answer.width, answer.height):
        return None
    return Slider(pair.title, find_caption(folder.name).text, truth, answer)


# A dozen recordings of a run that learns from sound: their pictures, and the sound to be heard.


COUNT = 12
RECORDING_BUDGET = 1_000_000  # bytes of all sounds as data URIs
_QUALITY = 80
_WORD = 2  # bytes of a sample
_AS_TEXT = 4 / 3  # bytes of a data URI for one of its content


def recordings_of(source: Source, count: int = COUNT, budget: int = RECORDING_BUDGET) -> list[Recording]:
    """Recordings evenly spread over a source; what cannot be read is left out."""
    sound = source.sound
    if sound is None:
        raise PatchloomError(f"{source.name} holds images, of which nothing can be heard")
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
                except Unreadable:  # it was replaced since
                    continue
                found.append(_recording(some, i, shown, samples[:most], len(samples), sound.rate))
    return [one._replace(caption=f"{one.caption} {source.modality.axes}") for one in found]


def _recording(source: Source, i: int, shown: np.ndarray, samples: np.ndarray, length: int, rate: int) -> Recording:
    name = source.place(i) or source.describe(i)
    label = -1 if source.labels is None else int(source.labels[i])
    said = [f"{source.classes[label]}." if label >= 0 else "", f"{length / rate:.3g} s."]
    if len(samples) < length:
        said.append(f"To be heard are the first {len(samples) / rate:.3g} s.")
    uri, width, height = webp(Image.fromarray(shown), max(shown.shape), _QUALITY)
    picture = Picture(name, "", f"Spectrogram of {name}", uri, width, height)
    return Recording(name, " ".join(filter(None, said)), picture, data_uri("audio/wav", wav(samples, rate)))


def wav(samples: np.ndarray, rate: int) -> bytes:
    """A WAV file of one channel; samples [n] int16, ``rate`` of them a second."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(_WORD)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()
