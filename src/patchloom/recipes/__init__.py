"""Recipes: rows of the papers' tables as settings of a run, one YAML file each in this folder.

They are read without torch, so that ``patchloom recipes`` and ``--help`` start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any, TypeGuard

import yaml

from patchloom.errors import (
    PatchloomError,
    listing,
    shorten_options,
    suggestion,
)
from patchloom.options.values import dotted
from patchloom.sizes import in_pixels, to_pair


@dataclass(frozen=True)
class PretrainRecipe:
    """Row of a paper's table: its settings, the paper's scores, and scores measured here.

    Attributes:
        name: name of the file.
        paper: name of the paper, and where it was published.
        row: difference from the paper's other rows.
        table: number of the table; empty if it is in no numbered table.
        data: training data of the paper.
        images: number of training images in that data.
        settings: settings of the run; ``task`` and ``model`` have a name and options.
        finetune: the recipe of fine-tuning, with options of the row that differ from it.
        protocol: protocol of ``patchloom evaluate`` for fine-tuning.
        published: the paper's scores on that data in percent, by protocol.
        cost: time and machines that the paper or its authors' program states.
        note: values that are not the paper's, or are our reading of it.
        measured: result of the recipe in patchloom, with the command; empty if it was not run.
        views: r of effective epochs (see `patchloom.tasks.task.Task.views`).
    """

    name: str
    paper: str
    row: str
    data: str
    images: int
    settings: Mapping[str, Any]
    finetune: str
    table: str = ""
    published: Mapping[str, float] = field(default_factory=dict)
    cost: str = ""
    note: str = ""
    measured: str = ""
    views: float = 1
    protocol: str = "finetune"

    @property
    def task(self) -> str:
        return str(self.settings["task"]["name"])

    @property
    def batch(self) -> int:
        """Number of images of an update."""
        return int(self.settings["batch_size"])

    @property
    def epochs(self) -> int:
        return int(self.settings["epochs"])

    @property
    def source(self) -> str:
        """Short name of the paper and its table."""
        return ", ".join(filter(None, (self.paper.partition(" (")[0], self.table)))

    @property
    def effective(self) -> float:
        return self.epochs * self.views

    def beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe's settings for everything that a user does not set.

        An update keeps its number of images: if only one of ``batch_size`` and ``accumulate`` is set, the other
        follows, to the nearest whole number. The warm-up keeps its fraction of the epochs if only these are set.
        """
        task = given.get("task", {}).get("name", "auto")
        if task not in ("auto", self.task):
            raise PatchloomError(
                f"the recipe {self.name} is of the task {self.task}, and --task {task} is given: leave out --task, or "
                "choose a recipe of that task (patchloom recipes lists them)"
            )
        left: dict[str, Any] = {}
        for name, value in self.settings.items():
            if isinstance(value, Mapping):
                left[name] = {key: inner for key, inner in value.items() if key not in given.get(name, {})}
            elif name not in given:
                left[name] = value
        left["task"]["name"] = self.task
        batch, steps = given.get("batch_size"), given.get("accumulate")
        if "accumulate" not in given and _number(batch):
            left["accumulate"] = max(1, round(self.batch / batch))
        elif "batch_size" not in given and _number(steps):
            left["batch_size"] = max(1, round(self.batch / steps))
        if given.get("minutes") is not None and "epochs" in left:  # its epochs follow from the measured speed
            left |= {"epochs": "auto", "warmup_epochs": "auto"} if "warmup_epochs" in left else {"epochs": "auto"}
        elif "epochs" in given and "warmup_epochs" in left:
            epochs, warmup = given["epochs"], left["warmup_epochs"]
            left["warmup_epochs"] = self._scaled_warmup(warmup, epochs) if _number(epochs) else "auto"
        return left

    def _scaled_warmup(self, warmup: float, epochs: float) -> float:
        """Return the warm-up with its fraction of the epochs, if there are ``epochs``."""
        return round(warmup * epochs / self.epochs, 2)

    def scaling(self, settings: Mapping[str, Any]) -> str:
        """Return a sentence if the warm-up of a run's resolved ``settings`` was scaled with the epochs, or else "".

        The warm-up of the other rows of a table is often the same for all lengths, so a scaled one is not theirs.
        """
        own, now, epochs = self.settings.get("warmup_epochs", 0), settings["warmup_epochs"], settings["epochs"]
        if now == own or now != self._scaled_warmup(own, epochs):
            return ""
        said = f"the warm-up was scaled with the epochs, from {own:g} of {self.epochs:,} to {now:g} of {epochs:,g}"
        return f"{said}: --warmup_epochs {own:g} keeps the recipe's" if own <= epochs else said

    def changes(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the differences of a run's resolved ``settings`` from the recipe, as ``epochs 5 (800)``.

        The number of images of an update depends on two settings; `update` describes it.
        """
        found = []
        for name, value in self.settings.items():
            if isinstance(value, Mapping):
                is_now = settings[name]
                found += [
                    f"{name if key == 'name' else f'{name}.{key}'} {is_now.get(key)} ({inner})"
                    for key, inner in value.items()
                    if is_now.get(key) != inner
                ]
            elif name in ("img_size", "patch_size"):
                if to_pair(settings[name]) != to_pair(value):
                    found.append(f"{name} {in_pixels(settings[name])} ({in_pixels(value)})")
            elif name != "batch_size" and settings[name] != value:
                found.append(f"{name} {settings[name]} ({value})")
        return found

    def update(self, settings: Mapping[str, Any], n: int, noun: str = "images") -> str:
        """Return a sentence on the number of images (``noun``) of an update of a run, and its learning rate."""
        blr, accumulate, images = settings["blr"], settings["accumulate"], min(settings["batch_size"], n)
        whole = images * accumulate
        said = f"an update has {whole:,} {noun}" + f" in {accumulate} steps of {images:,}" * (accumulate > 1)
        peak = _word(blr * whole / 256)
        if whole == self.batch:
            said += f", as in the recipe; the rate's peak is {peak}"
        else:
            said += f" (recipe: {self.batch:,}), so the rate's peak is {_word(blr)} x {whole:,} / 256 = {peak}"
        if whole > n:
            said += f". There are only {n:,} {noun} to train on: --accumulate {max(1, n // images)} makes more updates"
        return said

    def command(self, data: str, width: int) -> list[str]:
        """Return the lines of the equivalent shell command without ``--recipe``."""
        options = [f"{shorten_options(f'--{name}')} {_word(value)}" for name, value in dotted(self.settings).items()]
        lines = [f"patchloom pretrain {data}"]
        for option in options:
            if len(lines[-1]) + len(option) + 3 > width:  # a space and a backslash at the line's end
                lines.append(f"    {option}")
            else:
                lines[-1] += f" {option}"
        return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]

    def score(self) -> str:
        """Return the paper's scores in short form."""
        return ", ".join(f"{value:.1f} % {protocol}" for protocol, value in self.published.items())

    def samples(self) -> str:
        """Return the number of crops that the run sees, in millions."""
        return f"{self.effective * self.images / 1e6:,.0f} M"

    def evaluation(self) -> str:
        """Return the command that fine-tunes its encoder as in the paper."""
        return f"patchloom evaluate {self.protocol} RUN DATA --recipe {self.finetune}"

    def rows(self) -> list[tuple[str, str]]:
        """Return all facts about the recipe, as names and texts."""
        cost = f"{self.samples()} crops in {self.epochs:,} epochs, {self.effective:,g} effective ones"
        found = [
            ("paper", ", ".join(filter(None, (self.paper, self.table)))),
            ("data", f"{self.data}, {self.images:,} images"),
            ("cost", "; ".join(filter(None, (cost, self.cost)))),
            ("published", self.score() or "unknown"),
            ("measured here", self.measured or "not run"),
            ("fine-tuning", self.evaluation()),
            ("note", self.note),
        ]
        return [(name, text) for name, text in found if text]


def recipe_names() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in files(__name__).iterdir() if file.name.endswith(".yaml"))


@cache
def recipe_named(name: str) -> PretrainRecipe:
    names = recipe_names()
    if name not in names:
        holding = sorted((one for one in names if name and name in one), key=len)[:3]
        near = f"; did you mean {listing(holding)}?" if holding else suggestion(name, names)
        raise PatchloomError(f"there is no recipe {name}{near} patchloom recipes lists them.")
    found = yaml.safe_load(files(__name__).joinpath(f"{name}.yaml").read_text("utf-8"))
    unknown = found.keys() - {one.name for one in fields(PretrainRecipe)}
    assert not unknown, f"{name}.yaml: {unknown}"
    return PretrainRecipe(name=name, **found)


def _number(value: Any) -> TypeGuard[int]:
    """Return whether a value is a plausible number of epochs, images or steps."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _word(value: Any) -> str:
    """Format a value as typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"'{value}'"
    if not isinstance(value, float) or value == 0 or abs(value) >= 1e-3:
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    digits, exponent = f"{value:.3e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"
