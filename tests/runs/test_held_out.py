"""Held-out images are new to the weights of a run and of all runs before it."""

import csv
import hashlib
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from killing import SMALL
from PIL import Image
from ranks import run_together

from patchloom.data.sources.open import open_data
from patchloom.data.splits import default_held_out_share
from patchloom.errors import PatchloomError
from patchloom.evaluate import frozen
from patchloom.evaluate.settings import EvalSettings
from patchloom.look import look
from patchloom.nets.checkpoints.format import load_encoder_file, save_encoder
from patchloom.runs.checksummed import read_checksummed, write_checksummed
from patchloom.runs.folder import RunFolder
from patchloom.runs.held_out import choose_held_out, held_out_count, own_held_out, stored_held_out, with_share
from patchloom.runs.settings import Settings
from patchloom.runs.training_set import read_record
from patchloom.train import final_evaluation
from patchloom.train import loop as pretraining
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

QUICK = SMALL | {"epochs": 1, "task": "mae"}
NEW = "which were never trained on"


def more(folder: Path, numbers: range, side: int = 32) -> Path:
    """Add images of noise to a folder, a different one for each number."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in numbers:
        pixels = np.random.default_rng(1000 + i).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.png")
    return folder


def contents(paths) -> set[bytes]:
    return {hashlib.sha256(Path(path).read_bytes()).digest() for path in paths}


@pytest.fixture
def parts(monkeypatch):
    """Digests of the training and held-out files of each run, recorded while it runs."""
    found, train = [], pretraining.train

    def noted(fabric, task, source, *given):
        *_, validation, _, _ = given
        found.append(tuple(contents(one.describe(i) for i in range(len(one))) for one in (source, validation.held_out)))
        return train(fabric, task, source, *given)

    monkeypatch.setattr(pretraining, "train", noted)
    return found


@pytest.fixture(scope="module")
def first(images, tmp_path_factory):
    return pretrain(images, out=tmp_path_factory.mktemp("first") / "run", **QUICK).folder


def measured(run: Path) -> list[float]:
    with open(run / "metrics.csv", newline="") as file:
        return [float(row["held_out"]) for row in csv.DictReader(file) if row["held_out"]]


def test_training_noise_is_not_held_out(tmp_path, parts, capsys):
    """Positions in noise can only be memorised, so accuracy on new noise is chance."""
    still = {"name": "droppos", "mask_ratio": 0.0, "position_mask_ratio": 0.75}
    options = SMALL | {"img_size": 16, "batch_size": 32, "held_out": 0.25, "crop_scale": 1.0, "flip": False}
    options |= {"model": {"name": "nano", "embed_dim": 64, "depth": 2, "num_heads": 2}, "task": still}
    folder = more(tmp_path / "noise", range(64), 16)
    one = pretrain(folder, out=tmp_path / "one", **options | {"epochs": 150, "blr": 1e-2}).folder
    with open(one / "metrics.csv", newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["position_accuracy"]) > 0.95, "memorised"
    frozen = options | {"from_run": str(one), "epochs": 1, "blr": 1e-9}
    pretrain(folder, out=tmp_path / "seed", seed=1, **frozen)
    pretrain(more(folder, range(64, 100), 16), out=tmp_path / "grown", **frozen)
    for run, (training, held) in zip(("seed", "grown"), parts[1:], strict=True):
        assert not held & (parts[0][0] | training) and len(held) in (16, 25)
        noise = 3 * (1 / 3 * 2 / 3 / (3 * len(held))) ** 0.5  # three of four places are asked for: chance is a third
        assert abs(measured(tmp_path / run)[-1] - 1 / 3) < noise
    assert "held-out images" in (tmp_path / "seed" / "summary.txt").read_text()
    assert "memorised" not in capsys.readouterr().out


def test_a_chain_of_runs_never_holds_out_what_one_of_them_trained_on(images, tmp_path, parts, capsys):
    grown = tmp_path / "grown"
    pretrain(images, out=tmp_path / "again", **QUICK)
    shutil.copytree(images, grown)
    more(grown / "a", range(60, 80))
    second = pretrain(grown, from_run=str(tmp_path / "again"), seed=3, out=tmp_path / "second", **QUICK).folder
    pretrain(images, from_run=str(second), seed=4, out=tmp_path / "third", **QUICK)
    (train1, held1), (train2, held2), (train3, held3) = parts
    assert not held2 & train1 and not held3 & (train1 | train2)
    assert len(held2) == 16 and not held1 >= held2 and held3 <= held1
    record = read_record(RunFolder(tmp_path / "third").trained_on)
    assert len(record.contents) == len(train1 | train2 | train3) and record.unknown == ()
    capsys.readouterr()
    pretrain(images, from_run=str(tmp_path / "third"), seed=5, out=tmp_path / "fourth", **QUICK)
    assert parts[3] == parts[2], "no others are left"
    new = (
        f"of 12 images are held out: all others are copies, or the weights of {tmp_path / 'third'} were trained on them"
    )
    assert len(held3) < 12 and f"only {len(held3)} {new}" in capsys.readouterr().out


def test_if_all_images_were_trained_on_every_line_says_so(images, first, tmp_path, capsys):
    some, source = tmp_path / "some", open_data(images).train
    for path in map(Path, map(source.describe, trained_on(first))):
        (some / path.parent.name).mkdir(parents=True, exist_ok=True)
        os.symlink(path, some / path.parent.name / path.name)
    capsys.readouterr()
    run = pretrain(some, from_run=str(first), out=tmp_path / "run", **QUICK)
    told = capsys.readouterr().out
    doubt = f"the weights of {first}, with which it began, were trained on them"
    assert f"the validation images were held out of this run, but {doubt}" in told
    assert f"10 images that the weights of {first} were trained on" in run.summary
    assert f"The test images were held out of this run, but {doubt}" in told
    assert NEW not in told and "held-out images" not in told + run.summary
    pretrain(some, from_run=str(run.folder), out=tmp_path / "next", **QUICK)
    assert f"the weights of {run.folder}, with which it began, were trained on them" in capsys.readouterr().out


def test_final_evaluation_states_whether_images_are_new(images, first, tmp_path, monkeypatch, capsys):
    stories = []
    compare = frozen.compare_frozen

    def noted(protocols, vit, card, parts, *rest, **more):
        stories.append(parts.story)
        return compare(protocols, vit, card, parts, *rest, **more)

    monkeypatch.setattr(final_evaluation, "compare_frozen", noted)
    pretrain(images, from_run=str(first), out=tmp_path / "new", **QUICK)
    pretrain(images, from_run=str(older(first, tmp_path / "old")), out=tmp_path / "unknown", **QUICK)
    assert stories[0] == (
        f"The test images are the held-out ones: neither this run nor the weights of {first}, with which it began, "
        "were trained on them or on exact copies."
    )
    assert "held out of this run, but the weights of" in stories[1] and "may have been trained on them" in stories[1]
    # test images of the data's own
    own = tmp_path / "own"
    shutil.copytree(images, own / "train")
    shutil.copytree(images, own / "test")
    more(own / "test" / "a", range(60, 64))
    pretrain(own, out=tmp_path / "tested", **QUICK)
    assert "48 of 64 test images are exact copies of training images" in stories[2]
    assert "  48 of 64 test images are exact copies" in capsys.readouterr().out
    more(tmp_path / "others" / "train" / "a", range(70, 80))
    more(tmp_path / "others" / "train" / "b", range(80, 90))
    shutil.copytree(images, tmp_path / "others" / "test")
    pretrain(tmp_path / "others", from_run=str(first), out=tmp_path / "tested-later", **QUICK)
    assert "48 of 60 test images are exact copies of training images" in stories[3]


def older(run: Path, to: Path) -> Path:
    """Copy a run without the files that older versions did not write: held-out split and training record."""
    shutil.copytree(run, to)
    (to / "trained_on.bin").unlink()
    found = yaml.safe_load((to / "data.yaml").read_text())
    found = {name: value for name, value in found.items() if not name.startswith("held_out")}
    (to / "data.yaml").write_text(yaml.safe_dump(found))
    vit, card = load_encoder_file(to)
    save_encoder(vit, card.__class__(card.spec, card.mean, card.std, card.task, card.name), to / "encoder.safetensors")
    return to


def test_a_run_of_an_older_version(images, first, tmp_path, parts, capsys):
    old = older(first, tmp_path / "old")
    settings = RunFolder(old).read_config()
    train = open_data(images).train
    there = stored_held_out(RunFolder(first), settings, train)
    assert (stored_held_out(RunFolder(old), settings, train).indices == there.indices).all()
    (old / "summary.txt").unlink()
    resumed = pretrain(images, out=old, **QUICK)
    assert "on 12 held-out images" in resumed.summary and not (old / "trained_on.bin").exists()
    capsys.readouterr()
    run = pretrain(images, from_run=str(old), out=tmp_path / "run", **QUICK)
    told = capsys.readouterr().out
    assert f"the weights of {old}, with which it began, may have been trained on them" in told and NEW not in told
    assert f"on 12 images that the weights of {old} may have been trained on" in run.summary
    # nor can anything be claimed after that
    later = pretrain(more(tmp_path / "new", range(20)), from_run=str(run.folder), out=tmp_path / "later", **QUICK)
    assert "may have been trained on" in later.summary


def trained_on(run: Path) -> list[int]:
    """Return the indices of the images, of 60, that a run trained on."""
    return np.setdiff1d(np.arange(60), RunFolder(run).read_data()["held_out"]).tolist()


@pytest.mark.parametrize("known", [True, False])
def test_an_encoder_has_the_record_beside_it(known, images, first, tmp_path, parts, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(first, moved)
    file = moved / "encoder.safetensors"
    if not known:  # another run's, which took its place
        other = pretrain(images, out=tmp_path / "other", **QUICK | {"seed": 7}).folder
        shutil.copy(other / "encoder.safetensors", file)
    run = pretrain(images, init=str(file), seed=1, out=tmp_path / "run", **QUICK)
    if known:
        assert not parts[-1][1] & contents(open_data(images).train.describe(i) for i in trained_on(first))
        assert "on 12 held-out images" in run.summary
    else:
        assert f"on 12 images that the weights of {file} may have been trained on" in run.summary
        assert read_record(RunFolder(run.folder).trained_on).unknown == (str(file),)


def test_images_without_contents(images, first, tmp_path):
    """The contents of a command's output are unknown without running it; that they are unchanged is known."""
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(images, ".")
    data = f"pipe:cat {tmp_path / 'all.tar'}"
    one = pretrain(data, out=tmp_path / "one", **QUICK).folder
    assert read_record(RunFolder(one).trained_on).unknown == (data,)
    again = pretrain(data, from_run=str(one), seed=5, out=tmp_path / "again", **QUICK)
    assert RunFolder(again.folder).read_data()["held_out"] == RunFolder(one).read_data()["held_out"]
    assert "on 12 held-out images" in again.summary
    for start, others, doubt in [
        (again.folder, images, "unknown"),
        (first, data, "unknown"),
        (first, "digits", "unknown"),  # files, and pixels in memory
        (first, "shapes:50", ""),
        (first, images, ""),
    ]:
        found, record = choose_held_out(Settings(str(others), from_run=str(start)), open_data(others).train)
        assert found.doubt == doubt, (start, others)
        assert record.unknown == ((data,) if start == again.folder or others == data else ())
        assert found.looked == (others != data)
    assert "not checked for exact copies among the images" in (again.folder / "log.txt").read_text()


