"""Protocols from the encoder to the file of results: rows, seeds, honesty about test images, dry runs."""

import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from evaluating import numbers
from spoken import encoder_of_sound, speech_commands

from patchloom.data import loader
from patchloom.data.source import Data, Source
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import settings
from patchloom.evaluate.features import cache_folder
from patchloom.evaluate.protocols import evaluate
from patchloom.options.protocols import PROTOCOLS
from patchloom.results import store
from patchloom.results.claims import Claim

pytestmark = pytest.mark.usefixtures("quick_probe")

SEEDS = {"device": "cpu", "ks": (5, 20), "max_train": 80, "pooling": "mean"}


@pytest.mark.parametrize("protocol", ["knn", "linear"])
def test_results_have_the_encoder_beside_its_controls(run: Path, protocol: str) -> None:
    report = evaluate(protocol, run, "digits", device="cpu", max_train=250)
    names = ["tiny", "untrained", "raw pixels", "best constant"]
    assert list(dict.fromkeys(row.encoder for row in report.results)) == names
    best = {name: max(row.value for row in report.results if row.encoder == name) for name in ("tiny", "raw pixels")}
    assert best["raw pixels"] > 0.85 and best["tiny"] > 0.3 > report.results[-1].value
    assert report.n_test == 360 and all(row.low <= row.value <= row.high for row in report.results)
    for name in names[:3]:  # in the quoted setting
        its = [row.measure for row in report.results if row.encoder == name]
        assert {"accuracy", "balanced accuracy", *(f"recall of {digit}" for digit in range(10))} == {*its}
    assert "a stratified 250 of 1,437 training images" in report.method
    written = store.load(run)
    assert [row.value for row in written] == [row.value for row in report.results]
    assert {row.fingerprint for row in written} == {open_data("digits").test.fingerprint()}
    again = evaluate(protocol, run / "encoder.safetensors", "digits", device="cpu", max_train=250)
    assert numbers(again.results) == numbers(report.results) and len(store.load(run)) == len(written)


def test_knn_quotes_a_fixed_row(run: Path) -> None:
    report = evaluate("knn", run, "digits", device="cpu", max_train=150)
    quoted = next(row for row in report.results if (row.pooling, row.settings["k"]) == ("mean", 20))
    assert report.headline.startswith(f"kNN (k=20, mean): {quoted.text()} against")
    assert [one.control for one in report.against] == ["untrained", "raw pixels"]
    asked = evaluate("knn", run, "digits", pooling="class", ks=(5,), device="cpu", max_train=150)
    assert "k=5, class" in asked.headline


def test_data_without_test_images_is_split(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train: Source = open_data("digits").train.subset(range(200))
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(train, None))
    report = evaluate("knn", run, "digits", seeds=2, device="cpu", ks=(5,))
    assert report.n_test == 40 and "pre-training may have seen" in report.method
    assert report.others[0].fingerprint != report.fingerprint  # each seed splits anew
    gains = [one.quoted[0].value - one.quoted[1].value for one in (*report.others, report)]
    found = report.against[0]
    assert found.value == pytest.approx(sum(gains) / 2) and found.trainings == 2 and found.n == report.n_test
    # Student's 12.706 for 1 degree of freedom; a half for two seeds, and a quarter for what their splits share
    reach = 12.706 * abs(gains[0] - gains[1]) / 2**0.5 * (1 / 2 + 1 / 4) ** 0.5
    assert found.high == pytest.approx(min(1, found.value + reach), abs=1e-4)
    train.labels = None
    with pytest.raises(PatchloomError, match="digits has no labels"):
        evaluate("knn", run, "digits", device="cpu")


# The file of results.


def test_a_file_of_another_kind_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / store.FILE).write_text("other,columns\n")
    with pytest.raises(PatchloomError, match="line 1"):  # and not that the folder holds no run
        evaluate("knn", tmp_path, "digits")


# Several seeds.


def test_three_seeds_are_three_reports(run: Path) -> None:
    report = evaluate("knn", run, "digits", seed=4, seeds=3, **SEEDS)
    reports = (*report.others, report)
    assert [one.seed for one in reports] == [4, 5, 6] and not any(one.others for one in report.others)
    rows = store.load(run)
    assert [row.seed for row in rows] == [one.seed for one in reports for _ in one.results]
    assert [row.value for row in rows] == [row.value for one in reports for row in one.results]
    found = [row.against for row in rows if row.against]
    assert found == [one.against for one in reports] and [one[0].trainings for one in found] == [1, 1, 3]
    for one in reports:  # each is what it would have been alone
        assert numbers(
            evaluate("knn", run / "encoder.safetensors", "digits", seed=one.seed, **SEEDS).results
        ) == numbers(one.results)
    assert len({one.quoted[1].value for one in reports}) == 3  # other untrained encoders, other training images


def test_one_training_claims_nothing_and_three_are_taken_together(run: Path) -> None:
    given = {"device": "cpu", "workers": 0, "max_train": 60, "epochs": 1, "seeds": 3}
    report = evaluate("finetune", run, "digits", **given)
    reports = (*report.others, report)
    assert all(one.against[0].claim in (Claim.ONCE, Claim.NONE) for one in report.others)
    (found,) = report.against
    assert found.trained and found.trainings == 3 and found.n == report.n_test and found.over_seeds > 0
    sides = [[one.quoted[i].value for one in reports] for i in (0, 1)]
    assert all(len(set(side)) > 1 for side in sides), "seeds move the trainings of both sides"
    assert found.value == pytest.approx(sum(sides[0]) / 3 - sum(sides[1]) / 3)
    assert len({one.fingerprint for one in reports}) == 1
    assert report.conclusion() in report.text(300).split("\n")[:4] and "3 trainings" in report.conclusion()


