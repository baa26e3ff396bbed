"""One sweep over every task in TASKS and a mixture of every question."""

import inspect

import pytest
import timm
import torch
from options_swept import mixture_of
from sweep import FRAMES, OBLONG, asked_of, build, spec_of, views_of

from patchloom.errors import PatchloomError
from patchloom.nets.build import build_encoder
from patchloom.tasks import TASKS, build_task, ready_tasks, task_class, with_defaults
from patchloom.tasks.check import check_task
from patchloom.tasks.mixture import _QUESTIONS
from patchloom.train.step import build_optimizer

ENCODERS = {
    "class token": {"class_token": True},
    "registers": {"class_token": True, "reg_tokens": 2},
    "no class token": {"class_token": False},
}
SHAPES = {"frames": FRAMES, "oblong patches": OBLONG}
# names and options
CASES = {name: (name, {}) for name in TASKS} | {f"mixture, {one}": ("mixture", mixture_of(one)) for one in _QUESTIONS}


@pytest.fixture(params=TASKS)
def name(request):
    return request.param


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def build_case(case, seed=0, **options):
    name, asked = case
    return build(name, seed, asked, **options)


@pytest.mark.parametrize("options", (ENCODERS | SHAPES).values(), ids=ENCODERS | SHAPES)
def test_it_is_a_task(case, options):
    """It trains, measures and draws, by several processes and on a GPU."""
    name, asked = case
    spec = spec_of(name, options, asked)
    check_task(asked_of(name, asked, spec.channels), build_encoder(spec))


@pytest.mark.parametrize("options", ENCODERS.values(), ids=ENCODERS)
def test_every_trainable_parameter_has_an_effect(case, options):
    task = build_case(case, **options)
    task(*views_of(task), progress=0.5, generator=torch.Generator().manual_seed(0)).loss.backward()
    for key, weight in task.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None and weight.grad.abs().sum() > 0, f"{key} gets no gradient"
        else:
            assert weight.grad is None, f"{key} must have no gradient"


def test_bfloat16_gives_nearly_the_loss_and_gradients_of_float32(case):
    task = build_case(case).train()
    views, found = views_of(task), []
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = task(*views, progress=0.5, generator=torch.Generator().manual_seed(1)).loss
        task.zero_grad()
        loss.backward()
        gradients = [weight.grad.flatten() for weight in task.parameters() if weight.grad is not None]
        assert loss.dtype == torch.float32 and {part.dtype for part in gradients} == {torch.float32}
        found.append((loss.item(), torch.cat(gradients)))
    (exact, true), (near, close) = found
    assert abs(near - exact) < 0.01 * exact and (close - true).norm() < 0.1 * true.norm()


def test_loss_falls(case):
    task = build_case(case)
    optimizer = build_optimizer(task, 0.0, "cpu")
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    views, losses = views_of(task), []
    for step in range(30):
        # the same draw every time: only the weights can lower the loss
        outcome = task(*views, progress=0.9, generator=torch.Generator().manual_seed(0))
        outcome.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        task.after_step((step + 1) / 30)
        losses.append(outcome.loss.item())
    assert losses[-1] < 0.9 * losses[0], losses


def test_one_seed_one_result(case):
    def losses(seed):
        task = build_case(case, seed)
        optimizer = build_optimizer(task, 0.05, "cpu")
        optimizer.param_groups[0]["lr"] = 1e-3
        found = []
        for step in range(3):
            outcome = task(*views_of(task), progress=step / 3, generator=torch.Generator().manual_seed(seed + step))
            outcome.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            task.after_step((step + 1) / 3)
            found.append(outcome.loss.item())
        return found

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


@pytest.mark.parametrize("options", (ENCODERS | SHAPES).values(), ids=ENCODERS | SHAPES)
def test_the_encoder_loads_in_timm(case, options):
    task = build_case(case, **options)
    fresh = timm.create_model(**spec_of(case[0], options, case[1]).timm_arguments())
    fresh.load_state_dict(task.encoder.state_dict(), strict=True)


def refused(step, *words):
    with pytest.raises(PatchloomError) as problem:
        step()
    assert all(word in str(problem.value) for word in words) and "--" not in str(problem.value), problem.value


def test_views_that_do_not_fit_are_refused(case):
    """Of images of twice the size the first rows of patches would be read, without a word."""
    task, generator = build_case(case).eval(), torch.Generator().manual_seed(0)
    views = views_of(task)
    h, w = task.augment.size
    larger = [torch.randn(8, 3, 2 * h, 2 * w) for _ in views]
    refused(lambda: task(*larger), f"{2 * h}x{2 * w} pixels", f"{h}x{w}")
    if case[0] != "diet":  # whose measure cuts views of its own out of images of any size
        refused(lambda: task.measure(larger[0], generator), f"{2 * h}x{2 * w} pixels", f"{h}x{w}")
    refused(lambda: task(*(view[:, :1] for view in views)), "1 channels", "takes 3")
    refused(lambda: task(*(view[0] for view in views)), "[3, ", "[b c h w]")
    refused(lambda: task(*(view[:0] for view in views)), "an empty batch", "one image or more")
    refused(lambda: task(*(view.mul(255).byte() for view in views)), "uint8", "normalise")
    refused(lambda: task(*views, views[0]), f"got {len(views) + 1} views", f"takes {len(views)}")
    if len(views) == 2:
        refused(lambda: task(views[0]), "got 1 view ", "takes 2 views")
        refused(lambda: task(views[0], views[1][:4]), "8 and 4 images")


def test_an_input_of_nothing_and_a_foreign_encoder_are_refused():
    task = build("mae")
    task.given = lambda images, generator=None: None
    refused(lambda: task(*views_of(task)), "MAE.given returned NoneType", "return an EncoderInput")
    refused(lambda: type(task)(torch.nn.Linear(3, 3)), "Linear", "VisionTransformer")


def test_every_option_is_documented(name):
    cls = task_class(name)
    for option in list(inspect.signature(cls).parameters)[1:]:
        assert f"\n        {option}: " in cls.__doc__ or f"\n    {option}: " in inspect.getdoc(cls), option


def test_a_task_is_ready_if_it_needs_no_option(name):
    needs = TASKS[name].needs
    assert (name in ready_tasks()) == (not needs) and list(asked_of(name)) == ["name", needs][: 1 + bool(needs)]
    if needs:
        with pytest.raises(PatchloomError, match=f"give --task.{needs}"):
            build_task({"name": name}, build_encoder(spec_of(name, {})))


def test_unknown_names_get_the_nearest_suggestion():
    with pytest.raises(PatchloomError, match="did you mean droppos"):
        task_class("dropos")
    with pytest.raises(PatchloomError, match="did you mean mask_ratio"):
        with_defaults({"name": "mae", "mask_rato": 0.5})
    for wrong in ({"mask_ratio": "half"}, {"mask_ratio": float("nan")}, {"normalized_pixels": 1}):
        with pytest.raises(PatchloomError, match="cannot be"):
            with_defaults({"name": "mae", **wrong})
    with pytest.raises(PatchloomError, match="the task has no name"):
        with_defaults({"mask_ratio": 0.5})


@pytest.mark.parametrize("ratio", [-0.1, 0.999, 1.0, 2.0])
def test_impossible_mask_ratios_are_refused(name, ratio):
    if "mask_ratio" not in inspect.signature(task_class(name)).parameters:
        pytest.skip("the task has no mask ratio")
    with pytest.raises(PatchloomError, match="mask ratio of"):
        build(name, asked={"mask_ratio": ratio})
