"""An encoder as a file: timm's names and nothing else, with all that is needed to build it again in the metadata."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer

from patchloom.errors import PatchloomError
from patchloom.files import write_whole
from patchloom.nets.encode import EncoderSpec, build_encoder, check_servable

FORMAT = "patchloom-encoder-1"


@dataclass(frozen=True)
class EncoderCard:
    """What belongs to an encoder's weights.

    Attributes:
        spec: how to build it; None for one that came from timm, which is built by its name.
        mean, std: per channel, in [0, 1] units; images are normalised with them.
        task: pretext task by which it was trained; "untrained" or a timm name otherwise.
        name: what it is called in reports.
    """

    spec: EncoderSpec | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    task: str
    name: str


def save_encoder(vit: VisionTransformer, card: EncoderCard, path: Path) -> None:
    """Write the encoder's ``state_dict`` and card; the file appears whole or not at all."""
    about = {FORMAT: json.dumps(asdict(card))}  # one key: the order of several would differ from file to file
    weights = {name: value.detach().cpu().contiguous() for name, value in vit.state_dict().items()}
    write_whole(path, save(weights, metadata=about))


def read_card(path: Path) -> EncoderCard:
    """The card of an encoder file.

    Raises:
        PatchloomError: no such file, or none that patchloom wrote.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
    except (OSError, SafetensorError) as problem:
        raise PatchloomError(f"{path} cannot be read as encoder weights ({problem}): is it whole?") from problem
    if FORMAT not in about:
        raise PatchloomError(f"{path} has no patchloom metadata: use a file that patchloom wrote, or timm:NAME")
    card = json.loads(about[FORMAT])
    spec = card["spec"] | {"img_size": tuple(card["spec"]["img_size"])}
    return EncoderCard(EncoderSpec(**spec), tuple(card["mean"]), tuple(card["std"]), card["task"], card["name"])


def load_encoder(source: str | Path) -> tuple[VisionTransformer, EncoderCard]:
    """An encoder in eval mode, and its card.

    Args:
        source: a run's folder, an encoder's ``.safetensors`` file, or ``timm:NAME`` for weights that timm publishes.

    Raises:
        PatchloomError: nothing of that kind is there, or it cannot be served.
    """
    if str(source).startswith("timm:"):
        return _from_timm(str(source).removeprefix("timm:"))
    path = Path(source)
    if path.is_dir():
        path = path / "encoder.safetensors"
    if not path.exists():
        raise PatchloomError(f"there is no encoder at {path}: give a finished run, a .safetensors file or timm:NAME")
    card = read_card(path)
    vit = build_encoder(card.spec)
    with safe_open(path, "pt") as file:
        vit.load_state_dict({name: file.get_tensor(name) for name in file.keys()}, strict=True)
    return vit.eval(), card


def _from_timm(name: str) -> tuple[VisionTransformer, EncoderCard]:
    if not timm.is_model(name.split(".")[0]):
        raise PatchloomError(f"timm has no model called {name}: timm.list_models('vit*', pretrained=True) lists them")
    try:
        vit = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as problem:  # hubs fail in many ways, and every one of them means: no weights
        raise PatchloomError(f"the weights of {name} could not be fetched ({problem}): check the network") from problem
    check_servable(vit, name)
    about = vit.pretrained_cfg
    return vit.eval(), EncoderCard(None, tuple(about["mean"]), tuple(about["std"]), f"timm:{name}", name)


def untrained_twin(vit: VisionTransformer, card: EncoderCard, seed: int = 0) -> VisionTransformer:
    """A fresh encoder of the same kind: the control beside which every result is printed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if card.spec is not None:
            return build_encoder(card.spec).eval()
        return timm.create_model(card.name, pretrained=False, num_classes=0).eval()
