"""Students: backbones of timm with linear heads.

Letters: b batch, c channels, h w height and width, d width of the teacher.
"""

from __future__ import annotations

import math
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError, closest_word
from patchloom.nets.build import on_meta
from patchloom.nets.optimizer import parameter_groups
from patchloom.sizes import in_pixels


def create_backbone(model: str, options: dict[str, Any]) -> Any:
    """Create a backbone without a classifier and with random weights."""
    if model not in timm.list_models():
        near = closest_word(model, timm.list_models())
        hint = f"did you mean {near}?" if near else "timm.list_models() lists the names"
        raise PatchloomError(f"--student {model} is no model of timm: {hint}")
    try:
        return timm.create_model(model, pretrained=False, num_classes=0, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError) as problem:
        reason = " ".join(str(problem).split())
        raise PatchloomError(f"--student {model} does not fit these images ({reason}): choose another") from problem


def student_options(model: str, size: tuple[int, int], channels: int) -> dict[str, int | list[int]]:
    """Return the arguments of ``timm.create_model`` for images of this size: a ViT or Swin needs it, a CNN does not."""
    plain: dict[str, int | list[int]] = {"in_chans": channels}
    with on_meta():
        sized = getattr(getattr(create_backbone(model, dict(plain)), "patch_embed", None), "img_size", None) is not None
    return plain | ({"img_size": [*size]} if sized else {})


class Student(nn.Module):
    """Backbone with linear heads for the pooled and the dense features of a teacher.

    The heads are discarded after training.

    Args:
        backbone: model of timm without a classifier.
        size: height and width of the images.
        channels: channels of the images.
        width: width d of the teacher.
        name: name of the backbone, for errors.
    """

    backbone: Any

    def __init__(self, backbone: Any, size: tuple[int, int], channels: int, width: int, name: str):
        super().__init__()
        self.backbone = backbone
        self.last = False  # whether a map is [b h w c], as a Swin's
        self._prefix = getattr(backbone, "num_prefix_tokens", 0)
        training = backbone.training
        with torch.no_grad():
            try:
                found = backbone.eval().forward_features(torch.zeros(2, channels, *size))
            except (RuntimeError, AssertionError) as problem:
                known = getattr(backbone, "feature_info", None) or ()
                stride = max((int(one["reduction"]) for one in known if "reduction" in one), default=0)
                if stride > min(size):
                    raise PatchloomError(
                        f"images of {in_pixels(size)} pixels are too small for --student {name}, whose stride is "
                        f"{stride}: give --side {stride} or more"
                    ) from problem
                reason = " ".join(str(problem).split())
                raise PatchloomError(
                    f"--student {name} takes no images of {in_pixels(size)} pixels ({reason}): give another --side or "
                    "--student"
                ) from problem
            wide = int(backbone.num_features)
            grid = getattr(getattr(backbone, "patch_embed", None), "grid_size", None) or (0,)
            shapes = isinstance(found, Tensor) and found.ndim == 4 and wide in (found.shape[1], found.shape[3])
            if shapes:
                self.last = found.shape[1] != wide
            elif not (
                isinstance(found, Tensor) and found.ndim == 3 and found.shape[1] == self._prefix + math.prod(grid)
            ):
                raise PatchloomError(f"--student {name} has no map of features: choose a CNN or a plain ViT")
            pooled = backbone.forward_head(found, pre_logits=True)
        backbone.train(training)
        if pooled.ndim != 2:
            raise PatchloomError(f"--student {name} has no pooled features: choose another model of timm")
        self.pooled_head, self.dense_head = nn.Linear(pooled.shape[1], width), nn.Linear(wide, width)

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Return parameter groups for an optimiser; all layers of a student learn at the same rate."""
        assert layer_decay == 1
        return parameter_groups(self, weight_decay)

    def forward(self, images: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Predict the teacher's pooled features [b d], and those of a ``grid`` of n patches [b n d]."""
        features = found = self.backbone.forward_features(images)  # a map [b h w c], a CNN's map, or tokens
        if found.ndim == 3:
            features = found[:, self._prefix :].unflatten(1, self.backbone.patch_embed.grid_size)
        elif not self.last:
            features = found.permute(0, 2, 3, 1)
        dense = self.dense_head(features).permute(0, 3, 1, 2)
        dense = F.interpolate(dense.float(), grid, mode="bilinear", align_corners=False)
        pooled = self.pooled_head(self.backbone.forward_head(found, pre_logits=True))
        return pooled.float(), dense.flatten(2).transpose(1, 2)


def pooled_features(backbone: nn.Module, images: Tensor) -> Tensor:
    """Return a backbone's pooled features [b c], which timm's classifier would get, of images [b c h w]."""
    model: Any = backbone
    return model.forward_head(model.forward_features(images), pre_logits=True).float()
