"""Tests of the verb embed: vectors as in evaluations, read by other libraries, with their card."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from embedding import SMALL, SUFFIXES, Read, read, read_parts
from spoken import Tones, encoder_of_sound
from swins import spec_of, swin

import patchloom
from patchloom.cli import main
from patchloom.data.source import Data
from patchloom.data.sources.open import open_data
from patchloom.embed import embed, parts
from patchloom.errors import PatchloomError
from patchloom.evaluate import settings
from patchloom.evaluate.features import extract
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder, save_extra_module
from patchloom.nets.heads import InstanceHead


@pytest.fixture(scope="module")
def whole(tiny: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a file of each format."""
    folder = tmp_path_factory.mktemp("whole")
    for suffix in SUFFIXES:
        patchloom.embed(tiny, photos, to=folder / f"f{suffix}", **SMALL)
    return {suffix: folder / f"f{suffix}" for suffix in SUFFIXES}


def expected(encoder: Path, photos: Path, **options) -> dict[str, np.ndarray]:
    """Return features of training and test images, concatenated, as in evaluations."""
    vit, card = load_encoder_file(encoder)
    data = open_data(photos)
    each = [extract(vit, card, one, device="cpu", batch_size=4, **options) for one in (data.train, data.test)]
    return {name: torch.cat([one.tokens[name] for one in each]).numpy() for name in each[0].tokens}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_has_what_the_evaluations_see(whole: dict[str, Path], tiny: Path, photos: Path, suffix: str):
    found = read(whole[suffix])
    assert found.vectors.dtype == np.float32
    assert np.array_equal(found.vectors, expected(tiny, photos)["mean"])  # bit for bit
    names = [f"{split}/{label}/{i}.png" for split, label, i in _images()]
    assert found.paths == names and found.splits == [name.split("/")[0] for name in names]
    assert found.labels == [name.split("/")[1] for name in names]
    assert all((photos / path).is_file() for path in found.paths)
    assert not whole[suffix].with_name(f"{whole[suffix].name}.parts").exists()


def _images() -> list[tuple[str, str, int]]:
    """Return split, class and number of the readable images in listing order."""
    train, test = ([f"{i}" for i in some] for some in (range(26), range(26, 36)))
    rows = [(split, "ab"[int(i) % 2], int(i)) for split, some in (("train", train), ("test", test)) for i in some]
    order = sorted(rows, key=lambda row: (row[0] == "test", row[1], f"{row[2]}.png"))
    return [row for row in order if row[2] != 17]


def test_the_card_says_how_they_were_made(whole: dict[str, Path], tiny: Path, photos: Path):
    cards = [read(path).card for path in whole.values()]
    assert cards[0] == cards[1] == cards[2]
    card = cards[0]
    assert (card["rows"], card["unreadable"], card["data"]["splits"]) == (35, 1, {"train": 26, "test": 10})
    assert card["encoder"]["name"] == "tiny" and card["encoder"]["arguments"]["options"]["depth"] == 3
    assert len(card["encoder"]["weights_sha256"]) == 64
    assert (card["pooling"], card["layer"], card["shape"], card["dtype"]) == ("mean", "norm", [16], "float32")
    assert card["preprocessing"] | {"size": [8, 8], "mean": [0.3], "std": [0.37]} == card["preprocessing"]
    data = open_data(photos)
    assert card["data"]["fingerprint"] == {"train": data.train.fingerprint(), "test": data.test.fingerprint()}
    assert card["patchloom"] == patchloom.__version__ and card["classes"] == ["a", "b"]


def made(tmp_path: Path, *given, **options) -> Read:
    patchloom.embed(*given, to=tmp_path / "f.npz", **SMALL | options)
    return read(tmp_path / "f.npz")


def test_tokens_and_layers(tiny: Path, photos: Path, tmp_path: Path):
    last, each = expected(tiny, photos), expected(tiny, photos, layers=True)
    both = made(tmp_path / "1", tiny, photos, pooling="both", dtype="float16")
    assert both.vectors.dtype == np.float16
    assert np.array_equal(both.vectors, np.concatenate([last["class"], last["mean"]], 1).astype(np.float16))
    for i, (layer, name) in enumerate(((2, "block 2"), ("embedding", "embedding"), ("Block_3", "block 3"))):
        found = made(tmp_path / f"layer {i}", tiny, photos, layer=layer)
        assert found.card["layer"] == name and np.array_equal(found.vectors, each[name])
    middle = made(tmp_path / "2", tiny, photos, layer=2, pooling="patches").vectors
    assert middle.shape == (35, 16, 16)
    np.testing.assert_allclose(middle.mean(1), each["block 2"], atol=1e-6)


