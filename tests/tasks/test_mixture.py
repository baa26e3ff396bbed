"""Compositions: those that are the papers' tasks, those that make no sense, and the way from the command line."""

from copy import deepcopy

import pytest
import torch
from golden import close
from patchloom.objectives.positions import position_cross_entropy
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.options import parse_pretrain
from patchloom.patches.tokens import gather_tokens, in_grid_order, patchify, scatter_tokens, unpatchify
from patchloom.tasks import build_task, encoder_defaults
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.mixture import Mixture

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
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


def make(size=(32, 32), p=4, channels=3, positions=None, **options):
    torch.manual_seed(0)
    all_of_them = isinstance(options.get("withhold"), dict) and options["withhold"].get("drop_positions") == 1
    positions = positions or ("none" if all_of_them else "sincos")
    spec = EncoderSpec("nano", size, p, channels, positions=positions, options=SIZES)
    task = build_task({"name": "mixture", **options}, build_encoder(spec))
    task.normalized_by((0.4,) * channels, (0.25,) * channels)
    with torch.no_grad():  # zero biases would hide mistakes
        for weight in task.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    return task


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(b=4, n=1, seed=1):
    return torch.randn(n, b, 3, 32, 32, generator=generator(seed)).unbind()


@pytest.mark.parametrize("options", LIKE.values(), ids=LIKE)
def test_the_loss_is_the_weighted_sum_and_reaches_every_parameter(options):
    task = make(**options)
    views = batch(n=2 if options.get("teacher") == "second" else 1)
    outcome = task(*views, progress=0.5, generator=generator())
    weights = options["ask"]
    assert outcome.metrics.keys() == {f"{name}_loss" for name in weights}
    total = sum(weight * outcome.metrics[f"{name}_loss"] for name, weight in weights.items())
    torch.testing.assert_close(outcome.loss.detach(), total)
    outcome.loss.backward()
    for name, weight in task.named_parameters():
        assert weight.requires_grad == ("pos_embed" not in name and ".teacher." not in name)
        assert not weight.requires_grad or weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize("options", LIKE.values(), ids=LIKE)
def test_a_run_can_be_taken_up_again(options):
    """What every auto became is an option, too, and builds the same task."""
    task = make(**options)
    again = make(**options | {name: value for name, (value, _) in task.chosen.items()})
    assert not again.chosen
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in task.state_dict().items()}


def test_like_droppos_is_droppos():
    task = make(**LIKE["droppos"], sigma=1.0)
    other = DropPos(deepcopy(task.encoder), 0.75, 0.75, sigma=1.0, temperature=float("inf"))
    other.decoder.load_state_dict(task.questions["positions"].decoder.state_dict())
    other.position_token.data.copy_(task.position_token)
    (images,) = batch()
    seen = task.see(images, images, generator())
    dropped = seen.view.dropped.nonzero()[:, 1].view(4, -1)
    assert (seen.view.visible.shape[1], dropped.shape[1]) == (16, 12)
    for progress in (0.0, 0.7):
        mine = task(images, progress=progress, generator=generator()).loss
        theirs = other(images, progress=progress, hands=(seen.view.visible, seen.masked, dropped)).loss
        close(mine, theirs.detach())


def test_like_mp3_asks_every_patch_and_lets_few_serve():
    task = make(**LIKE["mp3"])
    (images,) = batch()
    seen = task.see(images, images, generator())
    assert seen.view.context.shape == (4, 16) and seen.view.visible.shape == (4, 64) and seen.view.dropped.all()
    question = task.questions["positions"]
    assert len(question.decoder.blocks) == 0 and not question.place(seen).told().any()
    expected = F.cross_entropy(question.decoder(seen.tokens).flatten(0, 1), torch.arange(64).repeat(4))
    close(task(images, generator=generator()).loss, expected.detach())
    assert encoder_defaults({"name": "mixture", **LIKE["mp3"]})["positions"][0] == "none"
    assert encoder_defaults({"name": "mixture", **LIKE["droppos"]}) == {}
    measure = task.eval().measure(images, generator())
    assert measure.baselines["chance"].tolist() == pytest.approx([1 / 64] * 4)


