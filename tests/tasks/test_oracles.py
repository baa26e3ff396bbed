"""The golden vectors of the authors' programs: losses, outputs and every gradient within a relative 1e-5."""

import pytest
import torch
from golden import Oracle, close, gradients_agree
from torch import Tensor

from patchloom.nets.encode import encode
from patchloom.nets.geometry import Geometry
from patchloom.patches.positions import smoothed_positions
from patchloom.patches.tokens import gather_tokens
from patchloom.questions.positions import PositionPrediction, Positions, loss_weights, weighted_mean
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.mae import MAE
from patchloom.withhold.encoder_input import all_patches, drop_positions, mask_patches


def by_grid(predicted: Tensor, p: int) -> Tensor:
    """Reorder the authors' pixels [b n p*p*c] to ours [b n c*p*p]."""
    return predicted.unflatten(-1, (p, p, 3)).movedim(-1, -3).flatten(-3)


def masked_of(oracle: Oracle) -> Tensor:
    """Return the patches that were not kept, in the order of the authors' shuffle."""
    return oracle["ids_restore"].argsort(1)[:, oracle["ids_keep"].shape[1] :]


def test_mae():
    oracle = Oracle("mae")
    task = MAE(oracle.encoder(), oracle.config["mask_ratio"], **oracle.decoder_options())
    oracle.load(task)
    visible, masked = oracle["ids_keep"], masked_of(oracle)
    given = mask_patches(all_patches(oracle["images"], task.geometry.n), visible, masked)
    loss = task(oracle["images"], given=given).loss
    loss.backward()
    close(loss, oracle["loss"][0])
    gradients_agree(task, oracle)
    theirs = by_grid(oracle["pred"], oracle.config["patch"])
    asked, answers = task.questions["pixels"].answer(task.encode(oracle["images"], given))
    assert torch.equal(asked, masked)
    close(answers, gather_tokens(theirs, masked))


def test_droppos_smoothed_as_the_program_does():
    """The labels, loss and gradient of the released script, whose map is of another grid than the patches."""
    oracle = Oracle("droppos_program")
    c, visible, dropped = oracle.config, oracle["ids_keep"], oracle["mask_pos"].bool()
    patch = c["size"] // c["grid"]
    geometry = Geometry((c["grid"],) * 2, (patch,) * 2, channels=3, prefix=0, width=8, has_class_token=False)
    asked = Positions(geometry, torch.nn.Identity(), {}, c["sigma"], smoothing="program")
    labels = asked.labels(c["sigma"], torch.device("cpu"))
    assert torch.equal(labels, oracle["smooth"][: geometry.n, : geometry.n])
    logits = oracle["logits"].requires_grad_()
    predicted = PositionPrediction(visible, dropped, logits)
    loss = weighted_mean(asked.cross_entropy(predicted, c["sigma"]), loss_weights(dropped, visible))
    loss.backward()
    close(loss, oracle["loss"][0])
    close(logits.grad, oracle["g.logits"])


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
    close(smoothed_positions(task.geometry.grid, c["sigma"]), oracle["smooth"])

    given = drop_positions(mask_patches(all_patches(images, task.geometry.n), visible, masked), dropped)
    assert torch.equal(given.dropped, oracle["mask_pos"].bool())
    encoded = task.encode(images, given)
    close(encoded.tokens, oracle["encoded"])
    asked = task.questions["positions"]
    logits = asked.predict(encoded).logits
    close(logits, oracle["logits"])

    outcome = task(images, given=given)
    outcome.loss.backward()
    gradients_agree(task, oracle)
    affinities = asked.affinities(encoded)
    weights = loss_weights(given.dropped, visible, affinities)
    if c["attn_guide"]:
        close(affinities, oracle["affinity_full"])
        chosen = gather_tokens(affinities, visible)
        close(chosen / chosen.sum(1, keepdim=True), oracle["affinity_visible"])
    # the authors weight their accuracy like their loss
    close(weighted_mean((logits.argmax(-1) == visible).float(), weights), oracle["accuracy"][0])
    if c["multi_task"]:
        close(outcome.metrics["positions_loss"], oracle["loss"][0])
        close(outcome.metrics["pixels_loss"], oracle["loss_mae"][0])
        close(outcome.loss, oracle["loss"][0] + oracle["loss_mae"][0])
        theirs = by_grid(oracle["pred_pixels"], c["patch"])
        close(task.questions["pixels"].answer(encoded)[1], gather_tokens(theirs, masked))
    else:
        close(outcome.loss, oracle["loss"][0])


def test_a_wrong_loss_would_be_caught():
    """The comparison fails for a relative difference of 2e-5."""
    with pytest.raises(AssertionError):
        close(torch.tensor([1.00002]), torch.tensor([1.0]))


def test_the_affinity_sees_the_whole_view():
    oracle = Oracle("droppos")
    task = DropPos(oracle.encoder(), **oracle.decoder_options())
    oracle.load(task)
    features = task.encoder.forward_features(oracle["images"])
    close(encode(task.encoder, all_patches(oracle["images"], task.geometry.n)), features)
