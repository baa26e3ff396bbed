"""A Python call is as strict as the command line: a slip in it is the same sentence, and never a TypeError."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from docstring_parser import parse as parse_docstring

from patchloom.display import clear_status
from patchloom.errors import OBJECTS, PatchloomError, check_type, closest_word, describe_type, listing, normalize_word

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


# Words that are no option or value: one sentence each, with what may have been meant.


# what other programs call it, or what it was called before, without hyphens and underscores
_RATE = "the base learning rate: the peak is blr · (images an update) / 256, so that it need not change with the batch"
_ELSEWHERE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("lr", "learningrate", "baselr"), ("blr", _RATE)),
    **dict.fromkeys(("batch", "bs", "b", "batchsizepergpu"), ("batch_size", "")),
    **dict.fromkeys(("output", "outputdir", "outdir", "outfolder", "savedir", "logdir", "name"), ("out", "")),
    **dict.fromkeys(("imagesize", "inputsize", "resolution", "size", "imgsz"), ("img_size", "")),
    **dict.fromkeys(("numworkers", "nworkers", "j"), ("workers", "")),
    **dict.fromkeys(("gpus", "ngpus", "numgpus", "nprocpernode"), ("devices", "")),
    **dict.fromkeys(("gpu", "cuda", "cpu"), ("device", "it takes cuda or cpu, and is chosen where it is left out")),
    **dict.fromkeys(("amp", "fp16", "bf16", "halfprecision"), ("precision", "")),
    **dict.fromkeys(("arch", "architecture", "backbone", "encoder", "net"), ("model", "")),
    **dict.fromkeys(("pretrained", "weights", "checkpoint", "ckpt"), ("init", "it takes timm:NAME or a file")),
    **dict.fromkeys(("steps", "iterations", "niter", "maxepochs", "numepochs"), ("epochs", "")),
    **dict.fromkeys(("wd", "decay"), ("weight_decay", "")),
    **dict.fromkeys(("warmup", "warmupsteps"), ("warmup_epochs", "")),
    **dict.fromkeys(("pretext", "method", "objective"), ("task", "")),
    **dict.fromkeys(("logger", "loggers", "tracker", "trackers", "reportto"), ("log", "")),
    **dict.fromkeys(("earlystop", "earlystopping", "stopafter"), ("patience", "")),
    **dict.fromkeys(("limit", "subset", "most", "maximages"), ("max_train", "")),
    **dict.fromkeys(("cfg", "conf", "yaml"), ("config", "")),
}
_NEEDLESS = {
    **dict.fromkeys(("resume", "continue"), "the same command, with the same --out, goes on where a run was stopped"),
    **dict.fromkeys(
        ("nodes", "nnodes", "numnodes"),
        "start processes on several machines by torchrun or srun (docs/how-to/slurm.md)",
    ),
    **dict.fromkeys(("verbose", "quiet"), "what is printed cannot be chosen"),
    **dict.fromkeys(("augment", "augmentation", "transforms"), "--flip, --crop_scale and --randaugment can be chosen"),
}
_REMOVED = ("nodes",)  # settings of older versions, which their files still have
_WORDS = ("data", "dataset", "datapath", "datadir", "input", "images", "run")  # which are given without a name


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file without those that older versions had and that no longer matter."""
    return {name: value for name, value in values.items() if name not in _REMOVED}


def shorten_options(text: str) -> str:
    """With --task for --task.name: nested names keep a name beside its options, and people type the short form."""
    return re.sub(r"--(task|model|config|from)[._](name|file|run)\b", r"--\1", text)


