"""Hessian-vector products and the smallest eigenvalue, against dense float64 references from the definitions."""

from __future__ import annotations

import math

import pytest
import torch

from solvers.flash_sinkhorn import solve
from solvers.flash_sinkhorn.plan.hvp import hvp
from solvers.flash_sinkhorn.plan.lanczos import lanczos_min_eigenvalue


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(n, seed=0):
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    return w / w.sum()


def dense_sinkhorn(x, y, a, b, eps, cost_scale=1.0, rho_x=None, rho_y=None):
    """Potentials and plan of OT_eps in float64 from the definition, to a change of 1e-14 or better."""
    cost = cost_scale * (x[:, None] - y[None]).square().sum(-1)
    damp_x, damp_y = (1.0 if rho is None else rho / (rho + eps) for rho in (rho_x, rho_y))
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(20_000):
        before = g
        f = -damp_x * eps * torch.logsumexp((g - cost) / eps + b.log(), 1)
        g = -damp_y * eps * torch.logsumexp((f[:, None] - cost) / eps + a.log()[:, None], 0)
        if (g - before).abs().max() < 1e-14 * max(1.0, g.abs().max().item()):
            return f, g, a[:, None] * b * torch.exp((f[:, None] + g - cost) / eps)
    raise AssertionError("the reference did not converge")


def dense_gradients(x, y, a, b, eps, cost_scale=1.0, rho_x=None, rho_y=None):
    f, g, p = dense_sinkhorn(x, y, a, b, eps, cost_scale, rho_x, rho_y)
    grad_x = 2 * cost_scale * (p.sum(1, keepdim=True) * x - p @ y)
    return grad_x, 2 * cost_scale * (p.sum(0)[:, None] * y - p.T @ x), f, g


def problem(n, m, d, seed=0):
    x, y = normal(n, d, seed=seed), normal(m, d, seed=seed + 1) + 0.2
    return x, y, weights(n, seed), weights(m, seed + 1)


def directions(n, m, d, seed=7):
    """Motions of the points, and changes of the weights that keep the mass."""
    v_a, v_b = 0.1 * normal(n, seed=seed + 2) / n, 0.1 * normal(m, seed=seed + 3) / m
    return normal(n, d, seed=seed), normal(m, d, seed=seed + 1), v_a - v_a.mean(), v_b - v_b.mean()


def close_to(device, exact):
    """A tolerance for float64 clouds: GPU sweeps are float32, and its rounding is felt times the system's condition."""
    return exact if device == "cpu" else max(exact, 3e-5)


def without_constant(h_a, h_b):
    """Potentials of balanced problems are known up to a constant: take h_a's mean off."""
    return h_a - h_a.mean(), h_b + h_a.mean()


RELAXED = [(None, None), (1.0, 2.0), (None, 0.7), (0.5, None)]


@pytest.mark.parametrize(("rho_x", "rho_y"), RELAXED)
@pytest.mark.parametrize(("d", "eps"), [(1, 0.4), (3, 0.8), (5, 2.0), (17, 8.0)])
def test_product_is_the_derivative_of_the_gradients(device, d, eps, rho_x, rho_y):
    n, m, cost_scale, h = 13, 9, 0.5, 1e-4
    clouds, moves = problem(n, m, d), directions(n, m, d)
    f, g, _ = dense_sinkhorn(*clouds, eps, cost_scale, rho_x, rho_y)
    arguments = [v.to(device) for v in (*clouds, f, g, *moves)]
    product = hvp(*arguments, eps=eps, cost_scale=cost_scale, rho_x=rho_x, rho_y=rho_y, tol=close_to(device, 1e-6))
    assert product.converged and product.residual <= close_to(device, 1e-6) and product.marginal_residual < 1e-5
    up, down = (
        dense_gradients(*(v + s * w for v, w in zip(clouds, moves, strict=True)), eps, cost_scale, rho_x, rho_y)
        for s in (h, -h)
    )
    want = [(plus - minus) / (2 * h) for plus, minus in zip(up, down, strict=True)]
    got = [v.cpu() for v in (product.h_x, product.h_y, product.h_a, product.h_b)]
    if rho_x is None and rho_y is None:
        got[2:], want[2:] = without_constant(*got[2:]), without_constant(*want[2:])
    # Central differences: h^2 / 6 times third derivatives, of order |v|^3 / eps^2.
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() < close_to(device, 2e-5) * theirs.abs().max()


