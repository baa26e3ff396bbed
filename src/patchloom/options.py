"""Options from signatures: the command line and YAML have the words and types of the Python call."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentError, ArgumentParser

from patchloom.errors import PatchloomError
from patchloom.hints import in_words

# timm's keyword arguments that change an encoder's shape, as --model.NAME; Python takes any that timm knows.
MODEL_OPTIONS: dict[str, tuple[type, str]] = {
    "embed_dim": (int, "width"),
    "depth": (int, "transformer blocks"),
    "num_heads": (int, "attention heads"),
    "mlp_ratio": (float, "hidden width of an MLP over its width"),
    "class_token": (bool, "whether there is a class token"),
    "reg_tokens": (int, "register tokens"),
    "no_embed_class": (bool, "no position embedding for class and register tokens"),
    "pre_norm": (bool, "a norm before the blocks, as in CLIP"),
    "qk_norm": (bool, "norm queries and keys"),
    "init_values": (float, "LayerScale's initial value"),
    "drop_path_rate": (float, "stochastic depth"),
}


def parse_pretrain(words: list[str]) -> tuple[dict[str, Any], str | None]:
    """Arguments of `patchloom.pretrain` from the words after ``patchloom pretrain``.

    Returns:
        The keyword arguments, and the folder of the run or None.

    Raises:
        PatchloomError: an unknown option, or a value of the wrong kind.
    """
    from patchloom.runs.settings import DEFAULT_TASK

    words = [re.sub(r"^--dry[-_]run$", "--dry_run=true", word) for word in words]
    words = [
        re.sub(r"^--from(?==|$)", "--from_run", re.sub(r"^--dry-run=", "--dry_run=", word)) for word in _joined(words)
    ]
    words = _with_configuration([re.sub(r"^--(task|model|config)(?==|$)", _named, word) for word in words])
    parsed = _parse(pretrain_parser(_last(words, "--task.name") or DEFAULT_TASK), words)
    given = parsed.as_dict()
    del given["config"]
    if not given["dry_run"]:  # what is left are the settings, of which it is none
        del given["dry_run"]
    given["img_size"] = image_size(given["img_size"])
    given["model"] = {name: value for name, value in given["model"].items() if value is not None}
    return given, given.pop("out")


def pretrain_parser(task: str) -> ArgumentParser:
    """What ``patchloom pretrain --task NAME`` takes.

    Raises:
        PatchloomError: no task has that name.
    """
    from patchloom.runs.settings import Settings
    from patchloom.tasks import task_class

    parser = _parser("pretrain", "Pre-train an encoder on images without labels.")
    parser.add_argument("data", type=str, help="folder of images, list file, or shapes, digits, cifar10, ...")
    parser.add_argument("--out", type=str, default=None, help="folder of the run (default: runs/DATA-TASK)")
    parser.add_argument("--dry_run", type=bool, default=False, help="say what the run will be and take, and end there")
    parser.add_argument("--config.file", type=str, default=None, help="YAML with these options; the command line wins")
    _add_signature(parser, Settings, skip={"data", "task", "model", "img_size"})
    parser.add_argument("--img_size", type=str, default="auto", help="pixels, such as 96, or 64x128 (height x width)")
    parser.add_argument("--model.name", type=str, default="auto", help="nano, micro, mini (ours), or a timm ViT")
    for name, (kind, help_text) in MODEL_OPTIONS.items():
        parser.add_argument(f"--model.{name}", type=kind | None, default=None, help=help_text)
    parser.add_argument("--task.name", type=str, default=task, help="pretext task; patchloom tasks lists them")
    _add_signature(parser, task_class(task), skip={"encoder"}, prefix="task.")
    return parser


def parse_call(verb: str, function: Callable[..., Any], words: list[str]) -> dict[str, Any]:
    """Arguments of ``function`` from the words after ``patchloom VERB``: positional ones as such, the rest as options.

    Raises:
        PatchloomError: an unknown option, or a value of the wrong kind.
    """
    return _parse(call_parser(verb, function), _joined(words)).as_dict()


def call_parser(verb: str, function: Callable[..., Any]) -> ArgumentParser:
    """What ``patchloom VERB`` takes, if it calls ``function``."""
    parser = _parser(verb, (inspect.getdoc(function) or "").splitlines()[0])
    _add_signature(parser, function)
    return parser


def parse_evaluate(words: list[str]) -> dict[str, Any]:
    """Arguments of `patchloom.evaluate.evaluate` from the words after ``patchloom evaluate``.

    Raises:
        PatchloomError: no such protocol, an unknown option, or a value of the wrong kind.
    """
    words = _joined(words)
    name = next((word for word in words if not word.startswith("-")), None)
    return _parse(evaluate_parser(name), words).as_dict()


def evaluate_parser(name: str | None) -> ArgumentParser:
    """What ``patchloom evaluate NAME`` takes; without a name, what all protocols take.

    Raises:
        PatchloomError: no such protocol.
    """
    from patchloom.evaluate import EvalSettings
    from patchloom.evaluate.protocols import PROTOCOLS, protocol_of

    about = f"Measure an encoder. The protocols: {', '.join(PROTOCOLS)}; each has a --help of its own."
    if name is not None:
        function, _ = protocol_of(name)
        about = (inspect.getdoc(function) or "").splitlines()[0]
    parser = _parser("evaluate" if name is None else f"evaluate {name}", about)
    parser.add_argument("protocol", type=str, help=", ".join(PROTOCOLS))
    parser.add_argument("run", type=str, help="a run's folder, an encoder's .safetensors file, or timm:NAME")
    parser.add_argument("data", type=str, help="labelled images, as pretrain takes them")
    if name is not None:
        _add_signature(parser, function, skip={"run", "data", "settings", "count"})
    _add_signature(parser, EvalSettings)
    return parser


def image_size(text: str) -> tuple[int, int] | str:
    """'auto', '96' (square), '64x128' or '[64, 128]' (height, width).

    Raises:
        PatchloomError: none of these.
    """
    if text == "auto":
        return "auto"
    match = re.fullmatch(r"\s*[\[(]?\s*(\d+)(?:\s*[x,]\s*(\d+))?\s*[\])]?\s*", text)
    if match is None:
        raise PatchloomError(f"--img_size cannot be {text}: it takes a size such as 96, 64x128 or auto")
    return (int(match[1]), int(match[2] or match[1]))


def _named(match: re.Match[str]) -> str:
    return f"--{match[1]}.file" if match[1] == "config" else f"--{match[1]}.name"


def short(text: str) -> str:
    """With --task for --task.name: nested names keep a name beside its options, and people type the short form."""
    return re.sub(r"--(task|model|config|from)[._](name|file|run)\b", r"--\1", text)


class _Parser(ArgumentParser):
    def format_help(self) -> str:
        return short(super().format_help())


def _parser(verb: str, about: str) -> ArgumentParser:
    return _Parser(prog=f"patchloom {verb}", description=about, exit_on_error=False, allow_abbrev=False)


def _add_signature(
    parser: ArgumentParser, owner: Callable[..., Any], skip: set[str] = frozenset(), prefix: str = ""
) -> None:
    """Add an option for every parameter, with type, default and help from signature and docstring.

    Parameters without a default become positional; so do those that have one and may be given by position.
    """
    described = {item.arg_name: item.description for item in parse_docstring(inspect.getdoc(owner) or "").params}
    hints = get_type_hints(owner.__init__ if inspect.isclass(owner) else owner)
    for name, parameter in inspect.signature(owner).parameters.items():
        if name in skip:
            continue
        text = (described.get(name) or "").replace("\n", " ")
        positional = not prefix and not dataclasses.is_dataclass(owner) and parameter.kind != parameter.KEYWORD_ONLY
        if positional:
            required = parameter.default is parameter.empty
            extra = {} if required else {"nargs": "?", "default": parameter.default}
            parser.add_argument(name, type=hints[name], help=text, **extra)
        else:
            parser.add_argument(f"--{prefix}{name}", type=hints[name], default=parameter.default, help=text)


def _parse(parser: ArgumentParser, words: list[str]) -> Any:
    # YAML, in which values are read, spells infinity .inf, and wants brackets around 5,20 and a space in {mask: 0.5}
    words = [re.sub(r"^(--[^=]+=)([-+]?)inf(inity)?$", r"\1\2.inf", word, flags=re.IGNORECASE) for word in words]
    words = [re.sub(r":(?=\S)", ": ", word) if re.match(r"--[\w.]+=\{.*\}$", word) else word for word in words]
    words = [re.sub(r"^(--ks=)(\d+(?:,\d+)*)$", r"\1[\2]", word) for word in words]
    for word in words:
        if long := re.match(r"(--[\w.]+)=[-+]?[\d_]{300,}$", word):  # more than a float, or a file's name, can have
            raise PatchloomError(f"{long[1]} cannot be a number of {len(word) - len(long[1]) - 1} digits")
    try:
        return parser.parse_args(words)
    except ArgumentError as problem:
        raise PatchloomError(_sentence(str(problem), parser)) from problem


def _sentence(problem: str, parser: ArgumentParser) -> str:
    """jsonargparse's report as one sentence that says what to do."""
    options = [option for action in parser._actions for option in action.option_strings]
    unknown = re.search(r"(?:[Uu]nrecognized arguments|No action for key): *(\S+)", problem)
    if unknown:
        option = unknown[1].split("=")[0]
        near = get_close_matches(option, options, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}?" if near else f"{parser.prog} --help lists them"
        return f"there is no option {option}; {hint}"
    key = re.search(r'(?:Parser key |[Aa]rgument )"?([\w.]+)"?', problem)
    value = re.search(r"Given value: (.*)", problem) or re.search(r"[Vv]alue:? [\"']?(.*?)[\"']?(?:$|\n)", problem)
    if key and value and (inner := re.match(r"NestedArg\(key='(.*?)'", value[1])):
        return f"there is no option --{key[1]}.{inner[1]}; {parser.prog} --help lists them"
    if key and value:
        action = next((a for a in parser._actions if key[1] in (a.dest, a.metavar)), None)
        kind = in_words(getattr(action, "_typehint", None) or action.type) if action else "another kind of value"
        name = f"--{key[1]}" if action is None or action.option_strings else key[1].upper()
        return f"{name} cannot be {value[1]}: it takes {kind}"
    return " ".join(problem.split()) + f"; {parser.prog} --help tells how"


