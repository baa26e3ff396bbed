"""Settings of a pre-training run, before and after `patchloom.train.resolve` replaces ``auto``."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from patchloom.arguments import to_plain_value, unknown_option_error
from patchloom.audio.compatibility import wrong_kind_error
from patchloom.audio.config import FeatureKind, Sound
from patchloom.data.augment import MAX_MAGNITUDE
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike, is_object_name
from patchloom.data.sources.open import absolute_name
from patchloom.errors import PatchloomError, check_type, conforms
from patchloom.nets.build import EncoderSpec, PositionKind, check_model_options
from patchloom.nets.compiling import Compile
from patchloom.nets.finetune import Adapt
from patchloom.nets.lora import Target
from patchloom.options.recipes import Border
from patchloom.recipes import recipe_named, recipe_names
from patchloom.sizes import PatchSize, compact, in_pixels, to_pair
from patchloom.tasks import AUTO, task_class, task_name, usual_task, with_defaults
from patchloom.tasks.custom import Code, is_code, is_loaded, label, only_here, refuse_changed

Auto = Literal["auto"]
# type of a task in Python: a name, the place of a class, a class, or a dict of one of these and options
TaskLike = str | type[Any] | Mapping[str, Any]
# larger numbers of processes, threads or pixels are typos that would overload a machine
_MAX = {"workers": 1024, "threads": 1024, "devices": 1024, "channels": 2**16}
_MAX |= {"epochs": 2**31 - 1, "minutes": 10**6, "seconds": 3600, "rate": 10**6, "bins": 4096}
_MAX_SIDE = 2**16
_RANDAUGMENT_STD = 0.5
_LORA: tuple[int, Target] = 16, "both"
# settings for one kind of data only, by the noun of a source
_ONLY_FOR = {
    "images": ("img_size", "channels", "crop_scale", "flip", "randaugment", "normalization", "crop_on"),
    "recordings": ("seconds", "rate", "features", "bins"),
}
LAUNCH = ("devices", "strategy", "keep_every", "log")  # settings that may change when a run is resumed


@dataclass(frozen=True)
class Settings:
    """Settings of a pre-training run, with the names of the command line.

    Attributes:
        data: folder of images, list or table of them, pattern, shards, or name of a data set; or several of these.
        task: pretext task: ``name`` and its options.
        model: encoder: ``name`` and overrides of timm's sizes.
        img_size: height and width in pixels.
        patch_size: side of a patch in pixels; 40x1 is rows x columns.
        positions: position embeddings: sincos, sincos-learned (starts as sincos), learned (starts random), random or
            none. sincos and random stay fixed. rotary: rotations only, for models such as DINOv3.
        channels: number of channels; greyscale and colour are converted into each other.
        epochs: passes over the training images; 0.5 is half a pass.
        minutes: training time by the clock instead of epochs, with held-out measures; the number of epochs is planned
            from a timing, anew on the way, and is stored.
        batch_size: images per step, over all devices.
        accumulate: steps per update, whose gradients are accumulated.
        blr: base learning rate; the peak is blr · (images per update) / 256.
        least_rate: learning rate at the end of the cosine, not scaled by the batch (DINO, I-JEPA: 1e-6; MAE: 0).
        weight_decay: weight decay of AdamW, without biases, norms and positions; auto: 0.05, for extrema 0.1.
        final_weight_decay: weight decay at the end of training, which --weight_decay reaches as a cosine (DINO, I-JEPA:
            from 0.04 to 0.4); constant if absent.
        layer_decay: ratio of the learning rates of a block and the next one; 1 disables it.
        betas: decay rates of AdamW's two moments; DeiT and MP3 use [0.9, 0.999].
        warmup_epochs: epochs of linear warm-up to the peak learning rate.
        halve_every: updates between halvings of the learning rate (MP3's speech models); 0: cosine decay to 0. With
            halvings, the warm-up is constant at a tenth of the peak.
        clip: largest gradient norm; 0 switches clipping off.
        crop_scale: smallest area of a random crop, as a fraction of the image; native: crops at the image's own scale.
            padded or reflected: the whole image, shifted by up to 4 pixels, with black or reflected pixels around it.
        flip: random horizontal flips. Switch them off if left and right matter.
        randaugment: magnitude of RandAugment, up to 10 (DeiT and MP3: 9); 0 switches it off.
        randaugment_std: standard deviation of that magnitude.
        seconds: length to which recordings are cut or padded.
        rate: sampling rate in Hz to which recordings are resampled.
        features: pictures of recordings: mel-frequency cepstral coefficients (mfcc) or mel spectrograms (logmel).
        bins: rows in the pictures of recordings: coefficients or mel bands.
        held_out: fraction of images held out for validation, at most 2,000 images; auto: 5 %, more for small data sets;
            0 trains on all, and measures nothing.
        knn_k: number of neighbours for the kNN accuracy during training, with labels only (ExtreMA: 200).
        knn_gallery: largest number of training images to search for neighbours (ExtreMA: a tenth of ImageNet).
        group: images held out together, such as frames of a video: parent (folder), a column of a table, or a regular
            expression. The parentheses of the expression capture the group in the path.
        normalization: source of the mean and std of the channels: the data, ImageNet, or the initial weights (init);
            auto: init with --init, else data.
        workers: processes that read images; 0 reads in the main process.
        cache: cache of decoded training images, filled in the first epoch: none, whole (full size), or a shorter side
            in pixels for larger images. auto: whole, if that saves much work and fits into memory and on the disc.
        crop_on: place where random crops are resized: in the workers, or on the device, for GPUs that wait for images.
            Equal up to rounding.
        device: device for training; auto: a GPU if there is one.
        devices: processes per machine, with one device each; auto: as started by torchrun or SLURM, else 1.
        strategy: ddp, or fsdp, which shards weights, gradients and moments.
        precision: precision of matrix products: float32, tf32 (NVIDIA GPUs), bfloat16, or float16 for GPUs without
            bfloat16. Weights stay float32.
        teacher_precision: precision of teachers and of droppos's guide, which need no gradient: same as --precision, or
            bfloat16.
        attention: form of attention: torch's fused kernel, or an explicit softmax. Equal up to rounding.
        kernels: attention kernels: torch, or native ones for bfloat16 on CPUs with AVX512-BF16, compiled on first use.
        compile: torch.compile for stacks of blocks and for losses; graphs: as CUDA graphs, too, for small models on one
            GPU (experimental: not yet run on a GPU).
        checkpointing: gradient checkpointing: less memory, and a third more time.
        threads: CPU threads per training process.
        from_run: folder of a run to take the initial weights from.
        initialization: random initial weights: xavier, as in MAE, or normal with deviation 0.02, as in DeiT and SimMIM.
        init: initial weights: timm:NAME, a run, a file, or a published checkpoint; for unusual sizes, give --model.
        adapt: trained weights of an encoder from --init or --from: all, the last blocks, or low-rank updates of the
            blocks' weights (lora), which are merged when the encoder is written.
        train_blocks: number of last blocks to train with --adapt blocks (2 if absent), with the last norm; with lora,
            they are trained whole, and the others by updates.
        lora_rank: rank of the low-rank updates.
        lora_on: layers with low-rank updates: those of the attention, of the MLP, or both.
        heads_first: fraction of the steps in which only new parts train: decoder, heads and tokens of the task.
        anchor: weight of a loss that keeps features near those of the initial weights: 1 - their cosine on whole
            images; 0 switches it off.
        recipe: row of a paper's table, with defaults for settings that are not given; ``patchloom recipes`` lists them.
        patience: evaluations without improvement before the run stops and keeps its best weights. Without it, the run
            keeps its last weights.
        keep_every: epochs between encoder files that are kept in the run's folder, as encoders/epoch-0010.safetensors.
        log: experiment trackers, any number of them: tensorboard, wandb, mlflow, trackio.
        split_seed: random seed of the held-out split, to compare runs of several seeds on the same images; else --seed.
        seed: random seed.
    """

    data: str | list[str]
    task: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    img_size: tuple[int, int] | Auto = "auto"
    patch_size: PatchSize | Auto = "auto"
    positions: PositionKind | Auto = "auto"
    channels: int | Auto = "auto"
    epochs: float | Auto = "auto"
    minutes: float | None = None
    batch_size: int | Auto = "auto"
    accumulate: int = 1
    blr: float | Auto = "auto"
    least_rate: float = 0.0
    weight_decay: float | Auto = "auto"
    final_weight_decay: float | None = None
    layer_decay: float | Auto = "auto"
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_epochs: float | Auto = "auto"
    halve_every: int = 0
    clip: float = 5.0
    crop_scale: float | Literal["auto", "native"] | Border = "auto"
    flip: bool = True
    randaugment: float = 0.0
    randaugment_std: float = _RANDAUGMENT_STD
    seconds: float = Sound.seconds
    rate: int = Sound.rate
    features: FeatureKind = Sound.features
    bins: int = Sound.bins
    held_out: float | Auto = "auto"
    knn_k: int = 20
    knn_gallery: int = 2000
    group: str | None = None
    normalization: Literal["data", "imagenet", "init"] | Auto = "auto"
    workers: int | Auto = "auto"
    cache: Literal["none", "whole"] | int | Auto = "auto"
    crop_on: Literal["workers", "device"] = "workers"
    device: Literal["cpu", "cuda", "mps"] | Auto = "auto"
    devices: int | Auto = "auto"
    strategy: Literal["ddp", "fsdp"] = "ddp"
    precision: Literal["float32", "tf32", "bfloat16", "float16"] | Auto = "auto"
    teacher_precision: Literal["same", "bfloat16"] = "same"
    attention: Literal["fused", "explicit"] | Auto = "auto"
    kernels: Literal["torch", "native"] | Auto = "auto"
    compile: Compile | Auto = "auto"
    checkpointing: bool = False
    threads: int | Auto = "auto"
    initialization: Literal["xavier", "normal"] = "xavier"
    from_run: str | None = None
    init: str | None = None
    adapt: Adapt | Auto = "auto"
    train_blocks: int | None = None
    lora_rank: int = _LORA[0]
    lora_on: Target = _LORA[1]
    heads_first: float | Auto = "auto"
    anchor: float = 0.0
    recipe: str | None = None
    patience: int | None = None
    keep_every: int | None = None
    log: str | list[str] | None = None
    split_seed: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse invalid values and combinations."""
        least = {"batch_size": 1, "accumulate": 1, "channels": 1, "threads": 1, "devices": 1}
        least |= {"workers": 0, "weight_decay": 0, "warmup_epochs": 0, "clip": 0, "seed": 0, "halve_every": 0}
        least |= {"rate": 1000, "bins": 1, "patience": 1, "train_blocks": 0, "knn_k": 1, "knn_gallery": 2}
        least |= {"lora_rank": 1, "least_rate": 0, "final_weight_decay": 0, "keep_every": 1}
        for name, bound in least.items():
            value, most = getattr(self, name), _MAX.get(name, 2**31 - 1)
            if value not in ("auto", None) and not bound <= value <= most:
                limit = f"{bound} or more" if value < bound else f"{most} or less"
                raise PatchloomError(f"--{name} must be {limit}, not {value}")
        if self.epochs != "auto" and not 0 < self.epochs <= _MAX["epochs"]:
            raise PatchloomError(f"--epochs must be above 0 and at most {_MAX['epochs']:,}, not {self.epochs:g}")
        if self.minutes is not None and not 0 < self.minutes <= _MAX["minutes"]:
            raise PatchloomError(f"--minutes must be above 0 and at most {_MAX['minutes']:,}, not {self.minutes:g}")
        if self.minutes is not None and self.epochs != "auto":
            raise PatchloomError("--minutes and --epochs both set the length of training: give one of them")
        if self.epochs != "auto" and self.warmup_epochs != "auto" and self.warmup_epochs > self.epochs:
            raise PatchloomError(f"--warmup_epochs {self.warmup_epochs} exceeds --epochs {self.epochs}: lower it")
        if self.blr != "auto" and not 0 < self.blr < math.inf:
            raise PatchloomError(f"--blr must be above 0 and finite, not {self.blr}")
        if self.least_rate and self.halve_every:
            raise PatchloomError("--least_rate ends the cosine, which --halve_every replaces: leave out one of them")
        if self.final_weight_decay is not None and self.weight_decay == 0:
            raise PatchloomError(
                "--final_weight_decay is reached from --weight_decay, which is 0: give one above 0, or leave it out"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise PatchloomError(f"--betas must lie in [0, 1), not {list(self.betas)}")
        if not 0 < self.seconds <= _MAX["seconds"]:
            raise PatchloomError(f"--seconds must be above 0, and {_MAX['seconds']} or less, not {self.seconds:g}")
        allowed = {"crop_scale": 1, "held_out": 0}  # besides fractions
        for name, end in allowed.items():
            share = getattr(self, name)
            if not isinstance(share, str) and not 0 < share < 1 and share != end:
                raise PatchloomError(f"--{name} must be a fraction between 0 and 1, or {end}, not {share}")
        if self.held_out == 0 and self.patience is not None:
            raise PatchloomError(
                "--patience compares measures on held-out images: leave out --patience or --held_out 0"
            )
        if self.crop_scale == "native" and isinstance(self.cache, int):
            raise PatchloomError(
                f"--cache {self.cache} shrinks images before --crop_scale native crops them: give --cache whole"
            )
        if self.crop_on == "device":
            whole = isinstance(self.crop_scale, str) and self.crop_scale in get_args(Border)
            for name, needed in (("crop_scale", whole), ("randaugment", self.randaugment)):
                if needed:
                    raise PatchloomError(
                        f"--{name} {getattr(self, name)} changes crops after they are resized, in the workers: leave "
                        "out --crop_on device"
                    )
        if not 0 <= self.randaugment <= MAX_MAGNITUDE:
            raise PatchloomError(f"--randaugment must be 0 to {MAX_MAGNITUDE}, not {self.randaugment}")
        if not 0 <= self.randaugment_std < math.inf:
            raise PatchloomError(f"--randaugment_std must be 0 or more, not {self.randaugment_std}")
        if not self.randaugment and self.randaugment_std != _RANDAUGMENT_STD:
            raise PatchloomError("--randaugment_std has no effect without --randaugment: add --randaugment 9")
        for name in ("img_size", "patch_size"):
            size = getattr(self, name)
            if size != "auto" and not 1 <= min(to_pair(size)) <= max(to_pair(size)) <= _MAX_SIDE:
                raise PatchloomError(f"--{name} must be positive and {_MAX_SIDE} or less, not {in_pixels(size)}")
        if self.from_run is not None and self.init is not None:
            raise PatchloomError("--from and --init both set the initial weights: give one of them")
        self._check_adaptation()

    def _check_adaptation(self) -> None:
        """Refuse invalid values and combinations of the options that adapt initial weights."""
        if self.layer_decay != "auto" and not 0 < self.layer_decay <= 1:
            raise PatchloomError(f"--layer_decay must be above 0 and at most 1, not {self.layer_decay:g}")
        if self.heads_first != "auto" and not 0 <= self.heads_first < 1:
            raise PatchloomError(f"--heads_first must be a fraction of the steps below 1, not {self.heads_first:g}")
        if not 0 <= self.anchor < math.inf:
            raise PatchloomError(f"--anchor must be 0 or more, not {self.anchor:g}")
        if self.from_run is None and self.init is None:
            kept = "which are random without --init"
            without = {
                "train_blocks": (self.train_blocks is not None, f"freezes the first blocks, {kept}"),
                "adapt": (self.adapt not in ("auto", "all"), f"{self.adapt} freezes weights, {kept}"),
                "heads_first": (self.heads_first not in ("auto", 0), f"keeps the encoder's weights, {kept}"),
                "anchor": (self.anchor > 0, f"keeps features near those of initial weights, {kept}"),
            }
            for name, (given, why) in without.items():
                if given:
                    raise PatchloomError(f"--{name} {why}: give --init timm:NAME, a file or a run, or leave it out")
        if self.adapt == "all" and self.train_blocks is not None:
            raise PatchloomError("--adapt all trains every block: leave out --train_blocks, or give --adapt blocks")
        if self.adapt != "lora" and (self.lora_rank, self.lora_on) != _LORA:
            raise PatchloomError("--lora_rank and --lora_on are for low-rank updates: add --adapt lora")
        if self.adapt == "lora" and self.strategy == "fsdp":
            raise PatchloomError("--adapt lora has few weights to shard: use --strategy ddp")

    def sound(self) -> Sound:
        """Return the configuration of pictures of recordings, without statistics."""
        return Sound(self.rate, self.seconds, self.features, self.bins)

    def check_kind(self, source: Source) -> None:
        """Refuse settings for recordings if ``source`` holds images, and vice versa."""
        usual = {field.name: field.default for field in fields(self)}
        for noun, names in _ONLY_FOR.items():
            for name in names:
                if noun != source.noun and getattr(self, name) != usual[name]:
                    raise wrong_kind_error(name, source)
        if not source.modality.resizable and isinstance(self.cache, int) and not isinstance(self.cache, bool):
            raise PatchloomError(
                f"--cache {self.cache} is an image size, and {source.name} holds recordings: give --cache whole"
            )

    def check_cache(self, crop: tuple[int, int]) -> None:
        """Refuse a cache with fewer pixels than the task's crops (h, w), which may be larger than ``img_size``."""
        if isinstance(self.cache, int) and self.cache < max(crop):
            raise PatchloomError(
                f"--cache {self.cache} keeps too few pixels for the crops of {label(self.task['name'])}, "
                f"{crop[0]}x{crop[1]}: give {max(crop)} or more, or whole"
            )

    def plain(self) -> dict[str, Any]:
        """Return plain values for YAML."""
        values = asdict(self)
        for name in ("img_size", "patch_size", "betas"):
            if isinstance(values[name], tuple):
                values[name] = list(values[name])
        return values

    @property
    def weights_before(self) -> tuple[str, ...]:
        """Sources of the initial weights and of a frozen teacher: a run, a file, or timm:NAME each."""
        return tuple(one for one in (self.from_run or self.init, self.task.get("features_of")) if one)

    def resolved(self, **chosen: Any) -> ResolvedSettings:
        """Return resolved settings with the ``chosen`` values for ``auto``."""
        return ResolvedSettings(**{field.name: getattr(self, field.name) for field in fields(self)} | chosen)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(Settings):
    """Settings of a run without any ``auto``, from `patchloom.train.resolve.resolve`.

    Options of a task may be ``auto`` until the task is built.
    """

    img_size: tuple[int, int]
    patch_size: PatchSize
    positions: PositionKind
    channels: int
    epochs: float
    batch_size: int
    blr: float
    weight_decay: float
    layer_decay: float
    warmup_epochs: float
    crop_scale: float | Literal["native"] | Border
    held_out: float
    normalization: Literal["data", "imagenet", "init"]
    workers: int
    cache: Literal["none", "whole"] | int
    device: Literal["cpu", "cuda", "mps"]
    devices: int
    precision: Literal["float32", "tf32", "bfloat16", "float16"]
    attention: Literal["fused", "explicit"]
    kernels: Literal["torch", "native"]
    compile: Compile
    threads: int
    adapt: Adapt
    heads_first: float

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)} | {"model": self.model.get("name")}
        if left := [name for name, value in given.items() if value == "auto"]:
            raise ValueError(f"{left[0]} is auto in resolved settings")

    def encoder_spec(self) -> EncoderSpec:
        """Return the specification of the encoder."""
        return encoder_spec(self.model, self.img_size, self.patch_size, self.channels, self.positions)


