"""Tiny recordings in memory and in Speech Commands' layout, and a tiny encoder of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from patchloom.audio.config import GREY, SIXTH, Sound
from patchloom.data.source import Source, digest
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder

RATE = 4000
SOUND = Sound(rate=RATE, seconds=0.11, bins=8, bands=16, mean=(0.0,) * 8, std=(2.0,) * 8)  # pictures of 8 x 9
PITCHES = {"yes": 300, "no": 700, "up": 1500, "cat": 1100, "bed": 500}


def tone(word: str, number: int, seconds: float = 0.1) -> np.ndarray:
    """Return a tone [n] in [-1, 1] with a word's pitch and new noise."""
    rng = np.random.default_rng([PITCHES[word], number])
    time = np.arange(round(RATE * seconds)) / RATE
    return 0.5 * np.sin(2 * np.pi * (PITCHES[word] * time + rng.random())) + 0.05 * rng.normal(size=len(time))


class Tones(Source):
    """Return a source of recordings in memory, with some of each word."""

    in_memory = True

    def __init__(self, each: int, words: tuple[str, ...] = ("yes", "no", "up"), first: int = 0) -> None:
        self.name, self.classes, self.sound, self.first = "tones", words, SOUND, first
        self.labels = np.arange(each * len(words)) % len(words)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> torch.Tensor:
        wave = tone(self.classes[self.labels[i]], self.first + i)
        return torch.from_numpy((wave * 2**15).astype(np.int16))[None, None]

    def fingerprint(self) -> str:
        return digest([str(self.first), str(self.labels.tolist())])


def encoder_of_sound(folder: Path) -> Path:
    """Write a folder with a tiny encoder for `SOUND`."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"depth": 2, "embed_dim": 16, "num_heads": 2, "class_token": True}
    spec = EncoderSpec("nano", SOUND.size, (8, 1), channels=1, options=sizes)
    torch.manual_seed(1)
    card = EncoderCard(spec, (GREY,), (SIXTH,), "mp3", "ear", sound=SOUND)
    save_encoder(build_encoder(spec), card, folder / "encoder.safetensors")
    return folder


def speech_commands(folder: Path) -> Path:
    """Write five words in the layout of Speech Commands: 6 training, 2 validation and 3 test recordings each."""
    import soundfile

    lists: dict[str, list[str]] = {"validation_list.txt": [], "testing_list.txt": []}
    for word in PITCHES:
        (folder / word).mkdir(parents=True)
        for number in range(11):
            soundfile.write(folder / word / f"{number}.wav", tone(word, number), RATE)
        lists["validation_list.txt"] += [f"{word}/{number}.wav" for number in (6, 7)]
        lists["testing_list.txt"] += [f"{word}/{number}.wav" for number in (8, 9, 10)]
    for name, paths in lists.items():
        (folder / name).write_text("\n".join(paths))
    (folder / "_background_noise_").mkdir()
    rain = 0.3 * np.random.default_rng(0).normal(size=4 * RATE)
    soundfile.write(folder / "_background_noise_" / "rain.wav", rain.clip(-1, 1), RATE)
    return folder
