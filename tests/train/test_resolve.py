"""Resolved settings, parameter groups, and other plain functions of training."""

from dataclasses import replace

import pytest
import torch

from patchloom.data.source import Source
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.runs.settings import ResolvedSettings, Settings, request
from patchloom.runs.task import prepare_task
from patchloom.tasks import build_task, with_defaults
from patchloom.tasks.defaults import momentum_for
from patchloom.train.estimate import too_little_memory
from patchloom.train.metrics import event_steps
from patchloom.train.resolve import resolve
from patchloom.train.step import parameter_groups


def test_points():
    assert event_steps(100, 0.25) == {25, 50, 75, 100}
    assert max(event_steps(7, 0.25)) == 7 and max(event_steps(1, 0.25)) == 1


def test_no_decay_on_biases_norms_tokens_and_positions():
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


def test_no_decay_on_scalars():
    net = torch.nn.Linear(2, 2)
    net.gain = torch.nn.Parameter(torch.zeros(()))
    assert any(one is net.gain for one in parameter_groups(net, 0.05)[1]["params"])


STATS = Stats((0.5,) * 3, (0.2,) * 3, 480, 640, 100, [])


def test_resolve_replaces_every_auto_and_says_why():
    settings, reasons = resolve(Settings("photos/", {"name": "mae"}, {"name": "auto"}), 900, 3, STATS)
    assert "auto" not in [value for value in settings.plain().values() if isinstance(value, str)]
    assert settings.model["name"] != "auto"
    assert settings.img_size[0] % settings.patch_size == 0
    assert set(reasons) >= {"device", "img_size", "patch_size", "model", "batch_size", "epochs", "blr", "precision"}
    assert all(reasons.values())


@pytest.mark.parametrize("task", ["mae", "mp3", "simmim"])
def test_the_rate_of_large_batches_is_maes_and_called_so(task):
    """SimMIM's is 5e-5 and that of MP3, as DeiT's, 2.5e-4; no word may call 1.5e-4 theirs."""
    asked = Settings("photos/", {"name": task}, {"name": "vit_tiny_patch16_224"}, batch_size=1024)
    settings, reasons = resolve(asked, 9000, 3, STATS)
    assert (settings.blr, reasons["blr"]) == (1.5e-4, "MAE's")


def test_a_square_of_oblong_images_is_said():
    def size(h, w):
        stats = STATS._replace(height=h, width=w)
        settings, reasons = resolve(Settings("photos/", {"name": "mae"}, {"name": "auto"}, device="cpu"), 900, 3, stats)
        return settings.img_size, reasons["img_size"]

    assert size(32, 128) == (
        (32, 32),
        "as the images, median 32; a square sees 25% of images of 32x128: --img_size 32x128",
    )
    assert size(480, 200)[1].endswith("a square sees 42% of images of 480x200: --img_size 232x96")
    assert "square" not in size(480, 640)[1]


def test_resolve_keeps_given_values():
    asked = Settings(
        "x", {"name": "mae"}, {"name": "micro", "depth": 3}, img_size=(64, 32), patch_size=4, epochs=7, blr=0.5
    )
    settings, reasons = resolve(asked, 900, 3, STATS)
    assert (settings.img_size, settings.patch_size, settings.epochs, settings.blr) == ((64, 32), 4, 7, 0.5)
    assert settings.model == {"name": "micro", "depth": 3}
    assert not {"img_size", "patch_size", "epochs", "model", "blr"} & set(reasons)


