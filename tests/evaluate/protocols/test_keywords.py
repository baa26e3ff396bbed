"""Keyword spotting as a whole: comparisons, choices, printed lines, pictures, files and refusals."""

from __future__ import annotations

import csv
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from spoken import Tones, encoder_of_sound, speech_commands

from patchloom.audio import keywords as spoken
from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate.classifier import load_classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols import keywords as protocol
from patchloom.evaluate.results import Report
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.training import Training, predict_classes
from patchloom.nets.build import build_encoder
from patchloom.nets.checkpoints.format import save_encoder
from patchloom.runs import held_out
from patchloom.runs.encoder import load_encoder
from patchloom.runs.training_set import no_record

pytestmark = pytest.mark.usefixtures("quick_probe")
pytest.importorskip("soundfile")

WORDS = "yes,no,up"
QUICK = {"words": WORDS, "device": "cpu", "updates": 4, "batch_size": 8}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speech_commands(tmp_path_factory.mktemp("data") / "commands")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return encoder_of_sound(tmp_path / "ear")


def _kept(run: Path, report: Report) -> tuple:
    files = {path.name: path.read_bytes() for path in sorted((run / "finetuned").iterdir())}
    return [(row.encoder, row.settings, row.right.tolist()) for row in report.rows], files


def test_the_command_line_from_end_to_end(run: Path, commands: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["keywords", str(run), str(commands), "--words", WORDS, "--updates", "30", "--batch_size", "8"]
    assert main(["evaluate", *words, "--device", "cpu", "--seeds", "2", "--shift", "0.005", "--clip", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "Keyword spotting: the encoder and a linear head were trained together, positions: keep.",
        "There are 5 classes: yes, no, up, silence and unknown.",
        "updates 30, warmup updates 3, batch 8,",
        "shift 0.005, noise share 0.8, noise volume 0.1",
        "The tested update was chosen on the data's own 10 validation recordings",
        "Raw features are a logistic regression on the spectrograms, 8x9 numbers each",
        "The data has 30 recordings for training, 10 for validation and 15 for testing.",
        "Image augmentation (crops, mirroring, RandAugment, erasing, cutmix) does not apply. ",
        "on 15 test recordings.",
        "Over 2 seeds, mean and range: ear",
        "from scratch: update",
        f"Picture: {run / 'pictures' / 'keywords-commands-small-1.png'}",
    ):
        assert part in printed, part
    rows = list(csv.DictReader((run / "results.csv").open()))
    assert [row["encoder"] for row in rows] == ["ear", "from scratch", "raw features", "best constant"] * 2
    assert {row["protocol"] for row in rows} == {"keywords"} and {row["n_test"] for row in rows} == {"15"}
    assert len({row["data_fingerprint"] for row in rows}) == 1  # the test is the same for every seed
    assert (run / "pictures" / "keywords-commands-small-1.png").read_bytes()[:4] == b"\x89PNG"


def test_the_classifier_says_the_same_again_and_the_matrix_counts_it(run: Path, commands: Path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr("patchloom.look.charts.draw_confusion", lambda **content: drawn.append(content))
    report = evaluate("keywords", run, commands, **QUICK, control=False, seed=2)
    model, card = load_classifier(run / "finetuned" / "keywords-commands-small-2.safetensors")
    parts = spoken.open_keywords(commands, WORDS.split(","), 2).heard_as(card.encoder.sound)
    found = predict_classes(model, parts.test, card.encoder, EvalSettings(device="cpu"))
    assert found.accuracy() == report.rows[0].value and card.classes == ("yes", "no", "up", "silence", "unknown")
    counts, classes = drawn[0]["counts"], drawn[0]["classes"]
    assert classes == card.classes and counts.sum() == 15 and counts.sum(1).tolist() == [3] * 5
    assert np.trace(counts) / 15 == report.rows[0].value
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
    assert its == direct and its.right.tolist() == direct.right.tolist() != ours.right.tolist()
    assert report.against[0].control == "start" and "% at its start" in report.headline
    assert "with their own normalisation" in report.protocol


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
    quick = {key: value for key, value in QUICK.items() if key != "words"}
    report = evaluate("keywords", run, "tones", **quick, validation=0.15, patience=1.0)
    first = record.index("test")
    assert set(record[:first]) == {"train", "validation"} and set(record[first:]) == {"test"}
    assert record.count("test") == 3 * 15 and "; no noise was added" in report.protocol  # three rows
    assert report.rows[0].settings["validation_images"] == 12 and "validation" not in report.rows[0].settings
    assert "noise_share" not in report.rows[0].settings and report.rows[0].settings["shift"] == 0.1
    record.clear()
    report = evaluate("keywords", run, "tones", **quick, validation=0.0, control=False)
    assert "validation" not in record and "chosen on the data's own" not in report.protocol


def test_the_conclusion_speaks_of_raw_features(run: Path, commands: Path) -> None:
    """Raw features were far better than the encoder, and no sentence said so."""
    report = evaluate("keywords", run, commands, **QUICK)
    against = {one.control: one for one in report.against}
    assert "raw features" in against and against["raw features"].sentence() in report.conclusion()


def test_a_share_of_the_labels(run: Path, commands: Path) -> None:
    report = evaluate("keywords", run, commands, **QUICK, labels=0.5, control=False)
    assert report.rows[0].settings["labelled"] == report.rows[1].settings["labelled"] == 15
    assert "A stratified 15 of 30 training recordings were used (seed 0). All validation recordings" in (
        report.protocol
    )
    assert report.headline.startswith("Keyword spotting (small-0.5): ")
    assert (run / "finetuned" / "keywords-commands-small-0.5-0.safetensors").is_file()
    with pytest.raises(PatchloomError, match="0.1 of 30 training recordings is 3, fewer than the 5 classes"):
        evaluate("keywords", run, commands, **QUICK, labels=0.1)


def test_one_seed_one_result_and_another_seed_another(run: Path, commands: Path, tmp_path: Path) -> None:
    paper = QUICK | {"recipe": "mp3-speech", "control": False}
    first = _kept(run, evaluate("keywords", run, commands, **paper))
    torch.manual_seed(7)
    other = encoder_of_sound(tmp_path / "other")
    again = _kept(other, evaluate("keywords", other, commands, **paper))
    assert again == first
    silent = _kept(run, evaluate("keywords", run, commands, **paper, noise_share=0.0))
    assert silent[1] != first[1]  # the noise reaches the training


def test_stopped_it_goes_on_as_if_it_had_not_been(
    run: Path, commands: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    paper = QUICK | {"recipe": "mp3-speech"}
    other = encoder_of_sound(tmp_path / "other")
    whole = _kept(other, evaluate("keywords", other, commands, **paper))
    step, done = Training.update, []

    def pressed(self, *given):
        done.append(1)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", pressed)
        with pytest.raises(Stopped, match="stopped at update 3 of 4 of ear: run the same command to resume"):
            evaluate("keywords", run, commands, **paper)
    capsys.readouterr()
    again = evaluate("keywords", run, commands, **paper)
    assert "ear resumes at update 3 of 4." in capsys.readouterr().out
    assert _kept(run, again) == whole


def test_a_plain_folder_of_words(run: Path, commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for word in ("yes", "no"):
        (tmp_path / "plain" / word).mkdir(parents=True)
        for path in (commands / word).iterdir():
            (tmp_path / "plain" / word / path.name).write_bytes(path.read_bytes())
    quick = {key: value for key, value in QUICK.items() if key != "words"}
    report = evaluate("keywords", run, tmp_path / "plain", **quick, control=False)
    assert "There are 2 classes: no and yes." in report.protocol and 2 < report.n_test < 8
    assert "recordings are drawn for it" in capsys.readouterr().out


def test_wrong_pairs_are_refused_in_a_sentence(run: Path, commands: Path, tiny_encoder: Path) -> None:
    for options, said in (
        ({"words": "yes,nope"}, "has no folder for the word nope"),
        ({"words": None}, "of the default ten words"),
        ({"flip": True}, "--flip is for images, and "),
        ({"group": "parent"}, "keywords uses the parts of the data: remove --group"),
        ({"labels": 0.0}, "--labels must be a fraction above 0"),
        ({"epochs": 3}, "--epochs does not go with --updates 4"),
        ({"noise_share": 1.5}, "--noise_share must be 0 to 1"),
        ({"out": "here", "seeds": 2}, "--out names one file"),
    ):
        with pytest.raises(PatchloomError, match=said):
            evaluate("keywords", run, commands, **QUICK | options)
    with pytest.raises(PatchloomError, match="tiny is an encoder of images: keywords needs one"):
        evaluate("keywords", tiny_encoder, commands, **QUICK)


def test_recordings_without_a_label_are_left_out_and_a_part_without_any_is_refused(
    run: Path, commands: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    quick = {key: value for key, value in QUICK.items() if key != "words"} | {"control": False}
    table = tmp_path / "table.csv"

    def written(blank: dict[str, int]) -> Path:
        rows = []
        for split, first in {"train": 0, "test": 8}.items():
            for word in ("yes", "no"):
                for number in range(first, 8 if split == "train" else 11):
                    label = "" if number - first < blank[split] else word
                    rows.append(f"{commands / word / str(number)}.wav,{label},{split}")
        table.write_text("\n".join(["path,label,split", *rows]))
        return table

    trained = []
    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", lambda self, *given: trained.append(1))
        for blank in ({"train": 0, "test": 3}, {"train": 8, "test": 0}):
            with pytest.raises(PatchloomError, match="has no labels"):
                evaluate("keywords", run, written(blank), **quick)
    assert not trained
    report = evaluate("keywords", run, written({"train": 1, "test": 1}), **quick)
    assert report.n_test == 4 and "There are 2 classes" in report.protocol
    assert "The data has 13 recordings for training, 1 for validation and 4 for testing." in report.protocol
    assert "2 training recordings without a label" in capsys.readouterr().out
    blank = Tones(4, first=9)
    blank.labels[:] = -1
    monkeypatch.setattr(protocol, "open_keywords", lambda *given: spoken.KeywordParts(Tones(8), blank, Tones(4), None))
    with pytest.raises(PatchloomError, match="has no labels"):
        evaluate("keywords", run, "tones", **quick)


def test_test_recordings_that_were_in_pre_training_are_counted(run: Path, commands: Path, monkeypatch) -> None:
    opened = spoken.open_keywords(commands, WORDS.split(","))
    heard = open_data(commands).test.contents()
    monkeypatch.setattr(held_out, "record_of", lambda source: no_record().and_trained_on(heard, "commands"))
    parts = protocol._parts(opened, load_encoder(run)[1], EvalSettings(), run)
    assert "12 of 15 test recordings were in pre-training" in parts.story  # the others are silence
