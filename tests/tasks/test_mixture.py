"""Mixtures: those that equal the papers' tasks, and the patches that each question predicts."""

from copy import deepcopy

import pytest
import torch
from golden import close
from mixing import make
from small import indices_of, seeded
from torch.nn import functional as F

from patchloom.patches.tokens import gather_tokens, in_grid_order, patchify, scatter_tokens, unpatchify
from patchloom.tasks import encoder_defaults
from patchloom.tasks.droppos import DropPos

LIKE = {
    "droppos": {"withhold": {"mask": 0.75, "drop_positions": 0.75}, "ask": {"positions": 1.0}},
    "mp3": {
        "withhold": {"drop_positions": 1, "limit_context": 0.75},
        "ask": {"positions": 1.0},
        "sigma": 0.0,
        "position_depth": 0,
    },
    "simmim": {"withhold": {"blank": 0.6}, "ask": {"pixels": 1.0}},
    "lut": {"withhold": {"mask": 0.75}, "ask": {"pixels": 1.0, "agreement": 0.25}, "teacher": "second"},
    "everything": {
        "withhold": {"zoom_out": 0.7, "mask": 0.25, "blank": 0.25, "drop_positions": 0.5, "limit_context": 0.5},
        "ask": {"agreement": 0.5, "positions": 2.0, "pixels": 3.0},
    },
    "nothing but a second view": {"withhold": {}, "ask": {"agreement": 1.0}, "teacher": "second"},
    "blur": {"withhold": {"blur": 3, "mask": 0.5}, "ask": {"pixels": 1.0}},
}


def batch(b=4, n=1, seed=1):
    return torch.randn(n, b, 3, 32, 32, generator=seeded(seed)).unbind()


def encoded(task, images, others=None):
    """Return the encoded rest of images, and the images that a teacher sees."""
    return task.encode(images, task.given(images, seeded()), None, others)


@pytest.mark.parametrize("options", LIKE.values(), ids=LIKE)
def test_the_loss_is_the_weighted_sum_and_reaches_every_parameter(options):
    task = make(**options)
    views = batch(n=2 if options.get("teacher") == "second" else 1)
    outcome = task(*views, progress=0.5, generator=seeded())
    weights, made = options["ask"], encoded(task, *views)
    losses = {name: task.questions[name](made, 0.5).loss.detach() for name in weights}
    total = sum(weight * losses[name] for name, weight in weights.items())
    torch.testing.assert_close(outcome.loss.detach(), total)
    named = {f"{name}_loss": loss for name, loss in losses.items()} if len(weights) > 1 else {}
    accuracy = {"position_accuracy"} if "positions" in weights else set()
    assert outcome.metrics.keys() == named.keys() | accuracy
    torch.testing.assert_close({name: outcome.metrics[name] for name in named}, named)
    outcome.loss.backward()
    for name, weight in task.named_parameters():
        assert weight.requires_grad == ("pos_embed" not in name and ".teacher." not in name)
        assert not weight.requires_grad or weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize("options", LIKE.values(), ids=LIKE)
def test_resolved_options_build_the_same_task(options):
    """The value that every auto became is a valid option, and builds the same task."""
    task = make(**options)
    again = make(**options | {name: value for name, (value, _) in task.chosen.items()})
    assert not again.chosen
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in task.state_dict().items()}


def test_like_droppos_is_droppos():
    task = make(**LIKE["droppos"], sigma=1.0)
    other = DropPos(deepcopy(task.encoder), 0.75, 0.75, sigma=1.0, temperature=float("inf"))
    other.questions["positions"].decoder.load_state_dict(task.questions["positions"].decoder.state_dict())
    other.position_token.data.copy_(task.position_token)
    (images,) = batch()
    given = task.given(images, seeded())
    assert given.visible.shape == (4, 16) and given.dropped.sum(1).tolist() == [12] * 4
    for progress in (0.0, 0.7):
        mine = task(images, progress=progress, generator=seeded()).loss
        theirs = other(images, progress=progress, given=given).loss
        close(mine, theirs.detach())


