"""Compiled parts of a training step: one graph each, compiled in the first step only, with the same results."""

import pytest
import torch
from killing import SMALL
from sweep import SIZE, asked_of, build, views_of
from swins import swin
from traced import graph_count, traced_parts

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.compiling import compilable, compiled, compiling
from patchloom.nets.performance import checkpoint_gradients
from patchloom.tasks import TASKS, build_task
from patchloom.train.loop import pretrain


def step_of(task, views, step=0):
    loss = task(*views, progress=step / 3, generator=torch.Generator().manual_seed(step)).loss
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in task.named_parameters() if weight.grad is not None}
    task.zero_grad()
    return loss.detach(), found


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-6)


# parts of a step: encoder, decoder and loss; a teacher or guide in addition; its layers and their mean
GRAPHS = {"mae": 3, "crossmae": 3, "simmim": 2, "droppos": 4, "mp3": 2, "restore": 2, "extrema": 2, "lut": 4}
GRAPHS |= {"distill": 3, "latent": 5, "diet": 1, "jigsaw": 2, "part": 1, "loca": 2, "nepa": 1, "mixture": 5}


SWEPT = [name if name in ("mae", "diet") else pytest.param(name, marks=pytest.mark.slow) for name in TASKS]


@pytest.mark.parametrize("name", SWEPT)
def test_each_part_is_one_graph_that_is_compiled_in_the_first_step(name):
    task = build(name).train()
    views = views_of(task)
    plain = step_of(task, views)
    with traced_parts():
        assert_same(step_of(task, views), plain)
        assert graph_count() == GRAPHS[name]
        for step in (1, 2):
            with compiling(False):  # as a measure between two steps of a run
                task.measure(views[0][:2], torch.Generator().manual_seed(0))
            step_of(task, views, step)
            task.after_step(step / 3)
        assert graph_count() == GRAPHS[name]


def test_each_batch_size_is_compiled_once():
    task = build("diet").train()
    views = views_of(task)
    fewer = [view[:-1] for view in views]
    plain = step_of(task, fewer)
    with traced_parts():
        for batch in (views, fewer, views, fewer):
            last = step_of(task, batch)
        assert graph_count() == 2 * GRAPHS["diet"]
    assert_same(last, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mae", "droppos", "mp3", "crossmae"])
def test_compiled_backward_passes_give_the_same_gradients(name):
    task = build(name).train()
    views = views_of(task)
    plain = step_of(task, views)
    for checkpointing in (False, True):
        checkpoint_gradients(task, checkpointing)
        with traced_parts("aot_eager"):
            assert_same(step_of(task, views), plain)


def rotary(model):
    options = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    return build_encoder(EncoderSpec(model, SIZE, 4, positions="rotary", options=options))


ENCODERS = {
    "Swin": swin,
    "DINOv3": lambda: rotary("vit_small_patch16_dinov3"),
    "mixed rotations": lambda: rotary("vit_small_patch16_rope_mixed_224"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "encoder"), [("mae", "Swin"), *(("droppos", kind) for kind in ENCODERS)])
def test_other_encoders_are_one_graph(name, encoder):
    task = build_task(asked_of(name), ENCODERS[encoder]()).train()
    views = views_of(task)
    plain = step_of(task, views)
    with traced_parts():
        assert_same(step_of(task, views), plain)
        assert graph_count() == GRAPHS[name]


def test_cuda_graphs_are_those_of_torch_and_a_step_announces_itself(monkeypatch):
    asked, begun = [], []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(len(asked)))
    compiled.cache_clear()
    try:
        for chosen in (False, True, "graphs", "graphs"):
            with compiling(chosen):
                assert halved(torch.ones(2)).tolist() == [0.5, 0.5]
    finally:
        compiled.cache_clear()
    assert [options["mode"] for options in asked] == [None, "reduce-overhead"] and begun == [1, 2]


@compilable
def doubled(values):
    return halved(4 * values)


@compilable
def halved(values):
    return values / 2


def test_a_part_inside_a_part_belongs_to_its_graph_and_an_error_ends_compiling():
    with traced_parts():
        assert doubled(torch.ones(2)).tolist() == [2, 2] and graph_count() == 1
        assert halved(torch.ones(2)).tolist() == [0.5, 0.5] and graph_count() == 2
    with pytest.raises(ZeroDivisionError), compiling():
        raise ZeroDivisionError
    before = graph_count()
    doubled(torch.ones(3))
    assert graph_count() == before


@pytest.mark.slow
def test_a_run_compiles_in_its_steps_only(images, tmp_path, quick_probe):
    with traced_parts(), compiling(False):
        pretrain(images, "mae", out=tmp_path / "run", **SMALL | {"compile": True, "epochs": 3, "kernels": "torch"})
        assert graph_count() == GRAPHS["mae"]
