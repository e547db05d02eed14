"""The plan over kept tile pairs as an operator, with bounds of what the others hold, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.plan.averages import Motion
from solvers.flash_sinkhorn.plan.operators import Plan

from ..geometry import from_tiles
from .kept import Kept
from .means import KeptMeans


@dataclass(frozen=True)
class Costs:
    """What a plan P and its potentials are worth, from sums over kept pairs; KL(P | Q) = sum P ln(P / Q) - P + Q.

    primal: <P, C> + eps KL(P | a x b) of P as it is, which misses its marginals by the residual. dual: the dual value
    of (f, g) with what was left out counted at its bound, so that OT_eps is at least that, up to rounding. gap: primal
    less the dual value without that bound, <P 1 - a, f> + <P^T 1 - b, g>. linear: <P, C>. omitted: bound of the mass
    of P in pairs left out.
    """

    primal: float
    dual: float
    gap: float
    linear: float
    omitted: float


class KeptPlan(Plan):
    """`Plan` over the kept tile pairs of x [n, d], y [m, d], a [n], b [m]: sums are exact for these, and what the
    others hold is bounded. kept: of these clouds, whose weights it has normalised.

    Rows without weight have means over pairs of their own, that leave out 1e-6 of each row at most.
    """

    def __init__(
        self, x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None, kept: Kept, *, eps: float, cost_scale: float
    ):
        inputs = checked_inputs(x, y, a, b, eps=eps, cost_scale=cost_scale, balanced=False)
        self.kept = kept
        self.take(KeptMeans(inputs, kept, eps=eps, cost_scale=cost_scale), x.dtype)

    @property
    def omitted(self) -> float:
        """Bound of the mass of P in all pairs left out, and of what the rounding of coordinates changes."""
        return self.kept.omitted * self._mass

    def row_omitted(self) -> Tensor:
        """[n] float64: bound of what row i of P holds in pairs left out; of (P v)_i at most so much times max |v|."""
        return self._bounds(transpose=False)

    def col_omitted(self) -> Tensor:
        """[m] float64: of column j."""
        return self._bounds(transpose=True)

    def costs(self, f: Tensor, g: Tensor) -> Costs:
        """Of the plan's own potentials f [n], g [m] for weights as given."""
        a, b = self.inputs.a, self.inputs.b
        rows, cols = self.row_sums(), self.col_sums()
        mass = rows.sum()
        value = _dot(a, f) + _dot(b, g) - self.eps * (mass - a.sum() * b.sum())
        gap = _dot(rows - a, f) + _dot(cols - b, g)
        # For points that move away from the centre at half their distance from it, dC is C itself.
        moves = ((points.double() - self.averages.centre) / 2 for points in (self.inputs.x, self.inputs.y))
        linear = _dot(rows, self.averages.cost_change_means(Motion(*moves)))
        primal, dual, gap, linear = torch.stack([value + gap, value, gap, linear]).tolist()
        return Costs(primal, dual - self.eps * self.omitted, gap, linear, self.omitted)

    @property
    def _mass(self) -> float:
        return float(self.inputs.a.sum() + self.inputs.b.sum()) / 2

    def _bounds(self, *, transpose: bool) -> Tensor:
        kept, weight = self.kept, self.inputs.b if transpose else self.inputs.a
        cloud, bound = (kept.y, kept.col_bound) if transpose else (kept.x, kept.row_bound)
        opposite = self.inputs.a.sum() if transpose else self.inputs.b.sum()
        of_points = from_tiles(cloud, bound.repeat_interleave(cloud.tree.tile))
        return weight * of_points * (opposite / self._mass)


def _dot(weight: Tensor, potential: Tensor) -> Tensor:
    """Terms without weight do not enter."""
    return torch.where(weight != 0, weight * potential, 0.0).sum()
