"""``bench``: real steps, counted operations, and the bottleneck."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from refusing import refusal

from patchloom.bench import Bench, StepSpeed, bench, flops_per_image, product, product_rate
from patchloom.cli import main
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.runs.settings import request
from patchloom.system.load import Load
from patchloom.tasks import ready_tasks
from patchloom.train.resolve import resolve

STATS = Stats((0.5,) * 3, (0.2,) * 3, 32, 32, 10, [])


def settings_for(task="mae", **given):
    asked = request("shapes", task, {"precision": "float32", "device": "cpu", **given})
    return resolve(asked, 1000, 3, STATS)[0]


def test_operations_count_matrix_products_forward_and_backward():
    # one block of width 64 over 8 + 1 tokens, and one of the decoder: all products can be written down
    model = {"name": "nano", "embed_dim": 64, "depth": 1, "num_heads": 4}
    task = {"name": "mae", "mask_ratio": 0.5, "decoder_depth": 1, "decoder_width": 32}
    settings = settings_for(task, model=model, img_size=32, patch_size=8)
    t, d, w, patch = 8 + 1, 64, 32, 3 * 8 * 8
    block = t * (12 * d * d) + 2 * t * t * d
    # keys and values of all tokens; queries, projection and MLP of the 8 masked ones alone
    decoder = (t + 8) * (2 * w * w) + 8 * (10 * w * w) + 2 * 8 * (t + 8) * w
    linears = t * d * w + 8 * w * patch
    products = 2 * (3 * (block + decoder + linears) + 2 * 8 * patch * d)  # the images need no gradient
    assert flops_per_image(settings) == pytest.approx(products, rel=1e-6)


def pace(images=100, seconds=1.0, data=1000.0):
    return StepSpeed("mae", False, (seconds,), images, 2e9, None, data)


def test_the_slower_part_is_the_limit():
    apart = Bench(replace(settings_for(), workers=2), {"float32": 1e12}, ())
    assert apart.limit(pace(data=400.0)).startswith("model (reading is ×4")
    assert apart.limit(pace(data=50.0)) == "data, by ×2.0: raise --workers, or use --cache"
    together = Bench(replace(settings_for(), workers=0), {"float32": 1e12}, ())
    assert together.limit(pace(data=300.0)) == "model (reading takes 25% of the time)"
    assert together.limit(pace(data=50.0)).startswith("data")
    assert apart.share(pace()) == pytest.approx(100 * 2e9 / 1e12)
    assert len(apart.sentences()) == 2
    busy = replace(apart, load=Load(cores=2, wanted=2, own=0.4, others=1.6))
    assert busy.sentences()[2] == "Other programs use 1.6 of 2 cores: times are those of a busy machine."


def test_a_task_whose_operations_are_unknown_has_no_share_of_the_peak():
    done = Bench(settings_for(), {"float32": 1e12}, (replace(pace(), flops=None),))
    assert done.table()[1][4:7] == ("", "", "") and done.plain()["tasks"][0]["fraction_of_peak"] is None


def test_a_dtype_without_instructions_multiplies_smaller_matrices(monkeypatch):
    """A product of 2048 rows took 20 s in bfloat16 on a CPU with AVX2 alone, and in float32 a tenth of one."""
    speed, sizes = {"float32": 1e11, "bfloat16": 1e9}, []
    monkeypatch.setattr("patchloom.bench.product", lambda device, dtype, size: sizes.append(size) or (dtype, size))
    taken = lambda ways, *_: {"": [2 * size**3 / speed[dtype] for dtype, size in ways.values()]}  # noqa: E731
    monkeypatch.setattr("patchloom.bench.seconds_of", taken)
    for dtype, most in (("float32", 2048), ("bfloat16", 512)):
        assert product_rate("cpu", dtype) == pytest.approx(speed[dtype]) and sizes[-1] == most


@pytest.mark.parametrize("dtype", ["tf32", "float32"])
def test_tf32_products_are_of_float32(dtype):
    assert product("cpu", dtype, 8)().dtype == torch.float32


@pytest.fixture
def quick(monkeypatch):
    """Multiply no large matrices, and time reading for a moment."""
    monkeypatch.setattr("patchloom.bench.product_rate", lambda device, dtype: 1e11)
    monkeypatch.setattr("patchloom.bench._READING", 0.1)
    return {"model": "nano", "img_size": 16, "patch_size": 4, "batch_size": 8, "rounds": 1, "precision": "float32"}


def test_bench_on_the_command_line(capsys, monkeypatch, quick):
    monkeypatch.setenv("COLUMNS", "200")
    words = [f"--{name}={value}" for name, value in quick.items()]
    assert main(["bench", "shapes:64", "--tasks", "mae,droppos", *words]) == 0
    peaks, sizes, _, heading, _, *rows = capsys.readouterr().out.splitlines()
    assert "100 GFLOP/s in bfloat16" in peaks and "batches of 8" in sizes and heading.startswith("task")
    assert [row.split()[0] for row in rows] == ["mae", "droppos"]
    assert all(re.search(r" \d+% +0\.\d\d +[\d,]+ +model|data", row) for row in rows)


def test_tasks_without_required_options_are_the_default(monkeypatch, quick):
    class Enough(Exception):
        pass

    def stopped(steps, device, rounds):
        raise Enough([way.args[0].settings.task["name"] for way in steps.values()])

    monkeypatch.setattr("patchloom.bench.seconds_of", stopped)
    with pytest.raises(Enough) as built:
        bench("shapes:64", **quick)
    assert built.value.args[0] == ready_tasks()


def test_a_default_task_that_does_not_suit_the_images_is_left_out(monkeypatch, capsys, quick):
    monkeypatch.setattr("patchloom.tasks.diet._MOST", 10)  # images
    monkeypatch.setattr("patchloom.bench.ready_tasks", lambda: ["mae", "diet"])
    assert [one.task for one in bench("shapes:64", **quick).paces] == ["mae"]
    assert "diet is left out: diet has one class per training image, up to 10" in capsys.readouterr().out
    assert "up to 10" in refusal(bench, "shapes:64", tasks=["diet"], batch_size=8)
    monkeypatch.setattr("patchloom.bench.ready_tasks", lambda: ["diet"])
    with pytest.raises(PatchloomError, match="up to 10"):  # none is left
        bench("shapes:64", batch_size=8)


def test_the_gain_of_compiling_is_printed_and_changes_no_run(monkeypatch, quick):
    monkeypatch.setattr("patchloom.train.estimate.compiling", lambda chosen: nullcontext())  # no compiler is needed
    done = bench("shapes:64", tasks=["mae", "simmim"], compile=True, **quick)
    assert [one.compiled for one in done.paces] == [False, True] * 2
    assert settings_for().compile is False
    for gains, advice in (((1.2, 1.06), "×1.06 to ×1.20 as fast: give pretrain --compile true"), ((1.2, 1.0), "leave")):
        paces = [
            replace(pace, seconds=(1 / gains[i // 2] if pace.compiled else 1.0,)) for i, pace in enumerate(done.paces)
        ]
        assert advice in replace(done, paces=tuple(paces)).sentences()[-1]
    assert "Compiled" not in str(replace(done, paces=done.paces[::2]).sentences())


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"tasks": []}, {"tasks": "mea"}, {"data": "nowhere"}])
def test_invalid_input_is_refused(wrong):
    refusal(bench, **wrong)
