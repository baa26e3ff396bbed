"""Makes the runs of `claims.py` and measures them: one arm, one seed. What is made already is not made again.

In the folder of the study: ``data`` (CIFAR-10's images that it uses, with their labels), ``images`` (the training
images without), ``runs/ARM-SEED`` (as `patchloom pretrain` leaves them), ``right/ARM-SEED/MEASURE.npy`` (whether each
test image was classified rightly), ``label-free/ARM-SEED.json``, ``paces`` and ``logs``.
"""

from __future__ import annotations

import fcntl
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from claims_declared import ARMS, EPOCHS, FROZEN, IMAGES, SAME, SCRATCH, SEEDS, Arm
from pace import seconds_a_step

import patchloom
from patchloom.data import Data, open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import EvalSettings, extract, linear_probe
from patchloom.evaluate.label_free.rows import label_free_rows
from patchloom.evaluate.neighbours import knn_right
from patchloom.evaluate.report import Report
from patchloom.files import write_whole
from patchloom.nets.weights import untrained_twin

K = 20
UNTRAINED = "untrained"
LABEL_FREE_IMAGES = 500
# the whole encoder and a head, by the recipe small; nothing is held out, so that the last epoch is tested
FINETUNING = {"batch_size": 32, "validation": 0.0, "precision": "float32", "device": "cpu", "workers": 0}
LENGTHS = {"few": {"epochs": 20, "max_train": 500}, "all": {"epochs": 4}}


def plain(arm: str) -> str:
    """The name of an arm, as a file's."""
    return re.sub(r"[^\w.]+", "-", arm.replace("γ", "g").replace("η", "eta"))


@dataclass(frozen=True)
class Study:
    """The folder of the study, and its lengths, which tests make smaller.

    Attributes:
        out: the folder.
        epochs: of pre-training.
        images: of each class, to train and to test on.
        lengths: of fine-tuning, by measure.
    """

    out: Path
    epochs: float = EPOCHS
    images: int = IMAGES
    lengths: dict[str, dict[str, int]] | None = None

    def run(self, arm: str, seed: int) -> Path:
        """The folder of the arm's pre-training; of an arm without one, that of the arm whose encoder it takes."""
        return self.out / "runs" / f"{plain(ARMS[arm].of or arm)}-{seed}"

    def right(self, arm: str, seed: int, measure: str) -> Path:
        """Where it is kept which test images were classified rightly: [n] bool."""
        return self.out / "right" / f"{plain(arm)}-{seed}" / f"{measure}.npy"

    def classifier(self, arm: str, seed: int) -> Path:
        """The arm's classifier that was fine-tuned with all labels."""
        return self.out / "classifiers" / f"{plain(arm)}-{seed}.safetensors"

    def label_free(self, arm: str, seed: int) -> Path:
        """Its measures without labels."""
        return self.out / "label-free" / f"{plain(arm)}-{seed}.json"

    def is_done(self, arm: str, seed: int) -> bool:
        """Whether all measures of an arm with a seed are there."""
        return all(self.right(arm, seed, measure).exists() for measure in ARMS[arm].measures)

    def read(self, arm: str, measure: str, seeds: int = SEEDS) -> np.ndarray | None:
        """[s n] which test images were classified rightly; None where not every seed is there."""
        paths = [self.right(arm, seed, measure) for seed in range(seeds)]
        return np.stack([np.load(path) for path in paths]) if all(path.exists() for path in paths) else None

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Wait until no other process does what has that name, which ends with the process that does it."""
        path = self.out / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def needed(arm: str, seed: int) -> list[tuple[str, int]]:
    """Arms and seeds that have to be done before this one."""
    of = ARMS[arm]
    before = [(name, seed) for name in (of.of, of.time_of, of.teacher) if name]
    return before + [(name, (seed + more) % SEEDS) for name, more in of.members]


def copy_images(study: Study, cifar: Path) -> None:
    """The first images of each class that a generator with seed 0 names, into the folder of the study.

    Raises:
        PatchloomError: they are not there, or too few.
    """
    if (study.out / "images").exists():
        return
    for part in ("train", "test"):
        classes = sorted(path for path in (cifar / part).glob("*") if path.is_dir())
        if not classes:
            raise PatchloomError(f"{cifar / part} has no folder of a class: unpack ../shared/data/cifar10.tar there")
        rng = np.random.default_rng(0)
        for folder in classes:
            files = sorted(folder.iterdir())
            if len(files) < study.images:
                raise PatchloomError(f"{folder} has {len(files):,} images, and the study takes {study.images:,}")
            place = study.out / "data" / part / folder.name
            place.mkdir(parents=True, exist_ok=True)
            for i in np.sort(rng.permutation(len(files))[: study.images]):
                shutil.copy(files[i], place)
    half = study.out / ".images"
    half.mkdir(exist_ok=True)
    for path in (study.out / "data" / "train").glob("*/*"):
        shutil.copy(path, half / f"{path.parent.name}-{path.name}")
    half.rename(study.out / "images")


def make(study: Study, arm: str, seed: int) -> None:
    """Pre-train an arm with a seed, if it does, and measure it."""
    with study.alone(f"{plain(arm)}-{seed}"):
        of = ARMS[arm]
        if of.task:
            pretrain(study, arm, seed)
        for measure in of.measures:
            if measure in LENGTHS:
                once(study, arm, seed, measure, ensemble if of.members else finetune)
            else:
                frozen(study, arm, seed)
        if of.task and not (kept := study.label_free(arm, seed)).exists():
            write_whole(kept, json.dumps(without_labels(study, arm, seed), indent=1))


def pretrain(study: Study, arm: str, seed: int) -> None:
    """As `patchloom pretrain` does it; a run that is there is gone on with."""
    of, task, epochs = ARMS[arm], dict(ARMS[arm].task), study.epochs
    if of.teacher:
        task["features_of"] = str(study.run(of.teacher, seed))
    if of.time_of:
        epochs = float(f"{epochs * times_as_fast(study, arm, task):.4g}")
    patchloom.pretrain(study.out / "images", task, out=study.run(arm, seed), epochs=epochs, seed=seed, **SAME)


def times_as_fast(study: Study, arm: str, task: dict[str, object]) -> float:
    """How many images an arm trains on while the arm that sets its time does on one; measured once for all seeds."""
    kept = study.out / "paces" / f"{plain(arm)}.json"
    with study.alone(f"pace-{plain(arm)}"):
        if not kept.exists():
            other = dict(ARMS[ARMS[arm].time_of].task)
            found = seconds_a_step(str(study.out / "images"), {"other": other, "arm": task}, SAME, rounds=7, steps=10)
            write_whole(kept, json.dumps({name: seconds / images for name, (seconds, images) in found.items()}))
        seconds = json.loads(kept.read_text())
    return seconds["other"] / seconds["arm"]


def once(study: Study, arm: str, seed: int, measure: str, of: Callable[[Study, str, int, str], Report]) -> None:
    """Keep which test images the first row of a report has right, if that is not kept yet."""
    kept = study.right(arm, seed, measure)
    if not kept.exists():
        keep(kept, of(study, arm, seed, measure).quoted[0].right)


def keep(path: Path, right: torch.Tensor | None) -> None:
    """Write what [n] bool says."""
    assert right is not None
    content = io.BytesIO()
    np.save(content, right.numpy())
    write_whole(path, content.getvalue())


def finetune(study: Study, arm: str, seed: int, measure: str) -> Report:
    """The whole encoder with a head; the control of one arm is an arm of its own, so it has none here."""
    scratch = {"from_scratch": True} if arm == SCRATCH else {"control": False}
    out = {}
    if measure == "all" and arm != SCRATCH:
        study.classifier(arm, seed).parent.mkdir(parents=True, exist_ok=True)
        out["out"] = str(study.classifier(arm, seed))
    length = (study.lengths or LENGTHS)[measure]
    given = {**FINETUNING, **length, **scratch, **out, "positions": ARMS[arm].positions, "seed": seed}
    return patchloom.evaluate("finetune", study.run(arm, seed), study.out / "data", **given)


def ensemble(study: Study, arm: str, seed: int, measure: str) -> Report:
    """The mean of the softmax outputs of the members' classifiers."""
    first, *others = (study.classifier(name, one) for name, one in needed(arm, seed))
    given = {"others": ",".join(map(str, others)), "device": "cpu", "workers": 0}
    return patchloom.evaluate("ensemble", first, study.out / "data", **given)


