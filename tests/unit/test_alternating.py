"""The shared loop: what it counts, when it stops, and that its free residual is the true one."""

from __future__ import annotations

import pytest
import torch

from fsbench.api import FixedIterations, ToResidual
from solvers.common.alternating import alternating_sinkhorn, log_weights

EPS = 0.05


def solve(budget, *, check_every=10):
    torch.manual_seed(0)
    x, y = torch.rand(31, 2, dtype=torch.float64), torch.rand(24, 2, dtype=torch.float64)
    a, b = (torch.softmax(torch.randn(n, dtype=torch.float64), 0) for n in (31, 24))
    logits = -torch.cdist(x, y).square() / EPS
    calls = []

    def row_lse(h):
        calls.append("row")
        return torch.logsumexp(logits + h, 1)

    def column_lse(h):
        calls.append("column")
        return torch.logsumexp(logits + h[:, None], 0)

    solution = alternating_sinkhorn(row_lse, column_lse, a=a, b=b, eps=EPS, budget=budget, check_every=check_every)
    plan = a[:, None] * b * torch.exp(solution.f[:, None] / EPS + solution.g / EPS + logits)
    return solution, (plan.sum(1) - a).abs().sum().item(), (plan.sum(0) - b).abs().sum().item(), calls


@pytest.mark.parametrize("iterations", [1, 2, 7])
def test_fixed_iterations_take_two_passes_each(iterations):
    solution, _, column_residual, calls = solve(FixedIterations(iterations))
    assert calls == ["row", "column"] * iterations
    assert (solution.n_iterations, solution.n_passes, solution.converged) == (iterations, len(calls), None)
    assert column_residual < 1e-13


def test_stops_at_the_first_look_that_passes():
    solution, row_residual, column_residual, calls = solve(ToResidual(1e-6), check_every=5)
    *earlier, last = solution.trace
    assert solution.converged and last.iteration == solution.n_iterations
    assert [point.iteration for point in solution.trace] == list(range(5, solution.n_iterations + 1, 5))
    assert earlier and all(point.residual > 1e-6 for point in earlier)
    assert last.residual == pytest.approx(row_residual, rel=1e-6) and row_residual <= 1e-6
    assert column_residual < 1e-13
    assert solution.n_passes == len(calls) == 2 * solution.n_iterations + 1


def test_looks_once_more_at_the_iteration_limit():
    solution, row_residual, _, _ = solve(ToResidual(1e-12, max_iterations=7), check_every=5)
    assert solution.n_iterations == 7 and solution.converged is False
    assert [point.iteration for point in solution.trace] == [5, 7]
    assert solution.trace[-1].residual == pytest.approx(row_residual, rel=1e-9)


def test_time_limit_stops_at_the_next_look():
    solution, _, _, _ = solve(ToResidual(1e-12, max_seconds=1e-9), check_every=5)
    assert solution.n_iterations == 5 and solution.converged is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_of_no_weight_is_finite_and_never_counts(dtype):
    logs = log_weights(torch.tensor([0.0, 1.0], dtype=dtype))
    assert torch.isfinite(logs).all() and logs[1] == 0
    assert torch.logsumexp(logs + torch.tensor([1e30, 0.0], dtype=dtype), 0) == 0
