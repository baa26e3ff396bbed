"""Protocols on frozen features: neighbours, layers, and patches without their places."""

from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import numbers, write_encoder
from PIL import Image
from refusing import refusal
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from patchloom.data.augment import CentreCrop
from patchloom.data.sources.in_memory import open_objects
from patchloom.data.sources.open import open_data
from patchloom.data.splits import pick
from patchloom.data.stats import normalize
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate, knn
from patchloom.evaluate.protocols.knn import knn_accuracies, knn_answers
from patchloom.evaluate.protocols.positions import AS_THEY_ARE, SHUFFLED, ZEROED, ShuffledPatches, without_positions
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file
from patchloom.nets.encode import layer_names
from patchloom.patches.tokens import patchify
from patchloom.results import store
from patchloom.results.claims import CONSTANT

pytestmark = pytest.mark.usefixtures("quick_probe")

PIXELS, LABELS = load_digits(return_X_y=True)
# noise keeps the accuracies far from 1 and apart from each other, so that a wrong vote shows
NOISY = (PIXELS + np.random.default_rng(0).normal(0, 8, PIXELS.shape)).astype(np.float32)
FEATURES, TARGETS = torch.from_numpy(NOISY), torch.from_numpy(LABELS)


@pytest.mark.parametrize("weighted", [True, False])
def test_neighbours_vote_as_in_scikit_learn(weighted: bool) -> None:
    ours = knn_accuracies(FEATURES[:1200], TARGETS[:1200], FEATURES[1200:], TARGETS[1200:], weighted=weighted, chunk=77)
    vote = _vote if weighted else "uniform"
    for k in (1, 5, 20, 100):
        theirs = KNeighborsClassifier(k, weights=vote, metric="cosine", algorithm="brute")
        assert ours[k] == pytest.approx(theirs.fit(NOISY[:1200], LABELS[:1200]).score(NOISY[1200:], LABELS[1200:]))
    assert len(set(ours.values())) == 4


def test_a_k_beyond_the_gallery_is_left_out(tiny_encoder: Path) -> None:
    """ExtreMA's gallery of 10 % and k = 200, of more images than digits has."""
    part, whole = (
        evaluate("knn", tiny_encoder, "digits", device="cpu", pooling="mean", ks=(20, 200), gallery=gallery)
        for gallery in (0.1, 1.0)
    )
    assert {row.settings["k"] for row in part.results if "k" in row.settings} == {20}
    assert "144 training images" in part.method and "k = 200" in part.method
    assert {row.settings["k"] for row in whole.results if "k" in row.settings} == {20, 200}
    assert "k = 200" not in whole.method and "gallery" not in whole.method
    assert whole.quoted[0].value > part.quoted[0].value
    some = FEATURES[:10], TARGETS[:10]
    assert list(knn_accuracies(*some, *some, ks=(20, 5, 1))) == [1, 5]
    for ks in ((20,), (0, 1)):
        assert "gallery of 10" in refusal(knn_accuracies, *some, *some, ks=ks)


def _vote(distances: np.ndarray) -> np.ndarray:
    return np.exp((1 - distances) / 0.07)


