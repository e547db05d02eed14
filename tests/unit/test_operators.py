"""The plan as an operator, its barycentric map and the gradient, against dense float64 from the definitions.

Every test runs on the CPU path, and on CUDA where there is one. GPU sweeps are float32 whatever the type of the points,
so tolerances for float64 points are those of float32 there.
"""

from __future__ import annotations

import math

import pytest
import torch

from solvers.flash_sinkhorn import solve
from solvers.flash_sinkhorn.plan.operators import Plan, barycentric_projection, gradient, plan_apply


def normal(n, d, seed=0, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(n, seed=0):
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    return w / w.sum()


def costs(x, y, cost_scale=1.0):
    x, y = x.double().cpu(), y.double().cpu()
    return cost_scale * (x[:, None] - y[None]).square().sum(-1)


def dense_plan(x, y, a, b, f, g, eps, cost_scale=1.0):
    f, g = f.double().cpu(), g.double().cpu()
    return a[:, None] * b * torch.exp((f[:, None] + g - costs(x, y, cost_scale)) / eps)


def dense_sinkhorn(x, y, a, b, eps, cost_scale=1.0):
    """Potentials and value of OT_eps in float64 from the definition, to a marginal error of 1e-13 or better."""
    cost = costs(x, y, cost_scale)
    g = torch.zeros(len(b), dtype=torch.float64)
    for _ in range(5_000):
        f = -eps * torch.logsumexp((g - cost) / eps + b.log(), 1)
        g = -eps * torch.logsumexp((f[:, None] - cost) / eps + a.log()[:, None], 0)
        row = torch.exp((f[:, None] + g - cost) / eps) @ b
        if (a * (row - 1)).abs().sum() < 1e-13:
            return f, g, a @ f + b @ g
    raise AssertionError("the reference did not converge")


def relative(got, want):
    return ((got.double().cpu() - want).abs().max() / want.abs().max()).item()


def tolerance(dtype, device, exponent=30.0):
    """Exponents up to `exponent` in the arithmetic of the sweeps: half an ulp each for a few summands."""
    return 1e-12 if dtype is torch.float64 and device == "cpu" else 1e-6 + 2e-7 * exponent


CASES = [(1, 0.3), (3, 0.5), (5, 2.0), (17, 10.0), (64, 40.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("d", "eps"), CASES)
def test_plan_is_the_dense_plan(device, dtype, d, eps):
    n, m = 137, 301
    x, y, a, b = normal(n, d, dtype=dtype), normal(m, d, 1, dtype) + 0.3, weights(n), weights(m, 1)
    f, g = eps * normal(n, 1, 2)[:, 0], eps * normal(m, 1, 3)[:, 0]  # far from converged
    p = dense_plan(x, y, a, b, f, g, eps, 0.5)
    plan = Plan(*(v.to(device) for v in (x, y, a, b, f, g)), eps=eps, cost_scale=0.5)
    close = tolerance(dtype, device)
    assert relative(plan.row_sums(), p.sum(1)) < close and relative(plan.col_sums(), p.sum(0)) < close
    for k in (1, 3, 9, 70):
        v, u = normal(m, k, 4, dtype), normal(n, k, 5, dtype)
        assert relative(plan.apply(v.to(device)), p @ v.double()) < close
        assert relative(plan.apply_transpose(u.to(device)), p.T @ u.double()) < close
    vector = normal(m, 1, 6, torch.float32)[:, 0]
    applied = plan.apply(vector.to(device))
    assert applied.shape == (n,) and applied.dtype is dtype
    assert relative(applied, p @ vector.double()) < close
    sums, points = plan.barycentre()
    assert relative(sums, p.sum(1)) < close and relative(points, p @ y.double()) < close
    sums, points = plan.barycentre(transpose=True)
    assert relative(sums, p.sum(0)) < close and relative(points, p.T @ x.double()) < close


def test_functions_are_the_methods(device):
    x, y, a, b = (v.to(device) for v in (normal(40, 6), normal(30, 6, 1), weights(40), weights(30, 1)))
    f, g = torch.zeros(40, device=device), torch.zeros(30, device=device)
    p = dense_plan(x, y, a.cpu(), b.cpu(), f, g, 3.0)
    v, u = normal(30, 2, 2).to(device), normal(40, 2, 3).to(device)
    assert relative(plan_apply(x, y, a, b, f, g, v, eps=3.0), p @ v.cpu()) < 1e-5
    assert relative(plan_apply(x, y, a, b, f, g, u, eps=3.0, transpose=True), p.T @ u.cpu()) < 1e-5
    mapped = p @ y.cpu() / p.sum(1, keepdim=True)
    assert relative(barycentric_projection(x, y, a, b, f, g, eps=3.0), mapped) < 1e-5
    assert relative(barycentric_projection(x, y, None, b, f, g, eps=3.0, values=y), mapped) < 1e-5


def test_identities_of_the_plan_and_the_map(device):
    """F07: P 1 = a; the map of X -> X + t less that of X -> X is t at every point."""
    x, a = normal(200, 3, dtype=torch.float32).to(device), weights(200).to(device)
    t = torch.tensor([0.5, -1.0, 2.0], device=device)
    maps = []
    for y in (x, x + t):
        # rounding of exponents up to |t|^2 / eps = 40 leaves residuals up to 1e-5 (`ROUNDINGS`)
        result = solve(x, y, a, a, eps=0.2, tol=2e-5, max_iterations=2000)
        assert result.converged
        plan = Plan(x, y, a, a, result.f, result.g, eps=0.2)
        # The residual asked for, and exponents that are float32 sums of up to 200.
        assert (plan.apply(torch.ones(200, device=device)) - a).abs().sum() < 4e-5
        maps.append(barycentric_projection(x, y, a, a, result.f, result.g, eps=0.2))
    assert (maps[1] - maps[0] - t).abs().max() < 1e-3


def test_labels_are_transported(device):
    """Two clusters far apart: x takes the labels of y, with probabilities that sum to one."""
    y = torch.cat([normal(20, 2, dtype=torch.float32), normal(30, 2, 1, torch.float32) + 50])
    x = torch.cat([normal(16, 2, 2, torch.float32), normal(24, 2, 3, torch.float32) + 50])
    labels = torch.nn.functional.one_hot(torch.tensor([0] * 20 + [1] * 30)).float()
    result = solve(x.to(device), y.to(device), eps=0.1, tol=1e-4)
    probabilities = barycentric_projection(
        x.to(device), y.to(device), None, None, result.f, result.g, eps=0.1, values=labels.to(device)
    ).cpu()
    assert torch.allclose(probabilities.sum(1), torch.ones(40), atol=1e-6)
    assert (probabilities[:16, 0] > 0.999).all() and (probabilities[16:, 1] > 0.999).all()


@pytest.mark.parametrize("d", [1, 3, 6, 40])
def test_nothing_overflows_away_from_convergence(device, d):
    """Row sums far outside float32's range: means are finite and right; sums in float64."""
    x, y, a, b = normal(63, d), normal(65, d, 1), weights(63), weights(65, 1)
    eps = 1e-2 * d
    f = torch.linspace(-3, 3, 63, dtype=torch.float64) * 200 * eps
    g = torch.linspace(3, -3, 65, dtype=torch.float64) * 40 * eps
    log = (f[:, None] + g - costs(x, y)) / eps + b.log()
    plan = Plan(*(v.to(device) for v in (x, y, a, b, f, g)), eps=eps)
    mapped = torch.softmax(log, 1) @ y
    exponent = log.abs().max().item() + (x.square().sum(1).max() / eps).item()
    close = tolerance(torch.float64, device, exponent)
    for _ in range(2):  # without and with known sums
        got = plan.means(y.to(device))
        assert torch.isfinite(got).all() and relative(got, mapped) < close
    assert relative(plan.row_sums().log(), torch.logsumexp(log, 1) + a.log()) < close
    displacement = plan.displacement().cpu()
    assert torch.isfinite(displacement).all() and relative(displacement, x - mapped) < 2 * close


@pytest.mark.parametrize("cost_scale", [1.0, 0.5])
@pytest.mark.parametrize(("d", "eps"), CASES)
def test_gradient_is_that_of_the_value(d, eps, cost_scale):
    """G02, G07: every coordinate against central differences of a dense converged float64 solver, and the sum rule."""
    n, m = 7, 5
    x, y, a, b = normal(n, d), normal(m, d, 1) + 0.2, weights(n), weights(m, 1)
    f, g, _ = dense_sinkhorn(x, y, a, b, eps, cost_scale)
    grad_x, grad_y = gradient(x, y, a, b, f, g, eps=eps, cost_scale=cost_scale)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        v, w = (torch.randn(k, d, generator=generator, dtype=torch.float64) for k in (n, m))
        h = 1e-4
        up, down = (dense_sinkhorn(x + s * v, y + s * w, a, b, eps, cost_scale)[2] for s in (h, -h))
        along = ((grad_x * v).sum() + (grad_y * w).sum()).item()
        # Truncation is h^2 / 6 times third derivatives of order |v|^3 / eps^2; all here stay below 1e-5.
        assert along == pytest.approx(((up - down) / (2 * h)).item(), rel=1e-5, abs=1e-7)
    rule = 2 * cost_scale * (a @ x - b @ y)
    assert torch.allclose(grad_x.sum(0), rule, atol=1e-11) and torch.allclose(grad_y.sum(0), -rule, atol=1e-11)


@pytest.mark.parametrize("d", [1, 3, 5, 17, 64])
def test_gradient_of_a_translated_copy(device, d):
    """R3, I12: the gradient of OT(X, X + t) less that of OT(X, X) is -2 a t, the divergence's gradient."""
    x, a = normal(33, d, dtype=torch.float32), weights(33)
    t = torch.linspace(0.2, 0.5, d)
    eps = float(d)
    gradients = []
    for y in (x, x + t):
        f, g, _ = dense_sinkhorn(x, y, a, a, eps)
        grad, _ = gradient(*(v.to(device) for v in (x, y, a, a, f, g)), eps=eps)
        gradients.append(grad.cpu())
    want = -2 * a[:, None] * t.double()
    assert ((gradients[1] - gradients[0] - want).abs() / a[:, None]).max() < 2e-5 * math.sqrt(d)


@pytest.mark.parametrize("d", [2, 3, 7])
@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 1e4), (torch.float64, 1e6)])
def test_common_offset_costs_no_digits(device, d, dtype, offset):
    """N27: the stored clouds, offset taken off exactly, are the reference; only sums of coordinates would notice."""
    eps = 0.5
    x, y = ((v + offset).to(dtype) for v in (normal(60, d), normal(45, d, 1)))
    a, b = weights(60), weights(45, 1)
    near_x, near_y = x.double() - offset, y.double() - offset
    f, g, _ = dense_sinkhorn(near_x, near_y, a, b, eps)
    p = dense_plan(near_x, near_y, a, b, f, g, eps)
    want_x = 2 * (p.sum(1, keepdim=True) * near_x - p @ near_y)
    want_y = 2 * (p.sum(0)[:, None] * near_y - p.T @ near_x)
    got_x, got_y = gradient(*(v.to(device) for v in (x, y, a, b, f, g)), eps=eps)
    exponent = (costs(near_x, near_y).max() / eps).item()
    close = 1e-6 if dtype is torch.float64 and device == "cpu" else tolerance(dtype, device, exponent)
    assert relative(got_x, want_x) < close and relative(got_y, want_y) < close
    _, points = Plan(*(v.to(device) for v in (x, y, a, b, f, g)), eps=eps).barycentre()
    assert relative(points, p @ y.double()) < (1e-9 if dtype is torch.float64 and device == "cpu" else close)


