"""Defaults by device: what ``auto`` becomes where speed decides, and why."""

from __future__ import annotations

import os
import shutil

import torch

from patchloom import machine
from patchloom.errors import PatchloomError
from patchloom.machine import Cores, best_threads, bfloat16_pays, compile_gain, cores, fused_gain, when
from patchloom.nets import native
from patchloom.nets.build import EncoderSpec, outline
from patchloom.nets.native.blocks import serves
from patchloom.nets.native.choice import NOT_SERVED, choose_kernels
from patchloom.nets.performance import attention_shape

_WORTH = 1.05  # less than that is noise
_CLEARLY = 0.8  # forms that are nearly alike shall not be chosen by chance: the results differ in their last digits

_MAX_EXPLICIT = 2**28  # numbers: of an explicit softmax of one image, GiB and seconds even to try it


def device() -> tuple[str, str]:
    """The best device there is."""
    if torch.cuda.is_available():
        return "cuda", "a CUDA GPU is there"
    if torch.backends.mps.is_available():
        return "mps", "an Apple GPU is there"
    return "cpu", "no GPU was found"


def threads(device: str) -> tuple[int, str]:
    """As many as multiply fastest."""
    if device != "cpu":
        return torch.get_num_threads(), "the device does the work"
    best, there = best_threads(), cores()
    of = "there is one core" if there == 1 else f"products are fastest so, of {there} cores{when(best)}"
    return round(best), of


def workers(device: str, here: Cores) -> tuple[int, str]:
    """Processes that read images; where they are in memory, cropping them is still work."""
    return machine.workers(device, here, least=1)


def precision(device: str) -> tuple[str, str]:
    """Half the bits where products gain from it."""
    if device == "cuda":
        good = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bfloat16", "the GPU has it") if good else ("float16", "the GPU has no bfloat16")
    if device == "mps":
        return "float32", "the safe choice on an Apple GPU"
    pays, why = bfloat16_pays()
    return ("bfloat16" if pays else "float32"), why


def attention(device: str, precision: str, spec: EncoderSpec) -> tuple[str, str]:
    """The form that is faster for the encoder's shape."""
    if device != "cpu":
        return "fused", "the usual choice on a GPU"
    heads, tokens, side = attention_shape(outline(spec))
    if heads * tokens**2 > _MAX_EXPLICIT:
        return "fused", f"an explicit softmax would hold {heads} tables of {tokens:,} x {tokens:,} numbers an image"
    gain = fused_gain(device, precision, heads, tokens, side)
    return ("explicit" if gain < _CLEARLY else "fused"), f"the fused kernel is ×{gain:.2f} as fast here{when(gain)}"


def kernels(device: str, bfloat16: bool, spec: EncoderSpec, images: int) -> tuple[str, str]:
    """Our own where they can be had, and are faster than torch's for the encoder's attention.

    Args:
        device: where training runs.
        bfloat16: whether anything is computed in it.
        spec: of the encoder.
        images: of a step.
    """
    return choose_kernels(outline(spec), device, bfloat16, images)


def check_kernels(kernels: str, device: str, bfloat16: bool, spec: EncoderSpec) -> None:
    """Refuse kernels that cannot be had.

    Raises:
        PatchloomError: native ones, where nothing is computed in bfloat16 on a CPU, or blocks have parts that they do
            not know, or that cannot be compiled.
    """
    if kernels != "native":
        return
    if device != "cpu" or not bfloat16:
        raise PatchloomError("--kernels native is for bfloat16 on a CPU: add --precision bfloat16, or leave it out")
    if not serves(outline(spec)):
        raise PatchloomError(f"--kernels native does not fit this model, since {NOT_SERVED}: use --kernels torch")
    native.library()


def compile(device: str, precision: str, spec: EncoderSpec, kernels: str, threads: int) -> tuple[bool, str]:
    """Only where `patchloom bench` found that it pays: trying it takes a minute."""
    gain = compile_gain(device, precision, spec.model, kernels, threads)
    if gain is None:
        return False, "unknown here: patchloom bench --compile true measures what it brings"
    if not can_compile(device):
        return False, "there is no C++ compiler"
    return gain > _WORTH, f"patchloom bench measured ×{gain:.2f}{when(gain)}"


def can_compile(device: str) -> bool:
    """Whether torch.compile finds what it needs: on a CPU, a C++ compiler."""
    return device != "cpu" or any(map(shutil.which, (os.environ.get("CXX") or "g++", "g++", "clang++")))
