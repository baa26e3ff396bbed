"""The encoder that a user means: of a run, finished or not, of a file, or one that timm publishes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, overload

from torch import Tensor, nn

from patchloom.arguments import PathLike, plain_path, validate_arguments
from patchloom.errors import PatchloomError
from patchloom.nets.build import build_encoder
from patchloom.nets.checkpoints import format
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.load import check_model, kind_of, load_bare_module, load_pretrained
from patchloom.nets.heads import InstanceHead, Use
from patchloom.nets.swin import Encoder
from patchloom.runs.folder import RunFolder, run_around, suggest_run
from patchloom.runs.task import load_task, newest_card
from patchloom.tasks.custom import is_loaded

_ENCODER = "encoder."


def unfinished_run(source: str | Path) -> RunFolder | None:
    """The folder of a run that has a checkpoint, and no encoder yet; None if ``source`` is anything else."""
    if str(source).startswith("timm:"):
        return None
    folder = RunFolder(source)
    begun = folder.config.exists() and folder.checkpoints.there()
    return folder if begun and not folder.encoder.exists() and folder.read_summary() is None else None


def encoder_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a task's tensors that are its encoder's, by timm's names."""
    return {name.removeprefix(_ENCODER): value for name, value in tensors.items() if name.startswith(_ENCODER)}


def check_place(source: str | Path) -> None:
    """Refuse a path at which no encoder can be, with what may have been meant."""
    if str(source).startswith("timm:") or unfinished_run(source) is not None:
        return
    path = Path(source)
    around = run_around(path)
    checkpoint = around is not None and path.parent == around / "checkpoints"
    if checkpoint or not format.find_weights(path).is_file():
        hint = (
            suggest_run(path)
            or format.published_like(source)
            or "give a run's folder, one of the Hugging Face Hub, a file of weights or timm:NAME"
        )
        if (path / "config.yaml").is_file():
            hint = "the run has no checkpoint yet, so let it train first"
            if RunFolder(path).read_summary() is not None:
                hint = "it was there when the run had finished; to have it written again, delete summary.txt and give "
                hint += "the run's command once more"
        raise PatchloomError(f"there is no encoder at {path}: {hint}")


@validate_arguments
def load_encoder(source: PathLike, model: str | None = None) -> tuple[Encoder, EncoderCard]:
    """An encoder in eval mode, and its card.

    Args:
        source: a run's folder; an encoder's ``.safetensors`` file; ``timm:NAME`` for weights that timm publishes; a
            folder as the Hugging Face Hub has it, of timm's or of transformers' ViT, ViTMAE or DINOv2; or, with
            ``model``, a file of weights alone by timm's or transformers' names, which torch or safetensors saved; it
            may be left out for what the papers' own programs saved. Of a run that was stopped it is the encoder of the
            newest checkpoint, and the card's name and note say so.
        model: timm's name of the model, for a file of weights alone.

    An encoder of recordings is given their pictures, which ``card.sound`` describes: of waveforms [b 1 1 n], int16 or
    float in [-1, 1], of ``card.sound.samples`` at ``card.sound.rate`` a second::

        from patchloom.data.stats import normalize
        from patchloom.audio.spectrogram import pictures

        encoder, card = patchloom.load_encoder("runs/speech-mp3")
        tokens = encoder.forward_features(normalize(pictures(waves, card.sound), card.mean, card.std))

    Raises:
        PatchloomError: nothing of that kind is there, or it cannot be served.
    """
    source = plain_path(source)
    check_place(source)
    check_model(source, model)
    folder = unfinished_run(source)
    if folder is None:
        vit, card = load_pretrained(source, model)
        return vit, _with_current_name(card, source)
    settings = folder.read_config()
    tensors, about = folder.checkpoints.newest()
    own = encoder_weights(tensors)
    spec = format.refuse_other_sizes(settings.encoder_spec(), own, folder.checkpoints.last)
    vit = build_encoder(spec)
    with format.expect_intact(folder.checkpoints.last):
        vit.load_state_dict(own, strict=True)
    return vit.eval(), newest_card(folder, settings, about)


def _with_current_name(card: EncoderCard, source: str | Path) -> EncoderCard:
    """The card with the name of the run's folder, which may have been renamed since; as it is without a run."""
    path = Path(source)
    folder = RunFolder(path if path.is_dir() else path.parent)
    own = path.is_dir() or path.name == folder.encoder.name
    return replace(card, name=folder.name) if own and folder.config.is_file() else card


@overload
def load_extra_module(source: PathLike, use: Literal["pooling"]) -> InstanceHead | None: ...
@overload
def load_extra_module(source: PathLike, use: Use) -> nn.Module | None: ...
@validate_arguments
def load_extra_module(source: PathLike, use: Use) -> nn.Module | None:
    """The module beside an encoder that is good for ``use``, in eval mode; None if there is none.

    Args:
        source: as `load_encoder` takes it.
        use: for which a module is wanted.

    Raises:
        PatchloomError: no encoder there, or the module's file is damaged, or not one that patchloom wrote.
    """
    found = named_extra_module(plain_path(source), use)
    return None if found is None else found[1]


def named_extra_module(source: str | Path, use: Use) -> tuple[str, nn.Module] | None:
    """As `load_extra_module`, with the name of the file in which it is, or will be when the run is finished."""
    folder = unfinished_run(source)
    if folder is not None and not is_loaded(folder.read_config().task["name"]):
        return None  # the class tells which modules there are, and nobody has asked to run its code
    if folder is not None:
        modules = load_task(source).task.extra_modules()
        return next(((f"{name}.safetensors", one.eval()) for name, one in modules.items() if one.use == use), None)
    if kind_of(source) == "bare":
        module = load_bare_module(Path(source), use)
        return None if module is None else ("instance_head.safetensors", module)
    module, path = format.load_module_file(source, use), format.extra_module_file(source, use)
    return None if module is None or path is None else (path.name, module)
