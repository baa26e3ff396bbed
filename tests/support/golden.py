"""Golden vectors from the authors' code, in the files that this code saves and patchloom reads."""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from torch import Tensor

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.fit import inherit, load_published
from patchloom.nets.checkpoints.programs import (
    BEYOND_MASKING_PROGRAM,
    DROPPOS_PROGRAM,
    EXTREMA_PROGRAM,
    LUT_PROGRAM,
    MAE_PROGRAM,
    TEACHER_PREFIX,
    NameRules,
    timm_names,
    translate_names,
)

FOLDER = Path(__file__).parents[1] / "oracles"
PROGRAMS = {
    "mae": MAE_PROGRAM,
    "droppos": DROPPOS_PROGRAM,
    "droppos_plain": DROPPOS_PROGRAM,
    "lut": LUT_PROGRAM,
    "extrema": EXTREMA_PROGRAM,
    "mask_zoom_in": BEYOND_MASKING_PROGRAM,
}


class Oracle:
    """File of golden vectors; weights and gradients are renamed by the tables of the package."""

    def __init__(self, name: str):
        self.program = PROGRAMS.get(name)  # None: vectors of one step of a program, without weights
        with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
            self.config = json.loads(file.metadata()["config"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def theirs(self, prefix: str) -> dict[str, Tensor]:
        """Return the entries that begin with ``prefix``, by the authors' names."""
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}

    def under(self, prefix: str, names: NameRules | None = None) -> dict[str, Tensor]:
        """Return weights ('w.') or gradients ('g.') by patchloom's names."""
        return translate_names(self.program, names or self.program.names, timm_names(self.theirs(prefix)))[0]

    def teacher(self, prefix: str) -> dict[str, Tensor]:
        """Return ExtreMA's teacher by patchloom's names."""
        theirs = {f"momentum_encoder.{name}": value for name, value in self.theirs(prefix).items()}
        ours = translate_names(self.program, self.program.names, theirs)[0]
        return {name.removeprefix(f"{TEACHER_PREFIX}."): value for name, value in ours.items()}

    def saved(self) -> dict[str, object]:
        weights = self.theirs("w.")
        if self.program is EXTREMA_PROGRAM:  # a MoCo v3 at heart
            return {"epoch": 300, "arch": "vit_base", "state_dict": {f"module.{key}": w for key, w in weights.items()}}
        more = {"epoch": 299, "args": argparse.Namespace(model="vit_base_patch16")}
        if self.program is LUT_PROGRAM:
            more["model_ema"] = {f"ema.{key}": weight for key, weight in self.theirs("t.").items()}
        return {"model": weights} | more

    def encoder(self, **options):
        c = self.config
        sizes = {"embed_dim": c["dim"], "depth": c["depth"], "num_heads": c["heads"], **options}
        return build_encoder(EncoderSpec("vit_tiny_patch16_224", (c["img"],) * 2, c["patch"], options=sizes))

    def decoder_options(self) -> dict[str, int]:
        c = self.config
        return {"decoder_width": c["ddim"], "decoder_depth": c["ddepth"], "decoder_heads": c["dheads"]}

    def load(self, task: torch.nn.Module) -> None:
        """Initialise from a file of the authors' code, like ``--init``; it must fill the whole task."""
        # fixed tables: ours are computed, so they are compared rather than loaded
        for key in ("w.decoder_pos_embed", "w.aux_decoder_pos_embed"):
            if key in self.tensors:
                close(task.questions["pixels"].decoder.positions, self.tensors[key][0, 1:])
        if (table := self.under("w.").get("encoder.pos_embed")) is not None:
            close(task.encoder.pos_embed, table)
        for weight in task.parameters():
            weight.data.fill_(torch.nan)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "pretrained.pth"
            torch.save(self.saved(), path)
            done = load_published(task.encoder, path, task=self.program.task)
            told = inherit(done.foreign, task, True, str(path))
        assert done.foreign.program is self.program and not done.missing and not any("Left" in line for line in told)
        assert all(value.isfinite().all() for value in task.state_dict().values())


def close(ours: Tensor, theirs: Tensor) -> None:
    """Check that the relative difference of the whole tensor is below 1e-5."""
    assert ours.shape == theirs.shape
    error = (ours.detach().double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-12)
    assert error < 1e-5, f"relative difference {error:.2e}"


def gradients_agree(task: torch.nn.Module, oracle: Oracle) -> None:
    expected = oracle.under("g.")
    trained = {name: weight for name, weight in task.named_parameters() if weight.requires_grad}
    assert set(trained) == set(expected)
    for name, weight in trained.items():
        close(weight.grad, expected[name])
