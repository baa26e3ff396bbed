"""Measurements of `gpu.py` on whole runs: the suite's GPU tests, training, a group of one, loading, and CIFAR-10."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import wraps
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from data_rate import draw_photographs
from gpu_steps import TINY, Result, precision_of, waits
from pretext import last_results, measure_of

from patchloom.data.augment import RandomCrop
from patchloom.data.cache import cache_images
from patchloom.data.loader import Prefetcher, training_batches
from patchloom.data.sources.open import open_data
from patchloom.data.splits import hold_out
from patchloom.errors import Stopped
from patchloom.system.files import write_whole
from patchloom.system.hardware import Cores, cores, synchronize
from patchloom.train import resolve
from patchloom.train.loop import pretrain
from patchloom.train.step import Stepper

ROOT = Path(__file__).parents[1]
_UNCOUNTED = 5  # number of first steps, whose waits are not counted
_ENDED = re.compile(r"^(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)
_ENDING = 10.0  # seconds in which a command may end


def command(words: list[str], seconds: float) -> tuple[int | None, str]:
    """Run a command, and return exit code and output; the code is None if it was ended before the time limit."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        out, _ = process.communicate(timeout=max(1.0, seconds - 1.5 * _ENDING))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, _ = process.communicate(timeout=_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        print(out, flush=True)
        return None, out
    print(out, flush=True)
    return process.returncode, out


def tests(tiny: bool, seconds: float) -> Result:
    """Run the suite's GPU tests; failed ones again alone, because a fault affects all later tests."""
    folder = ROOT / "tests" / "gpu" if tiny else ROOT / "tests"
    if not folder.is_dir() or not find_spec("pytest"):
        return {"absent": f"{folder.name} or pytest is missing: only the package is installed"}
    begin = time.monotonic()
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
    words += ["-o", "addopts=--import-mode=importlib", "--rootdir", str(ROOT), "--continue-on-collection-errors"]
    code, out = command([*words, str(folder)], seconds)
    ended = dict(_ENDED.findall(out))
    if code is None:
        raise TimeoutError(f"stopped after {len(ended)} tests: {dict(Counter(ended.values()))}")
    failed = [name for name, how in ended.items() if how in ("FAILED", "ERROR")]
    alone = {}
    for name in failed[:8]:
        left = seconds - (time.monotonic() - begin)
        if left > 40:
            again, told = command([*words, f"{ROOT}/{name}"], min(left, 120))
            lines = [line for line in told.splitlines() if line.startswith("E  ")]
            alone[name] = {"passed": again == 0, "lines": [line[:300] for line in lines[-4:]]}
    counted = Counter(ended.values())
    return {"counts": counted, "failed": failed, "alone": alone, "code": code, "end": out.splitlines()[-8:]}


def photographs(work: str, tiny: bool) -> Path:
    """Make JPEG files of 500 x 375 pixels, once."""
    folder = Path(work, "photographs")
    if not folder.is_dir():
        beside = folder.with_name(f"photographs-{os.getpid()}")
        beside.mkdir(parents=True)
        draw_photographs(beside, 20 if tiny else 1024)
        beside.rename(folder)
    return folder


