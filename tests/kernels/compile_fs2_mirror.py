"""Compile the kernels over lists of tile pairs for sm_90 and print one JSON line each: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.correct.triton_levels import AT_ONCE, merge_kernel, pattern_kernel
from solvers.flash_sinkhorn2.lists import triton_mirror
from solvers.flash_sinkhorn2.lists.triton_mirror import COLUMNS, GROUPS, GROUPS_AT_ONCE

INT32 = "lists", "places", "counts", "rows", "cols", "coarse_cols"
LISTS = {"GROUPS": GROUPS, "AT_ONCE": triton_mirror.AT_ONCE}
OFFSETS = {"GROUPS": GROUPS, "AT_ONCE": GROUPS_AT_ONCE, "COLUMNS": COLUMNS}
VARIANTS = [
    (triton_mirror.count_kernel, LISTS, 4),
    (triton_mirror.offset_kernel, OFFSETS, 2),
    (triton_mirror.place_kernel, LISTS, 4),
    (merge_kernel, {"AT_ONCE": AT_ONCE}, 1),
    *((pattern_kernel, {"AT_ONCE": AT_ONCE, "WRITE": write}, 1) for write in (False, True)),
]


def kinds(kernel, constants, wide):
    """Of arguments; entries are int32 unless there are too many: `wide`."""
    found = dict.fromkeys(kernel.arg_names, "*i64") | dict.fromkeys(INT32, "*i32")
    found |= dict.fromkeys(("entries", "first_entries"), "*i64" if wide else "*i32")
    found |= {"n_entries": "i64" if wide else "i32", "n_rows": "i32", "n_cols": "i32"}
    if kernel is pattern_kernel:
        found["counts"] = "*i64"
    return {name: "constexpr" if name in constants else found[name] for name in kernel.arg_names}


if __name__ == "__main__":
    for kernel, constants, warps in VARIANTS:
        for wide in (False, True)[: 1 + ("entries" in kernel.arg_names)]:
            source = ASTSource(fn=kernel, signature=kinds(kernel, constants, wide), constexprs=constants)
            found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
            print(json.dumps({"kernel": kernel.__name__, **constants, **inspect(found.asm["cubin"])}))
