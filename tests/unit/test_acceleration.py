"""Accelerated solves: closed forms, true residuals, the safeguard, the start, and how many passes they take.

References are plain float64 from the definitions. n_passes counts sweeps over all pairs.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from solvers.flash_sinkhorn import solve
from solvers.flash_sinkhorn.inputs.checks import checked_inputs
from solvers.flash_sinkhorn.iteration.acceleration import MEMORY, TorchAnderson, anderson
from solvers.flash_sinkhorn.iteration.start import sampled


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def uniform_cloud(n, d, seed=0):
    return torch.rand(n, d, generator=generator(seed), dtype=torch.float64)


def normal_cloud(n, d, seed=0):
    return torch.randn(n, d, generator=generator(seed), dtype=torch.float64)


def weights(n, seed=0):
    w = torch.rand(n, generator=generator(seed), dtype=torch.float64) + 0.1
    return w / w.sum()


def clusters(n, centres, seed):
    """n points of spread 0.04 around as many centres in the unit square."""
    at = uniform_cloud(centres, 2, seed)
    return at[torch.randint(centres, (n,), generator=generator(seed + 10))] + 0.04 * normal_cloud(n, 2, seed + 20)


def unbalanced_pair():
    """N02: the masses of two far clusters do not match."""
    x = torch.cat([torch.linspace(0, 0.3, 30), torch.linspace(5, 5.3, 20)])[:, None]
    y = torch.cat([torch.linspace(0, 0.3, 20), torch.linspace(5, 5.3, 30)])[:, None]
    return x, y


HARD = {
    "square to normal": (uniform_cloud(400, 2), 0.15 * normal_cloud(300, 2, 1) + 0.5, 5e-4),
    "cube to normal": (uniform_cloud(300, 3), 0.2 * normal_cloud(400, 3, 1) + 0.6, 2e-3),
    "clusters to clusters": (clusters(400, 5, 1), clusters(400, 7, 2), 2e-3),
}


def uniform(points):
    return torch.full((len(points),), 1 / len(points), dtype=torch.float64)


def dual(x, y, a, b, *, device="cpu", tol=1e-7, **options):
    """Dual value of a converged solve."""
    a, b = uniform(x) if a is None else a.double(), uniform(y) if b is None else b.double()
    result = solve(*(v.to(device) for v in (x, y, a, b)), tol=tol, **options)
    assert result.converged
    return (a @ result.f.cpu() + b @ result.g.cpu()).item()


def divergence(x, y, a=None, b=None, **options):
    return dual(x, y, a, b, **options) - (dual(x, x, a, a, **options) + dual(y, y, b, b, **options)) / 2


def residual(x, y, a, b, result):
    """max of both L1 marginal residuals in float64, by direct differences."""
    x, y, f, g = (v.double().cpu() for v in (x, y, result.f, result.g))
    cost = (x[:, None] - y[None]).square().sum(-1)
    plan = a[:, None] * b * torch.exp((f[:, None] + g - cost) / result.eps)
    return max((plan.sum(1) - a).abs().sum().item(), (plan.sum(0) - b).abs().sum().item())


def attainable(device, least, cost_over_eps):
    """A residual that can be asked for: on a GPU exponents of that size are float32, whatever the points are."""
    return least if device == "cpu" else max(least, 1e-6, 2e-7 * cost_over_eps)


@pytest.mark.parametrize("eps", [1e-4, 0.1, 10.0])
def test_r1_and_r2_one_point_on_a_side(device, eps):
    x, y, b = uniform_cloud(1, 3), uniform_cloud(40, 3, 1), weights(40)
    expected = (b * (x - y).square().sum(1)).sum().item()
    for p, q, u, v in ((x, y, uniform(x), b), (y, x, b, uniform(x))):
        tol = attainable(device, 1e-7, 3 / eps)
        found = dual(p, q, u, v, eps=eps, device=device, tol=tol)
        assert found == pytest.approx(expected, rel=1e-5, abs=3 * eps * tol)
    found = dual(x, y[:1], None, None, eps=eps, device=device, tol=tol)
    assert found == pytest.approx((x - y[:1]).square().sum().item(), rel=1e-5, abs=3 * eps * tol)


@pytest.mark.parametrize("d", [2, 10])
@pytest.mark.parametrize("eps", [0.003, 0.05, 1.0])
def test_r3_and_r4_translated_copies_and_common_shifts(device, d, eps):
    x, a = uniform_cloud(60, d), weights(60)
    shift = torch.zeros(d, dtype=torch.float64)
    shift[0] = 0.3
    tol = attainable(device, 1e-5, d / 2 / eps)
    for offset in (0.0, 20.0):
        found = divergence(x + offset, x + shift + offset, a, a, eps=eps, device=device, tol=tol)
        assert found == pytest.approx(0.09, abs=10 * tol)  # residual times the largest cost


def test_r5_scale(device):
    x, y = uniform_cloud(50, 2), uniform_cloud(70, 2, 1)
    tol = attainable(device, 1e-5, 2 / 0.01)
    one, three = (dual(s * x, s * y, None, None, eps=0.01 * s * s, device=device, tol=tol) for s in (1.0, 3.0))
    assert three == pytest.approx(9 * one, abs=18 * 2 * tol)  # residual times the largest cost, of either


@pytest.mark.parametrize("eps", [0.05, 0.5, 5.0])
def test_r6_two_points_and_unit_vectors(device, eps):
    tol = attainable(device, 1e-7, 2 / eps)
    points = torch.tensor([[0.0], [1.0]])
    found = dual(points, points, None, None, eps=eps, device=device, tol=tol)
    assert found == pytest.approx(-eps * math.log((1 + math.exp(-1 / eps)) / 2), rel=1e-5, abs=2 * tol)
    vectors = torch.eye(20)
    found = dual(vectors, vectors, None, None, eps=eps, device=device, tol=tol)
    assert found == pytest.approx(-eps * math.log((1 + 19 * math.exp(-2 / eps)) / 20), rel=1e-5, abs=2 * tol)


@pytest.mark.parametrize("eps", [1e-4, 1e-2, 1.0])
def test_r7_and_n20_the_assignment_and_its_entropy_bound_the_value(device, eps):
    x, y = uniform_cloud(100, 784), uniform_cloud(100, 784, 1)
    cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square().numpy()
    assignment = cost[linear_sum_assignment(cost)].mean()
    a = uniform(x)
    tol = attainable(device, 1e-5, cost.max() / eps)
    result = solve(x.to(device), y.to(device), eps=eps, tol=tol, max_iterations=300)
    found = (a @ result.f.cpu() + a @ result.g.cpu()).item()
    slack = result.residual * (cost.max() - cost.min()) + 1e-6 * assignment
    assert found <= assignment + eps * math.log(100) + slack
    assert found >= assignment - slack or not result.converged
    assert result.converged or eps < 1.0
    if device == "cpu":  # the flag is the truth
        assert (residual(x, y, a, a, result) <= 1.1e-5) == result.converged


def test_r8_normals_on_a_grid(device):
    nodes = torch.linspace(-14, 14, 401, dtype=torch.float64)[:, None]

    def normal(std):
        w = torch.exp(-(nodes[:, 0] ** 2) / (2 * std**2))
        return w / w.sum()

    found = dual(nodes, nodes, normal(1.0), normal(2.0), eps=0.5, device=device, tol=attainable(device, 1e-6, 50))
    assert found == pytest.approx(1.777670, abs=2e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("eps", [0.5, 1.0])
def test_r9_mass_that_must_cross(device, eps):
    """{0, L}: p - q crosses; cold plain updates need about exp(L^2 / 2 eps) iterations."""
    length, p, q = 6.0, 0.7, 0.4
    points = torch.tensor([[0.0], [length]])
    a, b = torch.tensor([p, 1 - p]), torch.tensor([q, 1 - q])
    plan = torch.tensor([[q, p - q], [0.0, 1 - p]], dtype=torch.float64)
    kl = torch.xlogy(plan, plan / (a.double()[:, None] * b.double())).sum().item()
    tol = attainable(device, 1e-5, length**2 / eps)
    found = dual(points, points, a, b, eps=eps, device=device, tol=tol)
    assert found == pytest.approx((p - q) * length**2 + eps * kl, abs=tol * length**2)


def test_n02_converges_by_default(device):
    x, y = unbalanced_pair()
    result = solve(x.to(device), y.to(device), eps=0.01, tol=1e-3)
    assert result.converged
    assert residual(x, y, uniform(x), uniform(y), result) < 1.1e-3
    value = (uniform(x) @ result.f.cpu() + uniform(y) @ result.g.cpu()).item()
    assert value == pytest.approx(4.613682, abs=1e-3 * 25)  # residual times largest cost
    if device == "cpu":  # float32 cannot tell residuals below 1e-4 at cost / eps = 2500
        found = divergence(x.double(), y.double(), eps=0.01, tol=1e-5)
        assert found == pytest.approx(4.599039, rel=1e-4)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 8, 11, 15])
@pytest.mark.parametrize("name", [*HARD, "N02"])
def test_n15_the_residual_is_that_of_what_is_returned_whenever_it_stops(device, name, limit):
    x, y, eps = HARD[name] if name in HARD else (*unbalanced_pair(), 0.01)
    result = solve(x.to(device), y.to(device), eps=eps, tol=1e-9, max_iterations=limit)
    assert result.n_iterations == limit and result.converged is False
    assert result.residual == pytest.approx(residual(x, y, uniform(x), uniform(y), result), rel=0.1)
    assert result.trace[-1].residual == result.residual and result.trace[-1].eps == eps


@pytest.mark.parametrize("name", HARD)
def test_hard_problems_take_a_third_of_the_plain_passes(device, name):
    x, y, eps = HARD[name]
    fast = solve(x.to(device), y.to(device), eps=eps, tol=1e-3)
    assert fast.converged
    assert residual(x, y, uniform(x), uniform(y), fast) < 1.1e-3
    thrice = math.floor(3 * fast.n_passes / 2)
    plain = solve(x.to(device), y.to(device), eps=eps, tol=1e-3, acceleration=False, max_iterations=thrice)
    assert plain.converged is False


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["large eps", "identical", "near"])
def test_where_plain_is_quick_nothing_is_lost(device, kind, seed):
    x = uniform_cloud(700, 3, seed)
    y = {"large eps": uniform_cloud(500, 3, seed + 5), "identical": x.clone(), "near": x + 1e-3 * normal_cloud(700, 3)}
    eps = 0.5 if kind == "large eps" else 0.01
    fast, plain = (solve(x.to(device), y[kind].to(device), eps=eps, tol=1e-3, acceleration=on) for on in (True, False))
    assert fast.converged and fast.n_passes <= plain.n_passes + 8  # on a GPU looks may be four apart


def test_a_bad_extrapolation_is_rejected(monkeypatch):
    """Coefficients of the sixth extrapolation are made absurd: the solve sees it, goes back, and still converges.

    That on a GPU the same is rejected is a test of the kernels.
    """
    x, y, eps = HARD["square to normal"]
    rejected, calls = [], []
    true_coefficients, true_forget = TorchAnderson._coefficients, TorchAnderson._forget

    def coefficients(self, *products):
        found = true_coefficients(self, *products)
        calls.append(found)
        return found if len(calls) != 6 or found is None else [value + 1e3 for value in found]

    def forget(self):
        rejected.append(len(calls))
        true_forget(self)

    monkeypatch.setattr("solvers.flash_sinkhorn.iteration.solver.iterate_from_best_start", iterate_from_zero)
    monkeypatch.setattr(TorchAnderson, "_coefficients", coefficients)
    monkeypatch.setattr(TorchAnderson, "_forget", forget)
    result = solve(x, y, eps=eps, tol=1e-3, max_iterations=400)
    assert calls[5] is not None
    assert rejected[:2] == [0, 6]  # made empty, and emptied right after the absurd step
    assert result.converged and residual(x, y, uniform(x), uniform(y), result) < 1.1e-3
    residuals = [check.residual for check in result.trace]
    assert residuals[6] > residuals[5] + 0.5  # what the absurd step led to was measured,
    assert residuals[7] < 1.5 * residuals[5]  # and left behind


@pytest.mark.parametrize("seed", [68, 104])
def test_the_last_iteration_at_the_limit_is_not_a_mixed_one_that_none_has_judged(seed):
    """Mixed, these ended at 1,000 with two fifths of the mass, or nearly all of it, in the wrong place."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.rand(n, 2, generator=generator).double() for n in (23, 47))
    found = [solve(x, 0.5 * y, eps=1e-4, tol=1e-3, max_iterations=limit) for limit in (999, 1000, 1001)]
    assert [result.n_iterations for result in found] == [999, 1000, 1001]
    assert all(result.residual < 0.02 for result in found)


