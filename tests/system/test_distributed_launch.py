"""Agreement between processes that train together."""

import pytest

from patchloom.errors import AlreadyReported, PatchloomError, TemporaryError
from patchloom.system import distributed


def fails():
    raise RuntimeError("a custom task")


@pytest.mark.parametrize("first", [True, False])
def test_any_failure_of_the_first_process_ends_the_others(monkeypatch, first):
    sent = []
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: int(not first))
    monkeypatch.setattr(distributed, "wait_for_all", lambda: None)

    def broadcast(values):
        sent.append(tuple(values))
        if not first:
            values[:] = None, ("a custom task", 1)

    monkeypatch.setattr(distributed.dist, "broadcast_object_list", broadcast)
    with pytest.raises(RuntimeError if first else AlreadyReported, match="a custom task") as raised:
        distributed.first_decides(fails)
    assert sent == [(None, ("a custom task", 1) if first else None)]
    assert first or raised.value.exit_code == 1


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("[gloo] Connection closed by peer", TemporaryError),
        ("DistStoreError: 1/2 clients joined", TemporaryError),
        ("a list of another size", RuntimeError),
        ("the restored weights do not fit", RuntimeError),
    ],
)
def test_only_a_lost_connection_means_that_another_process_has_died(monkeypatch, words, kind):
    def lost():
        raise RuntimeError(words)

    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "wait_for_all", lost)
    for wait in (lambda: distributed.raise_together(None), distributed.explain_peer_death()(lost)):
        with pytest.raises((PatchloomError, RuntimeError)) as raised:
            wait()
        assert type(raised.value) is kind
    assert not isinstance(raised.value, PatchloomError) or "another process has died" in str(raised.value)


def test_a_refusal_of_all_processes_is_reported_by_the_first(monkeypatch):
    for number, kind in enumerate((PatchloomError, AlreadyReported)):
        monkeypatch.setattr(distributed, "rank", lambda number=number: number)
        assert type(distributed.refused_by_all("too few images")) is kind
