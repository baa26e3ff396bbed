"""Protocols from the encoder to the file of results: rows, seeds, honesty about test images, dry runs."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import numbers, write_encoder
from labelled import write_noise
from PIL import Image
from refusing import failed, refusal
from safetensors.torch import save
from spoken import encoder_of_sound, speech_commands

from patchloom.cli import main
from patchloom.data import loader
from patchloom.data.source import Data, Source
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import settings
from patchloom.evaluate.features import pixel_features
from patchloom.evaluate.logistic import choose_strength, hold_out_for_choice
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.fewshot import subsample_training
from patchloom.evaluate.protocols.knn import knn
from patchloom.evaluate.settings import EvalSettings, parts_of, place_in_run, split_part
from patchloom.nets.checkpoints.format import save_encoder
from patchloom.options.declare import check_declared
from patchloom.options.protocols import PROTOCOLS, Knn
from patchloom.results import store
from patchloom.results.claims import Claim
from patchloom.results.evaluation import Evaluation, few_remark
from patchloom.runs.encoder import load_encoder
from patchloom.runs.folder import RunFolder
from patchloom.runs.training_set import digest_of_record, no_record, write_record
from patchloom.system import device as hardware
from patchloom.system.files import cache_root

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


def test_a_file_of_another_kind_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / store.FILE).write_text("other,columns\n")
    with pytest.raises(PatchloomError, match="line 1"):  # and not that the folder holds no run
        evaluate("knn", tmp_path, "digits")


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


TRAINED = {"epochs": 2, "flip": False, "control": False, "blr": [1e-3, 0.03]}
# protocol, options, how often the test images are read, and for how many encoders in turn
HONEST = [
    ("knn", {"pooling": "mean"}, 3, 3),  # the encoder, its twin, raw pixels
    ("linear", {"pooling": "mean"}, 3, 3),
    ("layers", {}, 3, 3),
    ("order", {"k": 5}, 8, 3),  # also shuffled, and without positions
    ("linear", {"recipe": "mae", "epochs": 2, "blr": 0.03}, 2, 1),
    ("finetune", TRAINED | {"control": True, "validation": 0.2}, 2, 1),  # validation images choose, too
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
    assert contents(trained) == before and not list((cache_root() / "features").glob("*"))


def test_every_protocol_can_be_planned() -> None:
    assert {case[0].partition(":")[0] for case in CASES} | ELSEWHERE == set(PROTOCOLS)


def test_other_data_can_be_planned(untouched: None, trained: Path, tmp_path: Path) -> None:
    run, commands = encoder_of_sound(tmp_path / "ear"), speech_commands(tmp_path / "commands")
    report = evaluate("keywords", run, commands, words="cat,bed", device="cpu", dry_run=True)
    assert "would be trained on" in report.method and report.results == []
    report = evaluate("label-free", trained, "shapes", device="cpu", images=40, dry_run=True)
    assert "would measure run on 40 images" in report.method


@pytest.mark.parametrize("data", ["a/yes,tones", ["a/yes", "tones"], [Path("a/yes"), "tones"]])
def test_several_names_of_data_make_one_file(tmp_path, data):
    assert place_in_run(tmp_path, data, "small", 1, "finetuned", ".x") == tmp_path / "finetuned/yes-tones-small-1.x"


def draw(folder: Path, numbers: range) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in numbers:
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Two classes of 20 images each, 5 of which lie there twice, one by a link and one in the other class."""
    root = tmp_path / "images"
    for label, first in (("a", 0), ("b", 20)):
        draw(root / label, range(first, first + 20))
    for i in range(3):
        shutil.copy(root / "a" / f"{i}.png", root / "a" / f"copy of {i}.png")
    (root / "b" / "link.png").symlink_to("25.png")
    shutil.copy(root / "a" / "9.png", root / "b" / "9.png")
    return root


@pytest.fixture
def split(labelled: Path, tmp_path: Path) -> Path:
    """The same images for training, and six others of each class as test images."""
    root = tmp_path / "split"
    shutil.copytree(labelled, root / "train")
    for label, first in (("a", 40), ("b", 60)):
        draw(root / "test" / label, range(first, first + 6))
    return root