@pytest.mark.parametrize("rho", [None, 1.0])
def test_symmetry(device, rho):
    """v.H w = w.H v over all four kinds of direction."""
    n, m, d, eps = 41, 33, 4, 2.0
    clouds = problem(n, m, d)
    f, g, _ = dense_sinkhorn(*clouds, eps, 1.0, rho, rho)
    v, w = directions(n, m, d, seed=10), directions(n, m, d, seed=20)
    products = []
    for direction in (v, w):
        arguments = [value.to(device) for value in (*clouds, f, g, *direction)]
        product = hvp(*arguments, eps=eps, rho_x=rho, rho_y=rho, tol=1e-7)
        h_x, h_y, h_a, h_b = (value.cpu() for value in (product.h_x, product.h_y, product.h_a, product.h_b))
        if rho is not None:  # F15: the gradient in a_i is rho (1 - e^(-f_i / rho)) - eps (e^(-f_i / rho) - |b|)
            h_a = (1 + eps / rho) * torch.exp(-f / rho) * h_a + eps * direction[3].sum()
            h_b = (1 + eps / rho) * torch.exp(-g / rho) * h_b + eps * direction[2].sum()
        products.append([h_x, h_y, h_a, h_b])
    one, other = (
        sum((left * right).sum().item() for left, right in zip(direction, product, strict=True))
        for direction, product in ((v, products[1]), (w, products[0]))
    )
    size = sum((left.abs() * right.abs()).sum().item() for left, right in zip(v, products[1], strict=True))
    assert abs(one - other) < close_to(device, 1e-6) * size


@pytest.mark.parametrize("d", [2, 6])
def test_moving_everything_together_changes_nothing(device, d):
    clouds = problem(50, 40, d)
    eps = 0.5 * d
    f, g, _ = dense_sinkhorn(*clouds, eps)
    t = normal(d, seed=5)
    arguments = [v.to(device) for v in (*clouds, f, g)]
    product = hvp(*arguments, t.expand(50, d).to(device), t.expand(40, d).to(device), eps=eps)
    alone = hvp(*arguments, t.expand(50, d).to(device), eps=eps)
    # x alone: every cost changes by 2 t.(x - y), which the potentials take up; each gradient moves by 2 a t.
    want = 2 * clouds[2][:, None] * t
    assert product.h_x.cpu().abs().max() < close_to(device, 2e-5) * want.abs().max()
    assert (alone.h_x.cpu() - want).abs().max() < close_to(device, 2e-5) * want.abs().max()


def test_batch_is_a_loop_and_shares_its_sweeps(device):
    clouds = problem(60, 45, 6)
    f, g, _ = dense_sinkhorn(*clouds, 3.0)
    arguments = [v.to(device) for v in (*clouds, f, g)]
    v_x, v_y = normal(3, 60, 6, seed=3).to(device), normal(3, 45, 6, seed=4).to(device)
    batch = hvp(*arguments, v_x, v_y, eps=3.0)
    singles = [hvp(*arguments, v, w, eps=3.0) for v, w in zip(v_x, v_y, strict=True)]
    for name in ("h_x", "h_y", "h_a", "h_b"):
        looped = torch.stack([getattr(single, name) for single in singles])
        assert (getattr(batch, name) - looped).abs().max() < close_to(device, 1e-5) * looped.abs().max()
    assert batch.n_passes < 2 + sum(single.n_passes - 2 for single in singles)
    in_y = hvp(*arguments, v_x[0], eps=3.0, in_x=False)
    in_x = hvp(*arguments, v_x[0], eps=3.0, in_y=False)
    both = hvp(*arguments, v_x[0], eps=3.0)
    assert in_y.h_x is None and torch.equal(in_y.h_y, both.h_y) and in_y.n_passes < both.n_passes
    assert in_x.h_y is None and torch.equal(in_x.h_x, both.h_x) and in_x.n_passes < both.n_passes


def test_residual_is_the_true_one(device):
    """Stopped early: the residual of the Schur system recomputed from the returned potentials, dense and in float64."""
    x, y, a, b = problem(40, 30, 3)
    f, g, p = dense_sinkhorn(x, y, a, b, 0.5)
    v = normal(40, 3, seed=9)
    product = hvp(*(w.to(device) for w in (x, y, a, b, f, g, v)), eps=0.5, max_iterations=3)
    change = 2 * ((x[:, None] - y[None]) * v[:, None]).sum(-1)
    s, t = (p * change).sum(1), (p * change).sum(0)
    rhs = t - p.T @ (s / a)
    left = rhs - (b * product.h_b.cpu() - p.T @ (p @ product.h_b.cpu() / a))
    assert product.converged is False and product.n_iterations == 3
    assert product.residual == pytest.approx((left.norm() / rhs.norm()).item(), rel=1e-3)


