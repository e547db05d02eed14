"""Means over the plan on the CPU: torch over blocks of scores."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..inputs.checks import Inputs
from ..sweeps.blocked_sweeps import BlockedCloud, BlockedSweeps
from ..sweeps.threads import each_block
from .averages import Averages, Motion


class BlockedAverages(Averages[BlockedCloud]):
    """Never stores more than a few blocks of scores a thread."""

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
        exponents = self.sweeps.exponents(rows, cols)

        def of_rows(block: slice) -> tuple[torch.Tensor, torch.Tensor]:
            size = block.stop - block.start
            total, moment = torch.zeros(size, dtype=dtype), torch.zeros(size, values.shape[1], dtype=dtype)
            maximum = torch.full((size,), 0.0 if settled else torch.finfo(dtype).min, dtype=dtype)
            for opposite, p, _ in exponents(block):
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
            return moment / total[:, None], maximum.double() + total.double().log2()

        means, sums = zip(*each_block(of_rows, self.sweeps.row_blocks(rows, cols)), strict=True)
        return torch.cat(means), torch.cat(sums)

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
        left, right = _change_factors(x, y, alpha, beta, motion, 2.0 * self.cost_scale)
        exponents = self.sweeps.exponents(rows, cols)

        def of_rows(block: slice) -> tuple[torch.Tensor, torch.Tensor]:
            size = block.stop - block.start
            total, first = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
            second = torch.zeros(size, y.shape[1], dtype=dtype)
            for opposite, p, scratch in exponents(block):
                p.exp2_()
                total += p.sum(1)
                p.mul_(torch.mm(left[block], right[opposite].T, out=scratch))
                first += p.sum(1)
                if with_points:
                    second.addmm_(p, y[opposite])
            return first / total, second / total[:, None]

        means, moments = zip(*each_block(of_rows, self.sweeps.row_blocks(rows, cols)), strict=True)
        return torch.cat(means), torch.cat(moments)

    def _centred(self, cloud: BlockedCloud) -> torch.Tensor:
        """[n, d] about `centre`."""
        if not self.sweeps.direct:
            return cloud.points
        points = self.inputs.x if cloud.points is self.sweeps.x.points else self.inputs.y
        return (points.double() - self.centre).to(points.dtype)


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
