"""``--to onnx``: an ONNX graph with normalisation, checked with onnxruntime."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError
from patchloom.export.encoder import (
    Export,
    Exportable,
    default_out,
    load_exportable,
    require_packages,
    silence_libraries,
)
from patchloom.export.examples import Examples, describe_files, largest_difference, make_examples, vectors_of_files
from patchloom.export.preprocessing import READING, preparing_by_pillow
from patchloom.nets.heads import POOLED, select_pooling, summaries
from patchloom.system.files import write_whole
from patchloom.version import __version__

_LARGEST = 2**31 - 2**20  # bytes of weights: an ONNX file is a protobuf message of less than 2 GiB
# Half precision has 11 bits, and rounding errors accumulate over blocks. A difference beyond this fraction of the
# largest feature means that a weight or a product exceeds its range.
_HALF = 2e-2


class _Graph(nn.Module):
    """Module from images [b c h w] in [0, 1] to tokens [b n d] and vectors [b d], float32.

    Args:
        one: the encoder to export.
        half: whether the encoder uses half precision; normalisation stays in float32.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, one: Exportable, half: bool) -> None:
        super().__init__()
        self.encoder = deepcopy(one.vit).half() if half else one.vit
        self.pooling, self.own_norm, self.halved = one.pooling, one.pooled_norm, half
        self.register_buffer("mean", torch.tensor(one.card.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(one.card.std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        given = (images - self.mean) / self.std
        tokens = self.encoder.forward_features(given.half() if self.halved else given).float()
        tokens = tokens.flatten(1, 2) if tokens.ndim == 4 else tokens
        found = summaries(self.encoder, tokens)
        if self.own_norm:
            norm: Any = self.encoder.fc_norm
            found = {name: norm(value.half()).float() if self.halved else norm(value) for name, value in found.items()}
        return tokens, select_pooling(self.pooling, found)


def to_onnx(
    run: str | Path,
    data: DataLike | None,
    out: str | Path | None,
    pooling: Any,
    fp16: bool,
    model: str | None = None,
    blend: float | None = None,
) -> Export:
    """Write the graph, run it with onnxruntime at two batch sizes, and compare."""
    require_packages("onnx", "onnx", "onnxscript", "onnxruntime")
    one = load_exportable(run, pooling, model, blend)
    _check(one, fp16)
    path = Path(out) if out else default_out(run, "encoder-fp16.onnx" if fp16 else "encoder.onnx", blend)
    if path.is_dir():
        raise PatchloomError(f"--out {path} is a folder: give a file, such as {path / 'encoder.onnx'}")
    examples = make_examples(run, data, one.card)
    by_file = examples.by_file() and one.channels in (1, 3)
    with TemporaryDirectory() as folder:  # an existing file is replaced only after the comparison
        file = Path(folder) / "encoder.onnx"
        _write(_Graph(one, fp16).eval(), one, file)
        pasted: dict[str, Any] = {}
        exec(_code(one, file, by_file), pasted)
        found, vectors = _compared(one, examples.given, pasted["run"], fp16)
        about = _about(file, pasted["session"])
        checks = [f"Its vectors ({one.pooling} tokens) differ by at most {vectors:.1e}. {about}"]
        if by_file:
            checks.append(_by_files(one, examples, Path(folder), pasted["embed"]))
        write_whole(path, file.read_bytes())
    return Export(
        path,
        None,
        found,
        len(examples.given),
        _code(one, path, by_file),
        f"images{' of noise' * bool(examples.why_noise)}",
        tuple(filter(None, (one.card.note, examples.why_noise))),
        by="onnxruntime's half-precision" if fp16 else "onnxruntime's",
        checks=tuple(checks),
    )


def _check(one: Exportable, fp16: bool) -> None:
    if one.card.sound is not None:
        raise PatchloomError("--to onnx supports only encoders of images: use --to timm for recordings")
    if one.pooling == "instance":
        raise PatchloomError("--to onnx does not support an instance head: use --pooling mean, or --to timm")
    size = sum(weight.numel() for weight in one.vit.state_dict().values()) * (2 if fp16 else 4)
    if size > _LARGEST:
        raise PatchloomError(
            f"an ONNX file holds less than 2 GiB, and the weights have {size / 2**30:.1f} GiB: "
            + ("use --to timm" if fp16 else "use --fp16, or --to timm")
        )


def _write(graph: _Graph, one: Exportable, file: Path) -> None:
    images = torch.rand(2, one.channels, *one.size)  # a batch of one would be taken as a constant
    try:
        with silence_libraries():
            torch.onnx.export(
                graph,
                (images,),
                file,
                input_names=["images"],
                output_names=["tokens", "features"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                dynamo=True,
                external_data=False,
                verbose=False,
            )
            describe_file(file, _description(one))
    except Exception as problem:  # any error of the exporter means that it cannot write this encoder
        raise export_error(problem, one.card.name, ": use --to timm") from problem


def export_error(problem: Exception, name: str, instead: str = "") -> PatchloomError:
    """Return the error about a model ``name`` that torch's exporter cannot write; ``instead`` ends the sentence."""
    first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return PatchloomError(f"torch cannot write {name} as ONNX ({first}){instead}")


def describe_file(file: Path, about: Mapping[str, str]) -> None:
    """Replace the exporter's metadata, which has local paths, by values for users of the file."""
    import onnx

    model = onnx.load(file)
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        del part.metadata_props[:]
    for node in graph.node:
        node.doc_string = ""
    onnx.helper.set_model_props(model, {**about, "patchloom": __version__})
    model.producer_name, model.producer_version = "patchloom", __version__
    onnx.save(model, file)


def _description(one: Exportable) -> dict[str, str]:
    return {
        "model": one.arguments["model_name"],
        "input": f"float32 [batch {one.channels} {one.size[0]} {one.size[1]}] in [0, 1]; the graph normalises it",
        "mean": json.dumps(list(one.card.mean)),
        "std": json.dumps(list(one.card.std)),
        "pooling": one.pooling,
        **({} if one.blend is None else {"blend": f"{one.blend:g}"}),
    }


def _compared(one: Exportable, images: Tensor, run: Any, fp16: bool) -> tuple[float, float]:
    """Return the largest differences of tokens and of vectors, for a batch of all images and of the first one."""
    with torch.inference_mode():
        ours = one.vit.forward_features(one.normalized(images))
        ours = ours.flatten(1, 2) if one.hierarchical else ours
    found = [0.0, 0.0]
    for count in (len(images), 1):
        theirs = [torch.from_numpy(array) for array in run(images[:count].numpy())]
        for i, (mine, its) in enumerate(zip((ours[:count], one.vectors(images[:count])), theirs, strict=True)):
            what = ("features", "vectors")[i]
            found[i] = max(found[i], _half(mine, its) if fp16 else largest_difference(what, mine, its, "onnxruntime"))
    return found[0], found[1]


def _half(ours: Tensor, theirs: Tensor) -> float:
    found = (theirs - ours).abs().max().item()
    largest = ours.abs().max().item()
    if not found <= _HALF * largest:  # also true for NaN
        raise PatchloomError(
            f"in half precision features differ by {found:.1e}, and the largest is {largest:.1e}: leave out --fp16"
        )
    return found


def _about(file: Path, session: Any) -> str:
    """Describe the opset, inputs and outputs of the file."""
    import onnx

    opset = onnx.load(file, load_external_data=False).opset_import[0].version
    takes, gives = (
        ", ".join(f"{one.name} {one.shape} {one.type.removeprefix('tensor(').rstrip(')')}" for one in some)
        for some in (session.get_inputs(), session.get_outputs())
    )
    return f"Opset {opset}; takes {takes}; gives {gives}.".replace("'", "")


def _by_files(one: Exportable, examples: Examples, folder: Path, embed: Any) -> str:
    """Return a sentence on vectors of files. Pillow may round pixels differently, so no bound is set."""
    ours, theirs = vectors_of_files(examples, folder, one.vector_of, embed)
    found, largest = (theirs - ours).abs().max().item(), ours.abs().max().item()
    return (
        f"Vectors by its embed(file), which resizes with Pillow, differ by at most {found:.1e} on "
        f"{describe_files(examples)}; their largest value is {largest:.1e}."
    )


def _code(one: Exportable, path: Path, by_file: bool) -> str:
    h, w = one.size
    pillow = "from PIL import Image, ImageOps\n" if by_file else ""
    code = (
        f"{'import numpy as np' + chr(10) if by_file else ''}import onnxruntime\n{pillow}\n"
        f'session = onnxruntime.InferenceSession({str(path)!r}, providers=["CPUExecutionProvider"])\n\n\n'
        "def run(images):\n"
        f'    """Return tokens [b n d] and vectors [b d] of images [b {one.channels} {h} {w}].\n\n'
        f"    The vectors are {POOLED[one.pooling]}. The images are float32 in [0, 1]; the graph normalises them.\n"
        '    """\n'
        '    return session.run(["tokens", "features"], {"images": images})\n'
    )
    if not by_file:
        return code
    embed = (
        'def embed(file):\n    """Return the vector [d] of an image file."""\n'
        "    return run(prepare(read(file)))[1][0]\n"
    )
    return "\n\n".join([code, READING, preparing_by_pillow(one.size, one.channels), embed])
