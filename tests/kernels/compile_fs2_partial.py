"""Compile the kernels over partial sums for sm_90 and print one JSON line each: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.sweep.partial_kernels import reduce_kernel
from solvers.flash_sinkhorn2.sweep.triton_partial import AT_ONCE

KINDS = {"partial": "*fp32", "starts": "*i64"}
ROWS = {"T": 32, "AT_ONCE": AT_ONCE}
VARIANTS = [
    (reduce_kernel, {**ROWS, "MAXIMUM": False}),
    (reduce_kernel, {**ROWS, "MAXIMUM": True}),
]

if __name__ == "__main__":
    for kernel, constants in VARIANTS:
        kinds = {**KINDS, "out": "*fp32" if constants["MAXIMUM"] else "*fp64"}
        signature = {k: "constexpr" if k in constants else kinds.get(k, "*fp64") for k in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
        print(json.dumps({"kernel": kernel.__name__, **constants, **inspect(found.asm["cubin"])}))
