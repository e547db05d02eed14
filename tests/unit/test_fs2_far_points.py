"""FlashSinkhorn2 where a few points are far out: the residual is met, or said to be what it is. References are dense
float64 from the definitions."""

from __future__ import annotations

import math
import time

import pytest
import torch

from solvers.flash_sinkhorn2 import solve
from solvers.flash_sinkhorn2.cascade import levels
from solvers.flash_sinkhorn2.cascade.anneal import FARTHEST, _continued
from solvers.flash_sinkhorn2.iterate.anderson import Anderson

EPS, TOL = 0.1, 1e-2
BLUR = math.sqrt(EPS)


def normal(n, seed=0, d=3):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(n, seed=0, d=3):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def residual(x, y, a, b, result):
    """Of the weights over their mass, by all pairs."""
    x, y = x.double(), y.double()
    a, b = (torch.ones(len(z)).double() if w is None else w for z, w in ((x, a), (y, b)))
    a, b = a / a.sum(), b / b.sum()
    cost = (x[:, None] - y).square().sum(2)
    plan = a[:, None] * b * torch.exp((result.f[:, None] + result.g - cost) / result.eps)
    return max((plan.sum(1) - a).abs().sum().item(), (plan.sum(0) - b).abs().sum().item())


def with_outliers(make, distance, n=100):
    """One point of either cloud so far out, on opposite sides."""
    x, y = make(n), make(n, 1)
    x[0], y[5] = distance, -distance
    return x, y


def weight_of(n, index, share):
    w = torch.full((n,), (1 - share) / (n - 1), dtype=torch.float64)
    w[index] = share
    return w


def check(x, y, a=None, b=None, **options):
    result = solve(x, y, a, b, eps=EPS, tol=TOL, **options)
    assert result.f.isfinite().all() and result.g.isfinite().all()
    true = residual(x, y, a, b, result)
    assert result.residual - 1e-5 <= true <= result.residual + result.omitted + 1e-5  # float32's partial sums
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("blurs", [1e1, 1e2, 1e3, 1e4])
@pytest.mark.parametrize("make", [normal, uniform])
def test_outliers_at_any_distance_cost_no_iterations(make, blurs, dtype):
    x, y = with_outliers(make, blurs * BLUR)
    result = check(x.to(dtype), y.to(dtype))
    assert result.converged and result.n_iterations <= 50  # with none out there up to 25; from larger eps, hundreds


@pytest.mark.parametrize("correction", ["full", "lite", "none"])
def test_with_every_correction(correction):
    assert check(*with_outliers(normal, 100.0), correction=correction).converged


@pytest.mark.parametrize("share", [1e-12, 1e-6, 1e-3, 0.1, 0.5])
def test_outliers_of_any_weight(share):
    x, y = with_outliers(normal, 100.0)
    assert check(x, y, weight_of(100, 0, share), weight_of(100, 5, share)).converged


@pytest.mark.parametrize("blurs", [1e2, 1e4])
def test_outliers_among_many_points(blurs, monkeypatch):
    """Levels of nodes, one of which holds the outlier."""
    monkeypatch.setattr(levels, "SMALL", 200)
    x, y = with_outliers(uniform, blurs * BLUR, n=600)
    assert check(x, y).converged


LINE = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
SHAPES = {
    "a thousand diameters apart": (normal(100), normal(90, 1) + 5000.0),
    "one against many": (normal(1), normal(100, 1)),
    "many against one far away": (normal(100), normal(1, 1) + 1e3),
    "one against one": (normal(1), normal(1, 1) + 1e3),
    "all equal": (torch.ones(100, 3), torch.ones(107, 3)),
    "all equal, elsewhere": (torch.ones(100, 3), torch.zeros(107, 3)),
    "collinear": (normal(100)[:, :1] * LINE, normal(103, 1)[:, :1] * LINE),
}


@pytest.mark.parametrize("name", SHAPES)
def test_degenerate_clouds(name):
    assert check(*SHAPES[name]).converged


def test_what_is_too_hard_says_so_with_the_true_residual():
    """Ten far points a cloud, thousands of blurs apart: a matching, which takes iterations no end."""
    x, y = normal(100), normal(100, 1)
    x[:5], y[:7] = 1e4 * BLUR * normal(5, 2), 1e4 * BLUR * normal(7, 3)
    result = check(x, y, max_iterations=60)
    assert not result.converged and result.n_iterations <= 60
    totals = [each.residual + each.omitted for each in result.trace]
    rounding = math.expm1(2.0**-52 * float(result.f.abs().max() + result.g.abs().max()) / EPS)  # of both potentials
    assert result.residual + result.omitted == pytest.approx(min(totals) + rounding, rel=1e-9)


