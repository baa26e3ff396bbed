"""Metadata of a run: dates, data, device and versions."""

from __future__ import annotations

import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from patchloom.display import duration
from patchloom.report.load_run import RunData
from patchloom.system.files import read_text
from patchloom.system.hardware import processor
from patchloom.version import __version__

_PROGRAMS = ("torch", "torchvision", "timm")


def run_metadata(run: RunData) -> list[tuple[str, str]]:
    """Return pairs of a term and a text; unknown ones are left out.

    A run does not record the versions that trained it. The versions listed are those that made the page.
    """
    settings, data = run.settings, run.data
    named = settings.data if isinstance(settings.data, str) else ", ".join(settings.data)
    held = len(data.get("held_out", ()))
    found = [
        ("folder", str(run.folder.path.absolute())),
        ("started", _date(run.folder.requested)),
        ("ended" if run.finished else "last written", _when(run.last_written())),
        ("trained for", _seconds(run)),
        ("data", named),
        ("fingerprint of the data", str(data.get("fingerprint", ""))),
        ("held out", f"{held:,} {run.modality.noun}" if held else ""),
        ("device", _device(run)),
        ("encoder", _encoder(run)),
        ("trained layers", _trained(run)),
        ("skipped updates", _skipped(run)),
        ("page made on", _machine()),
        ("page made with", versions()),
    ]
    return [(term, text) for term, text in found if text]


def _date(path: Path) -> str:
    with suppress(OSError):
        return _when(path.stat().st_mtime)
    return ""


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC") if seconds else ""


def _seconds(run: RunData) -> str:
    spent = run.metrics.get("seconds", np.empty(0))
    spent = spent[np.isfinite(spent)]
    total = max([*spent.tolist(), float(run.about.get("seconds") or 0.0)]) if len(spent) or run.about else 0.0
    return f"{duration(total)}, without measures and the final evaluation" if total else ""


def _device(run: RunData) -> str:
    settings = run.settings
    threads = f", {settings.threads} thread{'s' * (settings.threads != 1)}" if settings.device == "cpu" else ""
    several = f", {settings.devices} devices" if settings.devices != 1 else ""
    return f"{settings.device}{threads}{several}, {settings.precision}"


def _encoder(run: RunData) -> str:
    file = run.folder.encoder
    with suppress(OSError):
        return f"{file.name}, {file.stat().st_size / 1e6:,.1f} MB"
    return "from the newest checkpoint" if run.folder.checkpoints.there() else ""


def _trained(run: RunData) -> str:
    s = run.settings
    count, begun = s.train_blocks, s.from_run or s.init
    if s.adapt == "all":
        return ""
    blocks = f"the last {count} block{'s' * (count != 1)} and the last norm" if count else "the last norm"
    if s.adapt == "lora":
        updates = f"low-rank updates (rank {s.lora_rank}), merged here"
        return (
            f"{updates} into the weights of {begun}" if count is None else f"{blocks}; {updates} into those of {begun}"
        )
    return f"{blocks}; all other weights are those of {begun}"


def _skipped(run: RunData) -> str:
    with suppress(OSError, UnicodeDecodeError):
        lines = read_text(run.folder.skipped, errors="surrogateescape").splitlines()
        return f"{len(lines):,}, because the loss or gradient was not finite (see skipped.txt)" if lines else ""
    return ""


def _machine() -> str:
    return f"{processor('model name') or platform.processor() or platform.machine()}, {platform.system()}"


def versions() -> str:
    """Return the versions of patchloom and of what it computes with, in this process."""
    found = []
    for name in _PROGRAMS:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join([f"patchloom {__version__}", f"Python {platform.python_version()}", *found])
