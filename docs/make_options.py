"""Write what the package says of options without importing torch, and options.md, a page for people.

python docs/make_options.py

``src/patchloom/options.json`` comes from signatures and docstrings; the command line, its --help and options.md from
that. Tests refuse both files when they are out of date.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from patchloom import arguments
from patchloom.arguments import CommandSpec, Option, dump_specs, read_signature, shorten_options
from patchloom.bench import bench
from patchloom.check import check
from patchloom.cli import format_default, format_kind
from patchloom.compare.compare import compare
from patchloom.data.sources.builtin import BUILTIN
from patchloom.dense.predict import predict
from patchloom.embed.embed import embed
from patchloom.evaluate.protocols import PROTOCOLS, evaluate, protocol_of
from patchloom.evaluate.settings import EvalSettings
from patchloom.export.export import export
from patchloom.look.look import look
from patchloom.look.run_curves import draw_run_curves
from patchloom.options import evaluate_spec, pretrain_spec, task_spec, verb_spec
from patchloom.report.report import report
from patchloom.runs.settings import Settings
from patchloom.tasks import TASKS, task_class, usual_task
from patchloom.train.loop import pretrain

PAGE = Path(__file__).with_name("options.md")
CALLS = {
    "compare": compare,
    "look": look,
    "look curves": draw_run_curves,
    "embed": embed,
    "predict": predict,
    "report": report,
    "export": export,
    "bench": bench,
    "check": check,
}
_ABOUT = """\
# Options

Every option of every verb, with what it takes and its default. This page is written by `python docs/make_options.py`
from the signatures and docstrings, which `--help` shows, too; a test refuses it when it is out of date. How to put
the tasks' options to use is in [Variants](variants.md), what `auto` becomes in [Pre-train](pretrain.md#auto).

In Python, an option has the same name without dashes; `--task.NAME` and `--model.NAME` are keys beside `name` in the
dicts `task` and `model`, and so they are in a YAML file for `--config`. `--debug`, with any verb, shows the traceback
of an error. A name may have hyphens, `--img-size`, and true-or-false options need no value: `--checkpointing` is
`--checkpointing true`.
"""


def contents() -> str:
    """The whole of options.json."""
    training = read_signature(pretrain, skip={"data", "task", "out"})
    settings = read_signature(Settings, skip={"data", "task", "model", "img_size"})
    measuring = read_signature(evaluate, skip={"protocol", "run", "data"})
    common = read_signature(EvalSettings)
    verbs = {
        "check": read_signature(check),
        "pretrain": CommandSpec(training.about, (*training.options, *settings.options)),
        "evaluate": CommandSpec(measuring.about, (*measuring.options, *common.options)),
        **{verb: read_signature(CALLS[verb]) for verb in CALLS if verb != "check"},
    }
    tasks = {entry.path: read_signature(task_class(name), skip={"encoder"}) for name, entry in TASKS.items()}
    given = {"run", "data", "settings", "count"}
    protocols = {name: read_signature(protocol_of(name)[0], skip=given) for name in PROTOCOLS}
    parts = {"verbs": verbs, "tasks": tasks, "protocols": protocols}
    return dump_specs(parts, {"builtin": BUILTIN})


def page() -> str:
    """The whole of options.md."""
    first = pretrain_spec(usual_task(None)[0])
    shared = [option for option in first.options if option.name == "task.name" or option.name[:5] != "task."]
    sections = [_ABOUT, _section("pretrain", first, shared)]
    for name in TASKS:
        found = task_spec(name)
        options = [option._replace(name=f"task.{option.name}") for option in found.options]
        sections.append(_section(f"Options of {name}", found, options))
    common = evaluate_spec(None)
    sections.append(_section("evaluate", common, common.options))
    seen: dict[str, dict[str, Option]] = {}
    for name in PROTOCOLS:
        found = evaluate_spec(name)
        own = {option.name: option for option in found.options if option not in common.options}
        for other, entries in seen.items():
            same = [option for option in own if entries.get(option) == own[option]]
            if len(same) > 5:  # those of a recipe
                rest = [option for option in own.values() if option.name not in same]
                section = _section(f"evaluate {name}", found, rest)
                names = ", ".join(f"`--{option}`" for option in same)
                section += "\n" + _filled(f"As for [{other}](#evaluate-{other}): {names}.") + "\n"
                break
        else:
            section = _section(f"evaluate {name}", found, own.values())
        seen[name] = own
        sections.append(section)
    sections += [_section(verb, verb_spec(verb), verb_spec(verb).options) for verb in CALLS]
    return "\n".join(sections)


def _section(title: str, found: CommandSpec, options) -> str:
    entries = [_line(option) for option in options]
    return "\n".join([f"## {title}", "", _filled(found.about), "", *(entries or ["It has no options of its own."]), ""])


def _line(option: Option) -> str:
    name = option.name.upper() if option.positional else shorten_options(f"--{option.name}")
    default = "" if option.default in (None, "") else f"; default {format_default(option.default)}"
    about = f": {option.about}" if option.about else ""
    return _filled(f"- `{name}` ({format_kind(option)}{default}){about}" + "." * (not about.endswith(".")), "  ")


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    arguments.LISTED.write_text(contents(), "utf-8")
    arguments.clear_specs_cache()
    PAGE.write_text(page())
