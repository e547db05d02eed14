"""Compile the kernel of the screen's bounds for sm_90 and print one JSON line a dimension: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.screen.triton_bounds import PAIRS, exponent_kernel

KINDS = {"rows": "*i64", "cols": "*i64", "pairs": "i32", "D": "constexpr", "BP": "constexpr"}

if __name__ == "__main__":
    for d in (1, 3, 6):
        signature = {name: KINDS.get(name, "*fp64") for name in exponent_kernel.arg_names}
        source = ASTSource(fn=exponent_kernel, signature=signature, constexprs={"D": d, "BP": PAIRS})
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(json.dumps({"d": d, **inspect(found.asm["cubin"])}))