@pytest.mark.parametrize("rows", [7, 600, 1199])
def test_a_gallery_is_searched_in_parts(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Parts of fewer rows than neighbours are wanted, even ones, and a last one of a single row."""
    pooled = FEATURES[:1200], TARGETS[:1200], FEATURES[1200:], (1, 5, 20, 100)
    whole = knn_answers(*pooled)
    sizes, normalize = [], knn.F.normalize
    monkeypatch.setattr(knn, "_GALLERY", rows * FEATURES.shape[1] + 1)
    monkeypatch.setattr(knn.F, "normalize", lambda x, dim: sizes.append(len(x)) or normalize(x, dim=dim))
    parts = knn_answers(*pooled, chunk=300)
    assert max(sizes) == max(rows, 300) and all(torch.equal(parts[k][0], whole[k][0]) for k in whole)


def test_a_class_that_the_gallery_lacks_is_missed() -> None:
    x, y = FEATURES[:4], torch.tensor([0, 0, 1, 1])
    assert knn_accuracies(x, y, x, torch.tensor([0, 0, 1, 7]), ks=(1,)) == {1: 0.75}


# Layers, whose features are timm's own.


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
    for row in report.results[:5]:
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
    assert [row.encoder for row in report.results] == [*["tiny"] * 5, *["untrained"] * 5, "raw pixels", "best constant"]


def test_the_last_layer_is_what_knn_quotes(tiny_encoder: Path) -> None:
    knn, layers = (evaluate(name, tiny_encoder, "digits", device="cpu", max_train=300) for name in ("knn", "layers"))
    (ours, twin, pixels), (last, _, twins_last, _, same) = knn.quoted, layers.quoted
    assert [row.value for row in (last, twins_last, same)] == [row.value for row in (ours, twin, pixels)]


def test_rows_and_picture_of_a_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"device": "cpu", "max_train": 60, "k": 3}
    report = evaluate("layers", run, "digits", **options)
    rows = store.load(run)
    # the chosen layer may be the last one
    assert len(rows) == 12 and 3 <= sum(row.quoted for row in rows) <= 5
    monkeypatch.chdir(tmp_path)
    evaluate("layers", run, "digits", out="new/curve.png", **options)
    assert {path.name for path in tmp_path.rglob("*.png")} == {"layers.png", "curve.png"}
    assert "layers.png" in report.text(200) and (np.asarray(Image.open("new/curve.png")).min(-1) < 200).any()


FORTY = DIGITS.test.subset(range(40))


def make(positions: str, **sizes) -> torch.nn.Module:
    torch.manual_seed(0)
    spec = EncoderSpec("nano", (8, 8), 2, channels=1, positions=positions, options=SMALL | sizes)
    return build_encoder(spec).eval()


def patches_of(source, i: int) -> torch.Tensor:
    return patchify(source.read(i)[None].float(), (2, 2))[0]


def test_only_the_places_change() -> None:
    shuffled, again, other = (ShuffledPatches(FORTY, (8, 8), (2, 2), seed) for seed in (0, 0, 1))
    moved = 0
    for i in range(40):
        before, after = patches_of(FORTY, i), patches_of(shuffled, i)
        assert sorted(before.tolist()) == sorted(after.tolist())
        assert torch.equal(shuffled.read(i), again.read(i)) and shuffled.read(i).dtype == FORTY.read(i).dtype
        moved += not torch.equal(before, after)
    assert moved == 40 and not torch.equal(shuffled.read(3), other.read(3))
    marks = open_objects([torch.arange(64, dtype=torch.uint8).view(1, 8, 8)] * 2).train
    assert not torch.equal(*(ShuffledPatches(marks, (8, 8), (2, 2), 0).read(i) for i in (0, 1)))  # each has its own
    assert np.array_equal(shuffled.labels, FORTY.labels) and len(shuffled) == 40 and shuffled.name == FORTY.name
    for name in ("fingerprint", "stamp"):  # no cached features of others may be taken for theirs
        values = [getattr(source, name)() for source in (FORTY, shuffled, again, other)]
        assert values[1] == values[2] and len(set(values)) == 3
    assert shuffled.describe(2) == FORTY.describe(2)


def test_images_are_cut_before_they_are_shuffled() -> None:
    image = torch.randint(0, 256, (3, 30, 44), dtype=torch.uint8)
    (cut,) = CentreCrop((16, 24))(image)
    shuffled = ShuffledPatches(open_objects([image]).train, (16, 24), (8, 8), 0).read(0)
    assert shuffled.shape == (3, 16, 24)
    assert sorted(patchify(shuffled[None], (8, 8))[0].tolist()) == sorted(patchify(cut[None], (8, 8))[0].tolist())


@pytest.mark.parametrize(
    "sizes", [{"class_token": False}, {"class_token": True}, {"class_token": True, "reg_tokens": 2}]
)
def test_order_is_nothing_to_an_encoder_without_positions(sizes: dict) -> None:
    shuffled = ShuffledPatches(FORTY, (8, 8), (2, 2), 0)
    for vit, alike in (
        (make("none", **sizes), True),
        (make("sincos", **sizes), False),
        (without_positions(make("learned", **sizes)), True),
    ):
        normal, other = (extract(vit, CARD, source, device="cpu").pooled("mean") for source in (FORTY, shuffled))
        assert torch.allclose(normal, other, atol=1e-4) == alike


@pytest.mark.parametrize("positions", ["none", "sincos"])
def test_order_stands_beside_its_controls(positions: str, tmp_path: Path, record_reads) -> None:
    record_reads(200, 100)
    file = write_encoder(tmp_path / "e.safetensors", positions=positions, depth=2)
    report = evaluate("order", file, "digits", device="cpu", k=5)
    found = {
        (row.encoder, row.settings["probe"], row.settings["test_images"]): row.value
        for row in report.results
        if row.encoder != CONSTANT
    }
    given = (AS_THEY_ARE, SHUFFLED) + (ZEROED,) * (positions != "none")
    probes = ("linear", "kNN, k = 5")
    expected = {(name, probe, which) for name in ("tiny", "untrained") for probe in probes for which in given}
    assert found.keys() == expected | {("raw pixels", probe, which) for probe in probes for which in given[:2]}
    for name in ("tiny", "untrained"):
        for probe in probes:
            drop = found[name, probe, AS_THEY_ARE] - found[name, probe, SHUFFLED]
            assert drop == pytest.approx(0, abs=0.011) if positions == "none" else drop > 0.03, (name, probe)
    assert found["raw pixels", "linear", AS_THEY_ARE] > 0.7 > 0.3 > found["raw pixels", "linear", SHUFFLED]
    assert [row.settings["test_images"] for row in report.quoted] == [*given, *given, AS_THEY_ARE, SHUFFLED]
    again = evaluate("order", tmp_path / "e.safetensors", "digits", device="cpu", k=5)  # from the cache
    assert numbers(again.results) == numbers(report.results) and "Cached features" in again.method


def test_the_probe_of_order_is_that_of_normal_images(tmp_path: Path, record_reads) -> None:
    record_reads(120, 60)
    encoder = write_encoder(tmp_path / "e.safetensors", depth=2)
    rows = evaluate("order", encoder, "digits", device="cpu", pooling="class").results
    normal = {
        (row.encoder, row.settings["probe"], row.measure): row.value
        for row in rows
        if AS_THEY_ARE in row.settings.values()
    }
    for name, probe in (("linear", "linear"), ("knn", "kNN, k = 20")):
        ks = {"ks": (20,)} if name == "knn" else {}
        report = evaluate(name, encoder, "digits", device="cpu", pooling="class", **ks)
        assert len(report.quoted) == 3
        for row in report.quoted:
            assert normal[row.encoder, probe, row.measure] == row.value
