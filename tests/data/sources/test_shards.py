"""Shards give the same pixels, batches and messages on broken images as files."""

import errno
import gzip
import io
import os
import pickle
import socket
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from encoding import encoded
from PIL import Image
from refusing import refusal, refused

from patchloom.data.augment import RandomCrop
from patchloom.data.cache import cache_images, choose_cache
from patchloom.data.decode import Unreadable
from patchloom.data.loader import training_batches
from patchloom.data.sources import shards
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.sources.urls import Shard, expand_braces, stat_shards
from patchloom.data.splits import hold_out
from patchloom.errors import PatchloomError, TemporaryError

CROP = RandomCrop((8, 8))
EACH = 5


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "_PAUSES", ())
    shards._asked.clear()
    return tmp_path / "cache" / "patchloom" / "shards"


def picture(number: int) -> bytes:
    return encoded(np.random.default_rng(number).integers(0, 256, (10, 12, 3), dtype=np.uint8))


def write(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def numbered(shard: int) -> dict[str, bytes]:
    """Members of shard number `shard`: images with labels 0, 1 and 2 in turn, and another file."""
    members = {}
    for i in range(shard * EACH, (shard + 1) * EACH):
        members |= {f"in/{i:04}.png": picture(i), f"in/{i:04}.cls": b"%d\n" % (i % 3), f"in/{i:04}.json": b"{}"}
    return members


@pytest.fixture
def folder(tmp_path) -> Path:
    for shard in range(4):
        write(tmp_path / "set" / f"a-{shard:02}.tar", numbered(shard))
    return tmp_path / "set"


def pixels_of(number: int) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(picture(number))))).permute(2, 0, 1)


def assert_whole(source, count: int = 4 * EACH) -> None:
    assert len(source) == count and source.classes == ("0", "1", "2")
    assert source.labels.tolist() == [i % 3 for i in range(count)] and source.labels.dtype == np.int64
    assert all(torch.equal(source.read(i), pixels_of(i)) for i in range(count))


def same(a, b) -> bool:
    return torch.equal(a.indices, b.indices) and torch.equal(a.views[0], b.views[0]) and a.unreadable == b.unreadable


@pytest.mark.parametrize("pattern", ["a-{00..03}.tar", "a-*.tar", "a-0{0,{1..3}}.tar", ""])
def test_samples_are_the_stored_images(folder, pattern, monkeypatch):
    monkeypatch.chdir(folder.parent)
    source = open_data(f"set/{pattern}").train
    assert_whole(source)
    assert source.describe(6) == f"{folder}/a-01.tar:in/0006.png" and source.name == f"set/{pattern}"
    monkeypatch.chdir("/")  # a source that is open does not depend on it
    assert_whole(pickle.loads(pickle.dumps(source)))
    assert len(open_data(str(folder / "a-00.tar")).train) == EACH


def test_one_member_of_a_sample_is_its_image(tmp_path):
    other = {"z.txt": b"no image", "._a.png": b"of a Mac", "deep/er.cls": b"0", "@eaDir/a.png/M.png": picture(3)}
    members = {"a.seg.png": picture(9), "a.png": picture(1), "a.npy": b"latents", "B.IMAGE.PNG": picture(2)}
    path = write(tmp_path / "x.tar", other | members)
    source = open_data(str(path)).train
    assert [source.describe(i).rpartition(":")[2] for i in range(len(source))] == ["a.png", "B.IMAGE.PNG"]
    assert torch.equal(source.read(1), pixels_of(2))
    write(path, members | {"B.mask.png": picture(3)})
    refused(str(path), r"several images in one sample \(B.IMAGE.PNG, B.mask.png\)")


def test_labels_are_numbers_or_words(tmp_path):
    def labels(*texts):
        named = {f"{i}.cls": text for i, text in enumerate(texts) if text is not None}
        images = {f"{i}.png": picture(i) for i in range(len(texts))}
        source = open_data(str(write(tmp_path / "x.tar", images | named))).train
        return source.classes, None if source.labels is None else source.labels.tolist()

    assert labels(b"10", b"9", b"009", None) == (("9", "10"), [1, 0, 0, -1])
    assert labels(b"dog", b" cat\n", b"") == (("cat", "dog"), [1, 0, -1])
    assert labels(None, None) == ((), None)
    with pytest.raises(PatchloomError, match="mixes labels: .*number 1 and .*word cat"):
        labels(b"1", b"cat")


