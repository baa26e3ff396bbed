"""Damaged files of a run are reported, and the last intact ones are used: no verb gives a wrong result."""

import os
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from killing import draw_images, left_behind, typed

from patchloom.cli import main
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
    images = draw_images(root / "images", 40)
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


def run_command(words: list[str], capfd) -> tuple[int, str, str]:
    """Run a command, and return its exit code, its output, and its error message."""
    capfd.readouterr()
    code = main([str(word) for word in words])
    out, err = capfd.readouterr()
    assert code in (0, 2) and "Traceback" not in out + err, err
    assert code == 0 or (err.startswith("patchloom: ") and err.count("\n") == 1), err
    return code, out, err


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def damaged(content: bytes, rng: random.Random):
    """Yield damaged versions of a checkpoint's bytes, each with a name."""
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(8), *rng.sample(range(8, header), 60), *rng.sample(range(header, len(content)), 60)]
    for place in [*places, header - 1, header, len(content) - 1]:
        yield (
            f"bit of byte {place}",
            content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :],
        )
    for length in (0, 1, 7, 8, 9, header // 2, header, header + 1, len(content) // 2, len(content) - 1):
        yield f"first {length} bytes", content[:length]
    yield "a byte more", content + b"\0"
    yield "twice", content + content
    yield "a text", b"hello"
    yield "a pickle", b"\x80\x04N."
    yield "zeros", bytes(len(content))


def test_if_the_last_checkpoint_is_damaged_the_one_before_is_used(run):
    folder, rng = run / "checkpoints", random.Random(20261120)
    tensors, about, problems = Checkpoints(folder).read()
    before = Checkpoints(folder)
    content = before.last.read_bytes()
    before.last.unlink()
    earlier, about_earlier, _ = before.read()
    assert not problems and about_earlier["step"] < about["step"] and not same(earlier, tensors)
    refused = 0
    for name, bytes_ in damaged(content, rng):
        kept = Checkpoints(folder)
        kept.last.write_bytes(bytes_)
        found, about_found, problems = kept.read()
        if problems:
            refused += 1
            assert f"{kept.last} is damaged" in problems[0] and "\n" not in problems[0], name
            assert about_found == about_earlier and same(found, earlier), name
        else:
            assert about_found == about and same(found, tensors), name
    assert refused > 130
    kept.last.unlink()
    kept.last.mkdir()
    assert kept.read()[1] == about_earlier


def test_a_run_resumes_from_the_earlier_checkpoint(undamaged, run, capfd):
    last = run / "checkpoints" / "last.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    code, out, _ = run_command(typed(undamaged.images, run, TASK), capfd)
    said = " ".join(out.split())
    assert code == 0 and f"the checkpoint {last} is damaged" in said and "using the one before it" in said
    assert left_behind(run) == undamaged.content


def test_two_damaged_checkpoints_are_left_as_they_are(undamaged, run, capfd):
    files = sorted((run / "checkpoints").iterdir())
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    there = [path.read_bytes() for path in files]
    for words in (typed(undamaged.images, run, TASK), ["look", run]):
        code, _, err = run_command(words, capfd)
        assert code == 2 and all(str(path) in err for path in files) and "restore one from a copy" in err
    assert [path.read_bytes() for path in files] == there


@pytest.mark.parametrize("crash", [None, 1, 2])
def test_a_damaged_one_never_takes_the_place_of_a_sound_one(run, monkeypatch, crash):
    """If saving is interrupted at any renaming, one of the two checkpoints is still intact."""
    folder = run / "checkpoints"
    Checkpoints(folder).last.write_bytes(b"damaged")
    kept = Checkpoints(folder)
    tensors, about, _ = kept.read()
    renamed, rename = [], os.replace

    def replace(source, target):
        renamed.append(target)
        if len(renamed) == crash:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    if crash is None:
        kept.save(tensors, about | {"step": 1000})
        assert renamed[-1] == kept.last and kept.before not in renamed
    else:
        with pytest.raises(KeyboardInterrupt):
            kept.save(tensors, about | {"step": 1000})
    found, about_found, problems = Checkpoints(folder).read()
    assert same(found, tensors) and len(problems) == (crash is not None)
    assert about_found == (about | {"step": 1000} if crash is None else about)


def test_a_crash_between_the_renamings_loses_nothing(run, monkeypatch):
    kept = Checkpoints(run / "checkpoints")
    tensors, about, _ = kept.read()
    rename = os.replace

    def replace(source, target):
        if Path(source).name == "next.safetensors":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replace)
        kept.save(tensors, about | {"step": 1000})
    again = Checkpoints(run / "checkpoints")
    assert not again.last.exists() and again.read()[1:] == (about, [])
    again.save(tensors, about | {"step": 1001})
    assert again.read()[1]["step"] == 1001 and _step(again.before) == about["step"]


