"""Write what the package says of options without importing torch, and options.md, a page for people.

python docs/make_options.py

``src/patchloom/options.json`` comes from signatures and docstrings; the command line, its --help and options.md from
that. Tests refuse both files when they are out of date.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from patchloom import signatures
from patchloom.bench import bench
from patchloom.check import check
from patchloom.compare.verb import compare
from patchloom.data import BUILTIN
from patchloom.embed.verb import embed
from patchloom.evaluate import EvalSettings, evaluate
from patchloom.evaluate.protocols import PROTOCOLS, protocol_of
from patchloom.export import export
from patchloom.look.together import curves
from patchloom.look.verb import look
from patchloom.predict import predict
from patchloom.report.verb import report
from patchloom.runs.settings import Settings
from patchloom.signatures import Listed, Option, as_json, listed
from patchloom.tasks import TASKS, task_class, usual_task
from patchloom.train.pretrain import pretrain
from patchloom.typos import short
from patchloom.usage import kind_of, plainly
from patchloom.verbs import of_evaluate, of_pretrain, of_task, of_verb

PAGE = Path(__file__).with_name("options.md")
CALLS = {
    "compare": compare,
    "look": look,
    "look curves": curves,
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
    training = listed(pretrain, skip={"data", "task", "out"})
    settings = listed(Settings, skip={"data", "task", "model", "img_size"})
    measuring = listed(evaluate, skip={"protocol", "run", "data"})
    common = listed(EvalSettings)
    verbs = {
        "check": listed(check),
        "pretrain": Listed(training.about, (*training.options, *settings.options)),
        "evaluate": Listed(measuring.about, (*measuring.options, *common.options)),
        **{verb: listed(CALLS[verb]) for verb in CALLS if verb != "check"},
    }
    tasks = {entry.path: listed(task_class(name), skip={"encoder"}) for name, entry in TASKS.items()}
    given = {"run", "data", "settings", "count"}
    protocols = {name: listed(protocol_of(name)[0], skip=given) for name in PROTOCOLS}
    parts = {"verbs": verbs, "tasks": tasks, "protocols": protocols}
    return as_json(parts, {"builtin": BUILTIN})


def page() -> str:
    """The whole of options.md."""
    first = of_pretrain(usual_task(None)[0])
    shared = [option for option in first.options if option.name == "task.name" or option.name[:5] != "task."]
    sections = [_ABOUT, _section("pretrain", first, shared)]
    for name in TASKS:
        found = of_task(name)
        options = [option._replace(name=f"task.{option.name}") for option in found.options]
        sections.append(_section(f"Options of {name}", found, options))
    common = of_evaluate(None)
    sections.append(_section("evaluate", common, common.options))
    seen: dict[str, dict[str, Option]] = {}
    for name in PROTOCOLS:
        found = of_evaluate(name)
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
    sections += [_section(verb, of_verb(verb), of_verb(verb).options) for verb in CALLS]
    return "\n".join(sections)


def _section(title: str, found: Listed, options) -> str:
    entries = [_line(option) for option in options]
    return "\n".join([f"## {title}", "", _filled(found.about), "", *(entries or ["It has no options of its own."]), ""])


def _line(option: Option) -> str:
    name = option.name.upper() if option.positional else short(f"--{option.name}")
    default = "" if option.default in (None, "") else f"; default {plainly(option.default)}"
    about = f": {option.about}" if option.about else ""
    return _filled(f"- `{name}` ({kind_of(option)}{default}){about}" + "." * (not about.endswith(".")), "  ")


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    signatures.LISTED.write_text(contents(), "utf-8")
    signatures.forget()
    PAGE.write_text(page())
