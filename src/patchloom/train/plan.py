"""The plan of a run: the first process finds out what holds for all of them, and stores it in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from patchloom.data.near_duplicates import near_copies
from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import is_object_name
from patchloom.data.stats import Stats
from patchloom.display import is_first
from patchloom.errors import PatchloomError
from patchloom.nets.finetune import block_count
from patchloom.recipes import recipe_named, recipe_names
from patchloom.runs.folder import FolderLocked, RunFolder
from patchloom.runs.held_out import HeldOut, choose_held_out, held_out_count, stored_held_out, with_share
from patchloom.runs.settings import LAUNCH, Settings
from patchloom.runs.task import prepare_task
from patchloom.runs.training_set import no_record, read_record
from patchloom.sizes import in_pixels
from patchloom.system.distributed import world
from patchloom.system.hardware import Cores
from patchloom.tasks import check_step_size
from patchloom.tasks.custom import label
from patchloom.tasks.task import Task
from patchloom.train.estimate import Forecast, epochs_in, forecast_rest, forecast_run
from patchloom.train.init import Start
from patchloom.train.resolve import default_workers, measure_data, resolve, share_of_batch

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Plan(NamedTuple):
    """What holds for all processes of a run.

    Attributes:
        resumed: the run's folder holds a part of it already.
        settings: resolved.
        reasons: by setting, why ``auto`` became what it is.
        stats: of the training images.
        fingerprint: of all images.
        held_out: which of them are not trained on.
        doubt: a sentence, if some may be near copies of images that are trained on.
        views: of the task, by which epochs become effective ones.
        ended: epochs after which the run was finished, and from which it is trained on; 0 of any other.
        moved: the images lie elsewhere than when the run began.
    """

    resumed: bool
    settings: Settings
    reasons: dict[str, str]
    stats: Stats
    fingerprint: str
    held_out: HeldOut
    doubt: str = ""
    views: float = 1.0
    ended: float = 0
    moved: bool = False

    def with_chosen(self, task: Task) -> Plan:
        """With what the task's own options that were ``auto`` became, and its views."""
        # a class of the user's own that derives from ours may not take all of its options
        chosen = {name: one for name, one in task.chosen.items() if name in self.settings.task}
        values = {name: value for name, (value, _) in chosen.items()}
        reasons = {f"task.{name}": why for name, (_, why) in chosen.items()}
        settings = replace(self.settings, task=self.settings.task | values)
        return self._replace(settings=settings, reasons=self.reasons | reasons, views=task.views)


