"""Where patches are found by tasks, and by a linear layer on frozen encoders."""

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluating import ctrl_c_at, numbers, write_encoder
from perturbing import perturbed
from PIL import Image
from refusing import refusal

from patchloom.cli import main
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate.classifier import Classifier, ClassifierCard, save_classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.positions import (
    UNITS,
    Cell,
    PositionProbe,
    chance,
    measure_positions,
    position_rows,
    positions,
)
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import Trainer
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import load_encoder_file
from patchloom.nets.encode import encode, prefix_count
from patchloom.options.protocols import Positions
from patchloom.patches.partition import random_dropped
from patchloom.questions.positions import PositionPrediction
from patchloom.results import store
from patchloom.results.evaluation import Evaluation
from patchloom.tasks import build_task, encoder_defaults, with_defaults
from patchloom.withhold.encoder_input import all_patches, drop_positions

pytestmark = pytest.mark.usefixtures("quick_probe")

USUAL = Positions()
N, GRID = 16, (4, 4)
SIZES = {"embed_dim": 32, "depth": 1, "num_heads": 2}
TINY = ["--epochs", "1", "--batch_size", "16", "--patch_size", "4", "--model", "nano"]
TINY += ["--model.embed_dim", "32", "--model.depth", "1"]
TASKS = {
    "droppos": {"name": "droppos"},
    "droppos of another patch's position": {"name": "droppos", "placeholder": "foreign", "shuffle": True},
    "mp3": {"name": "mp3"},
    "mp3 with known positions": {"name": "mp3", "known_positions": 0.25},
    "mixture like droppos": {
        "name": "mixture",
        "withhold": {"mask": 0.5, "blank": 0.25, "drop_positions": 0.5},
        "ask": {"pixels": 1.0, "positions": 1.0},
    },
    "mixture that zooms in": {
        "name": "mixture",
        "withhold": {"zoom_in": 0.7, "drop_positions": 0.5},
        "ask": {"positions": 1.0},
    },
    "mixture like mp3": {"name": "mixture", "withhold": {"mask": 0.25, "drop_positions": 1}, "ask": {"positions": 1.0}},
}


def predict_positions(task, images, generator, **ratios):
    given = task.given(images, generator, **ratios)
    return task.questions["positions"].predict(task.encode(images, given, generator))


def made(kind):
    torch.manual_seed(0)
    options = with_defaults(TASKS[kind])
    spec = EncoderSpec("nano", (16, 16), 4, 3, encoder_defaults(options).get("positions", ("sincos",))[0], SIZES)
    return perturbed(build_task(options, build_encoder(spec)), 0.1).eval()


def batches(task, count=2, b=3):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(b, 3, *task.augment.size, generator=generator) for _ in range(count)]


def placer(answer):
    """Places patches of which a share ``ratio`` is asked, with the logits [b n n] that ``answer`` gives."""

    def place(images, generator, ratio):
        dropped = random_dropped(len(images), N, ratio, generator, "cpu")
        visible = all_patches(images, N).visible
        return PositionPrediction(visible, torch.zeros_like(visible).scatter(1, dropped, 1).bool(), answer(visible))

    return place