@pytest.mark.parametrize("absurd", [1e12, 1e300, math.nan])
def test_a_mixed_step_beyond_all_bounds_is_taken_back(monkeypatch, absurd):
    """In both potentials: a row half-step from there leaves no digit of u."""
    true_next, calls = Anderson.next, []

    def next_(self, at, image):
        mixed = true_next(self, at, image)
        calls.append(1)
        return mixed + absurd * torch.linspace(-1, 1, len(mixed)) if self.filled and len(calls) % 3 == 0 else mixed

    monkeypatch.setattr(Anderson, "next", next_)
    x, y = normal(150), 0.7 * normal(120, 1)
    result = solve(x, y, eps=EPS, tol=1e-4)
    assert result.converged and result.n_rejected > 0
    assert residual(x, y, None, None, result) <= 1.1e-4


def test_a_continuation_goes_no_further_than_can_be_undone():
    """Points that two loose solves put far apart would else be far too high at the third."""
    before, last = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 5000.0])
    v = _continued([(4.0, before), (1.0, last)], 0.25, before)
    assert v.tolist() == [4.0 * (1.0 + 0.25), 4.0 * 5000.0 + FARTHEST]


@pytest.mark.parametrize("n", [300, 3000])
def test_time_limits_end_every_stage_with_finite_potentials(n):
    """Also in the cascade, on levels above the points."""
    x, y = uniform(n), 0.5 * uniform(n, 1) + 0.2
    for seconds in (1e-6, 0.2):
        started = time.perf_counter()
        result = solve(x, y, eps=1e-3, tol=1e-7, max_seconds=seconds)
        assert not result.converged and result.f.isfinite().all() and result.g.isfinite().all()
        late = time.perf_counter() - started - seconds
        assert late < 20.0  # a lift, a mask and two passes; a shared machine takes its time
        assert result.n_passes < 12 if seconds < 1e-3 else len(result.trace) < 1000
        cost = (x[:, None] - y).square().sum(2)
        plan = torch.exp((result.f[:, None] + result.g - cost) / result.eps) / n**2
        true = max((plan.sum(1) * n - 1).abs().mean().item(), (plan.sum(0) * n - 1).abs().mean().item())
        assert result.residual - 1e-5 <= true <= result.residual + result.omitted + 1e-5


@pytest.mark.parametrize("n", [300, 2100])
def test_tolerances_below_rounding_end_iterations(n):
    x, y = uniform(n), uniform(n, 1)
    result = solve(x, y, eps=0.02, tol=1e-12)
    assert result.stalled and not result.converged and result.residual < 1e-6
    reached = next(k for k, each in enumerate(result.trace) if each.residual < 2 * result.residual)
    assert len(result.trace) <= 4 * reached + 45  # as long again, and twenty at least


def test_slow_progress_is_no_stall():
    """Without any acceleration, at a hundredth of the squared diameter."""
    x, y = uniform(200, d=2), uniform(200, 1, d=2) ** 2
    result = solve(x, y, eps=2e-3, tol=2e-5, correction="none", memory=0, max_iterations=3000)
    assert result.converged and result.n_iterations > 150 and not result.stalled


LIMIT = {
    "translated": (1e-5 * uniform(100), 1e-5 * uniform(90, 1) + 1.0),
    "to one": (1e-5 * uniform(2100), uniform(1, 1) + 1.0),
    "two far clumps": tuple(torch.cat([1e-5 * uniform(50, s), 1e-5 * uniform(50, s + 1) + 1.0]) for s in (0, 2)),
    "copies": (uniform(100), uniform(100)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LIMIT)
def test_the_largest_cost_may_be_1e11_eps(name, dtype):
    """First exponents are that large, and none of them a float32; just above is refused."""
    x, y = (points.to(dtype) for points in LIMIT[name])
    both = torch.cat([x, y]).double()
    largest = (both.amax(0) - both.amin(0)).square().sum().item()
    result = solve(x, y, eps=largest / 0.99e11, tol=TOL)
    assert result.converged
    # float64 rounds cost / eps by 1e-5 here and in the reference, more than once
    assert residual(x, y, None, None, result) <= result.residual + result.omitted + 1e-4
    with pytest.raises(ValueError, match="choose at least") as refused:
        solve(x, y, eps=largest / 1.01e11)
    solve(x, y, eps=float(str(refused.value).split()[-1]), max_iterations=1)  # what it advises works
