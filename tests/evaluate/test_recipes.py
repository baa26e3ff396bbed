"""Recipes have the papers' values, each can be replaced, and timm's parts are put together as timm does."""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from evaluating import write_encoder
from PIL import Image
from refusing import refusal
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.utils import random_seed

from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.stats import normalize
from patchloom.evaluate import classification
from patchloom.evaluate.classification import Views, begin_classifier, plan_for, predict_classes
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.recipes import PROBES, RECIPES, Course, Recipe, images_per_step, published_recipe, recipe_for
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.evaluate.trainer import Trainer, temporary_seed
from patchloom.nets.build import EncoderSpec, build_encoder, outline
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.finetune import with_variant
from patchloom.options.parse import evaluate_spec, parse_call
from patchloom.pace import Pace
from patchloom.results.claims import CONSTANT
from patchloom.system.files import cache_root

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
SPEC = EncoderSpec("nano", (8, 8), 4, channels=1, options=SMALL)
CARD = EncoderCard(SPEC, (0.3,), (0.37,), "mae", "tiny")
SIZES = {"S": (384, 12), "B": (768, 12), "L": (1024, 24)}
SETTINGS = EvalSettings(device="cpu")


def begun(recipe: Recipe, source: Source, model: Classifier | None = None) -> Trainer:
    settled = recipe.settled(len(source), "cpu")
    return begin_classifier(model or classifier(), CARD, settled, source, None, settings=SETTINGS)


def of_size(size: str, name: str, **changes) -> Recipe:
    width, depth = SIZES[size]
    embedding = SimpleNamespace(img_size=(224, 224))
    encoder = SimpleNamespace(num_features=width, feature_info=[{}] * depth, patch_embed=embedding)
    return recipe_for(name, encoder, changes)


def classifier(**options) -> Classifier:
    torch.manual_seed(0)
    model = Classifier(build_encoder(replace(SPEC, options=SMALL | options)), 10, "mean")
    torch.nn.init.normal_(model.head.weight)  # at its start all classes are alike, which hides mistakes
    return model


@pytest.mark.parametrize(
    ("name", "size", "values"),
    [
        ("mae", "B", {"epochs": 100, "blr": 1e-3, "layer_decay": 0.75, "drop_path": 0.1}),
        ("mae-normalized", "B", {"epochs": 100, "blr": 5e-4, "layer_decay": 0.65, "drop_path": 0.1}),
        ("mae-normalized", "L", {"epochs": 50, "blr": 1e-3, "layer_decay": 0.75, "drop_path": 0.2}),
        ("mp3-300", "B", {"epochs": 300, "warmup_epochs": 5, "batch": 2048, "blr": 2.5e-4}),
        ("droppos", "B", {"epochs": 100, "blr": 1e-3, "layer_decay": 0.8, "mixup": 0.8, "cutmix": 1.0}),
        ("droppos", "L", {"epochs": 50, "warmup_epochs": 5, "batch": 1024, "weight_decay": 0.05, "smoothing": 0.1}),
        ("droppos", "B", {"betas": (0.9, 0.999), "drop_path": 0.1, "randaugment": 9.0, "randaugment_std": 0.5}),
        ("extrema", "S", {"epochs": 200, "layer_decay": 0.75, "pooling": "mean"}),
        ("extrema", "B", {"epochs": 100, "blr": 1e-3, "layer_decay": 0.75}),
        ("extrema-22k", "B", {"epochs": 100, "blr": 5e-4, "layer_decay": 0.65}),
        ("extrema-few", "B", {"epochs": 1000, "lr": 5e-6}),
        ("restore", "B", {"epochs": 100, "pooling": "class", "blr": 1e-3, "layer_decay": 0.75}),
        ("simmim", "B", {"epochs": 100, "warmup_epochs": 20, "batch": 2048, "blr": 1.25e-3 / 2, "layer_decay": 0.65}),
        (
            "simmim",
            "B",
            {"weight_decay": 0.05, "betas": (0.9, 0.999), "drop_path": 0.1, "clip": 5.0, "pooling": "mean"},
        ),
        ("simmim", "B", {"mixup": 0.8, "cutmix": 1.0, "randaugment": 9.0, "erasing": 0.25, "smoothing": 0.1}),
        ("lut", "S", {"epochs": 300, "blr": 5e-4, "layer_decay": 0.75}),
        ("lut", "B", {"epochs": 100, "blr": 2.5e-4, "layer_decay": 0.65}),
        ("lut", "L", {"epochs": 50, "blr": 1e-3, "layer_decay": 0.65}),
        ("mp3", "B", {"pooling": "class", "repeats": 3, "erasing": 0.25, "drop_path": 0.1, "layer_decay": 1.0}),
        ("mp3", "B", {"epochs": 150, "batch": 2048, "blr": 5e-4 / 2, "weight_decay": 0.05, "smoothing": 0.1}),
        ("mp3-cifar100", "S", {"epochs": 400, "batch": 256, "blr": 5e-4 / 2, "pooling": "class", "repeats": 3}),
        ("mp3-cifar100", "S", {"crop_scale": "padded"}),  # DeiT's program at 32 pixels
        ("mp3-tiny-imagenet", "S", {"crop_scale": 0.08}),
        ("mp3-tiny-imagenet", "B", {"epochs": 400, "batch": 512, "blr": 5e-4 / 2, "pooling": "class", "repeats": 3}),
    ],
)
def test_recipes_are_the_papers(name: str, size: str, values: dict) -> None:
    recipe = of_size(size, name)
    assert {key: getattr(recipe, key) for key in values} == values