class Planner:
    """Plans a run in the first process.

    Args:
        asked: the settings as the user gave them.
        data: the images.
        folder: of the run.
        here: cores of this machine, and the processes of this training that share them.
        reasons: by setting, why it became what it is, where that is known already.
    """

    def __init__(
        self, asked: Settings, data: Data, folder: RunFolder, here: Cores, reasons: Mapping[str, str] | None = None
    ):
        self.asked, self.data, self.folder, self.here, self.reasons = asked, data, folder, here, dict(reasons or {})
        self.record = no_record()  # too long to be sent to the other processes, which have no use for it

    def plan(self) -> Plan:
        """What was stored when the run that is to be resumed was begun, or what is found out now."""
        return self._stored() if self.resumes() else self._found()

    def resumes(self) -> bool:
        """Whether the run's folder holds a part of this very run, or all of it."""
        try:
            return self.folder.holds(self._as_begun())
        except PatchloomError as problem:
            found = self._found()
            task = prepare_task(found.settings, found.stats)
            found.settings.check_cache(task.augment.size)
            if self._elsewhere() and (why := self._other_images()):
                raise PatchloomError(f"{problem}. Of the images: {why}") from None
            raise

    def longer(self) -> bool:
        """Return whether a finished run is asked to train on: the same settings, and more epochs."""
        folder, epochs = self.folder, self.asked.epochs
        if not folder.config.exists() or epochs == "auto" or epochs <= (now := folder.read_config().epochs):
            return False
        return folder.read_summary() is not None or folder.kept_end(now).exists()

    def go_on(self, plan: Plan, views: float) -> None:
        """Change what is stored of a run that is trained on, or whose images have moved."""
        if plan.moved:
            self.folder.rewrite("data", plan.settings.data)
        if plan.ended:
            self.folder.keep_end(plan.ended)
            self.folder.rewrite("epochs", plan.settings.epochs, plan.settings.epochs * views)

    def note_place(self) -> None:
        """Note where the images of a finished run lie now, if it is elsewhere, unless another process works there."""
        if self._elsewhere() and is_first():
            with suppress(FolderLocked):
                self.folder.lock()
                self.folder.rewrite("data", self.asked.data)
                print(f"  the images have moved, and are the same: {self.folder.config} says so from now on")
            self.folder.unlock()

    def _elsewhere(self) -> bool:
        """Return whether the images are called otherwise than in the run's configuration."""
        return self.folder.config.exists() and self.folder.read_config().data != self.asked.data

    def _as_begun(self) -> Settings:
        """Return what is asked for, with the words of the run's first command for what may change since."""
        asked, folder = self.asked, self.folder
        if not (folder.config.exists() and folder.requested.exists()):
            return asked
        begun, now = folder.read_requested(), folder.read_config()
        first = {name: begun.get(name, default) for name, default in (("epochs", "auto"), ("minutes", None))}
        if not self._elsewhere() or folder.read_data()["fingerprint"] == self.data.train.fingerprint():
            asked = replace(asked, data=begun.get("data", asked.data))
        if self.longer() or asked.epochs == now.epochs:
            scaled = {"warmup_epochs": begun.get("warmup_epochs", "auto")} if asked.recipe else {}  # with the epochs
            return replace(asked, **first, **scaled)
        if (end := folder.last_end()) is not None and asked.epochs != "auto":
            raise PatchloomError(
                f"{folder.path} has been trained on to {now.epochs:g} epochs, and --epochs {asked.epochs:g} is asked "
                f"for: give --epochs {now.epochs:g} or more; the run as it was before is kept in {end}"
            )
        return asked

    def _other_images(self) -> str:
        """Return how the images differ from those with which the run was begun, as far as that is known."""
        record, contents = read_record(self.folder.trained_on), self.data.train.contents()
        if record is None or record.unknown or contents is None or not len(record.contents):
            return ""
        there = int(np.isin(record.contents, contents).sum())
        noun, name = self.data.train.noun, self.data.train.name
        if there < len(record.contents):
            return f"of the {len(record.contents):,} {noun} that were trained on, {there:,} are in {name}"
        return (
            f"the {len(record.contents):,} {noun} that were trained on are in {name}, but their names or dates are "
            "others, or there are more: move or copy them with both (cp -a, rsync -a)"
        )

    def forecast(self, plan: Plan) -> Forecast | None:
        """What the run will take, or what is left of it; None where nothing is known."""
        training = plan.held_out.parts(self.data.train.heard_as(plan.stats.sound))[0]
        if plan.resumed and (found := forecast_rest(plan.settings, training, self.folder, kept=plan.ended > 0)):
            return found
        share = share_of_batch(plan.settings.batch_size, len(training), world())
        return forecast_run(plan.settings, training, share, self.here, self.folder)

    def store(self, plan: Plan) -> None:
        """Store the plan in the run's folder."""
        settings, reasons, stats = plan.settings, plan.reasons, plan.stats
        held_out = {**plan.held_out.plain(), "effective_epochs": settings.epochs * plan.views}
        self.folder.begin(self.asked, settings, reasons, stats, plan.fingerprint, held_out, self.record)
        self.folder.note_unreadable(stats.unreadable)

    def _stored(self) -> Plan:
        self.folder.lock()
        self.folder.tidy()
        settings, stats = self.folder.read_config(), self.folder.read_stats()
        if any(settings.task.get(name) != self.asked.task.get(name) for name in ("name", "features_of")):
            raise PatchloomError(
                f"{self.folder.config} names another task than the same run asked for: restore it from a copy, or "
                "choose another --out"
            )
        fingerprint = self.data.train.fingerprint()
        check_same(self.folder, self.data.train)
        held_out = stored_held_out(self.folder, settings, self.data.train)
        training = held_out.parts(self.data.train)[0]
        check_step_size(settings.task, settings.batch_size, len(training))
        share_of_batch(settings.batch_size, len(training), world())
        settings = replace(settings, **{name: getattr(self.asked, name) for name in LAUNCH})
        number, why = default_workers(settings.device, self.here)
        reasons = {}
        moved, ended = self._elsewhere(), settings.epochs if self.longer() else 0
        if moved:
            settings = replace(settings, data=self.asked.data)
        if ended:
            settings = replace(settings, epochs=self.asked.epochs)
        if self.asked.workers == "auto" and settings.workers != number:  # nothing but the pace depends on it
            settings, reasons = replace(settings, workers=number), {"workers": why}
        return Plan(True, settings, reasons, stats, fingerprint, held_out, ended=ended, moved=moved)

    def _found(self) -> Plan:
        asked, as_there = Start(self.asked).shaped()
        held_out, self.record = choose_held_out(self.asked, self.data.train)
        training = held_out.parts(self.data.train)[0]
        channels, stats = measure_data(asked, training)
        if asked.normalization == "imagenet":
            if channels != 3:
                raise PatchloomError(
                    f"ImageNet's statistics are for 3 channels, not {channels}: use --normalization data"
                )
            stats = stats._replace(mean=_IMAGENET[0], std=_IMAGENET[1])
        whole = self.data.train
        asked, share = with_share(asked, len(whole), whole.noun)
        if share and whole.groups is not None:
            share["held_out"] += f"; in whole groups {len(held_out.indices):,}"
        found = len(training), channels, stats, world(), self.here, training
        settings, reasons = resolve(replace(asked, minutes=None), *found)
        if asked.minutes is not None:
            each = share_of_batch(settings.batch_size, len(training), world())
            forecast = forecast_run(settings, training, each, self.here, self.folder, endless=True)
            epochs, why = epochs_in(asked.minutes, forecast, settings, len(training))
            fixed = {name: getattr(settings, name) for name in ("batch_size", "threads")}  # of which the pace is
            reasons = {name: reasons[name] for name in fixed if name in reasons}
            settings, others = resolve(replace(asked, minutes=None, epochs=epochs, **fixed), *found)
            reasons |= {**others, "epochs": why}
        check_step_size(settings.task, settings.batch_size, len(training) - len(stats.unreadable))
        reasons = self.reasons | as_there | share | reasons
        close = near_copies(self.data.train)
        return Plan(
            False,
            settings,
            reasons,
            stats,
            self.data.train.fingerprint(),
            held_out,
            "" if close is None else close.sentence(),
        )


