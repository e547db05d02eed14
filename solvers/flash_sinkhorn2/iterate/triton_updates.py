"""`updates.corrected` on a GPU: what it does besides the balance, in a few launches."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from ..correct.kernels import LARGEST
from ..geometry import TiledCloud

AT_ONCE = 16  # tile pairs
POINTS = 1024  # a program
TILES = 1024  # at once, of a program that goes over all
PER_NATURAL = tl.constexpr(1 / math.log(2.0))

OfPass = tuple[Tensor, Tensor, Tensor]  # partial, anchor and log2_sums


def tile_matrix(rows: TiledCloud, starts: Tensor, of_pass: OfPass) -> Tensor:
    """S [K] float64: S_IJ = sum over the rows i of tile I of a_i 2^(anchor_i - log2_sums_i) s_iJ."""
    partial, anchor, log2_sums = of_pass
    S = torch.empty(len(partial), dtype=torch.float64, device=partial.device)
    arguments = partial, starts, rows.weight, anchor, log2_sums, S
    launch(matrix_kernel, (rows.tree.tiles, 1, 1), arguments, _options(rows))
    return S


def tile_matrix_at(rows: TiledCloud, starts: Tensor, lists: Tensor, w: Tensor, of_pass: OfPass) -> Tensor:
    """S [K] float64 at w [column tiles], natural logarithms: of s_iJ e^w_J, and the sums of those."""
    partial, anchor, log2_sums = of_pass
    S = torch.empty(len(partial), dtype=torch.float64, device=partial.device)
    arguments = partial, starts, lists, w, rows.weight, anchor, log2_sums, S
    launch(matrix_at_kernel, (rows.tree.tiles, 1, 1), arguments, _options(rows))
    return S


def half_step(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, w: Tensor, more: Tensor,
    of_pass: OfPass,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u [N] with which every row sum is one, and v [M] + z log2(e): z is w + more [column tiles], natural logarithms,
    shortened to at most 30, or 0 if it or a sum of a row with weight is not finite."""
    partial, anchor, log2_sums = of_pass
    total, fails = torch.empty_like(w), torch.empty(1, dtype=torch.int32, device=w.device)
    launch(total_kernel, (1, 1, 1), (w, more, total, fails, len(w)), {"TILES": TILES, "num_warps": 8})
    sums = torch.empty_like(log2_sums)
    arguments = partial, starts, lists, total, rows.weight, anchor, log2_sums, sums, fails
    launch(sums_kernel, (rows.tree.tiles, 1, 1), arguments, _options(rows))
    new_u, new_v = torch.empty_like(u), torch.empty_like(v)
    moved = fails, rows.weight, u, sums, log2_sums, new_u, len(u), v, total, new_v, len(v)
    options = {"T": cols.tree.tile, "POINTS": POINTS}
    launch(move_kernel, (triton.cdiv(max(len(u), len(v)), POINTS), 1, 1), moved, options)
    return new_u, new_v


def _options(rows: TiledCloud) -> dict[str, int]:
    return {"T": rows.tree.tile, "AT_ONCE": AT_ONCE, "num_warps": 1}


@triton.jit
def _is_finite(value):
    return value - value == 0


@triton.jit
def matrix_kernel(partial, starts, weight, anchor, log2_sums, S, T: tl.constexpr, AT_ONCE: tl.constexpr):
    """One row tile and its list; rows without weight count for nothing whatever their partial sums."""
    tile = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, T)
    b_weight = tl.load(weight + tile * T + place)
    b_sums = tl.load(log2_sums + tile * T + place)
    factor = b_weight * tl.exp2(tl.load(anchor + tile * T + place).to(tl.float64) - b_sums)
    last = tl.load(starts + tile + 1)
    for start in range(tl.load(starts + tile), last, AT_ONCE):
        pair = start + tl.arange(0, AT_ONCE)
        s = tl.load(partial + pair[:, None] * T + place[None, :], (pair < last)[:, None], other=0.0)
        weighted = tl.where((b_weight > 0)[None, :], s.to(tl.float64) * factor[None, :], 0.0)
        tl.store(S + pair, tl.sum(weighted, 1), pair < last)


@triton.jit
def _sums_at(partial, starts, lists, w, anchor, log2_sums, tile, T: tl.constexpr, AT_ONCE: tl.constexpr):
    """[T]: anchor_i + log2 sum_J s_iJ e^w_J of the rows of one tile; as they were where there is nothing to sum."""
    point = tile * T + tl.arange(0, T)
    last = tl.load(starts + tile + 1)
    total = tl.zeros([AT_ONCE, T], tl.float64)
    for start in range(tl.load(starts + tile), last, AT_ONCE):
        pair = start + tl.arange(0, AT_ONCE)
        there = pair < last
        s = tl.load(partial + pair[:, None] * T + tl.arange(0, T)[None, :], there[:, None], other=0.0)
        multiplier = tl.exp(tl.load(w + tl.load(lists + pair, there, other=0)))
        total += s.to(tl.float64) * multiplier[:, None]
    found = tl.load(anchor + point).to(tl.float64) + tl.log2(tl.sum(total, 0))
    return tl.where(found == float("-inf"), tl.load(log2_sums + point), found)


