"""Options of the command line and of ``--config`` files, parsed into the arguments of the Python functions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import yaml

from patchloom.data.sources.names import FETCHED
from patchloom.errors import (
    PatchloomError,
    listing,
    shorten_options,
    suggestion,
    unknown_word_error,
    without_hyphens,
)
from patchloom.loggers import TRACKERS
from patchloom.options.declare import MODEL, TASK, CommandSpec, Option, declared, read_signature
from patchloom.options.evaluate import CommonOptions, Protocol
from patchloom.options.values import TRUTHS, convert_value, dotted, nested, parse_value
from patchloom.options.verbs import VERB_OPTIONS, Pretrain
from patchloom.recipes import recipe_named
from patchloom.system.files import read_text, read_yaml
from patchloom.tasks import AUTO, TASKS, task_class, usual_task

# Options of each verb.


VERBS: dict[str, str] = {
    "check": "read all images, report problems, and propose how to pre-train",
    "pretrain": "train an encoder on images without labels",
    "evaluate": "measure an encoder: kNN, linear probe, fine-tuning and others",
    "compare": "pre-train by several tasks for equal time, and compare the encoders",
    "embed": "write a feature vector for every image, and find similar images",
    "curate": "find near copies and outliers, and choose images to label",
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


def protocols() -> dict[str, Protocol]:
    from patchloom.options.protocols import PROTOCOLS  # which takes time that other verbs need not spend

    return PROTOCOLS


def verb_spec(verb: str) -> CommandSpec:
    """Return the options of ``patchloom VERB``, of evaluate those that all protocols have."""
    kind: Any = CommonOptions if verb == "evaluate" else VERB_OPTIONS[verb]
    return declared(kind)


def task_spec(name: str) -> CommandSpec:
    return declared(TASKS[name].options) if name in TASKS else read_signature(task_class(name))


def pretrain_spec(task: str) -> CommandSpec:
    """Return the options of ``patchloom pretrain --task TASK``."""
    own = declared(Pretrain)
    tasks = f"pretext task: {listing(TASKS)}; auto is mae, and droppos for shapes"
    changed: dict[str, dict[str, Any]] = {
        "model": {"name": "model.name"},
        "task": {"name": "task.name", "about": tasks, "positional": False},
    }
    options = [
        *(one._replace(**changed.get(one.name, {})) for one in own.options),
        *(
            Option(f"model.{name}", hint | None, None, about, group=MODEL, rare=True)
            for name, (hint, about) in MODEL_OPTIONS.items()
        ),
        *(one._replace(name=f"task.{one.name}", group=TASK, rare=True) for one in task_spec(task).options),
        Option("config.file", str | None, None, "YAML file with options; the command line overrides it", kind="file"),
    ]
    return CommandSpec(own.about, tuple(options))


def evaluate_spec(name: str | None) -> CommandSpec:
    """Return the options of ``patchloom evaluate NAME``, or those of all protocols if there is no name."""
    common, about, own, known = verb_spec("evaluate"), "", list[Option](), protocols()
    data = known["knn"].data
    if name is not None:
        plain = name.partition(":")[0]
        if plain not in known:
            raise PatchloomError(f"there is no protocol {name}{suggestion(name, known)} Choose {listing(known)}.")
        kind: Any = known[plain].options
        (about, options), data = declared(kind), known[plain].data
        own = [one for one in options if one.name != "count"]  # the number in blocks:2
    words = {"protocol": "name of a protocol, such as knn", "run": _ENCODER, "data": data}
    places = [Option(one, str, None, what, positional=True, required=True) for one, what in words.items()]
    return CommandSpec(about or common.about, (*places, *own, *common.options))


_SWITCHED = (*TRUTHS, "1", "0", "auto", "null")  # values of an option that is true without one


def parse_pretrain(words: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """Parse the words after ``patchloom pretrain`` into the arguments of `patchloom.pretrain`, and its folder.

    A configuration overrides a recipe, and the command line overrides both.
    """
    words = _trackers_together([_named(word) for word in words])
    typed = join_values(words)
    refuse_repeated(typed)
    data, found = _configuration(file := last_value(typed, "--config.file"))
    places = [word for word in join_values(words, pretrain_spec(usual_task(None)[0])) if not word.startswith("-")]
    if file is not None:
        _refuse_untyped(file, [] if places else data, found, typed)
    recipe = last_value(typed, "--recipe") or str(found.get("recipe") or "null")
    task = last_value(typed, "--task.name") or str(found.get("task.name") or AUTO)
    if recipe != "null":
        task = recipe_named(recipe).task
    elif task == AUTO:  # the data determine the task, and the task its options
        task = usual_task(places or data)[0]
    taken = pretrain_spec(task)
    typed, several = _several(join_values(words, taken), 0, taken)
    named = {"data": data[0] if len(data) == 1 else data} if data and not places else {}
    given = parse_words("patchloom pretrain", taken, typed, named, found) | several
    if given.get("recipe") is not None:
        left = dotted(recipe_named(given["recipe"]).beside(nested(given)))
        given = _converted(taken, left, f"the recipe {recipe}") | given | {"task.name": task}
    given = nested({one.name: one.default for one in taken.options} | given)
    del given["config.file"]
    if not given["dry_run"]:  # the rest are settings of the run, and this is none
        del given["dry_run"]
    given["model"] = {name: value for name, value in given["model"].items() if value is not None}
    return given, given.pop("out")


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
    return {one.name: one.default for one in taken.options} | parse_words(prog, taken, typed) | several


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


def parse_words(
    prog: str,
    taken: CommandSpec,
    words: Sequence[str],
    places: Mapping[str, Any] | None = None,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Parse joined words of a command into values by name of option, without defaults.

    Args:
        prog: the command.
        taken: its options.
        words: joined words.
        places: positional arguments from a configuration.
        before: values of options from a configuration, which the words override.

    Raises:
        PatchloomError: an unknown or missing option, or one word too many.
    """
    options = {f"--{one.name}": one for one in taken.options if not one.positional}
    lacking = [one for one in taken.options if one.positional and one.name not in (places or {})]
    names, known = [one.name.upper() for one in taken.options if one.positional], [*map(shorten_options, options)]
    for name in before or {}:
        if f"--{name}" not in options:
            raise unknown_word_error(shorten_options(f"--{name}"), prog, names, known, _owners)
    found = _converted(taken, before or {}, "the configuration") | {**(places or {})}
    for word in words:
        name, equals, text = word.partition("=")
        if name in options and not equals:
            raise PatchloomError(f"{shorten_options(name)} needs a value; see {prog} --help")
        if name in options:
            found[options[name].name] = parse_value(options[name], text)
        elif word.startswith("-") or not lacking:
            raise unknown_word_error(shorten_options(word), prog, names, known, _owners)
        else:
            one = lacking.pop(0)
            found[one.name] = parse_value(one, word)
    if needed := [f"{one.name.upper()} ({one.about.rstrip('.')})" for one in lacking if one.required]:
        raise PatchloomError(f"{prog} needs {listing(needed, 'and')}; see {prog} --help")
    return found


