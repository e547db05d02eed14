"""FlashSinkhorn2 as the harness sees it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from fsbench.api import Budget, Framework, Problem, Solution, Spec, Task, ToResidual, TracePoint, Unsupported
from solvers.flash_sinkhorn import NotConverged
from solvers.flash_sinkhorn.losses.loss import Regularisation, promoted

from .geometry.clouds import LARGEST_DIMENSION
from .plan.at_potentials import plan_at
from .plan.derivatives import KeptPair
from .plan.kept import Kept
from .plan.transport import transport
from .solver import Solved, solved, tile_sizes

REHEARSAL = 4096  # points a side: two levels


class FlashSinkhorn2:
    """correction "full", "lite" or "none"; memory of Anderson mixing, 0 for none; tile: points a tile; lasting,
    thinning: as in `solve`."""

    framework = Framework.TORCH
    tasks: tuple[Task, ...] = (Task.FORWARD,)

    def __init__(
        self,
        correction: str = "full",
        memory: int = 5,
        tile: int | None = None,
        lasting: bool = True,
        thinning: bool = True,
    ):
        options: dict[str, Any] = {"correction": correction, "memory": memory, "tile": tile}
        self.options = options | {"lasting": lasting, "thinning": thinning}
        self.tasks = Task.FORWARD, Task.FORWARD_BACKWARD, Task.HVP, Task.DIVERGENCE

    def supports(self, spec: Spec, budget: Budget) -> None:
        if spec.d > LARGEST_DIMENSION:
            raise Unsupported(f"d = {spec.d}: pairs of points can be left out for d of 1 to {LARGEST_DIMENSION} only")
        if not isinstance(budget, ToResidual):
            raise Unsupported("fixed iterations: the pairs that it keeps follow from the residual that is asked for")
        if spec.task not in self.tasks:
            raise Unsupported(f"task {spec.task}: it computes {', '.join(self.tasks)} only")
        if spec.dtype not in ("float32", "float64"):
            raise Unsupported(f"dtype {spec.dtype}: float32 and float64 only")
        if spec.dtype == "float64" and spec.device == "cuda":
            raise Unsupported("dtype float64 on a GPU: its sweeps are of float32 grade")
        if spec.device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
            raise Unsupported("needs a GPU of compute capability 8.0 or newer")

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Compile the kernels on points of this dimension and type that are not the problem's."""
        x, y, eps = rehearsal(spec)
        problem = Problem(x, y, None, None, replace(spec, n=len(x), m=len(y), eps=eps, cost_scale=1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConverged)
            found = self.solve(problem, ToResidual(1e-3, max_iterations=6))
        if spec.task is Task.HVP:
            self.hvp(problem, found.f, found.g, x, ToResidual(1e-3, max_iterations=2))

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        assert isinstance(budget, ToResidual)
        if problem.spec.task is Task.DIVERGENCE:
            return self._divergence(problem, budget)
        spec = problem.spec
        found = solved(
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
        result = found.result
        before = result.n_iterations - result.trace[-1].passes // 2  # at larger eps
        trace = tuple(
            TracePoint(before + check.passes // 2, check.seconds - result.started, check.residual)
            for check in result.trace
        )
        stats = {
            "kept_pairs_per_point": result.kept_pairs,
            "screens": result.n_screens,
            "rejected": result.n_rejected,
            "points_a_tile": result.tile,
        }
        counts = result.n_iterations, result.n_passes, result.converged
        solution = Solution(result.f, result.g, *counts, trace, stats=stats)
        return _with_gradients(solution, problem, found) if spec.task is Task.FORWARD_BACKWARD else solution

    def hvp(self, problem: Problem, f: torch.Tensor, g: torch.Tensor, v: torch.Tensor, budget: ToResidual) -> Solution:
        """Over pairs chosen for these potentials; choosing them is in the time."""
        spec, points = problem.spec, (problem.x, problem.y, problem.a, problem.b)
        tile = self.options["tile"] or tile_sizes(spec.d)[0]
        plan = plan_at(*points, f, g, tol=budget.tol, eps=spec.eps, cost_scale=spec.cost_scale, tile=tile)
        product = plan.hvp(v, tol=budget.tol, max_iterations=budget.max_iterations, in_y=False)
        trace = (TracePoint(product.n_iterations, None, product.residual),)
        kept = float(len(plan.kept.mask.cols)) * tile**2
        stats = {"kept_pairs_per_point": kept / spec.n}
        counts = product.n_iterations, product.n_passes, product.converged
        return Solution(f, g, *counts, trace, h_x=product.h_x, stats=stats)

    def _divergence(self, problem: Problem, budget: ToResidual) -> Solution:
        """As a user calls it; each of the three problems to its own residual, in as many iterations as it takes."""
        found = transport(
            problem.x,
            problem.y,
            problem.a,
            problem.b,
            eps=problem.spec.eps,
            cost_scale=problem.spec.cost_scale,
            debias=True,
            tol=budget.tol,
            max_iterations=budget.max_iterations,
            max_seconds=budget.max_seconds,
            **self.options,
        )
        own = (found.f_self, found.f_self), (found.g_self, found.g_self)
        return Solution(
            found.f, found.g, None, found.n_passes, found.converged, value=found.divergence, self_potentials=own
        )


def _with_gradients(solution: Solution, problem: Problem, found: Solved) -> Solution:
    """Rows normalised by their own sums over kept pairs: one pass and one product with values a cloud."""
    kept = Kept.of(found.passes, found.u, found.v, found.rounding, found.weightless)
    pair = KeptPair(Regularisation(problem.spec.eps, problem.spec.cost_scale), kept)
    tensors = *promoted(problem.x, problem.y, problem.a, problem.b), solution.f, solution.g
    grad_x, grad_y, _, _ = pair.gradients(tensors, (True, True, False, False))
    return solution.with_gradients(grad_x, grad_y, passes=4)


def rehearsal(spec: Spec) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Points x, y of that dimension, type and device, but not of the problem; and an eps for them."""
    n, m = min(spec.n, REHEARSAL), min(spec.m, REHEARSAL)
    kind: dict[str, Any] = {"dtype": getattr(torch, spec.dtype), "device": spec.device}
    generator = torch.Generator(spec.device).manual_seed(0)
    x = torch.rand(n, spec.d, generator=generator, **kind)
    y = torch.rand(m, spec.d, generator=generator, **kind) ** 2
    return x, y, 4.0 * max(n, m) ** (-2 / spec.d)  # a blur of two spacings
