"""The published flash-sinkhorn package (0.4.1), backend "multiscale": coarse cells, block-sparse updates; d = 3."""

from __future__ import annotations

import warnings

import torch
from flash_sinkhorn.multiscale import preprocess_coordinates, solve_multiscale

from fsbench.api import Budget, FixedIterations, Framework, Problem, Solution, Spec, Task, ToResidual, Unsupported

_SPACINGS_A_BLUR = 4.0  # of the clouds that `prepare` compiles and tunes on: few updates, a mask of moderate density


class FlashSinkhornPypiMultiscale:
    """Its public `solve_multiscale`, what `SamplesLoss(backend="multiscale", potentials=True)` calls, with `tol`, the
    residual it is to reach, at the budget's. The package leaves nothing else to set.

    It solves the clouds centred and rounded to TF32, which its own `preprocess_coordinates` makes and `solved` holds,
    and stops once a sample of the marginals of *those* is within tol: `converged` is its word on that.

    A cost s |x - y|^2 at eps is the full cost at eps / s with potentials s times as large. n_iterations counts its fine
    updates, not those of the coarse stage; n_passes is None, for a block-sparse update is no sweep over all pairs.
    """

    framework = Framework.TORCH

    def supports(self, spec: Spec, budget: Budget) -> None:
        """CUDA, float32, three dimensions, forward solves to a residual of at most one; Unsupported otherwise."""
        if spec.device != "cuda":
            raise Unsupported("flash-sinkhorn 0.4.1 takes CUDA tensors only")
        if spec.dtype != "float32":
            raise Unsupported(f"flash-sinkhorn 0.4.1 computes in float32 whatever it is given, got {spec.dtype}")
        if spec.d != 3:
            raise Unsupported(f"flash-sinkhorn's multiscale backend is for d=3, got d={spec.d}")
        if spec.task is not Task.FORWARD:
            raise Unsupported("flash-sinkhorn's multiscale backend returns potentials without gradients")
        if isinstance(budget, FixedIterations):
            raise Unsupported("flash-sinkhorn's multiscale backend runs to a residual, its iterations cannot be fixed")
        if budget.tol > 1:
            raise Unsupported(f"flash-sinkhorn's multiscale backend takes a tol of at most 1, got {budget.tol}")

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Compile and autotune at these sizes and eps, on uniform clouds of its own."""
        generator = torch.Generator(device=spec.device).manual_seed(0)
        blur = (spec.eps / spec.cost_scale) ** 0.5
        side = blur * max(spec.n, spec.m) ** (1 / 3) / _SPACINGS_A_BLUR
        x, y = (side * torch.rand(size, 3, device=spec.device, generator=generator) for size in (spec.n, spec.m))
        a, b = (torch.full((size,), 1 / size, device=spec.device) for size in (spec.n, spec.m))
        self.solve(Problem(x, y, a, b, spec), budget)

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        assert isinstance(budget, ToResidual)
        scale = problem.spec.cost_scale
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of coarse cells or rounding: the residual tells
            x, y = preprocess_coordinates(problem.x, problem.y, problem.a, problem.b)
            f, g, info = solve_multiscale(x, y, problem.a, problem.b, problem.spec.eps / scale, budget.tol)
        if scale != 1:
            f, g = scale * f, scale * g
        return Solution(f, g, n_iterations=info.fine_updates, n_passes=None, converged=info.accepted, solved=(x, y))
