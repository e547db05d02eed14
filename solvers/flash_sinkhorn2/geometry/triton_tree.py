"""`kd_tree` on a GPU: a sort and three launches a depth where nodes are large, one launch where they are small."""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)
# mypy: disable-error-code=assignment
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from .tree import BELOW_ONE, Tree

POINTS = 1024  # of a large node, a program
SMALL = 512  # points of a node from which on it is not sorted but each point's place counted
LANES, OTHERS = 128, 16  # points a program, of such a node, and how many they are compared with at once


def sort_by_depths(tree: Tree, points: Tensor) -> None:
    """`tree.order` sorted depth by depth, as on a CPU, by points [points, d] at these places."""
    n, tile, d = tree.n, tree.tile, points.shape[1]
    # keys must tie where they do on a CPU: no product is fused with a sum
    options = {"D": d, "T": tile, "BELOW_ONE": BELOW_ONE, "num_warps": 4, "enable_fp_fusion": False}
    sizes = [-(-tree.tiles >> depth) * tile for depth in range(tree.depths)]
    large = sum(size > SMALL for size in sizes)
    boxes = points.new_full((2**large, 2 * d), -torch.inf, dtype=torch.float64)  # of depth l from row 2^l on
    for depth, size in enumerate(sizes):
        of_points, of_tree = (points, *points.stride(), tree.order), (n, tree.tiles, depth)
        if depth < large:
            blocks = triton.cdiv(size, POINTS)
            grid, of_tree = (blocks << depth, 1, 1), (*of_tree, blocks)
            box, keys = boxes[2**depth :], points.new_empty(n, dtype=torch.float64)
            launch(box_kernel, grid, (*of_points, box, *of_tree), options | {"POINTS": POINTS})
            launch(key_kernel, grid, (*of_points, box, keys, *of_tree), options | {"POINTS": POINTS})
            permutation = keys.sort(stable=True).indices
            del keys
            tree.order = tree.order.gather(0, permutation)
        else:
            blocks, ordered = triton.cdiv(size, LANES), torch.empty_like(tree.order)
            lanes = {"LANES": LANES, "OTHERS": OTHERS}
            launch(count_kernel, (blocks << depth, 1, 1), (*of_points, ordered, *of_tree, blocks), options | lanes)
            tree.order = ordered


