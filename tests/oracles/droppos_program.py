"""Write tests/oracles/droppos_program.safetensors: position smoothing as DropPos' released script computes it.

The arithmetic of its ``engine_pretrain.py`` and of the loss in its ``models_DropPos_mae.py``, step by step in plain
Python and torch, without patchloom: ``python tests/oracles/droppos_program.py``. The older droppos.safetensors cannot
show the script's map, because Eq. 5's map was passed to the model there.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZE, GRID, SIGMA, IMAGES, VISIBLE = 224, 14, 1.0, 2, 49


def program_map(places: int, sigma: float) -> torch.Tensor:
    """Return the script's map [places places], which takes ``places`` for a square grid."""
    side, weights = int(math.sqrt(places)), torch.zeros(places, places)
    for i in range(places):
        for j in range(places):
            rows, columns = i // side - j // side, i % side - j % side
            weights[i, j] = math.exp(-(rows**2 + columns**2) / sigma**2)
    return weights / weights.sum(-1)  # divides columns


def main() -> None:
    n, places = GRID**2, (SIZE // GRID) ** 2
    smooth = program_map(places, SIGMA)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(IMAGES, VISIBLE, n, generator=generator, requires_grad=True)
    ids_keep = torch.stack([torch.randperm(n, generator=generator)[:VISIBLE] for _ in range(IMAGES)])
    mask_pos = (torch.rand(IMAGES, VISIBLE, generator=generator) < 0.75).float()
    # gathering rows for n columns leaves the other columns out
    rows = ids_keep[..., None].expand(-1, -1, n)
    labels = smooth.expand(IMAGES, -1, -1).gather(1, rows)
    loss = (-labels * logits.log_softmax(-1)).sum(-1) * mask_pos
    loss = loss.sum() / mask_pos.sum()
    loss.backward()
    tensors = {"smooth": smooth, "logits": logits.detach(), "ids_keep": ids_keep, "mask_pos": mask_pos}
    tensors |= {"loss": loss.detach()[None], "g.logits": logits.grad}
    config = json.dumps({"size": SIZE, "grid": GRID, "sigma": SIGMA})
    save_file(tensors, Path(__file__).with_name("droppos_program.safetensors"), {"config": config})


if __name__ == "__main__":
    main()
