"""``--to onnx``: a graph with normalisation of an encoder, classifier, segmenter or detector, run with onnxruntime.

Letters: b batch, c channels, h w height and width, n tokens, d width, k classes, m objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from patchloom.evaluate.classifier import Classifier, describe_calibration, load_classifier
from patchloom.export.encoder import Export, Exportable, silence_libraries
from patchloom.export.examples import Examples, describe_files, largest_difference, vectors_of_files
from patchloom.export.render import render
from patchloom.nets.checkpoints.format import CLASSIFIER_FORMAT, EncoderCard
from patchloom.nets.checkpoints.read import read_metadata
from patchloom.nets.heads import POOLED, select_pooling, summaries
from patchloom.system.files import write_whole
from patchloom.version import __version__

_IMAGES = 8
_LARGEST = 2**31 - 2**20  # bytes of weights: an ONNX file is a protobuf message of less than 2 GiB
# Half precision has 11 bits, and rounding errors accumulate over blocks. A difference beyond this fraction of the
# largest feature means that a weight or a product exceeds its range.
_HALF = 2e-2


class _Graph(nn.Module):
    """Module from images [b c h w] in [0, 1] of the model's size to named outputs; it normalises the images.

    Attributes:
        outputs: names of the outputs.
        batch: whether the number of images is free; else it is 1.
    """

    outputs: Sequence[str]
    batch = True
    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, card: EncoderCard) -> None:
        super().__init__()
        self.model: Any = model
        self.register_buffer("mean", torch.tensor(card.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(card.std).view(-1, 1, 1))

    def normalized(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std

    def write(self, file: Path, shape: Sequence[int], about: Mapping[str, str], name: str, instead: str = "") -> None:
        """Write the graph for images of ``shape`` [c h w] with torch's exporter, described by ``about``.

        Raises:
            PatchloomError: if torch cannot write the model, by its ``name``; ``instead`` ends the sentence.
        """
        import onnx  # an extra

        images = torch.rand(2, *shape)  # a batch of one would be taken as a constant
        names: dict[str, Any] = {"input_names": ["images"], "output_names": [*self.outputs], "verbose": False}
        try:
            with silence_libraries():
                if self.batch:
                    dynamic = {"images": {0: torch.export.Dim("batch")}}
                    options: dict[str, Any] = {"dynamic_shapes": dynamic, "dynamo": True, "external_data": False}
                    torch.onnx.export(self, (images,), file, **names, **options)
                else:
                    # torch.export cannot trace non-maximum suppression, whose number of boxes depends on the values
                    free = {name: {0: "objects"} for name in self.outputs}
                    torch.onnx.export(self, (images[:1],), str(file), dynamo=False, dynamic_axes=free, **names)
                model = onnx.load(file)
                graph = model.graph
                # instead of the exporter's metadata, which has local paths, values for users of the file
                ends = *graph.input, *graph.output
                for part in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *ends):
                    del part.metadata_props[:]
                for node in graph.node:
                    node.doc_string = ""
                onnx.helper.set_model_props(model, {**about, "patchloom": __version__})
                model.producer_name, model.producer_version = "patchloom", __version__
                onnx.save(model, file)
        except Exception as problem:  # any error of the exporter means that it cannot write this model
            first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            raise PatchloomError(f"torch cannot write {name} as ONNX ({first}){instead}") from problem

    def compare(
        self, images: Tensor, ours: Callable[[Tensor], Any], run: Callable[[Any], Any], half: bool = False
    ) -> dict[str, float]:
        """Return the largest difference of each output of the written graph, by ``run``, from ``ours``."""
        found = dict.fromkeys(self.outputs, 0.0)
        # at two batch sizes
        for some in (images, images[:1]) if self.batch else images.split(1):
            with torch.inference_mode():
                expected = ours(some)
            expected = expected if isinstance(expected, tuple) else (expected,)
            theirs = map(torch.from_numpy, run(some.numpy()))
            for name, mine, its in zip(self.outputs, expected, theirs, strict=True):
                if mine.shape != its.shape or (not mine.is_floating_point() and not torch.equal(mine, its)):
                    raise PatchloomError(f"{name} by onnxruntime differ: this is a bug, please report it")
                if mine.numel():
                    # the second output of an encoder is called features in the file, and vectors elsewhere
                    called = {"tokens": "features", "features": "vectors"}.get(name, name)
                    off, largest = (its.float() - mine.float()).abs().max().item(), mine.float().abs().max().item()
                    if not half:
                        off = largest_difference(called, mine.float(), its.float(), "onnxruntime")
                    elif not off <= _HALF * largest:  # also true for NaN
                        raise PatchloomError(
                            f"in half precision features differ by {off:.1e}, and the largest is {largest:.1e}: leave "
                            "out --fp16"
                        )
                    found[name] = max(found[name], off)
        return found


class _Features(_Graph):
    """Tokens [b n d] and vectors [b d] of an encoder; with ``half``, it uses half precision after the normalisation."""

    outputs = ("tokens", "features")

    def __init__(self, one: Exportable, half: bool) -> None:
        super().__init__(deepcopy(one.vit).half() if half else one.vit, one.card)
        self.pooling, self.own_norm, self.halved = one.pooling, one.pooled_norm, half

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        given = self.normalized(images)
        tokens = self.model.forward_features(given.half() if self.halved else given).float()
        tokens = tokens.flatten(1, 2) if tokens.ndim == 4 else tokens
        found = summaries(self.model, tokens)
        if self.own_norm:
            norm = self.model.fc_norm
            found = {name: norm(value.half()).float() if self.halved else norm(value) for name, value in found.items()}
        return tokens, select_pooling(self.pooling, found)


class _Classes(_Graph):
    """Calibrated probabilities [b k]."""

    outputs = ("probabilities",)

    def __init__(self, model: Classifier, card: EncoderCard, temperature: float) -> None:
        super().__init__(model, card)
        self.temperature = temperature

    def forward(self, images: Tensor) -> Tensor:
        return torch.softmax(self.model(self.normalized(images)) / self.temperature, dim=1)


class _Pixels(_Graph):
    """Logits [b k h w] of each pixel."""

    outputs = ("logits",)

    def forward(self, images: Tensor) -> Tensor:
        return F.interpolate(self.model(self.normalized(images)).main, self.model.size, mode="bilinear")


class _Objects(_Graph):
    """Boxes [m 4], labels [m] and scores [m] of a single image, and masks [m 28 28] if there are any."""

    batch = False

    def __init__(self, model: Detector, card: EncoderCard) -> None:
        super().__init__(model, card)
        self.outputs = ("boxes", "labels", "scores", *["masks"] * model.masks)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        (found,) = self.model(self.normalized(images), [self.model.size])
        return tuple(one for one in found if one is not None)


def to_onnx(one: Exportable, examples: Examples, path: Path, fp16: bool) -> Export:
    """Write the graph of an encoder, and compare features and, if Pillow can store the examples, vectors of files."""
    if one.pooling == "instance":
        raise PatchloomError("--to onnx does not support an instance head: use --pooling mean, or --to timm")
    size = sum(weight.numel() for weight in one.vit.state_dict().values()) * (2 if fp16 else 4)
    if size > _LARGEST:
        raise PatchloomError(
            f"an ONNX file holds less than 2 GiB, and the weights have {size / 2**30:.1f} GiB: "
            + ("use --to timm" if fp16 else "use --fp16, or --to timm")
        )
    if path.is_dir():
        raise PatchloomError(f"--out {path} is a folder: give a file, such as {path / 'encoder.onnx'}")
    import onnx  # an extra

    graph = _Features(one, fp16).eval()
    about = {
        "model": one.arguments["model_name"],
        "input": f"float32 [batch {one.channels} {one.size[0]} {one.size[1]}] in [0, 1]; the graph normalises it",
        "mean": json.dumps(list(one.card.mean)),
        "std": json.dumps(list(one.card.std)),
        "pooling": one.pooling,
        **({} if one.blend is None else {"blend": f"{one.blend:g}"}),
    }
    by_file = examples.by_file() and one.channels in (1, 3)
    code: dict[str, Any] = {"kind": "encoder", "size": one.size, "channels": one.channels, "outputs": graph.outputs}
    code |= {"by_file": by_file, "test_crop": 1.0, "pooled": POOLED[one.pooling]}

    def ours(images: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and vectors as in evaluations."""
        tokens = one.vit.forward_features(one.normalized(images))
        return tokens.flatten(1, 2) if one.hierarchical else tokens, one.vectors(images)

    with TemporaryDirectory() as folder:  # an existing file is replaced only after the comparison
        file, pasted = Path(folder) / "encoder.onnx", dict[str, Any]()
        graph.write(file, (one.channels, *one.size), about, one.card.name, ": use --to timm")
        exec(render("onnx.py.jinja", path=str(file), **code), pasted)
        found = graph.compare(examples.given, ours, pasted["run"], fp16)
        opset, session = onnx.load(file, load_external_data=False).opset_import[0].version, pasted["session"]
        takes, gives = (
            ", ".join(f"{its.name} {its.shape} {its.type.removeprefix('tensor(').rstrip(')')}" for its in some)
            for some in (session.get_inputs(), session.get_outputs())
        )
        described = f"Opset {opset}; takes {takes}; gives {gives}.".replace("'", "")
        checks = [f"Its vectors ({one.pooling} tokens) differ by at most {found['features']:.1e}. {described}"]
        if by_file:  # Pillow may round pixels differently, so no bound is set
            mine, its = vectors_of_files(examples, Path(folder), one.vector_of, pasted["embed"])
            checks.append(
                f"Vectors by its embed(file), which resizes with Pillow, differ by at most "
                f"{(its - mine).abs().max().item():.1e} on {describe_files(examples)}; their largest value is "
                f"{mine.abs().max().item():.1e}."
            )
        write_whole(path, file.read_bytes())
    return Export(
        path,
        None,
        found["tokens"],
        len(examples.given),
        render("onnx.py.jinja", path=str(path), **code),
        examples.called("images"),
        tuple(filter(None, (one.card.note, examples.why_noise))),
        by="onnxruntime's half-precision" if fp16 else "onnxruntime's",
        checks=tuple(checks),
    )