def test_norm_positions_and_erasing_are_those_of_the_programs() -> None:
    """A norm of its own (fc_norm) in MAE's, LUT's, ExtreMA's, DropPos' and SimMIM's; DropPos' keeps positions fixed.

    --reprob 0.25 in all of them and DeiT's; MP3's speech has none.
    """
    found = {name: of_size("B", name) for name in RECIPES}
    norm = {name for name, recipe in found.items() if recipe.fresh_norm}
    assert norm == {"mae", "mae-normalized", "lut", "extrema", "extrema-22k", "droppos", "simmim"}
    positions = {name for name, recipe in found.items() if recipe.train_positions}
    assert positions == norm - {"droppos", "simmim"} | {"extrema-few"}
    assert {name for name, recipe in found.items() if not recipe.erasing} == {"small", "mp3-speech"}
    assert {recipe.erasing for recipe in found.values()} == {0.0, 0.25}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mae", {"epochs": 90, "warmup_epochs": 10, "batch": 16_384, "blr": 0.1, "weight_decay": 0.0}),
        ("mae", {"momentum": 0.9, "pooling": "class", "crop_scale": 0.08, "flip": True, "randaugment": 0.0}),
        ("extrema", {"epochs": 90, "warmup_epochs": 10, "batch": 4096, "blr": 0.1, "weight_decay": 0.0}),
        ("extrema", {"momentum": 0.9, "pooling": "instance", "smoothing": 0.0, "mixup": 0.0, "cutmix": 0.0}),
        ("extrema", {"network": "teacher", "last_norm": False, "optimizer": "lars", "test_crop": 0.875}),
        ("mae", {"network": "student", "last_norm": True, "optimizer": "lars", "test_crop": 0.875}),
    ],
)
def test_linear_probes_are_the_papers(name: str, values: dict) -> None:
    recipe, sizes = PROBES[name]
    assert {key: getattr(recipe, key) for key in values} == values and not sizes


