"""Options of the command line and of ``--config`` files, parsed into the arguments of the Python functions."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from patchloom.arguments import (
    CommandSpec,
    Option,
    explain_error,
    from_source,
    read_signature,
    shorten_options,
    without_hyphens,
)
from patchloom.errors import PatchloomError, listing, suggestion
from patchloom.loggers import TRACKERS
from patchloom.options import declare
from patchloom.recipes import nested, recipe_named
from patchloom.system.files import read_text, read_yaml
from patchloom.tasks import AUTO, TASKS, task_class, usual_task

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

# Options of each verb: those of the function's signature, and a few that only the command line has.


VERBS: dict[str, str] = {
    "check": "read all images, report problems, and propose how to pre-train",
    "pretrain": "train an encoder on images without labels",
    "evaluate": "measure an encoder: kNN, linear probe, fine-tuning and others",
    "compare": "pre-train by several tasks for equal time, and compare the encoders",
    "embed": "write a feature vector for every image, and find similar images",
    "predict": "write classes, label maps or boxes, with a model of evaluate",
    "look": "draw reconstructions of a task, or what an encoder sees",
    "report": "write one page about one or several runs",
    "results": "make a table of the results of one or several runs",
    "export": "write an encoder for use without patchloom: timm, Hugging Face, ONNX",
    "distill": "train any backbone of timm on an encoder's features",
    "bench": "time each task on this machine, and show what limits a run",
    "tasks": "list the pretext tasks",
    "recipes": "list the papers' settings and published scores, or show one",
}
# timm's keyword arguments that change an encoder's shape, as --model.NAME; Python takes any that timm knows.
MODEL_OPTIONS: dict[str, tuple[Any, str]] = {
    "embed_dim": (int, "width of the encoder"),
    "depth": (int, "number of transformer blocks"),
    "num_heads": (int | list[int], "attention heads; of a Swin, those of each stage, such as '[1, 2, 4]'"),
    "depths": (list[int], "blocks in each stage of a Swin"),
    "window_size": (int, "side of a Swin's window in patches"),
    "mlp_ratio": (float, "hidden width of the MLPs, relative to the width"),
    "class_token": (bool, "class token before the patch tokens"),
    "reg_tokens": (int, "number of register tokens"),
    "no_embed_class": (bool, "no position embedding for class and register tokens"),
    "pre_norm": (bool, "normalisation before the blocks, as in CLIP"),
    "qk_norm": (bool, "normalisation of queries and keys"),
    "init_values": (float, "initial value of LayerScale"),
    "drop_path_rate": (float, "rate of stochastic depth"),
    "pos_drop_rate": (float, "dropout of the tokens before the first block"),
    "attn_drop_rate": (float, "dropout of attention weights"),
    "proj_drop_rate": (float, "dropout after attention and in the MLPs"),
}
_IMAGES = "folder of images, or another data source"
_ENCODER = "folder of a run, .safetensors file of an encoder, or timm:NAME"
# data of the protocols that do not take images with classes
_LABELLED = {
    "keywords": "recordings of words: one folder per word, or the layout of Speech Commands",
    "label-free": "images without labels, such as a folder",
    "segment": "images with label maps, such as images/ and labels/; train/, val/ and test/ in them are optional",
    "detect": "images with boxes as COCO, Pascal VOC or YOLO files; train/, val/ and test/ are optional",
}


# functions and settings that define the options of each verb
SIGNATURES: dict[str, tuple[str, ...]] = {
    "check": ("patchloom.check.check",),
    "pretrain": ("patchloom.train.loop.pretrain", "patchloom.runs.settings.Settings"),
    "evaluate": ("patchloom.evaluate.protocols.evaluate", "patchloom.evaluate.settings.EvalSettings"),
    "compare": ("patchloom.compare.compare.compare",),
    "look": ("patchloom.look.look.look",),
    "look curves": ("patchloom.look.run_curves.draw_run_curves",),
    "embed": ("patchloom.embed.embed.embed",),
    "predict": ("patchloom.predict.predict",),
    "report": ("patchloom.report.report.report",),
    "results": ("patchloom.report.results.results",),
    "export": ("patchloom.export.export.export",),
    "distill": ("patchloom.distill.distill",),
    "bench": ("patchloom.bench.bench",),
}
# parameters that the command line defines itself, since their values are typed differently from Python
_OTHERWISE = {
    "pretrain": {"data", "task", "out", "model", "img_size"},
    "evaluate": {"protocol", "run", "data"},
}


@cache
def protocols() -> dict[str, str]:
    """Return the evaluation protocols: import path of the function by name."""
    source = Path(__file__).parents[1] / "evaluate" / "protocols" / "__init__.py"
    found = dict[str, str]()
    for case in ast.walk(ast.parse(source.read_text("utf-8"))):
        match case:  # read, since an import would wait for torch
            case ast.match_case(
                pattern=ast.MatchValue(value=ast.Constant(value=str(name))),
                body=[ast.ImportFrom(module=str(module), names=[function]), *_],
            ):
                found[name] = f"{module}.{function.name}"
    return found


@cache
def verb_spec(verb: str) -> CommandSpec:
    """Return the options of ``patchloom VERB``, from the signature of its function."""
    found = [read_signature(from_source(path), _OTHERWISE.get(verb, ())) for path in SIGNATURES[verb]]
    return CommandSpec(found[0].about, tuple(option for one in found for option in one.options))


def task_spec(name: str) -> CommandSpec:
    """Return the options of a pretext task."""
    kind = TASKS[name].options if name in TASKS else None
    return declare.read_signature(task_class(name)) if kind is None else declare.declared(kind)


@cache
def protocol_spec(name: str) -> CommandSpec:
    """Return the options of a protocol, without those of `patchloom.evaluate.settings.EvalSettings`."""
    return read_signature(from_source(protocols()[name]), skip={"run", "data", "settings", "count"})


def pretrain_spec(task: str) -> CommandSpec:
    """Return the options of ``patchloom pretrain --task TASK``."""
    own = verb_spec("pretrain")
    folder = "folder of the run (default runs/DATA-TASK or -RECIPE); a run that was stopped there resumes"
    size = "image size of the encoder in pixels; 64x128 is height x width"
    model = "nano, micro, mini (our sizes, smallest first), swin-nano, or a ViT, Eva (DINOv3) or Swin by timm's name"
    word = str | Literal["auto"]
    options = [
        Option("data", str, None, _IMAGES, positional=True, required=True),
        Option("out", str | None, None, folder, kind="folder"),
        Option("config.file", str | None, None, "YAML file with options; the command line overrides it", kind="file"),
        *own.options,
        Option("img_size", word, "auto", size, kind="96, 64x128 or auto"),
        Option("model.name", word, "auto", model, kind="name or auto"),
        *(Option(f"model.{name}", kind | None, None, about) for name, (kind, about) in MODEL_OPTIONS.items()),
        Option(
            "task.name",
            str,
            AUTO,
            f"pretext task: {listing(TASKS)}; auto is mae, and droppos for shapes",
            kind="name or auto",
        ),
        *(option._replace(name=f"task.{option.name}") for option in task_spec(task).options),
    ]
    return CommandSpec(own.about, tuple(options))


def evaluate_spec(name: str | None) -> CommandSpec:
    """Return the options of ``patchloom evaluate NAME``, or those of all protocols if there is no name."""
    common = verb_spec("evaluate")
    own = CommandSpec("", ())
    if name is not None:
        plain, known = name.partition(":")[0], protocols()
        if plain not in known:
            raise PatchloomError(f"there is no protocol {name}{suggestion(name, known)} Choose {listing(known)}.")
        own = protocol_spec(plain)
    labelled = _LABELLED.get(name or "", "labelled images, such as one folder per class")
    words = {"protocol": "name of a protocol, such as knn", "run": _ENCODER, "data": labelled}
    places = [Option(one, str, None, about, positional=True, required=True) for one, about in words.items()]
    return CommandSpec(own.about or common.about, (*places, *own.options, *common.options))


_TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0", "auto", "null")


def parse_pretrain(words: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """Parse the words after ``patchloom pretrain`` into the arguments of `patchloom.pretrain`, and its folder."""
    words = _trackers_together([_named(word) for word in words])
    typed = join_values(words)
    refuse_repeated(typed)
    data, options = _configuration(file := last_value(typed, "--config.file"))
    if file is not None:
        refuse_repeated(options)
        _refuse_untyped(file, data if all(word.startswith("-") for word in typed) else [], options, typed)
    given_words = [*options, *join_values(words)]
    recipe = last_value(given_words, "--recipe")
    task = last_value(given_words, "--task.name") or AUTO
    if recipe not in (None, "null"):
        task = recipe_named(recipe).task
    elif task == AUTO:  # the data determine the task, and the task its options
        places = [word for word in join_values(words, pretrain_spec(usual_task(None)[0])) if not word.startswith("-")]
        task = usual_task(places or data)[0]
    typed = join_values(words, pretrain_spec(task))
    if recipe not in (None, "null"):
        options = [*_recipe_words(recipe, [*options, *typed]), *options]
        typed.append(f"--task.name={task}")  # the user may have given auto
    if all(word.startswith("-") for word in typed):
        options = [*data, *options]
    words, several = _several([*options, *typed], 0, pretrain_spec(task))
    given = _parse(pretrain_parser(task), words) | several
    del given["config"]
    if not given["dry_run"]:  # the rest are settings of the run, and this is none
        del given["dry_run"]
    given["img_size"] = image_size(given["img_size"])
    given["model"] = {name: value for name, value in given["model"].items() if value is not None}
    return given, given.pop("out")


def pretrain_parser(task: str) -> ArgumentParser:
    """Return the parser of ``patchloom pretrain --task NAME``."""
    return _parser("patchloom pretrain", pretrain_spec(task))


# verbs that take several sources, with the number of positional words before these
_BEFORE_SEVERAL = {
    **dict.fromkeys(("check", "compare", "look curves", "report", "results"), 0),
    **{"embed": 1, "predict": 1, "evaluate": 2},
}


def parse_call(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """Parse the words after ``patchloom VERB`` into the arguments of its function."""
    if verb == "pretrain":
        given, out = parse_pretrain(words)
        return {**given, "out": out}
    taken, prog = verb_spec(verb), f"patchloom {verb}"
    words = _trackers_together(words) if verb == "compare" else words
    if verb == "evaluate":
        name = next((word for word in join_values(words, evaluate_spec(None)) if not word.startswith("-")), None)
        taken, prog = evaluate_spec(name), prog if name is None else f"{prog} {name}"
    typed = join_values(words, taken)
    refuse_repeated(typed)
    typed, several = _several(typed, _BEFORE_SEVERAL[verb], taken) if verb in _BEFORE_SEVERAL else (typed, {})
    return _parse(_parser(prog, taken), typed) | several


def parse_evaluate(words: Sequence[str]) -> dict[str, Any]:
    """Parse the words after ``patchloom evaluate`` into the arguments of its function."""
    return parse_call("evaluate", words)


def image_size(text: str) -> tuple[int, int] | str:
    """Parse 'auto', '96' (square), '64x128' or '[64, 128]' (height, width)."""
    if text == "auto":
        return "auto"
    match = re.fullmatch(r"\s*[\[(]?\s*(\d+)(?:\s*[x,]\s*(\d+))?\s*[\])]?\s*", text)
    if match is None:
        raise PatchloomError(f"--img_size cannot be {text}: it takes a size such as 96, 64x128 or auto")
    return (int(match[1]), int(match[2] or match[1]))


def _named(word: str) -> str:
    """Replace short names: ``--task`` is ``--task.name``, and ``--from`` is a keyword of Python."""
    word = re.sub(r"^--from(?==|$)", "--from_run", word)
    word = re.sub(r"^--config(?==|$)", "--config.file", word)
    return re.sub(r"^--(task|model)(?==|$)", r"--\1.name", word)


def _trackers_together(words: Sequence[str]) -> list[str]:
    """Join ``--log tensorboard wandb`` to ``--log=tensorboard,wandb``, so that no tracker is taken for data."""
    names = f"(?:{'|'.join(TRACKERS)})"
    found: list[str] = []
    for word in words:
        behind = found and re.fullmatch(f"--log(={names}(,{names})*)?", found[-1])
        if behind and re.fullmatch(f"{names}(,{names})*", word):
            found[-1] += f",{word}" if behind[1] else f"={word}"
        else:
            found.append(word)
    return found


def _parser(prog: str, taken: CommandSpec) -> ArgumentParser:
    from jsonargparse import ArgumentParser  # slow to import, and help pages do not need it

    parser = ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False, add_help=False)
    for option in taken.options:
        extra = {} if option.required else {"default": option.default}
        if option.positional and not option.required:
            extra["nargs"] = "?"
        name = option.name if option.positional else f"--{option.name}"
        parser.add_argument(name, type=option.hint, help=option.about, **extra)
    return parser


def _parse(parser: ArgumentParser, words: list[str]) -> dict[str, Any]:
    from jsonargparse import ArgumentError

    # values are parsed as YAML, which spells infinity .inf, and needs a space in {mask: 0.5} and brackets around 5,20
    words = [re.sub(r"^(--[^=]+=)([-+]?)inf(inity)?$", r"\1\2.inf", word, flags=re.IGNORECASE) for word in words]
    words = [re.sub(r":(?=\S)", ": ", word) if re.match(r"--[\w.]+=\{.*\}$", word) else word for word in words]
    words = [re.sub(r"^(--(?:ks|few)=)([\d.]+(?:,[\d.]+)*)$", r"\1[\2]", word) for word in words]
    words = [re.sub(r"^(--blend=)([\d.]+(?:,[\d.]+)+)$", r"\1[\2]", word) for word in words]  # of export: a number
    words = [re.sub(r"^(--(?:img|patch)_size=)(\d+)x(\d+)$", r"\1[\2, \3]", word) for word in words]  # 40x1
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and " " in word and name not in parser._option_string_actions:
            # argparse would take it for a positional argument
            raise PatchloomError(explain_error(f"Unrecognized arguments: {name}", parser, _owners))
        if long := re.match(r"(--[\w.]+)=[-+]?[\d_]{300,}$", word):  # more than a float, or a file's name, can have
            raise PatchloomError(f"{long[1]} cannot be a number of {len(word) - len(long[1]) - 1} digits")
    try:
        parsed: dict[str, Any] = parser.parse_args(words).as_dict()
        return parsed
    except ArgumentError as problem:
        raise PatchloomError(explain_error(str(problem), parser, _owners)) from problem


def _owners(option: str) -> list[str]:
    """Return the commands that take an option, as the user would type them."""
    name, task = option.removeprefix("--"), option.removeprefix("--task.")
    verbs = sorted(SIGNATURES, key=lambda verb: verb != "pretrain")  # first, since other verbs share its options
    found = [f"patchloom {verb}" for verb in verbs if _has(verb_spec(verb), name)][:1]
    measures = sorted(protocols(), key=lambda one: one != "finetune")  # first, since it has all options of a recipe
    found += [f"patchloom evaluate {one}" for one in measures if _has(evaluate_spec(one), name)][:1]
    return found or [f"--task {one}" for one in TASKS if task != option and _has(task_spec(one), task)]


def _has(taken: CommandSpec, name: str) -> bool:
    return any(option.name == name for option in taken.options)


def join_values(words: Sequence[str], taken: CommandSpec | None = None) -> list[str]:
    """Join every option and its value to one word: ``--epochs 5`` becomes ``--epochs=5``.

    If ``taken`` is given, hyphens in names become underscores, and ``--flip`` without a value becomes ``--flip=true``,
    even before another word, if a positional argument is still missing.
    """
    options = () if taken is None else taken.options
    known = {f"--{option.name}" for option in options}
    switches = {f"--{option.name}" for option in options if bool in (option.hint, *get_args(option.hint))}
    pairs: list[list[str]] = []
    for word in words:
        if pairs and len(pairs[-1]) == 1 and re.match("--[^=]+$", pairs[-1][0]) and not word.startswith("--"):
            pairs[-1].append(word)
        else:
            name, equals, value = word.partition("=")
            plain = f"--{name[2:].replace('-', '_')}"
            pairs.append([plain + equals + value if name.startswith("--") and plain in known else word])
    lacking = sum(option.required for option in options) - sum(not pair[0].startswith("-") for pair in pairs)
    found: list[str] = []
    for name, *values in pairs:
        if name not in switches or (values and (values[0].lower() in _TRUTHS or lacking < 1)):
            found.append("=".join([name, *values]))
        else:
            found += [f"{name}=true", *values]
            lacking -= len(values)
    return found


def refuse_repeated(words: Sequence[str]) -> None:
    """Raise if an option is given twice in joined words."""
    seen = set[str]()
    for word in words:
        name = word.partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in seen:
            raise PatchloomError(f"{shorten_options(word.partition('=')[0])} is given twice: give it once")
        seen.add(name)


def _refuse_untyped(file: str, data: Sequence[str], options: Sequence[str], typed: Sequence[str]) -> None:
    """Raise if a configuration would run code or fetch data or weights: it may come from a stranger."""
    for name in dict.fromkeys(part.strip() for one in data for part in (one, *one.split(","))):
        made = re.fullmatch(r"(shapes|tones):\d+", name)
        # brace expansion may produce a command or an address, but never without a colon
        colon = ":" in name and not made
        place = any(sign in name for sign in ":*?[") or os.path.isdir(name)
        if (
            (colon and not os.path.exists(name))
            or (place and not made and _untyped(name))
            or name.partition("@")[0] in from_source("patchloom.data.sources.builtin.FETCHED")
        ):
            raise PatchloomError(
                f"the configuration {file} names the data {name[:80]}, which runs a command, is not on this machine or "
                "could be a whole disc: give the data on the command line, too, since a file alone may not do that"
            )
    for option in ("--task.name", "--init", "--from_run", "--task.features_of"):
        value = last_value(options, option)
        if value is None or last_value(typed, option) is not None:
            continue
        code = option == "--task.name" and (":" in value or value.endswith(".py"))
        if code or (option != "--task.name" and re.search(r"^\s*timm:|://", value)):
            what = "runs the code of" if code else "fetches"
            raise PatchloomError(
                f"the configuration {file} {what} {value[:80]}, which a file alone may not do: give "
                f"{shorten_options(option)} {value.partition('#')[0][:80]} on the command line, too"
            )


def _untyped(name: str) -> bool:
    """Return whether data may be opened only if the user typed its name, even if a folder has that name."""
    from patchloom.data.sources.open import untyped  # which imports torch

    return untyped(name) is not None


def _several(words: list[str], before: int, taken: CommandSpec) -> tuple[list[str], dict[str, list[str]]]:
    """Return joined words with only the first of several sources or runs, and all of these by their parameter's name.

    ``before`` positional words precede them. Users type several, or a shell expands a pattern to them.
    """
    data = [i for i, word in enumerate(words) if not word.startswith("-")][before:]
    if len(data) < 2:
        return words, {}
    known = [shorten_options(f"--{option.name}") for option in taken.options if not option.positional]
    for word in (words[i] for i in data):
        if not os.path.exists(word) and (said := without_hyphens(word, known)):
            raise PatchloomError(said)
        if not os.path.exists(word) and word in TASKS and "--task" in known:
            raise PatchloomError(f"{word} does not exist, but is a task: did you mean --task {word}?")
    name = [option.name for option in taken.options if option.positional][before]
    return [word for i, word in enumerate(words) if i not in data[1:]], {name: [words[i] for i in data]}


def last_value(words: Sequence[str], option: str) -> str | None:
    """Return the last value of ``option`` in joined words, or None."""
    return next((word.split("=", 1)[1] for word in reversed(words) if word.startswith(f"{option}=")), None)


def _recipe_words(recipe: str, words: Sequence[str]) -> list[str]:
    """Return the settings of a recipe that joined words do not override, as joined words."""
    given: dict[str, Any] = dict(word[2:].split("=", 1) for word in words if re.match("--[^=]+=", word))
    for name in ("epochs", "batch_size", "accumulate"):  # other settings of the recipe are computed from these
        if re.fullmatch(r"\d{1,9}", given.get(name, "")):
            given[name] = int(given[name])
    return list(_as_words(recipe_named(recipe).beside(nested(given)), f"the recipe {recipe}"))


def _configuration(file: str | None) -> tuple[list[str], list[str]]:
    """Return the data and the options of a ``--config`` file, as joined words."""
    if file is None:
        return [], []
    try:
        values = read_yaml(read_text(file, follow=True))
    except (OSError, UnicodeDecodeError) as problem:
        raise PatchloomError(f"the configuration {file} cannot be read: {problem}") from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:  # such as a 13th month, or a thousand brackets
        raise PatchloomError(f"the configuration {file} is not YAML: {' '.join(str(problem).split())}") from problem
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise PatchloomError(
            f"the configuration {file} does not hold settings: write one setting and its value per line, such as "
            "'epochs: 100'"
        )
    values = {**values}
    data = values.pop("data", None)
    options = list(_as_words(values, f"the configuration {file}"))
    return list(map(str, data if isinstance(data, list) else [] if data is None else [data])), options


def _as_words(values: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yield settings as joined words; error messages name ``place`` as their origin."""
    for name, value in values.items():
        nested = name in ("task", "model")
        pairs = {name: value}
        if nested:
            inside = value if isinstance(value, Mapping) else {"name": value}
            pairs = {f"{name}.{key}": inner for key, inner in inside.items()}
        for key, inner in pairs.items():
            try:
                if isinstance(inner, Mapping) and not nested:
                    raise TypeError("it contains further settings")
                word = f"--{key.replace('-', '_')}={_word(inner)}"
            except (
                TypeError,
                ValueError,
                RecursionError,
            ) as problem:  # not expressible in JSON, so no value of a setting
                raise PatchloomError(f"{key} in {place} must be a plain value: {problem}") from problem
            yield word


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
