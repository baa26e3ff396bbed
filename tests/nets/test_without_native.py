"""The package works without the folder of the native kernels, on torch's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import patchloom

SOURCE = Path(patchloom.__file__).parent
IMPORT = ("with suppress(ImportError)", "from patchloom.nets.native import")
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


def python(place, *arguments):
    """Run Python on the package in ``place``, and return its output."""
    environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", *map(str, arguments)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path):
    """Copy the package without the folder, compiled files included."""
    shutil.copytree(SOURCE, tmp_path / "patchloom", ignore=lambda folder, names: {"native"} & {*names})
    return tmp_path / "patchloom"


def test_all_works_without_the_folder(copy, tmp_path):
    run, refused = tmp_path / "run", tmp_path / "refused"
    said = python(
        tmp_path,
        START,
        tmp_path,
        f"{PRETRAIN} --kernels auto --epochs 0.5 --out {run}",
        f"evaluate knn {run} shapes:60 --device cpu",
        f"{PRETRAIN} --kernels native --out {refused}",
    )
    assert "codes 0 0 2" in said and "Traceback" not in said
    assert (run / "encoder.safetensors").exists() and not refused.exists()
    chosen, reason = [line for line in said.splitlines() if "has no patchloom/nets/native" in line]
    assert (
        "torch" in chosen and "native kernels are not available" in reason and reason.endswith(": use --kernels torch")
    )


@pytest.mark.parametrize("rest", ["what Python cached", "nothing, nor of its import"])
def test_nothing_else_depends_on_the_folder(rest, copy, tmp_path):
    if rest == "what Python cached":  # left by git when it removes the folder
        (copy / "nets" / "native" / "__pycache__").mkdir(parents=True)
    else:
        file = copy / "nets" / "performance.py"
        lines = file.read_text().splitlines()
        left = [line for line in lines if not line.strip().startswith(IMPORT)]
        assert len(left) == len(lines) - 2
        file.write_text("\n".join(left))
    code = "from patchloom.nets.performance import missing_kernels; print(missing_kernels('native'))"
    assert "has no patchloom/nets/native" in python(tmp_path, code)
