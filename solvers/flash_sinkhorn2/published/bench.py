"""The published method as the harness sees it."""

from __future__ import annotations

from fsbench.api import Budget, Problem, Solution, Spec, ToResidual, TracePoint

from ..bench import FlashSinkhorn2, rehearsal
from .solve import solve_published


class FlashSinkhorn2Published(FlashSinkhorn2):
    """`solve_published`. tile: points a tile."""

    def __init__(self, tile: int = 32):
        self.options = {"tile": tile}

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Compile the kernels on points of this dimension and type that are not the problem's."""
        x, y, eps = rehearsal(spec)
        solve_published(x, y, eps=eps, tol=1e-3, max_iterations=6, **self.options)

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        assert isinstance(budget, ToResidual)
        spec = problem.spec
        result = solve_published(
            problem.x,
            problem.y,
            problem.a,
            problem.b,
            eps=spec.eps,
            cost_scale=spec.cost_scale,
            tol=budget.tol,
            max_iterations=budget.max_iterations,
            max_seconds=budget.max_seconds,
            **self.options,
        )
        before = result.n_iterations - result.trace[-1].updates
        trace = tuple(
            TracePoint(before + trial.updates, trial.seconds - result.started, trial.residual) for trial in result.trace
        )
        return Solution(
            result.f,
            result.g,
            result.n_iterations,
            result.n_passes,
            result.converged,
            trace,
            stats={
                "kept_pairs_per_point": result.kept_pairs,
                "screens": result.n_screens,
                "coarse_returns": result.coarse_returns,
                "coarse_updates": result.coarse_updates,
                "sampled_residual": result.residual,
            },
        )
