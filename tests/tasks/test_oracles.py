"""The golden vectors of the authors' programs: losses, outputs and every gradient within a relative 1e-5."""

import pytest
import torch
from golden import Oracle, close, gradients_agree
from torch import Tensor

from patchloom.nets.encode import encode
from patchloom.nets.geometry import Geometry
from patchloom.patches.positions import smoothed_positions
from patchloom.patches.tokens import gather_tokens
from patchloom.questions.agreement import info_nce
from patchloom.questions.positions import PositionPrediction, Positions, affinity, loss_weights, weighted_mean
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.extrema import ExtreMA
from patchloom.tasks.lut import LUT
from patchloom.tasks.mae import MAE
from patchloom.tasks.restore import Restore
from patchloom.withhold.encoder_input import EncoderInput, all_patches, drop_positions, mask_patches


def by_grid(predicted: Tensor, p: int) -> Tensor:
    """Reorder the authors' pixels [b n p*p*c] to ours [b n c*p*p]."""
    return predicted.unflatten(-1, (p, p, 3)).movedim(-1, -3).flatten(-3)


def masked_of(oracle: Oracle) -> Tensor:
    """Return the patches that were not kept, in the order of the authors' shuffle."""
    return oracle["ids_restore"].argsort(1)[:, oracle["ids_keep"].shape[1] :]


def test_mae():
    oracle = Oracle("mae")
    task = MAE(oracle.encoder(), mask_ratio=oracle.config["mask_ratio"], **oracle.decoder_options())
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
    loss = weighted_mean(asked.cross_entropy(predicted, c["sigma"]), loss_weights(dropped))
    loss.backward()
    close(loss, oracle["loss"][0])
    close(logits.grad, oracle["g.logits"])


@pytest.mark.parametrize("name", ["droppos", "droppos_plain"])
def test_droppos(name):
    oracle = Oracle(name)
    c = oracle.config
    task = DropPos(
        oracle.encoder(),
        mask_ratio=c["mask_ratio"],
        position_mask_ratio=c["pos_mask_ratio"],
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
    weights = loss_weights(given.dropped, affinities)
    if c["attn_guide"]:
        close(affinity(encode(task.encoder, all_patches(images, task.geometry.n)), 1, 0.1), oracle["affinity_full"])
        close(affinities, oracle["affinity_visible"])
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
    task.normalized_by((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    oracle.load(task)
    close(task.encoder.pos_embed, oracle["encoder_pos"])
    close(task.questions["pixels"].decoder.positions, oracle["decoder_pos"][0])
    return task, oracle


def test_beyond_maskings_masking_and_zooming_in():
    """The authors' attention has no key bias, and their bridge to the decoder none; their class token is not used."""
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


def test_lut():
    oracle = Oracle("lut")
    c = oracle.config
    task = LUT(
        oracle.encoder(),
        mask_ratio=c["mask_ratio"],
        context_weight=c["weight"],
        head_width=c["mlp"],
        **oracle.decoder_options(),
    )
    oracle.load(task)
    one, two = oracle["view1"], oracle["view2"]
    given = task.given_parts(torch.cat([one, two]), torch.cat([oracle["ids_keep1"], oracle["ids_keep2"]]))

    outcome = task(one, two, given=given)
    outcome.loss.backward()
    close(outcome.loss, oracle["loss"][0])
    close(outcome.metrics["pixels_loss"], oracle["loss_mae"][0])
    close(outcome.metrics["agreement_loss"], oracle["loss_context"][0])
    gradients_agree(task, oracle)

    oracle.load(task)  # running statistics have moved
    students = task.guesses(task.encode(torch.cat([one, two]), given))
    for student, view, number in zip(students, (one, two), "12", strict=True):
        close(student, oracle[f"student{number}"])
        close(task.agreement.target(task.encoder, view), oracle[f"teacher{number}"])


def extrema(**options):
    oracle = Oracle("extrema")
    c = oracle.config
    sizes = {"head_width": c["mlp"], "head_out": c["proj"]}
    encoder = oracle.encoder(class_token=False)
    task = ExtreMA(encoder, mask_ratio=c["mask_ratio"], masks=c["masks"], **sizes, **options)
    oracle.load(task)
    parts = oracle["ids_keep"].unbind(1)
    return task, oracle, EncoderInput(oracle["student_view"], torch.cat(parts))


def test_extrema():
    task, oracle, given = extrema()
    follow(task, oracle.config["momentum"])
    for name, weight in oracle.teacher("updated.").items():
        close(task.agreement.teacher.state_dict()[name], weight)

    outcome = task(oracle["student_view"], oracle["teacher_view"], given=given)
    outcome.loss.backward()
    close(outcome.loss, oracle["loss"][0])
    expected = oracle.under("g.")
    for name, weight in task.named_parameters():
        if weight.requires_grad and name.endswith("attn.k.bias"):  # a softmax ignores both: rounding errors
            assert max(weight.grad.abs().max(), expected[name].abs().max()) < 1e-7
            weight.grad.copy_(expected[name])
    gradients_agree(task, oracle)
    close(task.agreement.predict(task.agreement.represent(task.encoder, given)), oracle["q"])
    close(task.agreement.target(task.encoder, oracle["teacher_view"]), oracle["k"])


def test_info_nce():
    task, oracle, given = extrema(loss="infonce", temperature=0.2)
    guesses = oracle["q"].unflatten(0, (-1, len(oracle["k"])))
    close(info_nce(guesses, oracle["k"], 0.2), oracle["loss_infonce_t0.2"][0])
    follow(task, oracle.config["momentum"])
    outcome = task(oracle["student_view"], oracle["teacher_view"], given=given)
    close(outcome.loss, oracle["loss_infonce_t0.2"][0])


def follow(task, momentum):
    """Move the teacher as in the authors' program when the vectors were recorded."""
    parts = {name: getattr(task.agreement, name) for name in ("instance_head", "projection")}
    task.agreement.teacher.follow(momentum, encoder=task.encoder, **parts)
