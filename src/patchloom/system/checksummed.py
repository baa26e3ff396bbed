"""YAML files with a checksum, which detects truncated and edited files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from patchloom.errors import PatchloomError
from patchloom.system.documents import check_plain
from patchloom.system.files import read_text, read_yaml, write_whole

_SEAL = "# if this file is edited, the run is not continued: "


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write no aliases, which `read_yaml` refuses."""
        return True


def write_checksummed(path: Path, values: dict[str, Any], notes: str = "") -> None:
    """Write a checksum, ``notes`` (comment lines) and ``values`` as YAML."""
    text = notes + yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    write_whole(path, f"{_SEAL}{_digest(text)}\n{text}")


def read_checksummed(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file, after comparing its checksum if it has one."""
    try:
        text = read_text(path)
        first, _, rest = text.partition("\n")
        if first.startswith(_SEAL) and first != _SEAL + _digest(rest):
            raise PatchloomError(f"{path} is not what patchloom wrote: restore it from a copy, or choose another --out")
        values = read_yaml(text)
        check_plain(values)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as problem:
        why = getattr(problem, "problem", None) or getattr(problem, "strerror", None) or type(problem).__name__
        raise PatchloomError(f"{path} cannot be read ({why}): restore it from a copy") from problem
    if not isinstance(values, dict):
        raise PatchloomError(f"{path} has no settings: restore it from a copy")
    return values


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