def test_potentials_short_of_convergence_are_reported(device):
    x, y, a, b = (v.to(device) for v in problem(40, 30, 3))
    result = solve(x, y, a, b, eps=0.05, n_iterations=3)
    product = hvp(x, y, a, b, result.f, result.g, normal(40, 3, seed=9).to(device), eps=0.05)
    cost = (x[:, None] - y[None]).square().sum(-1)
    p = a[:, None] * b * torch.exp((result.f[:, None] + result.g - cost) / 0.05)
    truth = max((p.sum(1) - a).abs().sum().item(), (p.sum(0) - b).abs().sum().item())
    assert product.marginal_residual == pytest.approx(truth, rel=1e-3) and truth > 1e-3


@pytest.mark.parametrize("d", [3, 24])
def test_float32_clouds(device, d):
    """Against the same product of the same clouds in float64; a common offset costs nothing."""
    x, y, a, b = problem(70, 90, d)
    x, y = (x + 100).float(), (y + 100).float()
    eps = float(d)
    exact = [x.double(), y.double(), a, b]
    f, g, _ = dense_sinkhorn(*exact, eps)
    v, w = normal(70, d, seed=3), normal(90, d, seed=4)
    want = hvp(*exact, f, g, v, w, eps=eps, tol=1e-10)
    got = hvp(*(u.to(device) for u in (x, y, a, b, f, g, v.float(), w.float())), eps=eps, tol=1e-5)
    assert got.converged and got.h_x.dtype is torch.float32
    for name in ("h_x", "h_y"):
        reference = getattr(want, name)
        assert (getattr(got, name).cpu() - reference).abs().max() < 1e-4 * reference.abs().max()


def test_points_without_weight(device):
    """They have no part in anything, and the change of their own potential is that of its definition."""
    n, m, d, eps, h = 20, 16, 2, 0.8, 1e-4
    x, y, a, b = problem(n, m, d)
    a[3] = b[5] = 0.0
    a, b = a / a.sum(), b / b.sum()
    f, g, _ = dense_sinkhorn(x, y, a, b, eps)
    v, w, v_a, _ = directions(n, m, d)
    product = hvp(*(u.to(device) for u in (x, y, a, b, f, g, v, w)), eps=eps)
    assert (product.h_x[3] == 0).all() and (product.h_y[5] == 0).all()
    up, down = (dense_sinkhorn(x + s * v, y + s * w, a, b, eps) for s in (h, -h))
    want = without_constant(*((plus - minus) / (2 * h) for plus, minus in zip(up[:2], down[:2], strict=True)))
    got = without_constant(product.h_a.cpu(), product.h_b.cpu())
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() < close_to(device, 2e-5) * theirs.abs().max()
    v_a = torch.where(a > 0, v_a, 0.0)
    v_a = v_a - a * v_a.sum()
    v_a[3] = 7.0  # ignored
    weighted = hvp(*(u.to(device) for u in (x, y, a, b, f, g)), v_a=v_a.to(device), eps=eps)
    assert all(torch.isfinite(h).all() for h in (weighted.h_x, weighted.h_y, weighted.h_a, weighted.h_b))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("v_x", {"v_x": torch.zeros(5, 3)}),
        ("v_x", {"v_x": torch.zeros(5, 2).long()}),
        ("v_x", {"v_x": [[0.0, 0.0]] * 5}),
        ("v_y", {"v_y": torch.zeros(5, 2)}),
        ("same number", {"v_x": torch.zeros(2, 5, 2), "v_y": torch.zeros(3, 4, 2)}),
        ("at least one", {"v_x": None}),
        ("tol", {"tol": 0.0}),
        ("rho_x", {"rho_x": -1.0}),
        ("max_iterations", {"max_iterations": 0}),
        ("f", {"f": torch.full((5,), math.inf)}),
    ],
)
def test_bad_input_is_refused_by_name(name, change):
    arguments = {"x": torch.zeros(5, 2), "y": torch.ones(4, 2), "a": None, "b": None, "f": torch.zeros(5)}
    arguments |= {"g": torch.zeros(4), "v_x": torch.zeros(5, 2), "eps": 0.1}
    with pytest.raises(ValueError, match=name):
        hvp(**(arguments | change))


