"""The three tasks that train a Swin, in the same sweep as ViTs; and a complete run, from images to timm."""

import math
import os
import signal
from dataclasses import replace

import pytest
import timm
import torch
from golden import close
from swins import DEEP, SIZES, spec_of, swin
from timm.models.swin_transformer import SwinTransformer

from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate.protocols import evaluate
from patchloom.export.export import export
from patchloom.look.look import look
from patchloom.nets.build import build_encoder
from patchloom.nets.performance import checkpoint_gradients, fuse_attention
from patchloom.questions.question import Measure
from patchloom.runs.encoder import load_encoder
from patchloom.runs.settings import Settings
from patchloom.runs.task import load_task
from patchloom.system.fake_cuda import CUDA, fake_cuda, on_fake_cuda
from patchloom.tasks import TASKS, build_task, task_class
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.mae import MAE
from patchloom.tasks.simmim import SimMIM
from patchloom.train.loop import pretrain
from patchloom.train.resolve import resolve
from patchloom.train.step import build_optimizer, parameter_groups

SWEPT = {
    "mae": [{}, {"normalized_pixels": False, "decoder_depth": 1}],
    "simmim": [{}, {"mask_ratio": 0.75, "mask_unit": 8, "normalized_pixels": True}],
    "droppos": [
        {},
        {"mask_ratio": 0.0, "position_mask_ratio": 1.0, "sigma": 0.0},
        {"placeholder": "learned", "shuffle": True, "temperature": float("inf"), "decoder_depth": 0},
        {"placeholder": "foreign", "pixels": True, "mask_ratio": 0.75},
    ],
}
CASES = [pytest.param(name, asked, id=f"{name} {asked}") for name, sets in SWEPT.items() for asked in sets]


def build(name, asked=None, seed=0, **sizes):
    torch.manual_seed(seed)
    return build_task({"name": name} | (asked or {}), build_encoder(spec_of(**sizes)))


