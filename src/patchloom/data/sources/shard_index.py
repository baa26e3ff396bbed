"""The index of a shard: names, offsets, sizes and labels of its images.

It is made once and cached in ``cache_root()/shards/index`` under a digest of the shard's address and state.
"""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import asdict, dataclass
from typing import BinaryIO

from patchloom.data.formats import IMAGE_SUFFIXES
from patchloom.data.sources.addresses import Shard, in_words
from patchloom.data.sources.base import digest
from patchloom.data.sources.fetch import open_shard
from patchloom.errors import PatchloomError
from patchloom.files import cache_root, write_whole

_FORMAT = "index 1"  # to be raised with changes of the code that makes an index
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True)
class ShardIndex:
    """The images in a shard.

    Attributes:
        names: of the members.
        starts, sizes: offset and size of the images, in bytes.
        labels: text of the label, or None.
        size: of the shard, in bytes.
    """

    names: list[str]
    starts: list[int]
    sizes: list[int]
    labels: list[str | None]
    size: int


def index_of(shard: Shard) -> ShardIndex:
    """The index of a shard, from the cache or read from the shard.

    Raises:
        PatchloomError: as `read_index`; or the shard cannot be fetched.
    """
    cached = cache_root() / "shards" / "index" / f"{digest([_FORMAT, shard.address, shard.state])}.json"
    try:
        return ShardIndex(**json.loads(cached.read_text("utf-8")))
    except (OSError, ValueError, TypeError):  # none there, or damaged
        pass
    with open_shard(shard) as file:
        index = read_index(file, shard.address)
    write_whole(cached, json.dumps(asdict(index)))
    return index


def read_index(file: BinaryIO, name: str) -> ShardIndex:
    """The index of an open shard.

    Raises:
        PatchloomError: it is compressed, damaged, or no tar file; or a sample has several images.
    """
    samples: dict[str, list[tarfile.TarInfo]] = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile() and not _base(member).startswith("."):
                    samples.setdefault(member.name.removesuffix(_suffix(member)), []).append(member)
            end = tar.offset
    except Exception as error:  # tarfile's own, and whatever wrong numbers in a header lead to
        file.seek(0)
        if file.read(8).startswith(_COMPRESSED):
            raise PatchloomError(
                f"{name} is compressed, so that no sample can be read alone: unpack it, or give the command that does, "
                "such as 'pipe:gzip -dc {000..012}.tar.gz'"
            ) from error
        raise PatchloomError(f"{name} is no tar file, or is damaged ({in_words(error)}): make it again") from error
    file.seek(end)
    rest = file.read(tarfile.RECORDSIZE)
    if not rest or rest.strip(b"\0"):  # tarfile stops silently where it finds no header
        raise PatchloomError(f"{name} is cut off or damaged after byte {end:,}: make it again")
    index = ShardIndex([], [], [], [], file.seek(0, os.SEEK_END))
    for members in samples.values():
        image = _image(members, name)
        if image is not None:
            index.names.append(image.name)
            index.starts.append(image.offset_data)
            index.sizes.append(image.size)
            index.labels.append(_label(file, members))
    return index


def _base(member: tarfile.TarInfo) -> str:
    return member.name.rpartition("/")[2]


def _suffix(member: tarfile.TarInfo) -> str:
    """Suffix of a member from its first dot on; the name before it is that of the sample."""
    return member.name[len(member.name) - len(_base(member).partition(".")[2]) - 1 :] if "." in _base(member) else ""


def _image(members: list[tarfile.TarInfo], shard: str) -> tarfile.TarInfo | None:
    """The image of a sample: NAME.jpg and the like if there is one, else NAME.npy, else NAME.WORD.jpg and the like."""
    suffixes = [_suffix(member).lower() for member in members]
    kinds: list[list[tarfile.TarInfo]] = [[], [], []]
    for member, suffix in zip(members, suffixes, strict=True):
        if suffix in IMAGE_SUFFIXES:
            kinds[suffix == ".npy"].append(member)
        elif os.path.splitext(suffix[1:])[1] in IMAGE_SUFFIXES:
            kinds[2].append(member)
    found = next(filter(None, kinds), [])
    if len(found) > 1:
        raise PatchloomError(
            f"{shard} has several images in one sample ({found[0].name}, {found[1].name}): leave one, since names that "
            "are alike up to their first dot make one sample"
        )
    return found[0] if found else None


def _label(file: BinaryIO, members: list[tarfile.TarInfo]) -> str | None:
    """The text of NAME.cls; a number loses its leading zeros."""
    for member in members:
        if _suffix(member).lower() == ".cls":
            file.seek(member.offset_data)
            text = file.read(member.size).decode("utf-8", "replace").strip()
            return str(int(text)) if text.isdecimal() else text or None
    return None
