"""Tests of the pictures, images, recordings and sliders on a page, each within its budget of bytes."""

import base64
import io
import json
import shutil
import wave
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.data.sources.open import open_data
from patchloom.dense.annotations.base import Objects
from patchloom.dense.pictures import BoxRow, MapRow, detection_picture, pair_files, segmentation_picture
from patchloom.look.sheet import Caption, write_picture
from patchloom.report import pictures
from patchloom.report.pictures import captions_of, collect_pictures, images_of, recordings_of, sliders_of, webp
from patchloom.runs.past import load_run


def opened(picture):
    kind, _, content = picture.uri.partition(",")
    assert kind == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def noise(path, width=600, height=500, caption=None):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    write_picture(path, buffer.getvalue(), caption)


def test_pictures_have_the_captions_and_the_order_of_their_writers(run):
    noise(run / "pictures" / "<script>.png")
    for name in ("a", "b"):
        noise(run / "pictures" / "deep" / f"{name}.png", caption=Caption("Same title", "Look.", 50))
    noise(run / "pictures" / "z.png", caption=Caption("Second", "Look.", 0))
    noise(run / "pictures-birds" / "recovered.png", caption=Caption("Other images", "Look.", 0))
    ((*found,),), said = collect_pictures([load_run(run)])
    assert not said
    assert [one.title for one in found] == [
        *("Images reassembled from patches", "Second", "Patches whose position was found"),
        *("Reassembled with more and less withheld", "Same title (a)", "Same title (b)", "<script>"),
        "Other images, of birds",
    ]
    for one in found:
        assert opened(one).size == (one.width, one.height) and one.alt
        assert one.caption or one.title == "<script>"


def test_many_pictures_become_smaller_and_then_fewer(run, monkeypatch):
    monkeypatch.setattr(pictures, "_STEPS", ((200, 85), (100, 60)))
    shutil.rmtree(run / "pictures")
    for i in range(6):
        noise(run / "pictures" / f"views-{i}.png", 200, 150)
    (many,), said = collect_pictures([load_run(run)], budget=60_000)
    assert sum(len(one.uri) for one in many) <= 60_000 and max(one.width for one in many) < 200 and not said
    (few,), said = collect_pictures([load_run(run)], budget=15_000)
    assert 0 < len(few) < len(many) and sum(len(one.uri) for one in few) <= 15_000
    assert said == [f"{len(many) - len(few)} of {len(many)} pictures are left out to keep the page small."]


def test_what_is_no_picture_is_named(run):
    shutil.rmtree(run / "pictures")
    assert collect_pictures([load_run(run)]) == ([[]], [])
    (run / "pictures").mkdir()
    (run / "pictures" / "broken.png").write_bytes(b"\x89PNG\r\n")
    assert collect_pictures([load_run(run)])[1][0].startswith("broken.png could not be shown (")


@pytest.mark.parametrize(("size", "shown"), [((400, 100), (200, 50)), ((100, 1600), (25, 400)), ((30, 20), (30, 20))])
def test_pictures_keep_their_shape(size, shown):
    assert webp(Image.new("RGB", size), 200, 80)[1:] == shown


def test_images_are_the_runs_own_held_out_ones_or_given(finished, tmp_path, images):
    found = images_of(load_run(finished))
    assert len(found.shown) == 12 and len(found.train) == 60 and found.what.startswith("held-out images of ")
    shutil.copytree(images / "a", tmp_path / "others")
    found = images_of(load_run(finished), tmp_path / "others")
    assert len(found.shown) == 30 and found.train is None and found.what == f"images of {tmp_path / 'others'}"
    assert len(images_of(load_run(finished), images).shown) == 12  # the run's own data means its held-out images


def test_data_that_is_gone_or_a_command_is_a_sentence(finished, tmp_path):
    found = load_run(finished)
    for data, said in (
        (str(tmp_path / "gone"), "does not exist"),
        (f"pipe:touch {tmp_path / 'ran'}", "give it with --data"),
    ):
        images = images_of(replace(found, settings=replace(found.settings, data=data)))
        assert images.shown is None and said in images.what
    assert not (tmp_path / "ran").exists()
    assert "images" in images_of(found, "tones").what  # recordings, for an encoder of images


