"""KeOps: the log-sum-exps as compiled map-reduce kernels that never store the cost matrix."""

from __future__ import annotations

from solvers.common.keops_runtime import check_device  # isort: skip  # first: it must run before torch is imported

from dataclasses import replace
from functools import lru_cache

import torch
from pykeops.torch import Genred

from fsbench.api import Budget, FixedIterations, Framework, Problem, Solution, Spec, Task
from solvers.common.alternating import alternating_sinkhorn, log_weights
from solvers.common.scheme import Scheme


class KeOps:
    """Log-domain Sinkhorn with KeOps' LogSumExp reduction of B - P |X - Y|^2: linear memory, direct differences.

    One formula serves rows and columns. Default settings of KeOps, which its documentation recommends; float32 sums
    stay in float32 blocks, as there. Compiled and loaded in `prepare`.

    The gradient is one Sum reduction of exp(A + B - P |X - Y|^2) [1, Y] a cloud: the plan's row sums, by which the rows
    are normalised, and its products with the coordinates. KeOps splits a sum where d is high, which it documents.

    check_every: iterations between two looks at the residual; each look stalls the device once and adds no pass.
    """

    framework = Framework.TORCH
    scheme = Scheme.ROWS_FIRST

    def __init__(self, *, check_every: int = 1) -> None:
        self.check_every = check_every

    def supports(self, spec: Spec, budget: Budget) -> None:
        """Any size, dimension and dtype; Unsupported on CUDA if KeOps itself would fall back to the CPU."""
        check_device(spec.device)

    def prepare(self, spec: Spec, budget: Budget) -> None:
        dtype = getattr(torch, spec.dtype)
        x = torch.zeros(2, spec.d, dtype=dtype, device=spec.device)
        weights = torch.full((2,), 0.5, dtype=dtype, device=spec.device)
        tiny = replace(spec, n=2, m=2)
        self.solve(Problem(x, x, weights, weights, tiny), FixedIterations(1))

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        x, y = problem.x.contiguous(), problem.y.contiguous()
        eps = problem.spec.eps
        reduce = _log_sum_exp(x.shape[1])
        inverse = torch.tensor([problem.spec.cost_scale / eps], dtype=x.dtype, device=x.device)
        with torch.no_grad():
            solution = alternating_sinkhorn(
                lambda h: reduce(x, y, h[:, None], inverse)[:, 0],
                lambda h: reduce(y, x, h[:, None], inverse)[:, 0],
                a=problem.a,
                b=problem.b,
                eps=eps,
                budget=budget,
                check_every=self.check_every,
            )
            if problem.spec.task is Task.FORWARD:
                return solution
            a, b, factor = problem.a[:, None], problem.b[:, None], 2 * problem.spec.cost_scale
            u, v = (log_weights(w) + h / eps for w, h in ((problem.a, solution.f), (problem.b, solution.g)))
            centre = 0.5 * (problem.a @ x + problem.b @ y)
            grad_x = factor * a * _displacement(x, y, u, v, inverse, centre)
            grad_y = factor * b * _displacement(y, x, v, u, inverse, centre)
        return solution.with_gradients(grad_x, grad_y, passes=2)


def _displacement(
    x: torch.Tensor, y: torch.Tensor, u: torch.Tensor, v: torch.Tensor, inverse: torch.Tensor, centre: torch.Tensor
) -> torch.Tensor:
    """x_i - (P y)_i / (P 1)_i [n, d], P = exp(u_i + v_j - inverse |x_i - y_j|^2); a point without weight stays."""
    moved = torch.cat([torch.ones_like(v)[:, None], y - centre], 1)
    moments = _plan_sums(x.shape[1])(x, y, u[:, None], v[:, None], inverse, moved)  # [n, 1 + d]
    mass = moments[:, :1]
    return torch.where(mass > 0, x - centre - moments[:, 1:] / mass, 0)


@lru_cache
def _log_sum_exp(d: int) -> Genred:
    """log sum_j exp(B_j - P |X_i - Y_j|^2) for points of dimension d."""
    aliases = [f"X = Vi({d})", f"Y = Vj({d})", "B = Vj(1)", "P = Pm(1)"]
    return Genred("B - P * SqDist(X, Y)", aliases, reduction_op="LogSumExp", axis=1)


@lru_cache
def _plan_sums(d: int) -> Genred:
    """sum_j exp(A_i + B_j - P |X_i - Y_j|^2) Z_j for points of dimension d and Z of dimension 1 + d."""
    aliases = [f"X = Vi({d})", f"Y = Vj({d})", "A = Vi(1)", "B = Vj(1)", "P = Pm(1)", f"Z = Vj({d + 1})"]
    return Genred("Exp(A + B - P * SqDist(X, Y)) * Z", aliases, reduction_op="Sum", axis=1)