def explain_error(problem: str, parser: ArgumentParser, owners: Callable[[str], Sequence[str]]) -> str:
    """What jsonargparse reports, as one sentence that says what to do."""
    known = [shorten_options(name) for action in parser._actions for name in action.option_strings if name[-1] != "+"]
    if "arguments are required" in problem:
        places = [action for action in parser._actions if not action.option_strings and action.required]
        lacking = problem.rpartition(":")[2].replace(",", " ").split()
        said = [f"{place.dest.upper()} ({(place.help or '').rstrip('.')})" for place in places if place.dest in lacking]
        return f"{parser.prog} needs {listing(said, 'and')}; {parser.prog} --help tells more"
    if bare := re.search(r"argument (\S+): expected", problem):
        return f"{shorten_options(bare[1])} needs a value; {parser.prog} --help tells which"
    unknown = re.search(r"(?:[Uu]nrecognized arguments|No action for key): *(.+)", problem)
    if unknown:
        return _unknown(unknown[1] if unknown[1][0] != "-" else unknown[1].split()[0], parser, known, owners)
    key = re.search(r'(?:Parser key |[Aa]rgument )"?([\w.]+)"?', problem)
    value = re.search(r"Given value: (.*)", problem) or re.search(r"[Vv]alue:? [\"']?(.*?)[\"']?(?:$|\n)", problem)
    if key and value and (inner := re.match(r"NestedArg\(key='(.*?)'", value[1])):
        return f"there is no option --{key[1]}.{inner[1]}; {parser.prog} --help lists them"
    if key and value:
        action = next((a for a in parser._actions if key[1] in (a.dest, a.metavar)), None)
        kind = describe_type(getattr(action, "_typehint", None) or action.type) if action else "another kind of value"
        name = shorten_options(f"--{key[1]}") if action is None or action.option_strings else key[1].upper()
        return f"{name} cannot be {value[1]}: it takes {kind}"
    return " ".join(problem.split()) + f"; {parser.prog} --help tells how"


def without_hyphens(word: str, known: Sequence[str]) -> str | None:
    """The sentence about a word that would be one of the options ``known``, if it began with two hyphens, or None."""
    name, equals, value = word.partition("=")
    bare = name.lstrip("-–—")
    meant = closest_word(bare, [one[2:] for one in known]) if equals or name != bare else None
    if meant is None:
        return None
    return f"{word} is no option, since these begin with two hyphens; did you mean --{meant}{equals}{value}?"


def _unknown(word: str, parser: ArgumentParser, known: Sequence[str], owners: Callable[[str], Sequence[str]]) -> str:
    name = word.partition("=")[0]
    bare = name.lstrip("-")
    if not name.startswith("--"):
        return without_hyphens(word, known) or (
            f"{word} is one word too many; {parser.prog} --help tells what it takes (names of options begin with --, "
            "and a name with spaces needs quotes)"
        )
    if said := _otherwise_called(name, bare, known):
        return said
    places = [action.dest.upper() for action in parser._actions if not action.option_strings]
    if normalize_word(bare) in _WORDS and places:
        return (
            f"there is no option {name}: give {listing(places, 'and')} without a name, {parser.prog} {' '.join(places)}"
        )
    if said := _mistyped(name, bare, known):
        return said
    if found := owners(name):
        return f"{name} is an option of {listing(found, 'and')}; {parser.prog} --help all lists those that go with it"
    return f"there is no option {name}; {parser.prog} --help all lists them"


def _otherwise_called(name: str, bare: str, known: Sequence[str]) -> str | None:
    """The sentence on an option that is not needed, or that has another name here."""
    if normalize_word(bare) in _NEEDLESS:
        return f"there is no option {name}: {_NEEDLESS[normalize_word(bare)]}"
    meant, why = _ELSEWHERE.get(normalize_word(bare), ("", ""))
    if f"--{meant}" in known:
        return f"there is no option {name}; did you mean --{meant}" + (f"? It is {why}" if why else "?")
    if re.match("no[-_]", bare) and (switch := f"--{bare[3:].replace('-', '_')}") in known:
        return f"there is no option {name}; did you mean {switch} false?"
    return None