def encoder_spec(
    model: Mapping[str, Any], img_size: tuple[int, int], patch_size: PatchSize, channels: int, positions: PositionKind
) -> EncoderSpec:
    """Return the specification of an encoder from a model's name, options and sizes."""
    sizes = {name: value for name, value in model.items() if name != "name" and value is not None}
    return EncoderSpec(model["name"], img_size, patch_size, channels, positions, sizes)


def why_task(data: DataLike, task: TaskLike, recipe: str | None = None, noun: str = "images") -> dict[str, str]:
    """Return the reason for an ``auto`` task as {"task": reason}; {} if the user or the recipe sets the task."""
    name = task.get("name") if isinstance(task, Mapping) else task
    return {"task": usual_task(data, noun)[1]} if name == AUTO and recipe is None else {}


def request(data: DataLike, task: TaskLike, settings: dict[str, Any]) -> Settings:
    """Build and check the settings that the user gave."""
    known = [field.name for field in fields(Settings)]
    for name in settings:
        part, _, inner = name.partition(".")
        if inner and part in ("model", "task"):
            raise PatchloomError(f"--{name} is written in Python as {part}={{'name': ..., {inner!r}: ...}}")
        if name not in known:
            raise unknown_option_error(name, known, "patchloom pretrain --help all lists them")
    given = dict(settings)
    chosen = dict(task) if isinstance(task, Mapping) else {"name": task}
    model = given.pop("model", {})
    if not conforms(model, str | dict[str, Any]):
        raise PatchloomError(f"--model cannot be {model}: give a name, or a dict of a name and sizes")
    model = {"name": model} if isinstance(model, str) else model
    check_model_options({name: value for name, value in model.items() if name != "name"})
    if given.get("recipe") is not None:
        check_type("recipe", given["recipe"], str)
        named = {**chosen, "name": task_name(chosen.get("name", AUTO))}
        left = recipe_named(given["recipe"]).beside({**given, "task": named, "model": model})
        chosen, model = {**chosen, **left.pop("task")}, {**model, **left.pop("model")}
        given = {**left, **given}
    if isinstance(given.get("epochs"), float) and given["epochs"].is_integer():
        given["epochs"] = int(given["epochs"])  # as on the command line
    if isinstance(given.get("log"), list | tuple):
        given["log"] = ",".join(map(str, given["log"]))  # as on the command line
    size = given.get("img_size", "auto")
    if isinstance(size, int):
        given["img_size"] = (size, size)
    for name in ("img_size", "patch_size", "betas"):
        if isinstance(given.get(name), list | tuple):
            given[name] = tuple(map(to_plain_value, given[name]))
    size = given.get("patch_size", "auto")
    if conforms(size, tuple[int, int]):
        given["patch_size"] = compact(size)
    for name in ("from_run", "init"):
        if isinstance(given.get(name), Path):
            given[name] = str(given[name])
        if isinstance(given.get(name), str) and Path(given[name]).exists():
            given[name] = str(Path(given[name]).absolute())
    if chosen.get("name") == AUTO:
        chosen["name"] = usual_task(data)[0]
    elif "name" in chosen:
        chosen["name"] = task_name(chosen["name"])
    options = with_defaults(chosen)
    if options.get("features_of") is not None and Path(options["features_of"]).exists():
        options["features_of"] = str(Path(options["features_of"]).absolute())
    if not task_class(options["name"]).measured:
        if given.setdefault("held_out", 0) not in (0, "auto"):
            raise PatchloomError(
                f"{label(options['name'])} is a bare loss, without a measure on held-out images: leave out --held_out"
            )
        given["held_out"] = 0
    asked = Settings(data=absolute_name(data), task=options, model={"name": "auto", **model}, **given)
    hints = get_type_hints(Settings)
    for name in known:
        check_type(name, getattr(asked, name), hints[name])
    asked.check()
    return asked


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name, such as ``task.name``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


