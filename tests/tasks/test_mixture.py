"""Mixtures: the papers' tasks from the same generator, the patches that each question predicts, and several masks."""

from copy import deepcopy

import pytest
import torch
from golden import close
from mixing import make
from refusing import refusal
from small import indices_of, seeded
from torch.nn import functional as F

from patchloom.data.augment import TwoViews
from patchloom.options.parse import parse_pretrain
from patchloom.patches.tokens import gather_tokens, in_grid_order, patchify
from patchloom.tasks import encoder_defaults
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.extrema import ExtreMA
from patchloom.tasks.mixture import Mixture
from patchloom.tasks.restore import Restore

SIZES = {"decoder_width": 32, "decoder_depth": 2, "decoder_heads": 2}
EXTREMA = {
    **{"withhold": {"mask": 0.8}, "ask": {"agreement": 1.0}, "teacher": "second", "masks": 5, "crop": "shared"},
    **{"color": "own", "class_token": "cait"},
}
DROPPOS = {
    **{"withhold": {"mask": 0.75, "drop_positions": 0.75}, "ask": {"positions": 1.0}},
    **{"sigma": 2.0, "sigma_end": 1.0, "position_temperature": 0.1},
}
RESTORE = {"withhold": {"zoom_in": 0.7, "mask": 0.75}, "ask": {"pixels": 1.0}, "canvas": 46, **SIZES}
MP3 = {
    **{"withhold": {"drop_positions": 1, "limit_context": 0.75}, "ask": {"positions": 1.0}},
    **{"sigma": 0.0, "position_depth": 0},
}
LUT = {"withhold": {"mask": 0.75}, "ask": {"pixels": 1.0, "agreement": 0.25}, "teacher": "second"}
EVERYTHING = {
    "withhold": {"zoom_out": 0.7, "mask": 0.25, "blank": 0.25, "drop_positions": 0.5, "limit_context": 0.5},
    "ask": {"agreement": 0.5, "positions": 2.0, "pixels": 3.0},
}


def images(side=32, n=1, b=6):
    return torch.randn(n, b, 3, side, side, generator=seeded(1)).unbind()


def encoded(task, images, others=None):
    """Return the encoded rest of images, and the images that a teacher sees."""
    return task.encode(images, task.given(images, seeded()), None, others)


