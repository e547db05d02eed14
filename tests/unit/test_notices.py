"""What a warning of a solve that did not converge advises: nothing that would not help."""

from __future__ import annotations

import warnings

import pytest
import torch

from solvers.flash_sinkhorn import NotConverged, transport
from solvers.flash_sinkhorn.iteration.self_transport import solve_self


def clouds() -> tuple[torch.Tensor, ...]:
    return tuple(torch.rand(n, 3, generator=torch.Generator().manual_seed(n)) for n in (40, 30))


@pytest.mark.parametrize("debias", [False, True])
def test_where_rounding_ended_iterations_more_are_not_advised(device, debias):
    x, y = (points.to(device) for points in clouds())
    with pytest.warns(NotConverged, match="float32 lets it fall no further: raise tol or eps .* float64") as told:
        assert transport(x, y, eps=0.1, tol=1e-12, debias=debias).converged is False
    assert "max_iterations" not in str(told[0].message) and told[0].filename == __file__


@pytest.mark.parametrize("debias", [False, True])
def test_float64_is_advised_where_it_helps_alone(debias):
    x, y = (points.double() for points in clouds())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert transport(x, y, eps=0.1, tol=1e-12, debias=debias).converged
    with pytest.warns(NotConverged, match=r"rounding lets it fall no further: raise tol or eps \(blur\)$"):
        transport(x, y, eps=0.1, tol=1e-30, debias=debias)


def test_a_limit_is_named_even_if_rounding_ended_another_of_the_problems(device):
    x, y = (points.to(device) for points in clouds())
    limits = {"eps": 2e-3, "tol": 1e-12, "max_iterations": 60}
    assert solve_self(x, None, **limits).stalled and solve_self(y, None, **limits).stalled
    with pytest.warns(NotConverged, match="raise max_iterations, max_seconds, eps .* or tol"):
        transport(x, y, debias=True, **limits)


def test_self_problems_stall_only_above_their_tolerance():
    x, _ = clouds()
    assert not solve_self(x, None, eps=0.1, tol=1e-4).stalled
    short = solve_self(x, None, eps=0.1, tol=1e-12, max_iterations=3)
    assert short.converged is False and not short.stalled
    assert not solve_self(x, None, eps=0.1, n_iterations=40).stalled


def test_values_that_float32_cannot_hold_are_told_and_float64_has_them(device):
    x, y = (points.to(device) for points in clouds())
    with pytest.warns(RuntimeWarning, match="far above the costs, .* float64"):
        transport(x, y, eps=1e6)
    if device == "cpu":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mean_cost = torch.cdist(x.double(), y.double()).square().mean().item()
            assert transport(x.double(), y.double(), eps=1e6).value.item() == pytest.approx(mean_cost, rel=1e-5)
            transport(x, y, eps=10.0)
