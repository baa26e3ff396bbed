"""Golden vectors of the authors' programs, with the authors' weight names turned into ours."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from patchloom.nets.build import EncoderSpec, build_encoder

FOLDER = Path(__file__).parents[1] / "oracles"


class Oracle:
    """One file of golden vectors, with the authors' weight names turned into ours."""

    def __init__(self, name: str):
        with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
            self.config = json.loads(file.metadata()["config"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Weights ('w.') or gradients ('g.') by our names."""
        return {
            self._ours(key[2:]): self._reordered(key[2:], value)
            for key, value in self.tensors.items()
            if key.startswith(prefix)
        }

    def _ours(self, key: str) -> str:
        pixels = "aux_decoder" if self.config.get("multi_task") else "decoder"
        fixed = {"mask_pos_token": "position_token", "mask_token": f"{self._home(pixels)}.mask_token"}
        if key in fixed:
            return fixed[key]
        for theirs in ("aux_decoder", "decoder"):
            if key.startswith(f"{theirs}_"):
                rest = key.removeprefix(f"{theirs}_")
                rest = "answer" + rest.removeprefix("pred") if rest.startswith("pred") else rest
                return f"{self._home(theirs)}.{rest}"
        return f"encoder.{key}"

    def _home(self, theirs: str) -> str:
        positions = theirs == "decoder" and self.config.get("pos_mask_ratio") is not None
        return f"questions.{'positions' if positions else 'pixels'}.decoder"

    def _reordered(self, key: str, value: Tensor) -> Tensor:
        """The authors' pixels run (row, column, channel) inside a patch; ours (channel, row, column)."""
        if key.startswith(("aux_decoder_pred", "decoder_pred")) and len(value) == self.pixels:
            p = self.config["patch"]
            return value.unflatten(0, (p, p, 3)).movedim(2, 0).flatten(0, 2)
        return value.reshape(-1) if key in ("mask_token", "mask_pos_token") else value

    @property
    def pixels(self) -> int:
        return 3 * self.config["patch"] ** 2

    def encoder(self, **options):
        c = self.config
        sizes = {"embed_dim": c["dim"], "depth": c["depth"], "num_heads": c["heads"], **options}
        return build_encoder(EncoderSpec("vit_tiny_patch16_224", (c["img"],) * 2, c["patch"], options=sizes))

    def decoder_options(self) -> dict[str, int]:
        c = self.config
        return {"decoder_width": c["ddim"], "decoder_depth": c["ddepth"], "decoder_heads": c["dheads"]}

    def load(self, task: torch.nn.Module) -> None:
        weights = self.under("w.")
        # fixed tables: ours are computed, so they are compared rather than loaded
        for name, question in task.questions.items():
            table = weights.pop(f"questions.{name}.decoder.pos_embed", None)
            if table is not None:
                close(question.decoder.positions, table[0, 1:])
        close(task.encoder.pos_embed, weights["encoder.pos_embed"])
        task.load_state_dict(weights, strict=True)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Relative difference of the whole tensor below 1e-5."""
    assert ours.shape == theirs.shape
    error = (ours.detach().double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-12)
    assert error < 1e-5, f"relative difference {error:.2e}"


def gradients_agree(task: torch.nn.Module, oracle: Oracle) -> None:
    expected = oracle.under("g.")
    trained = {name: weight for name, weight in task.named_parameters() if weight.requires_grad}
    assert set(trained) == set(expected)
    for name, weight in trained.items():
        close(weight.grad, expected[name])
