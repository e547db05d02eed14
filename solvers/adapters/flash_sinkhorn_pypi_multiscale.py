"""The published flash-sinkhorn package (0.4.1), backend "multiscale": coarse cells, block-sparse updates; d = 3."""

from __future__ import annotations

import math
import warnings

import torch
from flash_sinkhorn import SamplesLoss

from fsbench.api import Budget, FixedIterations, Framework, Problem, Solution, Spec, Task, ToResidual, Unsupported

_SPACINGS_A_BLUR = 4.0  # of the clouds that `prepare` compiles and tunes on: few updates, a mask of moderate density


class FlashSinkhornPypiMultiscale:
    """Its public `SamplesLoss(backend="multiscale", potentials=True)` with `tol`, the residual it is to reach, at the
    budget's. The package leaves nothing else to set: `scaling` and `threshold` are not used, eps is blur^2.

    It solves the clouds centred and rounded to TF32, and stops once a sample of the marginals of *those* is within tol:
    `converged` is its word on them, where the harness's residual is of the clouds as given.

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
        side = _blur(spec) * max(spec.n, spec.m) ** (1 / 3) / _SPACINGS_A_BLUR
        x, y = (side * torch.rand(size, 3, device=spec.device, generator=generator) for size in (spec.n, spec.m))
        a, b = (torch.full((size,), 1 / size, device=spec.device) for size in (spec.n, spec.m))
        self.solve(Problem(x, y, a, b, spec), budget)

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        assert isinstance(budget, ToResidual)
        scale = problem.spec.cost_scale
        loss = SamplesLoss(
            "sinkhorn", blur=_blur(problem.spec), backend="multiscale", tol=budget.tol, debias=False, potentials=True
        )
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", RuntimeWarning)  # that tol was not confirmed: `converged` says so
            f, g = loss(problem.a, problem.x, problem.b, problem.y)
        info = loss.last_multiscale_info
        if scale != 1:
            f, g = scale * f, scale * g
        return Solution(f, g, n_iterations=info.fine_updates, n_passes=None, converged=info.accepted)


def _blur(spec: Spec) -> float:
    return math.sqrt(spec.eps / spec.cost_scale)
