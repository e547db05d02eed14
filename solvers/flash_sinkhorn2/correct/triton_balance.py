"""The balance on a GPU: a launch a half-sweep, and the coarsest level in one; all of them bound once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import Launch

from .kernels import bound_kernel, newton_kernel, ratio_kernel, sum_kernel, update_kernel
from .levels import Coarsening, Level

AT_ONCE, LANES = 4, 32  # rows a warp does at once, and entries of each
FEW, WARPS = 8, 4  # rows and warps of programs that try corrections, the last of which goes over a number of each
SUMS = 128  # a program
SIZES = 32, 64, 128  # of the coarsest matrix
PARTS, BOUND = 1024, 1024  # at once, of a program that goes over all there are
PRODUCTS, INEXACT = 16, 1e-2  # of the coarsest matrix, a Newton step; of a squared norm, where that is enough


class TritonBalance:
    """w [columns] of S [K] as `Balance` has it: sweeps >= 1, factors 1, 2, 4, ... of a correction; fine, steps, stop:
    as there; products, inexact: of `newton_kernel`.

    masses: A and B of this level and all coarser ones. w is the same memory each time, one if fine and one if not, and
    so is what is in between, which balances of one level share.
    """

    def __init__(
        self,
        level: Level,
        masses: Sequence[tuple[Tensor, Tensor]],
        *,
        flipped: bool,
        sweeps: int,
        factors: int,
        steps: int,
        stop: float,
        products: int = PRODUCTS,
        inexact: float = INEXACT,
    ) -> None:
        self._flipped, self._sweeps, self._factors = flipped, sweeps, factors
        self._limits = {"STEPS": steps, "STOP": stop, "PRODUCTS": products, "INEXACT": inexact}
        self._steps: list[Callable[[], object]] = []
        A, B = masses[0]
        S = self._S = level.values[0]
        if level.coarsening is None:
            dense, places = S.new_zeros(len(A) * len(B)), level.places(flipped=flipped)
            self._steps.append(lambda: dense.index_copy_(0, places, S))
            w = self._newton(dense, A, B)
            self._fine_steps = [*self._steps]
        else:
            w = self._cycle(level, masses)
        self._w, self._fine_w = torch.empty_like(w), torch.empty_like(w)
        for launches, out in ((self._steps, self._w), (self._fine_steps, self._fine_w)):
            launches.append(Launch(bound_kernel, (1, 1, 1), (w, B, out, len(B)), {"BLOCK": BOUND, "num_warps": 8}))

    def __call__(self, S: Tensor, fine: bool) -> Tensor:
        self._S.copy_(S)
        for step in self._fine_steps if fine else self._steps:
            step()
        return self._fine_w if fine else self._w

    def _launch(self, kernel: object, programs: int, *arguments: object, **options: float) -> None:
        self._steps.append(Launch(kernel, (programs, 1, 1), arguments, options))

    def _cycle(self, level: Level, masses: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Where w of this level's S will be; there is a coarser one."""
        pairs, coarsening = level.pairs, level.coarsening
        assert coarsening is not None
        S, by_columns = level.values  # values in row order, and in column order once sorted
        (A, B), (coarse_A, coarse_B) = masses[:2]
        n_rows, n_cols = len(A), len(B)
        if coarsening.level.coarsening is None:
            sums = S.new_zeros(len(coarse_A) * len(coarse_B))
            self._sum(S, coarsening, coarsening.level.places(flipped=self._flipped), sums)
            coarse_w = self._newton(sums, coarse_A, coarse_B)
        else:
            self._sum(S, coarsening, None, coarsening.level.values[0])
            coarse_w = self._cycle(coarsening.level, masses[1:])
        rows = pairs.row_starts, pairs.cols, S, pairs.to_columns, S
        cols = pairs.col_starts, pairs.rows, S, pairs.to_columns, by_columns
        parents, flipped = coarsening.col_parents, self._flipped
        if flipped:
            rows, cols, parents = cols, rows, coarsening.row_parents
        w, ratios = torch.empty_like(B), A.new_empty(self._factors, n_rows)
        parts = A.new_empty(self._factors, triton.cdiv(n_rows, FEW))
        best, arrivals = torch.zeros(2, 1, dtype=torch.int32, device=A.device)

        def ratio(at: Tensor, factors: int = 1, *, sorts: bool = False) -> None:
            of_rows = parents, at, A, ratios, parts, n_rows, coarse_B, len(coarse_B), best, arrivals
            at_once, warps = (FEW, WARPS) if factors > 1 else (AT_ONCE, 1)
            options = {"FACTORS": factors, "SORTS": sorts, "ROWS": at_once, "LANES": LANES, "BLOCK": PARTS}
            self._launch(ratio_kernel, triton.cdiv(n_rows, at_once), *rows, *of_rows, **options, num_warps=warps)

        def update(at: Tensor, *, first: bool = False, sorts: bool = False) -> None:
            of_cols = ratios, parents, coarse_w, best, at, w, B, n_cols, n_rows
            options = {"FIRST": first, "SORTS": sorts, "COLUMNS": AT_ONCE, "LANES": LANES, "num_warps": 1}
            self._launch(update_kernel, triton.cdiv(n_cols, AT_ONCE), *cols, *of_cols, **options)

        ratio(coarse_w, self._factors, sorts=flipped)
        update(w, first=True, sorts=not flipped)
        corrected, zeros = len(self._steps), torch.zeros_like(B)
        ratio(w)
        update(w)
        ratio(zeros, sorts=flipped)
        update(zeros, sorts=not flipped)
        again, from_zero = self._steps[corrected : corrected + 2], self._steps[corrected + 2 :]
        self._steps[corrected:] = again * (self._sweeps - 1)
        self._fine_steps = from_zero + again * (self._sweeps - 1)  # the finest level's are the last
        return w

    def _sum(self, S: Tensor, coarsening: Coarsening, places: Tensor | None, out: Tensor) -> None:
        """S over the coarser entries, to their places."""
        n, dense = len(coarsening.starts) - 1, places is not None
        arguments = S, coarsening.starts, coarsening.entries, places if dense else coarsening.starts, out, n
        self._launch(sum_kernel, triton.cdiv(n, SUMS), *arguments, DENSE=dense, BLOCK=SUMS, num_warps=SUMS // 32)

    def _newton(self, S: Tensor, A: Tensor, B: Tensor) -> Tensor:
        """Where w of the dense S [rows * columns] will be."""
        w = torch.empty_like(B)
        size = next(size for size in SIZES if max(len(A), len(B)) <= size)
        options = {"SIZE": size, **self._limits, "num_warps": newton_warps(size)}
        self._launch(newton_kernel, 1, S, A, B, w, len(A), len(B), **options)
        return w


def newton_warps(size: int) -> int:
    """16 entries a thread: a program keeps the matrix in its registers, and 32 would not fit."""
    return size * size // 512
