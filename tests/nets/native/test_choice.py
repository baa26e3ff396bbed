"""Native kernels are compiled, chosen and rejected as machine and model allow."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from refusing import refusal

from patchloom import pretrain
from patchloom.errors import PatchloomError
from patchloom.nets import native, performance
from patchloom.nets.build import EncoderSpec, outline
from patchloom.nets.native import compiler as made

pytestmark = pytest.mark.usefixtures("quick_probe")
SWIN_TINY = (2, 3), (2, 6), (6, 12), (2, 24)  # blocks and heads of its stages

here = pytest.mark.skipif(native.lacking() is not None, reason=f"no native kernels: {native.lacking()}")


def lack(monkeypatch, reason):
    """Make the kernels missing for some reason, or available."""
    monkeypatch.setattr(performance, "NATIVE", native.KERNELS._replace(missing=lambda: reason))


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
@pytest.mark.parametrize(
    ("command", "said"), [(["g++", "-include", "nowhere.h"], "nowhere.h"), (["false"], "exit status 1")]
)
def test_compiler_errors_are_reported(command, said, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(made, "compiler", lambda: command)
    monkeypatch.setattr(made, "library", made.library.__wrapped__)
    with pytest.raises(PatchloomError, match=rf"cannot compile .*\(.*{said}.*\): use --kernels torch"):
        made.library()
    assert "cannot compile the native kernels (" in made.missing() and made.missing().endswith(")")
    assert not list(tmp_path.rglob("*.so*"))


@here
@pytest.mark.slow
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


def test_kernels_are_chosen_where_they_are_available(monkeypatch):
    vit = outline(EncoderSpec("nano", (32, 32), 8))
    assert performance.NATIVE is native.KERNELS
    lack(monkeypatch, None)
    for device, half, kernels in (("cpu", True, "native"), ("cpu", False, "torch"), ("cuda", True, "torch")):
        assert performance.choose_kernels(vit, device, half, 8)[0] == kernels
        if kernels == "torch":
            with pytest.raises(PatchloomError, match="needs bfloat16 on a CPU: add --precision bfloat16"):
                performance.check_native(vit, device, half)
    performance.check_native(vit, "cpu", True)
    for options in ({"num_heads": 16}, {"init_values": 0.1}):
        other = outline(EncoderSpec("nano", (32, 32), 8, options=options))
        kernels, why = performance.choose_kernels(other, "cpu", True, 8)
        assert kernels == "torch" and "plain blocks" in why
        assert "--kernels native does not fit this model" in refusal(performance.check_native, other, "cpu", True)
    lack(monkeypatch, "g++ was not found")
    assert performance.choose_kernels(vit, "cpu", True, 8) == ("torch", "g++ was not found")
    assert "g++ was not found: use --kernels torch" in refusal(performance.check_native, vit, "cpu", True)


@pytest.mark.parametrize("name", ["nano", "swin_tiny_patch4_window7_224"])
def test_attention_follows_the_precision_and_the_memory(name, monkeypatch):
    vit = outline(EncoderSpec(name, (224, 224), 4))
    if name == "nano":
        tokens = 56 * 56 + vit.num_prefix_tokens
        weights = len(vit.blocks) * tokens**2 * vit.blocks[0].attn.num_heads
        numbers = len(vit.blocks) * tokens * 128
    else:  # windows of 7 x 7
        weights = 49 * sum(depth * heads * 3136 // 4**i for i, (depth, heads) in enumerate(SWIN_TINY))
        numbers = sum(depth * 3136 // 4**i * 96 * 2**i for i, (depth, _) in enumerate(SWIN_TINY))
    stored = 2 * weights / 2**30  # for an image
    assert performance.kept_bytes(vit, 5, fused=True) == 4 * 5 * 40 * numbers
    assert performance.kept_bytes(vit, 5, fused=False) == 4 * 5 * (40 * numbers + 3 * weights)
    assert performance.choose_attention(vit, "cuda", True, 1)[0] == "fused"
    assert performance.choose_attention(vit, "cpu", False, 1)[0] == "fused"
    lack(monkeypatch, None)
    for memory, form in ((4.01, "explicit"), (3.99, "fused")):  # a quarter of it may be used
        monkeypatch.setattr(performance, "memory", lambda device, memory=memory: (0.0, memory * 3 * stored))
        assert performance.choose_attention(vit, "cpu", True, 3)[0] == form
        kernels, why = performance.choose_kernels(vit, "cpu", True, 3)
        if name == "nano":
            assert kernels == ("native" if form == "explicit" else "torch")
            assert ("GiB of attention weights" in why) == (form == "fused")


@here
def test_a_run_resumes_without_the_kernels_and_reports_it(images, tmp_path, monkeypatch, capsys):
    asked = {"out": tmp_path / "run", "kernels": "native", "precision": "bfloat16", "epochs": 1, "device": "cpu"}
    asked |= {"model": {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2}, "img_size": 16, "threads": 1}
    pretrain(images / "a", "mae", **asked)
    assert "torch's kernels" not in capsys.readouterr().out
    lack(monkeypatch, "native kernels are not available, because g++ was not found")
    (tmp_path / "run" / "summary.txt").unlink()  # as if it had been killed while pictures were drawn
    pretrain(images / "a", "mae", **asked)
    assert "because g++ was not found: using torch's kernels" in capsys.readouterr().out
