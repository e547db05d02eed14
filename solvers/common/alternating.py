"""The alternating Sinkhorn loop, written once against the two log-sum-exps that an implementation supplies."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fsbench.api import Budget, Solution, ToResidual, TracePoint

LogSumExp = Callable[[torch.Tensor], torch.Tensor]


def log_weights(weights: torch.Tensor) -> torch.Tensor:
    """log of non-negative weights; zero becomes so low that it never counts, yet stays finite for any backend."""
    floor = torch.finfo(weights.dtype).min / 4
    return weights.log().clamp_min(floor)


def alternating_sinkhorn(
    row_lse: LogSumExp,
    column_lse: LogSumExp,
    *,
    a: torch.Tensor,
    b: torch.Tensor,
    eps: float,
    budget: Budget,
    check_every: int,
) -> Solution:
    """Alternate F and G from g = 0 (Scheme.ROWS_FIRST) until the budget is spent.

    row_lse maps h [m] to log sum_j exp(h_j - C_ij / eps) [n], column_lse h [n] to the same over i [m]; a [n], b [m].
    After a G update the column marginals hold and the row sums are a_i exp((f_i - F_i) / eps), where F is the next
    update: the L1 residual costs no pass of its own. It is looked at every `check_every` iterations.
    """
    started = time.perf_counter()
    log_a, log_b = log_weights(a), log_weights(b)
    limit = budget.max_iterations if isinstance(budget, ToResidual) else budget.iterations
    trace: list[TracePoint] = []

    u = -row_lse(log_b)  # f / eps
    v = -column_lse(log_a + u)  # g / eps
    iterations, passes, converged = 1, 2.0, None
    if isinstance(budget, ToResidual):
        converged = False
    while iterations < limit or converged is False:
        next_u = -row_lse(log_b + v)
        passes += 1
        if isinstance(budget, ToResidual) and (iterations % check_every == 0 or iterations >= limit):
            residual = torch.where(a > 0, a * (torch.exp(u - next_u) - 1), 0).abs().sum().item()
            elapsed = time.perf_counter() - started
            trace.append(TracePoint(iterations, elapsed, residual))
            converged = residual <= budget.tol
            if converged or iterations >= limit or elapsed >= budget.max_seconds:
                break
        u = next_u
        v = -column_lse(log_a + u)
        iterations, passes = iterations + 1, passes + 1
    return Solution(eps * u, eps * v, iterations, passes, converged, tuple(trace))