def test_class_token_and_registers_of_any_layer(tiny: Path, photos: Path, tmp_path: Path):
    spec = EncoderSpec("nano", (8, 8), 2, channels=1, options={"depth": 2, "embed_dim": 16, "reg_tokens": 2})
    vit, card, path = build_encoder(spec).eval(), load_encoder_file(tiny)[1], tmp_path / "registers.safetensors"
    save_encoder(vit, replace(card, spec=spec), path)
    image = (open_data(photos).test.read(9).float()[None] / 255 - card.mean[0]) / card.std[0]
    whole = vit.forward_features(image)[0, :3].mean(0).detach()
    half = vit.forward_intermediates(image, indices=[0], return_prefix_tokens=True, intermediates_only=True)[0][1]
    found = made(tmp_path / "1", path, photos, pooling="prefix")
    np.testing.assert_allclose(found.vectors[-1], whole.numpy(), atol=1e-5)
    first = made(tmp_path / "2", path, photos, pooling="prefix", layer=1)
    np.testing.assert_allclose(first.vectors[-1], half[0].mean(0).detach().numpy(), atol=1e-5)
    with pytest.raises(PatchloomError, match="no register tokens for prefix features"):
        made(tmp_path / "3", tiny, photos, pooling="prefix")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_patch_tokens_are_timms_in_every_format(tiny: Path, photos: Path, tmp_path: Path, suffix: str):
    patchloom.embed(tiny, photos, to=tmp_path / f"f{suffix}", pooling="patches", dtype="float16", **SMALL)
    found = read(tmp_path / f"f{suffix}")
    assert found.vectors.shape == (35, 16, 16) and found.vectors.dtype == np.float16
    vit, card = load_encoder_file(tiny)
    image = open_data(photos).test.read(9).float()[None] / 255
    tokens = vit.forward_features((image - card.mean[0]) / card.std[0])[0, 1:]
    np.testing.assert_allclose(found.vectors[-1], tokens.detach().numpy(), atol=2e-3)


def test_a_swin_has_stages(photos: Path, tmp_path: Path):
    spec = spec_of((16, 16), 2, 1)
    save_encoder(swin((16, 16), 2, 1), EncoderCard(spec, (0.3,), (0.4,), "mae", "swin"), tmp_path / "s.safetensors")
    assert np.array_equal(
        made(tmp_path / "1", tmp_path / "s.safetensors", photos).vectors,
        expected(tmp_path / "s.safetensors", photos)["mean"],
    )
    stage = made(tmp_path / "2", tmp_path / "s.safetensors", photos, layer=1, pooling="patches")
    assert stage.card["layer"] == "stage 1" and stage.vectors.shape[0] == 35
    with pytest.raises(PatchloomError, match="no class token"):
        made(tmp_path / "3", tmp_path / "s.safetensors", photos, layer=1, pooling="class")


def test_an_instance_head(tiny: Path, photos: Path, tmp_path: Path):
    vit, card = load_encoder_file(tiny)
    save_encoder(vit, replace(card, extra_modules={"instance_head": "pooling"}), tmp_path / "encoder.safetensors")
    head = InstanceHead(16, 2).eval()
    save_extra_module(head, tmp_path / "instance_head.safetensors")
    found = made(tmp_path / "1", tmp_path / "encoder.safetensors", photos, pooling="instance")
    assert np.array_equal(found.vectors, expected(tiny, photos, head=head)["instance"])
    assert len(found.card["encoder"]["head_sha256"]) == 64
    with pytest.raises(PatchloomError, match="--pooling instance is only for the last layer"):
        made(tmp_path / "2", tmp_path / "encoder.safetensors", photos, pooling="instance", layer=1)
    with pytest.raises(PatchloomError, match="no module beside it for instance features"):
        made(tmp_path / "3", tiny, photos, pooling="instance")


def test_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(Tones(4), None))
    found = made(tmp_path, encoder_of_sound(tmp_path / "ear"), "tones")
    assert found.splits == ["all"] * 12 and found.labels[:3] == ["yes", "no", "up"]
    assert found.paths[5] == "tones #5" and "sound" in found.card["preprocessing"]
    with pytest.raises(PatchloomError, match="is an encoder of recordings, and digits holds images"):
        monkeypatch.undo()
        made(tmp_path / "2", tmp_path / "ear", "digits")


def test_images_without_labels_or_names(tiny: Path, tmp_path: Path):
    found = made(tmp_path / "1", tiny, [np.full((8, 8), i, np.uint8) for i in range(5)])
    assert found.labels == [None] * 5 and len({*found.paths}) == 5


