"""What a pre-training run is given: its settings, with ``auto`` where `patchloom.train.resolve` is to decide."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from patchloom.arguments import to_plain_value, unknown_option_error
from patchloom.audio.compatibility import wrong_kind_error
from patchloom.audio.config import FeatureKind, Sound
from patchloom.data.augment import MAX_MAGNITUDE
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike, is_object_name
from patchloom.data.sources.open import absolute_name
from patchloom.errors import PatchloomError, check_type, conforms
from patchloom.nets.build import EncoderSpec, PositionKind, check_model_options
from patchloom.recipes import recipe_named, recipe_names
from patchloom.sizes import PatchSize, compact, in_pixels, to_pair
from patchloom.tasks import AUTO, task_name, usual_task, with_defaults
from patchloom.tasks.custom import Code, is_code, is_loaded, label, only_here, refuse_changed

Auto = Literal["auto"]
# what verbs take for a task in Python: a name, the place of a class, a class, or a dict of one of these and options
TaskLike = str | type[Any] | Mapping[str, Any]
# of processes, threads and pixels more are a slip of the keyboard, and would bring a machine down
_MAX = {"workers": 1024, "threads": 1024, "devices": 1024, "channels": 2**16}
_MAX |= {"epochs": 2**31 - 1, "minutes": 10**6, "seconds": 3600, "rate": 10**6, "bins": 4096}
_MAX_SIDE = 2**16
_RANDAUGMENT_STD = 0.5
# which act on one kind of data alone, by the noun of a source
_ONLY_FOR = {
    "images": ("img_size", "channels", "crop_scale", "flip", "randaugment", "normalization"),
    "recordings": ("seconds", "rate", "features", "bins"),
}
LAUNCH = ("devices", "strategy", "log")  # with which settings a run may go on as it likes


@dataclass(frozen=True)
class Settings:
    """One pre-training run. The field names are the command line's; `patchloom.train.resolve` replaces every ``auto``.

    Attributes:
        data: folder of images, list or table of them, pattern, shards, or the name of a data set; or several of these.
        task: the pretext task: ``name`` and its options.
        model: the encoder: ``name`` and overrides of timm's sizes.
        img_size: height and width in pixels.
        patch_size: side of a patch in pixels; 40x1 is rows x columns.
        positions: position embeddings: sincos (fixed sine-cosine), sincos-learned (starts so, and is learned), learned
            (starts at random), random (and fixed) or none.
        channels: channels of the images; greyscale and colour are converted into each other.
        epochs: passes over the training images; 0.5 is half of one.
        minutes: time of training, instead of epochs: as many as fit by the pace that is measured before the run. They
            are stored, so that going on after a stop changes nothing.
        batch_size: images a step, of all devices together.
        accumulate: steps whose gradients are added up before the weights move.
        blr: base learning rate; the peak is blr · (images an update) / 256.
        weight_decay: of AdamW, for weights of two and more dimensions; auto is 0.05, and 0.1 for extrema.
        betas: decay rates of AdamW's two moments; [0.9, 0.999] are those of DeiT and MP3.
        warmup_epochs: passes over which the learning rate rises to its peak, in equal steps.
        halve_every: updates after which the learning rate is halved, again and again, after a warm-up at a tenth of
            the peak (MP3's speech models); 0 lets it rise in the warm-up, and fall to 0 as a cosine.
        clip: largest norm of the gradient; 0 switches it off.
        crop_scale: smallest share of an image's area that a random crop shows; crops go up to the whole. native cuts
            crops at about the image's own scale, whatever its size.
        flip: mirror half of the images. Switch it off where left and right matter.
        randaugment: magnitude of RandAugment, up to 10 (DeiT and MP3: 9); 0 switches it off.
        randaugment_std: standard deviation of that magnitude.
        seconds: length to which recordings are cut or padded.
        rate: samples a second to which recordings are resampled.
        features: of which pictures of recordings are made: mel-frequency cepstral coefficients (mfcc), or a mel
            spectrogram (logmel).
        bins: rows of pictures of recordings: coefficients, or bands.
        held_out: share of the images that is never trained on and serves the measures (at most 2,000 images); auto is
            5 %, and of small sets more.
        knn_k: neighbours of the kNN accuracy that is measured in training where there are labels (ExtreMA: 200).
        knn_gallery: training images among which they are looked for, at most (ExtreMA: a tenth of ImageNet).
        group: which images are held out together, such as frames of one video: parent (those of a folder), a column of
            a table, or a pattern, a regular expression whose brackets hold what names the group in the path.
        normalization: mean and std of the channels are those of the data, or ImageNet's.
        workers: processes that read images; 0 reads in the main process.
        cache: decode the training images once and keep them on the disc: none, whole (as they are), or the pixels to
            which their shorter side is reduced where it is longer.
        device: what computes; auto takes a GPU where there is one.
        devices: processes on each machine, with a device each; auto is what torchrun or SLURM started, else 1.
        strategy: ddp, or fsdp, which keeps weights, gradients and moments in parts between steps.
        precision: of matrix products: float32, bfloat16 where they gain from it, or float16, for GPUs that have no
            bfloat16 (weights stay float32).
        teacher_precision: of teachers, and of the guide of droppos, which no gradient reaches: the same, or bfloat16
            even where the rest is in float32.
        attention: by torch's fused kernel, or an explicit softmax; the same mathematics.
        kernels: torch's, or native: our own for bfloat16 on CPUs that have AVX512-BF16, compiled when first needed;
            they take the place of either form of attention.
        compile: have torch.compile write kernels for the transformer blocks.
        checkpointing: compute activations again instead of keeping them: less memory, and a third more time.
        threads: CPU threads of each training process.
        from_run: folder of a run with whose weights this one begins.
        init: weights to begin with: timm:NAME, a run, or a file, such as a paper's own program saved; of unusual sizes
            with --model.
        train_blocks: of the encoder that --init or --from brings, only so many of its last blocks are trained, and its
            last norm; what comes before them stays as it was read. Without it all of the encoder is trained.
        recipe: a row of a paper's table, whose settings hold where no others are given; ``patchloom recipes`` lists
            them.
        patience: held-out measures in a row that are not better than the best one before the run stops, and keeps the
            weights of that one; without it a run goes to its last step, and keeps those.
        log: trackers of experiments to which the run also tells what it does, any number of them: tensorboard, wandb,
            mlflow, trackio.
        split_seed: of which images are held out, for runs of several seeds that are to be compared on the same images;
            that of all else, if left out.
        seed: of everything random.
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
    weight_decay: float | Auto = "auto"
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_epochs: float | Auto = "auto"
    halve_every: int = 0
    clip: float = 5.0
    crop_scale: float | Literal["auto", "native"] = "auto"
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
    normalization: Literal["data", "imagenet"] = "data"
    workers: int | Auto = "auto"
    cache: Literal["none", "whole"] | int = "none"
    device: Literal["cpu", "cuda", "mps"] | Auto = "auto"
    devices: int | Auto = "auto"
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
    train_blocks: int | None = None
    recipe: str | None = None
    patience: int | None = None
    log: str | list[str] | None = None
    split_seed: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be meant."""
        least = {"batch_size": 1, "accumulate": 1, "channels": 1, "threads": 1, "devices": 1}
        least |= {"workers": 0, "weight_decay": 0, "warmup_epochs": 0, "clip": 0, "seed": 0, "halve_every": 0}
        least |= {"rate": 1000, "bins": 1, "patience": 1, "train_blocks": 0, "knn_k": 1, "knn_gallery": 2}
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
            raise PatchloomError("--minutes and --epochs both say how long to train: give one of them")
        if self.epochs != "auto" and self.warmup_epochs != "auto" and self.warmup_epochs > self.epochs:
            raise PatchloomError(f"--warmup_epochs {self.warmup_epochs} is more than --epochs {self.epochs}: lower it")
        if self.blr != "auto" and not 0 < self.blr < math.inf:
            raise PatchloomError(f"--blr must be above 0 and finite, not {self.blr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise PatchloomError(f"--betas must lie in [0, 1), not {list(self.betas)}")
        if not 0 < self.seconds <= _MAX["seconds"]:
            raise PatchloomError(f"--seconds must be above 0, and {_MAX['seconds']} or less, not {self.seconds:g}")
        for name in ("crop_scale", "held_out"):
            share = getattr(self, name)
            if not isinstance(share, str) and not 0 < share < 1 and (name, share) != ("crop_scale", 1):
                raise PatchloomError(f"--{name} is a share between 0 and 1, not {share}")
        if self.crop_scale == "native" and isinstance(self.cache, int):
            raise PatchloomError(
                f"--cache {self.cache} reduces images before --crop_scale native could cut them: give --cache whole"
            )
        if not 0 <= self.randaugment <= MAX_MAGNITUDE:
            raise PatchloomError(f"--randaugment must be 0 to {MAX_MAGNITUDE}, not {self.randaugment}")
        if not 0 <= self.randaugment_std < math.inf:
            raise PatchloomError(f"--randaugment_std must be 0 or more, not {self.randaugment_std}")
        if not self.randaugment and self.randaugment_std != _RANDAUGMENT_STD:
            raise PatchloomError("--randaugment_std changes nothing without --randaugment: give --randaugment 9, too")
        for name in ("img_size", "patch_size"):
            size = getattr(self, name)
            if size != "auto" and not 1 <= min(to_pair(size)) <= max(to_pair(size)) <= _MAX_SIDE:
                raise PatchloomError(f"--{name} must be positive and {_MAX_SIDE} or less, not {in_pixels(size)}")
        if self.from_run is not None and self.init is not None:
            raise PatchloomError("--from and --init both say with which weights to begin: give one of them")
        if self.train_blocks is not None and self.from_run is None and self.init is None:
            raise PatchloomError(
                "--train_blocks leaves the first blocks as they are, and without --init they would stay random: give "
                "--init timm:NAME, a file or a run, or leave --train_blocks out"
            )

    def sound(self) -> Sound:
        """How recordings become pictures, before their statistics are known."""
        return Sound(self.rate, self.seconds, self.features, self.bins)

    def check_kind(self, source: Source) -> None:
        """Refuse settings of recordings where ``source`` holds images, and the other way round."""
        usual = {field.name: field.default for field in fields(self)}
        for noun, names in _ONLY_FOR.items():
            for name in names:
                if noun != source.noun and getattr(self, name) != usual[name]:
                    raise wrong_kind_error(name, source)
        if not source.modality.resizable and isinstance(self.cache, int) and not isinstance(self.cache, bool):
            raise PatchloomError(
                f"--cache {self.cache} is a size of images, and {source.name} holds recordings: --cache whole"
            )

    def check_cache(self, crop: tuple[int, int]) -> None:
        """Refuse to keep fewer pixels than the task's crops have (h, w), which may be larger than its images."""
        if isinstance(self.cache, int) and self.cache < max(crop):
            raise PatchloomError(
                f"--cache {self.cache} keeps too few pixels, since {label(self.task['name'])} takes crops of "
                f"{crop[0]}x{crop[1]} here: give {max(crop)} or more, or whole"
            )

    def plain(self) -> dict[str, Any]:
        """As plain values for YAML."""
        values = asdict(self)
        for name in ("img_size", "patch_size", "betas"):
            if isinstance(values[name], tuple):
                values[name] = list(values[name])
        return values

    @property
    def weights_before(self) -> tuple[str, ...]:
        """Whose weights the run begins with, and whose features it learns: a run, a file, or timm:NAME each."""
        return tuple(one for one in (self.from_run or self.init, self.task.get("features_of")) if one)

    def resolved(self, **chosen: Any) -> ResolvedSettings:
        """The settings with what was ``chosen`` for every ``auto``."""
        return ResolvedSettings(**{field.name: getattr(self, field.name) for field in fields(self)} | chosen)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(Settings):
    """Settings of a run, none of which is ``auto``: `patchloom.train.resolve.resolve` makes them, runs store them.

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
    warmup_epochs: float
    crop_scale: float | Literal["native"]
    held_out: float
    workers: int
    device: Literal["cpu", "cuda", "mps"]
    devices: int
    precision: Literal["float32", "bfloat16", "float16"]
    attention: Literal["fused", "explicit"]
    kernels: Literal["torch", "native"]
    compile: bool
    threads: int

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)} | {"model": self.model.get("name")}
        if left := [name for name, value in given.items() if value == "auto"]:
            raise ValueError(f"{left[0]} is auto in resolved settings")

    def encoder_spec(self) -> EncoderSpec:
        """The encoder that the settings describe."""
        return encoder_spec(self.model, self.img_size, self.patch_size, self.channels, self.positions)


def encoder_spec(
    model: Mapping[str, Any], img_size: tuple[int, int], patch_size: PatchSize, channels: int, positions: PositionKind
) -> EncoderSpec:
    """The encoder of a model's name and options, with its sizes."""
    sizes = {name: value for name, value in model.items() if name != "name" and value is not None}
    return EncoderSpec(model["name"], img_size, patch_size, channels, positions, sizes)


def why_task(data: DataLike, task: TaskLike, recipe: str | None = None, noun: str = "images") -> dict[str, str]:
    """The reason for the task by the setting's name, where the user and the recipe leave it open."""
    name = task.get("name") if isinstance(task, Mapping) else task
    return {"task": usual_task(data, noun)[1]} if name == AUTO and recipe is None else {}


def request(data: DataLike, task: TaskLike, settings: dict[str, Any]) -> Settings:
    """The settings that a user asked for."""
    known = [field.name for field in fields(Settings)]
    for name in settings:
        part, _, inner = name.partition(".")
        if inner and part in ("model", "task"):
            raise PatchloomError(f"--{name} is given in Python as {part}={{'name': ..., {inner!r}: ...}}")
        if name not in known:
            raise unknown_option_error(name, known, "patchloom pretrain --help all lists them")
    given = dict(settings)
    chosen = dict(task) if isinstance(task, Mapping) else {"name": task}
    model = given.pop("model", {})
    if not conforms(model, str | dict[str, Any]):
        raise PatchloomError(f"--model cannot be {model}: it takes a name, or a dict of a name and sizes")
    model = {"name": model} if isinstance(model, str) else model
    check_model_options({name: value for name, value in model.items() if name != "name"})
    if given.get("recipe") is not None:
        check_type("recipe", given["recipe"], str)
        named = {**chosen, "name": task_name(chosen.get("name", AUTO))}
        left = recipe_named(given["recipe"]).beside({**given, "task": named, "model": model})
        chosen, model = {**chosen, **left.pop("task")}, {**model, **left.pop("model")}
        given = {**left, **given}
    if isinstance(given.get("epochs"), float) and given["epochs"].is_integer():
        given["epochs"] = int(given["epochs"])  # as it is typed and told
    if isinstance(given.get("log"), list | tuple):
        given["log"] = ",".join(map(str, given["log"]))  # as it is typed and told
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
    asked = Settings(data=absolute_name(data), task=options, model={"name": "auto", **model}, **given)
    hints = get_type_hints(Settings)
    for name in known:
        check_type(name, getattr(asked, name), hints[name])
    asked.check()
    return asked


# Whether what is asked for is what a run was begun with.


# Defaults of versions that did not know auto there, of settings and of options of a task. What auto became, the run has
# stored, so the same command means the same run.
_BEFORE_AUTO = {"held_out": 0.05, "weight_decay": 0.05}
_AUTO_SINCE_RECIPES = {"crop_scale": 0.2}  # of versions with recipes, and before
_OPTIONS_BEFORE_AUTO = {"loss": "byol", "momentum": 0.996}


def command(asked: dict[str, Any], data: str | list[str], out: Path | None) -> str:
    """Return the command of a run without its epochs, for a shell; "" where there is none, as of data in memory."""
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
    """'name: was A, now B' for every setting that differs from those with which a run was begun."""
    before, now = Settings("").plain() | requested, settings.plain()
    refuse_changed(before["task"].get("name", ""), now["task"]["name"], run)
    for one in (before, now):
        # options that are gone are named as differences; nobody has asked to run the code of another's run
        with suppress(PatchloomError):
            one["task"] = with_defaults(one["task"]) if is_loaded(one["task"].get("name", "")) else one["task"]
    if "recipe" not in requested:  # else a version that knows auto wrote it, and somebody gave the value
        _as_auto(before, now, _BEFORE_AUTO)
        _as_auto(before["task"], now["task"], _OPTIONS_BEFORE_AUTO)
    _as_auto(before, now, _AUTO_SINCE_RECIPES)
    for name in (*LAUNCH, "recipe"):  # it may go on with other devices; a recipe is what it sets
        before[name] = now[name]
    return _differences(before, now, became)


def _as_auto(before: dict[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Make auto of what was at its default ``before``, where it is auto ``now``."""
    for name, was in defaults.items():
        if name in before and before[name] == was and now.get(name) == "auto":
            before[name] = "auto"


def _differences(before: dict[str, Any], now: dict[str, Any], became: dict[str, Any], prefix: str = "") -> list[str]:
    """The sentences of `setting_differences`.

    One that is now what its ``auto`` had become is the same. The options of another task, or of another model, are not
    named one by one.
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
