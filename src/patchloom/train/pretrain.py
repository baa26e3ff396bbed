"""``pretrain``: from a folder of images to an encoder, pictures, and a sentence on what was learnt."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from lightning_fabric import Fabric
from torch.distributed.fsdp import FSDPModule

from patchloom.data import (
    Data,
    Source,
    Stats,
    cache_images,
    channels_of,
    lasting,
    open_data,
    statistics_of,
)
from patchloom.errors import PatchloomError, Stopped, Told
from patchloom.hints import check
from patchloom.machine import Cores, cores
from patchloom.memory import keep_freed_memory
from patchloom.nets.native import missing
from patchloom.nets.performance import compile_blocks
from patchloom.processes import cores_here, rank, world
from patchloom.runs.folder import RunFolder, plain_name
from patchloom.runs.held_out import HeldOut, choose_held_out, stored_held_out, wanted
from patchloom.runs.record import no_record
from patchloom.runs.settings import DEFAULT_TASK, LAUNCH, Settings
from patchloom.runs.task import load_task, prepare_task, run_card
from patchloom.tasks import check_images, with_defaults
from patchloom.train.closing import Closing
from patchloom.train.device_defaults import workers
from patchloom.train.failures import explained
from patchloom.train.launch import device_of, first_decides, launch
from patchloom.train.loop import Loop
from patchloom.train.progress import Reporter
from patchloom.train.resolve import resolve, share_of_batch
from patchloom.train.start import Start
from patchloom.train.watch import Watch

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: where everything is.
        summary: the closing sentence.
    """

    folder: Path
    summary: str


def pretrain(
    data: str | Path, task: str | dict[str, Any] = DEFAULT_TASK, *, out: str | Path | None = None, **settings
) -> Run:
    """Pre-train an encoder on images without labels.

    Args:
        data: a folder of images, a list file, or the name of a built-in ("shapes", "digits") or torchvision data set.
        task: name of a pretext task, or a dict of its ``name`` and options.
        out: folder of the run; ``runs/DATA-TASK`` if absent. A run that is there already is resumed.
        settings: the fields of `patchloom.runs.settings.Settings`, such as ``epochs=100``; ``model`` may be a name,
            or a dict of ``name`` and sizes.

    Returns:
        The run.

    Raises:
        PatchloomError: something cannot be used; the sentence says what to do.
    """
    asked = request(data, task, settings)
    path = Path(out) if out else Path("runs") / f"{plain_name(asked.data)}-{asked.task['name']}"
    opened = open_data(asked.data)
    return _Pretraining(asked, opened, RunFolder(path)).run()


def request(data: str | Path, task: str | dict[str, Any], settings: dict[str, Any]) -> Settings:
    """The settings that a user asked for.

    Raises:
        PatchloomError: an unknown setting.
    """
    known = [field.name for field in fields(Settings)]
    for name in settings:
        if name not in known:
            raise PatchloomError(f"pretrain has no setting called {name}: its settings are {', '.join(known)}")
    given = dict(settings)
    model = given.pop("model", "auto")
    size = given.get("img_size", "auto")
    if isinstance(size, int):
        given["img_size"] = (size, size)
    elif isinstance(size, list):
        given["img_size"] = tuple(size)
    for name in ("from_run", "init"):
        if given.get(name) is not None and Path(given[name]).exists():
            given[name] = str(Path(given[name]).absolute())
    asked = Settings(
        data=_lasting(data),
        task=with_defaults({"name": task} if isinstance(task, str) else task),
        model={"name": model} if isinstance(model, str) else {"name": "auto", **model},
        **given,
    )
    hints = get_type_hints(Settings)
    for name in known:
        check(name, getattr(asked, name), hints[name])
    asked.check()
    return asked


def _lasting(data: str | Path) -> str:
    """What data is called from any folder."""
    if not str(data).strip():
        raise PatchloomError("the data has no name: give a folder of images, a list file, or shapes")
    return lasting(data)


class _Settled(NamedTuple):
    """What the first process found out for all of them."""

    resumed: bool
    settings: Settings
    reasons: dict[str, str]
    stats: Stats
    fingerprint: str
    held_out: HeldOut


