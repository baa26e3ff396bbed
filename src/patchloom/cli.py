"""Command line ``patchloom VERB ...``: help pages, dispatch to the verbs, error messages and exit codes.

Options are parsed before the verb is imported, so that --help and typing errors do not wait for torch.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import platform
import shutil
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from patchloom.arguments import CommandSpec, Option, from_source, shorten_options
from patchloom.display import (
    Displayable,
    Lines,
    StatusMessage,
    TextTable,
    Verbatim,
    check_launcher,
    is_first,
    json_value,
    print_line,
    truncate_middle,
    visible,
)
from patchloom.errors import AlreadyReported, PatchloomError, Stopped, closest_word, listing
from patchloom.options.parse import (
    MODEL_OPTIONS,
    SIGNATURES,
    VERBS,
    evaluate_spec,
    join_values,
    last_value,
    parse_call,
    pretrain_spec,
    protocols,
    task_spec,
    verb_spec,
)
from patchloom.recipes import recipe_named, recipe_names
from patchloom.system.files import disk_error, similar
from patchloom.system.signals import StopAtOnce, discard_output
from patchloom.tasks import TASKS, usual_task
from patchloom.tasks.custom import fault_of

# Help pages: examples, then options by group. Rare options are only named, unless the user types ``--help all``.


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
# options in no group come last, under the name of the verb's own group
_GROUPS = {
    "data": "images max_train labels few per_class ignore threshold masks img_size size side scale crop_scale "
    "test_crop flip color held_out knn_k knn_gallery group channels normalization cache seconds rate features bins "
    "words shift noise_share noise_volume",
    "model": "model network last_norm head heads head_width window patch_size positions initialization init from_run "
    "adapt train_blocks lora_rank lora_on heads_first anchor",
    "task": "recipe task tasks beside",
    "training": "epochs minutes samples steps batch_size accumulate blr lr least_rate decay weight_decay "
    "final_weight_decay momentum optimizer betas layer_decay "
    "warmup_epochs updates warmup_updates warmup_lr halve_every warmup_steps clip drop_path auxiliary loss "
    "class_weights rare_crops validation patience keep_every log "
    "dropout smoothing mixup cutmix randaugment randaugment_std "
    "erasing repeats fresh_norm train_positions ema seed split_seed seeds",
    "machine": "parallel device devices strategy precision teacher_precision attention kernels compile "
    "checkpointing threads workers crop_on",
}
_RARE = {
    *"accumulate weight_decay warmup_epochs clip crop_scale normalization cache crop_on channels positions".split(),
    *"strategy precision teacher_precision attention kernels compile checkpointing threads".split(),
    *"least_rate final_weight_decay keep_every".split(),
    *"betas layer_decay drop_path smoothing mixup cutmix randaugment randaugment_std erasing repeats ema".split(),
    *"fresh_norm train_positions".split(),
    *"initialization knn_k knn_gallery lora_rank lora_on heads_first".split(),
    *"seconds rate features bins halve_every updates warmup_updates warmup_lr dropout noise_share noise_volume".split(),
    *"test_crop last_norm optimizer".split(),
    *"lr momentum placeholder ratio head_on warmup_steps decay auxiliary head_width color scale".split(),
}
_HELP = ("-h", "--help", "--help=all", "--help-all", "--help_all")
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
    ("'shards-*.tar'", "WebDataset shards: files, URLs such as s3://..., or pipe:COMMAND"),
    ("hf:NAME", "data set on the Hugging Face Hub, or hf:FOLDER for a local one"),
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
            *(line for verb, what in VERBS.items() for line in _row(f"  {verb}", what, 12, width)),
            "",
            "Options of a verb:         patchloom VERB --help",
            "Traceback after an error:  --debug",
        ]
    )


def help_page(verb: str, words: Sequence[str]) -> str:
    """Return the text of ``patchloom VERB WORDS --help``; ``all`` among the words explains every option."""
    asked = join_values([word for word in words if word not in (*_HELP, "all")])
    if verb == "look" and asked[:1] == ["curves"]:
        verb, asked = "look curves", asked[1:]
    taken, prog, title = _taken(verb, asked)
    places = [option for option in taken.options if option.positional]
    named = [option for option in taken.options if not option.positional]
    full, width = not {"all", *_HELP[2:]}.isdisjoint(words), page_width()
    shown = [option for option in named if full or not _rare(option, last_value(asked, "--task") is not None)]
    if len(named) - len(shown) <= 2:
        shown = named
    usage = " ".join([f"usage: {prog}", *(_place(option) for option in places), "[--OPTION VALUE ...]" * bool(named)])
    lines = [*wrap_to_page(usage), "", *wrap_to_page(taken.about), "", *_examples(verb, title, width), ""]
    if places:
        lines += [*(line for place in places for line in _explained(place, width)), ""]
    if verb == "evaluate" and not title:
        lines += ["PROTOCOL is one of"]
        lines += [line for name in protocols() for line in _row(f"  {name}", evaluate_spec(name).about, 24, width)] + [
            ""
        ]
    groups = _grouped(shown, title) if len(shown) > _FEW else {"options": shown} if shown else {}
    for group, options in groups.items():
        lines += [group or "other", *(line for option in options for line in _explained(option, width))]
        if group == "task" and verb == "pretrain" and not any(map(_of_task, shown)):
            lines += _row(
                "", f"Options of a task: patchloom pretrain --task {usual_task(None)[0]} --help", _COLUMN, width
            )
        lines.append("")
    lines += [*_row("  --json", "one JSON document (docs/reference/json.md)", _COLUMN, width), ""]
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
        lines += [
            "DATA is one of",
            *(line for form, what in _forms() for line in _row(f"  {form}", what, 18, width)),
            "",
        ]
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


def _rare(option: Option, task_named: bool) -> bool:
    if _of_task(option):
        return not task_named
    return option.name in _RARE or option.name in [f"model.{name}" for name in MODEL_OPTIONS]


def _grouped(options: Iterable[Option], title: str) -> dict[str, list[Option]]:
    own = {title: list[Option]()}
    common: dict[str, list[Option]] = {group: [] for group in _GROUPS}
    found = own | common if title in protocols() else common | own
    order = {name: i for i, name in enumerate(" ".join(_GROUPS.values()).split())}
    for option in sorted(options, key=lambda option: order.get(_head(option), len(order))):
        group = next((group for group, names in _GROUPS.items() if _head(option) in names.split()), title)
        found[group].append(option)
    return {group: options for group, options in found.items() if options}


def _head(option: Option) -> str:
    return option.name.partition(".")[0]


def _forms() -> list[tuple[str, str]]:
    first, second, fetched, *others = from_source("patchloom.data.sources.builtin.BUILTIN")
    how = f"or {listing(others)}: downloaded by torchvision, or read from a folder as {fetched}@FOLDER"
    return [*_FORMS, (f"{first}, {second}", "built-in images and sounds, offline"), (fetched, how)]


def _explained(option: Option, width: int) -> list[str]:
    if option.positional:
        return _row(f"  {option.name.upper()}", _about(option), 12, width)
    return _row(f"  {shorten_options(f'--{option.name}')} {format_kind(option)}", _about(option), _COLUMN, width)


def _about(option: Option) -> str:
    text = option.about.replace("``", "").rstrip(".")
    shown = format_default(option.default)
    return text if shown in ("", "None", "auto") else f"{text} (default {shown})"


def _place(option: Option) -> str:
    return option.name.upper() if option.required else f"[{option.name.upper()}]"


def _examples(verb: str, title: str, width: int) -> list[str]:
    """Return the lines with the examples of a verb, or of one of its protocols."""
    found = HELP_EXAMPLES[verb]
    if title in protocols():
        places = "runs/recordings-mp3 speech_commands/" if title == "keywords" else "runs/photos-mae labelled/"
        command = f"patchloom evaluate {title} {places}"
        found = [one for one in found if one[0] == command] or [(command, "")]
    column = 4 + max((len(command) for command, why in found if why and len(command) <= _LONG), default=_COLUMN)
    return [line for command, why in found for line in _row(f"  {command}", why, column, width)]


def _row(left: str, right: str, column: int, width: int) -> list[str]:
    """Return lines in two columns; a left text that is too wide has its own line."""
    lines = textwrap.wrap(right, max(20, width - column), break_on_hyphens=False) or [""]
    indented = [" " * column + line for line in lines]
    if len(left) + 2 > column:
        lefts = textwrap.wrap(left, width, subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False)
        return [*lefts, *indented] if right else lefts
    return [(left.ljust(column) + lines[0]).rstrip(), *indented[1:]]


def wrap_to_page(text: str) -> list[str]:
    """Wrap a text to the width of the page."""
    return textwrap.wrap(text, page_width(), break_on_hyphens=False, break_long_words=False)


def page_width() -> int:
    """Return the number of characters per line: the terminal's width, within 60 to 100."""
    return max(60, min(100, shutil.get_terminal_size((80, 24)).columns))