@pytest.mark.parametrize("batch", [64, 1024])
def test_few_labels_start_at_the_papers_rate_whatever_the_batch(batch: int) -> None:
    """ExtreMA: an initial rate of 5e-6, which no batch scales."""

    def peak(name: str, n: int = 1_281_167, **changes: float) -> float:
        return of_size("B", name, **changes).settled(n, "cpu").course(n).peak

    assert peak("extrema-few", 80, batch=batch) == 5e-6 != peak("extrema-few", 80, batch=batch, blr=5e-6)
    assert peak("mae") == peak("extrema") == 4e-3 and peak("simmim") == 5e-3 and peak("mp3", batch=512) < 5e-4 + 1e-9


def test_every_value_is_an_option_of_every_protocol_that_trains() -> None:
    options = {"epochs": "7", "blr": "[0.0001, 0.01]", "betas": "[0.9, 0.95]", "flip": "false", "pooling": "class"}
    words = [part for name, value in options.items() for part in (f"--{name}", value)]
    expected = {"epochs": 7, "blr": [1e-4, 0.01], "betas": (0.9, 0.95), "flip": False, "pooling": "class"}
    for protocol in ("finetune", "blocks:2", "few-shot", "keywords"):
        given = parse_call("evaluate", [protocol, "RUN", "DATA", *words])
        assert {name: given[name] for name in options} == expected
        own = {field.name for field in fields(Recipe)} - {"batch", "recordings"}  # --batch_size tells of the batch
        assert all(given[name] is None for name in own if name not in options) and "batch" not in given
        named = next(option.about for option in evaluate_spec(protocol).options if option.name == "recipe")
        assert all(re.search(rf"\b{name}(?![-\w])", named) for name in RECIPES)
    changes = {name: value for name, value in given.items() if name in expected}
    recipe = of_size("B", "mae", **changes | {"blr": 1e-4})
    assert (recipe.epochs, recipe.warmup_epochs, recipe.betas, recipe.cutmix) == (7, 0.35, (0.9, 0.95), 1.0)


def test_the_batch_of_a_training_is_the_batch_size_that_is_given() -> None:
    vit, images = build_encoder(SPEC), open_data("digits").test
    parts = Parts(images, images, "")
    for size, batch, read in (("auto", 32, 256), (6, 6, 6)):
        settings = EvalSettings(batch_size=size, device="cpu")
        assert plan_for("small", {}, vit, parts, settings, "float32").recipe.batch == batch
        assert settings.reading(images)["batch_size"] == read


def test_auto_values_follow_from_the_data() -> None:
    small = of_size("S", "small")
    # images -> of a step, epochs, share for validation: 1,000 updates, where 10 to 300 epochs allow it
    for n, *expected in ((14, 8, 300, 0), (129, 16, 125, 0), (161, 16, 125, 0.15), (1437, 64, 53, 0.15)):
        settled = small.settled(n, "cpu")
        assert [settled.batch, settled.epochs, settled.validation] == expected
        assert settled.warmup_epochs == settled.epochs / 10 and settled.patience == 0.3
    large = small.settled(50_000, "cuda")
    assert (large.batch, large.epochs) == (256, 107) and small.settled(50_000, "cpu").epochs == 10
    assert large.held_out(50_000) == 2000 and small.settled(161, "cpu").held_out(161) == 24
    assert small.settled(1437, "cuda").epochs == 300
    mae = of_size("B", "mae")
    assert mae.settled(1437, "cpu").plain() == mae.plain()  # the papers' train on all, to the end
    assert recipe_for("small", build_encoder(SPEC), {}).blr > small.blr == of_size("B", "small").blr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "mea"}, "mea: choose one of small, mae"),
        ({"batch": 63}, "--batch_size 64"),
        ({"batch": 2, "repeats": 3}, "--batch_size 2 cannot hold 3"),
        ({"blr": 0.0}, "--blr must be above 0"),
        ({"warmup_epochs": 200}, "--warmup_epochs 200"),
        ({"pooling": "both"}, "--pooling cannot be both"),
        ({"lr": 1e-4, "blr": 1e-3}, "--lr and --blr both"),
        ({"name": "mp3-speech", "epochs": 3}, "30,000 updates"),
        ({"warmup_updates": 3}, "--warmup_updates needs --updates"),
        ({"updates": 3, "warmup_updates": 4}, "--warmup_updates 4 is more"),
    ],
)
def test_refusals(change: dict, said: str) -> None:
    assert said in refusal(of_size, "B", **{"name": "mae"} | change)


