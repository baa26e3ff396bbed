"""Write options.md: every option of every verb, from the parsers whose --help shows the same.

python docs/make_options.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from jsonargparse import ArgumentParser

from patchloom.bench import bench
from patchloom.check import check
from patchloom.evaluate import PROTOCOLS
from patchloom.export import export
from patchloom.hints import in_words
from patchloom.look.pictures import look
from patchloom.options import call_parser, evaluate_parser, pretrain_parser, short
from patchloom.runs.settings import DEFAULT_TASK
from patchloom.tasks import TASKS, task_class

PAGE = Path(__file__).with_name("options.md")
CALLS = {"look": look, "export": export, "bench": bench, "check": check}
_ABOUT = """\
# Options

Every option of every verb, with what it takes and its default. This page is written by `python docs/make_options.py`
from the signatures and docstrings, which `--help` shows, too; a test refuses it when it is out of date. How to put
the tasks' options to use is in [Variants](variants.md), what `auto` becomes in [Pre-train](pretrain.md#auto).

In Python, an option has the same name without dashes; `--task.NAME` and `--model.NAME` are keys beside `name` in the
dicts `task` and `model`, and so they are in a YAML file for `--config`. `--debug`, with any verb, shows the traceback
of an error.
"""


def page() -> str:
    """The whole of options.md."""
    first = pretrain_parser(DEFAULT_TASK)
    sections = [_ABOUT, _section("pretrain", first, lambda option: not option.startswith("--task."))]
    for name in TASKS:
        about = (task_class(name).__doc__ or "").splitlines()[0]
        parser = pretrain_parser(name)
        sections.append(_section(f"Options of {name}", parser, lambda option: option.startswith("--task."), about))
    sections.append(_section("evaluate", evaluate_parser(None)))
    seen = {"evaluate": dict(_entries(evaluate_parser(None)))}
    for name in PROTOCOLS:
        parser = evaluate_parser(name)
        own = dict(entry for entry in _entries(parser) if entry not in seen["evaluate"].items())
        section = _section(f"evaluate {name}", parser, own.__contains__)
        for other, entries in list(seen.items())[1:]:
            same = [option for option, text in own.items() if entries.get(option) == text]
            if len(same) > 5:  # those of a recipe
                section = _section(f"evaluate {name}", parser, (own.keys() - same).__contains__)
                names = ", ".join(f"`{option}`" for option in same)
                section += "\n" + _filled(f"As for [{other}](#evaluate-{other}): {names}.") + "\n"
                break
        seen[name] = own
        sections.append(section)
    sections += [_section(verb, call_parser(verb, function)) for verb, function in CALLS.items()]
    return "\n".join(sections)


def _section(title: str, parser: ArgumentParser, wanted=lambda option: True, about: str = "") -> str:
    entries = [text for option, text in _entries(parser) if wanted(option)]
    about = _filled(about or parser.description)
    return "\n".join([f"## {title}", "", about, "", *(entries or ["It has no options of its own."]), ""])


def _entries(parser: ArgumentParser) -> list[tuple[str, str]]:
    """Each option's name, and its line."""
    found = []
    for action in parser._actions:
        # a list has a second name, which ends in +
        name = next((one for one in action.option_strings if one[-1] != "+"), action.dest.upper())
        if name in ("-h", "--print_config") or action.help == "==SUPPRESS==":
            continue
        name = short(name)
        kind = in_words(getattr(action, "_typehint", None) or action.type)
        default = str(action.default).lower() if isinstance(action.default, bool) else action.default
        ends = "" if action.required or default in (None, "") else f"; default {default}"
        about = f": {action.help}" if action.help else ""
        line = f"- `{name}` ({kind}{ends}){about}" + "." * (not about.endswith("."))
        found.append((name, _filled(line, "  ")))
    return found


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page())
