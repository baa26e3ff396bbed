"""Plan of a run: settings, statistics and held-out split, made by the first process for all and stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from patchloom.data.channels import channel_rows, is_listed
from patchloom.data.loader import batch_bytes, steps_per_epoch
from patchloom.data.near_duplicates import near_copies, subject_note
from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import is_object_name
from patchloom.data.splits import lacking_classes, some_groups
from patchloom.data.stats import Stats, scale_notes
from patchloom.data.workers import SHARED, fitting_readers
from patchloom.display import TextTable, is_first, print_line
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.programs import MeanStd
from patchloom.nets.finetune import block_count
from patchloom.nets.lora import adapter_parameters
from patchloom.questions.anchor import Anchor
from patchloom.recipes import recipe_named, recipe_names
from patchloom.runs.folder import FolderLocked, RunFolder
from patchloom.runs.held_out import HeldOut, choose_held_out, held_out_count, stored_held_out, with_share
from patchloom.runs.settings import LAUNCH, ResolvedSettings, Settings
from patchloom.runs.task import augment_of_readers, prepare_task
from patchloom.runs.training_set import no_record, read_record
from patchloom.sizes import in_pixels
from patchloom.system.device import Cores, cores
from patchloom.system.distributed import world
from patchloom.system.files import remove_leftovers, size_in_words
from patchloom.tasks import check_step_size
from patchloom.tasks.custom import label
from patchloom.tasks.task import Task
from patchloom.train.estimate import Forecast, epochs_in, forecast_elsewhere, forecast_rest, forecast_run
from patchloom.train.init import Start
from patchloom.train.resolve import default_cache, default_workers, measure_data, resolve, share_of_batch

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_FEW_GROUPS = 5  # held-out groups whose interval, over groups, is so wide that it excludes little


class Plan(NamedTuple):
    """Plan of a run, the same in all processes.

    Attributes:
        resumed: whether the run has begun already.
        settings: resolved settings.
        reasons: reasons for the values of ``auto``, by setting.
        stats: statistics of the training images.
        fingerprint: fingerprint of all images.
        held_out: held-out split.
        doubt: sentence on training images that may show the same as held-out ones; "" if there are none.
        views: crops per image of the task: the factor from epochs to effective epochs.
        ended: planned epochs of the finished run that is trained longer; 0 for other runs.
        reached: epochs that it was trained for: fewer than planned if it stopped early.
        moved: whether the images lie elsewhere than when the run began.
        processes: number of training processes.
    """

    resumed: bool
    settings: ResolvedSettings
    reasons: dict[str, str]
    stats: Stats
    fingerprint: str
    held_out: HeldOut
    doubt: str = ""
    views: float = 1.0
    ended: float = 0
    reached: float = 0
    moved: bool = False
    processes: int = 1

    def with_chosen(self, task: Task) -> Plan:
        """Add the task's own values of ``auto`` options, and its views."""
        # a user's subclass of one of our tasks may not take all of its options
        chosen = {name: one for name, one in task.chosen.items() if name in self.settings.task}
        values = {name: value for name, (value, _) in chosen.items()}
        reasons = {f"task.{name}": why for name, (_, why) in chosen.items()}
        settings = replace(self.settings, task=self.settings.task | values)
        return self._replace(settings=settings, reasons=self.reasons | reasons, views=task.views)


