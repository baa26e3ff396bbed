"""Tests of the images for a page: held out by the run, given, or unavailable."""

import shutil
from dataclasses import replace

from patchloom.report.load_run import load_run
from patchloom.report.pictures import images_of


def test_the_runs_own_held_out_images(run):
    found = images_of(load_run(run))
    assert len(found.shown) == 12 and len(found.train) == 60 and found.what.startswith("held-out images of ")


def test_given_images_are_taken(run, tmp_path, images):
    shutil.copytree(images / "a", tmp_path / "others")
    found = images_of(load_run(run), tmp_path / "others")
    assert len(found.shown) == 30 and found.train is None and found.what == f"images of {tmp_path / 'others'}"
    assert len(images_of(load_run(run), images).shown) == 12  # the run's own data means its held-out images


def test_data_that_is_gone_is_a_sentence(run, tmp_path):
    found = load_run(run)
    gone = replace(found, settings=replace(found.settings, data=str(tmp_path / "gone")))
    images = images_of(gone)
    assert images.shown is None and "does not exist" in images.what
    assert "images" in images_of(found, "tones").what  # recordings, for an encoder of images


def test_nobodys_command_is_run(run, tmp_path):
    found = load_run(run)
    command = f"pipe:touch {tmp_path / 'ran'}"
    images = images_of(replace(found, settings=replace(found.settings, data=command)))
    assert images.shown is None and "give it with --data" in images.what and not (tmp_path / "ran").exists()