@triton.jit
def matrix_at_kernel(partial, starts, lists, w, weight, anchor, log2_sums, S, T: tl.constexpr, AT_ONCE: tl.constexpr):
    """As `matrix_kernel`, of s_iJ e^w_J."""
    tile = tl.program_id(0).to(tl.int64)
    point = tile * T + tl.arange(0, T)
    b_weight = tl.load(weight + point)
    b_sums = _sums_at(partial, starts, lists, w, anchor, log2_sums, tile, T, AT_ONCE)
    factor = b_weight * tl.exp2(tl.load(anchor + point).to(tl.float64) - b_sums)
    last = tl.load(starts + tile + 1)
    for start in range(tl.load(starts + tile), last, AT_ONCE):
        pair = start + tl.arange(0, AT_ONCE)
        there = pair < last
        s = tl.load(partial + pair[:, None] * T + tl.arange(0, T)[None, :], there[:, None], other=0.0)
        weighted = tl.where((b_weight > 0)[None, :], s.to(tl.float64) * factor[None, :], 0.0)
        multiplier = tl.exp(tl.load(w + tl.load(lists + pair, there, other=0)))
        tl.store(S + pair, tl.sum(weighted, 1) * multiplier, there)


@triton.jit(do_not_specialize=["n"])
def total_kernel(w, more, total, fails, n, TILES: tl.constexpr):
    """One program: total [n] is w + more, shortened to at most 30: the dual value is concave in it, and gains still.
    fails [1] is one if any is not finite."""
    largest, lost = tl.zeros([TILES], tl.float64), tl.zeros([TILES], tl.int32)
    for start in range(0, n, TILES):
        tile = start + tl.arange(0, TILES)
        b_total = tl.load(w + tile, tile < n, other=0.0) + tl.load(more + tile, tile < n, other=0.0)
        largest = tl.maximum(largest, tl.abs(b_total))
        lost += (_is_finite(b_total) == 0).to(tl.int32)
    share = LARGEST / tl.maximum(tl.max(largest, 0), LARGEST)
    for start in range(0, n, TILES):
        tile = start + tl.arange(0, TILES)
        b_total = tl.load(w + tile, tile < n, other=0.0) + tl.load(more + tile, tile < n, other=0.0)
        tl.store(total + tile, b_total * share, tile < n)
    tl.store(fails, (tl.sum(lost, 0) > 0).to(tl.int32))


@triton.jit
def sums_kernel(
    partial, starts, lists, w, weight, anchor, log2_sums, sums, fails, T: tl.constexpr, AT_ONCE: tl.constexpr
):
    """sums [N] of one tile as `_sums_at` has them; fails [1] becomes one if that of a row with weight is not finite."""
    tile = tl.program_id(0).to(tl.int64)
    point = tile * T + tl.arange(0, T)
    found = _sums_at(partial, starts, lists, w, anchor, log2_sums, tile, T, AT_ONCE)
    tl.store(sums + point, found)
    if tl.sum(((tl.load(weight + point) > 0) & (_is_finite(found) == 0)).to(tl.int32), 0) > 0:
        tl.atomic_max(fails, 1)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def move_kernel(
    fails, weight, u, sums, log2_sums, new_u, n_rows, v, w, new_v, n_cols, T: tl.constexpr, POINTS: tl.constexpr
):
    """u - sums where rows have weight or their sum is finite, and v + w log2(e)."""
    works = tl.load(fails) == 0
    point = tl.program_id(0).to(tl.int64) * POINTS + tl.arange(0, POINTS)
    of_row, of_column = point < n_rows, point < n_cols
    b_sums = tl.load(log2_sums + point, of_row, other=0.0)
    b_sums = tl.where(works, tl.load(sums + point, of_row, other=0.0), b_sums)
    b_u = tl.load(u + point, of_row, other=0.0)
    moves = (tl.load(weight + point, of_row, other=0.0) > 0) | _is_finite(b_sums)
    tl.store(new_u + point, tl.where(moves, b_u - b_sums, b_u), of_row)
    b_w = tl.load(w + point // T, of_column, other=0.0)
    b_v = tl.load(v + point, of_column, other=0.0)
    tl.store(new_v + point, b_v + tl.where(works, b_w * PER_NATURAL, 0.0), of_column)
