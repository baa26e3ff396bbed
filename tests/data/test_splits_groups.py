from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.data.splits import choose_indices, hold_out, pick_groups, split_for_test, without_groups
from patchloom.errors import PatchloomError


@pytest.fixture
def films(draw, tmp_path):
    """Frames of five films in two folders: 3, 4, 5, 6 and 7 frames."""
    for film in range(5):
        for frame in range(film + 3):
            draw(f"{'day' if film < 2 else 'night'}/film{film}_{frame:03d}.png")
    return tmp_path


def film_of(source: Source) -> set[str]:
    return {source.describe(i).rpartition("/")[2].partition("_")[0] for i in range(len(source))}


@pytest.mark.parametrize("group", ["^(.*)_", r"film(\d)", r"film\d", "^([^_]+)_"])
@pytest.mark.parametrize("split", [hold_out, split_for_test])
def test_groups_stay_in_one_split(films, group, split):
    data = open_data(films, group=group)
    assert len(np.unique(data.train.groups)) == 5 and "5 groups of images" in data.notes[0]
    drawn = set()
    for seed in range(8):
        first, second = split(data.train, 0.4, seed=seed)
        assert not film_of(first) & film_of(second) and len(first) + len(second) == 25
        assert 0 < len(second) <= 10
        drawn |= film_of(second)
        again = first.subset(np.arange(len(first)))  # groups stay with their images, so that a part can be split again
        assert not film_of(hold_out(again, 0.4)[0]) & film_of(hold_out(again, 0.4)[1])
    assert len(drawn) > 2


def test_without_groups_films_are_split(films):
    first, second = hold_out(open_data(films).train, 0.4)
    assert film_of(first) & film_of(second)


def test_folders_and_larger_groups_than_requested(films):
    data = open_data(films, group="parent")
    assert data.train.groups.tolist() == [0] * 7 + [1] * 18 and "(day, night)" in data.notes[0]
    assert len(hold_out(data.train, 0.05)[1]) == 7  # the smaller one, although 1 was requested


def test_note_on_images_without_a_group(films, draw):
    for name in ("a.png", "b.png"):
        draw(f"night/{name}")
    data = open_data(films, group=r"(film\d)")
    assert len(np.unique(data.train.groups)) == 7 and "2 of 27 images are in no group" in data.notes[1]


def test_note_on_groups_in_training_and_test(draw, tmp_path):
    for name in ("train/a_1.png", "train/b_1.png", "test/b_2.png", "test/c_1.png"):
        draw(name)
    data = open_data(tmp_path, group="^(.*)_")
    assert "images of 1 of its groups in training and in test (b)" in data.notes[1]


def test_copies_of_held_out_images_stay_out_of_training(films):
    shutil.copy(films / "day/film0_000.png", films / "night/film4_100.png")
    shutil.copy(films / "day/film0_001.png", films / "day/film0_101.png")
    source = open_data(films, group=r"film(\d)").train
    seen = 0
    for seed in range(10):
        training, held = hold_out(source, 0.2, seed=seed)
        contents = held.contents()
        assert not np.isin(training.contents(), contents).any() and len(np.unique(contents)) == len(contents)
        seen += "film0" in film_of(held)
    assert seen


def test_known_images_are_avoided_by_whole_groups(films):
    source = open_data(films, group=r"film(\d)").train
    known = source.contents()[[i for i in range(25) if "film3" not in source.describe(i)][::2]]
    chosen, _ = choose_indices(source, 6, 0, known)
    assert film_of(source.subset(chosen)) == {"film3"}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 2)), min_size=2, max_size=40).filter(
        lambda rows: len({group for group, _ in rows}) > 1
    ),
    st.integers(0, 40),
    st.integers(0, 5),
)
def test_whole_groups_within_the_count_and_never_all(rows, count, seed):
    groups, labels = np.array(rows).T
    chosen = pick_groups(labels, groups, count, seed)
    assert 0 < len(chosen) < len(groups) and (np.diff(chosen) > 0).all()
    rest = np.setdiff1d(np.arange(len(groups)), chosen)
    assert not np.isin(groups[chosen], groups[rest]).any()
    smallest = np.unique(groups, return_counts=True)[1].min()
    assert len(chosen) <= max(count, smallest)


def test_groups_are_drawn_in_proportion_to_their_labels():
    groups, labels = np.repeat(np.arange(40), 5), np.repeat(np.arange(40) % 2, 5)
    for seed in range(5):
        assert np.bincount(labels[pick_groups(labels, groups, 50, seed)]).tolist() in ([25, 25], [30, 20], [20, 30])


def test_invalid_groups(films, tmp_path, draw):
    for group, match in (
        ("vidoe", "matches no image of .*, such as day/film0_000.png: give a regular expression"),
        (".*", "puts all|in no group|25 groups"),
        ("film", "puts all 25 images of .* into one group"),
        ("(a)(b)", r"has 2 pairs of brackets: leave one"),
        ("(", "is not a regular expression"),
    ):
        if group == ".*":
            assert len(np.unique(open_data(films, group=group).train.groups)) == 25
            continue
        with pytest.raises(PatchloomError, match=match):
            open_data(films, group=group)
    with pytest.raises(PatchloomError, match="--group parent needs names of files, and the images of digits have none"):
        open_data("digits", group="parent")
    source = open_data(films).train
    source.groups = np.zeros(25, np.int64)
    with pytest.raises(PatchloomError, match="one group, which cannot be split"):
        hold_out(source)
    assert len(hold_out(without_groups(source), 0.2)[1]) == 5


def test_when_nothing_would_be_left_to_train_on(draw, tmp_path):
    shutil.copy(draw("a_1.png"), tmp_path / "b_1.png")
    shutil.copy(draw("a_2.png"), tmp_path / "b_2.png")
    with pytest.raises(PatchloomError, match="copies of those in one group"):
        hold_out(open_data(tmp_path, group="^(.*)_").train)


def test_given_data_is_not_modified(films):
    own = open_data(films)
    assert open_data(own, group="^(.*)_").train.groups is not None
    assert own.train.groups is None and open_data(own).train.groups is None and not own.notes
