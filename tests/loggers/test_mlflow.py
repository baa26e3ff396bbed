"""MLflow's local store has what a run of two starts was told, in one run."""

import json
import math
from dataclasses import replace

import pytest
from tracked import QUOTED, RESULT, SETTINGS, shade, whole_run

from patchloom.loggers.queue import TrackerSet
from patchloom.runs.folder import RunFolder


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    from mlflow import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        said, run = [], tmp_path_factory.mktemp("told") / "photos-mae"
        whole_run(["mlflow"], run, said)
        assert [line for line in said if "switched off" in line] == []
        client = MlflowClient(tracking_uri=(run / "logs" / "mlruns").as_uri())
        experiment = client.get_experiment_by_name("patchloom").experiment_id
        yield run, client, client.search_runs([experiment])


def test_one_run_that_is_finished(told):
    run, _, found = told
    assert [one.info.run_name for one in found] == ["photos-mae"]
    assert found[0].info.status == "FINISHED"
    assert json.loads((run / "logs" / "mlflow.json").read_text()) == {
        "id": found[0].info.run_id,
        "step": 8,
        "pictured": 8,
        "shown": True,
        "ended": True,
        "setbacks": 0,
    }


def test_settings_that_a_start_could_not_send_are_sent_by_the_next(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (run := tmp_path / "run").mkdir()

    def told(settings) -> str:
        said: list[str] = []
        with TrackerSet(["mlflow"], RunFolder(run), said.append) as all_of_it:
            all_of_it.start(settings, [])
        return " ".join(said)

    with monkeypatch.context() as refused:
        refused.setattr(MlflowClient, "log_batch", lambda *args, **kwargs: 1 / 0)
        assert "mlflow is switched off" in told(SETTINGS)
    # what may differ from start to start is not changed there, which MLflow would refuse
    for settings in (SETTINGS, replace(SETTINGS, workers=1)):
        assert "switched off" not in told(settings)
    note = json.loads((run / "logs" / "mlflow.json").read_text())
    found = MlflowClient(tracking_uri=(run / "logs" / "mlruns").as_uri()).get_run(note["id"])
    assert found.data.params["task.mask_ratio"] == "0.75"
    assert found.data.params["workers"] == "auto"


def test_every_row_once_at_its_step(told):
    _, client, (run,) = told

    def history(name):
        return [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]

    assert history("held_out") == [(0, 1.5), (8, 0.75)]
    assert [step for step, _ in history("epoch")] == [0, 4, 8]
    assert history("images") == [(0, 0), (4, 64), (8, 128)] and history("images.apart") == [(0, 0.9)]
    assert history("loss")[0] == (4, 1.25) and math.isnan(history("loss")[1][1])
    assert history("results.knn.raw pixels") == [(8, 0.25)]


def test_settings_pictures_and_result(told, tmp_path):
    _, client, (run,) = told
    assert run.data.params["task.mask_ratio"] == "0.75" and run.data.params["model.name"] == "nano"
    assert run.data.tags["verdict"] == RESULT.verdict and run.data.tags["mlflow.note.content"] == RESULT.summary
    names = sorted(one.path for one in client.list_artifacts(run.info.run_id, "pictures"))
    assert names == ["pictures/recovered-00000000.png", "pictures/recovered-00000008.png"]
    with open(client.download_artifacts(run.info.run_id, names[1], str(tmp_path)), "rb") as file:
        assert shade(file.read()) == 200
    with open(client.download_artifacts(run.info.run_id, "results.json", str(tmp_path))) as file:
        assert json.load(file) == QUOTED
