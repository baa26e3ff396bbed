"""Encoders of runs, finished or not, of files, and of timm."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from patchloom.arguments import PathLike, plain_path, validate_arguments
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints import format
from patchloom.nets.checkpoints.fit import load_bare_module, load_pretrained
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.live import LiveEncoder, has_no_folder
from patchloom.nets.checkpoints.origin import Weights, check_model, kind_of
from patchloom.nets.heads import InstanceHead, Use
from patchloom.nets.lora import merged
from patchloom.nets.swin import Encoder
from patchloom.options.evaluate import Network
from patchloom.results.claims import OF_TEACHER, START
from patchloom.runs.folder import RunFolder, check_links, run_around, suggest_run
from patchloom.runs.task import load_task, newest_card
from patchloom.tasks.custom import is_loaded

STUDENT_WEIGHTS, STUDENT_CARD = "student.safetensors", "student.json"  # that patchloom distill writes
_ENCODER = "encoder."


_TEACHER = re.compile(r"questions\.\w+\.teacher\.encoder\.")  # a moving average, in the weights of a task


def encoder_place(run: PathLike | nn.Module, mean: Any = None, std: Any = None) -> str | Path:
    """Return the place of an encoder that a Python call is given, for the functions below.

    Args:
        run: folder of a run, file or ``timm:NAME``; or a module, which becomes a `LiveEncoder`.
        mean, std: statistics of a module's images, as for `LiveEncoder.of`.

    Raises:
        PatchloomError: the module cannot be used, or there are statistics for anything else.
    """
    if isinstance(run, nn.Module):
        return LiveEncoder.of(run, mean, std)
    if mean is not None or std is not None:
        raise PatchloomError("mean and std are for a module: a run, a file and timm:NAME have their own")
    return plain_path(run)


def unfinished_run(source: str | Path) -> RunFolder | None:
    """Return the folder of a run with a checkpoint but no encoder yet; None for any other ``source``."""
    if has_no_folder(source):
        return None
    folder = RunFolder(source)
    begun = folder.config.exists() and folder.checkpoints.there()
    return folder if begun and not folder.encoder.exists() and folder.read_summary() is None else None


def encoder_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the encoder's tensors of a task, with timm's names; low-rank updates are merged."""
    own = {name.removeprefix(_ENCODER): value for name, value in tensors.items() if name.startswith(_ENCODER)}
    return merged(own)


def check_place(source: str | Path) -> None:
    """Refuse a path without an encoder, and suggest what was meant."""
    if has_no_folder(source) or unfinished_run(source) is not None:
        return
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    if path in (folder, folder / format.ENCODER_FILE) and (folder / "config.yaml").is_file():
        check_links(folder)  # results may be written into this run
    if path in (folder, folder / STUDENT_WEIGHTS) and (folder / STUDENT_CARD).is_file():
        raise PatchloomError(
            f"{path} is a student of patchloom distill, and not an encoder with a card: distill --labels compares a "
            "student with its teacher, and docs/how-to/distill.md shows how timm loads it"
        )
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
                hint = "the run has finished, so it was removed later; to write it again, delete summary.txt and "
                hint += "repeat the run's command"
        raise PatchloomError(f"there is no encoder at {path}: {hint}")


