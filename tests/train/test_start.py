"""The weights that an adapted run began with are the control of what it learnt."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from patchloom.claims import START, Claim, Difference
from patchloom.errors import PatchloomError
from patchloom.evaluate.protocols import evaluate
from patchloom.export.export import export
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.report.curves import charts_of
from patchloom.report.load_run import load_run
from patchloom.runs.encoder import load_encoder, load_start
from patchloom.runs.folder import RunFolder
from patchloom.runs.verdict import ANOTHER, Health, Rule, Verdict
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")
SPEC = EncoderSpec("nano", (16, 16), 4, options={"embed_dim": 32, "depth": 2, "num_heads": 2})
OWN = (0.1, 0.2, 0.3), (0.9, 0.8, 0.7)  # normalisation of the weights, far from that of the images
QUICK = {"task": "mae", "epochs": 1, "batch_size": 16, "workers": 0, "kernels": "torch", "device": "cpu"}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of noise that overlap in brightness, in training and test."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 20)):
        for label in (0, 1):
            (folder / part / "ab"[label]).mkdir(parents=True)
            for i in range(count):
                low = 25 * label + rng.integers(100)
                pixels = rng.integers(low, low + 80, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / "ab"[label] / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with normalisation of its own."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "encoder.safetensors"
    save_encoder(build_encoder(SPEC), EncoderCard(SPEC, *OWN, "mae", "public"), path)
    return path


@pytest.fixture(scope="module")
def run(images: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "adapted"
    pretrain(images / "train", init=str(weights), normalization="data", blr=0.1, heads_first=0.0, out=out, **QUICK)
    return out


def test_the_start_is_stored_as_it_was_loaded_with_its_own_normalisation(run, weights):
    found = load_start(run)
    assert found is not None
    vit, card = found
    before = load_file(weights)
    assert all(torch.equal(weight, before[name]) for name, weight in vit.state_dict().items())
    assert (card.mean, card.std) == OWN and card.name == START and card.task == str(weights)
    trained, own = load_encoder(run)
    assert not torch.equal(trained.blocks[0].mlp.fc1.weight, vit.blocks[0].mlp.fc1.weight) and own.mean != OWN[0]


@pytest.mark.parametrize(
    ("protocol", "given", "controls"),
    [
        ("knn", {}, ["untrained", "raw pixels"]),
        ("linear", {}, ["untrained", "raw pixels"]),
        ("few-shot", {"per_class": 8, "method": "linear"}, ["untrained", "raw pixels"]),
        ("order", {"k": 5}, ["untrained", "raw pixels"]),
        ("blocks:2", {"epochs": 2, "warmup_epochs": 0}, ["untrained"]),
        ("label-free", {}, ["untrained", "raw pixels"]),
        ("position-sensitivity", {"steps": 4}, ["untrained", "chance"]),
    ],
)
def test_its_row_is_the_evaluation_of_its_file(run, images, protocol, given, controls):
    report = evaluate(protocol, run, images, device="cpu", **given)
    alone = evaluate(protocol, RunFolder(run).start, images, device="cpu", **given)
    assert list(dict.fromkeys(row.encoder for row in report.quoted)) == ["adapted", START, *controls]
    assert list(dict.fromkeys(row.encoder for row in alone.quoted)) == [START, *controls]
    ours = [replace(row) for row in report.rows if row.encoder == START]
    assert ours and ours == [row for row in alone.rows if row.encoder == START]
    assert ours != [replace(row, encoder=START) for row in report.rows if row.encoder == "adapted"]
    assert "at its start" in report.headline or protocol == "order"
    if protocol != "position-sensitivity":
        (gain,) = [one for one in report.against if one.control == START]
        first, *others = report.quoted
        its = next(row for row in others if row.encoder == START)
        assert gain.value == first.value - its.value and gain.low < gain.value < gain.high
        assert "its start" in report.conclusion()


def test_curves_have_the_start_as_a_baseline(run, images, weights, tmp_path):
    """With its own normalisation, so it is the curve's first value only where the run takes that, too."""
    same = pretrain(images / "train", init=str(weights), normalization="init", out=tmp_path / "run", **QUICK).folder
    found = []
    for folder in (run, same):
        (chart,) = [one for one in charts_of([load_run(folder)]) if one.title == "kNN accuracy"]
        lines = {line.name: line for line in chart.lines}
        assert lines[START].baseline and {"untrained", "raw pixels"} < lines.keys()
        found.append((lines["kNN accuracy"].y[0], *lines[START].y))
    (begun, *_), (own, *its) = found
    assert own == its[0] == its[1] == found[0][1] != begun