def test_like_simmim_asks_the_blank_patches_and_never_sees_them():
    task = make(**LIKE["simmim"])
    (images,) = batch()
    seen = task.see(images, images, generator())
    blank = seen.view.blank
    assert blank.sum(1).tolist() == [39] * 4 and seen.masked.shape == (4, 0)  # 0.6 of 64, rounded up
    which = blank.nonzero()[:, 1].view(4, -1)
    noise = unpatchify(scatter_tokens(torch.randn(4, 39, 48), which, patchify(images, 4)), 4, (8, 8))
    question = task.questions["pixels"]
    asked, answer = question.answer(seen)
    assert torch.equal(asked, which) and torch.equal(answer, question.answer(task.see(noise, noise, generator()))[1])

    truth = patchify(images * 0.25 + 0.4, 4).unflatten(-1, (3, 16))
    truth = ((truth - truth.mean(-1, keepdim=True)) / (truth.std(-1, keepdim=True) + 1e-6)).flatten(2)
    errors = [(answer[i, j] - truth[i, which[i, j]]).square().mean() for i in range(4) for j in range(39)]
    close(task(images, generator=generator()).loss, torch.stack(errors).mean().detach())


def test_like_lut_agrees_with_a_teacher_that_sees_all_of_the_second_view():
    task = make(**LIKE["lut"]).eval()
    one, two = batch(n=2)
    seen = task.see(one, two, generator())
    question = task.questions["agreement"]
    vit = question.teacher.encoder
    target = question.teacher.projection(vit.forward_features(two)[:, 1:].mean(1))
    guess = question.prediction(question.projection(seen.tokens[:, 1:].mean(1)))
    expected = (2 - 2 * F.cosine_similarity(guess, target, dim=-1)).mean()
    outcome = task(one, two, generator=generator())
    close(outcome.metrics["agreement_loss"], expected.detach())
    assert task(one, one, generator=generator()).metrics["agreement_loss"] != expected
    assert (task.augment.crop, task.augment.color) == ("own", "none")
    assert task.second == "second" and make(ask={"agreement": 1.0}).second == "same"


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


def test_blank_patches_do_not_speak_for_the_image():
    task = make(withhold={"blank": 0.5}, ask={"agreement": 1.0})
    (images,) = batch()
    seen = task.see(images, images, generator())
    student = task.questions["agreement"].student(seen)
    for i in range(4):
        torch.testing.assert_close(student[i], seen.tokens[i, 1:][~seen.view.blank[i]].mean(0))


@pytest.mark.parametrize("order", [("mask", "blank", "drop_positions"), ("drop_positions", "blank", "mask")])
@pytest.mark.parametrize("shares", [(0.25, 0.5, 0.5), (0.5, 0.3, 0.65), (0.1, 0.9, 0.05)])
def test_no_patch_is_both_blank_and_without_position(order, shares):
    given = dict(zip(("mask", "blank", "drop_positions"), shares, strict=True))
    task = make(withhold={name: given[name] for name in order}, ask={"pixels": 1.0, "positions": 1.0})
    (images,) = batch(b=30)
    view = task.view(images, generator())
    kept = int(64 * (1 - given["mask"]))
    assert view.visible.shape == (30, kept) and not (view.blank & view.dropped).any()
    for flags, name in ((view.blank, "blank"), (view.dropped, "drop_positions")):
        count = kept - int(kept * (1 - given[name]) + 1e-6)
        assert flags.sum(1).tolist() == [count] * 30
    assert all(len(set(row)) == kept for row in view.visible.tolist())


ASKED = (
    ({"mask": 0.5}, 32),
    ({"blank": 0.25}, 16),
    ({"mask": 0.5, "blank": 0.25}, 40),
    ({"blur": 3, "mask": 0.5, "blank": 0.25}, 64),
)


def test_what_is_asked_of_a_degraded_picture():
    """Every patch of the clean picture, seen or not; without degradation only what was not seen."""
    (images,) = batch()
    for withhold, count in ASKED:
        task = make(withhold=withhold, ask={"pixels": 1.0})
        seen = task.see(images, images, generator())
        asked, _ = task.questions["pixels"].answer(seen)
        hidden = ~torch.zeros(4, 64, dtype=torch.bool).scatter(1, seen.view.visible, seen.shows())
        assert torch.equal(asked.sort(dim=1).values, (hidden | ("blur" in withhold)).nonzero()[:, 1].view(4, count))
        perfect = patchify(images * 0.25 + 0.4, 4).unflatten(-1, (3, 16))
        perfect = (perfect - perfect.mean(-1, keepdim=True)) / (perfect.std(-1, keepdim=True) + 1e-6)
        assert task.questions["pixels"].errors(gather_tokens(perfect.flatten(2), asked), asked, seen).max() < 1e-9
        assert torch.equal(seen.view.images, images) == ("blur" not in withhold)


