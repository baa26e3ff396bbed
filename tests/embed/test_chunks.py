"""A kill costs a part: the same command goes on, to the same bytes; and nothing of all vectors' size is ever held."""

from __future__ import annotations

import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from embedding import ROWS, SMALL, SUFFIXES, embed_apart, read

import patchloom
from patchloom.data.decode import Unreadable
from patchloom.data.source import Source
from patchloom.embed import chunks as parts_module
from patchloom.embed.chunks import PartWriter, Rows, VectorParts
from patchloom.embed.formats import FORMATS, read_chunks
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import each_batch
from patchloom.nets.checkpoints.format import load_encoder_file


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_at_any_instant_it_ends_with_the_same_bytes(tiny: Path, photos: Path, tmp_path: Path, suffix: str):
    patchloom.embed(tiny, photos, to=tmp_path / "whole" / f"f{suffix}", **SMALL)
    expected = (tmp_path / "whole" / f"f{suffix}").read_bytes()
    to = tmp_path / "killed" / f"f{suffix}"
    # Each start locks the folder and writes the card, three events; then come the parts that are missing of six, two
    # events each; then the file is written beside, and moved. Of npz the kills are amid the first split, as the second
    # one begins, before the whole file has its name, and before it is moved; of the others amid parts and file.
    for event in (5, 9, 8, 9, 6) if suffix == ".npz" else (15, 6):
        assert embed_apart(tiny, photos, to, event) is None and not to.exists()
    patchloom.embed(tiny, photos, to=to, **SMALL)
    assert to.read_bytes() == expected
    assert [one.name for one in to.parent.iterdir()] == [to.name]  # no part is left, nor half of a file


def test_what_is_there_is_not_computed_again(tiny: Path, photos: Path, tmp_path: Path, capsys, monkeypatch):
    assert embed_apart(tiny, photos, tmp_path / "f.npz", event=11) is None
    there = sorted((tmp_path / "f.npz.parts").glob("*-*.safetensors"))
    assert 1 < len(there) < 6
    read_again: list[str] = []
    monkeypatch.setattr(parts_module.VectorParts, "write", _recorded(parts_module.VectorParts.write, read_again))
    patchloom.embed(tiny, photos, to=tmp_path / "f.npz", **SMALL)
    assert len(read_again) == 6 - len(there) and not {path.name for path in there} & {*read_again}
    done = min(26, ROWS * len(there))
    assert f"{done} of them are done already, by this command when it was stopped." in capsys.readouterr().out


def _recorded(write, record: list[str]):
    def recording(self, part, *given):
        record.append(part.path.name)
        write(self, part, *given)

    return recording


def test_parts_of_another_command_are_left_alone(tiny: Path, photos: Path, tmp_path: Path):
    assert embed_apart(tiny, photos, tmp_path / "f.npz", event=11) is None
    before = sorted((tmp_path / "f.npz.parts").iterdir())
    with pytest.raises(PatchloomError, match="holds what a command with another layer began: repeat that command"):
        patchloom.embed(tiny, photos, to=tmp_path / "f.npz", layer=1, **SMALL)
    assert sorted((tmp_path / "f.npz.parts").iterdir()) == before
    before[-1].write_bytes(b"damaged")
    with pytest.raises(PatchloomError, match="cannot be read .*: remove it, and give the same command again"):
        patchloom.embed(tiny, photos, to=tmp_path / "f.npz", **SMALL)
    before[-1].unlink()
    patchloom.embed(tiny, photos, to=tmp_path / "f.npz", **SMALL)


def test_two_at_once(tiny: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts_module, "_WAIT", 0.01)
    of_another = VectorParts(tmp_path / "f.npz", {"all": _Few(4, ())}, (2,), np.dtype(np.float32), 4)
    with of_another.locked():
        with pytest.raises(PatchloomError, match="another process is writing .*f.npz.parts: wait for its end"):
            patchloom.embed(tiny, photos, to=tmp_path / "f.npz", **SMALL)


class _Few(Source):
    """Grey images of 8 pixels, of which some cannot be read."""

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
    """Where a pass goes on amid images none of which can be read, the file is as if it had not been stopped."""
    from patchloom.data.source import Data
    from patchloom.evaluate import settings

    few = _Few(30, (*range(3, 11), *range(20, 30)))  # parts without any, in the middle and at the end
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(few, None))
    done = patchloom.embed(tiny, "few", to=tmp_path / "whole.npz", **SMALL)
    assert (done.card["rows"], done.card["unreadable"]) == (12, 18)
    assert done.notes == ("18 images could not be read and were left out, such as few #3.",)
    assert read(tmp_path / "whole.npz").paths == [f"few #{i}" for i in range(30) if i not in few.broken]
    join = Rows.of

    def killed(*given):
        raise KeyboardInterrupt

    for left in (4, 3, 2, 1):
        monkeypatch.setattr(Rows, "of", killed)
        with pytest.raises(KeyboardInterrupt):
            patchloom.embed(tiny, "few", to=tmp_path / "f.npz", **SMALL)
        for path in sorted((tmp_path / "f.npz.parts").glob("all-*"))[-left:]:
            path.unlink()
        monkeypatch.setattr(Rows, "of", join)
        patchloom.embed(tiny, "few", to=tmp_path / "f.npz", **SMALL)
        assert (tmp_path / "f.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
        (tmp_path / "f.npz").unlink()
    few.broken = tuple(range(30))
    with pytest.raises(PatchloomError, match="nothing in few could be read, beginning with few #0"):
        patchloom.embed(tiny, "few", to=tmp_path / "f.npz", **SMALL)


def test_a_pass_holds_a_batch_or_two(tiny: Path):
    vit, card = load_encoder_file(tiny)
    alive: list[weakref.ref] = []
    most = 0

    def keep(tokens, batch) -> None:
        nonlocal most
        most = max(most, sum(one() is not None for one in alive))
        alive.append(weakref.ref(tokens["vectors"]))

    def take(images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"vectors": torch.zeros(len(images), 5)}

    each_batch(vit, card, _Few(80, ()), take, keep, torch.device("cpu"), batch_size=4)
    assert len(alive) == 20 and most <= 1


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_does_not_grow_with_the_images(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch):
    """20 MB of vectors go through parts into a file, and are read back, within 3 MB."""
    monkeypatch.setattr(parts_module, "_ROWS", 1024)
    n, width, batch = 20 * 1024, 256, 256
    source = _Few(n, ())
    parts = VectorParts(tmp_path / f"f{suffix}", {"all": source}, (width,), np.dtype(np.float32), batch)
    parts.folder.mkdir()
    arrow = pyarrow.total_allocated_bytes()
    rows_in_arrow = 0
    tracemalloc.start()
    try:
        writer = PartWriter(parts, parts.all)
        for start in range(0, n, batch):
            writer.add(np.arange(start, start + batch), np.full((batch, width), start, np.float32))
        writer.finish()
        rows = Rows.of(parts, {"classes": [], "data": {"splits": {"all": n}}})
        FORMATS[suffix].write(tmp_path / f"f{suffix}", rows)
        total = 0
        for some in read_chunks(tmp_path / f"f{suffix}", (width * 64,)):
            total += len(some.paths)
            assert some.paths[0] == f"few #{total - len(some.paths)}"
            rows_in_arrow = max(rows_in_arrow, pyarrow.total_allocated_bytes() - arrow)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == n and (tmp_path / f"f{suffix}").stat().st_size > 4 * n * width
    assert peak < 6e6 and rows_in_arrow < 6e6, (peak, rows_in_arrow)
