"""Sweeps of a batch on the CPU: torch over blocks of scores, of as many problems at once as fit into a block."""

from __future__ import annotations

import math

import torch

from .blocked_sweeps import LARGEST_LOG2_SUM, Blocked, BlockedCloud
from .threads import each_block
from .tiles import LOG2_E

BLOCK_ROWS, BLOCK_COLS = 128, 2048
BLOCK_PAIRS = BLOCK_ROWS * BLOCK_COLS  # of all problems of a block: few enough to stay in the cache


class BlockedBatch(Blocked):
    """A batch of problems."""

    def sweep(self, rows: BlockedCloud, cols: BlockedCloud) -> torch.Tensor:
        """[B, 1, n] float64."""
        count = len(rows.weight)
        at_once = max(1, BLOCK_PAIRS // (min(BLOCK_ROWS, rows.n) * min(BLOCK_COLS, cols.n)))

        def of_problems(problems: slice) -> torch.Tensor:
            log2_sums = self._log2_sums(rows, cols, problems, with_maximum=rows.guarded)
            if not bool((log2_sums.abs() < LARGEST_LOG2_SUM).all()):  # false for nan too
                log2_sums = self._log2_sums(rows, cols, problems, with_maximum=True)
            return log2_sums

        blocks = (slice(start, min(start + at_once, count)) for start in range(0, count, at_once))
        return torch.cat(each_block(of_problems, blocks))[:, None]

    def _log2_sums(
        self, rows: BlockedCloud, cols: BlockedCloud, problems: slice, *, with_maximum: bool
    ) -> torch.Tensor:
        """[problems, n]."""
        found = []
        for row_start in range(0, rows.n, BLOCK_ROWS):
            block = problems, slice(row_start, min(row_start + BLOCK_ROWS, rows.n))
            partial = []
            for col_start in range(0, cols.n, BLOCK_COLS):
                opposite = problems, slice(col_start, min(col_start + BLOCK_COLS, cols.n))
                exponents = self._exponents(rows, cols, block, opposite)
                partial.append(_log2_sum_exp2(exponents, with_maximum=with_maximum).double())
            found.append(torch.logsumexp(torch.stack(partial) / LOG2_E, 0) * LOG2_E if len(partial) > 1 else partial[0])
        return torch.cat(found, 1)

    def _exponents(
        self,
        rows: BlockedCloud,
        cols: BlockedCloud,
        block: tuple[slice, slice],
        opposite: tuple[slice, slice],
    ) -> torch.Tensor:
        """[problems, rows, cols] of the blocks of points, until the next call."""
        row_bias, col_bias = rows.row_bias[block][:, :, None], cols.col_bias[opposite][:, None]
        shape = (len(row_bias), row_bias.shape[1], col_bias.shape[2])
        exponents, scratch = self._buffers_of_thread(math.prod(shape)).view(2, *shape)
        if not self.direct:
            q, k = rows.points[block] * self.scale, cols.points[opposite]
            one = torch.ones_like
            left, right = torch.cat([q, row_bias, one(row_bias)], 2), torch.cat([k, one(col_bias.mT), col_bias.mT], 2)
            return torch.bmm(left, right.mT, out=exponents)
        torch.add(row_bias, col_bias, out=exponents)
        problems = block[0]
        for coordinate in range(rows.points.shape[1]):
            q = rows.points[problems, coordinate, block[1]]
            k = cols.points[problems, coordinate, opposite[1]]
            torch.sub(q[:, :, None], k[:, None], out=scratch)
            exponents.addcmul_(scratch, scratch, value=self.scale)
        return exponents

    def _buffers_of_thread(self, pairs: int) -> torch.Tensor:
        """[2, pairs], kept from sweep to sweep: fresh memory costs more than the arithmetic on it."""
        if not hasattr(self._of_thread, "buffers"):
            self._of_thread.buffers = torch.empty(2, BLOCK_PAIRS, dtype=self.exponent_dtype)
        return self._of_thread.buffers[:, :pairs]


def _log2_sum_exp2(exponents: torch.Tensor, *, with_maximum: bool) -> torch.Tensor:
    """log2 sum_j 2^t_ij over the last axis; overwrites `exponents`."""
    if not with_maximum:
        return exponents.exp2_().sum(-1).log2_()
    maximum = exponents.amax(-1, keepdim=True).clamp_min_(torch.finfo(exponents.dtype).min)  # all weights zero
    return maximum[..., 0] + exponents.sub_(maximum).exp2_().sum(-1).log2_()