@pytest.mark.parametrize(
    "pattern, first, count, last",
    [
        ("a{000..012}.tar", "a000.tar", 13, "a012.tar"),
        ("{8..11}", "8", 4, "11"),
        ("{3..1}{a,b}", "3a", 6, "1b"),
        ("{0..9..4}", "0", 3, "8"),
        ("{a,b{1,2}}", "a", 3, "b2"),
        ("awk '{print $1}' ${V}{1..2}", "awk '{print $1}' ${V}1", 2, "awk '{print $1}' ${V}2"),
        ("x{", "x{", 1, "x{"),
        ("}a{b", "}a{b", 1, "}a{b"),
    ],
)
def test_braces(pattern, first, count, last):
    found = expand_braces(pattern)
    assert (found[0], len(found), found[-1]) == (first, count, last)


def laid_out(counts: list[int]) -> shards.Shards:
    """Shards with these numbers of images, whose images cannot be read."""
    numbers = np.repeat(np.arange(len(counts)), counts)
    made = [Shard(f"/{i}.tar", "", 0, True) for i in range(len(counts))]
    at = np.stack([numbers, numbers, numbers], 1)
    return shards.Shards("none", made, [""] * len(numbers), at)


def test_the_order_is_a_permutation_of_a_few_shards_at_a_time():
    source = laid_out([40] * 50)
    order = source.order(np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(2000))
    assert (order == source.order(np.random.default_rng(0))).all()
    assert (order != source.order(np.random.default_rng(1))).any()
    active = [len(set(source.at[order[start : start + 40], 0].tolist())) for start in range(0, 2000, 40)]
    assert max(active) <= shards.WINDOW + 2 and min(active) >= shards.WINDOW - 2  # at the beginning, too
    # on a circle, since the first images are from the same shards as the last ones
    for shard in range(50):
        places = np.sort(np.flatnonzero(source.at[order, 0] == shard))
        gaps = np.diff([*places, places[0] + 2000])
        assert 2000 - gaps.max() <= 40 * (shards.WINDOW + 2)


def test_a_subset_keeps_the_order_local_and_other_sources_keep_theirs():
    source = laid_out([40] * 50)
    training, held = hold_out(source, 0.5, max_images=2000)
    part = training.subset(np.arange(len(training))[::-1])
    order = part.order(np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(1000))
    number = source.at[training.indices[::-1][order], 0]
    assert max(len(set(number[start : start + 20].tolist())) for start in range(0, 1000, 20)) <= shards.WINDOW + 3
    shapes = Shapes(30)
    for one in (shapes, shapes.subset([3, 1, 2, 9, 9]), shapes.subset(range(20)).subset([4, 5, 6])):
        expected = np.random.default_rng((7, 0, 3)).permutation(len(one))
        assert one.order(np.random.default_rng((7, 0, 3))).tolist() == expected.tolist()


def test_batches_depend_on_neither_workers_nor_the_first_step(folder, cache):
    source = hold_out(open_data(f"pipe:cat {folder}/a-{{00..03}}.tar").train)[0]
    full = list(training_batches(source, CROP, 4, 7, 0, 9))
    assert len(set(torch.cat([batch.indices for batch in full[:4]]).tolist())) == 16
    for path in (cache / "fetched").glob("*.tar"):
        path.unlink()  # now it is the workers who fetch
    tail = list(training_batches(source, CROP, 4, 7, 3, 9, workers=2))
    assert len(tail) == 6 and all(map(same, tail, full[3:]))
    assert len(list((cache / "fetched").glob("*.tar"))) == 4
    local = hold_out(open_data(str(folder)).train)[0]
    assert all(map(same, training_batches(local, CROP, 4, 7, 0, 9), full))


