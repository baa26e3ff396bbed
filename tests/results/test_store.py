"""The file of results: what is appended is read back, and files of strangers are refused or left out line by line."""

import io
import json
import multiprocessing
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from refusing import refusal

from patchloom.errors import PatchloomError
from patchloom.results import store
from patchloom.results.evaluation import Evaluation, compare_results
from patchloom.results.result import Outcomes, Result

DAYS = [f"2026-11-{day}T10:00:00+00:00" for day in (24, 25)]


def evaluation(date: str = DAYS[0], right: int = 30) -> Evaluation:
    """Results of an encoder and a control on 40 images."""
    settings = {"k": 20, "betas": (0.9, 0.95)}
    both = ("a,\n\udc9b", right), ("b", 10)
    rows = [Result.of_images(name, "knn", settings, np.arange(40) < n) for name, n in both]
    about = {"data": "some", "fingerprint": "f" * 16, "seed": 0, "n_test": 40, "date": date}
    return Evaluation(rows, "", "", tuple(rows), **about).with_differences(False)


def lines_of(run: Path) -> list[bytes]:
    return (run / store.FILE).read_bytes().splitlines()


def arrays_of(run: Path) -> list[Path]:
    return sorted((run / store.FOLDER).iterdir())


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    assert store.load(tmp_path) == []
    first, second = evaluation(), evaluation(DAYS[1], 20)
    store.append(tmp_path, first.results)
    store.append(tmp_path, evaluation(DAYS[1]).results, once=True)  # which is there, but for its date
    assert len(lines_of(tmp_path)) == 2
    store.append(tmp_path, second.results, once=True)  # of which only the encoder's is new
    found = store.load(tmp_path, outcomes=True)
    assert [(one.encoder, one.value, one.date) for one in found] == [
        ("a,\\n?", 0.75, DAYS[0]), ("b", 0.25, DAYS[0]), ("a,\\n?", 0.5, DAYS[1]),
    ]  # fmt: skip
    assert [one.against for one in found] == [first.against, (), second.against]
    assert [one.outcomes.values.sum() for one in found] == [30, 10, 20]
    assert [len(one) for one in store.evaluations(found)] == [2, 1]


def test_two_runs_on_the_same_images_are_compared_by_image(tmp_path: Path) -> None:
    made = {}
    for name, n in (("one", 30), ("two", 20)):
        row = Result.of_images(name, "knn", {}, np.arange(40) < n, np.arange(40) // 4)
        pseudo = Result("AP", n / 40, 0.4, 0.8, 40, name, outcomes=Outcomes(np.linspace(0, n / 40, 10), True))
        made[name] = [row, pseudo]
        (tmp_path / name).mkdir()
        store.append(tmp_path / name, made[name])
    pairs = zip(*(store.load(tmp_path / name, outcomes=True) for name in made), strict=True)
    for (one, two), (first, second) in zip(pairs, zip(*made.values(), strict=True), strict=True):
        found = compare_results([one], [two], False)
        assert one.about == two.about and found.n == 40 and found == compare_results([first], [second], False)


@pytest.mark.parametrize("part", [1, 40, 10**6])
def test_a_line_that_was_cut_costs_itself_alone(tmp_path: Path, part: int) -> None:
    store.append(tmp_path, evaluation().results)
    path = tmp_path / store.FILE
    path.write_bytes(path.read_bytes()[: -min(part, len(lines_of(tmp_path)[1]))])
    store.append(tmp_path, evaluation(DAYS[1]).results)
    notes: list[str] = []
    dates = [one.date for one in store.load(tmp_path, notes)]
    assert dates == [DAYS[0]] * (2 - len(notes)) + [DAYS[1]] * 2 and len(notes) == (part > 1)


DAMAGED = [b"{", b"[1]", b"\xff", b"\0", b"3", b"[" * 10**5, b'{"a":' * 900 + b"1" + b"}" * 900, b" " * 2**20 + b"{}"]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: str(line[:6]))
def test_damaged_lines_are_refused_or_noted(tmp_path: Path, line: bytes) -> None:
    store.append(tmp_path, evaluation().results)
    path = tmp_path / store.FILE
    path.write_bytes(line + b"\n\n" + path.read_bytes())
    for read in (store.load, store.check):
        with pytest.raises(PatchloomError, match=f"line 1 of {re.escape(str(path))} .*remove the line"):
            read(tmp_path)
    notes: list[str] = []
    assert len(store.load(tmp_path, notes)) == 2 and len(notes) == 1 and "line 1" in notes[0]
    store.forget(tmp_path, "1")
    assert path.read_bytes() == line + b"\n\n"


