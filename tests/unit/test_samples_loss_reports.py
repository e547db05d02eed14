"""Public bug reports of neighbouring tools (N, I, G, M), through `SamplesLoss` and its gradients."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from dense_reference import cost_matrix, divergence, solve_dense
from full_cost import TIGHT, Full, leaf, normal, plain, shifted, uniform, weights

from solvers.flash_sinkhorn import SamplesLoss

pytestmark = pytest.mark.filterwarnings("ignore:solved to tol:RuntimeWarning")


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
    assert loss(x, y).item() == pytest.approx(6.002918, rel=3e-6)  # of fp16 pairs on a GPU
    text = repr(loss.transport(x, y))
    assert "C = 0.5 |x - y|^2" in text and "eps = 0.0025" in text


@pytest.mark.parametrize(("eps", "expected"), [(0.005, 0.065966), (1e-5, 0.0625 + 1e-5 * math.log(2))])
def test_n11_finite_where_potentials_are(device, eps, expected):
    x, y = torch.tensor([[0.0], [1.0]], device=device), torch.tensor([[0.25], [1.25]], device=device)
    result = plain(eps).loss.transport(x, y)
    assert 2 * result.value.item() == pytest.approx(expected, rel=1e-5)
    assert torch.isfinite(result.f).all() and (result.converged or eps == 1e-5)  # float32 rounds cost / eps to 5e-4


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


@pytest.mark.filterwarnings("ignore::solvers.flash_sinkhorn.NotConverged")  # at 1e8 float32 rounds exponents to 10
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
    loss = Full(0.3, debias=debias, tol=TIGHT[device])
    weight = leaf(a, device)
    loss(weight, *(v.to(device) for v in (x, b, y))).backward()

    def value(w):
        return divergence(x, y, w, b, eps=0.3) if debias else solve_dense(x, y, w, b, eps=0.3).value

    expected = (value(a + 1e-4 * direction) - value(a - 1e-4 * direction)) / 2e-4
    assert (weight.grad.cpu() @ direction).item() == pytest.approx(expected, rel=10 * TIGHT[device])


def test_g06_weight_gradients_have_one_documented_constant(device):
    """Of the plain balanced value, unit masses: <a, grad_a> = <b, grad_b>, however the problem was solved."""
    a, x, b, y = (v.to(device) for v in (weights(13), normal(13, 2), weights(17, 1), normal(17, 2, 1)))
    found = []
    for options in ({"tol": TIGHT[device]}, {"tol": 2e-5, "precision": "fast"}, {"n_iterations": 400}):
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
    # The last 3e-5 times distances of 70; a GPU's sums of 147 products round a few times more.
    close = 0.1 if device == "cuda" else 1e-5 if dtype is torch.float64 else 2e-3
    torch.testing.assert_close(points.grad.cpu(), x - y[match], rtol=1e-5, atol=close)


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
    code = (
        "import torch; from solvers.flash_sinkhorn import SamplesLoss; x = torch.rand(50, 3, requires_grad=True); "
        "SamplesLoss()(x, torch.rand(40, 3)).backward(); assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


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
