"""Measurements of the machine: cached, interleaved, and repeated if they are doubtful."""

import json
import os
import platform
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from patchloom.errors import PatchloomError
from patchloom.system import distributed, hardware


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "patchloom" / "machine.json"


def test_figures_are_cached_by_processor_torch_and_threads(own_cache, monkeypatch):
    figures = iter([2.0, 3.0, 4.0])
    assert hardware.cached_figure("a", lambda: next(figures)) == 2.0
    assert hardware.cached_figure("a", lambda: next(figures)) == 2.0
    assert hardware.cached_figure("b", lambda: next(figures)) == 3.0
    assert hardware.cached_figure("a", lambda: next(figures), again=True) == 4.0
    assert torch.__version__ in own_cache.read_text("utf-8")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert hardware.cached_figure("a", lambda: 5.0) == 5.0


def test_figures_of_a_busy_machine_are_measured_again(own_cache, monkeypatch):
    now, load = [1e9], [0.9]
    monkeypatch.setattr(hardware.time, "time", lambda: now[0])
    monkeypatch.setattr(hardware.BackgroundLoad, "share", lambda self: load[0])
    busy = hardware.cached_figure("a", lambda: 1.0)
    assert hardware.when(busy) == ", measured on 2001-09-09 while the machine was busy"
    assert hardware.cached_figure("a", lambda: 2.0) == 1.0
    now[0] += 3600
    assert hardware.cached_figure("a", lambda: 3.0) == 1.0  # it is still busy
    now[0], load[0] = now[0] + 3600, 0.0
    idle = hardware.cached_figure("a", lambda: 4.0)
    assert idle == 4.0 and "busy" not in hardware.when(idle)
    now[0] += 13 * 86400
    assert hardware.cached_figure("a", lambda: 5.0) == 4.0
    now[0], load[0] = now[0] + 2 * 86400, 0.9
    assert hardware.cached_figure("a", lambda: 6.0) == 4.0  # old, but not of a busy machine
    now[0], load[0] = now[0] + 3600, 0.0
    assert hardware.cached_figure("a", lambda: 7.0) == 7.0


def test_a_figure_of_an_older_version_is_measured_again(own_cache):
    hardware.cached_figure("a", lambda: 1.0)
    own_cache.write_text(json.dumps({name: 9.0 for name in json.loads(own_cache.read_text())}))
    assert hardware.cached_figure("a", lambda: 2.0) == 2.0