def _joined(words: list[str]) -> list[str]:
    """Every option in one word with its value: ``--epochs 5`` as ``--epochs=5``."""
    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        if before.startswith("--") and "=" not in before and before != "--help" and not word.startswith("--"):
            joined[-1] = f"{before}={word}"
        else:
            joined.append(word)
    return joined


def _last(words: list[str], option: str) -> str | None:
    """The last value that ``option`` is given in joined words."""
    return next((word.split("=", 1)[1] for word in reversed(words) if word.startswith(f"{option}=")), None)


def _with_configuration(words: list[str]) -> list[str]:
    """Put the options of a ``--config`` file in front of the words, so that the words win."""
    file = _last(words, "--config.file")
    if file is None:
        return words
    try:
        values = yaml.safe_load(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise PatchloomError(f"the configuration {file} cannot be read: {problem}") from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:  # such as a 13th month, or a thousand brackets
        raise PatchloomError(f"the configuration {file} is not YAML: {' '.join(str(problem).split())}") from problem
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise PatchloomError(f"the configuration {file} must be a list of 'setting: value' lines")
    values = dict(values)
    data = values.pop("data", None)
    options: list[str] = []
    for name, value in values.items():
        nested = name in ("task", "model")
        pairs = {name: value}
        if nested:
            inside = value if isinstance(value, Mapping) else {"name": value}
            pairs = {f"{name}.{key}": inner for key, inner in inside.items()}
        for key, inner in pairs.items():
            try:
                if isinstance(inner, Mapping) and not nested:
                    raise TypeError("it has settings of its own")
                options.append(f"--{key}={_word(inner)}")
            except (TypeError, ValueError, RecursionError) as problem:  # what JSON cannot say, no setting takes
                raise PatchloomError(f"{key} in the configuration {file} must be a plain value: {problem}") from problem
    positional = [] if data is None or any(not word.startswith("-") for word in words) else [str(data)]
    return [*positional, *options, *words]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
