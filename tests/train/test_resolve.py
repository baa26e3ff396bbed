"""Values for ``auto``: by the data, the task, and what the machine has, never by a timing."""

import platform
import time
from dataclasses import replace

import pytest
import torch
from killing import SMALL
from refusing import refusal
from resolved import resolved_settings

from patchloom.data.sources.in_memory import open_objects
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import trains_in_bfloat16
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.optimizer import parameter_groups
from patchloom.nets.performance import missing_kernels
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import ResolvedSettings, Settings, request
from patchloom.runs.task import prepare_task
from patchloom.system import distributed
from patchloom.system.device import Cores, choose_workers
from patchloom.system.distributed import cores_here
from patchloom.tasks import build_task, with_defaults
from patchloom.tasks.defaults import momentum_for
from patchloom.train.estimate import smaller_steps
from patchloom.train.loop import pretrain
from patchloom.train.metrics import event_steps
from patchloom.train.resolve import resolve, share_of_batch
from patchloom.train.step import seed_step


def test_points():
    assert event_steps(100, 0.25) == {25, 50, 75, 100}
    assert max(event_steps(7, 0.25)) == 7 and max(event_steps(1, 0.25)) == 1


def test_no_decay_on_biases_norms_tokens_positions_and_scalars():
    options = {"reg_tokens": 2}
    encoder = build_encoder(EncoderSpec("nano", (16, 16), 4, positions="learned", options=options))
    task = build_task({"name": "mae"}, encoder)
    decayed, free = parameter_groups(task, 0.05)
    names = {weight: name for name, weight in task.named_parameters()}
    assert decayed["weight_decay"] == 0.05 and free["weight_decay"] == 0
    assert all(names[w].endswith("weight") and w.ndim > 1 for w in decayed["params"])
    kept_free = {names[w] for w in free["params"]}
    assert {"encoder.cls_token", "encoder.reg_token", "encoder.pos_embed"} <= kept_free
    assert "questions.pixels.decoder.mask_token" in kept_free
    assert "encoder.blocks.0.attn.qkv.bias" in kept_free and "encoder.norm.weight" in kept_free
    assert len(decayed["params"]) + len(free["params"]) == len([w for w in task.parameters() if w.requires_grad])
    net = torch.nn.Linear(2, 2)
    net.gain = torch.nn.Parameter(torch.zeros(()))
    assert any(one is net.gain for one in parameter_groups(net, 0.05)[1]["params"])


STATS = Stats((0.5,) * 3, (0.2,) * 3, 480, 640, 100, [])


NANO = Settings("photos/", {"name": "mae"}, {"name": "auto"}, device="cpu")


def of_task(name, n, **given):
    """Return settings and reasons for training on ``n`` images."""
    task, model = {"name": name, **given.pop("options", {})}, given.pop("model", {"name": "auto"})
    return resolve(Settings("x", with_defaults(task), model, device="cpu", **given), n, 3, STATS)


def test_resolve_replaces_every_auto_and_says_why():
    settings, reasons = resolve(replace(NANO, device="auto", precision="float32"), 900, 3, STATS)
    assert "auto" not in [value for value in settings.plain().values() if isinstance(value, str)]
    assert set(reasons) >= {"device", "img_size", "patch_size", "model", "batch_size", "epochs", "blr", "kernels"}
    assert all(reasons.values()) and settings.model == {"name": "nano"} and settings.warmup_epochs == 22.2


@pytest.mark.parametrize(("name", "positions"), [("mp3", "rotary"), ("mae", "sincos")])
def test_a_task_that_withholds_positions_withholds_embeddings_of_a_model_that_rotates(name, positions):
    """EVA-02 has both position embeddings and rotations; the task withholds rotations by itself."""
    settings, reasons = of_task(name, 900, model={"name": "eva02_tiny_patch14_224"})
    assert settings.positions == positions and (reasons["positions"] == "as in timm") == (name == "mae")


@pytest.mark.parametrize(
    ("n", "batch", "epochs"),
    [(1, 1, 1600), (5, 5, 1600), (32, 8, 1600), (900, 64, 222), (1023, 64, 196), (1024, 128, 195), (10**5, 128, 10)],
)
def test_small_data_gets_more_epochs_and_smaller_batches(n, batch, epochs):
    settings, _ = resolve(NANO, n, 3, STATS)
    assert (settings.batch_size, settings.epochs) == (batch, epochs)


