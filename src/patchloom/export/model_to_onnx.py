"""``--to onnx`` of a classifier, segmenter or detector: a graph with normalisation, and the code that runs it.

Letters: b batch, c channels, h w height and width, k classes, m objects.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.loader import plain_batches
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.dense.checkpoint import load_dense
from patchloom.dense.detector import Detector
from patchloom.dense.segmenter import Segmenter
from patchloom.errors import PatchloomError
from patchloom.evaluate.calibration import describe_calibration
from patchloom.evaluate.classifier import Classifier, ClassifierCard, load_classifier
from patchloom.export.encoder import Export, require_packages, silence_libraries
from patchloom.export.examples import largest_difference
from patchloom.export.preprocessing import (
    READING,
    detecting_by_pillow,
    preparing_by_pillow,
    segmenting_by_pillow,
)
from patchloom.export.to_onnx import describe_file, export_error
from patchloom.nets.checkpoints.format import CLASSIFIER_FORMAT, EncoderCard
from patchloom.nets.checkpoints.read import read_metadata
from patchloom.nets.heads import OnEncoder
from patchloom.system.files import write_whole

_IMAGES = 8


class _Graph(nn.Module):
    """Module from images [b c h w] in [0, 1] of the model's size to its predictions."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: OnEncoder, card: EncoderCard) -> None:
        super().__init__()
        self.model: Any = model
        self.register_buffer("mean", torch.tensor(card.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(card.std).view(-1, 1, 1))

    def normalized(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


class _Classes(_Graph):
    """Calibrated probabilities [b k]."""

    def __init__(self, model: OnEncoder, card: EncoderCard, temperature: float) -> None:
        super().__init__(model, card)
        self.temperature = temperature

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        return torch.softmax(self.model(self.normalized(images)) / self.temperature, dim=1)


class _Pixels(_Graph):
    """Logits [b k h w] of each pixel."""

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        return F.interpolate(self.model(self.normalized(images)).main, self.model.size, mode="bilinear")


class _Objects(_Graph):
    """Boxes [m 4], labels [m] and scores [m] of a single image, and masks [m 28 28] if there are any."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """See the class."""
        (found,) = self.model(self.normalized(images), [self.model.size])
        return tuple(one for one in found if one is not None)


class _Form(NamedTuple):
    """Names and axes of a graph.

    Attributes:
        outputs: names of its outputs.
        batch: whether the number of images is free; else it is 1.
        says: description of input and outputs.
    """

    outputs: tuple[str, ...]
    batch: bool
    says: str


def model_to_onnx(run: str | Path, data: DataLike | None, out: str | Path | None) -> Export:
    """Write the graph and the code beside it, run it with onnxruntime, and compare with patchloom.

    Args:
        run: file of a classifier, segmenter or detector.
        data: images for the comparison; None: noise.
        out: file of the graph; the code has the same name with the suffix py. Default: beside the model.

    Raises:
        PatchloomError: if a library is missing, the model takes recordings, torch cannot write it, or onnxruntime's
            predictions differ.
    """
    require_packages("onnx", "onnx", "onnxscript", "onnxruntime")
    path = Path(out) if out is not None else Path(run).with_suffix(".onnx")
    if path.suffix != ".onnx":
        raise PatchloomError(f"--out is the file of a graph, so its name ends in .onnx, which {path} does not")
    classifies = CLASSIFIER_FORMAT in read_metadata(Path(run), "a model")
    model: Any
    card: Any
    model, card = load_classifier(run) if classifies else load_dense(run)
    if card.encoder.sound is not None:
        raise PatchloomError("--to onnx supports only models of images: recordings need patchloom predict")
    graph, form = _graph_of(model, card)
    images = _examples(model, data)
    code = _code(model, card, path, form)
    with TemporaryDirectory() as folder:  # existing files are replaced only after the comparison
        file = Path(folder) / "model.onnx"
        _write(graph, form, file, str(run), card)
        pasted: dict[str, Any] = {}
        exec(_code(model, card, file, form), pasted)
        difference, checks = _compared(graph, form, images, pasted["run"])
        write_whole(path, file.read_bytes())
    beside = path.with_suffix(".py")
    write_whole(beside, code)
    notes = (f"Its code is in {beside}, and needs onnxruntime, NumPy and Pillow.", form.says)
    kind = "images" if data is not None else "images of noise"
    return Export(path, None, difference, len(images), code, kind, notes, by="onnxruntime's", checks=tuple(checks))


def _graph_of(model: OnEncoder, card: Any) -> tuple[_Graph, _Form]:
    h, w = model.size
    takes = f"It takes images [{{}} {model.channels} {h} {w}], float32 in [0, 1], and normalises them"
    graph: _Graph
    if isinstance(model, Classifier):
        known = card.calibrated
        graph = _Classes(model, card.encoder, 1.0 if known is None else known.temperature)
        says = (
            f"{takes.format('batch')}; it gives probabilities [batch {model.classes}], {describe_calibration(known)}."
        )
        return graph.eval(), _Form(("probabilities",), True, says)
    if isinstance(model, Segmenter):
        graph = _Pixels(model, card.encoder)
        says = (
            f"{takes.format('batch')}; it gives logits [batch {model.classes} {h} {w}]. The size is fixed: its code "
            "moves this window over an image of any size, as predict does."
        )
        return graph.eval(), _Form(("logits",), True, says)
    assert isinstance(model, Detector)
    graph = _Objects(model, card.encoder)
    outputs = ("boxes", "labels", "scores", *["masks"] * model.masks)
    says = (
        f"{takes.format('1')}, one at a time; it gives boxes in pixels of that canvas, labels and scores"
        f"{' and masks of 28x28' * model.masks}, the highest score first. Proposals may reach into the padding of an "
        "image of another shape, which patchloom clips."
    )
    return graph.eval(), _Form(outputs, False, says)


def _examples(model: OnEncoder, data: DataLike | None) -> Tensor:
    """Return images [b c h w] in [0, 1] of the model's size."""
    if data is not None:
        batch = next(plain_batches(open_data(data).train, model.size, _IMAGES, channels=model.channels))
        return normalize(batch.views[0], (0.0,) * model.channels, (1.0,) * model.channels)
    generator = torch.Generator().manual_seed(0)
    h, w = model.size
    coarse = torch.rand(_IMAGES, model.channels, -(-h // 4), -(-w // 4), generator=generator)
    return coarse.repeat_interleave(4, 2).repeat_interleave(4, 3)[..., :h, :w]


def _write(graph: _Graph, form: _Form, file: Path, name: str, card: Any) -> None:
    images = torch.rand(2, graph.model.channels, *graph.model.size)  # a batch of one would be taken as a constant
    names: dict[str, Any] = {"input_names": ["images"], "output_names": [*form.outputs], "verbose": False}
    try:
        with silence_libraries():
            if form.batch:
                dynamic = {"images": {0: torch.export.Dim("batch")}}
                options: dict[str, Any] = {"dynamic_shapes": dynamic, "dynamo": True, "external_data": False}
                torch.onnx.export(graph, (images,), file, **names, **options)
            else:
                # torch.export cannot trace non-maximum suppression, whose number of boxes depends on the values
                free = {name: {0: "objects"} for name in form.outputs}
                torch.onnx.export(graph, (images[:1],), str(file), dynamo=False, dynamic_axes=free, **names)
            describe_file(file, {"classes": json.dumps(list(card.classes))})
    except Exception as problem:  # any error of the exporter means that it cannot write this model
        raise export_error(problem, name) from problem


def _compared(graph: _Graph, form: _Form, images: Tensor, run: Any) -> tuple[float, list[str]]:
    """Return the largest difference of the first output, and sentences on the others."""
    groups = [images, images[:1]] if form.batch else [images[i : i + 1] for i in range(len(images))]
    found = [0.0] * len(form.outputs)
    for some in groups:
        with torch.inference_mode():
            ours = graph(some)
        ours = ours if isinstance(ours, tuple) else (ours,)
        for i, (mine, its) in enumerate(zip(ours, map(torch.from_numpy, run(some.numpy())), strict=True)):
            if mine.shape != its.shape or (not mine.is_floating_point() and not torch.equal(mine, its)):
                raise PatchloomError(f"{form.outputs[i]} by onnxruntime differ: this is a bug, please report it")
            if mine.numel():
                found[i] = max(found[i], largest_difference(form.outputs[i], mine.float(), its.float(), "onnxruntime"))
    more = [f"Its {name} differ by at most {one:.1e}." for name, one in zip(form.outputs, found, strict=True)]
    return found[0], more


def _code(model: Any, card: Any, path: Path, form: _Form) -> str:
    """Return code that runs a graph on image files, with onnxruntime, NumPy and Pillow."""
    classes = "[\n" + "".join(f"    {name!r},\n" for name in card.classes) + "]"
    code = (
        "import numpy as np\nimport onnxruntime\nfrom PIL import Image, ImageOps\n\n"
        f'session = onnxruntime.InferenceSession({str(path)!r}, providers=["CPUExecutionProvider"])\n'
        f"CLASSES = {classes}\n\n\n"
        "def run(images):\n"
        f'    """Return {", ".join(form.outputs)} of images [b {model.channels} {model.size[0]} {model.size[1]}] in '
        '[0, 1]."""\n'
        f'    return session.run({[*form.outputs]!r}, {{"images": images}})\n'
    )
    if model.channels not in (1, 3):
        return code
    if isinstance(card, ClassifierCard):
        predict = (
            'def predict(file):\n    """Return the probability of each class of an image file."""\n'
            "    (probabilities,) = run(prepare(read(file)))\n"
            "    return dict(zip(CLASSES, probabilities[0].tolist()))\n"
        )
        return "\n\n".join([code, READING, preparing_by_pillow(model.size, model.channels, card.test_crop), predict])
    if isinstance(model, Segmenter):
        return "\n\n".join([code, READING, segmenting_by_pillow(model.size, model.channels, card.side)])
    return "\n\n".join([code, READING, detecting_by_pillow(model.size, model.channels, card.encoder.mean, model.sides)])
