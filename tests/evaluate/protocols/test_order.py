"""Shuffled patches and missing positions: what they are, and whom they concern."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from patchloom.claims import CONSTANT
from patchloom.cli import main
from patchloom.data.augment import CentreCrop
from patchloom.data.modality import IMAGES
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.order import AS_THEY_ARE, SHUFFLED, ZEROED, ShuffledPatches, without_positions
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.nets.encode import embed, encode
from patchloom.patches.tokens import patchify
from patchloom.withhold.encoder_input import all_patches

pytestmark = pytest.mark.usefixtures("quick_probe")

SIZES = {"depth": 2, "embed_dim": 32, "num_heads": 2}
DIGITS = open_data("digits").test.subset(range(40))
CARD = EncoderCard(None, (0.3,), (0.4,), "mp3", "small")


def make(positions: str, **sizes) -> torch.nn.Module:
    torch.manual_seed(0)
    spec = EncoderSpec("nano", (8, 8), 2, channels=1, positions=positions, options=SIZES | sizes)
    return build_encoder(spec).eval()


def patches_of(source, i: int) -> torch.Tensor:
    return patchify(source.read(i)[None].float(), (2, 2))[0]


def test_only_the_places_change() -> None:
    shuffled, again, other = (ShuffledPatches(DIGITS, (8, 8), (2, 2), seed) for seed in (0, 0, 1))
    moved = 0
    for i in range(40):
        before, after = patches_of(DIGITS, i), patches_of(shuffled, i)
        assert sorted(before.tolist()) == sorted(after.tolist())
        assert torch.equal(shuffled.read(i), again.read(i)) and shuffled.read(i).dtype == DIGITS.read(i).dtype
        moved += not torch.equal(before, after)
    assert moved == 40 and not torch.equal(shuffled.read(3), other.read(3))
    marks = torch.arange(64.0).view(1, 8, 8)
    orders = [
        patchify(one[None], (2, 2))[0, :, 0]
        for one in (ShuffledPatches(_Same(marks), (8, 8), (2, 2), 0).read(i) for i in (0, 1))
    ]
    assert not torch.equal(*orders)  # each image has its own
    assert np.array_equal(shuffled.labels, DIGITS.labels) and len(shuffled) == 40 and shuffled.name == DIGITS.name
    for name in ("fingerprint", "stamp"):  # no cached features of others may be taken for theirs
        values = [getattr(source, name)() for source in (DIGITS, shuffled, again, other)]
        assert values[1] == values[2] and len(set(values)) == 3
    assert shuffled.describe(2) == DIGITS.describe(2)


def test_images_are_cut_before_they_are_shuffled() -> None:
    image = torch.randint(0, 256, (3, 30, 44), dtype=torch.uint8)
    (cut,) = CentreCrop((16, 24))(image)
    shuffled = ShuffledPatches(_Same(image), (16, 24), (8, 8), 0).read(0)
    assert shuffled.shape == (3, 16, 24)
    assert sorted(patchify(shuffled[None], (8, 8))[0].tolist()) == sorted(patchify(cut[None], (8, 8))[0].tolist())


class _Same:
    modality = IMAGES
    name, classes, labels = "same", (), None

    def __init__(self, image: torch.Tensor) -> None:
        self.read = lambda i: image


@pytest.mark.parametrize(
    "sizes", [{"class_token": False}, {"class_token": True}, {"class_token": True, "reg_tokens": 2}]
)
def test_order_is_nothing_to_an_encoder_without_positions(sizes: dict) -> None:
    shuffled = ShuffledPatches(DIGITS, (8, 8), (2, 2), 0)
    for vit, alike in (
        (make("none", **sizes), True),
        (make("sincos", **sizes), False),
        (without_positions(make("learned", **sizes)), True),
    ):
        normal, other = (extract(vit, CARD, source, device="cpu").pooled("mean") for source in (DIGITS, shuffled))
        assert torch.allclose(normal, other, atol=1e-4) == alike


def test_removing_positions_leaves_the_encoder_and_its_tokens_alone() -> None:
    vit, images = make("learned", class_token=True), torch.randn(2, 1, 8, 8)
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    bare = without_positions(vit)
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())
    theirs, ours = (embed(one, all_patches(images, 16)) for one in (bare, vit))
    assert torch.equal(theirs[:, :1], ours[:, :1]) and not torch.allclose(theirs[:, 1:], ours[:, 1:])
    assert not torch.allclose(encode(bare, all_patches(images, 16)), encode(vit, all_patches(images, 16)))


def save(path: Path, positions: str) -> Path:
    spec = EncoderSpec("nano", (8, 8), 2, channels=1, positions=positions, options=SIZES)
    torch.manual_seed(1)
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.3,), (0.37,), "mp3", "tiny"), path)
    return path


@pytest.mark.parametrize("positions", ["none", "sincos"])
def test_the_report(positions: str, tmp_path: Path, record_reads) -> None:
    record_reads(200, 100)
    report = evaluate("order", save(tmp_path / "e.safetensors", positions), "digits", device="cpu", k=5)
    found = {
        (row.encoder, row.settings["probe"], row.settings["test_images"]): row.value
        for row in report.rows
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
    assert ("no position embeddings to remove" in report.protocol) == (positions == "none")
    assert [row.settings["test_images"] for row in report.quoted] == [*given, *given, AS_THEY_ARE, SHUFFLED]
    assert report.headline.startswith("Order (linear probe, mean): tiny ") and "patches shuffled" in report.headline
    again = evaluate("order", tmp_path / "e.safetensors", "digits", device="cpu", k=5)  # from the cache
    assert again.rows == report.rows and "Cached features" in again.protocol


def test_the_probe_is_that_of_normal_images(tmp_path: Path, record_reads) -> None:
    """As they are, test images get what the protocols linear and knn say."""
    record_reads(120, 60)
    encoder = save(tmp_path / "e.safetensors", "sincos")
    rows = evaluate("order", encoder, "digits", device="cpu", pooling="class").rows
    normal = {(row.encoder, row.settings["probe"]): row.value for row in rows if AS_THEY_ARE in row.settings.values()}
    for name, probe in (("linear", "linear"), ("knn", "kNN, k = 20")):
        ks = {"ks": (20,)} if name == "knn" else {}
        report = evaluate(name, encoder, "digits", device="cpu", pooling="class", **ks)
        for row in report.rows[:-1]:
            assert normal[row.encoder, probe] == row.value


def test_training_comes_before_testing(tmp_path: Path, record_reads) -> None:
    record = record_reads(60, 30)
    evaluate("order", save(tmp_path / "e.safetensors", "none"), "digits", device="cpu", k=5, cache=False)
    looked = 8  # for colours, which an encoder of grey images drops
    assert record == ["train"] * looked + (["train"] * 60 + ["test"] * 60) * 3


def test_from_the_command_line(tmp_path: Path, record_reads, capsys: pytest.CaptureFixture) -> None:
    record_reads(80, 30)
    save(tmp_path / "encoder.safetensors", "sincos")
    assert main(["evaluate", "order", str(tmp_path), "digits", "--k", "3", "--max_train", "60"]) == 0
    printed = capsys.readouterr().out
    assert all(heading in printed for heading in (AS_THEY_ARE, SHUFFLED.split()[1], ZEROED.split()[1]))
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(rows) == 2 * 3 * 2 + 2 * 2 + 1 and sum(row["quoted"] == "True" for row in rows) == 8


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    encoder = save(tmp_path / "e.safetensors", "none")
    assert load_encoder_file(encoder)[0].has_class_token
    for words, said in (
        (["--k", "0"], "k = 0 does not fit"),
        (["--pooling", "instance"], "--pooling cannot be instance"),
    ):
        assert main(["evaluate", "order", str(encoder), "digits", "--max_train", "20", *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(PatchloomError, match="no labels"):
        np.save(tmp_path / "a.npy", np.zeros((8, 8), np.uint8)), np.save(tmp_path / "b.npy", np.zeros((8, 8), np.uint8))
        evaluate("order", encoder, tmp_path, device="cpu")
