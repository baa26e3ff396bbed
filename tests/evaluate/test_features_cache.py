"""Features are taken once, and never those of other weights, sizes or images."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from patchloom.cli import main
from patchloom.data.source import Source
from patchloom.data.sources.builtin import Torchvision
from patchloom.data.sources.open import open_data
from patchloom.evaluate import features
from patchloom.evaluate.features import ImageFeatures, about_encoder, cache_folder, load_or_extract
from patchloom.evaluate.frozen import extractors
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file
from patchloom.nets.heads import InstanceHead

DIGITS = open_data("digits").train
SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 2}
CPU = EvalSettings(device="cpu")


def _made(source: Source, value: float = 1.0) -> ImageFeatures:
    n = len(source)
    tokens = {"mean": torch.full((n, 2), value), "class": torch.zeros(n, 2)}
    return ImageFeatures(tokens, torch.from_numpy(source.labels), torch.arange(n), [])


def _passes(about: str, source: Source, times: int = 2) -> list[bool]:
    """For each of some calls, whether it needed a pass."""
    return [not load_or_extract((about,), source, _made).cached for _ in range(times)]


def test_probes_of_one_encoder_cost_one_pass(
    tiny_encoder: Path, record_reads: Callable, empty_cache: Path, capsys: pytest.CaptureFixture
) -> None:
    record = record_reads()
    words = [str(tiny_encoder), "digits", "--device", "cpu"]
    assert main(["evaluate", "knn", *words]) == 0
    # each evaluation looks at some images for colours, which an encoder of grey images drops
    assert len(record) == 3 * 180 + 8 and "Cached features" not in capsys.readouterr().out
    assert main(["evaluate", "linear", *words, "--pooling", "mean"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Cached features were used for tiny, untrained, raw pixels: --cache false computes them again." in said
    assert main(["evaluate", "knn", *words, "--k", "5"]) == 2 and main(["evaluate", "knn", *words, "--ks", "5"]) == 0
    assert len(record) == 3 * 180 + 8 * 3  # a refusal looks at none, a cached pass reads no more
    assert main(["evaluate", "layers", *words]) == 0
    assert len(record) == 5 * 180 + 8 * 4  # layers are other features, raw pixels the same
    assert len(list(empty_cache.iterdir())) == 10


def test_what_is_kept_is_what_was_taken(tiny_encoder: Path) -> None:
    vit, card = load_encoder_file(tiny_encoder)
    some = DIGITS.subset(range(30))
    for layers in (False, True):
        for (_, fresh, _), (_, again, _), (_, anew, _) in zip(
            *(extractors(vit, card, how, layers=layers) for how in (CPU, CPU, replace(CPU, cache=False))), strict=True
        ):
            first, second, third = fresh(some), again(some), anew(some)
            # raw pixels were cached when the poolings were measured
            assert second.cached and not third.cached and (not first.cached or layers)
            for found in (first, second):
                assert list(found.tokens) == list(third.tokens) and found.poolings() == third.poolings()
                assert all(torch.equal(values, third.tokens[name]) for name, values in found.tokens.items())
                assert torch.equal(found.labels, third.labels) and torch.equal(found.indices, third.indices)


def test_without_the_cache_nothing_is_written_or_read(
    tiny_encoder: Path, record_reads: Callable, empty_cache: Path
) -> None:
    record = record_reads()
    for protocol, options in (("knn", []), ("layers", []), ("linear", ["--pooling", "mean"])):
        words = [protocol, str(tiny_encoder), "digits", "--device", "cpu", "--cache", "false", *options]
        assert main(["evaluate", *words]) == 0
    assert len(record) == 9 * 180 + 3 * 8 and not empty_cache.exists()


def test_the_closing_evaluation_keeps_nothing(tmp_path: Path, empty_cache: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(24):
        (tmp_path / "photos" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / "ab"[i % 2] / f"{i}.png")
    words = ["--epochs", "1", "--batch_size", "8", "--model", "nano", "--model.embed_dim", "32", "--model.depth", "1"]
    assert main(["pretrain", str(tmp_path / "photos"), "--out", str(tmp_path / "run"), *words]) == 0
    assert (tmp_path / "run" / "results.csv").exists() and not empty_cache.exists()


def _encoder(**changes) -> tuple[str, ...]:
    """What is said about an encoder that differs from the usual one in something."""
    seed, weight, head = changes.pop("seed", 0), changes.pop("weight", 0.0), changes.pop("head", None)
    about = {"mean": (0.3,), "std": (0.4,), "device": "cpu", "precision": "auto"} | changes.pop("about", {})
    spec = EncoderSpec("nano", changes.pop("size", (8, 8)), 2, 1, options=SMALL | changes)
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

    first, _ = draw("a/1.npy", 10), draw("b/2.npy", 20)

    def source() -> Source:
        return open_data(tmp_path / "photos").train

    assert _passes("x", source()) == [True, False]
    assert _passes("y", source()) == [True, False]
    assert _passes("x", source().subset([1])) == [True, False]
    assert _passes("x", source().subset([1, 0])) == [True, False]
    # other bytes of the same number, and the time set back: the fingerprint of runs cannot tell
    before, was = source().fingerprint(), first.stat()
    draw("a/1.npy", 11)
    os.utime(first, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert source().fingerprint() == before and first.stat().st_size == was.st_size
    assert _passes("x", source()) == [True, False]
    # another file in its place, likewise
    draw("c.npy", 12).replace(first)
    os.utime(first, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert source().fingerprint() == before
    assert _passes("x", source()) == [True, False]
    (tmp_path / "photos").rename(tmp_path / "moved")
    assert _passes("x", open_data(tmp_path / "moved").train) == [False, False]


def test_labels_are_the_datas_own(tiny_encoder: Path) -> None:
    some = DIGITS.subset(range(10))
    assert load_or_extract(("x",), some, _made).labels.tolist() == DIGITS.labels[:10].tolist()
    some.labels = some.labels[::-1].copy()
    found = load_or_extract(("x",), some, _made)
    assert found.cached and found.labels.tolist() == DIGITS.labels[:10][::-1].tolist()
    some.labels = np.where(np.arange(10) < 5, some.labels, -1)  # only those that have one are measured
    assert [len(load_or_extract(("x",), some, _made).labels), _passes("x", some)[0]] == [5, False]


def test_torchvision_sets_are_told_apart_by_their_pixels(tmp_path: Path) -> None:
    class InMemory:
        targets = (0, 1)

        def __init__(self, tone: int) -> None:
            self.data = np.full((2, 4, 4), tone, np.uint8)

        def __len__(self) -> int:
            return 2

    class InFiles(InMemory):
        def __init__(self, paths: list) -> None:
            self._image_files = paths

    class Unknown(InMemory):
        def __init__(self) -> None:
            pass

    stamps = [Torchvision("cifar10", "train", InMemory(tone)).stamp() for tone in (1, 1, 2)]
    assert stamps[0] == stamps[1] != stamps[2]
    paths = [tmp_path / "1.png", tmp_path / "2.png"]
    for path in paths:
        path.write_bytes(b"x")
    stamps = [Torchvision("dtd", "train", InFiles(some)).stamp() for some in (paths, paths, paths[::-1])]
    assert stamps[0] == stamps[1] != stamps[2]
    unknown = Torchvision("new", "train", Unknown())
    assert unknown.stamp() is None and unknown.subset([0]).stamp() is None
    assert _passes("x", unknown) == [True, True]


@pytest.mark.parametrize("harm", ["cut", "bit", "empty", "another's", "folder"])
def test_a_damaged_file_is_made_again(harm: str, empty_cache: Path) -> None:
    some = DIGITS.subset(range(8))
    assert _passes("x", some) == [True, False]
    (path,) = empty_cache.iterdir()
    good = path.read_bytes()
    if harm == "folder":
        path.unlink()
        path.mkdir()
        assert _passes("x", some) == [True, True]
        return
    flipped = bytearray(good)
    flipped[-9] ^= 1
    bad = {"cut": good[:-5], "bit": bytes(flipped), "empty": b"", "another's": save({"a": torch.zeros(2)})}[harm]
    path.write_bytes(bad)
    assert _passes("x", some) == [True, False]
    assert path.read_bytes() == good and list(empty_cache.iterdir()) == [path]


def test_the_oldest_go_when_the_room_is_full(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [DIGITS.subset(range(i, i + 50)) for i in range(4)]
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


def test_processes_at_once_do_not_disturb_one_another(empty_cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        sums = pool.map(_one_of_many, range(12), chunksize=1)
        pool.close()  # else they are sent a signal, which one that was just forked may lose
        pool.join()
    assert set(sums) == {800.0}
    assert len(list(empty_cache.iterdir())) == 1
    assert _passes("x", DIGITS.subset(range(400))) == [False, False]


def _one_of_many(_: int) -> float:
    return load_or_extract(("x",), DIGITS.subset(range(400)), _made).tokens["mean"].sum().item()


def test_a_cache_that_cannot_be_written_costs_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _passes("x", DIGITS.subset(range(8))) == [True, True]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the convention says to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "patchloom" / "features"


def test_images_that_change_meanwhile_are_not_kept(empty_cache: Path) -> None:
    some = DIGITS.subset(range(8))
    stamps = iter("ab")
    some.stamp = lambda: next(stamps)
    assert _passes("x", some, 1) == [True] and not empty_cache.exists()
    some.stamp = lambda: "a"
    assert _passes("x", some) == [True, False]


def test_unreadable_images_are_named_again(tmp_path: Path, tiny_encoder: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(20):
        for part in ("train", "test"):
            path = tmp_path / part / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(path)
    (tmp_path / "train" / "b" / "7.png").write_bytes(b"broken")
    first, second = (evaluate("knn", tiny_encoder, tmp_path, device="cpu", ks=(3,)) for _ in range(2))
    lost = f"1 images could not be read and were left out, such as {tmp_path / 'train' / 'b' / '7.png'}."
    assert lost in first.protocol and lost in second.protocol
    assert "Cached features" in second.protocol and second.rows == first.rows
