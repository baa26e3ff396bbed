"""Runs that adapt initial weights: rates, trained weights, the anchor, the weights' own normalisation."""

import csv
import os
import signal
from dataclasses import replace

import pytest
import torch
import yaml
from killing import SMALL, left_behind
from ranks import run_together
from safetensors.torch import load_file, save_file

from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError, Stopped
from patchloom.nets.encode import encode, patch_count
from patchloom.nets.lora import has_adapters, merged
from patchloom.questions.anchor import Anchor
from patchloom.runs.encoder import load_encoder
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import request, setting_differences
from patchloom.runs.task import load_task
from patchloom.train.loop import pretrain
from patchloom.train.resolve import resolve
from patchloom.train.step import Stepper, build_optimizer
from patchloom.withhold.encoder_input import all_patches

pytestmark = pytest.mark.usefixtures("quick_probe")

DEEP = SMALL | {"model": SMALL["model"] | {"depth": 3, "drop_path_rate": 0.0}, "epochs": 2}
STATS = Stats((0.5,) * 3, (0.2,) * 3, 32, 32, 10, [])
GIVEN = {"img_size": 32, "patch_size": 4, "model": {"name": "nano", "depth": 4}, "precision": "float32"}
GIVEN |= {"device": "cpu", "threads": 1, "kernels": "torch", "attention": "explicit", "compile": False}


def resolved(**given):
    return resolve(request("shapes", given.pop("task", "mae"), GIVEN | given), 1000, 3, STATS)


def stop_at(patch, step):
    """Send this process SIGTERM at an update."""
    update = Stepper.update

    def stopping(self, done, *rest):
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, done, *rest)

    patch.setattr(Stepper, "update", stopping)


@pytest.fixture(scope="module")
def earlier(images, tmp_path_factory):
    """Encoder file of a run, with statistics that are not those of the images."""
    out = tmp_path_factory.mktemp("earlier") / "run"
    run = pretrain(images, "mae", out=out, normalization="imagenet", **DEEP | {"epochs": 1})
    return str(run.folder / "encoder.safetensors")


# Defaults.


def test_from_scratch_nothing_is_gentle():
    settings, reasons = resolved()
    assert (settings.layer_decay, settings.heads_first, settings.anchor) == (1.0, 0.0, 0.0)
    assert (settings.adapt, settings.normalization, settings.blr) == ("all", "data", 4e-3)
    assert not {"layer_decay", "heads_first", "adapt", "normalization"} & reasons.keys()


@pytest.mark.parametrize("adapt", ["auto", "all", "blocks", "lora"])
def test_with_init_the_rates_are_gentle_and_say_why(adapt):
    settings, reasons = resolved(init="timm:any", adapt=adapt)
    assert (settings.blr, settings.layer_decay, settings.heads_first) == (4e-4, 0.9, 0.05)
    assert "a tenth" in reasons["blr"] and "0.004" in reasons["blr"]
    assert "lightly-train" in reasons["layer_decay"] and "alone first" in reasons["heads_first"]


def test_a_task_without_new_parts_does_not_wait_for_them():
    asked = {name: value for name, value in GIVEN.items()} | {"init": "timm:any"}
    settings, reasons = resolve(request("shapes", "nepa", asked), 1000, 3, STATS)
    assert settings.heads_first == 0 and "heads_first" not in reasons and settings.layer_decay == 0.9
    with pytest.raises(PatchloomError, match="nepa has no new parts to train first: leave out --heads_first"):
        resolve(request("shapes", "nepa", {**asked, "heads_first": 0.1}), 1000, 3, STATS)


def test_what_the_user_gives_wins():
    settings, reasons = resolved(init="timm:any", blr=1e-3, layer_decay=0.5, heads_first=0.2)
    assert (settings.blr, settings.layer_decay, settings.heads_first) == (1e-3, 0.5, 0.2)
    assert not {"blr", "layer_decay", "heads_first"} & reasons.keys()


def test_a_recipe_keeps_its_own_rates():
    asked = request("shapes", "mae", {**GIVEN, "init": "timm:any", "recipe": "mae-vit-b"})
    settings = resolve(replace(asked, model=asked.model | {"name": "nano"}), 1000, 3, STATS)[0]
    assert (settings.blr, settings.layer_decay, settings.heads_first) == (1.5e-4, 1.0, 0.0)