def fresh(work: str, *names: str) -> Path:
    """Return a run's folder, without files of an earlier attempt."""
    folder = Path(work, *names)
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def steady(run: Path) -> float | None:
    """Return images per second in the second half of a run, without its start; None if it was too short."""
    with open(run / "metrics.csv", newline="") as file:
        rows = [(int(row["images"]), float(row["seconds"])) for row in csv.DictReader(file) if row["seconds"]]
    rows = rows[len(rows) // 2 :]
    if len(rows) < 2 or rows[-1][1] <= rows[0][1]:
        return None
    return (rows[-1][0] - rows[0][0]) / (rows[-1][1] - rows[0][1])


def waiting(run: Path) -> str:
    """Return the share of time that a run waited for data, from its last line."""
    return (re.findall(r"(\d+%) waiting for data", (run / "log.txt").read_text("utf-8")) or [""])[-1]


def training(device: str, tiny: bool, work: str, seconds: float, task: str) -> Result:
    """Run a short `pretrain`, and count how often forward passes, updates and copies of batches wait for the GPU."""
    found: dict[str, list[int]] = {"forward": [], "update": [], "send": []}
    where: Counter[str] = Counter()

    def watch(of: type, name: str) -> None:
        plain = getattr(of, name)

        @wraps(plain)
        def method(*arguments: Any, **named: Any) -> Any:
            with waits(device) as places:
                done = plain(*arguments, **named)
            found[name].append(sum(places.values()))
            if len(found[name]) > _UNCOUNTED:
                where.update(places)
            return done

        setattr(of, name, method)

    for of, name in ((Stepper, "forward"), (Stepper, "update"), (Prefetcher, "send")):
        watch(of, name)
    sizes = TINY | {"batch_size": 4} if tiny else {"model": "mini", "img_size": 96, "patch_size": 8, "batch_size": 32}
    run = fresh(work, "training", task)
    pretrain(photographs(work, tiny), task, out=run, device=device, epochs=2, compile=False, **sizes)
    counted = {name: mean(values[_UNCOUNTED:] or values) for name, values in found.items()} if device == "cuda" else {}
    return {"steps": len(found["update"]), "images/s": steady(run), "waits": counted, "where": where}


def group(device: str, tiny: bool, work: str, seconds: float, task: str, strategy: str) -> Result:
    """Run `gpu_nccl.py` by torchrun."""
    folder = fresh(work, "group", f"{task}-{strategy}")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    words += [str(Path(__file__).with_name("gpu_nccl.py")), str(photographs(work, tiny)), str(folder), device]
    code, out = command([*words, task, strategy], seconds)
    lines = [line for line in out.splitlines() if line.startswith('{"backend"')]
    if code or not lines:
        raise RuntimeError(f"torchrun ended with {code}: {out[-1500:]}")
    return json.loads(lines[-1])


def loading(device: str, tiny: bool, work: str, known: Result, seconds: float, cached: bool) -> Result:
    """Measure images per second that are read, cropped to 224 px and copied to the device, with `auto` workers."""
    source, side, batch = open_data(photographs(work, tiny)).train, 32 if tiny else 224, 4 if tiny else 256
    workers = resolve.default_workers(device, Cores(cores()))[0]
    begin = time.perf_counter()
    if cached:
        source = cache_images(source, 256, workers, say=print)
    made = time.perf_counter() - begin
    batches = training_batches(source, RandomCrop((side, side)), batch, 0, 0, 10**6, workers, device=device)
    for _ in islice(batches, 1 if tiny else 4 * workers):
        pass  # start the workers, and use up the batches that they have prepared
    synchronize(device)
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < (0.3 if tiny else 8.0):
        next(batches)
        steps += 1
    synchronize(device)
    rate = steps * batch / (time.perf_counter() - start)
    result = {"images/s": rate, "workers": workers, "batch": batch, "side": side}
    return result | ({"making the cache": made} if cached else {"needed": _fastest(known)})


def _fastest(known: Result) -> Result:
    """Return the step that needs most images per second."""
    steps = known.get("steps", {})
    name = max(steps, key=lambda name: steps[name]["images/s"], default=None)
    return {"row": name, "images/s": steps[name]["images/s"]} if name else {}


def run(device: str, tiny: bool, work: str, seconds: float) -> Result:
    """Run `pretrain` of droppos from the cache, with reading, copying and training at the same time."""
    sizes = TINY | {"batch_size": 4} if tiny else {"model": "vit_small_patch16_224", "img_size": 224, "batch_size": 256}
    folder = fresh(work, "loading", "run")
    epochs = 1 if tiny else 80
    pretrain(photographs(work, tiny), "droppos", out=folder, device=device, epochs=epochs, cache=256, **sizes)
    return {"images/s": steady(folder), "waiting for data": waiting(folder), "epochs": epochs}


def two_classes(work: str) -> str:
    """Return some photographs with labels, for a trial in miniature."""
    folder = Path(work, "classes")
    for i, path in enumerate(sorted(photographs(work, True).iterdir())):
        place = folder / ("train" if i < 16 else "test") / "ab"[i % 2] / path.name  # two photographs, in turns
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    return str(folder)


def pace(data: str, task: str, out: Path, seconds: float, sizes: dict[str, Any]) -> float | None:
    """Measure images per second of a run that is stopped some seconds after its first update."""
    plain, ends = Stepper.update, []

    def update(*arguments: Any, **named: Any) -> Any:
        if not ends:
            ends.append(time.monotonic() + seconds)
        elif ends[-1] < time.monotonic():
            ends.append(float("inf"))  # only once
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments, **named)

    Stepper.update = update
    try:
        with contextlib.suppress(Stopped):
            pretrain(data, task, out=out, epochs=20, **sizes)
    finally:
        Stepper.update = plain
    return steady(out)


def cifar(device: str, tiny: bool, work: str, seconds: float, task: str, data: str, trained: float) -> Result:
    """Run for about ``trained`` seconds on CIFAR-10, or on other data, and evaluate the encoder."""
    sizes: dict[str, Any] = {"model": "mini", "batch_size": 256, "blr": 2e-3}
    if tiny:
        data, sizes = two_classes(work), TINY | {"batch_size": 4}
    elif not data.startswith("shapes"):
        sizes |= {"img_size": 32, "patch_size": 4, "cache": "whole"}
    sizes |= {"device": device, "precision": precision_of(device)}
    begun, out = Path(work, "cifar", f"{task}.json"), Path(work, "cifar", task)
    if not begun.exists():  # the same length in every attempt, so that a run resumes
        fresh(work, "cifar", task)
        images = len(hold_out(open_data(data).train, "auto", seed=0)[0])
        rate = pace(data, task, fresh(work, "cifar", f"{task}-pace"), trained / 12, sizes)
        epochs = max(1, round((rate or 0.0) * trained / images))
        write_whole(begun, json.dumps({"epochs": epochs, "images": images, "pace": rate}))
    found = json.loads(begun.read_text("utf-8"))
    done = pretrain(data, task, out=out, epochs=found["epochs"], **sizes)
    measure, baselines, spent = measure_of(out)
    learnt: dict[str, dict[str, float]] = {}
    for (protocol, encoder), value in last_results(out).items():
        learnt.setdefault(protocol, {})[encoder] = value
    told = {"samples": found["images"] * found["epochs"], "images/s": steady(out), "waiting for data": waiting(out)}
    told |= {"data": Path(data).name, "model": sizes["model"], "trained seconds": spent, "learnt": learnt}
    return found | told | {"measure": measure, "baselines": baselines, "summary": done.summary}
