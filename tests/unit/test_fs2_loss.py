"""Values, gradients and debiasing of FlashSinkhorn2 against dense float64 references and finite differences.

A value is off by eps (residual^2 + omitted), of each of its problems; a gradient by the residual times the distances
that mass moves. Allowed are these orders with a factor of ten, and the digits of float32 where the points are float32.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from dense_reference import divergence, solve_dense

from solvers.flash_sinkhorn import NotConverged
from solvers.flash_sinkhorn import transport as dense_transport
from solvers.flash_sinkhorn2 import transport
from solvers.flash_sinkhorn2.cascade import levels
from solvers.flash_sinkhorn2.geometry import tiled_clouds
from solvers.flash_sinkhorn2.iterate import Options
from solvers.flash_sinkhorn2.plan import near_copies, self_transport

TIGHT = 1e-6  # sums over a tile are float32: no residual much below


@pytest.fixture(autouse=True)
def small_clouds_are_screened_too(monkeypatch):
    monkeypatch.setattr(levels, "SMALL", 200)
    monkeypatch.setattr(self_transport, "SMALL", 200)


def uniform(n, d, seed):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(n, seed, mass=1.0):
    w = uniform(n, 1, seed)[:, 0] + 0.1
    w[::9] = 0.0
    return mass * w / w.sum()


def clouds(d, n=500, m=431, mass=1.0):
    return uniform(n, d, 0), uniform(m, d, 1) ** 1.5, weights(n, 2, mass), weights(m, 3, mass)


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


EPS = {1: 1e-3, 2: 3e-3, 3: 1e-2}


class TestValues:
    @pytest.mark.parametrize("d", [1, 2, 3])
    def test_value_and_divergence_are_those_of_the_definition(self, d):
        x, y, a, b = clouds(d, 300, 257)
        found = transport(x, y, a, b, eps=10 * EPS[d], cost_scale=0.5, debias=True, tol=1e-5)
        expected = solve_dense(x, y, a, b, eps=10 * EPS[d], cost_scale=0.5)
        allowed = 10 * EPS[d] * (10 * 1e-5**2 + 2 * 1e-5)  # omitted is part of the tolerance
        assert found.ot.item() == pytest.approx(expected.value, abs=allowed)
        assert found.linear_cost == pytest.approx(expected.linear_cost, abs=1e-5)
        exact = divergence(x, y, a, b, eps=10 * EPS[d], cost_scale=0.5)
        assert found.divergence.item() == found.value.item() == pytest.approx(exact, abs=2 * allowed)
        assert found.converged and found.residual + found.omitted <= 2e-5
        assert found.costs.dual <= expected.value <= found.costs.primal + 1e-5

    def test_masses_other_than_one(self):
        x, y, a, b = clouds(2, mass=2.5)
        found = transport(x, y, a, b, eps=0.01, debias=True, tol=1e-5)
        exact = dense_transport(x, y, a, b, eps=0.01, debias=True, tol=1e-9)
        for name in ("ot", "divergence"):
            assert getattr(found, name).item() == pytest.approx(getattr(exact, name).item(), abs=2.5 * 0.01 * 5e-5)
        live = a > 0
        torch.testing.assert_close(found.f[live] - found.f[live].mean(), exact.f[live] - exact.f[live].mean(), rtol=0,
                                   atol=1e-4)  # fmt: skip
        assert found.plan.row_sums().sum().item() == pytest.approx(2.5, rel=1e-4)

    def test_uniform_weights_are_the_default(self):
        x, y, _, _ = clouds(2)
        a, b = (torch.full((len(points),), 1 / len(points), dtype=torch.float64) for points in (x, y))
        given, default = (transport(x, y, *w, eps=0.01, tol=1e-4).ot for w in ((a, b), ()))
        assert torch.equal(given, default)


class TestGradients:
    @pytest.mark.parametrize("debias", [False, True])
    @pytest.mark.parametrize("d", [1, 2, 3])
    def test_they_are_those_of_the_dense_solver(self, d, debias):
        own, dense = leaves(*clouds(d)), leaves(*clouds(d))
        options = {"eps": EPS[d], "cost_scale": 0.5, "debias": debias}
        transport(*own, tol=1e-5, **options).value.backward()
        dense_transport(*dense, tol=1e-9, **options).value.backward()
        for mine, exact in zip(own, dense, strict=True):
            assert mine.grad.dtype == torch.float64
            assert (mine.grad - exact.grad).norm() <= 10 * 1e-5 * exact.grad.norm()
        assert not own[0].grad[own[2] == 0].any() and not own[1].grad[own[3] == 0].any()

    @pytest.mark.parametrize("debias", [False, True])
    def test_they_are_slopes_of_the_value(self, debias):
        """Central differences: off by the step squared, and by the values' rounding over the step."""
        x, y, a, b = clouds(2, 300, 257)
        moves = uniform(300, 2, 5) - 0.5, uniform(257, 2, 6) - 0.5, a * (uniform(300, 1, 7)[:, 0] - 0.5), b.clone()
        moves[2].sub_(a * moves[2].sum())
        moves[3].mul_(uniform(257, 1, 8)[:, 0] - 0.5).sub_(b * moves[3].sum())

        def value(step, side):
            moved = [x, y, a, b]
            moved[side] = moved[side] + step * moves[side]
            return transport(*moved, eps=0.02, debias=debias, tol=TIGHT).value.item()

        inputs = leaves(x, y, a, b)
        transport(*inputs, eps=0.02, debias=debias, tol=TIGHT).value.backward()
        step = 1e-3
        for side, (tensor, move) in enumerate(zip(inputs, moves, strict=True)):
            slope = (value(step, side) - value(-step, side)) / (2 * step)
            assert abs(slope) > 2e-4
            assert (tensor.grad * move).sum().item() == pytest.approx(slope, abs=1e-6 + 0.02 * 2 * TIGHT / step)

    def test_float32_points_have_float32_gradients(self):
        x, y, a, b = (tensor.float() for tensor in clouds(3))
        own, exact = leaves(x, y, a, b), leaves(x.double(), y.double(), a.double(), b.double())
        transport(*own, eps=0.01, debias=True, tol=1e-4).value.backward()
        dense_transport(*exact, eps=0.01, debias=True, tol=1e-9).value.backward()
        for mine, reference in zip(own, exact, strict=True):
            assert mine.grad.dtype == torch.float32
            assert (mine.grad - reference.grad).norm() <= 10 * 1e-4 * reference.grad.norm()

    def test_half_precision_points_are_taken(self):
        x, y, _, _ = clouds(2)
        x = x.half().requires_grad_()
        value = transport(x, y.half(), eps=0.01, debias=True, tol=1e-3).value
        value.backward()
        assert value.dtype == torch.float64 and x.grad.dtype == torch.float16 and x.grad.isfinite().all()

    def test_only_what_requires_a_gradient_has_one(self):
        x, y, a, b = clouds(2)
        y.requires_grad_()
        transport(x, y, a, b, eps=0.01, tol=1e-4).ot.backward()
        assert x.grad is None and a.grad is None and y.grad is not None
        assert not transport(x, y.detach(), a, b, eps=0.01, tol=1e-4).ot.requires_grad

    @pytest.mark.parametrize("debias", [False, True])
    def test_second_derivatives_are_those_of_the_dense_solver(self, debias):
        products = []
        for solver, tol in ((transport, 1e-5), (dense_transport, 1e-9)):
            x, y, a, b = leaves(uniform(300, 2, 0), uniform(257, 2, 1), weights(300, 2) + 1e-4, weights(257, 3) + 1e-4)
            value = solver(x, y, a / a.sum(), b / b.sum(), eps=0.05, debias=debias, tol=tol, hessian_tol=1e-8).value
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            products.append(torch.autograd.grad((gradient * (uniform(300, 2, 5) - 0.5)).sum(), (x, y, a)))
        for mine, exact in zip(*products, strict=True):
            assert (
                mine - exact
            ).norm() <= 10 * 1e-5 / 0.05 * exact.norm()  # potentials over eps are off by the residual


