"""Each tracker has the data of a run with two starts; names of trackers, and missing packages."""

import json
import math
import sqlite3
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked import QUOTED, RESULT, ROWS, SETTINGS, history_of, shade, whole_by_wandb, whole_run

from patchloom.errors import PatchloomError
from patchloom.loggers import TRACKERS
from patchloom.loggers.base import Tracker
from patchloom.loggers.queue import TrackerSet
from patchloom.loggers.trackers import check_installed, has_wandb_key, parse_trackers, tracker_class
from patchloom.runs.folder import RunFolder
from patchloom.train.loop import pretrain


def read_events(run) -> EventAccumulator:
    found = EventAccumulator(str(run / "logs" / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    return found.Reload()


@pytest.fixture(scope="module")
def tensorboard_run(tmp_path_factory):
    said, run = [], tmp_path_factory.mktemp("tensorboard_run") / "run"
    whole_run(["tensorboard"], run, said)
    return run, said, read_events(run)


def test_tensorboard_has_every_row_once(tensorboard_run):
    _, said, found = tensorboard_run
    assert [line for line in said if "switched off" in line] == []
    assert [(one.step, one.value) for one in found.Scalars("held_out")] == [(0, 1.5), (8, 0.75)]
    assert [one.step for one in found.Scalars("epoch")] == [0, 4, 8]
    assert [(one.step, one.value) for one in found.Scalars("baseline/flat patches")] == [(0, 1.0)]
    losses = found.Scalars("loss")
    assert (losses[0].step, losses[0].value) == (4, 1.25) and losses[1].step == 8 and math.isnan(losses[1].value)
    assert "knn" not in found.Tags()["scalars"] and "step" not in found.Tags()["scalars"]


def test_tensorboard_has_pictures_as_they_were_at_each_step(tensorboard_run):
    found = tensorboard_run[2].Images("pictures/recovered")
    assert [(one.step, shade(one.encoded_image_string)) for one in found] == [(0, 10), (8, 200)]


def test_tensorboard_has_settings_and_result(tensorboard_run):
    found = tensorboard_run[2]

    def text(name):
        return found.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()

    assert "| task.mask_ratio | 0.75 |" in text("settings") and "| model.depth | 2 |" in text("settings")
    assert text("verdict") == RESULT.verdict and text("summary") == RESULT.summary
    assert "| knn | raw pixels | 0.25 | 0.2 | 0.3 |" in text("results")
    assert found.Scalars("results/knn/trained")[0].value == 0.5


@pytest.mark.parametrize("noted", [4, 0, -1, None])
def test_tensorboard_has_unrecorded_rows_once_after_a_kill(tensorboard_run, tmp_path, noted):
    """A kill after a row was written and before that was recorded causes the row to be written again."""
    run = tmp_path / "run"
    whole_run(["tensorboard"], run, [])
    note = run / "logs" / "tensorboard.json"
    note.write_text(
        note.read_text().replace('"step": 8', f'"step": {noted}').replace('"ended": true', '"ended": false')
    )
    if noted is None:  # killed at the first row
        note.unlink()
    again = TrackerSet(["tensorboard"], RunFolder(run), print)
    again.start(SETTINGS, ROWS)
    again.close("success")
    assert [one.step for one in read_events(run).Scalars("epoch")] == [0, 4, 8]


def test_tensorboard_replaces_rows_after_a_setback(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with TrackerSet(["tensorboard"], RunFolder(run), print) as tracks:
        tracks.start(SETTINGS, ROWS[:2])
        tracks.log_row({"step": "6", "loss": "9"})
        tracks.rewind(4)
        tracks.log_row({"step": "6", "loss": "1"})
    assert [(one.step, one.value) for one in read_events(run).Scalars("loss")] == [(4, 1.25), (6, 1.0)]


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory):
    """Run without a key and without a mode: offline, since a prompt might remain unanswered."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_PROJECT"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(tmp_path_factory.mktemp("none") / "netrc"))
        said, run = [], tmp_path_factory.mktemp("wandb_run") / "photos-mae"
        whole_run(["wandb"], run, said)
    files = sorted((run / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    return said, files, [whole_by_wandb(file) for file in files]


def test_wandb_has_one_run_of_both_starts(wandb_run):
    said, files, starts = wandb_run
    assert [line for line in said if "switched off" in line] == []
    assert "offline" in said[0]
    assert len(files) == 2
    runs = [one.run for start in starts for one in start if one.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in runs}) == 1
    assert {(one.project, one.display_name) for one in runs} == {("patchloom", "photos-mae")}


def test_wandb_has_every_row_once(wandb_run):
    rows = [row for start in wandb_run[2] for row in history_of(start)]
    assert [row["step"] for row in rows if "epoch" in row] == [0, 4, 8]
    assert [(row["step"], row["held_out"]) for row in rows if "held_out" in row] == [(0, 1.5), (8, 0.75)]
    assert rows[0]["baseline/flat patches"] == 1.0
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] == 1.25 and math.isnan(float(losses[1]))


def test_wandb_has_pictures_settings_and_result(wandb_run):
    _, files, starts = wandb_run
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


def test_wandb_key_is_found_in_the_environment_and_by_netrc(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_IDENTITY_TOKEN_FILE", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "k" * 40)
    (tmp_path / "netrc").chmod(0o600)
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert has_wandb_key()


@pytest.fixture(scope="module")
def mlflow_run(tmp_path_factory):
    from mlflow import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        said, run = [], tmp_path_factory.mktemp("mlflow_run") / "photos-mae"
        whole_run(["mlflow"], run, said)
        assert [line for line in said if "switched off" in line] == []
        client = MlflowClient(tracking_uri=(run / "logs" / "mlruns").as_uri())
        experiment = client.get_experiment_by_name("patchloom").experiment_id
        yield run, client, client.search_runs([experiment])


def test_mlflow_has_one_finished_run(mlflow_run):
    run, _, found = mlflow_run
    assert [one.info.run_name for one in found] == ["photos-mae"]
    assert found[0].info.status == "FINISHED"
    assert json.loads((run / "logs" / "mlflow.json").read_text()) == {
        "id": found[0].info.run_id,
        "step": 8,
        "images_step": 8,
        "result_step": 8,
    }


def test_mlflow_gets_settings_that_an_earlier_start_could_not_send(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (run := tmp_path / "run").mkdir()

    def start(settings) -> str:
        said: list[str] = []
        with TrackerSet(["mlflow"], RunFolder(run), said.append) as all_of_it:
            all_of_it.start(settings, [])
        return " ".join(said)

    with monkeypatch.context() as refused:
        refused.setattr(MlflowClient, "log_batch", lambda *args, **kwargs: 1 / 0)
        assert "mlflow is switched off" in start(SETTINGS)
    # settings that differ between starts are not changed there: MLflow would refuse
    for settings in (SETTINGS, replace(SETTINGS, workers=1)):
        assert "switched off" not in start(settings)
    note = json.loads((run / "logs" / "mlflow.json").read_text())
    found = MlflowClient(tracking_uri=(run / "logs" / "mlruns").as_uri()).get_run(note["id"])
    assert found.data.params["task.mask_ratio"] == "0.75"
    assert found.data.params["workers"] == "0"  # as it was first


def test_mlflow_has_every_row_once(mlflow_run):
    _, client, (run,) = mlflow_run

    def history(name):
        return [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]

    assert history("held_out") == [(0, 1.5), (8, 0.75)]
    assert [step for step, _ in history("epoch")] == [0, 4, 8]
    assert history("images") == [(0, 0), (4, 64), (8, 128)] and history("images.apart") == [(0, 0.9)]
    assert history("loss")[0] == (4, 1.25) and math.isnan(history("loss")[1][1])
    assert history("results.knn.raw pixels") == [(8, 0.25)]


def test_mlflow_has_settings_pictures_and_result(mlflow_run, tmp_path):
    _, client, (run,) = mlflow_run
    assert run.data.params["task.mask_ratio"] == "0.75" and run.data.params["model.name"] == "nano"
    assert run.data.tags["verdict"] == RESULT.verdict and run.data.tags["mlflow.note.content"] == RESULT.summary
    names = sorted(one.path for one in client.list_artifacts(run.info.run_id, "pictures"))
    assert names == ["pictures/recovered-00000000.png", "pictures/recovered-00000008.png"]
    with open(client.download_artifacts(run.info.run_id, names[1], str(tmp_path)), "rb") as file:
        assert shade(file.read()) == 200
    with open(client.download_artifacts(run.info.run_id, "results.json", str(tmp_path))) as file:
        assert json.load(file) == QUOTED


def test_trackio_calls(tmp_path, monkeypatch):
    begun, calls = [], []

    def init(project, name, **options):
        begun.append((project, name, options["resume"]))
        log = lambda values, step: calls.append((step, values))  # noqa: E731
        return SimpleNamespace(config={}, log=log, finish=lambda: calls.append("finish"))

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, Image=lambda picture: picture))
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    said = []
    whole_run(["trackio"], tmp_path / "photos-mae", said)
    assert [line for line in said if "switched off" in line] == []
    assert len(begun) == 2 and begun[0] == begun[1] and begun[0][::2] == ("patchloom", "allow")
    assert begun[0][1].startswith("photos-mae-")
    assert [one[0] for one in calls if one != "finish"] == [0, 0, 4, 8, 8, 8]
    assert calls[0][1]["baseline/flat patches"] == 1.0 and calls[1][1]["pictures/recovered"].getpixel((0, 0))[0] == 10
    assert calls[-2][1]["verdict"] == RESULT.verdict and calls[-2][1]["results/knn/trained"] == 0.5


def test_trackio_database(tmp_path_factory, monkeypatch):
    """trackio's module reads the location of its database when it is imported."""
    home = tmp_path_factory.mktemp("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(home))
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    pytest.importorskip("trackio", exc_type=ImportError)
    said = []
    whole_run(["trackio"], home / "runs" / "photos-mae", said)
    assert [line for line in said if "switched off" in line] == []
    with sqlite3.connect(home / "patchloom.db") as store:
        rows = [
            (name, step, json.loads(values))
            for name, step, values in store.execute("select run_name, step, metrics from metrics order by id")
        ]
        (config,) = store.execute("select config from configs").fetchone()
    assert len({name for name, *_ in rows}) == 1
    assert [step for _, step, values in rows if "epoch" in values] == [0, 4, 8]
    assert [(step, values["held_out"]) for _, step, values in rows if "held_out" in values] == [(0, 1.5), (8, 0.75)]
    assert [step for _, step, values in rows if "pictures/recovered" in values] == [0, 8]
    assert rows[-1][2]["verdict"] == RESULT.verdict
    assert json.loads(config)["task.mask_ratio"] == "0.75"


@pytest.mark.parametrize("log", ["tensorboard, mlflow,tensorboard", ["tensorboard", "mlflow"]])
def test_names_are_read_from_a_text_or_a_list(log):
    assert parse_trackers(log) == ["tensorboard", "mlflow"]


def test_no_trackers():
    assert parse_trackers(None) == parse_trackers("") == []


def test_every_name_has_its_class():
    assert all(issubclass(tracker_class(name), Tracker) for name in TRACKERS)


@pytest.mark.parametrize(
    "log, sentence",
    [
        ("tensorbord", r"no tracker called tensorbord; did you mean tensorboard\?"),
        ("mlflow,comet", "no tracker called comet: there are tensorboard, wandb, mlflow and trackio"),
    ],
)
def test_another_name_is_refused_before_anything_is_made(log, sentence, tmp_path):
    with pytest.raises(PatchloomError, match=sentence):
        pretrain("shapes:100", log=log, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(PatchloomError) as refused:
        pretrain("shapes:100", log="wandb,tensorboard", out=tmp_path / "run")
    assert str(refused.value) == (
        "wandb and tensorboard are not installed: pip install 'tensorboard>=2.14' 'wandb>=0.16', or give another --log"
    )
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_tracker_left_is_not_a_package(tmp_path, monkeypatch):
    """Offline runs leave a folder wandb/, which Python would import as an empty package."""
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(PatchloomError, match="trackio is not installed"):
        check_installed(["trackio"])