def test_a_file_of_too_many_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / store.FILE).write_bytes(b"x\n" * (2**16 + 1))
    assert "more than 65,536 lines" in refusal(store.load, tmp_path, [])


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_only_a_regular_file_is_read_or_written(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "run" / store.FILE, tmp_path / "other"
    path.parent.mkdir(), other.write_text("")
    {"pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(other), "folder": path.mkdir}[kind]()
    for act in (store.load, store.check, lambda run: store.append(run, evaluation().results)):
        refusal(act, path.parent)
    assert other.read_text() == ""


def outcomes_with(tmp_path: Path, **changes: object) -> Outcomes | None:
    """Read the outcomes of a first result whose line has other words about them."""
    first, *others = lines_of(tmp_path)
    values = json.loads(first)
    values["outcomes"] = values["outcomes"] | changes
    (tmp_path / store.FILE).write_bytes(b"\n".join([json.dumps(values).encode(), *others]))
    return store.load(tmp_path, outcomes=True)[0].outcomes


@pytest.mark.parametrize("changes", [{"file": "../a.npz"}, {"file": 3}, {"place": [1]}, {"place": 9}])
def test_outcomes_of_another_place_are_not_read(tmp_path: Path, changes: dict) -> None:
    store.append(tmp_path, evaluation().results)
    np.savez(tmp_path / "a.npz", **{"0": np.ones(40)})
    assert outcomes_with(tmp_path) is not None and outcomes_with(tmp_path, **changes) is None


def _pickled(path: Path) -> None:
    np.savez(path, **{"0": np.array([{}] * 40, object)})


def _huge(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("0.npy", bytes(2**28 + 1))


def _absurd(path: Path) -> None:
    np.save(array := io.BytesIO(), np.ones(40))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("0.npy", array.getvalue().replace(b"(40,), }" + b" " * 12, b"(4" + b"0" * 12 + b",), }"))


DAMAGES = {
    "missing": Path.unlink,
    "text": lambda path: path.write_text("no archive"),
    "one array": lambda path: np.save(path.open("wb"), np.ones(40)),
    "half": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "pickled": _pickled,
    "huge": _huge,
    "absurd": _absurd,
    "others": lambda path: np.savez(path, **{"0": np.ones(39)}),
    "words": lambda path: np.savez(path, **{"0": np.array(["a"] * 40)}),
    "a table": lambda path: np.savez(path, **{"0": np.ones((40, 1))}),
    "groups of fewer": lambda path: np.savez(path, **{"0": np.ones(40), "0 groups": np.ones(39, int)}),
    "groups of words": lambda path: np.savez(path, **{"0": np.ones(40), "0 groups": np.array(["a"] * 40)}),
    "a link": lambda path: path.rename(path.with_suffix(".x")) and path.symlink_to(path.with_suffix(".x")),
    "a pipe": lambda path: path.unlink() or os.mkfifo(path),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_outcomes_are_none(tmp_path: Path, damage) -> None:
    store.append(tmp_path, evaluation().results)
    (path,) = arrays_of(tmp_path)
    damage(path)
    assert [one.outcomes for one in store.load(tmp_path, outcomes=True)] in ([None, None], [None])
    assert len(store.load(tmp_path)) == 2


def test_an_evaluation_is_forgotten_by_number_or_date(tmp_path: Path) -> None:
    for date, right in ((DAYS[0], 30), (DAYS[1], 20)):
        store.append(tmp_path, evaluation(date, right).results)
    before, path = lines_of(tmp_path), tmp_path / store.FILE
    for wrong in ("3", "0", "2025", ""):
        assert "2 of 2026-11-25" in refusal(store.forget, tmp_path, wrong)
    whole, files = path.read_bytes(), arrays_of(tmp_path)
    assert store.forget(tmp_path, "2026-11-24") == 2
    assert lines_of(tmp_path) == before[2:] and len(arrays_of(tmp_path)) == 1
    path.write_bytes(whole)
    assert store.forget(tmp_path, "2") == 2 and lines_of(tmp_path) == before[:2]
    assert len(files) == 2 and arrays_of(tmp_path) == []


def _append_often(run: Path, name: str) -> None:
    rows = [Result.exact("accuracy", name, "knn", {"long": "x" * 5000}, i) for i in range(10)]
    for _ in range(20):
        store.append(run, rows)


def test_two_processes_that_append_at_once_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / store.FILE).touch()
    both = [multiprocessing.get_context("fork").Process(target=_append_often, args=(tmp_path, name)) for name in "ab"]
    for one in both:
        one.start()
    for one in both:
        one.join()
    found = store.load(tmp_path)
    assert len(found) == 400
    for i in range(0, 400, 10):
        assert {one.encoder for one in found[i : i + 10]} in ({"a"}, {"b"})


def test_a_file_that_cannot_be_written_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, how: False)
    assert "cannot be written" in refusal(store.check, tmp_path)
