"""Sweeps of a batch on the CPU: torch over blocks of scores, of as many problems at once as fit into a block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import local

import torch

from ..inputs.checks import Inputs
from .sweeps import Cloud, Sweeps
from .threads import each_block
from .tiles import LARGEST_DIRECT_DIMENSION, LOG2_E

BLOCK_ROWS, BLOCK_COLS = 128, 2048
BLOCK_PAIRS = BLOCK_ROWS * BLOCK_COLS  # of all problems of a block: few enough to stay in the cache
LARGEST_LOG2_SUM = 60.0


@dataclass(eq=False)
class BatchedCloud(Cloud):
    """points [B, n, d] (direct differences: [B, d, n]) and biases [B, n] in the working precision; the rest float64."""

    points: torch.Tensor
    row_bias: torch.Tensor
    col_bias: torch.Tensor
    log2_weight: torch.Tensor
    guarded: bool = True  # nothing is known of the next sums


class BlockedBatch(Sweeps[BatchedCloud]):
    """B problems on the CPU, as `BlockedSweeps` has one; C = cost_scale |x - y|^2."""

    rounded = improvable = False

    def __init__(self, inputs: Inputs, *, cost_scale: float):
        self.cost_scale = cost_scale
        self.direct = inputs.x.shape[-1] <= LARGEST_DIRECT_DIMENSION
        self.scale, self.exponent_dtype = 0.0, inputs.x.dtype
        self._of_thread = local()
        centre = inputs.direct_centre if self.direct else inputs.centre
        self.x = self._store(inputs.x, inputs.a, centre)
        self.y = self._store(inputs.y, inputs.b, centre)

    def _store(self, points: torch.Tensor, weight: torch.Tensor, centre: torch.Tensor) -> BatchedCloud:
        count, n, _ = points.shape
        centred = (points.double() - centre[:, None]).to(points.dtype)
        square = torch.zeros_like(weight) if self.direct else centred.double().square().sum(-1) / 2
        return BatchedCloud(
            n=n,
            potential=torch.zeros_like(weight),
            used=torch.zeros_like(weight),
            residual=weight.new_zeros(count, 1),
            points=centred.mT.contiguous() if self.direct else centred,
            half_square=square,
            weight=weight,
            log2_weight=torch.log2(weight),
            row_bias=points.new_zeros(count, n),
            col_bias=points.new_zeros(count, n),
        )

    def set_epsilon(self, eps: float, ratio: float) -> None:
        s = self.cost_scale * LOG2_E / eps
        self.scale = -s if self.direct else 2.0 * s
        for cloud in (self.x, self.y):
            cloud.potential *= ratio
            cloud.guarded = True
            self._derive_biases(cloud)

    def _derive_biases(self, cloud: BatchedCloud) -> None:
        bias = self.bias(cloud)
        cloud.row_bias.copy_(bias)
        cloud.col_bias.copy_(bias + cloud.log2_weight)

    def sweep(self, rows: BatchedCloud, cols: BatchedCloud) -> torch.Tensor:
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
        self, rows: BatchedCloud, cols: BatchedCloud, problems: slice, *, with_maximum: bool
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
        rows: BatchedCloud,
        cols: BatchedCloud,
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

    def settle(self, rows: BatchedCloud, partial: torch.Tensor, *, relaxation: float, damping: float) -> None:
        log2_sums = partial[:, 0]
        rows.used.copy_(rows.row_bias.double() + self.scale * rows.half_square)
        excess = log2_sums + (1.0 - damping) * (rows.used - log2_sums)
        rows.potential.copy_(rows.used - relaxation * excess)
        rows.guarded = False
        self._derive_biases(rows)
        deviation = torch.expm1(excess / LOG2_E).abs()
        rows.residual[:, 0] = torch.where(rows.weight > 0, rows.weight * deviation, 0.0).sum(1)

    def take_potential(self, cloud: BatchedCloud, potential: torch.Tensor) -> None:
        cloud.potential.copy_(potential)
        self._derive_biases(cloud)


def _log2_sum_exp2(exponents: torch.Tensor, *, with_maximum: bool) -> torch.Tensor:
    """log2 sum_j 2^t_ij over the last axis; overwrites `exponents`."""
    if not with_maximum:
        return exponents.exp2_().sum(-1).log2_()
    maximum = exponents.amax(-1, keepdim=True).clamp_min_(torch.finfo(exponents.dtype).min)  # all weights zero
    return maximum[..., 0] + exponents.sub_(maximum).exp2_().sum(-1).log2_()
