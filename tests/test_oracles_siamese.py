"""The golden vectors of LUT and ExtreMA: losses, outputs, gradients and the updated teacher."""

import pytest
import torch
from golden import Oracle, close, gradients_agree

from patchloom.objectives.agreement import byol_loss, info_nce
from patchloom.tasks.extrema import ExtreMA
from patchloom.tasks.lut import LUT
from patchloom.views.view import whole


def test_lut():
    oracle = LutOracle("lut")
    c = oracle.config
    task = LUT(
        oracle.encoder(), mask_ratio=c["mask_ratio"], context_weight=c["weight"], head_width=c["mlp"], **oracle.sizes()
    )
    oracle.load(task)
    one, two, hands = oracle["view1"], oracle["view2"], (oracle["ids_keep1"], oracle["ids_keep2"])

    outcome = task(one, two, hands=hands)
    outcome.loss.backward()
    close(outcome.loss, oracle["loss"][0])
    close(outcome.metrics["pixel_loss"], oracle["loss_mae"][0])
    close(outcome.metrics["context_loss"], oracle["loss_context"][0])
    gradients_agree(task, oracle)

    oracle.load(task)  # running statistics have moved
    students = task.predict(task.encode(torch.cat([one, two]), torch.cat(hands)), torch.cat(hands), views=2)
    for student, view, number in zip(students, (one, two), "12", strict=True):
        close(student, oracle[f"student{number}"])
        close(task.teach(view), oracle[f"teacher{number}"])


def extrema(**options):
    oracle = ExtremaOracle("extrema")
    c = oracle.config
    sizes = {"head_width": c["mlp"], "head_out": c["proj"]}
    encoder = oracle.encoder(class_token=False)
    task = ExtreMA(encoder, mask_ratio=c["mask_ratio"], masks=c["masks"], **sizes, **options)
    oracle.load(task)
    return task, oracle, oracle["ids_keep"].unbind(1)


def test_extrema():
    task, oracle, hands = extrema()
    task.teacher.follow(oracle.config["momentum"], **task.followed())
    for name, weight in oracle.teacher("updated.").items():
        close(task.teacher.state_dict()[name], weight)

    outcome = task(oracle["student_view"], oracle["teacher_view"], hands=hands)
    outcome.loss.backward()
    close(outcome.loss, oracle["loss"][0])
    expected = oracle.under("g.")
    for name, weight in task.named_parameters():
        if weight.requires_grad and name.endswith("attn.k.bias"):  # not felt by a softmax: both are rounding
            assert max(weight.grad.abs().max(), expected[name].abs().max()) < 1e-7
            weight.grad.copy_(expected[name])
    gradients_agree(task, oracle)
    close(task.predict(oracle["student_view"], hands).flatten(0, 1), oracle["q"])
    close(task.project(task.teacher, whole(oracle["teacher_view"], task.patches)), oracle["k"])


def test_info_nce():
    task, oracle, hands = extrema(loss="infonce", temperature=0.2)
    guesses = oracle["q"].unflatten(0, (len(hands), -1))
    close(info_nce(guesses, oracle["k"], 0.2), oracle["loss_infonce_t0.2"][0])
    task.teacher.follow(oracle.config["momentum"], **task.followed())
    outcome = task(oracle["student_view"], oracle["teacher_view"], hands=hands)
    close(outcome.loss, oracle["loss_infonce_t0.2"][0])


def test_byol_is_the_squared_distance_of_normalised_outputs():
    student, teacher = torch.randn(4, 3, 8), torch.randn(3, 8)
    apart = torch.nn.functional.normalize(student, dim=-1) - torch.nn.functional.normalize(teacher, dim=-1)
    assert byol_loss(student, teacher).item() == pytest.approx(apart.square().sum(-1).mean().item(), rel=1e-5)


class LutOracle(Oracle):
    """The teacher's weights under ``t.``; its decoder, which the authors copied too, is of no use."""

    def sizes(self):
        return self.decoder_options()

    def _ours(self, key):
        return key if key.startswith(("head.", "predictor.")) else super()._ours(key)

    def under(self, prefix):
        ours = super().under(prefix)
        if prefix == "w.":
            own = {key: value for key, value in super().under("t.").items() if key.startswith(("encoder.", "head."))}
            ours |= {f"teacher.{key}": value for key, value in own.items()}
        return ours


class ExtremaOracle(Oracle):
    """Student and teacher under ``base_encoder`` and ``momentum_encoder``."""

    def _ours(self, key):
        home, _, rest = key.partition(".")
        if home == "predictor":
            return f"prediction.{rest}"
        return ("teacher." if home == "momentum_encoder" else "") + inside(rest)

    def teacher(self, prefix):
        return {inside(key.removeprefix(prefix)): self[key] for key in self.tensors if key.startswith(prefix)}


def inside(key):
    """Our place of one of the authors' encoder weights."""
    if key == "cls_token":
        return "instance_head.token"
    if key.startswith("blocks_token."):
        return key.replace("blocks_token.", "instance_head.layers.")
    return key.replace("head.", "projection.") if key.startswith("head.") else f"encoder.{key}"
