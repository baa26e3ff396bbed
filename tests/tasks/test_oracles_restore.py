"""The golden vectors of Beyond Masking's masking and zooming in: both losses and every gradient."""

import torch
from golden import Oracle, close

from patchloom.tasks.restore import Restore
from patchloom.withhold.encoder_input import all_patches, mask_patches

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class ZoomOracle(Oracle):
    """The authors' names; their attention has no key bias and their bridge to the decoder no bias."""

    def __init__(self):
        super().__init__("mask_zoom_in")
        shuffle = self["ids_restore"].argsort(1)
        self.parts = self["ids_keep"], shuffle[:, self["ids_keep"].shape[1] :]

    def under(self, prefix):
        theirs = {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}
        ours = {}
        for key, value in theirs.items():
            if key.endswith("q_bias"):
                name = key.replace("q_bias", "qkv.bias")
                ours[placed(name)] = torch.cat(
                    [value, torch.zeros_like(value), theirs[key.replace("q_bias", "v_bias")]]
                )
            elif key == "encoder_to_decoder.weight":
                ours["questions.pixels.decoder.embed.weight"] = value
            elif key.startswith("decoder.head."):  # pixels of a patch run (row, column, channel) there
                p = self.config["patch"]
                ours["questions.pixels." + key.replace("head", "answer")] = (
                    value.unflatten(0, (p, p, 3)).movedim(2, 0).flatten(0, 2)
                )
            elif key == "mask_token":
                ours["questions.pixels.decoder.mask_token"] = value.flatten()
            elif not key.endswith(("v_bias", "cls_token")):  # their class token is never used
                ours[placed(key)] = value
        return ours


def placed(name):
    """Where a weight of encoder or decoder is in our task."""
    return name if name.startswith("encoder.") else f"questions.pixels.{name}"


def restore():
    oracle = ZoomOracle()
    c = oracle.config
    task = Restore(
        oracle.encoder(class_token=False),
        mask_ratio=c["mask_ratio"],
        canvas=c["canvas"],
        band_weight=c["weights"][1],
        **oracle.decoder_options(),
    )
    task.normalized_by(*IMAGENET)
    weights = oracle.under("w.")
    weights["questions.pixels.decoder.embed.bias"] = torch.zeros(c["ddim"])
    weights["encoder.pos_embed"] = oracle["encoder_pos"]
    task.load_state_dict(weights, strict=True)
    task.questions["pixels"].decoder.positions.copy_(oracle["decoder_pos"][0])
    return task, oracle


def test_mask_and_zoom_in():
    task, oracle = restore()
    images = oracle["image"].float()
    degraded = task.degradation(all_patches(images, task.geometry.n), task.mean, task.std)
    outcome = task(images, given=mask_patches(degraded, *oracle.parts))
    outcome.loss.backward()
    close(outcome.metrics["mask_loss"], oracle["loss_mask"][0])
    close(outcome.metrics["band_loss"], oracle["loss_band"][0])
    close(outcome.loss, 0.8 * oracle["loss_mask"][0] + 0.2 * oracle["loss_band"][0])

    expected, trained = oracle.under("g."), dict(task.named_parameters())
    learnt = {name for name, weight in trained.items() if weight.requires_grad}
    assert expected.keys() == learnt - {"questions.pixels.decoder.embed.bias"}
    for name, gradient in expected.items():
        found = trained[name].grad
        if name.endswith("qkv.bias"):  # no key bias there, and here a softmax does not feel it
            q, k, v = found.chunk(3)
            assert k.abs().max() < 1e-6
            found = torch.cat([q, torch.zeros_like(k), v])
        close(found, gradient)
