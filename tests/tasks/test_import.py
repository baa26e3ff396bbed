"""Task classes by name from `patchloom.tasks`, imported when they are first used."""

import pytest

import patchloom.tasks
from patchloom.tasks import TASKS, task_class
from patchloom.tasks.task import Task


def test_every_class_is_in_the_package_under_its_name():
    for name in TASKS:
        kind = task_class(name)
        assert getattr(patchloom.tasks, kind.__name__) is kind
    assert {one for one in patchloom.tasks.__all__ if one[0].isupper()} == {
        *(entry.path.rpartition(".")[2] for entry in TASKS.values()),
        *("AUTO", "TASKS", "Entry", "Task"),
    }
    assert patchloom.tasks.Task is Task
    with pytest.raises(AttributeError, match="no attribute 'Droppos'"):
        patchloom.tasks.Droppos  # noqa: B018
    with pytest.raises(ImportError, match="Droppos"):
        exec("from patchloom.tasks import Droppos")
