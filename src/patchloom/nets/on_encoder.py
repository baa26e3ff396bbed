"""Nets on an encoder: what they are given, and a learning rate for each layer of it."""

from __future__ import annotations

from typing import Any

from timm.optim import param_groups_layer_decay
from torch import nn

from patchloom.nets.encode import input_channels, input_size, layer_patterns


class OnEncoder(nn.Module):
    """A net on an encoder, which is its submodule ``encoder_at``."""

    encoder_at = "encoder"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return input_size(self.get_submodule(self.encoder_at))

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return input_channels(self.get_submodule(self.encoder_at))

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, with layer-wise learning rate decay (``lr_scale``).

        As in facebookresearch/mae (util/lr_decay.py): patch embedding, tokens and positions are the lowest layer, each
        block is a layer, and everything else, the encoder's last norm included, is the top one, whose scale is 1. A
        layer's scale is ``layer_decay`` to the power of its distance from the top.
        """
        own = self.get_submodule(self.encoder_at).no_weight_decay()
        free = {f"{self.encoder_at}.{name}" for name in own} | {*_vectors(self)}
        return param_groups_layer_decay(self, weight_decay, free, layer_decay=layer_decay)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of parameter names by layer, for timm; names that match none are in the top layer."""
        stem, blocks = layer_patterns(self.get_submodule(self.encoder_at))
        begin = rf"^{self.encoder_at}\."
        return {"stem": f"{begin}{stem}", "blocks": [(f"{begin}{one}", order) for one, order in blocks]}


def _vectors(net: nn.Module) -> list[str]:
    """Names of parameters without weight decay: vectors such as tokens, and tables of relative position biases."""
    return [
        name
        for name, weight in net.named_parameters()
        if weight.numel() == weight.shape[-1] or name.endswith("relative_position_bias_table")
    ]
