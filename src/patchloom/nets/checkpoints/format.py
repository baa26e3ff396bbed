"""Encoder files: weights by timm's names only, and a card in the metadata that describes how to rebuild it.

Other modules of a task that an evaluation can use are in separate files beside it, so that the encoder's file stays
timm's; the encoder's card lists them and the use of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import huggingface_hub
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not in its __all__
from safetensors.torch import save
from torch import Tensor, nn

from patchloom.audio.config import Sound, sound_from
from patchloom.audio.recordings import modality_of
from patchloom.data.modality import Modality
from patchloom.errors import PatchloomError, check_range, conforms, listing, typed_fields
from patchloom.nets.build import (
    EncoderSpec,
    build_encoder,
    check_model_options,
    models_like,
    on_meta,
    outline,
    stock_encoder,
)
from patchloom.nets.checkpoints.read import (
    CHECKSUM,
    State,
    checksum,
    expect_intact,
    is_pickle,
    printable,
    read_metadata,
    read_weights,
)
from patchloom.nets.heads import EXTRA_MODULES, InstanceHead, Use
from patchloom.nets.lora import merged
from patchloom.nets.swin import Encoder
from patchloom.sizes import compact
from patchloom.system.files import write_whole
from patchloom.system.network import from_cache_alone, network_error, why_offline

ENCODER_FORMAT = "patchloom-encoder-1"
CLASSIFIER_FORMAT = "patchloom-classifier-1"
DENSE_FORMAT = "patchloom-dense-1"
# for the message of a verb that takes something else
_KINDS = {
    ENCODER_FORMAT: "an encoder",
    CLASSIFIER_FORMAT: "a classifier",
    DENSE_FORMAT: "a segmenter or detector",
}
_STATISTICS = {"mean": (-1e6, 1e6), "std": (0.0, 1e6)}
_LARGEST_IMAGE = 2**28  # numbers in an encoder's input
_LARGEST_BUFFERS = 2**31  # bytes
_Card = TypeVar("_Card")
UNKNOWN_LICENSE = "unknown"
_AND = " AND "


@dataclass(frozen=True)
class EncoderCard:
    """Metadata of an encoder's weights.

    Attributes:
        spec: how to build it; None for a timm model, which is built by its name.
        mean, std: statistics per channel, in [0, 1] units, that normalise its images.
        task: pretext task of its training; "untrained", or ``timm:NAME`` for a timm model.
        name: name in reports.
        trained_on: checksum of the list of training data, which lies beside it; "" without one.
        extra_modules: use of each module saved beside it, by its file's name without suffix.
        note: a sentence to print beside its results, such as that its run is not finished; "" without one.
        sound: conversion of recordings to its images; None for an encoder of images.
        license: licences of the public weights that it is, began with or learnt from, as `join_licenses` joins them;
            "" without such weights.
    """

    spec: EncoderSpec | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    task: str
    name: str
    trained_on: str = ""
    extra_modules: dict[str, Use] = field(default_factory=dict)
    note: str = ""
    sound: Sound | None = None
    license: str = ""

    @property
    def modality(self) -> Modality:
        """Kind of data that its images show."""
        return modality_of(self.sound)

    @property
    def own_spec(self) -> EncoderSpec:
        """``spec`` of an encoder that is not a timm model."""
        assert self.spec is not None, f"{self.name} is a model of timm's"
        return self.spec

    @property
    def timm_name(self) -> str:
        """timm's name of an encoder without ``spec``."""
        return self.task.removeprefix("timm:")


def save_encoder(vit: Encoder, card: EncoderCard, path: Path) -> None:
    """Write the encoder's ``state_dict`` and card atomically."""
    write_whole(path, encoder_bytes(vit, card))


def encoder_bytes(vit: Encoder, card: EncoderCard) -> bytes:
    """Return the content of an encoder file."""
    about = asdict(card)
    for name in ("sound", "license"):  # without them, files keep their original format
        if not about[name]:
            del about[name]
    return _net_bytes(vit, ENCODER_FORMAT, about)