def test_rewritten_files_do_not_count_as_new_images(images, first, tmp_path):
    asked = Settings(str(images), from_run=str(first), seed=1)
    copy = shutil.copytree(images, tmp_path / "copy")
    for path in sorted(copy.rglob("*.png")):
        Image.open(path).save(path, compress_level=0)  # the same pixels
    anew = open_data(copy).train
    assert choose_held_out(asked, anew)[0].doubt == "unknown"
    other = tmp_path / "other"  # elsewhere they may well be others: then it is only said what is known
    found = choose_held_out(replace(asked, data=str(other)), anew)[0]
    assert found.doubt == "" and f"neither this run nor the weights of {first}" in found.sentence("They")


@pytest.fixture
def copied(images, tmp_path):
    """Folder with every image twice, half of the copies as links."""
    folder = tmp_path / "copied"
    shutil.copytree(images, folder)
    for i, path in enumerate(sorted(folder.rglob("*.png"))):
        other = path.with_name(f"copy of {path.name}")
        other.symlink_to(path.name) if i % 2 else shutil.copy(path, other)
    return folder


def test_copies_of_held_out_images_are_not_trained_on(copied, tmp_path, parts, capsys):
    run = pretrain(copied, out=tmp_path / "run", **QUICK).folder
    assert "72 images to train on, 24 held out, 24 exact copies of those left out" in capsys.readouterr().out
    ((training, held),) = parts
    assert not training & held and (len(training), len(held)) == (36, 24)
    # going on: the very same images, and no file is read to find them
    (run / "summary.txt").unlink()
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]) / "patchloom" / "contents")
    pretrain(copied, out=run, **QUICK)
    assert parts[1] == parts[0] and not (Path(os.environ["XDG_CACHE_HOME"]) / "patchloom" / "contents").exists()


