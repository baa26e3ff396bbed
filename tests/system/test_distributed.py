"""Two processes with half a batch each equal one process with the whole batch, for every task and every question."""

import pytest
import torch
from data_parallel import train, train_together
from options_swept import mixture_of

from patchloom.tasks import TASKS
from patchloom.tasks.mixture import _QUESTIONS

# every task with its defaults, and options with further communication or random draws
CASES = {name: (name, {}) for name in TASKS} | {
    **{f"mixture, {one}": ("mixture", mixture_of(one)) for one in _QUESTIONS},
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


def test_processes_agree_on_the_smallest_number_with_every_backend(results):
    assert results["smallest"] == ([3, 3, 3],) * 2


def test_the_first_process_may_take_long(results):
    assert results["waits"] == ("well", "well")


def moved(result):
    """Return the changes of all tensors of the state. Beside the weights themselves, small steps would not show."""
    return {key: end.double() - result.start[key].double() for key, end in result.end.items()}


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
