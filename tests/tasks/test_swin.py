"""The three tasks that train a Swin, in the same sweep as ViTs; and a complete run, from images to timm."""

from dataclasses import replace

import pytest
import timm
import torch
from golden import close
from small import pixel_targets, seeded
from swins import DEEP, SIZES, spec_of, swin

from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.evaluate.protocols import evaluate
from patchloom.export.export import export
from patchloom.look.look import look
from patchloom.nets.build import build_encoder
from patchloom.runs.encoder import load_encoder
from patchloom.runs.settings import Settings
from patchloom.runs.task import load_task
from patchloom.tasks import TASKS, build_task, task_class
from patchloom.tasks.check import check_task
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.mae import MAE
from patchloom.tasks.simmim import SimMIM
from patchloom.train.loop import pretrain
from patchloom.train.resolve import resolve
from patchloom.nets.optimizer import parameter_groups
from patchloom.train.step import pretraining_optimizer

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


@pytest.mark.parametrize(("name", "asked"), CASES)
def test_it_trains_measures_and_draws(name, asked):
    """Every parameter has a gradient; on a GPU no step waits, with padding, shifts and masks of windows."""
    torch.manual_seed(0)
    check_task({"name": name} | asked, build_encoder(spec_of(window_size=3)))
    task, losses = build(name, asked), []
    optimizer = pretraining_optimizer(task, 0.0, "cpu")
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    for step in range(2 if asked else 15):
        with torch.autocast("cpu", torch.bfloat16, enabled=step == 1):
            losses.append(task(images(), progress=0.9, generator=seeded()).loss)
        losses[-1].backward()
        assert losses[-1].dtype == torch.float32
        assert not [key for key, weight in task.named_parameters() if weight.grad is None or not weight.grad.any()]
        if step:  # the first two have the same weights, in float32 and in bfloat16
            optimizer.step()
        optimizer.zero_grad()
    assert abs(losses[1] - losses[0]) < 0.01 * losses[0]
    assert asked or losses[-1] < 0.95 * losses[0]