class Planner:
    """Planner of a run, used in the first process.

    Args:
        asked: settings as the user gave them.
        data: images.
        folder: folder of the run.
        reasons: reasons for settings that are known already, by setting.

    Attributes:
        here: cores of this machine, and the training processes that share them.
        elsewhere: whether these processes would run on devices that this machine lacks.
    """

    def __init__(self, asked: Settings, data: Data, folder: RunFolder, reasons: Mapping[str, str]):
        self.asked, self.data, self.folder, self.reasons = asked, data, folder, dict(reasons)
        self.here, self.elsewhere = Cores(cores()), False
        self.record = no_record()  # not part of the plan: large, and only needed in the first process

    def plan(self) -> Plan:
        """Return the stored plan of a run to be resumed, or make a new one."""
        return self._stored() if self.resumes() else self._new()

    def resumes(self) -> bool:
        """Return whether the run's folder holds this run, finished or not."""
        try:
            return self.folder.holds(self._as_begun())
        except PatchloomError as problem:
            found = self._new()
            task = prepare_task(found.settings, found.stats)
            found.settings.check_cache(task.augment.size)
            if self._elsewhere() and (why := self._other_images()):
                raise PatchloomError(f"{problem}. Images: {why}") from None
            raise

    def longer(self) -> bool:
        """Return whether a finished run is to be trained longer: the same settings, and more epochs."""
        folder, epochs = self.folder, self.asked.epochs
        if not folder.config.exists() or epochs == "auto" or epochs <= (now := folder.read_config().epochs):
            return False
        return folder.read_summary() is not None or folder.kept_end(now).exists()

    def go_on(self, plan: Plan, views: float) -> None:
        """Update the stored settings of a run that is trained longer, or whose images have moved."""
        if plan.moved:
            self.folder.rewrite("data", plan.settings.data)
        if plan.ended:
            self.folder.keep_end(plan.ended)
            self.folder.rewrite("epochs", plan.settings.epochs, plan.settings.epochs * views)

    def note_place(self) -> None:
        """Store the new place of a finished run's images if they have moved, unless the folder is locked."""
        if self._elsewhere() and is_first():
            with suppress(FolderLocked):
                self.folder.lock()
                self.folder.rewrite("data", self.asked.data)
                print_line(f"  the images have moved, but are the same: {self.folder.config} was updated")
            self.folder.unlock()

    def _elsewhere(self) -> bool:
        """Return whether the images have another name or path than in the run's configuration."""
        return self.folder.config.exists() and self.folder.read_config().data != self.asked.data

    def _as_begun(self) -> Settings:
        """Return the requested settings, with the first command's values for what may differ."""
        asked, folder = self.asked, self.folder
        if not (folder.config.exists() and folder.requested.exists()):
            return asked
        begun, now = folder.read_requested(), folder.read_config()
        first: dict[str, Any] = {"epochs": begun.get("epochs", "auto"), "minutes": begun.get("minutes")}
        if not self._elsewhere() or folder.read_data()["fingerprint"] == self.data.train.fingerprint():
            asked = replace(asked, data=begun.get("data", asked.data))
        if self.longer() or asked.epochs == now.epochs:
            scaled: dict[str, Any] = (
                {"warmup_epochs": begun.get("warmup_epochs", "auto")} if asked.recipe else {}
            )  # scaled with the epochs
            return replace(asked, **first, **scaled)
        if (end := folder.last_end()) is not None and asked.epochs != "auto":
            if asked.epochs > now.epochs:
                raise PatchloomError(
                    f"{folder.path} is being trained for {now.epochs:g} epochs, and has not finished: repeat --epochs "
                    f"{now.epochs:g} first, and then give --epochs {asked.epochs:g}"
                )
            raise PatchloomError(
                f"{folder.path} has been trained for {now.epochs:g} epochs already, more than --epochs "
                f"{asked.epochs:g}: give --epochs {now.epochs:g} or more; the earlier, shorter run is in {end}"
            )
        return asked

    def _other_images(self) -> str:
        """Return how the images differ from those with which the run began; "" if unknown."""
        record, contents = read_record(self.folder.trained_on), self.data.train.contents()
        if record is None or record.unknown or contents is None or not len(record.contents):
            return ""
        there = int(np.isin(record.contents, contents).sum())
        noun, name = self.data.train.noun, self.data.train.name
        if there < len(record.contents):
            return f"{name} has {there:,} of the {len(record.contents):,} training {noun}"
        return (
            f"the {len(record.contents):,} training {noun} are in {name}, but their names or dates differ, or there "
            "are more files: copy them with names and dates (cp -a, rsync -a)"
        )

    def forecast(self, plan: Plan, timed: bool) -> Forecast:
        """Forecast the run, or the rest of a resumed one; steps are tried for it only if it is ``timed``."""
        training = plan.held_out.parts(self.data.train.heard_as(plan.stats.sound))[0]
        if plan.resumed and (found := forecast_rest(plan.settings, training, self.folder, kept=plan.ended > 0)):
            return found
        share = share_of_batch(plan.settings.batch_size, len(training), plan.processes)
        if self.elsewhere:
            return forecast_elsewhere(plan.settings, training, share, plan.processes, self.folder)
        return forecast_run(plan.settings, training, share, self.here, self.folder, timed)

    def store(self, plan: Plan) -> None:
        settings, reasons, stats = plan.settings, plan.reasons, plan.stats
        held_out = {**plan.held_out.plain(), "effective_epochs": settings.epochs * plan.views}
        self.folder.begin(self.asked, settings, reasons, stats, plan.fingerprint, held_out, self.record)
        self.folder.note_unreadable(stats.unreadable)

    def _stored(self) -> Plan:
        self.folder.lock()
        remove_leftovers(self.folder.path)  # of a killed process
        self.folder.checkpoints.clean()
        settings, stats = self.folder.read_config(), self.folder.read_stats()
        if any(settings.task.get(name) != self.asked.task.get(name) for name in ("name", "features_of")):
            raise PatchloomError(
                f"{self.folder.config} and {self.folder.requested} name different tasks: restore them from a copy, or "
                "choose another --out"
            )
        fingerprint = self.data.train.fingerprint()
        check_same(self.folder, self.data.train)
        held_out = stored_held_out(self.folder, settings, self.data.train)
        training = held_out.parts(self.data.train)[0]
        check_step_size(settings.task, settings.batch_size, len(training))
        share_of_batch(settings.batch_size, len(training), self._processes())
        launch = {name: getattr(self.asked, name) for name in LAUNCH}
        if self.asked.devices == "auto":
            launch["devices"] = self.here.processes
        moved, ended = self._elsewhere(), settings.epochs if self.longer() else 0
        reached = self.folder.checkpoints.progress()[0] / steps_per_epoch(len(training), settings.batch_size) or ended
        if moved:
            launch["data"] = self.asked.data
        if ended:
            launch["epochs"] = self.asked.epochs
        settings, reasons = replace(settings, **launch), dict[str, str]()
        now: dict[str, tuple[Any, str]] = {"workers": default_workers(settings.device, self.here)}
        if self.asked.cache == "auto":
            now["cache"] = default_cache(settings.epochs, settings.img_size, stats, training)
        for name, (value, why) in now.items():  # affect the pace only
            if getattr(self.asked, name) == "auto" and getattr(settings, name) != value:
                settings, reasons = replace(settings, **{name: value}), reasons | {name: why}
        plan = Plan(True, settings, reasons, stats, fingerprint, held_out, ended=ended, reached=reached, moved=moved)
        return plan._replace(processes=self._processes())

    def _processes(self) -> int:
        return self.here.processes if self.elsewhere else world()

    def _new(self) -> Plan:
        start = Start(self.asked)
        held_out, self.record = choose_held_out(self.asked, self.data.train)
        training = held_out.parts(self.data.train)[0]
        asked, as_there = start.shaped(training)
        channels, stats = measure_data(asked, training)
        asked, own, why_own = _with_statistics(asked, start, channels, stats)
        as_there |= why_own
        if own is not None:
            said = scale_notes(stats.mean, stats.std, *own)
            stats = stats._replace(mean=own[0], std=own[1], noticed=(*stats.noticed, *said))
        if asked.normalization == "imagenet":
            if channels != 3:
                raise PatchloomError(
                    f"ImageNet's statistics are for 3 channels, not {channels}: use --normalization data"
                )
            stats = stats._replace(mean=_IMAGENET[0], std=_IMAGENET[1])
        whole = self.data.train
        asked, share = with_share(asked, len(whole), whole.noun)
        if share and whole.groups is not None:
            share["held_out"] += f"; {len(held_out.indices):,} in whole groups"
        found = len(training), channels, stats, self._processes(), self.here, training, self.elsewhere
        if asked.minutes is not None and self.elsewhere:
            raise PatchloomError("--minutes needs the time of a step, and the devices are not here: give --epochs")
        settings, reasons = resolve(replace(asked, minutes=None), *found)
        if asked.minutes is not None:
            each = share_of_batch(settings.batch_size, len(training), world())
            forecast = forecast_run(settings, training, each, self.here, self.folder, endless=True)
            epochs, why = epochs_in(asked.minutes, forecast, settings, len(training))
            fixed = {name: getattr(settings, name) for name in ("batch_size", "threads")}  # as in the forecast
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
            subject_note(self.data.train) or ("" if close is None else close.sentence()),
            processes=self._processes(),
        )


