"""The golden vectors of Beyond Masking's masking and zooming in: both losses and every gradient.

The authors' attention has no key bias, and their bridge to the decoder no bias; their class token is never used.
"""

import torch
from golden import Oracle, close

from patchloom.tasks.restore import Restore
from patchloom.withhold.encoder_input import all_patches, mask_patches

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def restore():
    oracle = Oracle("mask_zoom_in")
    c = oracle.config
    task = Restore(
        oracle.encoder(class_token=False),
        mask_ratio=c["mask_ratio"],
        canvas=c["canvas"],
        band_weight=c["weights"][1],
        **oracle.decoder_options(),
    )
    task.normalized_by(*IMAGENET)
    oracle.load(task)
    close(task.encoder.pos_embed, oracle["encoder_pos"])
    close(task.questions["pixels"].decoder.positions, oracle["decoder_pos"][0])
    return task, oracle


def test_mask_and_zoom_in():
    task, oracle = restore()
    images = oracle["image"].float()
    kept, order = oracle["ids_keep"], oracle["ids_restore"].argsort(1)
    parts = kept, order[:, kept.shape[1] :]
    degraded = task.degradation(all_patches(images, task.geometry.n), task.mean, task.std)
    outcome = task(images, given=mask_patches(degraded, *parts))
    outcome.loss.backward()
    close(outcome.metrics["mask_loss"], oracle["loss_mask"][0])
    close(outcome.metrics["band_loss"], oracle["loss_band"][0])
    close(outcome.loss, 0.8 * oracle["loss_mask"][0] + 0.2 * oracle["loss_band"][0])

    expected, trained = oracle.under("g."), dict(task.named_parameters())
    learnt = {name for name, weight in trained.items() if weight.requires_grad}
    assert expected.keys() == learnt - {"questions.pixels.decoder.embed.bias"}
    for name, gradient in expected.items():
        found = trained[name].grad
        if name.endswith("qkv.bias"):  # no key bias there, and here a softmax ignores it
            q, k, v = found.chunk(3)
            assert k.abs().max() < 1e-6
            found = torch.cat([q, torch.zeros_like(k), v])
        close(found, gradient)
