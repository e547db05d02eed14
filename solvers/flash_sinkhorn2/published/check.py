"""The sampled check: marginals of some points drawn by weight, each over all points opposite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST, SECOND = 1024, 8192  # points a side; the second where the first leaves it open
STANDARD_ERRORS = 3.0
PAIRS_ON_GPU, PAIRS_ON_CPU = 2**26, 2**18  # at a time: launches few, and in its caches


@dataclass(frozen=True)
class Verdict:
    """residual: the larger side's estimate; score: with three standard errors on top, on the first sample, which
    candidates are ranked by; accepted: whether that of the decisive sample is within the tolerance."""

    accepted: bool
    residual: float
    score: float


@dataclass(eq=False)
class _Sample:
    index: Tensor  # [points] int64
    weight: Tensor  # [points], sums to one
    drawn: bool  # or all points, each by its weight


class SampledCheck:
    """Of points x [n, d], y [m, d], weights a [n], b [m] float64 that sum to one, at k = cost_scale log2(e) / eps.

    Points are drawn once, from one seed; a cloud with no more points than a sample is checked in all of them. A check
    accepts if both sides' estimates of |P1 - a|_1 and |P^T 1 - b|_1, with three standard errors on top, are within tol:
    a stopping rule, no bound. pairs_done: point pairs gone over.
    """

    def __init__(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, k: float, *, tol: float):
        self.sides = [(x.double(), a), (y.double(), b)]
        self.k, self.tol, self.pairs_done = k, tol, 0.0
        self._drawn: dict[int, list[_Sample]] = {}

    def __call__(self, u: Tensor, v: Tensor) -> Verdict:
        """Of potentials u [n], v [m] in base 2."""
        first = self._estimates(u, v, FIRST)
        score = max(mean + error for mean, error in first)
        if not math.isfinite(score):
            return Verdict(False, math.inf, math.inf)
        decisive = first
        if score > self.tol >= max(mean - error for mean, error in first):
            decisive = self._estimates(u, v, SECOND)
        accepted = max(mean + error for mean, error in decisive) <= self.tol
        return Verdict(accepted, max(mean for mean, _ in decisive), score)

    def _estimates(self, u: Tensor, v: Tensor, size: int) -> list[tuple[float, float]]:
        """Of rows and of columns: the mean |marginal / weight - 1| and three standard errors."""
        if size not in self._drawn:
            self._drawn[size] = [_sample(weight, size) for _, weight in self.sides]
        found = []
        for side, (own, other) in enumerate(((u, v), (v, u))):
            sample, points, (opposite, weight) = self._drawn[size][side], self.sides[side][0], self.sides[1 - side]
            off = (self._sums(points[sample.index], own[sample.index], opposite, other, weight) - 1.0).abs()
            mean = (sample.weight * off).sum()
            variance = (sample.weight * (off - mean).square()).sum() / (len(off) - 1) if sample.drawn else 0.0 * mean
            found.append((mean, STANDARD_ERRORS * variance.sqrt()))
        numbers = torch.stack([torch.stack(pair) for pair in found]).tolist()
        return [(mean, error) for mean, error in numbers]

    def _sums(self, points: Tensor, own: Tensor, opposite: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        """[points]: their marginals over their weights, in float64 and by direct differences."""
        solid = weight > 0
        opposite, other, log2_weight = opposite[solid], other[solid], weight[solid].log2()
        self.pairs_done += float(len(points)) * len(opposite)
        block = PAIRS_ON_GPU if points.is_cuda else PAIRS_ON_CPU
        axes, by_column, sums = opposite.T.contiguous(), other + log2_weight, []
        for x, by_row in zip(*(values.split(max(1, block // len(opposite))) for values in (points, own)), strict=True):
            exponent = by_row[:, None] + by_column
            for axis, coordinate in enumerate(axes):
                difference = x[:, axis, None] - coordinate
                exponent.addcmul_(difference, difference, value=-self.k)
            sums.append(exponent.exp2_().sum(1))
        return torch.cat(sums)


def _sample(weight: Tensor, size: int) -> _Sample:
    """By weight and with replacement, drawn on the host: the same on every device."""
    if len(weight) <= size:
        index = weight.nonzero()[:, 0]
        return _Sample(index, weight[index], False)
    generator = torch.Generator().manual_seed(size)
    running = weight.cumsum(0)
    at = torch.rand(size, dtype=torch.float64, generator=generator).to(weight.device) * running[-1]
    index = torch.searchsorted(running, at, right=True).clamp_(max=len(weight) - 1)
    return _Sample(index, torch.full_like(at, 1 / size), True)
