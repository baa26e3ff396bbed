"""Features of images: pooling, the cache on disc, and waits for a GPU."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from evaluating import numbers
from labelled import write_noise
from pseudo_cuda import pseudo_cuda
from refusing import refusal
from safetensors.torch import save
from scenes import Squares

from patchloom.data.source import Source
from patchloom.data.sources.builtin import Torchvision
from patchloom.data.sources.in_memory import open_objects
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.dense.segment import predict_overlaps
from patchloom.dense.segmenter import Segmenter
from patchloom.errors import PatchloomError
from patchloom.evaluate import features
from patchloom.evaluate.classification import predict_classes
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.features import (
    ImageFeatures,
    about_encoder,
    extract,
    load_or_extract,
    pixel_features,
    pixels_size,
)
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.knn import knn_answers
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.finetune import at_size
from patchloom.nets.heads import InstanceHead
from patchloom.system.files import cache_root

DIGITS = open_data("digits").train.subset(range(20))
SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
CARD = EncoderCard(None, (0.3,), (0.4,), "none", "small")


def _images() -> torch.Tensor:
    return normalize(torch.stack([DIGITS.read(i) for i in range(20)]), CARD.mean, CARD.std)


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 3}, {"class_token": False}])
def test_pooling_is_that_of_timm(options: dict) -> None:
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL | options)).train()
    found = extract(vit, CARD, DIGITS, device="cpu", batch_size=7)
    assert vit.training
    tokens = vit.eval().forward_features(_images()).detach()
    mean = tokens[:, vit.num_prefix_tokens :].mean(1)
    torch.testing.assert_close(found.pooled("mean"), mean, atol=1e-5, rtol=1e-4)
    assert found.labels.tolist() == DIGITS.labels.tolist()
    assert found.indices.tolist() == list(range(20))
    if options.get("class_token", True):
        registers = ("prefix",) * ("reg_tokens" in options)
        assert found.poolings() == ("class", "mean", *registers, "both")
        torch.testing.assert_close(found.pooled("class"), tokens[:, 0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.pooled("both"), torch.cat([tokens[:, 0], mean], 1), atol=1e-5, rtol=1e-4)
    else:
        assert found.poolings() == ("mean",)
        assert "no class token" in refusal(found.pooled, "class")
    if "reg_tokens" in options:
        in_front = torch.cat([tokens[:, :1], tokens[:, 1:4]], dim=1).mean(1)  # class token, three registers
        torch.testing.assert_close(found.pooled("prefix"), in_front, atol=1e-5, rtol=1e-4)
    else:
        assert "no register tokens for prefix features: use --pooling mean" in refusal(found.pooled, "prefix")


def test_a_norm_after_pooling_is_applied() -> None:
    own = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 0, "global_pool": "avg"}
    vit = timm.create_model("vit_tiny_patch16_224", **own, **SMALL).eval()
    torch.nn.init.uniform_(vit.fc_norm.weight)
    found = extract(vit, CARD, DIGITS, device="cpu")
    torch.testing.assert_close(found.pooled("mean"), vit(_images()).detach(), atol=1e-5, rtol=1e-4)


def test_images_without_labels_are_left_out_or_refused() -> None:
    some = DIGITS.subset(range(20))
    some.labels = np.where(np.arange(20) % 2, some.labels, -1)
    assert pixel_features(some, (8, 8), (0.5,), (0.5,)).labels.tolist() == DIGITS.labels[1::2].tolist()
    some.labels = None
    with pytest.raises(PatchloomError, match="digits has no labels: give tuples of an image and its label"):
        pixel_features(some, (8, 8), (0.5,), (0.5,))


def test_raw_pixels() -> None:
    found = pixel_features(DIGITS, (8, 8), (0.5,), (0.5,))
    expected = torch.stack([DIGITS.read(i) for i in range(20)]).flatten(1) / 127.5 - 1
    torch.testing.assert_close(found.tokens["pixels"], expected)
    assert found.labels.tolist() == DIGITS.labels.tolist()
    assert pixels_size((224, 112)) == (32, 16)
    wide = open_objects([(torch.zeros(3, 64, 64, dtype=torch.uint8), label) for label in "ab"]).train
    assert pixel_features(wide, (64, 64), (0.5,) * 3, (0.5,) * 3).tokens["pixels"].shape == (2, 3 * 32 * 32)


def test_a_diverged_encoder_is_named() -> None:
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL))
    vit.norm.weight.data[0] = torch.nan
    assert "small gives features that are not finite" in refusal(extract, vit, CARD, DIGITS, device="cpu")


# The cache: features are taken once, and never those of other weights, sizes or images.


TRAIN = open_data("digits").train
SHALLOW = {"depth": 1, "embed_dim": 32, "num_heads": 2}
CPU = EvalSettings(device="cpu")


def _made(source: Source, value: float = 1.0) -> ImageFeatures:
    n = len(source)
    tokens = {"mean": torch.full((n, 2), value), "class": torch.zeros(n, 2)}
    return ImageFeatures(tokens, torch.from_numpy(source.labels), torch.arange(n), [])


def _passes(about: str, source: Source, times: int = 2) -> list[bool]:
    """For each of some calls, whether it needed a pass."""
    return [not load_or_extract(_made, (about,), source).cached for _ in range(times)]


def test_probes_of_one_encoder_cost_one_pass(tiny_encoder: Path, record_reads: Callable, empty_cache: Path) -> None:
    record = record_reads()

    def reads(protocol: str, **options) -> int:
        """Number of images that are read, without the 8 of every evaluation that are looked at for colours."""
        record.clear()
        evaluate(protocol, tiny_encoder, "digits", device="cpu", **options)
        return len(record) - 8

    for protocol, options in (("knn", {}), ("layers", {}), ("linear", {"pooling": "mean"})):
        assert reads(protocol, cache=False, **options) == 3 * 180
    assert not empty_cache.exists()
    assert reads("knn") == 3 * 180
    assert reads("linear", pooling="mean") == reads("knn", ks=(5,)) == 0
    assert reads("layers") == 2 * 180  # layers are other features, raw pixels the same
    assert len(list(empty_cache.iterdir())) == 10


def _encoder(**changes) -> tuple[str, ...]:
    """What is said about an encoder that differs from the usual one in something."""
    seed, weight, head = changes.pop("seed", 0), changes.pop("weight", 0.0), changes.pop("head", None)
    about = {"mean": (0.3,), "std": (0.4,), "device": "cpu", "precision": "auto"} | changes.pop("about", {})
    spec = EncoderSpec("nano", changes.pop("size", (8, 8)), 2, 1, options=SHALLOW | changes)
    torch.manual_seed(seed)
    vit = build_encoder(spec)
    with torch.no_grad():
        vit.norm.bias[0] += weight
    if head is not None:
        torch.manual_seed(head)
        head = InstanceHead(32, 2)
    card = EncoderCard(spec, about["mean"], about["std"], "mae", "x")
    return about_encoder(vit, card, about["device"], head, about["precision"])


def test_whatever_features_follow_from_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    # no GPU is needed to say what would be done on one
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    changes = [
        {"seed": 1},
        {"weight": 1e-6},
        {"num_heads": 4},  # the weights of which are alike
        {"size": (8, 10)},
        {"init_values": 0.1},
        {"head": 0},
        {"head": 1},
        {"about": {"mean": (0.31,)}},
        {"about": {"std": (0.41,)}},
        {"about": {"device": "cuda"}},
        {"about": {"device": "cuda", "precision": "float32"}},
    ]
    said = [_encoder(), *(_encoder(**change) for change in changes)]
    assert len(set(said)) == len(said) and _encoder() == said[0]
    assert _encoder(about={"precision": "float32"}) == said[0]  # on CPUs it is that anyhow


def test_other_images_are_another_key(tmp_path: Path) -> None:
    def draw(name: str, tone: int) -> Path:
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.full((8, 8), tone, np.uint8))
        return path

    def source() -> Source:
        return open_data(tmp_path / "photos").train

    first, _ = draw("a/1.npy", 10), draw("b/2.npy", 20)
    for about, some in (("x", source()), ("y", source()), ("x", source().subset([1])), ("x", source().subset([1, 0]))):
        assert _passes(about, some) == [True, False]
    # other bytes of the same number, and another file, with the same time: the fingerprint of runs cannot tell
    for change in (lambda: draw("a/1.npy", 11), lambda: draw("c.npy", 12).replace(first)):
        before, was = source().fingerprint(), first.stat()
        change()
        os.utime(first, ns=(was.st_atime_ns, was.st_mtime_ns))
        assert source().fingerprint() == before and first.stat().st_size == was.st_size
        assert _passes("x", source()) == [True, False]
    (tmp_path / "photos").rename(tmp_path / "moved")
    assert _passes("x", open_data(tmp_path / "moved").train) == [False, False]


def test_labels_are_the_datas_own(tiny_encoder: Path) -> None:
    some = TRAIN.subset(range(10))
    assert load_or_extract(_made, ("x",), some).labels.tolist() == TRAIN.labels[:10].tolist()
    some.labels = some.labels[::-1].copy()
    found = load_or_extract(_made, ("x",), some)
    assert found.cached and found.labels.tolist() == TRAIN.labels[:10][::-1].tolist()
    some.labels = np.where(np.arange(10) < 5, some.labels, -1)
    assert load_or_extract(_made, ("x",), some).labels.tolist() == [*some.labels[:5].tolist(), *[-1] * 5]


def test_torchvision_sets_are_told_apart_by_their_pixels(tmp_path: Path) -> None:
    def stamp(**content: object) -> str | None:
        dataset = type("Dataset", (), {"targets": (0, 1), "__len__": lambda self: 2, **content})()
        return Torchvision("new", "train", dataset).stamp()

    ones, twos = (np.full((2, 4, 4), tone, np.uint8) for tone in (1, 2))
    assert stamp(data=ones) == stamp(data=ones.copy()) != stamp(data=twos) and stamp() is None
    paths = [tmp_path / "1.png", tmp_path / "2.png"]
    for path in paths:
        path.write_bytes(b"x")
    assert stamp(_image_files=paths) == stamp(_image_files=paths[:]) != stamp(_image_files=paths[::-1])


def test_images_that_change_meanwhile_or_have_no_stamp_are_not_kept(empty_cache: Path) -> None:
    some, stamps = TRAIN.subset(range(8)), iter("ab")
    for stamp in (lambda: next(stamps), lambda: None):
        some.stamp = stamp
        assert _passes("x", some, 1) == [True] and not empty_cache.exists()
    some.stamp = lambda: "a"
    assert _passes("x", some) == [True, False]


@pytest.mark.parametrize("harm", ["cut", "bit", "empty", "another's", "folder"])
def test_a_damaged_file_is_made_again(harm: str, empty_cache: Path) -> None:
    some = TRAIN.subset(range(8))
    assert _passes("x", some) == [True, False]
    (path,) = empty_cache.iterdir()
    good = path.read_bytes()
    if harm == "folder":
        path.unlink()
        path.mkdir()
        assert _passes("x", some) == [True, True]
        return
    flipped = good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]
    path.write_bytes({"cut": good[:-5], "bit": flipped, "empty": b"", "another's": save({"a": torch.zeros(2)})}[harm])
    assert _passes("x", some) == [True, False]
    assert path.read_bytes() == good and list(empty_cache.iterdir()) == [path]


def test_the_oldest_go_when_the_room_is_full(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [TRAIN.subset(range(i, i + 50)) for i in range(4)]
    assert _passes("x", some[0], 1) == [True]
    (first,) = empty_cache.iterdir()
    size = first.stat().st_size
    monkeypatch.setattr(features, "MAX_BYTES", 2 * size)
    assert _passes("x", some[1], 1) == [True]
    for age, path in enumerate(sorted(empty_cache.iterdir(), key=lambda path: path == first)):
        os.utime(path, (1000 - age, 1000 - age))
    half = empty_cache / ".half.safetensors.123"  # of a process that died
    half.write_bytes(b"x" * size)
    os.utime(half, (1, 1))
    assert _passes("x", some[0], 1) == [False]  # used just now: the other one is the oldest
    assert _passes("x", some[2], 1) == [True]
    assert not half.exists() and len(list(empty_cache.iterdir())) == 2
    assert _passes("x", some[0], 1) == [False] and _passes("x", some[1], 1) == [True]
    monkeypatch.setattr(features, "MAX_BYTES", 10)  # more than all the room is not cached
    before = set(empty_cache.iterdir())
    assert _passes("x", some[3]) == [True, True] and set(empty_cache.iterdir()) == before


def test_a_cache_that_cannot_be_written_costs_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _passes("x", TRAIN.subset(range(8))) == [True, True]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the convention says to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (cache_root() / "features") == tmp_path / ".cache" / "patchloom" / "features"


def test_unreadable_images_are_named_again(tmp_path: Path, tiny_encoder: Path) -> None:
    for part in ("train", "test"):
        write_noise(tmp_path / part, 20, 8, "L")
    broken = tmp_path / "train" / "b" / "7.png"
    broken.write_bytes(b"broken")
    first, second = (evaluate("knn", tiny_encoder, tmp_path, device="cpu", ks=(3,)) for _ in range(2))
    assert all("1 images could not be read" in one.method and str(broken) in one.method for one in (first, second))
    assert "Cached features" in second.method and numbers(second.results) == numbers(first.results)


# A GPU gives the results of the CPU, and is waited for as rarely as possible. Tested on pseudo CUDA.


HUNDRED = open_data("digits").train.subset(range(100))
X, Y = torch.randn(120, 16, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 4


def settings(device: str) -> EvalSettings:
    return EvalSettings(device=device, batch_size=10, workers=0)


def test_features_and_predictions_are_read_while_the_next_batch_is_computed() -> None:
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=SMALL))
    model = Classifier(vit, 10, "mean")

    def computed(device: str) -> tuple:
        yield extract(vit, CARD, HUNDRED, device=device, batch_size=10, precision="float32").tokens
        found = predict_classes(model, HUNDRED, CARD, settings(device), "float32")
        yield found.logits, found.labels

    here = [*computed("cpu")]
    with pseudo_cuda() as waits:
        model.to("cuda")
        waits.clear()
        for number, there in enumerate(computed("cuda")):
            assert sum(waits.values()) == 1, f"for the last of ten batches: {waits}"
            waits.clear()
            torch.testing.assert_close(there, here[number])  # a GPU normalises in one pass, with other last digits
    assert len(here[0]) == 2


def test_neighbours_are_searched_on_the_gpu() -> None:
    given = X[:80], Y[:80], X[80:], (1, 5, 20)
    here = knn_answers(*given, chunk=7)
    with pseudo_cuda() as waits:
        there = knn_answers(*given, chunk=7, device="cuda")
        assert sum(waits.values()) == 2, f"similarities and places, not those of each of six blocks: {waits}"
    assert all(torch.equal(there[k][0], here[k][0]) for k in here)


SPEC = EncoderSpec("nano", (16, 16), 4, options={"depth": 4, "embed_dim": 32, "num_heads": 2})
COLOURS = EncoderCard(SPEC, (0.4,) * 3, (0.2,) * 3, "mae", "tiny")


def test_pictures_are_segmented_several_at_once() -> None:
    torch.manual_seed(0)
    model = Segmenter(at_size(build_encoder(SPEC), COLOURS, (16, 16)), 3, head="upernet", head_width=16)
    images = Squares(20, (16, 40), seed=1)
    here = torch.stack(predict_overlaps(model, images, COLOURS, settings("cpu"), 16, precision="float32"))
    with pseudo_cuda() as waits:
        model.to("cuda")
        waits.clear()
        there = torch.stack(predict_overlaps(model, images, COLOURS, settings("cuda"), 16, precision="float32"))
        assert sum(waits.values()) == 1, f"for the last of three groups: {waits}"
    assert torch.equal(there, here) and here.sum() > 0
