"""`planes.levels` on a GPU: a launch a depth, from one so coarse that all pairs of its nodes may be looked at."""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)
# mypy: disable-error-code=assignment
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from ..geometry import TiledCloud
from .planes import RIDGE, Level

FIRST_DEPTH = 8  # 256 nodes: their pairs are fewer than the walk looks at further down
POINTS = 256  # of a node at once


def levels(cloud: TiledCloud, u: Tensor) -> list[Level]:
    """The cloud's nodes from 256, or fewer where there are no more, down to its tiles, with planes above u [N]."""
    tree = cloud.tree
    depths = range(min(FIRST_DEPTH, tree.depths - 1), tree.depths)
    bounds = [*(tree.starts(depth) for depth in depths), torch.arange(tree.tiles + 1, device=u.device)]
    found: list[Level] = []
    for index, starts in enumerate(bounds):
        children = starts
        if index < len(depths) - 1:
            children = torch.arange(0, 2 * len(starts), 2, device=u.device)
        if len(found) == len(depths):
            above = found[-1]
            prior = above.slope[torch.repeat_interleave(above.children.diff(), output_size=len(starts) - 1)]
        elif found:
            prior = found[-1].slope.repeat_interleave(2, 0)
        else:  # drawn towards zero, then towards that
            prior = _level(cloud, u, starts, children, torch.zeros_like(cloud.centre[: len(starts) - 1])).slope
        found.append(_level(cloud, u, starts, children, prior))
    return found


def _level(cloud: TiledCloud, u: Tensor, starts: Tensor, children: Tensor, prior: Tensor) -> Level:
    """Nodes of tiles starts[k] to starts[k + 1]."""
    nodes, d = prior.shape
    centre, half, slope = (torch.empty_like(prior) for _ in range(3))
    offset, mass = torch.empty_like(prior[:, 0]), torch.empty_like(prior[:, 0])
    arguments = (
        cloud.local, *cloud.local.stride(), cloud.centre.contiguous(), cloud.weight, u, starts, prior.contiguous(),
        centre, half, slope, offset, mass,
    )  # fmt: skip
    options = {"D": d, "T": cloud.tree.tile, "POINTS": POINTS, "RIDGE": RIDGE, "num_warps": 4}
    launch(plane_kernel, (nodes, 1, 1), arguments, options)
    return Level(centre, half, slope, offset, mass, children)


