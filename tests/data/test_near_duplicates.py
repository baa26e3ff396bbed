import numpy as np
import pytest
from PIL import Image

from patchloom.data.near_duplicates import group_in_names, near_copies, parted_wholes
from patchloom.data.sources.open import open_data


def scene(seed: int) -> np.ndarray:
    coarse = np.random.default_rng(seed).random((5, 5, 3))
    return np.asarray(Image.fromarray((coarse * 255).astype(np.uint8)).resize((64, 64), Image.BICUBIC)) / 255


def save(path, picture):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((picture.clip(0, 1) * 255).astype(np.uint8)).save(path)


def films(folder, name, count=4, frames=12):
    """Frames of films, or tiles of slides in rows and columns, each a scene that changes slowly."""
    for film in range(count):
        start, end = scene(2 * film), scene(2 * film + 1)
        for frame in range(frames):
            share = frame / (4 * frames)
            place = {"film": f"film{film}", "slide": f"slide{film}", "row": frame // 2, "column": frame % 2}
            save(folder / name.format(frame=frame, **place), (1 - share) * start + share * end)
    return open_data(folder).train


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("{film}_{frame:04d}.png", "^(.*)_"),
        ("{film}-f{frame:04d}.png", "^(.*)-"),
        ("{film}_{frame:04d}_rgb.png", r"^(.*?)\d+\D*$"),
        ("{film}/{frame:04d}.png", r"^(.*?)\d+\D*$"),
        ("all/{film}/x_{frame:04d}.png", "^(.*)_"),
        ("{film}_{frame}.png", "^(.*)_"),  # 10 comes after 9
        ("2021_take_{film}_x{frame:02d}_y01.png", r"(?<![A-Za-z])film[-_ ]?\d+"),
        ("{slide}_{row}_{column}.png", "^([^/_]+)_"),
        ("{slide}-{row}-{column}.png", "^([^/-]+)-"),
        ("set_a/{slide}_{row}_{column}.png", "^(.*/[^/_]+)_"),
        ("set-a/{slide}-{row}-{column}.png", "^(.*/[^/-]+)-"),
        ("{slide}r{row}c{column}.png", r"^([^/\d]*\d+)[^/\d]"),
        ("set1/{slide}r{row}c{column}.png", r"^(.*/[^/\d]*\d+)[^/\d]"),
    ],
)
def test_frames_of_films_and_tiles_of_slides_are_detected_and_a_pattern_is_found(tmp_path, name, group):
    found = near_copies(films(tmp_path, name))
    assert found.group == group and len(found.groups) == 4 and found.close > 0.8 * found.pairs
    source = open_data(tmp_path, group=group).train
    assert len(np.unique(source.groups)) == 4 and near_copies(source) is None
    assert f"--group '{group}'" in found.sentence() and "4 groups (" in found.sentence()


def test_one_long_film_is_cut_by_the_number(tmp_path):
    for frame in range(400):
        weight = np.maximum(0, 1 - abs(np.arange(9) - frame / 50))
        save(tmp_path / f"frame_{frame:05d}.png", sum(w * scene(i) for i, w in enumerate(weight) if w))
    found = near_copies(open_data(tmp_path).train)
    assert found.group == r"^(.*?\d+)\d\d\D*$" and len(found.groups) == 4


def test_other_images_give_no_warning(tmp_path, draw):
    for i in range(60):
        save(tmp_path / "photos" / f"{i:04d}.png", scene(i))
        save(tmp_path / "classes" / "ab"[i % 2] / f"{i:04d}.png", scene(i) * 0.5 + 0.5 * scene(1000 + i % 2))
        draw(f"noise/{i:04d}.png")
    for kind in ("photos", "classes", "noise"):
        assert near_copies(open_data(tmp_path / kind).train) is None
    assert near_copies(open_data("shapes:50").train) is None and near_copies(open_data("digits").train) is None


def test_names_without_a_pattern(tmp_path):
    source = films(tmp_path, "{film}{frame:02d}.png", count=1, frames=40)
    for i in range(40):  # one film whose names have no numbers
        letters = "".join(chr(ord("a") + int(digit)) for digit in f"{i:03d}")
        save(tmp_path / "letters" / f"{letters}.png", scene(i // 10) * (1 - i % 10 / 40) + scene(50) * (i % 10 / 40))
    found = near_copies(open_data(tmp_path / "letters").train)
    assert found.group is None and "--group PATTERN" in found.sentence()
    assert near_copies(source.subset(np.arange(5))) is None  # too few to decide


def test_broken_images_are_skipped(tmp_path):
    films(tmp_path, "{film}_{frame:04d}.png")
    for i in range(0, 12, 3):
        (tmp_path / f"film1_{i:04d}.png").write_bytes(b"no image")
    assert near_copies(open_data(tmp_path).train).group == "^(.*)_"


def test_subjects_in_names_suggest_a_group(tmp_path):
    for patient in range(6):
        for i in range(4):
            save(tmp_path / "all" / f"{i}-of-Patient_{patient}.png", scene(10 * patient + i))
    for i in range(8):
        save(tmp_path / "staircases" / f"staircase{i}.png", scene(i))
    source = open_data(tmp_path / "all").train
    group = group_in_names(source)
    assert len(np.unique(open_data(tmp_path / "all", group=group).train.groups)) == 6
    train, test = source.subset(np.arange(12)), source.subset(np.arange(12, 24))
    assert "Patient_0, Patient_1" in (said := parted_wholes(train, test)) and f"--group '{group}'" in said
    apart = [np.flatnonzero(open_data(tmp_path / "all", group=group).train.groups % 2 == part) for part in (0, 1)]
    assert not parted_wholes(source.subset(apart[0]), source.subset(apart[1]))
    assert group_in_names(open_data(tmp_path / "staircases").train) is None
    for well in range(4):
        for field in range(3):
            save(tmp_path / "wells" / f"plate{well // 2}_well{well}_field{field}.png", scene(well))
    group = group_in_names(open_data(tmp_path / "wells").train)
    assert len(np.unique(open_data(tmp_path / "wells", group=group).train.groups)) == 2, "plates are the largest unit"