def dense_hessian(x, y, a, b, eps, h=1e-4):
    columns = []
    for index in range(x.numel()):
        step = torch.zeros(x.numel(), dtype=torch.float64)
        step[index] = h
        up, down = (dense_gradients(x + s * step.view_as(x), y, a, b, eps)[0] for s in (1, -1))
        columns.append(((up - down) / (2 * h)).flatten())
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("d", "eps"), [(2, 0.3), (5, 1.0)])
def test_smallest_eigenvalue_is_the_dense_one(device, d, eps):
    n = 40 // d
    x, y, a, b = problem(n, 17, d)
    f, g, _ = dense_sinkhorn(x, y, a, b, eps)
    values, vectors = torch.linalg.eigh(dense_hessian(x, y, a, b, eps))
    arguments = [v.to(device) for v in (x, y, a, b, f, g)]
    # As many steps as dimensions: the whole space.
    found = lanczos_min_eigenvalue(*arguments, eps=eps, n_steps=40, tol=1e-6, solve_tol=1e-8)
    spread = values.abs().max().item()
    assert found.value == pytest.approx(values[0].item(), abs=close_to(device, 1e-4) * spread)
    assert found.spread == pytest.approx(spread, rel=1e-3)
    if values[1] - values[0] > 1e-2 * spread:
        assert abs((found.vector.cpu().flatten() @ vectors[:, 0]).item()) > 0.999
    image = hvp(*arguments, found.vector, eps=eps, tol=1e-8).h_x
    assert (image - found.value * found.vector).norm() < close_to(device, 1e-4) * spread


def test_few_steps_bound_the_eigenvalue_from_above(device):
    x, y, a, b = problem(25, 20, 3)
    f, g, _ = dense_sinkhorn(x, y, a, b, 0.5)
    arguments = [v.to(device) for v in (x, y, a, b, f, g)]
    one, few, many = (lanczos_min_eigenvalue(*arguments, eps=0.5, n_steps=k, tol=1e-9) for k in (1, 8, 24))
    assert one.n_steps == 1 and few.n_steps == 8 and not few.converged
    assert one.value >= few.value >= many.value - close_to(device, 1e-6) * many.spread
    again = lanczos_min_eigenvalue(*arguments, eps=0.5, n_steps=8, tol=1e-9)
    assert again.value == few.value and torch.equal(again.vector, few.vector)
    assert few.vector.norm().item() == pytest.approx(1.0, abs=1e-6)
    # Some eigenvalue lies within the residual stated.
    values = torch.linalg.eigvalsh(dense_hessian(x, y, a, b, 0.5))
    assert (values - few.value).abs().min() < few.residual + close_to(device, 1e-5) * few.spread


@pytest.mark.gpu
@pytest.mark.parametrize("d", [3, 64, 130])
def test_gpu_agrees_with_cpu_at_sizes_that_fill_it(d):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x, y = normal(3001, d, dtype=torch.float32), normal(2001, d, seed=1, dtype=torch.float32) + 0.1
    eps = 0.5 * d
    result = solve(x.double(), y.double(), eps=eps, tol=1e-8)
    v, w = normal(2, 3001, d, seed=3), normal(2, 2001, d, seed=4)
    want = hvp(x.double(), y.double(), None, None, result.f, result.g, v, w, eps=eps, tol=1e-8)
    on_gpu = [u.cuda() for u in (x, y)] + [None, None] + [u.cuda() for u in (result.f, result.g, v.float(), w.float())]
    got = hvp(*on_gpu, eps=eps, tol=1e-5)
    assert got.converged
    for name in ("h_x", "h_y"):
        reference = getattr(want, name)
        assert (getattr(got, name).cpu() - reference).abs().max() < 2e-4 * reference.abs().max()


def test_a_product_that_is_worth_nothing_is_refused_or_said(device):
    x, y = normal(20, 3).to(device), normal(15, 3, seed=1).to(device)
    solved = solve(x, y, eps=0.5, tol=1e-6)
    f, g = solved.f, solved.g
    for bad in (math.nan, math.inf):
        v = torch.ones_like(x)
        v[3, 1] = bad
        with pytest.raises(ValueError, match="v_x contains NaN or infinite"):
            hvp(x, y, None, None, f, g, v, eps=0.5)
    uneven = torch.rand(20, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="v_a and v_b must have equal sums"):
        hvp(x, y, None, None, f, g, v_a=uneven, eps=0.5)
    assert hvp(x, y, None, None, f, g, v_a=uneven - uneven.mean(), eps=0.5).converged
    assert hvp(x, y, None, None, f, g, v_a=uneven, eps=0.5, rho_x=1.0, rho_y=1.0).h_x is not None
    astray = hvp(x, y, None, None, f + 5.0, g, x, eps=0.5)
    assert astray.marginal_residual > 1 and not astray.converged
    with pytest.raises(ValueError, match="not potentials of this problem"):
        lanczos_min_eigenvalue(x, y, None, None, f + 1e5, g, eps=0.5)
