"""Held-out images are new to the weights of a run and of all runs before it."""

import os
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from killing import SMALL
from PIL import Image
from resolved import resolved_settings
from running import column, rows

from patchloom.data.sources.open import open_data
from patchloom.data.splits import default_held_out_share
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.evaluate.protocols import evaluate
from patchloom.look import look
from patchloom.nets.checkpoints.format import load_encoder_file, save_encoder
from patchloom.report.report import report
from patchloom.runs.folder import RunFolder
from patchloom.runs.held_out import (
    HeldOut,
    choose_held_out,
    describe_seen,
    held_out_count,
    note_test_overlap,
    own_held_out,
    seen_in_pretraining,
    stored_held_out,
    unchanged_held_out,
    with_share,
)
from patchloom.runs.settings import ResolvedSettings, Settings
from patchloom.runs.training_set import Record
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

QUICK = SMALL | {"epochs": 1, "task": "mae"}
STATS = Stats((0.5,) * 3, (0.2,) * 3, 32, 32, 10, [])


def more(folder: Path, numbers: range, side: int = 32) -> Path:
    """Add images of noise to a folder, a different one for each number."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in numbers:
        pixels = np.random.default_rng(1000 + i).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.png")
    return folder


class Begun(NamedTuple):
    """A run that has begun, with the contents of its training and its held-out images."""

    folder: RunFolder
    settings: ResolvedSettings
    held_out: HeldOut
    record: Record
    trained: set[bytes]
    held: set[bytes]


def begun(data: Path | str, out: Path, **given: Any) -> Begun:
    """Begin a run, which chooses its held-out images, without training it."""
    settings = resolved_settings(str(data), **{"held_out": 0.2} | given)
    source, folder = open_data(data, group=settings.group).train, RunFolder(out)
    found, record = choose_held_out(settings, source)
    folder.begin(settings, settings, {}, STATS, source.fingerprint(), found.plain(), record)
    contents = source.contents()
    parts = [set()] * 2 if contents is None else [{*part.contents().tolist()} for part in found.parts(source)]
    return Begun(folder, settings, found, record, *parts)


@pytest.fixture(scope="module")
def first(images, tmp_path_factory):
    return begun(images, tmp_path_factory.mktemp("first") / "run")


@pytest.mark.slow
def test_training_noise_is_not_held_out(tmp_path):
    """Positions in noise can only be memorised, so accuracy on new noise is chance."""
    still = {"name": "droppos", "mask_ratio": 0.0, "position_mask_ratio": 0.75}
    options = SMALL | {"img_size": 16, "batch_size": 32, "held_out": 0.25, "crop_scale": 1.0, "flip": False}
    options |= {"model": {"name": "nano", "embed_dim": 64, "depth": 2, "num_heads": 2}, "task": still}
    folder = more(tmp_path / "noise", range(64), 16)
    one = pretrain(folder, out=tmp_path / "one", **options | {"epochs": 150, "blr": 1e-2}).folder
    assert column(one, "position_accuracy")[-1] > 0.95, "memorised"
    frozen = options | {"from_run": str(one), "epochs": 1, "blr": 1e-9}
    pretrain(folder, out=tmp_path / "seed", seed=1, **frozen)
    pretrain(more(folder, range(64, 100), 16), out=tmp_path / "grown", **frozen)
    for name, held in (("seed", 16), ("grown", 25)):
        assert len(RunFolder(tmp_path / name).read_data()["held_out"]) == held
        noise = 3 * (1 / 3 * 2 / 3 / (3 * held)) ** 0.5  # three of four places are asked for: chance is a third
        assert abs(column(tmp_path / name, "held_out")[-1] - 1 / 3) < noise


def test_a_chain_of_runs_never_holds_out_what_one_of_them_trained_on(images, first, tmp_path):
    grown = shutil.copytree(images, tmp_path / "grown")
    more(grown / "a", range(60, 80))
    second = begun(grown, tmp_path / "second", from_run=str(first.folder.path), seed=3)
    third = begun(images, tmp_path / "third", from_run=str(second.folder.path), seed=4)
    assert (len(first.held), len(first.trained), len(second.held)) == (12, 48, 16)
    assert not second.held & first.trained and not third.held & (first.trained | second.trained)
    assert not first.held >= second.held and third.held < first.held
    assert len(third.record.contents) == len(first.trained | second.trained | third.trained)
    assert third.record.unknown == () and third.held_out.doubt == ""
    fourth = begun(images, tmp_path / "fourth", from_run=str(third.folder.path), seed=5)
    assert fourth.held == third.held, "no others are left"


def test_if_all_images_were_trained_on_every_line_says_so(images, small_run, tmp_path, capsys):
    before, some = small_run("mae"), tmp_path / "some"
    source, held = open_data(images).train, RunFolder(before).read_data()["held_out"]
    for path in (Path(source.describe(i)) for i in range(60) if i not in held):
        (some / path.parent.name).mkdir(parents=True, exist_ok=True)
        os.symlink(path, some / path.parent.name / path.name)
    run = pretrain(some, from_run=str(before), out=tmp_path / "run", **QUICK)
    told = capsys.readouterr().out
    doubt = f"the weights of {before}, with which it began, were trained on them"
    assert f"the validation images were held out of this run, but {doubt}" in told
    assert f"The test images were held out of this run, but {doubt}" in told
    assert f"10 images that the weights of {before} were trained on" in run.summary
    new = pretrain(images, from_run=str(before), seed=7, out=tmp_path / "new", **QUICK)
    assert "12 held-out images" in new.summary and "were trained on" not in new.summary


@pytest.mark.parametrize(
    ("found", "name", "sentence"),
    [
        ({}, "held-out images", "They are the held-out ones, which were never trained on."),
        ({"looked": False}, "held-out images", "Exact copies of them were not looked for"),
        ({"start": "runs/a"}, "held-out images", "neither this run nor the weights of runs/a, .* or on exact copies"),
        ({"start": "x", "doubt": "trained"}, "images that the weights of x were trained on", "x, .* were trained on"),
        ({"start": "x", "doubt": "unknown"}, "images that the weights of x may have been", "x, .* may have been tra"),
    ],
)
def test_sentences_say_what_is_known(found, name, sentence):
    held_out = HeldOut(np.array([0]), np.array([]), **found)
    assert held_out.named().startswith(name)
    assert re.search(sentence, held_out.sentence("They"))


def test_copies_of_test_images_are_counted(images, first, tmp_path):
    own = shutil.copytree(images, tmp_path / "own")
    more(own / "a", range(60, 64))
    test, settings = open_data(own).train, first.settings
    assert "48 of 64 test images are exact copies of training images" in note_test_overlap(first.folder, settings, test)
    assert note_test_overlap(first.folder, settings, open_data(more(tmp_path / "new", range(5))).train) == ""
    later = begun("digits", tmp_path / "later", from_run=str(first.folder.path))
    assert "may have been trained on the test images" in note_test_overlap(later.folder, later.settings, test)


def test_what_an_encoder_has_seen_is_known_from_the_record_beside_it(images, small_run, tmp_path):
    run, source = shutil.copytree(small_run("mae"), tmp_path / "run"), open_data(images).train
    file = run / "encoder.safetensors"
    held = source.subset(np.array(RunFolder(run).read_data()["held_out"]))
    for one in (run, file):
        assert describe_seen(one, source) == "48 of those 60 images were in pre-training, without their labels"
    assert describe_seen(file, held) == "none of those images were in pre-training"
    assert "48 of 60 test images were in pre-training" in seen_in_pretraining(file, source)
    assert seen_in_pretraining(file, held) == ""
    known = begun(images, tmp_path / "known", init=str(file), seed=1)
    assert known.held_out.doubt == "" and known.held == {*held.contents().tolist()}
    vit, card = load_encoder_file(run)
    save_encoder(vit, replace(card, trained_on=""), file)
    assert "may have seen" in describe_seen(file, source)
    strange = begun(images, tmp_path / "strange", init=str(file))
    assert strange.held_out.doubt == "unknown" and strange.record.unknown == (str(file),)


def test_images_without_contents(images, first, tmp_path):
    """The contents of a command's output are unknown without running it; that they are unchanged is known."""
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(images, ".")
    data = f"pipe:cat {tmp_path / 'all.tar'}"
    one = begun(data, tmp_path / "one")
    assert one.record.unknown == (data,) and not one.held_out.looked
    again = begun(data, tmp_path / "again", from_run=str(one.folder.path), seed=5)
    assert again.held_out.indices.tolist() == one.held_out.indices.tolist() and again.held_out.doubt == ""
    for start, others, doubt in [
        (again, images, "unknown"),
        (first, data, "unknown"),
        (first, "digits", "unknown"),  # files, and pixels in memory
        (first, "shapes:50", ""),
        (first, images, ""),
    ]:
        asked = Settings(str(others), from_run=str(start.folder.path))
        found, record = choose_held_out(asked, open_data(others).train)
        assert found.doubt == doubt, (start, others)
        assert record.unknown == ((data,) if start is again or others == data else ())
        assert found.looked == (others != data)