def check_same(folder: RunFolder, images: Source) -> None:
    """Refuse to go on with other images than those with which a run was begun."""
    if folder.read_data()["fingerprint"] != images.fingerprint():
        name = images.name
        other = (
            f"the {name} are not those with which"
            if is_object_name(name)
            else f"the {images.noun} in {name} have changed since"
        )
        raise PatchloomError(
            f"{other} {folder.path} was begun: choose a new folder with --out; --from {folder.path} starts there from "
            "its weights"
        )


def announce(
    plan: Plan,
    asked: Settings,
    data: Data,
    task: Task,
    sentences: list[str],
    folder: RunFolder,
    forecast: Forecast | None,
) -> list[str]:
    """Lines on what will be done, what every ``auto`` became, with which weights the task begins, and what it takes."""
    lines: list[str] = []
    s, say, held, whole = plan.settings, lines.append, plan.held_out, data.train
    training, held_out = held.parts(whole)
    counts = f"{len(training):,} {whole.noun} to train on, {len(held_out):,} held out"
    if copies := len(held.copies):
        counts += f", {copies:,} left out as exact copies of those"
    say(f"{label(s.task['name'])} on {whole.name}: {counts}")
    for line in describe_continuation(plan, folder):
        say(f"  {line}")
    for line in describe_recipe(s, len(training), whole.noun):
        say(f"  {line}")
    for line in (*data.notes, *plan.stats.noticed):
        say(f"  {line}")
    if plan.doubt:
        say(f"  warning: {plan.doubt}")
    if not held.looked:
        say(f"  exact copies among the {whole.noun} were not looked for")
    if held.doubt:
        say(f"  {held.sentence(f'the {whole.noun} of the measures')}")
    elif (start := held.start) and (more := held_out_count(asked, whole)) > len(held_out):
        say(f"  not {more:,} are held out: all others are copies, or the weights of {start} were trained on them")
    wide = max([20, *map(len, plan.reasons)])
    for name, why in plan.reasons.items():
        owner, _, option = name.rpartition(".")
        value = getattr(s, owner)[option] if owner else getattr(s, name)
        shown = value["name"] if name in ("model", "task") else in_pixels(value) if name.endswith("_size") else value
        shown = f"{shown:.4g}" if isinstance(shown, float) else shown
        say(f"  {name:<{wide}} {shown!s:<12} ({why})")
    if plan.stats.unreadable:
        say(f"  {len(plan.stats.unreadable)} of {plan.stats.sampled} sampled files cannot be read and are skipped")
    encoder = sum(weight.numel() for weight in task.encoder.parameters())
    rest = sum(weight.numel() for weight in task.parameters()) - encoder
    for line in sentences:
        say(f"  {line}")
    if world() > 1:
        say(f"  {world()} processes ({s.strategy}) with {s.batch_size // world()} {whole.noun} of a step each")
    if line := effective(task, s.epochs):
        say(f"  {line}")
    say(f"  encoder of {_in_words(encoder)} parameters, and {_in_words(rest)} that only the task needs")
    for line in [] if s.train_blocks is None else last_blocks(task, s.train_blocks):
        say(f"  {line}")
    for line in forecast.sentences() if forecast else ():
        say(f"  {line}")
    say(f"  everything goes to {folder.path}")
    return lines


