"""The Sinkhorn divergence from three solves, for implementations that have no such function of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fsbench.api import Budget, Problem, Solution, Task


def divergence(solve: Callable[[Problem, Budget], Solution], problem: Problem, budget: Budget) -> Solution:
    """OT_eps(a, b) - OT_eps(a, a) / 2 - OT_eps(b, b) / 2 for unit masses, by `solve` on each problem as task forward.

    solve must end with an exact half-step: the plan's mass is then one, and the dual value <a, f> + <b, g>.
    Source: Feydy et al. 2019 (1810.08278).
    """
    x, y, a, b = problem.x, problem.y, problem.a, problem.b
    clouds = (x, y, a, b), (x, x, a, a), (y, y, b, b)
    solved, values = [], []
    for cloud in clouds:
        spec = replace(problem.spec, n=len(cloud[0]), m=len(cloud[1]), task=Task.FORWARD)
        solved.append(solve(Problem(*cloud, spec), budget))
        values.append(_dot(cloud[2], solved[-1].f) + _dot(cloud[3], solved[-1].g))
    pair, of_x, of_y = solved
    passes = [each.n_passes for each in solved if each.n_passes is not None]
    return replace(
        pair,
        n_passes=sum(passes) if len(passes) == len(solved) else None,
        value=values[0] - values[1] / 2 - values[2] / 2,
        self_potentials=((of_x.f, of_x.g), (of_y.f, of_y.g)),
    )


def _dot(weight: torch.Tensor, potential: torch.Tensor) -> torch.Tensor:
    """In float64: the divergence is a difference. A point without weight counts for nothing."""
    return torch.where(weight > 0, weight.double() * potential.double(), 0).sum()