def _with_statistics(
    asked: Settings, start: Start, channels: int, stats: Stats
) -> tuple[Settings, MeanStd | None, dict[str, str]]:
    """Resolve ``--normalization`` for initial weights: settings, their mean and deviation if used, and the reason."""
    given, begins = asked.normalization, asked.init is not None
    if given == "init" and not begins and asked.from_run is None:
        raise PatchloomError("--normalization init needs initial weights: add --init, or use --normalization data")
    if given != "init" and not (given == "auto" and begins and stats.sound is None):
        return asked, None, {}
    found, why = start.normalization(channels)
    if found is None and given == "init":
        raise PatchloomError(f"--normalization init: {why}: use --normalization data or imagenet")
    chosen: Literal["data", "init"] = "data" if found is None else "init"
    return replace(asked, normalization=chosen), found, {"normalization": why} if given == "auto" else {}


def check_same(folder: RunFolder, images: Source) -> None:
    """Refuse to resume a run with other images."""
    if folder.read_data()["fingerprint"] != images.fingerprint():
        name = images.name
        other = (
            f"the {name} are not those with which"
            if is_object_name(name)
            else f"the {images.noun} in {name} have changed since"
        )
        raise PatchloomError(
            f"{other} {folder.path} was begun: choose a new folder with --out; add --from {folder.path} to start there "
            "from its weights"
        )


