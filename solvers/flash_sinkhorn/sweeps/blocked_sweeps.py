"""Sweeps on the CPU: torch over blocks of scores, float32 for float32 clouds and float64 for float64 ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..inputs.checks import Inputs
from .sweeps import Cloud, Sweeps
from .tiles import LARGEST_DIRECT_DIMENSION, LOG2_E

BLOCK_ROWS, BLOCK_COLS = 512, 2048  # large enough that starting the threads of each operation does not count
LARGEST_LOG2_SUM = 60.0


@dataclass(eq=False)
class BlockedCloud(Cloud):
    """points [n, d] (direct differences: [d, n]) and biases [n] in the working precision; the rest float64 [n].

    row_bias, col_bias: what a sweep adds to the scores of the cloud as rows and as columns.
    """

    points: torch.Tensor
    row_bias: torch.Tensor
    col_bias: torch.Tensor
    log2_weight: torch.Tensor
    guarded: bool = True  # nothing is known of the next sums


class BlockedSweeps(Sweeps[BlockedCloud]):
    """One problem on the CPU; C = cost_scale |x - y|^2.

    Never stores more than one block of scores. Low d takes direct differences, high d one product a block.
    """

    rounded = improvable = False

    def __init__(self, inputs: Inputs, *, cost_scale: float):
        self.cost_scale = cost_scale
        self.direct = inputs.x.shape[1] <= LARGEST_DIRECT_DIMENSION
        self.scale, self.exponent_dtype = 0.0, inputs.x.dtype
        centre = inputs.direct_centre if self.direct else inputs.centre
        self.x = self._store(inputs.x, inputs.a, centre)
        self.y = self._store(inputs.y, inputs.b, centre)

    def _store(self, points: torch.Tensor, weight: torch.Tensor, centre: torch.Tensor) -> BlockedCloud:
        dtype = points.dtype
        centred = (points.double() - centre).to(dtype)
        n = points.shape[0]
        square = torch.zeros_like(weight) if self.direct else centred.double().square().sum(1) / 2
        return BlockedCloud(
            n=n,
            potential=torch.zeros_like(weight),
            used=torch.zeros_like(weight),
            residual=torch.zeros(1, dtype=torch.float64),
            points=centred.T.contiguous() if self.direct else centred,
            half_square=square,
            weight=weight,
            log2_weight=torch.log2(weight),
            row_bias=torch.zeros(n, dtype=dtype),
            col_bias=torch.zeros(n, dtype=dtype),
        )

    def set_epsilon(self, eps: float, ratio: float) -> None:
        s = self.cost_scale * LOG2_E / eps
        self.scale = -s if self.direct else 2.0 * s
        for cloud in (self.x, self.y):
            cloud.potential *= ratio
            cloud.guarded = True
            self._derive_biases(cloud)

    def _derive_biases(self, cloud: BlockedCloud) -> None:
        bias = self.bias(cloud)
        cloud.row_bias.copy_(bias)
        cloud.col_bias.copy_(bias + cloud.log2_weight)

    def sweep(self, rows: BlockedCloud, cols: BlockedCloud) -> torch.Tensor:
        log2_sums = self._log2_sums(rows, cols, with_maximum=rows.guarded)
        if not bool((log2_sums.abs() < LARGEST_LOG2_SUM).all()):  # false for nan too
            log2_sums = self._log2_sums(rows, cols, with_maximum=True)
        return log2_sums[None]

    def _log2_sums(self, rows: BlockedCloud, cols: BlockedCloud, *, with_maximum: bool) -> torch.Tensor:
        col_blocks = range(0, cols.n, BLOCK_COLS)
        partial = torch.empty(len(col_blocks), rows.n, dtype=rows.points.dtype)
        buffers = torch.empty(2, min(BLOCK_ROWS, rows.n), min(BLOCK_COLS, cols.n), dtype=rows.points.dtype)
        for row_start in range(0, rows.n, BLOCK_ROWS):
            block = slice(row_start, min(row_start + BLOCK_ROWS, rows.n))
            left = None if self.direct else _left_factor(rows, block, self.scale)
            for index, col_start in enumerate(col_blocks):
                opposite = slice(col_start, min(col_start + BLOCK_COLS, cols.n))
                exponents, scratch = buffers[:, : block.stop - block.start, : opposite.stop - opposite.start]
                if left is None:
                    _direct_exponents(rows, cols, block, opposite, self.scale, exponents, scratch)
                else:
                    torch.mm(left, _right_factor(cols, opposite).T, out=exponents)
                partial[index, block] = _log2_sum_exp2(exponents, with_maximum=with_maximum)
        return torch.logsumexp(partial.double() / LOG2_E, 0) * LOG2_E

    def settle(self, rows: BlockedCloud, partial: torch.Tensor, *, relaxation: float, damping: float) -> None:
        rows.used.copy_(rows.row_bias.double() + self.scale * rows.half_square)
        excess = partial[0] + (1.0 - damping) * (rows.used - partial[0])
        rows.potential.copy_(rows.used - relaxation * excess)
        rows.guarded = False
        self._derive_biases(rows)
        deviation = torch.expm1(excess / LOG2_E).abs()
        rows.residual.fill_((rows.weight * deviation)[rows.weight > 0].sum())

    def take_potential(self, cloud: BlockedCloud, potential: torch.Tensor) -> None:
        cloud.potential.copy_(potential)
        self._derive_biases(cloud)


def _left_factor(rows: BlockedCloud, block: slice, scale: float) -> torch.Tensor:
    """[scale q_i, row_bias_i, 1]: times the right factor's transpose this is the exponent, biases included."""
    q, bias = rows.points[block] * scale, rows.row_bias[block, None]
    return torch.cat([q, bias, torch.ones_like(bias)], 1)


def _right_factor(cols: BlockedCloud, block: slice) -> torch.Tensor:
    """[k_j, 1, col_bias_j]."""
    bias = cols.col_bias[block, None]
    return torch.cat([cols.points[block], torch.ones_like(bias), bias], 1)


def _direct_exponents(
    rows: BlockedCloud,
    cols: BlockedCloud,
    block: slice,
    opposite: slice,
    scale: float,
    out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    torch.add(rows.row_bias[block, None], cols.col_bias[None, opposite], out=out)
    for q, k in zip(rows.points, cols.points, strict=True):
        torch.sub(q[block, None], k[None, opposite], out=scratch)
        out.addcmul_(scratch, scratch, value=scale)


def _log2_sum_exp2(exponents: torch.Tensor, *, with_maximum: bool) -> torch.Tensor:
    """log2 sum_j 2^t_ij of each row; overwrites `exponents`."""
    if not with_maximum:
        return exponents.exp2_().sum(1).log2_()
    maximum = exponents.amax(1, keepdim=True).clamp_min_(torch.finfo(exponents.dtype).min)  # all weights zero
    return maximum[:, 0] + exponents.sub_(maximum).exp2_().sum(1).log2_()
