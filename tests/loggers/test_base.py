"""The record of data sent to a tracker, and the result that is sent at the end."""

import json

import pytest
from tracked import RESULT

from patchloom.claims import Effect, MeasureResult
from patchloom.errors import PatchloomError
from patchloom.loggers.base import SentRecord
from patchloom.runs.verdict import Health, Rule, Verdict


def test_there_is_no_record_before_the_first_start(tmp_path):
    assert SentRecord.read(tmp_path / "none.json") == SentRecord("", -1, -1, -1)


def test_the_record_of_another_version_keeps_the_run_and_its_step(tmp_path):
    (tmp_path / "wandb.json").write_text(json.dumps({"id": "a1", "step": 8, "pictured": 8, "ended": True, "new": {}}))
    assert SentRecord.read(tmp_path / "wandb.json") == SentRecord("a1", 8)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": null}', '{"step": "x"}'])
def test_a_damaged_record_is_refused(text, tmp_path):
    (tmp_path / "wandb.json").write_text(text)
    with pytest.raises(PatchloomError, match=r"wandb.json is damaged: delete it"):
        SentRecord.read(tmp_path / "wandb.json")


def test_quoted_results_are_metrics():
    assert RESULT.scores() == {"results/knn/trained": 0.5, "results/knn/raw pixels": 0.25} and not RESULT.tags()


def test_the_verdict_and_its_measure_are_values():
    effects = {"chance": Effect(0.5, 0.4, 0.6, 50)}
    measure = MeasureResult("accuracy", 0.6, 0.5, 0.7, {"chance": 0.2}, effects, "chance", ("chance",), True)
    health = Health(Verdict.WEAK, 2.0, True, Rule.NOT_CLEAR, measure, {}, {"epochs": 40})
    result = RESULT._replace(health=health.plain())
    shares = {"results/share": 0.5, "results/share/low": 0.4, "results/share/high": 0.6}
    assert result.scores() == RESULT.scores() | {"results/held_out": 0.6, **shares}
    assert result.tags() == {"verdict_value": "learning but weak", "verdict_rule": "not_clear"}
