"""Tests of the verb report: runs in any state, hostile names, and no changes to other files."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from refusing import failed, refusal

from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.report.report import describe_data_issues, page_of, report
from patchloom.report.settings import run_metadata
from patchloom.results.verdict import Health, Verdict, no_labels, write_health
from patchloom.runs.folder import RunFolder
from patchloom.runs.past import load_run


@pytest.fixture
def pages(monkeypatch):
    made = []
    monkeypatch.setattr(
        "patchloom.report.report.render", lambda page: made.append(page) or f"<title>{len(made)}</title>"
    )
    return made


def test_one_run_has_its_page_beside_it(run, pages, capsys, monkeypatch):
    def state():
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "report.html"}

    write_health(run, Health(Verdict.HEALTHY, "12 % of the way", "", 2.0, True))
    before = state()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text() == "<title>1</title>" and state() == before
    (page,) = pages
    assert page.title == "mine" and page.notes == [] and page.tone == "good"
    (part,) = page.runs
    assert part.state == "finished" and page.charts and page.lead == ["12 % of the way"]
    for name in ("summary", "numbers", "settings", "pictures", "cloud", "files", "about", "command", "tables"):
        assert getattr(part, name), name


def test_facts_about_a_run(finished):
    found = load_run(finished)
    about, folder = dict(run_metadata(found)), finished.absolute()
    megabytes = (finished / "encoder.safetensors").stat().st_size / 1e6
    expected = {"folder": str(folder), "held out": "12 images", "fingerprint of the data": found.data["fingerprint"]}
    expected |= {"data": found.settings.data, "device": "cpu, 1 thread, float32"}
    expected |= {"encoder": f"encoder.safetensors, {megabytes:.1f} MB"}
    assert {name: about[name] for name in expected} == expected and "trained layers" not in about
    assert about["started"] <= about["ended"] and "patchloom" in about["page made with"]
    for changes, said in (
        ({"adapt": "lora", "lora_rank": 4, "from_run": "a"}, "(rank 4), merged here into the weights of a"),
        ({"adapt": "blocks", "train_blocks": 1, "init": "a"}, "the last 1 block and the last norm; all other weights"),
    ):
        assert said in dict(run_metadata(replace(found, settings=replace(found.settings, **changes))))["trained layers"]


def test_a_run_evaluated_with_labels_does_not_report_missing_labels(run):
    (run / "summary.txt").write_text("The task is being learnt.\n")
    assert page_of([run]).runs[0].summary == "The task is being learnt."
    (run / "results.jsonl").unlink()
    assert no_labels() in page_of([run]).runs[0].summary


def test_an_evaluation_is_removed_by_its_date_or_number(run, pages, capsys):
    before = (run / "results.jsonl").read_text()
    assert "has no evaluation" in failed(capsys, "report", run, "--forget", "2031")
    assert (run / "results.jsonl").read_text() == before and not pages
    assert main(["report", str(run), "--forget", "1"]) == 0
    assert len((run / "results.jsonl").read_text()) < len(before) and len(pages) == 1


def test_several_runs_share_a_page(run, pages, tmp_path, monkeypatch, capsys):
    other = shutil.copytree(run, tmp_path / "other")
    (other / "verdict.yaml").unlink()
    write_health(run, Health(Verdict.HEALTHY, "12 % of the way", "", 2.0, True))
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out.strip() == "report.html" and (tmp_path / "report.html").exists()
    (page,) = pages
    assert page.title == "mine and other" and [part.name for part in page.runs] == ["mine", "other"]
    assert page.lead[0] == "mine: healthy. 12 % of the way" and page.lead[1].startswith("other: ")
    assert [part.tone for part in page.runs] == ["good", "plain"]
    assert [line.name for line in page.charts[0].lines] == ["mine", "other"]
    assert report([run, other], out=tmp_path / "deep" / "a.html").exists()


def test_runs_whose_folders_are_called_the_same_are_told_apart(run, tmp_path):
    places = [tmp_path / above / "run" for above in ("a", "b")]
    for place in places:
        shutil.copytree(run, place)
    (places[1] / "results.jsonl").write_text("nothing\n")
    page = page_of(places)
    names = ["a/run", "b/run"]
    assert page.title == "a/run and b/run" and [part.name for part in page.runs] == names
    assert [line.name for line in page.charts[0].lines] == names
    assert all(lead.startswith(f"{name}: ") for lead, name in zip(page.lead, names, strict=True))
    assert [note.partition(": ")[0] for note in page.notes] == ["b/run"]
    for name, part, place in zip(names, page.runs, places, strict=True):
        assert name in part.pictures[0].alt and part.command.endswith(f"{place}-again")


def test_a_verdict_has_its_tone_and_holds_so_far_before_the_end(run):
    tones = {"healthy": "good", "learning but weak": "fair", "collapsed": "bad", "not learning": "bad"}
    for verdict, tone in (tones | {"too early to tell": "plain"}).items():
        write_health(run, Health(Verdict(verdict), "why", "then", 1.0, False))
        page = page_of([run])
        part = page.runs[0]
        assert (part.verdict, part.why, part.then, part.tone, page.tone) == (verdict, "why", "then", tone, tone)
    (run / "summary.txt").unlink()
    for verdict, said in [("healthy", "healthy so far"), ("too early to tell", "too early to tell")]:
        write_health(run, Health(Verdict(verdict), "why", "then", 1.0, False))
        assert page_of([run]).runs[0].verdict == said


def test_a_run_before_its_first_row(run, real_map):
    for name in ("summary.txt", "encoder.safetensors", "metrics.csv", "results.jsonl", "verdict.yaml"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "pictures")
    for path in run.rglob("*"):  # on a busy machine the run that all tests copy may be old by now
        os.utime(path)
    page = page_of([run])
    part = page.runs[0]
    assert part.state == "epoch 0 of 2, training" and part.settings and part.files and part.command
    assert (part.numbers, part.cloud, list(page.charts), part.summary) == ([], None, [], "")
    (note,) = page.notes
    assert "no map of embeddings" in note and "no checkpoint yet" in note and page.lead == ["epoch 0 of 2, training"]


def test_damage_is_noted_and_the_rest_is_there(run, tmp_path, real_map):
    (run / "metrics.csv").write_text("epoch\nx\n")
    (run / "results.jsonl").write_text("{}\n")
    page = page_of([run])
    assert len(page.notes) == 2 and page.runs[0].numbers == page.runs[0].tables == []
    assert any("results.jsonl could not be read" in note for note in page.notes)
    assert page.runs[0].cloud and page.runs[0].pictures
    (run / "results.jsonl").unlink()
    (run / "metrics.csv").unlink()
    page = page_of([run])
    assert not page.notes and page.runs[0].numbers == page.runs[0].tables == []
    (tmp_path / "one").mkdir()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "one" / "one.png")
    assert any("needs 5 images or more" in note for note in page_of([run], tmp_path / "one").notes)


@pytest.mark.slow
def test_recordings_can_be_heard(tmp_path, quick_probe):
    from patchloom.train.loop import pretrain

    small = {"model": {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2}, "epochs": 1, "batch_size": 16}
    run = pretrain("tones:30", "mae", out=tmp_path / "run", device="cpu", workers=0, compile=False, **small).folder
    page = page_of([run])
    part = page.runs[0]
    assert page.notes == [] and 5 <= len(part.recordings) <= 12 and part.cloud
    assert "recordings" in part.numbers[0].note and "recordings" in page.charts[1].note
    assert {"rate", "features"} <= {one.name for one in part.settings} and "flip" not in {s.name for s in part.settings}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere"], "nowhere is not the folder of a run"),
        (["RUN", "RUN/"], "is given twice"),
        (["RUN", "--out", "."], "--out . is a folder"),
        (["RUN", "--out", "FILE/page.html"], "could not be written"),
        ([], "patchloom report needs RUNS"),
    ],
)
def test_slips_are_sentences(finished, given, said, tmp_path, capsys, pages):
    (tmp_path / "file").write_text("")
    words = [word.replace("RUN", str(finished)).replace("FILE", str(tmp_path / "file")) for word in given]
    assert said in failed(capsys, "report", *words)
    assert "report needs the folder of a run" in refusal(page_of, [])


def test_broken_files_are_named(run):
    assert "All files that the run opened could be read." in describe_data_issues(load_run(run))
    (run / "unreadable.txt").write_bytes(b"a<b>.png\n\xff.png\n")
    said = describe_data_issues(load_run(run))[0]
    assert said.startswith("2 files") and said.endswith(": a<b>.png, \\udcff.png.")
    (run / "unreadable.txt").write_text("".join(f"{i}.png\n" for i in range(13)))
    said = describe_data_issues(load_run(run))[0]
    assert said.startswith("13 files") and ", and 3 more: " in said and said.endswith("unreadable.txt.")
    (run / "unreadable.txt").unlink()
    RunFolder(run).lock()
    RunFolder(run).note_unreadable([f"two\nlines/{i}.png" for i in range(6)])
    said = describe_data_issues(load_run(run))[0]
    assert said.startswith("6 files") and '"two\\nlines/0.png", ' in said and "\n" not in said


def test_exact_copies_are_counted(finished):
    found = load_run(finished)

    def said(**data):
        return describe_data_issues(replace(found, data=found.data | data))

    for data, words in (
        ({}, "No training image is an exact copy"),
        ({"held_out_copies": [1, 5]}, "2 exact copies of held-out images were excluded"),
        ({"held_out_copies": [1]}, "1 exact copy of held-out images was excluded"),
        ({"held_out_looked": False}, "not searched"),
    ):
        assert any(words in one for one in said(**data))


def test_near_copies_are_reported(finished, tmp_path, images):
    rng, folder = np.random.default_rng(0), tmp_path / "films"
    folder.mkdir()
    for film in range(15):
        scene = rng.integers(0, 200, (32, 32, 3))
        for frame in range(5):
            frames = (scene + rng.integers(0, 20, scene.shape)).astype(np.uint8)
            Image.fromarray(frames).save(folder / f"film{film}_{frame:03}.png")
    said = describe_data_issues(load_run(finished), open_data(folder).train)[-1]
    assert said.startswith("Neighbours in name are near copies (") and "--group" in said
    assert "No near copies were found" in describe_data_issues(load_run(finished), open_data(images).train)[-1]
    plain = describe_data_issues(load_run(finished))
    assert describe_data_issues(load_run(finished), open_data("shapes:40").train) == plain  # they have no names
