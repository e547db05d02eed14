"""Sweeps on the CPU: torch over cache-sized blocks, float32 for float32 clouds and float64 for float64 ones."""

from __future__ import annotations

import torch

from .cloud import LOG2_E, SweptCloud
from .sweeps import Sweeps
from .tiles import LARGEST_DIRECT_DIMENSION

BLOCK_ROWS, BLOCK_COLS = 128, 1024  # a block of scores stays in the second-level cache
LARGEST_LOG2_SUM = 60.0


class BlockedSweeps(Sweeps):
    """x [n, d], y [m, d] on the CPU, weights a [n], b [m] in float64, C = cost_scale |x - y|^2.

    Never stores more than one block of scores. Low d takes direct differences, high d one product a block.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, cost_scale: float):
        self.cost_scale = cost_scale
        self.rounded = False
        self.direct = x.shape[1] <= LARGEST_DIRECT_DIMENSION
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if not self.direct:
            centre = (x.double().sum(0) + y.double().sum(0)) / (x.shape[0] + y.shape[0])
            x, y = x.double() - centre, y.double() - centre
        self.x, self.y = _cloud(x.to(dtype), a, self.direct), _cloud(y.to(dtype), b, self.direct)
        self.scale = torch.ones(1, dtype=torch.float64)

    def set_epsilon(self, eps: float, f: torch.Tensor, g: torch.Tensor) -> None:
        s = self.cost_scale * LOG2_E / eps
        self.scale = torch.tensor([-s if self.direct else 2.0 * s], dtype=torch.float64)
        self.x.set_potential(f, self.scale)
        self.y.set_potential(g, self.scale)

    def sweep(self, rows: SweptCloud, cols: SweptCloud, *, safe: bool) -> torch.Tensor:
        scale = self.scale.item()
        col_blocks = range(0, cols.n, BLOCK_COLS)
        partial = torch.empty(len(col_blocks), rows.n, dtype=rows.hi.dtype)
        buffers = torch.empty(2, BLOCK_ROWS, BLOCK_COLS, dtype=rows.hi.dtype)
        for row_start in range(0, rows.n, BLOCK_ROWS):
            block = slice(row_start, min(row_start + BLOCK_ROWS, rows.n))
            left = None if self.direct else _left_factor(rows, block, scale)
            for index, col_start in enumerate(col_blocks):
                opposite = slice(col_start, min(col_start + BLOCK_COLS, cols.n))
                exponents, scratch = buffers[:, : block.stop - block.start, : opposite.stop - opposite.start]
                if left is None:
                    _direct_exponents(rows, cols, block, opposite, scale, exponents, scratch)
                else:
                    torch.mm(left, _right_factor(cols, opposite).T, out=exponents)
                partial[index, block] = _log2_sum_exp2(exponents, safe=safe)
        return partial

    def settle(self, rows: SweptCloud, cols: SweptCloud, partial: torch.Tensor, *, relaxation: float) -> None:
        log2_sum = torch.logsumexp(partial.double() / LOG2_E, 0) * LOG2_E
        if not bool((log2_sum.abs() < LARGEST_LOG2_SUM).all()):  # false for nan too
            log2_sum = torch.logsumexp(self.sweep(rows, cols, safe=True).double() / LOG2_E, 0) * LOG2_E
        rows.log2_sum.copy_(log2_sum)
        square = rows.half_square * self.scale
        rows.potential.copy_(rows.row_bias.double() + square - relaxation * rows.log2_sum.double())
        bias = rows.potential - square
        rows.row_bias.copy_(bias)
        rows.next_col_bias.copy_(bias + rows.log2_weight)
        deviation = torch.expm1(rows.log2_sum.double() / LOG2_E).abs()
        rows.block_residual.fill_((rows.weight * deviation)[rows.weight > 0].sum())


def _left_factor(rows: SweptCloud, block: slice, scale: float) -> torch.Tensor:
    """[scale q_i, row_bias_i, 1]: times the right factor's transpose this is the exponent, biases included."""
    q, bias = rows.hi[block] * scale, rows.row_bias[block, None]
    return torch.cat([q, bias, torch.ones_like(bias)], 1)


def _right_factor(cols: SweptCloud, block: slice) -> torch.Tensor:
    """[k_j, 1, col_bias_j]."""
    bias = cols.col_bias[block, None]
    return torch.cat([cols.hi[block], torch.ones_like(bias), bias], 1)


def _direct_exponents(
    rows: SweptCloud,
    cols: SweptCloud,
    block: slice,
    opposite: slice,
    scale: float,
    out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    torch.add(rows.row_bias[block, None], cols.col_bias[None, opposite], out=out)
    for q, k in zip(rows.hi, cols.hi, strict=True):
        torch.sub(q[block, None], k[None, opposite], out=scratch)
        out.addcmul_(scratch, scratch, value=scale)


def _log2_sum_exp2(exponents: torch.Tensor, *, safe: bool) -> torch.Tensor:
    """log2 sum_j 2^t_ij of each row; overwrites `exponents`."""
    if not safe:
        return exponents.exp2_().sum(1).log2_()
    maximum = exponents.amax(1, keepdim=True).clamp_min_(torch.finfo(exponents.dtype).min)  # all weights zero
    return maximum[:, 0] + exponents.sub_(maximum).exp2_().sum(1).log2_()


def _cloud(points: torch.Tensor, weight: torch.Tensor, direct: bool) -> SweptCloud:
    weight = weight.double()
    half_square = torch.zeros_like(weight) if direct else points.double().square().sum(1) / 2
    hi = points.T.contiguous() if direct else points.contiguous()
    single = torch.zeros(points.shape[0], dtype=points.dtype)
    return SweptCloud(
        n=points.shape[0],
        hi=hi,
        lo=hi,
        weight=weight,
        log2_weight=torch.log2(weight),
        half_square=half_square,
        potential=torch.zeros_like(weight),
        row_bias=single.clone(),
        col_bias=single.clone(),
        next_col_bias=single.clone(),
        log2_sum=single.clone(),
        block_residual=torch.zeros(1, dtype=torch.float64),
    )