class TestDebiasing:
    @pytest.mark.parametrize("d", [1, 2, 3])
    def test_a_translated_copy_is_at_its_squared_distance(self, d):
        x, _, a, _ = clouds(d)
        t = torch.tensor([0.3, -0.2, 0.4][:d], dtype=torch.float64)
        y = (x + t).requires_grad_()
        found = transport(x, y, a, a, eps=EPS[d], debias=True, tol=1e-4)
        exact = t.square().sum().item()
        assert found.divergence.item() == pytest.approx(exact, abs=EPS[d] * 2e-4)
        found.divergence.backward()
        torch.testing.assert_close(y.grad, 2 * a[:, None] * t, rtol=1e-3, atol=0)

    def test_a_cloud_is_at_no_distance_from_itself(self):
        x, _, a, _ = clouds(2)
        y = x.clone().requires_grad_()
        shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        for other, weight in ((y, a), (y[shuffled], a[shuffled])):
            found = transport(x, other, a, weight, eps=1e-3, debias=True, tol=1e-4)
            assert abs(found.divergence.item()) <= 1e-3 * 2e-4
            (gradient,) = torch.autograd.grad(found.divergence, y)
            plain = 2 * a[:, None] * (1e-3) ** 0.5  # of mass moved a blur
            assert (gradient.abs() <= 1e-3 * plain + 1e-12).all()

    def test_self_problems_take_few_passes_and_one_potential(self):
        x, y, a, b = clouds(2, 2500, 2400)
        found = transport(x, y, a, b, eps=5e-4, debias=True, tol=1e-4)
        for points, weight, potential in ((x, a, found.f_self), (y, b, found.g_self)):
            live = weight > 0
            kernel = torch.exp((potential[:, None] + potential - torch.cdist(points, points).square()) / 5e-4)
            rows = (kernel * weight).sum(1)
            assert (weight * (rows - 1).abs())[live].sum() <= 1e-4 + 1e-5
        cloud, _ = tiled_clouds(x, x, a, a)
        outcome = self_transport.solve_self(cloud, 1.4427 / 5e-4, tol=1e-4, max_passes=100)
        # The error is divided by three a pass: 3^-12 is 2e-6, and starts are off by a factor of the points in a blur.
        assert outcome.converged and outcome.n_passes <= 12 and outcome.passes.n_screens <= 2

    def test_clouds_that_differ_are_no_near_copies(self):
        x, y, a, b = clouds(2)
        of_x, of_y = tiled_clouds(x, y, a, b)
        zero = torch.zeros_like(of_x.weight), torch.zeros_like(of_y.weight)
        assert near_copies.solve_near_copy(of_x, of_y, *zero, 1e3, tol=1e-3, options=Options()) is None

    def test_copies_take_no_cascade(self, monkeypatch):
        monkeypatch.setattr("solvers.flash_sinkhorn2.plan.transport.solved", None)
        x, _, a, _ = clouds(2)
        moved = x + 0.02 * (EPS[2] ** 0.5) * uniform(*x.shape, 4)
        found = transport(x, moved, a, a, eps=EPS[2], debias=True, tol=1e-4)
        exact = dense_transport(x, moved, a, a, eps=EPS[2], debias=True, tol=1e-9)
        assert found.divergence.item() == pytest.approx(exact.divergence.item(), abs=EPS[2] * 2e-4)


