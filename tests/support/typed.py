"""Hypothesis strategies for options on the command line, derived from the signatures."""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from hypothesis import strategies as st

from patchloom import cli
from patchloom.options.evaluate import CommonOptions
from patchloom.options.parse import MODEL_OPTIONS
from patchloom.options.protocols import PROTOCOLS
from patchloom.options.verbs import Bench, Check, Export, Look
from patchloom.runs.settings import Settings
from patchloom.tasks import TASKS, task_class

# small and quick to build
SMALL = ["shapes:50", "--model=nano", "--model.embed_dim=32", "--model.depth=1", "--model.num_heads=2"]

NUMBERS = [0, 1, 2, 3, 7, 8, 16, -1, 2**31 - 1, 2**31, 2**63, 10**6, 10**18, 10**400, 0.5, 0.75, 1e-9, -0.5, 1e308]
NUMBERS += [float("nan"), float("inf"), -float("inf"), 1e-400]
WORDS = (
    *("", " ", "auto", "none", "None", "null", "true", "yes", "~", "nan", "inf", "1e308", "0x10", "1_000", "٣", "½"),
    *("-", "--", "---", "-1", "-x", "=", "a=b", "a b", "a\nb", "a\rb", "a\0b", "\udcff", "\ud83d", "é", "😀", "[", "]"),
    *("[]", "[1, 2]", "[1", "{}", "{", "{a: 1}", "{mask: 0.5}", "{mask:.5, mask:1}", "{1: 2}", "{name: mae}", "&a"),
    *("*a", "!!python/object:os.system", "!!int x", "!!binary x", "2026-11-20", "96", "64x128", "9" * 5000, "a" * 300),
    *("%s", "{0}", "$HOME", "~/x", "/", ".", "..", "/dev/null", "/proc/self/mem", "a/" * 2000, "@file", "timm:"),
    *("timm:vit_x", "shapes:0", "shapes:1", "shapes:-1", "shapes:x", "digits", "hf:", "hf:/nowhere", "*.tar", "mae"),
    "[[1], {}]",
)
word = st.sampled_from(WORDS) | st.sampled_from(NUMBERS).map(str) | st.text(max_size=6) | st.floats().map(str)


def meant(hint: Any) -> st.SearchStrategy[str]:
    """Generate words for a type hint, inside and outside its range."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from([str(one) for one in inside])
    if origin is Union or hint.__class__.__name__ == "UnionType":
        return st.one_of(*map(meant, inside))
    if hint in (int, float):
        return st.sampled_from([one for one in NUMBERS if hint is float or isinstance(one, int)]).map(str)
    if hint is bool:
        return st.sampled_from(["true", "false"])
    if origin is dict:
        names = st.sampled_from(["mask", "drop_positions", "pixels", "positions", "agreement", "x", ""])
        return st.dictionaries(names, st.sampled_from(NUMBERS), max_size=3).map(str)
    return word


@cache
def options(owner: Callable, skip: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """Return names and hints of the options in a signature."""
    hints = get_type_hints(owner if is_dataclass(owner) or not inspect.isclass(owner) else owner.__init__)
    return [(name, hints[name]) for name in inspect.signature(owner).parameters if name not in skip and name in hints]


def spelt(names: list[tuple[str, Any]]) -> st.SearchStrategy[list[str]]:
    """Generate one option: with a value of its type or another, without a value, abbreviated, or unknown."""

    def typed(chosen: tuple[str, Any]) -> st.SearchStrategy[list[str]]:
        name, hint = chosen
        right = meant(hint)
        value = right | right | right | word
        return st.one_of(
            value.map(lambda one: [f"--{name}={one}"]),
            value.map(lambda one: [f"--{name}={one}"]),
            value.map(lambda one: [f"--{name}", one]),
            value.map(lambda one: [f"--{name[:-1]}", one]),
            st.just([f"--{name}"]),
            word.map(lambda one: [one]),
        )

    return st.sampled_from(names).flatmap(typed)


def of_pretrain(task: str) -> list[tuple[str, Any]]:
    own = [(f"task.{name}", hint) for name, hint in options(task_class(task), ("encoder",))]
    models = [(f"model.{name}", kind) for name, (kind, _) in MODEL_OPTIONS.items()]
    rest = [(name, hint) for name, hint in options(Settings, ("task", "model", "data")) if name != "from_run"]
    return own + models + rest + [("from", str), ("model", str), ("out", str), ("config", str)]


@st.composite
def pretraining(draw: Callable) -> list[str]:
    task, other = draw(st.sampled_from([*TASKS])), draw(st.sampled_from([*TASKS]))
    known = spelt(of_pretrain(task) + of_pretrain(other)[:8])
    typed = sum(draw(st.lists(known, min_size=1, max_size=3)), [])
    return ["pretrain", *SMALL, f"--task={task}", *typed] if draw(st.booleans()) else ["pretrain", *typed, *SMALL]


@st.composite
def other_verb(draw: Callable) -> list[str]:
    verbs = {"check": Check, "bench": Bench, "look": Look, "export": Export, "evaluate": None, "tasks": cli.main}
    verb = draw(st.sampled_from([*verbs, "", "-h", "pretrian", "😀"]))
    if verb == "evaluate":
        protocol = draw(st.sampled_from([*PROTOCOLS, "blocks:2", "blocks:x", ""]))
        known = options(PROTOCOLS[protocol.partition(":")[0] or "knn"].options) if protocol != "blocks:x" else []
        known, places = known + options(CommonOptions), [protocol, "nowhere", "shapes:40"]
    else:
        known, places = options(verbs.get(verb) or Check), ["images" if verb in ("check", "bench") else "nowhere"]
    typed = sum(draw(st.lists(spelt(known), max_size=3)), [])
    return [verb, *(places if draw(st.booleans()) else draw(st.lists(word, max_size=3))), *typed]


plain = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.binary(max_size=3)
value = st.recursive(
    plain, lambda one: st.lists(one, max_size=3) | st.dictionaries(plain, one, max_size=3), max_leaves=5
)
SETTINGS = [name for name, _ in options(Settings)]
KEYS = [*SETTINGS, "out", "config", "task.mask_ratio", "model.depth", "nonsense", "", 1, None, True, (1, 2)]
PIECES = (
    *("a: &a [*a]", "&x {task: *x}", "*nowhere", "!!python/object/apply:os.system [exit]", "!!set {a}", "? [1]: 2"),
    *("epochs: 1\nepochs: 2", "a: b: c", "\t- x", "- 1\n- 2", "task:\n  name: mae\n  name: lut", "--- 1\n--- 2"),
    *("%YAML 9", "<<: [1]", "<<: {epochs: 1}", "seed: 2026-11-20", "seed: 1:30:00", "blr: 1e-3", "data: [a]"),
    *("data: {a: b}", "data:", "config: run.yaml", "{" * 3000, "[" * 3000 + "]" * 3000, "a: " + "b" * 100_000),
    *("model: nano\ntask: {}", "task: [mae]"),
)
configuration = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode("utf-16")),
    st.sampled_from(PIECES).map(str.encode),
    st.dictionaries(st.sampled_from(KEYS), value, min_size=1, max_size=3).map(
        lambda chosen: yaml.dump(chosen, allow_unicode=True).encode("utf-8", "surrogatepass")
    ),
    st.sampled_from(SETTINGS).flatmap(
        lambda name: value.map(lambda one: yaml.dump({name: one}).encode("utf-16")[2::2])
    ),
)