@pytest.mark.parametrize(("withhold", "count"), ASKED, ids=["masked", "blank", "both", "all, since blurred"])
def test_the_decoder_computes_only_what_is_asked_and_the_loss_is_that_of_answers_for_all(withhold, count):
    task = make(withhold=withhold, ask={"pixels": 1.0})
    (images,) = batch()
    question, computed = task.questions["pixels"], []
    hook = question.decoder.blocks[-1].mlp.register_forward_hook(lambda _, given, made: computed.append(made.shape[1]))
    outcome = task(images, generator=generator())
    hook.remove()
    assert computed == [count + (count == 64)]  # where all are asked, the class token costs less than cutting it off
    seen = task.see(images, images, generator())
    asked, _ = question.answer(seen)
    question.decoder.visible_asked = seen.view.visible.shape[1]
    answers = question.decoder(seen.tokens, seen.view.visible, seen.masked)
    answers = gather_tokens(in_grid_order(answers, seen.view.visible, seen.masked), asked)
    torch.testing.assert_close(outcome.loss, question.errors(answers, asked, seen).mean(), rtol=1e-6, atol=0)


def test_the_first_question_is_reported():
    for first, bar in (
        ("pixels", ("flat patches", "what was given")),
        ("positions", "chance"),
        ("agreement", "on other images"),
    ):
        ask = {first: 1.0} | {name: 1.0 for name in ("pixels", "positions", "agreement")}
        task = make(ask=ask).eval()
        assert task.measure(batch()[0], generator()).bar == bar
        assert len(task.draw(batch()[0], generator())) == 3


