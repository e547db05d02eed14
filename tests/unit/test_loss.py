"""Values, derivatives and results of OT_eps against dense float64 from the definitions, and autograd's own checks."""

from __future__ import annotations

import math

import pytest
import torch
from dense_reference import cost_matrix, divergence, solve_dense
from full_cost import TIGHT
from torch.autograd import gradcheck, gradgradcheck

from solvers.flash_sinkhorn.iteration.self_transport import solve_self
from solvers.flash_sinkhorn.iteration.solver import solve
from solvers.flash_sinkhorn.losses.loss import Regularisation, ot_value, self_term
from solvers.flash_sinkhorn.losses.notices import NotConverged
from solvers.flash_sinkhorn.losses.transport import transport
from solvers.flash_sinkhorn.losses.values import dual_value, weight_gradients
from solvers.flash_sinkhorn.plan import blocked_averages
from solvers.flash_sinkhorn.plan.hvp import hvp

RELAXATIONS = [(None, None), (1.0, 1.0), (1.0, None), (None, 0.7), (0.5, 2.0)]


def normal(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(n, seed=0, mass=1.0):
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2
    return w * (mass / w.sum())


def small_problem(mass_a=1.0, mass_b=1.0):
    return normal(5, 2), normal(6, 2, 1), weights(5, 2, mass_a), weights(6, 3, mass_b)


def differentiable(rho_x, rho_y, eps=0.5):
    """OT_eps of (x, y, a, b), solved to float64's rounding: gradients are off by the residual, and no more."""
    options = {"eps": eps, "cost_scale": 0.7, "rho_x": rho_x, "rho_y": rho_y}

    def value(x, y, a, b):
        result = solve(x, y, a, b, tol=1e-13, max_iterations=2000, **options)
        return ot_value(x, y, a, b, result.f, result.g, hessian_tol=1e-12, **options)

    return value


def requiring_grad(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize(("mass_a", "mass_b"), [(1.0, 1.0), (1.7, 1.7), (2.0, 0.6)])
@pytest.mark.parametrize(("rho_x", "rho_y"), RELAXATIONS)
def test_value_is_the_primal_value_of_the_definition(device, rho_x, rho_y, mass_a, mass_b):
    if rho_x is rho_y is None and mass_a != mass_b:
        pytest.skip("balanced: masses are equal")
    x, y, a, b = normal(31, 3), normal(23, 3, 1) + 0.3, weights(31, 2, mass_a), weights(23, 3, mass_b)
    options = {"eps": 0.3, "cost_scale": 0.5, "rho_x": rho_x, "rho_y": rho_y}
    expected = solve_dense(x, y, a, b, **options)
    result = transport(*(v.to(device) for v in (x, y, a, b)), tol=TIGHT[device], **options)
    # The value's error is the square of the residual; on a GPU also float32's of its mass times eps.
    assert result.value.item() == pytest.approx(expected.value, rel=1e-9 if device == "cpu" else 1e-6)
    assert result.linear_cost == pytest.approx(expected.linear_cost, rel=1e-5)
    p = result.plan.apply(torch.ones(23, device=device)).cpu().double()
    # The columns' residual, sum_j b_j |g_j - G_j| / eps, is at most tol |b|. In L1 weighted by the plan's marginals a
    # full update contracts errors of g by both dampings dx dy, and the rows' half-step passes on to P 1 no more than
    # 1 - dx of them: (1 - dx) / (1 - dx dy) <= 1 of the residual arrives.
    heaviest = (expected.plan.sum(0) / b).max().item()
    assert (p - expected.plan.sum(1)).abs().sum().item() <= TIGHT[device] * mass_b * heaviest


def test_dual_value_is_off_by_the_square_of_the_residual():
    x, y, a, b = small_problem()
    exact = solve_dense(x, y, a, b, eps=0.5)
    cost = cost_matrix(x, y)

    def value(size):
        f, g = exact.f + size * normal(1, 5, 7)[0], exact.g
        mass = (a[:, None] * b * torch.exp((f[:, None] + g - cost) / 0.5)).sum()
        return dual_value(a, b, f, g, eps=0.5, plan_mass=mass).item()

    errors = [exact.value - value(size) for size in (1e-2, 1e-3)]
    assert errors[1] > 0 and errors[0] / errors[1] == pytest.approx(100, rel=0.1)


def test_balanced_value_and_weight_gradients_do_not_depend_on_the_constant_in_f_and_g():
    x, y, a, b = small_problem(1.00003, 1.0)  # masses that differ as float32's do
    exact = solve_dense(x, y, a / a.sum(), b / b.sum(), eps=0.5)
    first, second = ((a, b, exact.f + shift, exact.g - shift) for shift in (0.0, 50.0))
    assert dual_value(*first, eps=0.5).item() == pytest.approx(dual_value(*second, eps=0.5).item(), rel=1e-13)
    for left, right in zip(weight_gradients(*first, eps=0.5), weight_gradients(*second, eps=0.5), strict=True):
        torch.testing.assert_close(left, right)


def test_a_relaxed_value_needs_the_mass_of_the_plan():
    with pytest.raises(ValueError, match="plan_mass"):
        dual_value(torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1), eps=1.0, rho_x=1.0)


@pytest.mark.parametrize(("rho_x", "rho_y"), RELAXATIONS)
def test_first_and_second_derivatives_in_points_and_weights(rho_x, rho_y):
    """Central differences of autograd; in balanced weights in every direction, those that change the mass included."""
    masses = (1.3, 1.3) if rho_x is rho_y is None else (1.3, 0.8)
    inputs = requiring_grad(*small_problem(*masses))
    value = differentiable(rho_x, rho_y)
    assert gradcheck(value, inputs, atol=1e-7, fast_mode=True)
    assert gradgradcheck(value, inputs, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("rho", [None, 0.6])
def test_derivatives_of_a_self_problem(rho):
    problem = Regularisation(eps=0.5, cost_scale=0.7, rho_x=rho, rho_y=rho, hessian_tol=1e-12)

    def value(x, a):
        own = solve_self(x, a, eps=0.5, cost_scale=0.7, rho=rho, tol=1e-14)
        return self_term(x.detach(), a.detach(), own.f, own.update, problem).attached(x, x, a, a)

    inputs = requiring_grad(normal(5, 2), weights(5, 2, 1.3))
    assert gradcheck(value, inputs, atol=1e-7, fast_mode=True)
    assert gradgradcheck(value, inputs, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize(("rho_x", "rho_y"), [(None, None), (0.6, 0.6), (0.6, None), (0.3, 1.0)])
def test_derivatives_of_the_divergence(rho_x, rho_y, debias):
    def value(x, y, a, b):
        options = {"rho_x": rho_x, "rho_y": rho_y, "tol": 1e-13, "hessian_tol": 1e-12, "max_iterations": 2000}
        return transport(x, y, a, b, eps=0.5, debias=debias, **options).value

    inputs = requiring_grad(*small_problem())
    assert gradcheck(value, inputs, atol=1e-7, fast_mode=True)
    assert gradgradcheck(value, inputs, atol=1e-6, fast_mode=True)


def test_f15_weight_gradients_of_the_relaxed_value(device):
    """rho (1 - exp(-f / rho)) - eps (exp(-f / rho) - |b|), from float32 points too."""
    x, y = normal(4, 2).float(), normal(5, 2, 1).float()
    a, b = weights(4, 2), weights(5, 3, 0.7)
    moved = requiring_grad(*(v.to(device) for v in (a, b)))
    transport(x.to(device), y.to(device), *moved, eps=0.3, rho=1.0, tol=TIGHT[device]).value.backward()
    for weight, gradient, seed in ((a, moved[0].grad, 5), (b, moved[1].grad, 6)):
        direction = normal(1, len(weight), seed)[0]
        ends = []
        for step in (1e-5, -1e-5):
            changed = [v + step * direction if v is weight else v for v in (a, b)]
            ends.append(solve_dense(x, y, *changed, eps=0.3, rho_x=1.0, rho_y=1.0).value)
        expected = (ends[0] - ends[1]) / 2e-5
        assert (gradient.cpu() @ direction).item() == pytest.approx(expected, rel=10 * TIGHT[device])


def test_points_without_weight(device):
    """Their own points have no gradient; the gradient in their weight is that of the value as they gain some."""
    x, y, a, b = normal(6, 2), normal(5, 2, 1), weights(6, 2), weights(5, 3)
    a[2] = 0.0
    a /= a.sum()
    moved = requiring_grad(*(v.to(device) for v in (x, y, a, b)))
    transport(*moved, eps=0.5, tol=TIGHT[device]).value.backward()
    assert moved[0].grad[2].abs().max() == 0
    step = torch.zeros(6, dtype=torch.float64)
    step[2], step[0] = 1e-5, -1e-5
    values = [solve_dense(x, y, a + k * step, b, eps=0.5).value for k in (0, 1, 2)]
    expected = (-3 * values[0] + 4 * values[1] - values[2]) / 2
    assert (moved[2].grad.cpu() @ step).item() == pytest.approx(expected, rel=1e-4)


def test_what_is_not_differentiable_is_refused():
    x, y, a, b = small_problem()
    inputs = requiring_grad(x, y, a, b)
    first = torch.autograd.grad(differentiable(None, None)(*inputs), inputs[:1], create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), inputs[:1], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="twice"):
        second.sum().backward()
    a[2] = 0.0
    inputs = requiring_grad(x, y, a / a.sum(), b)
    first = torch.autograd.grad(differentiable(None, None)(*inputs), inputs[2:3], create_graph=True)[0]
    with pytest.raises(ValueError, match="second derivatives in a"):
        first.square().sum().backward()


def test_value_of_potentials_from_anywhere(device):
    """Uniform weights, half precision, strided potentials of another type; bad ones are refused at once."""
    x, y = normal(9, 2).to(device, torch.float16).requires_grad_(), normal(8, 2, 1).to(device, torch.float16)
    result = solve(x, y, eps=0.5, tol=1e-5)
    f, g = (torch.stack([v, v], 1).float()[:, 0] for v in (result.f, result.g))
    value = ot_value(x, y, None, None, f, g, eps=0.5)
    value.backward()
    again = x.detach().requires_grad_()
    expected = transport(again, y, eps=0.5, tol=1e-5).value
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5) and x.grad.dtype == torch.float16
    torch.testing.assert_close(x.grad, again.grad, rtol=2e-3, atol=1e-4)
    for name, arguments in {"f": (f[:3], g), "g": (f, g / 0)}.items():
        with pytest.raises(ValueError, match=name):
            ot_value(x, y, None, None, *arguments, eps=0.5)
    with pytest.raises(ValueError, match="rho_x"):
        ot_value(x, y, None, None, f, g, eps=0.5, rho_x=-1.0)


def test_double_backward_is_the_hessian_vector_product(device):
    x, y, a, b = (v.to(device) for v in (normal(17, 3), normal(13, 3, 1), weights(17, 2), weights(13, 3)))
    x.requires_grad_()
    direction = normal(17, 3, 4).to(device)
    result = transport(x, y, a, b, eps=0.5, tol=TIGHT[device], hessian_tol=1e-6)
    (gradient,) = torch.autograd.grad(result.value, x, create_graph=True)
    (through_autograd,) = torch.autograd.grad(gradient, x, direction)
    expected = hvp(x, y, a, b, result.f, result.g, direction, eps=0.5, tol=1e-6).h_x
    torch.testing.assert_close(through_autograd, expected, rtol=1e-5, atol=1e-6)


def test_products_with_the_hessian_by_torchs_own_function():
    """It differentiates the double backward in its direction, which must not count as a third derivative."""
    inputs = small_problem()
    value, directions = differentiable(None, None), tuple(normal(1, v.numel(), 9).view(v.shape) for v in inputs)
    _, products = torch.autograd.functional.hvp(value, inputs, directions)
    gradients = torch.autograd.grad(value(*(leaves := requiring_grad(*inputs))), leaves, create_graph=True)
    expected = torch.autograd.grad(gradients, leaves, directions)
    for product, other in zip(products, expected, strict=True):
        torch.testing.assert_close(product, other, rtol=1e-8, atol=1e-9)
    _, of_x = torch.autograd.functional.hvp(lambda x: value(x, *inputs[1:]), inputs[0], directions[0])
    assert of_x.shape == inputs[0].shape and of_x.abs().max() > 0


@pytest.fixture
def sweeps_of_averages(monkeypatch):
    """The sweeps that gradients and relaxed values take on the CPU, counted."""
    counts = {"sweeps": 0}
    for name in ("_sweep_sums", "_means", "_moments"):
        original = getattr(blocked_averages.BlockedAverages, name)

        def counted(self, *arguments, original=original, **options):
            counts["sweeps"] += 1
            return original(self, *arguments, **options)

        monkeypatch.setattr(blocked_averages.BlockedAverages, name, counted)
    return counts


def test_nothing_is_swept_for_gradients_that_nobody_asks_for(sweeps_of_averages):
    x, y, a, b = small_problem()
    transport(x, y, a, b, eps=0.5, debias=True)
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        assert not transport(leaf, y, a, b, eps=0.5, debias=True).value.requires_grad
    result = transport(leaf, y, a, b, eps=0.5, debias=True)
    assert sweeps_of_averages["sweeps"] == 0
    result.value.backward()
    assert sweeps_of_averages["sweeps"] == 2  # one of x against y, one of x against itself
    transport(x, y, *requiring_grad(a, b), eps=0.5, debias=True).value.backward()
    assert sweeps_of_averages["sweeps"] == 2  # gradients in weights are the potentials


def test_upstream_gradients_of_any_size_and_kind():
    """I05: scaled, and expanded from one number; float32 points keep their type."""
    x, y = normal(9, 2).float().requires_grad_(), normal(8, 2, 1).float()
    (once,) = torch.autograd.grad(transport(x, y, eps=0.5).value, x)
    (scaled,) = torch.autograd.grad(1e-6 * transport(x, y, eps=0.5).value, x)
    stacked = torch.stack([transport(x, y, eps=0.5).value for _ in range(3)])
    (expanded,) = torch.autograd.grad(stacked, x, torch.ones((), dtype=torch.float64).expand(3))
    assert once.dtype == torch.float32
    torch.testing.assert_close(scaled, 1e-6 * once)
    torch.testing.assert_close(expanded, 3 * once)


@pytest.mark.parametrize("d", [1, 3, 20])
@pytest.mark.parametrize("eps", [10.0, 0.1, 1e-3, 1e-6])
@pytest.mark.parametrize("rho", [None, 0.1])
def test_self_problems_converge_in_few_sweeps_at_any_eps(d, eps, rho):
    """The error is divided by three each sweep: 14 of them for six digits, and a few to come near."""
    x, a = normal(101, d), weights(101)
    own = solve_self(x, a, eps=eps, rho=rho, tol=1e-6)
    assert own.converged and own.n_passes <= 18
    rate = 1.0 if rho is None else rho / (rho + eps)
    full = -rate * eps * torch.logsumexp((own.f[None] - cost_matrix(x, x)) / eps + a.log()[None], 1)
    truth = (a * torch.expm1((own.f - full) / eps).abs()).sum().item()
    assert own.residual == pytest.approx(truth, rel=1e-3, abs=1e-9)
    torch.testing.assert_close(own.update, full, rtol=1e-9, atol=1e-12)  # rounding of costs near 60


@pytest.mark.parametrize("mass", [1.0, 2.5])
@pytest.mark.parametrize("rho", [None, 0.6])
def test_self_value_is_that_of_the_pair(device, rho, mass):
    x, a = normal(31, 2), weights(31, mass=mass)
    expected = solve_dense(x, x, a, a, eps=1.0, rho_x=rho, rho_y=rho)
    own = solve_self(x.to(device), a.to(device), eps=1.0, rho=rho, tol=1e-6)
    problem = Regularisation(eps=1.0, rho_x=rho, rho_y=rho)
    value = self_term(x.to(device), a.to(device), own.f, own.update, problem).value
    assert value.item() == pytest.approx(expected.value, rel=1e-6)
    torch.testing.assert_close(own.f.cpu(), (expected.f + expected.g) / 2, rtol=1e-5, atol=1e-6)


def test_a_self_problem_ends_where_rounding_allows_no_less(device):
    own = solve_self(normal(65, 20).float().to(device), weights(65).to(device), eps=1e-3, tol=1e-9)
    assert own.converged is False and own.n_passes < 100 and 1e-9 < own.residual < 1e-2


def test_one_result_states_every_quantity_and_convention(device):
    """N08, F11: points {0, 1} on both sides."""
    x = torch.tensor([[0.0], [1.0]], device=device)
    full = transport(x, x.clone(), eps=0.5, tol=1e-6, debias=True)
    assert full.ot.item() == pytest.approx(0.283110, abs=1e-6)
    assert full.linear_cost == pytest.approx(0.119203, abs=1e-6)
    assert full.divergence.item() == pytest.approx(0.0, abs=1e-6) and full.value is full.divergence
    half = transport(x, x.clone(), eps=0.25, cost_scale=0.5, tol=1e-6)
    assert half.value.item() == pytest.approx(0.141555, abs=1e-6) and half.divergence is None
    assert full.converged and full.residual <= 1e-6
    for text in ("debiased", "0.2831", "0.1192", "C = 1 |x - y|^2", "eps = 0.5", "converged: residual", "fixed"):
        assert text in repr(full)
    for text in ("OT value", "C = 0.5 |x - y|^2"):
        assert text in repr(half)
    assert "relaxed with rho 2" in repr(transport(x, x, eps=0.5, rho=2.0))
    assert "residual not measured" in repr(transport(x, x, eps=0.5, n_iterations=2))


@pytest.mark.filterwarnings("ignore:solved to tol:RuntimeWarning")
def test_what_did_not_converge_says_so():
    """N02, N15: the flag and the residual are those of the potentials returned."""
    x = torch.cat([torch.linspace(0, 0.3, 30), torch.linspace(5, 5.3, 20)])[:, None]
    y = torch.cat([torch.linspace(0, 0.3, 20), torch.linspace(5, 5.3, 30)])[:, None]
    with pytest.warns(NotConverged, match="residual"):
        result = transport(x, y, eps=0.01, max_iterations=5, debias=True)
    assert result.converged is False and "NOT converged" in repr(result)
    p = (torch.exp((result.f[:, None] + result.g - cost_matrix(x, y)) / 0.01)) / 2500
    truth = max((p.sum(side) - 0.02).abs().sum().item() for side in (0, 1))
    assert result.residual == pytest.approx(truth, rel=0.01) and truth > 1e-3
    solved = transport(x, y, eps=0.01, debias=True)
    assert solved.converged and solved.value.item() == pytest.approx(4.599039, rel=1e-3)


@pytest.mark.filterwarnings("ignore:solved to tol:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::solvers.flash_sinkhorn.NotConverged")  # one iteration
@pytest.mark.parametrize(("d", "eps"), [(64, 5e-3), (64, 1e-3), (10, 1e-2), (3, 1e-3)])
def test_default_tolerance_is_within_reach_of_float32_and_stated(device, d, eps):
    x, y = (torch.rand(300, d, generator=torch.Generator().manual_seed(seed)).to(device) for seed in (0, 1))
    result = transport(x, y, eps=eps, debias=True)
    assert result.converged and 1e-4 <= result.tol <= 1e-2 and f"tol {result.tol:g}" in repr(result)
    if device == "cpu":
        assert transport(x.double(), y.double(), eps=10 * eps).tol == 1e-4
    far = torch.cat([x, x.new_full((1, d), 1e6)]), torch.cat([x.new_full((300,), 1 / 300), x.new_zeros(1)])
    padded = transport(far[0], y, far[1], None, eps=eps, max_iterations=1)
    assert padded.tol == pytest.approx(result.tol, rel=1e-4)  # points without weight do not count


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tol", {"tol": "small"}),
        ("tol", {"tol": 0.0}),
        ("at most one", {"tol": 0.1, "n_iterations": 3}),
        ("n_iterations", {"n_iterations": 0}),
        ("max_iterations", {"max_iterations": 0}),
        ("hessian_tol", {"hessian_tol": -1.0}),
        ("precision", {"precision": "double"}),
        ("eps", {"eps": 0.0}),
        ("rho_y", {"rho_y": float("inf")}),
        ("y contains NaN", {"y": torch.full((4, 2), math.nan)}),
        ("b has negative", {"b": torch.tensor([0.5, 0.7, -0.3, 0.1])}),
    ],
)
def test_bad_input_is_refused_by_name(name, options):
    arguments = {"x": normal(5, 2), "y": normal(4, 2, 1), "eps": 0.5, "debias": True} | options
    with pytest.raises(ValueError, match=name):
        transport(**arguments)


