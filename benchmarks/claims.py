"""Tests the papers' claims in miniature, three seeds of pre-training each, and writes claims.md.

    python benchmarks/get_data.py cifar10 /tmp/data
    python benchmarks/claims.py --plan                        # arms, their lengths, what is there already
    python benchmarks/claims.py --data /tmp/data/cifar10              # all claims; hours, two runs at a time
    python benchmarks/claims.py droppos mp3 --jobs 1          # some of them
    python benchmarks/claims.py --table                       # trains nothing: claims.md from what is there

`claims_arms.py` says what is trained, `claims_declared.py` what is claimed and compared, `claims_judge.py` how it is
decided. What is in ``--out`` is read and not made again, so a study that was stopped or killed goes on with the same
command, and a run of it where it was. Of a claim of which ``--out`` has less than claims.md, that keeps what it says.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from claims_arms import ARMS, SEEDS, UNTRAINED
from claims_declared import CLAIMS
from claims_page import write_page
from claims_runs import Study, copy_images, make, needed, plain

from patchloom.display import duration
from patchloom.errors import PatchloomError

Job = tuple[str, int]


def jobs_of(claims: list[str]) -> list[Job]:
    """Arms and seeds of some claims in the order in which they are made, each after those that it needs."""
    found: dict[Job, None] = {}

    def add(job: Job) -> None:
        for before in needed(*job):
            add(before)
        found.setdefault(job)

    for claim in claims:
        for seed in range(SEEDS):
            for arm in (*CLAIMS[claim].arms, UNTRAINED):  # beside which each is shown
                add((arm, seed))
    return list(found)


def one(study: Study, job: Job) -> subprocess.Popen[bytes]:
    """A process of its own for one arm and seed, which writes what it says to a file."""
    arm, seed = job
    (logs := study.out / "logs").mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, "--one", arm, str(seed), "--out", str(study.out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(logs / f"{plain(arm)}-{seed}.txt", "a") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, env=environment)


def make_all(study: Study, jobs: list[Job], at_once: int) -> list[Job]:
    """Make what is missing, some at a time.

    Returns:
        Those that could not be made.
    """
    missing = [job for job in jobs if not study.is_done(*job)]
    print(f"{len(jobs)} arms and seeds, {len(jobs) - len(missing)} are there", flush=True)
    running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}
    failed: list[Job] = []
    try:
        while missing or running:
            for job in list(missing):
                if len(running) < at_once and all(study.is_done(*before) for before in needed(*job)):
                    missing.remove(job)
                    running[job] = one(study, job), time.perf_counter()
            if not running:  # what they need has failed
                return failed + missing
            time.sleep(0.2)
            for job, (process, begun) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                took = duration(time.perf_counter() - begun)
                if process.returncode:
                    failed.append(job)
                log = study.out / "logs" / f"{plain(job[0])}-{job[1]}.txt"
                how = f"failed, see {log}" if process.returncode else took
                print(f"{job[0]}, seed {job[1]}: {how}; {len(missing)} to begin", flush=True)
    finally:
        for process, _ in running.values():
            process.terminate()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", help=f"of {', '.join(CLAIMS)}; all, if none is named")
    parser.add_argument("--data", type=Path, default=Path("/tmp/data/cifar10"), help="CIFAR-10, by class")
    parser.add_argument("--out", type=Path, default=Path("/tmp/claims"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, with one thread each")
    parser.add_argument("--plan", action="store_true", help="only tell what would be made")
    parser.add_argument("--table", action="store_true", help="only write claims.md")
    parser.add_argument("--page", type=Path, default=Path(__file__).with_name("claims.md"))
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    study = Study(args.out)
    if args.one:
        return make(study, args.one[0], int(args.one[1]))
    if unknown := [name for name in args.claims if name not in CLAIMS]:
        parser.error(f"there is no claim {unknown[0]}; there are {', '.join(CLAIMS)}")
    jobs = jobs_of(args.claims or list(CLAIMS))
    if args.plan:
        for arm, seed in jobs:
            print(f"{'there  ' if study.is_done(arm, seed) else 'missing'} {arm}, seed {seed}: {ARMS[arm]}")
        return None
    if not args.table:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the runs end with it
        try:
            copy_images(study, args.data)
        except PatchloomError as problem:
            parser.error(str(problem))
        failed = make_all(study, jobs, args.jobs)
    write_page(study, args.page)
    if not args.table and failed:
        sys.exit(f"{len(failed)} could not be made: {', '.join(f'{arm}, seed {seed}' for arm, seed in failed)}")


if __name__ == "__main__":
    main()