def _converted(taken: CommandSpec, values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return values of a configuration or a recipe in the types of the options."""
    options = {one.name: one for one in taken.options}
    return {name: convert_value(options[name], value, place) for name, value in values.items() if name in options}


def _owners(option: str) -> list[str]:
    """Return the commands that take an option, as the user would type them."""
    name, task = option.removeprefix("--"), option.removeprefix("--task.")
    # first pretrain, since other verbs share its options
    verbs = {
        "pretrain": pretrain_spec(usual_task(None)[0]),
        **{verb: verb_spec(verb) for verb in ("evaluate", *VERB_OPTIONS)},
    }
    found = [f"patchloom {verb}" for verb, taken in verbs.items() if _has(taken, name)][:1]
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
        if name not in switches or (values and (values[0].lower() in _SWITCHED or lacking < 1)):
            found.append("=".join([name, *values]))
        else:
            found += [f"{name}=true", *values]
            lacking -= len(values)
    return found


def refuse_repeated(words: Sequence[str]) -> None:
    seen = set[str]()
    for word in words:
        name = word.partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in seen:
            raise PatchloomError(f"{shorten_options(word.partition('=')[0])} is given twice: give it once")
        seen.add(name)


def _refuse_untyped(file: str, data: Sequence[str], options: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Raise if a configuration would run code or fetch data or weights: it may come from a stranger."""
    for name in dict.fromkeys(part.strip() for one in data for part in (one, *one.split(","))):
        made = re.fullmatch(r"(shapes|tones):\d+", name)
        # brace expansion may produce a command or an address, but never without a colon
        colon = ":" in name and not made
        place = any(sign in name for sign in ":*?[") or os.path.isdir(name)
        if (
            (colon and not os.path.exists(name))
            or (place and not made and _untyped(name))
            or name.partition("@")[0] in FETCHED
        ):
            raise PatchloomError(
                f"the configuration {file} names the data {name[:80]}, which runs a command, is not on this machine or "
                "could be a whole disc: give the data on the command line, too, since a file alone may not do that"
            )
    for option in ("--task.name", "--init", "--from_run", "--task.features_of"):
        value = str(options.get(option[2:]) or "")
        if last_value(typed, option) is not None:
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
    from patchloom.data.sources.open import untyped  # which imports torch: few configurations need it

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
    return next((word.split("=", 1)[1] for word in reversed(words) if word.startswith(f"{option}=")), None)


def _configuration(file: str | None) -> tuple[list[str], dict[str, Any]]:
    """Return the data and the options of a ``--config`` file, by dotted name."""
    if file is None:
        return [], {}
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
    found = dict[str, Any]()
    for name, value in dotted(values).items():
        plain = _named(f"--{name.replace('-', '_')}")[2:]
        if plain in found:
            raise PatchloomError(f"--{name} is given twice in the configuration {file}: give it once")
        if not _is_plain(value):
            raise PatchloomError(f"{name} in the configuration {file} must be a plain value, not {str(value)[:80]}")
        found[plain] = value
    return list(map(str, data if isinstance(data, list) else [] if data is None else [data])), found


def _is_plain(value: Any) -> bool:
    """Return whether a value of YAML is text, a number, true, false, or a list or mapping of these."""
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float)