def test_rewritten_files_do_not_count_as_new_images(images, first, tmp_path):
    copy = shutil.copytree(images, tmp_path / "copy")
    for path in sorted(copy.rglob("*.png")):
        Image.open(path).save(path, compress_level=0)  # the same pixels
    anew, start = open_data(copy).train, str(first.folder.path)
    assert choose_held_out(Settings(str(images), from_run=start), anew)[0].doubt == "unknown"
    # elsewhere they may well be others: then it is only said what is known
    assert choose_held_out(Settings(str(tmp_path / "other"), from_run=start), anew)[0].doubt == ""


def test_copies_of_held_out_images_are_not_trained_on(images, tmp_path):
    folder = shutil.copytree(images, tmp_path / "copied")
    for i, path in enumerate(sorted(folder.rglob("*.png"))):
        other = path.with_name(f"copy of {path.name}")
        other.symlink_to(path.name) if i % 2 else shutil.copy(path, other)
    run = begun(folder, tmp_path / "run")
    assert not run.trained & run.held and (len(run.trained), len(run.held)) == (36, 24)
    assert len(run.held_out.copies) == 24
    # the stored split is that of the very same images, and no file is read to find them
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]) / "patchloom" / "contents")
    again = stored_held_out(run.folder, run.settings, open_data(folder).train)
    assert (again.indices == run.held_out.indices).all() and (again.copies == run.held_out.copies).all()
    assert not (Path(os.environ["XDG_CACHE_HOME"]) / "patchloom" / "contents").exists()