def check(mixture, task, views):
    """Check that loss, metrics and the encoder's gradients are those of a paper's task with the same weights."""
    task.load_state_dict(mixture.state_dict())
    task.normalized_by(mixture.mean.flatten().tolist(), mixture.std.flatten().tolist())
    for progress in (0.0, 0.7):
        mine, theirs = (one(*views, progress=progress, generator=seeded(3)) for one in (mixture, task))
        close(mine.loss, theirs.loss.detach())
        assert mine.metrics.keys() == theirs.metrics.keys()
        for name, value in theirs.metrics.items():
            close(mine.metrics[name], value)
        for one, outcome in ((mixture, mine), (task, theirs)):
            one.zero_grad()
            outcome.loss.backward()
        gradients = dict(task.named_parameters())
        for name, weight in mixture.named_parameters():
            if weight.requires_grad:
                torch.testing.assert_close(weight.grad, gradients[name].grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("loss", ["infonce", "byol"])
def test_extremas(loss):
    mixture = make(**EXTREMA, agreement_loss=loss)
    task = ExtreMA(deepcopy(mixture.encoder), mask_ratio=0.8, masks=5, loss=loss)
    check(mixture, task, images(n=2))
    assert (mixture.augment.crop, mixture.augment.color) == (task.augment.crop, task.augment.color)
    assert mixture.extra_modules().keys() == task.extra_modules().keys()


def test_dropposs():
    mixture = make(**DROPPOS)
    task = DropPos(
        deepcopy(mixture.encoder), mask_ratio=0.75, position_mask_ratio=0.75, sigma=2.0, sigma_end=1.0, temperature=0.1
    )
    check(mixture, task, images())
    plain = make(**DROPPOS | {"position_temperature": float("inf")})
    plain.load_state_dict(mixture.state_dict())
    assert (plain(*images(), generator=seeded(3)).loss - mixture(*images(), generator=seeded(3)).loss).abs() > 1e-4
    assert encoder_defaults({"name": "mixture", **DROPPOS}) == {}


@pytest.mark.parametrize("options", [{}, {"band_weight": 0.4, "band_target": "original"}], ids=str)
def test_beyond_maskings(options):
    mixture = make(**RESTORE, **options)
    task = Restore(deepcopy(mixture.encoder), **SIZES, **options)
    assert mixture.augment.size == task.augment.size == (46, 46)
    check(mixture, task, images(46))
    assert mixture(*images(46), generator=seeded()).metrics.keys() == {"mask_loss", "band_loss"}


def test_mp3s_predicts_every_patch_from_few_keys():
    task, (photos,) = make(**MP3), images(b=4)
    made = encoded(task, photos)
    given, question = made.given, task.questions["positions"]
    assert given.context.shape == (4, 16) and given.visible.shape == (4, 64) and given.dropped.all()
    assert len(question.decoder.blocks) == 0 and not question.predict(made).known().any()
    expected = F.cross_entropy(question.decoder(made.tokens).flatten(0, 1), torch.arange(64).repeat(4))
    close(task(photos, generator=seeded()).loss, expected.detach())
    assert encoder_defaults({"name": "mixture", **MP3})["positions"][0] == "none"
    measure = task.eval().measure(photos, seeded())
    assert measure.baselines["chance"].tolist() == pytest.approx([1 / 64] * 4)


def test_luts_agrees_with_a_teacher_that_sees_all_of_the_second_view():
    task, (one, two) = make(**LUT).eval(), images(n=2)
    made, question = encoded(task, one, two), task.questions["agreement"]
    vit = question.teacher.encoder
    target = question.teacher.projection(vit.forward_features(two)[:, 1:].mean(1))
    guess = question.prediction(question.projection(made.tokens[:, 1:].mean(1)))
    expected = (2 - 2 * F.cosine_similarity(guess, target, dim=-1)).mean()
    close(task(one, two, generator=seeded()).metrics["agreement_loss"], expected.detach())
    assert task(one, one, generator=seeded()).metrics["agreement_loss"] != expected
    assert (task.augment.crop, task.augment.color) == ("own", "none")
    assert "teacher" not in task.chosen and make(ask={"agreement": 1.0}).chosen["teacher"][0] == "same"


@pytest.mark.parametrize("options", [DROPPOS, LUT, EVERYTHING], ids=["one question", "two", "three"])
def test_the_loss_is_the_weighted_sum(options):
    task, views = make(**options), images(n=2 if "teacher" in options else 1)
    outcome = task(*views, progress=0.5, generator=seeded())
    weights, made = options["ask"], encoded(task, *views)
    losses = {name: task.questions[name](made, 0.5).loss.detach() for name in weights}
    torch.testing.assert_close(outcome.loss.detach(), sum(weights[name] * losses[name] for name in weights))
    named = {f"{name}_loss": loss for name, loss in losses.items()} if len(weights) > 1 else {}
    accuracy = {"position_accuracy"} if "positions" in weights else set()
    assert outcome.metrics.keys() == named.keys() | accuracy
    torch.testing.assert_close({name: outcome.metrics[name] for name in named}, named)


def test_several_masks_are_disjoint_and_have_the_loss_of_each():
    asked = {"positions": 1.0, "pixels": 1.0, "agreement": 1.0}
    withhold = {"mask": 0.75, "blank": 0.25, "drop_positions": 0.5, "limit_context": 0.5}
    mixture, (photos,) = make(withhold=withhold, ask=asked, masks=3), images()
    given = mixture.given(photos, seeded(), masks=3)
    assert given.visible.shape == (18, 16) and given.masked.shape == (18, 48)
    for i in range(6):
        assert len(given.visible[i::6].unique()) == 48
    whole = mixture(photos, given=given).metrics
    parts = []
    for i in range(3):
        rows = slice(6 * i, 6 * i + 6)
        names = ("visible", "masked", "blank", "dropped", "context")
        one = type(given)(given.images, **{name: getattr(given, name)[rows] for name in names})
        parts.append(mixture(photos, given=one).metrics)
    for name in ("positions_loss", "pixels_loss", "agreement_loss"):
        close(whole[name], sum(part[name] for part in parts) / 3)
    assert mixture.given(photos, seeded()).visible.shape == (6, 16)  # measures and pictures have one mask


@pytest.mark.parametrize("shares", [(0.25, 0.5, 0.5), (0.5, 0.3, 0.65), (0.1, 0.9, 0.05)])
def test_no_patch_is_both_blank_and_without_position(shares):
    shares = dict(zip(("mask", "blank", "drop_positions"), shares, strict=True))
    (photos,) = images(b=30)
    for order in (list(shares), reversed(shares)):
        task = make(withhold={name: shares[name] for name in order}, ask={"pixels": 1.0, "positions": 1.0})
        given = task.given(photos, seeded())
        kept = int(64 * (1 - shares["mask"]))
        assert given.visible.shape == (30, kept) and not (given.blank & given.dropped).any()
        for flags, name in ((given.blank, "blank"), (given.dropped, "drop_positions")):
            count = kept - int(kept * (1 - shares[name]) + 1e-6)
            assert flags.sum(1).tolist() == [count] * 30
        assert all(len(set(row)) == kept for row in given.visible.tolist())


@pytest.mark.parametrize(
    ("withhold", "count"),
    [
        ({"mask": 0.5}, 32),
        ({"blank": 0.25}, 16),
        ({"mask": 0.5, "blank": 0.25}, 40),
        ({"blur": 3, "mask": 0.5, "blank": 0.25}, 64),
    ],
    ids=["masked", "blank", "both", "all, since blurred"],
)
def test_only_withheld_patches_are_predicted_and_computed(withhold, count):
    """Every patch of the clean image, seen or not, if it is degraded; otherwise the withheld ones."""
    task, (photos,) = make(withhold=withhold, ask={"pixels": 1.0}), images(b=4)
    question, computed = task.questions["pixels"], []
    hook = question.decoder.blocks[-1].mlp.register_forward_hook(lambda _, given, made: computed.append(made.shape[1]))
    outcome = task(photos, generator=seeded())
    hook.remove()
    # where all patches are predicted, computing the class token is cheaper than slicing it off
    assert computed == [count + (count == 64)]
    made = encoded(task, photos)
    asked, _ = question.answer(made)
    visible, masked = made.given.visible, made.given.masked
    unseen = ~torch.zeros(4, 64, dtype=torch.bool).scatter(1, visible, made.given.has_content())
    assert torch.equal(asked.sort(dim=1).values, indices_of(unseen | ("blur" in withhold)).view(4, count))
    perfect = patchify(photos * 0.25 + 0.4, (4, 4)).unflatten(-1, (3, 16))
    perfect = (perfect - perfect.mean(-1, keepdim=True)) / (perfect.std(-1, keepdim=True) + 1e-6)
    assert question.errors(made, asked, gather_tokens(perfect.flatten(2), asked))["loss"].max() < 1e-9
    assert torch.equal(made.given.images, photos) == ("blur" not in withhold)
    question.decoder.visible_asked = visible.shape[1]
    answers = question.decoder(made.tokens, visible, masked)
    answers = gather_tokens(in_grid_order(answers, visible, masked), asked)
    expected = question.errors(made, asked, answers)["loss"].mean()
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("first", "to_beat"),
    [("pixels", ("flat patches", "what was given")), ("positions", "chance"), ("agreement", "on other images")],
)
def test_the_first_question_is_reported(first, to_beat):
    task = make(ask={first: 1.0} | {name: 1.0 for name in ("pixels", "positions", "agreement")}).eval()
    assert task.measure(images()[0], seeded()).to_beat == to_beat
    assert len(task.draw(images()[0], seeded())) == 3


def test_from_the_command_line(tmp_path):
    file = tmp_path / "mine.yaml"
    task = "task: {name: mixture, withhold: {mask: 0.25, drop_positions: 0.5}, ask: {positions: 1, agreement: 0.5}"
    file.write_text(f"data: shapes\n{task}, teacher: second}}\n")
    given, _ = parse_pretrain(["--config", str(file)])
    assert list(given["task"]["withhold"].items()) == [("mask", 0.25), ("drop_positions", 0.5)]
    asked = {"positions": 1.0, "agreement": 0.5}
    assert list(given["task"]["ask"].items()) == list(asked.items())  # the first question is reported
    given, _ = parse_pretrain(["--config", str(file), "--task.withhold", "{drop_positions: 0.75, blank: 0.2}"])
    task = make(**{name: value for name, value in given["task"].items() if name != "name"})
    assert isinstance(task, Mixture) and task.counts == {"drop_positions": 48, "blank": 13}
    assert task.question_weights == asked and isinstance(task.augment, TwoViews)
    assert "it takes {NAME: float" in refusal(
        parse_pretrain, ["shapes", "--task", "mixture", "--task.withhold", "mask"]
    )