class TestWords:
    def test_a_solve_that_ends_early_says_so(self):
        x, y, a, b = clouds(2)
        with pytest.warns(NotConverged, match=r"residual .* above tol") as told:
            found = transport(x, y, a, b, eps=1e-4, tol=1e-5, max_iterations=1, debias=True)
        assert told[0].filename == __file__
        assert not found.converged and "NOT converged" in repr(found)
        with pytest.warns(NotConverged):
            transport(x, y, a, b, eps=1e-4, tol=1e-6, max_seconds=1e-6)

    def test_a_solve_that_converges_says_nothing(self):
        x, y, a, b = clouds(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = transport(x, y, a, b, eps=0.01, tol=1e-3)
        assert "linear cost" in repr(found) and found.n_passes > 1

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"x": torch.ones(9, 7), "y": torch.ones(9, 7)}, "dense solver"),
            ({"x": torch.full((9, 2), torch.nan)}, "x contains NaN"),
            ({"eps": 0.0}, "eps"),
            ({"tol": -1.0}, "tol"),
            ({"tile": 24}, "tile"),
            ({"max_iterations": 0}, "max_iterations"),
            ({"max_seconds": 0.0}, "max_seconds"),
            ({"a": torch.full((9,), 0.5)}, "mass"),
        ],
        ids=lambda value: value if isinstance(value, str) else " ".join(value),
    )
    def test_bad_arguments_are_named(self, change, match):
        arguments = {"x": torch.rand(9, 2), "y": torch.rand(9, 2), "eps": 0.1, "debias": True} | change
        with pytest.raises(ValueError, match=match):
            transport(arguments.pop("x"), arguments.pop("y"), **arguments)
