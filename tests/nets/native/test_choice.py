"""Native kernels are compiled, chosen and rejected as machine and model allow."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from patchloom import pretrain
from patchloom.errors import PatchloomError
from patchloom.nets import native, performance
from patchloom.nets.build import EncoderSpec, outline
from patchloom.nets.native import compiler as made
from patchloom.train import resolve as defaults

pytestmark = pytest.mark.usefixtures("quick_probe")

here = pytest.mark.skipif(native.lacking() is not None, reason=f"no native kernels: {native.lacking()}")


def lack(monkeypatch, reason):
    """Make the kernels missing for some reason, or available."""
    monkeypatch.setattr(performance, "NATIVE", native.KERNELS._replace(missing=lambda: reason))


def test_available_kernels_are_used():
    assert performance.NATIVE is native.KERNELS


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda patch: patch.setattr(sys, "platform", "darwin"), "they are for Linux"),
        (lambda patch: patch.setattr(made, "processor", lambda what: ""), "the processor has no AVX512-BF16"),
        (lambda patch: patch.setattr(made, "compiler", lambda: None), "g.. was not found"),
    ],
)
def test_the_reason_for_missing_kernels_is_reported(change, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a library compiled by another test would be available
    monkeypatch.setattr(made, "processor", lambda what: " ".join(made._EXTENSIONS))
    monkeypatch.setattr(made, "compiler", lambda: ["g++"])
    change(monkeypatch)
    with pytest.raises(PatchloomError, match=f"not available, because {reason}.*: use --kernels torch"):
        made.library.__wrapped__()


@here
def test_compiler_errors_are_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(made, "compiler", lambda: ["g++", "-include", "nowhere.h"])
    with pytest.raises(
        PatchloomError, match=r"cannot compile the native kernels \(.*nowhere.h.*\): use --kernels torch"
    ):
        made.library.__wrapped__()
    monkeypatch.setattr(made, "library", made.library.__wrapped__)
    assert "cannot compile the native kernels (" in made.missing() and made.missing().endswith(")")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not list(tmp_path.rglob("*.so*"))
    monkeypatch.setattr(made, "compiler", lambda: ["false"])
    with pytest.raises(PatchloomError, match=r"false cannot compile the native kernels \(exit status 1\)"):
        made.library.__wrapped__()


@here
def test_kernels_run_on_torchs_threads():
    # a second set of threads would compete with torch's for the cores
    code = (
        "import sklearn.utils._openmp_helpers, torch; from patchloom.nets import native; native.library()\n"
        "from patchloom.nets.native.compiler import _openmp\n"
        "lines = open('/proc/self/maps').read().split('\\n')\n"
        "print(*_openmp(), sum('libgomp' in line and 'scikit' not in line and 'r-xp' in line for line in lines))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, found = done.stdout.split()  # scikit-learn has its own
    assert path.startswith(str(Path(torch.__file__).parent)) and found == "1"


def test_kernels_are_chosen_if_faster_and_available(monkeypatch):
    spec = EncoderSpec("nano", (32, 32), 8)
    lack(monkeypatch, None)
    monkeypatch.setattr(performance, "fused_gain", lambda *shape: 2.0)
    for gain, form in ((2.05, "torch"), (3.0, "native")):
        monkeypatch.setattr(performance, "attention_gain", lambda *asked, gain=gain: gain)
        assert defaults.default_kernels("cpu", True, spec, 8) == (
            form,
            f"native attention is ×{gain / 2:.2f} as fast here",
        )
    assert (
        defaults.default_kernels("cpu", False, spec, 8)[0]
        == defaults.default_kernels("cuda", True, spec, 8)[0]
        == "torch"
    )
    for options in ({"num_heads": 16}, {"init_values": 0.1}):
        other = EncoderSpec("nano", (32, 32), 8, options=options)
        kernels, why = defaults.default_kernels("cpu", True, other, 8)
        assert kernels == "torch" and "plain blocks" in why
        with pytest.raises(PatchloomError, match="--kernels native does not fit this model"):
            performance.check_native(outline(other), "cpu", True)
    assert (
        "GiB of attention weights" in defaults.default_kernels("cpu", True, EncoderSpec("nano", (512, 512), 4), 4096)[1]
    )
    lack(monkeypatch, "g++ was not found")
    assert defaults.default_kernels("cpu", True, spec, 8) == ("torch", "g++ was not found")


def test_kernels_without_effect_are_rejected(tmp_path):
    with pytest.raises(PatchloomError, match="--kernels native needs bfloat16 on a CPU: add --precision bfloat16"):
        pretrain("shapes:40", "mae", out=tmp_path / "run", kernels="native", precision="float32", epochs=1)
    assert not (tmp_path / "run").exists()


@here
def test_a_run_resumes_without_the_kernels_and_reports_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "images").mkdir()
    for i in range(40):
        Image.effect_noise((16, 16), 50).save(tmp_path / "images" / f"{i}.png")
    asked = {"out": tmp_path / "run", "kernels": "native", "precision": "bfloat16", "epochs": 1, "device": "cpu"}
    pretrain(str(tmp_path / "images"), "mae", **asked)
    assert "torch's kernels" not in capsys.readouterr().out
    lack(monkeypatch, "native kernels are not available, because g++ was not found")
    (tmp_path / "run" / "summary.txt").unlink()  # as if it had been killed while pictures were drawn
    pretrain(str(tmp_path / "images"), "mae", **asked)
    assert "because g++ was not found: using torch's kernels" in capsys.readouterr().out
