"""``export``: an encoder goes home to timm, and proves that it arrived."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from patchloom.calls import PathLike, checked
from patchloom.data import DataLike, named, normalize, open_data, plain_batches
from patchloom.data.sound.code import code_of_pictures
from patchloom.data.sound.features import pictures
from patchloom.data.sound.hearing import first_waves, heard_by
from patchloom.data.sources.addresses import PIPE
from patchloom.errors import PatchloomError
from patchloom.files import write_whole
from patchloom.nets.encode import encode, final_norm, patch_count
from patchloom.nets.heads import represent
from patchloom.nets.plain import read_foreign
from patchloom.nets.states import plain_file
from patchloom.nets.weights import EncoderCard
from patchloom.runs.encoder import check_place, load_encoder, named_extra_module
from patchloom.runs.folder import RunFolder
from patchloom.shown import Shown, Verbatim
from patchloom.sound import Sound, noun_of
from patchloom.withhold.encoder_input import all_patches

_IMAGES = 16


@dataclass(frozen=True, repr=False)
class Export(Shown):
    """What was written.

    Attributes:
        weights: a safetensors file of timm's names.
        head: that of the instance head, or None if there is none beside the encoder.
        difference: largest absolute difference between our features, instance representation among them, and those
            that the snippet computes.
        images: on how many images, or recordings, they were compared.
        snippet: code that loads the weights with timm alone, and makes features of images in [0, 1], or of waveforms.
        compared_on: "images" or "recordings", or "images of noise" or "recordings of noise" where those of the run were
            not to be had.
        notes: sentences about that, and about a run that is not finished.
        sound: how recordings become its pictures; None of an encoder of images.
    """

    weights: Path
    head: Path | None
    difference: float
    images: int
    snippet: str
    compared_on: str = "images"
    notes: tuple[str, ...] = ()
    sound: Sound | None = None

    def parts(self, width: int) -> list[str]:
        """See `Shown`."""
        return [Verbatim(self.sentence()), *self.notes, "", Verbatim(self.snippet)]

    def sentence(self) -> str:
        """What was written, and how it was compared."""
        files, what = f"{self.weights}", "features"
        if self.head is not None:
            files, what = f"{files} and {self.head}", "features, the instance representation among them,"
        done = f"{files}: timm's {what} differ by at most {self.difference:.1e} on {self.images} {self.compared_on}."
        if self.sound is None:
            return done
        return f"{done} It takes {self.sound.seconds:g} s at {self.sound.rate:,} samples a second, one channel."


@checked
def export(run: PathLike, *, to: str = "timm", data: DataLike | None = None, out: str | Path | None = None) -> Export:
    """Write an encoder for use without patchloom, run the code that uses it, and compare features of images or sounds.

    An instance head beside the encoder goes with it, into a file whose name begins with the encoder's.

    Args:
        run: a run's folder, also of one that was stopped, an encoder's ``.safetensors`` file, or what a paper's own
            program saved of a model of the usual sizes.
        to: the library: timm.
        data: images or recordings to compare on; if absent, those of the run, or noise where they are not to be had.
        out: the file to write; ``RUN/timm.safetensors`` if absent.

    Raises:
        PatchloomError: an unknown library, no encoder there, or features that differ after loading.
    """
    if to != "timm":
        raise PatchloomError(f"patchloom exports to timm, not to {to}: use --to timm")
    if plain_file(run):
        check_place(run)  # it may be a checkpoint, beside what was meant
    if plain_file(run) and None in read_foreign(Path(run)):
        raise PatchloomError(f"{run} holds weights alone, which patchloom did not write: nothing has to be exported")
    vit, card = load_encoder(run)
    if card.spec is None:
        raise PatchloomError(f"{card.name} comes from timm already: load it there")
    path = Path(out) if out else (Path(run) if Path(run).is_dir() else Path(run).parent) / "timm.safetensors"
    examples, why_noise = _examples(run, data, card)
    files = {path: save(vit.state_dict())}
    head = None
    if (beside := named_extra_module(run, "pooling")) is not None:
        own, head = beside
        head_file = path.with_name(f"{path.stem}-{own}")  # two encoders in a folder keep theirs
        files[head_file] = save(head.state_dict())

    def snippet(folder: Path) -> str:
        arguments, file, sound = card.spec.timm_arguments(), folder / path.name, card.sound
        if sound is None:
            code = _snippet(arguments, file, card.mean, card.std)
        else:
            code = _snippet_of_waves(arguments, file, sound)
        return code if head is None else code + _head_snippet(folder / head_file.name, sound is not None, **head.sizes)

    pasted: dict[str, Any] = {}
    with TemporaryDirectory() as folder:  # what is there already stays until all has been compared
        for file, content in files.items():
            Path(folder, file.name).write_bytes(content)
        exec(snippet(Path(folder)), pasted)  # its own normalisation, too, is part of what is compared
    with torch.inference_mode():
        images = examples if card.sound is None else pictures(examples, card.sound)
        given = all_patches(normalize(images, card.mean, card.std), patch_count(vit))
        tokens = encode(vit, given, norm=False)
        difference = _difference("features", final_norm(vit, tokens), pasted["features"](examples).view_as(tokens))
        if head is not None:
            theirs = pasted["represent"](examples)
            difference = max(difference, _difference("instance features", represent(vit, head, tokens), theirs))
    for file, content in files.items():
        write_whole(file, content)
    notes = tuple(filter(None, (card.note, why_noise)))
    compared_on = f"{noun_of(card.sound)}{' of noise' * bool(why_noise)}"
    written = None if head is None else head_file
    return Export(path, written, difference, len(examples), snippet(path.parent), compared_on, notes, card.sound)


def _difference(what: str, ours: Tensor, theirs: Tensor) -> float:
    difference = (theirs - ours).abs().max().item()
    if not difference <= 1e-3 * ours.abs().max().item():  # true of nan too
        raise PatchloomError(
            f"{what} by the code that uses timm differ by {difference:.2e}: this is a bug, please report it"
        )
    return difference


def _examples(run: str | Path, data: DataLike | None, card: EncoderCard) -> tuple[Tensor, str]:
    """What users have, and a sentence if it is noise: images [b c h w] in [0, 1], or waveforms [b n] in [-1, 1].

    Raises:
        PatchloomError: the images that were named cannot be read.
    """
    noun = noun_of(card.sound)
    if data is not None:
        return _real(data, card), ""
    if not Path(run).is_dir():
        why = f"{run} does not tell which {noun} it was trained on"
    elif any(str(one).startswith(PIPE) for one in named(RunFolder(run).read_config().data)):
        # a run may come from a stranger
        why = "the run trained on what a command gives, which is only run for who types it"
    else:
        try:
            return _real(RunFolder(run).read_config().data, card), ""
        except PatchloomError as problem:
            why = f"the {noun} of the run are not to be had ({problem})"
    generator = torch.Generator().manual_seed(0)
    if card.sound is not None:
        said = f"Compared on noise, since {why}: --data RECORDINGS compares on recordings."
        return (0.1 * torch.randn(_IMAGES, card.sound.samples, generator=generator)).clamp(-1, 1), said
    # noise of the same statistics, so that the normalisation is compared where it is used
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    noise = torch.randn(_IMAGES, card.spec.channels, *card.spec.img_size, generator=generator)
    said = f"Compared on noise, since {why}: --data PHOTOS compares on images."
    return (mean + std * noise).clamp(0, 1), said


def _real(data: DataLike, card: EncoderCard) -> Tensor:
    channels = card.spec.channels
    source = heard_by(open_data(data), card.sound, card.name).train
    if card.sound is not None:
        return first_waves(source, _IMAGES)
    batch = next(plain_batches(source, card.spec.img_size, _IMAGES, channels=channels))
    return normalize(batch.views[0], (0.0,) * channels, (1.0,) * channels)


def _snippet(arguments: dict[str, Any], path: Path, mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    h, w = arguments["img_size"]
    # no digit is left out: those of dark images are small, and what is rounded away is divided by the deviation
    return (
        f"{_loading(arguments, path)}"
        "# of each channel, of pixels in [0, 1]\n"
        f"mean = torch.tensor({list(mean)}).view(-1, 1, 1)\n"
        f"std = torch.tensor({list(std)}).view(-1, 1, 1)\n\n\n"
        "def features(images):\n"
        f'    """{_tokens(arguments)} of images [b {arguments["in_chans"]} {h} {w}] in [0, 1]."""\n'
        "    return encoder.forward_features((images - mean) / std)\n"
    )


def _snippet_of_waves(arguments: dict[str, Any], path: Path, sound: Sound) -> str:
    length = f"{sound.seconds:g} s at {sound.rate:,} Hz"
    return (
        f"{_loading(arguments, path)}\n"
        f"{code_of_pictures(sound)}\n\n"
        "def features(waves):\n"
        f'    """{_tokens(arguments)} of waveforms [b {sound.samples}] in [-1, 1]: {length}."""\n'
        "    return encoder.forward_features(pictures(waves))\n"
    )


def _loading(arguments: dict[str, Any], path: Path) -> str:
    # None is what timm leaves out, whatever its name: the others' are parameters of timm, so that no file brings code
    given = {key: value for key, value in arguments.items() if key != "model_name" and value is not None}
    options = "".join(f"    {key}={value!r},\n" for key, value in given.items())
    return (
        "import timm\n"
        "import torch\n"
        "from safetensors.torch import load_file\n\n"
        f"encoder = timm.create_model(\n    {arguments['model_name']!r},\n{options})\n"
        f"encoder.load_state_dict(load_file({str(path)!r}))\n"
        "encoder.eval()\n"
    )


def _tokens(arguments: dict[str, Any]) -> str:
    return (
        "Units [b rows columns d]" if "depths" in arguments or "swin" in arguments["model_name"] else "Tokens [b n d]"
    )


def _head_snippet(path: Path, of_sound: bool, width: int, heads: int, depth: int) -> str:
    argument, given = ("waves", "pictures(waves)") if of_sound else ("images", "(images - mean) / std")
    return (
        "\n\nfrom functools import partial\n\n"
        "from timm.models.cait import LayerScaleBlockClassAttn\n\n"
        "norm = partial(torch.nn.LayerNorm, eps=1e-6)\n"
        f"weights = load_file({str(path)!r})\n"
        'class_token = weights.pop("token")\n'
        "blocks = torch.nn.ModuleList(\n"
        f"    LayerScaleBlockClassAttn({width}, {heads}, qkv_bias=True, norm_layer=norm) for _ in range({depth})\n"
        ")\n"
        'blocks.load_state_dict({name.removeprefix("layers."): value for name, value in weights.items()})\n'
        "blocks.eval()\n\n\n"
        f"def represent({argument}):\n"
        '    """Instance representation [b d]: a class token asks the patch tokens, which are not normed yet."""\n'
        f"    given = {given}\n"
        '    patches = encoder.forward_intermediates(given, indices=1, output_fmt="NLC", intermediates_only=True)[0]\n'
        "    token = class_token.expand(len(given), -1, -1)\n"
        "    for block in blocks:\n"
        "        token = block(patches, token)\n"
        "    return encoder.norm(token)[:, 0]\n"
    )
