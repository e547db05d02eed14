"""Hessian-vector products of the OT value at converged potentials, by one streamed linear solve. README derives it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..inputs.checks import MASS_TOLERANCE, positive, whole
from ..sweeps.tiles import Precision
from .averages import Motion
from .operators import Plan
from .schur import SchurSolution, SchurSystem


@dataclass(frozen=True)
class HessianProduct:
    """The Hessian of OT_eps times a direction: how the gradients in the points and the potentials change along it.

    h_x [n, d], h_y [m, d]: changes of 2 cost_scale sum_j P_ij (x_i - y_j) and of its mirror image in y, in the points'
    dtypes. h_a [n], h_b [m]: changes of the potentials f and g, float64. With balanced marginals f and g are the
    gradients in the weights, up to a constant added to the one and subtracted from the other; with relaxed ones those
    are functions of f and g. A batch of k directions puts k in front of every shape.

    residual: largest relative residual |rhs - S z| / |rhs| of the Schur systems, as measured at the end.
    marginal_residual: how far the potentials given were from converged, L1 over the mass. Both bound what the product
    is worth. converged: residual <= tol, of potentials at least near the problem's own (marginal_residual < 1).
    n_iterations of conjugate gradients; n_passes over all pairs, all directions together.
    """

    h_x: torch.Tensor | None
    h_y: torch.Tensor | None
    h_a: torch.Tensor
    h_b: torch.Tensor
    residual: float
    converged: bool
    marginal_residual: float
    n_iterations: int
    n_passes: int


def hvp(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    f: torch.Tensor,
    g: torch.Tensor,
    v_x: torch.Tensor | None = None,
    v_y: torch.Tensor | None = None,
    v_a: torch.Tensor | None = None,
    v_b: torch.Tensor | None = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho_x: float | None = None,
    rho_y: float | None = None,
    tol: float = 1e-6,
    max_iterations: int = 1000,
    in_x: bool = True,
    in_y: bool = True,
    precision: Precision | str = Precision.EXACT,
) -> HessianProduct:
    """The Hessian of OT_eps in (x, y, a, b) times (v_x, v_y, v_a, v_b), never storing an n x m array.

    v_x [n, d], v_y [m, d]: motions of the points. v_a [n], v_b [m]: changes of the weights, ignored where a weight is
    zero, and otherwise of equal sums if the marginals are balanced. None is zero. A leading k on every direction given
    makes a batch, whose k systems share each sweep. f [n], g [m]: converged potentials; away from convergence the
    product is that of no function, and `marginal_residual` says how far. rho_x, rho_y: strength of a relaxed marginal,
    rho KL(P 1 | a); None is balanced. tol: on the relative residual of the linear systems; max_iterations of
    conjugate gradients. in_x, in_y: whether h_x and h_y are wanted; None otherwise, at no cost. Other arguments as of
    `Plan`.

    Raises ValueError as `Plan` does, and for directions of the wrong shape, device or type, none at all, with NaN or
    infinite values, or of weights whose sums must be equal and are not.

    Source: arXiv 2602.03067, Th. 5.
    """
    plan = Plan(x, y, a, b, f, g, eps=eps, cost_scale=cost_scale, precision=precision)
    hessian = Hessian(plan, f, g, rho_x=rho_x, rho_y=rho_y)
    product = hessian_product(hessian, v_x, v_y, v_a, v_b, tol=tol, max_iterations=max_iterations, in_x=in_x, in_y=in_y)
    h_x = None if product.h_x is None else product.h_x.to(x.dtype)
    h_y = None if product.h_y is None else product.h_y.to(y.dtype)
    return replace(product, h_x=h_x, h_y=h_y)


def hessian_product(
    hessian: Hessian,
    v_x: torch.Tensor | None = None,
    v_y: torch.Tensor | None = None,
    v_a: torch.Tensor | None = None,
    v_b: torch.Tensor | None = None,
    *,
    tol: float,
    max_iterations: int,
    in_x: bool = True,
    in_y: bool = True,
) -> HessianProduct:
    """`hvp` of any plan's Hessian, whichever pairs it goes over; h_x and h_y are float64."""
    tol, max_iterations = positive("tol", tol), whole("max_iterations", max_iterations)
    given = {"v_x": v_x, "v_y": v_y, "v_a": v_a, "v_b": v_b}
    for name, v in given.items():
        if v is not None and not (isinstance(v, torch.Tensor) and v.is_floating_point()):
            raise ValueError(f"{name} must be a floating-point torch tensor or None, got {type(v).__name__}")
    single = all(v is None or v.ndim == rank for v, rank in zip(given.values(), (2, 2, 1, 1), strict=True))
    directions = [None if v is None else (v[None] if single else v).detach() for v in given.values()]
    hessian.check_directions(dict(zip(given, directions, strict=True)))
    tangent = hessian.tangent(*directions, tol=tol, max_iterations=max_iterations)
    h_x = hessian.change(tangent) if in_x else None
    h_y = hessian.change(tangent, transpose=True) if in_y else None
    if single:
        h_x, h_y = (None if change is None else change[0] for change in (h_x, h_y))
    marginal_residual = hessian.marginal_residual
    return HessianProduct(
        h_x=h_x,
        h_y=h_y,
        h_a=tangent.df[0] if single else tangent.df,
        h_b=tangent.dg[0] if single else tangent.dg,
        residual=tangent.solution.residual,
        converged=tangent.solution.residual <= tol and marginal_residual < 1.0,
        marginal_residual=marginal_residual,
        n_iterations=tangent.solution.n_iterations,
        n_passes=hessian.plan.averages.n_passes,
    )


