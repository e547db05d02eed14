"""Compile the kernels of mixing's history for sm_90 and print one JSON line each: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.iterate import triton_history
from solvers.flash_sinkhorn2.iterate.anderson import MEMORY
from solvers.flash_sinkhorn2.iterate.triton_history import PARTS, POINTS

KINDS = {"n": "i32", "slot": "i32", "filled": "i32", "arrivals": "*i32", "regularisation": "fp32"}
OPTIONS = {"POINTS": POINTS, "MEMORY": MEMORY, "SLOTS": 8}
VARIANTS = [("record_kernel", {**OPTIONS, "PARTS": PARTS, "WIDTH": 16}), ("mix_kernel", OPTIONS)]

if __name__ == "__main__":
    for name, constants in VARIANTS:
        kernel = getattr(triton_history, name)
        signature = {k: "constexpr" if k in constants else KINDS.get(k, "*fp64") for k in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        print(json.dumps({"kernel": name, **constants, **inspect(found.asm["cubin"])}))
