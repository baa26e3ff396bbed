"""``--to timm``: the encoder's weights with timm's names, and code that embeds images or recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save

from patchloom.audio.spectrogram import FLOOR
from patchloom.export.encoder import Export, Exportable
from patchloom.export.examples import Examples, describe_files, largest_difference, vectors_of_files
from patchloom.export.render import render
from patchloom.nets.checkpoints.format import encoder_bytes
from patchloom.nets.encode import encode, final_norm, patch_count, prefix_count
from patchloom.nets.heads import POOLED, represent
from patchloom.system.files import write_whole
from patchloom.withhold.encoder_input import all_patches


def to_timm(one: Exportable, examples: Examples, path: Path) -> Export:
    """Write the encoder, and its instance head to a file whose name begins with the encoder's."""
    vit, head, head_file = one.vit, one.head, path.with_name(f"{path.stem}-{one.head_file}")
    # the file lies apart from the run's others, and may be published: a start's task is the path of its source
    alone = replace(one.card, trained_on="", extra_modules={}, task=Path(one.card.task).name)
    if one.blend == 0:
        alone = replace(alone, note=f"{alone.note} These are the weights that an adaptation began with.".strip())
    files = {path: encoder_bytes(vit, alone)}  # timm ignores the card
    removal_file = None if one.removal is None else path.with_name(f"{path.stem}-without_positions.safetensors")
    if one.removal is not None and removal_file is not None:
        files[removal_file] = save({"weight": one.removal.weight})
    if head is not None:
        files[head_file] = save(head.state_dict())  # its name is unique per encoder in the folder
    by_file = examples.by_file() and one.channels in (1, 3)

    def code(folder: Path) -> str:
        """Return the code of the template, with the names of the files in a folder."""
        return render(
            "timm.py.jinja",
            one=one,
            weights=str(folder / path.name),
            head="" if head is None else str(folder / head_file.name),
            removal="" if removal_file is None else str(folder / removal_file.name),
            by_file=by_file,
            prefix=prefix_count(vit),
            pooled=POOLED[one.pooling],
            sound=one.card.sound,
            floor=FLOOR,
        )

    pasted: dict[str, Any] = {}
    with TemporaryDirectory() as folder:  # existing files are replaced only after the comparison
        for file, content in files.items():
            Path(folder, file.name).write_bytes(content)
        exec(code(Path(folder)), pasted)  # the comparison includes its normalisation
    with torch.inference_mode():
        given = all_patches(one.normalized(examples.given), patch_count(vit))
        tokens = encode(vit, given, norm=False)
        found = largest_difference(
            "features", final_norm(vit, tokens), pasted["features"](examples.given).view_as(tokens)
        )
        if head is not None:
            theirs = pasted["represent"](examples.given)
            found = max(found, largest_difference("instance features", represent(vit, head, tokens), theirs))
    checks = (_compared_vectors(one, examples, by_file, pasted),)
    for file, content in files.items():
        write_whole(file, content)
    written = None if head is None else head_file
    notes = tuple(filter(None, (one.card.note, examples.why_noise)))
    return Export(
        path,
        written,
        found,
        len(examples.given),
        code(path.parent),
        examples.called(one.card.modality.noun),
        notes,
        one.card.sound,
        checks=checks,
        removal_file=removal_file,
        removal=one.removal,
    )


def _compared_vectors(one: Exportable, examples: Examples, by_file: bool, pasted: dict[str, Any]) -> str:
    """Return a sentence with the largest difference of vectors by the printed code."""
    with torch.inference_mode(), TemporaryDirectory() as folder:
        if not examples.whole:
            both = one.vectors(examples.given), pasted["vectors"](examples.given)
            how = f"vectors(waves) ({one.pooling} tokens) differ by at most {{:.1e}}."
        elif by_file:
            both = vectors_of_files(examples, Path(folder), one.vector_of, pasted["embed"])
            how = f"embed(file) ({one.pooling} tokens) differ by at most {{:.1e}} on {describe_files(examples)}."
        else:
            whole = examples.whole
            both = torch.stack(list(map(one.vector_of, whole))), torch.stack(list(map(pasted["embed"], whole)))
            how = f"embed(image) ({one.pooling} tokens) differ by at most {{:.1e}} on {len(whole)} whole images."
        return f"Vectors by its {how.format(largest_difference('vectors', *both))}"