def announce(
    plan: Plan,
    asked: Settings,
    data: Data,
    task: Task,
    sentences: list[str],
    folder: RunFolder,
    forecast: Forecast,
) -> list[str]:
    """Return the printed plan: data, values of ``auto``, initial weights, and forecast."""
    s, held, whole = plan.settings, plan.held_out, data.train
    training, held_out = held.parts(whole)
    counts = f"{len(training):,} {whole.noun} to train on, {len(held_out):,} held out"
    if not len(held_out):
        why = "" if task.measured else f" {label(s.task['name'])} is a bare loss, so"
        counts += f":{why} nothing is measured, and there is no verdict; patchloom evaluate takes other images"
    if copies := len(held.copies):
        counts += f", {copies:,} exact copies of those left out"
    lines = [*describe_continuation(plan, folder), *describe_recipe(s, len(training), whole.noun)]
    lines += [*data.notes, *plan.stats.noticed]
    say = lines.append
    if plan.stats.channels and is_listed(plan.stats.channels):
        lines += TextTable.of(channel_rows(plan.stats.channels)).text(0).split("\n")
    if whole.groups is not None and held_out.groups is not None and len(held_out):
        parts = [len(np.unique(source.groups)) for source in (held_out, whole) if source.groups is not None]
        named = f"{parts[0]:,}" if asked.group is None else some_groups(held_out, asked.group)
        few = f"; so few groups say little about others: add groups, not {whole.noun}" * (parts[0] < _FEW_GROUPS)
        say(f"held-out groups: {named} of {parts[1]:,}{few}")
        say(lacking_classes(training, held_out, "held-out"))
    if plan.doubt:
        say(f"warning: {plan.doubt}")
    if not held.looked:
        say(f"not checked for exact copies among the {whole.noun}")
    if held.doubt:
        say(held.sentence(f"the validation {whole.noun}"))
    elif (start := held.start) and (more := held_out_count(asked, whole)) > len(held_out):
        say(
            f"only {len(held_out):,} of {more:,} {whole.noun} are held out: all others are copies, or the weights "
            f"of {start} were trained on them"
        )
    wide = max([20, *map(len, plan.reasons)])
    for name, why in plan.reasons.items():
        owner, _, option = name.rpartition(".")
        value = getattr(s, owner)[option] if owner else getattr(s, name)
        shown = value["name"] if name in ("model", "task") else in_pixels(value) if name.endswith("_size") else value
        shown = f"{shown:.4g}" if isinstance(shown, float) else shown
        say(f"{name:<{wide}} {shown!s:<12} ({why})")
    if lost := len(plan.stats.unreadable):
        say(f"{lost} of {lost + plan.stats.sampled} sampled files cannot be read, and are skipped")
    lines += sentences
    each = share_of_batch(s.batch_size, len(training), plan.processes)
    if plan.processes > 1:
        say(f"{plan.processes} processes ({s.strategy}), {each} {whole.noun} per step each")
    lines += [describe_readers(task, s, each), effective(task, s.epochs), describe_parameters(task, s)]
    lines += [*describe_adaptation(task, s), *forecast.sentences(), f"everything goes to {folder.path}"]
    about = f"{label(s.task['name'])} on {whole.name}: {counts}"
    return [about, *(f"  {line}" for line in lines if line)]


def describe_continuation(plan: Plan, folder: RunFolder) -> list[str]:
    """Return lines on a finished run that is trained longer, and on images that have moved."""
    lines = (
        [f"the images have moved, but are the same: the run goes on with {plan.settings.data}"] if plan.moved else []
    )
    if plan.ended:
        more = plan.settings.epochs - plan.reached
        rise = min(plan.settings.warmup_epochs, more / 10)
        least = plan.settings.least_rate
        rate = f"the learning rate rises over {rise:.3g} of them, then falls to {least:g} as a cosine"
        rate = "the learning rate is halved as before" if plan.settings.halve_every else rate
        lines.append(f"trains {more:.4g} epochs more after {plan.reached:.4g}, from its weights and moments; {rate}")
        lines.append(f"the run of {plan.ended:g} epochs is kept in {folder.kept_end(plan.ended)}")
    return lines


