"""Damaged files of a run are reported, and the last intact ones are used: no verb gives a wrong result."""

import os
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from evaluating import numbers
from killing import left_behind, typed
from labelled import write_noise

from patchloom.cli import main
from patchloom.results import store
from patchloom.runs.checkpoint import Checkpoints
from patchloom.train import loop as training

pytestmark = pytest.mark.usefixtures("quick_probe")

TASK = {"task": "extrema", "epochs": 2, "task.masks": 2, "task.head_width": 64, "task.head_out": 64}


class Undamaged(NamedTuple):
    """Finished undamaged run: its images, folder, and contents."""

    images: Path
    folder: Path
    content: dict


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    root = tmp_path_factory.mktemp("undamaged")
    images = write_noise(root / "images", 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_SAVE_EVERY", 0.0)  # so that the checkpoint before the last one is of another step
        assert main(typed(images, root / "run", TASK)) == 0
    return Undamaged(images, root / "run", left_behind(root / "run"))


@pytest.fixture
def run(undamaged, tmp_path):
    """Copy of the run that resumes from its last checkpoint."""
    shutil.copytree(undamaged.folder, tmp_path / "run")
    (tmp_path / "run" / "summary.txt").unlink()
    return tmp_path / "run"


def run_command(words: list, capfd) -> tuple[int, str, str]:
    """Run a command, and return its exit code, its output, and its error message."""
    capfd.readouterr()
    code = main([str(word) for word in words])
    out, err = capfd.readouterr()
    assert code in (0, 2) and "Traceback" not in out + err, err
    assert code == 0 or (err.startswith("patchloom: ") and err.count("\n") == 1), err
    return code, out, err


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    alone = Checkpoints(path.parent / "none")
    alone.last = path
    return alone.read()[:2]


def flipped(content: bytes, place: int, bit: int = 1) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def damaged(content: bytes, rng: random.Random):
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(8), *rng.sample(range(8, header), 20), *rng.sample(range(header, len(content)), 20)]
    for place in [*places, header - 1, header, len(content) - 1]:
        yield f"bit of byte {place}", flipped(content, place, rng.randrange(8))
    for length in (0, 1, 7, 8, 9, header // 2, header, header + 1, len(content) // 2, len(content) - 1):
        yield f"first {length} bytes", content[:length]
    yield from (("a text", b"hello"), ("a pickle", b"\x80\x04N."), ("zeros", bytes(len(content))))
    yield "a byte more", content + b"\0"
    yield "twice", content + content


def test_if_the_last_checkpoint_is_damaged_the_one_before_is_used(run):
    kept = Checkpoints(run / "checkpoints")
    (tensors, about), (earlier, about_earlier) = read(kept.last), read(kept.before)
    assert about_earlier["step"] < about["step"] and not same(earlier, tensors)
    refused = 0
    for name, content in damaged(kept.last.read_bytes(), random.Random(20261120)):
        kept.last.write_bytes(content)
        found, about_found, problems = Checkpoints(run / "checkpoints").read()
        if problems:
            refused += 1
            assert f"{kept.last} is damaged" in problems[0] and "\n" not in problems[0], name
        assert about_found == (about_earlier if problems else about), name
        assert same(found, earlier if problems else tensors), name
    assert refused > 60
    kept.last.unlink()
    kept.last.mkdir()
    assert kept.read()[1] == about_earlier


def test_a_run_goes_on_from_an_intact_checkpoint_and_leaves_damaged_ones(undamaged, run, capfd):
    last, before = (run / "checkpoints" / f"{name}.safetensors" for name in ("last", "before"))
    last.write_bytes(last.read_bytes()[:-1])
    both = shutil.copytree(run, run.with_name("both"))
    code, out, _ = run_command(typed(undamaged.images, run, TASK), capfd)
    said = " ".join(out.split())
    assert code == 0 and f"the checkpoint {last} is damaged" in said and "using the one before it" in said
    assert left_behind(run) == undamaged.content
    files = [both / "checkpoints" / path.name for path in (last, before)]
    files[1].write_bytes(files[1].read_bytes()[:-1])
    there = [path.read_bytes() for path in files]
    for words in (typed(undamaged.images, both, TASK), ["look", both]):
        code, _, err = run_command(words, capfd)
        assert code == 2 and all(str(path) in err for path in files) and "restore one from a copy" in err
    assert [path.read_bytes() for path in files] == there


@pytest.mark.parametrize("intact", [True, False])
@pytest.mark.parametrize("crash", [None, 1, 2])
def test_one_of_two_checkpoints_is_intact_wherever_saving_is_interrupted(run, monkeypatch, crash, intact):
    """A damaged one never takes the place of a sound one."""
    folder = run / "checkpoints"
    if not intact:
        Checkpoints(folder).last.write_bytes(b"damaged")
    kept = Checkpoints(folder)
    tensors, about, _ = kept.read()
    renamed, rename = [], os.replace

    def replace(source, target):
        renamed.append(target)
        if len(renamed) == crash:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        try:
            kept.save(tensors, about | {"step": 1000})
        except KeyboardInterrupt:
            assert crash
    again = Checkpoints(folder)
    found, about_found, _ = again.read()
    saved = crash is None or len(renamed) > crash
    assert same(found, tensors) and about_found == (about | {"step": 1000} if saved else about)
    again.save(tensors, about | {"step": 1001})
    assert again.read()[1]["step"] == 1001 and read(again.before)[1] == about_found


VERBS = {"look": ["look"], "knn": ["evaluate", "knn"], "export": ["export"]}
FILES = ("config.yaml", "requested.yaml", "data.yaml", "metrics.csv", store.FILE, "summary.txt")
FILES += ("encoder.safetensors", "instance_head.safetensors", "projection.safetensors", "log.txt")
HOW = ("removed", "empty", "half", "random", "flipped")
NO_DAMAGE = {
    ("instance_head.safetensors", "removed"),  # an encoder may stand alone: its report lacks rows then
    ("summary.txt", "flipped"),  # a letter of a sentence that nothing is computed from
}


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    changed = {"empty": b"", "half": content[: len(content) // 2], "random": random.Random(how).randbytes(200)}
    changed["flipped"] = flipped(content, len(content) // 2)
    path.unlink() if how == "removed" else path.write_bytes(changed[how])


def ask(verb: str, run: Path, images: Path, capfd) -> tuple:
    """Run a verb, and return its exit code, output, and written files."""
    for path in (run / "pictures").glob("*.png"):
        path.unlink()
    out = run / "exported.safetensors"
    out.unlink(missing_ok=True)
    more = {"look": [], "knn": [images, "--cache=false"], "export": [f"--out={out}"]}[verb]
    code, printed, _ = run_command([*VERBS[verb], run, *more], capfd)
    files = {path.name: path.read_bytes() for path in (run / "pictures").glob("*.png")} if verb == "look" else {}
    return code, printed.replace(str(run), "RUN"), files, out.read_bytes() if out.exists() else None


@pytest.fixture(scope="module")
def answers():
    return {}


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("config.yaml", ["flipped"]),
        ("metrics.csv", ["random"]),
        ("encoder.safetensors", ["half"]),
        *(pytest.param(name, HOW, marks=pytest.mark.slow) for name in FILES),
    ],
)
def test_a_damaged_file_gives_a_message_or_the_right_result(name, ways, undamaged, answers, run, capfd):
    if not answers:
        shutil.copy(undamaged.folder / "summary.txt", run)
        answers |= {verb: ask(verb, run, undamaged.images, capfd) for verb in VERBS}
        assert all(answer[0] == 0 for answer in answers.values())
    for how in ways:
        if (name, how) in NO_DAMAGE:
            continue
        shutil.copytree(undamaged.folder, run, dirs_exist_ok=True)
        damage(run / name, how)
        for verb, right in answers.items():
            found = ask(verb, run, undamaged.images, capfd)
            assert found[0] == 2 or found == right, (verb, how)
        if name in ("config.yaml", "data.yaml", "requested.yaml"):
            (run / "summary.txt").unlink()
            code, _, _ = run_command(typed(undamaged.images, run, TASK), capfd)
            assert code == 2, f"a run that goes on depends on it: {how}"
        if name == "summary.txt":
            shutil.copy(undamaged.folder / store.FILE, run)
            assert run_command(typed(undamaged.images, run, TASK), capfd)[0] == 0
            assert left_behind(run) == undamaged.content, how


def test_what_can_be_made_again_is(undamaged, run, capfd):
    for name in (FILES[3], *FILES[6:]):
        (run / name).write_bytes(random.Random(0).randbytes(100))
    table = run / store.FILE
    lines = table.read_bytes().splitlines(keepends=True)
    table.write_bytes(b"".join(lines[:3]) + b'{"date": "\xff' + lines[3][:20] + b"\r\0")
    assert run_command(typed(undamaged.images, run, TASK), capfd)[0] == 0
    notes = []
    found = numbers(store.load(run, notes, outcomes=True))
    assert found == undamaged.content[store.FILE] and len(notes) == 1
    shutil.copy(undamaged.folder / store.FILE, table)
    assert left_behind(run) == undamaged.content
