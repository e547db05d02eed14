"""Compile the screen's kernels for sm_90 and print one JSON line each: resources and SASS."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.iterate.passes import LOST
from solvers.flash_sinkhorn2.screen import triton_thin
from solvers.flash_sinkhorn2.screen.planes import RIDGE
from solvers.flash_sinkhorn2.screen.triton_planes import POINTS, plane_kernel
from solvers.flash_sinkhorn2.screen.triton_walk import CANDIDATES, walk_kernel

KINDS = {"pairs": "i32", "stride_point": "i32", "stride_coordinate": "i32"}
KINDS |= dict.fromkeys(("rows", "cols", "parents", "parent_starts", "children", "counts", "starts"), "*i64")
KINDS |= {
    "parent_lists": "*i32",
    "lists": "*i32",
    "entries": "*i32",
    "cheap": "*i8",
    "gone": "*i8",
    "kept": "*i32",
    "kept_starts": "*i64",
    "cost": "*fp32",
    "exponent": "*fp32",
    "near": "*i32",
    "exponents": "*fp32",
    "local": "*fp32",
}


def variants(d):
    yield plane_kernel, {"D": d, "T": 32, "POINTS": POINTS, "RIDGE": RIDGE}, 4
    for write in (False, True):
        yield walk_kernel, {"D": d, "CANDIDATES": CANDIDATES, "WRITE": write, "LAST": write}, 1


def thinning():
    pairs = {"PAIRS": triton_thin.PAIRS}
    for kernel in (
        triton_thin.mark_kernel,
        triton_thin.split_kernel,
        triton_thin.bound_kernel,
        triton_thin.keep_kernel,
    ):
        yield kernel, pairs, 1
    for in_place in (False, True):
        yield triton_thin.bounded_kernel, {**pairs, "IN_PLACE": in_place}, 1
    yield triton_thin.moved_kernel, {**pairs, "LOST": LOST}, 1


if __name__ == "__main__":
    for kernel, constants, warps in (*(one for d in (1, 3, 6) for one in variants(d)), *thinning()):
        signature = {k: "constexpr" if k in constants else KINDS.get(k, "*fp64") for k in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        print(json.dumps({"kernel": kernel.__name__, **constants, **inspect(found.asm["cubin"])}))
