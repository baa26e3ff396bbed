"""Which trackers there are, and what is said where one cannot be had."""

import sys

import pytest

from patchloom.errors import PatchloomError
from patchloom.loggers import TRACKERS
from patchloom.loggers.base import Tracker
from patchloom.loggers.registry import check_installed, parse_trackers, tracker_class
from patchloom.train.loop import pretrain


@pytest.mark.parametrize("log", ["tensorboard, mlflow,tensorboard", ["tensorboard", "mlflow"]])
def test_names_are_read_from_a_text_or_a_list(log):
    assert parse_trackers(log) == ["tensorboard", "mlflow"]


def test_none_is_asked_for():
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


def test_a_folder_that_a_tracker_left_is_no_package(tmp_path, monkeypatch):
    """wandb/ lies where its offline runs were begun, and Python would import it as an empty package."""
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(PatchloomError, match="trackio is not installed"):
        check_installed(["trackio"])
