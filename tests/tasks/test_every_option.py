"""Every option of every task, away from its default, without code for any of them."""

import pytest
from options_swept import OPTION_SETS, left_out

from patchloom.tasks import TASKS


def test_the_sets_are_of_all_tasks_and_only_of_them():
    assert OPTION_SETS.keys() == TASKS.keys()


@pytest.mark.parametrize("name", TASKS)
def test_every_option_is_swept(name):
    assert not left_out(name)