@dataclass(frozen=True)
class Tangent:
    """Directions [k, n, d] or [k, n], and how the plan follows: df [k, n], dg [k, m] float64 change the potentials."""

    v_x: torch.Tensor | None
    v_y: torch.Tensor | None
    df: torch.Tensor
    dg: torch.Tensor
    solution: SchurSolution


class Hessian:
    """The Hessian at one pair of potentials; what its products share is computed once. rho_x, rho_y: as of `hvp`."""

    def __init__(
        self, plan: Plan, f: torch.Tensor, g: torch.Tensor, *, rho_x: float | None = None, rho_y: float | None = None
    ):
        rho_x = rho_x if rho_x is None else positive("rho_x", rho_x)
        rho_y = rho_y if rho_y is None else positive("rho_y", rho_y)
        self.plan = plan
        self.kappa_x = 1.0 if rho_x is None else 1.0 + plan.eps / rho_x
        self.kappa_y = 1.0 if rho_y is None else 1.0 + plan.eps / rho_y
        a, b = plan.inputs.a, plan.inputs.b
        self._targets = (
            a if rho_x is None else a * torch.exp(-f.double() / rho_x),
            b if rho_y is None else b * torch.exp(-g.double() / rho_y),
        )
        self._displacements: dict[bool, torch.Tensor] = {}
        self._balanced = rho_x is None and rho_y is None

    def check_directions(self, given: dict[str, torch.Tensor | None]) -> None:
        """ValueError for directions, by name, that `tangent` cannot take. Reads back from the device."""
        self._checked_batch(*given.values())
        for name, v in given.items():
            if v is not None and not bool(torch.isfinite(v).all()):
                raise ValueError(f"{name} contains NaN or infinite values: remove or replace them first")
        v_a, v_b = given["v_a"], given["v_b"]
        if not self._balanced or (v_a is None and v_b is None):
            return
        sums, sizes = torch.zeros(2, dtype=torch.float64)
        for sign, v, weight in ((1, v_a, self.plan.inputs.a), (-1, v_b, self.plan.inputs.b)):
            if v is not None:
                counted = torch.where(weight > 0, v.double(), 0.0)
                sums, sizes = sums + sign * counted.sum(1).cpu(), sizes + counted.abs().sum(1).cpu()
        if bool((sums.abs() > MASS_TOLERANCE * sizes).any()):
            raise ValueError("v_a and v_b must have equal sums while the marginals are balanced: subtract their means")

    @property
    def marginal_residual(self) -> float:
        """Of the potentials given, L1 over the mass."""
        plan, (want_r, want_c) = self.plan, self._targets
        rows = (plan.row_sums() - want_r).abs().sum() / plan.inputs.a.sum()
        cols = (plan.col_sums() - want_c).abs().sum() / plan.inputs.b.sum()
        return torch.maximum(rows, cols).item()

    def tangent(
        self,
        v_x: torch.Tensor | None,
        v_y: torch.Tensor | None = None,
        v_a: torch.Tensor | None = None,
        v_b: torch.Tensor | None = None,
        *,
        tol: float,
        max_iterations: int,
    ) -> Tangent:
        """Solve for the change of the potentials along v_x [k, n, d], v_y [k, m, d], v_a [k, n], v_b [k, m]."""
        k = self._checked_batch(v_x, v_y, v_a, v_b)
        a, b, eps = self.plan.inputs.a, self.plan.inputs.b, self.plan.eps
        zeros_a, zeros_b = a.new_zeros(k, a.shape[0]), b.new_zeros(k, b.shape[0])
        log_a = zeros_a if v_a is None else torch.where(a > 0, eps * v_a / a, 0.0)
        log_b = zeros_b if v_b is None else torch.where(b > 0, eps * v_b / b, 0.0)
        # In this order each side's first sweep has values to carry, and leaves the side's sums behind.
        p = (zeros_a + self._cost_changes(v_x, v_y, transpose=False) + self.kappa_x * log_a).T
        back = self.plan.averages.means(p, transpose=True).double()
        q = (zeros_b + self._cost_changes(v_y, v_x, transpose=True) + self.kappa_y * log_b).T
        system = SchurSystem(self.plan.averages, self.plan.col_sums(), kappa_x=self.kappa_x, kappa_y=self.kappa_y)
        solution = system.solve(p, back, q, tol=tol, max_iterations=max_iterations)
        return Tangent(v_x, v_y, solution.phi.T - log_a, solution.gamma.T - log_b, solution)

    def change(self, tangent: Tangent, *, transpose: bool = False) -> torch.Tensor:
        """Change [k, n, d] of the gradient in x (transpose: [k, m, d] in y) along the tangent's directions, float64."""
        plan, solution = self.plan, tangent.solution
        sums = plan.sums(transpose=transpose)
        points = plan.inputs.y if transpose else plan.inputs.x
        points = points - plan.averages.centre.to(points.dtype)
        sides = (solution.phi.T, tangent.v_x), (solution.gamma.T, tangent.v_y)
        (alphas, own), (betas, opposite) = sides[::-1] if transpose else sides
        factor = 2.0 * plan.cost_scale
        changes = []
        for k, (alpha, beta) in enumerate(zip(alphas, betas, strict=True)):
            motion = Motion(None if own is None else own[k], None if opposite is None else opposite[k])
            mass, moment = plan.averages.moments(alpha, beta, motion, transpose=transpose)
            change = (points * mass[:, None] - moment) / plan.eps
            if motion.v is not None:
                change += motion.v
            if motion.w is not None:
                change -= plan.averages.means(motion.w, transpose=transpose)
            changes.append(factor * sums[:, None] * change)
        return torch.stack(changes)

    def _cost_changes(
        self,
        own: torch.Tensor | None,
        opposite: torch.Tensor | None,
        *,
        transpose: bool,
    ) -> torch.Tensor | float:
        """Means [k, n] of dC over each row; the rows' own motion needs no sweep of its own."""
        means: torch.Tensor | float = 0.0
        if own is not None:
            means = means + 2.0 * self.plan.cost_scale * (own * self._displacement(transpose)).sum(2).double()
        if opposite is not None:
            averages = self.plan.averages
            each = [averages.cost_change_means(Motion(None, w), transpose=transpose).double() for w in opposite]
            means = means + torch.stack(each)
        return means

    def _displacement(self, transpose: bool) -> torch.Tensor:
        if transpose not in self._displacements:
            self._displacements[transpose] = self.plan.averages.displacement(transpose=transpose)
        return self._displacements[transpose]

    def _checked_batch(self, *directions: torch.Tensor | None) -> int:
        """The number of directions. ValueError if any does not fit the problem or the others."""
        x, y = self.plan.inputs.x, self.plan.inputs.y
        shapes = {"v_x": x.shape, "v_y": y.shape, "v_a": x.shape[:1], "v_b": y.shape[:1]}
        counts = set()
        for (name, shape), v in zip(shapes.items(), directions, strict=True):
            if v is None:
                continue
            if v.shape[1:] != shape or v.shape[0] == 0:
                raise ValueError(f"{name} must have shape {list(shape)} or [k, ...] of it, got {list(v.shape)}")
            if v.device != x.device:
                raise ValueError(f"{name} must be on {x.device} like the points, got {v.device}")
            counts.add(v.shape[0])
        if len(counts) != 1:
            raise ValueError("give at least one of v_x, v_y, v_a, v_b, all with the same number of directions")
        return counts.pop()
