"""The balance on a GPU: a launch a half-sweep, and the coarsest level in one; all of them bound once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import Launch

from .kernels import choose_kernel, newton_kernel, ratio_kernel, sum_kernel, update_kernel
from .levels import Level
from .newton import STEPS

AT_ONCE, LANES = 4, 32  # rows a warp does at once, and entries of each
SUMS, PARTS = 128, 1024  # a program
PRODUCTS = 32  # of the coarsest matrix, a Newton step


class TritonBalance:
    """w [columns] of S [K] as `Balance` has it, but for its bounds: sweeps >= 1, factors 1, 2, 4, ... of a correction;
    fine: as in `Balance`.

    masses: A and B of this level and all coarser ones. What is in between and w itself are the same memory each time.
    """

    def __init__(
        self, level: Level, masses: Sequence[tuple[Tensor, Tensor]], *, flipped: bool, sweeps: int, factors: int
    ) -> None:
        self._flipped, self._sweeps, self._factors = flipped, sweeps, factors
        self._steps: list[Callable[[], object]] = []
        self._fine_steps = self._steps  # where there is one level
        self._S = masses[0][0].new_empty(len(level.pairs.cols))
        self._w = self._cycle(level, self._S, masses)

    def __call__(self, S: Tensor, fine: bool) -> Tensor:
        self._S.copy_(S)
        if fine:
            self._w.zero_()
        for step in self._fine_steps if fine else self._steps:
            step()
        return self._w

    def _launch(self, kernel: object, programs: int, *arguments: object, **options: int) -> None:
        self._steps.append(Launch(kernel, (programs, 1, 1), arguments, options))

    def _cycle(self, level: Level, S: Tensor, masses: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Where w of this level's S will be."""
        pairs, coarsening = level.pairs, level.coarsening
        A, B = masses[0]
        n_rows, n_cols = len(A), len(B)
        if coarsening is None:
            return self._newton(level, S, A, B)
        sums, by_columns = S.new_empty(len(coarsening.starts) - 1), torch.empty_like(S)
        grid = triton.cdiv(len(sums), SUMS)
        of_entries = S, coarsening.starts, coarsening.entries, sums, len(sums)
        self._launch(sum_kernel, grid, *of_entries, BLOCK=SUMS, num_warps=SUMS // 32)
        coarse_w = self._cycle(coarsening.level, sums, masses[1:])
        coarse_B = masses[1][1]
        sorts = len(self._steps)
        self._steps.append(lambda: torch.index_select(S, 0, pairs.to_columns, out=by_columns))
        rows = pairs.row_starts, pairs.cols, S
        cols = pairs.col_starts, pairs.rows, by_columns
        parents = coarsening.col_parents
        if self._flipped:
            rows, cols, parents = cols, rows, coarsening.row_parents
        grid, col_grid = triton.cdiv(n_rows, AT_ONCE), triton.cdiv(n_cols, AT_ONCE)
        w, ratios, parts = torch.empty_like(B), A.new_empty(self._factors, n_rows), A.new_empty(self._factors, grid)
        best = torch.empty(1, dtype=torch.int32, device=A.device)
        block = {"LANES": LANES, "num_warps": 1}
        of_rows = A, ratios, parts, n_rows
        self._launch(
            ratio_kernel, grid, *rows, parents, coarse_w, *of_rows, FACTORS=self._factors, ROWS=AT_ONCE, **block
        )
        of_coarse = coarse_w, coarse_B, len(coarse_B), best
        self._launch(choose_kernel, 1, parts, grid, *of_coarse, FACTORS=self._factors, BLOCK=PARTS)
        of_cols = ratios, parents, coarse_w, best, w, B, n_cols, n_rows
        self._launch(update_kernel, col_grid, *cols, *of_cols, FIRST=True, COLUMNS=AT_ONCE, **block)
        first = len(self._steps)
        self._launch(ratio_kernel, grid, *rows, parents, w, *of_rows, FACTORS=1, ROWS=AT_ONCE, **block)
        self._launch(update_kernel, col_grid, *cols, *of_cols, FIRST=False, COLUMNS=AT_ONCE, **block)
        again = self._steps[first:]
        self._steps[first:] = again * (self._sweeps - 1)
        self._fine_steps = [self._steps[sorts], *again * self._sweeps]  # the finest level's are the last
        return w

    def _newton(self, level: Level, S: Tensor, A: Tensor, B: Tensor) -> Tensor:
        places, w = level.places(flipped=self._flipped), torch.empty_like(B)
        dense = S.new_zeros(len(A) * len(B))
        self._steps.append(lambda: dense.index_copy_(0, places, S))
        size = 64 if max(len(A), len(B)) <= 64 else 128  # two kernels to compile, whatever the problem
        options = {"SIZE": size, "STEPS": STEPS, "PRODUCTS": PRODUCTS, "num_warps": newton_warps(size)}
        self._launch(newton_kernel, 1, dense, A, B, w, len(A), len(B), **options)
        return w


def newton_warps(size: int) -> int:
    """16 entries a thread: a program keeps the matrix in its registers."""
    return size * size // 512