def test_like_mp3_predicts_every_patch_from_few_keys():
    task = make(**LIKE["mp3"])
    (images,) = batch()
    made = encoded(task, images)
    given, question = made.given, task.questions["positions"]
    assert given.context.shape == (4, 16) and given.visible.shape == (4, 64) and given.dropped.all()
    assert len(question.decoder.blocks) == 0 and not question.predict(made).known().any()
    expected = F.cross_entropy(question.decoder(made.tokens).flatten(0, 1), torch.arange(64).repeat(4))
    close(task(images, generator=seeded()).loss, expected.detach())
    assert encoder_defaults({"name": "mixture", **LIKE["mp3"]})["positions"][0] == "none"
    assert encoder_defaults({"name": "mixture", **LIKE["droppos"]}) == {}
    measure = task.eval().measure(images, seeded())
    assert measure.baselines["chance"].tolist() == pytest.approx([1 / 64] * 4)


def test_like_simmim_predicts_blank_patches_without_seeing_them():
    task = make(**LIKE["simmim"])
    (images,) = batch()
    made = encoded(task, images)
    blank = made.given.blank
    assert blank.sum(1).tolist() == [39] * 4 and made.given.masked.shape == (4, 0)  # 0.6 of 64, rounded up
    which = indices_of(blank)
    noise = unpatchify(scatter_tokens(torch.randn(4, 39, 48), which, patchify(images, (4, 4))), (4, 4), (8, 8))
    question = task.questions["pixels"]
    asked, answer = question.answer(made)
    assert torch.equal(asked, which) and torch.equal(answer, question.answer(encoded(task, noise))[1])

    truth = patchify(images * 0.25 + 0.4, (4, 4)).unflatten(-1, (3, 16))
    truth = ((truth - truth.mean(-1, keepdim=True)) / (truth.std(-1, keepdim=True) + 1e-6)).flatten(2)
    errors = [(answer[i, j] - truth[i, which[i, j]]).square().mean() for i in range(4) for j in range(39)]
    close(task(images, generator=seeded()).loss, torch.stack(errors).mean().detach())


def test_like_lut_agrees_with_a_teacher_that_sees_all_of_the_second_view():
    task = make(**LIKE["lut"]).eval()
    one, two = batch(n=2)
    made = encoded(task, one, two)
    question = task.questions["agreement"]
    vit = question.teacher.encoder
    target = question.teacher.projection(vit.forward_features(two)[:, 1:].mean(1))
    guess = question.prediction(question.projection(made.tokens[:, 1:].mean(1)))
    expected = (2 - 2 * F.cosine_similarity(guess, target, dim=-1)).mean()
    outcome = task(one, two, generator=seeded())
    close(outcome.metrics["agreement_loss"], expected.detach())
    assert task(one, one, generator=seeded()).metrics["agreement_loss"] != expected
    assert (task.augment.crop, task.augment.color) == ("own", "none")
    assert "teacher" not in task.chosen and make(ask={"agreement": 1.0}).chosen["teacher"][0] == "same"


def test_the_teacher_follows():
    task = make(**LIKE["lut"], momentum=0.9)
    asked = task.questions["agreement"]
    parts = {"encoder": task.encoder, "projection": asked.projection}
    old = deepcopy(asked.teacher.state_dict())
    task.after_step(0.0)
    for name, new in asked.teacher.state_dict().items():
        home, _, rest = name.partition(".")
        torch.testing.assert_close(new, 0.9 * old[name] + 0.1 * parts[home].state_dict()[rest])
    make(**LIKE["mp3"]).after_step(0.5)  # nobody there


def test_blank_patches_do_not_count_in_the_representation():
    task = make(withhold={"blank": 0.5}, ask={"agreement": 1.0})
    (images,) = batch()
    made = encoded(task, images)
    summary = task.questions["agreement"].summary(made.tokens, made.given)
    for i in range(4):
        torch.testing.assert_close(summary[i], made.tokens[i, 1:][~made.given.blank[i]].mean(0))


