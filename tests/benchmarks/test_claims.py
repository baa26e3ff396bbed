"""Study of the papers' claims: its decisions, the order of its runs, and resuming."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import claims
import claims_page
import claims_probes
import claims_runs
import label_free
import numpy as np
import pytest
import torch
from claims_arms import ARMS, LENGTHS, MEASURES, SAME, SCRATCH, SEEDS, UNTRAINED
from claims_declared import CLAIMS
from claims_judge import CONTRADICTED, HOLDS, UNDECIDED, Noise, decide, noise_of
from claims_runs import Study, needed
from PIL import Image

from patchloom.errors import PatchloomError
from patchloom.evaluate.protocols.label_free import IDEST
from patchloom.evaluate.protocols.label_free import MEASURES as FIGURES
from patchloom.runs.settings import request


def drawn(rng: np.random.Generator, share: float, moved: float, n: int = 1000) -> np.ndarray:
    """Draw right answers [s n] with a share that varies over seeds."""
    shares = np.clip(share + moved * rng.standard_normal((SEEDS, 1)), 0, 1)
    return rng.random((SEEDS, n)) < shares


def test_where_nothing_differs_few_comparisons_are_decided() -> None:
    rng = np.random.default_rng(0)
    decided = 0
    for _ in range(100):
        arms = {str(number): drawn(rng, 0.4, 0.02) for number in range(6)}
        noise = noise_of(arms)
        found = [decide(arms[one], arms[other], noise, draws=400) for one, other in ("01", "23", "45")]
        decided += sum(one.verdict != UNDECIDED for one in found)
    assert 2 <= decided <= 25  # of 300, of which one in 20 may be; the draws are few


def test_a_comparison_of_two_arms() -> None:
    rng = np.random.default_rng(0)
    good, bad = drawn(rng, 0.6, 0.005), drawn(rng, 0.4, 0.005)
    noise = noise_of({"good": good, "bad": bad})
    up, down = decide(good, bad, noise), decide(bad, good, noise)
    assert (up.verdict, down.verdict) == (HOLDS, CONTRADICTED)
    assert up.points == pytest.approx(good.mean() - bad.mean()) == pytest.approx(-down.points)
    assert up.each == pytest.approx(good.mean(1) - bad.mean(1)) and up.low < up.points < up.high
    assert up.could_see == pytest.approx((up.high - up.low) / 2 * (1.96 + 0.842) / 1.96, rel=1e-3)
    assert decide(good, good, noise).points == 0 and decide(good, good, noise).verdict == UNDECIDED


def test_an_interval_has_the_width_of_student() -> None:
    """Without spread over images: t for the degrees of freedom, times the deviation of a difference of two means."""
    rng = np.random.default_rng(0)
    one, other = (np.full((SEEDS, 4), value) for value in (1.0, 0.0))
    found = decide(one, other, Noise(0.01 * rng.standard_normal(5000), 2, 2), draws=20_000)
    assert (found.high - found.low) / 2 == pytest.approx(4.303 * 0.01 * np.sqrt(2 / SEEDS), rel=0.05)


def test_one_arm_is_too_few_for_the_noise() -> None:
    with pytest.raises(ValueError, match="two arms and two seeds"):
        noise_of({"one": np.ones((SEEDS, 5), bool)})


def test_every_claim_compares_arms_that_are_measured_so(tmp_path: Path) -> None:
    for claim in CLAIMS.values():
        assert claim.comparisons and set(claim.beside) <= set(MEASURES)
        for one in claim.comparisons:
            assert one.measure in ARMS[one.better].measures and one.measure in ARMS[one.worse].measures
            assert one.better != one.worse
    assert {arm for claim in CLAIMS.values() for arm in claim.arms} | {"droppos", UNTRAINED} == set(ARMS)
    for of in ARMS.values():
        assert set(of.finetuning) <= set(LENGTHS) and set(of.others) <= set(ARMS)
        if of.task:
            task = dict(of.task) | ({"features_of": str(tmp_path)} if of.teacher else {})
            asked = request(str(tmp_path), task, {**SAME, "epochs": 1})
            assert asked.task["name"] == task["name"] and asked.batch_size == SAME["batch_size"]


def test_what_an_arm_needs_comes_before_it() -> None:
    jobs = claims.jobs_of(list(CLAIMS))
    assert len(set(jobs)) == len(jobs) == SEEDS * len(ARMS)
    for place, job in enumerate(jobs):
        assert all(jobs.index(before) < place for before in needed(*job))
    assert needed("mae and mae", SEEDS - 1) == [("mae", SEEDS - 1), ("mae", 0)]
    assert claims.jobs_of(["features"])[:2] == [("mae", 0), ("features of mae", 0)]


class Done(subprocess.Popen):
    def __init__(self, study: Study, job: tuple[str, int], code: int) -> None:
        self.returncode = code
        for path in study.files(*job) if not code else ():
            if path.suffix == ".npy":
                claims_runs.keep(study, *job, path.stem, np.random.default_rng(0).random(50) < 0.5)
            else:
                path.write_text(json.dumps({name: torch.rand(()).item() for name in FIGURES}))
                study.run(*job).mkdir(parents=True)
                (study.run(*job) / "metrics.csv").write_text("step,seconds\n1,\n1224,150.0\n")

    def poll(self) -> int:
        return self.returncode

    def __del__(self) -> None:
        pass


def test_a_failure_stops_only_arms_that_need_it(tmp_path: Path, monkeypatch, capsys) -> None:
    made: list[tuple[str, int]] = []

    def one(study: Study, job: tuple[str, int]) -> Done:
        made.append(job)
        return Done(study, job, 1 if job == ("mae", 1) else 0)

    monkeypatch.setattr(claims, "one", one)
    monkeypatch.setattr(label_free, "DRAWS", 20)
    monkeypatch.setattr(claims.time, "sleep", lambda _: None)
    study, jobs = Study(tmp_path), claims.jobs_of(["features", "lut", "mp3"])
    failed = claims.make_all(study, jobs, 8)
    assert set(failed) == {("mae", 1), *(job for job in jobs if ("mae", 1) in needed(*job))}
    assert ("features of mae", 1) not in made and len(made) == len(jobs) - len(failed) + 1
    assert "mae, seed 1: failed, see" in capsys.readouterr().out
    monkeypatch.setattr(claims, "one", lambda study, job: made.append(job) or Done(study, job, 0))
    made.clear()
    assert claims.make_all(study, jobs, 8) == [] and set(made) == set(failed)
    claims_page.write_page(study, tmp_path / "claims.md")
    text = (tmp_path / "claims.md").read_text()
    for said in ("| few | lut | mae | ", "not run yet", "| lut | `lut` | 1,224 | 150 |", "| RankMe | "):
        assert said in text
    assert "added later, " in text and "³ Added when results" in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith(("|", "<!--")))


def sections(text: str) -> dict[str, str]:
    return {part.splitlines()[0]: part for part in text.split("\n## ")[1:]}


def test_a_smaller_study_keeps_the_results_on_the_page(tmp_path: Path) -> None:
    page, study, rng = tmp_path / "claims.md", Study(tmp_path / "there"), np.random.default_rng(0)

    def keep(study: Study, measures: dict[str, list[str]]) -> None:
        for arm, seed in [(arm, seed) for arm in measures for seed in range(SEEDS)]:
            for measure in measures[arm]:
                claims_runs.keep(study, arm, seed, measure, rng.random(50) < 0.5)
            claims_runs.write_whole(study.result_path(arm, seed, claims_runs.WHERE), f"today on {study.out.name}")

    def verdicts(text: str) -> dict[str, str]:
        return {line.split(" | ")[0]: line for line in sections(text)["Verdicts"].splitlines() if line.count(" | ") > 2}

    keep(study, {"features of mae": ["few"], "mae": ["few", "all"], "mp3": ["all"], "mp3, η 0": ["all"]})
    claims_page.write_page(study, page)
    before = page.read_text()
    titles = {name: claim.title for name, claim in CLAIMS.items()}
    assert "Measured today on there. " in sections(before)[titles["features"]]
    assert "Measured" not in sections(before)[titles["droppos"]]  # nothing is
    claims_page.write_page(Study(tmp_path / "empty"), page)
    assert page.read_text() == before

    keep(elsewhere := Study(tmp_path / "elsewhere"), {"mp3": ["all"], "mp3, η 0": ["all"], "mae": ["few"]})
    claims_page.write_page(elsewhere, page)
    then = page.read_text()
    old, new = sections(before), sections(then)
    assert [title for title in old if old[title] != new[title]] == ["Verdicts", titles["mp3"]]
    assert "today on elsewhere" in new[titles["mp3"]] and "2 comparisons were made" in new["What chance does"]
    changed = [row for row, line in verdicts(before).items() if verdicts(then)[row] != line]
    assert changed == [f"| {titles['mp3']}"]


def test_the_page_has_every_comparison_that_is_declared() -> None:
    page = sections(Path(claims_page.__file__).with_name("claims.md").read_text())
    for claim in CLAIMS.values():
        rows = [line.split(" | ")[:3] for line in page[claim.title].splitlines() if line.count(" | ") == 7][2:]
        assert rows == [[f"| {one.measure}", one.better, one.worse] for one in claim.comparisons]


def test_ends_of_intervals_encoders_of_arms_and_independent_seeds() -> None:
    assert [claims_page.end(share) for share in (0.0004, -0.0004, 0.0123, -0.1)] == ["+0.04", "-0.04", "+1.2", "-10.0"]
    # frozen features are those of the encoder of an arm
    assert claims_page.encoder_of("mp3, relative positions", "knn") == "mp3"
    assert claims_page.encoder_of("mp3, relative positions", "all") == "mp3, relative positions"
    assert claims_page.encoder_of(UNTRAINED, "knn") == UNTRAINED  # whose weights are new
    # the noise is estimated from arms with independent seeds
    right = np.ones((SEEDS, 5), bool)
    several = {"mp3": right, "mp3, no positions": right, SCRATCH: right, "extrema, instance": right}
    assert set(claims_page.trained(several)) == {"mp3", SCRATCH, "extrema, instance"}


def test_the_section_on_probes_names_the_verdicts_that_differ(tmp_path: Path) -> None:
    page, images = tmp_path / "claims.md", np.arange(1000)
    right = {arm: {"linear": 400, "attentive": 450, "knn": 300} for arm in claims_probes.PROBED}
    right |= {
        "mae": {"linear": 400, "attentive": 600, "knn": 300},
        "lut": {"linear": 500, "attentive": 300, "knn": 300},
    }

    def keep(study: Study, seeds: int, *without: str) -> str:
        for arm, seed in ((arm, seed) for arm in right.keys() - {*without} for seed in range(seeds)):
            for measure, count in right[arm].items():
                rng = np.random.default_rng(seed)  # the same images are hard in all arms
                claims_runs.keep(study, arm, seed, measure, rng.permutation(images) < count + 5 * seed)
        claims_page.write_page(study, page)
        return " ".join(sections(page.read_text()).get(claims_probes.TITLE, "").split())

    assert not keep(Study(tmp_path / "none"), 1, "extrema")
    alone = keep(Study(tmp_path / "one"), 1, "droppos")
    assert "| mae | 40.0 | 60.0 | +20.0 | 30.0 |" in alone and "Not measured yet: `droppos`." in alone
    assert "| mae | untrained | undecided | better |" in alone and "over the test images alone" in alone
    assert "`extrema` is for `mae` +15.0 [" in alone and "(the order holds), and for `simmim` +0.0 [" in alone
    assert "| lut | untrained |" not in alone and "| untrained | lut | worse | better |" in alone  # best first
    claims_page.write_page(Study(tmp_path / "empty"), page)
    assert " ".join(sections(page.read_text())[claims_probes.TITLE].split()) == alone  # kept
    several = keep(Study(tmp_path / "three"), 3)
    assert "| mae | 40.5 (40.0-41.0) |" in several and "3 seeds, judged by the rule" in several
    assert claims.jobs_of([claims_probes.PROBES])[0] == ("mae", 0)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two classes, forty images of each in both parts."""
    out, rng = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (place := out / part / name).mkdir(parents=True)
            for number in range(40):
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return out