def test_blocks_and_their_number_are_one_option():
    two, one, both = (
        resolved(init="timm:any", **given)[0]
        for given in ({"adapt": "blocks"}, {"train_blocks": 1}, {"adapt": "blocks", "train_blocks": 3})
    )
    assert [(s.adapt, s.train_blocks) for s in (two, one, both)] == [("blocks", 2), ("blocks", 1), ("blocks", 3)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adapt": "lora"}, "--adapt lora freezes weights, which are random without --init"),
        ({"anchor": 1.0}, "--anchor keeps features near those of initial weights"),
        ({"heads_first": 0.1}, "--heads_first keeps the encoder's weights, which are random"),
        ({"init": "x", "adapt": "all", "train_blocks": 1}, "--adapt all trains every block: leave out --train_blocks"),
        ({"init": "x", "lora_rank": 4}, "add --adapt lora"),
        ({"init": "x", "adapt": "lora", "lora_rank": 0}, "--lora_rank must be 1 or more, not 0"),
        ({"init": "x", "adapt": "lora", "strategy": "fsdp"}, "use --strategy ddp"),
        ({"init": "x", "adapt": "some"}, "adapt cannot be"),
        ({"layer_decay": 0.0}, "--layer_decay must be above 0 and at most 1, not 0"),
        ({"init": "x", "heads_first": 1.0}, "--heads_first must be a fraction"),
        ({"init": "x", "anchor": -1.0}, "--anchor must be 0 or more"),
        ({"init": "x", "anchor": float("nan")}, "--anchor cannot be nan"),
    ],
)
def test_invalid_values_are_refused(given, said):
    with pytest.raises(PatchloomError, match=said):
        request("shapes", "mae", given)


def test_runs_of_before_go_on_as_they_were(tmp_path):
    """Neither the stored settings nor the comparison with the command may take today's defaults."""
    asked = request("shapes", "mae", {**GIVEN, "init": "timm:any"})
    before = asked.plain()
    for name in ("adapt", "layer_decay", "heads_first", "anchor", "lora_rank", "lora_on"):
        del before[name]
    before["normalization"] = "data"
    assert setting_differences(before, asked, {}, tmp_path) == []
    assert setting_differences(before, replace(asked, normalization="init"), {}, tmp_path) != []


def test_the_configuration_of_a_run_of_before_is_read_with_what_it_did(images, earlier, tmp_path):
    out = tmp_path / "run"
    pretrain(images, "mae", out=out, init=earlier, train_blocks=1, **DEEP | {"epochs": 0.3})
    config = RunFolder(out).config
    values = yaml.safe_load(config.read_text())
    for name in ("adapt", "layer_decay", "heads_first", "anchor", "lora_rank", "lora_on", "sha256"):
        values.pop(name, None)
    config.write_text(yaml.safe_dump(values))
    found = RunFolder(out).read_config()
    assert (found.adapt, found.layer_decay, found.heads_first, found.anchor) == ("blocks", 1.0, 0.0, 0.0)


# Normalisation.


def statistics(run):
    stats = RunFolder(run).read_stats()
    return stats.mean


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({}, True),
        ({"normalization": "init"}, True),
        ({"normalization": "data"}, False),
    ],
)
def test_images_are_normalised_as_those_of_the_weights(images, earlier, tmp_path, capsys, given, own):
    run = pretrain(images, "mae", out=tmp_path / "run", init=earlier, **DEEP | {"epochs": 0.3} | given).folder
    assert (statistics(run) == (0.485, 0.456, 0.406)) == own
    told = " ".join(capsys.readouterr().out.split())
    assert ("normalization init (as the weights were trained: mean 0.485, 0.456, 0.406" in told) == (not given)
    assert load_encoder(run)[1].mean == statistics(run)


