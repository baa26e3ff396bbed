"""Runs of `claims.py` and their measures, by arm and seed. Finished ones are not repeated.

The folder of the study has ``data`` (its images of CIFAR-10, with labels), ``images`` (the training images without
labels), ``runs/ARM-SEED`` (of `patchloom pretrain`), ``measured/ARM-SEED`` (declaration of the arm; MEASURE.npy:
whether each test image is classified correctly; label-free.json; date and machine), ``classifiers``, ``paces``, and
``logs``.
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
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from claims_arms import ARMS, EPOCHS, FINETUNING, IMAGES, LENGTHS, SAME, SEEDS, declaration
from pace import seconds_a_step

import patchloom
from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import test_classifiers
from patchloom.evaluate.features import extract
from patchloom.evaluate.logistic import linear_probe
from patchloom.evaluate.protocols.attentive import candidate, small_plan
from patchloom.evaluate.protocols.knn import knn_answers
from patchloom.evaluate.protocols.label_free import label_free_rows
from patchloom.evaluate.select import train_candidates
from patchloom.evaluate.settings import EvalSettings, Parts, Subject
from patchloom.nets.checkpoints.format import untrained_twin
from patchloom.nets.swin import refuse_hierarchical
from patchloom.runs.encoder import load_extra_module
from patchloom.system.device import processor
from patchloom.system.files import write_whole

K = 20
LABEL_FREE_IMAGES = 500
POSITION_IMAGES = 500
DECLARED, WHERE = "declared.json", "measured-on.txt"


def plain(arm: str) -> str:
    """Return the name of an arm as a file name."""
    return re.sub(r"[^\w.]+", "-", arm.replace("γ", "g").replace("η", "eta"))


@dataclass(frozen=True)
class Study:
    """Folder of the study, and its sizes, which tests reduce.

    Attributes:
        out: the folder.
        epochs: epochs of pre-training.
        images: images per class, for training and for the test.
        only: measures to make; empty: all of each arm.
    """

    out: Path
    epochs: float = EPOCHS
    images: int = IMAGES
    only: tuple[str, ...] = ()

    def run(self, arm: str, seed: int) -> Path:
        """Return the folder of the arm's pre-training, or that of the arm whose encoder it uses."""
        return self.out / "runs" / f"{plain(ARMS[arm].of or arm)}-{seed}"

    def result_path(self, arm: str, seed: int, name: str) -> Path:
        """Return the path of a result: MEASURE.npy, label-free.json, or the declaration."""
        return self.out / "measured" / f"{plain(arm)}-{seed}" / name

    def classifier(self, arm: str, seed: int) -> Path:
        """Return the path of the arm's classifier that was fine-tuned with all labels."""
        return self.out / "classifiers" / f"{plain(arm)}-{seed}.safetensors"

    def files(self, arm: str, seed: int) -> list[Path]:
        """Return the paths of all results of an arm with a seed."""
        names = [f"{measure}.npy" for measure in ARMS[arm].measures] + ["label-free.json"] * bool(ARMS[arm].task)
        wanted = [name for name in names if not self.only or Path(name).stem in self.only]
        return [self.result_path(arm, seed, name) for name in wanted]

    def is_as_declared(self, arm: str, seed: int) -> bool:
        """Return whether stored results are of the current declaration of the arm, or there are none."""
        path = self.result_path(arm, seed, DECLARED)
        return not path.exists() or path.read_text() == self.declared(arm)

    def declared(self, arm: str) -> str:
        """Return the declaration of an arm as JSON."""
        return json.dumps(declaration(arm, self.epochs, self.images), indent=1, default=str)

    def is_done(self, arm: str, seed: int) -> bool:
        """Return whether all results of an arm with a seed exist, of the current declaration."""
        return self.is_as_declared(arm, seed) and all(path.exists() for path in self.files(arm, seed))

    def read(self, arm: str, measure: str) -> np.ndarray | None:
        """Read [s n] whether each test image is correct, or [s 1] a share; None if a seed is missing."""
        paths = [self.result_path(arm, seed, f"{measure}.npy") for seed in range(SEEDS)]
        there = all(path.exists() and self.is_as_declared(arm, seed) for seed, path in enumerate(paths))
        return np.stack([np.load(path) for path in paths]) if there else None

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock of that name, which no other process can hold meanwhile."""
        path = self.out / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def needed(arm: str, seed: int) -> list[tuple[str, int]]:
    """Return the arms and seeds that have to be finished before this one."""
    before = [(name, (seed + more) % SEEDS) for name, more in ARMS[arm].members]
    return before or [(name, seed) for name in ARMS[arm].others]


def copy_images(study: Study, cifar: Path) -> None:
    """Copy images of each class, drawn with seed 0, to the folder of the study.

    Raises:
        PatchloomError: there are too few, or none.
    """
    if (study.out / "images").exists():
        return
    for part in ("train", "test"):
        classes = sorted(path for path in (cifar / part).glob("*") if path.is_dir())
        if not classes:
            raise PatchloomError(
                f"{cifar / part} has no folder of a class: run python benchmarks/get_data.py cifar10 /tmp/data"
            )
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
    """Pre-train an arm with a seed, if it is pre-trained, and measure it.

    Raises:
        PatchloomError: its results are of another declaration.
    """
    of = ARMS[arm]
    with study.lock(f"{plain(arm)}-{seed}"):
        if not study.is_as_declared(arm, seed):
            folder, run = study.result_path(arm, seed, "").resolve(), study.run(arm, seed)
            raise PatchloomError(f"{folder} was made by another declaration of {arm}: delete it, and {run}")
        write_whole(study.result_path(arm, seed, DECLARED), study.declared(arm))
        if of.task:
            pretrain(study, arm, seed)
        for path in study.files(arm, seed):
            if not path.exists():
                HOW[path.stem](study, arm, seed)
                write_whole(study.result_path(arm, seed, WHERE), f"{datetime.now(UTC):%Y-%m-%d} on {machine_name()}")


def machine_name() -> str:
    """Return the names of the processor and of the instructions that torch uses."""
    return f"an {processor('model name')} ({torch.backends.cpu.get_cpu_capability()})"


def keep(study: Study, arm: str, seed: int, measure: str, found: np.ndarray) -> None:
    """Store a result: [n] bool, or [1] a share."""
    content = io.BytesIO()
    np.save(content, found)
    write_whole(study.result_path(arm, seed, f"{measure}.npy"), content.getvalue())


def pretrain(study: Study, arm: str, seed: int) -> None:
    """Pre-train as `patchloom pretrain` does, or resume the run."""
    of, task, epochs = ARMS[arm], dict(ARMS[arm].task), study.epochs * ARMS[arm].times
    if of.teacher:
        task["features_of"] = str(study.run(of.teacher, seed))
    if of.time_of:
        epochs = float(f"{epochs * times_as_fast(study, arm, task):.4g}")
    patchloom.pretrain(study.out / "images", task, out=study.run(arm, seed), epochs=epochs, seed=seed, **SAME)


def times_as_fast(study: Study, arm: str, task: dict[str, object]) -> float:
    """Return the ratio of images per second to the arm that sets the time; measured once for all seeds."""
    kept = study.out / "paces" / f"{plain(arm)}.json"
    with study.lock(f"pace-{plain(arm)}"):
        if not kept.exists():
            other = dict(ARMS[ARMS[arm].time_of].task)
            found = seconds_a_step(str(study.out / "images"), {"other": other, "arm": task}, SAME, rounds=7, steps=10)
            write_whole(kept, json.dumps({name: seconds / images for name, (seconds, images) in found.items()}))
        seconds = json.loads(kept.read_text())
    return seconds["other"] / seconds["arm"]


def finetune(measure: str, study: Study, arm: str, seed: int) -> None:
    """Measure the fine-tuned encoder, or an ensemble of fine-tuned ones; the controls are separate arms."""
    of = ARMS[arm]
    if of.members:
        first, *others = (study.classifier(name, one) for name, one in needed(arm, seed))
        given: dict[str, Any] = {"others": ",".join(map(str, others)), "device": "cpu", "workers": 0}
        report = patchloom.evaluate("ensemble", first, study.out / "data", **given)
    else:
        given = {**FINETUNING, **LENGTHS[measure], **of.finetuning.get(measure, {}), "positions": of.positions}
        given |= {"from_scratch": True} if of.fresh else {"control": False}
        if measure == "all" and not of.fresh:
            study.classifier(arm, seed).parent.mkdir(parents=True, exist_ok=True)
            given["out"] = str(study.classifier(arm, seed))
        report = patchloom.evaluate("finetune", study.run(arm, seed), study.out / "data", seed=seed, **given)
    outcomes = report.quoted[0].outcomes
    assert outcomes is not None
    keep(study, arm, seed, measure, outcomes.values)


def frozen(study: Study, arm: str, seed: int) -> None:
    """Measure kNN and linear probes of an arm's frozen features."""
    vit, card = patchloom.load_encoder(study.run(arm, seed))
    if ARMS[arm].fresh:
        vit, _ = untrained_twin(card, seed=seed)
    measures = ARMS[arm].measures
    head = load_extra_module(study.run(arm, seed), "pooling") if "instance" in measures else None
    one, two = (extract(vit, card, source, device="cpu", head=head) for source in parts(study))
    for measure in {"linear", "knn", "instance"} & set(measures):
        pooling = "instance" if measure == "instance" and head is not None else "mean"
        (x, y), (queries, truth) = ((part.pooled(pooling), part.labels) for part in (one, two))
        if measure == "knn":
            right = knn_answers(x, y, queries, (K,))[K][0] == truth
        else:
            right = linear_probe(x, y, seed=0, device=torch.device("cpu"))[0].right(queries, truth)
        keep(study, arm, seed, measure, right.cpu().numpy())


