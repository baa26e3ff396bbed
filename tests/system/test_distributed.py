"""Processes that train together: two with half a batch each equal one with the whole batch; failures are agreed on."""

import pytest
import torch
from data_parallel import train, train_together
from options_swept import mixture_of

from patchloom.errors import AlreadyReported, PatchloomError, TemporaryError
from patchloom.options.tasks import QUESTIONS
from patchloom.system import distributed
from patchloom.tasks import TASKS

# every task with its defaults, and options with further communication or random draws
CASES = {name: (name, {}) for name in TASKS} | {
    **{f"mixture, {one}": ("mixture", mixture_of(one)) for one in QUESTIONS},
    "droppos, images weigh differently": ("droppos", {"mask_ratio": 0.5, "temperature": 0.1}),
    "droppos, foreign positions": ("droppos", {"placeholder": "foreign", "pixels": True}),
    "extrema, infonce": ("extrema", {"loss": "infonce"}),
    "lut on simmim": ("lut", {"base": "simmim"}),
    "mixture, agreement and pixels": ("mixture", {"withhold": {"mask": 0.5}, "ask": {"agreement": 1.0, "pixels": 1.0}}),
    "restore, blurred": ("restore", {"degradation": "blur", "kernel": [3.0, 5.0]}),
    "restore, amid other images": ("restore", {"degradation": "zoom_out", "fill": "images"}),
    "restore, zoomed out": ("restore", {"degradation": "zoom_out", "scale": [0.5, 0.75]}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each process, by case. All cases share one start of the processes, which takes longer than they."""
    found, smallest_ones, waits = train_together(list(CASES.values()), tmp_path_factory.mktemp("processes"))
    return dict(zip(CASES, found, strict=True)) | {"smallest": smallest_ones, "waits": waits}


def differing(ours, theirs):
    """Return the tensors that differ by more than 1e-4 of their norm, with that share.

    Norms below 1e-5 of that of all tensors together count as that: the gradient of the keys' biases consists of
    rounding errors, since mathematically it is zero.
    """
    assert ours.keys() == theirs.keys()
    least = 1e-5 * torch.cat([tensor.flatten().double() for tensor in theirs.values()]).norm()
    share = {
        key: (ours[key] - of).double().norm() / torch.maximum(of.double().norm(), least) for key, of in theirs.items()
    }
    return {key: one.item() for key, one in share.items() if not one <= 1e-4}


def moved(result):
    """Return the changes of all tensors of the state. Beside the weights themselves, small steps would not show."""
    return {key: end.double() - result.start[key].double() for key, end in result.end.items()}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one_with_the_whole_batch(case, results):
    ranks, alone = results[case], train(*CASES[case])
    failed = [one for one in ranks if isinstance(one, str)]
    assert not failed, "\n".join(failed)
    torch.testing.assert_close(sum(one.losses for one in ranks) / len(ranks), alone.losses, rtol=1e-5, atol=0)
    for one in ranks:
        assert not differing(one.gradients, alone.gradients)
        assert not differing(one.start, alone.start)
        assert not differing(moved(one), moved(alone))  # weights, the teacher's, and running statistics


def test_processes_agree_on_the_smallest_number_and_the_first_may_take_long(results):
    assert results["smallest"] == ([3, 3, 3],) * 2  # with every backend
    assert results["waits"] == ("well", "well")


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

    def fails():
        raise RuntimeError("a custom task")

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
    assert kind is RuntimeError or "another process has died" in str(raised.value)


def test_a_refusal_of_all_processes_is_reported_by_the_first(monkeypatch):
    for number, kind in enumerate((PatchloomError, AlreadyReported)):
        monkeypatch.setattr(distributed, "rank", lambda number=number: number)
        assert type(distributed.refused_by_all("too few images")) is kind
