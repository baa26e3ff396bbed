"""The verb ``export``: write an encoder for timm, the Hugging Face Hub or ONNX, and check the result."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from patchloom.arguments import plain_path
from patchloom.errors import PatchloomError, listing, pip_install
from patchloom.export.encoder import Export, default_out, load_exportable
from patchloom.export.examples import make_examples, open_run_images
from patchloom.export.to_timm import to_timm
from patchloom.export.without_positions import remove_positions_of
from patchloom.nets.checkpoints.format import is_model
from patchloom.nets.checkpoints.origin import check_model
from patchloom.options import verbs
from patchloom.options.declare import verb

# options of single formats, the libraries that they need, and the names of their files
_OWN = {"timm": ("without_positions",), "hf": ("license", "push", "public"), "onnx": ("fp16",)}
_LIBRARIES = {"timm": (), "hf": ("transformers",), "onnx": ("onnx", "onnxscript", "onnxruntime")}
_FILES = {"timm": "timm.safetensors", "hf": "hf", "onnx": "encoder.onnx"}


@verb(verbs.Export)
def export(options: verbs.Export) -> Export:
    """Write an encoder for use without patchloom, and compare its features with those of the exported code.

    An instance head is exported to timm only, as a separate file whose name begins with the encoder's.

    Raises:
        PatchloomError: if the format is unknown, there is no encoder, an option belongs to another format, a library is
            not installed, or features differ after loading.
    """
    if options.to not in _OWN:
        raise PatchloomError(f"--to {options.to} is not a format: choose from {listing(_OWN)}")
    for form, own in _OWN.items():
        for name in own:
            if form != options.to and getattr(options, name) not in (None, False):
                raise PatchloomError(f"--{name} is only for --to {form}: leave it out with --to {options.to}")
    if options.start and options.blend is not None:
        raise PatchloomError(f"--start is --blend 0: leave out --start or --blend {options.blend:g}")
    if options.public and options.push is None:
        raise PatchloomError("--public needs --push NAME: add it, or leave out --public")
    if absent := [name for name in _LIBRARIES[options.to] if find_spec(name) is None]:
        raise PatchloomError(f"--to {options.to} needs {listing(absent, 'and')}: {pip_install(options.to)}")
    if options.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", options.license):
        raise PatchloomError(
            f"--license {options.license} is not an identifier: give one in lower case, as listed by the Hub, such as "
            "apache-2.0, cc-by-4.0 or other"
        )
    if options.push is not None:
        from patchloom.export.to_hub import check_push

        check_push(options.push)
    run, data, to, model = plain_path(options.run), options.data, options.to, options.model
    out = None if options.out is None else Path(options.out)
    blend = 0.0 if options.start else options.blend
    if is_model(run):
        idle = {
            **{"pooling": options.pooling != "mean", "model": model is not None},
            **{"fp16": options.fp16, "blend": blend is not None},
        }
        if to != "onnx":
            raise PatchloomError(
                f"{run} is a classifier, segmenter or detector, which is exported as a whole to ONNX only: use --to "
                "onnx, or export the encoder of its run"
            )
        if used := [name for name, given in idle.items() if given]:
            raise PatchloomError(f"--{used[0]} is for encoders: leave it out with {run}")
        from patchloom.export.to_onnx import model_to_onnx

        return model_to_onnx(run, data, out or Path(run).with_suffix(".onnx"))
    check_model(run, model)
    one = load_exportable(run, options.pooling, model, blend)
    if to != "timm" and one.card.sound is not None:
        raise PatchloomError(f"--to {to} supports only encoders of images: use --to timm for recordings")
    path = out or default_out(run, "encoder-fp16.onnx" if options.fp16 else _FILES[to], blend)
    if to == "hf":
        from patchloom.export.to_hub import check_folder, to_hub  # modules of the report, which others do not need

        if one.pooling not in ("class", "mean"):
            raise PatchloomError(f"--to hf has no {one.pooling} pooling: choose class or mean, or use --to timm")
        check_folder(path)
        examples = make_examples(run, data, one.card)
        return to_hub(run, one, examples, path, options.license, options.push, options.public)
    if to == "onnx":
        from patchloom.export.to_onnx import to_onnx

        return to_onnx(one, make_examples(run, data, one.card), path, options.fp16)
    if options.without_positions:
        source, why = open_run_images(run, data, one.card)
        if source is None:
            raise PatchloomError(f"--without_positions needs {one.card.modality.noun}, but {why}: give --data")
        one = replace(one, removal=remove_positions_of(one.vit, one.card, source))
    return to_timm(one, make_examples(run, data, one.card), path)
