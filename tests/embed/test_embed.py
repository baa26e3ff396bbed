"""The verb embed: vectors as in evaluations, read by other libraries, and nearest neighbours among them."""

import json
import re
import shutil
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from embedding import SMALL, SUFFIXES, Read, read, read_parts
from PIL import Image
from refusing import refusal
from spoken import Tones, encoder_of_sound
from swins import spec_of, swin

import patchloom
from patchloom.cli import main
from patchloom.data.source import Data
from patchloom.data.sources.open import open_data
from patchloom.embed import embed, formats
from patchloom.embed import near as search
from patchloom.evaluate import settings
from patchloom.evaluate.features import extract
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder, save_extra_module
from patchloom.nets.heads import InstanceHead


@pytest.fixture(scope="module")
def whole(tiny: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    for suffix in SUFFIXES:
        patchloom.embed(tiny, photos, to=folder / f"f{suffix}", **SMALL)
    return {suffix: folder / f"f{suffix}" for suffix in SUFFIXES}


def expected(encoder: Path, photos: Path, **options) -> dict[str, np.ndarray]:
    vit, card = load_encoder_file(encoder)
    data = open_data(photos)
    each = [extract(vit, card, one, device="cpu", batch_size=4, **options) for one in (data.train, data.test)]
    return {name: torch.cat([one.tokens[name] for one in each]).numpy() for name in each[0].tokens}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_has_what_the_evaluations_see(whole: dict[str, Path], tiny: Path, photos: Path, suffix: str):
    found = read(whole[suffix])
    assert found.vectors.dtype == np.float32
    assert np.array_equal(found.vectors, expected(tiny, photos)["mean"])  # bit for bit
    files = [path for split in ("train", "test") for path in sorted((photos / split).rglob("*.png"))]
    names = [str(path.relative_to(photos)) for path in files if path.name != "17.png"]
    assert found.paths == names and found.splits == [name.split("/")[0] for name in names]
    assert found.labels == [name.split("/")[1] for name in names]
    assert not whole[suffix].with_name(f"{whole[suffix].name}.parts").exists()


def test_the_card_says_how_they_were_made(whole: dict[str, Path], photos: Path):
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
    with np.load(whole[".npz"]) as file:
        assert str(file["card"]).isascii()


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
    vit, card = load_encoder_file(tiny)
    image = open_data(photos).test.read(9).float()[None] / 255
    tokens = vit.forward_features((image - card.mean[0]) / card.std[0])[0, 1:].detach().numpy()
    for suffix in SUFFIXES:
        patchloom.embed(tiny, photos, to=tmp_path / f"f{suffix}", pooling="patches", dtype="float16", **SMALL)
        found = read(tmp_path / f"f{suffix}").vectors
        assert found.shape == (35, 16, 16) and found.dtype == np.float16
        np.testing.assert_allclose(found[-1], tokens, atol=2e-3)


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


def test_a_swin_has_stages(photos: Path, tmp_path: Path):
    spec, file = spec_of((16, 16), 2, 1), tmp_path / "s.safetensors"
    save_encoder(swin((16, 16), 2, 1), EncoderCard(spec, (0.3,), (0.4,), "mae", "swin"), file)
    assert np.array_equal(made(tmp_path / "1", file, photos).vectors, expected(file, photos)["mean"])
    stage = made(tmp_path / "2", file, photos, layer=1, pooling="patches")
    assert stage.card["layer"] == "stage 1" and stage.vectors.shape[0] == 35
    assert "no class token" in refusal(made, tmp_path / "3", file, photos, layer=1, pooling="class")


def test_an_instance_head(tiny: Path, photos: Path, tmp_path: Path):
    vit, card = load_encoder_file(tiny)
    save_encoder(vit, replace(card, extra_modules={"instance_head": "pooling"}), tmp_path / "encoder.safetensors")
    head = InstanceHead(16, 2).eval()
    save_extra_module(head, tmp_path / "instance_head.safetensors")
    found = made(tmp_path / "1", tmp_path / "encoder.safetensors", photos, pooling="instance")
    assert np.array_equal(found.vectors, expected(tiny, photos, head=head)["instance"])
    assert len(found.card["encoder"]["head_sha256"]) == 64
    said = refusal(made, tmp_path / "2", tmp_path / "encoder.safetensors", photos, pooling="instance", layer=1)
    assert "--pooling instance is only for the last layer" in said


def test_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(Tones(4), None))
    found = made(tmp_path, encoder_of_sound(tmp_path / "ear"), "tones")
    assert found.splits == ["all"] * 12 and found.labels[:3] == ["yes", "no", "up"]
    assert found.paths[5] == "tones #5" and "sound" in found.card["preprocessing"]
    monkeypatch.undo()
    said = refusal(made, tmp_path / "2", tmp_path / "ear", "digits")
    assert "is an encoder of recordings, and digits holds images" in said


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


