"""Time and updates that runs took."""

import pytest

from patchloom import PatchloomError
from patchloom.compare.runner import Job, Length
from patchloom.compare.timing import TrainedRun, note_unequal, read_trained, training_table


def test_a_run_that_misses_the_time_by_more_than_5_per_cent_is_named():
    fits, late = TrainedRun("mae", 0, 62.9, 200, 3200), TrainedRun("mae:blr=1e-3", 1, 63.1, 210, 3360)
    assert not note_unequal([fits], 1.0) and not note_unequal([fits, late], None)
    (said,) = note_unequal([fits, late, late._replace(seconds=56.9)], 1.0)
    assert "mae:blr=1e-3, seed 1 (63.1 s of training, 210 updates) and" in said and "56.9 s" in said and "60 s" in said
    assert "mae, seed 0" not in said
    assert training_table([fits])[1].rows == (("mae", "0", "62.9 s", "200", "3,200"),)


def test_steps_and_seconds_are_those_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("patchloom.compare.timing.RunFolder.read_config", lambda _: type("", (), {"accumulate": 4}))
    job = Job("mae", 2, tmp_path, [], Length(8, None, 60.0))
    (tmp_path / "metrics.csv").write_text("step,epoch,images,seconds\n1,0.5,8,1\n10,5,80,30.5\n")
    assert read_trained(job) == TrainedRun("mae", 2, 30.5, 3, 80)
    for text in ("step,epoch\n1,2\n", "step,epoch,images,seconds\n1,1,8,\n", "step,epoch,images,seconds\n1,1,8,-1\n"):
        (tmp_path / "metrics.csv").write_text(text)
        with pytest.raises(PatchloomError, match="restore it"):
            read_trained(job)
