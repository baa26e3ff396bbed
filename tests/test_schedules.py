import pytest

from patchloom.schedules import cosine_rate, halving_rate, warmup_again


def test_a_halving_rate_is_small_and_constant_first_then_halved_at_every_mark():
    rates = [halving_rate(step, 5, 0.8, 10) for step in range(30)]
    assert rates[:5] == pytest.approx([0.08] * 5) and rates[5:10] == pytest.approx([0.8] * 5)
    assert rates[10:20] == pytest.approx([0.4] * 10) and rates[20:] == pytest.approx([0.2] * 10)


def test_learning_rate_rises_then_falls_as_a_cosine():
    rates = [cosine_rate(step, 100, 10, 2.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0) and rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.0)  # halfway down the cosine
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert 0 < rates[-1] < 0.01
    assert cosine_rate(0, 5, 0, 1.0) == 1.0


def test_a_run_that_is_extended_warms_up_for_a_tenth_of_the_added_steps():
    assert [warmup_again(*given) for given in ((0, 100, 40), (100, 300, 40), (100, 300, 10))] == [40, 20, 10]