def test_a_step_has_even_batches_and_repeats() -> None:
    mp3 = of_size("B", "mp3").settled(10_000, "cpu")
    assert images_per_step(mp3, 10_000) == (682, 2046)
    assert images_per_step(of_size("B", "mae"), 15) == (14, 14)
    assert images_per_step(of_size("B", "mae", mixup=0.0, cutmix=0.0), 15) == (15, 15)
    assert "need 2 images in a batch" in refusal(images_per_step, of_size("B", "mae"), 1)


@pytest.mark.parametrize("n", [2, 256, 257, 1025, 1281, 16_001])
def test_parts_divide_the_step_of_a_probe(n: int) -> None:
    """Else fewer images are encoded than those by which the rate is scaled."""
    recipe = PROBES["mae"][0]
    images, _ = images_per_step(recipe, n)
    assert 0.95 * n < images <= n and images % recipe.parts(images) == 0


@pytest.mark.parametrize(("size", "epochs"), [("tiny", 100), ("small", 100), ("base", 100), ("large", 50)])
def test_a_swin_has_the_values_of_its_own_size(size: str, epochs: int) -> None:
    """Swin-B's last stage is as wide as ViT-L."""
    spec = EncoderSpec(f"swin_{size}_patch4_window7_224", (224, 224), 4, positions="none")
    assert recipe_for("droppos", outline(spec), {}).epochs == epochs


@pytest.mark.parametrize("mixed", [True, False])
def test_the_loss_of_a_batch_is_timms(mixed: bool) -> None:
    model, source = classifier(), open_data("digits").train.subset(range(16))
    mixing = {"mixup": 0.8, "cutmix": 1.0} if mixed else {"mixup": 0.0, "cutmix": 0.0}
    recipe = Recipe(epochs=1, warmup_epochs=0, batch=16, drop_path=0.0, randaugment=0.0, crop_scale=1.0, **mixing)
    training = begun(recipe, source, deepcopy(model))
    batch = next(training.batches(0, 1, 0))
    random_seed(3)
    loss = training.update(batch)
    images = normalize(batch.views[0], CARD.mean, CARD.std)
    labels = torch.from_numpy(source.labels)[batch.indices]
    if mixed:
        random_seed(3)
        mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
        images, labels = mix(images, labels)
        assert labels.sum(1).allclose(torch.ones(16)) and labels.min() >= 0.01 - 1e-6
        expected = SoftTargetCrossEntropy()(model(images), labels)
    else:
        expected = LabelSmoothingCrossEntropy(0.1)(model(images), labels)
    torch.testing.assert_close(loss, expected.detach())


