"""Compile the kernels of corrected half-steps for sm_90 and print one JSON line each: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.iterate import triton_updates
from solvers.flash_sinkhorn2.iterate.triton_updates import AT_ONCE, POINTS, TILES

KINDS = {"n": "i32", "n_rows": "i32", "n_cols": "i32", "fails": "*i32", "lists": "*i32", "starts": "*i64"}
KINDS |= {"partial": "*fp32", "anchor": "*fp32"}
VARIANTS = [
    ("matrix_kernel", {"T": 32, "AT_ONCE": AT_ONCE}, 1),
    ("matrix_at_kernel", {"T": 32, "AT_ONCE": AT_ONCE}, 1),
    ("matrix_at_kernel", {"T": 64, "AT_ONCE": AT_ONCE}, 1),
    ("total_kernel", {"TILES": TILES}, 8),
    ("sums_kernel", {"T": 32, "AT_ONCE": AT_ONCE}, 1),
    ("sums_kernel", {"T": 64, "AT_ONCE": AT_ONCE}, 1),
    ("move_kernel", {"T": 32, "POINTS": POINTS}, 4),
]

if __name__ == "__main__":
    for name, constants, warps in VARIANTS:
        kernel = getattr(triton_updates, name)
        signature = {k: "constexpr" if k in constants else KINDS.get(k, "*fp64") for k in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        print(json.dumps({"kernel": name, **constants, **inspect(found.asm["cubin"])}))