def test_what_is_printed(tiny: Path, photos: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # else sentences are wrapped
    words = ["embed", str(tiny), str(photos), "--to", str(tmp_path / "f.npz"), "--batch_size", "4", "--device", "cpu"]
    times = []
    for said in ("36 images.*16 numbers in float32", "Nothing was computed again"):
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert re.search(said, printed) and "1 images could not be read" in printed
        times.append((tmp_path / "f.npz").stat().st_mtime_ns)
    assert times[0] == times[1]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_of_another_card_is_left_alone(whole, tiny: Path, photos: Path, tmp_path: Path, suffix: str):
    content, other = whole[suffix].read_bytes(), tmp_path / "other.safetensors"
    vit, card = load_encoder_file(tiny)
    vit.norm.bias.data += 1
    save_encoder(vit, card, other)
    for encoder, data, options, what in (
        (tiny, photos, {"layer": 1}, "layer"),
        (tiny, photos, {"dtype": "float16"}, "dtype"),
        (tiny, photos / "test", {}, "data name, data splits and data fingerprint"),
        (other, photos, {}, "encoder weights_sha256"),
    ):
        said = refusal(patchloom.embed, encoder, data, to=whole[suffix], **SMALL | options)
        assert f"made by a command with another {what}" in said
    assert whole[suffix].read_bytes() == content


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", b"mine", b"PAR1 and more PAR1", "half"])
def test_other_files_are_left_alone(whole, tiny: Path, photos: Path, tmp_path: Path, suffix: str, content):
    path = tmp_path / f"f{suffix}"
    path.write_bytes(before := whole[suffix].read_bytes()[:-300] if content == "half" else content)
    assert "remove it" in refusal(patchloom.embed, tiny, photos, to=path, **SMALL)
    assert path.read_bytes() == before


def test_refusals(tiny: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.npz").mkdir()
    np.savez(tmp_path / "mine.npz", vectors=np.zeros(3))
    (tmp_path / "mine.safetensors").write_bytes(tiny.read_bytes())
    for options, said in (
        ({"to": None}, "--to is missing: .* FILE.parquet"),
        ({"to": tmp_path / "f.npy"}, "no known suffix"),
        ({"to": tmp_path / "f.parquet", "format": "npz"}, "--format npz is not that of .*f.parquet"),
        ({"to": tmp_path / "file"}, "file of another kind"),
        ({"to": tmp_path}, "was not written by embed"),
        ({"to": tmp_path / "mine.npz"}, "was not written by embed"),
        ({"to": tmp_path / "mine.safetensors"}, "was not written by embed"),
        ({"to": tmp_path / "folder.npz"}, "is a folder"),
        ({"layer": 4}, "--layer 4 does not exist: .* block 1 to 3 and norm"),
        ({"layer": "first"}, "--layer first does not exist"),
        ({"top": 0}, "--top must be 1 or more"),
        ({"pooling": "prefix"}, "no register tokens for prefix"),
        ({"pooling": "instance"}, "no module beside it for instance"),
    ):
        assert re.search(said, refusal(patchloom.embed, tiny, photos, **{"to": tmp_path / "f.npz", **SMALL, **options}))
    monkeypatch.setattr(embed.shutil, "disk_usage", lambda folder: type("", (), {"free": 100})())
    for to in (tmp_path / "f.npz", tmp_path / "new" / "parts"):
        assert "has 0.0 MB free" in refusal(patchloom.embed, tiny, photos, to=to, **SMALL)
    assert not (tmp_path / "new").exists()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for to in (tmp_path / "f.parquet", tmp_path / "new"):
        assert "needs pyarrow: pip install" in refusal(patchloom.embed, tiny, photos, to=to, **SMALL)


def test_a_file_that_does_not_fit_in_memory(tiny: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    patchloom.embed(tiny, photos, to=tmp_path / "whole.npz", **SMALL)
    monkeypatch.setattr(embed, "free_memory", lambda device: 1e-6)
    near = {"near": photos / "train" / "b" / "5.png"}
    for name, options in (("f.npz", {}), ("whole.npz", near)):
        said = refusal(patchloom.embed, tiny, photos, to=tmp_path / name, **options, **SMALL)
        assert re.search("of memory as one file, .*: give a folder", said)
    assert [one.name for one in tmp_path.iterdir()] == ["whole.npz"]  # nothing was begun
    assert patchloom.embed(tiny, photos, to=tmp_path / "f", format="npz", **near, **SMALL).neighbours
    free = [4200, 4199]  # that of its vectors twice, and of each row
    monkeypatch.setattr(embed, "free_memory", lambda device: free.pop(0) / 2**30)
    embed.check_memory(Path("f.npz"), 100, 10)
    assert "of memory as one file" in refusal(embed.check_memory, Path("f.npz"), 100, 10)


@pytest.mark.parametrize("name", formats.COUNTS)
def test_a_card_without_its_counts_is_refused(whole, tmp_path: Path, name: str):
    path, card = tmp_path / "f.npz", formats.read_card(whole[".npz"])
    del card[name]
    formats.write_rows(path, formats.read_rows(whole[".npz"]), card)
    assert "was not written by embed" in refusal(formats.read_card, path)


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
    if suffix == ".parquet":
        assert len(pyarrow.parquet.read_table(tmp_path / "parts")) == 35  # a folder is one table
    again = patchloom.embed(tiny, photos, to=tmp_path / "parts", **SMALL)  # of the kind that is there
    assert not again.made and again.card == done.card and again.files == 6 and again.notes
    other = next(one for one in SUFFIXES if one != suffix)
    for options, said in (({"layer": 1}, "another layer"), ({"format": other[1:]}, f"has parts in {suffix}")):
        assert said in refusal(patchloom.embed, tiny, photos, to=tmp_path / "parts", **options, **SMALL)


def test_numbers_that_float16_cannot_hold(tiny: Path, photos: Path, tmp_path: Path):
    vit, card = load_encoder_file(tiny)
    vit.norm.weight.data *= 1e6
    save_encoder(vit, card, tmp_path / "large.safetensors")
    said = refusal(made, tmp_path, tmp_path / "large.safetensors", photos, dtype="float16")
    assert "beyond 65,504, which float16 cannot hold: leave out --dtype" in said
    assert np.abs(made(tmp_path / "1", tmp_path / "large.safetensors", photos).vectors).max() > 65504


def test_images_that_change_meanwhile(tiny: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numbers = count()
    monkeypatch.setattr(type(open_data(str(photos)).train), "fingerprint", lambda self: f"{next(numbers)}")
    said = refusal(made, tmp_path, tiny, photos)
    assert re.search("has changed while its images were read: remove .*f.npz.parts", said)
    assert not (tmp_path / "f.npz").exists()


def test_images_for_validation_are_embedded_too(tiny: Path, photos: Path, tmp_path: Path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    shutil.copytree(folder / "test", folder / "val")
    splits = made(tmp_path, tiny, folder).splits
    assert splits.count("val") == splits.count("test") > 0 and set(splits) == {"train", "test", "val"}
    digits = open_data("digits").train
    data = Data(digits.subset(range(4)), None, (), {"val": digits.subset(range(4, 6))})
    assert made(tmp_path / "none", tiny, data).splits == ["train"] * 4 + ["val"] * 2  # without a test split


def test_rows_of_a_table_are_embedded_in_its_order(whole, tiny: Path, photos: Path, tmp_path: Path):
    paths = sorted((photos / "test").glob("*/*.png"), key=lambda path: int(path.stem))  # a and b in turn
    splits = ["train"] * 5 + ["test"] * 2 + ["val"] * 3
    rows = [f"{path},{path.parent.name},{split}" for path, split in zip(paths, splits, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    found, kept = made(tmp_path, tiny, tmp_path / "table.csv"), read(whole[".npz"])
    assert found.splits == splits and [Path(path).name for path in found.paths] == [path.name for path in paths]
    by_path = dict(zip(kept.paths, kept.vectors, strict=True))
    np.testing.assert_allclose(found.vectors, [by_path[str(path.relative_to(photos))] for path in paths], atol=1e-5)


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


# Nearest neighbours against a plain search over all vectors.


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 11), np.uint8)).save(folder / "new.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("words")
    return folder


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_nearest_are_those_of_a_plain_search(tiny: Path, photos: Path, tmp_path: Path, monkeypatch, suffix: str):
    monkeypatch.setattr(formats, "_READ_BYTES", 7 * 4 * 16)  # so that seven rows are read at once
    near = photos / "train" / "b" / "5.png"
    done = patchloom.embed(tiny, photos, to=tmp_path / f"f{suffix}", near=near, top=6, **SMALL)
    found = read(tmp_path / f"f{suffix}")
    centred = found.vectors - found.vectors.mean(0)  # the stored ones stay raw
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    cosines = unit @ unit[found.paths.index("train/b/5.png")]
    order = np.argsort(-cosines, kind="stable")[:7]
    assert [one.path for one in done.neighbours] == [found.paths[i] for i in order]
    assert [one.label for one in done.neighbours] == [found.labels[i] for i in order]
    assert [one.split for one in done.neighbours] == [found.splits[i] for i in order]
    np.testing.assert_allclose([one.cosine for one in done.neighbours], cosines[order], atol=1e-5)
    assert [one.itself for one in done.neighbours] == [True] + [False] * 6
    assert [one.rank for one in done.neighbours] == [0, 1, 2, 3, 4, 5, 6]
    pairs = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
    expected = [np.mean(pairs >= cosines[i] - 1e-6) for i in order]
    np.testing.assert_allclose([one.as_near for one in done.neighbours], expected, atol=1.5 / len(pairs))


def test_the_nearest_in_a_folder_are_those_in_a_file(tiny: Path, photos: Path, tmp_path: Path):
    near = {"near": photos / "train" / "b" / "5.png", "top": 6}
    parts, file = (patchloom.embed(tiny, photos, to=tmp_path / to, **near, **SMALL) for to in ("parts", "f.parquet"))
    assert parts.files == 6 and parts.neighbours[0].itself
    for one, other in zip(parts.neighbours, file.neighbours, strict=True):
        assert one == other._replace(cosine=pytest.approx(other.cosine, abs=1e-6))


def test_a_copy_elsewhere_is_a_row_like_others(tiny: Path, photos: Path, tmp_path: Path):
    shutil.copy(photos / "train" / "b" / "5.png", tmp_path / "5.png")
    done = patchloom.embed(tiny, photos, to=tmp_path / "f.npz", near=tmp_path / "5.png", top=2, **SMALL)
    assert [(one.path, one.itself) for one in done.neighbours][0] == ("train/b/5.png", False)
    assert done.neighbours[0].cosine == pytest.approx(1, abs=1e-5) and len(done.neighbours) == 2


def test_of_many_rows_a_sample_is_the_scale(tiny: Path, photos: Path, tmp_path: Path, monkeypatch):
    near = {"near": photos / "train" / "b" / "5.png", "top": 100}
    whole = patchloom.embed(tiny, photos, to=tmp_path / "f.npz", **near, **SMALL)
    monkeypatch.setattr(search, "_SAMPLED", 20)
    monkeypatch.setattr(formats, "_READ_BYTES", 7 * 4 * 16)
    sampled = patchloom.embed(tiny, photos, to=tmp_path / "f.npz", **near, **SMALL)
    assert [one.path for one in sampled.neighbours] == [one.path for one in whole.neighbours]
    one, other = (np.array([row.as_near for row in done.neighbours]) for done in (sampled, whole))
    assert (one != other).any() and np.abs(one - other).max() < 0.2 and np.all(np.diff(one) >= 0)
    assert np.allclose(one * 190, np.round(one * 190), atol=1e-6)  # 190 pairs of 20 rows


def test_a_file_of_one_row_has_no_scale(tiny: Path, photos: Path, tmp_path: Path):
    near = tmp_path / "one" / "5.png"
    near.parent.mkdir()
    shutil.copy(photos / "train" / "b" / "5.png", near)
    done = patchloom.embed(tiny, near.parent, to=tmp_path / "f.npz", near=near, **SMALL)
    assert [one.itself for one in done.neighbours] == [True] and np.isnan(done.neighbours[0].as_near)
    assert "as near" not in done.table()[0]


def test_patch_tokens_are_compared_at_their_places(tiny: Path, photos: Path, tmp_path: Path):
    options = {"pooling": "patches", "dtype": "float16", "near": photos / "test" / "a" / "26.png", "top": 100}
    done = patchloom.embed(tiny, photos, to=tmp_path / "f.parquet", **options, **SMALL)
    flat = read(tmp_path / "f.parquet").vectors.astype(np.float32).reshape(35, -1)
    flat -= flat.mean(0)
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    assert len(done.neighbours) == 35 and done.neighbours[0].itself
    # of what only a machine's rounding could put elsewhere, the order is not asked for
    expected = np.sort(unit @ unit[read(tmp_path / "f.parquet").paths.index("test/a/26.png")])[::-1]
    np.testing.assert_allclose([one.cosine for one in done.neighbours], expected, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"near": "none.png"}, "--near .*no such file"),
        ({"near": "."}, "--near .*no such file"),
        ({"near": "notes.txt"}, "--near .*not an image"),
        ({"near": "broken.png"}, "--near .*cannot be read"),
        ({"picture": "a.png"}, "add --near"),
        ({"near": "new.png", "picture": "a.jpg"}, "ends in .png"),
        ({"near": "new.png", "picture": "a.png", "top": 21}, "lower --top 21"),
        ({"near": "new.png", "picture": "new.png"}, "would replace it"),
    ],
)
def test_what_cannot_be_searched_or_drawn_is_refused_first(tiny, photos, others, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(others)
    before = {path: path.read_bytes() for path in others.iterdir()}
    assert re.search(said, refusal(patchloom.embed, tiny, photos, to=tmp_path / "f.npz", **options, **SMALL))
    assert not [*tmp_path.iterdir()] and {path: path.read_bytes() for path in others.iterdir()} == before


def test_the_neighbours_are_drawn(tiny: Path, photos: Path, tmp_path: Path, monkeypatch):
    rows, draw = [], search.draw_tiles
    monkeypatch.setattr(search, "draw_tiles", lambda *args, **more: rows.extend(args[0].rows) or draw(*args, **more))
    out, near = tmp_path / "new" / "near.png", photos / "train" / "b" / "5.png"
    to = {"to": tmp_path / "f.npz", "top": 3, "picture": out, **SMALL}
    done = patchloom.embed(tiny, photos, near=near, **to)
    assert str(out) in str(done) and done.plain()["picture"] == str(out) and Image.open(out).width > 400
    ((query, *others),) = rows
    assert [tile.words for tile in others] == [f"{one.cosine:.3f}" for one in done.neighbours if not one.itself]
    again = patchloom.embed(tiny, photos, near=photos / done.neighbours[1].path, **to)
    assert again.neighbours[0].itself and (rows[1][0].picture == others[0].picture).all()
    assert (others[0].picture != query.picture).any()


def test_a_picture_replaces_no_image_of_the_data(tiny: Path, photos: Path, others: Path, tmp_path: Path):
    picture = photos / "train/b/5.png"
    before = picture.read_bytes()
    given = {"to": tmp_path / "f.npz", "near": others / "new.png", "picture": picture, **SMALL}
    assert "would replace it" in refusal(patchloom.embed, tiny, photos, **given)
    assert picture.read_bytes() == before and not (tmp_path / "f.npz").exists()


@pytest.mark.parametrize("to", ["f.npz", "parts/"])
def test_means_of_divided_files(tiny: Path, tmp_path: Path, to: str):
    rng = np.random.default_rng(0)
    for name in ("a#1/x", "b/x", "b/y"):
        path = tmp_path / f"slides/{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (16, 24), np.uint8)).save(path)
    given = {"to": tmp_path / to, **SMALL}
    data = f"{tmp_path}/slides@tile=8,blank=0"
    done = patchloom.embed(tiny, data, files=tmp_path / "files.npz", **given)
    assert done.plain()["files"] == str(tmp_path / "files.npz") and "mean vector of each file" in str(done)
    written = [read(tmp_path / to)] if to == "f.npz" else read_parts(tmp_path / to).values()
    windows = np.concatenate([one.vectors for one in written])
    found = read(tmp_path / "files.npz")
    assert found.paths == ["a#1/x.png", "b/x.png", "b/y.png"] and found.labels == ["a#1", "b", "b"]
    assert np.allclose(found.vectors, windows.reshape(3, 6, -1).mean(1), atol=1e-6)
    assert "another averaged" in refusal(patchloom.embed, tiny, data, **{**given, "to": tmp_path / "files.npz"})
    whole = {**given, "to": tmp_path / "whole.npz", "files": tmp_path / "w.npz"}
    assert "not divided" in refusal(patchloom.embed, tiny, f"{tmp_path}/slides", **whole)
    assert "a file of its own" in refusal(patchloom.embed, tiny, data, **whole | {"files": tmp_path / "whole.npz"})
    said = "another averaged" if to == "f.npz" else "a file of its own"
    assert said in refusal(patchloom.embed, tiny, data, **whole | {"files": done.file})
    assert not (tmp_path / "whole.npz").exists() and not (tmp_path / "w.npz").exists()
