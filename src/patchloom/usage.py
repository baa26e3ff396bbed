"""Pages of ``--help``: examples, then options by groups; the rarer ones by name alone, until all are asked for."""

from __future__ import annotations

import shutil
import textwrap
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from patchloom.hints import listing
from patchloom.options import joined, last_value
from patchloom.signatures import Listed, Option, shipped_value
from patchloom.tasks import usual_task
from patchloom.typos import short
from patchloom.verbs import MODEL_OPTIONS, VERBS, of_evaluate, of_pretrain, of_task, of_verb, protocols

EXAMPLES: dict[str, list[tuple[str, str]]] = {
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
    "machine": "parallel device devices nodes strategy precision teacher_precision attention kernels compile "
    "checkpointing threads workers",
}
_RARE = {
    *"accumulate weight_decay warmup_epochs clip crop_scale normalization cache channels positions nodes".split(),
    *"strategy precision teacher_precision attention kernels compile checkpointing threads".split(),
    *"betas layer_decay drop_path smoothing mixup cutmix randaugment randaugment_std erasing repeats ema".split(),
    *"knn_k knn_gallery".split(),
    *"seconds rate features bins halve_every updates warmup_updates warmup_lr dropout noise_share noise_volume".split(),
    *"lr momentum placeholder ratio head_on warmup_steps decay auxiliary head_width color scale".split(),
}
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
            *filled("Pre-train vision transformers on your own unlabelled images, and see honestly what they learnt."),
            "",
            *_examples("", "", width),
            "",
            *(line for verb, what in VERBS.items() for line in _row(f"  {verb}", what, 12, width)),
            "",
            *filled("patchloom VERB --help tells the options; --debug shows where an error came from."),
        ]
    )


def page(verb: str, words: Sequence[str]) -> str:
    """What ``patchloom VERB WORDS --help`` prints; with ``all`` behind it, every option is explained.

    Raises:
        PatchloomError: the words name a task or a protocol that there is not.
    """
    flags = ("-h", "--help", "--help=all", "--help-all", "--help_all")
    asked = joined([word for word in words if word not in (*flags, "all")])
    if verb == "look" and asked[:1] == ["curves"]:
        verb, asked = "look curves", asked[1:]
    taken, prog, title = _taken(verb, asked)
    places = [option for option in taken.options if option.positional]
    named = [option for option in taken.options if not option.positional]
    full, width = not {"all", *flags[2:]}.isdisjoint(words), page_width()
    told = [option for option in named if full or not _rare(option, last_value(asked, "--task") is not None)]
    if len(named) - len(told) <= 2:
        told = named
    usage = " ".join([f"usage: {prog}", *(_place(option) for option in places), "[--OPTION VALUE ...]" * bool(named)])
    lines = [*filled(usage), "", *filled(taken.about), "", *_examples(verb, title, width), ""]
    if places:
        lines += [*(line for place in places for line in _explained(place, width)), ""]
    if verb == "evaluate" and not title:
        lines += ["PROTOCOL is one of"]
        lines += [line for name in protocols() for line in _row(f"  {name}", of_evaluate(name).about, 24, width)] + [""]
    groups = _grouped(told, title) if len(told) > _FEW else {"options": told} if told else {}
    for group, options in groups.items():
        lines += [group, *(line for option in options for line in _explained(option, width))]
        if group == "task" and verb == "pretrain" and not any(map(_of_task, told)):
            lines += _row(
                "", f"Each has its own options: patchloom pretrain --task {usual_task(None)[0]} --help", _COLUMN, width
            )
        lines.append("")
    if any("auto" in kind_of(option) for option in told):
        lines += [*filled("Leave out what takes auto, and it is chosen for you."), ""]
    rest = [short(f"--{option.name}") for option in named if option not in told and not _of_task(option)]
    if rest:
        lines += [*filled(f"{len(rest)} more, explained by {prog} --help all: {', '.join(rest)}."), ""]
    if any(place.name == "data" for place in places):
        lines += [
            "DATA is one of",
            *(line for form, what in _forms() for line in _row(f"  {form}", what, 18, width)),
            "",
        ]
    return "\n".join(lines[:-1])


def _taken(verb: str, words: Sequence[str]) -> tuple[Listed, str, str]:
    """What the verb takes, how it is called, and the title of options that stand in no group."""
    prog = f"patchloom {verb}"
    if verb in ("tasks", "recipes"):
        own = Option("name", str | None, None, "of one, to show all of it", positional=True)
        return Listed(f"{VERBS[verb].capitalize()}.", (own,) if verb == "recipes" else ()), prog, ""
    if verb == "pretrain":
        task = last_value(words, "--task")
        found = of_pretrain(task or usual_task(None)[0])
        return (found if task is None else found._replace(about=f"{task}: {of_task(task).about}")), prog, "run"
    if verb != "evaluate":
        return of_verb(verb), prog, "other"
    name = next((word for word in words if word.partition(":")[0] in protocols()), None)
    name = name or next((word for word in words if not word.startswith("-")), None)
    found = of_evaluate(name)
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
    first, second, fetched, *others = shipped_value("builtin")
    how = f"or {listing(others)}: fetched by torchvision, or from where {fetched}@FOLDER says"
    return [*_FORMS, (f"{first}, {second}", "built-in, offline"), (fetched, how)]


def _explained(option: Option, width: int) -> list[str]:
    if option.positional:
        return _row(f"  {option.name.upper()}", _about(option), 12, width)
    return _row(f"  {short(f'--{option.name}')} {kind_of(option)}", _about(option), _COLUMN, width)


def _about(option: Option) -> str:
    text = option.about.replace("``", "").rstrip(".")
    return text if option.default in (None, "", "auto") else f"{text} (default {plainly(option.default)})"


def _place(option: Option) -> str:
    return option.name.upper() if option.required else f"[{option.name.upper()}]"


def _examples(verb: str, title: str, width: int) -> list[str]:
    """Those of the verb, or of one of its protocols."""
    found = EXAMPLES[verb]
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


def filled(text: str) -> list[str]:
    """Lines of a text, as wide as the page."""
    return textwrap.wrap(text, page_width(), break_on_hyphens=False, break_long_words=False)


def page_width() -> int:
    """Letters of a line: those of the terminal, within what can be read."""
    return max(60, min(100, shutil.get_terminal_size((80, 24)).columns))


def kind_of(option: Option) -> str:
    """What an option takes, in as few letters as go beside its name."""
    return option.kind or _kind(option.hint)


def _kind(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        names = dict.fromkeys(name for one in inside if one is not type(None) for name in _names(one))
        # of kinds that overlap one is enough, and a list is typed as a text
        if "text" in names:
            names = [name for name in names if not name.startswith("list")]
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


def plainly(default: Any) -> str:
    """A default as it would be typed."""
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
