"""Pictures of predicted positions: DropPos Fig. 3, and MP3's rebuilt and mixed images (Figs. 14-15)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from patchloom.nets.geometry import Geometry
from patchloom.patches.partition import random_partition, share_of
from patchloom.patches.pictures import mark_wrong, mix_patches, put_together, scattered
from patchloom.questions.positions import DROPPOS_RATIOS, PositionPrediction, scores
from patchloom.questions.question import Sheet
from patchloom.sound import Sound

_POSITION_MASK_RATIO = 0.95
_NOTHING = "nothing landed"


def figure_3(
    geometry: Geometry,
    images: Tensor,
    predict: Callable[..., PositionPrediction],
    generator: torch.Generator,
    mask_ratios: Sequence[float] = DROPPOS_RATIOS["mask_ratio"],
) -> list[Sheet]:
    """Two sheets, over the mask ratios of Fig. 3: which patches are placed rightly, and the images put together again.

    ``predict`` places the patches of the images, at ratios that are named as those of `DROPPOS_RATIOS`; ``mask_ratios``
    are others than the figure's where an encoder cannot have these.
    """
    n, p = geometry.n, geometry.p
    marked, rebuilt = {"original": images}, {"original": images}
    for ratio in mask_ratios:
        if share_of(n, 1 - ratio) < 2:  # nothing to compare with
            continue
        answer = predict(mask_ratio=ratio, position_mask_ratio=_POSITION_MASK_RATIO)
        visible, placed = answer.visible, answer.places()
        if ratio == 0:
            rebuilt["given"] = put_together(images, p, visible, scattered(visible, answer.dropped, generator))
        marked[f"γ = {ratio}"] = mark_wrong(images, p, visible, placed)
        rebuilt[f"γ = {ratio}"] = put_together(images, p, visible, placed)
    dropped = n - share_of(n, 1 - _POSITION_MASK_RATIO)
    asked = f"At γ = 0 the places of {dropped} of {n} patches were withheld; γ is the share masked."
    return [
        Sheet("positions", f"{asked} What is shown was placed rightly, or its place was given.", marked, "masked"),
        Sheet(
            "rebuilt",
            f"{asked} Given: patches without a place, in random order. Then each stands where it was placed; where "
            "several landed, their mean.",
            rebuilt,
            _NOTHING,
        ),
    ]


def rebuilt_sheet(geometry: Geometry, images: Tensor, placed: dict[str, Tensor], generator: torch.Generator) -> Sheet:
    """Images put together from all their patches at the places [b n] that were predicted, by heading."""
    n, p = geometry.n, geometry.p
    everywhere = torch.arange(n, device=images.device).expand(len(images), -1)
    (order,) = random_partition(len(images), n, (n,), generator, images.device)
    columns = {"original": images, "given": put_together(images, p, everywhere, order)}
    columns |= {name: put_together(images, p, everywhere, places) for name, places in placed.items()}
    caption = (
        "Given: the patches without their places, in random order. Then each stands where it was placed, when a share "
        "η of the patches was barred from keys and values; where several landed, their mean."
    )
    return Sheet("rebuilt", caption, columns, _NOTHING)


def frames_sheet(
    geometry: Geometry, images: Tensor, answer: PositionPrediction, sound: Sound, generator: torch.Generator
) -> Sheet:
    """Recordings with their frames in disorder, and put back where each was predicted, with the scores of that."""
    p, visible, asked = geometry.p, answer.visible, answer.dropped
    columns = {
        "original": images,
        "in disorder": put_together(images, p, visible, scattered(visible, asked, generator)),
        "as put back": put_together(images, p, visible, answer.places()),
    }
    top, five, apart = (values[asked].mean().item() for values in scores(answer, geometry.grid).values())
    far = f"{apart:.1f} patches"
    if geometry.grid[0] == 1:
        frames = apart * p[1]
        far = f"{frames:.1f} frames ({1000 * frames * sound.hop_samples / sound.rate:.0f} ms)"
    noun = "frames" if p == (sound.bins, 1) else "patches"
    share, k = asked.float().mean().item(), visible.shape[1]
    caption = (
        f"In disorder: {round(share * k)} of {k} {noun}, whose positions were withheld, in random order. As put back: "
        f"each where it was placed; where several landed, their mean. Of those withheld, {top:.1%} are placed rightly "
        f"(top-1), and of {five:.1%} the right place is among the five likeliest (top-5); on average they are {far} "
        f"off."
    )
    return Sheet("rebuilt", caption, columns, _NOTHING)


def mixed_sheet(
    geometry: Geometry, images: Tensor, place: Callable[[Tensor], Tensor], generator: torch.Generator
) -> Sheet:
    """Two images taken apart, shuffled together, and each half of the patches rebuilt (MP3 Figs. 14-15).

    ``place`` tells where each patch [b n] of images [b c h w] is placed. Each image is mixed with the one before it.
    """
    others = images.roll(1, 0)
    everywhere = torch.arange(geometry.n, device=images.device).expand(len(images), -1)
    columns = {"image": images, "another": others}
    for name, mixed in zip(("first", "second"), mix_patches(images, others, geometry.p, generator), strict=True):
        columns[f"{name} set"] = mixed
        columns[f"{name} rebuilt"] = put_together(mixed, geometry.p, everywhere, place(mixed))
    caption = (
        "The patches of both images were shuffled together and dealt into two sets. Each set was given as if it were "
        "one image, without places; its keys and values come from its own context alone. Rebuilt: each patch stands "
        "where it was placed; where several landed, their mean."
    )
    return Sheet("mixed", caption, columns, _NOTHING)