def intact_shard(tmp_path) -> bytes:
    return write(tmp_path / "whole.tar", numbered(0)).read_bytes()


def border(content: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return tar.getmembers()[-2].offset


DAMAGES = {
    "cut in a member": lambda content: content[: border(content) + 700],
    "cut between members": lambda content: content[: border(content)],
    "cut in a header": lambda content: content[: border(content) + 100],
    "another header": lambda content: content.replace(b"in/0003.cls", b"in/0003.xls"),
    "joined with another": lambda content: content.rstrip(b"\0") + bytes(1536) + content,
    "nothing": lambda content: b"",
    "no tar": lambda content: b"hello" * 500,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_at_opening(tmp_path, damage):
    path = tmp_path / "broken.tar"
    path.write_bytes(DAMAGES[damage](intact_shard(tmp_path)))
    refused(str(path), f"^{path} is .*(damaged|cut off).*make it again$")
    path.write_bytes(intact_shard(tmp_path))
    source = open_data(str(path)).train
    assert len(source) == EACH
    path.write_bytes(path.read_bytes()[:1024])
    with pytest.raises(Unreadable, match="in/0004.png.*cut off"):
        source.read(4)


@pytest.mark.parametrize("size", [-512, -1024, -(2**40)])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, b"S"])
def test_a_member_of_negative_size_is_refused(size, kind, folder, tmp_path, ends):
    """tarfile would go back by its size, and read the same members for ever."""
    member = tarfile.TarInfo("x.png")
    member.type = kind
    head = bytearray(member.tobuf(tarfile.USTAR_FORMAT)[:512])
    head[124:136] = b"\xff" * 4 + size.to_bytes(8, "big", signed=True)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    whole = next(iter(sorted(folder.glob("*.tar")))).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        end = tar.getmembers()[-1].offset
    path = tmp_path / "x.tar"
    path.write_bytes(whole[:end] + head + bytes(20 * 512))
    refused(str(path), "damaged")


def test_a_compressed_shard_is_refused_and_the_command_helps(tmp_path, ends):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(intact_shard(tmp_path)))
    refused(str(path), "compressed.*pipe:gzip")
    source = open_data(f"pipe:gzip -dc {path}").train
    assert_whole(source, EACH)
    assert source.contents() is None
    assert "cannot be detected" in refusal(cache_images, source, "whole")
    os.mkfifo(tmp_path / "x.tar")
    refused(str(tmp_path / "x.tar"), "not a file")


def test_an_index_is_made_once_and_again_for_a_shard_that_changed(folder, monkeypatch):
    read, plain = [], shards.read_index
    monkeypatch.setattr(shards, "read_index", lambda file, name: read.append(Path(name).name) or plain(file, name))
    first = open_data(str(folder)).train
    assert sorted(read) == [f"a-{i:02}.tar" for i in range(4)]
    again, before = open_data(str(folder)).train, first.stamp()
    assert len(read) == 4 and again.fingerprint() == first.fingerprint() and again.stamp() == before
    write(folder / "a-02.tar", numbered(7))
    changed = open_data(str(folder)).train
    assert read[4:] == ["a-02.tar"] and torch.equal(changed.read(2 * EACH), pixels_of(7 * EACH))
    assert changed.fingerprint() != first.fingerprint()
    assert changed.stamp() != before != first.stamp()  # which is about what is there now


def test_a_damaged_index_is_made_again_and_a_moved_folder_keeps_its_fingerprint(folder, cache):
    before = open_data(str(folder)).train.fingerprint()
    for path in (cache / "index").iterdir():
        path.write_text(path.read_text()[:50])
    assert_whole(open_data(str(folder)).train)
    assert open_data(str(folder.rename(folder.with_name("moved")))).train.fingerprint() == before


@pytest.fixture
def memory(folder) -> str:
    fs = fsspec.filesystem("memory")
    for path in folder.iterdir():
        fs.pipe(f"/set/{path.name}", path.read_bytes())
    yield "memory://set"
    fs.store.clear()


