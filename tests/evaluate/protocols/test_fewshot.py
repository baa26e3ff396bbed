"""Few labels are few, of every class, and the same for the control."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from perturbing import perturbed
from refusing import refusal

from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.fewshot import load_stem, subsample_training
from patchloom.evaluate.protocols.finetune import candidate
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of
from patchloom.evaluate.subjects import open_subjects
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder, save_extra_module
from patchloom.nets.heads import Stem
from patchloom.tasks.extrema import ExtreMA
from patchloom.tasks.lut import LUT
from patchloom.withhold.encoder_input import all_patches

QUICK = {"device": "cpu", "epochs": 2, "flip": False}
SPEC = EncoderSpec("nano", (8, 8), 2, channels=1, options={"depth": 1, "embed_dim": 32, "num_heads": 2})
BARE = EncoderSpec("nano", (8, 8), 2, channels=1, options={**SPEC.options, "class_token": False})


def _run(folder: Path, task, spec: EncoderSpec, name: str) -> Path:
    beside = task.extra_modules()
    uses = {key: module.use for key, module in beside.items()}
    card = EncoderCard(spec, (0.3,), (0.37,), name, name, extra_modules=uses)
    save_encoder(task.encoder, card, folder / "encoder.safetensors")
    for key, module in beside.items():
        save_extra_module(module, folder / f"{key}.safetensors")
    return folder


def _extrema(folder: Path, class_token: str = "cait") -> tuple[Path, ExtreMA]:
    torch.manual_seed(0)
    spec = SPEC if class_token == "vit" else BARE
    task = ExtreMA(build_encoder(spec), class_token=class_token, head_width=16, head_out=8)
    perturbed(task, 0.1)  # zero biases and equal scales would hide mistakes
    return _run(folder, task.eval(), spec, "extrema"), task


@pytest.mark.parametrize(("share", "count"), [(0.01, 14), (0.1, 144), (None, 144), (50, 50), (1.0, 1437)])
def test_a_share_has_every_class(share: float | None, count: int) -> None:
    parts = parts_of("digits", EvalSettings())
    some, what = subsample_training(parts, share, None, 0)
    assert len(some.train) == what["labelled"] == count and set(some.train.labels) == set(range(10))
    assert some.test is parts.test and f"A stratified {count:,} of 1,437 training images" in some.story
    assert what["labels"] == (share or 0.1)
    other = subsample_training(parts, share, None, 1)[0].train
    assert np.array_equal(other.indices, some.train.indices) == (count == 1437)
    some, what = subsample_training(parts, None, 3, 0)
    assert np.bincount(some.train.labels).tolist() == [3] * 10 and what == {"per_class": 3, "labelled": 30}


@pytest.fixture
def named(tmp_path: Path, draw: Callable[..., Path]) -> Path:
    for part, count in (("train", 4), ("test", 2)):
        for label in ("cat", "dog"):
            for name in (*(f"{label}_{i}.png" for i in range(count)), "same.png"):
                draw(f"data/{part}/{label}/{name}")
    return tmp_path / "data"


def test_a_list_names_the_labelled_images(named: Path, tmp_path: Path) -> None:
    """SimCLR's lists are names of files; with folders they are told apart."""
    parts, file = parts_of(str(named), EvalSettings()), tmp_path / "1percent.txt"
    file.write_text("cat_1.png\r\n\n./dog/dog_2.png\ntrain\\cat\\same.png\ncat_1.png\ncat_77.png\n")
    some, what = subsample_training(parts, str(file), None, 0)
    paths = [some.train.describe(i) for i in range(len(some.train))]
    assert sorted(Path(path).name for path in paths) == ["cat_1.png", "dog_2.png", "same.png"]
    assert all("/train/" in path for path in paths) and what == {"labels": "1percent.txt", "labelled": 3}
    assert "The 3 of 10 training images" in some.story and "1 of its 4 names are of no" in some.story
    file.write_text("cat_1.png\ncat_2.png\n")
    assert "1 of the 2 classes" in subsample_training(parts, str(file), None, 0)[0].story
    for text, said in (
        ("same.png\n", "same.png in .* names 2 training images"),
        ("bird.png\n", "names none of the 10 training images: .*cat_0.png"),
    ):
        file.write_text(text)
        assert re.search(said, refusal(subsample_training, parts, str(file), None, 0))


@pytest.mark.parametrize(
    ("share", "per_class", "said"),
    [
        (0.005, None, "7, fewer than the 10 classes: use --labels 0.007"),
        (1.5, None, "--labels must be a fraction above 0 and up to 1"),
        (50.5, None, "--labels must be a fraction above 0"),
        (9, None, "--labels 9 is fewer than the 10 classes"),
        (1438, None, "--labels 1,438 is more than the 1,437"),
        ("none.txt", None, "there is no file none.txt"),
        ("10%", None, "write 0.1 for a fraction"),
        (None, 145, "use --per_class 1"),
        (0.1, 2, "both set the number of labels"),
    ],
)
def test_refusals(share: float | str | None, per_class: int | None, said: str) -> None:
    assert said in refusal(subsample_training, parts_of("digits", EvalSettings()), share, per_class, 0)