def test_the_log_says_how_public_weights_normalise_where_the_run_does_otherwise(images, earlier, tmp_path, capsys):
    save_file(load_file(earlier), bare := tmp_path / "bare.safetensors")
    pretrain(images, "mae", out=tmp_path / "run", init=str(bare), normalization="data", **DEEP | {"epochs": 0.3})
    told = " ".join(capsys.readouterr().out.split())
    assert "normalises images by mean 0.485, 0.456, 0.406;" in told and "this run uses --normalization data" in told


def test_from_keeps_the_statistics_of_the_data_unless_asked(images, earlier, tmp_path):
    start = earlier.removesuffix("/encoder.safetensors")
    short = {name: value for name, value in DEEP.items() if name not in ("model", "img_size", "patch_size")}
    short["epochs"] = 0.3
    usual = pretrain(images, "mae", out=tmp_path / "usual", from_run=start, **short).folder
    asked = pretrain(images, "mae", out=tmp_path / "asked", from_run=start, normalization="init", **short).folder
    assert statistics(usual) != (0.485, 0.456, 0.406) == statistics(asked)


def test_weights_without_statistics_leave_those_of_the_data(images, earlier, tmp_path, capsys):
    state = load_file(earlier)
    state["pos_embed"] = torch.full_like(state["pos_embed"], 0.01)  # else they are recognised as MAE's
    save_file(state, bare := tmp_path / "bare.safetensors")
    run = pretrain(images, "mae", out=tmp_path / "run", init=str(bare), **DEEP | {"epochs": 0.3}).folder
    assert statistics(run) != (0.485, 0.456, 0.406)
    assert "does not name its mean and deviation" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(PatchloomError, match="does not name its mean and deviation: use --normalization data"):
        pretrain(images, "mae", out=tmp_path / "no", init=str(bare), normalization="init", **DEEP)
    with pytest.raises(PatchloomError, match="--normalization init needs initial weights"):
        pretrain(images, "mae", out=tmp_path / "no", normalization="init", **DEEP)
    with pytest.raises(PatchloomError, match="is for images of 3 channels, not 1"):
        pretrain(images, "mae", out=tmp_path / "no", init=earlier, normalization="init", channels=1, **DEEP)


# Layer decay, and heads first.


def test_each_layer_has_its_rate_and_heads_have_the_whole(images, earlier, tmp_path):
    run = pretrain(images, "simmim", out=tmp_path / "run", init=earlier, **DEEP | {"epochs": 0.3}).folder
    task = load_task(run).task
    names = {id(weight): name for name, weight in task.named_parameters()}
    optimizer = build_optimizer(task, 0.05, "cpu", layer_decay=0.5)
    found = {
        names[id(weight)]: (group["lr_scale"], group["new"], group["weight_decay"])
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    assert found.keys() == {name for name, weight in task.named_parameters() if weight.requires_grad}
    assert found["encoder.patch_embed.proj.weight"] == (0.5**4, False, 0.05)
    assert found["encoder.blocks.0.attn.qkv.weight"] == (0.5**3, False, 0.05)
    assert found["encoder.blocks.2.attn.qkv.bias"] == (0.5, False, 0.0)
    assert found["encoder.norm.weight"] == (1.0, False, 0.0) and found["mask_token"] == (1.0, True, 0.0)
    assert all(new == (not name.startswith("encoder.")) for name, (_, new, _) in found.items())


def test_the_encoder_keeps_its_weights_while_heads_train_first(images, earlier, tmp_path, monkeypatch):
    seen, update = [], Stepper.update

    def noting(self, *rest):
        made = update(self, *rest)
        seen.append({name: value.clone() for name, value in self.task.state_dict().items()})
        return made

    monkeypatch.setattr(Stepper, "update", noting)
    pretrain(images, "simmim", out=tmp_path / "run", init=earlier, heads_first=0.5, **DEEP)
    before, steps = load_file(earlier), len(seen)
    assert steps == 6
    for step, state in enumerate(seen, start=1):
        same = torch.equal(state["encoder.blocks.1.attn.qkv.weight"], before["blocks.1.attn.qkv.weight"])
        assert same == (step <= 3)
    assert not torch.equal(seen[0]["mask_token"], seen[1]["mask_token"])


@pytest.mark.parametrize("stop", [2, 5])  # while the heads train first, and later
def test_a_gentle_run_that_is_stopped_goes_on_to_the_very_end(images, earlier, tmp_path, monkeypatch, stop):
    options = DEEP | {"init": earlier, "heads_first": 0.5}
    whole = pretrain(images, "mae", out=tmp_path / "whole" / "run", **options).folder
    out = tmp_path / "parts" / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, stop)
        with pytest.raises(Stopped):
            pretrain(images, "mae", out=out, **options)
    pretrain(images, "mae", out=out, **options)
    assert left_behind(out) == left_behind(whole)


