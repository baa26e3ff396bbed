"""The verb ``distill``: a backbone of timm learns an encoder's features, and is compared with its controls."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from patchloom.arguments import PathLike, plain_path, validate_arguments
from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.display import Displayable, TextTable, TimeLeft, Verbatim, duration, track_progress
from patchloom.distill.training import Distillation
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import ImageFeatures, groups_of, labels_of, only_labelled
from patchloom.evaluate.frozen import FeatureExtractor, encoder_extractor, evaluate_extractor, frozen_report
from patchloom.evaluate.protocols.knn import KNN
from patchloom.evaluate.results import Report
from patchloom.evaluate.settings import EvalSettings, open_with_notes, parts_of
from patchloom.evaluate.trainer import keep_until_done
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.load import check_model
from patchloom.nets.encode import grid_size, input_size
from patchloom.nets.student import (
    CARD,
    WEIGHTS,
    Student,
    StudentCard,
    create_backbone,
    pooled_features,
    save_student,
    student_options,
)
from patchloom.nets.swin import refuse_hierarchical
from patchloom.nets.teacher import FrozenTeacher
from patchloom.runs.encoder import load_encoder
from patchloom.sizes import in_pixels

_LARGEST = 2**14  # pixels of a side


@dataclass(frozen=True, repr=False)
class Distilled(Displayable):
    """A trained student.

    Attributes:
        folder: folder with its weights and card.
        card: the card.
        report: kNN of the student, of its random start and of the teacher; None without labels.
        planned: steps and seconds of all trainings of a dry run; else None.
    """

    folder: Path
    card: StudentCard
    report: Report | None
    planned: Mapping[str, float] | None = None

    def parts(self, width: int) -> list[str | TextTable]:
        """See `Displayable`."""
        if self.planned is not None:
            steps, takes = self.planned["steps"], duration(self.planned["seconds"])
            return [
                f"{steps:,} steps take about {takes}, measured on a few of them; without the comparison by labels",
                Verbatim(f"Everything would go to {self.folder}"),
                "This was a dry run: nothing was trained or written.",
            ]
        said: list[str | TextTable] = [] if self.report is None else [*self.report.parts(width), ""]
        said += ["No labels were given, so it is unknown what the student is good for: add --labels."] * (not said)
        return [*said, Verbatim(f"Weights for timm: {self.folder / WEIGHTS}"), Verbatim(f"Card: {self.folder / CARD}")]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        files = [] if self.planned else [str(self.folder / name) for name in (WEIGHTS, CARD)]
        report = None if self.report is None else self.report.plain()
        return {"files": files, "student": vars(self.card), "report": report, "planned": self.planned}


@validate_arguments
def distill(
    run: PathLike,
    data: DataLike,
    *,
    student: str,
    out: str | Path | None = None,
    labels: DataLike | None = None,
    side: int | None = None,
    epochs: float = 100.0,
    batch_size: int = 64,
    lr: float = 5e-4,
    decay: float = 0.04,
    dense: float = 1.0,
    seed: int = 0,
    seeds: int = 1,
    device: str = "auto",
    workers: int | Literal["auto"] = "auto",
    group: str | None = None,
    model: str | None = None,
    dry_run: bool = False,
) -> Distilled:
    """Train a backbone of timm on the pooled and the dense features of an encoder.

    The task ``distill`` of `patchloom.pretrain` is another thing: there a ViT predicts features of patches that it does
    not see.

    Args:
        run: teacher: folder of a run, ``.safetensors`` file of an encoder, or ``timm:NAME``.
        data: images to train on, without labels.
        student: timm's name of the backbone, such as convnext_atto.
        out: folder of the student; default: DATA-STUDENT in runs/.
        labels: labelled images for the comparison at the end; default: none.
        side: side of the square images that the student sees, in pixels; default: the teacher's size.
        epochs: passes over the images.
        batch_size: images per step.
        lr: peak learning rate of AdamW.
        decay: weight decay.
        dense: weight of the loss on dense features, beside 1 for the pooled ones; 0 for pooled features alone.
        seed: random seed.
        seeds: number of trainings for the comparison, with seeds counted up; the first student is written.
        device: device: auto (a GPU if available), cpu, cuda or another torch device.
        workers: data-loading processes; auto depends on the device.
        group: images of LABELS that a split keeps together, as in pretrain.
        model: timm's model name, if RUN is a file with weights only.
        dry_run: plan only: check the arguments, time a few steps, and write nothing.

    Raises:
        PatchloomError: a teacher or student that does not fit, or an option out of its range.
    """
    run = plain_path(run)
    check_model(run, model)
    for name, value, least in (("epochs", epochs, 0), ("lr", lr, 0), ("batch_size", batch_size, 1)):
        if not least < value < float("inf"):
            raise PatchloomError(f"--{name} must be above {least}, not {value:g}")
    for name, value in (("decay", decay), ("dense", dense)):
        if not 0 <= value < float("inf"):
            raise PatchloomError(f"--{name} must be 0 or more, not {value:g}")
    if seeds < 1 or (seeds > 1 and labels is None):
        raise PatchloomError(f"--seeds {seeds} compares trainings: give 1 or more, and --labels")
    if side is not None and not 8 <= side <= _LARGEST:
        raise PatchloomError(f"--side must be from 8 to {_LARGEST} pixels, not {side}")
    settings = EvalSettings(seed=seed, device=device, workers=workers, model=model, group=group)
    settings.check()
    vit, card = load_encoder(run, model)
    plain = refuse_hierarchical(vit, "a teacher of features", "give another encoder")
    if card.sound is not None:
        raise PatchloomError(f"{card.name} is an encoder of recordings, and students are for images: give another")
    size = input_size(vit) if side is None else (side, side)
    source = open_with_notes(data, None).train
    if source.sound is not None:
        raise PatchloomError(f"{source.name} holds recordings, and students are for images: give a folder of images")
    if len(source) < 2:
        raise PatchloomError(f"{source.name} has one image, and batch norms need several: add images")
    # before the training, so that a fault in the labels does not cost hours
    parts = None if labels is None else parts_of(labels, settings, card=card, run=run)
    name = Path(str(data)).stem if isinstance(data, str | Path) else "images"
    folder = Path(out) if out is not None else Path("runs") / f"{name}-{student}"
    if (folder / WEIGHTS).exists():
        raise PatchloomError(f"{folder} has a student already: choose another --out")
    options = student_options(student, size, len(card.mean))
    about = StudentCard(student, options, size, tuple(card.mean), tuple(card.std), card.name)
    print(
        f"{student} learns the features of {card.name} from {len(source):,} images of {source.name} at "
        f"{in_pixels(size)} pixels, in {epochs:g} epochs"
    )
    recipe: dict[str, Any] = {"epochs": epochs, "lr": lr, "weight_decay": decay, "batch": batch_size, "dense": dense}
    reports = []
    with keep_until_done():
        for one in (replace(settings, seed=seed + k) for k in range(seeds)):
            torch.manual_seed(one.seed)
            net = Student(create_backbone(student, options), size, len(card.mean), plain.embed_dim, student)
            start = deepcopy(net.backbone)
            teacher = FrozenTeacher(deepcopy(plain), card.mean, card.std, grid_size(plain))
            loop = Distillation(net, teacher, source, size, settings=one, **recipe)
            if dry_run:
                planned = {"steps": seeds * loop.steps, "seconds": seeds * loop.steps * loop.seconds_of_step()}
                return Distilled(folder, about, None, planned)
            loop.run(student if seeds == 1 else f"{student}, seed {one.seed}", TimeLeft(loop.steps))
            if one.seed == seed:
                first = net.backbone
            if parts is not None:
                reports.append(
                    _compare({student: net.backbone, f"random {student}": start}, about, vit, card, parts, one)
                )
        save_student(first, about, folder)
    report = reports[-1].over_seeds(reports[:-1]) if reports else None
    return Distilled(folder, about, report)


def _compare(
    backbones: Mapping[str, nn.Module],
    about: StudentCard,
    vit: Any,
    card: EncoderCard,
    parts: Any,
    settings: EvalSettings,
) -> Report:
    """Return kNN of the student, of its random start and of the teacher, on the same images."""
    extractors = [
        FeatureExtractor(name, partial(_features, net, about, settings), None) for name, net in backbones.items()
    ]
    extractors.append(encoder_extractor("teacher", vit, card, settings))
    rows = []
    for extractor in extractors:
        found, train, test = evaluate_extractor(extractor, (KNN,), parts, settings, "mean")
        rows.append(found[KNN.name])
    ours, random, theirs = map(KNN.quoted, rows)
    headline = (
        f"kNN (k={ours.settings['k']}): {ours.text()} against {100 * random.value:.1f} % of its random start and "
        f"{100 * theirs.value:.1f} % of the teacher"
    )
    around = f"{parts.story} The student's features are those that timm's classifier gets."
    return frozen_report(KNN, rows, headline, around, parts, settings, train, test).with_differences(True)


@torch.inference_mode()
def _features(net: nn.Module, about: StudentCard, settings: EvalSettings, source: Source) -> ImageFeatures:
    """Return a backbone's pooled features of every labelled image."""
    source, device = only_labelled(source), settings.torch_device
    net.to(device).eval()
    reading = settings.reading(source)
    batches = plain_batches(source, about.size, channels=len(about.mean), device=device, **reading)
    found, places, unreadable = [], [], list[str]()
    for batch in track_progress(batches, settings.batches(source), f"features of {len(source):,} images"):
        found.append(pooled_features(net, normalize(batch.views[0], about.mean, about.std)).cpu())
        places.append(batch.indices)
        unreadable += batch.unreadable
    indices = torch.cat(places)
    groups = groups_of(source, indices)
    return ImageFeatures({"pooled": torch.cat(found)}, labels_of(source, indices), indices, unreadable, groups=groups)
