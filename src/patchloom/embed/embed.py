"""The verb ``embed``: write embeddings of images to files, and search them for the nearest images.

Shapes are as in `patchloom.nets.encode`: b batch, c channels, h w height and width, n patches, d width.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.loader import Batch
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import evenly_spaced
from patchloom.data.sources.parts import Parts
from patchloom.data.stats import normalize
from patchloom.display import Displayable, StatusMessage, TextTable, Verbatim, duration, print_line
from patchloom.embed.formats import FORMATS, Card, Rows, arrow, iterate_rows, read_card, write_rows
from patchloom.embed.near import DRAWN, Neighbour, check_picture, draw_nearest, matching_rows, nearest_rows, open_one
from patchloom.embed.parts import (
    Part,
    PartFolder,
    PartWriter,
    cast_vectors,
    consecutive,
    path_of,
    to_utf8,
)
from patchloom.errors import PatchloomError, TemporaryError, closest_word, listing
from patchloom.estimate import scaled_seconds, time_steps
from patchloom.evaluate.features import digest_tensors, each_batch, runs_in_bfloat16
from patchloom.evaluate.settings import EvalSettings, open_with_notes, print_input_notes, print_notes_once
from patchloom.look.context import NamedEncoder
from patchloom.look.sheet import png_path
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.origin import check_model
from patchloom.nets.encode import (
    attention_heads,
    encode,
    encode_each,
    final_norm,
    input_channels,
    input_size,
    layer_names,
    patch_count,
    patch_layers,
    prefix_count,
)
from patchloom.nets.heads import (
    POOLED,
    InstanceHead,
    check_pooling,
    pooled_tokens,
    select_pooling,
    summaries,
    tokens_of,
)
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.options.declare import verb
from patchloom.options.verbs import LAST, Embed, Tokens
from patchloom.results.evaluation import note_unreadable
from patchloom.runs.encoder import encoder_place, load_encoder, load_extra_module
from patchloom.system.device import choose_workers, float32_products, free_memory
from patchloom.system.distributed import (
    cores_here,
    first_decides,
    launch_once,
    raise_together,
    rank,
    world,
)
from patchloom.system.files import size_in_words
from patchloom.system.load import BackgroundLoad
from patchloom.version import __version__
from patchloom.withhold.encoder_input import all_patches

# Extraction of vectors: layer and pooling.


def vector_extractor(
    vit: Encoder, head: InstanceHead | None, pooling: Tokens, layer: str
) -> Callable[[Tensor], Tensor]:
    """Return a function from normalised images [b c h w] to their vectors [b d] or patch tokens [b n d].

    The vectors are those of the evaluations: for the last layer those of `pooled_tokens`, for others the means of
    `extract` with ``layers``. Patch tokens of the last layer are normed.
    """
    if pooling == "instance" and layer != LAST:
        raise PatchloomError("--pooling instance is only for the last layer: leave out --layer, or use --pooling mean")
    if pooling != "patches":
        check_pooling(pooling, tokens_of(vit, head))
        if layer == LAST:
            return lambda images: select_pooling(pooling, pooled_tokens(vit, images, head))
    number = layer_names(vit).index(layer)

    def take(images: Tensor) -> Tensor:
        given = all_patches(images, patch_count(vit))
        if layer == LAST:
            tokens = final_norm(vit, encode(vit, given, norm=False))
        elif is_hierarchical(vit):
            tokens = next(islice(patch_layers(vit, images), number, None)).flatten(1, 2)
        else:
            tokens = next(islice(encode_each(vit, given), number, None))  # later ones are not computed
        if pooling == "patches":
            return tokens.float()[:, prefix_count(vit) :]
        return select_pooling(pooling, summaries(vit, tokens.float()))

    return take


class Encoding(NamedTuple):
    """Encoder with its extraction of vectors and the settings for computing them.

    Attributes:
        vit, card: the encoder.
        take: result of `vector_extractor`.
        settings: device, batch size and number of processes that read images.
        most: largest number of processes that read images, if it is chosen automatically.
    """

    vit: Encoder
    card: EncoderCard
    take: Callable[[Tensor], Tensor]
    settings: EvalSettings
    most: int = 0

    def workers_for(self, source: Source, batches: int) -> int:
        """Return the number of processes that read a number of batches of a source."""
        found = self.settings.workers_for(source, batches)
        return min(found, self.most) if self.settings.workers == "auto" else found

    def each(
        self,
        source: Source,
        keep: Callable[[np.ndarray, np.ndarray], None],
        workers: int = 0,
        what: str = "",
        first: int = 0,
        stop: int | None = None,
    ) -> None:
        """Call ``keep`` for each batch from ``first`` to ``stop`` - 1 with numbers of images, int64 [b], and vectors
        [b ...] float32.
        """
        at, batch_size = self.settings.torch_device, self.settings.at_once

        def hand(tokens: dict[str, Tensor], batch: Batch) -> None:
            keep(batch.indices.numpy(), tokens["vectors"].numpy())

        def take(images: Tensor) -> dict[str, Tensor]:
            return {"vectors": self.take(images)}

        half = runs_in_bfloat16(at, "auto")
        each_batch(self.vit, self.card, source, take, hand, at, batch_size, workers, half, what, first, stop)

    @torch.inference_mode()
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the vector of one image: (d,), (2d,) or (n, d)."""
        image = torch.zeros(1, input_channels(self.vit), *input_size(self.vit))
        return tuple(self.take(normalize(image, self.card.mean, self.card.std)).shape[1:])


