"""Closed forms (R) and public bug reports of neighbouring tools (N, I, G, M), through `SamplesLoss` and its gradients.

The reports state the full cost |x - y|^2: OT_full(eps, rho) = 2 OT_half(eps / 2, rho / 2), which `Full` applies.
"""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from dense_reference import cost_matrix, divergence, solve_dense

from solvers.flash_sinkhorn import SamplesLoss


class Full:
    """Loss of the full cost; called like SamplesLoss, its gradients are those of the doubled half cost."""

    def __init__(self, eps, *, rho=None, debias=True, **options):
        reach = None if rho is None else math.sqrt(rho / 2)
        self.loss = SamplesLoss(blur=math.sqrt(eps / 2), reach=reach, debias=debias, **options)

    def __call__(self, *clouds):
        return 2 * self.loss(*clouds)


def plain(eps, **options):
    return Full(eps, debias=False, **options)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(n, d, seed=0, dtype=torch.float64):
    return torch.randn(n, d, generator=generator(seed), dtype=torch.float64).to(dtype)


def uniform(n, d, seed=0, dtype=torch.float64):
    return torch.rand(n, d, generator=generator(seed), dtype=torch.float64).to(dtype)


def weights(n, seed=0):
    w = torch.rand(n, generator=generator(seed), dtype=torch.float64) + 0.1
    return w / w.sum()


def leaf(tensor, device):
    return tensor.detach().to(device).requires_grad_()


def shifted(x, t):
    """x moved along t, with the steps that x's type can take."""
    return x + torch.as_tensor(t, dtype=x.dtype)


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
        torch.testing.assert_close(points.grad.cpu(), 2 * (x - (b @ y)[None]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(cloud.grad.cpu(), 2 * b[:, None] * (y - x), rtol=1e-5, atol=1e-6)
    assert Full(eps)(x[:1].to(device), x[:1].to(device) + 1.0).item() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("d", [1, 2, 5, 33])
@pytest.mark.parametrize("eps", [1e-2, 0.1, 5.0])
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
    assert table.diag().abs().max() == 0
    torch.testing.assert_close(table, table.T, rtol=0, atol=1e-5)
    assert table[~torch.eye(5, dtype=torch.bool)].min() > 1e-3


def test_r7_large_eps_forgets_where_mass_goes(device):
    x, y, a, b = normal(11, 3), normal(9, 3, 1), weights(11), weights(9, 1)
    expected = (a @ cost_matrix(x, y) @ b).item()
    assert plain(1e5, tol=1e-6)(*(v.to(device) for v in (a, x, b, y))).item() == pytest.approx(expected, rel=1e-4)


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
    plain(0.2, tol=1e-6)(a.to(device), points, b.to(device), y.to(device)).backward()
    gradient = points.grad.cpu().double()
    x, y = x.double(), y.double()
    torch.testing.assert_close(gradient.sum(0), 2 * (a @ x - b @ y), rtol=1e-5, atol=1e-5)
    p = solve_dense(x, y, a, b, eps=0.2).plan
    torch.testing.assert_close(gradient, 2 * (p.sum(1)[:, None] * x - p @ y), rtol=1e-4, atol=1e-5)


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
    assert found.converged is expected.converged is True and found.n_passes == expected.n_passes
    found.value.backward()
    assert arguments[1].grad[10:].abs().max() == 0 and arguments[3].grad[8:].abs().max() == 0
    twice = torch.cat([x, x[:4]]), torch.cat([a[:4] / 2, a[4:], a[:4] / 2])
    merged = loss(*(v.to(device) for v in (twice[1], twice[0], b, y)))
    assert merged.item() == pytest.approx(expected.value.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-4, 2.5e-3, 0.05])
def test_n01_almost_identical_clouds(device, dtype, eps):
    x = (1.0 + 0.25 / math.sqrt(320) * normal(50, 160)).to(dtype)
    y = shifted(x, torch.full((160,), 0.01 / math.sqrt(160)))
    found = Full(eps)(x.to(device), y.to(device)).item()
    assert found == pytest.approx(1e-4, rel=0.05)  # a float32 copy is off by an ulp of one a coordinate


@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 5), (3, 1)])
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("eps", [1e-6, 0.1, 10.0])
def test_n04_copies_of_one_point(device, n, m, d, eps):
    x, y = leaf(torch.full((n, d), 0.3), device), leaf(torch.full((m, d), 0.3), device)
    value = Full(eps)(x, y)
    value.backward()
    assert abs(value.item()) <= 1e-6 * eps and x.grad.abs().max() <= 1e-7 and y.grad.abs().max() <= 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_n10_values_are_squared_distances(device, dtype):
    x = torch.zeros(1, 18, dtype=dtype, device=device)
    y = torch.full((1, 18), 3.464944 / math.sqrt(18), dtype=dtype, device=device)
    loss = SamplesLoss()
    assert loss(x, y).item() == pytest.approx(6.002918, rel=1e-6)
    text = repr(loss.transport(x, y))
    assert "C = 0.5 |x - y|^2" in text and "eps = 0.0025" in text


