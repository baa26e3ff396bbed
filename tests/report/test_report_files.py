"""Tests of the sentences on unreadable files and on copies."""

from dataclasses import replace

import numpy as np
from PIL import Image

from patchloom.data.sources.open import open_data
from patchloom.report.report import describe_data_issues
from patchloom.runs.folder import RunFolder
from patchloom.runs.past import load_run


def test_broken_files_are_named(run):
    assert "All files that the run opened could be read." in describe_data_issues(load_run(run))
    (run / "unreadable.txt").write_bytes(b"a<b>.png\n\xff.png\n")
    said = describe_data_issues(load_run(run))[0]
    assert said.startswith("2 files") and said.endswith(": a<b>.png, \\udcff.png.")
    (run / "unreadable.txt").write_text("".join(f"{i}.png\n" for i in range(13)))
    said = describe_data_issues(load_run(run))[0]
    assert said.startswith("13 files") and ", and 3 more: " in said and said.endswith("unreadable.txt.")
    (run / "unreadable.txt").unlink()
    RunFolder(run).lock()
    RunFolder(run).note_unreadable([f"two\nlines/{i}.png" for i in range(6)])
    said = describe_data_issues(load_run(run))[0]
    assert said.startswith("6 files") and '"two\\nlines/0.png", ' in said and "\n" not in said


def test_exact_copies_are_counted(finished):
    found = load_run(finished)

    def said(**data):
        return describe_data_issues(replace(found, data=found.data | data))

    for data, words in (
        ({}, "No training image is an exact copy"),
        ({"held_out_copies": [1, 5]}, "2 exact copies of held-out images were excluded"),
        ({"held_out_copies": [1]}, "1 exact copy of held-out images was excluded"),
        ({"held_out_looked": False}, "not searched"),
    ):
        assert any(words in one for one in said(**data))


def test_near_copies_are_reported(finished, tmp_path, images):
    rng, folder = np.random.default_rng(0), tmp_path / "films"
    folder.mkdir()
    for film in range(15):
        scene = rng.integers(0, 200, (32, 32, 3))
        for frame in range(5):
            frames = (scene + rng.integers(0, 20, scene.shape)).astype(np.uint8)
            Image.fromarray(frames).save(folder / f"film{film}_{frame:03}.png")
    said = describe_data_issues(load_run(finished), open_data(folder).train)[-1]
    assert said.startswith("Neighbours in name are near copies (") and "--group" in said
    assert "No near copies were found" in describe_data_issues(load_run(finished), open_data(images).train)[-1]
    plain = describe_data_issues(load_run(finished))
    assert describe_data_issues(load_run(finished), open_data("shapes:40").train) == plain  # they have no names