@pytest.fixture(scope="module")
def tones():
    source = open_data("tones:20").train
    return source.heard_as(replace(source.sound, mean=(0.0,) * 40, std=(1.0,) * 40))


def decoded(recording):
    content = base64.b64decode(recording.sound.removeprefix("data:audio/wav;base64,"))
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_recordings_sound_as_they_are(tones):
    found = recordings_of(tones, 5)
    assert len(found) == 5
    rate, samples = decoded(found[-1])
    assert rate == 16_000 and np.array_equal(samples, tones.read(19).flatten().numpy())
    assert found[0].picture.width > found[0].picture.height > 40 and "Left to right: 1 s" in found[0].caption
    assert tones.classes[int(tones.labels[0])] in found[0].caption


def test_long_recordings_are_cut(tones):
    found = recordings_of(tones, 4, budget=4 * 16_000)
    assert sum(len(one.sound) for one in found) <= 4 * 16_000 + 4 * 100  # and the headers
    rate, samples = decoded(found[0])
    assert 0.3 < len(samples) / rate < 0.5 and "first 0.375 s" in found[0].caption


CLASSES = ("<script>", "road")


def drawn(run):
    image = torch.randint(0, 256, (3, 60, 80), generator=torch.Generator().manual_seed(0)).byte()
    truth, answer = torch.zeros(60, 80, dtype=torch.int16), torch.ones(60, 80, dtype=torch.int16)
    rows = [MapRow(image, truth, answer, "best: a.png"), MapRow(image, None, answer, "unknown")]
    segmentation_picture(rows, CLASSES, run / "pictures" / "segment-small.png")
    box = Objects(torch.tensor([[5.0, 5, 30, 40]]), torch.tensor([1]), None, torch.tensor([False]))
    row = BoxRow(image, box, box, torch.tensor([0.9]), "worst: <b>")
    detection_picture([row], CLASSES, run / "pictures" / "detect-small.png")


def test_truth_and_answer_lie_over_one_another(run):
    drawn(run)
    segmented, detected = sliders_of(load_run(run))
    assert (detected.name, segmented.name) == ("worst: <b>", "best: a.png")
    for one in (detected, segmented):
        assert (one.truth.width, one.truth.height) == (one.answer.width, one.answer.height)
        assert one.truth.uri != one.answer.uri and one.caption
    # three of the task, and the two sheets with legends
    assert [path.stem for path in captions_of(load_run(run))][3:] == ["segment-small", "detect-small"]


def test_they_have_the_colours_of_the_classes_and_stay_small(run):
    drawn(run)
    pair = pair_files(run / "pictures" / "segment-small.png", 1)
    truth, answer = (Image.open(path).resize((1, 1), Image.Resampling.BOX).getpixel((0, 0)) for path in pair)
    assert truth[0] > truth[2] + 60 and answer[2] > answer[0] + 60  # orange, and blue
    found = sliders_of(load_run(run))
    whole = sum(len(one.truth.uri) + len(one.answer.uri) for one in found)
    less = sliders_of(load_run(run), whole - 1)
    assert len(less) == 2 and less[0].truth.width < found[0].truth.width
    assert sliders_of(load_run(run), 10) == []


def test_damaged_pairs_are_left_out(run):
    drawn(run)
    caption = run / "pictures" / "segment-small.caption.json"
    caption.write_text(json.dumps(json.loads(caption.read_text()) | {"pairs": ["missing", "best: a.png", "more"]}))
    pair_files(run / "pictures" / "detect-small.png", 1)[0].write_bytes(b"")
    assert [one.name for one in sliders_of(load_run(run))] == ["missing"]
    caption.write_text("{")
    assert sliders_of(load_run(run)) == []


def test_sliders_of_several_evaluations_say_of_which_they_are(run):
    drawn(run)
    shutil.copytree(run / "pictures" / "segment-small", run / "pictures" / "segment-large")
    for suffix in (".png", ".caption.json"):
        shutil.copy(run / f"pictures/segment-small{suffix}", run / f"pictures/segment-large{suffix}")
    large, small, detected = sliders_of(load_run(run))
    assert [one.name for one in (large, small)] == ["segment-large: best: a.png", "segment-small: best: a.png"]
    assert detected.name == "worst: <b>"
