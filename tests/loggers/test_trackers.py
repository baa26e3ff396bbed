"""Each tracker has the data of a run with two starts; names of trackers, and missing packages."""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from refusing import refusal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked import QUOTED, RESULT, ROWS, SETTINGS, history_of, shade, whole_by_wandb, whole_run

from patchloom.loggers import TRACKERS
from patchloom.loggers.base import Tracker
from patchloom.loggers.queue import TrackerSet
from patchloom.loggers.trackers import check_installed, has_wandb_key, parse_trackers, tracker_class
from patchloom.runs.folder import RunFolder
from patchloom.train.loop import pretrain


class Tracked(NamedTuple):
    """Data that a tracker has of a run.

    Attributes:
        runs: (project, name) of each run there.
        metrics: (step, value) of each metric by its name in ``metrics.csv``.
        pictures: (step, grey value) of the picture recovered.
        settings: settings by name.
        words: verdict, and summary where it is a text.
        scores: results by name.
    """

    runs: list[tuple[str, str]]
    metrics: dict[str, list[tuple[int, float]]]
    pictures: list[tuple[int, int]]
    settings: dict[str, str]
    words: dict[str, str]
    scores: dict[str, float]


def read_events(run) -> EventAccumulator:
    found = EventAccumulator(str(run / "logs" / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    return found.Reload()


def of_tensorboard(run) -> Tracked:
    found = read_events(run)

    def text(name):
        return found.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()

    metrics = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    pictures = [(one.step, shade(one.encoded_image_string)) for one in found.Images("pictures/recovered")]
    settings = dict(line.strip("| ").split(" | ") for line in text("settings").splitlines()[2:])
    assert "| knn | raw pixels | accuracy | 0.25 | 0.2 | 0.3 |" in text("results")
    words = {name: text(name) for name in ("verdict", "summary")}
    return Tracked(
        [("patchloom", run.name)], metrics, pictures, settings, words, {k: v[-1][1] for k, v in metrics.items()}
    )


def of_wandb(run) -> Tracked:
    files = sorted((run / "logs" / "wandb").glob("offline-run-*/*.wandb"))
    starts = [whole_by_wandb(file) for file in files]
    records = {
        kind: [getattr(one, kind) for start in starts for one in start if one.WhichOneof("record_type") == kind]
        for kind in ("run", "config", "summary")
    }
    assert len(files) == 2 and len({one.run_id for one in records["run"]}) == 1

    def values(updates) -> dict[str, Any]:
        return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in updates}

    metrics, rows = defaultdict(list), [row for start in starts for row in history_of(start)]
    for row in rows:
        for name, value in row.items():
            metrics[name].append((row["step"], value))
    files = [next(file.parent.glob("files/media/images/pictures/recovered_*.png")) for file in files]
    steps = [step for step, _ in metrics["pictures/recovered"]]
    pictures = [(step, shade(file.read_bytes())) for step, file in zip(steps, files, strict=True)]
    configured = [item for one in records["run"] for item in one.config.update]
    settings = values([*configured, *(item for one in records["config"] for item in one.update)])
    summary = values(item for one in records["summary"] for item in one.update)
    names = {(one.project, one.display_name) for one in records["run"]}
    return Tracked([*names], metrics, pictures, {k: str(v) for k, v in settings.items()}, summary, summary)


def of_mlflow(run) -> Tracked:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run / "logs" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("patchloom").experiment_id
    runs = client.search_runs([experiment])
    (one,) = runs
    assert one.info.status == "FINISHED"
    sent = {"id": one.info.run_id, "step": 8, "images_step": 8, "result_step": 8}
    assert json.loads((run / "logs" / "mlflow.json").read_text()) == sent

    def content(name: str) -> bytes:
        with open(client.download_artifacts(one.info.run_id, name), "rb") as file:
            return file.read()

    metrics = {
        name.replace("results.knn.", "results/knn/").replace("baseline.", "baseline/").replace("s.a", "s/a"): [
            (point.step, point.value) for point in client.get_metric_history(one.info.run_id, name)
        ]
        for name in one.data.metrics
    }
    names = sorted(file.path for file in client.list_artifacts(one.info.run_id, "pictures"))
    pictures = [(int(name[-12:-4]), shade(content(name))) for name in names]
    assert json.loads(content("results.json")) == [one.plain() for one in QUOTED]
    words = {"verdict": one.data.tags["verdict"], "summary": one.data.tags["mlflow.note.content"]}
    scores = {name: points[-1][1] for name, points in metrics.items()}
    return Tracked([("patchloom", one.info.run_name)], metrics, pictures, one.data.params, words, scores)


class FakeTrackio:
    """Stand-in for the package trackio, which holds Pillow below the version of others."""

    begun: list[tuple[str, str, str]] = []
    calls: list[tuple[int, dict[str, Any]]] = []
    config: dict[str, str] = {}

    @classmethod
    def init(cls, project, name, resume, **options):
        cls.begun.append((project, name, resume))
        return cls

    @classmethod
    def log(cls, values, step):
        cls.calls.append((step, values))

    finish = staticmethod(lambda: None)
    Image = staticmethod(lambda picture: picture)


def of_trackio(run) -> Tracked:
    assert len(FakeTrackio.begun) == 2 and len({*FakeTrackio.begun}) == 1
    project, name, resume = FakeTrackio.begun[0]
    assert resume == "allow"
    metrics = defaultdict(list)
    for step, values in FakeTrackio.calls:
        for key, value in values.items():
            metrics[key].append((step, value))
    pictures = [(step, picture.getpixel((0, 0))[0]) for step, picture in metrics["pictures/recovered"]]
    last = FakeTrackio.calls[-1][1]
    return Tracked([(project, name[:-7])], metrics, pictures, FakeTrackio.config, last, last)


READERS: dict[str, Callable[[Any], Tracked]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}
ENVIRONMENT = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_PROJECT", "TRACKIO_PROJECT")


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """No account and no server: W&B is offline, since a prompt might remain unanswered."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*ENVIRONMENT, "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(tmp_path_factory.mktemp("none") / "netrc"))
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setitem(sys.modules, "trackio", FakeTrackio)
        yield


@pytest.fixture(scope="module", params=TRACKERS)
def tracked(request, offline, tmp_path_factory) -> Tracked:
    said, run = [], tmp_path_factory.mktemp(request.param) / "photos-mae"
    whole_run([request.param], run, said)
    assert [line for line in said if "switched off" in line] == []
    return READERS[request.param](run)


def test_a_tracker_has_one_run_with_every_row_once(tracked):
    assert tracked.runs == [("patchloom", "photos-mae")]
    metrics = tracked.metrics
    assert metrics["held_out"] == [(0, 1.5), (8, 0.75)] and metrics["baseline/flat patches"] == [(0, 1.0)]
    assert [step for step, _ in metrics["epoch"]] == [0, 4, 8]
    assert metrics["images"] == [(0, 0), (4, 64), (8, 128)] and metrics["images/apart"] == [(0, pytest.approx(0.9))]
    (first, second) = metrics["loss"]
    assert first == (4, 1.25) and second[0] == 8 and math.isnan(float(second[1])) and "knn" not in metrics


def test_a_tracker_has_pictures_settings_and_the_result(tracked):
    assert tracked.pictures == [(0, 10), (8, 200)]
    assert tracked.settings["task.mask_ratio"] == "0.75" and tracked.settings["model.depth"] == "2"
    assert (tracked.words["verdict"], tracked.words["summary"]) == (RESULT.verdict, RESULT.summary)
    assert tracked.scores["results/knn/trained"] == 0.5 and tracked.scores["results/knn/raw pixels"] == 0.25


@pytest.mark.parametrize("noted", [4, 0, -1, None])
def test_tensorboard_has_unrecorded_rows_once_after_a_kill(tmp_path, noted):
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


def test_mlflow_gets_settings_that_an_earlier_start_could_not_send(offline, tmp_path):
    from mlflow import MlflowClient

    (run := tmp_path / "run").mkdir()

    def start(settings) -> str:
        said: list[str] = []
        with TrackerSet(["mlflow"], RunFolder(run), said.append) as all_of_it:
            all_of_it.start(settings, [])
        return " ".join(said)

    with pytest.MonkeyPatch.context() as refused:
        refused.setattr(MlflowClient, "log_batch", lambda *args, **kwargs: 1 / 0)
        assert "mlflow is switched off" in start(SETTINGS)
    # settings that differ between starts are not changed there: MLflow would refuse
    for settings in (SETTINGS, replace(SETTINGS, workers=1)):
        assert "switched off" not in start(settings)
    note = json.loads((run / "logs" / "mlflow.json").read_text())
    params = MlflowClient(tracking_uri=(run / "logs" / "mlruns").as_uri()).get_run(note["id"]).data.params
    assert (params["task.mask_ratio"], params["workers"]) == ("0.75", "0")  # as it was first


def test_wandb_key_is_found_in_the_environment_and_by_netrc(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "k" * 40)
    (tmp_path / "netrc").chmod(0o600)
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert has_wandb_key()


def test_names_are_read_from_a_text_or_a_list():
    for log in ("tensorboard, mlflow,tensorboard", ["tensorboard", "mlflow"]):
        assert parse_trackers(log) == ["tensorboard", "mlflow"]
    assert parse_trackers(None) == parse_trackers("") == []
    assert all(issubclass(tracker_class(name), Tracker) for name in TRACKERS)


def test_unknown_and_missing_trackers_are_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for log, said in (
        ("tensorbord", "did you mean tensorboard?"),
        ("mlflow,comet", "no tracker called comet: there are tensorboard, wandb, mlflow and trackio"),
        ("wandb,tensorboard", "wandb and tensorboard are not installed: pip install 'tensorboard>=2.14' 'wandb>="),
    ):
        assert said in refusal(pretrain, "shapes:100", log=log, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_tracker_left_is_not_a_package(tmp_path, monkeypatch):
    """Offline runs leave a folder wandb/, which Python would import as an empty package."""
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    assert "trackio is not installed" in refusal(check_installed, ["trackio"])
