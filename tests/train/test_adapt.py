"""Runs that adapt initial weights: rates, trained weights, the anchor, the weights' own normalisation."""

import shutil

import pytest
import torch
from killing import SMALL, left_behind
from ranks import run_together
from running import column, each_update, stop_at
from safetensors.torch import load_file, save_file
from small import small

from patchloom.bench import flops_per_image
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError, Stopped
from patchloom.export.encoder import load_exportable
from patchloom.export.model_card import model_card
from patchloom.nets.encode import encode, patch_count
from patchloom.nets.lora import has_adapters, merged
from patchloom.runs.encoder import load_encoder
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import request
from patchloom.runs.task import load_task
from patchloom.tasks.simmim import SimMIM
from patchloom.train.estimate import Step, sketch
from patchloom.train.loop import pretrain
from patchloom.train.metrics import estimate_flops as roughly
from patchloom.train.resolve import resolve
from patchloom.train.step import pretraining_optimizer
from patchloom.withhold.encoder_input import all_patches

pytestmark = pytest.mark.usefixtures("quick_probe")

DEEP = SMALL | {"model": SMALL["model"] | {"depth": 3, "drop_path_rate": 0.0}, "epochs": 2}  # 6 steps
SHORT = DEEP | {"epochs": 0.3}
# of settings of a run that begins from another one
OPEN = {name: value for name, value in SHORT.items() if name not in ("model", "img_size", "patch_size")}
STATS = Stats((0.5,) * 3, (0.2,) * 3, 32, 32, 10, [])
GIVEN = {"img_size": 32, "patch_size": 4, "model": {"name": "nano", "depth": 4}, "precision": "float32"}
GIVEN |= {"device": "cpu", "threads": 1, "kernels": "torch", "attention": "explicit", "compile": False}
IMAGENET = (0.485, 0.456, 0.406)


@pytest.fixture(scope="module")
def images(unlabelled_images):
    return unlabelled_images


def resolved(task="mae", **given):
    return resolve(request("shapes", task, GIVEN | given), 1000, 3, STATS)


@pytest.fixture(scope="module")
def earlier(images, tmp_path_factory):
    """Encoder file of a run, with statistics that are not those of the images."""
    out = tmp_path_factory.mktemp("earlier") / "run"
    run = pretrain(images, "mae", out=out, normalization="imagenet", **DEEP | {"epochs": 1})
    return str(run.folder / "encoder.safetensors")


@pytest.mark.parametrize(
    ("task", "given", "rates"),
    [
        ("mae", {"init": None}, (4e-3, 1.0, 0.0)),
        *(("mae", {"adapt": adapt}, (4e-4, 0.9, 0.05)) for adapt in ("auto", "all", "blocks", "lora")),
        ("mae", {"blr": 1e-3, "layer_decay": 0.5, "heads_first": 0.2}, (1e-3, 0.5, 0.2)),
        ("nepa", {}, (4e-4, 0.9, 0.0)),  # has no new parts
        ("mae", {"recipe": "mae-vit-b"}, (1.5e-4, 1.0, 0.0)),
    ],
)
def test_rates_with_initial_weights_are_gentle_unless_others_are_given(task, given, rates):
    settings, reasons = resolved(task, **{"init": "timm:any"} | given)
    assert (settings.blr, settings.layer_decay, settings.heads_first) == rates
    assert not given.keys() & reasons.keys()
    assert ("layer_decay" in reasons) == (settings.layer_decay == 0.9)
    assert ("heads_first" in reasons) == (settings.heads_first == 0.05)
    assert settings.anchor == 0.0


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ("all", None)),
        ({"adapt": "blocks"}, ("blocks", 2)),
        ({"train_blocks": 1}, ("blocks", 1)),
        ({"adapt": "blocks", "train_blocks": 3}, ("blocks", 3)),
        ({"adapt": "lora", "train_blocks": 1}, ("lora", 1)),
    ],
)
def test_blocks_and_their_number_are_one_option(given, found):
    settings, _ = resolved(init="timm:any", **given)
    assert (settings.adapt, settings.train_blocks) == found


