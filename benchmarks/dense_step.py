"""Time and peak memory of segmentation and detection: a training step, and one test image.

    python benchmarks/dense_step.py                             # ViT-S/16 and ViT-B/16 at 512 and 1024 px, one image
    python benchmarks/dense_step.py --batch 2 --dtype bfloat16
    python benchmarks/dense_step.py --only "detect" --checkpointing       # keep no activations inside the blocks
    python benchmarks/dense_step.py --model vit_tiny_patch16_224 --size 128 --rounds 1      # a quick trial

Rows: UPerNet of 512 channels; the linear head on a frozen encoder; Mask R-CNN with ViTDet's heads, attention in windows
(as for a pre-training at 224 px) or over all patches; and with light heads. A step is forward, backward and AdamW, on
random images; the loss of segmentation is at the images' own size, and detection has eight objects per image. The test
is of one whole image, up to the class of each pixel in segmentation; a sliding window costs that once per crop, at the
crop's size. The detector has one class, so that untrained it finds its 100 objects, which all get masks. Peak memory is
that of a separate process, with weights, gradients and AdamW's moments; freed memory stays with the process.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from types import SimpleNamespace

import timm
import torch
from peaks import peak_in_subprocess
from torch.nn import functional as F

from patchloom.dense.backbone import window_of
from patchloom.dense.detector import Detector
from patchloom.dense.recipes import SEGMENT
from patchloom.dense.segmenter import Segmenter
from patchloom.estimate import seconds_of
from patchloom.nets.encode import patch_side
from patchloom.nets.performance import checkpoint_gradients
from patchloom.system.device import keep_freed_memory

ROWS = ("segment upernet", "segment linear", "detect windows", "detect full", "detect light")
CLASSES, OBJECTS = 150, 8


class Work:
    """Training step and test of one network on random images."""

    def __init__(self, row: str, model: str, size: int, batch: int, dtype: str, device: str, checkpointing: bool):
        torch.manual_seed(0)
        encoder = timm.create_model(model, img_size=size, num_classes=0)
        self.segments = row.startswith("segment")
        if self.segments:
            net = Segmenter(encoder, CLASSES, head=row.split()[1])
        else:
            before = (224 // patch_side(encoder),) * 2
            window = window_of(encoder, before) if row.endswith("windows") else None
            net = Detector(encoder, 1, masks=True, window=window, light=row.endswith("light"))
        self.net = net.to(device)
        checkpoint_gradients(net, checkpointing)
        self.optimizer = torch.optim.AdamW(net.groups(0.05, 0.75), lr=1e-4)
        self.images = torch.randn(batch, 3, size, size, device=device)
        self.autocast = partial(torch.autocast, device, torch.bfloat16, enabled=dtype == "bfloat16")
        self.truth = torch.randint(CLASSES, (batch, size, size), device=device)
        self.objects = self._objects(batch, size)

    @staticmethod
    def _objects(batch: int, size: int) -> list[SimpleNamespace]:
        found = []
        for _ in range(batch):
            corners = torch.rand(OBJECTS, 2) * size * 0.7
            boxes = torch.cat([corners, corners + size * (0.05 + 0.25 * torch.rand(OBJECTS, 2))], dim=1)
            masks = torch.zeros(OBJECTS, size, size, dtype=torch.bool)
            for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist(), strict=True):
                mask[y0:y1, x0:x1] = True
            labels, crowd = torch.zeros(OBJECTS, dtype=torch.int64), torch.zeros(OBJECTS, dtype=torch.bool)
            found.append(SimpleNamespace(boxes=boxes, labels=labels, masks=masks, crowd=crowd))
        return found

    def _loss(self) -> torch.Tensor:
        if not self.segments:
            return sum(self.net(self.images, [self.net.size] * len(self.images), self.objects).values())
        logits = self.net(self.images)
        each = [
            F.cross_entropy(F.interpolate(one, self.truth.shape[1:], mode="bilinear"), self.truth)
            for one in logits
            if one is not None
        ]
        return sum(weight * one for weight, one in zip((1, SEGMENT["small"].auxiliary), each, strict=False))

    def step(self) -> None:
        self.net.train()
        with self.autocast():
            loss = self._loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def test(self) -> None:
        self.net.eval()
        with torch.inference_mode(), self.autocast():
            if self.segments:
                F.interpolate(self.net(self.images[:1]).main, self.net.size, mode="bilinear").argmax(1)
            else:
                self.net(self.images[:1], [self.net.size])


def repeat(kind: str, *arguments) -> None:
    """Do two steps, because the optimiser's moments exist from the second step on."""
    keep_freed_memory()
    work = getattr(Work(*arguments), kind)
    work()
    work()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["vit_small_patch16_224", "vit_base_patch16_224"])
    parser.add_argument("--size", nargs="*", type=int, default=[512, 1024], help="height and width of the images")
    parser.add_argument("--batch", type=int, default=1, help="images of a training step")
    parser.add_argument("--dtype", nargs="*", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds for the median, after a warm-up")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations of blocks again")
    parser.add_argument(
        "--no-memory", action="store_true", help="do not measure peak memory, which needs two processes per row"
    )
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose names contain one of these")
    args = parser.parse_args()
    keep_freed_memory()
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, batch {args.batch}\n")
    print(
        "| model | px | dtype | head | step s | test s | step peak GiB | test peak GiB |\n|" + " --- |" * 8, flush=True
    )
    rows = [row for row in ROWS if any(map(row.count, args.only))]
    for model, size, dtype, row in (
        (model, size, dtype, row) for model in args.model for size in args.size for dtype in args.dtype for row in rows
    ):
        given = row, model, size, args.batch, dtype, args.device, args.checkpointing
        work = Work(*given)
        seconds = seconds_of({"step": work.step, "test": work.test}, args.device, args.rounds)
        del work
        peaks = [None if args.no_memory else peak_in_subprocess(repeat, args.device, kind, *given) for kind in seconds]
        cells = [f"{statistics.median(each):.3g}" for each in seconds.values()]
        cells += ["" if peak is None else f"{peak:.2f}" for peak in peaks]
        print("|", " | ".join([model, str(size), dtype, row, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