def test_rows_without_weight(device):
    """N29, R12: they get exactly zero, wherever they are, and change nothing for the others."""
    x, y, a, b = normal(40, 3, dtype=torch.float32), normal(33, 3, 1, torch.float32), weights(40), weights(33, 1)
    padding = torch.tensor([[0.0, 0, 0], [1e6, -1e6, 1e6]])
    x_padded, a_padded = torch.cat([x, padding]), torch.cat([a, torch.zeros(2, dtype=torch.float64)])
    y_padded, b_padded = torch.cat([padding, y]), torch.cat([torch.zeros(2, dtype=torch.float64), b])
    plain = [v.to(device) for v in (x, y, a, b)]
    padded = [v.to(device) for v in (x_padded, y_padded, a_padded, b_padded)]
    result, with_padding = solve(*plain, eps=0.3, tol=1e-5), solve(*padded, eps=0.3, tol=1e-5)
    grad_x, grad_y = gradient(*plain, result.f, result.g, eps=0.3)
    padded_x, padded_y = gradient(*padded, with_padding.f, with_padding.g, eps=0.3)
    assert (padded_x[40:] == 0).all() and (padded_y[:2] == 0).all()
    assert (padded_x[:40] - grad_x).abs().max() < 1e-6 and (padded_y[2:] - grad_y).abs().max() < 1e-6
    plan = Plan(*padded, with_padding.f, with_padding.g, eps=0.3)
    assert (plan.apply(torch.ones(35, device=device))[40:] == 0).all() and (plan.row_sums()[40:] == 0).all()
    assert torch.isfinite(plan.means(torch.ones(35, device=device))).all()


