"""`walk.walk` on a GPU: level by level, each row node's list in order, counted and then written; nothing is sorted."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from solvers.flash_sinkhorn.sweeps.launching import launch

from .planes import Level
from .walk import TilePairs, TooManyPairs, of_tiles

CANDIDATES = 64  # of a row node at once


def walk(x: list[Level], y: list[Level], k: float, *, threshold: float, most_pairs: int | None = None) -> TilePairs:
    """All tile pairs but those of node pairs whose 2^exponent is nowhere above `threshold`, row after row and each
    row's columns ascending. TooManyPairs rather than more than `most_pairs` of one level, if given."""
    device = x[0].mass.device
    scale = torch.tensor([k, math.log2(threshold)], dtype=torch.float64, device=device)
    row_skipped = [torch.zeros_like(level.mass) for level in x]
    col_skipped = [torch.zeros_like(level.mass) for level in y]
    # as if every row node of the first level had one parent, and every column node were its own
    parents = torch.zeros(len(x[0].mass), dtype=torch.int64, device=device)
    children = torch.arange(len(y[0].mass) + 1, device=device)
    lists = children[:-1].int()
    starts = torch.tensor([0, len(lists)], device=device)
    last = max(len(x), len(y)) - 1
    for depth in range(last + 1):
        # the shallower tree waits at its tiles, which are their own children
        at_x, at_y = min(depth, len(x) - 1), min(depth, len(y) - 1)
        sides = [t for level in (x[at_x], y[at_y]) for t in (level.centre, level.half, level.slope, level.offset)]
        own = *sides, x[at_x].mass, y[at_y].mass, parents, starts, lists, children, scale
        skipped = row_skipped[at_x], col_skipped[at_y]
        nodes, d = x[at_x].centre.shape
        counts = torch.empty(nodes, dtype=torch.int64, device=device)
        grid, options = (nodes, 1, 1), {"D": d, "CANDIDATES": CANDIDATES, "num_warps": 1}
        counted = (*own, *skipped, counts, counts, lists, scale)
        launch(walk_kernel, grid, counted, {**options, "WRITE": False, "LAST": False})
        own_starts = pad(counts.cumsum(0), (1, 0))
        total = int(own_starts[-1])
        if most_pairs is not None and total > most_pairs:
            raise TooManyPairs
        near = torch.empty(total, dtype=torch.int32, device=device)
        exponent = torch.empty(len(near) if depth == last else 0, dtype=torch.float32, device=device)
        written = (*own, *skipped, counts, own_starts, near, exponent)
        launch(walk_kernel, grid, written, {**options, "WRITE": True, "LAST": depth == last})
        if depth < last:
            following = min(depth + 1, len(x) - 1)
            parents = torch.repeat_interleave(x[at_x].children.diff(), output_size=len(x[following].mass))
        starts, lists, children = own_starts, near, y[at_y].children
    return TilePairs(starts, lists, exponent, of_tiles(row_skipped, x), of_tiles(col_skipped, y))


@triton.jit
def largest_exponent(
    x_centre, x_half, x_slope, x_offset,  # [nodes, D] and [nodes]
    y_centre, y_half, y_slope, y_offset,
    i, j, k,
    D: tl.constexpr,
):  # fmt: skip
    """`bounds.largest_exponents` of pairs of nodes i and j, either of which may be one node."""
    total = tl.load(x_offset + i) + tl.load(y_offset + j)
    for axis in tl.static_range(D):
        G, H = tl.load(x_slope + i * D + axis), tl.load(y_slope + j * D + axis)
        l, h = tl.load(x_half + i * D + axis), tl.load(y_half + j * D + axis)
        apart = tl.load(x_centre + i * D + axis) - tl.load(y_centre + j * D + axis)
        rises = G + H > 0
        s_end, t_end = tl.where(rises, l, -l), tl.where(rises, h, -h)
        t = tl.minimum(tl.maximum(apart + s_end + H / (2 * k), -h), h)
        s = tl.minimum(tl.maximum(t_end - apart + G / (2 * k), -l), l)
        by_s, by_t = apart + s_end - t, apart + s - t_end
        total += tl.maximum(G * s_end + H * t - k * by_s * by_s, G * s + H * t_end - k * by_t * by_t)
    return total


@triton.jit
def walk_kernel(
    x_centre, x_half, x_slope, x_offset, y_centre, y_half, y_slope, y_offset, x_mass, y_mass,
    parents, parent_starts, parent_lists, children, scale, row_skipped, col_skipped, counts, starts, near, exponents,
    D: tl.constexpr, CANDIDATES: tl.constexpr, WRITE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One row node and the children of its parent's list: a column node has one or two, from children[J].

    How many hold more than the threshold somewhere, and what the others hold at most; WRITE: which they are, from
    starts[row] in `near`, LAST: with their largest exponents rounded up.
    """
    row = tl.program_id(0).to(tl.int64)
    parent = tl.load(parents + row)
    first, last = 2 * tl.load(parent_starts + parent), 2 * tl.load(parent_starts + parent + 1)
    k, least = tl.load(scale), tl.load(scale + 1)
    row_mass = tl.load(x_mass + row)
    skipped = tl.zeros([CANDIDATES], tl.float64)
    place = tl.load(starts + row) if WRITE else row - row
    for start in range(first, last, CANDIDATES):
        slot = start + tl.arange(0, CANDIDATES)
        column_parent = tl.load(parent_lists + slot // 2, slot < last, other=0)
        column = tl.load(children + column_parent) + slot % 2
        there = (slot < last) & (column < tl.load(children + column_parent + 1))
        column = tl.where(there, column, 0)
        exponent = largest_exponent(
            x_centre, x_half, x_slope, x_offset, y_centre, y_half, y_slope, y_offset, row, column, k, D
        )
        is_near = there & (exponent > least)
        if WRITE:
            before = tl.cumsum(is_near.to(tl.int32), 0) - is_near.to(tl.int32)
            tl.store(near + place + before, column.to(tl.int32), is_near)
            if LAST:
                rounded = exponent.to(tl.float32)
                tl.store(exponents + place + before, rounded + tl.abs(rounded) * 1.2e-7 + 1e-30, is_near)
        else:
            held = tl.where(there & (exponent <= least), tl.exp2(exponent), 0.0)
            skipped += held * tl.load(y_mass + column)
            tl.atomic_add(col_skipped + column, held * row_mass, held * row_mass > 0)
        place += tl.sum(is_near.to(tl.int64), 0)
    if not WRITE:
        tl.store(counts + row, place)
        tl.store(row_skipped + row, tl.load(row_skipped + row) + tl.sum(skipped, 0))
