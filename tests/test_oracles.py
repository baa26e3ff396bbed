"""The golden vectors of the authors' programs: losses, outputs and every gradient within a relative 1e-5."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from patchloom.nets.encode import EncoderSpec, build_encoder, encode
from patchloom.objectives.positions import loss_weights, weighted_mean
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.mae import MAE
from patchloom.views.positions import smoothed_positions
from patchloom.views.tokens import take

FOLDER = Path(__file__).parent / "oracles"


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
        return "pixel_decoder" if theirs == "aux_decoder" else "decoder"

    def _reordered(self, key: str, value: Tensor) -> Tensor:
        """The authors' pixels run (row, column, channel) inside a patch; ours (channel, row, column)."""
        if key.startswith(("aux_decoder_pred", "decoder_pred")) and len(value) == self.pixels:
            p = self.config["patch"]
            return value.unflatten(0, (p, p, 3)).movedim(2, 0).flatten(0, 2)
        return value.reshape(-1) if key in ("mask_token", "mask_pos_token") else value

    @property
    def pixels(self) -> int:
        return 3 * self.config["patch"] ** 2

    def encoder(self):
        c = self.config
        sizes = {"embed_dim": c["dim"], "depth": c["depth"], "num_heads": c["heads"]}
        return build_encoder(EncoderSpec("vit_tiny_patch16_224", (c["img"],) * 2, c["patch"], options=sizes))

    def decoder_options(self) -> dict[str, int]:
        c = self.config
        return {"decoder_width": c["ddim"], "decoder_depth": c["ddepth"], "decoder_heads": c["dheads"]}

    def load(self, task: torch.nn.Module) -> None:
        weights = self.under("w.")
        # fixed tables: ours are computed, so they are compared rather than loaded
        for ours in ("decoder", "pixel_decoder"):
            table = weights.pop(f"{ours}.pos_embed", None)
            if table is not None:
                close(getattr(task, ours).positions, table[0, 1:])
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


def by_grid(predicted: Tensor, p: int) -> Tensor:
    """The authors' pixel order [b n p*p*c] as ours [b n c*p*p]."""
    return predicted.unflatten(-1, (p, p, 3)).movedim(-1, -3).flatten(-3)


def masked_of(oracle: Oracle) -> Tensor:
    """The patches that were not kept, in the order of the authors' shuffle."""
    return oracle["ids_restore"].argsort(1)[:, oracle["ids_keep"].shape[1] :]


def test_mae():
    oracle = Oracle("mae")
    task = MAE(oracle.encoder(), oracle.config["mask_ratio"], **oracle.decoder_options())
    oracle.load(task)
    visible, masked = oracle["ids_keep"], masked_of(oracle)
    loss = task(oracle["images"], hands=(visible, masked)).loss
    loss.backward()
    close(loss, oracle["loss"][0])
    gradients_agree(task, oracle)
    theirs = by_grid(oracle["pred"], oracle.config["patch"])
    close(task.recover(oracle["images"], visible, masked), take(theirs, masked))


@pytest.mark.parametrize("name", ["droppos", "droppos_plain"])
def test_droppos(name):
    oracle = Oracle(name)
    c = oracle.config
    task = DropPos(
        oracle.encoder(),
        c["mask_ratio"],
        c["pos_mask_ratio"],
        sigma=c["sigma"],
        temperature=0.1 if c["attn_guide"] else float("inf"),
        pixels=c["multi_task"],
        pixel_decoder_depth=c["ddepth"],
        **oracle.decoder_options(),
    )
    oracle.load(task)
    images, visible, masked = oracle["images"], oracle["ids_keep"], masked_of(oracle)
    dropped = oracle["mask_pos"].bool().nonzero()[:, 1].view(len(images), -1)
    close(smoothed_positions(task.grid, c["sigma"]), oracle["smooth"])

    view = task.view(images, visible, dropped)
    assert torch.equal(view.dropped, oracle["mask_pos"].bool())
    tokens = task.encode(view)
    close(tokens, oracle["encoded"])
    logits = task.decoder(tokens)
    close(logits, oracle["logits"])

    outcome = task(images, hands=(visible, masked, dropped))
    outcome.loss.backward()
    gradients_agree(task, oracle)
    affinities = task.affinities(images)
    weights = loss_weights(view.dropped, visible, affinities)
    if c["attn_guide"]:
        close(affinities, oracle["affinity_full"])
        chosen = take(affinities, visible)
        close(chosen / chosen.sum(1, keepdim=True), oracle["affinity_visible"])
    # the authors weigh their accuracy as their loss
    close(weighted_mean((logits.argmax(-1) == visible).float(), weights), oracle["accuracy"][0])
    if c["multi_task"]:
        close(outcome.metrics["position_loss"], oracle["loss"][0])
        close(outcome.metrics["pixel_loss"], oracle["loss_mae"][0])
        close(outcome.loss, oracle["loss"][0] + oracle["loss_mae"][0])
        theirs = by_grid(oracle["pred_pixels"], c["patch"])
        close(task.pixel_decoder(tokens, visible, masked), take(theirs, masked))
    else:
        close(outcome.loss, oracle["loss"][0])


def test_a_wrong_loss_would_be_caught():
    """The comparison itself: a relative difference of 2e-5 fails."""
    with pytest.raises(AssertionError):
        close(torch.tensor([1.00002]), torch.tensor([1.0]))


def test_whole_view_is_what_the_affinity_sees():
    oracle = Oracle("droppos")
    task = DropPos(oracle.encoder(), **oracle.decoder_options())
    oracle.load(task)
    features = task.encoder.forward_features(oracle["images"])
    from patchloom.views.view import whole

    close(encode(task.encoder, whole(oracle["images"], task.patches)), features)