def test_a_folder_that_has_grown_has_a_new_split_without_training_images(images, tmp_path, monkeypatch):
    folder = shutil.copytree(images, tmp_path / "images")
    run = begun(folder, tmp_path / "run")
    source = open_data(folder).train
    assert own_held_out(run.folder, run.settings, source).indices.tolist() == run.held_out.indices.tolist()
    assert unchanged_held_out(run.folder.path, source).indices.tolist() == run.held_out.indices.tolist()
    more(folder / "a", range(30))
    grown = open_data(folder).train
    found = own_held_out(run.folder, run.settings, grown)
    contents = {*found.parts(grown)[1].contents().tolist()}
    assert len(contents) == 18 and not contents & run.trained
    with pytest.raises(PatchloomError, match="have changed since"):
        unchanged_held_out(run.folder.path, grown)


def test_a_run_holds_out_whole_groups(tmp_path):
    folder = tmp_path / "films"
    for film in range(4):  # of nine frames of noise each
        for path in more(folder / "new", range(100 * film, 100 * film + 9)).iterdir():
            path.rename(folder / f"film{film}_{path.name}")
    run = begun(folder, tmp_path / "run", group="^(.*)_")
    assert run.folder.read_config().group == "^(.*)_" and len(run.held) == 9
    assert len({open_data(folder).train.describe(i).partition("_")[0] for i in run.held_out.indices}) == 1
    # more frames: whole films that it did not train on
    more(folder / "new", range(1000, 1006))
    source = open_data(folder, group="^(.*)_").train
    found = own_held_out(run.folder, run.settings, source)
    assert not {*found.parts(source)[1].contents().tolist()} & run.trained


