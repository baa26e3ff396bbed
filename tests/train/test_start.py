"""The weights that an adapted run began with are the control of what it learnt."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from patchloom.claims import BLEND, START, Claim, Difference
from patchloom.errors import PatchloomError
from patchloom.evaluate.frozen import UNTRAINED
from patchloom.evaluate.protocols import evaluate
from patchloom.export.export import export
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.report.curves import charts_of
from patchloom.report.load_run import load_run
from patchloom.report.metrics import key_numbers
from patchloom.runs.encoder import load_blend, load_encoder, load_start
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
    """An encoder with another normalisation than the data's."""
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
    """The start has its own normalisation: it equals the curve's first value only where the run takes that, too."""
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


def test_blends_are_between_the_start_and_the_run(run):
    (start, its), (trained, own) = load_start(run), load_encoder(run)
    before, after = start.state_dict(), trained.state_dict()
    for share, end, card in ((0.0, before, its), (1.0, after, own)):
        vit, about = load_blend(run, share)
        assert all(torch.equal(weight, end[name]) for name, weight in vit.state_dict().items())
        assert (about.mean, about.std) == (card.mean, card.std)
    vit, about = load_blend(run, 0.25)
    for name, weight in vit.state_dict().items():
        torch.testing.assert_close(weight.double(), 0.75 * before[name].double() + 0.25 * after[name].double())
    assert about.mean == pytest.approx(
        [0.75 * one + 0.25 * other for one, other in zip(its.mean, own.mean, strict=True)]
    )
    assert about.name == "adapted, blend 0.25" and "0.75 of the start and 0.25 of the adapted" in about.note


def test_a_start_of_another_model_is_not_blended(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    other = replace(SPEC, options=SPEC.options | {"depth": 1})
    save_encoder(build_encoder(other), EncoderCard(other, *OWN, "mae", "public"), tmp_path / "run/start.safetensors")
    with pytest.raises(PatchloomError, match="cannot be blended with its start, because blocks.1.norm1.weight"):
        export(tmp_path / "run", blend=0.5)
    heads = replace(SPEC, options=SPEC.options | {"num_heads": 4})  # the same weights, another function
    save_encoder(build_encoder(heads), EncoderCard(heads, *OWN, "mae", "public"), tmp_path / "run/start.safetensors")
    with pytest.raises(PatchloomError, match="cannot be blended with its start, because the model"):
        export(tmp_path / "run", blend=0.5)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_blend_is_exported(run, share):
    done = export(run, blend=share)
    assert done.weights == run / ("start-timm.safetensors" if share == 0 else f"blend-{share:g}-timm.safetensors")
    vit, card = load_blend(run, share)
    assert all(torch.equal(weight, vit.state_dict()[name]) for name, weight in load_file(done.weights).items())
    again, alone = load_encoder(done.weights)  # timm's weights, which patchloom reads, too
    assert all(torch.equal(weight, vit.state_dict()[name]) for name, weight in again.state_dict().items())
    assert (alone.mean, alone.std) == (card.mean, card.std) and alone.note.startswith(card.note)
    assert alone.note and "/" not in alone.task
    assert card.note in (*done.notes, "")


def test_blends_of_an_encoders_file_are_scored_without_a_picture(run, images):
    report = evaluate("knn", run / "encoder.safetensors", images, device="cpu", blend=[0.5])
    assert not report.drawings and any(row.settings.get("blend") == 0.5 for row in report.rows)


def test_what_cannot_be_blended_is_refused(run, images, weights, tmp_path):
    for given, said in (
        ({"start": True, "blend": 0.5}, "--start is --blend 0"),
        ({"blend": 1.5}, "--blend is the share of the adapted weights"),
    ):
        with pytest.raises(PatchloomError, match=said):
            export(run, **given)
    pretrain(images / "train", out=tmp_path / "scratch", model="nano", img_size=16, patch_size=4, **QUICK)
    for source in (tmp_path / "scratch", weights):
        with pytest.raises(PatchloomError, match=r"has no start\.safetensors"):
            export(source, blend=0.5)
        with pytest.raises(PatchloomError, match=r"has no start\.safetensors"):
            evaluate("knn", source, images, device="cpu", blend=[0.5])
    for given, said in (
        ({"blend": [2.0]}, "from 0 to 1"),
        ({"blend": [0.5], "pooling": "instance"}, "--blend has no instance head"),
    ):
        with pytest.raises(PatchloomError, match=said):
            evaluate("knn", run, images, device="cpu", **given)
    with pytest.raises(PatchloomError, match="--blend applies to --recipe logistic only"):
        evaluate("linear", run, images, device="cpu", blend=[0.5], recipe="mae")


@pytest.mark.parametrize("protocol", ["knn", "linear"])
def test_the_curve_of_blends(run, images, protocol):
    alone = evaluate(protocol, run, images, device="cpu")
    report = evaluate(protocol, run, images, device="cpu", blend=[0.5, 0.25, 1.0])
    (drawing,) = report.drawings
    assert drawing.content["shares"] == [0.0, 0.25, 0.5, 1.0] and UNTRAINED in drawing.content["baselines"]
    assert drawing.content["values"][2][0] == next(row.value for row in report.rows if row.settings.get("blend") == 0.5)
    picture = Image.open(run / "pictures" / f"blends-{protocol}.png")
    assert picture.size[0] > 300 and alone.drawings == ()
    assert report.rows[: len(alone.rows)] == alone.rows and report.quoted[:-1] == alone.quoted
    points = {row.settings["blend"]: row for row in report.rows if row.encoder == BLEND}
    assert list(points) == [0.0, 0.25, 0.5, 1.0]
    for share, row in ((1.0, alone.quoted[0]), (0.0, alone.quoted[1])):
        assert (points[share].value, points[share].low, points[share].high) == (row.value, row.low, row.high)
    assert all(row.low <= row.value <= row.high for row in points.values())
    # a point is the evaluation of the exported blend
    file = export(run, blend=0.5, out=run.parent / f"{protocol}.safetensors").weights
    vit, card = load_blend(run, 0.5)
    save_encoder(vit, card, file)
    assert points[0.5].value == evaluate(protocol, file, images, device="cpu").quoted[0].value
    # chosen without the test images; ties go to the start
    best = max(row.settings["held_out_accuracy"] for row in points.values())
    chosen = next(share for share, row in points.items() if row.settings["held_out_accuracy"] == best)
    assert report.quoted[-1] == points[chosen]
    assert f"Of 4 blends with the start, {chosen:g} is the best on held-out training images" in report.headline
    assert report.against[-1].control == BLEND and "the chosen blend" in report.conclusion()
    assert [row["settings"]["blend"] for row in report.plain()["rows"] if row["encoder"] == BLEND] == [0, 0.25, 0.5, 1]


def test_a_curve_over_seeds_and_in_the_report(run, images):
    report = evaluate("knn", run, images, device="cpu", blend=[0.5], seeds=2)
    assert len(report.others) == 1 and report.against[-1].trainings == 2
    number = key_numbers(load_run(run))[-1]
    assert BLEND in [one.name for one in number.beside]
    assert number.quantity.value == report.quoted[0].value