def describe_continuation(plan: Plan, folder: RunFolder) -> list[str]:
    """Lines on a finished run that is trained on, and on images that have moved."""
    lines = (
        [f"the images have moved, and are the same: the run goes on with {plan.settings.data}"] if plan.moved else []
    )
    if plan.ended:
        more = plan.settings.epochs - plan.ended
        rise = min(plan.settings.warmup_epochs, more / 10)
        rate = f"the rate rises over {rise:.3g} of them, and falls to 0 as a cosine"
        rate = "the rate goes on being halved" if plan.settings.halve_every else rate
        lines.append(f"trains on after {plan.ended:g} epochs: {more:g} more, from its weights and moments; {rate}")
        lines.append(f"the run as it is now is kept in {folder.kept_end(plan.ended)}")
    return lines


def _in_words(weights: int) -> str:
    return f"{weights / 1e6:.1f} M" if weights >= 5e5 else f"{weights / 1e3:.1f} k"


def last_blocks(task: Task, count: int) -> list[str]:
    """Lines on a training of the encoder's last ``count`` blocks alone, and on what makes it dearer."""
    weights = list(task.encoder.parameters())
    trained = _in_words(sum(weight.numel() for weight in weights if weight.requires_grad))
    whole = _in_words(sum(weight.numel() for weight in weights))
    lines = [f"trains {count} of {block_count(task.encoder)} blocks: {trained} of {whole} parameters of the encoder"]
    learned = [name for name in ("mask_token", "position_token") if getattr(task, name, None) is not None]
    if learned:
        lines.append(f"  gradients pass through all blocks to {' and '.join(learned)}, which costs time and memory")
    return lines


def describe_recipe(settings: Settings, n: int, noun: str) -> list[str]:
    """Lines on the recipe of a run on ``n`` images: what of it was changed, and how large an update is."""
    if settings.recipe is None:
        return []
    if settings.recipe not in recipe_names():  # of the version that began the run
        return [f"by the recipe {settings.recipe}, which this version does not have"]
    recipe = recipe_named(settings.recipe)
    changes = recipe.changes(settings.plain())
    said = f"with {', '.join(changes)}" if changes else "unchanged"
    return [f"by the recipe {recipe.name} ({recipe.source}), {said}", recipe.update(settings.plain(), n, noun)]


def effective(task: Task, epochs: float) -> str:
    """A line on the effective epochs, where an image is seen in other crops than one of the encoder's size; or none."""
    (h, w), (height, width) = task.geometry.size, task.augment.size
    if task.views != 1:
        return (
            f"effective epochs {epochs * task.views:,g}: a step sees {task.views:g} crops of each {task.modality.item}"
        )
    if (h, w) != (height, width):
        asked = f"of a crop of {height}x{width} the encoder is given {h}x{w}"
        return f"effective epochs {epochs:,}: {asked}, once in a step"
    return ""
