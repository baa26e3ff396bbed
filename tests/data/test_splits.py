from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.splits import hold_out, pick, split_for_test
from patchloom.errors import PatchloomError


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=80), st.data())
def test_pick_is_proportional(labels, data):
    labels = np.array(labels)
    count = data.draw(st.integers(0, len(labels)))
    chosen = pick(labels, count, seed=0)
    assert len(chosen) == count == len(set(chosen.tolist()))
    kinds, sizes = np.unique(labels, return_counts=True)
    left = np.array([(labels == kind).sum() - (labels[chosen] == kind).sum() for kind in kinds])
    if count <= len(labels) - len(kinds):
        assert (left >= 1).all()
        if count < 0.5 * len(labels):
            assert np.abs(sizes - left - sizes * count / len(labels)).max() <= len(kinds)


def test_hold_out(draw, tmp_path):
    shapes = Shapes(1000)
    train, held = hold_out(shapes)
    assert len(train) == 950 and np.bincount(held.labels).tolist() == [5] * 10
    assert sorted([*train.indices, *held.indices]) == list(range(1000))
    assert hold_out(shapes)[1].fingerprint() == held.fingerprint() != hold_out(shapes, seed=1)[1].fingerprint()
    assert len(hold_out(shapes, share=0.9, max_images=100)[1]) == 100
    assert len(split_for_test(shapes)[1]) == 200
    small, one = hold_out(shapes.subset([3, 4]), share=0)
    assert len(small) == len(one) == 1 and len(hold_out(shapes.subset([3, 4]), share=1)[0]) == 1
    draw("1.png")
    with pytest.raises(PatchloomError, match="at least 2 are needed"):
        hold_out(open_data(tmp_path).train)
