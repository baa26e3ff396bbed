"""Tests of runs on a GPU: resumed, compiled, of every task, and later verbs."""

import csv
import os
import signal

import pytest
import torch
from killing import typed
from safetensors.torch import load_file
from sweep import asked_of

from patchloom import load_encoder
from patchloom.cli import main
from patchloom.tasks import TASKS
from patchloom.train.step import Stepper

pytestmark = pytest.mark.gpu
GPU = "cuda"
PLAIN = {"task": "droppos", "device": GPU, "threads": 1}


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert main(typed(images, out, PLAIN)) == 0
    return out


def losses(run):
    with open(run / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def test_stopped_and_resumed_is_never_stopped(images, tmp_path, monkeypatch, capsys, deterministic):
    assert main(typed(images, tmp_path / "plain", PLAIN)) == 0
    with monkeypatch.context() as patch:
        update = Stepper.update

        def stopped(self, done, *rest):
            if done == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(self, done, *rest)

        patch.setattr(Stepper, "update", stopped)
        assert main(typed(images, tmp_path / "stopped", PLAIN)) == 130
    capsys.readouterr()
    assert main(typed(images, tmp_path / "stopped", PLAIN)) == 0
    told = capsys.readouterr().out
    assert "Resuming after step " in told and "Resuming after step 0 " not in told
    plain, other = (load_file(tmp_path / name / "checkpoints" / "last.safetensors") for name in ("plain", "stopped"))
    assert plain.keys() == other.keys()
    assert [name for name, values in plain.items() if not torch.equal(values, other[name])] == []


@pytest.mark.parametrize("name", TASKS)
def test_every_task_in_bfloat16(images, tmp_path, name):
    own = {f"task.{option}": value for option, value in asked_of(name).items() if option != "name"}
    options = {"task": name, **own, "precision": "bfloat16", "attention": "fused", "epochs": 2}
    assert main(typed(images, tmp_path / "run", PLAIN | options)) == 0
    assert all(loss == loss and abs(loss) < 1e4 for loss in losses(tmp_path / "run"))


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 2, "cache": "whole", "accumulate": 2, "precision": "bfloat16"},
        {"task": "extrema", "checkpointing": True, "teacher_precision": "bfloat16", "workers": 2},
    ],
    ids=["workers, cache, accumulate", "checkpointing, teacher"],
)
def test_options(images, tmp_path, options):
    assert main(typed(images, tmp_path / "run", PLAIN | options)) == 0
    assert (tmp_path / "run" / "encoder.safetensors").exists()


def test_compiled_steps_train_as_they_do_without(images, tmp_path):
    found = []
    for on in (False, True, "graphs"):
        out = tmp_path / str(on)
        assert main(typed(images, out, PLAIN | {"compile": on, "epochs": 2})) == 0
        found.append(losses(out))
    torch._dynamo.reset()
    assert found[1] == pytest.approx(found[0], rel=0.01)
    assert found[2] == pytest.approx(found[1], rel=0.01)


def test_the_encoder_gives_on_the_cpu_what_it_gives_on_the_gpu(trained, exact):
    encoder, _ = load_encoder(trained)
    assert {weight.device.type for weight in encoder.parameters()} == {"cpu"}
    batch = torch.randn(4, 3, 32, 32)
    with torch.inference_mode():
        here = encoder.eval().forward_features(batch)
        there = encoder.to(GPU).forward_features(batch.to(GPU)).cpu()
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "protocol",
    [
        ["knn"],
        ["linear"],
        ["finetune", "--epochs", "1", "--batch_size", "16"],
        ["positions"],
        ["few-shot", "--labels", "0.5", "--epochs", "1"],
    ],
    ids=lambda words: words[0],
)
def test_evaluation(trained, images, tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    name, *options = protocol
    assert main(["evaluate", name, str(trained), str(images), "--device", GPU, *options]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["check", "shapes:64", "--device", GPU],
        ["bench", "shapes:64", "--device", GPU, "--tasks", "mae", "--rounds", "1", "--batch_size", "8"],
    ],
    ids=lambda words: words[0],
)
def test_verbs(words, capsys):
    assert main(words) == 0
    assert capsys.readouterr().out


def test_regression(trained, images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = sorted(images.rglob("*.png"))
    rows = [f"{path},{i % 7}" for i, path in enumerate(paths)]
    (tmp_path / "numbers.csv").write_text("\n".join(["path,number", *rows]))
    words = ["evaluate", "regress", str(trained), "numbers.csv", "--column", "number", "--k", "5", "--device", GPU]
    assert main(words) == 0


def test_look(trained):
    assert main(["look", str(trained)]) == 0


def test_what_compiling_brings_is_printed(capsys):
    words = ["bench", "shapes:64", "--device", GPU, "--tasks", "mae", "--rounds", "2", "--batch_size", "8"]
    assert main([*words, "--model", "nano", "--precision", "float32", "--threads", "1", "--compile", "true"]) == 0
    torch._dynamo.reset()
    assert "Compiled steps are" in capsys.readouterr().out


def test_too_little_memory_is_told_in_a_sentence(images, tmp_path, capsys):
    large = PLAIN | {"img_size": 256, "patch_size": 8, "batch_size": 48}  # 48 explicit softmaxes of 1024 tokens
    torch.cuda.empty_cache()
    there = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / there)
    try:
        assert main(typed(images, tmp_path / "run", large | {"task.mask_ratio": 0.0})) == 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    told = capsys.readouterr().err
    assert told.startswith("patchloom: ") and "out of memory" in told and "Traceback" not in told