# The card of a file of vectors. It has no date, so that the same command writes the same bytes.


def card_of(
    encoding: Encoding,
    head: InstanceHead | None,
    sources: Mapping[str, Source],
    *,
    pooling: str,
    layer: str,
    dtype: str,
) -> Card:
    """Return everything that the vectors depend on, as JSON values."""
    vit, card, settings = encoding.vit, encoding.card, encoding.settings
    first = next(iter(sources.values()))
    half = runs_in_bfloat16(settings.torch_device, "auto")
    place = Path(first.name).expanduser()
    encoder = {
        "name": card.name,
        "arguments": {"timm": card.timm_name} if card.spec is None else asdict(card.spec),
        "heads": attention_heads(vit),
        "weights_sha256": digest_tensors(vit.state_dict()),
        **({} if head is None else {"head_sha256": digest_tensors(head.state_dict())}),
    }
    made = {
        "encoder": encoder,
        "pooling": pooling,
        "layer": layer,
        "shape": list(encoding.shape()),
        "dtype": dtype,
        "preprocessing": {
            "size": list(input_size(vit)),
            "channels": input_channels(vit),
            "mean": list(card.mean),
            "std": list(card.std),
            **card.modality.preparation(),
        },
        "computed": {
            "device": settings.torch_device.type,
            "products": "bfloat16" if half else "float32",
            "batch_size": settings.at_once,
        },
        "data": {
            # a folder may be spelled in several ways
            "name": to_utf8(str(place) if place.is_dir() else first.name),
            "splits": {name: len(source) for name, source in sources.items()},
            "fingerprint": {name: source.fingerprint() for name, source in sources.items()},
        },
        "classes": list(map(to_utf8, first.classes)),
        "patchloom": __version__,
    }
    found: Card = json.loads(json.dumps(made))
    return found


# Messages before the images are read, and about the result.


_WHICH = POOLED | {"patches": "the patch tokens"}


def describe_vector(card: Card) -> str:
    """Describe the size of a vector, such as "128 numbers in float32"."""
    *patches, width = card["shape"]
    return f"{f'{math.prod(patches):,} times ' if patches else ''}{width:,} numbers in {card['dtype']}"


