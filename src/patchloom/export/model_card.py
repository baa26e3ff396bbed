"""Model card (README.md) of a folder for the Hub: description, results and usage of the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import yaml

from patchloom.data.sources.in_memory import is_object
from patchloom.data.sources.open import split_names
from patchloom.errors import PatchloomError
from patchloom.export.encoder import Exportable
from patchloom.export.preprocessing import OPENING
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

# Code with timm and with transformers, which ``export --to hf`` prints and writes into the model card.


def timm_code(place: str, channels: int, files: bool) -> str:
    """Return code that loads an encoder from ``place`` by ``timm.create_model`` and embeds images.

    Image ``files``, if Pillow and so the transforms of timm and transformers support them; otherwise tensors.
    """
    code = (
        f"import timm\nimport torch\n{_pillow(files)}encoder = timm.create_model({place!r}, pretrained=True).eval()\n"
    )
    if not files:
        return f"{code}{_of_tensors(channels)}"
    return (
        f"{code}"
        "config = timm.data.resolve_model_data_config(encoder)\n"
        "transform = timm.data.create_transform(**config, is_training=False)\n\n\n"
        "@torch.inference_mode()\n"
        "def embed(file):\n"
        '    """Return the vector [d] of an image file."""\n'
        f"{_opened(channels)}"
        "    return encoder(transform(image)[None])[0]\n"
    )


def transformers_code(place: str, channels: int, files: bool) -> str:
    """Return the same code with transformers; ``place`` is a folder or a name on the Hub."""
    if not files:
        return (
            "import torch\n"
            "from transformers import AutoModel\n\n"
            f"encoder = AutoModel.from_pretrained({place!r}).eval()\n"
            f"{_of_tensors(channels, '.pooler_output')}"
        )
    return (
        "import torch\n"
        f"{_pillow(files)[:-1]}"
        "from transformers import AutoImageProcessor, AutoModel\n\n"
        f"encoder = AutoModel.from_pretrained({place!r}).eval()\n"
        f"processor = AutoImageProcessor.from_pretrained({place!r})\n\n\n"
        "@torch.inference_mode()\n"
        "def embed(file):\n"
        '    """Return the vector [d] of an image file."""\n'
        f"{_opened(channels)}"
        "    return encoder(**processor(image)).pooler_output[0]\n"
    )


def _pillow(files: bool) -> str:
    return "from PIL import Image, ImageOps\n\n" if files else "\n"


def _opened(channels: int) -> str:
    """Return code that opens ``file`` upright, with transparency over white, and with the encoder's channels."""
    return (
        f"{OPENING}"
        '    image = image.convert("RGBA")\n'
        '    white = Image.new("RGBA", image.size, "white")\n'
        f'    image = Image.alpha_composite(white, image).convert("{"L" if channels == 1 else "RGB"}")\n'
    )


def _of_tensors(channels: int, output: str = "") -> str:
    return (
        "\n\n@torch.inference_mode()\n"
        "def vectors(images):\n"
        f'    """Return vectors [b d] of normalised images [b {channels} h w] of the encoder\'s size."""\n'
        f"    return encoder(images){output}\n"
    )


_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_PATH = re.compile(r"(?<!\S)(?:~|[A-Za-z]:\\|/)\S*[/\\](\S+)")  # absolute path, whose last part may be published
# metadata of a run without information on the machine or its files
_PUBLISHED = ("trained for", "trained layers", "held out", "skipped updates")


def check_license(license: str | None) -> None:
    """Refuse a text that is not a licence identifier."""
    if license is not None and not _LICENSE.fullmatch(license):
        raise PatchloomError(
            f"--license {license} is not an identifier: give one in lower case, as listed by the Hub, such as "
            "apache-2.0, cc-by-4.0 or other"
        )


def model_card(
    run: str | Path, one: Exportable, license: str | None, name: str | None, difference: float, files: bool
) -> str:
    """Return Markdown with a YAML header, with names from users escaped and without paths.

    ``files`` is that of `timm_code`.
    """
    of_run = one.blend != 0 and Path(run).is_dir() and (Path(run) / "config.yaml").is_file()
    told = load_run(run) if of_run else None
    table = ResultsTable([]) if told is None else _figures(told)
    hidden = {} if told is None else _hidden(told, table)
    called = one.card.name if name is None else name.rpartition("/")[2]
    place = name or f"NAME/{re.sub(r'[^A-Za-z0-9._-]+', '-', called)}"
    front = {
        **({"license": license} if license else _license_header(one.card.license or UNKNOWN_LICENSE)),
        "library_name": "timm",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["image-feature-extraction", "timm", "transformers", "self-supervised-learning", "patchloom"],
    }
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {escape_markdown(_public(called, hidden))}",
        _lead(one),
        "## Model\n\n" + _listed(_model(one)),
        *([] if told is None else _of_run(told, one, table, hidden)),
        *([f"## Licence\n\n{license_terms(one.card.license)}"] if one.card.license else []),
        "## Limits\n\n" + _limits(one, told),
        _usage(one, place, difference, files),
        f"Written by patchloom {__version__}.",
    ]
    return "\n\n".join(sections) + "\n"