class _Pretraining:
    """The steps of `pretrain`, in order."""

    def __init__(self, asked: Settings, data: Data, folder: RunFolder):
        self.asked, self.data, self.folder = asked, data, folder
        self.record = no_record()
        self.here = Cores(cores())  # as long as this process is alone

    @cached_property
    def fingerprint(self) -> str:
        """Of the images; a large folder's takes seconds."""
        return self.data.train.fingerprint()

    def run(self) -> Run:
        summary = self.folder.read_summary()
        if summary is not None:
            self.folder.holds(self.asked)
            print(f"{self.folder.path} is finished. {summary}")
            return Run(self.folder.path, summary)
        keep_freed_memory()
        fabric = launch(self.asked, self._device())
        self.here = cores_here()
        settled = first_decides(fabric, self._settle)
        if self.fingerprint != settled.fingerprint:
            raise PatchloomError(
                f"process {rank()} finds other images in {self.asked.data} than the first: give all machines the same"
            )
        self.settings, self.stats, self.apart = settled.settings, settled.stats, settled.held_out
        self.training, self.held_out = self.apart.parts(self.data.train)
        with explained(self.settings):
            return self._train(fabric, settled)

    def _train(self, fabric: Fabric, settled: _Settled) -> Run:
        settings, reasons, told = self.settings, settled.reasons, []
        if settings.device == "cpu" and settings.threads != "auto":  # which an older version's run still says
            torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        start = None if settled.resumed else Start(self.asked)
        begin = (lambda vit: None) if start is None else lambda vit: told.extend(start.encoder(vit))
        self.task = prepare_task(settings, self.stats.mean, self.stats.std, begin)
        if start is not None:
            told += start.rest(self.task)
            values = {name: value for name, (value, _) in self.task.chosen.items()}
            self.settings = settings = replace(settings, task=settings.task | values)
            reasons |= {f"task.{name}": why for name, (_, why) in self.task.chosen.items()}
        if not settled.resumed:  # the task alone knows how large its crops are
            first_decides(fabric, lambda: settings.check_cache(self.task.augment.size))
        source = self._kept(fabric.is_global_zero)  # before the folder is begun: there may be no room for it
        if not settled.resumed:
            first_decides(fabric, lambda: self._begin(reasons))
        self.reporter = Reporter(self.folder, fabric.is_global_zero)
        self._announce(reasons, told)
        self.card = run_card(settings, self.stats.mean, self.stats.std, self.folder.path.name)
        watch = Watch(self.task, self.card, self.held_out, self.training, settings)
        loop = Loop(fabric, self.task, source, settings, self.folder, self.reporter, watch)
        if loop.restored:
            self.reporter.say(f"Resuming after step {loop.state.step:,} of {loop.steps:,}.")
            if settings.kernels == "native" and (reason := missing()):
                self.reporter.say(f"  {reason}: torch's go on, and last digits differ")
        ended = loop.run()
        if not fabric.is_global_zero:
            if not ended:
                raise Told("stopped")
            return Run(self.folder.path, "")
        compile_blocks(self.task, enabled=False)  # the closing evaluation has other shapes, each of them once
        if not ended:
            raise Stopped("stopped, and a checkpoint was written: the same command goes on from there")
        if isinstance(self.task, FSDPModule):  # of which this process has a part; the last checkpoint has the whole
            watch.task = load_task(self.folder.path).task.to(fabric.device)
        closing = Closing(watch, self.card, self.folder, self.reporter, self.data, self.training, self.apart, settings)
        return Run(self.folder.path, closing.run(loop.measure, fabric.device, loop.stepper.autocast))

    def _device(self) -> str:
        """Where to train: as the run that is resumed did, if there is one."""
        return self.folder.read_config().device if self.folder.config.exists() else device_of(self.asked)

    def _begin(self, reasons: dict[str, str]) -> None:
        held_out = self.apart.plain()
        self.folder.begin(self.asked, self.settings, reasons, self.stats, self.fingerprint, held_out, self.record)
        self.folder.note_unreadable(self.stats.unreadable)

    def _settle(self) -> _Settled:
        """What holds for all processes: of the run that is resumed, or found out now."""
        return self._resumed() if self.folder.holds(self.asked) else self._resolved()

    def _resumed(self) -> _Settled:
        self.folder.lock()
        self.folder.tidy()
        settings, found = self.folder.read_config(), self.folder.read_data()
        if found["fingerprint"] != self.fingerprint:
            raise PatchloomError(
                f"the images in {settings.data} have changed since {self.folder.path} was begun: choose a new "
                f"folder with --out; --from {self.folder.path} starts there from its weights"
            )
        held_out = stored_held_out(self.folder, settings, self.data.train)
        training = held_out.parts(self.data.train)[0]
        check_images(settings.task, settings.batch_size, len(training))
        share_of_batch(settings.batch_size, len(training), world())
        settings = replace(settings, **{name: getattr(self.asked, name) for name in LAUNCH})
        number, why = workers(settings.device, self.here)
        reasons = {}
        if self.asked.workers == "auto" and settings.workers != number:  # nothing but the pace depends on it
            settings, reasons = replace(settings, workers=number), {"workers": why}
        stats = Stats(*(found[name] for name in ("mean", "std", "height", "width", "sampled")), [])
        return _Settled(True, settings, reasons, stats, self.fingerprint, held_out)

    def _resolved(self) -> _Settled:
        asked, as_there = Start(self.asked).shaped()
        held_out, self.record = choose_held_out(self.asked, self.data.train)
        training = held_out.parts(self.data.train)[0]
        found = channels_of(training)
        channels = found if asked.channels == "auto" else asked.channels
        stats = statistics_of(training, channels)
        if asked.normalization == "imagenet":
            if channels != 3:
                raise PatchloomError(
                    f"ImageNet's statistics are for 3 channels, not {channels}: use --normalization data"
                )
            stats = stats._replace(mean=_IMAGENET[0], std=_IMAGENET[1])
        settings, reasons = resolve(asked, len(training), channels, stats, world(), self.here)
        check_images(settings.task, settings.batch_size, len(training) - len(stats.unreadable))
        return _Settled(False, settings, as_there | reasons, stats, self.fingerprint, held_out)

    def _kept(self, loud: bool) -> Source:
        """The training images as the steps read them; all other uses read the files themselves."""
        if self.settings.cache == "none":
            return self.training
        # with those that are held out, so that other seeds find the same images there
        say = partial(print, flush=True) if loud else lambda line: None
        return self.apart.parts(cache_images(self.data.train, self.settings.cache, self.settings.workers, say))[0]

    def _announce(self, reasons: dict[str, str], told: list[str]) -> None:
        """Say what will be done, what every auto became, and with which weights it begins."""
        s, say = self.settings, self.reporter.say
        counts = f"{len(self.training):,} images to train on, {len(self.held_out):,} held out"
        if copies := len(self.apart.copies):
            counts += f", {copies:,} left out as exact copies of those"
        say(f"{s.task['name']} on {self.data.train.name}: {counts}")
        if not self.apart.looked:
            say("  exact copies among the images were not looked for")
        if self.apart.doubt:
            say(f"  {self.apart.sentence('the images of the measures')}")
        elif (start := self.apart.start) and (more := wanted(self.asked, self.data.train)) > len(self.held_out):
            say(f"  not {more:,} are held out: all others are copies, or the weights of {start} were trained on them")
        for name, why in reasons.items():
            owner, _, option = name.rpartition(".")
            value = getattr(s, owner)[option] if owner else getattr(s, name)
            shown = value["name"] if name == "model" else "x".join(map(str, value)) if name == "img_size" else value
            shown = f"{shown:.4g}" if isinstance(shown, float) else shown
            say(f"  {name:<20} {shown!s:<12} ({why})")
        if self.stats.unreadable:
            say(f"  {len(self.stats.unreadable)} of {self.stats.sampled} sampled files cannot be read and are skipped")
        encoder = sum(weight.numel() for weight in self.task.encoder.parameters())
        rest = sum(weight.numel() for weight in self.task.parameters()) - encoder
        for line in told:
            say(f"  {line}")
        if world() > 1:
            say(f"  {world()} processes ({s.strategy}) with {s.batch_size // world()} images of a step each")
        say(f"  encoder of {encoder / 1e6:.1f} M parameters, and {rest / 1e6:.1f} M that only the task needs")
        say(f"  everything goes to {self.folder.path}")