# Test images choose nothing, and are not even read before all has been chosen.


TRAINED = {"epochs": 2, "flip": False, "control": False, "blr": [1e-3, 0.03]}
# protocol, options, how often the test images are read, and for how many encoders in turn
HONEST = [
    ("knn", {"pooling": "mean"}, 3, 3),  # the encoder, its twin, raw pixels
    ("linear", {"pooling": "mean"}, 3, 3),
    ("layers", {}, 3, 3),
    ("order", {"k": 5}, 8, 3),  # also shuffled, and without positions
    ("linear", {"recipe": "mae", "epochs": 2, "blr": 0.03}, 2, 1),
    ("finetune", TRAINED, 1, 1),
    ("blocks:1", TRAINED, 1, 1),
    ("attentive", {"epochs": 2, "control": False, "queries": 4}, 1, 1),
]
NAMES = ["knn", "linear", "layers", "order", "linear mae", "finetune", "blocks", "attentive"]


@pytest.mark.parametrize(("protocol", "options", "passes", "encoders"), HONEST, ids=NAMES)
def test_test_images_are_read_after_everything_is_chosen_and_choose_nothing(
    tiny_encoder: Path, record_reads: Callable, protocol: str, options: dict, passes: int, encoders: int
) -> None:
    labels = open_data("digits").test.labels[:60]
    reports = []
    for answers in (labels, np.random.default_rng(0).permutation(labels)):
        record = record_reads(test_labels=answers)
        reports.append(evaluate(protocol, tiny_encoder, "digits", device="cpu", **options))
        if not reports[1:]:
            assert [what for what, _ in groupby(record)] == ["train", "test"] * encoders
            assert record.count("test") // 60 == passes  # a picture reads some again
    honest, blind = reports
    assert [row.settings for row in blind.results[:-1]] == [row.settings for row in honest.results[:-1]]
    assert [row.settings for row in blind.quoted] == [row.settings for row in honest.quoted]
    if protocol in ("knn", "layers"):
        # the labels are not in the cache: the second report used the first one's features, and yet was blind
        assert "features were used for tiny, untrained, raw pixels" in blind.method
        assert blind.quoted[-1].value < 0.3 < 0.6 < honest.quoted[-1].value


# A dry run opens encoder and data, says what would be done, and does none of it.


# protocol, options, what is said
CASES = [
    ("knn", {}, "encode 48 training and 12 test images, and the same by its controls: raw pixels"),
    ("linear", {}, "encode 48 training"),
    ("linear", {"recipe": "mae", "epochs": 7}, "run and untrained would be trained on 48 images for 7 epochs"),
    ("layers", {}, "encode 48 training"),
    ("order", {}, "encode 48 training"),
    (
        "finetune",
        {"recipe": "mae"},
        "run and from scratch would be trained on 48 images for 100 epochs of 1 step each",
    ),
    ("finetune", {"recipe": "mae", "validation": 0.25}, "36 images, with 12 others to choose the epoch"),
    ("attentive", {}, "run and untrained would be trained on 48 images"),
    ("blocks:2", {}, "run and untrained would be trained on 48 images"),
    ("few-shot", {"labels": 20}, "run and from scratch would be trained on 20 images"),
    ("few-shot", {"labels": 20, "method": "linear"}, "encode 20 training"),
    ("position-sensitivity", {}, "train 1,000 steps on each of run and untrained"),
    ("positions", {}, "place patches of 12 images"),
]
ELSEWHERE = {
    "keywords",
    "regress",
    "ensemble",
    "label-free",
    "segment",
    "detect",
}  # other data: below, and tests of each


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an image was read for work")

    for kind in (loader._PlainBatches, loader._TrainingBatches):
        monkeypatch.setattr(kind, "__getitem__", refuse)


@pytest.fixture
def trained(small_run: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run("droppos"), tmp_path / "run"))


@pytest.mark.parametrize(("protocol", "options", "said"), CASES)
def test_nothing_is_done(trained: Path, images: Path, untouched: None, protocol: str, options: dict, said: str) -> None:
    before = contents(trained)
    report = evaluate(protocol, trained, images, device="cpu", seeds=3, dry_run=True, **options)
    assert said in report.method and report.method.endswith("The same for 3 seeds.")
    assert report.results == [] and "dry run" in report.text(80)
    assert contents(trained) == before and not list(cache_folder().glob("*"))


def test_every_protocol_can_be_planned() -> None:
    assert {case[0].partition(":")[0] for case in CASES} | ELSEWHERE == set(PROTOCOLS)


def test_other_data_can_be_planned(untouched: None, trained: Path, tmp_path: Path) -> None:
    run, commands = encoder_of_sound(tmp_path / "ear"), speech_commands(tmp_path / "commands")
    report = evaluate("keywords", run, commands, words="cat,bed", device="cpu", dry_run=True)
    assert "would be trained on" in report.method and report.results == []
    report = evaluate("label-free", trained, "shapes", device="cpu", images=40, dry_run=True)
    assert "would measure run on 40 images" in report.method