REFUSED = [
    ({"withhold": {"masks": 0.5}}, "--task.withhold knows no masks: choose among mask, blank"),
    ({"ask": {"pixel": 1.0}}, "--task.ask knows no pixel: choose among pixels, positions, agreement"),
    ({"teacher": "own"}, "--task.teacher cannot be own"),
    ({"ask": {}}, "--task.ask needs one question or more"),
    ({"ask": {"pixels": 0.0}}, "each with a weight above 0"),
    ({"ask": {"pixels": 1.0, "positions": -1.0}}, "each with a weight above 0"),
    ({"withhold": {"mask": 1.0}, "ask": {"pixels": 1.0}}, "withhold mask is a share between 0 and 1, not 1.0"),
    ({"withhold": {"blank": 0.0}, "ask": {"pixels": 1.0}}, "withhold blank is a share between 0 and 1, not 0.0"),
    ({"withhold": {"drop_positions": 1.5}}, "withhold drop_positions is a share between 0 and 1, not 1.5"),
    ({"withhold": {"limit_context": -0.5}}, "withhold limit_context is a share between 0 and 1"),
    ({"withhold": {"blur": 3, "fisheye": 0.2}, "ask": {"pixels": 1.0}}, "one degradation of the picture at a time"),
    ({"withhold": {"limit_context": 0.5, "mask": 0.5}, "ask": {"pixels": 1.0}}, "put it after mask"),
    ({"withhold": {"drop_positions": 0.5}, "ask": {"pixels": 1.0}}, "no pixels are withheld"),
    ({"withhold": {}, "ask": {"pixels": 1.0}}, "no pixels are withheld"),
    ({"withhold": {"mask": 0.5}, "ask": {"positions": 1.0}}, "no visible patch's position is withheld"),
    (
        {"withhold": {"drop_positions": 1}, "ask": {"positions": 1.0}, "positions": "sincos"},
        "drop_positions 1 does not go with an encoder that has positions: use --positions none",
    ),
    (
        {"withhold": {"drop_positions": 0.5}, "ask": {"positions": 1.0}, "positions": "none"},
        "drop_positions 0.5 does not go with an encoder that has no positions: use --positions sincos",
    ),
    ({"ask": {"agreement": 1.0}, "teacher": "none"}, "agreement needs somebody to agree with"),
    ({"ask": {"pixels": 1.0}, "teacher": "same"}, "nobody asks the teacher"),
    ({"withhold": {}, "ask": {"agreement": 1.0}}, "the student sees all that the teacher sees"),
    ({"withhold": {"mask": 0.999}, "ask": {"pixels": 1.0}}, "mask ratio of 0.999 leaves 0 of 64 patches visible"),
    (
        {"withhold": {"blank": 0.6, "drop_positions": 0.5}, "ask": {"positions": 1.0}},
        "of 64 patches that enter, 39 would be blank and 32 without a position",
    ),
    ({"withhold": {"blank": 0.99}, "ask": {"pixels": 1.0}}, "every patch would be blank"),
    ({"withhold": {"mask": 1e-9}, "ask": {"pixels": 1.0}}, "mask 1e-09 takes none of the patches: raise it"),
    ({"withhold": {"blank": 1e-9}, "ask": {"pixels": 1.0}}, "blank 1e-09 takes none of the patches"),
    (
        {"withhold": {"drop_positions": 1e-9}, "ask": {"positions": 1.0}},
        "drop_positions 1e-09 takes none of the patches",
    ),
    ({"decoder_depth": 0}, "the encoder learns nothing by them: give --task.decoder_depth 1 or more"),
    ({"withhold": {"blur": 4}, "ask": {"pixels": 1.0}}, "the kernel of blur must be odd sides"),
    ({"withhold": {"zoom_in": 2}, "ask": {"pixels": 1.0}}, "the scale of zoom_in must be"),
    (
        {"withhold": {"decolorize": 0.3}, "ask": {"pixels": 1.0}, "channels": 1},
        "decolorize is for images of 3 channels",
    ),
    ({"momentum": 2.0}, "momentum must lie in"),
    ({"sigma": -1.0}, "sigma must be 0 or more"),
    ({"size": (8, 8), "p": 1}, "within patches of one pixel"),
    ({"withhold": {"mask": "half"}}, "--task.withhold cannot be .*: it takes names with numbers"),
    ({"ask": ["pixels"]}, "--task.ask cannot be"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_cannot_be_answered_is_refused_with_the_reason(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_from_the_command_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "data: shapes\n"
        "task:\n  name: mixture\n"
        "  withhold: {mask: 0.25, drop_positions: 0.5, limit_context: 0.5}\n"
        "  ask:\n    positions: 1\n    agreement: 0.5\n"
        "  teacher: second\n"
    )
    asked = {"positions": 1.0, "agreement": 0.5}
    given, _ = parse_pretrain(["--config", str(file)])
    assert list(given["task"]["withhold"].items()) == [("mask", 0.25), ("drop_positions", 0.5), ("limit_context", 0.5)]
    assert list(given["task"]["ask"].items()) == list(asked.items())  # the first is reported
    given, _ = parse_pretrain(["--config", str(file), "--task.withhold", "{drop_positions: 0.75, blank: 0.2}"])
    assert given["task"]["withhold"] == {"drop_positions": 0.75, "blank": 0.2} and given["task"]["ask"] == asked
    task = make(**{name: value for name, value in given["task"].items() if name != "name"})
    assert isinstance(task, Mixture) and task.counts == {"drop_positions": 48, "blank": 13}
    assert (task.ask, task.second) == (asked, "second")
    for typed in ("{mask: 0.5}", "{mask:0.5}", '{"mask":0.5}'):
        given, _ = parse_pretrain(["shapes", "--task", "mixture", "--task.withhold", typed])
        assert given["task"]["withhold"] == {"mask": 0.5} and given["task"]["ask"] == "auto"
    with pytest.raises(PatchloomError, match="--task.withhold cannot be mask: it takes names with numbers"):
        parse_pretrain(["shapes", "--task", "mixture", "--task.withhold", "mask"])


def test_positions_count_where_they_were_dropped_alone():
    task = make(withhold={"drop_positions": 0.5}, ask={"positions": 1.0}, sigma=0.0)
    (images,) = batch()
    seen = task.see(images, images, generator())
    logits = task.questions["positions"].decoder(seen.tokens)
    entropy = position_cross_entropy(logits, torch.eye(64)[seen.view.visible])
    close(task(images, generator=generator()).loss, entropy[seen.view.dropped].mean().detach())