def test_heads_do_not_train_first_again_in_a_run_that_is_trained_longer(images, earlier, tmp_path, monkeypatch):
    options = DEEP | {"init": earlier, "heads_first": 0.9}
    out = pretrain(images, "mae", out=tmp_path / "run", **options | {"epochs": 1}).folder
    before, rates = load_file(out / "encoder.safetensors"), []
    update = Stepper.update

    def noting(self, *rest):
        made = update(self, *rest)
        rates.append(min(group["lr"] for group in self.optimizer.param_groups))
        return made

    monkeypatch.setattr(Stepper, "update", noting)
    pretrain(images, "mae", out=out, **options)
    assert len(rates) == 3 and min(rates) > 0
    after = load_file(out / "encoder.safetensors")
    assert not torch.equal(after["blocks.0.attn.qkv.weight"], before["blocks.0.attn.qkv.weight"])


# Low-rank updates and the anchor in runs.

TASKS = {"mae": {}, "simmim": {}, "extrema": {"anchor": 0.5}, "lut": {}}


@pytest.fixture(scope="module", params=TASKS)
def lora(request, images, earlier, tmp_path_factory):
    """Run with low-rank updates, and its task and options."""
    options = DEEP | {"adapt": "lora", "lora_rank": 4, "init": earlier} | TASKS[request.param]
    out = tmp_path_factory.mktemp("lora") / "run"
    return pretrain(images, request.param, out=out, **options).folder, request.param, options


def test_the_encoder_is_merged_and_the_checkpoint_has_the_updates(lora, earlier):
    run, _, _ = lora
    before, after = load_file(earlier), load_file(run / "encoder.safetensors")
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    linear = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    resized = {"pos_embed", "cls_token"} - before.keys() | ({"pos_embed"} & moved)
    assert moved - resized == {f"blocks.{i}.{name}" for i in range(3) for name in linear}
    checkpoint = load_file(run / "checkpoints" / "last.safetensors")
    trained = {name for name in checkpoint if name.startswith("optimizer.exp_avg.encoder.")}
    assert len(trained) == 24 and all(name.endswith((".up", ".down")) for name in trained)
    assert not any("parametrizations" in name for name in checkpoint if ".teacher." in name)


def test_the_file_and_the_checkpoint_compute_the_same(lora, images):
    run, _, _ = lora
    task = load_task(run).task
    plain, _ = load_encoder(run)
    assert has_adapters(task.encoder) and not has_adapters(plain)
    batch = torch.rand(2, 3, 32, 32)
    given = all_patches(batch, patch_count(plain))
    torch.testing.assert_close(encode(plain, given), encode(task.encoder, given), rtol=0, atol=1e-5)
    assert all(
        torch.equal(value, plain.state_dict()[name]) for name, value in merged(task.encoder.state_dict()).items()
    )


def test_the_log_says_what_is_trained(lora):
    run, _, options = lora
    log = (run / "log.txt").read_text()
    assert "trains updates of rank 4\n" in log
    plain, tensors = load_encoder(run)[0], load_task(run).task.encoder.state_dict()
    updates = sum(value.numel() for name, value in tensors.items() if name.endswith((".up", ".down")))
    whole = sum(weight.numel() for weight in plain.parameters())
    task = load_task(run).task
    frozen = [task.encoder, *(part for part in task.children() if isinstance(part, Anchor))]
    rest = sum(weight.numel() for weight in task.parameters())
    rest -= sum(weight.numel() for part in frozen for weight in part.parameters())
    counted = f"{whole / 1e3:.1f} k parameters of the encoder, which are frozen, {updates / 1e3:.1f} k of its low-rank "
    assert f"{counted}updates, {rest / 1e3:.1f} k task-only parameters" in log
    assert ("keeps features near the start" in log) == ("anchor" in options)