def test_what_an_encoder_lacks_cannot_be_asked_for(images, earlier, tmp_path):
    with pytest.raises(PatchloomError, match="nepa has no new parts to train first: leave out --heads_first"):
        resolved("nepa", init="timm:any", heads_first=0.1)
    with pytest.raises(PatchloomError, match="--train_blocks 4 is more than the 3 blocks of the encoder"):
        pretrain(images, "mae", out=tmp_path / "run", init=earlier, train_blocks=4, **DEEP)
    weights = load_file(earlier)
    del weights["patch_embed.proj.bias"], weights["blocks.2.norm1.bias"]
    save_file(weights, lacking := tmp_path / "lacking.safetensors")
    with pytest.raises(PatchloomError, match="has no patch_embed.proj.bias, and --train_blocks 1 would leave it"):
        pretrain(images, "mae", out=tmp_path / "run", init=str(lacking), train_blocks=1, **DEEP)
    assert not (tmp_path / "run").exists()


def means(run):
    return RunFolder(run).read_stats().mean


@pytest.mark.parametrize("given", ["auto", "init", "data"])
def test_images_are_normalised_as_those_of_the_weights(images, earlier, tmp_path, capsys, given):
    run = pretrain(images, "mae", out=tmp_path / "run", init=earlier, normalization=given, **SHORT).folder
    assert (means(run) == IMAGENET) == (given != "data")
    told = " ".join(capsys.readouterr().out.split())
    assert ("normalization init (as the weights were trained: mean 0.485, 0.456, 0.406" in told) == (given == "auto")
    assert load_encoder(run)[1].mean == means(run)
    if given == "init":
        next_run = pretrain(images, "mae", out=tmp_path / "next", from_run=str(run), **OPEN).folder
        assert means(next_run) != IMAGENET, "--from keeps those of the data"
        next_run = pretrain(images, "mae", out=tmp_path / "asked", from_run=str(run), normalization="init", **OPEN)
        assert means(next_run.folder) == IMAGENET


def test_weights_without_statistics_leave_those_of_the_data(images, earlier, tmp_path):
    state = load_file(earlier)
    state["pos_embed"] = torch.full_like(state["pos_embed"], 0.01)  # else they are recognised as MAE's
    save_file(state, bare := tmp_path / "bare.safetensors")
    run = pretrain(images, "mae", out=tmp_path / "run", init=str(bare), **SHORT).folder
    assert means(run) != IMAGENET
    for given, said in (
        ({"init": str(bare)}, "does not name its mean and deviation: use --normalization data"),
        ({}, "--normalization init needs initial weights"),
        ({"init": earlier, "channels": 1}, "is for images of 3 channels, not 1"),
    ):
        with pytest.raises(PatchloomError, match=said):
            pretrain(images, "mae", out=tmp_path / "no", normalization="init", **DEEP | given)


