"""Cached scores of encoders, and when they are computed again."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from patchloom.compare import scores
from patchloom.compare.scores import (
    Contender,
    LabelledData,
    Scores,
    Way,
    caching_extractor,
    contenders,
    score_encoder,
    subset_features,
    weights_digest,
)
from patchloom.data.source import Source
from patchloom.evaluate.frozen import evaluate_extractor, extractors
from patchloom.evaluate.protocols.fewshot import subsample_training
from patchloom.evaluate.protocols.knn import KNN
from patchloom.evaluate.protocols.linear import LINEAR
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.train.estimate import RandomImages

SPEC = EncoderSpec("nano", (16, 16), 8, 3, options={"embed_dim": 16, "depth": 1, "num_heads": 2})
CARD = EncoderCard(SPEC, (0.5,) * 3, (0.25,) * 3, "mae", "mae")


def encoder_at(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    save_encoder(build_encoder(SPEC), CARD, folder / "encoder.safetensors")
    return folder


def pictured(n: int, seed: int = 0) -> Source:
    """Make bright and dark images in turn, with labels."""
    labels = np.arange(n) % 2
    images = torch.randint(128, (n, 3, 16, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    source = RandomImages(images + 100 * torch.from_numpy(labels)[:, None, None, None].to(torch.uint8))
    source.labels, source.classes = labels, ("dark", "bright")
    return source


def kept(path: Path, key: str, made: list[int], **more) -> Scores:
    """Return scores from a file, or make them and count that."""
    right = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 1]).bool()

    def make() -> Scores:
        made.append(1)
        return Scores({"linear": right}, {"linear": "9 labels"}, ~right, "dark", **more)

    found = scores.load_or_compute(path, key, make, Scores.plain, Scores.of)
    assert found.right["linear"].equal(right) and found.about == {"linear": "9 labels"}
    assert found.constant.equal(~right) and found.answer == "dark"
    return found


def test_scores_are_cached_and_damaged_ones_computed_again(tmp_path):
    path, made = tmp_path / "scores" / "one.json", []
    for key, count in (("a", 1), ("a", 1), ("b", 2)):
        assert kept(path, key, made).groups is None and len(made) == count
    whole = path.read_text()
    for count, damage in enumerate(("", "{", '{"key": "b"}', '{"key": "b", "found": 3}', "[]", whole[:-9]), 3):
        path.write_text(damage)
        kept(path, "b", made)
        assert len(made) == count
    groups = torch.arange(9) // 3
    for _ in range(2):
        assert kept(path, "c", made, groups=groups).groups.equal(groups)


def test_a_changed_encoder_is_scored_again(tmp_path, monkeypatch):
    run, made = encoder_at(tmp_path / "run"), []

    def score(one: Contender, *_) -> Scores:
        made.append(one.name)
        return Scores({"linear": torch.tensor([True, False])}, {"linear": "all"}, torch.tensor([True, False]), "dark")

    monkeypatch.setattr(scores, "_score", score)
    those = [Contender("mine", 0, "task", str(run)), Contender("raw pixels", 0, "control", str(run))]
    on = LabelledData(Parts(pictured(8), pictured(4), ""), [Way("linear", LINEAR)], [])

    def count() -> int:
        made.clear()
        assert len(list(scores.all_scores(those, on, EvalSettings(), tmp_path / "out"))) == 2
        return len(made)

    assert [count(), count()] == [2, 0]
    encoder_at(run, seed=1)  # trained further, or deleted and trained again
    assert [count(), count()] == [2, 0]
    run.rename(tmp_path / "moved")
    those = [one._replace(place=str(tmp_path / "moved")) for one in those]
    assert count() == 0
    monkeypatch.setattr(scores, "__version__", "another")
    assert [count(), count()] == [2, 0]
    monkeypatch.setattr(RandomImages, "stamp", lambda self: "files were replaced")
    assert [count(), count()] == [2, 0]


def test_the_digest_covers_the_weights_and_the_head(tmp_path):
    run = encoder_at(tmp_path / "run")
    file = run / "encoder.safetensors"
    before = weights_digest(str(run))
    assert weights_digest(str(file)) == before and weights_digest("timm:vit_tiny") == ""
    os.utime(file, (0, 0))
    assert weights_digest(str(run)) == before
    encoder_at(run, seed=1)
    assert weights_digest(str(run)) != before


def test_all_ways_of_scoring_share_one_pass_over_the_images():
    vit, settings = build_encoder(SPEC), EvalSettings(cache=False, workers=0)
    parts = Parts(pictured(60), pictured(20, seed=1), "")
    extractor, passes = extractors(vit, CARD, settings)[0], []

    def counted(source: Source) -> object:
        passes.append(len(source))
        return extractor.features_of(source)

    ways = [Way("linear", LINEAR), Way("kNN", KNN), Way("a tenth", LINEAR, 0.1), Way("5 a class", LINEAR, 5)]
    found = score_encoder(extractor._replace(features_of=counted), ways, parts, settings, 0)
    assert sorted(passes) == [20, 60]
    for way, few in zip(ways[2:], ((0.1, None), (None, 5)), strict=True):
        its = subsample_training(parts, *few, 0)[0]
        rows = evaluate_extractor(extractor, [way.protocol], its, settings)[0]  # a separate pass
        assert way.protocol.quoted(rows["linear"]).right.equal(found.right[way.name])


def test_features_of_a_subset():
    source, settings = pictured(30), EvalSettings(cache=False, workers=0)
    source.groups = np.arange(30) // 3
    extractor = extractors(build_encoder(SPEC), CARD, settings)[0]
    some = source.subset([21, 4, 9])
    part, alone = caching_extractor(extractor, source).features_of(some), extractor.features_of(some)
    assert part.labels.equal(alone.labels) and part.indices.equal(alone.indices) and part.groups.equal(alone.groups)
    for name, values in alone.tokens.items():
        torch.testing.assert_close(part.tokens[name], values)
    whole = extractor.features_of(source)
    rest = torch.tensor([i for i in range(30) if i != 4])  # image 4 is taken as unreadable
    tokens = {name: values[rest] for name, values in whole.tokens.items()}
    lacking = type(whole)(tokens, whole.labels[rest], rest, [])
    found = subset_features(lacking, some)
    assert found.indices.tolist() == [0, 2] and found.unreadable == [some.describe(1)]


def test_controls_without_a_training_are_scored_by_as_many_draws_as_the_tasks():
    jobs = [SimpleNamespace(finished=True, task="mae", seed=seed, folder=f"mae-{seed}") for seed in range(3)]
    for draws in (1, 3):
        found = Counter(one.name for one in contenders(jobs, 3, ["other"], draws))
        assert found == {"mae": 3, "untrained": 3, "raw pixels": draws, "other": draws}