def iterate_from_zero(loop, eps, tol, limits):
    loop.set_epsilon(eps)
    loop.iterate_to(tol, limits)


def test_extrapolation_is_least_squares(device):
    """Coefficients against numpy's least squares on the same weighted, centred differences."""
    inputs = checked_inputs(
        uniform_cloud(30, 2).to(device), uniform_cloud(20, 2, 1).to(device), None, weights(20).to(device),
        eps=0.02, cost_scale=1.0,
    )  # fmt: skip
    from solvers.flash_sinkhorn.iteration.loop import Loop, Method, Updates
    from solvers.flash_sinkhorn.sweeps.tiles import Precision

    loop = Loop(inputs, Method(1.0, None, None, Updates.ALTERNATING, True), Precision.EXACT)
    loop.set_epsilon(0.02)
    mixer = anderson(loop.sweeps, mass=1.0)
    y, b = loop.sweeps.y, loop.sweeps.y.weight.cpu()
    steps, images = [], []
    for _ in range(MEMORY + 3):
        loop.iterate()
        step = (y.potential - y.used).cpu()
        steps.append(((step - b @ step) * b.sqrt()).numpy())
        images.append(y.potential.cpu().numpy().copy())
        mixer.record()
        mixer.extrapolate()
        if len(steps) > 1:
            newest = slice(max(0, len(steps) - 1 - MEMORY), None)
            differences, moves = np.diff(np.array(steps)[newest], axis=0), np.diff(np.array(images)[newest], axis=0)
            best = np.linalg.lstsq(differences.T, steps[-1], rcond=None)[0]
            expected = images[-1] - best @ moves
            found = y.potential.cpu().numpy()
            scale = np.abs(expected - images[-1]).max()
            weighted = b.numpy() > 0
            assert np.abs(found - expected)[weighted].max() < 1e-2 * scale + 1e-6


