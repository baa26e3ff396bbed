"""Speed of training steps beside other work, by how OpenMP's threads wait for each other.

    python benchmarks/waiting.py                                  # every policy, `nano` at 32 px, native kernels
    python benchmarks/waiting.py --work nano96 vit_s --kernels native torch
    python benchmarks/waiting.py --policies default spin=1000     # two of them, with more rounds: --rounds 5

torch's threads spin while they wait for the slowest of them, or sleep at once, or spin for a while: libgomp reads this
from the environment when it is loaded. "by the load" is `patchloom.system.waiting`, which the command line uses; with
"asleep" threads always sleep soon. Each policy has four processes, which build the same training step and wait for
commands. A cell of the table is one of the situations below, in turns with the other policies: all processes of the
cell train for `--seconds`, and the images that all of them finished count. Each situation has a fair share of what one
process reaches alone under the first policy.

The quota is a control group of Linux, which needs root; the column is left out where none can be made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

POLICIES = {
    "torch's own": {},
    "by the load": {},
    "asleep": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin=2000": {"GOMP_SPINCOUNT": "2000"},
    "spin=1000": {"GOMP_SPINCOUNT": "1000"},
    "spin=3000": {"GOMP_SPINCOUNT": "3000"},
    "spin=10000": {"GOMP_SPINCOUNT": "10000"},
    "spin=100000": {"GOMP_SPINCOUNT": "100000"},
}
# processes that train, busy loops beside them, and the fair share of all trainings together on two cores
SITUATIONS = {
    "quiet": (1, 0, 1.0),
    "reading": (1, 0, 1.0),  # a worker process decodes its images
    "1 loop": (1, 1, 0.75),
    "2 loops": (1, 2, 0.5),
    "0.2 loop": (1, 0.2, 0.9),
    "0.4 loop": (1, 0.4, 0.8),
    "0.6 loop": (1, 0.6, 0.7),
    "2 trainings": (2, 0, 1.0),
    "4 trainings": (4, 0, 1.0),
    "half quota": (1, 0, 0.5),
}
WORK = {  # model, image side, patch side, images per step
    "nano32": ("nano", 32, 8, 128),
    "nano96": ("nano", 96, 8, 128),
    "vit_s": ("vit_small_patch16_224", 224, 16, 8),
}
_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
LEAD = 1.5  # seconds of training before the time counts, in which a program notices the others
_PERIOD = 100_000  # microseconds in which a quota is dealt out, as Docker's


def serve(policy: str, work: str, kernels: str, photographs: str) -> None:
    """Build the step, and train whenever a line of stdin asks for it: the start, the seconds, and whether to read."""
    import torch

    from patchloom.data.loader import training_batches
    from patchloom.data.sources.open import open_data
    from patchloom.data.stats import Stats
    from patchloom.runs.settings import request
    from patchloom.system.device import cores, keep_freed_memory
    from patchloom.system.waiting import SleepingTeam, _libgomp, sleep_when_busy
    from patchloom.train.estimate import Step
    from patchloom.train.resolve import resolve

    keep_freed_memory()
    if policy == "by the load":
        sleep_when_busy()
    model, side, patch, batch = WORK[work]
    given = {"model": model, "img_size": side, "patch_size": patch, "batch_size": batch, "device": "cpu"}
    given |= {"precision": "bfloat16", "kernels": kernels, "compile": False, "attention": "explicit"}
    stats = Stats((0.5,) * 3, (0.25,) * 3, side, side, 1, [])
    settings, _ = resolve(request("shapes", "mae", given), 2**16, 3, stats)
    torch.set_num_threads(cores())
    step = Step(settings)
    own, source, read = step.batch, open_data(photographs).train, None
    step()
    if policy == "asleep":
        library = _libgomp()
        assert library is not None
        SleepingTeam(library)  # its thread keeps it open
    print("ready", flush=True)
    for line in sys.stdin:
        start, seconds, reading = json.loads(line)
        if reading and read is None:
            read = training_batches(source, step.task.augment, batch, 0, 0, 10**6, 1, 3, device=torch.device("cpu"))
            next(read)
        done, end, now = 0.0, start + seconds, 0.0
        while now < end:
            begun, step.batch = time.time(), next(read) if reading else own
            step()
            now = time.time()
            # the part of the step that lies within the time
            done += max(0.0, min(now, end) - max(begun, start)) / (now - begun)
        if read is not None:
            read.close()  # its worker would decode ahead during the next cell
            read = None
        print(done * batch / seconds, flush=True)


class Server:
    """Process that trains on command."""

    def __init__(self, policy: str, *words: str) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
        command = [sys.executable, __file__, "--serve", policy, *words]
        self.process = subprocess.Popen(
            command, env=kept | POLICIES[policy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, start: float, seconds: float, reading: bool) -> None:
        """Have it train from ``start``, in seconds since 1970."""
        assert self.process.stdin is not None
        print(json.dumps([start, seconds, reading]), file=self.process.stdin, flush=True)

    def answer(self) -> str:
        """Return its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a training has ended by itself: see its message above")
        return line