@pytest.mark.parametrize(("eps", "expected"), [(0.005, 0.065966), (1e-5, 0.0625 + 1e-5 * math.log(2))])
def test_n11_finite_where_potentials_are(device, eps, expected):
    x, y = torch.tensor([[0.0], [1.0]], device=device), torch.tensor([[0.25], [1.25]], device=device)
    loss = plain(eps)
    assert loss(x, y).item() == pytest.approx(expected, rel=1e-5)
    assert loss.loss.transport(x, y).converged


@pytest.mark.parametrize("precision", ["exact", "mixed", "fast"])
def test_n13_clouds_away_from_the_origin(device, precision):
    x = 2 * normal(50, 2, dtype=torch.float32) - 30
    found = Full(0.05, precision=precision)(x.to(device), shifted(x, [0.3, 0.0]).to(device)).item()
    assert found == pytest.approx(0.09, rel=0.01)


@pytest.mark.parametrize("precision", ["exact", "mixed", "fast"])
@pytest.mark.parametrize("eps", [0.01, 1.0])
def test_n14_g08_a_cloud_is_at_no_distance_from_itself(device, eps, precision):
    x = normal(64, 128, dtype=torch.float32).to(device)
    x[1] = x[2] = x[0]  # duplicated rows
    points = leaf(x, device)
    value = Full(eps, precision=precision)(points, x.clone())
    value.backward()
    assert abs(value.item()) <= 1e-6 * eps
    assert points.grad.abs().max() <= 1e-5
    (gradient,) = torch.autograd.grad(plain(eps, precision=precision)(points, x.clone()), points)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("n", "m"), [(5, 960), (2, 777)])
def test_n24_any_two_sizes(device, n, m):
    x, y = uniform(n, 2, dtype=torch.float32), uniform(m, 2, 1, dtype=torch.float32)
    a, b = torch.full((n,), 1 / n), torch.full((m,), 1 / m)
    result = SamplesLoss(blur=0.1).transport(*(v.to(device) for v in (a, x, b, y)))
    rows = result.plan.row_sums().cpu().double()
    assert result.value.item() > 0 and rows.sum().item() == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(rows, a.double(), rtol=0, atol=1e-3 / n)  # tol


def test_n25_float32_weights_that_sum_to_one_in_float32(device):
    a, b = (torch.softmax(10 * uniform(1, 625, seed, dtype=torch.float32)[0], 0) for seed in (0, 1))
    side = torch.arange(25.0)
    grid = torch.cartesian_prod(side, side) / 25
    exact = [v.double() / v.double().sum() for v in (a, b)]
    loss = Full(0.05)
    found = loss(*(v.to(device) for v in (a, grid, b, grid))).item()
    assert found == pytest.approx(loss(*(v.to(device) for v in (exact[0], grid, exact[1], grid))).item(), rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, 10.0, 1e3, 1e4])
def test_n27_common_offsets(device, offset):
    found = plain(1.0)(torch.tensor([[512695.0]], device=device), torch.tensor([[512804.0]], device=device))
    assert found.item() == pytest.approx(11881, rel=1e-6)
    x = uniform(64, 3, dtype=torch.float32) + offset
    y = shifted(x, [0.05, 0.0, 0.0])
    step = (y - x).double()
    # At 1e4 an ulp is 1e-3: the stored shift differs by up to 1 % from point to point.
    assert Full(0.01)(x.to(device), y.to(device)).item() == pytest.approx(step.square().sum(1).mean().item(), rel=0.02)


def test_n30_omitted_weights_are_uniform(device):
    x, y = uniform(15, 2).to(device), uniform(10, 2, 1).to(device)
    a = torch.full((15,), 1 / 15, dtype=torch.float64, device=device)
    b = torch.full((10,), 1 / 10, dtype=torch.float64, device=device)
    loss = SamplesLoss(blur=0.1)
    assert loss(x, y).item() == loss(a, x, b, y).item()