class Textured(Source):
    """Images of 400 pixels with stripes 4 or 100 pixels wide."""

    def __init__(self, wide):
        self.name, self.wide = "textures", wide

    def __len__(self):
        return 4

    def read(self, i):
        stripes = torch.tensor([40, 40, 200, 200], dtype=torch.uint8).repeat_interleave(self.wide)
        return stripes.repeat(400 // len(stripes)).expand(3, 400, 400).contiguous()

    def fingerprint(self):
        return str(self.wide)


def test_images_whose_structure_a_reduction_loses_are_cut_at_native_scale():
    stats, model, device = STATS._replace(height=400, width=400), {"name": "auto"}, {"device": "cpu"}

    def crop_of(task="mae", images=None, **given):
        asked = Settings("x", with_defaults({"name": task}), model, **device, **given)
        settings, reasons = resolve(asked, 900, 3, stats, images=images)
        return settings.crop_scale, reasons.get("crop_scale", "")

    fine = Textured(wide=1)
    assert (
        crop_of(images=fine)[0] == "native"
        and "400x400" in crop_of(images=fine)[1]
        and "96x96" in crop_of(images=fine)[1]
    )
    assert crop_of(images=Textured(wide=25))[0] == 0.2
    assert crop_of(images=fine, img_size=(240, 240))[0] == 0.2  # hardly smaller than the images
    assert crop_of("droppos", fine)[0] == 0.2  # asks where a patch is, which depends on the scale
    assert crop_of("loca", fine)[0] == 1.0 and "whole images" in crop_of("loca", fine)[1]
    assert crop_of(images=fine, crop_scale=0.3) == (0.3, "")
    assert crop_of(images=fine, cache=120)[0] == 0.2


def test_native_crops_of_other_tasks_are_refused():
    with pytest.raises(PatchloomError, match="--cache whole"):
        Settings("x", crop_scale="native", cache=120).check()
    settings, _ = of_task("lut", 900, crop_scale="native", img_size=(32, 32))
    with pytest.raises(PatchloomError, match="seldom overlap"):
        prepare_task(settings, STATS)
    settings, _ = of_task("mae", 900, crop_scale="native", img_size=(32, 32))
    assert prepare_task(settings, STATS).augment.native


def test_padded_crops_reach_the_augmentation_of_any_task():
    given = {"img_size": (32, 32), "patch_size": 8}
    for name, border in (("mae", "padded"), ("lut", "reflected"), ("extrema", "reflected"), ("restore", "padded")):
        settings, reasons = of_task(name, 900, crop_scale=border, **given)
        assert prepare_task(settings, STATS).augment.border == border and "crop_scale" not in reasons
    with pytest.raises(PatchloomError, match="crop_scale cannot be mirrored: it takes"):
        request("photos", "mae", {"crop_scale": "mirrored"})


def test_sizes_for_patches_that_are_not_square():
    given = {"device": "cpu", "patch_size": (40, 1)}
    settings, _ = resolve(Settings("x", {"name": "mae"}, {"name": "auto"}, **given), 900, 3, STATS)
    assert (settings.img_size, settings.encoder_spec().grid) == ((80, 96), (2, 96))
    with pytest.raises(PatchloomError, match="--patch_size 40x1: a Swin needs square patches"):
        resolve(Settings("x", {"name": "mae"}, {"name": "swin-nano"}, **given), 900, 3, STATS)


def test_small_data_gets_more_epochs_and_smaller_batches():
    small, _ = resolve(Settings("x", {"name": "mae"}, {"name": "auto"}), 100, 3, STATS)
    large, _ = resolve(Settings("x", {"name": "mae"}, {"name": "auto"}), 100_000, 3, STATS)
    few, why = resolve(Settings("x", {"name": "mae"}, {"name": "auto"}, device="cpu"), 32, 3, STATS)
    assert (few.batch_size, why["batch_size"]) == (8, "the least, as there are 32 images")
    assert small.epochs > large.epochs and small.batch_size < large.batch_size
    one, _ = resolve(Settings("x", {"name": "mae"}, {"name": "auto"}), 1, 3, STATS)
    assert one.batch_size == 1


def of_task(name, n, **given):
    """Return settings and reasons for training on ``n`` images."""
    task = {"name": name, **given.pop("options", {})}
    return resolve(Settings("x", with_defaults(task), {"name": "auto"}, device="cpu", **given), n, 3, STATS)


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
    mae, _ = of_task("mae", 11_250, epochs=3)
    assert (mae.batch_size, mae.weight_decay) == (128, 0.05)


def test_given_values_are_kept_in_short_trainings():
    asked = {"epochs": 3, "batch_size": 64, "weight_decay": 0.02}
    settings, reasons = of_task("extrema", 11_250, options={"loss": "byol", "momentum": 0.99}, **asked)
    assert (settings.batch_size, settings.weight_decay) == (64, 0.02)
    assert (settings.task["loss"], settings.task["momentum"]) == ("byol", 0.99)
    assert not {"batch_size", "weight_decay", "task.loss", "task.momentum"} & reasons.keys()


def test_updates_are_counted_with_accumulation():
    assert of_task("lut", 128_000, epochs=1)[0].batch_size == 128
    assert of_task("lut", 128_000, epochs=1, accumulate=2)[0].batch_size == 64


@pytest.mark.parametrize(("updates", "momentum"), [(1, 0.0), (100, 0.0), (1_000, 0.9), (24_999, 0.996), (10**6, 0.996)])
def test_a_teacher_remembers_a_hundredth_and_never_more_than_the_papers(updates, momentum):
    assert momentum_for(updates)[0] == pytest.approx(momentum, abs=1e-4)


@pytest.mark.parametrize("side", [8, 28, 32, 64, 96, 100, 224, 1000])
def test_auto_sizes_always_fit(side):
    stats = STATS._replace(height=side, width=side + 5)
    settings, _ = resolve(Settings("x", {"name": "mae"}, {"name": "auto"}, device="cpu"), 900, 3, stats)
    assert settings.img_size[0] % settings.patch_size == 0 and settings.img_size[0] >= 2 * settings.patch_size


def test_images_of_a_pixel_are_refused():
    stats = STATS._replace(height=1, width=300)
    with pytest.raises(PatchloomError, match="a side of 1 pixel or less"):
        resolve(Settings("x", {"name": "mae"}, {"name": "auto"}, device="cpu"), 900, 3, stats)
    asked = Settings("x", {"name": "mae"}, {"name": "auto"}, (32, 32), device="cpu")
    assert resolve(asked, 900, 3, stats)[0].patch_size == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"epochs": 0}, "--epochs must be above 0"),
        ({"blr": -1.0}, "--blr must be above 0"),
        ({"held_out": 1.5}, "--held_out must be a fraction between 0 and 1"),
        ({"crop_scale": 0.0}, "--crop_scale must be a fraction"),
        ({"img_size": (0, 32)}, "--img_size must be positive"),
        ({"patch_size": (40, 0)}, "--patch_size must be positive and 65536 or less, not 40x0"),
        ({"seed": -1}, "--seed must be 0 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, said):
    with pytest.raises(PatchloomError, match=said):
        Settings("x", **wrong).check()


def test_seeded_steps_repeat():
    from patchloom.train.step import seed_step

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
            said = too_little_memory("need", Settings("x", {"name": task}, batch_size=batch))
            assert ("halve --batch_size" in said) == (batch // 2 >= max(least, processes)), (batch, said)
            assert ("use smaller images or a smaller --model" in said) != ("halve --batch_size" in said)


def test_compiling_is_asked_for_only_where_there_is_a_compiler(monkeypatch):
    asked = Settings("x", {"name": "mae"}, {"name": "auto"}, device="cpu", compile=True)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/g++")
    assert resolve(asked, 900, 3, STATS)[0].compile is True
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(PatchloomError, match="compiler"):
        resolve(asked, 900, 3, STATS)


def test_attention_takes_the_form_that_is_clearly_faster(monkeypatch):
    for gain, form in ((0.2, "explicit"), (0.95, "fused"), (3.0, "fused")):
        monkeypatch.setattr("patchloom.train.resolve.fused_gain", lambda *shape, gain=gain: gain)
        settings, reasons = resolve(Settings("x", {"name": "mae"}, {"name": "auto"}, device="cpu"), 9, 3, STATS)
        assert settings.attention == form and f"×{gain:.2f}" in reasons["attention"]


@pytest.mark.parametrize("name", ["batch_size", "img_size", "device", "compile", "crop_scale", "held_out", "devices"])
def test_auto_cannot_stand_in_resolved_settings(name):
    settings = resolve(Settings("x", {"name": "mae"}, {"name": "auto"}, device="cpu"), 900, 3, STATS)[0]
    assert isinstance(settings, ResolvedSettings) and settings.plain().keys() == Settings("x").plain().keys()
    with pytest.raises(ValueError, match=f"{name} is auto"):
        replace(settings, **{name: "auto"})
    with pytest.raises(ValueError, match="model is auto"):
        replace(settings, model={"name": "auto"})


def test_settings_without_a_choice_for_auto_are_not_resolved():
    with pytest.raises(ValueError, match="is auto"):
        Settings("x", {"name": "mae"}, {"name": "nano"}).resolved(img_size=(32, 32))