def test_fixed_iterations_are_plain(device):
    x, y = uniform_cloud(200, 3).to(device), uniform_cloud(150, 3, 1).to(device)
    on, off = (solve(x, y, eps=0.01, n_iterations=12, acceleration=value) for value in (True, False))
    assert torch.equal(on.f, off.f) and torch.equal(on.g, off.g) and on.n_passes == 24


def test_same_result_every_time(device):
    x, y, eps = HARD["clusters to clusters"]
    first, second = (solve(x.to(device), y.to(device), eps=eps, tol=1e-3) for _ in range(2))
    assert torch.equal(first.f, second.f) and first.n_passes == second.n_passes


def test_n32_swapping_the_clouds_changes_nothing(device):
    x, y, a, b = normal_cloud(40, 2), normal_cloud(25, 2, 1), weights(40, 2), weights(25, 3)
    tol = attainable(device, 1e-5, 10 / 1e-3)
    options = {"eps": 1e-3, "tol": tol, "max_iterations": 3000, "device": device}
    assert dual(x, y, a, b, **options) == pytest.approx(dual(y, x, b, a, **options), abs=10 * tol)


@pytest.mark.parametrize("where", [0.0, 1e6])
def test_n29_points_without_weight_have_no_effect(device, where):
    x, y, a, b = normal_cloud(200, 3), normal_cloud(150, 3, 1), weights(200), weights(150, 1)
    padded_x = torch.cat([torch.full((30, 3), where, dtype=torch.float64), x])
    padded_a = torch.cat([torch.zeros(30, dtype=torch.float64), a])
    tol = attainable(device, 1e-4, 50 / 0.05)
    plain = solve(*(v.to(device) for v in (x, y, a, b)), eps=0.05, tol=tol)
    padded = solve(*(v.to(device) for v in (padded_x, y, padded_a, b)), eps=0.05, tol=tol)
    back = solve(*(v.to(device) for v in (y, padded_x, b, padded_a)), eps=0.05, tol=tol)
    assert plain.converged and padded.converged and back.converged
    values = [
        (a @ plain.f.cpu() + b @ plain.g.cpu()).item(),
        (padded_a @ padded.f.cpu() + b @ padded.g.cpu()).item(),
        (b @ back.f.cpu() + padded_a @ back.g.cpu()).item(),
    ]
    assert values == pytest.approx([values[0]] * 3, abs=10 * tol)
    assert all(torch.isfinite(r.f).all() and torch.isfinite(r.g).all() for r in (plain, padded, back))


