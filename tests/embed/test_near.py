"""Tests of nearest neighbours against a plain search over all vectors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from embedding import SMALL, SUFFIXES, read
from PIL import Image

import patchloom
from patchloom.cli import main
from patchloom.embed import formats
from patchloom.embed import near as search
from patchloom.errors import PatchloomError


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an image that is not a row, and files that are not images."""
    folder = tmp_path_factory.mktemp("others")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 11), np.uint8)).save(folder / "new.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("words")
    return folder


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_nearest_are_those_of_a_plain_search(tiny: Path, photos: Path, tmp_path: Path, monkeypatch, suffix: str):
    monkeypatch.setattr(formats, "_READ_BYTES", 7 * 4 * 16)  # so that seven rows are read at once
    near = photos / "train" / "b" / "5.png"
    done = patchloom.embed(tiny, photos, to=tmp_path / f"f{suffix}", near=near, top=6, **SMALL)
    found = read(tmp_path / f"f{suffix}")
    centred = found.vectors - found.vectors.mean(0)  # the stored ones stay raw
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    cosines = unit @ unit[found.paths.index("train/b/5.png")]
    order = np.argsort(-cosines, kind="stable")[:7]
    assert [one.path for one in done.neighbours] == [found.paths[i] for i in order]
    assert [one.label for one in done.neighbours] == [found.labels[i] for i in order]
    assert [one.split for one in done.neighbours] == [found.splits[i] for i in order]
    np.testing.assert_allclose([one.cosine for one in done.neighbours], cosines[order], atol=1e-5)
    assert [one.itself for one in done.neighbours] == [True] + [False] * 6
    assert [one.rank for one in done.neighbours] == [0, 1, 2, 3, 4, 5, 6]
    pairs = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
    expected = [np.mean(pairs >= cosines[i] - 1e-6) for i in order]
    np.testing.assert_allclose([one.as_near for one in done.neighbours], expected, atol=1.5 / len(pairs))


def test_the_nearest_in_a_folder_are_those_in_a_file(tiny: Path, photos: Path, tmp_path: Path):
    near = {"near": photos / "train" / "b" / "5.png", "top": 6}
    parts, file = (patchloom.embed(tiny, photos, to=tmp_path / to, **near, **SMALL) for to in ("parts", "f.parquet"))
    assert parts.files == 6 and parts.neighbours[0].itself
    for one, other in zip(parts.neighbours, file.neighbours, strict=True):
        assert one == other._replace(cosine=pytest.approx(other.cosine, abs=1e-6))


def test_a_copy_elsewhere_is_a_row_like_others(tiny: Path, photos: Path, tmp_path: Path):
    shutil.copy(photos / "train" / "b" / "5.png", tmp_path / "5.png")
    done = patchloom.embed(tiny, photos, to=tmp_path / "f.npz", near=tmp_path / "5.png", top=2, **SMALL)
    assert [(one.path, one.itself) for one in done.neighbours][0] == ("train/b/5.png", False)
    assert done.neighbours[0].cosine == pytest.approx(1, abs=1e-5) and len(done.neighbours) == 2


def test_of_many_rows_a_sample_is_the_scale(tiny: Path, photos: Path, tmp_path: Path, monkeypatch):
    near = {"near": photos / "train" / "b" / "5.png", "top": 100}
    whole = patchloom.embed(tiny, photos, to=tmp_path / "f.npz", **near, **SMALL)
    monkeypatch.setattr(search, "_SAMPLED", 20)
    monkeypatch.setattr(formats, "_READ_BYTES", 7 * 4 * 16)
    sampled = patchloom.embed(tiny, photos, to=tmp_path / "f.npz", **near, **SMALL)
    assert [one.path for one in sampled.neighbours] == [one.path for one in whole.neighbours]
    one, other = (np.array([row.as_near for row in done.neighbours]) for done in (sampled, whole))
    assert (one != other).any() and np.abs(one - other).max() < 0.2 and np.all(np.diff(one) >= 0)
    assert np.allclose(one * 190, np.round(one * 190), atol=1e-6)  # 190 pairs of 20 rows


def test_a_file_of_one_row_has_no_scale(tiny: Path, photos: Path, tmp_path: Path):
    near = tmp_path / "one" / "5.png"
    near.parent.mkdir()
    shutil.copy(photos / "train" / "b" / "5.png", near)
    done = patchloom.embed(tiny, near.parent, to=tmp_path / "f.npz", near=near, **SMALL)
    assert [one.itself for one in done.neighbours] == [True] and np.isnan(done.neighbours[0].as_near)
    assert "as near" not in done.table()[0]


def test_patch_tokens_are_compared_at_their_places(tiny: Path, photos: Path, tmp_path: Path):
    options = {"pooling": "patches", "dtype": "float16", "near": photos / "test" / "a" / "26.png", "top": 100}
    done = patchloom.embed(tiny, photos, to=tmp_path / "f.parquet", **options, **SMALL)
    flat = read(tmp_path / "f.parquet").vectors.astype(np.float32).reshape(35, -1)
    flat -= flat.mean(0)
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    assert len(done.neighbours) == 35 and done.neighbours[0].itself
    # of what only a machine's rounding could put elsewhere, the order is not asked for
    expected = np.sort(unit @ unit[read(tmp_path / "f.parquet").paths.index("test/a/26.png")])[::-1]
    np.testing.assert_allclose([one.cosine for one in done.neighbours], expected, atol=1e-3)


def test_what_is_printed(tiny: Path, photos: Path, others: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["embed", str(tiny), str(photos), "--to", str(tmp_path / "f.npz"), "--top", "3", "--device", "cpu"]
    assert main([*words, "--near", str(photos / "test" / "a" / "26.png")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("─")][-5:]
    assert lines[0].split() == ["rank", "cosine", "as", "near", "split", "label", "path"]
    assert lines[1].split() == ["1.0000", "test", "a", "test/a/26.png", "(the", "image", "itself)"]
    assert main([*words, "--near", str(others / "new.png")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("─")]
    assert lines[-5].startswith(f"Nearest to {others / 'new.png'}, by the cosine")
    assert [line.split()[0] for line in lines[-3:]] == ["1", "2", "3"]
    assert all(re.match(r"\d  +[\d.-]+  1 pair in [\d.,]+  ", line) for line in lines[-3:])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none.png", "there is no such file; give the path of one image"),
        (".", "there is no such file"),
        ("notes.txt", "is not an image or recording by its suffix"),
        ("broken.png", "cannot be read"),
    ],
)
def test_a_bad_image_is_refused_before_anything_is_done(
    tiny: Path, photos: Path, others: Path, tmp_path: Path, name: str, sentence: str
):
    with pytest.raises(PatchloomError, match=f"--near .*{sentence}"):
        patchloom.embed(tiny, photos, to=tmp_path / "f.npz", near=others / name, **SMALL)
    assert not [*tmp_path.iterdir()]


def test_the_neighbours_are_drawn(tiny: Path, photos: Path, tmp_path: Path, monkeypatch):
    rows = []
    draw = search.draw_tiles
    monkeypatch.setattr(search, "draw_tiles", lambda *args, **more: rows.extend(args[0]) or draw(*args, **more))
    near, out = photos / "train" / "b" / "5.png", tmp_path / "new" / "near.png"
    done = patchloom.embed(tiny, photos, to=tmp_path / "f.npz", near=near, top=3, picture=out, **SMALL)
    assert f"Picture: {out}" in str(done) and done.plain()["picture"] == str(out) and Image.open(out).width > 400
    ((query, *others),) = rows
    assert [tile.words for tile in others] == [f"{one.cosine:.3f}" for one in done.neighbours if not one.itself]
    again = patchloom.embed(tiny, photos, to=tmp_path / "f.npz", near=photos / done.neighbours[1].path, top=3,
                            picture=out, **SMALL)  # fmt: skip
    assert again.neighbours[0].itself and (rows[1][0].picture == others[0].picture).all()
    assert (others[0].picture != query.picture).any()


@pytest.mark.parametrize(
    "options, said",
    [({"near": None}, "add --near"), ({"picture": "a.jpg"}, "ends in .png"), ({"top": 21}, "lower --top 21")],
)
def test_a_picture_that_cannot_be_drawn_is_refused_first(tiny: Path, photos: Path, tmp_path: Path, options, said):
    asked = {"near": photos / "train" / "b" / "5.png", "picture": "a.png", "to": tmp_path / "f.npz", **SMALL, **options}
    with pytest.raises(PatchloomError, match=said):
        patchloom.embed(tiny, photos, **asked)
    assert not (tmp_path / "f.npz").exists()


def test_a_picture_replaces_no_image(tiny: Path, photos: Path, others: Path, tmp_path: Path):
    for near, picture in ((others / "new.png", others / "new.png"), (others / "new.png", photos / "train/b/5.png")):
        before = picture.read_bytes()
        with pytest.raises(PatchloomError, match="would replace it: choose another name"):
            patchloom.embed(tiny, photos, to=tmp_path / "f.npz", near=near, picture=picture, **SMALL)
        assert picture.read_bytes() == before and not (tmp_path / "f.npz").exists()
