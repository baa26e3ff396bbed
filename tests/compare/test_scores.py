"""Results of encoders by labels, and when they are measured again."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from swins import spec_of, swin

from patchloom.compare import scores
from patchloom.compare.scores import Contender, LabelledData, Way, contenders, subset_features
from patchloom.data.source import Source
from patchloom.evaluate.frozen import encoder_extractor
from patchloom.evaluate.settings import EvalSettings, Parts, Subject
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.results import store
from patchloom.train.estimate import RandomImages

SPEC = EncoderSpec("nano", (16, 16), 8, 3, options={"embed_dim": 16, "depth": 1, "num_heads": 2})
QUICK = EvalSettings(device="cpu", cache=False, workers=0)
CARD = EncoderCard(SPEC, (0.5,) * 3, (0.25,) * 3, "mae", "mae")


def encoder_at(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    save_encoder(build_encoder(SPEC), CARD, folder / "encoder.safetensors")
    return folder


def pictured(n: int, seed: int = 0) -> Source:
    labels = np.arange(n) % 2
    images = torch.randint(128, (n, 3, 16, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    source = RandomImages(images + 100 * torch.from_numpy(labels)[:, None, None, None].to(torch.uint8))
    source.labels, source.classes = labels, ("dark", "bright")
    return source


def on_shades() -> LabelledData:
    ways = [Way("linear", "linear"), Way("kNN", "knn"), Way("a tenth", "linear", 0.1), Way("5 a class", "linear", 5)]
    return LabelledData(Parts(pictured(60), pictured(20, seed=1), ""), ways, [])


def test_results_are_kept_with_the_outcomes_of_images(tmp_path):
    run = encoder_at(tmp_path / "run")
    those = [Contender(*one, str(run)) for one in (("mine", 3, "task"), ("untrained", 0, "control"))]
    those.append(Contender("raw pixels", 0, "control", str(run)))
    found = scores.all_scores(those, on_shades(), QUICK, tmp_path / "out")
    assert [*found] == ["linear", "kNN", "a tenth", "5 a class"]
    stored = store.load(tmp_path / "out", outcomes=True)
    assert {one.fingerprint for one in stored} == {pictured(20, seed=1).fingerprint()} and len(stored) == 16
    for way, its in found.items():
        assert [*its] == ["mine", "untrained", "raw pixels", "best constant"] and its["mine"][0].seed == 3
        assert all(result in stored and len(result.outcomes.values) == result.n == 20 for (result,) in its.values())
        few = its["mine"][0].settings
        assert (few.get("labels"), few.get("per_class")) == {"a tenth": (0.1, None), "5 a class": (None, 5)}.get(
            way, (None, None)
        )


def test_the_verdict_is_by_the_attentive_probe_if_it_applies_to_all_encoders(tmp_path, monkeypatch, quick_probe):
    mine = Contender("mine", 0, "task", str(encoder_at(tmp_path / "run")))
    pixels, on = mine._replace(name="raw pixels", kind="control"), on_shades()
    few = scores.with_attentive(on, [mine, pixels], QUICK)
    assert few.ways == on.ways and "with fewer than 1,000 labels" in few.notes[0]
    monkeypatch.setattr(scores, "_ATTENTIVE_LABELS", 60)
    with_it = scores.with_attentive(on, [mine, pixels], QUICK)
    assert with_it.ways[0] == Way("attentive", "attentive") and with_it.ways[1:] == on.ways and not with_it.notes
    with_it = with_it._replace(ways=with_it.ways[:1])
    found = scores.all_scores([mine, pixels], with_it, QUICK, tmp_path / "out")["attentive"]
    assert [*found] == ["mine", "raw pixels", "best constant"]
    assert found["mine"][0].settings["queries"] == 16 and all(one.protocol == "attentive" for (one,) in found.values())
    monkeypatch.setattr(scores, "test_classifiers", None)  # nothing is measured again
    assert scores.all_scores([mine, pixels], with_it, QUICK, tmp_path / "out")["attentive"] == found

    def why_not(*those: Contender) -> str:
        without = scores.with_attentive(on, those, QUICK)
        assert without.ways == on.ways
        return without.notes[0]

    save_encoder(swin(), replace(CARD, spec=spec_of()), tmp_path / "swin" / "encoder.safetensors")
    assert "by the linear probe: swin is a Swin" in why_not(
        mine, Contender("swin", 0, "beside", str(tmp_path / "swin"))
    )
    monkeypatch.setattr("patchloom.evaluate.protocols.attentive.free_memory", lambda device: 0.0)
    assert "the tokens of 60 images need" in why_not(mine)


def test_only_what_changed_is_measured_again(tmp_path, monkeypatch):
    run, made, on = encoder_at(tmp_path / "run"), [], on_shades()
    score = scores.score_encoder

    def counted(extractor, ways, *rest):
        made.append([way.name for way in ways])
        return score(extractor, ways, *rest)

    monkeypatch.setattr(scores, "score_encoder", counted)
    those = [Contender("mine", 0, "task", str(run)), Contender("raw pixels", 0, "control", str(run))]

    def count(ways: int = 2) -> int:
        made.clear()
        found = scores.all_scores(those, on._replace(ways=on.ways[:ways]), QUICK, tmp_path / "out")
        assert [[*its] for its in found.values()] == [["mine", "raw pixels", "best constant"]] * ways
        return len(made)

    assert [count(), count()] == [2, 0]
    assert count(3) == 2 and made == [["a tenth"]] * 2  # a way that was added
    encoder_at(run, seed=1)  # trained further, or deleted and trained again
    assert [count(), count()] == [2, 0]
    run.rename(tmp_path / "moved")
    those = [one._replace(place=str(tmp_path / "moved")) for one in those]
    assert count() == 0
    lines = (tmp_path / "out" / store.FILE).read_text()
    (tmp_path / "out" / store.FILE).write_text(lines[:-9])  # damaged
    assert [count(), count()] == [2, 0]
    for file in (tmp_path / "out" / store.FOLDER).iterdir():
        file.unlink()
    assert [count(), count()] == [2, 0]
    monkeypatch.setattr(scores, "__version__", "another")
    assert [count(), count()] == [2, 0]
    monkeypatch.setattr(RandomImages, "stamp", lambda self: "files were replaced")
    assert [count(), count()] == [2, 0]


def test_features_of_a_subset():
    source = pictured(30)
    source.groups = np.arange(30) // 3
    extractor = encoder_extractor(Subject("mae", build_encoder(SPEC), CARD), QUICK)
    some, whole = source.subset([21, 4, 9]), extractor.features_of(source)
    part, alone = subset_features(whole, some), extractor.features_of(some)
    assert part.labels.equal(alone.labels) and part.indices.equal(alone.indices) and part.groups.equal(alone.groups)
    for name, values in alone.tokens.items():
        torch.testing.assert_close(part.tokens[name], values)
    for readable, place in (([*range(4), *range(5, 30)], 1), (range(21), 0)):
        rest = torch.tensor(readable)
        tokens = {name: values[rest] for name, values in whole.tokens.items()}
        found = subset_features(type(whole)(tokens, whole.labels[rest], rest, []), some)
        assert found.indices.tolist() == [i for i in range(3) if i != place]
        assert found.unreadable == [some.describe(place)]


def test_controls_without_a_training_are_scored_by_as_many_draws_as_the_tasks():
    jobs = [SimpleNamespace(finished=True, task="mae", seed=seed, folder=f"mae-{seed}") for seed in range(3)]
    for draws in (1, 3):
        found = Counter(one.name for one in contenders(jobs, 3, ["other"], draws))
        assert found == {"mae": 3, "untrained": 3, "raw pixels": draws, "other": draws}
