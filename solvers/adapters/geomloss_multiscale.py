"""GeomLoss: its two-scale Sinkhorn loop with annealing and kernel truncation, on KeOps' block-sparse reductions."""

from __future__ import annotations

from solvers.common.keops_runtime import check_device  # isort: skip  # first: it must run before torch is imported

import math
from dataclasses import replace

import torch
from geomloss import SamplesLoss

from fsbench.api import Budget, FixedIterations, Framework, Problem, Solution, Spec, Task, Unsupported


class GeomlossMultiscale:
    """`SamplesLoss("sinkhorn", p=2, backend="multiscale", debias=False, potentials=True)`; truncate and cluster_scale
    at their documented defaults.

    scaling: ratio of two successive blurs of the annealing, in (0, 1). It is the only dial of accuracy: one update a
    temperature and no stopping rule, so the harness runs a ladder of it and takes the first rung that passes.

    GeomLoss has cost |x - y|^2 / 2 and eps = blur^2. Ours is cost_scale |x - y|^2, that is 2 cost_scale times theirs:
    blur = sqrt(eps / (2 cost_scale)), and potentials are multiplied by 2 cost_scale.

    Gradients are torch's of <a, f> + <b, g>, which is GeomLoss's own loss: its last update is differentiable, with the
    opposite potential held.
    """

    framework = Framework.TORCH

    def __init__(self, *, scaling: float) -> None:
        if not 0 < scaling < 1:
            raise ValueError(f"scaling must be strictly between 0 and 1, got {scaling}")
        self.scaling = scaling

    def supports(self, spec: Spec, budget: Budget) -> None:
        """Up to three dimensions and budgets to a residual; Unsupported otherwise."""
        if spec.d > 3:
            raise Unsupported(f"GeomLoss clusters points in at most 3 dimensions, got d={spec.d}")
        if spec.task is Task.DIVERGENCE:
            raise Unsupported("GeomLoss's debiased loss returns no potentials to judge its value by")
        if isinstance(budget, FixedIterations):
            raise Unsupported("GeomLoss's annealing schedule sets the number of iterations, it cannot be fixed")
        check_device(spec.device)

    def prepare(self, spec: Spec, budget: Budget) -> None:
        """Compile and load the KeOps formulas: a small cloud takes the dense path, a wide one the block-sparse path."""
        dtype = getattr(torch, spec.dtype)
        blur = _blur(spec)
        weights = torch.full((20,), 0.05, dtype=dtype, device=spec.device)
        for width in (blur, 10 * blur * 2000 ** (1 / spec.d)):  # clusters are width / 2000^(1/d) wide
            x = torch.linspace(0, width, 20, dtype=dtype, device=spec.device)[:, None].expand(-1, spec.d).contiguous()
            type(self)(scaling=0.5).solve(Problem(x, x, weights, weights, spec), budget)

    def solve(self, problem: Problem, budget: Budget) -> Solution:
        if problem.spec.task is Task.FORWARD:
            with torch.no_grad():  # GeomLoss switches gradients on as it ends; leaving this block puts them back
                f, g = _potentials(problem, self.scaling)
            return Solution(f, g, n_iterations=None, n_passes=None)
        x, y = (points.detach().requires_grad_() for points in (problem.x, problem.y))
        f, g = _potentials(replace(problem, x=x, y=y), self.scaling)
        grad_x, grad_y = torch.autograd.grad(problem.a @ f + problem.b @ g, (x, y))
        return Solution(f.detach(), g.detach(), n_iterations=None, n_passes=None, grad_x=grad_x, grad_y=grad_y)


def _potentials(problem: Problem, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    loss = SamplesLoss(
        "sinkhorn",
        p=2,
        blur=_blur(problem.spec),
        scaling=scaling,
        debias=False,
        potentials=True,
        backend="multiscale",
    )
    scale = 2 * problem.spec.cost_scale
    f, g = loss(problem.a, problem.x, problem.b, problem.y)
    return scale * f, scale * g


def _blur(spec: Spec) -> float:
    return math.sqrt(spec.eps / (2 * spec.cost_scale))