def test_a_folder_may_be_spelled_in_several_ways(tiny: Path, photos: Path, tmp_path: Path, monkeypatch, capsys):
    to, name = tmp_path / "f.npz", photos.name
    monkeypatch.chdir(photos.parent)
    made = patchloom.embed(tiny, f"./{name}//", to=to, **SMALL)
    first = read(to)
    assert made.card["data"]["name"] == name and first.paths[0].startswith("train/a/")
    before = to.stat().st_mtime_ns
    patchloom.embed(tiny, name, to=to, **SMALL)
    assert to.stat().st_mtime_ns == before  # it is the same file
    monkeypatch.chdir(photos)
    patchloom.embed(tiny, ".", to=tmp_path / "g.npz", **SMALL)
    assert read(tmp_path / "g.npz").paths == first.paths


def test_paths_of_several_folders_differ(tiny: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder, numbers in (("a", (0, 2)), ("../b", (0, 4))):
        (tmp_path / "in" / folder).mkdir(parents=True, exist_ok=True)
        for i in numbers:
            shutil.copy(photos / "train" / "a" / f"{i}.png", tmp_path / "in" / folder)
    monkeypatch.chdir(tmp_path / "in")
    assert made(tmp_path, tiny, ["a", "../b"]).paths == ["a/0.png", "a/2.png", "../b/0.png", "../b/4.png"]


def test_what_is_printed(
    tiny: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "500")  # else sentences are wrapped
    words = ["embed", str(tiny), str(photos), "--to", str(tmp_path / "f.npz"), "--batch_size", "4", "--device", "cpu"]
    assert main(words) == 0
    first, last, holds = capsys.readouterr().out.splitlines()
    assert first.startswith("36 images: for each, the mean of the patch tokens of tiny, 16 numbers in float32.")
    assert "f.npz will have about 0.0 MB" in first
    assert last.startswith("1 images could not be read and were left out, such as") and "17.png" in last
    assert holds == f"{tmp_path / 'f.npz'} has 35 vectors of 16 numbers in float32 (0.0 MB)."
    before = (tmp_path / "f.npz").stat().st_mtime_ns
    assert main(words) == 0
    assert (tmp_path / "f.npz").stat().st_mtime_ns == before
    lost, there = capsys.readouterr().out.splitlines()
    assert lost == "1 images could not be read when it was made and were skipped."
    assert "exists and was made with the same settings" in there and "Nothing was computed again." in there


def test_the_time_of_many_is_told_first(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    patchloom.embed(tiny, "digits", to=tmp_path / "f.npz", device="cpu", workers=0, batch_size=64)
    said = capsys.readouterr().out
    assert "1,797 images: " in said and ", and it takes about " in said


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_of_another_card_is_left_alone(whole, tiny: Path, photos: Path, tmp_path: Path, suffix: str):
    content = whole[suffix].read_bytes()
    for options, what in (({"layer": 1}, "another layer"), ({"dtype": "float16"}, "another dtype")):
        with pytest.raises(PatchloomError, match=f"exists and was made with {what}: choose another --to"):
            patchloom.embed(tiny, photos, to=whole[suffix], **SMALL | options)
    with pytest.raises(PatchloomError, match="made with another data name, data splits and data fingerprint"):
        patchloom.embed(tiny, photos / "test", to=whole[suffix], **SMALL)
    vit, card = load_encoder_file(tiny)
    vit.norm.bias.data += 1
    save_encoder(vit, card, tmp_path / "other.safetensors")
    with pytest.raises(PatchloomError, match="made with another encoder weights_sha256"):
        patchloom.embed(tmp_path / "other.safetensors", photos, to=whole[suffix], **SMALL)
    assert whole[suffix].read_bytes() == content


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", b"mine", b"PAR1 and more PAR1", "half"])
def test_other_files_are_left_alone(whole, tiny: Path, photos: Path, tmp_path: Path, suffix: str, content):
    path = tmp_path / f"f{suffix}"
    content = whole[suffix].read_bytes()[:-300] if content == "half" and suffix != ".safetensors" else content
    path.write_bytes(b"half" if content == "half" else content)
    before = path.read_bytes()
    with pytest.raises(PatchloomError, match="remove it"):
        patchloom.embed(tiny, photos, to=path, **SMALL)
    assert path.read_bytes() == before


def test_files_of_others_that_can_be_read_are_left_alone(tiny: Path, photos: Path, tmp_path: Path):
    np.savez(tmp_path / "f.npz", vectors=np.zeros(3))
    (tmp_path / "f.safetensors").write_bytes(tiny.read_bytes())
    for name in ("f.npz", "f.safetensors"):
        with pytest.raises(PatchloomError, match=f"{name} exists and was not written by embed"):
            patchloom.embed(tiny, photos, to=tmp_path / name, **SMALL)


def test_refusals(tiny: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(sentence: str, **options) -> None:
        with pytest.raises(PatchloomError, match=sentence):
            patchloom.embed(tiny, photos, **{"to": tmp_path / "f.npz", **SMALL, **options})

    refused("--to is missing: give a FOLDER, FILE.parquet, FILE.npz or FILE.safetensors", to=None)
    refused(r"no known suffix: .* .parquet, .npz or .safetensors, as in f.npz, or .* folder", to=tmp_path / "f.npy")
    refused("--format npz is not that of .*f.parquet: leave it out", to=tmp_path / "f.parquet", format="npz")
    (tmp_path / "file").write_text("mine")
    refused("file is a file of another kind: give a folder", to=tmp_path / "file")
    refused("exists and was not written by embed: choose another --to", to=tmp_path)
    refused("--devices must be 1 or more, not 0", devices=0)
    (tmp_path / "folder.npz").mkdir()
    refused("is a folder: give a file in it", to=tmp_path / "folder.npz")
    refused("--layer 4 does not exist: this encoder has embedding, block 1 to 3 and norm", layer=4)
    refused("--layer first does not exist: this encoder has", layer="first")
    refused("--top must be 1 or more, not 0", top=0)
    refused("--batch_size must be 1 or more, not 0", batch_size=0)
    refused("--pooling cannot be max: it takes mean, class", pooling="max")
    monkeypatch.setattr(embed.shutil, "disk_usage", lambda folder: type("", (), {"free": 100})())
    refused("needs about 0.0 MB while it is made, and .* has 0.0 MB free: free some space")
    refused(
        "needs about 0.0 MB while it is made, and .* has 0.0 MB free: free some space", to=tmp_path / "new" / "parts"
    )
    assert not (tmp_path / "new").exists()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(r"Parquet needs pyarrow: pip install 'pyarrow", to=tmp_path / "f.parquet")


def test_a_file_that_does_not_fit_in_memory(tiny: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    patchloom.embed(tiny, photos, to=tmp_path / "whole.npz", **SMALL)
    monkeypatch.setattr(embed, "free_memory", lambda device: 1e-6)
    with pytest.raises(PatchloomError, match=r"of memory as one file, .*: give a folder, as in --to .*/f/,"):
        patchloom.embed(tiny, photos, to=tmp_path / "f.npz", **SMALL)
    assert [one.name for one in tmp_path.iterdir()] == ["whole.npz"]  # nothing was begun
    near = {"near": photos / "train" / "b" / "5.png", **SMALL}
    with pytest.raises(PatchloomError, match="of memory as one file"):
        patchloom.embed(tiny, photos, to=tmp_path / "whole.npz", **near)
    assert patchloom.embed(tiny, photos, to=tmp_path / "f", format="npz", **near).neighbours


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_folder_of_parts_has_the_rows_of_the_file(whole, tiny: Path, photos: Path, tmp_path: Path, suffix: str):
    done = patchloom.embed(tiny, photos, to=tmp_path / "parts", format=suffix[1:], **SMALL)
    found, expected = read_parts(tmp_path / "parts"), read(whole[suffix])
    starts = [("train", i) for i in (0, 8, 16, 24)] + [("test", i) for i in (0, 8)]
    each = [found[f"{split}-{start:09}{suffix}"] for split, start in starts]
    assert len(found) == done.files == 6 and sum(len(one.vectors) for one in each) == done.card["rows"] == 35
    assert np.array_equal(np.concatenate([one.vectors for one in each]), expected.vectors)  # bit for bit
    for name in ("paths", "splits", "labels"):
        assert sum((getattr(one, name) for one in each), []) == getattr(expected, name)
    counts = [(one.card["rows"], one.card["unreadable"]) for one in each]
    assert sorted(counts) == [(2, 0)] * 2 + [(7, 1)] + [(8, 0)] * 3
    card = json.loads((tmp_path / "parts" / "_card.json").read_text())
    assert card == expected.card == {**each[0].card, "rows": 35, "unreadable": 1}
    assert {path.stat().st_mode for path in (tmp_path / "parts").glob("[!.]*-*")} == {whole[".npz"].stat().st_mode}
    again = patchloom.embed(tiny, photos, to=tmp_path / "parts", **SMALL)  # of the kind that is there
    assert not again.made and again.card == done.card and again.files == 6 and again.notes
    with pytest.raises(PatchloomError, match="parts was made by a command with another layer"):
        patchloom.embed(tiny, photos, to=tmp_path / "parts", layer=1, **SMALL)
    other = next(one for one in SUFFIXES if one != suffix)
    with pytest.raises(PatchloomError, match=f"parts has parts in {suffix}: leave out --format"):
        patchloom.embed(tiny, photos, to=tmp_path / "parts", format=other[1:], **SMALL)


def test_a_folder_of_parquet_is_one_table(tiny: Path, photos: Path, tmp_path: Path):
    patchloom.embed(tiny, photos, to=f"{tmp_path}/v1.0/", **SMALL)
    table = pyarrow.parquet.read_table(tmp_path / "v1.0")
    assert len(table) == 35 and table.column_names == ["path", "split", "label", "vector"]


def test_numbers_that_float16_cannot_hold(tiny: Path, photos: Path, tmp_path: Path):
    vit, card = load_encoder_file(tiny)
    vit.norm.weight.data *= 1e6
    save_encoder(vit, card, tmp_path / "large.safetensors")
    with pytest.raises(PatchloomError, match="beyond 65,504, which float16 cannot hold: leave out --dtype"):
        made(tmp_path, tmp_path / "large.safetensors", photos, dtype="float16")
    assert np.abs(made(tmp_path / "1", tmp_path / "large.safetensors", photos).vectors).max() > 65504


def test_images_that_change_meanwhile(tiny: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "fingerprints", lambda sources: {"train": "1", "test": "2"})
    with pytest.raises(PatchloomError, match="has changed while its images were read: remove .*f.npz.parts"):
        made(tmp_path, tiny, photos)
    assert not (tmp_path / "f.npz").exists()


def test_the_card_is_json_of_ascii(whole: dict[str, Path]):
    with np.load(whole[".npz"]) as file:
        assert str(file["card"]).isascii() and json.loads(str(file["card"]))


def test_images_for_validation_are_there_too(tiny: Path, photos: Path, tmp_path: Path):
    """Images for validation are embedded, too."""
    folder = shutil.copytree(photos, tmp_path / "photos")
    shutil.copytree(folder / "test", folder / "val")
    patchloom.embed(tiny, folder, to=tmp_path / "f.npz", **SMALL)
    splits = read(tmp_path / "f.npz").splits
    assert splits.count("val") == splits.count("test") > 0 and set(splits) == {"train", "test", "val"}


def test_rows_of_a_table_for_validation_are_there_too(tiny: Path, photos: Path, tmp_path: Path):
    """Images for validation are embedded, too."""
    paths = sorted((photos / "test").glob("*/*.png"), key=lambda path: int(path.stem))  # a and b in turn
    splits = ["train"] * 5 + ["test"] * 2 + ["val"] * 3
    rows = [f"{path},{path.parent.name},{split}" for path, split in zip(paths, splits, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    patchloom.embed(tiny, tmp_path / "table.csv", to=tmp_path / "f.npz", **SMALL)
    found = read(tmp_path / "f.npz")
    assert found.splits == splits and [Path(path).name for path in found.paths] == [path.name for path in paths]
    kept = read(patchloom.embed(tiny, photos, to=tmp_path / "g.npz", **SMALL).file)
    by_path = dict(zip(kept.paths, kept.vectors, strict=True))
    expected = [by_path[str(path.relative_to(photos))] for path in paths]
    np.testing.assert_allclose(found.vectors, expected, atol=1e-5)


def test_without_a_test_split_the_rest_keep_their_names(tiny: Path, tmp_path: Path):
    digits = open_data("digits").train
    data = Data(digits.subset(range(4)), None, (), {"val": digits.subset(range(4, 6))})
    patchloom.embed(tiny, data, to=tmp_path / "f.npz", **SMALL)
    assert read(tmp_path / "f.npz").splits == ["train"] * 4 + ["val"] * 2


def test_what_is_done_once_is_not_multiplied_by_the_images(monkeypatch):
    """10,000 images at 1 ms with 0.9 s of start-up take 11 s, not the 20 minutes of a linear estimate."""
    now, prepared = [0.0], set()
    monkeypatch.setattr("patchloom.estimate.time.perf_counter", lambda: now[0])

    class SlowStart:
        def each(self, source, keep):
            kernels = 0 if len(source) in prepared else 5  # for each new number of images
            prepared.add(len(source))
            now[0] += 0.9 + kernels + 0.001 * len(source)

    assert embed.seconds_for(SlowStart(), {"all": open_data("shapes:1000").train}, 10_000) == pytest.approx(10.9)