def test_single_points_and_copies(device):
    """R1, R2, N04, G08: n = 1, identical points, duplicates."""
    x, y = torch.tensor([[0.3, -0.2]]), torch.tensor([[1.0, 2.0], [0.0, 1.0], [0.0, 1.0]])
    b = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    for eps in (1e-6, 0.1, 10.0):
        if eps > 1e-6:  # cost / eps of five million leaves float32 no digit of an exponent
            result = solve(x.to(device), y.to(device), None, b.to(device), eps=eps, n_iterations=3)
            grad_x, grad_y = gradient(x.to(device), y.to(device), None, b.to(device), result.f, result.g, eps=eps)
            assert torch.allclose(grad_x.cpu(), 2 * (x - b.float() @ y), atol=2e-5)
            assert torch.allclose(grad_y.cpu(), 2 * b.float()[:, None] * (y - x), atol=1e-6)
        same = torch.zeros(5, 2, device=device)
        result = solve(same, same.clone(), eps=eps, n_iterations=3)
        assert all((grad == 0).all() for grad in gradient(same, same, None, None, result.f, result.g, eps=eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_separated_pairs_in_high_dimension(device, dtype):
    """G10: 2 against 2 points far apart: gradient rows are x_i - y_sigma(i)."""
    x, y = 4 * normal(2, 147, dtype=dtype), 4 * normal(2, 147, 1, dtype)
    result = solve(x.to(device), y.to(device), eps=0.01, annealing=0.5, tol=1e-4)
    cost = costs(x, y)
    sigma = [0, 1] if cost[0, 0] + cost[1, 1] < cost[0, 1] + cost[1, 0] else [1, 0]
    grad_x, _ = gradient(x.to(device), y.to(device), None, None, result.f, result.g, eps=0.01)
    assert torch.allclose(grad_x.cpu(), x - y[sigma], atol=1e-5)


def test_every_dimension(device):
    """I12: tile edges, chunks and padding; the gradient of the divergence of a translated copy is -2 a t."""
    dimensions = [1, 2, 3, 4, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 120, 127, 128, 129, 255, 257, 511, 700]
    dimensions += [1000, 1023, 1024, 1025, 2049]
    uniform = torch.full((33,), 1 / 33, dtype=torch.float64)
    for d in dimensions:
        x, t = normal(33, d, dtype=torch.float32), torch.linspace(0.2, 0.5, d)
        gradients = []
        for y in (x, x + t):
            f, g, _ = dense_sinkhorn(x, y, uniform, uniform, 2.0 * d)
            grad_x, grad_y = gradient(
                *(v.to(device) for v in (x, y)), None, None, f.to(device), g.to(device), eps=2.0 * d
            )
            gradients.append((grad_x.cpu(), grad_y.cpu()))
        differences = [after - before for before, after in zip(*gradients, strict=True)]
        assert (differences[0] + 2 * t / 33).abs().max() < 1e-5 and (differences[1] - 2 * t / 33).abs().max() < 1e-5, d


def test_autograd_and_autocast_leave_it_alone(device):
    """Inputs that require gradients are constants here, and mixed precision is not for potentials."""
    x, y = normal(40, 6, dtype=torch.float32).to(device), normal(30, 6, 1, torch.float32).to(device)
    f, g, v = torch.zeros(40, device=device), torch.zeros(30, device=device), normal(30, 2, 2, torch.float32).to(device)
    want = plan_apply(x, y, None, None, f, g, v, eps=3.0), gradient(x, y, None, None, f, g, eps=3.0)[0]
    inputs = [w.clone().requires_grad_() for w in (x, y, f, g, v)]
    with torch.autocast(device, dtype=torch.bfloat16):
        got = (
            plan_apply(*inputs[:2], None, None, *inputs[2:], eps=3.0),
            gradient(*inputs[:2], None, None, *inputs[2:4], eps=3.0)[0],
        )
    for ours, theirs in zip(got, want, strict=True):
        assert not ours.requires_grad and ours.dtype is torch.float32
        assert relative(ours, theirs.double().cpu()) < 1e-5  # bfloat16 would show at 1e-2


def test_masses_other_than_one_and_unequal(device):
    x, y, a, b = normal(30, 4), normal(20, 4, 1), 3 * weights(30), 0.5 * weights(20, 1)
    f, g = normal(30, 1, 2)[:, 0], normal(20, 1, 3)[:, 0]
    p = dense_plan(x, y, a, b, f, g, 2.0)
    plan = Plan(*(v.to(device) for v in (x, y, a, b, f, g)), eps=2.0)
    assert relative(plan.row_sums(), p.sum(1)) < 1e-5 and relative(plan.col_sums(), p.sum(0)) < 1e-5
    grad_x, grad_y = gradient(*(v.to(device) for v in (x, y, a, b, f, g)), eps=2.0, balanced=False)
    assert relative(grad_x, 2 * (p.sum(1, keepdim=True) * x - p @ y)) < 1e-5
    assert relative(grad_y, 2 * (p.sum(0)[:, None] * y - p.T @ x)) < 1e-5


def test_types_and_strides(device):
    x, y, f, g = normal(20, 3), normal(30, 3, 1), torch.zeros(20), torch.zeros(30)
    uniform = [torch.full((k,), 1 / k, dtype=torch.float64) for k in (20, 30)]
    p = dense_plan(x, y, *uniform, f, g, 1.0)
    for dtype, close in ((torch.float16, 2e-2), (torch.bfloat16, 1e-1)):
        plan = Plan(x.to(device, dtype), y.to(device, dtype), None, None, f.to(device), g.to(device), eps=1.0)
        applied = plan.apply(torch.ones(30, 2, device=device, dtype=dtype))
        assert applied.dtype is dtype and relative(applied, p.sum(1, keepdim=True).expand(-1, 2)) < close
    plan = Plan(x.to(device), y.to(device), None, None, f.to(device), g.to(device), eps=1.0)
    strided = normal(60, 8, 2).to(device)[::2, ::2]
    assert relative(plan.apply(strided), p @ strided.cpu()) < 1e-5
    expanded = torch.ones(1, 1, device=device).expand(30, 4)
    assert relative(plan.apply(expanded), p.sum(1, keepdim=True).expand(-1, 4)) < 1e-5


def test_columns_of_any_size_keep_their_digits(device):
    """Columns twenty orders of magnitude apart, one of zeros, and one whose largest entry has hardly any weight."""
    x, y = normal(50, 8), normal(60, 8, 1)
    f, g = torch.zeros(50), torch.zeros(60)
    uniform = [torch.full((k,), 1 / k, dtype=torch.float64) for k in (50, 60)]
    p = dense_plan(x, y, *uniform, f, g, 6.0)
    v = normal(60, 5, 2) * torch.tensor([1e-12, 1e8, 1.0, 0.0, 1.0], dtype=torch.float64)
    v[0, 4] = 1e3
    plan = Plan(*(value.to(device) for value in (x, y)), None, None, f.to(device), g.to(device), eps=6.0)
    applied, want = plan.apply(v.to(device)).cpu(), p @ v
    for column in (0, 1, 2, 4):
        assert relative(applied[:, column], want[:, column]) < 1e-5
    assert (applied[:, 3] == 0).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("f", {"f": torch.zeros(4)}),
        ("f", {"f": torch.full((5,), math.nan)}),
        ("g", {"g": torch.tensor([0.0, 0.0, math.inf, 0.0])}),
        ("g", {"g": torch.full((4,), 1e36)}),
        ("g", {"g": torch.zeros(4, dtype=torch.int64)}),
        ("x", {"x": torch.full((5, 2), math.nan)}),
        ("eps", {"eps": -1.0}),
        ("cost_scale", {"cost_scale": 0.0}),
        ("precision", {"precision": "double"}),
        ("x", {"x": [[0.0, 0.0]] * 5}),
    ],
)
def test_bad_input_is_refused_by_name(name, change):
    arguments = {"x": torch.zeros(5, 2), "y": torch.ones(4, 2), "a": None, "b": None}
    arguments |= {"f": torch.zeros(5), "g": torch.zeros(4), "eps": 0.1, "cost_scale": 1.0}
    arguments |= change
    positional = [arguments.pop(key) for key in ("x", "y", "a", "b", "f", "g")]
    with pytest.raises(ValueError, match=name):
        Plan(*positional, **arguments)


