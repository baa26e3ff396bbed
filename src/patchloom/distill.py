"""The verb ``distill``: a backbone of timm learns an encoder's features, and is compared with its controls.

`patchloom.train.loop` trains tasks around a ViT or Swin, whose card, measures and pictures a student cannot have. The
trainer of the evaluations, used here, resumes as exactly.

Letters: b batch, n patches of the teacher's grid, d width of the teacher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.arguments import plain_path
from patchloom.data.augment import ColoredCrop
from patchloom.data.duplicates import copies_among
from patchloom.data.loader import Batch, plain_batches, steps_of, steps_per_epoch
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.display import Displayable, TextTable, Verbatim, duration, print_line, track_progress
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import ImageFeatures, only_labelled, with_labels
from patchloom.evaluate.frozen import FeatureExtractor, encoder_extractor
from patchloom.evaluate.protocols.knn import knn_report
from patchloom.evaluate.protocols.linear import knn_and_linear, linear_report
from patchloom.evaluate.recipes import Course
from patchloom.evaluate.settings import EvalSettings, Parts, Subject, open_with_notes, parts_of, share_nothing
from patchloom.evaluate.trainer import Forward, Trainer, image_batches, keep_until_done
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import grid_size, input_size
from patchloom.nets.student import Student, create_backbone, pooled_features, student_options
from patchloom.nets.swin import refuse_hierarchical
from patchloom.nets.teacher import FrozenTeacher
from patchloom.options.declare import verb
from patchloom.options.verbs import Distill
from patchloom.pace import Pace
from patchloom.results.evaluation import Evaluation
from patchloom.runs.encoder import STUDENT_CARD, STUDENT_WEIGHTS, load_encoder
from patchloom.sizes import in_pixels
from patchloom.system.device import float32_products
from patchloom.system.files import write_whole
from patchloom.system.load import BackgroundLoad, Load

_OF_EVALUATIONS = ("seed", "device", "workers", "model", "group")  # options that the comparison takes as they are
_FORMAT = "patchloom student 1"
_SCALE = (0.14, 1.0)  # area of a crop, as lightly-train's
_WARMUP = 0.05  # share of the steps
_CLIP = 1.0


@dataclass(frozen=True)
class StudentCard:
    """Facts that a student's weights do not show.

    Attributes:
        model: timm's name of the backbone.
        options: further arguments of ``timm.create_model``.
        size: height and width of the training images in pixels.
        mean, std: statistics per channel that normalise images in [0, 1], which are the teacher's.
        teacher: name of the teacher.
        license: the teacher's, as in `EncoderCard`.
    """

    model: str
    options: dict[str, int | list[int]]
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    teacher: str
    license: str


@dataclass(frozen=True, repr=False)
class Distilled(Displayable):
    """A trained student.

    Attributes:
        folder: folder with its weights and card.
        card: the card.
        report: kNN of the student, of its random start and of the teacher; None without labels.
        linear: the same by a linear probe.
        planned: steps and seconds of all trainings of a dry run; else None.
        load: load by other programs while a dry run timed its steps.
    """

    folder: Path
    card: StudentCard
    report: Evaluation | None
    linear: Evaluation | None
    planned: Mapping[str, float] | None = None
    load: Load = Load()

    def parts(self, width: int) -> list[str | TextTable]:
        if self.planned is not None:
            steps, takes = self.planned["steps"], duration(self.planned["seconds"])
            return [
                f"{steps:,} steps take about {takes}, measured on a few of them; without the comparison by labels",
                *filter(None, [self.load.sentence()]),
                Verbatim(f"Everything would go to {self.folder}"),
                "This was a dry run: nothing was trained or written.",
            ]
        said: list[str | TextTable] = []
        for report in (self.report, self.linear):
            said += [] if report is None else [*report.parts(width), ""]
        said += ["No labels were given, so it is unknown what the student is good for: add --labels."] * (not said)
        said.append(Verbatim(f"Weights for timm: {self.folder / STUDENT_WEIGHTS}"))
        return [*said, Verbatim(f"Card: {self.folder / STUDENT_CARD}")]

    def plain(self) -> dict[str, Any]:
        planned = None if self.planned is None else {**self.planned, "load": self.load.plain()}
        files = [] if self.planned else [str(self.folder / name) for name in (STUDENT_WEIGHTS, STUDENT_CARD)]
        reports = {"report": self.report, "linear": self.linear}
        plain = {name: None if one is None else one.plain() for name, one in reports.items()}
        return {"files": files, "student": vars(self.card), **plain, "planned": planned}


@verb(Distill)
@float32_products()
def distill(options: Distill) -> Distilled:
    """Train a backbone of timm on the pooled and the dense features of an encoder.

    The task ``distill`` of `patchloom.pretrain` is another thing: there a ViT predicts features of patches that it does
    not see.

    Raises:
        PatchloomError: a teacher or student that does not fit, or an option out of its range.
    """
    run, student, side, seeds = plain_path(options.run), options.student, options.side, options.seeds
    if seeds > 1 and options.labels is None:
        raise PatchloomError(f"--seeds {seeds} compares trainings: give --labels, too")
    settings = EvalSettings(**{name: getattr(options, name) for name in _OF_EVALUATIONS})
    share_nothing(settings, "distill")
    vit, card = load_encoder(run, options.model)
    plain = refuse_hierarchical(vit, "a teacher of features", "give another encoder")
    if card.sound is not None:
        raise PatchloomError(f"{card.name} is an encoder of recordings, and students are for images: give another")
    size = input_size(vit) if side is None else (side, side)
    source = open_with_notes(options.data, None).train
    if source.sound is not None:
        raise PatchloomError(f"{source.name} holds recordings, and students are for images: give a folder of images")
    if len(source) < 2:
        raise PatchloomError(f"{source.name} has one image, and batch norms need several: add images")
    # before the training, so that a fault in the labels does not cost hours
    parts = None if options.labels is None else parts_of(options.labels, settings, card=card, run=run)
    if parts is not None and (said := _seen_by_student(source, parts.test)):
        parts = replace(parts, story=f"{parts.story} {said}")
    name = Path(str(options.data)).stem if isinstance(options.data, str | Path) else "images"
    folder = Path(options.out) if options.out is not None else Path("runs") / f"{name}-{student}"
    if (folder / STUDENT_WEIGHTS).exists():
        raise PatchloomError(f"{folder} has a student already: choose another --out")
    arguments = student_options(student, size, len(card.mean))
    about = StudentCard(student, arguments, size, tuple(card.mean), tuple(card.std), card.name, card.license)
    print_line(
        f"{student} learns the features of {card.name} from {len(source):,} images of {source.name} at "
        f"{in_pixels(size)} pixels, in {options.epochs:g} epochs"
    )
    course = distillation_course(len(source), options.epochs, options.lr, options.decay, options.batch_size)
    steps = seeds * course.steps
    pace = Pace(steps)
    compared: list[list[Evaluation]] = []  # by seed, then by protocol
    with keep_until_done():
        for one in (replace(settings, seed=options.seed + k) for k in range(seeds)):
            torch.manual_seed(one.seed)
            net = Student(create_backbone(student, arguments), size, len(card.mean), plain.embed_dim, student)
            start = deepcopy(net.backbone)
            teacher = FrozenTeacher(deepcopy(plain), card.mean, card.std, grid_size(plain))
            trainer = begin_distillation(net, teacher, source, size, course, dense=options.dense, settings=one)
            if options.dry_run:
                others = BackgroundLoad()
                planned = {"steps": steps, "seconds": steps * trainer.seconds_of_step()}
                return Distilled(folder, about, None, None, planned, others.load())
            trainer.fit(student if seeds == 1 else f"{student}, seed {one.seed}", pace)
            if one.seed == options.seed:
                first = net.backbone
            if parts is not None:
                nets = {student: net.backbone, f"random {student}": start}
                compared.append(_compare(nets, about, vit, card, parts, one))
        write_whole(folder / STUDENT_CARD, json.dumps({"format": _FORMAT} | asdict(about), indent=2))
        weights = {name: value.detach().cpu().contiguous() for name, value in first.state_dict().items()}
        write_whole(folder / STUDENT_WEIGHTS, lambda path: save_file(weights, path))
    if not compared:
        return Distilled(folder, about, None, None)
    knn, linear = (of_seeds[-1].over_seeds(of_seeds[:-1]) for of_seeds in zip(*compared, strict=True))
    return Distilled(folder, about, knn, linear)


def _seen_by_student(source: Source, test: Source) -> str:
    """Return a sentence on test images that the student is trained on; "" if there are none."""
    contents = source.contents()
    seen = None if contents is None else copies_among(test, contents)
    if seen is None:
        return f"The student's training may have seen the test {test.noun}, without their labels."
    were = f"{seen:,} of {len(test):,} test {test.noun} are among the student's training images"
    return f"{were}, without their labels." if seen else ""


def _compare(
    backbones: Mapping[str, nn.Module],
    about: StudentCard,
    vit: Any,
    card: EncoderCard,
    parts: Parts[Source],
    settings: EvalSettings,
) -> list[Evaluation]:
    """Return kNN and linear probe of the student, of its random start and of the teacher, on the same images."""
    extractors = [FeatureExtractor(name, partial(_features, net, about, settings)) for name, net in backbones.items()]
    extractors.append(encoder_extractor(Subject("teacher", vit, card), settings))
    near, probed, train, test = knn_and_linear(extractors, parts, settings, "mean")
    around = f"{parts.story} The student's features are those that timm's classifier gets."
    reports = []
    for make, rows in ((knn_report, near), (linear_report, probed)):
        _, random, teacher = (row for row in rows if row.quoted)
        against = f"{random.number()} of its random start and {teacher.number()} of the teacher"
        reports.append(make(rows, parts, settings, train, test, around, against=against, trained=True))
    return reports


@torch.inference_mode()
def _features(net: nn.Module, about: StudentCard, settings: EvalSettings, source: Source) -> ImageFeatures:
    source, device = only_labelled(source), settings.torch_device
    net.to(device).eval()
    reading = settings.reading(source)
    batches = plain_batches(source, about.size, channels=len(about.mean), device=device, **reading)
    found, places, unreadable = [], [], list[str]()
    for batch in track_progress(batches, settings.batches(source), f"features of {len(source):,} images"):
        found.append(pooled_features(net, normalize(batch.views[0], about.mean, about.std)).cpu())
        places.append(batch.indices)
        unreadable += batch.unreadable
    return with_labels({"pooled": torch.cat(found)}, source, places, unreadable)


def distillation_course(n: int, epochs: float, lr: float, weight_decay: float, batch: int) -> Course:
    """Return the course of a distillation on ``n`` images; ``epochs`` may be a fraction."""
    steps = steps_of(epochs, n, batch)
    return Course(
        steps=steps,
        per_epoch=steps_per_epoch(n, batch),
        unit="epoch",
        batch=min(batch, n),
        peak=lr,
        rate_option=f"--lr (now {lr:g})",
        warmup=min(round(_WARMUP * steps), steps - 1),
        weight_decay=weight_decay,
        clip=_CLIP,
    )


def begin_distillation(
    student: Student,
    teacher: FrozenTeacher,
    source: Source,
    size: tuple[int, int],
    course: Course,
    *,
    dense: float,
    settings: EvalSettings,
) -> Trainer:
    """Return the training of a student on views of ``size``, which the teacher sees as well.

    ``dense`` is the weight of the loss on the dense features, beside 1 for the pooled ones.
    """
    mean, std = teacher.mean.flatten().tolist(), teacher.std.flatten().tolist()
    identity = {
        "course": asdict(course),
        "dense": dense,
        "size": size,
        "images": source.fingerprint(),
        "teacher": teacher.digest.tolist(),
    }
    grid, augment = grid_size(teacher.encoder), ColoredCrop(size, scale=_SCALE)
    teacher.to(settings.torch_device)

    def loss(forward: Forward, batch: Batch) -> Tensor:
        images = batch.views[0]
        pooled, patches = forward(normalize(images, mean, std), grid)
        if not images.is_floating_point():
            images = images.float() / 255
        whole, each = feature_cosines(pooled, patches, teacher(images))
        return 1 - whole + dense * (1 - each)

    return Trainer(
        student,
        loss,
        image_batches(source, augment, course.batch, len(mean), settings),
        course,
        settings=settings,
        identity=identity,
        noun=source.noun,
        workers=partial(settings.workers_for, source, trained=True),
    )


def feature_cosines(pooled: Tensor, dense: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cosines with a teacher's features [b n d], of pooled features [b d] and of dense ones [b n d]."""
    whole = F.cosine_similarity(pooled.float(), features.mean(1), dim=-1).mean()
    return whole, F.cosine_similarity(dense.float(), features, dim=-1).mean()
