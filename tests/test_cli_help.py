"""Help pages and messages about typing errors: in 80 columns, without importing torch."""

import json
import os
import re
import subprocess
import sys

import pytest

from patchloom.data.sources.names import BUILTIN
from patchloom.options.help import HELP_EXAMPLES, help_page, overview
from patchloom.options.parse import (
    VERBS,
    evaluate_spec,
    parse_call,
    parse_pretrain,
    pretrain_spec,
    verb_spec,
)
from patchloom.options.protocols import PROTOCOLS
from patchloom.tasks import TASKS

_ASK = """
import contextlib, io, json, sys
from patchloom.cli import main
printed = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    printed.append([code, out.getvalue(), err.getvalue()])
json.dump([printed, sorted({"torch", "numpy", "timm"} & set(sys.modules))], sys.stdout)
"""
PAGES = [
    *([], ["-h"], ["help"], ["tasks"], ["recipes"], ["recipes", "lut-vit-b-context"]),
    *([verb, "--help", *more] for verb in VERBS for more in ([], ["all"])),
    *(["pretrain", "--task", task, "-h"] for task in TASKS),
    *(["evaluate", protocol, "--help", *more] for protocol in PROTOCOLS for more in ([], ["all"])),
    ["evaluate", "blocks:2", "run", "photos", "--help"],
]
TYPED = {
    "pretrain photos epoch=3": "did you mean --epochs=3?",
    "pretrain photos -epochs 3": "begin with two hyphens; did you mean --epochs?",
    "pretrain photos \N{EM DASH}epochs=3": "begin with two hyphens; did you mean --epochs=3?",
    "pretrain photos --lr 0.1": "did you mean --blr?",
    "pretrain photos --epochs=ten": "--epochs cannot be ten: it takes float or auto",
    "pretrain photos --epochs": "--epochs needs a value",
    "pretrain photos --gpus 2": "there is no option --gpus; patchloom pretrain --help all lists them",
    "pretrain photos --mask_ratio 0.5": "did you mean --task.mask_ratio?",
    "pretrain photos --task mae --task.sigma 1": "--task.sigma is an option of --task droppos and --task mixture",
    "compare photos --task.mask_ratio 0.5": "write it behind a task, as in --tasks mae,mae:task.mask_ratio=VALUE",
    "pretrain photos --task DropPos": "did you mean droppos?",
    "pretrain photos mae": "mae does not exist, but is a task: did you mean --task mae?",
    "pretrain photos --no-flip": "did you mean --flip false?",
    "pretrain photos --device 2": "--device cannot be 2: it takes cpu, cuda, mps or auto",
    "pretrain --data photos": "give DATA without a name, patchloom pretrain DATA",
    "pretrain photos --ks 3": "--ks is an option of patchloom evaluate knn",
    "pretrain photos --qqqq 3": "patchloom pretrain --help all lists them",
    "evaluate": "patchloom evaluate needs PROTOCOL (name of a protocol, such as knn), RUN (",
    "evaluate knn": "patchloom evaluate knn needs RUN (",
    "evaluate nothing run photos": "there is no protocol nothing. Choose ",
    "evaluate finetune run photos --batch 8": "there is no option --batch; did you mean --batch_size?",
    "evaluate knn run photos --Ks 3": "did you mean --ks?",
    "pretrain photos --recipe simmim": "there is no recipe simmim; did you mean simmim-vit-b",
    "pretrain photos --recipe mae-vit-b --task lut": "the recipe mae-vit-b is of the task mae, and --task lut is given",
    "recipes mae-vitb": "there is no recipe mae-vitb; did you mean mae-vit-b?",
    "recipes mae-vit-b lut-vit-b": "takes the name of one recipe, or nothing",
    "look run photos others": "others is one word too many",
    "finetune run photos": "did you mean patchloom evaluate finetune run photos?",
    "mae": "did you mean patchloom pretrain photos/ --task mae?",
    "train photos": "did you mean pretrain?",
    "--task mae photos": "--task comes too early",
    ".": ". is no verb: did you mean patchloom check ., or patchloom pretrain .?",
    "help nothing": "there is no verb nothing.",
    "check no/such/folder": "no/such/folder does not exist",
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The output of each of `PAGES` and `TYPED`, from a separate process, and the slow modules that it imported."""
    words = [*PAGES, *(text.split(" ") for text in TYPED)]
    done = subprocess.run(
        [sys.executable, "-c", _ASK, json.dumps(words)],
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("x"),
        env=os.environ | {"COLUMNS": "80"},
    )
    assert not done.stderr, done.stderr
    answers, slow = json.loads(done.stdout)
    return dict(zip(map(tuple, words), answers, strict=True)), slow


def test_neither_help_nor_a_typing_error_imports_torch(printed):
    assert printed[1] == []


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_a_page_fits_80_columns_in_plain_words(words, printed):
    code, out, err = printed[0][tuple(words)]
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(r"Union|Literal|NoneType|``|\bstr\b|None\b", out), out
    assert not re.search(r"(?<!\.)\.\.(?!\.)| \n", out), "no line ends in spaces, and no sentence in two stops"


@pytest.mark.parametrize("text", TYPED)
def test_a_typing_error_gets_a_suggestion(text, printed):
    code, out, err = printed[0][tuple(text.split(" "))]
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert TYPED[text] in err


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        *((["pretrain", "--task", task], pretrain_spec(task)) for task in TASKS),
        *((["evaluate", protocol], evaluate_spec(protocol)) for protocol in PROTOCOLS),
        *(([verb], verb_spec(verb)) for verb in ("check", "look", "curate", "predict", "export", "distill", "bench")),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_every_option_is_named_and_all_are_explained(words, taken):
    short, whole = help_page(words[0], [*words[1:], "--help"]), help_page(words[0], [*words[1:], "--help", "all"])
    for option in taken.options[1 if words[0] == "evaluate" else 0 :]:
        if option.positional:
            assert re.search(rf"^  {option.name.upper()} ", short, re.MULTILINE)
            continue
        name = re.sub(r"(task|model|config)\.(name|file)$|from_run$", lambda m: m[1] or "from", option.name)
        assert re.search(rf"--{re.escape(name)}\b", short), name
        assert len(re.findall(rf"^  --{re.escape(name)} [\w{{]", whole, re.MULTILINE)) == 1, name
        assert option.about and option.about.split()[0].strip('"`') in whole
    hidden = re.search(r"^(\d+) more, explained by", short, re.MULTILINE)
    explained = len(re.findall(r"^  --", short, re.MULTILINE))
    assert explained + (int(hidden[1]) if hidden else 0) == len(re.findall(r"^  --", whole, re.MULTILINE))
    assert "more, explained by" not in whole


def test_options_are_grouped():
    text = help_page("pretrain", ["--help"])
    assert re.findall(r"^(\w+)$", text, re.MULTILINE) == ["data", "model", "task", "training", "machine", "run"]
    assert re.search(r"^  --epochs float or auto +passes over", text, re.MULTILINE)
    assert text.index("patchloom pretrain photos/") < text.index("--epochs float"), "examples come first"


def test_help_lists_the_kinds_of_data():
    kinds = (*BUILTIN, "list.txt", "table.csv", "pattern", "several", "hf:NAME", "pipe:COMMAND")
    for verb in ("check", "pretrain", "evaluate", "look", "bench"):
        assert all(re.search(rf"\b{kind}\b", help_page(verb, ["--help"])) for kind in kinds)
    assert "speech_commands/" in help_page("evaluate", ["keywords", "--help"])


def test_examples_are_commands():
    for command in (command for found in HELP_EXAMPLES.values() for command, _ in found):
        _, verb, *words = command.split()
        if words[:1] == ["curves"]:
            verb, words = f"{verb} curves", words[1:]
        if "--help" in words:
            assert help_page(verb, words)
        elif verb not in ("tasks", "recipes"):
            parse_call(verb, words)


def test_all_ways_to_ask_for_help_are_equal(printed):
    assert printed[0][()] == printed[0][("-h",)] == printed[0][("help",)] and printed[0][()][1] == overview() + "\n"
    assert help_page("look", ["--help"]) == help_page("look", ["-h"]) != help_page("look", ["curves", "--help"])
    assert help_page("look", ["curves", "--help"]).startswith("usage: patchloom look curves RUNS [--OPTION VALUE ...]")


def test_names_may_have_hyphens_and_switches_need_no_value():
    given, _ = parse_pretrain("photos --img-size 64 --batch-size=8 --task mae --task.mask-ratio 0.5".split())
    assert (given["img_size"], given["batch_size"], given["task"]["mask_ratio"]) == ((64, 64), 8, 0.5)
    assert parse_pretrain(["photos", "--checkpointing", "--epochs", "3"])[0]["checkpointing"] is True
    given, _ = parse_pretrain(["--checkpointing", "photos"])  # the word behind can only be the data
    assert (given["checkpointing"], given["data"]) == (True, "photos")
    assert parse_pretrain(["photos", "--flip", "false"])[0]["flip"] is False
    assert parse_call("evaluate", ["finetune", "run", "photos", "--from-scratch"])["from_scratch"] is True


def test_the_table_of_tasks(printed):
    out = printed[0][("tasks",)][1]
    for name, entry in TASKS.items():
        line = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        assert all(f"×{cost}" in line for cost in entry.cost or ())
    assert "patchloom bench" in out and out.splitlines()[0].split()[-2:] == ["nano", "ViT-S"]
