"""The verb ``curate``: lists of near copies, of outliers and of images to label, and a page that shows them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.near_duplicates import thumbnails
from patchloom.data.source import Source
from patchloom.data.sources.concat import ConcatSource
from patchloom.data.sources.parts import Parts
from patchloom.display import Displayable, TextTable, Verbatim
from patchloom.embed.curation import NEIGHBOURS, choose_images, find_copies, find_neighbours, unit_vectors
from patchloom.embed.parts import path_of
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import ImageFeatures, about_encoder, load_or_extract, one_pass
from patchloom.evaluate.settings import (
    EvalSettings,
    open_with_notes,
    print_input_notes,
    print_notes_once,
    share_nothing,
)
from patchloom.look.picture_page import PageItem, PageSection, data_uri, picture_page
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.heads import pooled_tokens
from patchloom.nets.swin import Encoder
from patchloom.options.declare import verb
from patchloom.options.verbs import Curate
from patchloom.results.evaluation import note_unreadable
from patchloom.runs.encoder import encoder_place, load_encoder
from patchloom.runs.folder import data_slug
from patchloom.system.device import float32_products
from patchloom.system.files import make_folder, write_whole

UNIQUE, COPIES, OUTLIERS, TO_LABEL, PAGE = (
    *("unique.csv", "copies.csv", "outliers.csv", "to-label.csv"),
    "curated.html",
)
_OUTLIERS, _FEWEST_OUTLIERS = 0.01, 10  # share and least number
_COUNT = 100  # images to label
_MANY = 0.1  # share of near copies from which they may be something else
_CHOICES = {"random": "a random draw", "herding": "MaxHerding"}


class ImageList(NamedTuple):
    """A list of images, a row each.

    Attributes:
        file: name of its file.
        title: heading of its pictures.
        about: what it holds.
        columns: values of the rows by column; the first is the path.
        pictures: images for the page, with a few words each.
    """

    file: str
    title: str
    about: str
    columns: Mapping[str, Sequence[object]]
    pictures: Sequence[tuple[int, str]] = ()

    def __len__(self) -> int:
        return len(self.columns["path"])

    def write(self, folder: Path) -> None:
        """Write the list as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([[*self.columns], *zip(*self.columns.values(), strict=True)])
        write_whole(folder / self.file, text.getvalue().encode("utf-8", "surrogateescape"))


@dataclass(frozen=True, repr=False)
class Curated(Displayable):
    """Result of `curate`.

    Attributes:
        out: folder of the lists.
        data: name of the images.
        noun: images or recordings.
        images: number of images that could be read.
        counts: number of images and content of each list, by file.
        pictures: most pictures of a list on the page; 0 for no page.
        suffix: text after a list's name with which other verbs take it; None if its images have no files.
        notes: sentences on the encoder and on skipped images.
    """

    out: Path
    data: str
    noun: str
    images: int
    counts: Mapping[str, tuple[int, str]]
    pictures: int
    suffix: str | None
    notes: tuple[str, ...] = ()

    def parts(self, width: int) -> Sequence[str | TextTable]:
        rows = [(str(self.out / file), f"{count:,}", about) for file, (count, about) in self.counts.items()]
        if self.suffix is None:
            takes = f"The lists only name their {self.noun}, which are no files of their own."
        else:
            takes = (
                f"patchloom pretrain {self.out / UNIQUE}{self.suffix} trains without near copies. Fill in the column "
                f"label of {self.out / TO_LABEL}: then every verb takes it, too."
            )
        return [
            *self.notes,
            Verbatim(f"{self.images:,} {self.noun} of {self.data}:"),
            TextTable.of([("list", self.noun, ""), *rows], texts=[2]),
            Verbatim(takes),
            *[Verbatim(f"{self.out / PAGE} shows the first of each.")] * bool(self.pictures),
        ]

    def plain(self) -> dict[str, Any]:
        counts = {file: count for file, (count, _) in self.counts.items()}
        return {"out": str(self.out), "images": self.images, "counts": counts, "notes": [*self.notes]}


@verb(Curate)
@float32_products()
def curate(options: Curate) -> Curated:
    """Write lists of near copies, of outliers and of images to label, and a page that shows them.

    Near copies are alike by an encoder's features and by small grey copies of the images. Outliers are the images
    farthest from their 20 nearest. Images to label are drawn at random: in `benchmarks/curation.py` no other choice was
    better on all data, at any number of labels.

    Returns:
        The number of images in each list.

    Raises:
        PatchloomError: there is no such encoder or data, the folder holds files, or too few images can be chosen from.
    """
    out = Path(options.out) if options.out is not None else Path("curated") / data_slug(options.data)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise PatchloomError(f"{out} holds files, perhaps with labels that you filled in: give another folder, --out")
    settings = EvalSettings(
        device=options.device, batch_size=options.batch_size, workers=options.workers, cache=options.cache
    )
    share_nothing(settings, "curate")
    settings.torch_device  # noqa: B018  # refuse an unknown device first
    vit, card = load_encoder(encoder_place(options.run, options.mean, options.std), options.model)
    with print_notes_once():
        opened = with_encoder_sound(open_with_notes(options.data), card.sound, card.name)
        print_input_notes(opened.train, card)
    splits = opened.splits
    images = ConcatSource(opened.train.name, [*splits.values()], opened.train.classes)
    found = features_of(vit, card, images, settings)
    if len(found.indices) < 2:
        raise PatchloomError(f"{images.name} has fewer than two readable {images.noun}: give more")
    split_of = np.repeat([*splits], [len(source) for source in splits.values()])[found.indices.numpy()]
    lists = make_lists(found, images, split_of, options, settings.torch_device)
    make_folder(out)
    for one in lists:
        one.write(out)
    if options.pictures:
        write_whole(out / PAGE, page_of(lists, images, found.indices.tolist(), options.pictures))
    division = f"@{opened.train.division.plain()}" if isinstance(opened.train, Parts) else ""
    suffix = division if _is_file(images.describe(int(found.indices[0]))) else None
    counts = {one.file: (len(one), one.about) for one in lists}
    notes = [*([card.note] if card.note else []), *note_unreadable(found.unreadable, images.noun)]
    if counts[COPIES][0] > _MANY * len(found.indices):
        notes.append(
            f"{counts[COPIES][0]:,} near copies are many. If these are no frames of films, they may only have one "
            f"layout, as radiographs do: look at {out / PAGE}, and raise --alike {options.alike:g}."
        )
    return Curated(out, images.name, images.noun, len(found.indices), counts, options.pictures, suffix, tuple(notes))