def test_mae_keeps_one_unit_of_each_cell_and_predicts_the_others():
    task = MAE(swin()).eval()
    given = task.given(images(), seeded())
    assert given.visible.shape == (8, 16) and given.masked.shape == (8, 48)
    assert torch.equal(given.visible // 8 // 2 * 4 + given.visible % 8 // 2, torch.arange(16).expand(8, 16))
    # written out: normalised pixels of whole units, masked ones only
    answers = task.questions["pixels"].decoder(task.encode(images(), given).tokens, given.visible, given.masked)
    asked = pixel_targets(images(), 4).gather(1, given.masked[..., None].expand(-1, -1, 48))
    close(task(images(), given=given).loss, (answers - asked).square().mean())


def test_simmim_blanks_units_after_the_patch_embedding():
    task = SimMIM(swin(**DEEP))
    assert task.unit == 1 and task.chosen["mask_unit"][0] == 8  # pixels, as 32 for Swin-T
    assert task.mask_token.shape == (8,) and task.questions["pixels"].decoder.out_features == 3 * 8 * 8
    given = task.given(images(), seeded())
    assert given.visible.shape == (8, 16) and given.blank.sum(1).tolist() == [10] * 8
    assert build("simmim", {"mask_unit": 8}).unit == 2


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
    net = swin()
    free = {id(one) for one in parameter_groups(net, 0.1)[1]["params"]}  # of weight decay
    tables = [one for key, one in net.named_parameters() if key.endswith("relative_position_bias_table")]
    assert len(tables) == 4 and all(id(one) in free for one in tables)
    task = build("droppos")
    assert (task.mask_ratio, task.placeholder, task.position_token) == (0.75, "zeros", None)
    few, odd = build("droppos", size=(16, 16)), build("droppos", size=(36, 32))
    assert few.mask_ratio == 0 and "only 4 patches" in few.chosen["mask_ratio"][1]
    assert odd.mask_ratio == 0 and "9x8" in odd.chosen["mask_ratio"][1]
    assert odd.questions["positions"].ratios["mask_ratio"] == (0.0,)
    assert build("droppos", {"placeholder": "learned"}).position_token.shape == (8,)


@pytest.mark.parametrize(
    ("name", "asked", "size", "words"),
    [
        ("mae", {"mask_ratio": 0.5}, (32, 32), "0.5 does not fit a Swin, .* --task.mask_ratio 0.75"),
        ("droppos", {"mask_ratio": 0.5}, (32, 32), "0.5 does not fit a Swin"),
        ("mae", {"mask_ratio": 0.75}, (36, 32), "9x8 units have an odd side: give --img_size 32x32"),
        ("droppos", {"mask_ratio": 0.75}, (32, 36), "8x9 units have an odd side: give --img_size 32x32"),
        ("mae", {"mask_unit": 8}, (32, 32), "units of 8 pixels do not fit a Swin"),
        ("simmim", {"mask_unit": 6}, (32, 32), "units of 6 pixels do not fit 8x8 patches of 4"),
    ],
)
def test_only_uniform_masks_are_accepted(name, asked, size, words):
    assert build("mae", {"mask_unit": 4}).unit == 1
    with pytest.raises(PatchloomError, match=words):
        build(name, asked, size=size)


def test_other_tasks_are_refused_before_anything_is_resolved():
    assert {name for name in TASKS if task_class(name).serves_swin} == {*SWEPT}
    for name in TASKS.keys() - SWEPT.keys():
        with pytest.raises(PatchloomError, match="needs a plain ViT: .* .mae, simmim or droppos"):
            task_class(name)(build_encoder(spec_of()))
    stats = Stats((0.5,) * 3, (0.2,) * 3, 480, 640, 100, [])
    with pytest.raises(PatchloomError, match="MP3 needs a plain ViT"):
        resolve(Settings("photos/", {"name": "mp3"}, {"name": "swin-nano"}), 900, 3, stats)


@pytest.mark.slow
def test_a_run_is_exported_evaluated_drawn_and_starts_another(tmp_path, quick_probe):
    model = {"name": "swin-nano", **SIZES, "drop_path_rate": 0.1}
    settings = {"model": model, "img_size": 32, "batch_size": 16, "precision": "float32", "compile": False}
    settings |= {"attention": "explicit", "threads": 1, "workers": 0, "device": "cpu", "epochs": 1}
    run = pretrain("shapes:60", "droppos", out=tmp_path / "run", **settings).folder
    done, pasted = export(run), {}
    exec(done.snippet, pasted)
    assert done.difference < 1e-4 and pasted["features"](torch.rand(2, 3, 32, 32)).shape == (2, 8, 8, 16)
    timm.create_model(**spec_of().timm_arguments()).load_state_dict(load_encoder(run)[0].state_dict(), strict=True)
    begun = pretrain("shapes:40", "mae", out=tmp_path / "mae", init=str(run), **settings).folder
    assert load_task(begun).settings.task["name"] == "mae"
    quick = {"device": "cpu", "cache": False}
    assert [row.encoder for row in evaluate("knn", run, "shapes:60", **quick).quoted][1] == "untrained"
    assert evaluate("positions", run, "shapes:40", images=10, **quick).n_test == 10
    trained = evaluate("finetune", run, "shapes:40", epochs=1, precision="float32", validation=0.0, **quick)
    assert [row.encoder for row in trained.quoted] == ["run", "from scratch"]
    assert {path.name for path in look(run)} >= {"positions.png", "rebuilt.png"}
    unsupported = [("layers", {}, "plain ViT"), ("order", {}, "plain ViT")]
    unsupported += [("finetune", {"positions": "fixed"}, "--positions"), ("finetune", {"recipe": "mp3"}, "class token")]
    for protocol, options, words in unsupported:
        with pytest.raises(PatchloomError, match=words):
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
    assert settings.blr == 1e-3 and "Swin" in reasons["positions"]
