"""On which images is measured, who reads them, and notes on data before an evaluation."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import numbers, write_encoder
from labelled import write_noise
from PIL import Image
from refusing import refusal

from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.evaluate import settings
from patchloom.evaluate.features import pixel_features
from patchloom.evaluate.logistic import choose_strength, hold_out_for_choice
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.fewshot import subsample_training
from patchloom.evaluate.protocols.knn import knn
from patchloom.evaluate.settings import EvalSettings, parts_of, place_in_run, split_part
from patchloom.nets.checkpoints.format import save_encoder
from patchloom.options.declare import check_declared
from patchloom.options.protocols import Knn
from patchloom.results.evaluation import Evaluation, few_remark
from patchloom.runs.encoder import load_encoder
from patchloom.runs.folder import RunFolder
from patchloom.runs.training_set import digest_of_record, no_record, write_record
from patchloom.system import device as hardware

pytestmark = pytest.mark.usefixtures("quick_probe")


@pytest.mark.parametrize("data", ["a/yes,tones", ["a/yes", "tones"], [Path("a/yes"), "tones"]])
def test_several_names_of_data_make_one_file(tmp_path, data):
    assert place_in_run(tmp_path, data, "small", 1, "finetuned", ".x") == tmp_path / "finetuned/yes-tones-small-1.x"


# Training and test images, and copies among them.


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


# How many processes read images, and that nothing else depends on it.


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


# Images of one group stay on one side of every split.


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
