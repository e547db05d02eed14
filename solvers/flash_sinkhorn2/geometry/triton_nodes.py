"""Centroids of nodes and how far their points are from them, on a GPU: one launch a depth."""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)
# mypy: disable-error-code=assignment
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from .clouds import TiledCloud

POINTS = 1024  # of a node at once


def moments(cloud: TiledCloud, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the nodes of `depth`: centroids [2^depth, d], masses [2^depth], and their points' weighted squared distances
    from the centroid, over d."""
    tree, d = cloud.tree, cloud.centre.shape[1]
    found = cloud.mass.new_empty(2**depth, d), cloud.mass.new_empty(2**depth), cloud.mass.new_empty(2**depth)
    arguments = cloud.local, *cloud.local.stride(), cloud.centre.contiguous(), cloud.weight, *found, tree.tiles, depth
    options = {"D": d, "T": tree.tile, "POINTS": POINTS, "num_warps": 8}
    launch(node_kernel, (2**depth, 1, 1), arguments, options)
    return found


@triton.jit
def _load(local, stride_point, stride_coordinate, centre, weight, point, last, D: tl.constexpr, T: tl.constexpr):
    """Weights of points, and D coordinates of those that have any."""
    b_weight = tl.load(weight + point, point < last, other=0.0)
    counts = b_weight > 0
    x = ()
    for d in tl.static_range(D):
        dx = tl.load(local + point * stride_point + d * stride_coordinate, counts, other=0.0)
        x = x + (dx.to(tl.float64) + tl.load(centre + point // T * D + d, counts, other=0.0),)
    return b_weight, x


@triton.jit(do_not_specialize=["tiles", "depth"])
def node_kernel(
    local, stride_point, stride_coordinate, centre, weight, centroid, mass, square, tiles, depth,
    D: tl.constexpr, T: tl.constexpr, POINTS: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    first_tile, last_tile = node * tiles >> depth, (node + 1) * tiles >> depth
    first, last = first_tile * T, last_tile * T
    lane = tl.arange(0, POINTS)
    total = tl.zeros([POINTS], tl.float64)
    sums = ()
    for _d in tl.static_range(D):
        sums = sums + (tl.zeros([POINTS], tl.float64),)
    for start in range(first, last, POINTS):
        b_weight, x = _load(local, stride_point, stride_coordinate, centre, weight, start + lane, last, D, T)
        total += b_weight
        moved = ()
        for d in tl.static_range(D):
            moved = moved + (sums[d] + b_weight * x[d],)
        sums = moved
    b_mass = tl.sum(total, 0)
    middle = ()
    for d in tl.static_range(D):
        middle = middle + (tl.sum(sums[d], 0) / tl.where(b_mass > 0, b_mass, 1.0),)
    if b_mass == 0:  # the mean of its tiles' centres
        for d in tl.static_range(D):
            count = tl.zeros([POINTS], tl.float64)
            for start in range(first_tile, last_tile, POINTS):
                tile = start + lane
                count += tl.load(centre + tile * D + d, tile < last_tile, other=0.0)
            tl.store(centroid + node * D + d, tl.sum(count, 0) / (last_tile - first_tile))
    else:
        for d in tl.static_range(D):
            tl.store(centroid + node * D + d, middle[d])
    far = tl.zeros([POINTS], tl.float64)
    for start in range(first, last, POINTS):
        b_weight, x = _load(local, stride_point, stride_coordinate, centre, weight, start + lane, last, D, T)
        for d in tl.static_range(D):
            far += b_weight * (x[d] - middle[d]) * (x[d] - middle[d])
    tl.store(mass + node, b_mass)
    tl.store(square + node, tl.sum(far, 0) / D)