def _mistyped(name: str, bare: str, known: Sequence[str]) -> str | None:
    """The sentence on an option that is like one of those that there are."""
    inside = [one for one in known if one.endswith(f".{bare}")]
    if near := inside[0] if inside else closest_word(name, known):
        return f"there is no option {name}; did you mean {near if near.startswith('--') else f'--{near}'}?"
    return None


def unknown_option_error(name: str, known: Iterable[str], otherwise: str) -> PatchloomError:
    """The refusal of a keyword of a Python call, in the words of the command line."""
    options = [f"--{one}" for one in known]
    said = _otherwise_called(f"--{name}", name, options) or _mistyped(f"--{name}", name, options)
    return PatchloomError(said or f"there is no option --{name}; {otherwise}")


# What options there are: from signatures and docstrings, of live objects or of source files that are not imported.


P = ParamSpec("P")
R = TypeVar("R")
_JOINED = ("data", "runs")  # several words of which are joined by who reads them
_PLAIN = (int, float, bool, str, Path, type(None))


class Option(NamedTuple):
    """One option, or a word that is given by its place.

    Attributes:
        name: as in the signature.
        hint: its type, as far as words can be of it.
        default: None where there is none, too.
        about: its line in the docstring.
        positional: whether it is given by its place.
        required: whether it must be given.
        kind: what it takes, where that is to be said in other words than those of the hint.
    """

    name: str
    hint: Any
    default: Any = None
    about: str = ""
    positional: bool = False
    required: bool = False
    kind: str = ""


class CommandSpec(NamedTuple):
    """What takes options: a verb, a task or a protocol.

    Attributes:
        about: the first line of its docstring.
        options: in the order of the signature.
    """

    about: str
    options: tuple[Option, ...]


def read_signature(owner: Callable[..., Any], skip: Collection[str] = ()) -> CommandSpec:
    """What a function, a class or the fields of a dataclass take, from signature and docstring.

    Parameters that may be given by position are so on the command line, too; those of classes never are. What no word
    can be, such as a function, is left out.
    """
    text = inspect.getdoc(owner) or ""
    described = {item.arg_name: item.description for item in parse_docstring(text).params}
    hints = get_type_hints(owner.__init__ if inspect.isclass(owner) else owner)
    found = []
    for name, parameter in inspect.signature(owner).parameters.items():
        if name in skip or parameter.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            continue
        required = parameter.default is Parameter.empty
        default = None if required else parameter.default
        hint = command_line_hint(hints.get(name, str if default is None else type(default)))
        hint = str if name in _JOINED else hint
        if hint is None:
            continue
        about = " ".join((described.get(name) or "").split())
        positional = not inspect.isclass(owner) and parameter.kind is not Parameter.KEYWORD_ONLY
        found.append(Option(name, hint, default, about, positional, required))
    return CommandSpec((text.splitlines() or [""])[0], tuple(found))