def test_cached_images_have_the_same_split(copied, tmp_path, parts):
    pretrain(copied, out=tmp_path / "files", **QUICK)
    pretrain(copied, out=tmp_path / "kept", cache="whole", **QUICK)
    assert parts[0] == parts[1]
    assert measured(tmp_path / "files") == measured(tmp_path / "kept")


def test_several_processes_hold_out_what_the_first_one_does(copied, first, tmp_path):
    ended, _ = run_together(copied, tmp_path / "both", 2, QUICK | {"from_run": str(first)})
    assert [one.code for one in ended] == [0, 0], "\n".join(one.told for one in ended)
    alone = pretrain(copied, from_run=str(first), out=tmp_path / "alone", **QUICK).folder
    found = [RunFolder(run).read_data() for run in (tmp_path / "both", alone)]
    assert found[0]["held_out"] == found[1]["held_out"] and len(found[0]["held_out"]) == 12
    assert measured(tmp_path / "both") == pytest.approx(measured(alone), rel=1e-4)
    records = [read_record(RunFolder(run).trained_on) for run in (tmp_path / "both", alone)]
    assert (records[0].contents == records[1].contents).all()


def test_pictures_of_a_run_whose_folder_has_grown_show_what_it_did_not_train_on(images, tmp_path, parts, monkeypatch):
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    run = pretrain(folder, out=tmp_path / "run", **QUICK).folder
    shown = []
    monkeypatch.setattr(look, "draw_task", lambda task, source, *rest, **more: shown.append(source) or [])
    look.look(run)
    more(folder / "a", range(30))
    look.look(run)
    before, after = (contents(one.describe(i) for i in range(len(one))) for one in shown)
    assert before == parts[0][1] and not after & parts[0][0] and len(after) == 18