def frozen(study: Study, arm: str, seed: int) -> None:
    """kNN and the linear probe of an arm's features, if they are not kept yet; beside them those of its twin."""
    wanted = {name: study.right(arm, seed, name) for name in FROZEN}
    if all(path.exists() for path in wanted.values()):
        return
    vit, card = patchloom.load_encoder(study.run(arm, seed))
    data = labelled_parts(study)
    for name, right in accuracies(vit, card, data, ARMS[arm]).items():
        keep(wanted[name], right)
    if arm == "mae":  # whose sizes are those of most; of what an untrained encoder gives, only its mean is asked
        twin, _ = untrained_twin(card, seed=seed)
        for name, right in accuracies(twin, card, data, ARMS[arm]).items():
            keep(study.right(UNTRAINED, seed, name), right)


def labelled_parts(study: Study) -> Data:
    """Training and test images with their labels."""
    data = open_data(study.out / "data")
    assert data.test is not None
    return data


def accuracies(vit: torch.nn.Module, card, data: Data, arm: Arm) -> dict[str, torch.Tensor]:
    """[n] which test images kNN and the linear probe have right, by the features of the training images."""
    one, two = (extract(vit, card, source, device="cpu") for source in (data.train, data.test))
    (x, y), (queries, truth) = ((part.pooled(arm.pooling), part.labels) for part in (one, two))
    probe, _ = linear_probe(x, y, seed=0, device=torch.device("cpu"))
    return {"knn": knn_right(x, y, queries, truth, (K,))[K].cpu(), "linear": probe.right(queries, truth).cpu()}


def without_labels(study: Study, arm: str, seed: int) -> dict[str, float]:
    """The measures of `patchloom evaluate label-free`, of test images that no run saw."""
    vit, card = patchloom.load_encoder(study.run(arm, seed))
    settings = EvalSettings(device="cpu", workers=0, cache=False)
    rows = label_free_rows(arm, vit, card, labelled_parts(study).test, settings, images=LABEL_FREE_IMAGES)
    return {row.settings["measure"]: row.value for row in rows}