def save_net(net: nn.Module, key: str, about: dict[str, Any], path: Path) -> None:
    """Write a net's ``state_dict`` and, under ``key``, its metadata ``about`` with a checksum of both.

    Low-rank updates are merged into the weights. The file is written atomically.
    """
    write_whole(path, _net_bytes(net, key, about))


def _net_bytes(net: nn.Module, key: str, about: dict[str, Any]) -> bytes:
    weights = {name: value.detach().cpu().contiguous() for name, value in merged(net.state_dict()).items()}
    about = about | {CHECKSUM: checksum(weights, json.dumps(about))}
    # a single key, because the order of several would differ from file to file
    return save(weights, metadata={key: json.dumps(about)})


def card_of(path: Path) -> EncoderCard | None:
    """Return the card of a file that `save_encoder` wrote; None for any other file of weights."""
    ours = not is_pickle(path) and ENCODER_FORMAT in read_metadata(path, "weights")
    return read_encoder_card(path) if ours else None


def read_encoder_card(path: Path) -> EncoderCard:
    """Read the card of an encoder file."""
    about = read_about(path, ENCODER_FORMAT, "encoder weights")
    with expect_intact(path):
        card = card_from(about)
        if card.spec is None:
            raise ValueError("its card names no sizes")
        return card


def card_from(about: Any) -> EncoderCard:
    """Validate an encoder's card, as ``asdict`` and JSON represent it; the file is untrusted."""
    if isinstance(about, Mapping):
        about = {**about, "spec": spec_from(about.get("spec")), "sound": sound_from(about.get("sound"))}
    card = checked_card(EncoderCard, about)
    check_statistics(card.mean, card.std)
    if card.spec is not None and len(card.mean) != card.spec.channels:
        raise ValueError("mean and std have another number of channels")
    if not all(re.fullmatch(r"\w[\w-]{0,99}", name) for name in card.extra_modules):
        raise ValueError("a module beside the encoder has an invalid name")
    takes = None if card.spec is None else (card.spec.channels, *card.spec.img_size)
    if card.sound is not None and takes not in (None, (1, *card.sound.size)):
        raise ValueError("the pictures of its recordings have another size than its images")
    if card.spec is None:
        try:
            stock_encoder(card.timm_name)
        except PatchloomError as problem:
            raise ValueError(str(problem)) from problem
    return card


def checked_card(cls: type[_Card], about: Any, ranges: Mapping[str, tuple[float, float]] | None = None) -> _Card:
    """Validate the card of any file that patchloom writes, as ``asdict`` and JSON represent it.

    Unknown names, which a later version may have added, are left out; types and ``ranges`` are checked; an encoder's
    card inside is validated by `card_from`; and control characters, which could control a terminal, are replaced.
    """
    if not isinstance(about, Mapping):
        raise ValueError("it has no card")
    known = {one.name: one for one in fields(cast(Any, cls))}
    given = {name: value for name, value in about.items() if name in known}
    for name, one in known.items():
        if name not in given and one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"its card lacks {name}")
    hints = get_type_hints(cls)
    nested = {name: card_from(value) for name, value in given.items() if hints[name] is EncoderCard}
    found = typed_fields(cls, given | nested, ranges)
    return cls(**{name: _printable_inside(value, 5000 if name == "note" else 500) for name, value in found.items()})


def _printable_inside(value: Any, most: int) -> Any:
    """Return a plain value with all texts in it made printable."""
    if isinstance(value, str):
        return printable(value, most)
    if isinstance(value, list | tuple):
        return type(value)(_printable_inside(one, most) for one in value)
    if isinstance(value, dict):
        return {_printable_inside(name, most): _printable_inside(one, most) for name, one in value.items()}
    return value