def _step(path: Path) -> int:
    alone = Checkpoints(path.parent / "none")
    alone.last = path
    return alone.read()[1]["step"]


def made(content: bytes, how: str) -> bytes | None:
    rng = random.Random(how)
    if how == "flipped":  # somewhere in the middle
        place = len(content) // 2
        return content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :]
    return {"removed": None, "empty": b"", "half": content[: len(content) // 2], "random": rng.randbytes(200)}[how]


VERBS = {"look": ["look"], "knn": ["evaluate", "knn"], "export": ["export"]}
FILES = ("config.yaml", "requested.yaml", "data.yaml", "metrics.csv", "results.csv", "summary.txt")
FILES += ("encoder.safetensors", "instance_head.safetensors", "projection.safetensors", "log.txt")


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
    """Result of each verb on the undamaged run."""
    return {}


HOW = ("removed", "empty", "half", "random", "flipped")
CASES = [(name, how) for name in FILES for how in HOW]
CASES.remove(("instance_head.safetensors", "removed"))  # an encoder may stand alone: its report lacks rows then
CASES.remove(("summary.txt", "flipped"))  # a letter of a sentence that nothing is computed from


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_damaged_file_gives_a_message_or_the_right_result(name, how, undamaged, answers, run, capfd):
    shutil.copy(undamaged.folder / "summary.txt", run)
    if not answers:
        answers |= {verb: ask(verb, run, undamaged.images, capfd) for verb in VERBS}
        assert all(answer[0] == 0 for answer in answers.values())
        shutil.copy(undamaged.folder / "results.csv", run)
    content = made((run / name).read_bytes(), how)
    (run / name).unlink() if content is None else (run / name).write_bytes(content)
    for verb, right in answers.items():
        found = ask(verb, run, undamaged.images, capfd)
        assert found[0] == 2 or found == right, verb
    if name in ("config.yaml", "data.yaml", "requested.yaml"):
        (run / "summary.txt").unlink()
        assert run_command(typed(undamaged.images, run, TASK), capfd)[0] == 2, "a run that goes on depends on it"
    if name == "summary.txt":
        shutil.copy(undamaged.folder / "results.csv", run)
        assert run_command(typed(undamaged.images, run, TASK), capfd)[0] == 0
        assert left_behind(run) == undamaged.content


@pytest.mark.parametrize("name", FILES[3:4] + FILES[6:])
def test_what_can_be_made_again_is(name, undamaged, run, capfd):
    (run / name).write_bytes(random.Random(0).randbytes(100))
    assert run_command(typed(undamaged.images, run, TASK), capfd)[0] == 0
    assert left_behind(run) == undamaged.content


def test_a_damaged_table_keeps_what_was_measured(undamaged, run, capfd):
    table = run / "results.csv"
    lines = table.read_bytes().splitlines(keepends=True)
    table.write_bytes(b"".join(lines[:3]) + b'2026,"\xff' + lines[3][:20] + b"\r\0")
    assert run_command(typed(undamaged.images, run, TASK), capfd)[0] == 0
    kept = table.read_bytes()
    assert all(kept.count(line.split(b",", 1)[1]) == 1 for line in lines[1:])
