"""Small segmenters and detectors with their cards."""

import torch
from perturbing import perturbed

from patchloom.dense.checkpoint import DenseCard
from patchloom.dense.detector import Detector
from patchloom.dense.segmenter import Segmenter
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.finetune import at_size

SIZES = {"embed_dim": 16, "depth": 4, "num_heads": 2}
SEGMENTER = {"head": "upernet", "head_width": 16, "auxiliary": True}
DETECTOR = {"masks": True, "width": 16, "window": 2, "light": True}
CLASSES = ("sky", "road", "tree")


def a_model(kind: str, size: tuple[int, int], **arguments) -> tuple[Segmenter | Detector, DenseCard]:
    """Return a model with perturbed weights, at another size than in pre-training, and its card."""
    torch.manual_seed(0)
    spec = EncoderSpec("nano", (32, 32), 8, positions="sincos", options=SIZES)
    encoder = EncoderCard(spec, (0.5,) * 3, (0.25,) * 3, "mae", "runs/small")
    net = Segmenter if kind == "segment" else Detector
    model = net(at_size(build_encoder(spec), encoder, size, "learned"), len(CLASSES), **arguments)
    perturbed(model, 0.02)
    side = size[0] if kind == "segment" else None
    about = ("photos", "f" * 16, 1, {"recipe": "small", "lr": 1e-3})
    ids = tuple(range(len(CLASSES))) if kind == "segment" else ()
    return model.eval(), DenseCard(kind, encoder, "learned", size, side, arguments, CLASSES, *about, ids=ids)
