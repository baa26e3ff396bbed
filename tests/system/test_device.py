"""Rules by capability are fixed; memory is measured."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from patchloom.errors import PatchloomError
from patchloom.system import device as hardware
from patchloom.system import distributed


@pytest.mark.parametrize(
    ("fields", "mkldnn", "precision", "why"),
    [
        ({"flags": "avx512f avx512_bf16"}, True, "bfloat16", "AVX512-BF16"),
        ({"flags": "avx512f avx512_bf16 amx_bf16"}, True, "bfloat16", "AMX-BF16"),
        ({"flags": "avx2 avx512f avx512bw amx_int8"}, True, "float32", "no instructions for bfloat16"),
        ({"Features": "asimd bf16"}, True, "bfloat16", "ARM's BF16"),
        ({"Features": "asimd bf16"}, False, "float32", "no instructions"),  # torch without oneDNN
        ({"Features": "asimd svebf16"}, True, "float32", "no instructions"),
        ({}, True, "float32", "no instructions"),
    ],
)
def test_the_processors_instructions_choose_the_precision(monkeypatch, fields, mkldnn, precision, why):
    monkeypatch.setattr(hardware, "processor", lambda what: fields.get(what, ""))
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: mkldnn)
    chosen, reason = hardware.choose_precision("cpu")
    assert chosen == precision and why in reason


def test_gpus_choose_the_precision(monkeypatch):
    for native, chosen in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation, native=native: native)
        assert hardware.choose_precision("cuda")[0] == chosen
    assert hardware.choose_precision("mps")[0] == "float32"


@pytest.mark.parametrize(
    ("precision", "capability", "fits"), [("tf32", (8, 0), 1), ("tf32", (7, 5), 0), ("bfloat16", (7, 5), 1)]
)
def test_tf32_is_of_gpus_since_ampere(precision, capability, fits, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    hardware.check_precision("float32", "cpu")
    for device in ("cuda", *(("cpu", "mps") if not fits else ())):
        with nullcontext() if fits else pytest.raises(PatchloomError, match="8.0 or later: use --precision float32"):
            hardware.check_precision(precision, device)


def test_threads_are_torchs_or_fewer_in_a_container(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for there, threads, why in ((64, 8, "torch's default"), (8, 8, "torch's"), (3, 3, "3 cores"), (1, 1, "one core")):
        monkeypatch.setattr(hardware, "cores", lambda there=there: there)
        chosen, reason = hardware.choose_threads("cpu")
        assert chosen == threads and why in reason
    assert hardware.choose_threads("cuda")[0] == 8


GPU = {
    "torch.cuda.get_device_capability": (8, 0),
    "patchloom.system.device.find_spec": True,
    "shutil.which": "/usr/bin/gcc",
    "pathlib.Path.exists": True,
    "patchloom.system.device.compiling_fault": None,
}
LACKS = {
    "compute capability 7.0": ("torch.cuda.get_device_capability", (6, 1)),
    "Triton is not installed": ("patchloom.system.device.find_spec", None),
    "no C compiler": ("shutil.which", None),
    "Python.h": ("pathlib.Path.exists", False),
    "a first kernel": ("patchloom.system.device.compiling_fault", "a first kernel does not compile"),
}


@pytest.mark.parametrize("why", [None, *LACKS])
def test_long_runs_are_compiled_on_gpus_that_triton_serves(monkeypatch, why):
    asked = []
    for place, value in (GPU | dict([LACKS[why]] if why else [])).items():
        monkeypatch.setattr(place, lambda *_, place=place, value=value: asked.append(place) or value)
    for steps, device in ((4_999, "cuda"), (5_000, "cpu"), (5_000, "mps")):
        assert hardware.choose_compile(device, steps)[0] is False
    assert not asked  # no kernel is tried for a run that is not compiled
    compiles, reason = hardware.choose_compile("cuda", 5_000)
    assert compiles is (why is None) and (why or "") in reason


def test_a_kernel_that_does_not_compile_is_explained_in_one_line(monkeypatch):
    def compile_broken(function, **_):
        raise RuntimeError("In file included from x.cpp\nbroken.h: no such file\n\n")

    monkeypatch.setattr(torch, "compile", compile_broken)
    said = hardware.compiling_fault.__wrapped__("cpu")
    assert said == "a first kernel does not compile (RuntimeError: broken.h: no such file)"


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_a_first_kernel_shows_whether_the_compiler_works(broken, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'broken.h: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    code = "from patchloom.system.device import compiling_fault\nprint(compiling_fault('cpu'))"
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"CXX": str(compiler)} if broken else {}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    said = ended.stdout.strip()
    assert said.startswith("a first kernel does not compile (") and said.count("\n") == 0 if broken else said == "None"


def test_a_quota_of_a_control_group_counts(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 4)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert hardware.cores() == 4 and len(hardware.own_cores()) == 64
    assert distributed.cores_here() == hardware.Cores(4, 1)


@pytest.mark.parametrize(
    ("folder", "limit", "now", "total"),
    [("", "memory.max", "memory.current", ""), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")],
)
def test_cached_files_leave_the_memory_of_a_control_group_free(monkeypatch, tmp_path, folder, limit, now, total):
    """Files that are read again and again, such as those of --cache, are active; the kernel drops them if need be."""
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    monkeypatch.setattr(hardware, "control_groups", lambda controller: [place])
    monkeypatch.setattr(hardware, "memory", lambda device: (0.0, 2.0**20))
    (place / limit).write_text("1000000\n")
    (place / now).write_text("900000\n")
    own = "inactive_file 1\nactive_file 1\n" if total else ""  # without those of the groups inside
    (place / "memory.stat").write_text(f"anon 5\n{own}{total}inactive_file 200000\n{total}active_file 600000\n")
    assert hardware.free_memory("cpu") * 2**30 == pytest.approx(900_000)


def test_memory_is_in_gib(monkeypatch):
    monkeypatch.setattr(hardware, "_groups", lambda: [(2**20, 5)])
    monkeypatch.setattr(hardware, "resident", lambda peak: 3.0 * 2**30)
    assert hardware.memory("cpu") == (3, 2**-10)


def test_errors_other_than_of_memory_pass_its_guard():
    with pytest.raises(RuntimeError, match="negative dimension"), hardware.MemoryGuard(1):
        torch.empty(-1)