@pytest.mark.parametrize("labels", [True, False])
def test_copies_are_on_one_side_of_a_split(labelled: Path, labels: bool) -> None:
    left = set()
    for seed in range(12):
        parts = parts_of(labelled, EvalSettings(seed=seed), labels=labels)
        assert not np.isin(parts.train.contents(), parts.test.contents()).any()
        count = 45 - len(parts.train) - len(parts.test)
        assert (f"{count} exact copies" in parts.story) == (count > 0)
        left.add(count)
    assert max(left) > 0


def test_test_images_that_are_trained_on_are_counted(split: Path) -> None:
    assert "copies" not in parts_of(split, EvalSettings()).story
    shutil.copy(split / "train" / "a" / "3.png", split / "test" / "a" / "3.png")
    (split / "test" / "b" / "30.png").symlink_to(split / "train" / "b" / "30.png")
    for labels in (True, False):
        assert "2 of 14 test images are exact copies" in parts_of(split, EvalSettings(), labels=labels).story
    # of the images that are used: with these seeds, both, one and none of the two that were copied
    counts = set()
    for seed in range(8):
        parts = parts_of(split, EvalSettings(seed=seed, max_train=20))
        count = int(np.isin(parts.test.contents(), parts.train.contents()).sum())
        assert (f" {count} of 14 test images are exact copies" in parts.story) == (count > 0)
        counts.add(count)
    assert {0, 1} <= counts


def test_test_images_that_were_in_pre_training_are_counted(split: Path, tiny_encoder: Path, tmp_path: Path) -> None:
    vit, card = load_encoder(tiny_encoder)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    test = parts_of(split, EvalSettings()).test
    split_off = parts_of(split / "train", EvalSettings()).test  # that data has no test images of its own

    def said_of(data: Path) -> str:
        return evaluate("knn", run.path, data, device="cpu", ks=(1,)).method

    for known in (0, 5):
        trained_on = np.concatenate([part.contents()[:known] for part in (test, split_off)])
        write_record(no_record().and_trained_on(trained_on, "photos"), run.trained_on)
        save_encoder(vit, replace(card, trained_on=digest_of_record(run.trained_on)), run.encoder)
        said = said_of(split)
        counted = f" {known} of 12 test images were in pre-training" in said
        assert counted == ("in pre-training" in said) == (known > 0)
        seen = f"5 of those {len(split_off)} images were in pre-training" if known else "none of those images were in"
        assert seen in said_of(split / "train")
    run.trained_on.write_bytes(b"of another encoder")
    assert "were in pre-training" not in said_of(split)
    assert "pre-training may have seen those images" in said_of(split / "train")


# Notes before an evaluation: left-out splits, leaks between training and test images, colours that are dropped.


VAL = r"Of 26 images, train \(20\) is trained on, test \(4\) is the test, and val \(2\) is neither"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, count in {"train": 20, "test": 4, "val": 2}.items():
        write_noise(tmp_path / "photos" / split, count, 8, "L")
    return tmp_path / "photos"


def test_evaluate_names_left_out_images_once(tiny_encoder: Path, photos: Path, capsys) -> None:
    assert main(["evaluate", "knn", str(tiny_encoder), str(photos), "--seeds", "2"]) == 0
    assert len(re.findall(VAL, capsys.readouterr().out)) == 1
    evaluate("knn", tiny_encoder, photos)
    assert re.match(VAL, capsys.readouterr().out), "another evaluation says it, too"
    knn(tiny_encoder, photos, EvalSettings(), Knn())
    assert not capsys.readouterr().out


