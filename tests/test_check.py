"""``check``: statistics against numpy, reported faults, and a proposal that pretrain accepts."""

import os
import re
import shlex
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from refusing import failed

from patchloom.check import check
from patchloom.cli import main
from patchloom.data.scan import survey
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.options.parse import parse_pretrain
from patchloom.runs.held_out import with_share
from patchloom.runs.settings import request
from patchloom.train.estimate import Forecast
from patchloom.train.resolve import resolve

pytestmark = pytest.mark.usefixtures("quick_probe")

RNG = np.random.default_rng(0)


def noise(*shape, dtype=np.uint8):
    return RNG.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Folder of eight readable images in four formats and five sizes, seven unreadable ones, and a loop of links."""
    root = tmp_path_factory.mktemp("mixed")
    (root / "deep").mkdir()
    arrays = {"a.png": noise(20, 30, 3), "b.png": noise(24, 16), "c.npy": noise(20, 30, 3)}
    arrays["flat.png"] = np.full((10, 12, 3), 77, np.uint8)
    for name in ("a.png", "b.png", "flat.png"):
        Image.fromarray(arrays[name]).save(root / name)
    np.save(root / "c.npy", arrays["c.npy"])
    arrays["deep/d.tif"] = noise(50, 40, dtype=np.uint16)
    tifffile.imwrite(root / "deep/d.tif", arrays["deep/d.tif"])
    Image.fromarray(arrays["a.png"]).save(root / "e.bmp")  # the same pixels in another file format
    os.link(root / "b.png", root / "f.png")
    os.symlink(root / "a.png", root / "g.png")
    arrays |= {"e.bmp": arrays["a.png"], "f.png": arrays["b.png"], "g.png": arrays["a.png"]}

    size = struct.pack(">II", 60_000, 60_000)  # a decompression bomb: the header of the first, with another size
    content = (root / "a.png").read_bytes()
    head = b"IHDR" + size + content[24:29]
    (root / "bomb.png").write_bytes(content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:])
    (root / "empty.png").write_bytes(b"")
    Image.fromarray(noise(40, 40, 3)).save(root / "half.jpg")
    (root / "half.jpg").write_bytes((root / "half.jpg").read_bytes()[:900])
    (root / "page.jpg").write_text("<!doctype html><html><body>404</body></html>")
    (root / "text.png").write_text("a text, and no image")
    (root / "short.tif").write_bytes((root / "deep/d.tif").read_bytes()[:200])
    os.symlink(root / "nowhere.png", root / "lost.png")
    os.symlink(root, root / "deep" / "again")
    return root, arrays


BROKEN = ["bomb.png", "empty.png", "half.jpg", "lost.png", "page.jpg", "short.tif", "text.png"]


def quick(data, **how):
    return check(str(data), estimate=False, **how)


def named(found, indices, root):
    return [os.path.relpath(found.name(i), root) for i in indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_statistics_agree_with_numpy(mixed, workers, monkeypatch):
    monkeypatch.setattr("patchloom.data.reading._EACH", 4)  # several parts, and so few are not read in one process
    root, arrays = mixed
    found = survey(open_data(root).train, workers=workers)
    assert named(found, [i for i, _ in found.broken], root) == BROKEN
    assert named(found, found.rows["index"].tolist(), root) == sorted(arrays)
    sizes = [arrays[name].shape[:2] for name in sorted(arrays)]
    assert list(zip(found.rows["height"], found.rows["width"], strict=True)) == sizes
    assert found.rows["deep"].tolist() == [name == "deep/d.tif" for name in sorted(arrays)]
    assert found.kinds == {"PNG RGB": 3, "PNG L": 2, "NPY": 1, "TIFF I;16": 1, "BMP RGB": 1}
    assert [named(found, group, root) for group in found.copies] == [["a.png", "e.bmp", "g.png"], ["b.png", "f.png"]]
    assert found.repeated == 3
    assert named(found, found.flat, root) == ["flat.png"]

    most = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}
    colour = [np.broadcast_to(a if a.ndim == 3 else a[..., None], (*a.shape[:2], 3)) for a in arrays.values()]
    pixels = np.concatenate([a.reshape(-1, 3) / most[a.dtype] for a in colour])
    stats = found.stats(3)
    np.testing.assert_allclose(stats.mean, pixels.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.std, pixels.std(0), rtol=1e-5)
    assert (stats.height, stats.width) == tuple(np.round(np.median(sizes, axis=0)).astype(int))
    assert stats.sampled == len(arrays) and len(stats.unreadable) == len(BROKEN)


def test_printed_report(mixed, capsys, caplog, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    root, _ = mixed
    out = tmp_path / "lists" / "broken.tsv"
    assert main(["check", str(root), "--out", str(out), "--estimate", "false"]) == 0
    assert not caplog.records, "tifffile talks about the short file"
    printed = capsys.readouterr().out
    cells = {line[:16].strip(): line[16:].strip() for line in printed.splitlines()}
    assert [cells[name] for name in ("images", "unreadable", "copies", "one colour")] == ["15", "7", "3", "1"]
    assert cells["height x width"] == "10x12 to 50x40, 20x30 at the median; 4 sizes"
    assert cells["channels"] == "1 (3), 3 (5)" and cells["depth"] == "8 bits (7), more than 8 bits (1)"
    for words in ("7 of 15 images", "decompression bomb", "different scales", "5 different images are few", "38% are"):
        assert words in printed
    assert f"{root}/a.png = {root}/e.bmp = {root}/g.png; {root}/b.png = {root}/f.png" in printed
    lines = [line.split("\t") for line in out.read_text().splitlines()]
    assert [os.path.relpath(name, root) for name, _ in lines] == [*BROKEN, "deep/d.tif"]  # the odd one
    assert all(reason for _, reason in lines)


def test_only_the_first_broken_files_are_printed(tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(1000):
        (folder / f"{i:04}{('.png', '.jpg', '.npy', '.gif')[i % 4]}").write_bytes(b"\x00no" * (i % 7))
    for i in range(4):
        Image.fromarray(noise(8, 8)).save(folder / f"good{i}.png")
    assert main(["check", str(folder), "--out", str(tmp_path / "broken")]) == 0
    told = capsys.readouterr().out
    assert "1,000 of 1,004 images cannot be read:" in told and "  and 990 more" in told
    assert sum(line.startswith(f"  {folder}") for line in told.splitlines()) == 10
    assert len((tmp_path / "broken").read_text().splitlines()) == 1000
    assert "It would fail: " in told  # too many failures in a row for training


def test_test_images_among_training_images(tmp_path):
    for place in ("train/x", "train/y", "test/x", "test/y"):
        (tmp_path / place).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(noise(8, 8)).save(tmp_path / place / f"{i}.png")
    for to in ("train/y/copy.png", "test/x/copy.png", "test/y/copy.png"):
        (tmp_path / to).write_bytes((tmp_path / "train/x/0.png").read_bytes())
    done = quick(tmp_path)
    assert [(named(done.test, [a], tmp_path), named(done.train, [b], tmp_path)) for a, b in done.leaks] == [
        (["test/x/copy.png"], ["train/x/0.png"]),
        (["test/y/copy.png"], ["train/x/0.png"]),
    ]
    said = "\n".join(done.sentences())
    assert "2 of 8 test images also occur in the training set" in said and "train: 1 of 7 images are copies" in said
    rows = {row[0]: row[1:] for row in done.table()}
    assert rows[""] == ("train", "test") and rows["images"] == ("7", "8")
    assert rows["classes"] == ("x (3), y (4)", "2 of 4 images each")
    assert quick("digits").leaks == []


def test_classes_are_counted(tmp_path):
    for i in range(12):
        folder_of(tmp_path / f"class{i:02}", **{str(j): noise(4, 4) for j in range(i + 1)})
    assert ("classes", "12 of 1 (class00) to 12 (class11) images") in quick(tmp_path).table()
    lines = [f"class03/{i}.npy\ta\nclass01/{i}.npy\tb\nclass02/{i}.npy\n" for i in range(2)]
    (tmp_path / "list.txt").write_text("".join(lines))
    assert ("classes", "2 of 2 images each; 2 without a label") in quick(tmp_path / "list.txt").table()


@pytest.mark.parametrize("data", ["shapes:300", "photos"])
def test_the_proposed_command_trains_the_proposed_run(data, tmp_path):
    if data == "photos":
        data = str(tmp_path / "my photos")
        os.mkdir(data)
        for i in range(20):
            Image.fromarray(noise(40, 60 + i)).save(f"{data}/{i}.png")
    done = quick(data, epochs=3, workers=0).proposal
    assert done.settings.epochs == 3 and done.settings.batch_size == {"shapes:300": 16}.get(data, 8)
    words = shlex.split(done.command)
    assert words[:2] == ["patchloom", "pretrain"]
    given, _ = parse_pretrain(words[2:])
    opened = open_data(data).train
    asked, share = with_share(request(given.pop("data"), given.pop("task"), given), len(opened))
    stats = survey(opened).stats(done.settings.channels)
    again, _ = resolve(asked, len(opened) - round(0.2 * len(opened)), 3, stats)
    assert again == done.settings and share == {"held_out": done.reasons["held_out"]}
    assert {row[0] for row in done.table()[1:]} == set(done.reasons)


def test_the_estimate(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["check", "shapes:64", "--batch_size", "8", "--epochs", "3", "--task", "mae", "--img_size", "16"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "patchloom pretrain shapes:64 --task mae" in told
    assert "18 steps of" in told  # 64 - 13 held out, in batches of 8
    assert re.search(r"needs about \d\.\d of [\d.,]+ GiB of memory\n", told)

    def full(*asked, **more):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("patchloom.train.estimate.try_steps", full)
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "It would fail" in told and "halve --batch_size" in told
    assert "takes about" not in told and "images          64" in told


def test_reading_that_takes_longer_than_training_is_said_with_a_remedy():
    slow = Forecast(steps=1000, step=0.2, reading=0.3, apart=True, crop=320, disc=0.0, room=1.0)
    proposal = replace(quick("shapes:64").proposal, estimate=slow)
    said = " ".join(proposal.sentences())
    assert "about 5 min 0 s" in said and "reading takes longer than training" in said and "--cache 400" in said
    assert "--cache whole" in " ".join(replace(proposal, fixed_size=True).sentences())
    stored = replace(proposal, settings=replace(proposal.settings, cache="whole"))
    assert "--cache" not in " ".join(stored.sentences()) and "--workers" in " ".join(stored.sentences())
    said = " ".join(replace(proposal, estimate=replace(slow, step=0.4)).sentences())
    assert "reading takes longer" not in said and "about 6 min 40 s" in said


def test_small_images(tmp_path):
    for i in range(20):
        Image.fromarray(noise(*((40, 40) if i else (30, 30)))).save(tmp_path / f"{i}.png")
    assert "1 of 20 images are smaller than 40x40, and would be enlarged." in quick(tmp_path).sentences()
    assert any("20 of 20 images would be blurred" in line for line in quick(tmp_path, img_size=96).sentences())
    assert not any("would be" in line for line in quick(tmp_path, img_size=24).sentences())


def test_crops_at_native_scale_are_proposed_where_images_are_large(tmp_path):
    for kind, size in (("fine", 256), ("smooth", 8)):
        (tmp_path / kind).mkdir()
        for i in range(12):
            Image.fromarray(noise(size, size)).resize((256, 256)).save(tmp_path / kind / f"{i}.png")
    fine, smooth = (quick(tmp_path / kind, task="mae", device="cpu") for kind in ("fine", "smooth"))
    assert ("crop_scale", "native") in [row[:2] for row in fine.proposal.table()]
    assert "--crop_scale native" in fine.proposal.command
    assert ("crop_scale", "0.2") in [row[:2] for row in smooth.proposal.table()]
    assert "--crop_scale" not in smooth.proposal.command
    small = quick(tmp_path / "smooth", task="mae", img_size=160)
    advised = [any("--crop_scale native" in line for line in one.sentences()) for one in (fine, smooth, small)]
    assert advised == [False, True, False] and any("2.7 times" in line for line in smooth.sentences())


def test_names_that_are_not_utf_8(tmp_path, capfdbinary):
    name = os.path.join(os.fsencode(tmp_path), b"bad\xff.png")
    with open(name, "wb") as file:
        file.write(b"no image")
    for i in range(3):
        Image.fromarray(noise(8, 8)).save(tmp_path / f"{i}.png")
    assert main(["check", str(tmp_path), "--estimate", "false", "--out", str(tmp_path / "broken")]) == 0
    assert rb"bad\udcff.png: " in capfdbinary.readouterr().out
    assert (tmp_path / "broken").read_bytes().startswith(name + b"\t")


def folder_of(folder, **arrays):
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def test_invalid_input_gets_a_one_line_message(tmp_path, capsys):
    assert "empty folder" in failed(capsys, "check", tmp_path)
    assert "--images" in failed(capsys, "check", "shapes", "--images", "0")
    assert "no cuda device" in failed(capsys, "check", "shapes:64", "--device", "cuda") or torch.cuda.is_available()
    (tmp_path / "a.png").write_text("no")
    (tmp_path / "b.png").write_text("no")
    assert f"nothing could be read in {tmp_path}: {tmp_path}/a.png" in failed(capsys, "check", tmp_path)


def test_images_of_other_channels_are_named_after_the_report(tmp_path, capsys):
    folder_of(tmp_path / "train", c=noise(8, 8, 4), d=noise(8, 8, 3), e=noise(9, 9, 4))
    out = tmp_path / "broken.txt"
    assert main(["check", str(tmp_path / "train"), "--out", str(out), "--estimate", "false"]) == 2
    told = capsys.readouterr()
    assert "of 3 channels (" in told.err and "/d.npy) and of 4 (" in told.err and "/c.npy and 1 more)" in told.err
    assert out.read_text() == f"{tmp_path}/train/d.npy\t3 channels\n"
    assert "--channels 4" in told.out and "of 3 channels" not in told.out  # the rest is reported
    shown = quick(tmp_path / "train")  # in Python, where no error follows
    assert "of 3 channels" in str(shown) and "of 3 channels" in shown._repr_html_()
    (tmp_path / "train" / "d.npy").unlink()
    folder_of(tmp_path / "test", a=noise(8, 8, 5), b=noise(8, 8, 5))
    with pytest.raises(PatchloomError, match="of 4 channels .* and of 5 "):
        quick(tmp_path)


def test_an_image_of_another_depth_is_named(tmp_path):
    folder_of(tmp_path, **{f"{i}": noise(8, 8, 2).astype(np.uint16) * 250 for i in range(5)}, odd=noise(8, 8, 2))
    done = quick(tmp_path, out=tmp_path / "odd.tsv")
    assert any("1 of 6 is 8 bits" in said and "odd.npy" in said for said in done.sentences())
    assert (tmp_path / "odd.tsv").read_text() == f"{tmp_path}/odd.npy\t8 bits\n" and not done.refusal


def test_the_crops_are_the_tasks():
    """The proposed cache is large enough for the canvas of restore, which is larger than its images."""
    done = check("shapes:64", task="restore", img_size=32, patch_size=8, batch_size=8, epochs=1, device="cpu")
    assert done.proposal.estimate.crop == 46


def test_a_picture_shows_the_windows_that_are_read(tmp_path, capsys):
    slide = np.full((80, 120, 3), 240, np.uint8)
    slide[:40, 40:] = noise(40, 80, 3)
    tifffile.imwrite(tmp_path / "a.tif", slide, photometric="rgb", tile=(16, 16))
    found = quick(f"{tmp_path}@tile=40", picture=tmp_path / "windows.png")
    assert found.plain()["picture"] == str(found.picture) and f"{found.picture} shows" in " ".join(found.sentences())
    picture = np.asarray(Image.open(found.picture)).reshape(-1, 3).astype(int)
    assert (abs(picture - 0.35 * 255) < 20).all(1).mean() > 0.1  # glass that no window covers
    for words, name, part in (("@tile=40", "w.jpg", "PNG"), ("", "w.png", "not divided")):
        assert main(["check", f"{tmp_path}{words}", "--picture", str(tmp_path / name)]) == 2
        assert part in capsys.readouterr().err and not (tmp_path / name).exists()