def command_line_hint(hint: Any) -> Any:
    """The part of a hint that can be said in words on a command line; None if there is none."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint in _PLAIN or origin is Literal:
        return hint
    if origin in (Union, types.UnionType):
        kept = [one for one in map(command_line_hint, inside) if one is not None]
        return None if set(kept) <= {type(None)} else Union[tuple(kept)]  # noqa: UP007
    if origin in (list, tuple, dict, Sequence) and all(one in _PLAIN for one in inside if one is not ...):
        return hint
    return None


def takes_recipe(protocol: Callable[P, R], kind: type[Any], only: Collection[str] = ()) -> Callable[P, R]:
    """Decorator that replaces the last parameter ``**changes`` of a protocol by the options of a kind of recipe.

    Signature and docstring follow from the fields and their descriptions, so that neither is written twice. Options
    are ``only`` some fields, or all but those that tell of the batch, as the settings common to all protocols do, and
    whether recordings are trained on. A base learning rate may be a list, of which the best on held-out training images
    is chosen.
    """
    own = signature(protocol)
    known = get_type_hints(kind)
    names = only or [field.name for field in fields(kind) if field.name not in ("batch", "recordings")]
    hints = {name: known[name] | None for name in names}
    if "blr" in hints:
        hints["blr"] = float | list[float] | None
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hints[name]) for name in names]
    own_options = [parameter for parameter in own.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    protocol.__signature__ = own.replace(parameters=[*own_options, *added])  # type: ignore[attr-defined]
    protocol.__annotations__ |= hints
    described = {name: text for one in reversed(kind.__mro__) for name, text in _descriptions(one).items()}
    if "blr" in hints:
        described["blr"] = described["blr"].replace("rate;", "rate, or a list to choose from;")
    lines = "".join(f"    {name}:{described[name]}" for name in names)
    text = inspect.getdoc(protocol) or ""
    protocol.__doc__ = re.sub(r"^    changes: .*\n", lambda _: lines, text + "\n", flags=re.M)
    return protocol


def _descriptions(kind: type[Any]) -> dict[str, str]:
    """What a recipe's docstring says of each of its own fields, line breaks and all."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2] + "\n"
    return dict(re.findall(r"^    (\w+):(.*\n(?:     .*\n)*)", text, flags=re.M))


def from_source(path: str) -> Any:
    """A function, class or constant of this package by its path, read from its source file: nothing is imported.

    A function has its signature and docstring, a class also its bases and the fields of a dataclass, and no more. So
    `read_signature` finds in it what it finds in the live object, and the command line need not wait for torch.
    """
    module, _, name = path.rpartition(".")
    return _names(module)[name]


class _ForeignType(type):
    def __getattr__(cls, name: str) -> _ForeignType:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _: object) -> _ForeignType:
        return cls


class _Foreign(metaclass=_ForeignType):
    """Whatever a module has from other libraries, and their attributes: no word on a command line can be it."""


@cache
def _names(module: str) -> _Names:
    return _Names(module)


