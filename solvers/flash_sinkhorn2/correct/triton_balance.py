"""The balance on a GPU: a launch a half-sweep, and the coarsest level in one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from .kernels import choose_kernel, newton_kernel, ratio_kernel, sum_kernel, update_kernel
from .levels import Level
from .newton import STEPS

AT_ONCE, LANES = 4, 32  # rows a warp does at once, and entries of each
SUMS, PARTS = 128, 1024  # a program
PRODUCTS = 32  # of the coarsest matrix, a Newton step


def balance_triton(
    level: Level, S: Tensor, masses: Sequence[tuple[Tensor, Tensor]], *, flipped: bool, sweeps: int, factors: int
) -> Tensor:
    """w [columns] as `balance` has it, but for its bounds: sweeps >= 1, factors 1, 2, 4, ... of a correction.

    masses: A and B of this level and all coarser ones.
    """
    context: Any = torch.cuda.device(S.device) if S.is_cuda else nullcontext()
    with context:
        return _cycle(level, S, masses, flipped, sweeps, factors)


def _cycle(
    level: Level, S: Tensor, masses: Sequence[tuple[Tensor, Tensor]], flipped: bool, sweeps: int, factors: int
) -> Tensor:
    pairs, coarsening = level.pairs, level.coarsening
    A, B = masses[0]
    n_rows, n_cols = len(A), len(B)
    if coarsening is None:
        return _newton(level, S, A, B, flipped)
    sums = torch.empty_like(S[: len(coarsening.starts) - 1])
    sum_kernel[(triton.cdiv(len(sums), SUMS),)](
        S, coarsening.starts, coarsening.entries, sums, len(sums), BLOCK=SUMS, num_warps=SUMS // 32
    )
    coarse_w = _cycle(coarsening.level, sums, masses[1:], flipped, sweeps, factors)
    coarse_B = masses[1][1]
    rows = pairs.row_starts, pairs.cols, S
    cols = pairs.col_starts, pairs.rows, S[pairs.to_columns]
    parents = coarsening.col_parents
    if flipped:
        rows, cols, parents = cols, rows, coarsening.row_parents
    grid, col_grid = (triton.cdiv(n_rows, AT_ONCE),), (triton.cdiv(n_cols, AT_ONCE),)
    w, ratios, parts = torch.empty_like(B), A.new_empty(factors, n_rows), A.new_empty(factors, grid[0])
    best = torch.empty(1, dtype=torch.int32, device=A.device)
    block = {"LANES": LANES, "num_warps": 1}
    ratio_kernel[grid](*rows, parents, coarse_w, A, ratios, parts, n_rows, FACTORS=factors, ROWS=AT_ONCE, **block)
    choose_kernel[(1,)](parts, grid[0], coarse_w, coarse_B, len(coarse_B), best, FACTORS=factors, BLOCK=PARTS)
    for sweep in range(sweeps):
        if sweep:
            ratio_kernel[grid](*rows, parents, w, A, ratios, parts, n_rows, FACTORS=1, ROWS=AT_ONCE, **block)
        update_kernel[col_grid](
            *cols, ratios, parents, coarse_w, best, w, B, n_cols, n_rows, FIRST=not sweep, COLUMNS=AT_ONCE, **block
        )
    return w


def _newton(level: Level, S: Tensor, A: Tensor, B: Tensor, flipped: bool) -> Tensor:
    w = torch.empty_like(B)
    dense = level.dense(S)
    dense = dense.T.contiguous() if flipped else dense
    size = 64 if max(len(A), len(B)) <= 64 else 128  # two kernels to compile, whatever the problem
    newton_kernel[(1,)](
        dense, A, B, w, len(A), len(B), SIZE=size, STEPS=STEPS, PRODUCTS=PRODUCTS, num_warps=newton_warps(size)
    )
    return w


def newton_warps(size: int) -> int:
    """16 entries a thread: a program keeps the matrix in its registers."""
    return size * size // 512