def parts(tree: Tree, points: Tensor, width: float, *, step: float, steps: int) -> tuple[Tensor, Tensor]:
    """The parts [steps, tiles] int16 that tiles need to be no wider than `width`, and than widths `step` times as large
    each; the places [steps] int64 that these make."""
    n, tile, tiles = tree.n, tree.tile, tree.tiles
    found = torch.empty(steps, tiles, dtype=torch.int16, device=points.device)
    totals = torch.zeros(steps, dtype=torch.int64, device=points.device)
    widest = torch.full((1,), width, dtype=torch.float64, device=points.device)
    at_once = max(POINTS // tile, 1)
    arguments = points, *points.stride(), tree.order, widest, found, totals, n, tiles
    options = {"D": points.shape[1], "T": tile, "TILES": at_once, "STEP": step, "STEPS": steps, "num_warps": 8}
    launch(parts_kernel, (triton.cdiv(tiles, at_once), 1, 1), arguments, options)
    return found, totals


@triton.jit
def _node(n, tiles, depth, blocks, T: tl.constexpr):
    """This program's node, its first point and the one after its last, and which block of them is the program's."""
    program = tl.program_id(0)
    node = (program // blocks).to(tl.int64)
    first = (node * tiles >> depth) * T
    last = tl.minimum(((node + 1) * tiles >> depth) * T, n)
    return node, first, last, program % blocks


@triton.jit
def _load(points, stride_point, stride_coordinate, order, point, inside, D: tl.constexpr):
    """D coordinates of points at these places, in float64."""
    source = points + tl.load(order + point, inside, other=0) * stride_point
    x = ()
    for d in tl.static_range(D):
        x = x + (tl.load(source + d * stride_coordinate, inside, other=0.0).to(tl.float64),)
    return x


@triton.jit
def _scaled(high, minus_low, D: tl.constexpr, BELOW_ONE: tl.constexpr):
    """The axis along which a box is widest, the first of them, where it starts there, and what to multiply by."""
    axis = 0
    low = -minus_low[0]
    widest = high[0] - low
    for d in tl.static_range(1, D):
        width = high[d] + minus_low[d]
        wider = width > widest
        axis = tl.where(wider, d, axis)
        low = tl.where(wider, -minus_low[d], low)
        widest = tl.where(wider, width, widest)
    return axis, low, tl.where(widest > 0, BELOW_ONE / widest, 0.0)


@triton.jit
def _keys(points, stride_point, stride_coordinate, order, point, inside, node, axis, low, scale):
    source = points + tl.load(order + point, inside, other=0) * stride_point + axis * stride_coordinate
    x = tl.load(source, inside, other=0.0).to(tl.float64)
    return (x - low) * scale + node.to(tl.float64)


@triton.jit(do_not_specialize=["n", "tiles", "depth", "blocks"])
def box_kernel(
    points, stride_point, stride_coordinate, order, box, n, tiles, depth, blocks,
    D: tl.constexpr, T: tl.constexpr, POINTS: tl.constexpr, BELOW_ONE: tl.constexpr,
):  # fmt: skip
    """box [nodes, 2, D] float64, of -inf: the largest coordinates, and the largest of their negatives."""
    node, first, last, block = _node(n, tiles, depth, blocks, T)
    point = first + block * POINTS + tl.arange(0, POINTS)
    inside = point < last
    x = _load(points, stride_point, stride_coordinate, order, point, inside, D)
    if first + block * POINTS < last:
        for d in tl.static_range(D):
            high = tl.max(tl.where(inside, x[d], float("-inf")), 0)
            minus_low = tl.max(tl.where(inside, -x[d], float("-inf")), 0)
            # integers are compared in place of floats: no zero may be negative
            tl.atomic_max(box + node * 2 * D + d, tl.where(high == 0, 0.0, high), sem="relaxed")
            tl.atomic_max(box + node * 2 * D + D + d, tl.where(minus_low == 0, 0.0, minus_low), sem="relaxed")


@triton.jit(do_not_specialize=["n", "tiles", "depth", "blocks"])
def key_kernel(
    points, stride_point, stride_coordinate, order, box, keys, n, tiles, depth, blocks,
    D: tl.constexpr, T: tl.constexpr, POINTS: tl.constexpr, BELOW_ONE: tl.constexpr,
):  # fmt: skip
    """keys [n] float64: a point's node, and how far along its box the point is."""
    node, first, last, block = _node(n, tiles, depth, blocks, T)
    point = first + block * POINTS + tl.arange(0, POINTS)
    inside = point < last
    high, minus_low = (), ()
    for d in tl.static_range(D):
        high = high + (tl.load(box + node * 2 * D + d),)
        minus_low = minus_low + (tl.load(box + node * 2 * D + D + d),)
    axis, low, scale = _scaled(high, minus_low, D, BELOW_ONE)
    b_keys = _keys(points, stride_point, stride_coordinate, order, point, inside, node, axis, low, scale)
    tl.store(keys + point, b_keys, inside)


@triton.jit(do_not_specialize=["n", "tiles", "depth", "blocks"])
def count_kernel(
    points, stride_point, stride_coordinate, order, ordered, n, tiles, depth, blocks,
    D: tl.constexpr, T: tl.constexpr, LANES: tl.constexpr, OTHERS: tl.constexpr, BELOW_ONE: tl.constexpr,
):  # fmt: skip
    """ordered [n]: order, sorted by key within each node. A point comes after those of smaller keys, and of its own key
    after those that it came after before."""
    node, first, last, block = _node(n, tiles, depth, blocks, T)
    lane = tl.arange(0, LANES)
    high, minus_low = (), ()
    for _d in tl.static_range(D):
        high = high + (tl.full([LANES], float("-inf"), tl.float64),)
        minus_low = minus_low + (tl.full([LANES], float("-inf"), tl.float64),)
    for start in range(first, last, LANES):
        point = start + lane
        inside = point < last
        x = _load(points, stride_point, stride_coordinate, order, point, inside, D)
        higher, lower = (), ()
        for d in tl.static_range(D):
            higher = higher + (tl.maximum(high[d], tl.where(inside, x[d], float("-inf"))),)
            lower = lower + (tl.maximum(minus_low[d], tl.where(inside, -x[d], float("-inf"))),)
        high, minus_low = higher, lower
    highest, least = (), ()
    for d in tl.static_range(D):
        highest = highest + (tl.max(high[d], 0),)
        least = least + (tl.max(minus_low[d], 0),)
    axis, low, scale = _scaled(highest, least, D, BELOW_ONE)
    point = first + block * LANES + lane
    inside = point < last
    key = _keys(points, stride_point, stride_coordinate, order, point, inside, node, axis, low, scale)[:, None]
    before = tl.zeros([LANES], tl.int32)
    for start in range(first, last, OTHERS):
        other = start + tl.arange(0, OTHERS)
        real = other < last
        others = _keys(points, stride_point, stride_coordinate, order, other, real, node, axis, low, scale)[None, :]
        ahead = (others < key) | ((others == key) & (other[None, :] < point[:, None]))
        before += tl.sum((ahead & real[None, :]).to(tl.int32), 1)
    tl.store(ordered + first + before, tl.load(order + point, inside, other=0), inside)


@triton.jit(do_not_specialize=["n", "tiles"])
def parts_kernel(
    points, stride_point, stride_coordinate, order, widest, parts, totals, n, tiles,
    D: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """parts [STEPS, tiles]; totals [STEPS] int64, zeros."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    point = tile[:, None] * T + tl.arange(0, T)[None, :]
    inside = point < n
    source = points + tl.load(order + point, inside, other=0) * stride_point
    edges = ()
    for d in tl.static_range(D):
        x = tl.load(source + d * stride_coordinate, inside, other=0.0)
        high = tl.max(tl.where(inside, x, float("-inf")), 1)
        low = tl.min(tl.where(inside, x, float("inf")), 1)
        edges = edges + ((high - low).to(tl.float64),)
    sizes = tl.maximum(tl.minimum(n - tile * T, T), 0)
    width = tl.load(widest)
    for step in range(STEPS):
        needed = tl.full([TILES], 1.0, tl.float64)
        for d in tl.static_range(D):
            needed *= tl.maximum(edges[d] / width, 1.0)
        b_parts = tl.minimum(needed, T).to(tl.int64)
        tl.store(parts + step * tiles.to(tl.int64) + tile, b_parts, tile < tiles)
        tl.atomic_add(totals + step, tl.sum(b_parts * sizes, 0), sem="relaxed")
        width *= STEP
