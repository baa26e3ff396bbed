"""Documentation: marked blocks run, every command parses, and every option is documented and exists."""

import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from forked import server
from PIL import Image
from sklearn import datasets
from sklearn.utils import Bunch

from patchloom.cli import main
from patchloom.data.source import Data
from patchloom.data.sources import builtin
from patchloom.options.parse import VERBS, evaluate_spec, parse_call, pretrain_spec, verb_spec
from patchloom.options.protocols import PROTOCOLS
from patchloom.tasks import TASKS

pytestmark = pytest.mark.usefixtures("quick_probe")

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
REFERENCE = ROOT / "docs" / "reference"
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPECS = [
    *(pretrain_spec(task) for task in TASKS),
    *(evaluate_spec(protocol) for protocol in PROTOCOLS),
    *(verb_spec(verb) for verb in (*VERBS, "look curves") if verb not in ("pretrain", "evaluate", "tasks", "recipes")),
]
KNOWN = {option.name for spec in SPECS for option in spec.options}
KNOWN |= {*"debug help json version config out dry_run task model from task.NAME model.NAME".split()}
OTHERS = {  # options of a task that the page defines, of other programs, and of older versions
    **dict.fromkeys(("extend.md", "extend-parts.md", "extend-question.md"), {"task.share"}),
    "compare-and-extend.md": {"task.side"},
    "pretrain.md": {"lr"},
    "rare-classes.md": {"times"},
    "slurm.md": {*"cpus_per_task kill_on_bad_exit rdzv_conf requeue shutdown_timeout signal".split()},
    "kubernetes.md": {"shutdown_timeout"},
    "exit-codes.md": {"kill_on_bad_exit"},
    "install.md": {"no_index", "spec"},
    "troubleshooting.md": {"shm_size"},
    "CHANGELOG.md": {"batch", "lr", "nodes", "taks"},
    "CONTRIBUTING.md": {"strict", "build_arg"},
    "README.md": {"spec"},
    "docker.md": {*"build_arg cpus gpus index_url shm_size time user userns volume".split()},
}


@pytest.fixture(scope="module")
def quick_pages() -> Iterator[None]:
    """Give the set digits fewer images, and fork the processes that measure memory from one with all modules loaded."""
    whole, opened, context = datasets.load_digits(), builtin._open_digits, multiprocessing.get_context
    server()  # started here: later, signals would be blocked in it and in all that it forks

    def few() -> Data:
        with pytest.MonkeyPatch.context() as patch:  # pages that call load_digits themselves get all images
            patch.setattr(datasets, "load_digits", lambda: Bunch(images=whole.images[:600], target=whole.target[:600]))
            return opened()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin, "_open_digits", few)
        patch.setattr(multiprocessing, "get_context", lambda kind=None: server() if kind == "spawn" else context(kind))
        yield


class Block(NamedTuple):
    """A fenced block: words after the fence, content, and line of the fence."""

    info: list[str]
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(m[1].split(), m[2], text.count("\n", 0, m.start()) + 1) for m in FENCE.finditer(text)]


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each ``patchloom`` command of a shell block."""
    lines = (shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines())
    return [[*takewhile(lambda word: word != "|", words[1:])] for words in lines if words[:1] == ["patchloom"]]


def parse(words: list[str]) -> None:
    assert words, "patchloom without a verb"
    verb, *rest = [word for word in words if word != "--json"]  # not among the options of a verb
    if (verb, *rest[:1]) == ("look", "curves"):
        parse_call("look curves", rest[1:])
    elif verb in VERBS and verb not in ("tasks", "recipes"):
        parse_call(verb, rest)
    else:
        assert verb in VERBS or verb.startswith("-"), f"no verb {verb}"


def inline_commands(page: Path) -> list[list[str]]:
    """Yield the complete commands in running text, such as `patchloom verb ...`."""
    prose = FENCE.sub("", page.read_text())
    found = re.findall(r"`patchloom ([^`\n]+)`", prose)
    return [shlex.split(text) for text in found if "..." not in text and "NAME" not in text and "--help" not in text]


def draw_image(path: Path, seed: int, brighter: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 200, (8, 8, 3), dtype=np.uint8)
    pixels[..., brighter] += 50
    Image.fromarray(pixels).resize((32, 32)).save(path)


@pytest.fixture
def readme_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders that README names, and trainings of a few steps."""
    monkeypatch.chdir(tmp_path)
    for i in range(40):
        draw_image(Path(f"photos/{i:04}.png"), i)
        draw_image(Path(f"labelled/{'ab'[i % 2]}/{i}.png"), i, brighter=i % 2)
        draw_image(Path(f"frames/images/{i}.png"), i)
        maps = np.random.default_rng(i).integers(0, 2, (32, 32), dtype=np.uint8)
        Path("frames/labels").mkdir(exist_ok=True)
        Image.fromarray(maps).save(f"frames/labels/{i}.png")
    monkeypatch.setattr("patchloom.train.resolve._SAMPLES", {"cpu": 64, "gpu": 64})
    monkeypatch.setattr("patchloom.evaluate.recipes._UPDATES", {"cpu": 2, "gpu": 2})
    monkeypatch.setattr("patchloom.evaluate.recipes._EPOCHS", (1, 2))
    monkeypatch.setattr("patchloom.dense.recipes._UPDATES", {"cpu": 2, "gpu": 2})
    return tmp_path