def test_n31_translation_and_scale(device):
    x = normal(100, 3)
    for scale, eps, expected in ((1.0, 0.01, 400.0), (0.5, 0.0025, 100.0)):
        y = x + torch.tensor([20.0, 0.0, 0.0])
        assert Full(eps)((scale * x).to(device), (scale * y).to(device)).item() == pytest.approx(expected, rel=1e-4)


def test_n32_swapping_the_clouds(device):
    a, x, b, y = (v.to(device) for v in (weights(40), uniform(40, 2), weights(25, 1), uniform(25, 2, 1)))
    loss = Full(1e-3)
    assert loss(a, x, b, y).item() == pytest.approx(loss(b, y, a, x).item(), rel=1e-4)


@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4, 1e6, 1e8])
def test_n33_any_ratio_of_cost_to_eps(device, ratio):
    x = uniform(32, 3, dtype=torch.float32)
    y = shifted(x, [0.25, 0.0, 0.0])
    found = Full(3.0 / ratio, max_iterations=200)(x.to(device), y.to(device)).item()
    assert found == pytest.approx(0.0625, rel=1e-3 if ratio < 1e6 else 0.05)


def test_n34_rows_and_columns_are_not_mistaken(device):
    x, y, a, b = normal(7, 3), normal(5, 3, 1), weights(7), weights(5, 1)
    expected = solve_dense(x, y, a, b, eps=0.2).value
    assert plain(0.2)(*(v.to(device) for v in (a, x, b, y))).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 15, 16, 17, 63, 65, 120, 129, 257, 700, 1025])
def test_i12_every_dimension(device, d):
    x = normal(33, d, dtype=torch.float32) / math.sqrt(d)
    t = torch.zeros(d)
    t[0] = 0.1
    points = leaf(x, device)
    value = Full(0.5, tol=1e-5)(points, (x + t).to(device))
    value.backward()
    assert value.item() == pytest.approx(0.01, rel=1e-4)
    torch.testing.assert_close(points.grad.cpu(), (-2 / 33 * t).expand(33, d), rtol=0, atol=1e-3 * 0.2 / 33)


def test_i06_scalars_from_anywhere_but_arrays_from_one_device(device):
    x, y = normal(6, 3).to(device), normal(5, 3, 1).to(device)
    blur = torch.tensor(0.5)
    assert SamplesLoss(blur=blur)(x, y).item() == SamplesLoss(blur=0.5)(x, y).item()
    with pytest.raises(ValueError, match="device"):
        SamplesLoss()(x, y.to("meta"))


@pytest.mark.parametrize("debias", [True, False])
def test_g01_weight_gradients_along_a_direction_that_keeps_the_mass(device, debias):
    x, y, b = normal(4, 2), normal(5, 2, 1), weights(5)
    a = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    direction = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    loss = Full(0.3, debias=debias, tol=1e-6)
    weight = leaf(a, device)
    loss(weight, *(v.to(device) for v in (x, b, y))).backward()

    def value(w):
        return divergence(x, y, w, b, eps=0.3) if debias else solve_dense(x, y, w, b, eps=0.3).value

    expected = (value(a + 1e-4 * direction) - value(a - 1e-4 * direction)) / 2e-4
    assert (weight.grad.cpu() @ direction).item() == pytest.approx(expected, rel=1e-5)


def test_g06_weight_gradients_have_one_documented_constant(device):
    """Of the plain balanced value, unit masses: <a, grad_a> = <b, grad_b>, however the problem was solved."""
    a, x, b, y = (v.to(device) for v in (weights(13), normal(13, 2), weights(17, 1), normal(17, 2, 1)))
    found = []
    for options in ({"tol": 1e-6}, {"tol": 1e-5, "precision": "fast"}, {"n_iterations": 400}):
        in_a, in_b = leaf(a, device), leaf(b, device)
        plain(0.5, **options)(in_a, x, in_b, y).backward()
        assert (a @ in_a.grad).item() == pytest.approx((b @ in_b.grad).item(), rel=1e-9)
        found.append(in_a.grad)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-3), (torch.float64, 1e-6)])
