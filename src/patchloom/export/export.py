"""The verb ``export``: write an encoder for timm, the Hugging Face Hub or ONNX, and check the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from patchloom.arguments import plain_path
from patchloom.errors import PatchloomError, listing
from patchloom.export.encoder import Export, default_out, load_exportable
from patchloom.export.examples import make_examples, open_run_images
from patchloom.export.to_timm import to_timm
from patchloom.export.without_positions import remove_positions_of
from patchloom.nets.checkpoints.format import is_model
from patchloom.nets.checkpoints.origin import check_model
from patchloom.options import verbs
from patchloom.options.declare import verb

# options of single formats
_OWN = {"timm": ("without_positions",), "hf": ("license", "push", "public"), "onnx": ("fp16",)}


@verb(verbs.Export)
def export(options: verbs.Export) -> Export:
    """Write an encoder for use without patchloom, and compare its features with those of the exported code.

    An instance head is exported to timm only, as a separate file whose name begins with the encoder's.

    Raises:
        PatchloomError: if the format is unknown, there is no encoder, an option belongs to another format, a library is
            not installed, or features differ after loading.
    """
    _check_options(options)
    run, data, out, pooling, model = plain_path(options.run), options.data, options.out, options.pooling, options.model
    blend = 0.0 if options.start else options.blend
    if is_model(run):
        idle = {
            **{"pooling": pooling != "mean", "model": model is not None},
            **{"fp16": options.fp16, "blend": blend is not None},
        }
        if options.to != "onnx":
            raise PatchloomError(
                f"{run} is a classifier, segmenter or detector, which is exported as a whole to ONNX only: use --to "
                "onnx, or export the encoder of its run"
            )
        if used := [name for name, given in idle.items() if given]:
            raise PatchloomError(f"--{used[0]} is for encoders: leave it out with {run}")
        from patchloom.export.model_to_onnx import model_to_onnx

        return model_to_onnx(run, data, out)
    check_model(run, model)
    if options.to == "hf":
        from patchloom.export.to_hub import to_hub  # imports modules of the report, which the others do not need

        return to_hub(run, data, out, pooling, options.license, options.push, options.public, model, blend)
    if options.to == "onnx":
        from patchloom.export.to_onnx import to_onnx

        return to_onnx(run, data, out, pooling, options.fp16, model, blend)
    one = load_exportable(run, pooling, model, blend)
    if options.without_positions:
        source, why = open_run_images(run, data, one.card)
        if source is None:
            raise PatchloomError(f"--without_positions needs {one.card.modality.noun}, but {why}: give --data")
        one = replace(one, removal=remove_positions_of(one.vit, one.card, source))
    path = Path(out) if out else default_out(run, "timm.safetensors", blend)
    return to_timm(one, make_examples(run, data, one.card), path)


def _check_options(options: verbs.Export) -> None:
    """Refuse an unknown format, and options without effect."""
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
