"""What a pre-training run is told, and what ``auto`` becomes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from patchloom.data import Stats
from patchloom.errors import PatchloomError
from patchloom.machine import Cores, cores
from patchloom.nets.build import PRESETS, EncoderSpec
from patchloom.tasks import check_images, encoder_wishes
from patchloom.train import suits

Auto = Literal["auto"]
DEFAULT_TASK = "droppos"
# of processes, threads and pixels more are a slip of the keyboard, and would bring a machine down
_MOST = {"workers": 1024, "threads": 1024, "devices": 1024, "nodes": 2**16, "patch_size": 2**16, "channels": 2**16}
LAUNCH = ("devices", "nodes", "strategy")  # with which settings a run may go on as it likes


@dataclass(frozen=True)
class Settings:
    """One pre-training run. Every ``auto`` is replaced by `resolve`; the field names are the command line's.

    Attributes:
        data: folder of images, list file, or the name of a built-in or torchvision data set.
        task: the pretext task: ``name`` and its options.
        model: the encoder: ``name`` and overrides of timm's sizes.
        img_size: height and width in pixels.
        patch_size: side of a patch in pixels.
        positions: fixed sincos, learned, random or no position embeddings.
        channels: channels of the images; greyscale and colour are converted into each other.
        epochs: passes over the training images.
        batch_size: images a step, of all devices together.
        accumulate: steps whose gradients are added up before the weights move.
        blr: base learning rate; the peak is blr · (images an update) / 256.
        weight_decay: AdamW's, for weights of two and more dimensions.
        warmup_epochs: passes over which the learning rate rises from 0 to its peak.
        clip: largest norm of the gradient; 0 switches it off.
        crop_scale: smallest share of an image's area that a random crop shows; crops go up to the whole.
        flip: mirror half of the images. Switch it off where left and right matter.
        held_out: share of the images that is never trained on and serves the measures (at most 2,000 images).
        normalization: channel statistics of the data, or ImageNet's.
        workers: processes that read images; 0 reads in the main process.
        cache: decode the training images once and keep them on the disc: none, whole (as they are), or the pixels to
            which their shorter side is reduced where it is longer.
        device: cpu, cuda or mps.
        devices: processes on each machine, with a device each; auto is what torchrun or SLURM started, else 1.
        nodes: machines that train together.
        strategy: ddp, or fsdp, which keeps weights, gradients and moments in parts between steps.
        precision: of products: float32, bfloat16 where they gain from it, or float16, for GPUs that have no bfloat16
            (weights stay float32).
        teacher_precision: of teachers, and of the guide of droppos, which no gradient reaches: the same, or bfloat16
            even where the rest is in float32.
        attention: with torch's fused kernel, or an explicit softmax; the same mathematics.
        kernels: torch's, or native: our own for bfloat16 on CPUs that have AVX512-BF16, compiled when first needed;
            they take the place of either form of attention.
        compile: have torch.compile write kernels for the transformer blocks.
        checkpointing: compute activations again instead of keeping them: less memory, and a third more time.
        threads: of each training process on a CPU.
        from_run: folder of a run with whose weights this one begins; on the command line --from.
        init: public weights with which the encoder begins: timm:NAME, or a file.
        seed: of everything random.
    """

    data: str
    task: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    img_size: tuple[int, int] | Auto = "auto"
    patch_size: int | Auto = "auto"
    positions: Literal["sincos", "learned", "random", "none"] | Auto = "auto"
    channels: int | Auto = "auto"
    epochs: int | Auto = "auto"
    batch_size: int | Auto = "auto"
    accumulate: int = 1
    blr: float | Auto = "auto"
    weight_decay: float = 0.05
    warmup_epochs: float | Auto = "auto"
    clip: float = 5.0
    crop_scale: float = 0.2
    flip: bool = True
    held_out: float = 0.05
    normalization: Literal["data", "imagenet"] = "data"
    workers: int | Auto = "auto"
    cache: Literal["none", "whole"] | int = "none"
    device: Literal["cpu", "cuda", "mps"] | Auto = "auto"
    devices: int | Auto = "auto"
    nodes: int = 1
    strategy: Literal["ddp", "fsdp"] = "ddp"
    precision: Literal["float32", "bfloat16", "float16"] | Auto = "auto"
    teacher_precision: Literal["same", "bfloat16"] = "same"
    attention: Literal["fused", "explicit"] | Auto = "auto"
    kernels: Literal["torch", "native"] | Auto = "auto"
    compile: bool | Auto = "auto"
    checkpointing: bool = False
    threads: int | Auto = "auto"
    from_run: str | None = None
    init: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            PatchloomError: a number out of its range.
        """
        least = {"epochs": 1, "batch_size": 1, "accumulate": 1, "patch_size": 1, "channels": 1, "threads": 1}
        least |= {"devices": 1, "nodes": 1}
        least |= {"workers": 0, "weight_decay": 0, "warmup_epochs": 0, "clip": 0, "seed": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value != "auto" and value < bound:
                raise PatchloomError(f"--{name} must be {bound} or more, not {value}")
        for name in least:
            bound, value = _MOST.get(name, 2**31 - 1), getattr(self, name)
            if value != "auto" and value > bound:
                raise PatchloomError(f"--{name} must be {bound} or less, not {value}")
        if "auto" not in (self.epochs, self.warmup_epochs) and self.warmup_epochs > self.epochs:
            raise PatchloomError(f"--warmup_epochs {self.warmup_epochs} is more than --epochs {self.epochs}: lower it")
        if self.blr != "auto" and not 0 < self.blr < math.inf:
            raise PatchloomError(f"--blr must be above 0 and finite, not {self.blr}")
        for name in ("crop_scale", "held_out"):
            if not 0 < getattr(self, name) < 1 and (name, getattr(self, name)) != ("crop_scale", 1):
                raise PatchloomError(f"--{name} is a share between 0 and 1, not {getattr(self, name)}")
        if self.img_size != "auto" and not 1 <= min(self.img_size) <= max(self.img_size) <= _MOST["patch_size"]:
            raise PatchloomError(f"--img_size must be positive and {_MOST['patch_size']} or less, not {self.img_size}")
        if self.from_run is not None and self.init is not None:
            raise PatchloomError("--from and --init both say with which weights to begin: give one of them")

    def check_cache(self, crop: tuple[int, int]) -> None:
        """Refuse to keep fewer pixels than the task's crops have (h, w), which may be larger than its images.

        Raises:
            PatchloomError: the sides to which images are reduced would have to be enlarged again.
        """
        if isinstance(self.cache, int) and self.cache < max(crop):
            raise PatchloomError(
                f"--cache {self.cache} keeps too few pixels, since {self.task['name']} takes crops of "
                f"{crop[0]}x{crop[1]} here: give {max(crop)} or more, or whole"
            )

    def plain(self) -> dict[str, Any]:
        """As plain values for YAML."""
        values = asdict(self)
        if self.img_size != "auto":
            values["img_size"] = list(self.img_size)
        return values

    def encoder_spec(self) -> EncoderSpec:
        """The encoder that resolved settings describe."""
        sizes = {name: value for name, value in self.model.items() if name != "name" and value is not None}
        return EncoderSpec(self.model["name"], self.img_size, self.patch_size, self.channels, self.positions, sizes)


# Images seen by the end of a run, if epochs is auto: minutes on a CPU, hours on a GPU.
_SAMPLES = {"cpu": 200_000, "gpu": 20_000_000}
_MOST_EPOCHS = 1600

# Measured (benchmarks/README.md): with few, large patches, positions on `shapes` can be learnt within minutes.
_ON_SHAPES = {"img_size": (32, 32), "patch_size": 8}


def resolve(
    settings: Settings, n: int, channels: int, stats: Stats, world: int = 1, here: Cores | None = None
) -> tuple[Settings, dict[str, str]]:
    """Replace every ``auto``.

    Args:
        settings: as the user gave them.
        n: training images.
        channels: channels found in the data.
        stats: median size and statistics of the data.
        world: processes that train together.
        here: how many of them share the cores of this machine; all of those of a node, if absent.

    Returns:
        Settings without ``auto``, and for each one that was chosen, the reason in a few words.
    """
    reasons: dict[str, str] = {}
    chosen: dict[str, Any] = {}

    def auto(name: str, value: Any, why: str) -> Any:
        asked = settings.model.get("name", "auto") if name == "model" else getattr(settings, name)
        if asked != "auto":
            return asked
        reasons[name] = why
        chosen[name] = {**settings.model, "name": value} if name == "model" else value
        return value

    device = auto("device", *suits.device())
    suits.check_device(device)
    auto("channels", channels, "what the images have")
    if settings.data.partition(":")[0] == "shapes" and (settings.img_size, settings.patch_size) == ("auto", "auto"):
        (h, w), patch = (
            auto(name, value, "measured best on shapes within minutes") for name, value in _ON_SHAPES.items()
        )
    else:
        h, w = auto("img_size", *_img_size(device, min(stats.height, stats.width), settings.patch_size))
        patch = auto("patch_size", _patch(min(h, w)), f"common for {min(h, w)} pixels")
    auto("model", *_model(device, (h // patch) * (w // patch)))
    wishes = encoder_wishes(settings.task)
    auto("positions", *wishes.get("positions", ("sincos", "as in the papers")))
    if "class_token" in wishes and settings.model.get("class_token") is None:
        value, reasons["model.class_token"] = wishes["class_token"]
        chosen["model"] = {**chosen.get("model", settings.model), "class_token": value}
    batch = auto("batch_size", *_batch(device, n, world))
    check_images(settings.task, batch, n)
    share_of_batch(batch, n, world)
    here = here or Cores(cores(), max(1, world // settings.nodes))
    if settings.devices == "auto":
        chosen["devices"] = here.processes
    samples = _SAMPLES["cpu" if device == "cpu" else "gpu"]
    epochs = min(_MOST_EPOCHS, max(10, round(samples / n)))
    epochs = auto("epochs", epochs, f"{n * epochs:,} samples in all from {n:,} training images")
    auto("blr", *_blr(chosen.get("model", settings.model)["name"], batch * settings.accumulate))
    auto("warmup_epochs", round(epochs * 0.1, 2), "a tenth of the epochs")
    threads = auto("threads", *suits.threads(device))
    auto("workers", *suits.workers(device, here))
    half = auto("precision", *suits.precision(device))
    spec = replace(settings, **chosen).encoder_spec()
    auto("attention", *suits.attention(device, half, spec))
    halves = "bfloat16" in (half, settings.teacher_precision)
    kernels = settings.kernels
    if kernels == "auto":  # else nothing shall be compiled
        kernels = auto("kernels", *suits.kernels(device, halves, spec, batch // world))
    suits.check_kernels(settings.kernels, device, halves, spec)
    auto("compile", *suits.compile(device, half, spec, kernels, threads))
    if settings.compile is True and not suits.can_compile(device):
        raise PatchloomError("--compile true needs a C++ compiler, such as g++: install one, or leave it out")
    resolved = replace(settings, **chosen)
    resolved.check()  # what was given may not go with what was chosen
    return resolved, reasons


def _img_size(device: str, median: int, patch: int | Auto) -> tuple[tuple[int, int], str]:
    ceiling = 96 if device == "cpu" else 224
    step = _patch(min(median, ceiling)) if patch == "auto" else patch
    side = max(1, round(min(median, ceiling) / step)) * step
    why = f"the most that is quick on a {device}" if median > ceiling else f"as the images, {median} at the median"
    return (side, side), why


def _patch(side: int) -> int:
    return 2 if side <= 16 else 4 if side <= 48 else 8 if side <= 112 else 16


def _model(device: str, patches: int) -> tuple[str, str]:
    if device == "cpu":
        return "nano", "small enough to train on a CPU"
    if patches <= 100:
        return "mini", "small images"
    return "vit_small_patch16_224", "a good start on one GPU"


def _batch(device: str, n: int, world: int) -> tuple[int, str]:
    usual, why = (128, "usual on a cpu") if device == "cpu" else (256 * world, f"usual on a {device}")
    if world > 1:
        why += f", for {world} processes"
    if n < 8 * usual:
        usual = max(1, min(usual, 2 ** max(3, (n // 8).bit_length() - 1), n))
        why = f"an eighth of the {n} images or less"
    return max(world, usual // world * world), why


def share_of_batch(batch: int, n: int, world: int) -> int:
    """Images of a step of ``batch`` that each of ``world`` processes takes, of ``n`` images in all.

    Raises:
        PatchloomError: they cannot be shared evenly.
    """
    images = min(batch, n)
    if images % world:
        below, above = images // world * world, (images // world + 1) * world
        near = f"{below} or {above}" if 0 < below and above <= n else str(below or above)
        raise PatchloomError(
            f"{images} images a step cannot be shared evenly by {world} processes: use --batch_size {near}, or another "
            "number of processes"
        )
    return images // world


def _blr(model: str, batch: int) -> tuple[float, str]:
    if model in PRESETS:
        return 4e-3, "narrow encoders in small batches want more than the papers' 1.5e-4"
    if batch < 1024:
        return 1e-3, "small batches want more than the papers' 1.5e-4, which is for 4096"
    return 1.5e-4, "the papers'"