@dataclass(frozen=True, repr=False)
class EmbeddingsFile(Displayable):
    """File of vectors, or folder of parts.

    Attributes:
        file: path of the file or folder.
        card: how the vectors were made, and their number.
        size: size in bytes.
        made: whether this call made it; otherwise it existed.
        files: number of parts in a folder; 0 for a file.
        notes: sentences on the encoder and on skipped images.
        near: query image of the search; "" for none.
        neighbours: nearest rows, the nearest first.
        picture: path of their picture; "" for none.
        averaged: path of the mean vectors of divided files; "" for none.
    """

    file: Path
    card: Card
    size: int
    made: bool
    files: int = 0
    notes: tuple[str, ...] = ()
    near: str = ""
    neighbours: tuple[Neighbour, ...] = ()
    picture: str = ""
    averaged: str = ""

    def parts(self, width: int) -> Sequence[str | TextTable]:
        shown: list[str | TextTable] = [*self.notes, *map(Verbatim, self.sentences())]
        if self.neighbours:
            shown.append(TextTable.of(self.table()))
        return [*shown, Verbatim(f"Picture: {self.picture}")] if self.picture else shown

    def plain(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "bytes": self.size,
            "made": self.made,
            "parts": self.files,
            "files": self.averaged or None,
            "card": self.card,
            "near": self.near or None,
            "neighbours": [one._asdict() for one in self.neighbours],
            "picture": self.picture or None,
            "notes": [*self.notes],
        }

    def sentences(self) -> list[str]:
        """Return sentences on the contents of the file and on the query image."""
        parts = f" in {self.files:,} {'parts' if self.files > 1 else 'part'}" if self.files else ""
        holds = f"{self.card['rows']:,} vectors of {describe_vector(self.card)}{parts} ({size_in_words(self.size)})"
        said = [
            f"{self.file} has {holds}."
            if self.made
            else f"{self.file} exists and was made with the same settings: {holds}. Nothing was computed again."
        ]
        if self.averaged:
            said.append(f"{self.averaged} has the mean vector of each file.")
        if not self.neighbours:
            return said
        scale = "and the fraction of pairs of rows that are as near"
        return [*said, f"Nearest to {self.near}, by the cosine of the vectors minus their mean, {scale}:"]

    def table(self) -> list[tuple[str, ...]]:
        """Return the nearest rows below a heading, without columns that are empty."""
        near = list[str]()
        for one in self.neighbours:
            if one.itself or math.isnan(one.as_near):
                near.append("")
            elif not one.as_near:
                near.append("no pair")
            else:
                count = 1 / one.as_near
                near.append(f"1 pair in {count:.1f}" if count < 10 else f"1 pair in {float(f'{count:.2g}'):,.0f}")
        columns = {
            "rank": [str(one.rank or "") for one in self.neighbours],
            "cosine": [f"{one.cosine:.4f}" for one in self.neighbours],
            "as near": near,
            "split": [one.split for one in self.neighbours],
            "label": [one.label or "" for one in self.neighbours],
            "path": [f"{one.path}{' (the image itself)' if one.itself else ''}" for one in self.neighbours],
        }
        if len(self.card["data"]["splits"]) == 1:
            del columns["split"]
        for name in ("as near", "label"):
            if not any(columns[name]):
                del columns[name]
        return [tuple(columns), *zip(*columns.values(), strict=True)]


# Estimates of disc space, memory and time.


_FEW, _TIMED = 8, 64  # numbers of images timed; the difference excludes the constant time
_SLOW = 1.0  # seconds above which the second timing has few images, too
_PATHS = 100  # paths sampled to estimate their length
_BESIDE = 10  # bytes of a row for its split and label
_IN_MEMORY = 400  # bytes of a row for path, split and label as Python's text


def check_memory(file: Path, size: int, images: int) -> None:
    """Refuse a single file that does not fit in memory, where it is joined and searched."""
    need = 2 * size + _IN_MEMORY * images
    free = free_memory("cpu") * 2**30
    if need > free:
        raise PatchloomError(
            f"{file} needs about {size_in_words(need)} of memory as one file, and {size_in_words(free)} are free: give "
            f"a folder, as in --to {file.with_suffix('')}/, which keeps the vectors in parts"
        )


def seconds_for(encoding: Encoding, sources: Mapping[str, Source], images: int) -> float | None:
    """Estimate the time for a number of images from a few of them; None if these cannot be read."""
    source = max(sources.values(), key=len)

    def seconds_of_some(count: int, warm_up: bool = True) -> float:
        some = source.subset(evenly_spaced(len(source), count))
        return time_steps(lambda: encoding.each(some, lambda *_: None), least=1, warm_up=warm_up)[0]

    if images > 2 * _TIMED:
        with suppress(PatchloomError):  # none of the few can be read; the full pass reports the reason
            least = seconds_of_some(_FEW)
            slow = least > _SLOW
            more = 2 * _FEW if slow else _TIMED
            return scaled_seconds(images, (_FEW, least), (more, seconds_of_some(more, warm_up=not slow)))
    return None


# Computation: one process plans, all compute the missing parts, and one finishes.