def test_positions_are_evaluated_on_the_stored_split(images, first, tmp_path):
    from patchloom.evaluate.protocols.positions import positions

    task = {"name": "droppos", "position_mask_ratio": 0.5}
    run = pretrain(images, from_run=str(first), out=tmp_path / "run", seed=9, **QUICK | {"task": task}).folder
    report = positions(run, images, EvalSettings(device="cpu"))
    assert "neither this run nor the weights of" in report.protocol and report.n_test == 12
    old = older(run, tmp_path / "old")
    assert "may have been trained on them" in positions(old, images, EvalSettings(device="cpu")).protocol


def films(folder: Path) -> Path:
    """Four films of nine frames of noise each."""
    for film in range(4):
        for path in more(folder / "new", range(100 * film, 100 * film + 9)).iterdir():
            path.rename(folder / f"film{film}_{path.name}")
    return folder


def test_a_run_holds_out_whole_groups_and_goes_on_with_them(tmp_path, parts, capsys):
    folder = films(tmp_path / "films")
    options = QUICK | {"group": "^(.*)_", "held_out": "auto"}
    run = pretrain(folder, out=tmp_path / "run", **options).folder
    told = capsys.readouterr().out
    assert "27 images to train on, 9 held out" in told
    assert "a fifth of 36 images, since fewer say little; 9 in whole groups" in told
    held = RunFolder(run).read_data()["held_out"]
    assert len({open_data(folder).train.describe(i).partition("_")[0] for i in held}) == 1
    assert RunFolder(run).read_config().group == "^(.*)_"
    (run / "summary.txt").unlink()
    pretrain(folder, out=run, **options)
    assert parts[1] == parts[0]
    with pytest.raises(PatchloomError, match="group: was "):
        pretrain(folder, out=run, **options | {"group": None})
    # more frames: whole films that it did not train on
    before = contents(open_data(folder).train.describe(i) for i in held)
    more(folder / "new", range(1000, 1006))
    source = open_data(folder, group="^(.*)_").train
    found = own_held_out(RunFolder(run), RunFolder(run).read_config(), source)
    assert contents(source.describe(i) for i in found.indices) <= before | contents((folder / "new").iterdir())


