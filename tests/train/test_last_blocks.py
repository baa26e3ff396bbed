"""Runs that train only the last blocks of an encoder (``--train_blocks``)."""

import os
import signal
from pathlib import Path

import pytest
import torch
from killing import SMALL, left_behind, typed
from ranks import run_together
from safetensors.torch import load_file, save_file

from patchloom.bench import flops_per_image
from patchloom.cli import main
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError, Stopped
from patchloom.export.encoder import load_exportable
from patchloom.export.model_card import model_card
from patchloom.runs.settings import request
from patchloom.train.estimate import Step, sketch
from patchloom.train.loop import pretrain
from patchloom.train.metrics import estimate_flops as roughly
from patchloom.train.resolve import resolve
from patchloom.train.step import Stepper

pytestmark = pytest.mark.usefixtures("quick_probe")

DEEP = SMALL | {"model": SMALL["model"] | {"depth": 3, "drop_path_rate": 0.0}, "epochs": 2}


@pytest.fixture(scope="module")
def earlier(images, tmp_path_factory):
    """Encoder file of a run."""
    run = pretrain(images, "mae", out=tmp_path_factory.mktemp("earlier") / "run", **DEEP | {"epochs": 1})
    return str(run.folder / "encoder.safetensors")


@pytest.fixture(scope="module")
def adapted(images, earlier, tmp_path_factory):
    """Run that trained only its last block."""
    out = tmp_path_factory.mktemp("adapted") / "run"
    return pretrain(images, "extrema", out=out, init=earlier, train_blocks=1, **DEEP).folder


def test_the_first_blocks_are_those_that_were_read_and_the_last_is_not(earlier, adapted):
    before, after = load_file(earlier), load_file(adapted / "encoder.safetensors")
    moved = {name for name in after if not torch.equal(after[name], before[name]) and name != "pos_embed"}
    assert moved == {name for name in after if name.startswith(("blocks.2.", "norm."))}
    checkpoint = load_file(adapted / "checkpoints" / "last.safetensors")
    moments = {name.split(".encoder.")[1] for name in checkpoint if name.startswith("optimizer.exp_avg.encoder.")}
    assert moments == moved


def test_the_log_and_the_card_say_what_is_trained(adapted, earlier):
    log = (adapted / "log.txt").read_text()
    assert "  trains 1 of 3 blocks\n" in log and "parameters of the encoder, of which 12.8 k are trained," in log
    card = model_card(adapted, load_exportable(adapted, "mean"), None, None, 0.0, True)
    assert "**trained layers**: the last 1 block and the last norm; all other weights are those of encoder" in card
    assert str(Path(earlier).parent) not in card


def test_a_learned_token_before_the_first_block_is_reported_as_costly(images, earlier, tmp_path, capsys):
    for task, said in (("simmim", True), ("mae", False)):
        words = typed(images, tmp_path / task, {**DEEP, "task": task, "init": earlier, "train_blocks": 2})
        assert main([*words, "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert "trains 2 of 3 blocks" in out
        assert ("gradients pass through all blocks to mask_token, which costs time and memory" in out) == said


def test_a_run_that_is_stopped_goes_on_to_the_very_end(images, earlier, adapted, tmp_path, monkeypatch):
    update = Stepper.update

    def stopping(self, done, *rest):
        if done == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, done, *rest)

    out = tmp_path / adapted.name
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "update", stopping)
        with pytest.raises(Stopped):
            pretrain(images, "extrema", out=out, init=earlier, train_blocks=1, **DEEP)
    with pytest.raises(PatchloomError, match="train_blocks: was 1, now 2"):
        pretrain(images, "extrema", out=out, init=earlier, train_blocks=2, **DEEP)
    with pytest.raises(PatchloomError, match="train_blocks: was 1, now None"):
        pretrain(images, "extrema", out=out, init=earlier, **DEEP)
    pretrain(images, "extrema", out=out, init=earlier, train_blocks=1, **DEEP)
    assert left_behind(out) == left_behind(adapted)


