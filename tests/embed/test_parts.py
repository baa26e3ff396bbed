"""Tests of interrupted and parallel embedding: the result has the same bytes."""

from __future__ import annotations

import re
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from embedding import SMALL, SUFFIXES, embed_apart, embed_together, read, read_parts
from refusing import refusal

import patchloom
from patchloom.data.decode import Unreadable
from patchloom.data.source import Data, Source
from patchloom.embed import parts as parts_module
from patchloom.embed.formats import Rows, iterate_rows, read_card, read_rows, write_rows
from patchloom.embed.parts import PartFolder, PartWriter
from patchloom.evaluate import settings


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_at_any_instant_it_ends_with_the_same_bytes(tiny: Path, photos: Path, tmp_path: Path, suffix: str):
    patchloom.embed(tiny, photos, to=tmp_path / "whole" / f"f{suffix}", **SMALL)
    expected = (tmp_path / "whole" / f"f{suffix}").read_bytes()
    to = tmp_path / "killed" / f"f{suffix}"
    # Files get their names in this order: the card, six parts, the card with the counts, the file beside the parts, and
    # in its place. The first start is killed amid the first split, the next ones as the second split begins, before the
    # whole file has its name, and before it is moved; of npz alone, as processes take their time.
    for event in (4, 2, 4, 3) if suffix == ".npz" else (7, 3):
        assert embed_apart(tiny, photos, to, event) is None and not to.exists()
    patchloom.embed(tiny, photos, to=to, **SMALL)
    assert to.read_bytes() == expected
    assert [one.name for one in to.parent.iterdir()] == [to.name]  # no part is left, nor half of a file


def test_parts_that_are_there_are_not_computed_again(tiny: Path, photos: Path, tmp_path: Path, capsys):
    patchloom.embed(tiny, photos, to=tmp_path / "whole", **SMALL)
    there = sorted(stopped(tiny, photos, tmp_path / "f").glob("[!.]*-*"))
    assert len(there) == 3
    there.pop(1).unlink()  # as where another process was slower
    before = [path.stat().st_mtime_ns for path in there]
    patchloom.embed(tiny, photos, to=tmp_path / "f", **SMALL)
    assert [path.stat().st_mtime_ns for path in there] == before
    assert "16 of them are already done" in capsys.readouterr().out
    for path in (tmp_path / "whole").glob("[!.]*"):
        assert path.read_bytes() == (tmp_path / "f" / path.name).read_bytes()


def stopped(tiny: Path, photos: Path, to: Path) -> Path:
    write = PartFolder.write

    def stopping(self, part, *given):
        if len([*self.folder.glob("[!.]*-*")]) == 3:
            raise KeyboardInterrupt
        write(self, part, *given)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PartFolder, "write", stopping)
        patchloom.embed(tiny, photos, to=to, **SMALL)
    return to.with_name(f"{to.name}.parts") if to.suffix else to


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_parts_of_another_command_are_left_alone(tiny: Path, photos: Path, tmp_path: Path, suffix: str):
    to = tmp_path / f"f{suffix}"
    folder = stopped(tiny, photos, to)
    before = {path: path.read_bytes() for path in folder.glob("[!.]*")}
    assert len(before) == 4
    assert "another layer: repeat that command" in refusal(patchloom.embed, tiny, photos, to=to, layer=1, **SMALL)
    part = max(before)
    patchloom.embed(tiny, photos, to=tmp_path / f"other{suffix}", layer=1, **SMALL)
    for content, said in (
        (b"damaged", "cannot be read as vectors"),
        (before[part][:-300], "cannot be read as vectors"),
        ((tmp_path / f"other{suffix}").read_bytes(), f"{part.name} was made by a command with another layer"),
    ):
        part.write_bytes(content)
        assert said in refusal(patchloom.embed, tiny, photos, to=to, **SMALL)
        assert before | {part: content} == {path: path.read_bytes() for path in folder.glob("[!.]*")}
    part.unlink()
    patchloom.embed(tiny, photos, to=to, **SMALL)


def test_a_part_with_other_rows_than_it_says(tiny: Path, photos: Path, tmp_path: Path):
    part = min(stopped(tiny, photos, tmp_path / "f.npz").glob("[!.]*-*"))
    table = read_rows(part)
    write_rows(part, Rows(*(column[:3] for column in table)), read_card(part))
    said = refusal(patchloom.embed, tiny, photos, to=tmp_path / "f.npz", **SMALL)
    assert "does not have the 8 vectors of its card" in said


def test_two_at_once(tiny: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts_module, "_WAIT", 0.01)
    with _folder(tmp_path / "f.npz.parts", ".npz", _Few(4, ()), 2, 4).locked():
        said = refusal(patchloom.embed, tiny, photos, to=tmp_path / "f.npz", **SMALL)
        assert re.search("another process is writing .*f.npz.parts: wait until it ends", said)


def _folder(folder: Path, suffix: str, source: Source, width: int, batch: int) -> PartFolder:
    card = dict.fromkeys(("encoder", "preprocessing", "computed"), {})
    card |= {"data": {"splits": {"all": len(source)}, "fingerprint": {"all": source.fingerprint()}}}
    card |= {"dtype": "float32", "shape": [width], "classes": []}
    return PartFolder(folder, suffix, {"all": source}, card, batch)


