import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusing import refusal, refused

from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.splits import (
    choose_indices,
    hold_out,
    lacking_classes,
    pick,
    pick_groups,
    split_for_test,
    without_groups,
)


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=80), st.data())
def test_pick_is_proportional(labels, data):
    labels = np.array(labels)
    count = data.draw(st.integers(0, len(labels)))
    chosen = pick(labels, count, seed=0)
    assert len(chosen) == count == len(set(chosen.tolist()))
    kinds, sizes = np.unique(labels, return_counts=True)
    left = np.array([(labels == kind).sum() - (labels[chosen] == kind).sum() for kind in kinds])
    if count <= len(labels) - len(kinds):
        assert (left >= 1).all()
        if count < 0.5 * len(labels):
            assert np.abs(sizes - left - sizes * count / len(labels)).max() <= len(kinds)


def test_hold_out(draw, tmp_path):
    shapes = Shapes(1000)
    train, held = hold_out(shapes)
    assert len(train) == 950 and np.bincount(held.labels).tolist() == [5] * 10
    assert sorted([*train.indices, *held.indices]) == list(range(1000))
    assert hold_out(shapes)[1].fingerprint() == held.fingerprint() != hold_out(shapes, seed=1)[1].fingerprint()
    assert len(hold_out(shapes, share=0.9, max_images=100)[1]) == 100
    assert len(split_for_test(shapes)[1]) == 200
    small, one = hold_out(shapes.subset([3, 4]), share=0)
    assert len(small) == len(one) == 1 and len(hold_out(shapes.subset([3, 4]), share=1)[0]) == 1
    draw("1.png")
    assert "at least 2 are needed" in refusal(hold_out, open_data(tmp_path).train)


@pytest.fixture
def films(draw, tmp_path):
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


def test_folders_and_larger_groups_than_requested(films):
    data = open_data(films, group="parent")
    assert data.train.groups.tolist() == [0] * 7 + [1] * 18 and "(day, night)" in data.notes[0]
    assert len(hold_out(data.train, 0.05)[1]) == 7  # the smaller one, although 1 was requested


def test_notes_on_images_without_a_group_and_on_groups_in_training_and_test(draw, films):
    for name in ("a.png", "b.png"):
        draw(f"night/{name}")
    data = open_data(films, group=r"(film\d)")
    assert len(np.unique(data.train.groups)) == 7 and "2 of 27 images are in no group" in data.notes[1]
    for name in ("train/a_1.png", "train/b_1.png", "test/b_2.png", "test/c_1.png"):
        draw(f"split/{name}")
    data = open_data(films / "split", group="^(.*)_")
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
    shared = {*labels[chosen]} & {*labels[rest]} - {-1}  # for which more images than asked for may be drawn
    assert len(chosen) <= max(count, smallest) or (shared and 2 * len(chosen) <= len(labels))


def test_groups_are_drawn_in_proportion_to_their_labels():
    groups, labels = np.repeat(np.arange(40), 5), np.repeat(np.arange(40) % 2, 5)
    for seed in range(5):
        assert np.bincount(labels[pick_groups(labels, groups, 50, seed)]).tolist() in ([25, 25], [30, 20], [20, 30])


def test_groups_with_some_images_of_a_rare_class_are_drawn_in_proportion():
    labels, groups = np.zeros((20, 8), np.int64), np.repeat(np.arange(20), 8)
    labels[::3, 3:5] = 1  # 7 of 20 patients, in 2 of 8 images each
    for seed in range(10):
        assert labels.ravel()[pick_groups(labels.ravel(), groups, 32, seed)].sum() in (2, 4)


@pytest.mark.parametrize(
    "classes", [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 2, 0, 1, 2, 0, 1, 2], [1, 0, 1, 0, 0, 0, 0]]
)
def test_few_groups_of_one_class_each_have_all_classes_in_both_parts(classes):
    labels, groups = np.repeat(classes, 20), np.repeat(np.arange(len(classes)), 20)
    drawn = [pick_groups(labels, groups, len(labels) // 5, seed) for seed in range(5)]
    assert all(np.unique(labels[one]).tolist() == np.unique(classes).tolist() for one in drawn)
    assert {len(one) for one in drawn} == {20 * len({*classes})} and len({one.tobytes() for one in drawn}) > 1
    assert all({*np.delete(labels, one)} == {*classes} for one in drawn)


def test_few_groups_whose_rare_class_is_in_some(films):
    """The choice with all classes is nearest to the asked size and to the shares of the classes."""
    groups = np.repeat(np.arange(5), 10)
    labels = np.zeros(50, np.int64)
    labels[[13, *range(21, 30)]] = 1  # one in group 1, nine in group 2
    assert all(np.unique(groups[pick_groups(labels, groups, 10, seed)]).tolist() == [1] for seed in range(5))
    labels[labels == 0] = -1
    labels[:2] = 0  # in one group, so it cannot be in both
    assert np.unique(groups[pick_groups(labels, groups, 10, 0)]).tolist() in ([1], [2])
    source = open_data(films, group=r"film(\d)").train
    source.labels, source.classes = (source.groups == 0).astype(np.int64), ("usual", "rare")
    said = lacking_classes(*hold_out(source, 0.2))
    assert said == "Groups stay whole, and no test image has class rare: label more groups."
    assert not lacking_classes(*hold_out(without_groups(source), 0.2))


@pytest.mark.parametrize(
    ("group", "word"),
    [
        ("vidoe", "no image .*film0_000.png"),
        ("film", "all 25 images"),
        ("(a)(b)", "2 pairs"),
        ("(", "regular"),
    ],
)
def test_invalid_groups(films, group, word):
    refused(films, word, group=group)


def test_groups_need_names_and_differences(films):
    assert len(np.unique(open_data(films, group=".*").train.groups)) == 25
    refused("digits", "--group parent needs names of files", group="parent")
    source = open_data(films).train
    source.groups = np.zeros(25, np.int64)
    assert "in one group" in refusal(hold_out, source)
    assert len(hold_out(without_groups(source), 0.2)[1]) == 5


def test_when_nothing_would_be_left_to_train_on(draw, tmp_path):
    shutil.copy(draw("a_1.png"), tmp_path / "b_1.png")
    shutil.copy(draw("a_2.png"), tmp_path / "b_2.png")
    assert "copies of those in one group" in refusal(hold_out, open_data(tmp_path, group="^(.*)_").train)


def test_given_data_is_not_modified(films):
    own = open_data(films)
    assert open_data(own, group="^(.*)_").train.groups is not None
    assert own.train.groups is None and open_data(own).train.groups is None and not own.notes