def find_existing(to: Path, parts: PartFolder) -> EmbeddingsFile | None:
    """Return the file or the folder of parts if it exists and was made with the same settings."""
    if to == parts.folder:
        found = None if parts.missing() else parts.finished()
        if found is None:
            return None
    elif not to.exists():
        return None
    else:
        found = read_card(to)
        parts.check(found, to)
        with suppress(PatchloomError):  # of another command's parts
            parts.missing()
            shutil.rmtree(parts.folder, ignore_errors=True)
    lost = found["unreadable"]
    notes = (f"{lost:,} {parts.noun} could not be read when it was made and were skipped.",) if lost else ()
    return _described(to, parts, found, False, notes)


def _described(to: Path, parts: PartFolder, card: Card, made: bool, notes: tuple[str, ...]) -> EmbeddingsFile:
    """Return the result at ``to``, which is a file or the folder of parts."""
    if to == parts.folder:
        return EmbeddingsFile(to, card, parts.size, made, len(parts.all), notes)
    return EmbeddingsFile(to, card, to.stat().st_size, made, notes=notes)


def make(to: Path, parts: PartFolder, encoding: Encoding) -> EmbeddingsFile:
    """Compute the missing parts, distributed over processes, and join them if the result is a single file."""
    with ExitStack() as held:
        done, missing = first_decides(lambda: _plan(to, parts, encoding, held))
        if done is not None:
            return done
        problem = None
        share = slice(len(missing) * rank() // world(), len(missing) * (rank() + 1) // world())
        try:
            for run in consecutive(missing[share]):  # in one pass
                source, writer = parts.sources[run[0].split], PartWriter(parts, run)
                first, stop = run[0].start // parts.batch_size, -(-run[-1].stop // parts.batch_size)
                images = f"{run[-1].stop - run[0].start:,} {source.noun}"
                what = f"{parts.card['encoder']['name']}: vectors of {images}"
                encoding.each(source, writer.add, encoding.workers_for(source, stop - first), what, first, stop)
                writer.finish()
        except PatchloomError as error:
            problem = error
        raise_together(problem)

        def finish() -> EmbeddingsFile:
            card, unreadable = parts.finish()
            if to != parts.folder:
                with StatusMessage(f"writing {to}"):
                    parts.join(to, card)
            return _described(to, parts, card, True, tuple(note_unreadable(unreadable, parts.noun)))

        return first_decides(finish)


def _plan(to: Path, parts: PartFolder, encoding: Encoding, held: ExitStack) -> tuple[EmbeddingsFile | None, list[Part]]:
    """Return the existing result, or announce and return the parts to compute, locked until ``held`` ends."""
    if done := find_existing(to, parts):
        return done, []
    images, whole = sum(map(len, parts.sources.values())), 0.0
    vector = int(np.prod(parts.shape)) * parts.dtype.itemsize
    for source in parts.sources.values():
        lengths = [len(path_of(source, i)) for i in evenly_spaced(len(source), _PATHS)]
        # text of a fixed width has 4 bytes per character of the longest path
        path = 4 * max(lengths) if parts.suffix == ".npz" else sum(lengths) / len(lengths) + 8
        whole += len(source) * (vector + path + _BESIDE)
    size = round(whole)
    place = next(one for one in parts.folder.absolute().parents if one.is_dir())
    need = (size if to == parts.folder else 2 * size) - parts.size
    free = shutil.disk_usage(place).free
    if need > free:
        raise TemporaryError(
            f"{to.name} needs about {size_in_words(need)} while it is made, and {place} has {size_in_words(free)} "
            "free: free some space, choose a --to on a larger disc, or use --dtype float16"
        )
    if to != parts.folder:
        check_memory(to, size, images)
    held.enter_context(parts.locked())
    if done := find_existing(to, parts):  # of another command, for which this one waited
        return done, []
    missing = parts.missing()
    parts.begin()
    rest = sum(part.stop - part.start for part in missing)
    with StatusMessage("estimating the time"):
        others = BackgroundLoad()
        seconds = seconds_for(encoding, parts.sources, rest // world())
        busy = "" if seconds is None else others.load().sentence()
    readers = any(encoding.settings.reading(source)["workers"] for source in parts.sources.values())
    card = parts.card
    takes = "" if seconds is None else f", and it takes {'at most ' * readers}about {duration(seconds)}"
    layer = "" if card["layer"] == "norm" else f" after {card['layer']}"
    print_line(
        f"{images:,} {parts.noun}: for each, {_WHICH[card['pooling']]}{layer} of {card['encoder']['name']}, "
        f"{describe_vector(card)}. {to} will have about {size_in_words(size)}{takes}."
    )
    if busy:
        print_line(f"  {busy}")
    if rest < images:
        print_line(f"{images - rest:,} of them are already done: resuming.")
    return None, missing


def find_nearest(
    near: str | Path, image: Source, done: EmbeddingsFile, parts: PartFolder, encoding: Encoding, top: int
) -> EmbeddingsFile:
    """Return the result with the nearest rows to the only image of the source ``image``."""
    if not done.files:
        check_memory(done.file, done.size, done.card["rows"])
    vectors = list[np.ndarray]()
    with StatusMessage(f"searching {done.file}"):
        encoding.each(image, lambda _, its: vectors.append(cast_vectors(its, done.card["dtype"])))
        query, own = vectors[0][0].astype(np.float32), matching_rows(near, parts.sources)
        found = nearest_rows(_written(done, parts), query, top, own)
    return replace(done, near=str(near), neighbours=tuple(found))


def _written(done: EmbeddingsFile, parts: PartFolder) -> list[Path]:
    """Return the files with the rows of a result."""
    return [part.path for part in parts.all] if done.files else [done.file]


# Mean vectors of files whose windows, slices or frames are the images.


_AVERAGED = {"averaged": "files"}  # field of the card of mean vectors


def check_averages(to: Path, place: Path, parts: PartFolder) -> None:
    """Refuse a file for mean vectors that has another kind or other content, or data without divided files."""
    if to.suffix.lower() not in FORMATS or to == place:
        raise PatchloomError(f"--files {to} must be a file of its own that ends in {listing(FORMATS, 'or')}")
    for source in parts.sources.values():
        if not isinstance(source, Parts) or source.division.whole:
            raise PatchloomError(
                f"--files averages the windows, slices or frames of files, and {source.name} is not divided into "
                "any: leave it out, or add tile=256, slices=1 or fps=1 after @"
            )
    if to.suffix.lower() == ".parquet":
        arrow()  # which may not be installed
    if to.exists():
        parts.check(read_card(to), to, **_AVERAGED)


def write_averages(to: Path, done: EmbeddingsFile, parts: PartFolder) -> None:
    """Write the mean vector of the rows of each divided file; its label is theirs, if they have the same."""
    totals: dict[tuple[str, str], Any] = defaultdict(float)
    counts, labels = Counter[tuple[str, str]](), defaultdict[tuple[str, str], set[str | None]](set)
    for rows in iterate_rows(_written(done, parts)):
        for vector, path, split, label in zip(*rows, strict=True):
            key = split, path.rpartition("#")[0]
            totals[key] = totals[key] + vector.astype(np.float64)
            counts[key] += 1
            labels[key].add(label)
    means = np.stack([total / counts[key] for key, total in totals.items()])
    splits, paths = zip(*totals, strict=True)
    own = [next(iter(each)) if len(each) == 1 else None for each in labels.values()]
    rows = Rows(cast_vectors(means, parts.dtype), [*paths], [*splits], own)
    write_rows(to, rows, done.card | _AVERAGED | {"rows": len(means)})


def parse_target(to: str | Path, format: str) -> tuple[Path, Path, str]:
    """Return the path of the result, the folder of its parts, and their file suffix."""
    path = folder = Path(to).expanduser()
    suffix = path.suffix.lower()
    if str(to).endswith("/") or not suffix or (path.is_dir() and suffix not in FORMATS):
        if path.is_file():
            raise PatchloomError(
                f"--to {to} is a file of another kind: give a folder, or a file that ends in {listing(FORMATS)}"
            )
        there = {one.suffix for one in path.glob("*-*") if one.suffix in FORMATS}
        suffix = f".{format}" if format != "auto" else min(there, default=".parquet")
        if there - {suffix}:
            others = min(there - {suffix})
            raise PatchloomError(f"{path} has parts in {others}: leave out --format, or choose another --to")
    else:
        if suffix not in FORMATS:
            ending = closest_word(suffix, FORMATS) or ".parquet"
            raise PatchloomError(
                f"--to {path} has no known suffix: end the file in {listing(FORMATS)}, as in {path.stem}{ending}, or "
                f"give {path}/ for a folder of parts"
            )
        if path.is_dir():
            raise PatchloomError(f"--to {path} is a folder: give a file in it, or {path}/")
        if format not in ("auto", suffix[1:]):
            raise PatchloomError(f"--format {format} is not that of {path}: leave it out, or give a folder")
        folder = path.with_name(f"{path.name}.parts")
    if suffix == ".parquet":
        arrow()  # which may not be installed
    return path, folder, suffix


# options that the encoding of images takes as the evaluations do
_OF_EVALUATIONS = ("device", "batch_size", "workers", "model")


@verb(Embed)
@float32_products()
def embed(options: Embed) -> EmbeddingsFile:
    """Write the embeddings of images to Parquet, npz or safetensors files, with a description of how they were made.

    They are the features that the evaluations use. Each part has about a thousand images and is a complete file, so any
    number of processes can write parts; an interrupted command resumes when it is repeated.

    Returns:
        Description of the file or folder, with the nearest neighbours.

    Raises:
        PatchloomError: if there is no such encoder, data or layer, the file exists with other settings or cannot be
            written, or there is no room for it.
    """
    if options.to is None:
        raise PatchloomError("--to is missing: give a FOLDER, FILE.parquet, FILE.npz or FILE.safetensors")
    near, top, picture, pooling = options.near, options.top, options.picture, options.pooling
    if picture is not None:
        if near is None:
            raise PatchloomError("--picture draws the neighbours of one image: add --near IMAGE")
        png_path(picture)
        if top > DRAWN:
            raise PatchloomError(f"--picture has room for {DRAWN} neighbours: lower --top {top}")
    settings = EvalSettings(**{name: getattr(options, name) for name in _OF_EVALUATIONS})
    run = encoder_place(options.run, options.mean, options.std)
    check_model(run, options.model)
    place, folder, suffix = parse_target(options.to, options.format)
    asked = None if near is None else open_one(near)
    launch_once(settings.torch_device.type, options.devices)
    vit, about = load_encoder(run, options.model)
    head = load_extra_module(run, "pooling") if pooling == "instance" else None
    names = layer_names(vit)
    layer = " ".join(str(options.layer).lower().replace("_", " ").split())
    if re.fullmatch(r"[0-9]{1,9}", layer):  # the number of a block
        layer = f"{names[1].split()[0]} {int(layer)}"
    if layer not in names:
        blocks = f"{names[1]} to {names[-2].split()[1]}"
        raise PatchloomError(
            f"--layer {options.layer} does not exist: this encoder has {listing([names[0], blocks, LAST], 'and')}"
        )
    most = choose_workers(settings.torch_device.type, cores_here())[0]
    encoding = Encoding(vit, about, vector_extractor(vit, head, pooling, layer), settings, most)
    one = None if asked is None else with_encoder_sound(asked, about.sound, about.name).train
    with print_notes_once():
        opened = with_encoder_sound(open_with_notes(options.data), about.sound, about.name)
        print_input_notes(opened.train, about)
    splits = opened.splits
    sources = splits if len(splits) > 1 else {"all": opened.train}
    if picture is not None and near is not None:
        check_picture(Path(picture).expanduser(), near, sources)
    with StatusMessage("fingerprinting the encoder and the images"):
        card = card_of(encoding, head, sources, pooling=pooling, layer=layer, dtype=options.dtype)
    if head is not None:
        head.to(settings.torch_device)
    parts = PartFolder(folder, suffix, sources, card, settings.at_once)
    averaged = None if options.files is None else Path(options.files).expanduser()
    if averaged is not None:
        check_averages(averaged, place, parts)
    done = make(place, parts, encoding)
    if averaged is not None:
        first_decides(partial(write_averages, averaged, done, parts))
        done = replace(done, averaged=str(averaged))
    if one is not None and near is not None:
        done = first_decides(lambda: find_nearest(near, one, done, parts, encoding, top))
        if picture is not None:
            named_vit, out = NamedEncoder(about.name, vit, about), Path(picture).expanduser()
            first_decides(lambda: str(draw_nearest(named_vit, str(near), one, done.neighbours, sources, out)))
            done = replace(done, picture=str(out))
    return replace(done, notes=(about.note, *done.notes) if about.note else done.notes)