def test_a_run_from_random_weights_and_one_of_before_have_none(run, images, tmp_path):
    pretrain(images / "train", out=tmp_path / "scratch", model="nano", img_size=16, patch_size=4, **QUICK)
    assert load_start(tmp_path / "scratch") is None and not RunFolder(tmp_path / "scratch").start.exists()
    with pytest.raises(PatchloomError, match=r"has no start\.safetensors: only runs with --init or --from"):
        export(tmp_path / "scratch", start=True)
    report = evaluate("knn", tmp_path / "scratch", images, device="cpu")
    assert [row.encoder for row in report.quoted] == ["scratch", "untrained", "raw pixels"]


def test_a_longer_training_keeps_its_start(images, weights, tmp_path):
    given = QUICK | {"init": str(weights), "out": tmp_path / "run"}
    pretrain(images / "train", **given)
    before = RunFolder(tmp_path / "run").start.read_bytes()
    pretrain(images / "train", **given | {"epochs": 2})
    assert RunFolder(tmp_path / "run").start.read_bytes() == before


def test_a_run_from_another_run_begins_with_its_encoder(run, images, tmp_path):
    pretrain(images / "train", from_run=str(run), out=tmp_path / "next", **QUICK)
    found, (before, card) = load_start(tmp_path / "next"), load_encoder(run)
    assert found is not None and (found[1].mean, found[1].std) == (card.mean, card.std)
    assert all(torch.equal(weight, before.state_dict()[name]) for name, weight in found[0].state_dict().items())


def test_low_rank_updates_are_no_part_of_it(images, weights, tmp_path):
    pretrain(images / "train", init=str(weights), adapt="lora", out=tmp_path / "run", **QUICK)
    assert load_file(RunFolder(tmp_path / "run").start).keys() == load_file(weights).keys()


def test_the_start_is_exported_to_the_bit(run, tmp_path):
    done = export(run, start=True)
    assert done.weights == run / "start-timm.safetensors"
    vit, _ = load_encoder_file(RunFolder(run).start)
    written = load_file(done.weights)
    assert all(torch.equal(weight, written[name]) for name, weight in vit.state_dict().items())
    assert export(run, start=True, out=tmp_path / "mine.safetensors").weights == tmp_path / "mine.safetensors"


@pytest.mark.parametrize(
    ("low", "high", "claim", "said"),
    [
        (
            0.013,
            0.029,
            Claim.BETTER,
            "Adaptation helped: the encoder is 2.1 points better than its start [+1.3, +2.9].",
        ),
        (-0.01, 0.03, Claim.NONE, "The encoder is indistinguishable from its start (+1.0 points [-1.0, +3.0])."),
        (-0.03, -0.01, Claim.WORSE, "worse than its start [-3.0, -1.0]. Keep the start."),
    ],
)
def test_the_sentence_says_whether_adaptation_helped(low, high, claim, said):
    found = Difference(START, (low + high) / 2, low, high, 500)
    assert found.claim is claim and said in found.sentence()


def test_the_verdict_advises_to_keep_a_better_start():
    figures = {"knn": 0.5, "control": START, "knn of it": 0.6}
    health = Health(Verdict.WEAK, 1.0, True, Rule.NO_GAIN_IN_CLASSES, None, figures, {"task": ANOTHER, "epochs": 4})
    assert health.then.startswith("keep the start (patchloom export RUN --start)")