@pytest.fixture(scope="module")
def single_process(images, earlier, tmp_path_factory):
    """Options of a run, and the result of one process."""
    options = DEEP | {"task": "mae", "init": earlier, "train_blocks": 1, "blr": 1e-3, "epochs": 1}
    (ended,), (found,) = run_together(images, tmp_path_factory.mktemp("single") / "run", 1, options)
    assert ended.code == 0, ended.told
    return options, found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_what_one_trains(strategy, images, earlier, single_process, tmp_path):
    options, alone = single_process
    ended, ranks = run_together(images, tmp_path / "run", 2, options | {"strategy": strategy})
    assert [one.code for one in ended] == [0, 0], [one.told for one in ended]
    before = load_file(earlier)
    for found in ranks:
        assert found.keys() == alone.keys()
        for name, value in before.items():
            if name.startswith(("blocks.0", "blocks.1", "patch_embed")):
                assert torch.equal(found[f"encoder.{name}"], value), name
        for name in ("encoder.blocks.2.mlp.fc1.weight", "encoder.norm.weight"):
            torch.testing.assert_close(found[name], alone[name], rtol=2e-3, atol=1e-4)
            assert not torch.equal(found[name], before[name.removeprefix("encoder.")])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_blocks": 1}, "random without --init: give --init timm:NAME"),
        ({"train_blocks": -1, "init": "x"}, "--train_blocks must be 0 or more, not -1"),
        ({"train_blocks": 1.5, "init": "x"}, "train_blocks cannot be 1.5"),
        ({"train_blocks": True, "init": "x"}, "train_blocks cannot be True"),
    ],
)
def test_invalid_values_are_refused_before_reading(given, said):
    with pytest.raises(PatchloomError, match=said):
        request("shapes", "mae", given)


def test_more_blocks_than_there_are_and_weights_that_nobody_trained_are_refused(images, earlier, tmp_path):
    with pytest.raises(PatchloomError, match="--train_blocks 4 is more than the 3 blocks of the encoder"):
        pretrain(images, "mae", out=tmp_path / "run", init=earlier, train_blocks=4, **DEEP)
    weights = load_file(earlier)
    del weights["patch_embed.proj.bias"], weights["blocks.2.norm1.bias"]
    save_file(weights, lacking := tmp_path / "lacking.safetensors")
    with pytest.raises(PatchloomError, match="has no patch_embed.proj.bias, and --train_blocks 1 would leave it"):
        pretrain(images, "mae", out=tmp_path / "run", init=str(lacking), train_blocks=1, **DEEP)
    assert not (tmp_path / "run").exists()


STATS = Stats((0.5,) * 3, (0.2,) * 3, 32, 32, 10, [])


def settings_for(task, train_blocks):
    sizes = {"img_size": 32, "patch_size": 4, "model": {"name": "nano", "depth": 4}, "init": "timm:any"}
    sizes |= {"precision": "float32", "device": "cpu", "threads": 1, "kernels": "torch", "attention": "explicit"}
    return resolve(request("shapes", task, {**sizes, "train_blocks": train_blocks}), 1000, 3, STATS)[0]


@pytest.mark.parametrize("task", ["mae", "simmim", "droppos", "extrema"])
def test_the_memory_of_a_step_is_estimated(task):
    whole, few = (sketch(settings_for(task, count), 8) for count in (None, 1))
    for counted, settings in ((whole, settings_for(task, None)), (few, settings_for(task, 1))):
        assert counted.flops / 8 == pytest.approx(flops_per_image(settings), rel=0.02)
    assert few.flops < whole.flops and few.activations < whole.activations
    assert few.sizes.weights == whole.sizes.weights and few.sizes.trained < 0.7 * whole.sizes.trained
    assert few.sizes.checkpoint == whole.sizes.checkpoint - 2 * (whole.sizes.trained - few.sizes.trained)
    assert roughly(Step(settings_for(task, 1)).task) < roughly(Step(settings_for(task, None)).task)
