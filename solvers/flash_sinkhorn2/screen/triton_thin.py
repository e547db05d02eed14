"""`mask.thin` on a GPU: of each tile the largest cost that may go is found by bisection, and no list is sorted."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from ..lists import mirrored
from ..sweep.partial_kernels import upward
from .mask import Mask, running

PAIRS = 128  # of a list at once
OPTIONS = {"PAIRS": PAIRS, "num_warps": 1}


def thin(mask: Mask, row_tile_max: Tensor, col_tile_max: Tensor, budget: float) -> Mask:
    """As `mask.thin`, but costs that are one float32 are left out or kept together. Costs are float32 or float64."""
    rows, cols = len(mask.row_bound), len(mask.col_bound)
    gone = torch.empty(len(mask.cols), dtype=torch.int8, device=mask.cols.device)
    counts = torch.empty_like(mask.row_starts[1:])
    row_bound, col_bound = torch.empty_like(mask.row_bound), torch.empty_like(mask.col_bound)
    of_cols = mask.col_starts, mask.to_columns, col_tile_max.contiguous()
    launch(mark_kernel, (cols, 1, 1), (*of_cols, budget - mask.col_bound, gone), OPTIONS)
    of_rows = mask.row_starts, row_tile_max.contiguous(), budget - mask.row_bound
    launch(split_kernel, (rows, 1, 1), (*of_rows, mask.row_bound, gone, counts, row_bound), OPTIONS)
    launch(bound_kernel, (cols, 1, 1), (*of_cols, mask.col_bound, gone, col_bound), OPTIONS)
    row_starts = running(counts)
    kept = torch.empty(int(row_starts[-1]), dtype=torch.int32, device=gone.device)
    launch(keep_kernel, (rows, 1, 1), (mask.row_starts, mask.cols, gone, row_starts, kept), OPTIONS)
    return Mask(row_starts, kept, *mirrored(row_starts, kept, cols), row_bound, col_bound)


def bounded_costs(mask: Mask, exponent: Tensor, row_mass: Tensor, col_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Costs [K] float32, rounded up, of rows in row order and of columns in column order, of pairs whose exponents [K]
    float32 are bounded; the first are written over `exponent`."""
    of_cols = torch.empty_like(exponent)
    entries = mask.to_columns
    arguments = mask.col_starts, mask.rows, entries, exponent, row_mass, of_cols
    launch(bounded_kernel, (len(mask.col_bound), 1, 1), arguments, {**OPTIONS, "IN_PLACE": False})
    arguments = mask.row_starts, mask.cols, entries, exponent, col_mass, exponent
    launch(bounded_kernel, (len(mask.row_bound), 1, 1), arguments, {**OPTIONS, "IN_PLACE": True})
    return exponent, of_cols


def moved_costs(
    starts: Tensor, lists: Tensor, measured: Tensor, rise: Tensor, opposite_rise: Tensor, lost: float
) -> Tensor:  # fmt: skip
    """measured [K] float32, largest sums over each pair, become those after potentials rose by so much at the most, and
    by `opposite_rise` opposite; rounded up. What is below `lost` was as large as that."""
    arguments = starts, lists, measured, rise, opposite_rise
    launch(moved_kernel, (len(rise), 1, 1), arguments, {**OPTIONS, "LOST": lost})
    return measured


@triton.jit
def _bits(cost):
    """Of the nearest float32: as integers they are ordered as costs are, from zero on."""
    return cost.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _most(cost, first, last, allowed, PAIRS: tl.constexpr):
    """The bits of the largest float32 such that all costs of a list up to it are together within what is allowed; -1 if
    there is none."""
    low = tl.full([], -1, tl.int32)  # within
    high = tl.full([], 0x7F800000, tl.int32)  # infinity never is
    for _ in range(32):
        middle = low + (high - low) // 2
        total = tl.zeros([PAIRS], tl.float64)
        for start in range(first, last, PAIRS):
            pair = start + tl.arange(0, PAIRS)
            b_cost = tl.load(cost + pair, pair < last, other=0.0).to(tl.float64)
            total += tl.where(_bits(b_cost) <= middle, b_cost, 0.0)
        within = (middle == -1) | (tl.sum(total, 0) <= allowed)
        low = tl.where(within, middle, low)
        high = tl.where(within, high, middle)
    return low


