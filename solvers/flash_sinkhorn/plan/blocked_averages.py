"""Means over the plan on the CPU: torch over blocks of scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..inputs.checks import Inputs
from ..sweeps.blocked_sweeps import (
    BLOCK_COLS,
    BLOCK_ROWS,
    BlockedCloud,
    BlockedSweeps,
    _direct_exponents,
    _left_factor,
    _right_factor,
)
from .averages import Averages, Motion


class BlockedAverages(Averages[BlockedCloud]):
    """Never stores more than a few blocks of scores."""

    sweeps: BlockedSweeps

    def __init__(self, inputs: Inputs, *, cost_scale: float):
        super().__init__(inputs, BlockedSweeps(inputs, cost_scale=cost_scale), cost_scale=cost_scale)

    def _sweep_sums(self, rows: BlockedCloud, cols: BlockedCloud) -> torch.Tensor:
        return self.sweeps.sweep(rows, cols)[0].double()

    def _settle(self, rows: BlockedCloud, log2_sums: torch.Tensor) -> BlockedCloud:
        return replace(rows, row_bias=(rows.row_bias.double() - log2_sums).to(rows.row_bias.dtype))

    @torch.autocast("cpu", enabled=False)
    def _means(
        self, rows: BlockedCloud, cols: BlockedCloud, values: torch.Tensor | None, *, settled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = rows.row_bias.dtype
        values = self._centred(cols) if values is None else values.to(dtype)
        sums = torch.empty(rows.n, dtype=torch.float64)
        means = torch.empty(rows.n, values.shape[1], dtype=dtype)
        for block in _blocks(rows.n, BLOCK_ROWS):
            size = block.stop - block.start
            total, moment = torch.zeros(size, dtype=dtype), torch.zeros(size, values.shape[1], dtype=dtype)
            maximum = torch.full((size,), 0.0 if settled else torch.finfo(dtype).min, dtype=dtype)
            for opposite, p in self._exponents(rows, cols, block):
                if not settled:
                    new_maximum = torch.maximum(maximum, p.amax(1))
                    shrink = torch.exp2(maximum - new_maximum)
                    total *= shrink
                    moment *= shrink[:, None]
                    maximum = new_maximum
                    p.sub_(maximum[:, None])
                p.exp2_()
                total += p.sum(1)
                moment.addmm_(p, values[opposite])
            means[block] = moment / total[:, None]
            sums[block] = maximum.double() + total.double().log2()
        return means, sums

    @torch.autocast("cpu", enabled=False)
    def _moments(
        self,
        rows: BlockedCloud,
        cols: BlockedCloud,
        alpha: torch.Tensor,
        beta: torch.Tensor,
        motion: Motion,
        *,
        with_points: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = rows.row_bias.dtype
        x, y = self._centred(rows), self._centred(cols)
        means, moments = torch.empty(rows.n, dtype=dtype), torch.empty_like(x)
        left, right = _change_factors(x, y, alpha, beta, motion, 2.0 * self.cost_scale)
        for block in _blocks(rows.n, BLOCK_ROWS):
            size = block.stop - block.start
            total, first = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
            second = torch.zeros(size, y.shape[1], dtype=dtype)
            for opposite, p in self._exponents(rows, cols, block):
                p.exp2_()
                total += p.sum(1)
                p.mul_(left[block] @ right[opposite].T)
                first += p.sum(1)
                if with_points:
                    second.addmm_(p, y[opposite])
            means[block] = first / total
            moments[block] = second / total[:, None]
        return means, moments

    def _centred(self, cloud: BlockedCloud) -> torch.Tensor:
        """[n, d] about `centre`."""
        if not self.sweeps.direct:
            return cloud.points
        points = self.inputs.x if cloud.points is self.sweeps.x.points else self.inputs.y
        return (points.double() - self.centre).to(points.dtype)

    def _exponents(self, rows: BlockedCloud, cols: BlockedCloud, block: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        """(columns, exponents [rows, columns] to be overwritten) block by block."""
        size = block.stop - block.start
        buffers = torch.empty(2, size, min(BLOCK_COLS, cols.n), dtype=rows.row_bias.dtype)
        left = None if self.sweeps.direct else _left_factor(rows, block, self.sweeps.scale)
        for opposite in _blocks(cols.n, BLOCK_COLS):
            exponents, scratch = buffers[:, :, : opposite.stop - opposite.start]
            if left is None:
                _direct_exponents(rows, cols, block, opposite, self.sweeps.scale, exponents, scratch)
            else:
                torch.mm(left, _right_factor(cols, opposite).T, out=exponents)
            yield opposite, exponents


def _change_factors(
    x: torch.Tensor, y: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, motion: Motion, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Left [n, .] and right [m, .] with left right^T = alpha_i + beta_j - factor (x_i - y_j).(v_i - w_j)."""
    alpha, beta = alpha.double()[:, None], beta.double()[:, None]
    left, right = [], []
    if motion.v is not None:
        alpha = alpha - factor * (x.double() * motion.v).sum(1, keepdim=True)
        left.append(factor * motion.v)
        right.append(y)
    if motion.w is not None:
        beta = beta - factor * (y.double() * motion.w).sum(1, keepdim=True)
        left.append(x)
        right.append(factor * motion.w)
    left += [alpha, torch.ones_like(alpha)]
    right += [torch.ones_like(beta), beta]
    dtype = x.dtype
    return torch.cat([part.to(dtype) for part in left], 1), torch.cat([part.to(dtype) for part in right], 1)


def _blocks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))
