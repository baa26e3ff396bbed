"""Adaptation of weights to an encoder's sizes, as in timm, with a description of every change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed, resize_rel_pos_bias_table
from timm.models import adapt_input_conv
from timm.models.swin_transformer import WindowAttention

from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.read import State
from patchloom.nets.encode import grid_size, patch_count
from patchloom.nets.swin import Encoder, PlainViT

POSITIONS_KEY, PROJECTION_KEY, BIASES_KEY = "pos_embed", "patch_embed.proj.weight", "relative_position_bias_table"
_TOKENS = ("cls_token", "dist_token", "reg_token")  # in their order before the patches; dist_token is DeiT's

OptionalGrid = tuple[int, int] | None


class Misfit(PatchloomError):
    """Weights that do not fit an encoder; the remedy is for the settings of a training.

    Args:
        fact: description of the difference.
        remedy: settings of the encoder that the weights fit.
    """

    def __init__(self, fact: str, remedy: str):
        super().__init__(f"{fact}: {remedy}")
        self.fact = fact


def fit_projection(fitting: State, target: State) -> list[str]:
    """Adapt the patch projection [d c p p] to the encoder's patch size and channels."""
    value, own = fitting.get(PROJECTION_KEY), target[PROJECTION_KEY]
    if value is None or value.ndim != 4 or len(value) != len(own) or not value.numel():
        return []
    changes = []
    if value.shape[2:] != own.shape[2:]:
        changes.append(
            f"{PROJECTION_KEY}: from patches of {format_grid(value.shape[2:])} to {format_grid(own.shape[2:])} pixels"
        )
        value = resample_patch_embed(value, list(own.shape[2:]))
    if value.shape[1] == 3 != own.shape[1]:  # timm's rule is for colour images
        how = "as their sum" if own.shape[1] == 1 else f"repeated in turn, times 3/{own.shape[1]}"
        changes.append(f"{PROJECTION_KEY}: from 3 channels to {own.shape[1]}, {how}")
        value = adapt_input_conv(own.shape[1], value)
    fitting[PROJECTION_KEY] = value
    return changes


def token_counts(state: State) -> dict[str, int]:
    """Return the tokens that stand before the patches, and their numbers."""
    return {name: state[name].shape[1] for name in _TOKENS if name in state and state[name].ndim == 3}


def square_grid(entries: int, tokens: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of position entries of tokens, and the side of the square grid of the rest; 0, 0 without one.

    timm has entries for all tokens before the patches, or for none; DINOv2 for the class token only.
    """
    for prefix in _prefixes(tokens):
        side = math.isqrt(max(0, entries - prefix))
        if side and side**2 == entries - prefix:
            return prefix, side
    return 0, 0


def _prefixes(tokens: Mapping[str, int]) -> tuple[int, int, int]:
    return sum(tokens.values()), tokens.get("cls_token", 0), 0


def fit_positions(
    vit: Encoder, source: str, weights: State, fitting: State, target: State, grid: OptionalGrid
) -> list[str]:
    """Adapt position embeddings [1 prefix+n d] to the encoder's tokens and grid.

    If the encoder has no position for a token, the token's position is added to it, which keeps the sum.
    """
    table, own = fitting.get(POSITIONS_KEY), target.get(POSITIONS_KEY)
    if table is None or table.ndim != 3:
        return []
    assert own is not None  # weights that fit the encoder have no other names
    if (len(table), table.shape[2]) != (1, own.shape[2]):
        return []
    changes, tokens, wanted = [], token_counts(weights), token_counts(target)
    new, n = grid_size(vit), patch_count(vit)
    entries = own.shape[1] > n
    prefix = table.shape[1] - n  # entries of other tokens
    old: OptionalGrid = None  # grid of the rest; None: the encoder's
    if grid is not None and table.shape[1] - math.prod(grid) in _prefixes(tokens):
        prefix, old = table.shape[1] - math.prod(grid), grid
    elif table.shape != own.shape or tokens != wanted:
        others, side = square_grid(table.shape[1], tokens)
        if side:
            prefix, old = others, None if side**2 == n else (side, side)
        elif prefix not in _prefixes(tokens):
            raise Misfit(
                f"{POSITIONS_KEY} in {source} has {table.shape[1]} entries, which fit no square grid of patches",
                "give the --img_size and --patch_size of the file",
            )
    patches = table[:, prefix:]
    if old is None and new[0] != new[1]:
        changes.append(f"{POSITIONS_KEY}: for {n} patches in a grid that is not stated, taken for {format_grid(new)}")
    elif old not in (None, new):
        changes.append(f"{POSITIONS_KEY}: from a grid of {format_grid(old)} to {format_grid(new)}")
        patches = resample_abs_pos_embed(patches, list(new), list(old), num_prefix_tokens=0)
    if prefix == tokens.get("cls_token") != sum(tokens.values()):  # DINOv2's register tokens have no positions
        tokens = {"cls_token": prefix}
    had = dict(zip(tokens, table[:, :prefix].split(list(tokens.values()), dim=1), strict=True)) if prefix else {}
    for name, entry in had.items():
        if name not in wanted:
            changes.append(f"{POSITIONS_KEY}: without the entry of {name}")
        elif not entries and fitting[name].shape == entry.shape:
            fitting[name] = fitting[name] + entry  # not in place, to keep the source
            changes.append(f"{name}: with its entry of {POSITIONS_KEY}, because this encoder has no place for it")
    kept = []
    for name, count in wanted.items() if entries else ():
        kept.append(had.get(name, table.new_zeros(1, count, table.shape[2])))
        if name not in had:
            changes.append(f"{POSITIONS_KEY}: zero for {name}")
    fitting[POSITIONS_KEY] = torch.cat([*kept, patches], dim=1)
    return changes


def fit_biases(vit: Encoder, fitting: State, target: State) -> list[str]:
    """Adapt a Swin's tables of relative position biases to the encoder's windows."""
    changes = []
    for name, table in fitting.items():
        own = target[name]
        if not name.endswith(BIASES_KEY) or table.shape == own.shape or table.shape[1:] != own.shape[1:]:
            continue
        # from square windows, which nearly all are; others are rejected like any other shape that differs
        old = round((math.isqrt(len(table)) + 1) / 2)
        if len(table) == (2 * old - 1) ** 2:
            new = cast(WindowAttention, vit.get_submodule(name.rpartition(".")[0])).window_size
            fitting[name] = resize_rel_pos_bias_table(table, new_window_size=new, new_bias_shape=own.shape)
            changes.append(f"{name}: from windows of {old}x{old} to {format_grid(new)}")
    return changes


def resize_input(vit: PlainViT, size: tuple[int, int]) -> None:
    """Set the input size of an encoder in place; its position embeddings are resampled (bicubic, as in timm).

    timm before 1.0.31 makes fixed embeddings trainable, and does not resample them if the number of patches is the
    same, so they are resampled here.
    """
    table, grid = vit.pos_embed, grid_size(vit)
    vit.set_input_size(img_size=size)
    if table is None or grid_size(vit) == grid:
        return
    prefix = table.shape[1] - grid[0] * grid[1]
    with torch.no_grad():
        new = resample_abs_pos_embed(table, list(grid_size(vit)), list(grid), num_prefix_tokens=prefix)
    vit.pos_embed = torch.nn.Parameter(new, requires_grad=table.requires_grad)


def format_grid(sizes: tuple[int, ...]) -> str:
    """Format sizes, such as 14x14."""
    return "x".join(map(str, sizes)) or "a scalar"