def images(b=8):
    return torch.randn(b, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_sweep_covers_all_tasks_for_a_swin():
    assert {name for name in TASKS if task_class(name).serves_swin} == {*SWEPT}


@pytest.mark.parametrize(("name", "asked"), CASES)
def test_finite_loss_and_a_gradient_for_every_parameter(name, asked):
    task = build(name, asked)
    outcome = task(images(), progress=0.5, generator=seeded())
    assert outcome.loss.dtype == torch.float32 and math.isfinite(outcome.loss.item())
    outcome.loss.backward()
    assert not [key for key, weight in task.named_parameters() if weight.grad is None or not weight.grad.any()]


@pytest.mark.parametrize("name", SWEPT)
def test_loss_falls_from_a_seed_and_half_precision_is_near(name):
    def losses(seed):
        task, found = build(name, seed=seed), []
        optimizer = build_optimizer(task, 0.0, "cpu")
        for group in optimizer.param_groups:
            group["lr"] = 3e-3
        for _ in range(30):
            outcome = task(images(), progress=0.9, generator=seeded())
            outcome.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(outcome.loss.item())
        return found

    one = losses(0)
    assert one[-1] < 0.9 * one[0] and one == losses(0) and one != losses(1)
    task = build(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert abs(task(images(), progress=0.9, generator=seeded()).loss.item() - one[0]) < 0.01 * one[0]


@pytest.mark.parametrize(("name", "asked"), CASES)
def test_measure_and_pictures(name, asked):
    task = build(name, asked).eval()
    with torch.inference_mode():
        one, two = (task.measure(images(4), seeded(1)) for _ in range(2))
        sheets = task.draw(images(4), seeded(1))
    assert isinstance(one, Measure) and one.values.shape == (4,) and torch.equal(one.values, two.values)
    assert all(column.shape == (4, 3, 32, 32) for sheet in sheets for column in sheet.columns.values())
    if name == "droppos":
        assert "γ = 0.75" in sheets[1].columns and "γ = 0.5" not in sheets[1].columns


@pytest.mark.parametrize("form", [{}, {"checkpointing": True}, {"fused": False}])
@pytest.mark.parametrize(("name", "asked"), CASES)
def test_no_task_waits_for_a_gpu(name, asked, form):
    task = build(name, asked, window_size=3).train()  # with padding, shifts and masks
    checkpoint_gradients(task, form.get("checkpointing", False))
    fuse_attention(task, form.get("fused", True))
    with fake_cuda():
        on_fake_cuda(task)
        with torch.autocast("cuda", torch.bfloat16):
            outcome = task(torch.empty(8, 3, 32, 32, device=CUDA), progress=0.5)
    assert outcome.loss.device == CUDA and outcome.loss.requires_grad


def test_mae_keeps_one_unit_of_each_cell_and_predicts_the_others():
    task = MAE(swin()).eval()
    given = task.given(images(), seeded())
    assert given.visible.shape == (8, 16) and given.masked.shape == (8, 48)
    assert torch.equal(given.visible // 8 // 2 * 4 + given.visible % 8 // 2, torch.arange(16).expand(8, 16))
    # written out: normalised pixels of whole units, masked ones only
    answers = task.questions["pixels"].decoder(task.encode(images(), given).tokens, given.visible, given.masked)
    units = images().unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(8, 64, 48)
    asked = units.gather(1, given.masked[..., None].expand(-1, -1, 48))
    asked = (asked - asked.mean(-1, keepdim=True)) / (asked.var(-1, keepdim=True) + 1e-6).sqrt()
    close(task(images(), given=given).loss, (answers - asked).square().mean())


def test_simmim_blanks_units_after_the_patch_embedding():
    task = SimMIM(swin(**DEEP))
    assert task.unit == 1 and task.chosen["mask_unit"][0] == 8  # pixels, as 32 for Swin-T
    assert task.mask_token.shape == (8,) and task.questions["pixels"].decoder.out_features == 3 * 8 * 8
    given = task.given(images(), seeded())
    assert given.visible.shape == (8, 16) and given.blank.sum(1).tolist() == [10] * 8
    assert build("simmim", {"mask_unit": 8}).unit == 2
    with pytest.raises(PatchloomError, match="mask units of 6 pixels do not fit 8x8 patches of 4"):
        build("simmim", {"mask_unit": 6})


def test_droppos_places_units_and_their_order_changes_no_loss():
    task = DropPos(swin(), sigma=0.5).eval()
    given = task.given(images(), seeded())
    assert given.visible.shape == (8, 16) and given.dropped.sum(1).tolist() == [12] * 8
    order = torch.randperm(16)
    other = replace(given, visible=given.visible[:, order], dropped=given.dropped[:, order])
    close(task(images(), given=given).loss, task(images(), given=other).loss)
    shuffled = DropPos(swin(), shuffle=True).given(images(), seeded()).visible
    assert torch.equal(shuffled.sort(1).values, given.visible) and not torch.equal(shuffled, given.visible)
    assert task.questions["positions"].ratios["mask_ratio"] == (0.0, 0.75)


def test_auto_for_a_swin():
    task = build("droppos")
    assert (task.mask_ratio, task.placeholder, task.position_token) == (0.75, "zeros", None)
    few, odd = build("droppos", size=(16, 16)), build("droppos", size=(36, 32))
    assert few.mask_ratio == 0 and "would leave only 4 patches visible" in few.chosen["mask_ratio"][1]
    assert odd.mask_ratio == 0 and "9x8 are not" in odd.chosen["mask_ratio"][1]
    assert odd.questions["positions"].ratios["mask_ratio"] == (0.0,)
    assert build("droppos", {"placeholder": "learned"}).position_token.shape == (8,)


@pytest.mark.parametrize("name", [name for name in TASKS if name not in SWEPT])
def test_other_tasks_are_rejected_with_the_supported_ones(name):
    with pytest.raises(PatchloomError, match="needs a plain ViT: .* a task that trains a Swin .mae, simmim or droppos"):
        task_class(name)(build_encoder(spec_of()))


@pytest.mark.parametrize("name", ["mae", "droppos"])
def test_only_uniform_masks_are_accepted(name):
    with pytest.raises(PatchloomError, match="0.5 does not fit a Swin, .* give --task.mask_ratio 0.75"):
        build(name, {"mask_ratio": 0.5})
    with pytest.raises(PatchloomError, match="9x8 units have an odd side: give --img_size 32x32"):
        build(name, {"mask_ratio": 0.75}, size=(36, 32))


def test_mae_takes_only_its_default_mask_unit():
    assert build("mae", {"mask_unit": 4}).unit == 1
    with pytest.raises(PatchloomError, match="units of 8 pixels do not fit a Swin, .* leave out --task.mask_unit"):
        build("mae", {"mask_unit": 8})


def test_tables_of_biases_are_not_decayed():
    net = swin()
    free = {id(one) for one in parameter_groups(net, 0.1)[1]["params"]}
    tables = [one for key, one in net.named_parameters() if key.endswith("relative_position_bias_table")]
    assert len(tables) == 4 and all(id(one) in free for one in tables)


RUN = {
    "task": "droppos",
    "model": {"name": "swin-nano", **SIZES, "drop_path_rate": 0.1},
    "img_size": 32,
    "batch_size": 16,
    "epochs": 2,
    "precision": "float32",
    "attention": "explicit",
    "compile": False,
    "threads": 1,
    "workers": 0,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, quick_probe):
    return pretrain("shapes:60", out=tmp_path_factory.mktemp("swin") / "run", **RUN).folder


def test_a_stopped_run_resumes_exactly(run, tmp_path, monkeypatch):
    after, stopped = DropPos.after_step, []

    def stop_once(task, progress):
        after(task, progress)
        if progress < 0.5 and not stopped:  # the trial steps before the run use a half
            stopped.append(progress)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(DropPos, "after_step", stop_once)
    with pytest.raises(Stopped):
        pretrain("shapes:60", out=tmp_path / "run", **RUN)
    assert not (tmp_path / "run" / "encoder.safetensors").exists()
    half, card = load_encoder(tmp_path / "run")
    assert isinstance(half, SwinTransformer) and "not finished" in card.note
    again = pretrain("shapes:60", out=tmp_path / "run", **RUN).folder
    one, two = (load_encoder(folder)[0].state_dict() for folder in (run, again))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not all(torch.equal(one[key], value) for key, value in half.state_dict().items())


def test_the_encoder_loads_in_timm_and_starts_another_run(run, tmp_path):
    done = export(run)
    pasted = {}
    exec(done.snippet, pasted)
    assert done.difference < 1e-4 and pasted["features"](torch.rand(2, 3, 32, 32)).shape == (2, 8, 8, 16)
    weights, arguments = load_encoder(run)[0].state_dict(), spec_of().timm_arguments()
    timm.create_model(**arguments).load_state_dict(weights, strict=True)
    begun = pretrain("shapes:40", out=tmp_path / "mae", **RUN | {"task": "mae", "init": str(run), "epochs": 1}).folder
    assert load_task(begun).settings.task["name"] == "mae"


def test_protocols_and_pictures_work_on_a_run(run):
    quick = {"device": "cpu", "cache": False}
    assert [row.encoder for row in evaluate("knn", run, "shapes:60", **quick).quoted][1] == "untrained"
    assert evaluate("positions", run, "shapes:40", images=10, **quick).n_test == 10
    trained = evaluate("finetune", run, "shapes:40", epochs=1, precision="float32", validation=0.0, **quick)
    assert [row.encoder for row in trained.quoted] == ["run", "from scratch"]
    assert {path.name for path in look(run)} >= {"positions.png", "rebuilt.png"}


@pytest.mark.parametrize(
    ("protocol", "options", "said"),
    [
        ("layers", {}, "layers needs the tokens of a plain ViT, and this is a Swin: take knn, linear"),
        ("order", {}, "order needs the tokens of a plain ViT"),
        ("finetune", {"positions": "fixed"}, "a Swin keeps its own relative positions: leave out --positions fixed"),
        ("finetune", {"recipe": "mp3", "epochs": 1}, "a Swin cannot have a class token"),
    ],
)
def test_unsupported_commands_are_rejected(run, protocol, options, said):
    with pytest.raises(PatchloomError, match=said):
        evaluate(protocol, run, "shapes:40", device="cpu", **options)


@pytest.mark.parametrize(
    ("asked", "size", "patch"),
    [
        ({}, (96, 96), 2),
        ({"img_size": (64, 64)}, (64, 64), 2),
        ({"patch_size": 4}, (96, 96), 4),
        ({"model": {"name": "swin_tiny_patch4_window7_224"}}, (128, 128), 4),
        ({"model": {"name": "swin-nano", "depths": [2, 2]}}, (96, 96), 4),
    ],
)
def test_auto_sizes_have_an_even_number_of_units(asked, size, patch):
    stats = Stats((0.5,) * 3, (0.2,) * 3, 480, 640, 100, [])
    asked = Settings("photos/", **{"task": {"name": "mae"}, "model": {"name": "swin-nano"}, "device": "cpu"} | asked)
    settings, reasons = resolve(asked, 900, 3, stats)
    assert (settings.img_size, settings.patch_size, settings.positions) == (size, patch, "none")
    assert settings.blr == 1e-3 and "a Swin has relative positions" in reasons["positions"]
    unit = patch * 2 ** (len(settings.model.get("depths", [2] * (4 if "tiny" in settings.model["name"] else 3))) - 1)
    assert size[0] % (2 * unit) == 0


def test_other_tasks_are_rejected_before_anything_is_resolved():
    stats = Stats((0.5,) * 3, (0.2,) * 3, 480, 640, 100, [])
    with pytest.raises(PatchloomError, match="MP3 needs a plain ViT"):
        resolve(Settings("photos/", {"name": "mp3"}, {"name": "swin-nano"}), 900, 3, stats)
