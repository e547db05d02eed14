"""Relaxed marginals: closed forms, and potentials against float64 fixed points written from the definition."""

from __future__ import annotations

import math

import pytest
import torch

from solvers.flash_sinkhorn import solve


def cloud(n, d, seed):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(cost, a, b, eps, rho_x, rho_y, iterations=20_000):
    """(f, g) in float64: alternate f = -damping eps log sum_j b_j exp((g_j - C_ij) / eps) and its mirror image."""

    def damping(rho):
        return 1.0 if rho is None else rho / (rho + eps)

    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(iterations):
        previous = f
        f = -damping(rho_x) * eps * torch.logsumexp((g[None] - cost) / eps + b.log()[None], 1)
        g = -damping(rho_y) * eps * torch.logsumexp((f[:, None] - cost) / eps + a.log()[:, None], 0)
        if (f - previous).abs().max() < 1e-13:
            return f, g
    raise AssertionError("the reference did not converge")


def value(cost, a, b, result, rho_x, rho_y):
    """Primal value <P, C> + eps KL(P | a x b) + rho_x KL(P1 | a) + rho_y KL(P^T 1 | b) in float64."""

    def kl(p, q):
        return (torch.xlogy(p, p / q) - p + q).sum()

    f, g = result.f.cpu(), result.g.cpu()
    plan = a[:, None] * b * torch.exp((f[:, None] + g - cost) / result.eps)
    total = (plan * cost).sum() + result.eps * kl(plan, a[:, None] * b)
    total += 0.0 if rho_x is None else rho_x * kl(plan.sum(1), a)
    return (total + (0.0 if rho_y is None else rho_y * kl(plan.sum(0), b))).item()


@pytest.mark.parametrize("updates", ["alternating", "symmetric"])
@pytest.mark.parametrize(("mass_a", "mass_b"), [(1.0, 1.0), (2.0, 0.3)])
@pytest.mark.parametrize(("distance", "eps", "rho"), [(2.0, 0.02, 2.0), (2.0, 2.0, 2.0), (1.0, 0.5, 10.0)])
def test_r10_single_points(device, updates, mass_a, mass_b, distance, eps, rho):
    x, y = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    y[0, 0] = distance
    a, b = torch.tensor([mass_a], dtype=torch.float64), torch.tensor([mass_b], dtype=torch.float64)
    moved = (v.to(device) for v in (x, y, a, b))
    # On a GPU potentials reach the exponents as float32: half an ulp of either, in base 2.
    largest = distance**2 + rho * abs(math.log(mass_a / mass_b))
    tol = 1e-7 if device == "cpu" else max(1e-7, 2e-7 * largest / eps)
    result = solve(*moved, eps=eps, rho=rho, tol=tol, updates=updates)
    assert result.converged
    cost = torch.full((1, 1), distance**2, dtype=torch.float64)
    mass = (mass_a * mass_b) ** ((eps + rho) / (eps + 2 * rho)) * math.exp(-(distance**2) / (eps + 2 * rho))
    expected = eps * mass_a * mass_b + rho * (mass_a + mass_b) - (eps + 2 * rho) * mass
    transported = mass_a * mass_b * torch.exp((result.f.cpu() + result.g.cpu() - cost[0]) / eps)
    noise = tol * (rho + eps) / eps  # over the contraction of one iteration
    assert value(cost, a, b, result, rho, rho) == pytest.approx(expected, rel=max(noise, 1e-9))
    assert transported.item() == pytest.approx(mass, rel=4 * noise)


@pytest.mark.parametrize("distance", [10.0, 100.0])
def test_n35_no_mass_arrives_and_nothing_underflows(device, distance):
    """The mass is exp(-distance^2 / 2) and less: row sums are far below float32's range, potentials are not."""
    x, y = torch.zeros(1, 1), torch.full((1, 1), distance)
    one = torch.ones(1, dtype=torch.float64)
    result = solve(x.to(device), y.to(device), eps=0.01, rho=1.0, n_iterations=1000)
    assert torch.isfinite(result.f).all() and torch.isfinite(result.g).all()
    cost = torch.full((1, 1), distance**2, dtype=torch.float64)
    assert value(cost, one, one, result, 1.0, 1.0) == pytest.approx(2.01, rel=1e-6)


