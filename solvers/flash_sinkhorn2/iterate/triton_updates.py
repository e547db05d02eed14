"""`updates.corrected` on a GPU: what it does besides the balance, in a few launches."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from ..geometry import TiledCloud

AT_ONCE = 16  # tile pairs
POINTS = 1024  # a program
PER_NATURAL = tl.constexpr(1 / math.log(2.0))


def tile_matrix(rows: TiledCloud, starts: Tensor, partial: Tensor, anchor: Tensor, log2_sums: Tensor) -> Tensor:
    """S [K] float64: S_IJ = sum over the rows i of tile I of a_i 2^(anchor_i - log2_sums_i) s_iJ."""
    S = torch.empty(len(partial), dtype=torch.float64, device=partial.device)
    arguments = partial, starts, rows.weight, anchor, log2_sums, S
    options = {"T": rows.tree.tile, "AT_ONCE": AT_ONCE, "num_warps": 1}
    launch(matrix_kernel, (rows.tree.tiles, 1, 1), arguments, options)
    return S


def moved_sums(
    rows: TiledCloud, starts: Tensor, lists: Tensor, w: Tensor, partial: Tensor, anchor: Tensor, log2_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """sums [N]: anchor_i + log2 sum_J s_iJ e^w_J, those before where there is nothing to sum; and [1] int32, whether
    one of a row with weight, or an entry of w, is not finite."""
    sums, fails = torch.empty_like(log2_sums), torch.zeros(1, dtype=torch.int32, device=w.device)
    arguments = partial, starts, lists, w, rows.weight, anchor, log2_sums, sums, fails, len(w)
    launch(sums_kernel, (rows.tree.tiles, 1, 1), arguments, {"T": rows.tree.tile, "AT_ONCE": AT_ONCE, "num_warps": 1})
    return sums, fails


def half_step(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, w: Tensor,
    partial: Tensor, anchor: Tensor, log2_sums: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """v [M] + w log2(e), w [column tiles] in natural logarithms, and u [N] with which every row sum is one; with w = 0
    if sums are not finite otherwise."""
    new_u, new_v = torch.empty_like(u), torch.empty_like(v)
    sums, fails = moved_sums(rows, starts, lists, w, partial, anchor, log2_sums)
    arguments = fails, rows.weight, u, sums, log2_sums, new_u, len(u), v, w, new_v, len(v)
    options = {"T": cols.tree.tile, "POINTS": POINTS}
    launch(move_kernel, (triton.cdiv(max(len(u), len(v)), POINTS), 1, 1), arguments, options)
    return new_u, new_v


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


@triton.jit(do_not_specialize=["n_cols"])
def sums_kernel(
    partial, starts, lists, w, weight, anchor, log2_sums, sums, fails, n_cols,
    T: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """sums [N]: anchor_i + log2 sum_J s_iJ e^w_J of the rows of one tile; as they were where there is nothing to sum.

    fails [1] is one if a sum of rows with weight, or an entry of w, is not finite: a program looks at a few of these.
    """
    tile = tl.program_id(0).to(tl.int64)
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
    found = tl.where(found == float("-inf"), tl.load(log2_sums + point), found)
    tl.store(sums + point, found)
    lost = tl.sum(((tl.load(weight + point) > 0) & (_is_finite(found) == 0)).to(tl.int32), 0)
    for column in range(tl.program_id(0), n_cols, tl.num_programs(0)):
        lost += (_is_finite(tl.load(w + column)) == 0).to(tl.int32)
    if lost > 0:
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