@pytest.mark.parametrize("order", [("mask", "blank", "drop_positions"), ("drop_positions", "blank", "mask")])
@pytest.mark.parametrize("shares", [(0.25, 0.5, 0.5), (0.5, 0.3, 0.65), (0.1, 0.9, 0.05)])
def test_no_patch_is_both_blank_and_without_position(order, shares):
    shares = dict(zip(("mask", "blank", "drop_positions"), shares, strict=True))
    task = make(withhold={name: shares[name] for name in order}, ask={"pixels": 1.0, "positions": 1.0})
    (images,) = batch(b=30)
    given = task.given(images, seeded())
    kept = int(64 * (1 - shares["mask"]))
    assert given.visible.shape == (30, kept) and not (given.blank & given.dropped).any()
    for flags, name in ((given.blank, "blank"), (given.dropped, "drop_positions")):
        count = kept - int(kept * (1 - shares[name]) + 1e-6)
        assert flags.sum(1).tolist() == [count] * 30
    assert all(len(set(row)) == kept for row in given.visible.tolist())


ASKED = (
    ({"mask": 0.5}, 32),
    ({"blank": 0.25}, 16),
    ({"mask": 0.5, "blank": 0.25}, 40),
    ({"blur": 3, "mask": 0.5, "blank": 0.25}, 64),
)


def test_patches_predicted_of_a_degraded_image():
    """Every patch of the clean image, seen or not; without degradation only the withheld ones."""
    (images,) = batch()
    for withhold, count in ASKED:
        task = make(withhold=withhold, ask={"pixels": 1.0})
        made, question = encoded(task, images), task.questions["pixels"]
        asked, _ = question.answer(made)
        unseen = ~torch.zeros(4, 64, dtype=torch.bool).scatter(1, made.given.visible, made.given.has_content())
        assert torch.equal(asked.sort(dim=1).values, indices_of(unseen | ("blur" in withhold)).view(4, count))
        perfect = patchify(images * 0.25 + 0.4, (4, 4)).unflatten(-1, (3, 16))
        perfect = (perfect - perfect.mean(-1, keepdim=True)) / (perfect.std(-1, keepdim=True) + 1e-6)
        assert question.errors(made, asked, gather_tokens(perfect.flatten(2), asked))["loss"].max() < 1e-9
        assert torch.equal(made.given.images, images) == ("blur" not in withhold)


@pytest.mark.parametrize(("withhold", "count"), ASKED, ids=["masked", "blank", "both", "all, since blurred"])
def test_the_decoder_computes_only_predicted_patches_with_the_same_loss(withhold, count):
    task = make(withhold=withhold, ask={"pixels": 1.0})
    (images,) = batch()
    question, computed = task.questions["pixels"], []
    hook = question.decoder.blocks[-1].mlp.register_forward_hook(lambda _, given, made: computed.append(made.shape[1]))
    outcome = task(images, generator=seeded())
    hook.remove()
    # where all patches are predicted, computing the class token is cheaper than slicing it off
    assert computed == [count + (count == 64)]
    made = encoded(task, images)
    asked, _ = question.answer(made)
    visible, masked = made.given.visible, made.given.masked
    question.decoder.visible_asked = visible.shape[1]
    answers = question.decoder(made.tokens, visible, masked)
    answers = gather_tokens(in_grid_order(answers, visible, masked), asked)
    expected = question.errors(made, asked, answers)["loss"].mean()
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-6, atol=0)


def test_the_first_question_is_reported():
    for first, to_beat in (
        ("pixels", ("flat patches", "what was given")),
        ("positions", "chance"),
        ("agreement", "on other images"),
    ):
        ask = {first: 1.0} | {name: 1.0 for name in ("pixels", "positions", "agreement")}
        task = make(ask=ask).eval()
        assert task.measure(batch()[0], seeded()).to_beat == to_beat
        assert len(task.draw(batch()[0], seeded())) == 3


def test_only_dropped_positions_count():
    task = make(withhold={"drop_positions": 0.5}, ask={"positions": 1.0}, sigma=0.0)
    (images,) = batch()
    made = encoded(task, images)
    logits, dropped = task.questions["positions"].decoder(made.tokens), made.given.dropped
    expected = F.cross_entropy(logits[dropped], made.given.visible[dropped])
    close(task(images, generator=seeded()).loss, expected.detach())
