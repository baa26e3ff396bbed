"""Arguments of public functions: options read from signatures and docstrings, and messages about wrong ones."""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import (
    Any,
    ParamSpec,
    TypeVar,
    get_type_hints,
)

from docstring_parser import parse as parse_docstring

from patchloom.display import clear_status
from patchloom.errors import OBJECTS, PatchloomError, check_type
from patchloom.options.declare import CommandSpec, Option, command_line_hint, to_plain_value
from patchloom.options.messages import (
    unknown_option_error,
)

# Options from signatures and docstrings, of live objects or of source files that are not imported.


P = ParamSpec("P")
R = TypeVar("R")
_JOINED = ("data", "runs")  # parameters that take several words, which the function joins
_PLAIN = (int, float, bool, str, Path, type(None))


def read_signature(owner: Callable[..., Any], skip: Collection[str] = ()) -> CommandSpec:
    """Return the options of a function, a class or a dataclass, from its signature and docstring.

    Positional parameters of functions are positional on the command line; those of classes never are. Parameters whose
    values cannot be typed, such as functions, are left out.
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


def from_source(path: str) -> Any:
    """Return a function, class or constant of this package from its source file, without importing it.

    A function has only its signature and docstring; a class has its bases and the fields of a dataclass, too. That is
    enough for `read_signature`, so the command line does not wait for torch.
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
    """Stand-in for all names that a module imports from other libraries."""


@cache
def _names(module: str) -> _Names:
    return _Names(module)


class _Names(dict[str, Any]):
    """Names of a module of this package, each evaluated from its source when it is first looked up.

    The standard library is imported, other modules of this package are read in the same way, the rest is `_Foreign`.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        place = Path(__file__).parents[1].joinpath(*module.split("."))
        package = place / "__init__.py"
        self.file = package if package.exists() else place.with_suffix(".py")
        self.nodes: dict[str, tuple[ast.stmt, str]] = {}  # statement by name, and the name in the module of origin
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
    """Keep the signature and the docstring."""
    for one in (*node.args.args, *node.args.kwonlyargs):
        one.annotation = None if one.arg in _JOINED else one.annotation
    node.decorator_list = []
    node.body = node.body[:1] if ast.get_docstring(node) is not None else [ast.Pass()]
    node.returns = None
    return ast.fix_missing_locations(node)


# a path, or an object with `__fspath__`, such as a run
PathLike = str | Path | os.PathLike[str]


def plain_path(path: PathLike) -> str | Path:
    """Return a string unchanged, and any other path, such as a run, as a `Path`."""
    return path if isinstance(path, str) else Path(path)


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that checks the arguments of a public function against its signature.

    Wrong arguments raise `PatchloomError`, with the message of the command line, and never a TypeError from inside.
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
    """Return all arguments of a call by name."""
    kinds = {name: one.kind for name, one in takes.parameters.items()}
    places = [name for name, kind in kinds.items() if kind is Parameter.POSITIONAL_OR_KEYWORD]
    options = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    if len(given) > len(places):
        raise PatchloomError(f"{verb} takes {', '.join(places)} without a name: give all others as NAME=VALUE")
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