@triton.jit
def _load(
    local, stride_point, stride_coordinate, centre, weight, potential, point, last, D: tl.constexpr, T: tl.constexpr
):
    """Whether points count, their potential, and their D coordinates."""
    there = point < last
    counts = tl.load(weight + point, there, other=0.0) > 0
    b_potential = tl.load(potential + point, counts, other=0.0)
    x = ()
    for d in tl.static_range(D):
        dx = tl.load(local + point * stride_point + d * stride_coordinate, counts, other=0.0)
        x = x + (dx.to(tl.float64) + tl.load(centre + point // T * D + d, counts, other=0.0),)
    return counts, b_potential, x


@triton.jit
def plane_kernel(
    local, stride_point, stride_coordinate, centre, weight, potential, starts, prior,
    node_centre, node_half, node_slope, node_offset, node_mass,
    D: tl.constexpr, T: tl.constexpr, POINTS: tl.constexpr, RIDGE: tl.constexpr,
):  # fmt: skip
    """One node: its box, and the plane by least squares, drawn towards the prior slope, as high as its points need."""
    node = tl.program_id(0).to(tl.int64)
    first, last = tl.load(starts + node) * T, tl.load(starts + node + 1) * T
    lane = tl.arange(0, POINTS)
    nothing = tl.zeros([POINTS], tl.float64)
    count, total, heavy = nothing, nothing, nothing
    sums, low, high = (), (), ()
    for _d in tl.static_range(D):
        sums = sums + (nothing,)
        low = low + (nothing + float("inf"),)
        high = high + (nothing - float("inf"),)
    for start in range(first, last, POINTS):
        point = start + lane
        counts, b_potential, x = _load(
            local, stride_point, stride_coordinate, centre, weight, potential, point, last, D, T
        )
        count += counts.to(tl.float64)
        heavy += tl.load(weight + point, counts, other=0.0)
        total += b_potential
        moved, lower, higher = (), (), ()
        for d in tl.static_range(D):
            moved = moved + (sums[d] + tl.where(counts, x[d], 0.0),)
            lower = lower + (tl.minimum(low[d], tl.where(counts, x[d], float("inf"))),)
            higher = higher + (tl.maximum(high[d], tl.where(counts, x[d], float("-inf"))),)
        sums, low, high = moved, lower, higher
    points = tl.maximum(tl.sum(count, 0), 1.0)
    mean_potential = tl.sum(total, 0) / points
    mean, middle = (), ()
    for d in tl.static_range(D):
        mean = mean + (tl.sum(sums[d], 0) / points,)
        bottom, top = tl.min(low[d], 0), tl.max(high[d], 0)
        here = tl.where(bottom <= top, (bottom + top) / 2, 0.0)
        middle = middle + (here,)
        tl.store(node_centre + node * D + d, here)
        tl.store(node_half + node * D + d, tl.where(bottom <= top, (top - bottom) / 2, 0.0))
    tl.store(node_mass + node, tl.sum(heavy, 0))

    products = ()  # upper triangle by rows, each with the product with the potential at its end
    for _p in tl.static_range(D * (D + 1) // 2 + D):
        products = products + (nothing,)
    for start in range(first, last, POINTS):
        counts, b_potential, x = _load(
            local, stride_point, stride_coordinate, centre, weight, potential, start + lane, last, D, T
        )
        b_potential = tl.where(counts, b_potential - mean_potential, 0.0)
        added = ()
        for r in tl.static_range(D):
            deviation = tl.where(counts, x[r] - mean[r], 0.0)
            for c in tl.static_range(r, D):
                added = added + (products[len(added)] + deviation * (x[c] - mean[c]),)
            added = added + (products[len(added)] + deviation * b_potential,)
        products = added
    system = ()  # [D, D + 1], for the slope less the prior
    trace = mean_potential * 0.0
    for r in tl.static_range(D):
        right = tl.sum(products[r * (D + 1) - r * (r - 1) // 2 + D - r], 0)
        for c in tl.static_range(D):
            if r <= c:  # noqa: SIM108 (both sides of an expression would be indexed)
                entry = tl.sum(products[r * (D + 1) - r * (r - 1) // 2 + c - r], 0)
            else:
                entry = system[c * (D + 1) + r]
            right -= entry * tl.load(prior + node * D + c)
            if r == c:
                trace += entry
            system = system + (entry,)
        system = system + (right,)
    ridge = tl.where(trace > 0, trace * (RIDGE / D), 1.0)
    for pivot in tl.static_range(D):
        reduced = ()
        inverse = 1.0 / (system[pivot * (D + 1) + pivot] + ridge)
        for r in tl.static_range(D):
            for c in tl.static_range(D + 1):
                if r == pivot:
                    reduced = reduced + (system[r * (D + 1) + c] * inverse,)
                else:
                    share = system[r * (D + 1) + pivot] * inverse
                    reduced = reduced + (system[r * (D + 1) + c] - share * system[pivot * (D + 1) + c],)
        system = reduced
    slope = ()
    for d in tl.static_range(D):
        slope = slope + (tl.load(prior + node * D + d) + system[d * (D + 1) + D],)
        tl.store(node_slope + node * D + d, slope[d])
    highest = nothing - float("inf")
    for start in range(first, last, POINTS):
        counts, above, x = _load(
            local, stride_point, stride_coordinate, centre, weight, potential, start + lane, last, D, T
        )
        for d in tl.static_range(D):
            above -= slope[d] * (x[d] - middle[d])
        highest = tl.maximum(highest, tl.where(counts, above, float("-inf")))
    tl.store(node_offset + node, tl.max(highest, 0))
