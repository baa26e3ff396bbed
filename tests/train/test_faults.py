"""Runs that are killed at any point with SIGKILL and resumed end like uninterrupted ones."""

import random
import time

import pytest
from killing import Kill, kill_until_done, left_behind, start

SEED = 20261120
KILLS = 4  # at the least, of each task
CASES = {
    "droppos": {"task": "droppos", "accumulate": 2},
    "extrema": {"task": "extrema"},
    "lut": {"task": "lut"},
    "mae": {"task": "mae", "workers": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_anywhere_resumes_to_the_same_result(case, images, tmp_path):
    options, rng = CASES[case], random.Random(f"{SEED} {case}")
    print(f"seed {SEED} {case}")
    start(images, tmp_path / "first" / "run", options, Kill())  # the server that processes are forked from starts, too
    begin = time.perf_counter()
    killed, events = start(images, tmp_path / "plain" / "run", options, Kill())
    seconds = time.perf_counter() - begin
    assert not killed and events > 20
    plain, kills, folders = left_behind(tmp_path / "plain" / "run"), 0, 0
    assert plain == left_behind(tmp_path / "first" / "run")
    while kills < KILLS:
        out = tmp_path / f"killed{folders}" / "run"  # of the same name, which the encoder's card has
        kills += kill_until_done(images, out, options, events, seconds, rng)
        folders += 1
        found = left_behind(out)
        assert found.keys() == plain.keys()
        differing = [name for name in plain if plain[name] != found[name]]
        rows = [(plain[name], found[name]) for name in differing if name.endswith(".csv")]
        assert not differing, f"{differing} ({rows}) after {kills} kills in {folders} folders"
    print(f"{kills} kills in {folders} folders, {seconds:.1f} s a run")


def test_killed_between_the_last_checkpoint_and_its_table(images, tmp_path):
    """The rows are in the checkpoint, so the table is complete after the next start."""
    for name in ("plain", "cut"):
        start(images, tmp_path / name / "run", CASES["lut"], Kill())
    run = tmp_path / "cut" / "run"
    (run / "summary.txt").unlink()
    table = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(table[:-3]))
    assert start(images, run, CASES["lut"], Kill())[0] is False
    assert left_behind(run) == left_behind(tmp_path / "plain" / "run")
