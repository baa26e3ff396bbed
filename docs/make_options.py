"""Generator of reference/command-line.md from the declarations of options; a test fails if the page is out of date.

python docs/make_options.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from patchloom.errors import shorten_options
from patchloom.options.declare import CommandSpec, Option
from patchloom.options.help import format_default, format_kind
from patchloom.options.parse import evaluate_spec, pretrain_spec, protocols, task_spec, verb_spec
from patchloom.options.verbs import VERB_OPTIONS
from patchloom.tasks import TASKS, usual_task

PAGE = Path(__file__).parent / "reference" / "command-line.md"
_ABOUT = """\
# Command line

Every option of every verb, with its type and default. `python docs/make_options.py` writes this page from the same
declarations as `--help`; a test fails if it is out of date. [Task options](task-options.md) explains the
tasks' options with examples, and [auto](auto.md) how `auto` is resolved.

In Python, an option has the same name without dashes. `--task.NAME` and `--model.NAME` are keys beside `name` in the
dicts `task` and `model`, and in a YAML file for `--config`. Names may have hyphens, as in `--img-size`. True-or-false
options need no value: `--checkpointing` is `--checkpointing true`. With any verb, `--debug` shows the traceback of an
error, and `--json` prints the result as [one JSON document](json.md).
"""


def page() -> str:
    """Return the text of options.md."""
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
    for name in protocols():
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
    sections += [_section(verb, verb_spec(verb), verb_spec(verb).options) for verb in VERB_OPTIONS]
    return "\n".join(sections)


def _section(title: str, found: CommandSpec, options) -> str:
    entries = [_line(option) for option in options]
    return "\n".join([f"## {title}", "", _filled(found.about), "", *(entries or ["It has no further options."]), ""])


def _line(option: Option) -> str:
    name = option.name.upper() if option.positional else shorten_options(f"--{option.name}")
    shown = format_default(option.default)
    default = "" if shown in ("", "None") else f"; default {shown}"
    about = f": {option.about}" if option.about else ""
    return _filled(f"- `{name}` ({format_kind(option)}{default}){about}" + "." * (not about.endswith(".")), "  ")


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page())