@pytest.mark.parametrize(
    "address",
    ["memory://set/a-*.tar", "memory://set/a-{00..03}.tar", "file://SET/a-*.tar", "zip://a-*.tar::file://SET/all.zip"],
)
def test_addresses_that_fsspec_knows(memory, folder, cache, address):
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for path in folder.glob("*.tar"):
            archive.write(path, path.name)
    for _ in range(2):
        assert_whole(open_data(address.replace("SET", str(folder))).train)
        fetched = [*(cache / "fetched").glob("*.tar")]
        assert len(fetched) == (0 if address.startswith("file:") else 4)
        for path in fetched:
            path.unlink()


def test_a_remote_shard_that_changes(memory):
    source = open_data(f"{memory}/a-*.tar").train
    stamp, fingerprint = source.stamp(), source.fingerprint()
    fs = fsspec.filesystem("memory")
    fs.pipe("/set/a-01.tar", fs.cat("/set/a-00.tar"))
    assert source.stamp() != stamp and open_data(f"{memory}/a-*.tar").train.fingerprint() != fingerprint
    shards.cached_path(source.shards[1]).unlink()
    shards._asked[source.shards[1].address] = shards._FEW
    with pytest.raises(Unreadable, match=r"^memory://set/a-01.tar:in/0005.png.*changed since it was opened"):
        source.read(EACH)


def test_a_few_images_are_fetched_without_the_whole_shard(memory, cache, monkeypatch):
    source = open_data(f"{memory}/a-*.tar").train
    here = cache / "fetched"
    for path in here.glob("*.tar"):
        path.unlink()
    for i in range(shards._FEW):
        assert torch.equal(source.read(i), pixels_of(i)) and not list(here.glob("*.tar"))
    assert torch.equal(source.read(shards._FEW), pixels_of(shards._FEW)) and len(list(here.glob("*.tar"))) == 1
    for address in range(shards._REMEMBERED):
        assert shards._seldom(str(address))
    assert shards._seldom(source.shards[0].address)  # forgotten meanwhile
    shards.cached_path(source.shards[0]).unlink()
    monkeypatch.setattr(fsspec.filesystem("memory"), "cat_file", lambda path, **part: bytes(99999), raising=False)
    assert torch.equal(source.read(2), pixels_of(2)), "a server without ranges works"


def test_the_cache_of_fetched_shards_is_bounded(memory, cache, monkeypatch):
    size = fsspec.filesystem("memory").size("/set/a-00.tar")
    source = open_data(f"{memory}/a-*.tar").train
    monkeypatch.setenv(shards.ROOM, str(2.5 * size / 1e9))
    for number, shard in enumerate(source.shards):
        shards._asked[shard.address] = shards._FEW
        if shards.cached_path(shard).exists():
            os.utime(shards.cached_path(shard), (number + 1, number + 1))
    shards.cached_path(source.shards[3]).unlink()
    source.read(0)  # so that the first was used lately
    source.read(3 * EACH)
    left = [number for number, shard in enumerate(source.shards) if shards.cached_path(shard).exists()]
    assert left == [0, 3]
    assert_whole(source)
    assert sum(path.stat().st_size for path in (cache / "fetched").glob("*.tar")) <= 2.5 * size


def test_too_small_a_cache_is_refused_on_opening(memory, folder, tmp_path, monkeypatch):
    monkeypatch.setenv(shards.ROOM, "1e-5")
    refused(f"{memory}/a-*.tar", f"1e-05 GB are allowed: raise {shards.ROOM}")

    def fetching():
        return [thread for thread in threading.enumerate() if thread.name != "waiting"]  # which prints messages

    before, slow = fetching(), f"echo >> {tmp_path}/log; sleep 0.05; cat {folder}/a-00.tar; : {{0..99}}"
    error = refused(f"pipe:{slow}", f"1e-05 GB are allowed: raise {shards.ROOM}")
    assert error.__traceback__ and fetching() == before, "threads end, though the traceback holds all that was there"
    assert len((tmp_path / "log").read_text()) < 100
    assert_whole(open_data(str(folder)).train)  # needs none
    monkeypatch.setenv(shards.ROOM, "much")
    refused(f"{memory}/a-*.tar", f"^{shards.ROOM} is much")


