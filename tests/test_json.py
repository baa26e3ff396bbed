"""Tests of --json: one document on standard output, valid by docs/reference/json.schema.json, with Python's values."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from dense_models import DETECTOR, SEGMENTER, a_model
from forked import SUBPROCESS
from labelled import two_tones

import patchloom
from patchloom import cli
from patchloom.compare import runner
from patchloom.dense.checkpoint import save_dense
from patchloom.display import json_value
from patchloom.errors import AlreadyReported, Stopped
from patchloom.options.parse import VERBS
from patchloom.train.step import Stepper

pytestmark = pytest.mark.usefixtures("quick_probe")

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "reference" / "json.schema.json").read_text("utf-8"))
MODEL = ["--model", "nano", "--model.embed_dim", "32", "--model.depth", "1"]
SMALL = [*MODEL, "--task", "mae", "--epochs", "1", "--batch_size", "16"]
TINY = ["--img_size", "16", "--patch_size", "8", "--batch_size", "16", "--threads", "1", "--workers", "0"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return two_tones(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert cli.main(["pretrain", str(photos), "--out", str(out), *SMALL]) == 0
    return out


@pytest.fixture
def document(capsys):
    """A function that runs a command with --json, and returns its document, valid by the schema."""

    def ask(*words: object, code: int = 0) -> dict:
        capsys.readouterr()
        assert cli.main([*map(str, words), "--json"]) == code
        found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        jsonschema.validate(found, SCHEMA)
        assert ("error" in found) == (code != 0) and found["version"] == patchloom.__version__
        return found

    return ask


def test_the_schema_is_one_and_knows_every_verb():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert {one["if"]["properties"]["verb"]["const"] for one in SCHEMA["allOf"][:-1]} == {*VERBS, "version"}


def test_check(document, photos):
    found = document("check", photos, "--estimate", "false")["result"]
    train = found["splits"]["train"]
    assert (train["n"], train["read"], train["classes"]) == (25, 24, {"dark": 12, "light": 13})
    assert [one["file"] for one in train["unreadable"]] == [str(photos / "light" / "broken.jpg")]
    assert (train["height"]["most"], train["width"]["median"], train["channels"]) == (20, 26, {"3": 24})
    assert found["proposal"]["command"].startswith("patchloom pretrain") and found["proposal"]["estimate"] is None
    assert found == json_value(patchloom.check(photos, estimate=False).plain()), "Python has the same"


def test_check_estimates(document):
    words = ["check", "shapes:64", "--batch_size", "8", "--epochs", "3", "--task", "mae", "--img_size", "16"]
    estimate = document(*words)["result"]["proposal"]["estimate"]
    assert estimate["steps"] == 18 and estimate["how"] == "measured" and 0 < estimate["memory_bytes"] < 2**33


def test_check_of_recordings(document, record, tmp_path):
    for i in range(4):
        record(f"sounds/{i}.wav", seconds=0.1 * (i + 1))
    found = document("check", tmp_path / "sounds", "--estimate", "false")["result"]
    train = found["splits"]["train"]
    assert found["noun"] == "recordings" and train["formats"] is None and train["seconds"]["most"] == pytest.approx(0.4)
    assert [one["hz"] for one in train["sounds"]] == [16_000]


def test_pretrain(document, photos, run, tmp_path, capsys):
    dry = document("pretrain", photos, "--out", tmp_path / "new", *SMALL, "--dry-run")["result"]
    assert not dry["finished"] and dry["planned"]["forecast"]["steps"] == 1 and not (tmp_path / "new").exists()
    assert dry["planned"]["settings"]["batch_size"] == 16 and "img_size" in dry["planned"]["reasons"]
    assert cli.main(["pretrain", str(photos), "--out", str(tmp_path / "new"), *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    done = json.loads(out)
    jsonschema.validate(done, SCHEMA)
    assert "everything goes to" in err, "progress is told on standard error"
    again = document("pretrain", photos, "--out", tmp_path / "new", *SMALL)
    assert again["result"]["finished"] and again == done, "a finished run gives the same"
    assert done["result"]["metrics"]["epoch"] == 1 and Path(done["result"]["encoder"]).exists()
    assert done["result"]["verdict"]["ended"] and done["result"]["settings"]["task"]["name"] == "mae"


def test_a_stopped_pretrain_says_where(document, photos, tmp_path, monkeypatch):
    words = ["pretrain", photos, "--out", tmp_path / "run", *MODEL, "--task", "mae", "--epochs", "3"]
    words += ["--batch_size", "16"]
    update = Stepper.update

    def stopping(self, done, *rest):
        os.kill(os.getpid(), signal.SIGTERM)
        return update(self, done, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "update", stopping)
        error = document(*words, code=130)["error"]
    assert error["run"] == {"folder": str(tmp_path / "run"), "finished": False, "step": 2, "steps": 3}
    dry = document(*words, "--dry-run")["result"]
    assert (dry["finished"], dry["step"], dry["planned"]["forecast"]["steps"]) == (False, 2, 1)


def test_evaluate(document, photos, run):
    found = document("evaluate", "knn", run, photos, "--seeds", "2")["result"]
    quoted = [one for one in found["results"] if one["quoted"]]
    assert {"run", "untrained"} <= {one["encoder"] for one in quoted} and all(one["n"] > 0 for one in quoted)
    assert all(0 <= one["low"] <= one["value"] <= one["high"] <= 1 for one in quoted if one["unit"] == "%")
    assert quoted[0]["against"] and all(one["trainings"] == 2 for one in quoted[0]["against"])
    assert {one["seed"] for other in found["other_seeds"] for one in other["results"]} == {0} != {quoted[0]["seed"]}


def test_results(document, run, tmp_path):
    found = document("results", run, "--all", "--to", tmp_path / "table.csv")["result"]
    assert found["file"] == str(tmp_path / "table.csv") and {"run", "untrained"} <= {
        row["encoder"] for row in found["rows"]
    }


@pytest.mark.slow
def test_compare(document, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "subprocess", SUBPROCESS)
    words = ["compare", photos, "--tasks", "mae,mp3", "--samples", "48", "--seeds", "1", *TINY, "--out", tmp_path / "c"]
    dry = document(*words, "--dry_run")["result"]
    assert [one["task"] for one in dry["planned"]["tasks"]] == ["mae", "mp3"] and dry["planned"]["seconds"] > 0
    assert dry["winner"] is None and not dry["results"] and not dry["files"]
    done = document(*words)["result"]
    assert {one["encoder"] for one in done["results"]} == {"mae", "mp3", "untrained", "raw pixels", "best constant"}
    assert all(0 <= one["low"] <= one["value"] <= one["high"] <= 1 for one in done["results"])
    assert sorted(done["order"]) == ["mae", "mp3"] and all(Path(file).exists() for file in done["files"])
    runs = document("compare", tmp_path / "c" / "mae-seed0", tmp_path / "c" / "mp3-seed0")["result"]
    assert [one["control"] for one in runs["results"][1]["against"]] == ["mae-seed0"] and runs["folder"] is None


def test_embed(document, photos, run, tmp_path):
    near = photos / "dark" / "1.jpg"
    found = document("embed", run, photos, "--to", tmp_path / "v.npz", "--near", near, "--top", "2")["result"]
    assert found["made"] and found["bytes"] == (tmp_path / "v.npz").stat().st_size and found["card"]["rows"] == 24
    assert [(one["rank"], one["itself"]) for one in found["neighbours"]] == [(0, True), (1, False), (2, False)]
    assert not document("embed", run, photos, "--to", tmp_path / "v.npz")["result"]["made"]


@pytest.mark.parametrize(("kind", "size", "about"), [("segment", 32, SEGMENTER), ("detect", 64, DETECTOR)])
def test_predict(document, photos, tmp_path, kind, size, about):
    save_dense(*a_model(kind, (size, size), **about), tmp_path / "model.safetensors")
    words = ["predict", tmp_path / "model.safetensors", photos, "--out", tmp_path / "out", "--pictures", "1"]
    found = document(*words, "--score", "0")["result"]
    assert (found["kind"], found["images"], found["pictures"]) == (kind, 24, 1) and Path(found["written"]).exists()
    assert kind == "detect" or sum(found["counts"].values()) == 24 * 20 * 26


def test_look_and_report(document, photos, run, small_run, tmp_path):
    files = document("look", run, photos, "--images", "2", "--out", tmp_path)["result"]["files"]
    files += document("report", run, "--out", tmp_path / "report.html")["result"]["files"]
    curves = document("look", "curves", run, small_run("droppos"), "--out", tmp_path)
    assert curves["verb"] == "look"
    files += curves["result"]["files"]
    assert len(files) >= 3 and all(Path(file).exists() for file in files)


def test_export(document, run, photos, tmp_path):
    found = document("export", run, "--data", photos, "--out", tmp_path / "e.safetensors")["result"]
    assert found["weights"] == str(tmp_path / "e.safetensors") and 0 <= found["difference"] < 1e-3
    assert "import timm" in found["snippet"] and found["compared"] > 0


def test_bench(document, monkeypatch):
    monkeypatch.setattr("patchloom.bench.product_rate", lambda device, dtype: 1e11)
    words = ["bench", "shapes:64", "--tasks", "mae", "--rounds", "2", "--batch_size", "8", "--model", "nano"]
    (one,) = document(*words, "--img_size", "16")["result"]["tasks"]
    assert (one["task"], one["images_per_step"], len(one["seconds"])) == ("mae", 8, 2)
    assert 2**24 < one["memory_bytes"] < 2**30  # weights, gradients, moments and activations of a nano encoder
    assert one["images_per_second"] == pytest.approx(8 / np.median(one["seconds"]))


def test_what_needs_no_torch(document):
    assert {one["task"] for one in document("tasks")["result"]["tasks"]} == {*patchloom.TASKS}
    (one,) = document("recipes", "mae-vit-b")["result"]["recipes"]
    assert one["settings"]["task"]["name"] == "mae" and len(document("recipes")["result"]["recipes"]) > 1
    for words in ("--version", "-V", "version"):
        assert document(words)["result"]["version"] == patchloom.__version__


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (patchloom.PatchloomError("no"), 2),
        (AlreadyReported("another process said it"), 2),
        (AlreadyReported("another process said it", 75), 75),
        (Stopped("stopped, and a checkpoint was written"), 130),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("by 0"), 1),
        (OSError(28, "No space left on device", "a"), 75),
        (OSError(13, "Permission denied", "a"), 2),
        (patchloom.TemporaryError("later"), 75),
        (MemoryError(), 2),
    ],
    ids=lambda one: type(one).__name__,
)
def test_exit_codes_and_errors(document, monkeypatch, capsys, problem, code):
    import torch  # noqa: F401  of which lacking memory is asked

    def verb(words):
        print("on the way")
        raise problem

    monkeypatch.setattr(cli, "run_verb", lambda name, words: verb(words))
    assert document("check", "photos", code=code)["error"]["exit_code"] == code
    assert cli.main(["check", "photos"]) == code
    told = capsys.readouterr()
    assert told.out == "on the way\n" and told.err.count("patchloom: ") == (not isinstance(problem, AlreadyReported))


def test_a_refusal(document, capsys):
    assert "nowhere/photos does not exist" in document("check", "nowhere/photos", code=2)["error"]["message"]
    assert document("trian", code=2)["verb"] == "trian"
    assert cli.main(["check", "photos", "--json=true"]) == 2
    capsys.readouterr()
    with pytest.raises(patchloom.PatchloomError):  # the traceback comes beside the document
        cli.main(["check", "nowhere/photos", "--json", "--debug"])
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 1  # as Python ends after a traceback


def test_only_the_first_process_prints_json(monkeypatch, capsys):
    for name, said in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", name)
        assert cli.main(["tasks", "--json"]) == 0 and bool(capsys.readouterr().out) == said
        assert cli.main(["recipes", "none", "--json"]) == 2 and bool(capsys.readouterr().out) == said


@pytest.mark.slow
def test_two_processes_print_one_document(photos, tmp_path):
    words = [sys.executable, "-m", "patchloom", "pretrain", str(photos), "--out", str(tmp_path / "run"), *SMALL]
    words += ["--devices", "2", "--device", "cpu", "--threads", "1", "--workers", "0", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    jsonschema.validate(found, SCHEMA)
    assert found["result"]["finished"] and "2 processes (ddp)" in done.stderr


def test_values_that_json_lacks():
    values = {"a": float("nan"), 1: [float("inf"), True, None], "path": Path("x"), "n": np.float32(0.5), "t": (1, "b")}
    assert json_value(values) == {"a": None, "1": [None, True, None], "path": "x", "n": 0.5, "t": [1, "b"]}
