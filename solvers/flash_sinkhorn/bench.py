"""FlashSinkhorn as the harness sees it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fsbench.api import (
    Budget,
    FixedIterations,
    Framework,
    Problem,
    Solution,
    Spec,
    Task,
    ToResidual,
    TracePoint,
    Unsupported,
)
from solvers.common.scheme import Scheme

from .inputs.checks import checked_inputs
from .iteration.solver import Result, solve
from .losses.notices import NotConverged
from .losses.transport import transport
from .plan.hvp import HessianProduct, hvp
from .plan.operators import gradient
from .sweeps.tiles import Precision


class FlashSinkhorn:
    """precision "fast", "mixed" or "exact"; updates "alternating" or "symmetric"; annealing: ratio or None."""

    framework = Framework.TORCH

    def __init__(self, precision: str = "exact", updates: str = "alternating", annealing: float | None = None):
        self.scheme = Scheme.ROWS_FIRST if updates == "alternating" else None
        self.options: dict[str, Any] = {"precision": precision, "updates": updates, "annealing": annealing}

    def supports(self, spec: Spec, budget: Budget) -> None:
        if spec.dtype not in ("float32", "float64"):
            raise Unsupported(f"dtype {spec.dtype}: float32 and float64 only")
        if spec.dtype == "float64" and spec.device == "cuda":
            raise Unsupported("dtype float64 on a GPU: its sweeps are of float32 grade")
        if spec.device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
            raise Unsupported("needs a GPU of compute capability 8.0 or newer")
        if spec.task is Task.DIVERGENCE and (self.options["updates"] != "alternating" or self.options["annealing"]):
            raise Unsupported("the divergence is solved by alternating updates without annealing")

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Compile the kernels on points of this shape and type that are not the problem's."""
        dtype = getattr(torch, spec.dtype)
        x = torch.linspace(0, 1, spec.n * spec.d, dtype=dtype, device=spec.device).reshape(spec.n, spec.d)
        y = torch.linspace(0, 1, spec.m * spec.d, dtype=dtype, device=spec.device).reshape(spec.m, spec.d)
        if spec.task is Task.HVP:
            f, g = x.new_zeros(spec.n), y.new_zeros(spec.m)
            self._product(Problem(x, y, None, None, spec), f, g, x, ToResidual(1.0, max_iterations=1))
            return
        if spec.task is Task.DIVERGENCE:
            self._divergence(Problem(x, y, None, None, spec), FixedIterations(2))
            if isinstance(budget, ToResidual):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", NotConverged)
                    self._divergence(Problem(x, y, None, None, spec), ToResidual(1e-12, max_iterations=4))
            return
        result = solve(x, y, eps=spec.eps, cost_scale=spec.cost_scale, n_iterations=2, **self.options)
        if spec.task is Task.FORWARD_BACKWARD:
            self._gradient(Problem(x, y, None, None, spec), result)
        if not isinstance(budget, FixedIterations):
            solve(x, y, eps=spec.eps, cost_scale=spec.cost_scale, tol=1e-12, max_iterations=4, **self.options)

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        spec = problem.spec
        if spec.task is Task.DIVERGENCE:
            return self._divergence(problem, budget)
        result = solve(
            problem.x,
            problem.y,
            problem.a,
            problem.b,
            eps=spec.eps,
            cost_scale=spec.cost_scale,
            **_limits(budget),
            **self.options,
        )
        at_eps = [check for check in result.trace if check.eps == result.eps]  # the start looks at larger eps as well
        trace = tuple(TracePoint(check.iteration, check.seconds, check.residual) for check in at_eps)
        solution = Solution(
            result.f,
            result.g,
            result.n_iterations,
            result.n_passes,
            result.converged,
            trace,
            solved=_solved(problem, result.precision),
        )
        if spec.task is Task.FORWARD:
            return solution
        return solution.with_gradients(*self._gradient(problem, result), passes=2)

    def hvp(self, problem: Problem, f: torch.Tensor, g: torch.Tensor, v: torch.Tensor, budget: ToResidual) -> Solution:
        """Streaming conjugate gradients on the Schur complement."""
        product = self._product(problem, f, g, v, budget)
        trace = (TracePoint(product.n_iterations, None, product.residual),)
        return Solution(f, g, product.n_iterations, product.n_passes, product.converged, trace, h_x=product.h_x)

    def _product(
        self, problem: Problem, f: torch.Tensor, g: torch.Tensor, v: torch.Tensor, budget: ToResidual
    ) -> HessianProduct:
        spec = problem.spec
        return hvp(
            problem.x,
            problem.y,
            problem.a,
            problem.b,
            f,
            g,
            v,
            eps=spec.eps,
            cost_scale=spec.cost_scale,
            tol=budget.tol,
            max_iterations=budget.max_iterations,
            in_y=False,
            precision=self.options["precision"],
        )

    def _divergence(self, problem: Problem, budget: Budget) -> Solution:
        """As a user calls it; a self problem's iteration is one sweep, and its potential serves both sides."""
        found = transport(
            problem.x,
            problem.y,
            problem.a,
            problem.b,
            eps=problem.spec.eps,
            cost_scale=problem.spec.cost_scale,
            debias=True,
            precision=self.options["precision"],
            **_limits(budget),
        )
        own = (found.f_self, found.f_self), (found.g_self, found.g_self)
        n_iterations = budget.iterations if isinstance(budget, FixedIterations) else None
        counts = n_iterations, found.n_passes, found.converged
        return Solution(found.f, found.g, *counts, value=found.divergence, self_potentials=own)

    def _gradient(self, problem: Problem, result: Result) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows normalised by their own sums: one sweep a cloud."""
        spec = problem.spec
        return gradient(
            problem.x,
            problem.y,
            problem.a,
            problem.b,
            result.f,
            result.g,
            eps=spec.eps,
            cost_scale=spec.cost_scale,
            precision=self.options["precision"],
        )


def _limits(budget: Budget) -> dict[str, Any]:
    """As `solve` and `transport` take them."""
    if isinstance(budget, FixedIterations):
        return {"n_iterations": budget.iterations}
    return {"tol": budget.tol, "max_iterations": budget.max_iterations, "max_seconds": budget.max_seconds}


def _solved(problem: Problem, precision: Precision) -> Callable[[], tuple[torch.Tensor, torch.Tensor]] | None:
    """Makes the points that sweeps of this precision stored in the place of those given; None where they round none."""
    if problem.spec.device == "cpu" or precision is Precision.EXACT or precision.packs(problem.spec.d):
        return None

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        inputs = checked_inputs(
            problem.x, problem.y, problem.a, problem.b, eps=problem.spec.eps, cost_scale=problem.spec.cost_scale
        )
        x = inputs.x if precision.splits_x else inputs.rounded(inputs.x)
        return x, inputs.rounded(inputs.y)

    return make
