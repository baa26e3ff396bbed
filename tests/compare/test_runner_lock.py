"""One comparison at a time in a folder."""

import pytest
from holding import hold

from patchloom import PatchloomError
from patchloom.compare.runner import is_locked, lock_folder


@pytest.fixture
def held(tmp_path):
    """Return a folder that another process has locked."""
    process = hold(tmp_path / ".lock")
    yield tmp_path
    process.communicate()


def test_another_comparison_is_refused(held):
    with pytest.raises(PatchloomError, match="another comparison is running in .*: wait until it ends, or choose"):
        with lock_folder(held):
            raise AssertionError
    assert (held / ".lock").exists()


def test_a_folder_that_stays_empty_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
        1 / 0  # noqa: B018
    assert not (tmp_path / "a" / "b").exists()
    with lock_folder(tmp_path / "new"):
        (tmp_path / "new" / "plan").touch()
    assert (tmp_path / "new" / "plan").exists()
    with lock_folder(tmp_path / "new"):  # again, since the first lock was released
        pass


def test_a_run_is_locked_while_another_process_trains_there(held, tmp_path_factory):
    assert is_locked(held)
    assert not is_locked(tmp_path_factory.mktemp("free")) and not is_locked(held / "none")