# licences that timm states and the Hub lists; it takes others by name (huggingface.co/docs/hub/repositories-licenses)
_OF_THE_HUB = {
    *("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-nc-4.0", "apple-ascl", "apple-amlr", "gemma"),
    *("other", UNKNOWN_LICENSE),
}
# licences under which weights derived from others have to be passed on, with a copy of the text
_WITH_A_COPY = {"dinov3-license": "https://github.com/facebookresearch/dinov3/blob/main/LICENSE.md"}


def _license_header(license: str) -> dict[str, str]:
    """Return the fields of the header for a licence that the weights state."""
    if license in _OF_THE_HUB:
        return {"license": license}
    links = [_WITH_A_COPY[one] for one in split_licenses(license) if one in _WITH_A_COPY]
    return {"license": "other", "license_name": license, **({"license_link": links[0]} if links else {})}


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


def _lead(one: Exportable) -> str:
    task = one.card.task.rpartition("/")[2]  # a user's task has the path of its file
    if one.blend == 0:
        return (
            f"An image encoder: the weights of {escape_markdown(task)} with which a run began, fitted to its sizes. It "
            "has no classifier and computes a vector for each image."
        )
    entry = TASKS.get(task)
    by = f"`{task}`" if re.fullmatch(r"[\w.-]+", task) else escape_markdown(task)
    paper = ""
    if entry is not None and entry.paper:
        paper = " " + escape_markdown(f"({entry.paper}; withheld: {entry.withheld}; asked: {entry.asked})")
    return (
        f"An image encoder, pre-trained without labels with the pretext task {by}{paper}. It has no classifier and "
        "computes a vector for each image."
    )


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


def _of_run(told: RunData, one: Exportable, table: ResultsTable, hidden: Mapping[str, str]) -> list[str]:
    """Return the sections about a run: training and, unless its weights are blended, figures and verdict."""
    settings = told.settings
    about = dict(run_metadata(told))
    data = data_slug(settings.data) if not is_object(settings.data) else "images in memory"
    epochs = f"{min(told.epoch, settings.epochs):.4g} of {settings.epochs:g}"
    facts = [
        ("data", f"{data}, without labels"),
        ("images", _images(told)),
        ("epochs", epochs),
        ("weights", one.card.note),
        ("batch", f"{settings.batch_size} images"),
        ("state", "" if told.finished else told.state()),
        *((term, about.get(term, "")) for term in _PUBLISHED),
    ]
    facts = [(term, _public(text, hidden)) for term, text in facts if text]
    found = ["## Training\n\n" + _listed(facts)]
    if one.blend is not None:
        return found
    shown = [table.markdown(lambda text: _public(text, hidden)).rstrip()] * bool(table.rows)
    shown += [f"- {escape_markdown(_public(note, hidden))}" for note in table.notes]
    found += ["\n\n".join(["## Figures", *shown])] * bool(shown)
    if told.health is not None:
        why = f": {told.health.why}" if told.health.why else ""
        so_far = "" if told.finished else " so far"
        found.append(f"## Verdict\n\n{escape_markdown(_public(f'{told.health.verdict}{so_far}{why}', hidden))}.")
    return found


def _images(told: RunData) -> str:
    """Return the number of training images as text; "" if unknown."""
    with suppress(PatchloomError):
        record = read_record(told.folder.trained_on)
        if record is not None and not record.unknown and len(record.contents):
            return f"{len(record.contents):,} different {told.modality.noun}"
    return ""


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


def _limits(one: Exportable, told: RunData | None) -> str:
    said = [
        "It was trained on the images above; its performance on other images is unknown.",
        "Vectors represent whole images at the size above: details smaller than a patch are mostly lost.",
        "Biases in the images are also in the vectors; they have not been examined.",
    ]
    if told is None:
        said[0] = "The encoder's file does not record its training images or its performance."
    elif not told.finished:
        said.append("The run is not finished: this is its newest checkpoint.")
    return "\n".join(f"- {one}" for one in said)


def _usage(one: Exportable, place: str, difference: float, files: bool) -> str:
    code = timm_code(f"hf-hub:{place}", one.channels, files)
    other = transformers_code(place, one.channels, files)
    return (
        "## How to use\n\n"
        f"With timm, whose vectors differed from those of the run by at most {difference:.1e} at export "
        "(`local-dir:FOLDER` loads a local copy):\n\n"
        f"```python\n{code}```\n\nWith transformers:\n\n```python\n{other}```"
    )


def _listed(facts: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- **{escape_markdown(term)}**: {escape_markdown(text)}" for term, text in facts)


def _hidden(told: RunData, table: ResultsTable) -> dict[str, str]:
    """Map paths that the run's settings and results contain to their last parts."""
    names = [] if is_object(told.settings.data) else [str(name) for name in split_names(told.settings.data)]
    names += [row.result.data for row in table.rows]
    names += [str(told.folder.path), str(told.folder.path.absolute()), *told.settings.weights_before]
    paths = {name for name in names if "/" in name or "\\" in name}
    return {name: data_slug(name) for name in sorted(paths, key=len, reverse=True)}


def _public(text: str, hidden: Mapping[str, str]) -> str:
    """Replace known paths, and texts that look like absolute paths, by their last parts."""
    for name, short in hidden.items():
        text = text.replace(name, short)
    return _PATH.sub(r"\1", text)
