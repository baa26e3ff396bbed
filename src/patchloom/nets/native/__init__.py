"""Optional kernels for bfloat16 on CPUs with AVX512-BF16, written in C++ in this folder.

torch's attention passes over its tables in memory six times forward and backward, and between two products its norms,
GELU and sums pass over all tokens; these kernels keep a few tokens in the cache through half a block, and sum in
float32. The system's g++ compiles them at first use, in seconds, and the result is cached (see `compiler`). Everything
else runs on torch's kernels.

Only `patchloom.nets.performance` imports this folder, and works without it.
"""

from patchloom.nets.native.blocks import knows_block, native_block, runs_native
from patchloom.nets.native.compiler import lacking, library, missing
from patchloom.nets.sparse_attention import BlockKernels

__all__ = ["KERNELS", "lacking", "library", "missing"]

KERNELS = BlockKernels(knows_block, runs_native, native_block, missing)