@pytest.mark.parametrize("updates", ["alternating", "symmetric"])
@pytest.mark.parametrize("d", [2, 7])
@pytest.mark.parametrize(("rho_x", "rho_y"), [(0.3, 0.3), (0.05, 2.0), (0.3, None), (None, 0.3)])
def test_potentials_are_the_fixed_point_of_the_definition(device, updates, d, rho_x, rho_y):
    x, y = cloud(41, d, 0), cloud(29, d, 1) * 0.8 + 0.3
    a, b = cloud(41, 1, 2)[:, 0] + 0.1, 0.7 * (cloud(29, 1, 3)[:, 0] + 0.1)  # masses that differ
    eps = 0.05
    cost = (x[:, None] - y[None]).square().sum(-1)
    f, g = reference(cost, a, b, eps, rho_x, rho_y)
    options = {"rho_x": rho_x, "rho_y": rho_y, "updates": updates, "tol": 1e-6}
    result = solve(*(v.to(device) for v in (x, y, a, b)), eps=eps, **options)
    assert result.converged
    # tol is the mean relative error of an update; the map contracts by about rho / (rho + eps) an iteration.
    assert (result.f.cpu() - f).abs().max() < 2e-3 * eps
    assert (result.g.cpu() - g).abs().max() < 2e-3 * eps


@pytest.mark.parametrize(("rho_x", "rho_y"), [(0.3, 0.3), (0.3, None), (None, 0.3)])
def test_residual_is_that_of_its_definition(device, rho_x, rho_y):
    x, y = cloud(41, 2, 0), cloud(29, 2, 1) + 0.5
    a, b = cloud(41, 1, 2)[:, 0] + 0.1, 2 * (cloud(29, 1, 3)[:, 0] + 0.1)
    eps, cost = 0.05, (x[:, None] - y[None]).square().sum(-1)
    moved = (v.to(device) for v in (x, y, a, b))
    result = solve(*moved, eps=eps, rho_x=rho_x, rho_y=rho_y, tol=1e-9, max_iterations=3)
    assert result.converged is False and result.residual > 1e-3
    f, g = result.f.cpu(), result.g.cpu()
    damping = [1.0 if rho is None else rho / (rho + eps) for rho in (rho_x, rho_y)]
    new_f = -damping[0] * eps * torch.logsumexp((g[None] - cost) / eps + b.log()[None], 1)
    new_g = -damping[1] * eps * torch.logsumexp((f[:, None] - cost) / eps + a.log()[:, None], 0)
    of_x = (a * torch.expm1((f - new_f) / eps).abs()).sum() / a.sum()
    of_y = (b * torch.expm1((g - new_g) / eps).abs()).sum() / b.sum()
    assert result.residual == pytest.approx(max(of_x, of_y).item(), rel=1e-3)


def test_a_large_penalty_is_the_balanced_problem(device):
    x, y = cloud(30, 3, 0), cloud(20, 3, 1)
    balanced = solve(x.to(device), y.to(device), eps=0.1, tol=1e-6)
    relaxed = solve(x.to(device), y.to(device), eps=0.1, rho=1e5, n_iterations=200)
    split = (balanced.f[0] - relaxed.f[0]).item()  # the constant that only a balanced problem is free in
    assert (balanced.f - relaxed.f - split).abs().max() < 1e-4
    assert (balanced.g - relaxed.g + split).abs().max() < 1e-4


def test_zero_weights_have_no_effect(device):
    x, y, a = cloud(10, 3, 0), cloud(8, 3, 1), cloud(10, 1, 2)[:, 0] + 0.1
    far = torch.cat([x, torch.full((5, 3), 1e6, dtype=torch.float64)])
    padded = torch.cat([a, torch.zeros(5, dtype=torch.float64)])
    plain = solve(x.to(device), y.to(device), a.to(device), None, eps=0.1, rho=0.5, tol=1e-6)
    result = solve(far.to(device), y.to(device), padded.to(device), None, eps=0.1, rho=0.5, tol=1e-6)
    assert result.converged and torch.isfinite(result.f).all()
    assert (result.f[:10] - plain.f).abs().max() < 1e-5 and (result.g - plain.g).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rho", {"rho": 0.0}),
        ("rho", {"rho": math.nan}),
        ("rho_x", {"rho_x": -1.0}),
        ("rho_y", {"rho_y": math.inf}),
        ("a sums to zero", {"rho": 1.0, "a": torch.zeros(5)}),
    ],
)
def test_bad_options_are_refused_by_name(name, options):
    x, a = torch.zeros(5, 2), options.pop("a", None)
    with pytest.raises(ValueError, match=name):
        solve(x, x, a, None, eps=0.1, n_iterations=1, **options)


def test_masses_that_differ_need_a_penalty():
    x, a = torch.zeros(2, 2), torch.ones(2)
    with pytest.raises(ValueError, match="mass"):
        solve(x, x, a, 2 * a, eps=0.1, n_iterations=1)
    assert torch.isfinite(solve(x, x, a, 2 * a, eps=0.1, rho_y=1.0, n_iterations=1).f).all()
