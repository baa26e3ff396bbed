"""Help pages: examples, then options by group. Rare options are only named, unless the user types ``--help all``."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from patchloom.data.sources.names import BUILTIN
from patchloom.errors import describe_type, listing, shorten_options
from patchloom.options.declare import DATA, MACHINE, MODEL, TASK, TRAINING, CommandSpec, Option
from patchloom.options.parse import (
    VERBS,
    evaluate_spec,
    join_values,
    last_value,
    pretrain_spec,
    protocols,
    task_spec,
    verb_spec,
)
from patchloom.tasks import usual_task

HELP_EXAMPLES: dict[str, list[tuple[str, str]]] = {
    "": [
        ("patchloom check photos/", "look at your images"),
        ("patchloom pretrain photos/", "train on them"),
        ("patchloom evaluate knn runs/photos-mae labelled/", "see what it learnt"),
        ("patchloom pretrain shapes", "built-in images"),
    ],
    "check": [
        ("patchloom check photos/", "read all, and time a few steps"),
        ("patchloom check photos/ --images 1000", "read a random sample"),
    ],
    "pretrain": [
        ("patchloom pretrain photos/", "defaults for all options"),
        ("patchloom pretrain photos/ --task mae --epochs 50", "your choice"),
        ("patchloom pretrain photos/ --init timm:vit_tiny_patch16_224", "from public weights"),
    ],
    "evaluate": [
        ("patchloom evaluate knn runs/photos-mae labelled/", "in seconds"),
        ("patchloom evaluate linear runs/photos-mae labelled/", "a linear layer"),
        ("patchloom evaluate finetune runs/photos-mae labelled/", "all layers"),
        ("patchloom evaluate segment runs/photos-mae frames/", "label maps"),
        ("patchloom evaluate finetune --help", "options of one"),
    ],
    "compare": [
        ("patchloom compare photos/ --tasks mae,droppos,mp3 --minutes 20", "20 minutes each"),
        ("patchloom compare photos/ --labels labelled/ --seeds 3", "other labels"),
        ("patchloom compare photos/ --dry-run", "only the plan"),
        ("patchloom compare runs/photos-mae runs/photos-droppos", "evaluated runs"),
    ],
    "embed": [
        ("patchloom embed runs/photos-mae photos/ --to photos.parquet", "one table"),
        ("patchloom embed runs/photos-mae photos/ --to photos.npz --near a.jpg", "similar images"),
        ("patchloom embed runs/photos-mae photos/ --to vectors/ --devices 4", "on four devices"),
    ],
    "curate": [
        ("patchloom curate runs/photos-mae photos/", "100 to label, and what to leave out"),
        ("patchloom curate timm:vit_small_patch14_dinov2.lvd142m photos/ --count 40", "by public weights"),
    ],
    "predict": [
        ("patchloom predict runs/photos-mae photos/", "with the model of a run"),
        ("patchloom predict model.safetensors photos/", "a table, label maps, or COCO JSON"),
        ("patchloom predict model.safetensors photos/ --pictures all", "draw every image"),
    ],
    "look": [
        ("patchloom look runs/photos-mae", "held-out images"),
        ("patchloom look runs/photos-mae others/ --images 4", "other images"),
        ("patchloom look runs/photos-mae --what attention,features", "what it sees"),
        ("patchloom look curves runs/photos-mae runs/photos-restore", "plot losses"),
    ],
    "look curves": [
        ("patchloom look curves runs/photos-mae runs/photos-restore", "plot losses"),
        ("patchloom look curves runs/* --against epochs", "plot results"),
    ],
    "report": [
        ("patchloom report runs/photos-mae", "report.html in the run"),
        ("patchloom report runs/photos-mae runs/photos-restore", "both on one page"),
    ],
    "results": [
        ("patchloom results runs/photos-mae", "with intervals and controls"),
        ("patchloom results runs/ --to table.csv", "all runs, for a spreadsheet"),
        ("patchloom results runs/ --to table.tex", "for a paper"),
    ],
    "export": [
        ("patchloom export runs/photos-mae", "weights and code for timm"),
        ("patchloom export runs/photos-mae --to hf --push me/photos-mae", "upload to the Hub"),
        ("patchloom export runs/photos-mae --to onnx --fp16", "for onnxruntime"),
    ],
    "distill": [
        ("patchloom distill runs/photos-mae photos/ --student convnext_atto", "a small CNN"),
        ("patchloom distill timm:vit_base_patch16_224.dino photos/ --student resnet18 --labels labelled/", "compared"),
    ],
    "bench": [
        ("patchloom bench photos/ --tasks mae,droppos", "before a long run"),
        ("patchloom bench --model vit_small_patch16_224 --img_size 224", "on built-in images"),
    ],
    "tasks": [("patchloom tasks", "")],
    "recipes": [("patchloom recipes", "list all"), ("patchloom recipes mae-vit-b", "show one")],
}
_GROUPS = (DATA, MODEL, TASK, TRAINING, MACHINE)  # options in no group come last, under the verb's own heading
HELP = ("-h", "--help", "--help=all", "--help-all", "--help_all")
_COLUMN = 30  # column of the descriptions
_LONG = 56  # an example longer than this has its explanation on the next line
_FEW = 6  # up to this number, options are not grouped
_FORMS = [
    ("photos/", "folder of images; subfolders are classes, train/ and test/ are splits"),
    ("recordings/", "folder of recordings: WAV, FLAC, Ogg, MP3"),
    ("one/ two/", "several sources, for check, pretrain and evaluate"),
    ("'a/**/*.jpg'", "pattern of paths, in quotes"),
    ("list.txt", "text file with one path per line"),
    ("table.csv", "table with a column of paths, and optionally labels; or .tsv"),
    ("wsi/@tile=256", "windows of slides and scenes; @slices=1 of stacks, @fps=1 of films, @bands=4+3+2 channels"),
    ("'shards-*.tar'", "WebDataset shards: files, URLs such as s3://..., or pipe:COMMAND"),
    ("hf:NAME", "data set on the Hugging Face Hub, or hf:FOLDER for a local one"),
    (", ".join(BUILTIN[:2]), "built-in images and sounds, offline"),
    (
        BUILTIN[2],
        f"or {listing(BUILTIN[3:])}: downloaded by torchvision, or read from a folder as {BUILTIN[2]}@FOLDER",
    ),
]


def overview() -> str:
    """Return the text of ``patchloom --help``."""
    width = page_width()
    return "\n".join(
        [
            "usage: patchloom VERB ...",
            "",
            *wrap_to_page(
                "Pre-train vision transformers on your own unlabelled images, and see honestly what they learnt."
            ),
            "",
            *_examples("", "", width),
            "",
            *(line for verb, what in VERBS.items() for line in two_columns(f"  {verb}", what, 12, width)),
            "",
            "Options of a verb:         patchloom VERB --help",
            "Traceback after an error:  --debug",
        ]
    )


def help_page(verb: str, words: Sequence[str]) -> str:
    """Return the text of ``patchloom VERB WORDS --help``; ``all`` among the words explains every option."""
    asked = join_values([word for word in words if word not in (*HELP, "all")])
    if verb == "look" and asked[:1] == ["curves"]:
        verb, asked = "look curves", asked[1:]
    taken, prog, title = _taken(verb, asked)
    places = [option for option in taken.options if option.positional]
    named = [option for option in taken.options if not option.positional]
    full, width = not {"all", *HELP[2:]}.isdisjoint(words), page_width()
    of_task = last_value(asked, "--task") is not None
    shown = [option for option in named if full or not option.rare or (of_task and _of_task(option))]
    if len(named) - len(shown) <= 2:
        shown = named
    forms = [one.name.upper() if one.required else f"[{one.name.upper()}]" for one in places]
    usage = " ".join([f"usage: {prog}", *forms, "[--OPTION VALUE ...]" * bool(named)])
    lines = [*wrap_to_page(usage), "", *wrap_to_page(taken.about), "", *_examples(verb, title, width), ""]
    if places:
        lines += [*(line for place in places for line in _explained(place, width)), ""]
    if verb == "evaluate" and not title:
        rows = (two_columns(f"  {name}", evaluate_spec(name).about, 24, width) for name in protocols())
        lines += ["PROTOCOL is one of", *(line for row in rows for line in row), ""]
    groups: dict[str, list[Option]] = {"options": shown}
    if len(shown) > _FEW:
        order = (title, *_GROUPS) if verb == "evaluate" and title else (*_GROUPS, title)
        groups = {group: [one for one in shown if (one.group or title) == group] for group in order}
    for group, options in groups.items():
        if not options:
            continue
        lines += [group or "other", *(line for option in options for line in _explained(option, width))]
        if group == "task" and verb == "pretrain" and not any(map(_of_task, shown)):
            lines += two_columns(
                "", f"Options of a task: patchloom pretrain --task {usual_task(None)[0]} --help", _COLUMN, width
            )
        lines.append("")
    lines += [*two_columns("  --json", "one JSON document (docs/reference/json.md)", _COLUMN, width), ""]
    if any("auto" in format_kind(option) for option in shown):
        lines += [*wrap_to_page("Options that take auto are chosen for you if you leave them out."), ""]
    rest = [shorten_options(f"--{option.name}") for option in named if option not in shown and not _of_task(option)]
    if rest:
        lines += [
            *wrap_to_page(f"{len(rest)} more, explained by {prog} --help all:"),
            *wrap_to_page(", ".join(rest)),
            "",
        ]
    if any(place.name == "data" for place in places):
        rows = (two_columns(f"  {form}", what, 18, width) for form, what in _FORMS)
        lines += ["DATA is one of", *(line for row in rows for line in row), ""]
    return "\n".join(lines[:-1])


def _taken(verb: str, words: Sequence[str]) -> tuple[CommandSpec, str, str]:
    """Return the options of a verb, the command that calls it, and the title of the options in no group."""
    prog = f"patchloom {verb}"
    if verb in ("tasks", "recipes"):
        own = Option("name", str | None, None, "name of a recipe, to show all its settings", positional=True)
        return CommandSpec(f"{VERBS[verb].capitalize()}.", (own,) if verb == "recipes" else ()), prog, ""
    if verb == "pretrain":
        task = last_value(words, "--task")
        found = pretrain_spec(task or usual_task(None)[0])
        return (found if task is None else found._replace(about=f"{task}: {task_spec(task).about}")), prog, "run"
    if verb != "evaluate":
        return verb_spec(verb), prog, "other"
    name = next((word for word in words if word.partition(":")[0] in protocols()), None)
    name = name or next((word for word in words if not word.startswith("-")), None)
    found = evaluate_spec(name)
    if name is None:
        return found, prog, ""
    plain = name.partition(":")[0]
    return found._replace(options=found.options[1:]), f"{prog} {name}", plain  # the protocol is named already


def _of_task(option: Option) -> bool:
    return option.name.startswith("task.") and option.name != "task.name"


def _explained(option: Option, width: int) -> list[str]:
    text, shown = option.about.replace("`", "").rstrip("."), format_default(option.default)
    if shown not in ("", "None", "auto"):
        text += f" (default {shown})"
    if option.positional:
        return two_columns(f"  {option.name.upper()}", text, 12, width)
    return two_columns(f"  {shorten_options(f'--{option.name}')} {format_kind(option)}", text, _COLUMN, width)


def _examples(verb: str, title: str, width: int) -> list[str]:
    """Return the lines with the examples of a verb, or of one of its protocols."""
    found = HELP_EXAMPLES[verb]
    if verb == "evaluate" and title:
        places = "runs/recordings-mp3 speech_commands/" if title == "keywords" else "runs/photos-mae labelled/"
        command = f"patchloom evaluate {title} {places}"
        found = [one for one in found if one[0] == command] or [(command, "")]
    column = 4 + max((len(command) for command, why in found if why and len(command) <= _LONG), default=_COLUMN)
    return [line for command, why in found for line in two_columns(f"  {command}", why, column, width)]


def two_columns(left: str, right: str, column: int, width: int) -> list[str]:
    """Return lines in two columns; a left text that is too wide has its own line."""
    lines = textwrap.wrap(right, max(20, width - column), break_on_hyphens=False) or [""]
    indented = [" " * column + line for line in lines]
    if len(left) + 2 > column:
        lefts = textwrap.wrap(left, width, subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False)
        return [*lefts, *indented] if right else lefts
    return [(left.ljust(column) + lines[0]).rstrip(), *indented[1:]]


def wrap_to_page(text: str) -> list[str]:
    return textwrap.wrap(text, page_width(), break_on_hyphens=False, break_long_words=False)


def page_width() -> int:
    """Return the number of characters per line: the terminal's width, within 60 to 100."""
    return max(60, min(100, shutil.get_terminal_size((80, 24)).columns))


def format_kind(option: Option) -> str:
    """Return the kind of value that an option takes, such as ``int or auto``."""
    return option.kind or describe_type(option.hint)


def format_default(default: Any) -> str:
    """Return a default as the user would type it."""
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
