"""One sweep over every task in TASKS and a mixture of every question."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from options_swept import mixture_of
from refusing import refusal
from small import seeded
from sweep import FRAMES, OBLONG, asked_of, build, spec_of, views_of

import patchloom.tasks
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.teacher import Teacher
from patchloom.options.declare import declared
from patchloom.options.tasks import QUESTIONS
from patchloom.patches.tokens import patchify, unpatchify
from patchloom.tasks import TASKS, build_task, ready_tasks, task_class, with_defaults
from patchloom.tasks.check import check_task
from patchloom.tasks.task import augment_views
from patchloom.train.step import pretraining_optimizer

ENCODERS = {
    "class token": {"class_token": True},
    "registers": {"class_token": True, "reg_tokens": 2},
    "no class token": {"class_token": False},
    "frames": FRAMES,
}
# names and options
CASES = {name: (name, {}) for name in TASKS} | {f"mixture, {one}": ("mixture", mixture_of(one)) for one in QUESTIONS}
TAUGHT = ["extrema", "lut", "latent", "loca", "mixture, agreement"]  # by a moving average of themselves


@pytest.fixture(params=TASKS)
def name(request):
    return request.param


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def build_case(case, seed=0, **options):
    name, asked = case
    return build(name, seed, asked, **options)


def check(case, options):
    name, asked = case
    spec = spec_of(name, options, asked)
    check_task(asked_of(name, asked, spec.channels), build_encoder(spec))


def test_it_is_a_task(case):
    """It trains, measures and draws, by several processes and on a GPU, on a grid whose sides all differ."""
    check(case, OBLONG | ENCODERS["registers"] | {"depth": 1})


@pytest.mark.slow
def test_it_is_a_task_with_every_encoder(case):
    for options in (ENCODERS["registers"], ENCODERS["no class token"], FRAMES):
        check(case, options | {"depth": 1})


@pytest.mark.parametrize("options", ENCODERS.values(), ids=ENCODERS)
def test_every_encoder_is_trained_measured_drawn_and_loads_in_timm(case, options):
    task = build_case(case, **options, depth=1)
    task(*views_of(task), progress=0.5, generator=seeded()).loss.backward()
    for key, weight in task.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None and weight.grad.abs().sum() > 0, f"{key} gets no gradient"
        else:
            assert weight.grad is None, f"{key} must have no gradient"
    fresh = timm.create_model(**spec_of(case[0], options | {"depth": 1}, case[1]).timm_arguments())
    fresh.load_state_dict(task.encoder.state_dict(), strict=True)
    measure, sheets = task.eval().measure(views_of(task)[0], seeded()), task.draw(views_of(task)[0], seeded())
    for values in (measure.values, *measure.baselines.values()):
        assert values.shape == (8,) and values.isfinite().all()
    assert all(sheet.page_title and sheet.page_text for sheet in sheets)
    columns = [column for sheet in sheets for column in sheet.columns.values()]
    assert columns and all(column.shape[1] == task.geometry.channels for column in columns)


def test_withheld_pixels_never_reach_the_encoder(case):
    task = build_case(case).eval()
    given = task.given(views_of(task)[0], seeded())
    images, g = given.images, task.geometry
    parts = {name: getattr(given, name) for name in ("visible", "blank", "dropped", "context")}
    given = replace(given, **{name: one if one is None else one[: len(images)] for name, one in parts.items()})
    seen = torch.zeros(len(images), g.n, dtype=torch.bool).scatter(1, given.visible, given.has_content())[..., None]
    patches = patchify(images, g.p)

    def tokens(patches):
        shown = unpatchify(patches, g.p, g.grid)
        return task.encode_tokens(replace(given, images=shown), seeded())[0]

    before = tokens(patches)
    assert torch.equal(tokens(torch.where(seen, patches, torch.nan)), before)
    assert not torch.equal(tokens(torch.where(seen, patches + 1, patches)), before)


@pytest.mark.parametrize("case", TAUGHT)
@pytest.mark.parametrize(("progress", "kept"), [(0.0, 0.9), (0.5, 0.95), (1.0, 1.0)])
def test_the_teacher_follows_along_a_half_cosine(case, progress, kept):
    task = build_case((CASES[case][0], CASES[case][1] | {"momentum": 0.9}))
    (question,) = [one for one in task.questions.values() if getattr(one, "teacher", None) is not None]
    with torch.no_grad():
        for value in task.state_dict().values():
            if value.is_floating_point():
                value.add_(torch.rand_like(value))
    before = {key: value.clone() for key, value in question.teacher.state_dict().items()}
    task.after_step(progress)
    for key, new in question.teacher.state_dict().items():
        home, _, rest = key.partition(".")
        source = (task if home == "encoder" else question).get_submodule(home).state_dict()[rest]
        torch.testing.assert_close(new, kept * before[key] + (1 - kept) * source if new.is_floating_point() else source)


def test_all_tasks_with_a_moving_average_are_taught():
    found = {
        name for name, case in CASES.items() if any(isinstance(one, Teacher) for one in build_case(case).modules())
    }
    assert found == {*TAUGHT}


def test_bfloat16_gives_nearly_the_loss_and_gradients_of_float32(case):
    task = build_case(case).train()
    views, found = views_of(task), []
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = task(*views, progress=0.5, generator=seeded(1)).loss
        task.zero_grad()
        loss.backward()
        gradients = [weight.grad.flatten() for weight in task.parameters() if weight.grad is not None]
        assert loss.dtype == torch.float32 and {part.dtype for part in gradients} == {torch.float32}
        found.append((loss.item(), torch.cat(gradients)))
    (exact, true), (near, close) = found
    assert abs(near - exact) < 0.01 * exact and (close - true).norm() < 0.1 * true.norm()


def train(case, steps, seed, rate, progress, draws):
    """Return the losses of ``steps`` updates; ``draws`` maps a step to the seed of its draws."""
    task, losses = build_case(case, seed, depth=1), []
    optimizer = pretraining_optimizer(task, 0.0, "cpu")
    for group in optimizer.param_groups:
        group["lr"] = rate
    views = views_of(task)
    for step in range(steps):
        outcome = task(*views, progress=progress, generator=seeded(draws(step)))
        outcome.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        task.after_step((step + 1) / steps)
        losses.append(outcome.loss.item())
    return losses


def test_loss_falls(case):
    # the same draw every time: only the weights can lower the loss
    losses = train(case, 30, 0, 3e-3, 0.9, lambda step: 0)
    assert losses[-1] < 0.9 * losses[0], losses


def test_one_seed_one_result(case):
    one, same, other = (train(case, 3, seed, 1e-3, 0.3, lambda step, seed=seed: seed + step) for seed in (0, 0, 1))
    assert one == same and one != other


def refused(step, *words):
    said = refusal(step)
    assert all(word in said for word in words) and "--" not in said


def test_views_that_do_not_fit_are_refused(case):
    """Of images of twice the size the first rows of patches would be read, without a word."""
    task = build_case(case).eval()
    views = views_of(task)
    h, w = task.augment.size
    larger = [torch.randn(8, 3, 2 * h, 2 * w) for _ in views]
    refused(lambda: task(*larger), f"{2 * h}x{2 * w} pixels", f"{h}x{w}")
    if case[0] != "diet":  # whose measure cuts views of its own out of images of any size
        refused(lambda: task.measure(larger[0], seeded()), f"{2 * h}x{2 * w} pixels", f"{h}x{w}")
    refused(lambda: task(*(view[:, :1] for view in views)), "1 channels", "takes 3")
    refused(lambda: task(*(view[0] for view in views)), "[3, ", "[b c h w]")
    refused(lambda: task(*(view[:0] for view in views)), "empty batch")
    refused(lambda: task(*(view.mul(255).byte() for view in views)), "uint8", "normalise")
    refused(lambda: task(*views, views[0]), f"got {len(views) + 1} views", f"takes {len(views)}")
    if len(views) == 2:
        refused(lambda: task(views[0]), "got 1 view ", "takes 2 views")
        refused(lambda: task(views[0], views[1][:4]), "8 and 4 images")


def test_an_input_of_nothing_and_a_foreign_encoder_are_refused():
    task = build("mae")
    task.given = lambda images, generator=None: None
    refused(lambda: task(*views_of(task)), "NoneType", "EncoderInput")
    refused(lambda: type(task)(torch.nn.Linear(3, 3)), "Linear", "VisionTransformer")


def test_every_option_is_documented_and_a_task_is_ready_if_it_needs_none(name):
    cls = task_class(name)
    assert getattr(patchloom.tasks, cls.__name__) is cls
    declaration = declared(TASKS[name].options)
    assert declaration.about == inspect.getdoc(cls).splitlines()[0]
    assert ["encoder", *(one.name for one in declaration.options)] == list(inspect.signature(cls).parameters)
    for option in declaration.options:
        assert f"\n    {option.name}: {option.about}." in inspect.getdoc(cls.__init__) and option.about, option
    needs = TASKS[name].needs
    assert (name in ready_tasks()) == (not needs) and list(asked_of(name)) == ["name", needs][: 1 + bool(needs)]
    if needs:
        assert f"give --task.{needs}" in refusal(build_task, {"name": name}, build_encoder(spec_of(name, {})))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "dropos"}, "did you mean droppos"),
        ({"name": "mae", "mask_rato": 0.5}, "did you mean --task.mask_ratio"),
        ({"name": "mae", "mask_ratio": "half"}, "cannot be"),
        ({"name": "mae", "mask_ratio": float("nan")}, "cannot be"),
        ({"name": "mae", "normalized_pixels": 1}, "cannot be"),
        ({"mask_ratio": 0.5}, "no name"),
    ],
)
def test_unknown_names_and_values_are_refused(wrong, words):
    assert words in refusal(with_defaults, wrong)
    with pytest.raises(ImportError, match="Droppos"):
        exec("from patchloom.tasks import Droppos")


def test_impossible_mask_ratios_are_refused(name):
    if "mask_ratio" in inspect.signature(task_class(name)).parameters:
        assert "mask ratio of" in refusal(build, name, asked={"mask_ratio": 0.999})
        for ratio in (-0.1, 1.0, 2.0):
            assert "mask_ratio must be" in refusal(build, name, asked={"mask_ratio": ratio})


@pytest.mark.parametrize("task", ["extrema", "lut"])
@pytest.mark.parametrize("brightest", [255, 300 / 65535, 1.0])
def test_views_for_pictures_keep_the_bit_depth(task, brightest):
    """Eight bits would leave two of 300 of 65,535 levels."""
    options = {"depth": 1, "embed_dim": 32, "class_token": task == "lut"}
    one = build_task({"name": task}, build_encoder(EncoderSpec("nano", (16, 16), 2, options=options)))
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * brightest
    images = images.round().byte() if brightest == 255 else images
    unit = images.float() / 255 if brightest == 255 else images
    mean, std = unit.mean((0, 2, 3)), unit.std((0, 2, 3))
    one.normalized_by(mean.tolist(), std.tolist())

    drawn = augment_views(one, (unit - one.mean) / one.std, torch.Generator().manual_seed(5))
    rng = np.random.default_rng(int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(5))))
    trained = zip(*(one.augment(image, rng) for image in images), strict=True)
    for ours, theirs in zip(drawn, map(torch.stack, trained), strict=True):
        if brightest == 255:
            assert torch.equal(ours, (theirs.float() / 255 - one.mean) / one.std)
        else:
            torch.testing.assert_close(ours * one.std + one.mean, theirs, atol=1e-5 * brightest, rtol=1e-5)