def test_a_stopped_run_goes_on_to_the_very_end(lora, images, tmp_path, monkeypatch):
    run, name, options = lora
    out = tmp_path / run.name
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Stopped):
            pretrain(images, name, out=out, **options)
    vit, card = load_encoder(out)  # of the checkpoint
    assert not has_adapters(vit) and "(step 4 of 6)" in card.name
    with pytest.raises(PatchloomError, match="lora_rank: was 4, now 8"):
        pretrain(images, name, out=out, **options | {"lora_rank": 8})
    pretrain(images, name, out=out, **options)
    assert left_behind(out) == left_behind(run)


def test_another_run_begins_from_the_merged_weights(lora, images, tmp_path):
    run, name, _ = lora
    short = {key: value for key, value in DEEP.items() if key not in ("model", "img_size", "patch_size")}
    (run / "encoder.safetensors").rename(tmp_path / "away")
    try:
        out = pretrain(
            images, name, out=tmp_path / "run", from_run=str(run), blr=1e-12, **short | {"epochs": 0.3}
        ).folder
    finally:
        (tmp_path / "away").rename(run / "encoder.safetensors")
    first, second = load_file(run / "encoder.safetensors"), load_file(out / "encoder.safetensors")
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def anchored(images, earlier, tmp_path_factory):
    """Two runs, without and with a strong anchor, at a rate that moves the encoder; and a resumed one."""
    options = DEEP | {"init": earlier, "blr": 3e-2, "heads_first": 0.0, "layer_decay": 1.0, "epochs": 4}
    folder = tmp_path_factory.mktemp("anchored")
    runs = [
        pretrain(images, "mae", out=folder / str(weight) / "run", anchor=weight, **options).folder
        for weight in (1e-6, 5.0)
    ]
    return runs, options


def column(run, name):
    with open(run / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_an_anchored_encoder_stays_nearer(anchored):
    (free, near), _ = anchored
    assert column(free, "anchor_cosine")[-1] < column(near, "anchor_cosine")[-1] <= 1
    assert column(near, "anchor_loss")[-1] == pytest.approx(1 - column(near, "anchor_cosine")[-1], abs=1e-5)
    log = (near / "log.txt").read_text()
    assert "loss + 5 · (1 - cosine)" in log and ", cosine to the start 0." in log


def test_the_start_is_in_the_checkpoint_and_stays(anchored, earlier):
    (_, near), _ = anchored
    checkpoint, before = load_file(near / "checkpoints" / "last.safetensors"), load_file(earlier)
    for name, value in before.items():
        assert torch.equal(checkpoint[f"anchor.start.encoder.{name}"], value)


def test_an_anchored_run_resumes_without_its_source(anchored, images, earlier, tmp_path, monkeypatch):
    (_, near), options = anchored
    source = tmp_path / "source.safetensors"
    source.write_bytes(open(earlier, "rb").read())
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(Stopped):
            pretrain(images, "mae", out=out, anchor=5.0, **options | {"init": str(source)})
    source.unlink()
    pretrain(images, "mae", out=out, anchor=5.0, **options | {"init": str(source)})
    one, other = (load_file(run / "encoder.safetensors") for run in (near, out))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ddp", {"adapt": "lora", "lora_rank": 4, "anchor": 0.5}),
        ("fsdp", {"anchor": 0.5, "layer_decay": 0.8, "heads_first": 0.3}),
    ],
)
def test_two_processes_train_what_one_trains(strategy, more, images, earlier, tmp_path):
    options = DEEP | {"task": "mae", "init": earlier, "blr": 1e-3, "epochs": 1} | more
    (ended,), (alone,) = run_together(images, tmp_path / "one" / "run", 1, options)
    assert ended.code == 0, ended.told
    ended, ranks = run_together(images, tmp_path / "two" / "run", 2, options | {"strategy": strategy})
    assert [one.code for one in ended] == [0, 0], [one.told for one in ended]
    for found in ranks:
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=2e-3, atol=1e-4)
