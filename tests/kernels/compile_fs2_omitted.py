"""Compile the kernels of what is left out for sm_90 and print one JSON line each: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.iterate import triton_omitted
from solvers.flash_sinkhorn2.iterate.triton_omitted import PART, TILES

KINDS = {"tiles": "i32", "x_tiles": "i32", "y_tiles": "i32"}
VARIANTS = [
    ("rise_kernel", {"T": 32, "TILES": TILES}, 4),
    ("rise_kernel", {"T": 64, "TILES": TILES}, 4),
    ("omitted_kernel", {"PART": PART}, 8),
]

if __name__ == "__main__":
    for name, constants, warps in VARIANTS:
        kernel = getattr(triton_omitted, name)
        signature = {k: "constexpr" if k in constants else KINDS.get(k, "*fp64") for k in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        print(json.dumps({"kernel": name, **constants, **inspect(found.asm["cubin"])}))
