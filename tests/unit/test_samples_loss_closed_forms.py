"""Problems whose answer is known in closed form (R1 to R12), through `SamplesLoss` and its gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from dense_reference import cost_matrix, solve_dense
from full_cost import TIGHT, Full, leaf, normal, plain, uniform, weights

from solvers.flash_sinkhorn import SamplesLoss

# At the smallest eps here the float32 grade sweeps of a GPU cannot reach every tolerance; the answers are still right.
pytestmark = pytest.mark.filterwarnings(
    "ignore::solvers.flash_sinkhorn.NotConverged", "ignore:solved to tol:RuntimeWarning"
)


@pytest.mark.parametrize("eps", [1e-6, 0.1, 10.0])
def test_r1_r2_single_points_against_clouds(device, eps):
    x, y, b = normal(1, 3), normal(7, 3, 1), weights(7)
    one = torch.ones(1, dtype=torch.float64)
    for swapped in (False, True):
        points, cloud = leaf(x, device), leaf(y, device)
        sides = [(one.to(device), points), (b.to(device), cloud)]
        value = plain(eps)(*itertools.chain(*(sides[::-1] if swapped else sides)))
        value.backward()
        assert value.item() == pytest.approx((b * (x - y).square().sum(1)).sum().item(), rel=1e-6)
        torch.testing.assert_close(cloud.grad.cpu(), 2 * b[:, None] * (y - x), rtol=1e-5, atol=1e-6)
        if device == "cpu" or eps > 1e-3:  # at 1e-6 float32 rounds exponents of 1e7 to whole numbers
            expected = 2 * (x - (b @ y)[None])
            torch.testing.assert_close(points.grad.cpu(), expected, rtol=1e-5, atol=30 * TIGHT[device])
    assert Full(eps)(x[:1].to(device), x[:1].to(device) + 1.0).item() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("d", [1, 2, 5, 33])
@pytest.mark.parametrize("eps", [1e-6, 1e-3, 0.1, 5.0])
def test_r3_g05_translated_copy(device, eps, d):
    """Value |t|^2, gradient -2 a t: exact at any eps, weights and dimension."""
    x, a = normal(40, d, d), weights(40)
    t = 0.3 * normal(1, d, 99)[0]
    points = leaf(x, device)
    tol = 1e-6 if device == "cpu" else 1e-4  # GPU sweeps are of float32 grade, whose rounding is near 1e-5 |x|^2 / eps
    value = Full(eps, tol=tol, max_iterations=500)(a.to(device), points, a.to(device), (x + t).to(device))
    value.backward()
    assert value.item() == pytest.approx(t.square().sum().item(), rel=1e-5)
    expected = -2 * a[:, None] * t
    # A gradient is off by the residual, times the distance between points that share mass, over |t|.
    torch.testing.assert_close(points.grad.cpu(), expected, rtol=0, atol=100 * tol * expected.abs().max().item())


def test_r4_r5_motions_and_scale(device):
    x, y, a, b = normal(20, 3), normal(15, 3, 1), weights(20), weights(15, 1)
    rotation = torch.linalg.qr(normal(3, 3, 5))[0]
    value = Full(0.3, tol=1e-5)(*(v.to(device) for v in (a, x, b, y))).item()
    for moved_x, moved_y, eps, scale in (
        (x + 7, y + 7, 0.3, 1.0),
        (x @ rotation, y @ rotation, 0.3, 1.0),
        (0.5 * x, 0.5 * y, 0.075, 0.25),
    ):
        found = Full(eps, tol=1e-5)(*(v.to(device) for v in (a, moved_x, b, moved_y))).item()
        assert found == pytest.approx(scale * value, rel=1e-5)


def test_r6_n22_points_with_themselves(device):
    """The plain value of a cloud with itself is positive, the divergence is not."""
    x = torch.tensor([[0.0], [1.0]], device=device)
    assert plain(0.5)(x, x.clone()).item() == pytest.approx(0.283110, abs=1e-6)
    unit = torch.eye(9, device=device)
    expected = -0.5 * math.log((1 + 8 * math.exp(-2 / 0.5)) / 9)
    assert plain(0.5)(unit, unit.clone()).item() == pytest.approx(expected, rel=1e-6)
    angle = torch.linspace(0, 2, 5)
    centres = torch.stack([angle.cos(), angle.sin()], 1)
    clouds = [(centre + math.sqrt(0.4) * normal(25, 2, k).float()).to(device) for k, centre in enumerate(centres)]
    table = torch.tensor([[Full(0.5)(p, q.clone()).item() for q in clouds] for p in clouds])
    assert table.diag().abs().max() < 1e-7
    torch.testing.assert_close(table, table.T, rtol=0, atol=1e-5)
    assert table[~torch.eye(5, dtype=torch.bool)].min() > 1e-3


def test_r7_large_eps_forgets_where_mass_goes(device):
    x, y, a, b = normal(11, 3), normal(9, 3, 1), weights(11), weights(9, 1)
    expected, eps = (a @ cost_matrix(x, y) @ b).item(), 1e5
    # the cost is eps times a logarithm of sums near one, which a GPU has in float32: half an ulp of one
    tolerance = eps * 2.0**-24 if device == "cuda" else 1e-4 * expected
    assert plain(eps, tol=1e-6)(*(v.to(device) for v in (a, x, b, y))).item() == pytest.approx(expected, abs=tolerance)


def test_r8_n06_divergence_is_least_at_equal_width(device):
    nodes = torch.linspace(-14, 14, 301, dtype=torch.float64)[:, None].to(device)

    def gaussian(std):
        w = torch.exp(-(nodes[:, 0] ** 2) / (2 * std**2))
        return w / w.sum()

    def both(std, mean=0.0):
        arguments = gaussian(1.0), nodes, gaussian(std), nodes + mean
        return plain(0.5)(*arguments).item(), Full(0.5)(*arguments).item()

    value, debiased = both(2.0, 1.0)
    assert value == pytest.approx(2.777670, abs=1e-4) and debiased == pytest.approx(1.998055, abs=1e-4)
    assert both(1.0)[0] == pytest.approx(0.612178, abs=1e-4)
    stds = [0.8, 0.866, 0.93, 1.0, 1.07]
    values = [both(std) for std in stds]
    assert min(range(5), key=lambda k: values[k][0]) == 1 and min(range(5), key=lambda k: values[k][1]) == 3


def test_r9_mass_between_two_far_points(device):
    x = torch.tensor([[0.0], [10.0]], dtype=torch.float64)
    p, q, eps = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.4, 0.6]).double(), 0.1
    plan = torch.tensor([[0.4, 0.3], [0.0, 0.3]], dtype=torch.float64)
    expected = 30.0 + eps * torch.xlogy(plan, plan / (p[:, None] * q)).sum().item()
    points = leaf(x, device)
    value = plain(eps)(p.to(device), points, q.to(device), x.to(device))
    value.backward()
    assert value.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(points.grad.cpu(), torch.tensor([[-6.0], [0.0]]).double(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize(
    ("eps", "value", "slope"), [(0.01, 1.266874, 0.739428), (1.0, 1.459749, 1.026834)], ids=["eps 0.01", "eps 1"]
)
def test_r10_n38_g04_relaxed_single_points(device, eps, value, slope, debias):
    """Half cost, points 2 apart, rho = 1; the gradient is that of the value."""
    x = torch.zeros(1, 2, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.tensor([[2.0, 0.0]], dtype=torch.float64, device=device)
    found = SamplesLoss(blur=math.sqrt(eps), reach=1.0, debias=debias, tol=1e-5)(x, y)
    found.backward()
    assert found.item() == pytest.approx(value, abs=1e-5)
    # The residual, over the contraction of an iteration: about rho / eps times as much.
    expected = torch.tensor([[-slope, 0.0]], dtype=torch.float64, device=device)
    torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("distance", [10.0, 100.0])
def test_n35_nothing_is_moved_that_far(device, distance, debias):
    """Saturated at eps + 2 rho; the gradient is zero to rounding, not NaN."""
    x = torch.zeros(1, 1, device=device, requires_grad=True)
    value = Full(0.01, rho=1.0, debias=debias)(x, torch.full((1, 1), distance, device=device))
    value.backward()
    assert value.item() == pytest.approx(2.01, rel=1e-5) and abs(x.grad.item()) < 1e-6


def test_n36_relaxed_value_is_between_nothing_and_the_balanced_one(device):
    x, a, b = uniform(200, 30), weights(200), weights(200, 1)
    arguments = [v.to(device) for v in (a, x, b, uniform(200, 30, 1) + 0.1)]
    found = plain(1.0, rho=1.0)(*arguments).item()
    assert 0 <= found <= min(plain(1.0)(*arguments).item(), 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_r11_g02_sum_rule_and_rows_of_the_gradient(device, dtype):
    x, y, a, b = normal(6, 3, dtype=dtype), normal(5, 3, 1, dtype=dtype), weights(6), weights(5, 1)
    points = leaf(x, device)
    tol = TIGHT[device]
    plain(0.2, tol=tol)(a.to(device), points, b.to(device), y.to(device)).backward()
    gradient = points.grad.cpu().double()
    x, y = x.double(), y.double()
    torch.testing.assert_close(gradient.sum(0), 2 * (a @ x - b @ y), rtol=1e-5, atol=30 * tol)
    p = solve_dense(x, y, a, b, eps=0.2).plan
    torch.testing.assert_close(gradient, 2 * (p.sum(1)[:, None] * x - p @ y), rtol=1e-4, atol=30 * tol)


@pytest.mark.parametrize("reach", [None, 1.0])
@pytest.mark.parametrize("where", [0.0, 1e6])
def test_r12_n29_padding_without_weight_has_no_effect(device, where, reach):
    """Value, flag and iterations as without it; no gradient; merged duplicates change nothing either."""
    x, y, a, b = uniform(10, 3), uniform(8, 3, 1), weights(10), weights(8, 1)
    padded_x, padded_y = (torch.cat([v, torch.full((6, 3), where, dtype=torch.float64)]) for v in (x, y))
    padded_a, padded_b = (torch.cat([v, torch.zeros(6, dtype=torch.float64)]) for v in (a, b))
    loss = SamplesLoss(blur=0.1, reach=reach)
    expected = loss.transport(*(v.to(device) for v in (a, x, b, y)))
    arguments = [leaf(v, device) for v in (padded_a, padded_x, padded_b, padded_y)]
    found = loss.transport(*arguments)
    assert found.value.item() == pytest.approx(expected.value.item(), rel=1e-5)
    assert found.converged is expected.converged is True
    assert abs(found.n_passes - expected.n_passes) <= (0 if device == "cpu" else 16)  # sums in another order
    found.value.backward()
    assert arguments[1].grad[10:].abs().max() == 0 and arguments[3].grad[8:].abs().max() == 0
    twice = torch.cat([x, x[:4]]), torch.cat([a[:4] / 2, a[4:], a[:4] / 2])
    merged = loss(*(v.to(device) for v in (twice[1], twice[0], b, y)))
    assert merged.item() == pytest.approx(expected.value.item(), rel=1e-5)
