"""`in_kd_order` on a GPU: one launch."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from .tree import Tree

POINTS = 256  # a program


def arranged(tree: Tree, points: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What follows the tree in `TiledCloud`, of points [n, d] float64 and weights [n] float64 in the tree's order."""
    tiles, tile, d = tree.tiles, tree.tile, points.shape[1]
    size = tiles * tile
    centre, half_box, mass = points.new_empty(tiles, d), points.new_empty(tiles, d), points.new_empty(tiles)
    local, lost = (points.new_empty(size, d, dtype=dtype) for _ in range(2))
    weights, log2_weight = points.new_empty(size), points.new_empty(size)
    found = centre, local, lost, half_box, weights, log2_weight, mass
    at_once = max(POINTS // tile, 1)
    options = {"D": d, "T": tile, "TILES": at_once, "num_warps": 4}
    arguments = points, *points.stride(), weight.contiguous(), *found, tree.n
    launch(cloud_kernel, (triton.cdiv(tiles, at_once), 1, 1), arguments, options)
    return found


@triton.jit(do_not_specialize=["n"])
def cloud_kernel(
    points, stride_point, stride_coordinate, weight, centre, local, lost, half_box, weights, log2_weight, mass, n,
    D: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    there = tile * T < n
    point = tile[:, None] * T + tl.arange(0, T)[None, :]
    inside = there[:, None]
    b_weight = tl.load(weight + point, point < n, other=0.0)
    heavy = b_weight > 0
    b_mass = tl.sum(b_weight, 1)
    counts = heavy | (b_mass == 0)[:, None]  # a tile without weight is centred on all its points
    tl.store(weights + point, b_weight, inside)
    tl.store(log2_weight + point, tl.where(heavy, tl.log2(tl.where(heavy, b_weight, 1.0)), float("-inf")), inside)
    tl.store(mass + tile, b_mass, there)
    source = points + tl.minimum(point, n - 1) * stride_point  # the last point repeats
    for d in tl.static_range(D):
        x = tl.load(source + d * stride_coordinate, inside, other=0.0)
        low = tl.min(tl.where(counts, x, float("inf")), 1)
        middle = (low + tl.max(tl.where(counts, x, float("-inf")), 1)) / 2
        exact = x - middle[:, None]
        rounded = exact.to(local.dtype.element_ty)
        rest = tl.where(heavy, exact - rounded.to(tl.float64), 0.0)
        reach = tl.max(tl.where(heavy, tl.abs(rounded), 0.0), 1)  # of the rounded coordinates
        tl.store(local + point * D + d, rounded, inside)
        tl.store(lost + point * D + d, rest.to(lost.dtype.element_ty), inside)
        tl.store(centre + tile * D + d, middle, there)
        tl.store(half_box + tile * D + d, reach.to(tl.float64), there)