@pytest.mark.skipif(hardware._worked() is None, reason="the system does not tell what its cores did")
def test_background_load_excludes_this_process():
    work = "import time; end = time.time() + 60\nwhile time.time() < end: pass"
    others = [subprocess.Popen([sys.executable, "-c", work]) for _ in hardware.own_cores()]
    try:
        time.sleep(0.3)
        seen = hardware.BackgroundLoad()
        time.sleep(0.5)
        assert seen.share() > hardware._BUSY
    finally:
        for one in others:
            one.kill()
            one.wait()
    times = iter([0.0, 3.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "_worked", lambda: next(times))
        patch.setattr(hardware.time, "process_time", iter([0.0, 3.0]).__next__)
        assert hardware.BackgroundLoad().share() == 0.0


def test_a_quota_of_a_control_group_counts(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 4)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert hardware.cores() == 4 and len(hardware.own_cores()) == 64
    assert distributed.cores_here() == hardware.Cores(4, 1)


@pytest.mark.parametrize("damage", ["", "[1]", "{", '{"x": "y"}'])
def test_a_damaged_cache_is_replaced(own_cache, damage):
    hardware.cached_figure("a", lambda: 1.0)
    own_cache.write_text(damage or json.dumps(dict.fromkeys(json.loads(own_cache.read_text()), "many")))
    assert hardware.cached_figure("a", lambda: 2.0) == 2.0
    assert hardware.cached_figure("a", lambda: 3.0) == 2.0


def test_an_unwritable_cache_only_costs_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert hardware.cached_figure("a", lambda: 1.5) == 1.5


def test_timing_is_interleaved_after_a_warm_up_round():
    order = []
    ways = {"one": lambda: order.append("one"), "two": lambda: (order.append("two"), time.sleep(0.01))}
    seconds = hardware.seconds_of(ways, rounds=3)
    assert order == ["one", "two"] * 4
    assert [len(values) for values in seconds.values()] == [3, 3]
    assert hardware.median_seconds(ways, rounds=3)["two"] >= 0.01


def test_threads_are_fewer_only_if_that_is_clearly_faster(own_cache, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    for seconds, best in (
        ({"8": 1.0, "4": 0.95, "2": 2.0, "1": 4.0}, 8),
        ({"8": 5.0, "4": 0.95, "2": 0.9, "1": 4.0}, 4),
        ({"8": 5.0, "4": 3.0, "2": 2.0, "1": 1.0}, 1),
    ):
        monkeypatch.setattr(
            hardware, "median_seconds", lambda ways, seconds=seconds: {name: seconds[name] for name in ways}
        )
        own_cache.unlink(missing_ok=True)
        assert hardware.best_threads() == best
        assert told[-1] == 8  # measuring changes no setting
    monkeypatch.setattr(hardware, "cores", lambda: 2)  # in a container
    monkeypatch.setattr(hardware, "median_seconds", lambda ways: {name: 1.0 for name in ways})
    own_cache.unlink()
    assert hardware.best_threads() == 2


def test_the_figures_are_those_of_real_work():
    rates = hardware.product_rates(size=256, rounds=2)
    assert set(rates) == {"float32", "bfloat16"} and min(rates.values()) > 1e8
    assert hardware.bfloat16_gain() > 0 and hardware.fused_gain("cpu", "float32", 2, 9, 8) > 0


def test_a_dtype_without_instructions_multiplies_smaller_matrices(monkeypatch):
    """A product of 2048 rows took 20 s in bfloat16 on a CPU with AVX2 alone, and in float32 a tenth of one."""
    pace, asked = {"float32": 1e11, "bfloat16": 1e9}, []

    def timed(ways, device="cpu", rounds=5):
        return {name: 2 * rows**3 / pace[dtype] for (name, (dtype, rows)) in ways.items()}

    def product(device, dtype, size):
        asked.append((dtype, size))
        return dtype, size

    monkeypatch.setattr(hardware, "median_seconds", timed)
    monkeypatch.setattr(hardware, "product", product)
    assert hardware.product_rates() == pytest.approx(pace)
    assert max(size for dtype, size in asked if dtype == "float32") == 2048
    assert max(size for dtype, size in asked if dtype == "bfloat16") == 512


def test_a_compiled_steps_gain_is_known_only_after_it_was_measured():
    assert hardware.compile_gain("cpu", "float32", "nano", "torch", 2) is None
    assert hardware.compile_gain("cpu", "float32", "nano", "torch", 2, lambda: 1.25) == 1.25
    assert hardware.compile_gain("cpu", "float32", "nano", "torch", 2) == 1.25
    assert hardware.compile_gain("cpu", "float32", "nano", "torch", 1) is None
    assert hardware.compile_gain("cpu", "bfloat16", "nano", "torch", 2) is None
    assert hardware.compile_gain("cpu", "float32", "nano", "native", 2) is None


def test_memory_is_measured_in_a_process_whose_errors_are_raised():
    with pytest.raises(PatchloomError, match=r"has died \(-6\), perhaps because there is too little"):
        hardware.peak_in_subprocess(os.abort, "cpu")
    with pytest.raises(ValueError, match="invalid literal"):
        hardware.peak_in_subprocess(int, "cpu", "no number")


def test_peak_memory_is_that_of_the_work_alone():
    small, large = (hardware.peak_in_subprocess(np.ones, "cpu", (mib, 2**20), np.uint8) for mib in (50, 400))
    if small is None:
        pytest.skip("this system does not tell")
    assert 0.25 < large - small < 0.45  # 350 MiB


def test_freed_memory_is_kept_where_the_system_can():
    assert hardware.keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
