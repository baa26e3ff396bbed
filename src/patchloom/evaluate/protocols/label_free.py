"""Measures without labels: effective dimension of the features, and retrieval of an image by crops and parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import listing
from patchloom.evaluate.label_free import (
    AREAS,
    CROPS_PER_IMAGE,
    DELTA,
    DSE_CLUSTERS,
    DSE_IMAGES,
    NEIGHBOUR_COUNT,
    RANKME,
    SHARES,
    LabelFreeFeatures,
    chance_rows,
    drawn_images,
    extract_label_free,
    extract_label_free_pixels,
    overlap_measure,
    own_crop,
    rows_from_features,
)
from patchloom.evaluate.settings import EvalSettings, parts_of
from patchloom.evaluate.subjects import open_subjects
from patchloom.nets.encode import input_size
from patchloom.nets.swin import is_hierarchical
from patchloom.options.protocols import LabelFree
from patchloom.results.evaluation import Evaluation, as_control, note_unreadable
from patchloom.results.result import Result

# results of benchmarks/label_free.py
_WORTH = (
    "None of these numbers is a verdict. Among equally long trainings, RankMe correlated with the accuracy of kNN on "
    "two data sets (Spearman's ρ 0.5 to 0.6), but not clearly with that of a linear probe; no other measure did so on "
    "both, and an untrained encoder also has a high RankMe. To choose between encoders, label a few hundred "
    "items and use knn."
)


def label_free(run: str | Path, data: DataLike, settings: EvalSettings, options: LabelFree) -> Evaluation:
    """Measure an encoder without labels: rank of its features, and retrieval of images by crops and by few patches.

    Args:
        run, settings, options: as in `patchloom.evaluate.protocols.evaluate`.
        data: images, as for `patchloom.data.sources.open.open_data`; labels are not needed.

    Raises:
        PatchloomError: unknown encoder or data, or fewer than 32 images.
    """
    subjects = open_subjects(run, settings)
    _, vit, card, *_ = subjects.ours
    parts = parts_of(data, settings, labels=False, card=card, run=run)
    source, story = drawn_images(parts.test, options.images, settings.seed), parts.story
    if len(source) < len(parts.test):
        story += f" {len(source):,} of {len(parts.test):,} test {source.noun} were drawn (seed {settings.seed})."
    settings.end_if_dry(source, f"label-free would measure {card.name} on {len(source):,} {source.noun}.", story)
    size, cropped = input_size(vit), source.modality.resizable
    ours = extract_label_free(card.name, vit, card, source, settings)
    rows = [rows_from_features(card.name, ours)]
    for one in subjects.controls:
        found = extract_label_free(one.name, one.vit, one.card, source, settings)
        rows.append(rows_from_features(one.name, found))
    if cropped:
        name = card.modality.raw
        rows.append(rows_from_features(name, extract_label_free_pixels(name, size, card, source, settings)))
    measured = {row.measure for row in rows[0]}
    measure = next(one for one in (own_crop(AREAS[-1]), overlap_measure(SHARES[1]), RANKME) if one in measured)
    quoted = tuple(row for each in rows for row in each if row.measure == measure)
    report = Evaluation.of_test(
        source,
        settings.seed,
        ours.n,
        results=[*sum(rows, []), *chance_rows(ours)],
        method=" ".join(
            [
                *_sentences(ours, source.noun, cropped, is_hierarchical(vit)),
                story,
                *note_unreadable(ours.unreadable, source.noun),
            ]
        ),
        headline=_headline(measure, quoted, f"{ours.n:,} test {source.noun}"),
        quoted=quoted,
        across="measure",
        down=True,
    )
    return report if quoted[0].outcomes is None else report.with_differences(False)


def _sentences(found: LabelFreeFeatures, noun: str, cropped: bool, swin: bool) -> list[str]:
    """Describe each measure in plain words."""
    assert found.whole is not None
    n, d = found.whole.shape
    said = [
        f"Label-free: mean patch tokens of {n:,} {noun}, without labels. RankMe: effective number of directions "
        f"that the {d} numbers of a feature use, at most {min(n, d)}. α-ReQ: decay of the variance over directions, as "
        "j^-α; large if few directions hold almost all variance."
    ]
    if not cropped:
        said.append(
            f"LiDAR and own crops are left out: a crop of a {noun.removesuffix('s')} would be a different sound."
        )
    else:
        areas = _listed(AREAS)
        said.append(
            f"LiDAR: effective number of directions in which images differ more than {CROPS_PER_IMAGE} random crops of "
            f"one image (δ {DELTA:g}). "
            f"Own crop: two random crops of each image, each of {areas} of its area; the fraction of the images whose "
            f"first crop is nearest to its own second crop among those of all {n:,}."
        )
    said.append("IdEst: intrinsic dimension of the features, by minimum spanning trees; its paper prefers a lower one.")
    if found.dense is not None:
        said.append(
            f"DSE, for dense use: separation of {DSE_CLUSTERS} clusters of patches per {noun.removesuffix('s')}, plus "
            f"the fraction of dimensions that patches at one position use, in {min(n, DSE_IMAGES)} {noun}. Compare it "
            "among checkpoints of one run."
        )
    if swin:
        said.append("Neighbours kept is left out: a Swin cannot leave out any of its patches.")
    else:
        said.append(
            f"Neighbours kept: fraction of the {NEIGHBOUR_COUNT} nearest neighbours (by cosine) that remain so if only "
            f"{_listed(SHARES)} of the patches, drawn at random, are seen."
        )
    return [*said, "Nothing was trained or chosen.", _WORTH]


def _listed(shares: Sequence[float]) -> str:
    *first, last = (f"{100 * share:g}" for share in shares)
    return f"{', '.join(first)} or {last} %"


def _headline(measure: str, quoted: Sequence[Result], tested: str) -> str:
    ours, *others = quoted
    against = listing([as_control(row) for row in others], "and")
    return f"{measure[0].upper()}{measure[1:]}: {ours.text()} against {against} on {tested}."
