"""The Sinkhorn divergence from three solves, for implementations that have no such function of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fsbench.api import Budget, FixedIterations, Problem, Solution, Task

LEAST_SECONDS = 1e-6  # a problem that has none left ends where it looks first


def divergence(solve: Callable[[Problem, Budget], Solution], problem: Problem, budget: Budget) -> Solution:
    """OT_eps(a, b) - OT_eps(a, a) / 2 - OT_eps(b, b) / 2 for unit masses, by `solve` on each problem as task forward.

    solve must end with an exact half-step: the plan's mass is then one, and the dual value <a, f> + <b, g>. The seconds
    of a budget are those of all three.
    Source: Feydy et al. 2019 (1810.08278).
    """
    x, y, a, b = problem.x, problem.y, problem.a, problem.b
    clouds = (x, y, a, b), (x, x, a, a), (y, y, b, b)
    started, allowed = time.perf_counter(), budget
    solved, values = [], []
    for cloud in clouds:
        spec = replace(problem.spec, n=len(cloud[0]), m=len(cloud[1]), task=Task.FORWARD)
        if not isinstance(budget, FixedIterations):
            left = budget.max_seconds - (time.perf_counter() - started)
            allowed = replace(budget, max_seconds=max(left, LEAST_SECONDS))
        solved.append(solve(Problem(*cloud, spec), allowed))
        values.append(_dot(cloud[2], solved[-1].f) + _dot(cloud[3], solved[-1].g))
    pair, of_x, of_y = solved
    passes = [each.n_passes for each in solved if each.n_passes is not None]
    return replace(
        pair,
        n_iterations=pair.n_iterations if isinstance(budget, FixedIterations) else None,
        converged=None if pair.converged is None else all(each.converged for each in solved),
        n_passes=sum(passes) if len(passes) == len(solved) else None,
        value=values[0] - values[1] / 2 - values[2] / 2,
        self_potentials=((of_x.f, of_x.g), (of_y.f, of_y.g)),
    )


def _dot(weight: torch.Tensor, potential: torch.Tensor) -> torch.Tensor:
    """In float64: the divergence is a difference. A point without weight counts for nothing."""
    return torch.where(weight > 0, weight.double() * potential.double(), 0).sum()