def test_number_of_held_out_images():
    shares = {n: default_held_out_share(n)[0] for n in (2, 10, 40, 300, 320, 367, 1279, 1280, 1437, 5000, 50_000)}
    counts = {n: held_out_count(Settings("x"), Sized(n)) for n in shares}
    assert counts == {
        2: 0, 10: 2, 40: 8, 300: 60, 320: 64, 367: 64, 1279: 64, 1280: 64, 1437: 72, 5000: 250, 50_000: 2000,
    }  # fmt: skip
    assert all(round(share * n) == counts[n] for n, share in shares.items() if n < 50_000)
    # of the built-in sets it stays what it was
    assert [held_out_count(Settings("x", held_out=0.05), Sized(n)) for n in (1437, 5000, 50_000)] == [72, 250, 2000]
    assert with_share(Settings("x", held_out=0.3), 10) == (Settings("x", held_out=0.3), {})
    settings, reasons = with_share(Settings("x"), 10)
    assert settings.held_out == 0.2 and reasons == {"held_out": "a fifth of 10 images, since fewer say little"}


class Sized(list):
    def __init__(self, n: int) -> None:
        super().__init__(range(n))


def test_a_run_of_a_version_without_auto_goes_on(tmp_path, parts):
    folder = more(tmp_path / "images", range(40))
    run = pretrain(folder, out=tmp_path / "run", **QUICK | {"held_out": 0.05}).folder
    (run / "summary.txt").unlink()
    with pytest.raises(PatchloomError, match="held_out: was 0.05, now auto"):  # this version was told
        pretrain(folder, out=run, **QUICK | {"held_out": "auto"})
    requested = read_checksummed(run / "requested.yaml")
    del requested["recipe"]  # which no version had that did not know auto
    write_checksummed(run / "requested.yaml", requested)
    pretrain(folder, out=run, **QUICK | {"held_out": "auto"})
    assert parts[1] == parts[0] and len(parts[0][1]) == 2
    with pytest.raises(PatchloomError, match="held_out: was 0.05, now 0.1"):
        pretrain(folder, out=run, **QUICK | {"held_out": 0.1})


def test_several_folders_resume_from_any_working_directory(tmp_path, parts, monkeypatch):
    more(tmp_path / "a", range(20)), more(tmp_path / "b", range(30, 50))
    monkeypatch.chdir(tmp_path)
    run = pretrain(["a", "b"], **QUICK).folder
    assert run == Path("runs/a-b-mae") and RunFolder(run).read_config().data == [str(tmp_path / name) for name in "ab"]
    (run / "summary.txt").unlink()
    monkeypatch.chdir(tmp_path / "a")
    pretrain([tmp_path / "a", f"{tmp_path}/b/"], out=tmp_path / run, **QUICK)
    assert parts[1] == parts[0]
    shown = []
    monkeypatch.setattr(look, "draw_task", lambda task, source, *rest, **more: shown.append(source) or [])
    look.look(tmp_path / run)
    look.look(tmp_path / run, [tmp_path / "a", tmp_path / "b"])
    assert [contents(one.describe(i) for i in range(len(one))) for one in shown] == [parts[0][1]] * 2


def test_near_copies_are_reported_at_the_start(tmp_path, capsys):
    for film in range(3):
        ends = [np.random.default_rng([film, end]).integers(0, 256, (4, 4, 3), dtype=np.uint8) for end in (0, 1)]
        for frame in range(15):
            pixels = ends[0] + (ends[1].astype(float) - ends[0]) * frame / 60
            (tmp_path / "films").mkdir(exist_ok=True)
            picture = Image.fromarray(pixels.astype(np.uint8)).resize((32, 32), Image.BICUBIC)
            picture.save(tmp_path / "films" / f"film{film}_{frame:03}.png")
    pretrain(tmp_path / "films", out=tmp_path / "run", **QUICK)
    told = capsys.readouterr().out
    assert (
        "warning: neighbours in name are near copies" in told and "--group '^(.*)_' keeps them together, in 3" in told
    )
    pretrain(tmp_path / "films", out=tmp_path / "grouped", **QUICK | {"group": "^(.*)_"})
    told = capsys.readouterr().out
    held_out = RunFolder(tmp_path / "grouped").read_data()["held_out"]
    assert "near copies" not in told and f"held-out groups: 1 (film{held_out[0] // 15}) of 3; so few groups" in told
