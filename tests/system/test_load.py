"""Load by other programs."""

import pytest
import torch

from patchloom.system import device as hardware
from patchloom.system import load
from patchloom.system.load import BackgroundLoad, Load, LoadWatch


class Machine:
    """/proc and control groups of a machine with four cores, of which this process may use two."""

    def __init__(self, place, monkeypatch):
        self.place, self.now = place, 100.0
        monkeypatch.setattr(hardware, "PROC", place / "proc")
        monkeypatch.setattr(hardware, "GROUPS", place / "groups")
        monkeypatch.setattr(load, "_ticks", TICKS)
        monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda process: {1, 2}, raising=False)
        monkeypatch.setattr(hardware.os, "sysconf", lambda name: 100)  # ticks a second
        monkeypatch.setattr(hardware.os, "getpid", lambda: 10)
        monkeypatch.setattr(hardware.os, "getppid", lambda: 9)
        monkeypatch.setattr(load.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        monkeypatch.setattr("joblib.cpu_count", lambda: 2)
        for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS"):
            monkeypatch.delenv(name, raising=False)
        self.write("proc/self/cgroup", "7:cpuset:/\n2:cpu,cpuacct:/docker/x\n0::/\n")

    def write(self, name, text):
        (self.place / name).parent.mkdir(parents=True, exist_ok=True)
        (self.place / name).write_text(text)

    def work(self, cores, processes):
        """Write the ticks of user programs and of the kernel on each core, and (parent, name, ticks) of processes."""
        lines = [f"cpu{i} {user} 0 {kernel} 5000 7 0 0 0 0 0" for i, (user, kernel) in enumerate(cores)]
        self.write("proc/stat", "\n".join(["cpu  1 1 1 1 1 1 1 1 0 0", *lines, "intr 1"]) + "\n")
        for number, (parent, name, user, waited) in processes.items():
            fields = f"S {parent} 1 1 0 -1 0 0 0 0 0 {user} 0 {waited} 0 20 0 1 0"
            self.write(f"proc/{number}/stat", f"{number} ({name}) {fields}\n")


TICKS = load._ticks  # conftest.py replaces it


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


BEFORE = [(1000, 0), (1000, 0), (1000, 0), (1000, 0)]
QUIET = {9: (1, "sh", 0, 0), 10: (9, "python) S 1 (", 500, 0), 11: (10, "worker", 50, 0), 12: (11, "child", 0, 0)}


def test_background_load_is_without_own_processes_and_other_cores(machine):
    machine.work(BEFORE, QUIET | {20: (1, "browser", 300, 0)})
    seen = BackgroundLoad()
    machine.now += 10.0
    # 10 + 6 seconds on our cores: 8 of this process, 3 of its workers, one of which has ended, and 5 of others
    machine.work(
        [(2000, 0), (1900, 100), (1600, 0), (2000, 0)],
        QUIET | {10: (9, "python", 1300, 100), 12: (11, "child", 200, 0)},
    )
    found = seen.load()
    assert found == Load(cores=2, wanted=2, own=pytest.approx(1.1), others=pytest.approx(0.5)) and found.busy
    assert found.sentence() == "other programs use 0.5 of 2 cores: times are those of a busy machine"
    assert found.plain()["other_cores"] == pytest.approx(0.5) and found.plain()["busy"]


def test_processes_that_train_together_are_no_others(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    machine.work(BEFORE, QUIET | {15: (9, "rank 1", 0, 0)})
    seen = BackgroundLoad()
    machine.now += 10.0
    machine.work(
        [(1000, 0), (2000, 0), (2000, 0), (1000, 0)], QUIET | {10: (9, "rank 0", 1500, 0), 15: (9, "rank 1", 1000, 0)}
    )
    assert seen.load().others == 0.0 and not seen.load().busy


def test_a_machine_is_busy_if_too_few_cores_are_left():
    loads = {(2, 1, 1.0, 1.0): False, (2, 2, 1.0, 1.0): True, (16, 16, 1.5, 4.0): False}  # the last waits for a GPU
    for (there, wanted, own, others), busy in loads.items():
        assert Load(cores=there, wanted=wanted, own=own, others=others).busy == busy


@pytest.mark.parametrize(
    ("file", "line", "unit"), [("", "throttled_usec", 10**6), ("cpu,cpuacct/docker/x/", "throttled_time", 10**9)]
)
def test_a_cpu_quota_counts(file, line, unit, machine):
    machine.work(BEFORE, QUIET)
    if file:  # version 1, whose controllers together have a folder, and a link for each
        file = file.replace("cpu,cpuacct", "cpu")
    machine.write(f"groups/{file}cpu.stat", f"nr_throttled 1\n{line} {unit}\n")
    seen = BackgroundLoad()
    machine.now += 10.0
    machine.work([(1000, 0), (1500, 0), (1500, 0), (1000, 0)], QUIET | {10: (9, "python", 1500, 0)})
    machine.write(f"groups/{file}cpu.stat", f"nr_throttled 90\n{line} {4 * unit}\n")
    found = seen.load()
    assert found.withheld == pytest.approx(0.3) and found.others == 0.0
    assert found.sentence() == "a CPU quota leaves 1.0 of 2 cores: times are those of a busy machine"
    machine.write(f"groups/{file}cpu.stat", f"nr_throttled 90\n{line} {2 * unit}\n")
    assert not seen.load().busy, "it used up its quota often, but late"


def test_without_proc_nothing_is_known_of_others(machine):
    machine.write("groups/cpu.stat", "throttled_usec 0\n")
    seen = BackgroundLoad()
    machine.now += 10.0
    machine.write("groups/cpu.stat", f"throttled_usec {10**6}\n")  # of an unknown amount of work
    found = seen.load()
    assert found.withheld == pytest.approx(0.1) and found.others is None and not found.busy and found.sentence() == ""


def test_a_run_reports_when_a_machine_becomes_busy_and_quiet_but_not_often(monkeypatch):
    now, busy = [0.0], [False]
    monkeypatch.setattr(BackgroundLoad, "load", lambda self: Load(cores=2, wanted=2, own=0.4, others=1.6 * busy[0]))
    watch, said = LoadWatch(lambda: now[0]), []

    def pass_time(seconds):
        for _ in range(int(seconds)):
            now[0] += 1
            if news := watch.news():
                said.append((now[0], news.partition(":")[0]))

    pass_time(100)
    assert not said
    busy[0] = True
    pass_time(60)
    busy[0] = False
    pass_time(1000)
    assert said == [(120, "other programs use 1.6 of 2 cores"), (420, "the machine is no longer busy")]
    for _ in range(240):  # it changes every half minute
        busy[0] = not busy[0]
        pass_time(30)
    assert len(said) <= 7