def group() -> Path | None:
    """Make a control group with a quota of one core; return its folder, or None if that is not possible."""
    for root, quota in ((Path("/sys/fs/cgroup/cpu"), "v1"), (Path("/sys/fs/cgroup"), "v2")):
        folder = root / "patchloom-waiting"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            if quota == "v1":
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
                (folder / "cpu.cfs_quota_us").write_text(str(_PERIOD))
            else:
                (folder / "cpu.max").write_text(f"{_PERIOD} {_PERIOD}")
            return folder
    return None


@contextlib.contextmanager
def limited(process: subprocess.Popen[str], folder: Path | None) -> Iterator[None]:
    """Keep a process in a control group during the block."""
    if folder is not None:
        (folder / "cgroup.procs").write_text(str(process.pid))
    try:
        yield
    finally:
        if folder is not None:
            (folder.parent / "cgroup.procs").write_text(str(process.pid))


LOOP = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.02 * share
    while time.perf_counter() < end:
        pass
    time.sleep(0.02 * (1 - share))
"""


@contextlib.contextmanager
def busy_loops(count: float) -> Iterator[None]:
    """Run that many processes that never wait; a fraction is one that works for this fraction of the time."""
    shares = [1.0] * int(count) + [count % 1] * (count % 1 > 0)
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, str(share)]) for share in shares]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def rate(servers: list[Server], situation: str, seconds: float, quota: Path | None) -> float:
    """Return the images per second of all trainings of a situation together."""
    trainings, loops, _ = SITUATIONS[situation]
    used = servers[:trainings]
    with busy_loops(loops), limited(used[0].process, quota if situation == "half quota" else None):
        start = time.time() + (4.0 if situation == "reading" else LEAD)
        for server in used:
            server.ask(start, seconds, situation == "reading")
        return sum(float(server.answer()) for server in used)


def draw_photographs(folder: str) -> None:
    """Save images that take a few milliseconds to decode."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(300):
        small = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8))
        small.resize((160, 120), Image.Resampling.BICUBIC).save(f"{folder}/{i}.jpg", quality=90)


def measure(work: str, kernels: str, args: argparse.Namespace, quota: Path | None, photographs: str) -> None:
    """Print the table of one model, as fractions of the fair share."""
    policies, situations = args.policies, [one for one in args.situations if one != "half quota" or quota]
    servers = {policy: [Server(policy, work, kernels, photographs) for _ in range(4)] for policy in policies}
    for each in servers.values():
        for server in each:
            server.answer()  # it is ready
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(args.rounds):
        for situation in situations:
            for policy in policies[number % 2 * (len(policies) - 1) :: 1 - number % 2 * 2]:  # forth and back
                found[policy, situation].append(rate(servers[policy], situation, args.seconds, quota))
    for each in servers.values():
        for server in each:
            server.process.kill()
    alone = statistics.median(found[policies[0], "quiet"])
    print(f"\n{work}, {kernels} kernels: {alone:,.0f} images/s alone; percent of the fair share, median (range)\n")
    print("| policy |", " | ".join(situations), "|")
    print("| --- |", " | ".join("---" for _ in situations), "|")
    for policy in policies:
        cells = []
        for situation in situations:
            shares = sorted(value / alone / SITUATIONS[situation][2] for value in found[policy, situation])
            cells.append(f"{100 * statistics.median(shares):.0f} ({100 * shares[0]:.0f}-{100 * shares[-1]:.0f})")
        print(f"| {policy} |", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Print a table for each model and each kind of kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", default=["nano32"], choices=WORK)
    parser.add_argument("--kernels", nargs="+", default=["native"], choices=["native", "torch"])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--situations", nargs="+", default=list(SITUATIONS), choices=SITUATIONS)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    quota = group()
    with tempfile.TemporaryDirectory() as photographs:
        draw_photographs(photographs)
        for work in args.work:
            for kernels in args.kernels:
                measure(work, kernels, args, quota, photographs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
