"""The plan over kept tile pairs as an operator, with bounds of what the others hold, and what it costs."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.plan.averages import Motion
from solvers.flash_sinkhorn.plan.hvp import Hessian, HessianProduct, hessian_product
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

    def hvp(
        self,
        v_x: Tensor | None = None,
        v_y: Tensor | None = None,
        v_a: Tensor | None = None,
        v_b: Tensor | None = None,
        *,
        tol: float = 1e-6,
        max_iterations: int = 1000,
        in_x: bool = True,
        in_y: bool = True,
    ) -> HessianProduct:
        """The Hessian of OT_eps in (x, y, a, b) times (v_x, v_y, v_a, v_b), over kept pairs; otherwise as the dense
        solver's `hvp`, but that h_x and h_y are float64.

        residual: measured, of the kept pairs' system. A pair left out would change a row's means by the share of the
        row that it holds, and potentials by that over the least eigenvalue of the system, 1 - sigma^2.
        """
        a, b = self.inputs.a, self.inputs.b
        # Where a light row meets no kept pair it must not spoil all others.
        means = KeptMeans(self.inputs, self.kept, eps=self.eps, cost_scale=self.cost_scale, lost=0.0)
        plan = copy(self)
        plan.take(means, self.dtype)
        hessian = Hessian(plan, torch.zeros_like(a), torch.zeros_like(b))
        return hessian_product(
            hessian, v_x, v_y, v_a, v_b, tol=tol, max_iterations=max_iterations, in_x=in_x, in_y=in_y
        )

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