def check_statistics(mean: Any, std: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Validate mean and standard deviation per channel from an untrusted file."""
    found = typed_fields(EncoderCard, {"mean": mean, "std": std}, _STATISTICS)
    if not 0 < len(found["mean"]) == len(found["std"]) or 0 in found["std"]:
        raise ValueError("mean and std must have one number per channel, and std none that is 0")
    return found["mean"], found["std"]


def spec_from(given: Any) -> EncoderSpec | None:
    """Read an encoder's spec from its card."""
    if given is None:
        return None
    ranges = dict.fromkeys(("img_size", "patch_size", "channels"), (1, 2**16))
    values = typed_fields(EncoderSpec, given, ranges)
    if missing := {"model", "img_size", "patch_size"} - values.keys():
        raise ValueError(f"its card lacks {min(missing)}")
    spec = EncoderSpec(**values)
    spec = replace(spec, patch_size=compact(spec.patch_size))
    if spec.channels * spec.img_size[0] * spec.img_size[1] > _LARGEST_IMAGE:
        raise ValueError(f"images of {spec.channels} x {spec.img_size[0]} x {spec.img_size[1]} are too large")
    try:
        check_model_options(spec.options)
    except PatchloomError as problem:
        raise ValueError(str(problem)) from problem
    return spec


def read_about(path: Path, key: str, what: str) -> dict[str, Any]:
    """Read the metadata that `save_net` wrote under ``key``; ``what`` names the expected contents in errors."""
    about = read_metadata(path, what)
    if key not in about:
        if kind := next((kind for name, kind in _KINDS.items() if name in about), None):
            takes = "" if kind == _KINDS[ENCODER_FORMAT] else "; patchloom predict and patchloom export take it"
            raise PatchloomError(f"{path} is {kind}, not {what}: give another file{takes}")
        if any(name.startswith("patchloom-") for name in about):
            raise PatchloomError(f"{path} was written by patchloom, but is not {what}: give another file")
        raise PatchloomError(f"{path} has no patchloom metadata: use a file that patchloom wrote, or timm:NAME")
    with expect_intact(path):
        found = json.loads(about[key])
        return {name: value for name, value in found.items() if name != CHECKSUM}


def is_model(path: str | Path) -> bool:
    """Return whether a path is the file of a classifier, segmenter or detector."""
    path = Path(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    return bool({CLASSIFIER_FORMAT, DENSE_FORMAT} & read_metadata(path, "a model").keys())


ENCODER_FILE, HUB_CONFIG = "encoder.safetensors", "config.json"
HUB_README, HUB_IMAGES = "README.md", "preprocessor_config.json"
_HUB_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ON_HUB = "timm:hf-hub:"


def is_on_hub(source: str | Path) -> bool:
    """Return whether a source is ``timm:hf-hub:OWNER/NAME``, a repository of the Hugging Face Hub."""
    return str(source).startswith(_ON_HUB)


@contextmanager
def _fetching(what: str, remedy: str) -> Iterator[str]:
    """Use the cache alone if the hub does not answer, whose reason is returned; every failure means: no weights."""
    offline = why_offline()
    try:
        with from_cache_alone(bool(offline)):
            yield offline
    except Exception as problem:  # hubs fail in many ways
        reason = offline or (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise network_error(
            f"the weights of {what} could not be fetched ({reason}): {remedy}", None if offline else problem
        ) from problem


def find_weights(source: str | Path) -> Path:
    """Return the file of weights of a path: itself, or a file in a run's or the Hub's folder; it may not exist."""
    path = Path(source)
    if not path.is_dir():
        return path
    hub = [path / name for name in _HUB_WEIGHTS if (path / name).is_file() and (path / HUB_CONFIG).is_file()]
    return hub[0] if hub and not (path / ENCODER_FILE).exists() else path / ENCODER_FILE


def weights_file(source: str | Path) -> Path:
    """Return the file of weights of a folder, file or repository of the Hub; raise an error if there is none.

    What is fetched is data: a configuration in the same folder is validated like that of any folder, and no code is
    fetched.
    """
    if not is_on_hub(source):
        path = find_weights(source)
        if not path.is_file():
            hint = published_like(source) or "give a finished run, a .safetensors file or timm:NAME"
            raise PatchloomError(f"there is no encoder at {path}: {hint}")
        return path
    repository, _, revision = str(source).removeprefix(_ON_HUB).partition("@")
    try:
        validate_repo_id(repository)
        if "/" not in repository:
            raise HFValidationError("it has no owner")
    except HFValidationError as problem:
        raise PatchloomError(f"{source} names no repository of the Hub: give timm:hf-hub:OWNER/NAME") from problem
    get = partial(huggingface_hub.hf_hub_download, repository, revision=revision or None)
    remedy = (
        f"check the network, the name and your access to it, or fetch {_HUB_WEIGHTS[0]} elsewhere, and give that file "
        "with --model and its name in timm"
    )
    with _fetching(str(source), remedy):
        get(HUB_CONFIG)
        for name in (HUB_README, HUB_IMAGES):
            with suppress(EntryNotFoundError):
                get(name)
        try:
            return Path(get(_HUB_WEIGHTS[0]))
        except EntryNotFoundError:
            return Path(get(_HUB_WEIGHTS[1]))


def published_like(source: str | Path) -> str:
    """Suggest published weights of timm for something that is not a path, as the end of a sentence, or ""."""
    found = [] if "/" in str(source) else models_like(str(source), pretrained=True)
    return f"did you mean {listing(f'timm:{name}' for name in found)}?" if found else ""


def load_encoder_file(source: str | Path) -> tuple[Encoder, EncoderCard]:
    """Load an encoder in eval mode, and its card."""
    if not str(source).startswith("timm:"):
        path = weights_file(source)
        card = read_encoder_card(path)
        return build_with(card.own_spec, read_weights(path), path), card
    name = str(source).removeprefix("timm:")
    stock_encoder(name)  # reject unsupported models before gigabytes are fetched
    home = timm.models.get_pretrained_cfg(name)
    repository = None if home is None else home.hf_hub_id
    there = f"model.safetensors of {repository}" if repository else "them"
    remedy = f"check the network, or fetch {there} elsewhere, and give that file with --model {name} instead"
    with _fetching(name, remedy) as offline:
        if offline and not repository:  # only the hub's library can use its cache alone
            raise network_error(offline)
        vit = cast(Encoder, timm.create_model(name, pretrained=True, num_classes=0))
    about = cast(dict[str, Any], vit.pretrained_cfg)
    mean, std = tuple(about["mean"]), tuple(about["std"])
    return vit.eval(), EncoderCard(None, mean, std, f"timm:{name}", name, license=timm_license(name))


def build_with(spec: EncoderSpec, weights: State, path: Path) -> Encoder:
    """Build an encoder in eval mode with the weights in a file, unless these have other sizes than its card."""
    with expect_intact(path):
        net = outline(spec)  # before memory is allocated
        check_affordable(net, weights.values())
        _expect_shapes(net, weights)
    vit = build_encoder(spec)
    vit.load_state_dict(weights, strict=True)
    return vit.eval()


def _expect_shapes(net: nn.Module, weights: State) -> None:
    own, theirs = ({name: one.shape for name, one in state.items()} for state in (net.state_dict(), weights))
    if own != theirs:
        raise ValueError("its weights have other sizes than its card names")


def check_affordable(net: Encoder, weights: Iterable[Tensor]) -> None:
    """Raise an error for a net that is much larger than its weights, or has large buffers, which files do not hold."""
    if sum(one.numel() for one in net.parameters()) > 4 * sum(one.numel() for one in weights) + 2**22:
        raise ValueError("it holds fewer weights than its encoder has")
    if (size := sum(one.nbytes for one in net.buffers())) > _LARGEST_BUFFERS:
        raise ValueError(f"its buffers need {size / 2**30:.1f} GiB")


def refuse_larger(card: EncoderCard, weights: State, path: Path) -> None:
    """Raise an error if a card's encoder is not affordable, before memory is allocated."""
    with expect_intact(path):
        net = stock_encoder(card.timm_name) if card.spec is None else outline(card.spec)
        check_affordable(net, weights.values())


def timm_license(name: str) -> str:
    """Return the licence of the weights that timm publishes under a name."""
    about = timm.models.get_pretrained_cfg(name)
    return license_from(None if about is None else about.license)


def join_licenses(*stated: str) -> str:
    """Join licences by the AND of SPDX expressions; "" is left out, and joined ones are split first."""
    return _AND.join(dict.fromkeys(one for each in stated for one in split_licenses(each)))


def split_licenses(joined: str) -> list[str]:
    """Return the licences that `join_licenses` joined."""
    return joined.split(_AND) if joined else []


def license_from(stated: Any) -> str:
    """Return the licence that an untrusted file or timm states, as printable text, or else `UNKNOWN_LICENSE`."""
    found = printable(" ".join(stated.split()), 100) if isinstance(stated, str) else ""
    return found or UNKNOWN_LICENSE


def untrained_twin(
    card: EncoderCard, head: InstanceHead | None = None, seed: int = 0
) -> tuple[Encoder, InstanceHead | None]:
    """Build an untrained encoder of the same kind, the control of every result, and an untrained head for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if card.spec is not None:
            twin = build_encoder(card.spec)
        else:
            twin = cast(Encoder, timm.create_model(card.timm_name, pretrained=False, num_classes=0))
        fresh = None if head is None else InstanceHead(**head.sizes).eval()
        return twin.eval(), fresh


# Modules saved beside an encoder, each in its own file; the encoder's card lists their uses.


MODULE_FORMAT = "patchloom-module-1"


def save_extra_module(module: nn.Module, path: Path) -> None:
    """Write the ``state_dict`` of a module of `EXTRA_MODULES`, its class, and the ``sizes`` that rebuild it.

    The file is written atomically.
    """
    if type(module).__name__ not in EXTRA_MODULES:
        raise ValueError(f"{type(module).__name__} is not in EXTRA_MODULES: add its builder there")
    save_net(module, MODULE_FORMAT, {"kind": type(module).__name__, "sizes": module.sizes}, path)


@dataclass(frozen=True)
class ModuleCard:
    """Metadata of the weights of a module of `EXTRA_MODULES`: its class, and its ``sizes``."""

    kind: str
    sizes: dict[str, Any]


def load_extra_module(source: str | Path, use: Use) -> tuple[str, nn.Module] | None:
    """Load the module beside an encoder for ``use``, in eval mode, with its file's name.

    None if the encoder's card lists none, or the encoder was copied without its modules.
    """
    if str(source).startswith("timm:"):
        return None
    path = weights_file(source)
    card = card_of(path) if path.name == ENCODER_FILE else None
    uses = {} if card is None else card.extra_modules
    named = (path.with_name(f"{name}.safetensors") for name, good_for in uses.items() if good_for == use)
    file = next((one for one in named if one.exists()), None)
    if file is None:
        return None
    about, weights = read_about(file, MODULE_FORMAT, "a module beside an encoder"), read_weights(file)
    with expect_intact(file):
        module_card = checked_card(ModuleCard, about)
        builds = EXTRA_MODULES[module_card.kind]
        made_by = builds.__init__ if isinstance(builds, type) else builds  # type: ignore[misc]  # no subclass
        check_arguments(module_card.sizes, get_type_hints(made_by), 2**16)
        if (depth := module_card.sizes.get("depth")) is not None and depth > len(weights):
            raise ValueError(f"it has fewer weights than {depth} blocks")
        with on_meta():  # before memory is allocated
            _expect_shapes(builds(**module_card.sizes), weights)
        module = builds(**module_card.sizes)
        module.load_state_dict(weights, strict=True)
    return file.name, module.eval()


def check_arguments(given: Mapping[str, Any], hints: Mapping[str, Any], most: int) -> None:
    """Raise an error for arguments of a card that have other types, or are numbers below 1 or above ``most``."""
    for name, value in given.items():
        if name not in hints or not conforms(value, hints[name]):
            raise ValueError(f"it has the argument {str(name)[:40]!r} of {str(value)[:40]!r}")
        check_range(name, value, 1, most)