class _Names(dict[str, Any]):
    """The names of a module of this package, each made from its source when it is first looked up.

    The standard library is imported, other modules of this package are read in the same way, all else is `_Foreign`.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        place = Path(__file__).parents[1].joinpath(*module.split("."))
        package = place / "__init__.py"
        self.file = package if package.exists() else place.with_suffix(".py")
        self.nodes: dict[str, tuple[ast.stmt, str]] = {}  # by name, with what it is called where it is imported from
        for node in ast.parse(self.file.read_text("utf-8")).body:
            match node:
                case ast.Import() | ast.ImportFrom():
                    found = {one.asname or one.name.partition(".")[0]: one.name for one in node.names}
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    found = {name: name}
                case ast.Assign():
                    targets = (one for target in node.targets for one in ast.walk(target))
                    found = {one.id: one.id for one in targets if isinstance(one, ast.Name)}
                case _:
                    continue
            self.nodes |= {name: (node, origin) for name, origin in found.items()}

    def __missing__(self, name: str) -> Any:
        node, origin = self.nodes[name]
        match node:
            case ast.ClassDef():
                self[name] = self._class(node)
            case ast.FunctionDef():
                self._run(_without_body(node))
            case ast.AnnAssign(value=ast.expr() as value):
                self[name] = self._value(value)
            case ast.ImportFrom(module=str(module)) if module != __name__ and module.startswith("patchloom"):
                self[name] = _names(module)[origin]
            case ast.Import() | ast.ImportFrom() if _top(node, origin) not in {*sys.stdlib_module_names, "patchloom"}:
                self[name] = _Foreign
            case _:
                self._run(node)
        return self[name]

    def _class(self, node: ast.ClassDef) -> type:
        bases = [base for base in map(self._value, node.bases) if isinstance(base, type) and base is not _Foreign]
        ours = tuple(base for base in bases if base.__module__ == __name__)
        body: dict[str, Any] = {"__module__": __name__, "__doc__": ast.get_docstring(node, clean=False)}
        decorators = [one for one in node.decorator_list if ast.unparse(one).startswith("dataclass")]
        hints: dict[str, Any] = {}
        for one in node.body:
            match one:
                case ast.FunctionDef(name="__init__"):
                    self._run(_without_body(one))
                    body["__init__"] = self.pop("__init__")
                case ast.AnnAssign(target=ast.Name(id=name)) if decorators:
                    hints[name] = self._value(one.annotation)
                    body |= {} if one.value is None else {name: self._value(one.value)}
        made = type(node.name, ours, body | {"__annotations__": hints})
        for decorator in decorators:
            made = self._value(decorator)(made)
        return made

    def _run(self, node: ast.stmt) -> None:
        exec(compile(ast.Module([node], []), self.file, "exec", dont_inherit=True), {}, self)

    def _value(self, node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), self.file, "eval", dont_inherit=True), {}, self)


def _top(node: ast.Import | ast.ImportFrom, origin: str) -> str:
    return (origin if isinstance(node, ast.Import) else node.module or "").partition(".")[0]


def _without_body(node: ast.FunctionDef) -> ast.FunctionDef:
    """Its signature and docstring alone, with what `takes_recipe` adds to them."""
    for one in (*node.args.args, *node.args.kwonlyargs):
        one.annotation = None if one.arg in _JOINED else one.annotation
    node.decorator_list = [one for one in node.decorator_list if "takes_recipe" in ast.unparse(one)]
    node.body = node.body[:1] if ast.get_docstring(node) is not None else [ast.Pass()]
    node.returns = None
    return ast.fix_missing_locations(node)


# a path, or whatever stands for one, such as a run
PathLike = str | Path | os.PathLike[str]


def plain_path(path: PathLike) -> str | Path:
    """A path as it was typed, or as a `Path`, also of what stands for one, such as a run."""
    return path if isinstance(path, str) else Path(path)


def to_plain_value(value: Any) -> Any:
    """A number of NumPy or torch as Python's own, and whatever stands for a path, such as a run, as a `Path`."""
    if isinstance(value, os.PathLike) and not isinstance(value, Path):
        return Path(value)
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """A verb, or another function of the public API, that refuses in a sentence what its signature does not take.

    So a slip is a `PatchloomError` in Python, too, and no TypeError from somewhere inside.
    """
    name = getattr(function, "__name__", "")
    takes = signature(function)
    by_name: Callable[..., R] = function

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        values = {key: to_plain_value(value) for key, value in _by_name(name, takes, given, named).items()}
        hints = get_type_hints(function)
        for key, value in values.items():
            if key in hints and key in takes.parameters and key not in OBJECTS:
                check_type(key, value, hints[key])
        with clear_status():
            return by_name(**values)

    return call


def _by_name(verb: str, takes: Signature, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, of a function whose positional parameters have names."""
    kinds = {name: one.kind for name, one in takes.parameters.items()}
    places = [name for name, kind in kinds.items() if kind is Parameter.POSITIONAL_OR_KEYWORD]
    options = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    if len(given) > len(places):
        raise PatchloomError(f"{verb} takes {', '.join(places)} without a name: give all else as NAME=VALUE")
    values = dict(zip(places, given, strict=False))
    for name in named:
        if name in values:
            raise PatchloomError(f"{verb} is given {name} twice: give it once")
        if name not in kinds and Parameter.VAR_KEYWORD not in kinds.values():
            there = f"patchloom {verb} --help all lists them" if options else f"{verb} takes {', '.join(places)}"
            raise unknown_option_error(name, [*places, *options], there)
    values |= named
    needed = [name for name in places if takes.parameters[name].default is Parameter.empty]
    if missing := [name for name in needed if name not in values]:
        raise PatchloomError(f"{verb} needs {' and '.join(missing)}, as in patchloom.{verb}({', '.join(needed)})")
    return values
