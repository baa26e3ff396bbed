"""Settings, command and circumstances of a run: values with their reasons, dates, data, device and versions."""

from __future__ import annotations

import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from patchloom.display import duration
from patchloom.report.page import Setting
from patchloom.runs.past import RunData
from patchloom.runs.settings import command, option_text, settings_by_name, usual_settings
from patchloom.system.device import processor
from patchloom.system.files import read_text
from patchloom.tasks.custom import Code, is_code
from patchloom.version import __version__

DEFAULT, CHOSEN = "the default", "chosen for you"
# settings that have no effect on the other kind of data
_OF_SOUND = ("seconds", "rate", "features", "bins")
_OF_IMAGES = ("crop_scale", "flip", "randaugment", "randaugment_std", "normalization")


def settings_of(run: RunData) -> list[Setting]:
    """Return the settings of a run: those that were ``auto`` with the reason, those given, then the defaults.

    Settings that are still ``auto``, such as the depth of an unused decoder, and settings for the other kind of data
    are left out.
    """
    asked, recipe, others = settings_by_name(run.asked), run.asked.get("recipe"), _OF_IMAGES if run.sound else _OF_SOUND
    usual, of_recipe = (usual_settings(run.asked, one) for one in (None, recipe))
    found: tuple[list[Setting], ...] = ([], [], [])
    for name, value in run.became.items():
        if value in ("auto", None) or name in others:
            continue
        place, why = 1, ""
        if asked.get(name) == "auto":
            place, why = 0, run.reasons.get(name) or run.reasons.get(name.removesuffix(".name")) or CHOSEN
        elif of_recipe.get(name) == value != usual.get(name):
            why = f"from the recipe {recipe}"
        elif usual.get(name) == value and name not in ("data", "task.name"):
            place, why = 2, DEFAULT
        shown = f"{value:g}" if isinstance(value, float) else option_text(name, value)
        if name == "task.name" and is_code(shown):
            shown = Code.of(shown).typed
        found[place].append(Setting(name, shown, why))
    return [*found[0], *found[1], *found[2]]


def command_of(run: RunData) -> str:
    """Return the command that repeats a finished run in another folder, or resumes an unfinished one.

    "" if the requested settings cannot be read, or the data were given as a Python object.
    """
    place = run.folder.path
    again = place.with_name(f"{place.absolute().name}-again") if run.finished else place
    return command(run.asked, run.asked.get("data", ""), again)


# Circumstances of a run.


def run_metadata(run: RunData) -> list[tuple[str, str]]:
    """Return pairs of a term and a text; unknown ones are left out.

    A run does not record the versions that trained it. The versions listed are those that made the page.
    """
    s, folder, held = run.settings, run.folder, len(run.data.get("held_out", ()))
    spent = run.metrics.get("seconds", np.empty(0))
    seconds = max([*spent[np.isfinite(spent)].tolist(), float(run.about.get("seconds") or 0.0)])
    device = f"{s.device}, {s.threads} thread{'s' * (s.threads != 1)}" if s.device == "cpu" else str(s.device)
    if s.devices != 1:
        device += f", {s.devices} devices"
    begun, started, trained, skipped = s.from_run or s.init, "", "", ""
    encoder = "from the newest checkpoint" if folder.checkpoints.there() else ""
    with suppress(OSError):
        encoder = f"{folder.encoder.name}, {folder.encoder.stat().st_size / 1e6:,.1f} MB"
    with suppress(OSError):
        started = _when(folder.requested.stat().st_mtime)
    with suppress(OSError, UnicodeDecodeError):
        lines = read_text(folder.skipped, errors="surrogateescape").splitlines()
        if lines:
            skipped = f"{len(lines):,}, because the loss or gradient was not finite (see skipped.txt)"
    if s.adapt != "all":
        trained = "the last norm"
        if s.train_blocks:
            trained = f"the last {s.train_blocks} block{'s' * (s.train_blocks != 1)} and {trained}"
        updates = f"low-rank updates (rank {s.lora_rank}), merged here"
        if s.adapt != "lora":
            trained += f"; all other weights are those of {begun}"
        elif s.train_blocks is None:
            trained = f"{updates} into the weights of {begun}"
        else:
            trained += f"; {updates} into those of {begun}"
    machine = processor("model name") or platform.processor() or platform.machine()
    found = [
        ("folder", str(folder.path.absolute())),
        ("started", started),
        ("ended" if run.finished else "last written", _when(run.last_written())),
        ("trained for", f"{duration(seconds)}, without measures and the final evaluation" if seconds else ""),
        ("data", s.data if isinstance(s.data, str) else ", ".join(s.data)),
        ("fingerprint of the data", str(run.data.get("fingerprint", ""))),
        ("held out", f"{held:,} {run.modality.noun}" if held else ""),
        ("device", f"{device}, {s.precision}"),
        ("encoder", encoder),
        ("trained layers", trained),
        ("skipped updates", skipped),
        ("page made on", f"{machine}, {platform.system()}"),
        ("page made with", versions()),
    ]
    return [(term, text) for term, text in found if text]


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC") if seconds else ""


def versions() -> str:
    """Return the versions of patchloom and of what it computes with, in this process."""
    found = []
    for name in ("torch", "torchvision", "timm"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join([f"patchloom {__version__}", f"Python {platform.python_version()}", *found])