def features_of(vit: Encoder, card: EncoderCard, images: Source, settings: EvalSettings) -> ImageFeatures:
    """Return the mean of the patch tokens of each image and its `thumbnails`, in one pass, with the cache."""

    def pools(pixels: Tensor) -> dict[str, Tensor]:
        return {"mean": pooled_tokens(vit, pixels)["mean"], "thumbnails": thumbnails(pixels)}

    def make(source: Source) -> ImageFeatures:
        what = f"{card.name}: features of {len(source):,} {source.noun}"
        return one_pass(vit, card, source, pools, settings.torch_device, **settings.reading(source), what=what)

    about = ("curate", *about_encoder(vit, card, settings.torch_device)) if settings.cache else ()
    return load_or_extract(make, about, images, keep=settings.cache)


def make_lists(
    found: ImageFeatures, images: Source, split_of: np.ndarray, options: Curate, device: torch.device
) -> list[ImageList]:
    """Return the lists of images, by their features ``found`` [n] and their splits [n]."""
    noun, labels = images.noun, found.labels.numpy()
    vectors, small = found.tokens["mean"], found.tokens["thumbnails"]
    near, units = find_neighbours(vectors, device), unit_vectors(vectors)
    # recordings of one word look alike
    copies = find_copies(near, small, options.alike) if images.sound is None else {}
    staying = np.setdiff1d(np.arange(len(units)), [*copies])
    far = near.isolation()
    outliers = staying[np.argsort(-far[staying], kind="stable")]
    outliers = outliers[: max(_FEWEST_OUTLIERS, round(_OUTLIERS * len(outliers)))]
    unlabelled = labels < 0 if (labels < 0).any() else np.ones(len(labels), bool)
    candidates = staying[unlabelled[staying] & (split_of[staying] == "train")]
    count = min(_COUNT, len(candidates)) if options.count == "auto" else options.count
    if count > len(candidates) or not count:
        raise PatchloomError(
            f"--count {max(count, 1)} is more than the {len(candidates):,} {noun} of {images.name} that have no near "
            "copy and no label: give less"
        )
    chosen = choose_images(options.choose, units, candidates, count, options.seed)
    stands = np.bincount((units @ units[chosen].T).argmax(1).numpy(), minlength=len(chosen)).tolist()

    named = [images.describe(i) for i in found.indices.tolist()]
    names = [os.path.abspath(name) if _is_file(name) else name for name in named]  # so that a list may be moved
    classes = np.array([*images.classes, ""])[labels].tolist()
    same = [float(small[i] @ small[j]) for i, j in copies.items()]
    across = sum(split_of[i] != split_of[j] for i, j in copies.items())
    kept = {"path": [names[i] for i in staying]}
    kept |= {"label": [classes[i] for i in staying]} if any(classes) else {}
    kept |= {"split": split_of[staying].tolist()} if len({*split_of}) > 1 else {}
    return [
        ImageList(UNIQUE, "Without near copies", "without near copies", kept),
        ImageList(
            COPIES,
            "Near copies",
            f"near copies of others{f', {across:,} of them of another split' if across else ''}",
            {
                "path": [names[i] for i in copies],
                "copy_of": [names[j] for j in copies.values()],
                "correlation": [f"{one:.4f}" for one in same],
            },
            [
                one
                for (i, j), alike in zip(copies.items(), same, strict=True)
                for one in ((j, "stays"), (i, f"a near copy: correlation {alike:.3f}"))
            ],
        ),
        ImageList(
            OUTLIERS,
            "Outliers",
            f"farthest from their {NEIGHBOURS} nearest, up to {far.max():.1f} times the median: faulty or rare",
            {"path": [names[i] for i in outliers], "times_median": [f"{far[i]:.3f}" for i in outliers]},
            [(i, f"{far[i]:.2f} times the median distance") for i in outliers.tolist()],
        ),
        ImageList(
            TO_LABEL,
            "To label",
            f"to label, by {_CHOICES[options.choose]}",
            {
                "path": [names[i] for i in chosen],
                "label": [""] * len(chosen),
                "share_nearest": [f"{count / len(units):.4f}" for count in stands],
            },
            [(i, f"the nearest of them to {count:,} {noun}") for i, count in zip(chosen, stands, strict=True)],
        ),
    ]


def page_of(lists: Sequence[ImageList], images: Source, rows: Sequence[int], most: int) -> str:
    """Return the page with up to ``most`` pictures of each list; ``rows`` are the numbers of its images."""
    sections = []
    for one in reversed(lists):
        items = [
            PageItem(path_of(images, rows[i]), data_uri(images, rows[i]), words) for i, words in one.pictures[:most]
        ]
        if items:
            sections.append(PageSection(one.title, f"{len(one):,} {images.noun} in {one.file}: {one.about}.", items))
    return picture_page(sections, images.name)


def _is_file(name: str) -> bool:
    return os.path.exists(name.partition("#")[0])
