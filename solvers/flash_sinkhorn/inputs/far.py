"""Points without weight so far out that sweeps hold them nearer: where they are, and their rows of the plan there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

LARGEST_COORDINATE = 1e150  # any beyond is taken as that large, for squares to stay in float64's range
PAIRS_AT_ONCE = 1 << 21  # 16 MiB of exponents
LOG2_E = math.log2(math.e)  # exponents are of base 2: far below one, exp is several times slower


@dataclass(frozen=True, eq=False)
class Seen:
    """The opposite points as far ones see them, of B problems: points [B, m, d] about centre [B, d], and bias [B, m] =
    log2 b_j + (g_j - cost_scale |y_j|^2) log2(e) / eps."""

    points: torch.Tensor
    centre: torch.Tensor
    bias: torch.Tensor
    eps: float
    cost_scale: float

    @classmethod
    def of(
        cls, points: torch.Tensor, weight: torch.Tensor, potential: torch.Tensor, *, eps: float, cost_scale: float
    ) -> Seen:
        """points [B, m, d], weight [B, m]; potential [B, m] in units of the cost, any where there is no weight."""
        live, points = weight > 0, points.double()
        centre = (weight[..., None] * points).sum(1) / weight.sum(1, keepdim=True)
        points = points - centre[:, None]
        exponents = (potential - cost_scale * points.square().sum(2)) * (LOG2_E / eps) + weight.log2()
        return cls(points, centre, torch.where(live, exponents, -torch.inf), eps, cost_scale)


@dataclass(frozen=True, eq=False)
class Far:
    """Such points of a cloud, or of the clouds of B problems: index [B, r], where they are, points [B, r, d] float64,
    and which of the r there are, real [B, r], for problems may differ in number.

    Rows are summed in float64 over all pairs, in blocks: no more than `PAIRS_AT_ONCE` exponents, or one row of them.
    """

    index: torch.Tensor
    real: torch.Tensor
    points: torch.Tensor

    @classmethod
    def of(cls, points: torch.Tensor, held: torch.Tensor) -> Far | None:
        """Those of points [B, n, d] that are held elsewhere; None if none are. Waits for the device."""
        moved = (points != held).any(2)
        count = int(moved.sum(1).amax())
        if not count:
            return None
        index = moved.byte().argsort(dim=1, descending=True, stable=True)[:, :count]
        there = points.take_along_dim(index[..., None], 1).double()
        return cls(index, moved.take_along_dim(index, 1), there.clamp(-LARGEST_COORDINATE, LARGEST_COORDINATE))

    def put(self, values: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """values [B, n] or [B, n, k] with found, [B, r] or [B, r, k], in the place of these points'."""
        index, real = self.index, self.real
        if values.ndim == 3:
            index, real = (v[..., None].expand(found.shape) for v in (index, real))
        kept = values.gather(1, index)
        return values.scatter(1, index, torch.where(real, found.to(values.dtype), kept))

    def without(self, values: torch.Tensor) -> torch.Tensor:
        """values [n] or [n, k] of the only problem, zero at these points."""
        return values.index_fill(0, self.index[0], 0.0)

    def potentials(self, seen: Seen) -> torch.Tensor:
        """[B, r]: the soft-min extension, f(x) = -eps log sum_j b_j exp((g_j - C(x, y_j)) / eps)."""
        found = torch.empty_like(self.points[..., 0])
        for block, x, p, largest in self._blocks(seen):
            log2_sums = largest + p.sum(2).log2()
            found[block] = seen.cost_scale * x.square().sum(2) - seen.eps / LOG2_E * log2_sums
        return found

    def means(self, seen: Seen, values: torch.Tensor) -> torch.Tensor:
        """[B, r, k] float64: means of values [B, m, k] of the opposite points over these points' rows of the plan."""
        found, values = self.points.new_empty(*self.index.shape, values.shape[2]), values.double()
        for block, _, p, _ in self._blocks(seen):
            found[block] = p @ values[block[0]] / p.sum(2, keepdim=True)
        return found

    def _blocks(self, seen: Seen) -> Iterator[tuple[tuple[slice, slice], torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(problems and rows, these about the centre [b, rows, d], shares of each row's largest pair [b, rows, m], log2
        of that [b, rows] without cost_scale |x|^2)."""
        problems, count = self.index.shape
        rows_at_once = max(1, min(count, PAIRS_AT_ONCE // seen.bias.shape[1]))
        at_once = max(1, PAIRS_AT_ONCE // (rows_at_once * seen.bias.shape[1])) if rows_at_once == count else 1
        for first in range(0, problems, at_once):
            some = slice(first, first + at_once)
            for start in range(0, count, rows_at_once):
                rows = slice(start, start + rows_at_once)
                x = self.points[some, rows] - seen.centre[some, None]
                slopes = x * (2.0 * seen.cost_scale * LOG2_E / seen.eps)
                exponents = torch.baddbmm(seen.bias[some, None], slopes, seen.points[some].mT)
                largest = exponents.amax(2, keepdim=True)
                yield (some, rows), x, exponents.sub_(largest).exp2_(), largest[..., 0]