# Comparison with the settings of an existing run.


def command(asked: dict[str, Any], data: str | list[str], out: Path | None) -> str:
    """Return the shell command of a run without its epochs; "" if there is none, as for data in memory."""
    task, model = asked["task"], asked["model"]
    if is_object_name(data) or only_here(task["name"]):
        return ""
    recipe = recipe_named(asked["recipe"]).settings if asked.get("recipe") in recipe_names() else {}
    usual = Settings("").plain() | {name: one for name, one in recipe.items() if not isinstance(one, Mapping)}
    words = (
        []
        if recipe or task["name"] == usual_task(data)[0]
        else [f"--task={Code.of(task['name']).typed if is_code(task['name']) else task['name']}"]
    )
    for owner, given, defaults in (("task", task, with_defaults({"name": task["name"]})), ("model", model, {})):
        its = {**defaults, "name": "auto" if owner == "model" else task["name"], **recipe.get(owner, {})}
        for name, value in given.items():
            if value != its.get(name):
                words.append(f"--{owner}={value}" if name == "name" else f"--{owner}.{name}={_word(value)}")
    for name, value in asked.items():
        if name not in ("data", "task", "model", "epochs", "minutes") and value != usual.get(name):
            sizes = name in ("img_size", "patch_size") and value != "auto"
            said = in_pixels(compact(value)) if sizes else _word(value)
            words.append(f"--{'from' if name == 'from_run' else name}={said}")
    if out is not None:
        words.append(f"--out={out}")
    words = [part for word in words for part in word.split("=", 1)]
    return shlex.join(["patchloom", "pretrain", *(data if isinstance(data, list) else [data]), *words])


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def setting_differences(requested: dict[str, Any], settings: Settings, became: dict[str, Any], run: Path) -> list[str]:
    """Return 'name: was A, now B' for every setting that differs from those of an existing run."""
    before, now = Settings("").plain() | requested, settings.plain()
    refuse_changed(before["task"].get("name", ""), now["task"]["name"], run)
    for one in (before, now):
        # removed options are listed as differences; the code of a run is not executed without permission
        with suppress(PatchloomError):
            one["task"] = with_defaults(one["task"]) if is_loaded(one["task"].get("name", "")) else one["task"]
    for name in (*LAUNCH, "recipe"):  # may change on resume; a recipe counts by the settings that it sets
        before[name] = now[name]
    return _differences(before, now, became)


def _differences(before: dict[str, Any], now: dict[str, Any], became: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the differences of nested settings as sentences.

    A value equal to the resolved ``auto`` is no difference. If the task or the model has changed, its options are not
    listed.
    """
    if prefix and before.get("name") != now.get("name") and became.get("name") != now.get("name"):
        return [f"{prefix.rstrip('.')}: was {before.get('name')}, now {now.get('name')}"]
    found = []
    for name in sorted({*before, *now}, key=lambda name: (name != "data", name)):
        a, b, resolved = before.get(name), now.get(name), became.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, resolved if isinstance(resolved, dict) else {}, f"{prefix}{name}.")
        elif a != b and not (a == "auto" and b == resolved):
            a, b = (in_pixels(one) if name == "patch_size" and one is not None else one for one in (a, b))
            found.append(f"{prefix}{name}: was {a}, now {b}")
    return found