@pytest.mark.parametrize(("rho_x", "rho_y"), [(30.0, 30.0), (0.5, None), (None, 0.5)])
def test_relaxed_marginals_are_accelerated(device, rho_x, rho_y):
    """A large penalty leaves the common constant of f and g to converge as slowly as (rho / (rho + eps))^2."""
    x, y = uniform_cloud(300, 2), 0.2 * normal_cloud(250, 2, 1) + 0.4
    a, b = 2 * weights(300), weights(250, 1)
    moved = [v.to(device) for v in (x, y, a, b)]
    options = {"eps": 0.01, "rho_x": rho_x, "rho_y": rho_y, "tol": 1e-3}
    fast = solve(*moved, **options)
    plain = solve(*moved, **options, acceleration=False, max_iterations=math.floor(fast.n_passes))
    assert fast.converged and plain.converged is False  # in twice the passes
    f, g = fast.f.cpu(), fast.g.cpu()
    cost = (x[:, None] - y[None]).square().sum(-1)
    damping = [1.0 if rho is None else rho / (rho + 0.01) for rho in (rho_x, rho_y)]
    new_g = -damping[1] * 0.01 * torch.logsumexp((f[:, None] - cost) / 0.01 + a.log()[:, None], 0)
    assert fast.residual == pytest.approx((b * torch.expm1((g - new_g) / 0.01).abs()).sum().item(), rel=0.1)