@pytest.mark.parametrize("to", ["f.npz", pytest.param("parts", marks=pytest.mark.slow)])
def test_several_processes_write_what_one_does(tiny: Path, photos: Path, tmp_path: Path, to: str):
    patchloom.embed(tiny, photos, to=tmp_path / "whole" / to, **SMALL)
    ended = embed_together(tiny, photos, tmp_path / "together" / to, 3)
    assert [one.code for one in ended] == [0, 0, 0] and [one.written for one in ended] == [2, 2, 2]
    assert [one.made for one in ended] == [True] * 3  # all of them are told the result
    for path in (tmp_path / "whole").glob("**/[!.]*.*"):
        assert path.read_bytes() == (tmp_path / "together" / path.relative_to(tmp_path / "whole")).read_bytes()
    assert len([*(tmp_path / "together").iterdir()]) == 1


@pytest.mark.slow
def test_if_one_process_fails_the_others_keep_their_parts(tiny: Path, photos: Path, tmp_path: Path):
    ended = embed_together(tiny, photos, tmp_path / "parts", 3, failing={1: 1})
    assert [one.code for one in ended] == [2, 2, 2] and [one.written for one in ended] == [2, 0, 2]
    assert [one.told for one in ended] == ["another", "PatchloomError: no", "another"]
    assert len(read_parts(tmp_path / "parts")) == 4
    patchloom.embed(tiny, photos, to=tmp_path / "parts", **SMALL)


@pytest.mark.slow
def test_if_one_process_is_killed_the_others_end(tiny: Path, photos: Path, tmp_path: Path):
    first, killed = embed_together(tiny, photos, tmp_path / "f.npz", 2, failing={1: signal.SIGKILL})
    assert (first.code, first.written, killed.code) == (2, 3, -1)
    assert "another process has died" in first.told
    assert len(read_parts(tmp_path / "f.npz.parts")) == 3


class _Few(Source):
    """Source of grey images of 8 pixels, some of them unreadable."""

    name = "few"

    def __init__(self, count: int, broken: tuple[int, ...]) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def read(self, i: int) -> torch.Tensor:
        if i in self.broken:
            raise Unreadable("broken")
        return torch.full((1, 8, 8), i, dtype=torch.uint8)

    def fingerprint(self) -> str:
        return "0" * 16


def test_nothing_readable_is_left(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Resuming among unreadable images gives the same file as an uninterrupted command."""
    few = _Few(30, (*range(3, 11), *range(20, 30)))  # parts without any, in the middle and at the end
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(few, None))
    done = patchloom.embed(tiny, "few", to=tmp_path / "whole.npz", **SMALL)
    assert (done.card["rows"], done.card["unreadable"]) == (12, 18)
    assert done.notes == ("18 images could not be read and were left out, such as few #3.",)
    assert read(tmp_path / "whole.npz").paths == [f"few #{i}" for i in range(30) if i not in few.broken]
    for gone in ([-4, -3, -2, -1], [-2, -1], [1], [0, 3]):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
            patch.setattr(PartFolder, "finish", None)  # as killed before the end
            patchloom.embed(tiny, "few", to=tmp_path / "f.npz", **SMALL)
        there = sorted((tmp_path / "f.npz.parts").glob("all-*"))
        for i in gone:
            there[i].unlink()
        patchloom.embed(tiny, "few", to=tmp_path / "f.npz", **SMALL)
        assert (tmp_path / "f.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
        (tmp_path / "f.npz").unlink()
    few.broken = tuple(range(30))
    said = refusal(patchloom.embed, tiny, "few", to=tmp_path / "f.npz", **SMALL)
    assert "nothing in few could be read, beginning with few #0" in said


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_does_not_grow_with_the_images(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch):
    """Writing and reading 20 MB of vectors in parts needs less than 6 MB of memory."""
    monkeypatch.setattr(parts_module, "ROWS", 1024)
    n, width, batch = 20 * 1024, 256, 256
    folder = _folder(tmp_path / "parts", suffix, _Few(n, ()), width, batch)
    arrow = pyarrow.total_allocated_bytes()
    rows_in_arrow = 0
    tracemalloc.start()
    try:
        with folder.locked():
            writer = PartWriter(folder, folder.missing())
            folder.begin()
            for start in range(0, n, batch):
                writer.add(np.arange(start, start + batch), np.full((batch, width), start, np.float32))
            writer.finish()
            folder.finish()
        total = 0
        for some in iterate_rows([part.path for part in folder.all]):
            assert (
                some.paths[0] == f"few #{total}"
                and some.vectors[-1, 0] == (total + len(some.paths) - 1) // batch * batch
            )
            total += len(some.paths)
            rows_in_arrow = max(rows_in_arrow, pyarrow.total_allocated_bytes() - arrow)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == n and folder.size > 4 * n * width
    assert peak < 6e6 and rows_in_arrow < 6e6, (peak, rows_in_arrow)
