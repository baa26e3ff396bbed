"""Every layer's features are timm's own, and their curve is what scikit-learn finds of them."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.data.splits import pick
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.results import Report, Row
from patchloom.look.charts import draw_layers
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file
from patchloom.nets.encode import layer_names

DIGITS = open_data("digits")
SMALL = {"depth": 3, "embed_dim": 32, "num_heads": 2}
CARD = EncoderCard(None, (0.3,), (0.4,), "none", "small")
NAMES = ("embedding", "block 1", "block 2", "block 3", "norm")


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 3}, {"class_token": False, "init_values": 0.1}])
def test_layers_are_what_timm_computes_and_of_one_pass(options: dict) -> None:
    torch.manual_seed(0)
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL | options)).eval()
    some = DIGITS.train.subset(range(20))
    theirs: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda module, given, out, name=name: theirs.update({name: out}))
        for name, module in zip(NAMES, [vit.norm_pre, *vit.blocks, vit.norm], strict=True)
    ]
    with torch.inference_mode():
        vit.forward_features(normalize(torch.stack([some.read(i) for i in range(20)]), CARD.mean, CARD.std))
    for hook in hooks:
        hook.remove()
    batches = []
    vit.norm_pre.register_forward_hook(lambda *_: batches.append(1))
    found = extract(vit, CARD, some, layers=True, device="cpu", batch_size=7)
    assert len(batches) == 3 and tuple(found.tokens) == layer_names(vit) == NAMES
    for name in NAMES:
        mean = theirs[name][:, vit.num_prefix_tokens :].mean(1)
        torch.testing.assert_close(found.tokens[name], mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.tokens["norm"], extract(vit, CARD, some, device="cpu").pooled("mean"))


def _theirs(gallery: np.ndarray, labels: np.ndarray, queries: np.ndarray, truth: np.ndarray, k: int = 20):
    """The accuracy in float64, and how far rounding may move it: queries whose k-th and next neighbours are as near."""
    vote = KNeighborsClassifier(k, weights=lambda d: np.exp((1 - d) / 0.07), metric="cosine", algorithm="brute")
    vote.fit(gallery.astype(np.float64), labels)
    near = vote.kneighbors(queries.astype(np.float64), k + 1)[0]
    tied = (near[:, k] - near[:, k - 1] < 1e-6).mean()
    assert tied < 0.1
    return pytest.approx(vote.score(queries.astype(np.float64), truth), abs=tied + 1e-9)


def test_the_curve_and_the_chosen_layer_agree_with_scikit_learn(tiny_encoder: Path) -> None:
    report = evaluate("layers", tiny_encoder, "digits", device="cpu", max_train=400, seed=3)
    vit, card = load_encoder_file(tiny_encoder)
    train = DIGITS.train.subset(np.setdiff1d(np.arange(1437), pick(DIGITS.train.labels, 1437 - 400, 3)))
    held = pick(train.labels, 80, 3)
    rest = np.setdiff1d(np.arange(400), held)
    a, b = (extract(vit, card, source, layers=True, device="cpu").tokens for source in (train, DIGITS.test))
    inner = {}
    for row in report.rows[:5]:
        name = row.settings["layer"]
        x, y = a[name].numpy(), train.labels
        inner[name] = row.settings["held_out_accuracy"]
        assert (row.encoder, row.pooling, row.settings["k"]) == ("tiny", "mean", 20)
        assert row.value == _theirs(x, y, b[name].numpy(), DIGITS.test.labels)
        assert inner[name] == _theirs(x[rest], y[rest], x[held], y[held]) and row.settings["held_out"] == 80
    last, best, twin, twins_best, pixels = report.quoted
    assert last.settings["layer"] == twin.settings["layer"] == "norm"
    assert best.settings["layer"] == max(inner, key=inner.get)
    assert (twins_best.encoder, pixels.encoder) == ("untrained", "raw pixels")
    assert best.text() in report.headline and last.text() in report.headline and pixels.number() in report.headline
    assert [row.encoder for row in report.rows] == [*["tiny"] * 5, *["untrained"] * 5, "raw pixels", "best constant"]


def test_the_last_layer_is_what_knn_quotes(tiny_encoder: Path) -> None:
    by = {
        name: evaluate(name, tiny_encoder, "digits", device="cpu", max_train=300).quoted for name in ("knn", "layers")
    }
    (ours, twin, pixels), (last, _, twins_last, _, same) = by["knn"], by["layers"]
    assert [row.value for row in (last, twins_last, same)] == [row.value for row in (ours, twin, pixels)]


def test_table_rows_and_picture_of_a_run(tiny_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "encoder.safetensors").write_bytes(tiny_encoder.read_bytes())
    assert main(["evaluate", "layers", str(run), "digits", "--device", "cpu", "--max_train", "100", "--k", "5"]) == 0
    printed = capsys.readouterr().out
    lines = [line.split("  ")[0] for line in printed.splitlines() if line.count("% [") == 2 and "against" not in line]
    assert lines == [*NAMES, "raw pixels", "best constant"]
    assert f"Picture: {run / 'pictures' / 'layers.png'}" in printed
    assert (np.asarray(Image.open(run / "pictures" / "layers.png")).min(-1) < 200).any()
    rows = list(csv.DictReader((run / "results.csv").open()))
    assert len(rows) == 12 and {row["protocol"] for row in rows} == {"layers"}
    # the chosen layer may be the last one
    assert 3 <= sum(row["quoted"] == "True" for row in rows) <= 5


def test_a_picture_elsewhere_or_none(tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"device": "cpu", "max_train": 60, "k": 3}
    assert evaluate("layers", tiny_encoder, "digits", **options).drawings == ()
    evaluate("layers", tiny_encoder, "digits", out="new/curve.png", **options)
    assert [path.name for path in tmp_path.rglob("*.png")] == ["curve.png"]


def test_what_cannot_be_meant(tiny_encoder: Path) -> None:
    for options, message in (
        ({"k": 0}, "--k must be 1 or more"),
        ({"k": 90, "max_train": 100}, "gallery of 80 images"),
    ):
        with pytest.raises(PatchloomError, match=message):
            evaluate("layers", tiny_encoder, "digits", device="cpu", **options)


def test_the_same_numbers_give_the_same_picture(tmp_path: Path) -> None:
    values = [(0.2, 0.1, 0.3), (0.6, 0.5, 0.7), (0.5, 0.4, 0.6)]
    content = {"layers": ["embedding", "block 1", "norm"], "values": values, "controls": {"untrained": [0.2, 0.3, 0.7]}}
    content |= {"baselines": {"raw pixels": 0.4}, "best": 1, "name": "run [1]", "note": ""}
    first, second = (draw_layers(**content, out=tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second


def test_controls_without_layers_stand_in_every_column() -> None:
    rows = [Row.of(name, "mean", "layers", {"layer": "norm"}, 0.5, 10) for name in ("a", "b")]
    pixels = Row.of("raw pixels", "pixels", "layers", {}, 0.9, 10)
    report = Report([*rows, pixels], "", "", (rows[0],), "data", "f" * 16, 0, 10, across="layer", down=True)
    text = report.text(120)
    assert text.count("raw pixels") == 1 and text.count("90.0 %") == 2
