"""``--to timm``: the encoder's weights by timm's names, and code that goes from an image file to its vector."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save

from patchloom.export.code_timm import code_of
from patchloom.export.examples import Examples, difference, files_in_words, vectors_of_files
from patchloom.export.exported import Export, Exportable
from patchloom.files import write_whole
from patchloom.nets.encode import encode, final_norm, patch_count
from patchloom.nets.heads import represent
from patchloom.sound import noun_of
from patchloom.withhold.encoder_input import all_patches


def to_timm(one: Exportable, examples: Examples, path: Path) -> Export:
    """Write the encoder, and an instance head beside it into a file whose name begins with the encoder's.

    Args:
        one: what is exported.
        examples: on what it is compared.
        path: the file to write.

    Raises:
        PatchloomError: features or vectors by the code that is to be printed differ, or nothing can be written there.
    """
    vit, head, head_file = one.vit, one.head, path.with_name(f"{path.stem}-{one.head_file}")
    files = {path: save(vit.state_dict())}
    if head is not None:
        files[head_file] = save(head.state_dict())  # two encoders in a folder keep theirs
    by_file = examples.by_file() and one.channels in (1, 3)

    def code(folder: Path) -> str:
        return code_of(one, folder / path.name, None if head is None else folder / head_file.name, by_file)

    pasted: dict[str, Any] = {}
    with TemporaryDirectory() as folder:  # what is there already stays until all has been compared
        for file, content in files.items():
            Path(folder, file.name).write_bytes(content)
        exec(code(Path(folder)), pasted)  # its own normalisation, too, is part of what is compared
    with torch.inference_mode():
        given = all_patches(one.normalized(examples.given), patch_count(vit))
        tokens = encode(vit, given, norm=False)
        found = difference("features", final_norm(vit, tokens), pasted["features"](examples.given).view_as(tokens))
        if head is not None:
            theirs = pasted["represent"](examples.given)
            found = max(found, difference("instance features", represent(vit, head, tokens), theirs))
    checks = (_compared_vectors(one, examples, by_file, pasted),)
    for file, content in files.items():
        write_whole(file, content)
    written = None if head is None else head_file
    compared_on = f"{noun_of(one.card.sound)}{' of noise' * bool(examples.why_noise)}"
    notes = tuple(filter(None, (one.card.note, examples.why_noise)))
    return Export(
        path, written, found, len(examples.given), code(path.parent), compared_on, notes, one.card.sound, checks=checks
    )


def _compared_vectors(one: Exportable, examples: Examples, by_file: bool, pasted: dict[str, Any]) -> str:
    """A sentence with the largest difference of vectors by the code.

    Raises:
        PatchloomError: they differ.
    """
    with torch.inference_mode(), TemporaryDirectory() as folder:
        if not examples.whole:
            both = one.vectors(examples.given), pasted["vectors"](examples.given)
            how = f"vectors(waves) ({one.pooling} tokens) differ by at most {{:.1e}}."
        elif by_file:
            both = vectors_of_files(examples, Path(folder), one.vector_of, pasted["embed"])
            how = f"embed(file) ({one.pooling} tokens) differ by at most {{:.1e}} on {files_in_words(examples)}."
        else:
            whole = examples.whole
            both = torch.stack(list(map(one.vector_of, whole))), torch.stack(list(map(pasted["embed"], whole)))
            how = f"embed(image) ({one.pooling} tokens) differ by at most {{:.1e}} on {len(whole)} whole images."
        return f"Vectors by its {how.format(difference('vectors', *both))}"
