"""Settings of a pre-training run, before and after `patchloom.train.resolve` replaces ``auto``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from patchloom.audio.compatibility import wrong_kind_error
from patchloom.audio.config import Sound
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike, is_object_name
from patchloom.data.sources.open import absolute_name
from patchloom.errors import PatchloomError, check_type, conforms
from patchloom.nets.build import EncoderSpec, check_model_options
from patchloom.options.declare import to_plain_value
from patchloom.options.pretrain import Adapt, Compile, PositionKind, PretrainOptions
from patchloom.options.recipes import Border
from patchloom.options.values import dotted
from patchloom.recipes import recipe_named
from patchloom.sizes import PatchSize, compact, in_pixels, to_pair
from patchloom.tasks import AUTO, task_class, task_name, usual_task, with_defaults
from patchloom.tasks.custom import Code, is_code, is_loaded, label, only_here, refuse_changed

# type of a task in Python: a name, the place of a class, a class, or a dict of one of these and options
TaskLike = str | type[Any] | Mapping[str, Any]
# settings for one kind of data only, by the noun of a source
_ONLY_FOR = {
    "images": ("img_size", "channels", "crop_scale", "flip", "randaugment", "normalization", "crop_on"),
    "recordings": ("seconds", "rate", "features", "bins"),
}
LAUNCH = ("devices", "strategy", "keep_every", "log")  # settings that may change when a run is resumed


@dataclass(frozen=True)
class Settings(PretrainOptions):
    """Requested settings of a pre-training run: the options of ``patchloom pretrain``."""

    data: str | list[str]
    task: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

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
        return encoder_spec(self.model, self.img_size, self.patch_size, self.channels, self.positions)


def encoder_spec(
    model: Mapping[str, Any], img_size: tuple[int, int], patch_size: PatchSize, channels: int, positions: PositionKind
) -> EncoderSpec:
    sizes = {name: value for name, value in model.items() if name != "name" and value is not None}
    return EncoderSpec(model["name"], img_size, patch_size, channels, positions, sizes)


def why_task(data: DataLike, task: TaskLike, recipe: str | None = None, noun: str = "images") -> dict[str, str]:
    """Return the reason for an ``auto`` task as {"task": reason}; {} if the user or the recipe sets the task."""
    name = task.get("name") if isinstance(task, Mapping) else task
    return {"task": usual_task(data, noun)[1]} if name == AUTO and recipe is None else {}


def request(data: DataLike, task: TaskLike, settings: dict[str, Any]) -> Settings:
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
    if isinstance(given.get("img_size"), int):
        given["img_size"] = to_pair(given["img_size"])
    for name in ("img_size", "patch_size", "betas"):
        if isinstance(given.get(name), list | tuple):
            given[name] = tuple(map(to_plain_value, given[name]))
    if conforms(given.get("patch_size"), tuple[int, int]):
        given["patch_size"] = compact(given["patch_size"])
    for name in ("from_run", "init"):
        if isinstance(place := given.get(name), str | Path):
            given[name] = str(Path(place).absolute() if Path(place).exists() else place)
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
    asked.check()
    return asked


# Settings by name, and the command of a run.


def settings_by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name; compound values become text."""
    found = {}
    for name, value in dotted(values).items():
        if name in ("img_size", "patch_size") and isinstance(value, list):
            value = in_pixels(value)  # 32x32 also for a square
        found[name] = value if isinstance(value, str | int | float | None) else option_text(name, value)
    return found


def option_text(name: str, value: Any) -> str:
    """Return the value of an option as the command line takes it."""
    if isinstance(value, str | Path):
        return str(value)
    if name in ("img_size", "patch_size"):
        return in_pixels(compact(value))
    return json.dumps(value).replace('"', "")  # names in lists and mappings stand without quotes


def usual_settings(asked: Mapping[str, Any], recipe: str | None = None) -> dict[str, Any]:
    """Return `settings_by_name` of a command with only data, task and recipe; general ones if these fail."""
    task, found = str(asked.get("task", {}).get("name", "")), Settings("")
    if not is_code(task) or is_loaded(task):  # a report must not execute the code that a run names
        with suppress(PatchloomError, KeyError):  # such as of a user's task whose file no longer exists
            found = request(asked["data"], {} if recipe else {"name": task}, {"recipe": recipe} if recipe else {})
    return settings_by_name(found.plain())


def command(asked: Mapping[str, Any], data: Any, out: Path | None, leave: Collection[str] = ()) -> str:
    """Return the shell command of a run with these requested settings; "" if there is none, as for data in memory.

    Options at their defaults are left out, and those that ``leave`` names.
    """
    names, recipe = data if isinstance(data, list) else [data], asked.get("recipe")
    task = str(asked.get("task", {}).get("name", ""))
    if only_here(task) or not all(isinstance(name, str) and name and not is_object_name(name) for name in names):
        return ""
    words = ["--recipe", recipe] if recipe else ["--task", Code.of(task).typed if is_code(task) else task]
    usual = usual_settings(asked, recipe)
    for name, value in settings_by_name(asked).items():
        if name not in ("data", "task.name", "recipe", *leave) and usual.get(name, "auto") != value:
            option, word = {"from_run": "from", "model.name": "model"}.get(name, name), option_text(name, value)
            words += [f"--{option}={word}"] if word.startswith("--") else [f"--{option}", word]
    if out is not None:
        words += ["--out", str(out)]
    return shlex.join(["patchloom", "pretrain", *names, *words])


# Comparison with the settings of an existing run.


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