@pytest.mark.parametrize(
    ("side", "img_size", "patch_size"), [(8, 8, 2), (16, 16, 2), (28, 28, 4), (48, 48, 4), (64, 64, 8), (1000, 96, 8)]
)
def test_sizes_follow_the_images(side, img_size, patch_size):
    settings, _ = resolve(NANO, 900, 3, STATS._replace(height=side + 5, width=side))
    assert (settings.img_size, settings.patch_size) == ((img_size, img_size), patch_size)


def test_a_gpu_gets_larger_ones(monkeypatch):
    for name, value in (("check_device", None), ("choose_precision", ("float32", "")), ("choose_compile", (False, ""))):
        monkeypatch.setattr(f"patchloom.train.resolve.{name}", lambda *_, value=value: value)
    for world, batch in ((1, 256), (4, 1024)):
        settings, _ = resolve(replace(NANO, device="cuda", attention="fused", kernels="torch"), 10**6, 3, STATS, world)
        assert (settings.img_size, settings.patch_size, settings.epochs) == ((224, 224), 16, 20)
        assert (settings.model["name"], settings.batch_size) == ("vit_small_patch16_224", batch)
    small = replace(NANO, device="cuda", img_size=(40, 40), attention="fused", kernels="torch")
    assert resolve(small, 10**6, 3, STATS)[0].model["name"] == "mini"


@pytest.mark.parametrize(
    ("batch", "images", "processes", "remedy"), [(16, 100, 3, "15 or 18"), (128, 16, 3, "15,"), (2, 100, 3, "3,")]
)
def test_a_batch_that_cannot_be_shared_evenly_is_refused(batch, images, processes, remedy):
    assert share_of_batch(12, 100, 3) == 4 and share_of_batch(128, 12, 3) == 4
    assert f"use --batch_size {remedy}" in refusal(share_of_batch, batch, images, processes)


@pytest.mark.parametrize("task", ["mae", "mp3", "simmim"])
def test_the_rate_of_large_batches_is_maes_and_called_so(task):
    """SimMIM's is 5e-5 and that of MP3, as DeiT's, 2.5e-4; no word may call 1.5e-4 theirs."""
    asked = Settings("photos/", {"name": task}, {"name": "vit_tiny_patch16_224"}, batch_size=1024)
    settings, reasons = resolve(asked, 9000, 3, STATS)
    assert (settings.blr, reasons["blr"]) == (1.5e-4, "MAE's")
    assert resolve(replace(asked, batch_size=512, accumulate=2), 9000, 3, STATS)[0].blr == 1.5e-4
    assert resolve(replace(asked, batch_size=512), 9000, 3, STATS)[0].blr == 1e-3
    assert resolve(replace(asked, model={"name": "nano"}), 9000, 3, STATS)[0].blr == 4e-3


def test_a_square_of_oblong_images_is_said():
    def size(h, w):
        settings, reasons = resolve(NANO, 900, 3, STATS._replace(height=h, width=w))
        return settings.img_size, reasons["img_size"]

    assert size(32, 128)[0] == (32, 32) and "25% of images of 32x128: --img_size 32x128" in size(32, 128)[1]
    assert size(480, 200)[1].endswith("a square sees 42% of images of 480x200: --img_size 232x96")
    assert "square" not in size(480, 640)[1]
    assert "a side of 1 pixel or less" in refusal(size, 1, 300)


def test_resolve_keeps_given_values():
    given = {"img_size": (64, 32), "patch_size": 4, "epochs": 7, "blr": 0.5, "batch_size": 12, "weight_decay": 0.02}
    settings, reasons = resolve(replace(NANO, model={"name": "micro", "depth": 3}, **given), 900, 3, STATS)
    assert {name: getattr(settings, name) for name in given} == given
    assert settings.model == {"name": "micro", "depth": 3} and not {*given, "model"} & reasons.keys()
    settings, reasons = of_task("extrema", 11_250, options={"loss": "byol", "momentum": 0.99})
    assert (settings.task["loss"], settings.task["momentum"]) == ("byol", 0.99)
    assert not {"task.loss", "task.momentum"} & reasons.keys()