def test_every_layer_has_its_share_of_the_rate() -> None:
    source = open_data("digits").train.subset(range(32))
    recipe = Recipe(epochs=10, warmup_epochs=2, batch=16, blr=0.16, layer_decay=0.5, randaugment=0.0)
    training = begun(recipe, source)
    batches = training.batches(0, 5, 0)
    for step in range(5):
        training.update(next(batches))
        rates = {group["lr_scale"]: group["lr"] for group in training.optimizer.param_groups}
        assert rates == {scale: scale * training.course.rate(step) for scale in (1.0, 0.5, 0.25, 0.125)}


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("deep", [False, True])
def test_views_follow_from_the_generator_alone(channels: int, deep: bool) -> None:
    image = torch.randint(256, (channels, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image = image.float() / 255 if deep else image
    views = Views((8, 8), Recipe(repeats=3), (0.5,) * channels, Shapes(2))
    state = torch.get_rng_state()
    seen = [views(image, np.random.default_rng(seed)) for seed in range(12)]
    assert torch.equal(state, torch.get_rng_state())
    assert all(view.shape == (channels, 8, 8) and view.dtype == image.dtype for three in seen for view in three)
    torch.manual_seed(5)
    assert all(torch.equal(*pair) for pair in zip(seen[3], views(image, np.random.default_rng(3)), strict=True))
    assert not torch.equal(seen[0][0], seen[0][1]) and not torch.equal(seen[0][0], seen[1][0])
    assert deep is False or all(view.min() >= 0 and view.max() <= 1 for three in seen for view in three)


def test_views_have_the_strength_of_the_recipe_and_its_deviation() -> None:
    mean = (0.1, 0.2, 0.3)
    change = Views((8, 8), Recipe(randaugment=3.0, randaugment_std=0.25), mean, Shapes(2)).crop.randaugment
    assert (change.magnitude, change.std, change.fill) == (3.0, 0.25, mean)


def test_padded_views_are_shifted_and_no_more() -> None:
    """Fine-tuning at 32 pixels in DeiT's program: black pixels come in, and the picture keeps its scale."""
    image = torch.randint(1, 256, (3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views = Views((12, 12), Recipe(randaugment=0.0, crop_scale="padded"), (0.5,) * 3, Shapes(2))
    seen = [views(image, np.random.default_rng(seed))[0] for seed in range(40)]
    pixels = {tuple(one) for one in image.flatten(1).T.tolist()} | {(0, 0, 0)}
    assert all({tuple(one) for one in view.flatten(1).T.tolist()} <= pixels for view in seen)
    assert any((view == 0).any() for view in seen)


def test_a_moving_average_is_what_comes_back() -> None:
    source = open_data("digits").train.subset(range(16))
    recipe = Recipe(epochs=3, warmup_epochs=0, batch=16, erasing=0.5, clip=1.0, repeats=2)
    model = classifier()

    def trained(recipe: Recipe, model: Classifier) -> Classifier:
        with temporary_seed(SETTINGS):
            return begun(recipe, source, model).fit("tiny", Pace(3)).model

    plain, average = trained(recipe, model), trained(replace(recipe, ema=0.9), classifier())
    assert plain is model and not plain.training and not average.training
    start, last, mean = (model.head.weight for model in (classifier(), plain, average))
    assert (last - start).norm() > (mean - start).norm() > 0
    found = predict_classes(average, source, CARD, SETTINGS, "bfloat16")
    assert found.logits.shape == (16, 10) and found.logits.dtype == torch.float32


def test_the_rate_of_speech_is_low_then_halved_whatever_came_before() -> None:
    """MP3, section 4.3: 500 updates at a constant small rate, then higher, and halved every 10,000."""
    recipe = of_size("S", "mp3-speech")
    course = recipe.settled(300, "cpu").course(255)  # 45 images are for validation
    assert course.steps == 30_000 and course.batch == 255 and course.weight_decay == 0
    shares = {29_999: 0.25, 0: 0.1, 499: 0.1, 500: 1, 9_999: 1, 10_000: 0.5, 20_000: 0.25}
    assert {step: course.rate(step) for step in shares} == {step: recipe.lr * one for step, one in shares.items()}
    paper = {"batch": 256, "smoothing": 0.1, "dropout": 0.1, "mixup": 0.0, "erasing": 0.0, "pooling": "class"}
    assert {name: getattr(recipe, name) for name in paper} == paper and recipe.patience < 1
    short = of_size("S", "mp3-speech", updates=3000)
    assert (short.warmup_updates, short.halve_every) == (50, 1000)
    assert of_size("S", "mp3-speech", updates=3000, halve_every=7).halve_every == 7
    mae = of_size("B", "mae", updates=400)
    assert (mae.warmup_updates, mae.halve_every) == (20, 0)
    assert not {"epochs", "warmup_epochs", "halve_every", "dropout", "shift"} & set(mae.plain())
    assert not {"updates", "warmup_updates"} & set(of_size("B", "mae").plain())


def test_dropout_is_behind_positions_attention_and_mlps_and_the_recipes_alone() -> None:
    spec = replace(SPEC, options=SMALL | {"proj_drop_rate": 0.3, "attn_drop_rate": 0.3})
    card, vit = replace(CARD, spec=spec), build_encoder(spec)

    def rates(**how: float) -> dict[str, float]:
        varied = with_variant(vit, card, **how).named_modules()
        return {name: module.p for name, module in varied if isinstance(module, torch.nn.Dropout)}

    assert not any(rates().values())
    behind = {
        "pos_drop",
        *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.proj_drop", "mlp.drop1", "mlp.drop2")),
    }
    assert behind <= {name for name, rate in rates(dropout=0.1).items() if rate == 0.1}
    assert not any(rate for name, rate in rates(dropout=0.1).items() if name.endswith("attn_drop"))
    model = Classifier(with_variant(vit, CARD, dropout=0.5), 10, "mean")
    images = torch.rand(2, 1, 8, 8)
    assert not torch.equal(model.train().pooled(images), model.pooled(images))
    assert torch.equal(model.eval().pooled(images), model.pooled(images))


INSIDE = 0.5  # of 40 pixels, the 20 at the centre


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("crop") / "encoder.safetensors", (16, 16), 4, 3)


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("framed"), np.random.default_rng(0)
    for label, value in (("dark", 20), ("bright", 230)):
        for part, count in (("train", 24), ("test", 12)):
            (folder / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                frame = np.full_like(pixels, value)
                frame[6:-6, 6:-6] = pixels[6:-6, 6:-6]
                Image.fromarray(frame).save(folder / part / label / f"{i}.png")
    return folder


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("knn", {"ks": (5,)}), ("layers", {"k": 5}), ("linear", {}), ("few-shot", {"method": "linear", "labels": 0.5})],
)
@pytest.mark.usefixtures("quick_probe")
def test_a_frame_that_the_test_crop_leaves_out_is_not_seen(
    encoder: Path, framed: Path, protocol: str, options: dict
) -> None:
    # the second call of each finds the features of both crops in the cache
    for _ in range(2):
        whole, cut = (
            evaluate(protocol, encoder, framed, device="cpu", test_crop=crop, **options) for crop in (1, INSIDE)
        )
        (before,), (after,) = ([r.value for r in one.quoted if r.encoder == "raw pixels"] for one in (whole, cut))
        assert before == 1 and after < 0.8
    assert whole.quoted[0].value > cut.quoted[0].value
    assert {row.settings.get("test_crop") for row in cut.results if row.encoder != CONSTANT and row.settings} == {
        INSIDE
    }
    assert not any("test_crop" in row.settings for row in whole.results) and "--test_crop" not in whole.method
    assert "32x32" in cut.method and "16x16" in cut.method
    assert len(list((cache_root() / "features").iterdir())) >= 12


@pytest.fixture
def crops(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    own: Callable[..., Iterator] = classification.plain_batches

    def recorded(*words: object, **options: object) -> Iterator:
        found.append(options["test_crop"])
        return own(*words, **options)

    monkeypatch.setattr(classification, "plain_batches", recorded)
    return found


def test_a_recipe_has_it_and_an_ensemble_repeats_it(
    encoder: Path, framed: Path, crops: list[float], tmp_path: Path
) -> None:
    short = {"device": "cpu", "epochs": 1, "batch_size": 8}
    for seed, change in enumerate(({}, {"test_crop": 0.75})):
        out = str(tmp_path / f"{seed}.safetensors")
        evaluate("finetune", encoder, framed, recipe="mae", control=False, out=out, **short, **change)
    evaluate("finetune", encoder, framed, control=False, **short, validation=0.2)
    assert crops == [0.875, 0.75, 1.0, 1.0, 1.0]  # small: validation images, also for the temperature
    crops.clear()
    for change in ({}, {"test_crop": 0.5}):
        pair = tmp_path / "0.safetensors", str(tmp_path / "1.safetensors")
        evaluate("ensemble", pair[0], framed, others=pair[1], device="cpu", **change)
    assert crops == [0.875, 0.75, 0.5, 0.5]
    crops.clear()
    report = evaluate("linear", encoder, framed, recipe="mae", control=False, pooling="mean", **short)
    assert crops == [0.875] and report.results[0].settings["test_crop"] == 0.875


def test_the_recipes_of_the_papers_have_it_up_to_224_pixels() -> None:
    small, large = (build_encoder(EncoderSpec("nano", (side, side), 16, options=SMALL)) for side in (224, 240))
    whole = {"small", "mp3-cifar100"}  # ours, and one of images of 32 pixels, which DeiT's program does not resize
    for known in (RECIPES, PROBES):
        for name in known:
            assert published_recipe(name, small, known).test_crop == (1.0 if name in whole else 0.875)
            assert published_recipe(name, large, known).test_crop == 1.0
    assert recipe_for("mae", large, {"test_crop": 0.9}).test_crop == 0.9
    assert recipe_for("mae", small, {}).for_recordings(noise=False).test_crop == 1.0


# Course of a training: learning rates equal to timm's to the bit, and its length in words.

LENGTHS = [(1, 0), (2, 1), (7, 3), (20, 0), (30, 29), (100, 10), (1000, 333)]
PEAK = 0.1 / 3


def course(steps: int, **changes: Any) -> Course:
    own = {"per_epoch": 4, "unit": "epoch", "batch": 16, "peak": PEAK, "rate_option": "--blr (now 0.1)"}
    return Course(**{"steps": steps, **own, **changes})


def rates_of(scheduler: Scheduler, steps: int) -> list[float]:
    """Return timm's rate of each update, which counts from 1."""
    found = []
    for step in range(steps):
        scheduler.step_update(step + 1)
        found.append(scheduler.optimizer.param_groups[0]["lr"])
    return found


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)


@pytest.mark.parametrize(("steps", "warmup"), LENGTHS)
def test_rates_are_timms_to_the_bit(steps: int, warmup: int) -> None:
    # one more than the number of steps, so that the last rate is above 0
    rest, shared = steps - warmup + 1, {"warmup_t": warmup, "t_in_epochs": False}
    drops = (0.6, 0.85)
    expected = {
        "cosine": CosineLRScheduler(optimizer(), rest, warmup_prefix=True, **shared),
        "linear": PolyLRScheduler(optimizer(), rest, power=1.0, warmup_prefix=True, **shared),
        # timm lowers the rate at the number before a drop, and its updates count from 1
        "steps": MultiStepLRScheduler(
            optimizer(), [round(share * steps) + 2 for share in drops], 0.1, warmup_prefix=False, **shared
        ),
    }
    for decay, scheduler in expected.items():
        ours = course(steps, warmup=warmup, decay=decay, drops=drops)
        assert [ours.rate(step) for step in range(steps)] == rates_of(scheduler, steps), decay
        assert ours.rate(steps - 1) > 0


@pytest.mark.parametrize(
    ("unit", "steps", "length", "position"),
    [
        ("epoch", 40, "10 epochs", "epoch 1.5 of 10"),
        ("epoch", 4, "1 epoch", "epoch 1.5 of 1"),
        ("update", 30_000, "30,000 updates", "update 6 of 30,000"),
        ("step", 1, "1 step", "step 6 of 1"),
    ],
)
def test_lengths_and_positions_are_in_the_unit(unit: str, steps: int, length: str, position: str) -> None:
    ours = course(steps, unit=unit)
    assert (ours.length, ours.position(6)) == (length, position)
