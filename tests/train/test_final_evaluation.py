"""The attentive probe at the end of a run: by its counted work beside that of the run."""

from pathlib import Path

import pytest
from killing import SMALL

import patchloom
from patchloom.results import store
from patchloom.train import final_evaluation

pytestmark = pytest.mark.usefixtures("quick_probe")


def ended(run: Path) -> tuple[str, set[str]]:
    return (run / "log.txt").read_text(), {one.protocol for one in store.load(run)}


@pytest.fixture
def trained(images, tmp_path):
    return lambda: patchloom.pretrain(images, "mae", out=tmp_path / "run", **SMALL | {"epochs": 1}).folder


def test_a_short_run_leaves_the_attentive_probe_out_and_says_so(small_run) -> None:
    log, protocols = ended(run := small_run("mae"))
    assert "No attentive probe: its work is " in log and f"evaluate attentive {run} DATA" in log
    assert protocols == {"knn", "linear"}


def test_a_run_with_enough_work_ends_with_the_attentive_probe_and_its_controls(trained, monkeypatch) -> None:
    monkeypatch.setattr(final_evaluation, "_ATTENTIVE_SHARE", 1e9)
    log, protocols = ended(run := trained())
    assert "Attentive probe (small): " in log and "No attentive probe" not in log
    assert protocols == {"knn", "linear", "attentive"}
    quoted = {one.encoder for one in store.load(run) if one.protocol == "attentive" and one.quoted}
    assert {"run", "untrained"} <= quoted


def test_tokens_without_room_are_left_out(trained, monkeypatch) -> None:
    monkeypatch.setattr("patchloom.evaluate.protocols.attentive.free_memory", lambda device: 0.0)
    log, protocols = ended(trained())
    assert "GiB of memory, and 0.0 are free" in log and protocols == {"knn", "linear"}