@pytest.mark.slow
def test_every_command_of_the_readme_works_as_written(readme_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skipped = []
    for info, text, line in blocks_of(ROOT / "README.md"):
        for words in commands_of(text) if info == ["bash"] else []:
            if any(word.startswith("timm:") for word in words):
                skipped.append(words)  # its weights would be fetched
                continue
            assert main(words) == 0, f"README.md:{line} patchloom {' '.join(words)}: {capsys.readouterr().err}"
        if info == ["python"]:
            exec(compile("\n" * line + text, "README.md", "exec"), {"__name__": "readme"})
    assert len(skipped) == 2
    assert {"report.html", "encoder.safetensors"} <= {one.name for one in Path("runs/photos-mae").iterdir()}
    assert Path("photos.npz").exists()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks(page, quick_pages, tmp_path, monkeypatch):
    """Blocks work in order, in one folder: ``file NAME`` is written, ``run`` is run, other commands are parsed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names: dict = {"__name__": "docs"}
    tasks = dict(TASKS)
    try:
        for info, text, line in blocks_of(page):
            language, *marks = info or ["text"]
            if language == "bash":
                for words in commands_of(text):
                    parse(words)
            elif language == "python":
                code = compile("\n" * line + text, str(page), "exec")  # blank lines: tracebacks name the page's line
            if marks[:1] == ["file"]:
                Path(marks[1]).write_text(text)
            elif marks == ["run"] and language == "python":
                exec(code, names)
            elif marks == ["run"]:
                assert language == "bash", f"{page.name}:{line} cannot be run"
                for one in text.replace("\\\n", " ").splitlines():
                    if (ours := commands_of(one)) and not set("|<>&;$") & set(one):  # no new process needed
                        assert main(*ours) == 0, f"{page.name}:{line} {one}"
                        continue
                    done = subprocess.run(["bash", "-euo", "pipefail", "-c", one], capture_output=True, text=True)
                    assert done.returncode == 0, f"{page.name}:{line} {one}\n{done.stdout}\n{done.stderr}"
            else:
                assert not marks, f"{page.name}:{line} has an unknown mark {' '.join(marks)}"
        for words in inline_commands(page):
            parse(words)
    finally:
        TASKS.clear()
        TASKS.update(tasks)


def test_pages_and_pictures_that_scripts_write_are_up_to_date():
    options, recipes, diagrams = (
        runpy.run_path(str(ROOT / "docs" / f"make_{name}.py")) for name in ("options", "recipes", "diagrams")
    )
    assert (REFERENCE / "command-line.md").read_text() == options["page"](), "renew it: python docs/make_options.py"
    assert (REFERENCE / "recipes.md").read_text() == recipes["page"](), "renew it: python docs/make_recipes.py"
    for name, text in diagrams["diagrams"]().items():
        assert (ROOT / "docs" / "_pictures" / name).read_text() == text, "renew it: python docs/make_diagrams.py"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_options_and_links_exist(page):
    text = page.read_text()
    named = re.findall(r"`[^`\n]*?--([A-Za-z][\w.-]*\w)", FENCE.sub("", text))
    unknown = {name.replace("-", "_") for name in named} - KNOWN - OTHERS.get(page.name, set())
    assert not unknown, f"options that do not exist: {unknown}"
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"broken link: {target}"


def test_the_index_links_every_page_and_pages_that_the_source_names_exist():
    """Messages, comments and other pages name files of docs/ by their path from the root."""
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    pages = [page.relative_to(docs).as_posix() for page in PAGES if page.is_relative_to(docs)]
    assert not [page for page in pages if f"({page})" not in index and page != "README.md"]
    sources = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.[pm][yd]")]
    named = {
        (name, path.name)
        for path in [*sources, *ROOT.glob("*.md"), ROOT / "Dockerfile"]
        for name in re.findall(r"docs/[\w/-]+\.(?:md|json|py|png|jpg)", path.read_text("utf-8"))
    }
    assert named and not sorted(one for one in named if not (ROOT / one[0]).exists())
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:src|tests|docs|benchmarks)/[^`]*)`", text)
    named += [f"src/patchloom/{folder}" for folder in re.findall(r"^\| `(\w+/)`", text, re.MULTILINE)]
    assert len(named) > 20 and not [name for name in named if "NAME" not in name and not (ROOT / name).exists()]
    lists = [
        (path, name)
        for path, change in re.findall(r"^\| `((?:src|tests)/[\w/]+\.py)` \|(.*)\|$", text, re.MULTILINE)
        for name in re.findall(r"`(_?[A-Z][A-Z_]+)`(?! in )", change)
    ]
    assert len(lists) > 8 and not [(path, name) for path, name in lists if name not in (ROOT / path).read_text()]


def test_the_family_has_a_row_per_task_with_its_measured_cost():
    text = (ROOT / "docs" / "explanation" / "family.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(?:[^|]*\|){5} ([^|]*) \| [^|]* \|$", text, re.MULTILINE)
    costs = {
        name: "not measured" if entry.cost is None else "{}, {}".format(*entry.cost) for name, entry in TASKS.items()
    }
    assert dict(rows) == costs | {"mixture": "depends"} and len(rows) == len(TASKS)