@pytest.mark.slow
def test_the_study_makes_what_is_missing_and_nothing_else(cifar: Path, tmp_path: Path, monkeypatch) -> None:
    for name, length in {"few": {"epochs": 1, "max_train": 20}, "all": {"epochs": 1}}.items():
        monkeypatch.setitem(claims_runs.LENGTHS, name, length)
    study, jobs = Study(tmp_path, epochs=1, images=36), [("mae", 0), (SCRATCH, 0), (UNTRAINED, 0)]
    claims_runs.copy_images(study, cifar)
    assert len(list((tmp_path / "images").iterdir())) == 72
    for job in jobs:
        claims_runs.make(study, *job)
        assert study.is_done(*job) and not study.is_done(job[0], 1)
    kept = {path: path.stat().st_mtime_ns for path in study.out.rglob("*.npy")}
    assert {np.load(path).shape for path in kept} == {(72,)} and len(kept) == 5 + 2 + 3
    found = set(json.loads(study.result_path("mae", 0, "label-free.json").read_text()))
    assert set(FIGURES) - {IDEST} <= found <= set(FIGURES)  # so few images may have no slope between 0 and 1
    study.result_path("mae", 0, "knn.npy").unlink()
    assert not study.is_done("mae", 0)
    monkeypatch.setitem(claims_runs.HOW, "few", None)  # so that calling it fails
    for job in jobs:
        claims_runs.make(study, *job)
    assert study.is_done("mae", 0)
    changed = [path.stem for path, before in kept.items() if path.stat().st_mtime_ns != before]
    assert set(changed) <= {"knn", "linear"}
    monkeypatch.setitem(ARMS, "mae", replace(ARMS["mae"], times=2))
    assert not study.is_done("mae", 0) and not study.is_done(SCRATCH, 0)  # which needs it
    with pytest.raises(PatchloomError, match="another declaration of mae: delete"):
        claims_runs.make(study, "mae", 0)


def test_missing_data_and_unknown_claims_are_reported(cifar: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    for words, said in (
        (["lut"], "has no folder of a class|has 40 images"),
        (["nothing"], "there is no claim nothing"),
    ):
        monkeypatch.setattr("sys.argv", ["claims.py", *words, "--data", str(cifar), "--out", str(tmp_path)])
        with pytest.raises(SystemExit, match="2"):
            claims.main()
        assert re.search(said, capsys.readouterr().err)