@triton.jit
def mark_kernel(starts, entries, cost, allowance, cheap, PAIRS: tl.constexpr):
    """One column tile: cheap [K], in row order, is 1 where its cost may go, and 0 elsewhere."""
    tile = tl.program_id(0)
    first, last = tl.load(starts + tile), tl.load(starts + tile + 1)
    most = _most(cost, first, last, tl.load(allowance + tile), PAIRS)
    for start in range(first, last, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        there = pair < last
        b_cost = tl.load(cost + pair, there, other=0.0).to(tl.float64)
        entry = tl.load(entries + pair, there, other=0)
        tl.store(cheap + entry, (_bits(b_cost) <= most).to(tl.int8), there)


@triton.jit
def split_kernel(starts, cost, allowance, bound, cheap, counts, new_bound, PAIRS: tl.constexpr):
    """One row tile: a pair is left out if it is cheap for both its tiles. `cheap` says whether it is for its column,
    and then which are left out; how many are kept; and the tile's bound with the cost of those left out."""
    tile = tl.program_id(0)
    first, last = tl.load(starts + tile), tl.load(starts + tile + 1)
    most = _most(cost, first, last, tl.load(allowance + tile), PAIRS)
    total = tl.zeros([PAIRS], tl.float64)
    count = first - first
    for start in range(first, last, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        there = pair < last
        b_cost = tl.load(cost + pair, there, other=0.0).to(tl.float64)
        gone = there & (_bits(b_cost) <= most) & (tl.load(cheap + pair, there, other=0) == 1)
        total += tl.where(gone, b_cost, 0.0)
        count += tl.sum((there & (gone == 0)).to(tl.int64), 0)
        tl.store(cheap + pair, gone.to(tl.int8), there)
    tl.store(counts + tile, count)
    tl.store(new_bound + tile, tl.load(bound + tile) + tl.sum(total, 0))


@triton.jit
def bound_kernel(starts, entries, cost, bound, gone, new_bound, PAIRS: tl.constexpr):
    """One column tile: its bound with the cost of the pairs that are gone [K], in row order."""
    tile = tl.program_id(0)
    last = tl.load(starts + tile + 1)
    total = tl.zeros([PAIRS], tl.float64)
    for start in range(tl.load(starts + tile), last, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        there = pair < last
        is_gone = tl.load(gone + tl.load(entries + pair, there, other=0), there, other=0) == 1
        total += tl.where(is_gone, tl.load(cost + pair, there, other=0.0).to(tl.float64), 0.0)
    tl.store(new_bound + tile, tl.load(bound + tile) + tl.sum(total, 0))


@triton.jit
def keep_kernel(starts, lists, gone, kept_starts, kept, PAIRS: tl.constexpr):
    """One row tile: its list without the pairs that are gone."""
    tile = tl.program_id(0)
    last = tl.load(starts + tile + 1)
    place = tl.load(kept_starts + tile)
    for start in range(tl.load(starts + tile), last, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        there = pair < last
        stays = (tl.load(gone + pair, there, other=1) == 0).to(tl.int32)
        column = tl.load(lists + pair, there, other=0)
        tl.store(kept + place + tl.cumsum(stays, 0) - stays, column, stays == 1)
        place += tl.sum(stays, 0)


@triton.jit
def bounded_kernel(
    starts, lists, entries, exponent, opposite_mass, cost, PAIRS: tl.constexpr, IN_PLACE: tl.constexpr
):  # fmt: skip
    """One tile: cost [K], 2^exponent times the mass opposite, rounded up; exponents [K] are in row order, and so is
    the list if it is done IN_PLACE."""
    tile = tl.program_id(0)
    last = tl.load(starts + tile + 1)
    for start in range(tl.load(starts + tile), last, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        there = pair < last
        entry = pair if IN_PLACE else tl.load(entries + pair, there, other=0)
        b_exponent = tl.load(exponent + entry, there, other=0.0).to(tl.float64)
        mass = tl.load(opposite_mass + tl.load(lists + pair, there, other=0), there, other=0.0)
        tl.store(cost + pair, upward(tl.exp2(b_exponent) * mass), there)


@triton.jit
def moved_kernel(starts, lists, cost, rise, opposite_rise, PAIRS: tl.constexpr, LOST: tl.constexpr):
    """One tile: its costs times 2^(rise of the tile + rise opposite), rounded up; -inf is the rise where there is no
    weight."""
    tile = tl.program_id(0)
    last = tl.load(starts + tile + 1)
    own = tl.load(rise + tile)
    for start in range(tl.load(starts + tile), last, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        there = pair < last
        b_cost = tl.load(cost + pair, there, other=0.0).to(tl.float64)
        b_cost = tl.where(b_cost < LOST, LOST, b_cost)
        both = own + tl.load(opposite_rise + tl.load(lists + pair, there, other=0), there, other=0.0)
        b_cost *= tl.exp2(tl.minimum(tl.maximum(both, -1000.0), 1000.0))
        tl.store(cost + pair, upward(b_cost), there)
