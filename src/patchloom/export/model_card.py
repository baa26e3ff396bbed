"""Model card (README.md) of a folder for the Hub: description, results and usage of the weights."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import yaml

from patchloom.data.sources.in_memory import is_object
from patchloom.data.sources.open import split_names
from patchloom.errors import PatchloomError
from patchloom.export.encoder import Exportable
from patchloom.export.render import render
from patchloom.nets.checkpoints.format import UNKNOWN_LICENSE, split_licenses
from patchloom.nets.heads import POOLED
from patchloom.report.results import ResultsTable, escape_markdown, over_seeds, rows_of
from patchloom.report.settings import run_metadata
from patchloom.results.result import Result
from patchloom.runs.folder import data_slug
from patchloom.runs.past import RunData, load_run
from patchloom.runs.training_set import read_record
from patchloom.sizes import in_pixels
from patchloom.tasks import TASKS
from patchloom.version import __version__


def hub_code(library: str, place: str, channels: int, files: bool) -> str:
    """Return code that loads an encoder from ``place`` by timm or transformers and embeds images.

    Args:
        library: "timm" or "transformers".
        place: of timm "local-dir:FOLDER" or "hf-hub:NAME"; else a folder or a name on the Hub.
        channels: number of channels of the encoder.
        files: whether the images are files, which needs that Pillow, and so the libraries' transforms, support them;
            else they are tensors.
    """
    return render("hub.py.jinja", library=library, place=place, channels=channels, files=files)


_PATH = re.compile(r"(?<!\S)(?:~|[A-Za-z]:\\|/)\S*[/\\](\S+)")  # absolute path, whose last part may be published
# metadata of a run without information on the machine or its files
_PUBLISHED = ("trained for", "trained layers", "held out", "skipped updates")


def model_card(
    run: str | Path, one: Exportable, license: str | None, name: str | None, difference: float, files: bool
) -> str:
    """Return Markdown with a YAML header, with names from users escaped and without paths.

    ``files`` is that of `hub_code`.
    """
    of_run = one.blend != 0 and Path(run).is_dir() and (Path(run) / "config.yaml").is_file()
    told = load_run(run) if of_run else None
    whole = one.blend is None  # a blend has no figures of its own
    table = ResultsTable([]) if told is None else _figures(told)
    named = list[str]()
    if told is not None:
        data = told.settings.data
        named = [] if is_object(data) else [str(one) for one in split_names(data)]
        named += [row.result.data for row in table.rows]
        named += [str(told.folder.path), str(told.folder.path.absolute()), *told.settings.weights_before]
    paths = {path for path in named if "/" in path or "\\" in path}
    hidden = {path: data_slug(path) for path in sorted(paths, key=len, reverse=True)}

    def public(text: str) -> str:
        """Replace known paths, and texts that look like absolute paths, by their last parts."""
        for path, short in hidden.items():
            text = text.replace(path, short)
        return _PATH.sub(r"\1", text)

    called = one.card.name if name is None else name.rpartition("/")[2]
    place = name or f"NAME/{re.sub(r'[^A-Za-z0-9._-]+', '-', called)}"
    stated, header = one.card.license or UNKNOWN_LICENSE, {"license": license or one.card.license or UNKNOWN_LICENSE}
    if not license and stated not in _OF_THE_HUB:
        header = {"license": "other", "license_name": stated}
        links = [_WITH_A_COPY[its] for its in split_licenses(stated) if its in _WITH_A_COPY]
        header |= {"license_link": links[0]} if links else {}
    front = {
        **header,
        "library_name": "timm",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["image-feature-extraction", "timm", "transformers", "self-supervised-learning", "patchloom"],
    }
    task = one.card.task.rpartition("/")[2]  # a user's task has the path of its file
    verdict = ""
    if told is not None and told.health is not None and whole:
        why = f": {told.health.why}" if told.health.why else ""
        verdict = public(f"{told.health.verdict}{'' if told.finished else ' so far'}{why}")
    return render(
        "card.md.jinja",
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        title=escape_markdown(public(called)),
        of_start=one.blend == 0,
        task=task,
        plain_task=re.fullmatch(r"[\w.-]+", task),
        entry=TASKS.get(task),
        model=_model(one),
        training=[] if told is None else [(term, public(text)) for term, text in _training(told, one) if text],
        table=table.markdown(public).rstrip() if whole and table.rows else "",
        notes=[*map(public, table.notes)] if whole else [],
        verdict=verdict,
        licence=license_terms(one.card.license) if one.card.license else "",
        told=told,
        difference=difference,
        by_timm=hub_code("timm", f"hf-hub:{place}", one.channels, files),
        by_transformers=hub_code("transformers", place, one.channels, files),
        version=__version__,
    )


# licences that timm states and the Hub lists; it takes others by name (huggingface.co/docs/hub/repositories-licenses)
_OF_THE_HUB = {
    *("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-nc-4.0", "apple-ascl", "apple-amlr", "gemma"),
    *("other", UNKNOWN_LICENSE),
}
# licences under which weights derived from others have to be passed on, with a copy of the text
_WITH_A_COPY = {"dinov3-license": "https://github.com/facebookresearch/dinov3/blob/main/LICENSE.md"}


def license_terms(license: str) -> str:
    """Return sentences on the licences of the weights that training began with or learnt from."""
    said = []
    for one in split_licenses(license):
        named = f"Licence of the weights that training began with or learnt from: {escape_markdown(one)}"
        if one == UNKNOWN_LICENSE:
            said.append(f"{named}: check the weights' source.")
            continue
        said.append(f"{named}. It applies to these weights, too.")
        if one in _WITH_A_COPY:
            said.append(f"They may be passed on only under it, with a copy of its text: {_WITH_A_COPY[one]}")
    return " ".join(said)


def _model(one: Exportable) -> list[tuple[str, str]]:
    h, w = one.size
    count = sum(weight.numel() for weight in one.vit.parameters())
    width = one.vit.num_features
    channels = f"{one.channels} channel{'s' * (one.channels != 1)}"
    return [
        ("architecture", f"{type(one.vit).__name__} of timm ({one.arguments['model_name']} with other sizes)"),
        ("parameters", f"{count / 1e6:.1f} M"),
        ("images", f"{channels}, {h} x {w} pixels, patches of {in_pixels(one.card.own_spec.patch_size)}"),
        ("vector", f"{width} numbers, {POOLED[one.pooling]}"),
        ("mean of pixels in [0, 1]", ", ".join(f"{value:.4g}" for value in one.card.mean)),
        ("deviation of pixels", ", ".join(f"{value:.4g}" for value in one.card.std)),
    ]


def _training(told: RunData, one: Exportable) -> list[tuple[str, str]]:
    """Return facts about the training of a run; some are empty."""
    settings = told.settings
    about = dict(run_metadata(told))
    data, images = data_slug(settings.data) if not is_object(settings.data) else "images in memory", ""
    with suppress(PatchloomError):
        record = read_record(told.folder.trained_on)
        if record is not None and not record.unknown and len(record.contents):
            images = f"{len(record.contents):,} different {told.modality.noun}"
    return [
        ("data", f"{data}, without labels"),
        ("images", images),
        ("epochs", f"{min(told.epoch, settings.epochs):.4g} of {settings.epochs:g}"),
        ("weights", one.card.note),
        ("batch", f"{settings.batch_size} images"),
        ("state", "" if told.finished else told.state()),
        *((term, about.get(term, "")) for term in _PUBLISHED),
    ]


def _figures(told: RunData) -> ResultsTable:
    """Return the last held-out measure beside its baselines, and the quoted results."""
    own, name, measured = told.measured, "this encoder", list[Result]()
    if math.isfinite(own.value):
        beside = (
            replace(own, encoder=one.name, value=one.value, low=one.value, high=one.value) for one in own.baselines
        )
        measured = [replace(one, data="held out") for one in (replace(own, encoder=name), *beside)]
    rows = [row for group in rows_of(told.results, "", name) for row in group]
    return ResultsTable([*(over_seeds([one], "") for one in measured), *rows], [*told.problems.values()])