def test_large_eps_has_no_larger_to_start_from(device):
    """Slow because of the penalty, not of eps: the first iterations are kept and mixed."""
    x, y = uniform_cloud(100, 2).to(device), uniform_cloud(80, 2, 1).to(device)
    result = solve(x, y, weights(100).to(device) * 3, weights(80).to(device), eps=1.0, rho=100.0, tol=1e-4)
    assert result.converged and result.n_iterations < 15  # plain updates lose 2 % of the error an iteration
    assert {check.eps for check in result.trace} == {1.0} and result.n_passes == 2 * result.n_iterations


def test_the_dual_value_is_the_problems_own(device):
    """Differences of the safeguard's value against the dual objective written out, balanced and relaxed."""
    from solvers.flash_sinkhorn.iteration.loop import Loop, Method, Updates
    from solvers.flash_sinkhorn.sweeps.tiles import Precision

    x, y, a, b, eps = uniform_cloud(20, 2), uniform_cloud(15, 2, 1), weights(20), weights(15, 1), 0.1
    cost = (x[:, None] - y[None]).square().sum(-1)
    for rho_x, rho_y in ((None, None), (0.3, 0.7), (0.3, None), (None, 0.7)):
        inputs = checked_inputs(
            *(v.to(device) for v in (x, y, a, b)), eps=eps, cost_scale=1.0, balanced=rho_x is None and rho_y is None
        )
        loop = Loop(inputs, Method(1.0, rho_x, rho_y, Updates.ALTERNATING, True), Precision.EXACT)
        loop.set_epsilon(eps)
        mixer = anderson(loop.sweeps, mass=1.0)
        found, expected = [], []
        for _ in range(4):
            loop.iterate()
            mixer.record()
            found.append(mixer.numbers[1].item() * eps)
            f = loop.sweeps.x.potential[:20].cpu() * eps * math.log(2)
            g = loop.sweeps.y.used[:15].cpu() * eps * math.log(2)
            value = -eps * (a[:, None] * b * torch.exp((f[:, None] + g - cost) / eps)).sum()
            for potential, weight, rho in ((f, a, rho_x), (g, b, rho_y)):
                value += (weight * (potential if rho is None else -rho * torch.expm1(-potential / rho))).sum()
            expected.append(value.item())
        assert np.diff(found) == pytest.approx(np.diff(expected), abs=1e-6)
        assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(found))


def test_a_sample_follows_the_weights_and_draws_nothing_without(device):
    x, a = uniform_cloud(2000, 2), weights(2000)
    a[::3] = 0.0
    a[-5:] = 0.0
    a = (a / a.sum()).to(device)
    marked = torch.cat([x, a.cpu()[:, None]], 1).to(device)
    inputs = checked_inputs(marked, marked, a, a, eps=0.1, cost_scale=1.0)
    sample = sampled(inputs)
    assert sample is not None and len(sample.x) == 125
    assert (sample.x[:, 2] > 0).all() and sample.a.sum().item() == pytest.approx(1.0)
    # An evenly spread sample of 125: means to well under a standard error, 0.3 / sqrt(125).
    difference = sample.x[:, :2].mean(0).cpu() - (a.cpu()[:, None] * x).sum(0)
    assert difference.abs().max() < 0.06
    assert sampled(checked_inputs(x[:60].to(device), x.to(device), None, None, eps=0.1, cost_scale=1.0)) is None


def test_time_and_iteration_limits_hold_for_the_start_as_well(device):
    x, y = uniform_cloud(2000, 3).to(device), (uniform_cloud(2000, 3, 1) + 3).to(device)
    result = solve(x, y, eps=1e-5, tol=1e-9, max_seconds=0.5)
    assert result.converged is False and result.trace[-1].seconds < 5.0 and result.trace[-1].eps == 1e-5
    result = solve(x[:300], y[:300], eps=1e-5, tol=1e-9, max_iterations=40)
    assert result.n_iterations <= 40 and result.trace[-1].eps == 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_annealing_by_the_user_takes_the_place_of_the_start(device, dtype):
    x, y, eps = HARD["clusters to clusters"]
    result = solve(x.to(device, dtype), y.to(device, dtype), eps=eps, tol=1e-3, annealing=0.5)
    assert result.converged and result.n_passes == 2 * result.n_iterations
    assert {check.eps for check in result.trace} == {eps}