def test_number_of_held_out_images():
    shares = {n: default_held_out_share(n)[0] for n in (2, 10, 40, 300, 320, 367, 1279, 1280, 1437, 5000, 50_000)}
    counts = {n: held_out_count(Settings("x"), range(n)) for n in shares}
    assert counts == {
        2: 0, 10: 2, 40: 8, 300: 60, 320: 64, 367: 64, 1279: 64, 1280: 64, 1437: 72, 5000: 250, 50_000: 2000,
    }  # fmt: skip
    assert all(round(share * n) == counts[n] for n, share in shares.items() if n < 50_000)
    assert with_share(Settings("x", held_out=0.3), 10) == (Settings("x", held_out=0.3), {})
    settings, reasons = with_share(Settings("x"), 10)
    assert settings.held_out == 0.2 and reasons == {"held_out": "a fifth of 10 images, since fewer say little"}


def test_several_folders_resume_from_any_working_directory(tmp_path, monkeypatch):
    more(tmp_path / "a", range(20)), more(tmp_path / "b", range(30, 50))
    monkeypatch.chdir(tmp_path)
    run = pretrain(["a", "b"], **QUICK).folder
    assert run == Path("runs/a-b-mae") and RunFolder(run).read_config().data == [str(tmp_path / name) for name in "ab"]
    (run / "summary.txt").unlink()
    monkeypatch.chdir(tmp_path / "a")
    pretrain([tmp_path / "a", f"{tmp_path}/b/"], out=tmp_path / run, **QUICK)
    shown = []
    monkeypatch.setattr(look, "draw_task", lambda task, source, *rest, **more: shown.append(source.fingerprint()) or [])
    look.look(tmp_path / run)
    look.look(tmp_path / run, [tmp_path / "a", tmp_path / "b"])
    assert shown[0] == shown[1]


# --held_out 0: nothing is measured, and everything that would need it says so.

ALL = SMALL | {"epochs": 2, "held_out": 0.0}


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    return pretrain(images, "mae", out=tmp_path_factory.mktemp("all") / "run", **ALL).folder


def test_all_images_are_trained_on(whole, images):
    said = (whole / "log.txt").read_text()
    assert "60 images to train on, 0 held out: nothing is measured, and there is no verdict" in said
    assert RunFolder(whole).read_summary() == "Trained on all 60 images, so nothing was measured on others."
    assert describe_seen(whole, open_data(images).train).startswith("60 of those 60 images")
    assert not any(name.startswith(("held_out", "baseline", "knn", "features")) for name in rows(whole)[0])
    assert len(rows(whole)) > 3 and np.isfinite(column(whole, "loss")).all()
    assert not (whole / "verdict.yaml").exists() and (whole / "encoder.safetensors").is_file()
    assert pretrain(images, "mae", out=whole, **ALL).plain()["verdict"] is None  # finished: nothing is done again


def test_what_needs_held_out_images_says_so(whole, images, tmp_path):
    with pytest.raises(PatchloomError, match="was trained on all of its images .* as in patchloom look RUN IMAGES"):
        look.look(whole)
    look.look(whole, "shapes", images=4)
    page = report(whole, out=tmp_path / "page.html").read_text("utf-8")
    assert "No images were held out (--held_out 0)" in page
    with pytest.raises(PatchloomError, match="images: leave out --patience or --held_out 0"):
        pretrain(images, "mae", out=tmp_path / "other", patience=2, **ALL)
    with pytest.raises(PatchloomError, match="--held_out must be 0 or more and below 1, not -0.1"):
        pretrain(images, "mae", out=tmp_path / "other", **SMALL | {"held_out": -0.1})
    assert choose_held_out(Settings(str(images), from_run=str(whole)), open_data(images).train)[0].doubt == "trained"
    knn = evaluate("knn", whole, images, device="cpu", ks=(5,), pooling="mean")
    assert "12 of those 12 images were in pre-training" in knn.method
