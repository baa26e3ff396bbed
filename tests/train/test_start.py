"""The weights that an adapted run began with are the control of what it learnt."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import numbers
from PIL import Image
from refusing import refusal
from safetensors.torch import load_file

from patchloom.evaluate.protocols import evaluate
from patchloom.export.export import export
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.results.claims import BLEND, START, UNTRAINED, Claim, Difference
from patchloom.runs.encoder import load_blend, load_encoder, load_start
from patchloom.runs.folder import RunFolder
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
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (
                ("blocks:2", {"epochs": 2, "warmup_epochs": 0}, ["untrained"]),
                ("label-free", {}, ["untrained", "raw pixels"]),
                ("position-sensitivity", {"steps": 4}, ["untrained", "chance"]),
            )
        ),
    ],
)
def test_its_row_is_the_evaluation_of_its_file(run, images, protocol, given, controls):
    report = evaluate(protocol, run, images, device="cpu", **given)
    alone = evaluate(protocol, RunFolder(run).start, images, device="cpu", **given)
    assert list(dict.fromkeys(row.encoder for row in report.quoted)) == ["adapted", START, *controls]
    assert list(dict.fromkeys(row.encoder for row in alone.quoted)) == [START, *controls]
    ours = [row for row in report.results if row.encoder == START]
    assert ours and numbers(ours) == numbers(row for row in alone.results if row.encoder == START)
    assert numbers(ours) != numbers(replace(row, encoder=START) for row in report.results if row.encoder == "adapted")
    assert "at its start" in report.headline
    if protocol != "position-sensitivity":
        (gain,) = [one for one in report.against if one.control == START]
        first, *others = report.quoted
        its = next(row for row in others if row.encoder == START)
        assert gain.value == first.value - its.value and gain.low < gain.value < gain.high
        assert "its start" in report.conclusion()


@pytest.mark.slow
def test_fine_tuning_stands_beside_the_start(run, images, tmp_path):
    """Trained from the file itself, with its normalisation, not that of the run."""
    short = {"epochs": 1, "warmup_epochs": 0, "batch_size": 16}
    beside = evaluate("finetune", run, images, **short)
    direct = evaluate("finetune", RunFolder(run).start, images, control=False, out=str(tmp_path / "c"), **short)
    assert [row.encoder for row in beside.quoted] == ["adapted", START]
    assert numbers(beside.quoted[1:]) == numbers(direct.quoted)
    alone = evaluate("finetune", run, images, from_scratch=True, **short)
    assert [row.encoder for row in alone.quoted] == ["from scratch"]


@pytest.mark.slow
def test_layers_stand_beside_those_of_the_start(run, images, tmp_path):
    reports = [evaluate("layers", one, images, out=tmp_path / "a.png") for one in (run, RunFolder(run).start)]
    its = [[(row.pooling, row.value) for row in report.results if row.encoder == START] for report in reports]
    assert its[0] == its[1] != [] and reports[0].against[0].control == START


@pytest.fixture(scope="module")
def scratch(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "scratch"
    return pretrain(images / "train", out=out, model="nano", img_size=16, patch_size=4, **QUICK).folder


def test_a_run_from_random_weights_has_none(scratch, images):
    assert load_start(scratch) is None and not RunFolder(scratch).start.exists()
    assert "has no start.safetensors: only runs with --init or --from" in refusal(export, scratch, start=True)
    report = evaluate("knn", scratch, images, device="cpu")
    assert [row.encoder for row in report.quoted] == ["scratch", "untrained", "raw pixels"]


def test_a_longer_training_keeps_its_start(images, weights, tmp_path):
    """Low-rank updates are no part of it."""
    given = QUICK | {"init": str(weights), "adapt": "lora", "out": tmp_path / "run"}
    pretrain(images / "train", **given)
    before = RunFolder(tmp_path / "run").start.read_bytes()
    assert load_file(RunFolder(tmp_path / "run").start).keys() == load_file(weights).keys()
    pretrain(images / "train", **given | {"epochs": 2})
    assert RunFolder(tmp_path / "run").start.read_bytes() == before


def test_a_run_from_another_run_begins_with_its_encoder(run, images, tmp_path):
    pretrain(images / "train", from_run=str(run), out=tmp_path / "next", **QUICK)
    found, (before, card) = load_start(tmp_path / "next"), load_encoder(run)
    assert found is not None and (found[1].mean, found[1].std) == (card.mean, card.std)
    assert all(torch.equal(weight, before.state_dict()[name]) for name, weight in found[0].state_dict().items())


def test_the_start_is_exported_to_the_bit(run, tmp_path):
    done = export(run, start=True)
    assert done.weights == run / "start-timm.safetensors"
    vit, _ = load_encoder_file(RunFolder(run).start)
    written = load_file(done.weights)
    assert all(torch.equal(weight, written[name]) for name, weight in vit.state_dict().items())
    assert export(run, start=True, out=tmp_path / "mine.safetensors").weights == tmp_path / "mine.safetensors"
    pytest.importorskip("transformers")
    hub = export(run, to="hf", start=True)
    before = RunFolder(run).read_config().weights_before[0]
    assert hub.weights.name == "start-hf" and f"The licence of {before}" in " ".join(hub.notes)


@pytest.mark.parametrize(
    ("low", "high", "claim", "said"),
    [
        (0.013, 0.029, Claim.BETTER, "2.1 points better than its start [+1.3, +2.9]"),
        (-0.01, 0.03, Claim.NONE, "indistinguishable from its start (+1.0 points [-1.0, +3.0])"),
        (-0.03, -0.01, Claim.WORSE, "worse than its start [-3.0, -1.0]. Keep the start."),
    ],
)
def test_the_sentence_says_whether_adaptation_helped(low, high, claim, said):
    found = Difference(START, (low + high) / 2, low, high, 500)
    assert found.claim is claim and said in found.sentence()


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
    # another depth, and the same weights in another function
    for options, said in (({"depth": 1}, "blocks.1.norm1.weight"), ({"num_heads": 4}, "the model")):
        other = replace(SPEC, options=SPEC.options | options)
        save_encoder(build_encoder(other), EncoderCard(other, *OWN, "mae", "x"), tmp_path / "run/start.safetensors")
        assert f"cannot be blended with its start, because {said}" in refusal(export, tmp_path / "run", blend=0.5)


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


def test_what_cannot_be_blended_is_refused(run, scratch, images, weights):
    for given, said in (
        ({"start": True, "blend": 0.5}, "--start is --blend 0"),
        ({"blend": 1.5}, "--blend must be 0 to 1"),
    ):
        assert re.search(said, refusal(export, run, **given))
    for source in (scratch, weights):
        assert "has no start.safetensors" in refusal(export, source, blend=0.5)
    for source, protocol, given, said in (
        (scratch, "knn", {"blend": [0.5]}, r"has no start\.safetensors"),
        (run, "knn", {"blend": [2.0]}, "from 0 to 1"),
        (run, "knn", {"blend": [0.5], "pooling": "instance"}, "--blend has no instance head"),
        (run, "linear", {"blend": [0.5], "recipe": "mae"}, "--blend applies to --recipe logistic only"),
    ):
        assert re.search(said, refusal(evaluate, protocol, source, images, device="cpu", **given))


@pytest.mark.parametrize("protocol", ["knn", pytest.param("linear", marks=pytest.mark.slow)])
def test_the_curve_of_blends(run, images, protocol):
    alone = evaluate(protocol, run, images, device="cpu")
    found = evaluate(protocol, run, images, device="cpu", blend=[0.5, 0.25, 1.0])
    assert numbers(found.results[: len(alone.results)]) == numbers(alone.results) and not alone.drawings
    assert numbers(found.quoted[:-1]) == numbers(alone.quoted)
    points = {row.settings["blend"]: row for row in found.results if row.encoder == BLEND}
    for share, row in ((1.0, alone.quoted[0]), (0.0, alone.quoted[1])):
        assert (points[share].value, points[share].low, points[share].high) == (row.value, row.low, row.high)
    (drawing,) = found.drawings
    (panel,) = drawing.content["panels"]
    assert list(points) == panel.lines[0].x.tolist() == [0.0, 0.25, 0.5, 1.0]
    assert panel.lines[0].y[2] == points[0.5].value and UNTRAINED in panel.baselines
    assert Image.open(run / "pictures" / f"blends-{protocol}.png").size[0] > 300
    # a point is the evaluation of the blend
    vit, card = load_blend(run, 0.5)
    save_encoder(vit, card, file := run.parent / f"{protocol}.safetensors")
    assert points[0.5].value == evaluate(protocol, file, images, device="cpu").quoted[0].value
    # chosen without the test images; ties go to the start
    best = max(row.settings["held_out_accuracy"] for row in points.values())
    chosen = next(share for share, row in points.items() if row.settings["held_out_accuracy"] == best)
    assert found.quoted[-1] == points[chosen] and f"{chosen:g} is the best on held-out" in found.headline
    assert found.against[-1].control == BLEND