def attentive(study: Study, arm: str, seed: int) -> None:
    """Measure an attentive probe of an arm's patch tokens by the recipe small."""
    vit, card = patchloom.load_encoder(study.run(arm, seed))
    if ARMS[arm].fresh:
        vit, _ = untrained_twin(card, seed=seed)
    settings = EvalSettings(seed=seed, device="cpu", workers=0, cache=False)
    plan = small_plan(refuse_hierarchical(vit, "attentive", ""), Parts(*parts(study), ""), settings, "float32")
    fitted = train_candidates([candidate(Subject(arm, vit, card), plan.parts)], plan, quiet=True)
    keep(study, arm, seed, "attentive", test_classifiers("attentive", fitted, plan, "float32")[1][0].right.numpy())


def positions(study: Study, arm: str, seed: int) -> None:
    """Measure the accuracy of the run's own task on positions, averaged over shares of withheld patches."""
    given = {"images": POSITION_IMAGES, "device": "cpu", "workers": 0}
    report = patchloom.evaluate("positions", study.run(arm, seed), study.out / "data", **given)
    keep(study, arm, seed, "positions", np.array([report.quoted[0].value], np.float32))


def without_labels(study: Study, arm: str, seed: int) -> None:
    """Measure `patchloom evaluate label-free` on test images that no run saw."""
    vit, card = patchloom.load_encoder(study.run(arm, seed))
    settings = EvalSettings(device="cpu", workers=0, cache=False)
    rows = label_free_rows(arm, vit, card, parts(study)[1], settings, images=LABEL_FREE_IMAGES)
    found = {row.measure: row.value for row in rows}
    write_whole(study.result_path(arm, seed, "label-free.json"), json.dumps(found, indent=1))


def parts(study: Study) -> tuple[Source, Source]:
    """Return training and test images with labels."""
    data = open_data(study.out / "data")
    assert data.test is not None
    return data.train, data.test


# function of each result; some write several
HOW: dict[str, Callable[[Study, str, int], None]] = {
    "few": partial(finetune, "few"),
    "all": partial(finetune, "all"),
    "linear": frozen,
    "attentive": attentive,
    "knn": frozen,
    "instance": frozen,
    "positions": positions,
    "label-free": without_labels,
}