def test_g07_gradients_along_a_random_direction(device, dtype, rel):
    x, y, direction = uniform(10, 3, dtype=dtype), uniform(10, 3, 1, dtype=dtype), normal(10, 3, 2)
    points, uniform_weights = leaf(x, device), torch.full((10,), 0.1, dtype=torch.float64)
    tol = 1e-10 if dtype is torch.float64 and device == "cpu" else 1e-5  # GPU sweeps are of float32 grade
    plain(0.1, tol=tol)(points, y.to(device)).backward()
    ends = [
        solve_dense(x.double() + step * direction, y, uniform_weights, uniform_weights, eps=0.1).value
        for step in (1e-5, -1e-5)
    ]
    expected = (ends[0] - ends[1]) / 2e-5
    found = (points.grad.cpu().double() * direction).sum().item()
    assert found == pytest.approx(expected, rel=rel if device == "cpu" else 1e-3)


@pytest.mark.filterwarnings("ignore::solvers.flash_sinkhorn.NotConverged")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_g10_two_far_pairs_in_high_dimension(device, dtype):
    x, y = 4 * normal(2, 147, dtype=dtype), 4 * normal(2, 147, 1, dtype=dtype)
    cost = cost_matrix(x, y)
    match = [0, 1] if cost.trace() < cost.flip(1).trace() else [1, 0]
    points = leaf(x, device)
    # Exponents are near 1e5 here, which float32 rounds to 1e-2: the last 3e-5 of the mass stays on the other pairs.
    value = plain(0.01, tol=1e-6, max_iterations=50)(points, y.to(device))
    value.backward()
    best = cost[[0, 1], match].mean().item()
    assert value.item() == pytest.approx(best + 0.01 * math.log(2), rel=1e-6)
    exact = dtype is torch.float64 and device == "cpu"
    torch.testing.assert_close(points.grad.cpu(), x - y[match], rtol=1e-5, atol=1e-5 if exact else 2e-3)


def test_m01_m14_memory_grows_with_the_points_not_the_pairs_or_iterations():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def peak(n, m, iterations):
        x, y = uniform(n, 3, dtype=torch.float32).cuda().requires_grad_(), uniform(m, 3, 1, dtype=torch.float32).cuda()
        loss = SamplesLoss(blur=0.05, n_iterations=iterations)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(x, y).backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(65_536, 32_768, 3) < 500e6
    assert peak(131_072, 65_536, 3) < 2.5 * peak(65_536, 32_768, 3)
    assert peak(2_000, 2_000, 1_000) < 1.05 * peak(2_000, 2_000, 10)


def test_m04_nothing_accumulates(device):
    """Graphs are freed: the second-order graph too."""
    import gc
    import weakref

    x, y = normal(20, 2).to(device), normal(20, 2, 1).to(device)
    seen = []
    for _ in range(2):
        points = leaf(x, device)
        (gradient,) = torch.autograd.grad(SamplesLoss(blur=0.5)(points, y), points, create_graph=True)
        gradient.square().sum().backward()
        seen.append(weakref.ref(points))
        del points, gradient
    gc.collect()
    assert all(reference() is None for reference in seen)


def test_m11_cpu_clouds_never_touch_cuda():
    SamplesLoss()(normal(50, 3), normal(50, 3, 1))
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


def test_i07_side_streams_and_other_devices():
    """Forward and backward on a stream that is not the default, and on a GPU that is not the current one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x, y = uniform(3000, 3, dtype=torch.float32).cuda(), uniform(2000, 3, 1, dtype=torch.float32).cuda()

    def run(p, q):
        points = p.clone().requires_grad_()
        value = SamplesLoss(blur=0.1)(points, q)
        value.backward()
        return value.item(), points.grad

    value, gradient = run(x, y)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = run(x, y)
    torch.cuda.synchronize()
    assert on_stream[0] == value and torch.equal(on_stream[1], gradient)
    if torch.cuda.device_count() > 1:
        elsewhere = run(x.to("cuda:1"), y.to("cuda:1"))
        assert elsewhere[0] == pytest.approx(value, rel=1e-6)
        torch.testing.assert_close(elsewhere[1].cpu(), gradient.cpu(), rtol=1e-5, atol=1e-9)


def test_threads_do_not_meet(device):
    """One loss object, several threads."""
    loss = SamplesLoss(blur=0.2)
    x, y = normal(30, 2).to(device), normal(20, 2, 1).to(device)
    expected, found = loss(x, y).item(), []
    threads = [threading.Thread(target=lambda: found.append(loss(x, y).item())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