def _in_words(weights: int) -> str:
    return f"{weights / 1e6:.1f} M" if weights >= 5e5 else f"{weights / 1e3:.1f} k" if weights else "0"


def describe_parameters(task: Task, settings: ResolvedSettings) -> str:
    """Return a line on the number of parameters of the encoder, and how many of them are trained if not all are."""
    updates = {id(weight) for weight in adapter_parameters(task.encoder)}
    own = [weight for weight in task.encoder.parameters() if id(weight) not in updates]
    rest = _count(task.parameters()) - _count(task.encoder.parameters())
    rest -= sum(_count(one.parameters()) for one in task.children() if isinstance(one, Anchor))  # the frozen start
    said = [f"{_in_words(_count(own))} parameters of the encoder"]
    if settings.adapt != "all":
        trained = _count(weight for weight in own if weight.requires_grad)
        said.append(f"of which {_in_words(trained)} are trained" if trained else "which are frozen")
    if updates:
        said.append(f"{_in_words(_count(adapter_parameters(task.encoder)))} of its low-rank updates")
    return ", ".join([*said, f"{_in_words(rest)} task-only parameters"])


def _count(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def describe_adaptation(task: Task, settings: ResolvedSettings) -> list[str]:
    """Return lines on the trained part of the encoder, if it is not the whole, and on the anchor."""
    lines = []
    if settings.anchor:
        lines.append(f"keeps features near the start: loss + {settings.anchor:g} · (1 - cosine), on whole images")
    if settings.adapt == "all":
        return lines
    count = settings.train_blocks
    what = "" if count is None else f"{count} of {block_count(task.encoder)} blocks"
    if settings.adapt == "lora":
        updates = f"updates of rank {settings.lora_rank}"
        what = updates if count is None else f"{what}, and {updates} in the others"
    lines.append(f"trains {what}")
    learned = [
        name for name in ("mask_token", "position_token", "position_place") if getattr(task, name, None) is not None
    ]
    if learned:
        lines.append(f"  gradients pass through all blocks to {' and '.join(learned)}, which costs time and memory")
    return lines


def describe_recipe(settings: ResolvedSettings, n: int, noun: str) -> list[str]:
    """Return lines on the recipe of a run on ``n`` images: changed settings, a scaled warm-up, images per update."""
    if settings.recipe is None:
        return []
    if settings.recipe not in recipe_names():  # begun by another version
        return [f"recipe {settings.recipe}, which this version does not have"]
    recipe = recipe_named(settings.recipe)
    changes = recipe.changes(settings.plain())
    said = f"with {', '.join(changes)}" if changes else "unchanged"
    if not changes and min(settings.batch_size, n) * settings.accumulate != recipe.batch:
        said = f"unchanged but for the {noun} of an update"
    plain = settings.plain()
    lines = [f"recipe {recipe.name} ({recipe.source}), {said}", recipe.scaling(plain), recipe.update(plain, n, noun)]
    return [line for line in lines if line]


def describe_readers(task: Task, settings: ResolvedSettings, images: int) -> str:
    """Return a line if the batches of ``images`` of all workers do not fit into shared memory; "" if they do."""
    each = batch_bytes(augment_of_readers(task, settings), images, settings.channels)
    readers, free = fitting_readers(settings.workers, each)
    if readers == fitting_readers(settings.workers, 0)[0]:
        return ""
    return (
        f"shared memory: {readers.workers} of {settings.workers} workers read, one batch in advance each: more do not "
        f"fit into the {size_in_words(free)} that {SHARED} has free, at {size_in_words(each)} a batch; give more, such "
        "as docker run --shm-size 2g"
    )


def effective(task: Task, epochs: float) -> str:
    """Return a line on effective epochs; "" if a step sees one crop of the encoder's size per image."""
    (h, w), (height, width) = task.geometry.size, task.augment.size
    if task.views != 1:
        item = task.modality.item
        return f"effective epochs {epochs * task.views:,g}: a step sees {task.views:g} crops of each {item}"
    if (h, w) != (height, width):
        return f"effective epochs {epochs:,}: a step uses {h}x{w} of each crop of {height}x{width}"
    return ""
