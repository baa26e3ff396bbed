"""The attentive probe at the end of a run: by its counted work beside that of the run."""

from pathlib import Path

import pytest

import patchloom
from patchloom.results import store
from patchloom.train import final_evaluation

pytestmark = pytest.mark.usefixtures("quick_probe")
SMALL = {"model": {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2}, "batch_size": 64, "workers": 0}
SMALL |= {"epochs": 1, "patch_size": 2, "threads": 1, "precision": "float32", "compile": False, "device": "cpu"}


def trained(out: Path, **options: object) -> tuple[str, set[str]]:
    run = patchloom.pretrain("digits", "mae", out=out, **{**SMALL, **options})
    return (run.folder / "log.txt").read_text(), {one.protocol for one in store.load(run.folder)}


def test_a_short_run_leaves_the_attentive_probe_out_and_says_so(tmp_path: Path) -> None:
    log, protocols = trained(tmp_path / "run")
    assert "No attentive probe: its work is " in log and f"evaluate attentive {tmp_path / 'run'} DATA" in log
    assert protocols == {"knn", "linear"}


def test_a_run_with_enough_work_ends_with_the_attentive_probe_and_its_controls(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(final_evaluation, "_ATTENTIVE_SHARE", 1e9)
    log, protocols = trained(tmp_path / "run")
    assert "Attentive probe (small): " in log and "No attentive probe" not in log
    assert protocols == {"knn", "linear", "attentive"}
    quoted = {one.encoder for one in store.load(tmp_path / "run") if one.protocol == "attentive" and one.quoted}
    assert {"run", "untrained"} <= quoted


def test_a_swin_and_tokens_without_room_are_left_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("patchloom.evaluate.protocols.attentive.free_memory", lambda device: 0.0)
    log, protocols = trained(tmp_path / "run")
    assert "GiB of memory, and 0.0 are free" in log and protocols == {"knn", "linear"}
