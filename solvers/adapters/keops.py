"""KeOps: the log-sum-exps as compiled map-reduce kernels that never store the cost matrix."""

from __future__ import annotations

from solvers.common.keops_runtime import check_device  # isort: skip  # first: it must run before torch is imported

from dataclasses import replace
from functools import lru_cache

import torch
from pykeops.torch import Genred

from fsbench.api import Budget, FixedIterations, Framework, Problem, Solution, Spec, Task, ToResidual
from solvers.common.alternating import alternating_sinkhorn, log_weights
from solvers.common.divergence import divergence
from solvers.common.hessian import PlanProducts, hessian_product
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
        problem = Problem(x, x, weights, weights, replace(spec, n=2, m=2))
        if spec.task is Task.HVP:
            self.hvp(problem, weights, weights, x + 1, ToResidual(1e-3, max_iterations=1))
        else:
            self.solve(problem, FixedIterations(1))

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        if problem.spec.task is Task.DIVERGENCE:
            return divergence(self.solve, problem, budget)
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

    def hvp(self, problem: Problem, f: torch.Tensor, g: torch.Tensor, v: torch.Tensor, budget: ToResidual) -> Solution:
        """Conjugate gradients on Sum reductions of the plan times vectors, coordinates and second moments."""
        x, y, eps = problem.x.contiguous(), problem.y.contiguous(), problem.spec.eps
        d = x.shape[1]
        inverse = torch.tensor([problem.spec.cost_scale / eps], dtype=x.dtype, device=x.device)
        with torch.no_grad():
            u = (log_weights(problem.a) + f / eps)[:, None]
            w = (log_weights(problem.b) + g / eps)[:, None]
            centre = 0.5 * (problem.a @ x + problem.b @ y)
            x_centred, y_centred = x - centre, y - centre
            second = _plan_sums(d, "(Z | W) * W", f"Z = Vi({d})", f"W = Vj({d})")
            products = PlanProducts(
                rows=lambda values: _plan_times(d, values.shape[1])(x, y, u, w, inverse, values.contiguous()),
                columns=lambda values: _plan_times(d, values.shape[1])(y, x, w, u, inverse, values.contiguous()),
                second_moment=lambda v: second(x, y, u, w, inverse, v.contiguous(), y_centred),
                x=x_centred,
                y=y_centred,
            )
            return hessian_product(products, problem, f, g, v, budget)


def _displacement(
    x: torch.Tensor, y: torch.Tensor, u: torch.Tensor, v: torch.Tensor, inverse: torch.Tensor, centre: torch.Tensor
) -> torch.Tensor:
    """x_i - (P y)_i / (P 1)_i [n, d], P = exp(u_i + v_j - inverse |x_i - y_j|^2); a point without weight stays."""
    moved = torch.cat([torch.ones_like(v)[:, None], y - centre], 1)
    moments = _plan_times(x.shape[1], x.shape[1] + 1)(x, y, u[:, None], v[:, None], inverse, moved)  # [n, 1 + d]
    mass = moments[:, :1]
    return torch.where(mass > 0, x - centre - moments[:, 1:] / mass, 0)


@lru_cache
def _log_sum_exp(d: int) -> Genred:
    """log sum_j exp(B_j - P |X_i - Y_j|^2) for points of dimension d."""
    aliases = [f"X = Vi({d})", f"Y = Vj({d})", "B = Vj(1)", "P = Pm(1)"]
    return Genred("B - P * SqDist(X, Y)", aliases, reduction_op="LogSumExp", axis=1)


def _plan_times(d: int, k: int) -> Genred:
    """sum_j P_ij Z_j for points of dimension d and Z of dimension k."""
    return _plan_sums(d, "Z", f"Z = Vj({k})")


@lru_cache
def _plan_sums(d: int, factor: str, *more: str) -> Genred:
    """sum_j exp(A_i + B_j - P |X_i - Y_j|^2) factor for points of dimension d; `more` are the factor's variables."""
    aliases = [f"X = Vi({d})", f"Y = Vj({d})", "A = Vi(1)", "B = Vj(1)", "P = Pm(1)", *more]
    return Genred(f"Exp(A + B - P * SqDist(X, Y)) * {factor}", aliases, reduction_op="Sum", axis=1)