def model_to_onnx(run: str | Path, data: DataLike | None, path: Path) -> Export:
    """Write the graph of a classifier, segmenter or detector, and the code that runs it beside it.

    Args:
        run: file of the model.
        data: images for the comparison; None: noise.
        path: file of the graph; the code has the same name with the suffix py.

    Raises:
        PatchloomError: if the model takes recordings, torch cannot write it, or onnxruntime's predictions differ.
    """
    if path.suffix != ".onnx":
        raise PatchloomError(f"--out is the file of a graph, so its name ends in .onnx, which {path} does not")
    classifies = CLASSIFIER_FORMAT in read_metadata(Path(run), "a model")
    model: Any
    card: Any
    model, card = load_classifier(run) if classifies else load_dense(run)
    if card.encoder.sound is not None:
        raise PatchloomError("--to onnx supports only models of images: recordings need patchloom predict")
    (h, w), channels = model.size, model.channels
    takes = f"It takes images [{{}} {channels} {h} {w}], float32 in [0, 1], and normalises them"
    graph: _Graph
    code: dict[str, Any]
    if isinstance(model, Classifier):
        known = card.calibrated
        graph = _Classes(model, card.encoder, 1.0 if known is None else known.temperature)
        says = f"it gives probabilities [batch {model.classes}], {describe_calibration(known)}."
        code = {"kind": "classifier", "test_crop": card.test_crop}
    elif isinstance(model, Segmenter):
        graph = _Pixels(model, card.encoder)
        says = (
            f"it gives logits [batch {model.classes} {h} {w}]. The size is fixed: its code moves this window over an "
            "image of any size, as predict does."
        )
        code = {"kind": "segmenter", "side": card.side}
    else:
        graph = _Objects(model, card.encoder)
        takes += ", one at a time"
        says = (
            f"it gives boxes in pixels of that canvas, labels and scores{' and masks of 28x28' * model.masks}, the "
            "highest score first. Proposals may reach into the padding of an image of another shape, which patchloom "
            "clips."
        )
        code = {"kind": "detector", "mean": card.encoder.mean, "sides": model.sides}
    code |= {"size": model.size, "channels": channels, "outputs": graph.outputs, "classes": card.classes}
    code |= {"by_file": channels in (1, 3)}
    graph.eval()
    with TemporaryDirectory() as folder:  # existing files are replaced only after the comparison
        file, pasted = Path(folder) / "model.onnx", dict[str, Any]()
        graph.write(file, (channels, h, w), {"classes": json.dumps(list(card.classes))}, str(run))
        exec(render("onnx.py.jinja", path=str(file), **code), pasted)
        images = _example_images(model, data)
        found = graph.compare(images, graph, pasted["run"])
        write_whole(path, file.read_bytes())
    beside, text = path.with_suffix(".py"), render("onnx.py.jinja", path=str(path), **code)
    write_whole(beside, text)
    about = f"{takes.format('batch' if graph.batch else '1')}; {says}"
    notes = (f"Its code is in {beside}, and needs onnxruntime, NumPy and Pillow.", about)
    kind = "images" if data is not None else "images of noise"
    checks = tuple(f"Its {name} differ by at most {one:.1e}." for name, one in found.items())
    return Export(
        path, None, found[graph.outputs[0]], len(images), text, kind, notes, by="onnxruntime's", checks=checks
    )


def _example_images(model: Any, data: DataLike | None) -> Tensor:
    """Return images [b c h w] in [0, 1] of the model's size."""
    if data is not None:
        batch = next(plain_batches(open_data(data).train, model.size, _IMAGES, channels=model.channels))
        return normalize(batch.views[0], (0.0,) * model.channels, (1.0,) * model.channels)
    generator = torch.Generator().manual_seed(0)
    h, w = model.size
    coarse = torch.rand(_IMAGES, model.channels, -(-h // 4), -(-w // 4), generator=generator)
    return coarse.repeat_interleave(4, 2).repeat_interleave(4, 3)[..., :h, :w]
