"""A dry run opens encoder and data, says what would be done, and does none of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from spoken import encoder_of_sound, speech_commands

from patchloom.cli import main
from patchloom.data import loader
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import cache_folder
from patchloom.evaluate.protocols import PROTOCOLS, evaluate

# protocol, options, what is said
CASES = [
    ("knn", {}, "knn of run would encode 48 training and 12 test images, and the same by its controls: raw pixels"),
    ("linear", {}, "linear of run would encode 48 training"),
    ("linear", {"recipe": "mae", "epochs": 7}, "run and untrained would be trained on 48 images for 7 epochs"),
    ("layers", {}, "layers of run would encode 48 training"),
    ("order", {}, "order of run would encode 48 training"),
    ("finetune", {"recipe": "mae"}, "run and from scratch would be trained on 48 images for 100 epochs of 1 step each"),
    (
        "finetune",
        {"recipe": "mae", "validation": 0.25},
        "36 images, with 12 others to choose the epoch, for 100 epochs",
    ),
    ("blocks:2", {}, "run and untrained would be trained on 48 images"),
    ("few-shot", {"labels": 20}, "run and from scratch would be trained on 20 images"),
    ("few-shot", {"labels": 20, "method": "linear"}, "linear of run would encode 20 training"),
    ("position-sensitivity", {}, "would train 1,000 steps on each of run and untrained"),
    ("positions", {}, "positions would place patches of 12 images"),
]
ELSEWHERE = {"keywords", "ensemble", "label-free", "segment", "detect"}  # other data: below, and tests of each


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an image was read for work")

    for kind in (loader._PlainBatches, loader._TrainingBatches):
        monkeypatch.setattr(kind, "__getitem__", refuse)


@pytest.fixture
def run(small_run: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run("droppos"), tmp_path / "run"))


@pytest.mark.parametrize(("protocol", "options", "said"), CASES)
def test_nothing_is_done(run: Path, images: Path, untouched: None, protocol: str, options: dict, said: str) -> None:
    before = contents(run)
    report = evaluate(protocol, run, images, device="cpu", seeds=3, dry_run=True, **options)
    assert said in report.protocol and report.protocol.endswith("The same for 3 seeds.")
    assert report.rows == [] and report.text(80).startswith("This was a dry run: nothing was trained")
    assert "fifth was split off" in report.protocol or protocol == "positions"
    assert contents(run) == before and not list(cache_folder().glob("*"))


def test_every_protocol_can_be_planned() -> None:
    assert {case[0].partition(":")[0] for case in CASES} | ELSEWHERE == set(PROTOCOLS)


def test_the_command_line(
    run: Path, images: Path, untouched: None, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    words = ["evaluate", "finetune", str(run), str(images), "--device", "cpu", "--dry-run"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "run and from scratch would be trained" in " ".join(printed.split()) and "Recipe small: epochs" in printed
    assert "blr 0.0" in printed and ", lr " not in printed
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["rows"] == [] and "would be trained" in result["method"]
    with pytest.raises(PatchloomError, match="there is no recipe"):  # wrong options are refused as ever
        evaluate("finetune", run, images, recipe="mea", dry_run=True)


def test_recordings(untouched: None, tmp_path: Path) -> None:
    run, commands = encoder_of_sound(tmp_path / "run"), speech_commands(tmp_path / "commands")
    report = evaluate("keywords", run, commands, words="cat,bed", device="cpu", dry_run=True)
    assert "would be trained on" in report.protocol and report.rows == []


def test_measures_without_labels(run: Path, untouched: None) -> None:
    report = evaluate("label-free", run, "shapes", device="cpu", images=40, dry_run=True)
    assert report.protocol.startswith("label-free would measure run on 40 images.")
