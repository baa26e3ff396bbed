"""Names of built-in data sets, without torch."""

from __future__ import annotations

from typing import Any

_FLAG = {"train": True}, {"train": False}
_SPLIT = {"split": "train"}, {"split": "test"}
# by name: a class of torchvision.datasets, and its arguments for training and test images (None: there are none)
FETCHED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "cifar10": ("CIFAR10", *_FLAG),
    "cifar100": ("CIFAR100", *_FLAG),
    "stl10": ("STL10", *_SPLIT),
    "svhn": ("SVHN", *_SPLIT),
    "fashionmnist": ("FashionMNIST", *_FLAG),
    "mnist": ("MNIST", *_FLAG),
    "flowers102": ("Flowers102", *_SPLIT),
    "food101": ("Food101", *_SPLIT),
    "oxfordiiitpet": ("OxfordIIITPet", {"split": "trainval"}, {"split": "test"}),
    "dtd": ("DTD", *_SPLIT),
    "eurosat": ("EuroSAT", {}, None),
}
BUILTIN = ("shapes", "tones", "digits", *FETCHED)
