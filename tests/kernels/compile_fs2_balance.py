"""Compile the balance's kernels for sm_90 and print one JSON line each: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.correct import kernels
from solvers.flash_sinkhorn2.correct.triton_balance import AT_ONCE, LANES, PARTS, PRODUCTS, SUMS, newton_warps

KINDS = {"n": "i32", "n_rows": "i32", "n_cols": "i32", "n_parts": "i32", "best": "*i32"}
KINDS |= {"starts": "*i64", "cols": "*i32", "rows": "*i32", "parents": "*i64", "entries": "*i32"}
LIST = {"LANES": LANES}
NEWTON = {"STEPS": 8, "PRODUCTS": PRODUCTS}
VARIANTS = [
    ("sum_kernel", {"BLOCK": SUMS}, SUMS // 32),
    ("ratio_kernel", {"FACTORS": 2, "ROWS": AT_ONCE, **LIST}, 1),
    ("ratio_kernel", {"FACTORS": 1, "ROWS": AT_ONCE, **LIST}, 1),
    ("choose_kernel", {"FACTORS": 2, "BLOCK": PARTS}, 4),
    ("update_kernel", {"FIRST": True, "COLUMNS": AT_ONCE, **LIST}, 1),
    ("update_kernel", {"FIRST": False, "COLUMNS": AT_ONCE, **LIST}, 1),
    ("newton_kernel", {"SIZE": 64, **NEWTON}, newton_warps(64)),
    ("newton_kernel", {"SIZE": 128, **NEWTON}, newton_warps(128)),
]

if __name__ == "__main__":
    for name, constants, warps in VARIANTS:
        kernel = getattr(kernels, name)
        signature = {k: "constexpr" if k in constants else KINDS.get(k, "*fp64") for k in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        print(json.dumps({"kernel": name, **constants, **inspect(found.asm["cubin"])}))
