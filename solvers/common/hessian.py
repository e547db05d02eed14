"""The Hessian product in x by conjugate gradients, written once against an implementation's products with the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsbench.api import Problem, Solution, ToResidual, TracePoint

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PlanProducts:
    """rows: P values, [m, k] -> [n, k]. columns: P^T values, [n, k] -> [m, k]. Each is one pass over all pairs.

    second_moment: v [n, d] -> sum_j P_ij (y_j . v_i) y_j [n, d], of the same coordinates as x, y [n or m, d] here.
    """

    rows: Product
    columns: Product
    second_moment: Product
    x: torch.Tensor
    y: torch.Tensor


def hessian_product(
    plan: PlanProducts, problem: Problem, f: torch.Tensor, g: torch.Tensor, v: torch.Tensor, budget: ToResidual
) -> Solution:
    """h_x [n, d]: the Hessian of OT_eps in x times v, at converged f [n], g [m] and positive weights.

    With dC_ij = 2 cost_scale (x_i - y_j) . v_i the potentials change by (phi, gamma) so that the marginals stay; gamma
    solves the Schur complement diag(b) - P^T diag(1 / a) P, here in the unknown sqrt(b) gamma. The residual told is
    the true one, relative to the right-hand side, after the last iteration. Source: arXiv 2602.03067, Th. 5.
    """
    x, y, a, eps = plan.x, plan.y, problem.a, problem.spec.eps
    factor, root_b, along = 2 * problem.spec.cost_scale, problem.b.sqrt(), (x * v).sum(1)
    plan_y = plan.rows(y)
    p = factor * (a * along - (plan_y * v).sum(1))
    of_columns = plan.columns(torch.cat([along[:, None], v], 1))
    q = factor * (of_columns[:, 0] - (y * of_columns[:, 1:]).sum(1))

    def schur(z: torch.Tensor) -> torch.Tensor:
        forth = plan.rows((z / root_b)[:, None])
        return z - plan.columns(forth / a[:, None])[:, 0] / root_b

    rhs = (q - plan.columns((p / a)[:, None])[:, 0]) / root_b
    z, iterations = _conjugate_gradients(schur, rhs, budget)
    residual = float((rhs - schur(z)).norm() / rhs.norm())
    gamma = z / root_b
    phi = (p - plan.rows(gamma[:, None])[:, 0]) / a
    moved = (phi - factor * along)[:, None] * plan_y + plan.rows(gamma[:, None] * y) + factor * plan.second_moment(v)
    h_x = factor * (a[:, None] * v - moved / eps)
    trace = (TracePoint(iterations, None, residual),)
    passes = 2.0 * iterations + 8
    return Solution(f, g, iterations, passes, residual <= budget.tol, trace, h_x=h_x)


def _conjugate_gradients(
    apply: Callable[[torch.Tensor], torch.Tensor], rhs: torch.Tensor, budget: ToResidual
) -> tuple[torch.Tensor, int]:
    """Solve apply(z) = rhs to the recursive residual budget.tol; z and the number of iterations."""
    z, residual, direction = torch.zeros_like(rhs), rhs, rhs
    square = rhs @ rhs
    goal = budget.tol**2 * square
    for iteration in range(budget.max_iterations):
        if square <= goal:
            return z, iteration
        applied = apply(direction)
        step = square / (direction @ applied)
        z, residual = z + step * direction, residual - step * applied
        before, square = square, residual @ residual
        direction = residual + (square / before) * direction
    return z, budget.max_iterations
