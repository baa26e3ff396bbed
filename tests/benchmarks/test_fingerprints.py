"""Fingerprints of tasks: equal for equal code, and differences sorted by kind."""

import json
import sys

import fingerprints
import pytest


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """A function that runs the script for two sets of options, and returns its output."""
    sets = {"droppos": [{"mask_ratio": 0.5}], "simmim": [{}]}
    monkeypatch.setattr(fingerprints, "OPTION_SETS", sets)
    monkeypatch.setattr(fingerprints.torch, "set_num_threads", lambda number: None)

    def ask(verb):
        monkeypatch.setattr(sys, "argv", ["fingerprints.py", verb, str(tmp_path / "before.json")])
        return fingerprints.main(), capsys.readouterr().out

    return ask


def test_differences_are_sorted_by_kind(ask, tmp_path):
    assert ask("record") == (0, f"2 fingerprints in {tmp_path / 'before.json'}\n")
    code, said = ask("compare")
    assert code == 0 and "2 of 2 fingerprints are equal to the bit" in said

    before = json.loads((tmp_path / "before.json").read_text())
    first, second = before.values()
    first["caption"]["positions"] = "Other words."
    first["loss at 0.25"] *= 1 + 1e-7
    second["measure"]["blurred copy"][1] *= 1.01  # the norm
    second["measure"]["blurred copy"][3] = "other bits"
    (tmp_path / "before.json").write_text(json.dumps(before))
    code, said = ask("compare")
    kinds = [line.split(":")[0] for line in said.splitlines()[:-1]]
    assert code == 1 and sorted(kinds) == ["NUMBERS", "ROUNDING", "words"]
    assert "0 of 2 fingerprints are equal to the bit" in said