def format_kind(option: Option) -> str:
    """Return the kind of value that an option takes, such as ``int or auto``."""
    return option.kind or _kind(option.hint)


def _kind(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        names = dict.fromkeys(name for one in inside if one is not type(None) for name in _names(one))
        # kinds overlap: a list is typed as text, and a path is text, too
        if "text" in names:
            names = dict.fromkeys(name for name in names if not name.startswith("list"))
        return listing(name for name in names if name != "text" or "path" not in names)
    return listing(_names(hint))


def _names(hint: Any) -> list[str]:
    """Return the kinds of values of a hint that is no union: one name, or those of its literals."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return list(map(str, inside))
    if inside == (int, int):
        return ["HxW"]
    if origin is not None:
        return ["{NAME: float, ...}" if origin is dict else f"list of {_kind(inside[0])}"]
    known = {int: ["int"], float: ["float"], bool: ["true", "false"], str: ["text"], Path: ["path"]}
    return known[hint]


def format_default(default: Any) -> str:
    """Return a default as the user would type it."""
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


# other names that users may type for a verb
_MEANT = {
    **dict.fromkeys(("train", "fit", "run", "pre-train", "resume", "continue"), "pretrain"),
    **dict.fromkeys(("eval", "test", "score", "measure", "probe", "validate"), "evaluate"),
    **dict.fromkeys(("draw", "show", "view", "plot", "visualize", "visualise", "pictures"), "look"),
    **dict.fromkeys(("save", "convert"), "export"),
    **dict.fromkeys(("versus", "vs", "choose", "select"), "compare"),
    **dict.fromkeys(("html", "page", "summary", "summarize", "summarise"), "report"),
    **dict.fromkeys(("table", "tables", "csv", "scores", "numbers", "result"), "results"),
    **dict.fromkeys(("features", "embeddings", "embedding", "encode", "extract", "vectors", "similar"), "embed"),
    **dict.fromkeys(("infer", "inference", "apply", "label"), "predict"),
    **dict.fromkeys(("time", "benchmark", "profile"), "bench"),
    **dict.fromkeys(("list", "task", "ls"), "tasks"),
    **dict.fromkeys(("info", "inspect", "stats", "propose"), "check"),
}
_ON_FEWER = (
    "Options that you give override the recipe. An update has {:,} images: if fewer fit in memory, --batch_size {} "
    "splits an update into several steps, and --accumulate follows."
)
_ON_RECIPES = (
    "patchloom pretrain photos/ --recipe NAME  trains with one",
    "patchloom recipes NAME                    shows all its settings",
)
_HINT_TASKS = (
    "nano, ViT-S: time of a step relative to mae, for nano at 96 pixels with patches of 8, and for ViT-S at 224 with "
    "patches of 16. It depends on sizes and machine: patchloom bench photos/ measures yours. Options of a task: "
    "patchloom pretrain --task NAME --help"
)


_LONGEST = 4000  # characters of an error message


def _explain(error: Exception) -> tuple[int, str]:
    """Return the exit code after an error, and the message."""
    problem = error if isinstance(error, PatchloomError) else disk_error(error) or _fault_of_torch(error)
    problem = problem or fault_of(error)
    if problem is None:
        return 1, f"unexpected {type(error).__name__}: {error}. Run again with --debug and report the traceback."
    return problem.exit_code, str(problem)


def _fault_of_torch(error: Exception) -> PatchloomError | None:
    """Return the message about too little memory or a lost reading process, if torch reports one."""
    if "torch" not in sys.modules:
        return None
    from patchloom.data.workers import lost_worker
    from patchloom.system.hardware import memory_shortage

    if lost := lost_worker(error):  # from a signal handler, so it may come outside of the training
        return lost
    need = memory_shortage(error)
    if not need:
        return None
    return PatchloomError(f"this needs more memory than is free ({need}): lower --batch_size, or free memory")


def _no_verb(word: str, rest: Sequence[str]) -> str:
    """Return the message about a first word that is no verb."""
    known = f"The verbs are {listing(VERBS, 'and')}; patchloom --help describes them."
    typed = " ".join([word, *rest])
    if word.startswith("-"):
        return f"{word} comes too early: begin with a verb, as in patchloom pretrain photos/ --epochs 50. {known}"
    if word in protocols():
        return f"{word} is a protocol of evaluation: did you mean patchloom evaluate {typed}?"
    if word in TASKS:
        return f"{word} is a task: did you mean patchloom pretrain photos/ --task {word}?"
    if word not in _MEANT and os.path.exists(word):
        return f"{word} is no verb: did you mean patchloom check {word}, or patchloom pretrain {word}?"
    near = _MEANT.get(word) or closest_word(word, VERBS)
    return f"there is no verb {word}{f'; did you mean {near}?' if near else '.'} {known}"


def _refuse_missing(data: object) -> None:
    """Raise if the data is a path that does not exist, before torch is loaded; `open_data` checks everything else."""
    if isinstance(data, str) and "/" in data and not any(sign in data for sign in "*?[]{}:@,|"):
        path = os.path.expanduser(data)
        if not os.path.lexists(path):
            beside = similar(Path(path))
            then = f"did you mean {beside}?" if beside else "give a folder, or a text file of paths"
            raise PatchloomError(f"{data} does not exist: {then}")


def _call(verb: str, words: list[str]) -> Any:
    """Call a verb with the words after it, and return its result."""
    if verb == "look" and words[:1] == ["curves"]:
        verb, words = "look curves", words[1:]
    given = parse_call(verb, words)
    _refuse_missing(given.get("data"))
    module, _, name = SIGNATURES[verb][0].rpartition(".")
    with StatusMessage("starting"):  # importing torch takes seconds
        function = getattr(_import(module), name)
        if "torch" in sys.modules:  # results does not need it
            _import("patchloom.system.waiting").sleep_when_busy()
    return function(**given)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pause garbage collection: it takes a fifth of the time of imports and of parsing, and finds nothing to free."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _import(name: str) -> types.ModuleType:
    """Import the module of a verb."""
    if name in sys.modules:
        return sys.modules[name]
    with _without_collection():
        module = import_module(name)
        gc.freeze()  # later collections need not search the million objects of torch and timm either
    return module


@dataclass(frozen=True, repr=False)
class Catalog(Displayable):
    """Tables and lines about tasks, recipes or the version, with their values for ``--json``."""

    shown: Sequence[str | TextTable]
    values: dict[str, Any]

    def parts(self, width: int) -> Sequence[str | TextTable]:
        """See `Displayable`."""
        return self.shown

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        return self.values


def _tasks(words: list[str]) -> Catalog:
    if words:
        raise PatchloomError(
            "patchloom tasks takes no arguments: patchloom pretrain --task NAME --help shows the options of a task"
        )
    rows = [("task", "paper", "withheld from the encoder", "asked of it", "nano", "ViT-S")]
    for name, entry in TASKS.items():
        small, large = ("", "") if entry.cost is None else (f"×{cost:.1f}" for cost in entry.cost)
        rows.append((name, entry.paper, entry.withheld, entry.asked, small, large))
    found = [{"task": name, **entry._asdict(), "cost": entry.cost and [*entry.cost]} for name, entry in TASKS.items()]
    return Catalog([TextTable.of(rows, texts=(1, 2, 3)), "", _HINT_TASKS], {"tasks": found})


def _recipes(words: list[str]) -> Catalog:
    if len(words) > 1 or any(word.startswith("-") for word in words):
        raise PatchloomError("patchloom recipes takes the name of one recipe, or nothing to list all")
    found = [recipe_named(name) for name in words or recipe_names()]
    values = {"recipes": [asdict(one) for one in found]}
    if words:
        one, width = found[0], page_width()
        lines = [f"{one.name}: {one.row}, {one.epochs:,} epochs", ""]
        lines += [line for name, text in one.rows() for line in _row(name, text, 15, width)]
        lines += ["", f"patchloom pretrain DATA --recipe {one.name}", "stands for", *one.command("DATA", width), ""]
        return Catalog([*map(Verbatim, lines), _ON_FEWER.format(one.batch, min(256, one.batch // 4))], values)
    rows = [("recipe", "paper", "epochs", "published")]
    rows += [(one.name, one.source, f"{one.epochs:>6,}", one.score().partition(",")[0]) for one in found]
    run = [one.name for one in found if one.measured]
    measured = f"Run with patchloom: {listing(run, 'and')}." if run else "No recipe was run with patchloom yet."
    about = f"Rows of the papers' tables, with their published scores. {measured}"
    return Catalog([TextTable.of(rows, texts=[1]), "", about, "", *map(Verbatim, _ON_RECIPES)], values)


# function of each verb: it takes the words after the verb, and returns the result
COMMANDS: dict[str, Callable[[list[str]], Any]] = {verb: partial(_call, verb) for verb in VERBS}
COMMANDS |= {"tasks": _tasks, "recipes": _recipes}


def _run(words: list[str]) -> Any:
    """Run one command, and return its result or a page of help."""
    verb, *rest = words or ["--help"]
    if verb == "help":
        verb, *rest = [*rest[:1], "--help", *rest[1:]] if rest and rest[0] != "all" else ["--help"]
    if verb in _HELP:
        return overview()
    if verb in ("--version", "-V", "version"):
        from patchloom.version import __version__

        return Catalog([__version__], {"version": __version__, "python": platform.python_version()})
    if verb not in VERBS:
        raise PatchloomError(_no_verb(verb, rest))
    if any(word.startswith("--json=") for word in rest):
        raise PatchloomError("--json takes no value: give it alone")
    if any(word in _HELP for word in rest):
        with _without_collection():
            return help_page(verb, rest)
    return COMMANDS[verb](rest)


def _print_document(verb: str, **content: Any) -> None:
    """Print the document of ``--json``, which docs/reference/json.schema.json describes."""
    from patchloom.version import __version__

    document = json.dumps({"verb": verb, "version": __version__, **content}, indent=2, allow_nan=False)
    print(document.replace("\x7f", "\\u007f"), flush=True)  # the only control character that JSON does not escape


def _values(result: Any) -> Any:
    """Return a result as JSON values; some verbs return the files that they wrote."""
    if isinstance(result, Displayable):
        return json_value(result.plain())
    return {"files": json_value(result if isinstance(result, list) else [result])}


def _text(one: Any, wants_help: bool) -> str:
    """Return a result or a part of it as text for the terminal; a refusal is left out, since an error follows."""
    if isinstance(one, Displayable):
        return one.text()
    return visible(Lines(one) if wants_help else str(one))


def _print_traceback(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    print_line(Lines("".join(traceback.format_exception(kind, error, trace)).rstrip()), sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 success, 2 an error that the user can correct, 75 a fault that may pass by itself, 1 a fault of
        patchloom, 130 stopped by a signal.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug, as_json = "--debug" in words, "--json" in words
    words = [word for word in words if word not in ("--debug", "--json")]
    wants_help = words[:1] in ([], ["help"]) or not {*_HELP}.isdisjoint(words)
    as_json = as_json and not wants_help
    verb = "version" if words[:1] == ["-V"] else words[0].lstrip("-") if words else ""
    for stream in (sys.stdout, sys.stderr):  # a terminal may lack letters, such as those of file names
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with StopAtOnce() as stop:
        try:
            check_launcher()
            # progress goes to stderr, so that stdout holds nothing but the document
            with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
                result = _run(words)
            refusal = result.refusal if isinstance(result, Displayable) else ""
            if is_first() and as_json and not refusal:
                _print_document(verb, result=_values(result))
            elif (is_first() and not as_json and verb != "pretrain") or wants_help:  # pretrain has printed it already
                shown = result if isinstance(result, list) else [result]
                print(*(_text(one, wants_help) for one in shown), sep="\n", flush=True)
            if refusal:
                raise PatchloomError(refusal)
            return 0
        except BaseException as error:
            # libraries turn Ctrl-C, or the end of another process by the same signal, into errors of their own
            stopped = isinstance(error, KeyboardInterrupt) or (stop.asked and not isinstance(error, Stopped))
            if not stopped and not isinstance(error, Exception):
                raise
            if not stopped and isinstance(error, BrokenPipeError):  # the reader went away, as `| head` does
                discard_output()
                return 0
            code, message = _explain(error) if isinstance(error, Exception) and not stopped else (130, "stopped.")
            message = truncate_middle(message, _LONGEST)
            if as_json and is_first():
                run = {"run": error.progress} if isinstance(error, Stopped) and error.progress else {}
                number = 1 if debug and not stopped else code
                _print_document(verb, error={"message": message, "exit_code": number, **run})
            if debug and not stopped:
                sys.excepthook = _print_traceback
                raise
            # every process reports its own error, but only the first one that they were stopped
            silent = isinstance(error, AlreadyReported) or ((stopped or isinstance(error, Stopped)) and not is_first())
            if not silent:
                with contextlib.suppress(OSError):  # a terminal that was closed
                    # names and values from the user may contain line breaks
                    print_line(f"patchloom: {' '.join(message.splitlines())}", sys.stderr)
            return code


if __name__ == "__main__":
    sys.exit(main())
