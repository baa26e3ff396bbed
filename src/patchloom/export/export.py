"""The verb ``export``: write an encoder for timm, the Hugging Face Hub or ONNX, and check the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from patchloom.arguments import PathLike, plain_path, validate_arguments
from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError, listing
from patchloom.export.encoder import Export, ExportPooling, default_out, load_exportable
from patchloom.export.examples import make_examples, open_run_images
from patchloom.export.to_timm import to_timm
from patchloom.export.without_positions import remove_positions_of
from patchloom.nets.checkpoints.format import is_model
from patchloom.nets.checkpoints.load import check_model

# options of single formats with their defaults
_OWN: dict[str, dict[str, Any]] = {
    "timm": {"without_positions": False},
    "hf": {"license": None, "push": None, "public": False},
    "onnx": {"fp16": False},
}


@validate_arguments
def export(
    run: PathLike,
    *,
    to: str = "timm",
    data: DataLike | None = None,
    out: str | Path | None = None,
    pooling: ExportPooling = "mean",
    model: str | None = None,
    fp16: bool = False,
    license: str | None = None,
    push: str | None = None,
    public: bool = False,
    start: bool = False,
    blend: float | None = None,
    without_positions: bool = False,
) -> Export:
    """Write an encoder for use without patchloom, and compare its features with those of the exported code.

    An instance head is exported to timm only, as a separate file whose name begins with the encoder's.

    Args:
        run: folder of a run, finished or stopped, ``.safetensors`` file of an encoder, or a published checkpoint of a
            model in a standard size; for onnx also the file of a classifier, segmenter or detector, as a whole.
        to: format: timm (weights and code), hf (folder for the Hugging Face Hub, loaded by timm and transformers), or
            onnx (graph with normalisation, for onnxruntime).
        data: images or recordings for the comparison; default: those of the run, or noise if they are unavailable.
        out: file to write, or folder for hf; default: ``RUN/timm.safetensors``, ``RUN/hf`` or ``RUN/encoder.onnx``.
        pooling: vector of an image: mean of the patch tokens, class token, prefix (mean of class token and registers;
            timm and ONNX only), both (mean and class token), or instance (timm only).
        model: timm's model name, if RUN is a file with weights only.
        fp16: half precision for onnx.
        license: licence identifier for the model card of hf, such as apache-2.0; default: unknown.
        push: repository on the Hub, such as me/photos-mae, to upload the folder of hf to.
        public: public visibility of a new repository; default: private.
        start: export the weights that the run began with (``--init``, ``--from``) instead of the trained ones, to names
            that begin with ``start``.
        blend: share of the trained weights in a blend with those that the run began with, such as 0.5 (WiSE-FT), to
            names that begin with ``blend``.
        without_positions: beside the weights, write a linear map of the patch tokens after which a linear probe cannot
            read row and column (as RASA), fitted to up to 500 images; timm only.

    Raises:
        PatchloomError: if the format is unknown, there is no encoder, an option belongs to another format, a library is
            not installed, or features differ after loading.
    """
    if to not in _OWN:
        raise PatchloomError(f"--to {to} is not a format: choose from {listing(_OWN)}")
    own = {"without_positions": without_positions, "fp16": fp16, "license": license, "push": push, "public": public}
    _check_options(to, own)
    run = plain_path(run)
    if start and blend is not None:
        raise PatchloomError(f"--start is --blend 0: leave out --start or --blend {blend:g}")
    if blend is not None and not 0 <= blend <= 1:
        raise PatchloomError(f"--blend is the share of the adapted weights, from 0 to 1, not {blend:g}")
    blend = 0.0 if start else blend
    if is_model(run):
        idle = {"pooling": pooling != "mean", "model": model is not None, "fp16": fp16, "blend": blend is not None}
        if to != "onnx":
            raise PatchloomError(
                f"{run} is a classifier, segmenter or detector, which is exported as a whole to ONNX only: use --to "
                "onnx, or export the encoder of its run"
            )
        if used := [name for name, given in idle.items() if given]:
            raise PatchloomError(f"--{used[0]} is for encoders: leave it out with {run}")
        from patchloom.export.model_to_onnx import model_to_onnx

        return model_to_onnx(run, data, out)
    check_model(run, model)
    if to == "hf":
        from patchloom.export.to_hub import to_hub  # imports modules of the report, which the others do not need

        return to_hub(run, data, out, pooling, license, push, public, model, blend)
    if to == "onnx":
        from patchloom.export.to_onnx import to_onnx

        return to_onnx(run, data, out, pooling, fp16, model, blend)
    one = load_exportable(run, pooling, model, blend)
    if without_positions:
        source, why = open_run_images(run, data, one.card)
        if source is None:
            raise PatchloomError(f"--without_positions needs {one.card.modality.noun}, but {why}: give --data")
        one = replace(one, removal=remove_positions_of(one.vit, one.card, source))
    path = Path(out) if out else default_out(run, "timm.safetensors", blend)
    return to_timm(one, make_examples(run, data, one.card), path)


def _check_options(to: str, given: dict[str, Any]) -> None:
    """Refuse options without effect."""
    for form, own in _OWN.items():
        for name, usual in own.items():
            if form != to and given[name] != usual:
                raise PatchloomError(f"--{name} is only for --to {form}: leave it out with --to {to}")
    if given["public"] and given["push"] is None:
        raise PatchloomError("--public needs --push NAME: add it, or leave out --public")
