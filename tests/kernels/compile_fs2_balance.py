"""Compile the balance's kernels for sm_90 and print one JSON line each: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.correct import kernels
from solvers.flash_sinkhorn2.correct.newton import STEPS, STOP
from solvers.flash_sinkhorn2.correct.triton_balance import (
    AT_ONCE,
    BOUND,
    FEW,
    INEXACT,
    LANES,
    PARTS,
    PRODUCTS,
    SIZES,
    SUMS,
    WARPS,
    newton_warps,
)

KINDS = {"n": "i32", "n_rows": "i32", "n_cols": "i32", "n_coarse": "i32", "best": "*i32", "arrivals": "*i32"}
KINDS |= {"starts": "*i64", "cols": "*i32", "rows": "*i32", "parents": "*i64", "entries": "*i32"}
KINDS |= {"order": "*i64", "places": "*i64"}
UPDATE = {"COLUMNS": AT_ONCE, "LANES": LANES}
NEWTON = {"STEPS": STEPS, "STOP": STOP, "PRODUCTS": PRODUCTS, "INEXACT": INEXACT}


def ratio(factors: int, rows: int, warps: int, *, sorts: bool):
    constants = {"FACTORS": factors, "SORTS": sorts, "ROWS": rows, "LANES": LANES, "BLOCK": PARTS}
    return "ratio_kernel", constants, warps


VARIANTS = [
    *(("sum_kernel", {"DENSE": dense, "BLOCK": SUMS}, SUMS // 32) for dense in (False, True)),
    *(ratio(1, AT_ONCE, 1, sorts=sorts) for sorts in (False, True)),
    *(ratio(2, FEW, WARPS, sorts=sorts) for sorts in (False, True)),
    *(("update_kernel", {"FIRST": n, "SORTS": sorts, **UPDATE}, 1) for n in (0, 1) for sorts in (False, True)),
    ("bound_kernel", {"BLOCK": BOUND}, 8),
    *(("newton_kernel", {"SIZE": size, **NEWTON}, newton_warps(size)) for size in SIZES),
]

if __name__ == "__main__":
    for name, constants, warps in VARIANTS:
        kernel = getattr(kernels, name)
        signature = {k: "constexpr" if k in constants else KINDS.get(k, "*fp64") for k in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        print(json.dumps({"kernel": name, **constants, **inspect(found.asm["cubin"])}))
