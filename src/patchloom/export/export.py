"""The verb ``export``: an encoder goes home to timm, to the Hub or to ONNX, and proves that it arrived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchloom.arguments import PathLike, plain_path, validate_arguments
from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError, listing
from patchloom.export.encoder import Export, ExportPooling, default_out, load_exportable
from patchloom.export.examples import make_examples
from patchloom.export.to_timm import to_timm
from patchloom.nets.checkpoints.load import check_model

# which options are of which form alone, with what they are when nobody gives them
_OWN: dict[str, dict[str, Any]] = {
    "timm": {},
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
) -> Export:
    """Write an encoder for use without patchloom, run the code that uses it, and compare features of images or sounds.

    An instance head beside the encoder goes with it to timm, into a file whose name begins with the encoder's.

    Args:
        run: a run's folder, also of one that was stopped, an encoder's ``.safetensors`` file, or what a paper's own
            program saved of a model of the usual sizes.
        to: timm (weights, and code from a file's name to its vector), hf (a folder for the Hugging Face Hub, which timm
            and transformers load) or onnx (a graph with normalisation inside, for onnxruntime).
        data: images or recordings to compare on; if absent, those of the run, or noise where they are not to be had.
        out: the file to write, or of hf the folder; ``RUN/timm.safetensors``, ``RUN/hf`` or ``RUN/encoder.onnx`` if
            absent.
        pooling: what an image's vector is: mean of the patch tokens, class token, prefix (mean of class token and
            registers; timm and ONNX), both mean and class token, or instance (timm alone).
        model: timm's name of the model, where RUN is a file of weights alone.
        fp16: weights and products of onnx in half precision.
        license: of the weights, in the model card of hf, as the Hub calls it, such as apache-2.0; unknown if absent.
        push: a name on the Hub, such as me/photos-mae, to which the folder of hf is uploaded.
        public: whoever wants may see a repository that push makes; else it is private.

    Raises:
        PatchloomError: an unknown library, no encoder there, an option of another form, a library that is not
            installed, or features that differ after loading.
    """
    if to not in _OWN:
        raise PatchloomError(f"patchloom exports to {listing(_OWN)}, not to {to}: use --to timm")
    _check_options(to, {"fp16": fp16, "license": license, "push": push, "public": public})
    run = plain_path(run)
    check_model(run, model)
    if to == "hf":
        from patchloom.export.to_hub import to_hub  # with what a report needs, of which the others know nothing

        return to_hub(run, data, out, pooling, license, push, public, model)
    if to == "onnx":
        from patchloom.export.to_onnx import to_onnx

        return to_onnx(run, data, out, pooling, fp16, model)
    one = load_exportable(run, pooling, model)
    return to_timm(one, make_examples(run, data, one.card), Path(out) if out else default_out(run, "timm.safetensors"))


def _check_options(to: str, given: dict[str, Any]) -> None:
    """Refuse options that would be without effect."""
    for form, own in _OWN.items():
        for name, usual in own.items():
            if form != to and given[name] != usual:
                raise PatchloomError(f"--{name} is for --to {form}: leave it out with --to {to}")
    if given["public"] and given["push"] is None:
        raise PatchloomError("--public is for what --push uploads: give --push NAME, too, or leave it out")