def printed_by(capsys, *words: str) -> str:
    assert main([*words, "--device", "cpu", "--workers", "0"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_crops_of_a_slide_on_both_sides_are_told_with_a_group_that_mends_it(tmp_path, capsys) -> None:
    run = str(write_encoder(tmp_path / "encoder.safetensors", (16, 16), 4, 3))
    data = write_noise(tmp_path / "images", 40, 16)
    for path in [*data.rglob("*.png")]:
        path.rename(path.with_name(f"slide{int(path.stem) % 5}_{path.name}"))
    said = printed_by(capsys, "evaluate", "knn", run, str(data))
    assert "groups (slide0, slide1, " in said
    group = re.search(r"--group '(.*?)'", said)[1]
    assert "in training and in test" not in printed_by(capsys, "evaluate", "knn", run, str(data), "--group", group)


@pytest.mark.parametrize(("channels", "mode", "told"), [(1, "RGB", True), (1, "L", False), (3, "RGB", False)])
def test_an_encoder_of_grey_images_says_that_it_drops_colours(tmp_path, capsys, channels, mode, told) -> None:
    run = str(write_encoder(tmp_path / "encoder.safetensors", (16, 16), 4, channels))
    data = str(write_noise(tmp_path / "images", 40, 16, mode))
    assert ("colours are dropped" in printed_by(capsys, "evaluate", "knn", run, data)) == told
    assert ("colours are dropped" in printed_by(capsys, "embed", run, data, "--to", str(tmp_path / "v.npz"))) == told


class On(EvalSettings):
    """On a device that is not there."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@pytest.mark.parametrize(
    ("cores", "on_a_cpu", "on_a_gpu"), [(1, 0, 1), (2, 0, 1), (4, 1, 3), (16, 4, 15), (64, 16, 16)]
)
def test_few_cores_of_a_cpu_are_for_computing(photos: Path, monkeypatch, cores, on_a_cpu, on_a_gpu) -> None:
    monkeypatch.setattr(settings, "cores", lambda: cores)
    source = open_data(str(photos)).train
    for device, number in (("cpu", on_a_cpu), ("cuda", on_a_gpu)):
        assert (
            On(device=device).workers_for(source, 1000) == On(device=device).workers_for(source, 1000, True) == number
        )
        assert On(device=device).readers[0] == number


def test_no_reader_is_started_where_it_does_not_pay(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "cores", lambda: 64)
    source, digits = open_data(str(photos)).train, open_data("digits").train
    assert [On(device="cuda").workers_for(source, batches) for batches in (1, 2, 5)] == [16, 16, 16]
    assert [On(device="cpu").workers_for(source, batches) for batches in (1, 7, 8)] == [0, 0, 16]
    for device in ("cpu", "cuda"):
        assert On(device=device).workers_for(digits, 1000) == 0
        assert On(device=device).workers_for(digits.subset(range(99)).subset(range(50)), 1000) == 0
        assert On(device=device).workers_for(digits, 1000, trained=True) == 16  # crops are made of them
    assert On(device="cuda", batch_size=20).reading(source) == {"batch_size": 20, "workers": 16}
    assert [On(device="cpu", workers=number).workers_for(source, 1) for number in (0, 3)] == [0, 3]
    for number in (-1, "many"):
        assert "--workers" in refusal(check_declared, EvalSettings(workers=number))


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("knn", {"ks": (1,)}), ("finetune", {"epochs": 2, "batch_size": 8, "blr": 0.01, "control": False})],
)
def test_no_result_depends_on_the_readers(tiny_encoder: Path, tmp_path, monkeypatch, protocol: str, options) -> None:
    data = write_noise(tmp_path / "noise", 60, 8, "L")
    monkeypatch.setattr(settings, "cores", lambda: 8)
    monkeypatch.setattr(settings, "_FEW_BATCHES", 2)
    started, real = [], EvalSettings.workers_for
    monkeypatch.setattr(
        EvalSettings, "workers_for", lambda *rest, **more: started.append(real(*rest, **more)) or started[-1]
    )
    found = []
    for workers in (0, "auto"):
        started.clear()
        asked = {"device": "cpu", "workers": workers, "batch_size": 10, "cache": False}
        report = evaluate(protocol, tiny_encoder, data, **asked | options)
        assert max(started) == (2 if workers == "auto" else 0)
        found.append([(row.value, row.low, row.high) for row in report.results])
        assert ("p to 2 processes read the data (--workers auto" in report.method) == (workers == "auto")
    assert found[0] == found[1]


def test_a_single_core_is_told_without_a_plural() -> None:
    assert hardware.choose_workers("cpu", hardware.Cores(1), least=1) == (1, "there is one core")
    assert hardware.choose_workers("cuda", hardware.Cores(1))[0] == 1


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of ten films each, with six frames nearly alike each; nothing in them tells the class."""
    folder = tmp_path_factory.mktemp("films")
    rng = np.random.default_rng(0)
    for film in range(20):
        colour = rng.integers(30, 226, (8, 8))
        (folder / "ab"[film % 2]).mkdir(exist_ok=True)
        for frame in range(6):
            noisy = colour + rng.integers(-3, 4, (8, 8))
            Image.fromarray(noisy.astype(np.uint8)).save(folder / "ab"[film % 2] / f"film{film:02}_{frame}.png")
    return folder


def film_of(source, some=None) -> set[str]:
    indices = range(len(source)) if some is None else some
    return {Path(source.describe(int(i))).name.partition("_")[0] for i in indices}


def test_the_test_images_are_whole_groups(films: Path) -> None:
    for seed in range(3):
        parts = parts_of(films, EvalSettings(seed=seed, group="^(.*)_"))
        assert not film_of(parts.train) & film_of(parts.test) and len(parts.test) == 24
        assert "in whole groups" in parts.story and "Test groups: 4 (" in parts.story
        assert all(film in parts.story for film in film_of(parts.test)) and len(film_of(parts.test)) == 4
        assert set(parts.test.labels.tolist()) == {0, 1}
        few_of_them = subsample_training(parts, None, 20, seed)[0]
        assert not film_of(few_of_them.train) & film_of(parts.test)
    plain = parts_of(films, EvalSettings())
    assert film_of(plain.train) & film_of(plain.test) and "whole groups" not in plain.story


def test_choices_hold_out_whole_groups(films: Path) -> None:
    train = parts_of(films, EvalSettings(group="^(.*)_")).train
    features = pixel_features(train, (8, 8), (0.5,), (0.2,))
    rest, held = hold_out_for_choice(features.labels, 0, features.groups)
    assert len(held) == 18 and not film_of(train, rest) & film_of(train, held)
    first, second = split_part(train, round(0.1 * len(train)), 0)  # as fine-tuning chooses a rate
    assert not film_of(first) & film_of(second)
    values = features.tokens["pixels"]
    choices = [choose_strength(values, features.labels, groups=groups) for groups in (features.groups, None)]
    assert [choice.held_out for choice in choices] == [18, 19]


def test_own_test_images_have_groups_too(films: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        shutil.copytree(films, tmp_path / part)
    parts = parts_of(tmp_path, EvalSettings(group="^(.*)_"))
    assert parts.test.groups is not None and len(np.unique(parts.test.groups)) == 20
    assert "Intervals are over its groups." in parts.story


def test_where_groups_leave_no_choice_images_are_held_out_one_by_one() -> None:
    labels = torch.arange(40) % 2
    for groups in (torch.zeros(40, dtype=torch.int64), labels):
        rest, held = hold_out_for_choice(labels, 0, groups)
        assert len(held) == 8 and len(labels[rest].unique()) == 2


def test_frames_that_are_known_by_heart_flatter(films: Path, tiny_encoder: Path) -> None:
    def measured(group: str | None) -> Evaluation:
        return evaluate("linear", tiny_encoder, films, device="cpu", group=group, seed=1)

    alone, whole, cached = measured(None), measured("^(.*)_"), measured("^(.*)_")  # features of an earlier pass
    assert alone.quoted[0].value > 0.9 and whole.quoted[0].value < 0.8
    assert numbers(cached.results) == numbers(whole.results) and cached.quoted[0] in cached.results
    assert cached.quoted[0].settings.items() >= {"held_out": 18, "group": "^(.*)_"}.items()
    assert "Only 4 test groups" in few_remark(cached.quoted[0])


def test_fine_tuning_chooses_where_one_group_is_left(films: Path, tiny_encoder: Path, tmp_path: Path) -> None:
    data = tmp_path / "two"
    for film in (0, 1, 2, 3):
        for path in films.glob(f"*/film{film:02}_*.png"):
            (data / path.parent.name).mkdir(parents=True, exist_ok=True)
            name = f"{'early' if film < 2 else 'late'}_{path.name}"
            (data / path.parent.name / name).write_bytes(path.read_bytes())
    given = {"device": "cpu", "group": "(early|late)", "epochs": 1, "control": False}
    done = evaluate("finetune", tiny_encoder, data, **given, blr=[1e-3, 1e-2])
    assert done.quoted[0].settings["held_out"] == 1
    done = evaluate("finetune", tiny_encoder, data, **given, validation=0.5)
    assert done.quoted[0].settings["validation_images"] == 6
    assert "puts all 24 images" in refusal(evaluate, "knn", tiny_encoder, data, device="cpu", group="_film")


# What is typed wrongly, and what does not go together: one sentence and exit code 2, before anything is written.


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("knnn RUN digits", "did you mean knn?"),
        ("knn:3 RUN digits", "knn:3"),
        ("knn RUN digits --galery 0.1", "did you mean --gallery?"),
        ("linear RUN digits --ks 5", "--ks is an option of patchloom evaluate knn"),
        ("knn RUN digits --epochs 5", "--epochs is an option of patchloom pretrain and patchloom evaluate finetune"),
        ("linear RUN digits --epochs 5", "--epochs applies to --recipe mae or extrema"),
        ("knn RUN digit", "did you mean the built-in data digits?"),
        ("knn RUN", "needs DATA"),
    ],
)
def test_what_is_typed_wrongly(tiny_encoder: Path, words: str, near: str, capsys: pytest.CaptureFixture) -> None:
    assert near in failed(capsys, "evaluate", *words.replace("RUN", str(tiny_encoder)).split())


MAE, SHORT = {"recipe": "mae"}, {"epochs": 2}
BAD_OPTIONS = {
    "svm": [({}, "no protocol svm")],
    "knn": [
        ({"device": "abacus"}, "device abacus"),
        ({"seeds": 0}, "--seeds must be 1 or more"),
        ({"galery": 0.1}, "did you mean --gallery?"),
        ({"gallery": 0.0}, "--gallery must be above 0 and at most 1"),
        ({"test_crop": 0.0}, "--test_crop must be"),
        ({"devices": 2}, "one process: leave out --devices 2"),
        ({"accumulate": 2}, "no training steps: leave out --accumulate 2"),
    ],
    "layers": [({"k": 90, "max_train": 100}, "gallery of 80 images")],
    "order": [({"pooling": "instance"}, "--pooling cannot be instance")],
    "linear": [
        (SHORT, "--epochs applies to --recipe mae or extrema"),
        ({"control": False}, "--control applies to --recipe mae or extrema"),
        ({"devices": 2}, "--recipe logistic is for one process"),
        ({"recipe": "droppos"}, "choose one of logistic, mae, extrema"),
        ({"recipe": "extrema"}, "no module beside it for instance features"),
        (MAE | {"accumulate": 2}, "--accumulate has no effect"),
        (MAE | {"pooling": "both"}, "--pooling both applies to --recipe logistic"),
        (MAE | {"pooling": "prefix"}, "--pooling prefix applies to --recipe logistic"),
        (MAE | {"mixup": 0.8}, "there is no option --mixup"),
        (MAE | {"blr": 0.0}, "--blr must be above 0"),
        (MAE | {"batch_size": 1}, "use --batch_size 2 or more"),
    ],
    "attentive": [
        ({"recipe": "mae"}, "choose one of small, ep"),
        ({"queries": 7, "max_train": 100}, "--queries and --reduce that divide"),
        ({"accumulate": 2}, "--accumulate has no effect"),
        ({"form": "cross", "reduce": 2}, "leave out --reduce"),
    ],
    "regress": [
        ({}, "needs --column: give a table"),
        ({"column": "age"}, "digits has no column age"),
        ({"column": "age", "accumulate": 2}, "no training steps: leave out --accumulate 2"),
    ],
    "blocks:0": [(SHORT, "blocks:0 trains no block")],
    "blocks:2": [({"layer_decay": 0.5}, "--layer_decay has no effect")],
    "few-shot": [
        ({"method": "linear", "devices": 2}, "--method linear is for one process"),
        *(
            ({"method": "linear", **option}, f"--{next(iter(option))}.* applies to --method finetune")
            for option in (SHORT, {"head_on": "projection"}, MAE, {"positions": "none"})
        ),
        ({"head_on": "projection"}, "task mae saved no projection"),
    ],
    "finetune": [
        ({"max_train": 9}, "too few for 10 classes"),
        ({"positions": "rotary"}, "--positions cannot be rotary"),
        ({"from_scratch": True, "out": "here"}, "--from_scratch saves no classifier"),
        ({"blr": []}, "--blr is empty"),
        ({"blr": [1e-3, -1.0]}, "--blr must be"),
        ({"recipe": "dino"}, "no recipe dino"),
        ({"out": "here", "seeds": 2}, "--out names one file"),
        ({"train_positions": True, "positions": "fixed"}, "--positions fixed .* leave out --train_positions"),
        ({"shift": 0.1}, "--shift is for recordings, and digits holds images"),
        ({"mixup": 0.8, "batch_size": 7}, "use --batch_size 8"),
    ],
}


@pytest.mark.parametrize("protocol", BAD_OPTIONS)
def test_bad_options_are_refused(run: Path, protocol: str) -> None:
    for options, said in BAD_OPTIONS[protocol]:
        assert re.search(said, refusal(evaluate, protocol, run, "digits", **{"device": "cpu", **options}))
    assert [path.name for path in run.iterdir()] == ["encoder.safetensors"]


@pytest.mark.parametrize("protocol", ["knn", "linear", "layers", "order", "finetune"])
def test_what_does_not_go_together(
    run: Path, protocol: str, tmp_path: Path, empty_cache: Path, capsys: pytest.CaptureFixture
) -> None:
    for i in range(8):
        folder = tmp_path / "deep" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{i}.npy", np.full((8, 8, 5), i, np.uint8))
    (tmp_path / "plain").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "plain" / "1.png")
    whole = (run / "encoder.safetensors").read_bytes()
    if protocol != "finetune":
        assert "has 5 channels where 1 are expected" in failed(capsys, "evaluate", protocol, run, tmp_path / "deep")
    assert re.search("has no labels: .* sub-folder", failed(capsys, "evaluate", protocol, run, tmp_path / "plain"))
    strange = save({"a": torch.zeros(1)})
    others = {"half": whole[: len(whole) // 2], "text": b"not weights", "empty": b"", "strange": strange}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
        said = "holds weights alone" if name == "strange" else "cannot be read as encoder weights"
        assert f"{tmp_path / name} {said}" in failed(capsys, "evaluate", protocol, tmp_path / name, "digits")
    assert "there is no encoder at" in failed(capsys, "evaluate", protocol, tmp_path / "deep", "digits")
    assert [path.name for path in run.iterdir()] == ["encoder.safetensors"] and not empty_cache.exists()


@pytest.mark.parametrize(
    ("protocol", "encoder", "options", "said"),
    [
        ("finetune", {"channels": 5}, {}, "1 channel where 5 are expected"),
        ("finetune", {"model": "swin-nano", "size": (32, 32), "p": 4}, {"train_positions": True}, "no position embed"),
        ("blocks:2", {"class_token": False}, {"pooling": "class"}, "no class token .*--pooling mean"),
        ("linear", {"class_token": False}, MAE | {"pooling": "class"}, "no class token .*--pooling mean"),
    ],
)
def test_encoders_that_a_protocol_cannot_take_are_refused(tmp_path: Path, protocol, encoder, options, said) -> None:
    file = write_encoder(tmp_path / "e.safetensors", positions="none", **encoder)
    assert re.search(said, refusal(evaluate, protocol, file, "digits", device="cpu", max_train=40, **options))
