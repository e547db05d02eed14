"""Compile the tree's kernels for sm_90 and print one JSON line each: resources, SASS, and fused products in float64."""

from __future__ import annotations

import json

import triton
from compile_sweeps import inspect
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from solvers.flash_sinkhorn2.geometry import triton_clouds, triton_nodes
from solvers.flash_sinkhorn2.geometry.roomy import STEP, STEPS
from solvers.flash_sinkhorn2.geometry.tree import BELOW_ONE
from solvers.flash_sinkhorn2.geometry.triton_clouds import cloud_kernel
from solvers.flash_sinkhorn2.geometry.triton_nodes import node_kernel
from solvers.flash_sinkhorn2.geometry.triton_tree import (
    LANES,
    OTHERS,
    POINTS,
    box_kernel,
    count_kernel,
    key_kernel,
    parts_kernel,
)

KINDS = dict.fromkeys(("stride_point", "stride_coordinate", "n", "tiles", "depth", "blocks"), "i32")
KINDS |= {
    "points": "*fp32",
    "local": "*fp32",
    "lost": "*fp32",
    "order": "*i64",
    "ordered": "*i64",
    "parts": "*i16",
    "totals": "*i64",
}


def variants(d):
    options = {"num_warps": 4, "enable_fp_fusion": False}
    of_tree = {"D": d, "T": 32, "BELOW_ONE": BELOW_ONE}
    yield box_kernel, of_tree | {"POINTS": POINTS}, options
    yield key_kernel, of_tree | {"POINTS": POINTS}, options
    for tile in (8, 64):
        of_tiles = {"D": d, "T": tile, "TILES": POINTS // tile}
        yield parts_kernel, of_tiles | {"STEP": STEP, "STEPS": STEPS}, {"num_warps": 8}
        yield cloud_kernel, {"D": d, "T": tile, "TILES": triton_clouds.POINTS // tile}, {"num_warps": 4}
    yield node_kernel, {"D": d, "T": 32, "POINTS": triton_nodes.POINTS}, {"num_warps": 8}
    yield count_kernel, of_tree | {"LANES": LANES, "OTHERS": OTHERS}, options


def kind_of(kernel, name):
    if kernel is cloud_kernel and name == "points":
        return "*fp64"
    return KINDS.get(name, "*fp64")


if __name__ == "__main__":
    for d in (1, 3, 6):
        for kernel, constants, options in variants(d):
            signature = {k: "constexpr" if k in constants else kind_of(kernel, k) for k in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            fused = found.asm["ptx"].count("fma.rn.f64")
            print(json.dumps({"kernel": kernel.__name__, **constants, "fused": fused, **inspect(found.asm["cubin"])}))
