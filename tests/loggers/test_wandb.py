"""W&B's offline files have what a run of two starts was told, under one name."""

import math

import pytest
from tracked import RESULT, history_of, whole_by_wandb, whole_run

from patchloom.loggers.wandb import has_key


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Without a key and without a mode: offline, since nobody may be there to be asked."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_PROJECT"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(tmp_path_factory.mktemp("none") / "netrc"))
        said, run = [], tmp_path_factory.mktemp("told") / "photos-mae"
        whole_run(["wandb"], run, said)
    files = sorted((run / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    return said, files, [whole_by_wandb(file) for file in files]


def test_both_starts_are_one_run(told):
    said, files, starts = told
    assert [line for line in said if "switched off" in line] == []
    assert "offline" in said[0]
    assert len(files) == 2
    runs = [one.run for start in starts for one in start if one.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in runs}) == 1
    assert {(one.project, one.display_name) for one in runs} == {("patchloom", "photos-mae")}


def test_every_row_once(told):
    rows = [row for start in told[2] for row in history_of(start)]
    assert [row["step"] for row in rows if "epoch" in row] == [0, 4, 8]
    assert [(row["step"], row["held_out"]) for row in rows if "held_out" in row] == [(0, 1.5), (8, 0.75)]
    assert rows[0]["baseline/flat patches"] == 1.0
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] == 1.25 and math.isnan(float(losses[1]))


def test_pictures_settings_and_result(told):
    _, files, starts = told
    pictured = [row["step"] for start in starts for row in history_of(start) if "pictures/recovered" in row]
    assert pictured == [0, 8]
    assert len(list(files[1].parent.glob("files/media/images/pictures/recovered_*.png"))) == 1
    configured = [item for one in starts[0] for item in (*one.run.config.update, *one.config.update)]
    values = {item.key or item.nested_key[0]: item.value_json for item in configured}
    assert values["task.mask_ratio"] == "0.75"
    summary = {
        item.key or item.nested_key[0]: item.value_json
        for one in starts[1]
        if one.WhichOneof("record_type") == "summary"
        for item in one.summary.update
    }
    assert summary["verdict"] == f'"{RESULT.verdict}"'


def test_a_key_is_known_by_the_environment_and_by_netrc(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_IDENTITY_TOKEN_FILE", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "k" * 40)
    (tmp_path / "netrc").chmod(0o600)
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert has_key()