def textured(wide):
    """Return four images of 400 pixels with stripes 2 or 50 pixels wide."""
    stripes = torch.tensor([40, 40, 200, 200], dtype=torch.uint8).repeat_interleave(wide)
    return open_objects([stripes.repeat(400 // len(stripes)).expand(3, 400, 400).contiguous()] * 4).train


def test_images_whose_structure_a_reduction_loses_are_cut_at_native_scale():
    stats = STATS._replace(height=400, width=400)

    def crop_of(task="mae", images=None, **given):
        asked = replace(NANO, task=with_defaults({"name": task}), **given)
        settings, reasons = resolve(asked, 900, 3, stats, images=images)
        return settings.crop_scale, reasons.get("crop_scale", "")

    fine = textured(wide=1)
    assert crop_of(images=fine)[0] == "native" and "400x400 to 96x96" in crop_of(images=fine)[1]
    assert crop_of(images=textured(wide=25))[0] == 0.2
    assert crop_of(images=fine, img_size=(240, 240))[0] == 0.2  # hardly smaller than the images
    assert crop_of("droppos", fine)[0] == 0.2  # asks where a patch is, which depends on the scale
    assert crop_of("loca", fine)[0] == 1.0 and "whole images" in crop_of("loca", fine)[1]
    assert crop_of(images=fine, crop_scale=0.3) == (0.3, "")
    assert crop_of(images=fine, cache=120)[0] == 0.2


def test_native_crops_of_other_tasks_are_refused():
    assert "--cache whole" in refusal(Settings("x", crop_scale="native", cache=120).check)
    settings, _ = of_task("lut", 900, crop_scale="native", img_size=(32, 32))
    assert "seldom overlap" in refusal(prepare_task, settings, STATS)
    settings, _ = of_task("mae", 900, crop_scale="native", img_size=(32, 32))
    assert prepare_task(settings, STATS).augment.native


def test_padded_crops_reach_the_augmentation_of_any_task():
    given = {"img_size": (32, 32), "patch_size": 8}
    for name, border in (("mae", "padded"), ("lut", "reflected"), ("extrema", "reflected"), ("restore", "padded")):
        settings, reasons = of_task(name, 900, crop_scale=border, **given)
        assert prepare_task(settings, STATS).augment.border == border and "crop_scale" not in reasons
    assert "crop_scale cannot be mirrored: it takes" in refusal(request, "photos", "mae", {"crop_scale": "mirrored"})


def test_sizes_for_patches_that_are_not_square():
    given = {"patch_size": (40, 1)}
    settings, _ = resolve(replace(NANO, **given), 900, 3, STATS)
    assert (settings.img_size, settings.encoder_spec().grid) == ((80, 96), (2, 96))
    with pytest.raises(PatchloomError, match="--patch_size 40x1: a Swin needs square patches"):
        resolve(replace(NANO, model={"name": "swin-nano"}, **given), 900, 3, STATS)


def test_a_teacher_gets_enough_updates_and_a_memory_that_fits_them():
    short, reasons = of_task("extrema", 11_250, epochs=3)
    assert (short.batch_size, short.weight_decay) == (32, 0.1)
    updates = 3 * (11_250 // 32)
    assert short.task["momentum"] == pytest.approx(1 - 100 / updates, abs=1e-3)
    assert short.task["loss"] == "infonce" and f"these are {updates:,}" in reasons["task.loss"]
    assert "updates" in reasons["batch_size"]
    long, reasons = of_task("extrema", 1_281_167, epochs=300, batch_size=2048)
    assert (long.task["momentum"], long.task["loss"]) == (0.996, "byol")
    lut, _ = of_task("lut", 11_250, epochs=3)
    assert (lut.batch_size, lut.weight_decay) == (32, 0.05) and lut.task["momentum"] == short.task["momentum"]
    agree = {"withhold": {"mask": 0.5}, "ask": {"agreement": 1.0, "pixels": 1.0}}
    mixed, reasons = of_task("mixture", 11_250, epochs=3, options=agree)
    assert mixed.batch_size == 32 and mixed.task["momentum"] == short.task["momentum"]
    alone, _ = of_task("mixture", 11_250, epochs=3)
    assert (alone.batch_size, alone.task["momentum"]) == (128, "auto"), "it has no teacher"
    assert of_task("lut", 128_000, epochs=1)[0].batch_size == 128
    assert of_task("lut", 128_000, epochs=1, accumulate=2)[0].batch_size == 64
    mae, _ = of_task("mae", 11_250, epochs=3)
    assert (mae.batch_size, mae.weight_decay) == (128, 0.05)


@pytest.mark.parametrize(("updates", "momentum"), [(1, 0.0), (100, 0.0), (1_000, 0.9), (24_999, 0.996), (10**6, 0.996)])
def test_a_teacher_remembers_a_hundredth_and_never_more_than_the_papers(updates, momentum):
    assert momentum_for(updates)[0] == pytest.approx(momentum, abs=1e-4)


def test_seeded_steps_repeat():
    generator = torch.Generator()
    drawn = []
    for step, rank in ((3, 0), (3, 0), (4, 0), (3, 1)):
        seed_step(0, step, rank, generator)
        drawn.append((torch.rand(1, generator=generator).item(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0] and drawn[0][1] != drawn[2][1]
    assert drawn[0][0] == drawn[3][0]  # processes take their rows of one draw for all
    assert drawn[0][1] != drawn[3][1]  # and drop other paths


@pytest.mark.parametrize(("task", "least"), [("mae", 1), ("lut", 2), ("extrema", 2)])
def test_the_remedy_for_too_little_memory_is_valid(task, least, monkeypatch):
    for processes in (1, 3):
        monkeypatch.setattr("patchloom.train.estimate.world", lambda processes=processes: processes)
        for batch in range(1, 9):
            said = smaller_steps(Settings("x", {"name": task}, batch_size=batch))
            assert ("halve --batch_size" in said) == (batch // 2 >= max(least, processes)), (batch, said)
            assert ("use smaller images or a smaller --model" in said) != ("halve --batch_size" in said)


def test_compiling_needs_a_compiler_that_works(monkeypatch):
    asked = replace(NANO, compile=True)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/g++")
    assert resolve(asked, 900, 3, STATS)[0].compile is True
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "compiler" in refusal(resolve, asked, 900, 3, STATS)
    monkeypatch.setattr("patchloom.train.resolve.cannot_compile", lambda device: "a first kernel fails")
    for value in (True, "graphs"):
        with pytest.raises(PatchloomError, match=f"--compile {str(value).lower()} .* a first kernel fails"):
            resolve(replace(NANO, compile=value), 900, 3, STATS)


@pytest.mark.parametrize(
    ("device", "accumulate", "world", "why"),
    [("cpu", 1, 1, "CUDA GPU"), ("cuda", 2, 1, "--accumulate 2"), ("cuda", 1, 2, "single process"), ("cuda", 1, 1, "")],
)
def test_cuda_graphs_are_refused_where_gradients_outlive_a_step(device, accumulate, world, why, monkeypatch):
    for name, value in (("cannot_compile", None), ("check_device", None), ("choose_precision", ("float32", ""))):
        monkeypatch.setattr(f"patchloom.train.resolve.{name}", lambda device, value=value: value)
    given = {"device": device, "accumulate": accumulate, "compile": "graphs"}
    asked = replace(NANO, **given)
    if not why:
        assert resolve(asked, 900, 3, STATS, world)[0].compile == "graphs"
        return
    with pytest.raises(PatchloomError, match=f"--compile graphs .*{why}.*--compile true"):
        resolve(asked, 900, 3, STATS, world)


def test_auto_cannot_stand_in_resolved_settings():
    settings = resolve(NANO, 900, 3, STATS)[0]
    assert isinstance(settings, ResolvedSettings) and settings.plain().keys() == NANO.plain().keys()
    for name in ("batch_size", "img_size", "device", "compile", "crop_scale", "held_out", "devices"):
        with pytest.raises(ValueError, match=f"{name} is auto"):
            replace(settings, **{name: "auto"})
    with pytest.raises(ValueError, match="model is auto"):
        replace(settings, model={"name": "auto"})
    with pytest.raises(ValueError, match="is auto"):
        NANO.resolved(img_size=(32, 32))


@pytest.mark.parametrize("task", ["mae", "lut", "extrema"])
def test_normal_weights_are_those_of_the_whole_task(task):
    """Deviation 0.02 in encoder, decoder, heads and teachers, as in DeiT's and SimMIM's; the default is MAE's."""
    settings = replace(resolved_settings(), task={"name": task}, model={"name": "nano"})
    found = {}
    for how in ("xavier", "normal"):
        torch.manual_seed(0)
        net = prepare_task(replace(settings, initialization=how), STATS)
        modules = [one for one in net.modules() if isinstance(one, torch.nn.Linear | torch.nn.Conv2d)]
        found[how] = [one.weight.std().item() for one in modules if one.weight.numel() > 4096]
    assert found["normal"] == pytest.approx([0.02] * len(found["normal"]), rel=0.05)
    assert not any(0.019 < one < 0.021 for one in found["xavier"]) and len(found["xavier"]) > 20


# Cores and clocks.


def test_all_of_a_machine_together_have_no_more_than_its_cores():
    for device in ("cpu", "cuda", "mps"):
        for processes in (1, 2, 4, 8):
            number, why = choose_workers(device, Cores(64, processes), least=1)
            assert processes * (number + 1) <= 64 and number >= 1
            assert ("processes share 64" in why) == (processes > 1)
        assert choose_workers(device, Cores(2, 8), least=1)[0] == 1  # one, even if there are more processes than cores
    assert [choose_workers("cuda", Cores(64, processes), least=1)[0] for processes in (1, 8)] == [16, 7]


ALL, HERE = set(range(64)), platform.node()


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ([(HERE, ALL, 64)] * 8, Cores(64, 8)),  # torchrun: every process may use every core
        ([(HERE, set(range(8 * i, 8 * i + 8)), 8) for i in range(8)], Cores(64, 8)),  # SLURM: each has its own
        ([("another", ALL, 64)] * 8 + [(HERE, set(range(16)), 16)] * 4, Cores(16, 4)),  # another machine's do not count
        ([(HERE, ALL, 16)] * 4, Cores(16, 4)),  # a container that gives the time of 16
    ],
)
def test_cores_are_counted_however_they_are_shared(known, found, monkeypatch):
    asked = []
    monkeypatch.setattr(distributed, "collected", lambda own: asked.append(own) or known)
    assert cores_here() == found and found.each in (8, 4)
    assert [machine for machine, *_ in asked[0]] == [HERE]


@pytest.mark.usefixtures("default_workers")
def test_settings_have_this_processs_share():
    asked = replace(NANO, kernels="torch", attention="fused")
    for here, workers in ((Cores(64), 16), (Cores(64, 2), 8), (Cores(64, 8), 2), (Cores(4, 8), 1)):
        settings, reasons = resolve(asked, 900, 3, STATS, 8 * here.processes, here)
        assert (settings.workers, settings.devices) == (workers, here.processes)
        assert reasons["workers"].startswith("most of" if here.each > 1 else "there is one core")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.usefixtures("quick_probe", "default_workers")
def test_a_run_that_goes_on_elsewhere_reads_as_suits_there(unlabelled_images, tmp_path, monkeypatch):
    given = SMALL | {"task": "mae", "workers": "auto", "epochs": 0.5, "out": tmp_path / "run"}
    monkeypatch.setattr("patchloom.train.loop.cores_here", lambda: Cores(12))
    pretrain(unlabelled_images, **given)
    (tmp_path / "run" / "summary.txt").unlink()
    for here, workers in ((Cores(12), 3), (Cores(12, 6), 1)):
        monkeypatch.setattr("patchloom.train.loop.cores_here", lambda here=here: here)
        planned = pretrain(unlabelled_images, dry_run=True, **given).planned
        assert planned["settings"]["workers"] == workers
        assert ("since 6 processes share 12" in planned["reasons"].get("workers", "")) == (workers == 1)
    assert RunFolder(tmp_path / "run").read_config().workers == 3


@pytest.mark.slow  # compiles native kernels
def test_no_rule_reads_a_clock(monkeypatch):
    missing_kernels("native")  # compiling them shows for how long

    def refuse():
        raise AssertionError("a rule reads a clock")

    with monkeypatch.context() as patch:
        for clock in ("perf_counter", "process_time", "monotonic", "time"):
            patch.setattr(time, clock, refuse)
        settings, reasons = resolve(replace(NANO, model={"name": "auto"}), 900, 3, STATS)
        half = trains_in_bfloat16(torch.device("cpu"), "auto")
    assert {"precision", "threads", "attention", "kernels", "compile"} <= reasons.keys()
    assert half == (settings.precision == "bfloat16")