def test_fine_tuning_sees_only_those(tiny_encoder: Path, record_reads) -> None:
    record = record_reads(120, 40)
    report = evaluate("few-shot", tiny_encoder, "digits", per_class=2, blr=0.02, **QUICK)
    assert record.count("test") == 80 and set(record[: record.index("test")]) == {"train"}  # tiny, and from scratch
    assert list(dict.fromkeys(row.encoder for row in report.results)) == ["tiny", "from scratch", "best constant"]
    assert report.results[0].settings.items() >= {"per_class": 2, "labelled": 20, "head_on": "features"}.items()
    assert report.headline.startswith("Fine-tuning with 20 labels (small): ")
    assert {row.protocol for row in report.results} == {"few-shot"}


@pytest.mark.usefixtures("quick_probe")
def test_the_linear_probe_is_that_of_frozen_features(tiny_encoder: Path) -> None:
    report = evaluate("few-shot", tiny_encoder, "digits", method="linear", labels=0.1, device="cpu")
    names = ["tiny", "untrained", "raw pixels", "best constant"]
    assert list(dict.fromkeys(row.encoder for row in report.results)) == names
    assert report.results[0].settings.items() >= {"labels": 0.1, "labelled": 144, "method": "linear"}.items()
    assert all(row in report.results for row in report.quoted) and {row.protocol for row in report.results} == {
        "few-shot"
    }
    assert report.headline.startswith("With 144 labels: Linear probe")
    assert next(row for row in report.quoted if row.encoder == "raw pixels").value > 0.8


@pytest.mark.parametrize("class_token", ["cait", "vit", "mean"])
def test_the_projections_first_layer_is_the_tasks_own(tmp_path: Path, class_token: str) -> None:
    run, task = _extrema(tmp_path, class_token)
    settings, digits = EvalSettings(device="cpu"), open_data("digits").train
    ours, _, fresh = open_subjects(run, settings, tuned=True, head=True)
    stem = load_stem(run, ours, settings)
    assert stem.pooling == {"cait": "instance", "vit": "class"}.get(class_token, "mean")
    card, parts = ours.card, Parts(digits, digits, "")
    build = candidate(ours._replace(stem=stem), "auto", parts, pooling=stem.pooling).build
    model, again = build(Recipe()).eval(), build(Recipe())
    images = normalize(torch.stack([digits.read(i) for i in range(5)]), card.mean, card.std)
    with torch.no_grad():
        expected = task.agreement.projection[:3](task.agreement.represent(task.encoder, all_patches(images, 16)))
        if class_token != "mean":  # there, the norm comes after the mean
            torch.testing.assert_close(model.stem(model.pooled(images)), expected)
        assert model(images).shape == (5, 10)
    assert torch.equal(model.stem[0].weight, task.agreement.projection[0].weight)
    assert model.stem[0].weight is not again.stem[0].weight
    untrained = fresh._replace(stem=Stem.fresh(**stem.sizes))
    scratch = candidate(untrained, "auto", parts, pooling=stem.pooling).build(Recipe())
    assert not torch.equal(scratch.stem[0].weight, model.stem[0].weight)
    assert scratch.stem[0].weight.shape == model.stem[0].weight.shape and scratch.pooling == model.pooling
    trained = {id(weight) for group in model.groups(0.05, 0.75) for weight in group["params"]}
    assert trained == {id(weight) for weight in model.parameters() if weight.requires_grad}


def test_a_head_on_the_projection_from_end_to_end(tmp_path: Path) -> None:
    run, _ = _extrema(tmp_path)
    options = {"head_on": "projection", "recipe": "extrema", "batch_size": 10, "per_class": 2, **QUICK}
    report = evaluate("few-shot", run, "digits", **options)
    assert report.results[0].pooling == report.results[1].pooling == "instance" and report.n_test == 360
    assert "projection's first layer" in report.method
    assert report.results[0].settings["pooling"] == "instance" and "fresh_norm" not in report.results[0].settings
    for name, value in {"pooling": "class", "fresh_norm": True}.items():
        assert f"leave --{name} out" in refusal(evaluate, "few-shot", run, "digits", **{name: value}, **options)
    (head,) = Path(run).rglob("instance_head.safetensors")
    head.unlink()
    assert "needs the instance head" in refusal(evaluate, "few-shot", run, "digits", **options)
    run = _run(tmp_path / "lut", LUT(build_encoder(SPEC), head_width=16, decoder_depth=1), SPEC, "lut")
    assert "task lut saved no projection" in refusal(evaluate, "few-shot", run, "digits", **options)
