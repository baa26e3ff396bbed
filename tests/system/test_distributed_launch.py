"""What processes that train together agree on."""

import pytest

from patchloom.errors import AlreadyReported
from patchloom.system import distributed


def fails():
    raise RuntimeError("a task of one's own")


@pytest.mark.parametrize("first", [True, False])
def test_whatever_fails_in_the_first_process_ends_the_others(monkeypatch, first):
    sent = []
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: int(not first))
    monkeypatch.setattr(distributed, "wait_for_all", lambda: None)

    def broadcast(values):
        sent.append(tuple(values))
        if not first:
            values[:] = None, "a task of one's own"

    monkeypatch.setattr(distributed.dist, "broadcast_object_list", broadcast)
    with pytest.raises(RuntimeError if first else AlreadyReported, match="a task of one's own"):
        distributed.first_decides(fails)
    assert sent == [(None, "a task of one's own" if first else None)]
