"""Test of the papers' claims in miniature, three seeds of pre-training per arm; writes claims.md.

    python benchmarks/get_data.py cifar10 /tmp/data
    python benchmarks/claims.py --plan                        # list the arms, their lengths, and finished ones
    python benchmarks/claims.py --data /tmp/data/cifar10      # all claims; hours, two runs at a time
    python benchmarks/claims.py droppos mp3 --jobs 1          # some of them
    python benchmarks/claims.py probes                        # linear, attentive and kNN of seven tasks, nothing else
    python benchmarks/claims.py --table                       # no training: claims.md from the results in --out

`claims_arms.py` defines what is trained, `claims_declared.py` what is claimed and compared, `claims_judge.py` how it is
decided. Results in ``--out`` are read, not repeated, so the same command resumes a study that was stopped or killed,
and its unfinished runs. If ``--out`` has fewer results of a claim than claims.md, the page keeps its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from claims_arms import ARMS, FROZEN, SEEDS, UNTRAINED
from claims_declared import CLAIMS
from claims_page import write_page
from claims_probes import PROBED, PROBES
from claims_runs import Study, copy_images, make, needed, plain

from patchloom.display import duration
from patchloom.errors import PatchloomError

Job = tuple[str, int]


def jobs_of(claims: list[str]) -> list[Job]:
    """Return arms and seeds of some claims in running order, each after those that it needs."""
    found: dict[Job, None] = {}

    def add(job: Job) -> None:
        for before in needed(*job):
            add(before)
        found.setdefault(job)

    for claim in claims:
        for seed in range(SEEDS):
            for arm in PROBED if claim == PROBES else (*CLAIMS[claim].arms, UNTRAINED):  # the control of each
                add((arm, seed))
    return list(found)


def one(study: Study, job: Job) -> subprocess.Popen[bytes]:
    """Start a process for one arm and seed, with its output in a log file."""
    arm, seed = job
    (logs := study.out / "logs").mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, "--one", arm, str(seed), "--out", str(study.out), *[PROBES] * bool(study.only)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(logs / f"{plain(arm)}-{seed}.txt", "a") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, env=environment)


def make_all(study: Study, jobs: list[Job], at_once: int) -> list[Job]:
    """Run all missing arms and seeds, ``at_once`` at a time.

    Returns:
        Those that failed, or that need a failed one.
    """
    missing = [job for job in jobs if not study.is_done(*job)]
    print(f"{len(jobs)} arms and seeds, {len(jobs) - len(missing)} are finished", flush=True)
    running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}
    failed: list[Job] = []
    try:
        while missing or running:
            for job in list(missing):
                if len(running) < at_once and all(study.is_done(*before) for before in needed(*job)):
                    missing.remove(job)
                    running[job] = one(study, job), time.perf_counter()
            if not running:  # the rest need a failed one
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
                print(f"{job[0]}, seed {job[1]}: {how}; {len(missing)} not yet started", flush=True)
    finally:
        for process, _ in running.values():
            process.terminate()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", help=f"of {', '.join((*CLAIMS, PROBES))}; all claims, if none is named")
    parser.add_argument("--data", type=Path, default=Path("/tmp/data/cifar10"), help="CIFAR-10, by class")
    parser.add_argument("--out", type=Path, default=Path("/tmp/claims"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, with one thread each")
    parser.add_argument("--plan", action="store_true", help="only list what would be run")
    parser.add_argument("--table", action="store_true", help="only write claims.md")
    parser.add_argument("--page", type=Path, default=Path(__file__).with_name("claims.md"))
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    study = Study(args.out, only=FROZEN if args.claims == [PROBES] else ())
    if args.one:
        return make(study, args.one[0], int(args.one[1]))
    if unknown := [name for name in args.claims if name not in (*CLAIMS, PROBES)]:
        parser.error(f"there is no claim {unknown[0]}; there are {', '.join((*CLAIMS, PROBES))}")
    jobs = jobs_of(args.claims or list(CLAIMS))
    if args.plan:
        for arm, seed in jobs:
            print(f"{'there  ' if study.is_done(arm, seed) else 'missing'} {arm}, seed {seed}: {ARMS[arm]}")
        return None
    if not args.table:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that SIGTERM ends the runs, too
        try:
            copy_images(study, args.data)
        except PatchloomError as problem:
            parser.error(str(problem))
        failed = make_all(study, jobs, args.jobs)
    write_page(study, args.page)
    if not args.table and failed:
        sys.exit(
            f"{len(failed)} failed or need a failed one: {', '.join(f'{arm}, seed {seed}' for arm, seed in failed)}"
        )


if __name__ == "__main__":
    main()
