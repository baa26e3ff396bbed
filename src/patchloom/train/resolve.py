"""Values for the ``auto`` settings of a run, with their reasons."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from patchloom.data.cache import choose_cache
from patchloom.data.loader import steps_of
from patchloom.data.source import Source, Subset
from patchloom.data.stats import Stats, measure, variance_lost
from patchloom.errors import PatchloomError
from patchloom.nets.build import PRESETS, outline, rotates, swin_sizes
from patchloom.nets.performance import check_native, choose_attention, choose_kernels
from patchloom.options.declare import Auto
from patchloom.options.refusals import refuse
from patchloom.runs.held_out import with_share
from patchloom.runs.settings import ResolvedSettings, Settings, encoder_spec
from patchloom.sizes import PatchSize, in_pixels, to_pair
from patchloom.system.device import (
    Cores,
    cannot_compile,
    check_device,
    check_precision,
    choose_compile,
    choose_precision,
    choose_threads,
    choose_workers,
    cores,
)
from patchloom.tasks import check_step_size, task_class, with_defaults
from patchloom.tasks.custom import label

# Defaults by device.

# Decoded images are stored if they have so many pixels, so many times the pixels of a crop, and for so many epochs:
# storing an image takes the processor as long as decoding it one to three times.
_WORTH_STORING, _MUCH_LARGER, _OFTEN = 128 * 128, 2, 4


def default_device() -> tuple[str, str]:
    if torch.cuda.is_available():
        return "cuda", "a CUDA GPU was found"
    if torch.backends.mps.is_available():
        return "mps", "an Apple GPU was found"
    return "cpu", "no GPU was found"


def default_workers(device: str, here: Cores) -> tuple[int, str]:
    """Choose the number of reading processes; at least one, because cropping is work even for images in memory."""
    return choose_workers(device, here, least=1)


def default_cache(
    epochs: float, size: tuple[int, int], stats: Stats, training: Source | None
) -> tuple[Literal["none", "whole"], str]:
    """Choose a cache for images that are read often and are much larger than crops of ``size`` (h, w).

    Decoding the others costs little beside a training step.
    """
    if training is None or not stats.modality.resizable:
        return "none", f"{stats.modality.noun} are not cached unless that is asked for"
    if training.in_memory:
        return "none", f"the {training.noun} are in memory"
    if epochs < _OFTEN:
        return "none", f"{training.noun} are decoded too seldom in {epochs:g} epoch{'s' * (epochs != 1)}"
    if stats.height * stats.width < max(_WORTH_STORING, _MUCH_LARGER * math.prod(size)):
        return "none", f"{training.noun} of {in_pixels((stats.height, stats.width))} are decoded fast enough"
    # a cache holds the held-out images of this run, too, which another run may train on
    whole = training.source if isinstance(training, Subset) else training
    return choose_cache(whole, stats.height * stats.width * len(stats.mean))


# Images seen in a run if epochs is auto: minutes on a CPU, hours on a GPU.
_SAMPLES = {"cpu": 200_000, "gpu": 20_000_000}
_MAX_EPOCHS = 1600
_LEAST_FOR_UPDATES = 32  # smallest batch size that is chosen to get more updates

# Measured (benchmarks/README.md): with few large patches, positions on `shapes` are learnt within minutes.
_OBLONG = 1.5  # ratio of sides from which a square is said to leave much out
_SMALLEST = 4  # image side in pixels: two patches of two
_ON_SHAPES = {"img_size": (32, 32), "patch_size": 8}
_USUAL_SCALE = 0.2  # smallest area of a crop, as in MAE
_PROGRAMS = "as in the papers' programs"
LARGE = 2.0  # ratio of image side to training side from which crops at native scale are considered
_FINE = 0.25  # fraction of variance lost by resizing from which crops are cut natively (benchmarks/resolution.py)
_FRAMES_ON_TONES = 7  # frames per patch: with single frames, hardly a position was learnt in the same time


def resolve(
    settings: Settings,
    n: int,
    channels: int,
    stats: Stats,
    world: int = 1,
    here: Cores | None = None,
    images: Source | None = None,
    elsewhere: bool = False,
) -> tuple[ResolvedSettings, dict[str, str]]:
    """Replace every ``auto``, and return the resolved settings with the reasons.

    A plan for devices ``elsewhere`` assumes a recent GPU, and nothing is asked of the device.
    """
    settings, reasons = with_share(settings, n, stats.modality.noun)
    chosen: dict[str, Any] = {}

    def auto(name: str, value: Any, why: str) -> Any:
        asked = settings.model.get("name", "auto") if name == "model" else getattr(settings, name)
        if asked != "auto":
            return asked
        reasons[name] = why
        chosen[name] = {**settings.model, "name": value} if name == "model" else value
        return value

    def sought(name: str, find: Callable[..., tuple[Any, str]], *about: Any) -> Any:
        """Call `auto` with the result of ``find``, which may take seconds and is skipped if a value was given."""
        asked = getattr(settings, name)
        return auto(name, *find(*about)) if asked == "auto" else asked

    device = auto("device", *default_device())
    if not elsewhere:
        check_device(device)
    modality = stats.modality
    auto("channels", channels, f"as the {modality.noun}")
    swin = swin_sizes(settings.model.get("name", "auto"), settings.model)
    asked = with_defaults(settings.task)
    task = task_class(asked.pop("name"))
    task.refuse_swin(swin is not None)
    if swin is not None:
        for name, value, why in _of_swin(device, min(stats.height, stats.width), settings, *swin):
            auto(name, value, why)
        (h, w), patch = (chosen.get(name, getattr(settings, name)) for name in ("img_size", "patch_size"))
    elif modality.own_size is not None:
        h, w = auto("img_size", *modality.own_size)
        if str(settings.data).partition(":")[0] == "tones" and not w % _FRAMES_ON_TONES:
            patch = auto("patch_size", (h, _FRAMES_ON_TONES), "few patches, whose order is learnt within minutes")
        else:
            patch = auto("patch_size", (h, 1), "one frame per patch, as in MP3")
        modality.check_patches(patch)
    elif str(settings.data).partition(":")[0] == "shapes" and (settings.img_size, settings.patch_size) == (
        "auto",
        "auto",
    ):
        (h, w), patch = (auto(name, value, "best on shapes within minutes") for name, value in _ON_SHAPES.items())
    else:
        h, w = auto("img_size", *_img_size(settings.img_size, device, (stats.height, stats.width), settings.patch_size))
        patch = auto("patch_size", _patch(min(h, w)), f"common for {min(h, w)} pixels")
    if modality.resizable:
        sought("crop_scale", _crop_scale, settings, (h, w), (stats.height, stats.width), images)
    else:
        chosen["crop_scale"] = _USUAL_SCALE
    rows, columns = to_pair(patch)
    auto("model", *_model(device, (h // rows) * (w // columns), modality.noun))
    defaults = task.encoder_defaults(asked)
    usual = ("sincos", "as in the papers") if swin is None else ("none", "a Swin has relative positions")
    positions = defaults.get("positions", usual)
    if rotary := rotates(chosen.get("model", settings.model)["name"]):
        # a task that withholds all positions withholds rotations, too
        positions = ("rotary", positions[1]) if positions[0] == "none" else (rotary, "as in timm")
    auto("positions", *positions)
    if "class_token" in defaults and settings.model.get("class_token") is None:
        value, reasons["model.class_token"] = defaults["class_token"]
        chosen["model"] = {**chosen.get("model", settings.model), "class_token": value}
    samples = _SAMPLES["cpu" if device == "cpu" else "gpu"]
    epochs = min(_MAX_EPOCHS, max(10, round(samples / n))) if settings.epochs == "auto" else settings.epochs
    batch = auto(
        "batch_size",
        *_batch(device, n, world, n * epochs / settings.accumulate, task.updates_needed(asked), modality.noun),
    )
    check_step_size(settings.task, batch, n)
    share_of_batch(batch, n, world)
    here = here or Cores(cores(), world)
    if settings.devices == "auto":
        chosen["devices"] = here.processes
    epochs = auto("epochs", epochs, f"{round(n * epochs):,} samples in all from {n:,} training {modality.noun}")
    updates = max(1, steps_of(epochs, n, batch) // settings.accumulate)
    wanted = task.training_defaults(asked, updates) | task.data_defaults(asked, n, modality.noun)
    auto("weight_decay", *wanted.get("weight_decay", (0.05, "as MAE's")))
    narrow = chosen.get("model", settings.model)["name"] in PRESETS and swin is None
    for name, value, why in _adaptation(settings, narrow, min(batch, n) * settings.accumulate):
        if getattr(settings, name) in ("auto", None):
            chosen[name] = value
            if why:
                reasons[name] = why
    for name, (value, why) in wanted.items():
        owner, _, option = name.partition(".")
        if option and settings.task.get(option, "auto") == "auto":
            chosen[owner] = {**chosen.get(owner, settings.task), option: value}
            reasons[name] = why
    auto("warmup_epochs", round(epochs * 0.1, 4), "a tenth of the epochs")
    auto("threads", *choose_threads(device))
    auto("workers", *default_workers(device, here))
    sought("cache", default_cache, epochs, (h, w), stats, images)
    if elsewhere and device == "cuda":
        half = auto("precision", "bfloat16", "GPUs of compute capability 8.0 and later support it")
        auto("compile", False, "decided where the GPU is")
    else:
        half = auto("precision", *choose_precision(device))
        check_precision(half, device)
    shape = ("model", "img_size", "patch_size", "channels", "positions")
    vit = outline(encoder_spec(*(chosen.get(name, getattr(settings, name)) for name in shape)))
    at_once = batch // world * here.processes
    sought("attention", choose_attention, vit, device, half == "bfloat16", at_once)
    halves = "bfloat16" in (half, settings.teacher_precision)
    sought("kernels", choose_kernels, vit, device, halves, at_once)
    if settings.kernels == "native":
        check_native(vit, device, halves)
    if "compile" not in chosen:
        sought("compile", choose_compile, device, steps_of(epochs, n, batch))
    if not elsewhere and settings.compile in (True, "graphs") and (reason := cannot_compile(device)):
        said = str(settings.compile).lower()
        raise PatchloomError(f"--compile {said} cannot be used, because {reason}: leave it out")
    if settings.compile == "graphs":  # whose gradients are overwritten by the next step
        cannot = (
            (device != "cuda", "needs a CUDA GPU"),
            (settings.accumulate > 1, f"cannot add up the gradients of --accumulate {settings.accumulate}"),
            (world > 1, "is for a single process"),
        )
        refuse((one, f"--compile graphs {why}: use --compile true, or leave it out") for one, why in cannot)
    resolved = settings.resolved(**chosen)
    resolved.check()  # given and chosen values may be incompatible
    peak = resolved.blr * min(batch, n) * resolved.accumulate / 256
    if resolved.least_rate > peak:
        raise PatchloomError(
            f"--least_rate {resolved.least_rate:g} exceeds the peak of the learning rate, {peak:.3g} (--blr · images "
            "per update / 256): lower it"
        )
    return resolved, reasons


def measure_data(settings: Settings, source: Source, sample: int = 1000) -> tuple[int, Stats]:
    """Measure the channels and the statistics of the training data."""
    settings.check_kind(source)
    return measure(source, settings.channels, settings.sound(), sample)


def _of_swin(device: str, median: int, settings: Settings, patch: int | None, along: int) -> list[tuple[str, Any, str]]:
    """Choose sizes for a Swin with their reasons: image sides are an even number of mask units."""
    asked, given = settings.patch_size, settings.img_size
    if isinstance(asked, tuple):
        raise PatchloomError(f"--patch_size {in_pixels(asked)}: a Swin needs square patches, so give one side")
    side = min(given) if given != "auto" else min(median, 96 if device == "cpu" else 256)
    why = "as the name says"
    if patch is None:
        patch, why = 2 ** max(0, math.floor(math.log2(side / (8 * along)))), "for 8 or a few more units a side"
    step = 2 * along * (patch if asked == "auto" else asked)
    fitting = max(1, round(side / step)) * step
    reason = f"an even number of units of {step // 2} pixels"
    return [("patch_size", patch, why), ("img_size", (fitting, fitting), reason)]


def _img_size(asked: Any, device: str, image: tuple[int, int], patch: PatchSize | Auto) -> tuple[tuple[int, int], str]:
    """Choose a square for images of median size ``image`` (h, w)."""
    median, longest = min(image), max(image)
    if asked == "auto" and median < _SMALLEST:
        raise PatchloomError(
            f"half of the images have a side of {median} pixel{'s' * (median != 1)} or less, too small for patches: "
            "give larger images, or --img_size to enlarge them"
        )
    ceiling = 96 if device == "cpu" else 224
    steps = to_pair(_patch(min(median, ceiling)) if patch == "auto" else patch)
    h, w = (max(1, round(min(median, ceiling) / step)) * step for step in steps)
    why = f"the largest that is fast on a {device}" if median > ceiling else f"as the images, median {median}"
    if longest > _OBLONG * median:
        sides = zip((h, w), image, steps, strict=True)
        whole = tuple(max(1, round(side * own / median / step)) * step for side, own, step in sides)
        why += f"; a square sees {median / longest:.0%} of images of {in_pixels(image)}: --img_size {in_pixels(whole)}"
    return (h, w), why


def _crop_scale(
    settings: Settings, size: tuple[int, int], image: tuple[int, int], images: Source | None
) -> tuple[float | str, str]:
    """Choose the crop scale for images of median size ``image`` (h, w), trained on at ``size`` (h, w)."""
    factor, task = min(image[0] / size[0], image[1] / size[1]), task_class(settings.task["name"])
    if task.cuts_crops:
        return 1.0, f"{label(settings.task['name'])} cuts crops out of whole images"
    if factor < LARGE or images is None or not task.native_crops:
        return _USUAL_SCALE, _PROGRAMS
    if isinstance(settings.cache, int):
        return _USUAL_SCALE, f"{_PROGRAMS}; --cache {settings.cache} shrinks the images before crops are cut"
    lost = variance_lost(images, size)
    said = f"shrinking images of {in_pixels(image)} to {in_pixels(size)} removes {lost:.0%} of their variance"
    if lost > _FINE:
        return "native", said
    twice = (2 * size[0], 2 * size[1])
    return _USUAL_SCALE, (
        f"{_PROGRAMS}; {said}, and all of their finest structure: if that matters, --img_size {in_pixels(twice)} with "
        "patches of twice the side has as many tokens"
    )


def _patch(side: int) -> int:
    return 2 if side <= 16 else 4 if side <= 48 else 8 if side <= 112 else 16


def _model(device: str, patches: int, noun: str) -> tuple[str, str]:
    if device == "cpu":
        return "nano", "small enough for a CPU"
    if patches <= 100:
        return "mini", f"small {noun}"
    return "vit_small_patch16_224", "a good start on one GPU"


def _batch(device: str, n: int, world: int, samples: float, needed: tuple[int, str], noun: str) -> tuple[int, str]:
    """Choose the batch size for ``samples`` images in all, with at least the ``needed`` number of updates."""
    usual, why = (128, "usual on a cpu") if device == "cpu" else (256 * world, f"usual on a {device}")
    if world > 1:
        why += f", for {world} processes"
    if n < 8 * usual:
        usual = max(1, min(usual, 2 ** max(3, (n // 8).bit_length() - 1), n))
        why = f"at most an eighth of the {n} {noun}" if 8 * usual <= n else f"the least, as there are {n} {noun}"
    least, reason = needed
    while samples / usual < least and usual > _LEAST_FOR_UPDATES:
        usual, why = max(_LEAST_FOR_UPDATES, usual // 2), f"for more updates: {reason}"
    return max(world, usual // world * world), why


def share_of_batch(batch: int, n: int, world: int) -> int:
    """Return the images per step and process for batch size ``batch``; refuse uneven shares."""
    images = min(batch, n)
    if images % world:
        below, above = images // world * world, (images // world + 1) * world
        near = f"{below} or {above}" if 0 < below and above <= n else str(below or above)
        raise PatchloomError(
            f"{images} images per step cannot be shared evenly by {world} processes: use --batch_size {near}, or "
            "another number of processes"
        )
    return images // world


_GENTLE = 0.1  # fraction of the rate from scratch; at the full rate public weights lost their features (dinov2 #204)
_LAYER_DECAY = 0.9  # as in lightly-train, which continues the pre-training of DINOv2
_HEADS_FIRST = 0.05  # of the steps; new heads send noise into the encoder until they fit
_LAST_BLOCKS = 2


def _adaptation(settings: Settings, narrow: bool, batch: int) -> list[tuple[str, Any, str]]:
    """Choose rates and trained weights, gentle with ``--init``, with their reasons, for ``batch`` images per update.

    A recipe keeps its own rates. Values without effect have no reason, and are not printed.
    """
    blr, why = 1.5e-4, "MAE's"  # DropPos, Beyond Masking, ExtreMA and LUT have it, too; SimMIM and MP3 have others
    if narrow:
        blr, why = 4e-3, "narrow encoders and small batches need more than MAE's 1.5e-4"
    elif batch < 1024:
        blr, why = 1e-3, "small batches need more than MAE's 1.5e-4 for 4096"
    heads = not task_class(settings.task["name"]).only_encoder
    if not heads and settings.heads_first not in ("auto", 0):
        raise PatchloomError(f"{settings.task['name']} has no new parts to train first: leave out --heads_first")
    adapt = settings.adapt
    if adapt == "auto":
        adapt = "all" if settings.train_blocks is None else "blocks"
    found: list[tuple[str, Any, str]] = [("adapt", adapt, ""), ("normalization", "data", "")]
    if adapt == "blocks" and settings.train_blocks is None:
        found.append(("train_blocks", _LAST_BLOCKS, "few blocks forget little; 1 to 4 are usual"))
    if settings.init is None or settings.recipe is not None:
        return [*found, ("blr", blr, why), ("layer_decay", 1.0, ""), ("heads_first", 0.0, "")]
    low = float(f"{_GENTLE * blr:.4g}")
    first = (_HEADS_FIRST, "decoder, heads and tokens of the task train alone first")
    return [
        *found,
        ("blr", low, f"a tenth of the rate from scratch, {blr:g}, which changes trained weights too fast"),
        ("layer_decay", _LAYER_DECAY, "first blocks change least, as in lightly-train"),
        ("heads_first", *(first if heads else (0.0, ""))),
    ]