def test_a_shard_is_fetched_once_for_concurrent_readers(folder, tmp_path):
    shard = Shard(f"pipe:echo asked >> {tmp_path}/log; sleep 0.1; cat {folder}/a-00.tar", "", 0, False)
    with ThreadPoolExecutor(6) as pool:
        parts = set(pool.map(lambda _: shards.read_range(shard, 512, 100), range(6)))
    assert parts == {(folder / "a-00.tar").read_bytes()[512:612]}
    assert (tmp_path / "log").read_text() == "asked\n"


@pytest.mark.parametrize("told", ["ETag", "Last-Modified", "mtime", "none of these"])
def test_the_state_of_a_shard_is_that_of_its_server(memory, monkeypatch, told):
    info = {"size": 7, "type": "file", told: "x"}
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", lambda fs, path: info)
    (shard,) = stat_shards(["memory://set/a-00.tar"])
    assert shard.size == 7 and shard.certain == (told != "none of these") == ("x" in shard.state)


def test_a_command_that_fails_leaves_nothing(folder, cache):
    for command, reason in ((f"cat {folder}/gone.tar", "No such file"), (f"cat {folder}/a-00.tar; exit 3", "code 3")):
        refused(f"pipe:{command}", f"^pipe:cat .* cannot be fetched: .*{reason}")
    assert {path.suffix for path in (cache / "fetched").iterdir()} == {".lock"}


@pytest.mark.parametrize(
    "command, code, kind",
    [
        ("curl -sf 'https://host/a.tar?b&c'", 7, TemporaryError),
        ("curl -sf https://host/a.tar", 6, PatchloomError),  # no such host
        ("curl -sf https://host/a.tar; exit 7", 0, PatchloomError),  # not curl's
        ("wget -q -O - https://host/a.tar", 4, TemporaryError),
        ("other https://host/a.tar", 7, PatchloomError),
        ("other https://host/a.tar", 75, TemporaryError),
        ("other '", 0, PatchloomError),
    ],
)
def test_a_command_that_reaches_no_host_may_be_repeated(tmp_path, monkeypatch, command, code, kind):
    for name in ("curl", "wget", "other"):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert type(refused(f"pipe:{command}", "cannot be fetched")) is kind


def test_downloads_of_another_length_are_refused(folder):
    source = open_data(f"pipe:cat {folder}/a-00.tar").train
    shards.cached_path(source.shards[0]).unlink()
    path = folder / "a-00.tar"
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(Unreadable, match="in/0000.png: .* cannot be fetched: 19,968 bytes came instead of 20,480"):
        source.read(0)
    assert not list(shards.shard_cache().glob("*.tar"))


