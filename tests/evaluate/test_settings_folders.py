"""Where files of an evaluation lie in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchloom.evaluate.settings import place_in_run


@pytest.mark.parametrize("data", ["a/yes,tones", ["a/yes", "tones"], [Path("a/yes"), "tones"]])
def test_several_names_of_data_make_one(tmp_path, data):
    assert place_in_run(tmp_path, data, "small", 1, "finetuned", ".x") == tmp_path / "finetuned/yes-tones-small-1.x"
