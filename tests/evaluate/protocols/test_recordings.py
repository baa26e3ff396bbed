"""Every protocol takes recordings, and keywords are spotted in them."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import numbers
from refusing import refusal
from spoken import SOUND, Tones, encoder_of_sound, speech_commands

from patchloom.audio import keywords as spoken
from patchloom.audio.augment import excerpt_at
from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.loader import training_batches
from patchloom.data.source import Data
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import settings
from patchloom.evaluate.classification import Views, predict_classes
from patchloom.evaluate.classifier import load_classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols import keywords as protocol
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import Trainer
from patchloom.nets.build import build_encoder
from patchloom.nets.checkpoints.format import save_encoder
from patchloom.results import store
from patchloom.runs import held_out
from patchloom.runs.encoder import load_encoder
from patchloom.runs.training_set import no_record

pytestmark = pytest.mark.usefixtures("quick_probe")


@pytest.fixture(scope="module")
def ear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder_of_sound(tmp_path_factory.mktemp("ear"))


@pytest.fixture
def tones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(Tones(20), Tones(8, first=1000)))


SWEPT = {
    "knn": {"ks": (1, 5)},
    "linear": {},
    "linear, the papers'": {"recipe": "mae", "epochs": 1},
    "layers": {"k": 5},
    "order": {"k": 5},
    "position-sensitivity": {"steps": 2},
    "finetune": {"epochs": 2},
    "finetune, by a paper": {"recipe": "mp3-speech", "updates": 3, "batch_size": 8},
    "attentive": {"epochs": 1, "queries": 4},
    "blocks:1": {"epochs": 1},
    "few-shot": {"per_class": 3, "epochs": 1},
}
FROZEN = ("knn", "linear", "layers", "order")  # of these, what has raw features beside the encoder


@pytest.mark.parametrize("name", SWEPT)
def test_every_protocol_takes_recordings(ear: Path, tones: None, name: str) -> None:
    report = evaluate(name.split(",")[0], ear, "tones", device="cpu", **SWEPT[name])
    said = " ".join(report.text(200).split())
    assert report.n_test == 24 and "24 test recordings" in said
    assert not re.search(r"\bimages\b|pixels", re.sub("What recipes do to images|raw features pixels", "", said)), said
    raw = [row for row in report.results if row.encoder == "raw features"]
    assert all(row.value > 0.8 for row in raw if row.settings.get("test_images") != "patches shuffled")
    assert bool(raw) == (name in FROZEN)


def test_shift_and_noise_reach_the_batches_and_follow_from_the_generator_alone() -> None:
    noise = (torch.full((1, 1, 800), 10_000, dtype=torch.int16),)
    wave = torch.arange(1, SOUND.samples + 1, dtype=torch.int16)[None, None]
    source, noisy = Tones(4), Tones(4)
    noisy.noise = noise
    shifting = Views(SOUND.size, Recipe(shift=0.01, repeats=2).for_recordings(noise=False), (0.5,), source)
    most = round(0.01 * SOUND.rate)
    found = {int((view[0, 0] == 0).sum()) for seed in range(40) for view in shifting(wave, np.random.default_rng(seed))}
    assert max(found) == most and len(found) > most // 2
    first = shifting(wave, np.random.default_rng(3))
    torch.manual_seed(5)
    assert all(map(torch.equal, first, shifting(wave, np.random.default_rng(3))))
    assert not torch.equal(*first)

    loud = Recipe(shift=0, noise_share=0.5, noise_volume=0.1).for_recordings(noise=True)
    mixing = Views(SOUND.size, loud, (0.5,), noisy)
    added = [(mixing(wave, np.random.default_rng(seed))[0] - wave).unique().tolist() for seed in range(200)]
    assert all(len(each) == 1 and 0 <= each[0] <= 1000 for each in added)
    assert 60 < sum(each != [0] for each in added) < 140 and max(each[0] for each in added) > 900
    plain = Views(SOUND.size, Recipe(shift=0).for_recordings(noise=False), (0.5,), source)
    assert torch.equal(plain(wave, np.random.default_rng(0))[0], excerpt_at(wave, 0, SOUND.samples))

    with_noise, without = (
        next(training_batches(source, views, 6, 0, 0, 1, channels=1)).views[0] for views in (mixing, plain)
    )
    assert with_noise.shape == (6, 1, *SOUND.size)
    changed = (with_noise - without).abs().flatten(1).amax(1) > 1e-3
    assert 0 < changed.sum() < 6


def test_what_is_for_images_is_refused_and_what_does_not_act_is_said(ear: Path, tones: None) -> None:
    for name, value in {"flip": True, "crop_scale": 0.5, "randaugment": 5.0, "erasing": 0.1, "cutmix": 1.0}.items():
        assert f"--{name} is for images" in refusal(evaluate, "finetune", ear, "tones", device="cpu", **{name: value})
    with pytest.raises(PatchloomError, match="--noise_volume needs recordings of noise"):
        evaluate("finetune", ear, "tones", device="cpu", noise_volume=0.2)
    options = {"recipe": "mae", "shift": 0.02, "epochs": 1, "batch_size": 8, "control": False}
    settings = evaluate("finetune", ear, "tones", device="cpu", **options).results[0].settings
    assert settings.items() >= {"shift": 0.02, "mixup": 0.8}.items()
    assert not {"flip", "crop_scale", "randaugment", "erasing", "cutmix", "noise_share"} & set(settings)
    with pytest.raises(PatchloomError, match="ear is an encoder of recordings, and digits holds images"):
        with_encoder_sound(open_data("digits"), SOUND, "ear")


WORDS = "yes,no,up"
NO_WORDS = {"device": "cpu", "updates": 4, "batch_size": 8}
QUICK = NO_WORDS | {"words": WORDS}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("soundfile")
    return speech_commands(tmp_path_factory.mktemp("data") / "commands")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return encoder_of_sound(tmp_path / "ear")


def test_every_seed_has_rows_and_a_picture(run: Path, commands: Path) -> None:
    options = QUICK | {"updates": 30, "seeds": 2, "shift": 0.005, "clip": 1.0}
    report = evaluate("keywords", run, commands, **options)
    for part in (
        "There are 5 classes: yes, no, up, silence and unknown.",
        "updates 30, warmup updates 3, batch 8,",
        "shift 0.005, noise share 0.8, noise volume 0.1",
        "30 recordings for training, 10 for validation and 15 for testing",
    ):
        assert part in report.method, part
    rows = store.load(run)
    rights = [row.encoder for row in rows if row.measure == "accuracy"]
    assert rights == ["ear", "from scratch", "raw features", "best constant"] * 2
    assert {row.protocol for row in rows} == {"keywords"} and {row.n for row in rows} == {15}
    assert len({row.fingerprint for row in rows}) == 1  # the test is the same for every seed
    assert (run / "pictures" / "keywords-commands-small-1.png").read_bytes()[:4] == b"\x89PNG"


def test_the_classifier_says_the_same_again_and_the_matrix_counts_it(run: Path, commands: Path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr("patchloom.evaluate.protocols.keywords.draw_confusion", lambda **content: drawn.append(content))
    report = evaluate("keywords", run, commands, **QUICK, control=False, seed=2)
    model, card = load_classifier(run / "finetuned" / "keywords-commands-small-2.safetensors")
    parts = spoken.open_keywords(commands, WORDS.split(","), 2).heard_as(card.encoder.sound)
    found = predict_classes(model, parts.test, card.encoder, EvalSettings(device="cpu"))
    assert found.accuracy() == report.results[0].value and card.classes == ("yes", "no", "up", "silence", "unknown")
    counts, classes = drawn[0]["counts"], drawn[0]["classes"]
    assert classes == card.classes and counts.sum() == 15 and counts.sum(1).tolist() == [3] * 5
    assert np.trace(counts) / 15 == report.results[0].value
    for truth, answer in zip(found.labels.tolist(), found.logits.argmax(1).tolist(), strict=True):
        counts[truth, answer] -= 1
    assert not counts.any()


def test_the_start_of_a_run_replaces_training_from_scratch(run: Path, commands: Path, tmp_path: Path) -> None:
    """Its row is that of its file, which has other statistics than the run."""
    start, (_, card) = run / "start.safetensors", load_encoder(run)
    torch.manual_seed(2)
    save_encoder(build_encoder(card.own_spec), replace(card, mean=(0.0,), std=(1.0,), name="start"), start)
    report = evaluate("keywords", run, commands, **QUICK)
    alone = evaluate("keywords", start, commands, control=False, out=str(tmp_path / "c.safetensors"), **QUICK)
    assert [row.encoder for row in report.quoted] == ["ear", "start", "raw features"]
    ours, its, direct = report.quoted[0], report.quoted[1], alone.quoted[0]
    assert numbers([its]) == numbers([direct])
    assert its.outcomes.values.tolist() != ours.outcomes.values.tolist()
    assert report.against[0].control == "start" and "at its start" in report.headline
    against = {one.control: one for one in report.against}
    assert against["raw features"].sentence() in report.conclusion()  # far better ones were not mentioned


def test_validation_decides_and_the_test_is_read_once_at_the_end(run: Path, monkeypatch) -> None:
    record = []

    class Heard(Tones):
        def __init__(self, part: str, each: int):
            super().__init__(each, first=len(part) * 100)
            self.part = part

        def read(self, i: int) -> torch.Tensor:
            record.append(self.part)
            return super().read(i)

    def parts(*given) -> spoken.KeywordParts:
        return spoken.KeywordParts(Heard("train", 10), Heard("validation", 4), Heard("test", 5), None)

    monkeypatch.setattr(protocol, "open_keywords", parts)
    report = evaluate("keywords", run, "tones", **NO_WORDS, validation=0.15, patience=1.0)
    first = record.index("test")
    assert set(record[:first]) == {"train", "validation"} and set(record[first:]) == {"test"}
    assert record.count("test") == 3 * 15 and "no noise was added" in report.method  # three rows
    assert report.results[0].settings["validation_images"] == 12 and "validation" not in report.results[0].settings
    assert "noise_share" not in report.results[0].settings and report.results[0].settings["shift"] == 0.1
    record.clear()
    evaluate("keywords", run, "tones", **NO_WORDS, validation=0.0, control=False)
    assert "validation" not in record


def test_a_share_of_the_labels(run: Path, commands: Path) -> None:
    report = evaluate("keywords", run, commands, **QUICK, labels=0.5, control=False)
    assert report.results[0].settings["labelled"] == report.results[1].settings["labelled"] == 15
    assert (run / "finetuned" / "keywords-commands-small-0.5-0.safetensors").is_file()


def test_a_plain_folder_of_words(run: Path, commands: Path, tmp_path: Path) -> None:
    for word in ("yes", "no"):
        shutil.copytree(commands / word, tmp_path / "plain" / word)
    report = evaluate("keywords", run, tmp_path / "plain", **NO_WORDS, control=False)
    assert "There are 2 classes: no and yes." in report.method and 2 < report.n_test < 8


def test_wrong_pairs_are_refused_in_a_sentence(run: Path, commands: Path, tiny_encoder: Path) -> None:
    for options, said in (
        ({"words": "yes,nope"}, "no folder for the word nope"),
        ({"words": None}, "default ten words"),
        ({"flip": True}, "--flip is for images"),
        ({"group": "parent"}, "remove --group"),
        ({"labels": 0.0}, "--labels must be a fraction above 0"),
        ({"labels": 0.1}, "3, fewer than the 5 classes"),
        ({"epochs": 3}, "--epochs does not go with --updates 4"),
        ({"noise_share": 1.5}, "--noise_share must be 0 to 1"),
        ({"out": "here", "seeds": 2}, "--out names one file"),
    ):
        assert said in refusal(evaluate, "keywords", run, commands, **QUICK | options)
    with pytest.raises(PatchloomError, match="tiny is an encoder of images: keywords needs one"):
        evaluate("keywords", tiny_encoder, commands, **QUICK)


def test_recordings_without_a_label_are_left_out(run, commands: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    rows = [
        f"{commands / word / str(n)}.wav,{'' if n in (0, 8) else word},{'train' if n < 8 else 'test'}"
        for word in ("yes", "no")
        for n in range(11)
    ]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    report = evaluate("keywords", run, tmp_path / "table.csv", **NO_WORDS, control=False)
    assert report.n_test == 4 and "13 recordings for training, 1 for validation and 4 for testing" in report.method
    assert "2 training recordings without a label" in capsys.readouterr().out
    blank = Tones(4, first=9)
    blank.labels[:] = -1
    monkeypatch.setattr(Trainer, "update", None)  # nothing is trained before
    for parts in ((Tones(8), Tones(4), blank), (blank, Tones(4), Tones(4)), (Tones(8), blank, Tones(4))):
        monkeypatch.setattr(protocol, "open_keywords", lambda *given, parts=parts: spoken.KeywordParts(*parts, None))
        assert "has no labels" in refusal(evaluate, "keywords", run, "tones", **NO_WORDS, control=False)


def test_test_recordings_that_were_in_pre_training_are_counted(run: Path, commands: Path, monkeypatch) -> None:
    heard = open_data(commands).test.contents()
    monkeypatch.setattr(held_out, "record_of", lambda source: no_record().and_trained_on(heard, "commands"))
    report = evaluate("keywords", run, commands, **QUICK, dry_run=True)
    assert "12 of 15 test recordings were in pre-training" in report.method  # the others are silence