def test_each_layer_has_its_rate_and_heads_have_the_whole():
    task = small(SimMIM)  # with 2 blocks
    names = {id(weight): name for name, weight in task.named_parameters()}
    optimizer = pretraining_optimizer(task, 0.05, "cpu", layer_decay=0.5)
    found = {
        names[id(weight)]: (group["lr_scale"], group["new"], group["weight_decay"])
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    assert found.keys() == {name for name, weight in task.named_parameters() if weight.requires_grad}
    assert found["encoder.patch_embed.proj.weight"] == (0.5**3, False, 0.05)
    assert found["encoder.blocks.0.attn.qkv.weight"] == (0.5**2, False, 0.05)
    assert found["encoder.blocks.1.attn.qkv.bias"] == (0.5, False, 0.0)
    assert found["encoder.norm.weight"] == (1.0, False, 0.0) and found["mask_token"] == (1.0, True, 0.0)
    assert all(new == (not name.startswith("encoder.")) for name, (_, new, _) in found.items())


def test_the_encoder_keeps_its_weights_while_heads_train_first(images, earlier, tmp_path, monkeypatch):
    """A run that is trained longer does not let its heads train first again."""
    seen = []
    each_update(
        monkeypatch, lambda stepper, _: seen.append({k: v.clone() for k, v in stepper.task.state_dict().items()})
    )
    options = DEEP | {"init": earlier, "heads_first": 0.5, "out": tmp_path / "run"}
    run = pretrain(images, "simmim", **options).folder
    states, before = [*seen[1:], load_task(run).task.state_dict()], load_file(earlier)
    for step, state in enumerate(states, start=1):
        same = torch.equal(state["encoder.blocks.1.attn.qkv.weight"], before["blocks.1.attn.qkv.weight"])
        assert same == (step <= 3)
    assert len(states) == 6 and not torch.equal(states[0]["mask_token"], states[1]["mask_token"])
    seen.clear()
    pretrain(images, "simmim", **options | {"epochs": 3})
    name = "encoder.blocks.1.attn.qkv.weight"
    assert len(seen) == 3 and not torch.equal(seen[0][name], seen[1][name])


HOW = {
    "gentle": ("mae", {"heads_first": 0.5}),
    "blocks": ("extrema", {"train_blocks": 1}),
    "lora": ("mae", {"adapt": "lora", "lora_rank": 4}),
    "lora of a teacher": ("extrema", {"adapt": "lora", "lora_rank": 4, "anchor": 0.5}),
}


@pytest.fixture(scope="module")
def adapted(images, earlier, tmp_path_factory):
    """Return a function that gives the task, the options and the finished run of each adaptation."""
    found = {}

    def run(how):
        if how not in found:
            task, options = HOW[how][0], DEEP | {"init": earlier} | HOW[how][1]
            out = tmp_path_factory.mktemp("adapted") / "run"
            found[how] = task, options, pretrain(images, task, out=out, **options).folder
        return found[how]

    return run


@pytest.mark.parametrize(("how", "step"), [("gentle", 2), *((how, 5) for how in HOW if how != "lora")])
def test_a_stopped_run_goes_on_to_the_very_end(how, step, adapted, images, tmp_path, monkeypatch):
    task, options, whole = adapted(how)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(patch, step)
        pretrain(images, task, out=tmp_path / "run", **options)
    vit, card = load_encoder(tmp_path / "run")  # of the checkpoint
    assert not has_adapters(vit) and f"(step {step} of 6)" in card.name
    pretrain(images, task, out=tmp_path / "run", **options)
    assert left_behind(tmp_path / "run") == left_behind(whole)


def test_only_the_last_blocks_are_trained(adapted, earlier):
    _, _, run = adapted("blocks")
    before, after = load_file(earlier), load_file(run / "encoder.safetensors")
    moved = {name for name in after if not torch.equal(after[name], before[name]) and name != "pos_embed"}
    assert moved == {name for name in after if name.startswith(("blocks.2.", "norm."))}
    checkpoint = load_file(run / "checkpoints" / "last.safetensors")
    moments = {name.split(".encoder.")[1] for name in checkpoint if name.startswith("optimizer.exp_avg.encoder.")}
    assert moments == moved
    assert "  trains 1 of 3 blocks\n" in (run / "log.txt").read_text()
    card = model_card(run, load_exportable(run, "mean"), None, None, 0.0, True)
    assert "the last 1 block and the last norm" in card and earlier not in card


@pytest.mark.parametrize("task", ["simmim", "extrema"])
def test_fewer_trained_blocks_cost_less(task):
    all_blocks, one_block = (resolved(task, init="timm:any", train_blocks=count)[0] for count in (None, 1))
    whole, few = (sketch(settings, 8) for settings in (all_blocks, one_block))
    for counted, settings in ((whole, all_blocks), (few, one_block)):
        assert counted.flops / 8 == pytest.approx(flops_per_image(settings), rel=0.02)
    assert few.flops < whole.flops and few.activations < whole.activations
    assert few.sizes.weights == whole.sizes.weights and few.sizes.trained < 0.7 * whole.sizes.trained
    assert few.sizes.checkpoint == whole.sizes.checkpoint - 2 * (whole.sizes.trained - few.sizes.trained)
    assert roughly(Step(one_block).task) < roughly(Step(all_blocks).task)


@pytest.mark.parametrize("how", ["lora", "lora of a teacher"])
def test_the_encoder_is_merged_and_the_checkpoint_has_the_updates(how, adapted, earlier):
    _, _, run = adapted(how)
    before, after = load_file(earlier), load_file(run / "encoder.safetensors")
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    linear = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    resized = {"pos_embed", "cls_token"} - before.keys() | ({"pos_embed"} & moved)
    assert moved - resized == {f"blocks.{i}.{name}" for i in range(3) for name in linear}
    checkpoint = load_file(run / "checkpoints" / "last.safetensors")
    trained = {name for name in checkpoint if name.startswith("optimizer.exp_avg.encoder.")}
    assert len(trained) == 24 and all(name.endswith((".up", ".down")) for name in trained)
    assert not any("parametrizations" in name for name in checkpoint if ".teacher." in name)
    task, (plain, _) = load_task(run).task, load_encoder(run)
    assert has_adapters(task.encoder) and not has_adapters(plain)
    batch = torch.rand(2, 3, 32, 32)
    given = all_patches(batch, patch_count(plain))
    torch.testing.assert_close(encode(plain, given), encode(task.encoder, given), rtol=0, atol=1e-5)
    one, other = plain.state_dict(), merged(task.encoder.state_dict())
    assert all(torch.equal(value, one[name]) for name, value in other.items())


@pytest.fixture(scope="module")
def anchored(images, earlier, tmp_path_factory):
    """Two runs, without and with a strong anchor, at a rate that moves the encoder, and their options."""
    options = DEEP | {"init": earlier, "blr": 3e-2, "heads_first": 0.0, "layer_decay": 1.0, "epochs": 4}
    folder = tmp_path_factory.mktemp("anchored")
    runs = [
        pretrain(images, "mae", out=folder / str(weight) / "run", anchor=weight, **options).folder
        for weight in (1e-6, 5.0)
    ]
    return runs, options


def test_an_anchored_encoder_stays_nearer(anchored, earlier):
    (free, near), _ = anchored
    assert column(free, "anchor_cosine")[-1] < column(near, "anchor_cosine")[-1] <= 1
    assert column(near, "anchor_loss")[-1] == pytest.approx(1 - column(near, "anchor_cosine")[-1], abs=1e-5)
    log = (near / "log.txt").read_text()
    assert "loss + 5 · (1 - cosine)" in log and ", cosine to the start 0." in log
    checkpoint = load_file(near / "checkpoints" / "last.safetensors")
    for name, value in load_file(earlier).items():
        assert torch.equal(checkpoint[f"anchor.start.encoder.{name}"], value)


def test_an_anchored_run_resumes_without_its_source(anchored, images, earlier, tmp_path, monkeypatch):
    (_, near), options = anchored
    given = options | {"anchor": 5.0, "init": shutil.copy(earlier, tmp_path / "source.safetensors")}
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(patch, 5)
        pretrain(images, "mae", out=tmp_path / "run", **given)
    (tmp_path / "source.safetensors").unlink()
    pretrain(images, "mae", out=tmp_path / "run", **given)
    one, other = (load_file(run / "encoder.safetensors") for run in (near, tmp_path / "run"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ddp", {"adapt": "lora", "lora_rank": 4, "anchor": 0.5}),
        ("fsdp", {"anchor": 0.5, "layer_decay": 0.8, "heads_first": 0.3}),
        ("fsdp", {"train_blocks": 1}),
    ],
)
def test_two_processes_train_what_one_trains(strategy, more, images, earlier, tmp_path):
    options = DEEP | {"task": "mae", "init": earlier, "blr": 1e-3, "epochs": 1} | more
    (ended,), (alone,) = run_together(images, tmp_path / "one" / "run", 1, options)
    assert ended.code == 0, ended.told
    ended, ranks = run_together(images, tmp_path / "two" / "run", 2, options | {"strategy": strategy})
    assert [one.code for one in ended] == [0, 0], [one.told for one in ended]
    frozen = ("blocks.0", "blocks.1", "patch_embed") if "train_blocks" in more else ()
    for found in ranks:
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=2e-3, atol=1e-4)
        for name, value in load_file(earlier).items():
            assert not name.startswith(frozen) or torch.equal(found[f"encoder.{name}"], value), name
