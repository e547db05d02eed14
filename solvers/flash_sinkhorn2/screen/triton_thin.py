"""`mask.thin` on a GPU: of each tile the largest cost that may go is found by bisection, and no list is sorted."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from .mask import Mask, running

PAIRS = 128  # of a list at once


def thin(mask: Mask, row_tile_max: Tensor, col_tile_max: Tensor, budget: float) -> Mask:
    """As `mask.thin`, but costs that are one float32 are left out or kept together."""
    row_cost, col_cost = row_tile_max.double().contiguous(), col_tile_max.double().contiguous()
    rows = mask.row_starts, mask.cols, row_cost, col_cost
    cols = mask.col_starts, mask.rows, col_cost[mask.to_columns], row_cost[mask.to_columns]
    row_most = _most(rows[0], rows[2], budget - mask.row_bound)
    col_most = _most(cols[0], cols[2], budget - mask.col_bound)
    kept, row_counts, row_bound = _split(*rows, row_most, col_most, mask.row_bound)
    kept_by_columns, col_counts, col_bound = _split(*cols, col_most, row_most, mask.col_bound)
    index, by_columns = kept.nonzero()[:, 0], kept_by_columns.nonzero()[:, 0]
    before = running(kept.to(torch.int32))
    return Mask(
        running(row_counts),
        mask.cols[index],
        running(col_counts),
        mask.rows[by_columns],
        before[mask.to_columns[by_columns]],
        row_bound,
        col_bound,
    )


def _most(starts: Tensor, cost: Tensor, allowance: Tensor) -> Tensor:
    most = torch.empty(len(starts) - 1, dtype=torch.int32, device=starts.device)
    launch(bisect_kernel, (len(most), 1, 1), (starts, cost, allowance, most), {"PAIRS": PAIRS, "num_warps": 1})
    return most


def _split(
    starts: Tensor, lists: Tensor, cost: Tensor, opposite_cost: Tensor, most: Tensor, opposite_most: Tensor,
    bound: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kept = torch.empty(len(lists), dtype=torch.int8, device=lists.device)
    counts, new_bound = torch.empty_like(starts[1:]), torch.empty_like(bound)
    arguments = (starts, lists, cost, opposite_cost, most, opposite_most, bound, kept, counts, new_bound)
    launch(split_kernel, (len(counts), 1, 1), arguments, {"PAIRS": PAIRS, "num_warps": 1})
    return kept, counts, new_bound


@triton.jit
def _bits(cost):
    """Of the nearest float32: as integers they are ordered as costs are, from zero on."""
    return cost.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def bisect_kernel(starts, cost, allowance, most, PAIRS: tl.constexpr):
    """One tile: the bits of the largest float32 such that all costs up to it are together within the allowance; -1 if
    there is none."""
    tile = tl.program_id(0)
    first, last = tl.load(starts + tile), tl.load(starts + tile + 1)
    allowed = tl.load(allowance + tile)
    low = tl.full([], -1, tl.int32)  # within
    high = tl.full([], 0x7F800000, tl.int32)  # infinity never is
    for _ in range(32):
        middle = low + (high - low) // 2
        total = tl.zeros([PAIRS], tl.float64)
        for start in range(first, last, PAIRS):
            pair = start + tl.arange(0, PAIRS)
            b_cost = tl.load(cost + pair, pair < last, other=0.0)
            total += tl.where(_bits(b_cost) <= middle, b_cost, 0.0)
        within = (middle == -1) | (tl.sum(total, 0) <= allowed)
        low = tl.where(within, middle, low)
        high = tl.where(within, high, middle)
    tl.store(most + tile, low)


@triton.jit
def split_kernel(
    starts, lists, cost, opposite_cost, most, opposite_most, bound, kept, counts, new_bound, PAIRS: tl.constexpr
):
    """One tile: a pair is left out if it is cheap for both its tiles. Which are kept, how many, and the tile's bound
    with the cost of those left out."""
    tile = tl.program_id(0)
    first, last = tl.load(starts + tile), tl.load(starts + tile + 1)
    own = tl.load(most + tile)
    total = tl.zeros([PAIRS], tl.float64)
    count = first - first
    for start in range(first, last, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        there = pair < last
        b_cost = tl.load(cost + pair, there, other=0.0)
        b_opposite = tl.load(opposite_cost + pair, there, other=0.0)
        opposite = tl.load(opposite_most + tl.load(lists + pair, there, other=0))
        cheap = there & (_bits(b_cost) <= own) & (_bits(b_opposite) <= opposite)
        total += tl.where(cheap, b_cost, 0.0)
        count += tl.sum((there & (cheap == 0)).to(tl.int64), 0)
        tl.store(kept + pair, (cheap == 0).to(tl.int8), there)
    tl.store(counts + tile, count)
    tl.store(new_bound + tile, tl.load(bound + tile) + tl.sum(total, 0))
