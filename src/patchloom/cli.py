"""The command line: ``patchloom VERB ...``, a table of verbs, words as in Python.

Words are read before the verb is imported: neither --help nor a slip of the keyboard shall wait for torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from patchloom.arguments import CommandSpec, Option, from_source, shorten_options
from patchloom.display import Displayable, StatusMessage, TextTable, Verbatim, is_first, json_value
from patchloom.errors import AlreadyReported, PatchloomError, Stopped, closest_word, listing
from patchloom.options import (
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

# Pages of ``--help``: examples, then options by groups; the rarer ones by name alone, until all are asked for.


HELP_EXAMPLES: dict[str, list[tuple[str, str]]] = {
    "": [
        ("patchloom check photos/", "looks at your images"),
        ("patchloom pretrain photos/", "trains on them"),
        ("patchloom evaluate knn runs/photos-mae labelled/", "what it learnt"),
        ("patchloom pretrain shapes", "built-in images, offline"),
    ],
    "check": [
        ("patchloom check photos/", "reads all, and times a few steps"),
        ("patchloom check photos/ --images 1000", "a quick look at many"),
    ],
    "pretrain": [
        ("patchloom pretrain photos/", "the rest is chosen for you"),
        ("patchloom pretrain photos/ --task mae --epochs 50", "as you say"),
        ("patchloom pretrain photos/ --init timm:vit_tiny_patch16_224", ""),
    ],
    "evaluate": [
        ("patchloom evaluate knn runs/photos-mae labelled/", "seconds"),
        ("patchloom evaluate linear runs/photos-mae labelled/", "a linear layer"),
        ("patchloom evaluate finetune runs/photos-mae labelled/", "all layers"),
        ("patchloom evaluate segment runs/photos-mae frames/", "label maps"),
        ("patchloom evaluate finetune --help", "its options"),
    ],
    "compare": [
        ("patchloom compare photos/ --tasks mae,droppos,mp3 --minutes 20", ""),
        ("patchloom compare photos/ --labels labelled/ --seeds 3", "by labels"),
        ("patchloom compare photos/ --dry_run", "what it would take"),
    ],
    "embed": [
        ("patchloom embed runs/photos-mae photos/ --to photos.parquet", ""),
        ("patchloom embed runs/photos-mae photos/ --to photos.npz --near a.jpg", ""),
        ("patchloom embed runs/photos-mae photos/ --to vectors/ --devices 4", ""),
    ],
    "predict": [
        ("patchloom predict model.safetensors photos/", "label maps, or COCO JSON"),
        ("patchloom predict model.safetensors photos/ --pictures all", ""),
    ],
    "look": [
        ("patchloom look runs/photos-mae", "of its own images"),
        ("patchloom look runs/photos-mae others/ --images 4", "of others"),
        ("patchloom look runs/photos-mae --what attention,features", "what it sees"),
        ("patchloom look curves runs/photos-mae runs/photos-restore", "their losses"),
    ],
    "look curves": [
        ("patchloom look curves runs/photos-mae runs/photos-restore", "losses"),
        ("patchloom look curves runs/* --against epochs", "results"),
    ],
    "report": [
        ("patchloom report runs/photos-mae", "writes report.html into the run"),
        ("patchloom report runs/photos-mae runs/photos-restore", "of both"),
    ],
    "export": [
        ("patchloom export runs/photos-mae", "weights, and code that uses them"),
        ("patchloom export runs/photos-mae --to hf --push me/photos-mae", ""),
        ("patchloom export runs/photos-mae --to onnx --fp16", "for onnxruntime"),
    ],
    "bench": [
        ("patchloom bench photos/ --tasks mae,droppos", "before a long run"),
        ("patchloom bench --model vit_small_patch16_224 --img_size 224", ""),
    ],
    "tasks": [("patchloom tasks", "")],
    "recipes": [("patchloom recipes", "a line each"), ("patchloom recipes mae-vit-b", "all of one")],
}
# an option that stands in no group comes last, under the name of what it belongs to
_GROUPS = {
    "data": "images max_train labels few per_class ignore masks img_size size side scale crop_scale flip color "
    "held_out knn_k knn_gallery group channels normalization cache seconds rate features bins words shift noise_share "
    "noise_volume",
    "model": "model head heads head_width window patch_size positions init from_run train_blocks",
    "task": "recipe task tasks beside",
    "training": "epochs minutes samples steps batch_size accumulate blr lr decay weight_decay momentum betas "
    "layer_decay warmup_epochs updates warmup_updates warmup_lr halve_every warmup_steps clip drop_path auxiliary "
    "validation patience log dropout smoothing mixup cutmix randaugment randaugment_std erasing repeats ema "
    "seed split_seed seeds",
    "machine": "parallel device devices strategy precision teacher_precision attention kernels compile "
    "checkpointing threads workers",
}
_RARE = {
    *"accumulate weight_decay warmup_epochs clip crop_scale normalization cache channels positions".split(),
    *"strategy precision teacher_precision attention kernels compile checkpointing threads".split(),
    *"betas layer_decay drop_path smoothing mixup cutmix randaugment randaugment_std erasing repeats ema".split(),
    *"knn_k knn_gallery".split(),
    *"seconds rate features bins halve_every updates warmup_updates warmup_lr dropout noise_share noise_volume".split(),
    *"lr momentum placeholder ratio head_on warmup_steps decay auxiliary head_width color scale".split(),
}
_HELP = ("-h", "--help", "--help=all", "--help-all", "--help_all")
_COLUMN = 30  # where the explanations begin
_FEW = 6  # options that need no groups
_FORMS = [
    ("photos/", "a folder of images; folders in it are classes, train/ and test/ splits"),
    ("recordings/", "the same of recordings: WAV, FLAC, Ogg, MP3"),
    ("one/ two/", "several of these, for check, pretrain and evaluate"),
    ("'a/**/*.jpg'", "a pattern of paths, in quotes"),
    ("list.txt", "a text file with the path of an image in each line"),
    ("table.csv", "a table with a column of paths, and labels if you have them; or .tsv"),
    ("'shards-*.tar'", "shards (WebDataset), here or at an address such as s3://..., or pipe:COMMAND"),
    ("hf:NAME", "a data set of Hugging Face, or hf:FOLDER for one on this machine"),
]


def overview() -> str:
    """What ``patchloom --help`` prints."""
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
            *wrap_to_page("patchloom VERB --help tells the options; --debug shows where an error came from."),
        ]
    )


def help_page(verb: str, words: Sequence[str]) -> str:
    """What ``patchloom VERB WORDS --help`` prints; with ``all`` behind it, every option is explained."""
    asked = join_values([word for word in words if word not in (*_HELP, "all")])
    if verb == "look" and asked[:1] == ["curves"]:
        verb, asked = "look curves", asked[1:]
    taken, prog, title = _taken(verb, asked)
    places = [option for option in taken.options if option.positional]
    named = [option for option in taken.options if not option.positional]
    full, width = not {"all", *_HELP[2:]}.isdisjoint(words), page_width()
    told = [option for option in named if full or not _rare(option, last_value(asked, "--task") is not None)]
    if len(named) - len(told) <= 2:
        told = named
    usage = " ".join([f"usage: {prog}", *(_place(option) for option in places), "[--OPTION VALUE ...]" * bool(named)])
    lines = [*wrap_to_page(usage), "", *wrap_to_page(taken.about), "", *_examples(verb, title, width), ""]
    if places:
        lines += [*(line for place in places for line in _explained(place, width)), ""]
    if verb == "evaluate" and not title:
        lines += ["PROTOCOL is one of"]
        lines += [line for name in protocols() for line in _row(f"  {name}", evaluate_spec(name).about, 24, width)] + [
            ""
        ]
    groups = _grouped(told, title) if len(told) > _FEW else {"options": told} if told else {}
    for group, options in groups.items():
        lines += [group, *(line for option in options for line in _explained(option, width))]
        if group == "task" and verb == "pretrain" and not any(map(_of_task, told)):
            lines += _row(
                "", f"Each has its own options: patchloom pretrain --task {usual_task(None)[0]} --help", _COLUMN, width
            )
        lines.append("")
    lines += [*_row("  --json", "one JSON document (docs/json.md)", _COLUMN, width), ""]
    if any("auto" in format_kind(option) for option in told):
        lines += [*wrap_to_page("Leave out what takes auto, and it is chosen for you."), ""]
    rest = [shorten_options(f"--{option.name}") for option in named if option not in told and not _of_task(option)]
    if rest:
        lines += [*wrap_to_page(f"{len(rest)} more, explained by {prog} --help all: {', '.join(rest)}."), ""]
    if any(place.name == "data" for place in places):
        lines += [
            "DATA is one of",
            *(line for form, what in _forms() for line in _row(f"  {form}", what, 18, width)),
            "",
        ]
    return "\n".join(lines[:-1])


def _taken(verb: str, words: Sequence[str]) -> tuple[CommandSpec, str, str]:
    """What the verb takes, how it is called, and the title of options that stand in no group."""
    prog = f"patchloom {verb}"
    if verb in ("tasks", "recipes"):
        own = Option("name", str | None, None, "of one, to show all of it", positional=True)
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
    how = f"or {listing(others)}: fetched by torchvision, or from where {fetched}@FOLDER says"
    return [*_FORMS, (f"{first}, {second}", "built-in, offline"), (fetched, how)]


def _explained(option: Option, width: int) -> list[str]:
    if option.positional:
        return _row(f"  {option.name.upper()}", _about(option), 12, width)
    return _row(f"  {shorten_options(f'--{option.name}')} {format_kind(option)}", _about(option), _COLUMN, width)


def _about(option: Option) -> str:
    text = option.about.replace("``", "").rstrip(".")
    return text if option.default in (None, "", "auto") else f"{text} (default {format_default(option.default)})"


def _place(option: Option) -> str:
    return option.name.upper() if option.required else f"[{option.name.upper()}]"


def _examples(verb: str, title: str, width: int) -> list[str]:
    """Those of the verb, or of one of its protocols."""
    found = HELP_EXAMPLES[verb]
    if title in protocols():
        places = "runs/recordings-mp3 speech_commands/" if title == "keywords" else "runs/photos-mae labelled/"
        command = f"patchloom evaluate {title} {places}"
        found = [one for one in found if one[0] == command] or [(command, "")]
    column = 4 + max((len(command) for command, why in found if why), default=0)
    return [line for command, why in found for line in _row(f"  {command}", why, column, width)]


def _row(left: str, right: str, column: int, width: int) -> list[str]:
    """Two columns; what is too wide for the left one has a line of its own."""
    lines = textwrap.wrap(right, max(20, width - column), break_on_hyphens=False) or [""]
    indented = [" " * column + line for line in lines]
    if len(left) + 2 > column:
        lefts = textwrap.wrap(left, width, subsequent_indent=" " * 6, break_on_hyphens=False, break_long_words=False)
        return [*lefts, *indented] if right else lefts
    return [(left.ljust(column) + lines[0]).rstrip(), *indented[1:]]


def wrap_to_page(text: str) -> list[str]:
    """Lines of a text, as wide as the page."""
    return textwrap.wrap(text, page_width(), break_on_hyphens=False, break_long_words=False)


def page_width() -> int:
    """Letters of a line: those of the terminal, within what can be read."""
    return max(60, min(100, shutil.get_terminal_size((80, 24)).columns))


def format_kind(option: Option) -> str:
    """What an option takes, in as few letters as go beside its name."""
    return option.kind or _kind(option.hint)


def _kind(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        names = dict.fromkeys(name for one in inside if one is not type(None) for name in _names(one))
        # of kinds that overlap one is enough, and a list is typed as a text
        if "text" in names:
            names = dict.fromkeys(name for name in names if not name.startswith("list"))
        return listing(name for name in names if name != "text" or "path" not in names)
    return listing(_names(hint))


def _names(hint: Any) -> list[str]:
    """Of what a hint without alternatives takes, or its alternatives."""
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
    """A default as it would be typed."""
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


# how others call a verb, and what is a part of one
_MEANT = {
    **dict.fromkeys(("train", "fit", "run", "pre-train", "resume", "continue"), "pretrain"),
    **dict.fromkeys(("eval", "test", "score", "measure", "probe", "validate"), "evaluate"),
    **dict.fromkeys(("draw", "show", "view", "plot", "visualize", "visualise", "pictures"), "look"),
    **dict.fromkeys(("save", "convert"), "export"),
    **dict.fromkeys(("versus", "vs", "choose", "select"), "compare"),
    **dict.fromkeys(("html", "page", "summary", "summarize", "summarise"), "report"),
    **dict.fromkeys(("features", "embeddings", "embedding", "encode", "extract", "vectors", "similar"), "embed"),
    **dict.fromkeys(("infer", "inference", "apply", "label"), "predict"),
    **dict.fromkeys(("time", "benchmark", "profile"), "bench"),
    **dict.fromkeys(("list", "task", "ls"), "tasks"),
    **dict.fromkeys(("info", "inspect", "stats", "propose"), "check"),
}
_ON_FEWER = (
    "What you give beside --recipe wins. An update has {:,} images: where fewer fit in a step, --batch_size {} makes "
    "several steps of an update, and --accumulate follows."
)
_ON_RECIPES = (
    "patchloom pretrain photos/ --recipe NAME  trains by one",
    "patchloom recipes NAME                    tells all of it",
)
_HINT_TASKS = (
    "nano, ViT-S: the time of a step over that of mae, with 96 pixels and patches of 8, and with 224 and 16. It "
    "depends on sizes and machine: patchloom bench photos/ measures yours. patchloom pretrain --task NAME --help "
    "tells a task's options."
)


def _explain(error: Exception) -> tuple[int, str]:
    """The exit code after an error, and a sentence on what was wrong."""
    problem = error if isinstance(error, PatchloomError) else disk_error(error) or _too_little_memory(error)
    problem = problem or fault_of(error)
    if problem is None:
        said = f"unexpected {type(error).__name__}: {error}. Run again with --debug and report what it shows."
        return 1, said
    return 130 if isinstance(problem, Stopped) else 2, str(problem)


def _too_little_memory(error: Exception) -> PatchloomError | None:
    if "torch" not in sys.modules:
        return None
    from patchloom.system.hardware import memory_shortage

    need = memory_shortage(error)
    if not need:
        return None
    return PatchloomError(f"this needs more memory than there is ({need}): lower --batch_size, or free memory")


def _no_verb(word: str, rest: Sequence[str]) -> str:
    """The sentence about a first word that is no verb."""
    known = f"The verbs are {listing(VERBS, 'and')}; patchloom --help tells what they do."
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
    """Refuse a path of data that is not there before torch is loaded; of all else `open_data` decides."""
    if isinstance(data, str) and "/" in data and not any(sign in data for sign in "*?[]{}:@,|"):
        path = os.path.expanduser(data)
        if not os.path.lexists(path):
            beside = similar(Path(path))
            then = f"did you mean {beside}?" if beside else "give a folder, or a text file of paths"
            raise PatchloomError(f"{data} does not exist: {then}")


def _call(verb: str, words: list[str]) -> Any:
    """Do what the words after a verb say, and return its result."""
    if verb == "look" and words[:1] == ["curves"]:
        verb, words = "look curves", words[1:]
    given = parse_call(verb, words)
    _refuse_missing(given.get("data"))
    module, _, name = SIGNATURES[verb][0].rpartition(".")
    with StatusMessage("starting"):  # torch is loaded, which takes seconds, and on a busy machine many
        function = getattr(import_module(module), name)
    return function(**given)


@dataclass(frozen=True, repr=False)
class Catalog(Displayable):
    """What is known without a run: tasks, recipes or the version, as it is shown and as values."""

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
            "patchloom tasks takes no arguments; patchloom pretrain --task NAME --help tells its options"
        )
    rows = [("task", "paper", "withheld from the encoder", "asked of it", "nano", "ViT-S")]
    for name, entry in TASKS.items():
        small, large = ("", "") if entry.cost is None else (f"×{cost:.1f}" for cost in entry.cost)
        rows.append((name, entry.paper, entry.withheld, entry.asked, small, large))
    found = [{"task": name, **entry._asdict(), "cost": entry.cost and [*entry.cost]} for name, entry in TASKS.items()]
    return Catalog([TextTable.of(rows, texts=(1, 2, 3)), "", _HINT_TASKS], {"tasks": found})


def _recipes(words: list[str]) -> Catalog:
    if len(words) > 1 or any(word.startswith("-") for word in words):
        raise PatchloomError("patchloom recipes takes the name of one recipe, or nothing: it lists all then")
    found = [recipe_named(name) for name in words or recipe_names()]
    values = {"recipes": [asdict(one) for one in found]}
    if words:
        one, width = found[0], page_width()
        lines = [f"{one.name}: {one.row}, {one.epochs:,} epochs", ""]
        lines += [line for name, text in one.rows() for line in _row(name, text, 15, width)]
        lines += ["", f"patchloom pretrain DATA --recipe {one.name}", "is short for", *one.command("DATA", width), ""]
        return Catalog([*map(Verbatim, lines), _ON_FEWER.format(one.batch, min(256, one.batch // 4))], values)
    rows = [("recipe", "paper", "epochs", "published")]
    rows += [(one.name, one.source, f"{one.epochs:>6,}", one.score().partition(",")[0]) for one in found]
    run = [one.name for one in found if one.measured]
    said = f"Measured here: {listing(run, 'and')}." if run else "They have not been run here."
    said = f"Rows of the papers' tables, with the score that is published. {said}"
    return Catalog([TextTable.of(rows, texts=[1]), "", said, "", *map(Verbatim, _ON_RECIPES)], values)


# what does a verb's work: the words after it are read, and its result is returned
COMMANDS: dict[str, Callable[[list[str]], Any]] = {verb: partial(_call, verb) for verb in VERBS}
COMMANDS |= {"tasks": _tasks, "recipes": _recipes}


def _run(words: list[str]) -> Any:
    """Run one command, and return its result, or the lines of a page of help."""
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
    return help_page(verb, rest) if any(word in _HELP for word in rest) else COMMANDS[verb](rest)


def _print_document(verb: str, **content: Any) -> None:
    """Print the document of ``--json``, which docs/json.schema.json describes."""
    from patchloom.version import __version__

    print(json.dumps({"verb": verb, "version": __version__, **content}, indent=2, allow_nan=False), flush=True)


def _values(result: Any) -> Any:
    """A result for JSON; some verbs return the files that they wrote."""
    if isinstance(result, Displayable):
        return json_value(result.plain())
    return {"files": json_value(result if isinstance(result, list) else [result])}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 done, 2 the user can mend it, 1 patchloom is at fault, 130 stopped, by whichever signal.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug, as_json = "--debug" in words, "--json" in words
    words = [word for word in words if word not in ("--debug", "--json")]
    helped = words[:1] in ([], ["help"]) or not {*_HELP}.isdisjoint(words)
    as_json = as_json and not helped
    verb = "version" if words[:1] == ["-V"] else words[0].lstrip("-") if words else ""
    with StopAtOnce() as stop:
        try:
            # what is said on the way is no part of the document
            with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
                result = _run(words)
            if is_first() and as_json:
                _print_document(verb, result=_values(result))
            elif is_first() and verb != "pretrain" or helped:  # a run tells all of it on its way
                print(*result if isinstance(result, list) else [result], sep="\n", flush=True)
            return 0
        except BaseException as error:
            # what a library makes of Ctrl-C, or of another process's end by the same signal, is no error of its own
            stopped = isinstance(error, KeyboardInterrupt) or (stop.asked and not isinstance(error, Stopped))
            if not stopped and not isinstance(error, Exception):
                raise
            if not stopped and isinstance(error, BrokenPipeError):  # the reader went away, as `| head` does
                discard_output()
                return 0
            code, said = _explain(error) if isinstance(error, Exception) and not stopped else (130, "stopped.")
            if as_json and is_first():
                _print_document(verb, error={"message": said, "exit_code": 1 if debug and not stopped else code})
            if debug and not stopped:
                raise
            # of several processes, the first one says that they were stopped, and each what is wrong with itself
            if not isinstance(error, AlreadyReported) and (is_first() or not stopped):
                with contextlib.suppress(OSError):  # a terminal that was closed
                    # names and values that a user gave may hold line breaks
                    print(f"patchloom: {' '.join(said.splitlines())}", file=sys.stderr)
            return code


if __name__ == "__main__":
    sys.exit(main())