@pytest.mark.parametrize("given", [0, 5, 9])
def test_chance_is_that_of_simulated_guessers(given):
    grid, trials = (3, 4), 40_000
    free = np.random.default_rng(0).permuted(np.tile(np.arange(12), (trials, 1)), axis=1)[:, given:]
    true = free[:, :1]  # of what is free, the first is as good as any
    guesses = np.random.default_rng(1).permuted(free, axis=1)[:, :5]
    found = {
        "top-1": (guesses[:, :1] == true).mean(),
        "top-5": (guesses == true).any(1).mean(),
        "distance": np.hypot(guesses[:, :1] // 4 - true // 4, guesses[:, :1] % 4 - true % 4).mean(),
    }
    for name, value in chance(grid, given).items():
        assert found[name] == pytest.approx(value, abs=0.015), name
    places = list(product(range(3), range(4)))
    nearest = min(np.mean([np.hypot(r - y, c - x) for y, x in places]) for r, c in places)
    values, counts = dict.fromkeys(UNITS, torch.ones(2, dtype=torch.float64)), torch.ones(12)
    rows = position_rows("positions", {"mine": [Cell({}, values, chance(grid, given), counts, counts)]}, grid)
    assert [row.value for row in rows if row.encoder == "always the centre"] == [pytest.approx(nearest)]


@pytest.mark.parametrize("kind", TASKS)
def test_the_grid_against_a_loop(kind):
    task = made(kind)
    axes, images = task.questions["positions"].ratios, batches(task)
    cells = measure_positions(partial(predict_positions, task), axes, task.geometry.grid, images, seed=3)
    assert [cell.ratios for cell in cells] == [dict(zip(axes, some, strict=True)) for some in product(*axes.values())]
    for cell in cells:
        generator = torch.Generator().manual_seed(3)
        values, found, asked = {name: [] for name in UNITS}, [0] * N, [0] * N
        for batch in images:
            with torch.inference_mode():
                placed = predict_positions(task, batch, generator, **cell.ratios)
            for visible, dropped, logits in zip(*(part.tolist() for part in placed), strict=True):
                mine = {name: [] for name in UNITS}
                for true, is_asked, answer in zip(visible, dropped, logits, strict=True):
                    if not is_asked:
                        continue
                    ranked = sorted(range(N), key=lambda place: -answer[place])
                    mine["top-1"].append(ranked[0] == true)
                    mine["top-5"].append(true in ranked[:5])
                    mine["distance"].append(np.hypot(ranked[0] // 4 - true // 4, ranked[0] % 4 - true % 4))
                    asked[true] += 1
                    found[true] += ranked[0] == true
                for name, each in mine.items():
                    values[name].append(np.mean(each))
        for name, expected in values.items():
            assert cell.values[name].tolist() == pytest.approx(expected, abs=1e-6), (cell.ratios, name)
        expected = [hits / of if of else float("nan") for hits, of in zip(found, asked, strict=True)]
        assert (cell.found / cell.asked).view(GRID).flatten().tolist() == pytest.approx(expected, nan_ok=True)
        given = int(placed.known()[0])
        assert cell.chance == chance(GRID, given) and (placed.known() == given).all()


@pytest.mark.parametrize(
    ("kind", "ratios", "visible", "dropped"),
    [
        ("droppos", {"mask_ratio": 0.75, "position_mask_ratio": 0.25}, 4, 1),
        ("droppos", {"mask_ratio": 0.0, "position_mask_ratio": 0.95}, 16, 16),
        ("mixture like droppos", {"mask_ratio": 0.75, "position_mask_ratio": 0.25}, 4, 1),
        ("mixture that zooms in", {"mask_ratio": 0.5, "position_mask_ratio": 0.75}, 8, 6),
        ("mp3", {"context_mask_ratio": 0.9}, 16, 16),
        ("mp3 with known positions", {"context_mask_ratio": 0.0}, 16, 12),
        ("mixture like mp3", {"context_mask_ratio": 0.9}, 12, 12),
    ],
)
def test_every_task_withholds_what_it_is_told(kind, ratios, visible, dropped):
    task = made(kind)
    (images,) = batches(task, 1)
    placed = predict_positions(task, images, torch.Generator().manual_seed(0), **ratios)
    assert placed.visible.shape == (3, visible) and placed.logits.shape == (3, visible, N)
    assert placed.dropped.sum(1).tolist() == [dropped] * 3


def test_the_map_shows_where():
    """Even places are found; of odd ones the neighbour is named, which is one patch off."""

    def answer(visible):
        return torch.nn.functional.one_hot(visible // 2 * 2, N)

    (cell,) = measure_positions(placer(answer), {"ratio": (0.5,)}, GRID, batches(made("mp3"), 20), 0)
    assert (cell.found / cell.asked).view(GRID).tolist() == [[1.0, 0.0, 1.0, 0.0]] * 4
    torch.testing.assert_close(cell.values["distance"], 1 - cell.values["top-1"])
    right = cell.found.sum().item()
    offsets = {(3, 3): right, (3, 2): cell.asked.sum().item() - right}  # the centre, and one column to the left of it
    assert {(i, j): cell.offsets[i, j].item() for i, j in cell.offsets.nonzero().tolist()} == offsets


def test_the_average_is_taken_image_by_image():
    given = chance(GRID, 0), *torch.ones(2, N)
    each = {0.1: [0.0, 1.0, 0.5], 0.2: [1.0, 0.0, 0.5]}
    cells = [Cell({"ratio": ratio}, dict.fromkeys(UNITS, torch.tensor(one)), *given) for ratio, one in each.items()]
    rows = [row for row in position_rows("positions", {"a": cells}, GRID) if row.settings.get("ratio") == "average"]
    assert [(row.value, row.low, row.high) for row in rows if row.encoder == "a"] == [(0.5, 0.5, 0.5)] * 3


def paint(folder: Path, count: int, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        pixels = np.linspace(40, 200, 16)[:, None, None] + rng.normal(0, 30, (16, 16, 3))
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("data") / "photos", 40, 0)


@pytest.fixture(scope="module", params=["droppos", "mp3"])
def run(request: pytest.FixtureRequest, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / request.param
    assert main(["pretrain", str(photos), "--task", request.param, "--out", str(out), "--held_out", "0.2", *TINY]) == 0
    return out


def test_rows_and_picture_of_a_run(run: Path, photos: Path) -> None:
    report = evaluate("positions", run, photos, device="cpu")
    assert "held-out ones" in report.method and report.n_test == 8
    assert (run / "pictures" / "position_map-photos.png").stat().st_size > 5000
    cells = 16 if run.name == "droppos" else 5
    rows = store.load(run)
    assert len(rows) == 3 * 2 * (cells + 1) + 1  # measures, run and chance, cells and average; and the centre
    quoted = [row for row in rows if row.quoted]
    assert [row.encoder for row in quoted] == [run.name, "chance"]
    assert all("average" in row.settings.values() for row in quoted)
    assert {row.measure for row in rows} == set(UNITS)
    for row in rows:
        if row.encoder == "chance":
            assert row.low == row.value == row.high
            if (row.measure, *map(row.settings.get, ("position_mask_ratio", "mask_ratio"))) == ("top-1", 0.25, 0.5):
                assert row.value == pytest.approx(1 / (16 - 6))


def test_a_task_with_one_ratio_has_no_average(run: Path, photos: Path, monkeypatch) -> None:
    """Of one ratio there is no average, and what is quoted was looked for among averages."""
    module = sys.modules[positions.__module__]
    of_task = module.measure_positions

    def of_one(predict, axes, *rest):
        return of_task(predict, {name: ratios[:1] for name, ratios in axes.items()}, *rest)

    monkeypatch.setattr(module, "measure_positions", of_one)
    report = positions(run, photos, EvalSettings(device="cpu"), USUAL)
    assert [row.encoder for row in report.quoted] == [run.name, "chance"]
    assert "average" not in report.headline and "8 test images" in report.headline


def test_it_says_what_pretraining_may_have_seen(run: Path, tmp_path: Path) -> None:
    others = paint(tmp_path / "others", 10, 1)
    (others / "broken.png").write_bytes(b"no image")
    report = positions(run, others, EvalSettings(device="cpu"), USUAL)
    assert "pre-training may have seen them" in report.method and report.n_test == 10
    assert "1 images could not be read" in report.method
    some = positions(run, others, EvalSettings(device="cpu"), Positions(images=4))
    assert "4 of 11 images were drawn" in some.method and some.n_test <= 4
    paint(tmp_path / "both" / "train", 5, 1), paint(tmp_path / "both" / "test", 6, 2)
    assert positions(run, tmp_path / "both", EvalSettings(device="cpu"), USUAL).n_test == 6


def test_one_seed_one_result(run: Path, photos: Path) -> None:
    first, again, other = (positions(run, photos, EvalSettings(seed=seed, device="cpu"), USUAL) for seed in (0, 0, 1))
    assert numbers(first.results) == numbers(again.results) and first.headline == again.headline
    assert [row.value for row in first.results] != [row.value for row in other.results]
    with pytest.raises(PatchloomError, match="is not the folder of a run"):
        positions(run / "encoder.safetensors", photos, EvalSettings(device="cpu"), USUAL)


def test_a_task_without_positions_is_refused(small_run, photos: Path) -> None:
    with pytest.raises(PatchloomError, match="trained by mae, which does not predict positions"):
        positions(small_run("mae"), photos, EvalSettings(device="cpu"), USUAL)


def test_a_grid_of_too_few_patches_is_refused() -> None:
    one = PositionPrediction(torch.zeros(2, 1).long(), torch.ones(2, 1).bool(), torch.zeros(2, 1, 4))
    with pytest.raises(PatchloomError, match=r"only one of 4 patches would be visible \(mask ratio 0.75\)"):
        measure_positions(lambda *_, **__: one, {"mask_ratio": (0.75,)}, (2, 2), [torch.zeros(2, 3, 8, 8)], 0)


QUICK = {"device": "cpu", "steps": 60}
CHANCE = 1 / 12  # 4 of 16 positions are given


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "encoder.safetensors")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders without labels: every pixel is noise; or one corner of every patch tells its row, another its column."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    row, column = np.mgrid[:8, :8] // 2
    for name in ("noise", "marked"):
        (root / name).mkdir()
        for i in range(60):
            pixels = rng.integers(0, 256, (8, 8))
            if name == "marked":
                pixels[::2, ::2], pixels[1::2, 1::2] = (70 * row)[::2, ::2], (70 * column)[::2, ::2]
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i:02}.png")
    return {name: root / name for name in ("noise", "marked")}


def top1(report) -> dict[str, float]:
    return {row.encoder: row.value for row in report.results if row.measure == "top-1"}


OURS = {"placeholder": "learned", "standardize": True}


@pytest.mark.parametrize("how", [{}, OURS], ids=str)
def test_marks_are_read_and_noise_is_not(encoder: Path, drawn: dict[str, Path], how: dict[str, Any]) -> None:
    marked = evaluate("position-sensitivity", encoder, drawn["marked"], **how, **QUICK)
    assert top1(marked)["tiny"] > 0.6 and top1(marked)["chance"] == pytest.approx(CHANCE)
    if how:  # what can learn more could read more of noise
        assert top1(evaluate("position-sensitivity", encoder, drawn["noise"], **how, **QUICK))["tiny"] < 0.2
    assert ("standardised" in marked.method) == ("standardize" in how) and marked.n_test == 12
    distance = {row.encoder: row for row in marked.results if row.measure == "distance"}
    assert distance["tiny"].value < 1 < distance["always the centre"].value and distance["tiny"].unit == "patches"


def test_by_default_a_linear_layer_alone_is_trained(encoder: Path) -> None:
    """DropPos Table 7: a linear head on features of a frozen encoder, and nothing else that learns."""
    probe = PositionProbe(load_encoder_file(encoder)[0], "zeros")
    assert {name for name, one in probe.named_parameters() if one.requires_grad} == {"layer.weight", "layer.bias"}
    images = torch.randn(4, 1, 8, 8)
    placed = probe(images, torch.Generator().manual_seed(0), 0.75)
    given = drop_positions(all_patches(images, 16), placed.dropped.nonzero()[:, 1].view(4, 12))
    tokens = encode(probe.vit, given, position_token=torch.zeros(32))[:, prefix_count(probe.vit) :]
    torch.nn.init.normal_(probe.layer.weight)
    again = probe(images, torch.Generator().manual_seed(0), 0.75)
    torch.testing.assert_close(again.logits, tokens @ probe.layer.weight.T + probe.layer.bias)


def test_masked_positions_are_hidden(encoder: Path) -> None:
    """On patches that are all alike, those without position get one answer wherever they are."""
    probe = PositionProbe(load_encoder_file(encoder)[0], "learned").eval()
    torch.nn.init.normal_(probe.layer.weight), torch.nn.init.normal_(probe.token)
    with torch.inference_mode():
        placed = probe(torch.ones(3, 1, 8, 8), torch.Generator().manual_seed(0), 0.75)
    assert placed.dropped.sum(1).tolist() == [12] * 3
    for logits, dropped in zip(placed.logits, placed.dropped, strict=True):
        torch.testing.assert_close(logits[dropped], logits[dropped][:1].expand(12, -1), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(logits[~dropped], logits[dropped][:1], atol=1e-2)


@pytest.mark.parametrize("how", [{}, OURS], ids=str)
def test_a_stopped_training_of_a_probe_goes_on_to_the_same_weights(
    encoder: Path, drawn: dict[str, Path], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    fit, fitted = Trainer.fit, list[dict[str, torch.Tensor]]()

    def noted(self: Trainer, *given: Any) -> Any:
        trained = fit(self, *given)
        fitted.append({name: value.clone() for name, value in trained.model.state_dict().items()})
        return trained

    def measured() -> Evaluation:
        return evaluate("position-sensitivity", encoder, drawn["marked"], **QUICK | {"steps": 6} | how)

    monkeypatch.setattr(Trainer, "fit", noted)
    whole = measured()
    with ctrl_c_at(Trainer, 9), pytest.raises(Stopped, match="stopped at step 3 of 6 of untrained: .* resume"):
        measured()
    again = measured()
    assert "untrained resumes at step 3 of 6." in capsys.readouterr().out
    assert numbers(again.results) == numbers(whole.results)
    for name, value in fitted[1].items():  # of the untrained encoder
        assert torch.equal(value, fitted[-1][name]), name


def test_before_and_after_finetuning(encoder: Path, drawn: dict[str, Path], tmp_path: Path) -> None:
    other = write_encoder(tmp_path / "other.safetensors", seed=5)
    vit, card = load_encoder_file(other)
    settled = ClassifierCard(card, "keep", "mean", ("a", "b"), "photos", "0" * 16, 0, {})
    save_classifier(Classifier(vit, 2, "mean"), settled, tmp_path / "classifier.safetensors")

    def measured(run: Path, **more: Any) -> Evaluation:
        return evaluate("position-sensitivity", run, drawn["marked"], **QUICK | {"steps": 10} | more)

    of_encoder, of_classifier = (
        measured(encoder, finetuned=tmp_path / file) for file in (other, "classifier.safetensors")
    )
    assert numbers(of_encoder.results) == numbers(of_classifier.results)
    assert [row.encoder for row in of_encoder.quoted] == ["tiny", "fine-tuned", "untrained", "chance"]
    found = top1(of_encoder)
    assert found["tiny"] != found["fine-tuned"] == top1(measured(other))["tiny"]
    once, again, other = (numbers(measured(encoder, seed=seed).results) for seed in (0, 0, 1))
    assert once == again != other


def test_refusals(encoder: Path, drawn: dict[str, Path], tmp_path: Path) -> None:
    none = write_encoder(tmp_path / "none.safetensors", positions="none")
    larger = write_encoder(tmp_path / "larger.safetensors", (12, 12))
    for run, options, said in (
        (none, {}, "tiny has no position embeddings"),
        (encoder, {"finetuned": none}, "fine-tuned has no position embeddings"),
        (encoder, {"finetuned": larger}, "fine-tuned has another patch grid"),
        (encoder, {"finetuned": tmp_path / "nothing.safetensors"}, "there is no encoder at"),
        (encoder, {"ratio": 0.0}, "--ratio must be above 0 and at most 1"),
    ):
        assert said in refusal(evaluate, "position-sensitivity", run, drawn["noise"], **{"device": "cpu", **options})