@validate_arguments
def load_encoder(
    source: PathLike, model: str | None = None, network: Network | None = None
) -> tuple[Encoder, EncoderCard]:
    """Load an encoder in eval mode, and its card.

    Args:
        source: folder of a run; ``.safetensors`` file of an encoder; ``timm:NAME`` for weights that timm publishes;
            folder in the format of the Hugging Face Hub, of timm's or of transformers' ViT, ViTMAE or DINOv2; or, with
            ``model``, a file of bare weights with timm's or transformers' names, saved by torch or safetensors. Files
            of the papers' own programs need no ``model``. For an interrupted run, the encoder of the newest checkpoint
            is loaded, and the card's name and note say so.
        model: timm's name of the model, for a file of bare weights.
        network: student or teacher, the moving average that some tasks train beside it, such as extrema and lut. By
            default the student of a run, and from a file of ExtreMA's program the teacher, whose frozen features its
            authors evaluate.

        An encoder of recordings takes pictures of waveforms [b 1 1 n], int16 or float in [-1, 1], with n =
        ``card.sound.samples`` at ``card.sound.rate`` per second::

        from patchloom.data.stats import normalize
        from patchloom.audio.spectrogram import pictures

        encoder, card = patchloom.load_encoder("runs/speech-mp3")
        tokens = encoder.forward_features(normalize(pictures(waves, card.sound), card.mean, card.std))

    Raises:
        PatchloomError: no encoder was found, or it cannot be loaded.
    """
    source = plain_path(source)
    check_place(source)
    check_model(source, model)
    folder = unfinished_run(source)
    if folder is None:
        if network == "teacher" and kind_of(source) in ("module", "timm", "patchloom"):
            vit, card = load_pretrained(_teacher_file(source))
            now = _with_current_name(card, source)
            return vit, card if now is card else replace(now, name=now.name + OF_TEACHER)
        vit, card = load_pretrained(source, model, network=network)
        return vit, _with_current_name(card, source)
    settings = folder.read_config()
    tensors, about = folder.checkpoints.newest()
    own = encoder_weights(tensors)
    if network == "teacher":
        own = {_TEACHER.sub("", name): value for name, value in tensors.items() if _TEACHER.match(name)}
        if not own:
            raise _no_teacher(source)
    vit = format.build_with(settings.encoder_spec(), own, folder.checkpoints.last)
    card = newest_card(folder, settings, about)
    return vit, replace(card, name=card.name + OF_TEACHER) if network == "teacher" else card


def _run_of(source: str | Path) -> RunFolder | None:
    """Return the run whose folder, or encoder's file, ``source`` is; None for any other source."""
    path = Path(source)
    folder = RunFolder(path if path.is_dir() else path.parent)
    return folder if path.is_dir() or path.name == folder.encoder.name else None


def has_teacher(source: str | Path) -> bool:
    """Return whether a run, finished or not, has a teacher beside the student, or a file of ExtreMA or LUT."""
    if (folder := unfinished_run(source)) is not None:
        return any(map(_TEACHER.match, folder.checkpoints.newest()[0]))
    if kind_of(source) in ("module", "timm", "patchloom"):
        return (folder := _run_of(source)) is not None and folder.teacher.is_file()
    foreign = Weights(source).foreign
    return foreign is not None and bool(foreign.encoder_of("teacher"))


def _teacher_file(source: str | Path) -> Path:
    """Return the file of the teacher's encoder of a finished run."""
    folder = _run_of(source)
    if folder is None or not folder.teacher.is_file():
        raise _no_teacher(source)
    return folder.teacher


def _no_teacher(source: str | Path) -> PatchloomError:
    return PatchloomError(
        f"{source} has no teacher: leave out --network (tasks such as extrema, lut and latent train one)"
    )


def load_start(source: str | Path) -> tuple[Encoder, EncoderCard] | None:
    """Load the weights that a run began with, in eval mode, and their card with their own normalisation.

    Args:
        source: folder of a run, or ``encoder.safetensors`` in it.

    Returns:
        None for a run from random weights, and without a run.

    Raises:
        PatchloomError: the file is damaged.
    """
    folder = _run_of(source)
    if folder is None or not folder.start.is_file():
        return None
    vit, card = load_pretrained(folder.start)
    return vit, replace(card, name=START)


def load_blend(source: str | Path, share: float) -> tuple[Encoder, EncoderCard]:
    """Load the blend of a run's encoder with its start, as in `blend`, and its card.

    Raises:
        PatchloomError: there is no start, or the two cannot be blended.
    """
    start = load_start(source)
    if start is None:
        raise PatchloomError(
            f"{source} has no start.safetensors: only runs with --init or --from have it; use its encoder unblended"
        )
    return start if share == 0 else blend(start, load_encoder(source), share)


