"""One cloud made ready for sweeps: operands in the sweep's precision, biases, potential. Base 2, see kernels.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .tiles import LARGEST_DIRECT_DIMENSION, Precision, padded_dimension

LOG2_E = math.log2(math.e)
PADDING = 256  # points; a multiple of every tile's rows and cols


@dataclass
class SweptCloud:
    """hi, lo: operands [n_padded, d_padded] (direct differences: [d, n_padded] float32, lo unused).

    weight, log2_weight, half_square, potential: float64 [n_padded]; potential is f log2(e) / eps.
    half_square is |q|^2 / 2 of the stored operands, so that a rounded problem is solved consistently.
    row_bias, col_bias, log2_sum: float32 [n_padded]. Padding repeats a point with weight zero.
    A settled half-step leaves its column bias in next_col_bias; `turn` makes it the present one.
    """

    n: int
    hi: torch.Tensor
    lo: torch.Tensor
    weight: torch.Tensor
    log2_weight: torch.Tensor
    half_square: torch.Tensor
    potential: torch.Tensor
    row_bias: torch.Tensor
    col_bias: torch.Tensor
    next_col_bias: torch.Tensor
    log2_sum: torch.Tensor
    block_residual: torch.Tensor

    def set_potential(self, potential: torch.Tensor, scale: torch.Tensor) -> None:
        """Take over a base-2 potential [n_padded] and derive both biases from it."""
        bias = potential - self.half_square * scale.double()
        self.potential.copy_(potential)
        self.row_bias.copy_(bias)
        self.col_bias.copy_(bias + self.log2_weight)

    def turn(self) -> None:
        self.col_bias, self.next_col_bias = self.next_col_bias, self.col_bias


@dataclass
class Geometry:
    """How operands relate to costs: score scale and whether scores are direct differences.

    unit is the power of two by which centred coordinates were divided; the score scale of kernels.py is
    2 s unit^2 for dot products and -s for direct differences, with s = cost_scale log2(e) / eps.
    """

    direct: bool
    split: bool
    unit: torch.Tensor  # float64 [], on the device: reading it back would stall the queue

    def score_scale(self, eps: float, cost_scale: float) -> torch.Tensor:
        s = cost_scale * LOG2_E / eps
        if self.direct:
            return torch.full((1,), -s, dtype=torch.float32, device=self.unit.device)
        return (2.0 * s * self.unit**2).float().reshape(1)


def make_clouds(
    x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, precision: Precision
) -> tuple[SweptCloud, SweptCloud, Geometry]:
    """Operands of x [n, d] and y [m, d] with weights a [n], b [m] (float64), in one common frame."""
    d = x.shape[1]
    if d <= LARGEST_DIRECT_DIMENSION:
        geometry = Geometry(direct=True, split=False, unit=torch.ones((), dtype=torch.float64, device=x.device))
        if x.dtype == torch.float64:  # float32 coordinates are exact as they are; float64 ones are moved near zero
            centre = y.mean(0)
            x, y = x - centre, y - centre
        return _direct_cloud(x, a), _direct_cloud(y, b), geometry
    x64, y64 = x.double(), y.double()
    centre = (x64.sum(0) + y64.sum(0)) / (x.shape[0] + y.shape[0])
    x64, y64 = x64 - centre, y64 - centre
    largest = torch.maximum(x64.abs().amax(), y64.abs().amax()).clamp_min(torch.finfo(torch.float64).tiny)
    unit = torch.exp2(torch.ceil(torch.log2(largest)) - 9)  # coordinates up to 2^9: fp16 holds hi and lo parts well
    split = precision is Precision.EXACT
    geometry = Geometry(direct=False, split=split, unit=unit)
    return _dot_cloud(x64 / unit, a, split), _dot_cloud(y64 / unit, b, split), geometry


def _direct_cloud(points: torch.Tensor, weight: torch.Tensor) -> SweptCloud:
    n_padded = _round_up(points.shape[0])
    hi = torch.empty(points.shape[1], n_padded, dtype=torch.float32, device=points.device)
    hi[:, : points.shape[0]] = points.T
    hi[:, points.shape[0] :] = points[:1].T
    half_square = torch.zeros(n_padded, dtype=torch.float64, device=points.device)
    return _cloud(points.shape[0], hi, hi, weight, half_square)


def _dot_cloud(points: torch.Tensor, weight: torch.Tensor, split: bool) -> SweptCloud:
    n, d = points.shape
    n_padded = _round_up(n)
    hi = torch.zeros(n_padded, padded_dimension(d), dtype=torch.float16, device=points.device)
    hi[:n, :d] = points
    hi[n:, :d] = points[:1]
    stored = hi[:, :d].double()
    lo = hi
    if split:
        lo = torch.zeros_like(hi)
        lo[:n, :d] = points - stored[:n]
        lo[n:, :d] = points[:1] - stored[n:]
        stored = stored + lo[:, :d].double()
    return _cloud(n, hi, lo, weight, stored.square().sum(1) / 2)


def _cloud(n: int, hi: torch.Tensor, lo: torch.Tensor, weight: torch.Tensor, half_square: torch.Tensor) -> SweptCloud:
    n_padded = half_square.shape[0]
    padded_weight = torch.zeros(n_padded, dtype=torch.float64, device=hi.device)
    padded_weight[:n] = weight

    def single() -> torch.Tensor:
        return torch.zeros(n_padded, dtype=torch.float32, device=hi.device)

    return SweptCloud(
        n=n,
        hi=hi,
        lo=lo,
        weight=padded_weight,
        log2_weight=torch.log2(padded_weight),
        half_square=half_square,
        potential=torch.zeros_like(padded_weight),
        row_bias=single(),
        col_bias=single(),
        next_col_bias=single(),
        log2_sum=single(),
        block_residual=torch.zeros(n_padded, dtype=torch.float64, device=hi.device),
    )


def _round_up(n: int) -> int:
    return -(-n // PADDING) * PADDING
