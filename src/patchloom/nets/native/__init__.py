"""Optional kernels for bfloat16 on CPUs with AVX512-BF16, written in C++ in this folder.

torch's attention passes over its tables in memory six times forward and backward, and its GELU and norms convert their
numbers in between; these kernels compute the same in fewer passes, with float32 sums. The system's g++ compiles them at
first use, in seconds, and the result is cached (see `compiler`). Everything else runs on torch's kernels.

Only `patchloom.nets.performance` imports this folder, and works without it.
"""

from patchloom.nets.native.blocks import knows_block, native_block, runs_native
from patchloom.nets.native.compiler import lacking, library, missing
from patchloom.nets.native.ops import LANES, add_norm, attention, gelu
from patchloom.nets.sparse_attention import BlockKernels

__all__ = ["LANES", "KERNELS", "add_norm", "attention", "gelu", "lacking", "library", "missing"]

KERNELS = BlockKernels(knows_block, runs_native, native_block, attention, missing)
