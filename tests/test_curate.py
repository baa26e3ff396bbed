"""The verb curate: its lists, which other verbs take, and its page."""

import csv
from pathlib import Path

import numpy as np
import pytest
import tifffile
from evaluating import write_encoder
from PIL import Image
from refusing import refusal

import patchloom
from patchloom.cli import main
from patchloom.data.sources.open import open_data


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "encoder.safetensors", depth=1, embed_dim=16)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve training images, two of them brighter copies of others, one broken; a test image is a copy, too."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    pixels = rng.integers(0, 200, (12, 16, 16), np.uint8)
    pixels[7], pixels[9] = pixels[3] + 40, pixels[3] // 2
    for split, number, image in [*(("train", i, one) for i, one in enumerate(pixels)), ("test", 0, pixels[5])]:
        (folder / split).mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / split / f"{number:02}.png")
    (folder / "train" / "11.png").write_bytes(b"no image")
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def test_lists_and_page(encoder, photos, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["curate", str(encoder), str(photos), "--count", "4", "--out", str(out), "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "12 images of" in said and "1 of them of another split" in said and "11.png" in said
    assert "3 near copies are many" in said and "raise --alike 0.95" in said
    train = photos / "train"
    copies = {Path(row["path"]): Path(row["copy_of"]) for row in rows(out / "copies.csv")}
    assert copies == {
        train / "07.png": train / "03.png",
        train / "09.png": train / "03.png",
        photos / "test" / "00.png": train / "05.png",
    }
    unique = rows(out / "unique.csv")
    assert len(unique) == 9 and {Path(row["path"]) for row in unique}.isdisjoint(copies)
    assert {row["split"] for row in unique} == {"train"} and "label" not in unique[0]
    chosen = rows(out / "to-label.csv")
    assert len(chosen) == 4 and {row["label"] for row in chosen} == {""}
    assert {Path(row["path"]).parent for row in chosen} == {train}
    assert sum(float(row["share_nearest"]) for row in chosen) == pytest.approx(1, abs=1e-3)
    far = [float(row["times_median"]) for row in rows(out / "outliers.csv")]
    assert far == sorted(far, reverse=True)
    page = (out / "curated.html").read_text()
    assert page.index("To label") < page.index("Outliers") < page.index("Near copies")
    assert page.count("<img") == 4 + 9 + 6 and 'alt="train/03.png"' in page


def test_other_verbs_take_the_lists(encoder, photos, tmp_path):
    done = patchloom.curate(encoder, photos, count=3, out=tmp_path / "out", device="cpu", pictures=0)
    patchloom.curate(encoder, photos, out=tmp_path / "exact", device="cpu", pictures=0, alike=1)
    assert not any(row["path"].endswith("09.png") for row in rows(tmp_path / "exact" / "copies.csv"))  # rounded
    assert done.suffix == "" and done.counts["to-label.csv"][0] == 3
    assert len(open_data(tmp_path / "out" / "unique.csv").train) == 9
    listed = tmp_path / "out" / "to-label.csv"
    assert open_data(listed).train.labels is None  # nothing is filled in yet
    head, *lines = listed.read_text().splitlines()
    filled = [line.replace(",,", f",{name},") for line, name in zip(lines, "aab", strict=True)]
    listed.write_text("\n".join([head, *filled]) + "\n")
    opened = open_data(listed).train
    assert opened.classes == ("a", "b") and opened.labels.tolist() == [0, 0, 1]
    said = refusal(patchloom.curate, encoder, photos, out=tmp_path / "out")
    assert "labels that you filled in" in said and listed.read_text().count(",a,") == 2


def test_only_images_without_labels_are_chosen(encoder, photos, tmp_path):
    files = sorted((photos / "train").glob("0[0-6].png"))
    lines = [f"{file},{'x' if i % 2 else ''}" for i, file in enumerate(files)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    some = {"device": "cpu", "pictures": 0}
    patchloom.curate(encoder, tmp_path / "table.csv", count=4, out=tmp_path / "out", **some)
    assert {Path(row["path"]) for row in rows(tmp_path / "out" / "to-label.csv")} == {*files[::2]}
    assert [row["label"] for row in rows(tmp_path / "out" / "unique.csv")].count("x") == 3
    said = refusal(patchloom.curate, encoder, tmp_path / "table.csv", count=5, out=tmp_path / "no", **some)
    assert "--count 5 is more than the 4 images" in said and not (tmp_path / "no").exists()
    assert (
        patchloom.curate(encoder, tmp_path / "table.csv", out=tmp_path / "auto", **some).counts["to-label.csv"][0] == 4
    )


def test_windows_keep_their_places(encoder, tmp_path):
    scene = np.random.default_rng(0).integers(0, 256, (48, 64), np.uint8)
    (tmp_path / "scenes").mkdir()
    tifffile.imwrite(tmp_path / "scenes" / "a.tif", scene)
    done = patchloom.curate(encoder, f"{tmp_path / 'scenes'}/@tile=16", count=5, out=tmp_path / "out", device="cpu")
    assert done.images == 12 and done.suffix == "@tile=16x16"
    opened = open_data(f"{tmp_path / 'out' / 'to-label.csv'}{done.suffix}").train
    assert len(opened) == 5 and all("a.tif#y=" in opened.describe(i) for i in range(5))
