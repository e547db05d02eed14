"""POT (Python Optimal Transport): its log-domain Sinkhorn on a stored cost matrix, through its torch backend."""

from __future__ import annotations

import solvers.common.keops_runtime  # noqa: F401  # isort: skip  # first: POT imports KeOps wherever it is installed

import math

import ot
import torch

from fsbench.api import Budget, FixedIterations, Framework, Problem, Solution, Spec, Task, ToResidual, Unsupported
from solvers.common.scheme import Scheme


class Pot:
    """`ot.sinkhorn(method="sinkhorn_log")`, which POT recommends for small eps; CPU or CUDA, float32 or float64.

    The cost is `ot.dist` on clouds centred first, as it expands the square. POT looks at the L2 error of the column
    marginal at iterations 1, 11, 21, ...: since |r|_1 <= sqrt(m) |r|_2, stopThr = tol / sqrt(m) makes its stop imply
    an L1 residual of tol. Fixed iterations use stopThr = 0, which its strict comparison never passes. POT always
    builds the plan at the end; that pass and its memory are part of using it. `max_seconds` of a budget cannot stop it.

    Gradients are the plan taken back through `ot.dist` by torch, which is what `ot.solve(grad="envelope")` documents,
    without the value that it computes besides.
    """

    framework = Framework.TORCH
    scheme = Scheme.COLUMNS_FIRST_UNWEIGHTED

    def supports(self, spec: Spec, budget: Budget) -> None:
        """Any size, dimension, dtype and device, as long as the memory holds several n x m matrices."""
        if spec.task is Task.DIVERGENCE:
            raise Unsupported("POT's own divergence, empirical_sinkhorn_divergence, is of <P, C> without the entropy")

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Nothing to compile."""

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        x, y, a, b, eps = problem.x, problem.y, problem.a, problem.b, problem.spec.eps
        forward = problem.spec.task is Task.FORWARD
        centre = 0.5 * (a @ x + b @ y)
        x, y = ((points - centre).requires_grad_(not forward) for points in (x, y))
        with torch.set_grad_enabled(not forward):
            cost = ot.dist(x, y, metric="sqeuclidean")
            if problem.spec.cost_scale != 1:
                cost = cost * problem.spec.cost_scale
        limit = budget.iterations if isinstance(budget, FixedIterations) else budget.max_iterations
        threshold = budget.tol / math.sqrt(y.shape[0]) if isinstance(budget, ToResidual) else 0.0
        with torch.no_grad():
            plan, log = ot.sinkhorn(
                a, b, cost, eps, method="sinkhorn_log", numItermax=limit, stopThr=threshold, log=True, warn=False
            )
        with torch.no_grad():
            f, g = _common_potentials(cost, log["log_u"], log["log_v"], a, b, eps)
        iterations = int(log["niter"]) + 1
        converged = bool(log["err"][-1] < threshold) if isinstance(budget, ToResidual) else None
        solution = Solution(f, g, iterations, 2.0 * iterations + len(log["err"]) + 1, converged)
        if forward:
            return solution
        return solution.with_gradients(*torch.autograd.grad(cost, (x, y), plan), passes=2)


def _common_potentials(
    cost: torch.Tensor, log_u: torch.Tensor, log_v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """From P = exp(u + v - C / eps) to the common convention; where a weight is zero, the potential's extension."""
    f, g = eps * (log_u - a.log()), eps * (log_v - b.log())
    empty_rows, empty_columns = a == 0, b == 0
    if empty_rows.any():
        f[empty_rows] = -eps * torch.logsumexp(log_v - cost[empty_rows] / eps, 1)
    if empty_columns.any():
        g[empty_columns] = -eps * torch.logsumexp(log_u[:, None] - cost[:, empty_columns] / eps, 0)
    return f, g