def test_a_short_outage_is_retried(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_PAUSES", (0, 0))
    command = f"echo >> {tmp_path}/log; test $(wc -l < {tmp_path}/log) = 3 && cat {folder}/a-00.tar"
    assert_whole(open_data(f"pipe:{command}").train, EACH)


def test_a_host_that_resets_a_download_may_be_asked_again(memory, monkeypatch):
    def reset(*_, **__):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", reset)
    assert type(refused(f"{memory}/a-*.tar", "a-00.tar cannot be fetched: .*reset")) is TemporaryError


@pytest.mark.parametrize("remote", [False, True])
def test_a_missing_shard_costs_only_its_images(folder, memory, remote):
    source = open_data(f"{memory}/a-*.tar" if remote else str(folder)).train
    lost = source.shards[1]
    if remote:
        fsspec.filesystem("memory").rm("/set/a-01.tar")
        shards.cached_path(lost).unlink()
    else:
        os.unlink(lost.address)
    with pytest.raises(Unreadable, match=f"^{lost.address}:in/0005.png"):
        source.read(EACH)
    assert choose_cache(source, 0) == ("none", "changes of the images cannot be detected")
    batches = list(training_batches(source, CROP, 4, 0, 0, 5))
    assert not set(torch.cat([batch.indices for batch in batches]).tolist()) & set(range(EACH, 2 * EACH))
    assert {name for batch in batches for name in batch.unreadable} == {source.describe(i) for i in range(5, 10)}


def test_a_folder_of_shards_and_its_splits(tmp_path):
    root = tmp_path / "data"
    for name, number in (("train-0.tar", 0), ("train-1.tar", 1), ("val-0.tar", 2), ("extra-0.tar", 3)):
        write(root / name, numbered(number))
    (root / "README.md").write_text("x")
    (root / "lost+found").mkdir()  # a folder of another program, which does not count
    (root / "lost+found" / "1.png").write_bytes(picture(0))
    data = open_data(str(root))
    assert_whole(data.train, 2 * EACH)
    assert len(data.test) == EACH and data.test.classes == data.train.classes and not data.others
    assert torch.equal(data.test.read(1), pixels_of(2 * EACH + 1))
    (note,) = data.notes
    assert all(one in note for one in ("train (2 shards)", "val (1 shard) is the test", "extra (1 shard) is neither"))
    write(root / "test-0.tar", numbered(4))
    write(root / "val-1.tar", {"a.png": picture(1), "a.cls": b"7"})
    data = open_data(str(root))
    assert torch.equal(data.test.read(1), pixels_of(4 * EACH + 1)) and data.others.keys() == {"val"}
    val = data.others["val"]  # the last one has a class that is not trained on
    assert torch.equal(val.read(1), pixels_of(2 * EACH + 1)) and val.labels.tolist() == [1, 2, 0, 1, 2, -1]
    (root / "test-0.tar").unlink()
    refused(str(root), "has the class 7 in val but not in train")
    (root / "val-1.tar").rename(root / "dev-1.tar")  # another word for it
    (root / "val-0.tar").rename(root / "validation-0.tar")
    assert len(open_data(str(root)).test) == EACH
    for name in ("validation-0.tar", "dev-1.tar"):
        (root / name).unlink()
    data = open_data(str(root))
    assert data.test is None and len(data.train) == 3 * EACH
    (root / "beside.png").write_bytes(picture(0))
    assert len(open_data(str(root)).train) == 1  # an ordinary folder, in which other files are ignored


@pytest.mark.parametrize(
    "data, sentence",
    [
        ("gone-{0..3}.tar", "there is no shard .*gone-0.tar"),
        ("gone-*.tar", "there is no shard .*gone-"),
        ("memory://gone/*.tar", "there is no shard memory://gone/"),
        ("memory://gone/1.tar", "nothing was found there"),
        ("memory://set", "memory://set is a folder"),
        ("nonesuch://x.tar", "nonesuch"),
        ("farstore://x.tar", "^farstore://x.tar needs another package"),
        ("text.tar", "no sample has an image"),
    ],
)
def test_errors_say_what_to_do(memory, tmp_path, monkeypatch, data, sentence):
    fsspec.register_implementation("farstore", "farstore_fs.Farstore", clobber=True, errtxt="Install farstore_fs")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "text.tar", {"a.txt": b"x", "a.cls": b"1"})
    refused(data, sentence)


@pytest.fixture
def server():
    """Address of a server that answers with the state in the path, such as /503/a.tar."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(int(self.path.split("/")[1]))

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as found:
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


@pytest.mark.parametrize(
    "state, kind, sentence",
    [
        (404, PatchloomError, "nothing was found there"),
        (403, PatchloomError, "opened: 403"),
        (503, TemporaryError, "opened: 503"),
        (None, TemporaryError, "opened: the connection was refused"),
    ],
)
def test_what_a_server_answers_is_said(server, state, kind, sentence):
    with socket.socket() as free:  # bound, and not listening
        free.bind(("127.0.0.1", 0))
        address = f"{server}/{state}/a.tar" if state else f"http://127.0.0.1:{free.getsockname()[1]}/a.tar"
        with pytest.raises(PatchloomError, match=sentence) as caught:
            open_data(address)
    assert type(caught.value) is kind and ("nothing was found" in str(caught.value)) == (state == 404)
