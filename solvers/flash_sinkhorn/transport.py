"""Entropic OT of two weighted clouds as one differentiable result: value, debiased value, linear cost, plan."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .averages import Motion
from .checks import positive
from .loss import Regularisation, full_precision, ot_value, self_value
from .operators import Plan
from .self_transport import solve_self
from .solver import solve
from .tiles import Precision

DEFAULT_TOL = 1e-3
LEAST_SECONDS = 1e-6  # a problem that has none left ends after its first iteration
HESSIAN_TOL = 1e-4  # or tol, where that is less


@dataclass(frozen=True, repr=False)
class Transport:
    """What OT_eps of x, a and y, b came to, with C = cost_scale |x - y|^2 and eps, rho in units of C.

    ot: OT_eps = min <P, C> + eps KL(P | a x b) (+ rho_x KL(P 1 | a) + rho_y KL(P^T 1 | b)), where KL(P | Q) = sum P
    ln(P / Q) - P + Q. divergence: S_eps = OT_eps(a, b) - OT_eps(a, a) / 2 - OT_eps(b, b) / 2 (+ eps (|a| - |b|)^2 / 2),
    or None without debiasing. Both are squared distances, no root is taken; float64 scalars, differentiable twice.

    f [n], g [m]: potentials of OT_eps(a, b), of P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps); f_self, g_self: those of
    the two self problems, or None. All float64 constants to autograd. residual: the largest of the problems, as of
    `solve`, None after a fixed number of iterations; converged: residual <= tol, or None. n_passes: sweeps over all
    pairs, the three problems' together.
    """

    ot: torch.Tensor
    divergence: torch.Tensor | None
    f: torch.Tensor
    g: torch.Tensor
    f_self: torch.Tensor | None
    g_self: torch.Tensor | None
    residual: float | None
    converged: bool | None
    tol: float | None
    problem: Regularisation
    n_passes: float
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

    @property
    def value(self) -> torch.Tensor:
        """The divergence if it was asked for, else the OT value."""
        return self.ot if self.divergence is None else self.divergence

    @cached_property
    def plan(self) -> Plan:
        """The plan of OT_eps(a, b) as an operator."""
        return Plan(
            *self.inputs,
            self.f,
            self.g,
            eps=self.problem.eps,
            cost_scale=self.problem.cost_scale,
            precision=self.problem.precision,
        )

    @cached_property
    def linear_cost(self) -> float:
        """<P, C> of that plan, without any entropy. Two sweeps on first use."""
        plan = self.plan
        # For points that move away from the centre at half their distance from it, dC is C itself.
        motion = Motion(*((points - plan.averages.centre.to(points)) / 2 for points in self.inputs[:2]))
        row_costs = plan.averages.cost_change_means(motion).double()
        return (plan.row_sums() * row_costs).sum().item()

    def __repr__(self) -> str:
        problem = self.problem
        name = "OT value" if self.divergence is None else "Sinkhorn divergence (debiased)"
        sides = (("P1", problem.rho_x), ("P^T1", problem.rho_y))
        marginals = ", ".join(
            f"{side} {'fixed' if rho is None else f'relaxed with rho {rho:g}'}" for side, rho in sides
        )
        if self.residual is None:
            state = "fixed number of iterations, residual not measured"
        else:
            state = (
                f"{'converged' if self.converged else 'NOT converged'}: residual {self.residual:.2e}, tol {self.tol:g}"
            )
        return (
            f"{name}: {self.value.item():.8g}\n"
            f"  OT_eps {self.ot.item():.8g}, linear cost <P, C> {self.linear_cost:.8g}\n"
            f"  C = {problem.cost_scale:g} |x - y|^2, eps = {problem.eps:g}; {marginals}\n"
            f"  {state}; {self.n_passes:g} passes"
        )


def transport(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho: float | None = None,
    rho_x: float | None = None,
    rho_y: float | None = None,
    debias: bool = False,
    tol: float | None = None,
    n_iterations: int | None = None,
    max_iterations: int = 10_000,
    max_seconds: float | None = None,
    precision: Precision | str = Precision.EXACT,
    hessian_tol: float | None = None,
) -> Transport:
    """Solve OT_eps(a, b), and with debias its two self problems too; the values are differentiable in x, y, a and b.

    x [n, d], y [m, d], a [n], b [m]: as of `solve`, of any float dtype, strides and device; uniform weights if None.
    Solved to tol (1e-3 if None) on the L1 marginal residual, or for n_iterations; max_seconds is for all problems
    together. Values are off by the square of the residual, gradients by the residual: ask for a smaller tol where
    gradients are to be exact. Gradients have the dtypes of their inputs, and no input without requires_grad costs
    anything. hessian_tol: on the linear systems of second derivatives; the lesser of tol and 1e-4 if None.

    The self problems have the same rho_x and rho_y as the first, so that S(a, a) = 0.

    Raises ValueError as `solve` does.

    Source: Feydy et al. 2019 (1810.08278); Sejourne et al. 2019 (1910.12958).
    """
    for name, points in (("x", x), ("y", y)):
        if not isinstance(points, torch.Tensor):
            raise ValueError(f"{name} must be a floating-point torch tensor, got {type(points).__name__}")
    rho_x, rho_y = rho if rho_x is None else rho_x, rho if rho_y is None else rho_y
    if tol is None and n_iterations is None:
        tol = DEFAULT_TOL
    budget = _Budget(tol, n_iterations, max_iterations, max_seconds)
    with full_precision(x):
        solved = solve(
            x, y, a, b, eps=eps, cost_scale=cost_scale, rho_x=rho_x, rho_y=rho_y, precision=precision, **budget.left()
        )
        problem = Regularisation(
            eps=solved.eps,
            cost_scale=solved.cost_scale,
            rho_x=None if rho_x is None else float(rho_x),
            rho_y=None if rho_y is None else float(rho_y),
            precision=solved.precision,
            hessian_tol=min(HESSIAN_TOL, tol or HESSIAN_TOL) if hessian_tol is None else hessian_tol,
        )
        dtype = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
        x, y, a, b = x.to(dtype), y.to(dtype), _weights(a, x), _weights(b, y)
        ot = ot_value(x, y, a, b, solved.f, solved.g, problem)
        own = [_solve_self(x, a, 0, problem, budget), _solve_self(y, b, 1, problem, budget)] if debias else []
    residuals = [solved.residual, *(side.residual for side in own)]
    converged = [solved.converged, *(side.converged for side in own)]
    divergence = None
    if own:
        divergence = ot - own[0].value / 2 - own[1].value / 2
        if not problem.balanced:
            divergence = divergence + problem.eps * (a.sum() - b.sum()).square() / 2
    return Transport(
        ot=ot,
        divergence=divergence,
        f=solved.f,
        g=solved.g,
        f_self=own[0].potential if own else None,
        g_self=own[1].potential if own else None,
        residual=None if tol is None else max(r for r in residuals if r is not None),
        converged=None if tol is None else all(converged),
        tol=tol,
        problem=problem,
        n_passes=solved.n_passes + sum(side.n_passes for side in own),
        inputs=(x.detach(), y.detach(), a.detach(), b.detach()),
    )


@dataclass(frozen=True)
class _SelfProblem:
    value: torch.Tensor
    potential: torch.Tensor
    residual: float | None
    converged: bool | None
    n_passes: float


def _solve_self(x: torch.Tensor, a: torch.Tensor, side: int, problem: Regularisation, budget: _Budget) -> _SelfProblem:
    """OT_eps(a, a) of one cloud, rounded if it was in OT_eps(a, b); side: 0 for the first cloud, 1 for the second."""
    exact = problem.precision.splits_y if side else problem.precision.splits_x
    problem = dataclasses.replace(problem, precision=Precision.EXACT if exact else Precision.FAST)
    options: dict[str, Any] = {"eps": problem.eps, "cost_scale": problem.cost_scale, "precision": problem.precision}
    if problem.rho_x == problem.rho_y:
        own = solve_self(x.detach(), a.detach(), rho=problem.rho_x, **options, **budget.left())
        value = self_value(x, a, own.f, own.update, problem)
        return _SelfProblem(value, own.f, own.residual, own.converged, own.n_passes)
    pair = solve(x, x, a, a, rho_x=problem.rho_x, rho_y=problem.rho_y, **options, **budget.left())
    value = ot_value(x, x, a, a, pair.f, pair.g, problem)
    return _SelfProblem(value, pair.g if side else pair.f, pair.residual, pair.converged, pair.n_passes)


class _Budget:
    """The stopping rule, with the seconds that are left of it."""

    def __init__(self, tol: float | None, n_iterations: int | None, max_iterations: int, max_seconds: float | None):
        self.rule: dict[str, Any] = {"tol": tol, "n_iterations": n_iterations, "max_iterations": max_iterations}
        self.max_seconds = None if max_seconds is None else positive("max_seconds", max_seconds)
        self.started = time.perf_counter()

    def left(self) -> dict[str, Any]:
        if self.max_seconds is None:
            return self.rule
        left = self.max_seconds - (time.perf_counter() - self.started)
        return self.rule | {"max_seconds": max(left, LEAST_SECONDS)}


def _weights(weight: torch.Tensor | None, points: torch.Tensor) -> torch.Tensor:
    if weight is None:
        n = points.shape[0]
        return torch.full((n,), 1.0 / n, dtype=torch.float64, device=points.device)
    return weight.double()
