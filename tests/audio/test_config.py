"""Words for recordings where sentences are written for images."""

from patchloom.audio.config import Sound, reword_for_sound


def test_words_of_images_become_those_of_sound():
    said = "Images of pixels: each image, imagery and a Pixels' patch."
    assert reword_for_sound(said, Sound()) == "Recordings of values: each recording, imagery and a Values' patch."
    assert reword_for_sound(said, None) == said


def test_names_and_paths_stay():
    said = "the weights of runs/images/a.st and images-mae know 3 images."
    assert reword_for_sound(said, Sound()) == "the weights of runs/images/a.st and images-mae know 3 recordings."