def test_n40_masses_other_than_one(device):
    x = torch.tensor([[0.0], [1.0]], device=device)
    a, b = torch.tensor([0.5, 1.5], device=device), torch.tensor([1.2, 0.8], device=device)
    result = transport(x, x, a, b, eps=0.3, tol=1e-6)
    assert result.value.item() == pytest.approx(0.976785, abs=2e-6)
    assert result.linear_cost == pytest.approx(0.701450, abs=2e-6)
    with pytest.raises(ValueError, match="same mass"):
        transport(x, x, a, torch.tensor([1.2, 1.8], device=device), eps=0.3)


@pytest.mark.parametrize("precision", ["exact", "mixed", "fast"])
def test_n41_a_translated_copy_in_every_precision(device, precision):
    """The rounding of coordinates near 5 + N(0, 1) is up to 2e-3; consistent, it moves S by less than its square."""
    x = (normal(512, 64) + 5).float()
    y = x + torch.full((64,), 0.1 / 8)
    for options in ({"tol": 1e-3}, {"n_iterations": 20}):
        result = transport(x.to(device), y.to(device), eps=0.05, debias=True, precision=precision, **options)
        assert result.value.item() == pytest.approx(0.01, rel=0.05)


def test_fixed_iterations_give_the_value_of_their_potentials(device):
    x, y, a, b = (v.to(device) for v in (normal(21, 3), normal(17, 3, 1), weights(21), weights(17, 1)))
    result = transport(x, y, a, b, eps=0.5, n_iterations=3)
    assert result.converged is None and result.residual is None and result.n_passes == 6
    plain = solve(x, y, a, b, eps=0.5, n_iterations=3)
    assert result.value.item() == pytest.approx((a @ plain.f + b @ plain.g).item(), rel=1e-9)
    assert result.value.item() < solve_dense(*(v.cpu() for v in (x, y, a, b)), eps=0.5).value


def test_seconds_are_for_all_problems_together():
    """An impossible tolerance: the first problem uses up the time, the others end after one iteration."""
    x, y = normal(401, 3), normal(399, 3, 1)
    with pytest.warns(NotConverged, match="max_seconds"):
        result = transport(x, y, eps=1e-3, tol=1e-30, debias=True, max_seconds=0.3)
    assert result.converged is False and math.isfinite(result.value.item())
    with pytest.raises(ValueError, match="max_seconds"):
        transport(x, y, eps=1e-3, max_seconds="soon")


def test_divergence_by_its_definition(device):
    x, y, a, b = normal(19, 2), normal(23, 2, 1), weights(19, 2, 1.5), weights(23, 3, 0.7)
    options = {"eps": 0.4, "rho_x": 0.8, "rho_y": 0.3}
    result = transport(*(v.to(device) for v in (x, y, a, b)), debias=True, tol=TIGHT[device], **options)
    assert result.value.item() == pytest.approx(divergence(x, y, a, b, **options), rel=1e-6)
    alone = transport(
        x.to(device), x.clone().to(device), a.to(device), a.to(device), debias=True, tol=TIGHT[device], **options
    )
    assert alone.value.item() == pytest.approx(0.0, abs=1e-6)
