"""Kernels of our own for bfloat16 on CPUs that have AVX512-BF16, written in C++ beside this file.

torch's attention walks over its tables six times there and back, through memory, and its GELU and norms convert their
numbers on the way; ours compute the same in fewer walks, with float32 sums. The system's g++ makes them when they are
first needed, in seconds, and the outcome is kept (see `compiler`). Everything else runs on torch's kernels.

Only `patchloom.nets.performance` imports this folder, and works without it.
"""

from patchloom.nets.native.blocks import knows_block, native_block, runs_native
from patchloom.nets.native.compiler import lacking, library, missing
from patchloom.nets.native.ops import LANES, add_norm, attention, gelu
from patchloom.nets.sparse_attention import BlockKernels

__all__ = ["LANES", "KERNELS", "add_norm", "attention", "gelu", "lacking", "library", "missing"]

KERNELS = BlockKernels(knows_block, runs_native, native_block, attention, missing)
