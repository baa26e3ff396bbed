"""The package works without the folder of the native kernels, on torch's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refusing import refusal

import patchloom
from patchloom.nets import performance
from patchloom.nets.build import EncoderSpec, outline

SOURCE = Path(patchloom.__file__).parent
PRETRAIN = "pretrain shapes:60 --task mae --model nano --model.depth 1 --img_size 32 --patch_size 8 --batch_size 16"
PRETRAIN += " --precision bfloat16 --threads 1 --workers 0 --device cpu"
START = """
import sys
import patchloom
from patchloom.cli import main
place, *asked = sys.argv[1:]
assert patchloom.__file__.startswith(place)
codes = [main(words.split()) for words in asked]
print("codes", *codes)
"""


def test_without_the_folder_torchs_kernels_are_chosen(monkeypatch):
    monkeypatch.setattr(performance, "NATIVE", None)
    vit = outline(EncoderSpec("nano", (32, 32), 8))
    kernels, why = performance.choose_kernels(vit, "cpu", True, 8)
    assert kernels == "torch" and "has no patchloom/nets/native" in why
    assert performance.missing_kernels("torch") is None and performance.missing_kernels("native") == why
    assert "has no patchloom/nets/native: use --kernels torch" in refusal(performance.check_native, vit, "cpu", True)


@pytest.mark.slow
def test_all_works_without_the_folder(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "patchloom", ignore=lambda folder, names: {"native"} & {*names})
    (tmp_path / "patchloom" / "nets" / "native" / "__pycache__").mkdir(parents=True)  # left by git when it removes it
    run, refused = tmp_path / "run", tmp_path / "refused"
    words = [f"{PRETRAIN} --kernels auto --epochs 0.5 --out {run}", f"{PRETRAIN} --kernels native --out {refused}"]
    words.append(f"evaluate knn {run} shapes:60 --device cpu")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", START, str(tmp_path), *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "codes 0 2 0" in done.stdout and "Traceback" not in done.stdout + done.stderr
    assert (run / "encoder.safetensors").exists() and not refused.exists()
