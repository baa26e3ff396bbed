"""``--to hf``: a folder in timm's format for the Hugging Face Hub, checked with timm and transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
import timm
import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not in its __all__
from timm.models import save_for_hf
from timm.models.eva import Eva
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.export.encoder import Export, Exportable, silence_libraries
from patchloom.export.examples import Examples, describe_files, largest_difference, vectors_of_files
from patchloom.export.model_card import hub_code, license_terms, model_card
from patchloom.nets.checkpoints.format import UNKNOWN_LICENSE
from patchloom.runs.folder import RunFolder, run_around
from patchloom.system.files import make_folder, write_whole
from patchloom.system.network import network_error, why_offline

# ``--push NAME``: upload of a folder to the Hugging Face Hub.


def check_push(name: str) -> None:
    """Refuse a push that would fail, before any other work."""
    try:
        validate_repo_id(name)
        if "/" not in name:  # the Hub would add the user's name, but the model card needs the whole name
            raise HFValidationError("it has no owner")
    except HFValidationError as problem:
        raise PatchloomError(
            f"--push {name} is not a repository name: give OWNER/NAME, such as me/photos-mae, in letters, digits, '-', "
            "'_' and '.'"
        ) from problem
    if huggingface_hub.get_token() is None:
        raise PatchloomError(
            "--push needs a token of the Hub with write access: run hf auth login, set HF_TOKEN, or leave out --push "
            "to write only the folder"
        )
    if offline := why_offline():
        raise network_error(f"--push cannot reach the Hub ({offline}): leave it out, and upload the folder later")


def push(folder: Path, files: Sequence[str], name: str, public: bool) -> str:
    """Upload files of a folder to a repository, which is created if necessary."""
    api = huggingface_hub.HfApi()
    try:
        made = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            allow_patterns=list(files),
            commit_message="Encoder exported by patchloom",
        )
    except Exception as problem:  # any error of the Hub or the network means that nothing was uploaded
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise network_error(
            f"{folder} is written, but was not uploaded to {name} ({first}): fix that and repeat the command", problem
        ) from problem
    return str(made)


_FILES = ("config.json", "model.safetensors", "README.md")


def to_hub(
    run: str | Path,
    one: Exportable,
    examples: Examples,
    folder: Path,
    license: str | None,
    name: str | None,
    public: bool,
) -> Export:
    """Write the folder with a model card, load it with both libraries, compare, and upload it to ``name``, if any."""
    readable = one.channels in (1, 3)
    by_file = readable and examples.by_file()
    files = by_file or (readable and not examples.whole)  # without examples, 8 bits are assumed
    with TemporaryDirectory() as made:  # existing files are replaced only after the comparison
        work = Path(made) / "hf"
        _save(one, work)
        features, vectors, checks = _compare(one, examples, work, by_file)
        card = model_card(run, one, license, name, vectors, files)
        (work / "README.md").write_text(card, "utf-8")
        contents = {file: (work / file).read_bytes() for file in _FILES}
    make_folder(folder)
    for file, content in contents.items():
        write_whole(folder / file, content)
    head = "" if one.head is None else "The instance head is left out: --to timm writes it."
    said, stated = list[str](), one.card.license
    unknown = license is None and stated in ("", UNKNOWN_LICENSE)
    if unknown:
        said.append("The model card says license: unknown. Name yours by --license, such as apache-2.0.")
    said += [license_terms(stated)] * bool(stated)
    around = RunFolder(run if Path(run).is_dir() else run_around(run) or run)
    if before := around.read_config().weights_before if unknown and around.config.exists() else ():
        said.append(f"The licence of {' and '.join(before)} applies to these weights, too.")
    notes = [one.card.note, examples.why_noise, head, " ".join(said)]
    if name is not None:
        checks.append(f"Uploaded: {push(folder, _FILES, name, public)}")
    return Export(
        folder,
        None,
        features,
        len(examples.given),
        hub_code("timm", f"local-dir:{folder}", one.channels, files),
        examples.called("images"),
        tuple(filter(None, notes)),
        by="timm's and transformers'",
        checks=tuple(checks),
    )


def check_folder(folder: Path) -> None:
    """Refuse a folder that has other files than those of an export."""
    if folder.exists() and not folder.is_dir():
        raise PatchloomError(f"--out {folder} is a file: give a folder")
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    if others := [name for name in names if name not in _FILES and name[0] != "."]:
        raise PatchloomError(f"{folder} has other files, such as {min(others)}: give another folder with --out")


def _save(one: Exportable, folder: Path) -> None:
    """Write weights and configuration with timm's function, so that the model from ``timm.create_model`` pools."""
    pool: dict[str, Any] = {}
    if not one.hierarchical:  # a Swin returns the mean already
        # by default, "avg" would move the norm behind the mean, unlike in pre-training
        norm = "use_fc_norm" if isinstance(one.vit, Eva) else "fc_norm"
        pool = {"global_pool": "token"} if one.pooling == "class" else {"global_pool": "avg", norm: one.pooled_norm}
        if not isinstance(one.vit, Eva):
            pool["pool_include_prefix"] = False  # the vectors here are means of patch tokens
    arguments = {name: value for name, value in one.arguments.items() if value is not None} | pool
    model: Any = timm.create_model(**arguments)
    model.load_state_dict(one.vit.state_dict(), strict=True)
    model.pretrained_cfg = {
        "architecture": arguments["model_name"],
        "input_size": (one.channels, *one.size),
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "mean": one.card.mean,
        "std": one.card.std,
        "num_classes": 0,
        "pool_size": None,
        "first_conv": None,
        "classifier": None,
        "custom_load": False,
    }
    own = {name: value for name, value in arguments.items() if name not in ("model_name", "num_classes")}
    save_for_hf(model, str(folder), model_args=own, safe_serialization=True)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    # transformers passes this itself, and would pass it twice; timm also stores it outside of model_args
    config["model_args"].pop("num_classes", None)
    # without these, older versions of timm convert weights for other channels than 3
    config["pretrained_cfg"] |= {"first_conv": None, "custom_load": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _compare(one: Exportable, examples: Examples, folder: Path, by_file: bool) -> tuple[float, float, list[str]]:
    """Load the folder with both libraries by running the code of the model card, and compare.

    Returns:
        The largest differences of features by both, and of vectors by timm, and sentences on vectors.
    """
    # The code differs from that of the card only in the place. Its models are compared on the same images; its vectors
    # of files also depend on how the libraries read files.
    timms: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    with silence_libraries():
        exec(hub_code("timm", f"local-dir:{folder}", one.channels, by_file), timms)
        exec(hub_code("transformers", str(folder), one.channels, by_file), theirs)
    images = one.normalized(examples.given)
    with torch.inference_mode():
        ours, vectors = one.vit.forward_features(images), one.vectors(examples.given)
        output = theirs["encoder"](images)
        features = max(
            largest_difference("features", ours, timms["encoder"].forward_features(images), "timm"),
            largest_difference("features", ours, output.last_hidden_state, "transformers"),
        )
        first = largest_difference("vectors", vectors, timms["encoder"](images), "timm")
        second = largest_difference("vectors", vectors, output.pooler_output, "transformers")
    said = [
        f"Vectors ({one.pooling} tokens) differ by at most {first:.1e} by timm.create_model, and by "
        f"{second:.1e} by transformers' AutoModel."
    ]
    if by_file:
        # the libraries resize the whole image with Pillow before they crop the centre, so no bound is set
        with TemporaryDirectory() as pictures:
            mine, by_timm = vectors_of_files(examples, Path(pictures), one.vector_of, timms["embed"])
            others = torch.stack([theirs["embed"](str(path)) for path in examples.in_files(Path(pictures))])
        both = (by_timm, others)
        far = max((its - mine).abs().max().item() for its in both)
        alike = min(nn.functional.cosine_similarity(mine, its).min().item() for its in both)
        said.append(
            f"With the libraries' own transforms of files, which resize before cropping, vectors differ by at most "
            f"{far:.1e} on {describe_files(examples)} (cosine similarity {alike:.5f} or more)."
        )
    return features, first, said
