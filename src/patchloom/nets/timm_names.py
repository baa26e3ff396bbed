"""Weights of a ViT or Swin under other programs' names, brought under timm's: the same weights in the same order."""

from __future__ import annotations

import re

import torch
from torch import Tensor

_BLOCK = r"((?:^|.*\.)blocks\.\d+\.)"
_CHUNK = re.compile(r"(^|\.)blocks\.\d+\.(\d+\.)")  # DINOv2 trains its blocks in chunks, and counts them through
_SCALE = re.compile(_BLOCK + r"gamma_([12])$")
_BIAS = re.compile(_BLOCK + r"attn\.q_bias$")
_MERGING = re.compile(r"((?:^|.*\.)layers\.)(\d+)(\.downsample\..+)")
_COMPUTED = re.compile(r"(^|\.)layers\.\d+\.blocks\.\d+\.(attn\.relative_position_index|attn_mask)$")
_APART = re.compile(_BLOCK + r"attn\.q(_proj)?\.(weight|bias)$")


def timm_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of other programs with timm's names for what is in a ViT's blocks, and for register tokens.

    - ``blocks.0.7.``, the block 7 in a chunk, becomes ``blocks.7.`` (DINOv2).
    - ``gamma_1`` of LayerScale becomes ``ls1.gamma`` (BEiT, SimMIM).
    - ``q_bias`` and ``v_bias`` become ``qkv.bias``, with zeros for the keys (BEiT, SimMIM, Beyond Masking).
    - ``q``, ``k`` and ``v`` apart become ``qkv``.
    - ``register_tokens`` becomes ``reg_token`` (DINOv2).
    - ``layers.0.downsample.``, the patch merging that ends a Swin's stage, becomes ``layers.1.downsample.``, since in
      timm it begins the next one; what follows from the windows' sizes is left out (Swin, SimMIM).

    Class attention (``blocks_token``) is no block of a ViT and stays as it is.
    """
    state = _merging({_CHUNK.sub(r"\1blocks.\2", name): value for name, value in state.items()})
    named: dict[str, Tensor] = {}
    done: set[str] = set()
    for name, value in state.items():
        if name in done:
            continue
        if found := _SCALE.fullmatch(name):
            name = f"{found[1]}ls{found[2]}.gamma"
        elif name == "register_tokens" or name.endswith(".register_tokens"):
            name = name.removesuffix("register_tokens") + "reg_token"
        elif found := _BIAS.fullmatch(name):
            if values := _alike(state, [name, f"{found[1]}attn.v_bias"]):
                done.update(values)
                q, v = values.values()
                name, value = f"{found[1]}attn.qkv.bias", torch.cat([q, torch.zeros_like(q), v])
        elif found := _APART.fullmatch(name):
            if values := _alike(state, [f"{found[1]}attn.{one}{found[2] or ''}.{found[3]}" for one in "qkv"]):
                done.update(values)
                name, value = f"{found[1]}attn.qkv.{found[3]}", torch.cat(list(values.values()))
        named[name] = value
    return {name: value for name, value in named.items() if name not in done}


def _merging(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of a Swin's patch merging as timm's."""
    merging = {name: found for name in state if (found := _MERGING.fullmatch(name))}
    ending = {found[1] for found in merging.values() if found[2] == "0"}  # in timm nothing is merged before stage 0
    named = {}
    for name, value in state.items():
        if (found := merging.get(name)) and found[1] in ending:
            name = f"{found[1]}{int(found[2]) + 1}{found[3]}"
        if not _COMPUTED.search(name):
            named[name] = value
    return named


def _alike(state: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The weights of these names if all are there and can be put one below the other, else none."""
    found = {name: state[name] for name in names if name in state}
    shapes = {value.shape for value in found.values()}
    return found if len(found) == len(names) and len(shapes) == 1 and len(next(iter(shapes))) else {}
