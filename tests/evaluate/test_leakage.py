"""Test images answer once, at the end: they choose nothing, and are not even read before all has been chosen."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from patchloom.data.sources.open import open_data
from patchloom.evaluate.protocols import evaluate, linear, protocol_of
from patchloom.evaluate.protocols import layers as layers_file

pytestmark = pytest.mark.usefixtures("quick_probe")

CHOICES = {"knn": [], "linear": [(linear, "linear_probe")], "layers": [(layers_file, "_held_out")]}
# the encoder, its twin, raw pixels
ORDER = {
    "knn": ["train", "test"] * 3,
    "linear": ["train", "chosen", "test"] * 3,
    "layers": ["train", "chosen", "test"] * 2 + ["train", "test"],
}


def _options(protocol: str) -> dict:
    return {} if protocol == "layers" else {"pooling": "mean"}


@pytest.mark.parametrize("protocol", CHOICES)
def test_test_images_are_read_after_everything_is_chosen(
    tiny_encoder: Path, record_reads: Callable, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_reads()
    protocol_of(protocol)
    for module, name in CHOICES[protocol]:
        choose = getattr(module, name)

        def watched(*args, choose=choose, **kwargs):
            found = choose(*args, **kwargs)
            record.append("chosen")
            return found

        monkeypatch.setattr(module, name, watched)
    evaluate(protocol, tiny_encoder, "digits", device="cpu", cache=False, **_options(protocol))
    assert [what for what, _ in groupby(record)] == ORDER[protocol]
    looked = 8  # for colours, which an encoder of grey images drops
    assert record.count("train") == 3 * 120 + looked and record.count("test") == 3 * 60


@pytest.mark.parametrize("protocol", CHOICES)
def test_shuffled_test_labels_choose_the_same(tiny_encoder: Path, record_reads: Callable, protocol: str) -> None:
    labels = open_data("digits").test.labels[:60]
    reports = []
    for answers in (labels, np.random.default_rng(0).permutation(labels)):
        record_reads(test_labels=answers)
        reports.append(evaluate(protocol, tiny_encoder, "digits", device="cpu", **_options(protocol)))
    honest, blind = reports
    assert [row.settings for row in blind.rows] == [row.settings for row in honest.rows]
    assert [row.settings for row in blind.quoted] == [row.settings for row in honest.quoted]
    # the labels are not in the cache: the second report used the first one's features, and yet was blind
    assert "features were used for tiny, untrained, raw pixels" in blind.protocol
    assert blind.quoted[-1].value < 0.3 < 0.6 < honest.quoted[-1].value
