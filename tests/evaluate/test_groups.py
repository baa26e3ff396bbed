"""Images of one group stay on one side wherever an evaluation splits labelled images itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sweep import teacher_file

from patchloom.data.splits import hold_out
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import pixel_features
from patchloom.evaluate.logistic import choose_strength, hold_out_for_choice
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.fewshot import subsample_training
from patchloom.evaluate.settings import EvalSettings, parts_of

pytestmark = pytest.mark.usefixtures("quick_probe")


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of ten films each, with six frames nearly alike each; nothing in them tells the class."""
    folder = tmp_path_factory.mktemp("films")
    rng = np.random.default_rng(0)
    for film in range(20):
        colour = rng.integers(30, 226, (8, 8))
        (folder / "ab"[film % 2]).mkdir(exist_ok=True)
        for frame in range(6):
            noisy = colour + rng.integers(-3, 4, (8, 8))
            Image.fromarray(noisy.astype(np.uint8)).save(folder / "ab"[film % 2] / f"film{film:02}_{frame}.png")
    return folder


def film_of(source, some=None) -> set[str]:
    indices = range(len(source)) if some is None else some
    return {Path(source.describe(int(i))).name.partition("_")[0] for i in indices}


def test_the_test_images_are_whole_groups(films: Path) -> None:
    for seed in range(3):
        parts = parts_of(films, EvalSettings(seed=seed, group="^(.*)_"))
        assert not film_of(parts.train) & film_of(parts.test) and len(parts.test) == 24
        assert "a stratified fifth was split off for the test in whole groups" in parts.story
        named, over = parts.story.partition("Test groups: ")[2].removesuffix(".").split("; ")
        count, _, named = named.removesuffix(")").partition(" (")
        named = named.split(", ")
        assert over == "intervals are over groups"
        assert count == "4" and len(named) == 4 and {*named} == film_of(parts.test)
        assert set(parts.test.labels.tolist()) == {0, 1}
        few_of_them = subsample_training(parts, None, 20, seed)[0]
        assert not film_of(few_of_them.train) & film_of(parts.test)
    plain = parts_of(films, EvalSettings())
    assert film_of(plain.train) & film_of(plain.test) and "whole groups" not in plain.story


def test_choices_hold_out_whole_groups(films: Path) -> None:
    train = parts_of(films, EvalSettings(group="^(.*)_")).train
    features = pixel_features(train, (8, 8), (0.5,), (0.2,))
    rest, held = hold_out_for_choice(features.labels, 0, features.groups)
    assert len(held) == 18 and not film_of(train, rest) & film_of(train, held)
    first, second = hold_out(train, 0.1, len(train))  # as fine-tuning chooses a rate
    assert not film_of(first) & film_of(second)
    values = features.tokens["pixels"]
    choices = [choose_strength(values, features.labels, groups=groups) for groups in (features.groups, None)]
    assert [choice.held_out for choice in choices] == [18, 19]


def test_intervals_are_over_the_test_groups(films: Path) -> None:
    """The nearest films decide the class of all six frames at once, so a film counts about once."""
    over, alone = (
        evaluate("knn", teacher_file(), films, device="cpu", group=group).quoted[0] for group in ("^(.*)_", None)
    )
    assert over.groups is not None and len(over.groups.unique()) == 4 and alone.groups is None
    assert over.high - over.low > 1.5 * (alone.high - alone.low)


def test_own_test_images_have_groups_too(films: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        shutil.copytree(films, tmp_path / part)
    parts = parts_of(tmp_path, EvalSettings(group="^(.*)_"))
    assert parts.test.groups is not None and len(np.unique(parts.test.groups)) == 20
    assert "Intervals are over its groups." in parts.story


def test_where_groups_leave_no_choice_images_are_held_out_one_by_one() -> None:
    labels = torch.arange(40) % 2
    for groups in (torch.zeros(40, dtype=torch.int64), labels):
        rest, held = hold_out_for_choice(labels, 0, groups)
        assert len(held) == 8 and len(labels[rest].unique()) == 2


def test_frames_that_are_known_by_heart_flatter(films: Path, tiny_encoder: Path) -> None:
    scores = {
        group: evaluate("linear", tiny_encoder, films, device="cpu", group=group, seed=1).quoted[0].value
        for group in (None, "^(.*)_")
    }
    assert scores[None] > 0.9 and scores["^(.*)_"] < 0.8, scores
    cached = evaluate(
        "linear", tiny_encoder, films, device="cpu", group="^(.*)_", seed=1
    )  # features of an earlier pass
    assert cached.quoted[0].settings["held_out"] == 18 and "whole groups" in cached.protocol
    assert cached.quoted[0].settings["group"] == "^(.*)_" and cached.quoted[0] in cached.rows
    assert "Only 4 test groups: others could have given anything" in cached.caution()


def test_fine_tuning_chooses_where_one_group_is_left(films: Path, tiny_encoder: Path, tmp_path: Path) -> None:
    data = tmp_path / "two"
    for film in (0, 1, 2, 3):
        for path in films.glob(f"*/film{film:02}_*.png"):
            (data / path.parent.name).mkdir(parents=True, exist_ok=True)
            name = f"{'early' if film < 2 else 'late'}_{path.name}"
            (data / path.parent.name / name).write_bytes(path.read_bytes())
    group = "(early|late)"
    done = evaluate(
        "finetune", tiny_encoder, data, device="cpu", group=group, blr=[1e-3, 1e-2], epochs=1, control=False
    )
    assert done.quoted[0].settings["held_out"] == 1
    done = evaluate("finetune", tiny_encoder, data, device="cpu", group=group, epochs=1, control=False, validation=0.5)
    assert done.quoted[0].settings["validation_images"] == 6
    with pytest.raises(PatchloomError, match="puts all 24 images"):
        evaluate("knn", tiny_encoder, data, device="cpu", group="_film")