def blend(
    start: tuple[Encoder, EncoderCard], adapted: tuple[Encoder, EncoderCard], share: float
) -> tuple[Encoder, EncoderCard]:
    """Return the encoder with the weights (1 - share) * start + share * adapted, and its card.

    This is WiSE-FT (Wortsman et al. 2022, arXiv:2109.01903). Mean and deviation of the images are blended, too. A share
    of 0 gives exactly the start, and 1 the adapted weights.

    Raises:
        PatchloomError: the two have other parts or sizes.
    """
    (first, its), (second, own) = start, adapted
    before, after = first.state_dict(), second.state_dict()
    shapes, others = ({name: tuple(one.shape) for name, one in state.items()} for state in (before, after))
    if its.spec != own.spec or its.sound != own.sound or shapes != others:
        name = next((name for name in {**shapes, **others} if shapes.get(name) != others.get(name)), "the model")
        raise PatchloomError(
            f"{own.name} cannot be blended with its start, because {name} is another one there: restore "
            "start.safetensors from a copy, or train again"
        )
    mixed = deepcopy(second)
    mixed.load_state_dict({name: torch.lerp(before[name], after[name], share) for name in after})
    mean, std = _between(its.mean, own.mean, share), _between(its.std, own.std, share)
    note = f"{own.note} The weights are {1 - share:.3g} of the start and {share:.3g} of the adapted encoder (WiSE-FT)."
    name = f"{own.name}, blend {share:g}"
    return mixed.eval(), replace(own, mean=mean, std=std, name=name, note=note.strip(), extra_modules={})


def _between(first: tuple[float, ...], second: tuple[float, ...], share: float) -> tuple[float, ...]:
    one, other = (torch.tensor(values, dtype=torch.float64) for values in (first, second))
    return tuple(torch.lerp(one, other, share).tolist())


def _with_current_name(card: EncoderCard, source: str | Path) -> EncoderCard:
    """Return the card with the present name of the run's folder; unchanged without a run."""
    folder = _run_of(source)
    return card if folder is None or not folder.config.is_file() else replace(card, name=folder.name)


@overload
def load_extra_module(
    source: PathLike, use: Literal["pooling"], network: Network | None = None
) -> InstanceHead | None: ...
@overload
def load_extra_module(source: PathLike, use: Use, network: Network | None = None) -> nn.Module | None: ...
@validate_arguments
def load_extra_module(source: PathLike, use: Use, network: Network | None = None) -> nn.Module | None:
    """Load the extra module beside an encoder for ``use``, in eval mode; None if there is none.

    Args:
        source, network: as for `load_encoder`.
        use: purpose of the module.

    Raises:
        PatchloomError: no encoder was found, or the module's file is damaged or not from patchloom.
    """
    found = named_extra_module(plain_path(source), use, network)
    return None if found is None else found[1]


def named_extra_module(source: str | Path, use: Use, network: Network | None = None) -> tuple[str, nn.Module] | None:
    """Return the name of the present or future file of the module of `load_extra_module`, and the module."""
    if isinstance(source, LiveEncoder):
        return None
    folder = unfinished_run(source)
    if folder is not None and not is_loaded(folder.read_config().task["name"]):
        return None  # only the task's class knows its modules, and the user has not allowed to run its code
    if folder is not None:
        task = load_task(source).task
        modules = task.extra_modules()
        if network == "teacher":
            modules = {name: one for name, one in task.teacher_modules().items() if name != "encoder"}
        return next(((f"{name}.safetensors", one.eval()) for name, one in modules.items() if one.use == use), None)
    if kind_of(source) == "bare":
        module = load_bare_module(Path(source), use, network)
        return None if module is None else ("instance_head.safetensors", module)
    if network == "teacher":
        source = _teacher_file(source)
    return format.load_extra_module(source, use)
