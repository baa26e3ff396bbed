"""``pretrain``: from a folder of images to an encoder, pictures, and a sentence on what was learnt."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch

from patchloom.data import (
    Data,
    Source,
    Stats,
    channels_of,
    hold_out,
    in_memory,
    is_builtin,
    keep,
    measure,
    open_data,
)
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate import How, Parts, Report, append_rows, compare, has_labels, labelled
from patchloom.files import write_whole
from patchloom.hints import check
from patchloom.look import draw_curves
from patchloom.machine import keep_freed_memory
from patchloom.nets.encode import compile_blocks
from patchloom.nets.weights import save_encoder, save_head
from patchloom.tasks import with_defaults
from patchloom.train.folder import RunFolder, plain_name
from patchloom.train.loop import Loop, build_fabric
from patchloom.train.pictures import draw_task, prepare_task, run_card
from patchloom.train.progress import Reporter
from patchloom.train.settings import DEFAULT_TASK, Settings, resolve
from patchloom.train.watch import Watch, verdict

_MOST_EVALUATED = 5000  # training images of the closing evaluation; `patchloom evaluate` takes all
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
        settings: the fields of `patchloom.train.settings.Settings`, such as ``epochs=100``; ``model`` may be a name,
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
    """What data is called from any folder: names stay, paths become absolute."""
    if not str(data).strip():
        raise PatchloomError("the data has no name: give a folder of images, a list file, or shapes")
    if isinstance(data, str) and (is_builtin(data) or not Path(data).exists()):
        return data
    return str(Path(data).absolute())


class _Pretraining:
    """The steps of `pretrain`, in order."""

    def __init__(self, asked: Settings, data: Data, folder: RunFolder):
        self.asked, self.data, self.folder = asked, data, folder
        self.training, self.held_out = hold_out(data.train, asked.held_out, seed=asked.seed)
        self.resumed = folder.holds(asked)

    def run(self) -> Run:
        if self.folder.summary.exists():
            summary = self.folder.summary.read_text("utf-8").strip()
            print(f"{self.folder.path} is finished. {summary}")
            return Run(self.folder.path, summary)
        keep_freed_memory()
        settings, reasons, stats = self._settle()
        if settings.device == "cpu" and settings.threads != "auto":  # which an older version's run still says
            torch.set_num_threads(settings.threads)
        fabric = build_fabric(settings)
        fabric.launch()
        torch.manual_seed(settings.seed)
        self.task = prepare_task(settings, stats.mean, stats.std)
        if not self.resumed:
            values = {name: value for name, (value, _) in self.task.chosen.items()}
            settings = replace(settings, task=settings.task | values)
            reasons |= {f"task.{name}": why for name, (_, why) in self.task.chosen.items()}
        self.settings, self.stats = settings, stats
        source = self._kept(fabric.is_global_zero)  # before the folder is begun: there may be no room for it
        if fabric.is_global_zero and not self.resumed:
            self.folder.begin(self.asked, settings, reasons, stats, self.data.train.fingerprint())
            self.folder.note_unreadable(stats.unreadable)
        self.reporter = Reporter(self.folder.log, fabric.is_global_zero)
        self._announce(reasons)
        self.card = run_card(settings, stats.mean, stats.std, self.folder.path.name)
        watch = Watch(self.task, self.card, self.held_out, self.training, settings)
        loop = Loop(fabric, self.task, source, settings, self.card, self.folder, self.reporter, watch)
        if self.resumed:
            self.reporter.say(f"Resuming after step {loop.first:,} of {loop.steps:,}.")
        try:
            ended = loop.run()
            compile_blocks(self.task, enabled=False)  # the closing evaluation has other shapes, each of them once
            if not ended:
                raise Stopped("stopped, and a checkpoint was written: the same command goes on from there")
            return Run(self.folder.path, self._finish(loop, watch))
        except torch.OutOfMemoryError as problem:
            raise PatchloomError(
                f"the device has too little memory for {settings.batch_size} images at once: halve --batch_size and "
                "double --accumulate, which keeps the size of an update (and take another --out)"
            ) from problem

    def _settle(self) -> tuple[Settings, dict[str, str], Stats]:
        """Resolved settings, reasons, and statistics: measured now, or those of the run that is resumed."""
        if self.resumed:
            settings, found = self.folder.read_config(), self.folder.read_data()
            if found["fingerprint"] != self.data.train.fingerprint():
                raise PatchloomError(
                    f"the images in {settings.data} have changed since {self.folder.path} was begun: choose a new "
                    "folder with --out"
                )
            return settings, {}, Stats(*(found[name] for name in ("mean", "std", "height", "width", "sampled")), [])
        found = channels_of(self.training)
        channels = found if self.asked.channels == "auto" else self.asked.channels
        stats = measure(self.training, channels)
        if self.asked.normalization == "imagenet":
            if channels != 3:
                raise PatchloomError(
                    f"ImageNet's statistics are for 3 channels, not {channels}: use --normalization data"
                )
            stats = stats._replace(mean=_IMAGENET[0], std=_IMAGENET[1])
        settings, reasons = resolve(self.asked, len(self.training), channels, stats, in_memory(self.data.train))
        return settings, reasons, stats

    def _kept(self, loud: bool) -> Source:
        """The training images as the steps read them; all other uses read the files themselves."""
        if self.settings.cache == "none":
            return self.training
        # with those that are held out, so that other seeds find the same images there
        say = partial(print, flush=True) if loud else lambda line: None
        kept = keep(self.data.train, self.settings.cache, self.settings.workers, say)
        return hold_out(kept, self.asked.held_out, seed=self.asked.seed)[0]

    def _announce(self, reasons: dict[str, str]) -> None:
        """Say what will be done, and what every auto became."""
        s, say = self.settings, self.reporter.say
        counts = f"{len(self.training):,} images to train on, {len(self.held_out):,} held out"
        say(f"{s.task['name']} on {self.data.train.name}: {counts}")
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
        say(f"  encoder of {encoder / 1e6:.1f} M parameters, and {rest / 1e6:.1f} M that only the task needs")
        say(f"  everything goes to {self.folder.path}")

    def _evaluate(self, watch: Watch) -> Report:
        """kNN (which is returned) and linear probe beside their controls, on images that were never trained on."""
        if has_labels(self.data.test):
            test, story = self.data.test, "The data brings its own test images."
        else:
            test, story = self.held_out, "The test images are the held-out ones, which were never trained on."
        train = self.training
        if len(train) > _MOST_EVALUATED:
            some = np.random.default_rng(self.settings.seed).permutation(len(train))[:_MOST_EVALUATED]
            train, story = train.subset(np.sort(some)), f"{story} The training images are a random subset."
        parts = Parts(labelled(train), labelled(test), story)
        device = str(next(self.task.parameters()).device)
        # these weights and this split are measured once: nothing to keep
        how = How(self.settings.seed, device=device, batch_size=watch.batch_size, workers=watch.workers, cache=False)
        head = self.task.beside().get("instance_head")
        knn, linear = compare(("knn", "linear"), self.task.encoder, self.card, parts, how, head)
        for report in (knn, linear):
            append_rows(self.folder.path / "results.csv", report)
            self.reporter.say(report.headline)
        return knn

    def _finish(self, loop: Loop, watch: Watch) -> str:
        """Write the encoder and what belongs beside it, draw the pictures, and say what was learnt."""
        beside = self.task.beside()
        for name, module in beside.items():
            save_head(module, self.folder.encoder.with_name(f"{name}.safetensors"))
        save_encoder(self.task.encoder, self.card, self.folder.encoder)
        fabric = loop.fabric
        result = loop.measure or watch.look(fabric.device, fabric.autocast)[0]  # none: stopped after the last step
        draw_curves(self.folder.metrics, self.folder.pictures / "curves.png", result.name)
        draw_task(self.task, self.held_out, self.card, self.folder.pictures, fabric.device)
        if count := len(self.folder.unreadable_names()):
            files = "file" if count == 1 else "files"
            self.reporter.say(f"{count} {files} could not be read: see {self.folder.unreadable}.")
        knn = self._evaluate(watch) if watch.gallery is not None else None
        summary = verdict(result, knn)
        self.reporter.say(summary)
        told = "".join(f", and {name}.safetensors beside it" for name in beside)
        self.reporter.say(f"Pictures: {self.folder.pictures}. Encoder: {self.folder.encoder}{told}.")
        write_whole(self.folder.summary, summary + "\n")
        return summary