@pytest.mark.parametrize(
    "v", [torch.zeros(5), torch.zeros(4, 0), torch.zeros(4, 2, 2), torch.zeros(4).long(), [0.0] * 4]
)
def test_bad_values_are_refused_by_name(v):
    plan = Plan(torch.zeros(5, 2), torch.ones(4, 2), None, None, torch.zeros(5), torch.zeros(4), eps=0.1)
    with pytest.raises(ValueError, match="v must"):
        plan.apply(v)


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "k"), [(3, 3), (3, 40), (64, 64), (64, 1), (130, 130), (512, 5)])
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_gpu_agrees_with_cpu_at_sizes_that_fill_it(d, k, precision):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    n, m, eps = 4999, 3001, 0.5 * d
    x, y = normal(n, d, dtype=torch.float32), normal(m, d, 1, torch.float32) + 0.1
    f, g = 0.1 * eps * normal(n, 1, 2)[:, 0], 0.1 * eps * normal(m, 1, 3)[:, 0]
    v = normal(m, k, 4)
    reference = Plan(x.double(), y.double(), None, None, f, g, eps=eps)
    plan = Plan(*(w.cuda() for w in (x, y)), None, None, f.cuda(), g.cuda(), eps=eps, precision=precision)
    rounded = precision == "fast" and d > 4
    # Exact: exponents of up to about 30. Fast: 10-bit mantissas in |x|^2 / eps = 2 and in the values.
    close = 2e-2 if rounded else 1e-5
    for _ in range(2):
        assert relative(plan.apply(v.cuda()), reference.apply(v)) < close
    assert relative(plan.displacement(), reference.displacement()) < close
    assert relative(plan.displacement(transpose=True), reference.displacement(transpose=True)) < close
    first, second = plan.apply(v.cuda()), plan.apply(v.cuda())
    assert torch.equal(first, second)  # the same sums in the same order, every time


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 512])
def test_gpu_memory_of_the_gradient(d):
    """Peak above inputs: at most four copies of the clouds in float32."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    n, m = 30_000, 20_000
    x, y = torch.randn(n, d, device="cuda"), torch.randn(m, d, device="cuda")
    f, g = (torch.zeros(k, dtype=torch.float64, device="cuda") for k in (n, m))
    gradient(x[:100], y[:100], None, None, f[:100], g[:100], eps=float(d))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradient(x, y, None, None, f, g, eps=float(d))
    assert torch.cuda.max_memory_allocated() - before <= 4 * (n + m) * d * 4


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """I09: more than 2^31 coordinates, of which only those of the last 84 points are not zero."""
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs a CUDA device with 80 GiB free")
    n, d = 16_777_300, 128
    x, y = torch.zeros(n, d, device="cuda"), torch.zeros(1, d, device="cuda")
    x[-84:, 0] = 1000.0
    f, g = torch.zeros(n, dtype=torch.float64, device="cuda"), torch.zeros(1, dtype=torch.float64, device="cuda")
    f[-84:] = 1e6
    grad_x, grad_y = gradient(x, y, None, None, f, g, eps=1e6)
    assert (grad_x[-84:, 0] * n / 2 - 1000.0).abs().max() < 1e-2
    assert grad_x[:-84].abs().max() * n < 1e-2
    assert grad_y[0, 0].item() == pytest.approx(-2 * 84 * 1000.0 / n, rel=1e-3)


@pytest.mark.gpu
def test_identities_at_fifty_thousand_points():
    """F07 at its own size, on points of the unit cube."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.rand(50_000, 3, generator=torch.Generator().manual_seed(0)).cuda()
    t = torch.tensor([0.5, -1.0, 2.0], device="cuda")
    maps = []
    for y in (x, x + t):
        result = solve(x, y, eps=0.05, tol=1e-5)
        plan = Plan(x, y, None, None, result.f, result.g, eps=0.05)
        assert (plan.apply(torch.ones(50_000, device="cuda")) * 50_000 - 1).abs().max() < 1e-3
        maps.append(barycentric_projection(x, y, None, None, result.f, result.g, eps=0.05))
    assert (maps[1] - maps[0] - t).abs().max() < 1e-3
