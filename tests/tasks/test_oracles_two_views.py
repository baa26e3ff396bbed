"""The golden vectors of LUT and ExtreMA: losses, outputs, gradients and the updated teacher."""

import pytest
import torch
from golden import Oracle, close, gradients_agree

from patchloom.questions.agreement import byol_loss, info_nce
from patchloom.tasks.extrema import ExtreMA
from patchloom.tasks.lut import LUT
from patchloom.withhold.encoder_input import EncoderInput


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


def test_byol_is_the_squared_distance_of_normalised_outputs():
    student, teacher = torch.randn(4, 3, 8), torch.randn(3, 8)
    apart = torch.nn.functional.normalize(student, dim=-1) - torch.nn.functional.normalize(teacher, dim=-1)
    assert byol_loss(student, teacher).item() == pytest.approx(apart.square().sum(-1).mean().item(), rel=1e-5)


def follow(task, momentum):
    """Move the teacher as in the authors' program when the vectors were recorded."""
    parts = {name: getattr(task.agreement, name) for name in ("instance_head", "projection")}
    task.agreement.teacher.follow(momentum, encoder=task.encoder, **parts)
