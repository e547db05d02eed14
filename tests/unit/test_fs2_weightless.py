"""Points without weight in FlashSinkhorn2: their potentials, weights' gradients and means are those of the soft-min
extension over all pairs, in float64 from its definition, wherever they are."""

from __future__ import annotations

import math

import pytest
import torch
from dense_reference import cost_matrix, solve_dense

from solvers.flash_sinkhorn.plan.averages import Motion
from solvers.flash_sinkhorn2 import solve, transport
from solvers.flash_sinkhorn2.cascade import levels
from solvers.flash_sinkhorn2.plan import self_transport
from solvers.flash_sinkhorn2.plan.weightless import LEFT_OUT

SCALE, MASS, TOL = 0.7, 1.7, 1e-4
EPS = {1: 1e-4, 2: 1e-3, 3: 4e-3}
DISTANCES = (0.0, 10.0, 1e3, 1e5)  # in blurs, from all others
# float64 rounds the largest cost over eps, 1e10, and the sums that form it
ROUNDING = 1e10 * 2.0**-50
DIGITS = {torch.float32: 2.0**-24, torch.float64: 2.0**-50}


@pytest.fixture(autouse=True)
def small_clouds_are_screened_too(monkeypatch):
    monkeypatch.setattr(levels, "SMALL", 200)
    monkeypatch.setattr(self_transport, "SMALL", 200)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def uniform(n, d, seed):
    return torch.rand(n, d, generator=generator(seed), dtype=torch.float64)


def spread(points, weight, blur, seed):
    """Points without weight at each of the distances from the unit box in turn, in random directions."""
    index = (weight == 0).nonzero()[:, 0]
    away = torch.tensor(DISTANCES, dtype=torch.float64).repeat(len(index))[: len(index), None] * blur
    direction = torch.randn(len(index), points.shape[1], generator=generator(seed), dtype=torch.float64)
    inside = points[index]
    outside = 0.5 + direction / direction.norm(dim=1, keepdim=True) * (away + 1.0)
    return points.index_put((index,), torch.where(away > 0, outside, inside))


class Case:
    """Every third point, or all but one of x or of y, has no weight."""

    def __init__(self, d, dtype=torch.float64, alone=None, device="cpu", n=430, m=390):
        self.eps = EPS[d]
        self.a, self.b = uniform(n, 1, 2)[:, 0] + 0.1, uniform(m, 1, 3)[:, 0] + 0.1
        for name, weight in (("x", self.a), ("y", self.b)):
            zero = torch.arange(len(weight)) % 3 == 0 if alone != name else torch.arange(len(weight)) != 17
            weight[zero] = 0.0
        blur = math.sqrt(self.eps / SCALE)
        self.x = spread(uniform(n, d, 0), self.a, blur, 4).to(device, dtype)
        self.y = spread(uniform(m, d, 1) ** 1.5, self.b, blur, 5).to(device, dtype)
        self.a, self.b = (MASS * w.to(device) / w.sum().item() for w in (self.a, self.b))

    def solved(self, **options):
        return transport(*self.leaves(), eps=self.eps, cost_scale=SCALE, tol=TOL, **options)

    def leaves(self):
        return [tensor.clone().requires_grad_() for tensor in (self.x, self.y, self.a, self.b)]

    def sides(self, found):
        """Points, weight, potential, opposite points, weight, potential, and whether the latter are rows."""
        yield self.x, self.a, found.f, self.y, self.b, found.g, False
        yield self.y, self.b, found.g, self.x, self.a, found.f, True


def extension(points, others, weight, potential, eps):
    """f [r] = -eps log sum_j b_j exp((g_j - C_ij) / eps) and the softmax [r, m]; others without weight have none."""
    live = weight > 0
    exponents = (potential[live] - cost_matrix(points, others[live], SCALE)) / eps + weight[live].log()
    rows = torch.zeros(len(points), len(others), dtype=torch.float64, device=points.device)
    rows[:, live] = torch.softmax(exponents, 1)
    return -eps * torch.logsumexp(exponents, 1), rows


CASES = [(1, torch.float64, None), (2, torch.float64, None), (3, torch.float64, None), (3, torch.float32, None)]
CASES += [(2, torch.float64, "x"), (2, torch.float64, "y"), (3, torch.float32, "x"), (1, torch.float32, "y")]


@pytest.fixture(params=CASES, ids=str)
def case(request, device):
    return Case(*request.param, device)


class TestPotentials:
    def test_they_are_the_extension_of_the_opposite_ones(self, case):
        found = case.solved()
        assert found.converged
        for points, weight, f, others, opposite, g, _ in case.sides(found):
            expected, _ = extension(points[weight == 0], others, opposite, g, case.eps)
            error = (f[weight == 0] - expected).abs() / case.eps
            assert error.max() <= LEFT_OUT + ROUNDING

    def test_self_potentials_too(self, case):
        found = case.solved(debias=True)
        for points, weight, potential in ((case.x, case.a, found.f_self), (case.y, case.b, found.g_self)):
            expected, _ = extension(points[weight == 0], points, weight, potential, case.eps)
            # off by a step of the self problem's iteration: its residual, in any one point more than on average
            assert ((potential[weight == 0] - expected).abs() / case.eps).max() <= LEFT_OUT + ROUNDING

    @pytest.mark.parametrize("d", [1, 2, 3])
    def test_weights_gradients_are_those_of_the_solution(self, d):
        case = Case(d, n=130, m=121)
        case.eps *= 10
        tensors = case.leaves()
        transport(*tensors, eps=case.eps, cost_scale=SCALE, tol=TOL).ot.backward()
        live_x, live_y = case.a > 0, case.b > 0
        exact = solve_dense(case.x[live_x], case.y[live_y], case.a[live_x], case.b[live_y], eps=case.eps,
                            cost_scale=SCALE)  # fmt: skip
        for points, weight, others, opposite, g, gradient in (
            (case.x, case.a, case.y[live_y], case.b[live_y], exact.g, tensors[2].grad),
            (case.y, case.b, case.x[live_x], case.a[live_x], exact.f, tensors[3].grad),
        ):
            expected, _ = extension(points, others, opposite, g, case.eps)
            off = gradient - expected
            off -= (off * weight).sum() / MASS  # a constant is no matter between gradients of one side
            # the residual is the mean change of f / eps at one more update: slow modes and light points need more
            assert off.abs().max() <= 100 * TOL * case.eps

    def test_points_beyond_float64_s_exponents(self):
        """Costs of 1e12 eps and more: as exact, relatively, as float64 holds them."""
        case = Case(2)
        zero = (case.a == 0).nonzero()[:, 0]
        for index, far in zip(zero, (1e5, 1e10, 1e30, 1e100), strict=False):
            case.x[index] = torch.tensor([far, -0.3 * far], dtype=torch.float64)
        found = case.solved()
        assert found.converged
        expected, _ = extension(case.x[zero], case.y, case.b, found.g, case.eps)
        torch.testing.assert_close(found.f[zero][:4], expected[:4], rtol=2.0**-50, atol=0)
        assert found.plan.means(case.y)[zero].isfinite().all()

    def test_a_plain_solve_has_them_too(self):
        case = Case(2)
        found = solve(case.x, case.y, case.a, case.b, eps=case.eps, cost_scale=SCALE, tol=TOL)
        expected, _ = extension(case.x[case.a == 0], case.y, case.b, found.g, case.eps)
        assert (found.f[case.a == 0] - expected).abs().max() <= (LEFT_OUT + ROUNDING) * case.eps


class TestPlan:
    def test_means_and_displacements(self, case):
        found = case.solved()
        for points, weight, _, others, opposite, g, transpose in case.sides(found):
            zero, d = weight == 0, points.shape[1]
            _, rows = extension(points[zero], others, opposite, g, case.eps)
            values = torch.cat([others.double(), uniform(len(others), 2, 6).to(others.device)], 1).to(points.dtype)
            means = found.plan.means(values, transpose=transpose)[zero].double()
            # left-out pairs move the mean by their share of the distance to it; the box and values are of size one
            allowed = 2 * d * LEFT_OUT + DIGITS[points.dtype]
            largest = torch.where((opposite > 0)[:, None], values.double().abs(), 0.0).amax()
            assert (means - rows @ values.double()).abs().max() <= (allowed + ROUNDING) * largest
            moved = found.plan.displacement(transpose=transpose)[zero].double()
            expected = points[zero].double() - rows @ others.double()
            assert ((moved - expected).abs() / (1 + expected.abs())).max() <= allowed + ROUNDING
            _, barycentres = found.plan.barycentre(transpose=transpose)
            assert not barycentres[zero].any()

    def test_changes_of_cost(self, case):
        found, d = case.solved(), case.x.shape[1]
        v, w = (uniform(len(points), d, 6).to(points.device) - 0.5 for points in (case.x, case.y))
        zero = case.a == 0
        _, rows = extension(case.x[zero], case.y, case.b, found.g, case.eps)
        between = case.x[zero].double()[:, None] - case.y.double()
        for motion in (Motion(v, None), Motion(None, w), Motion(v, w)):
            direction = (0.0 if motion.v is None else v[zero][:, None]) - (0.0 if motion.w is None else w)
            change = 2 * SCALE * (between * direction).sum(-1)
            allowed = (4 * d * LEFT_OUT + ROUNDING) * (1 + between.abs().amax((1, 2)))
            found_change = found.plan.averages.cost_change_means(motion)[zero]
            assert ((found_change - (rows * change).sum(1)).abs() <= allowed).all()

    def test_second_derivatives_are_as_without_them(self):
        case, tol = Case(2), 1e-6
        case.x[(case.a == 0).nonzero()[0]] = 1e30
        live_x, live_y, options = case.a > 0, case.b > 0, {"eps": case.eps, "cost_scale": SCALE, "tol": tol}
        found = transport(case.x, case.y, case.a, case.b, **options)
        alone = transport(case.x[live_x], case.y[live_y], case.a[live_x], case.b[live_y], **options)
        v, w = uniform(len(case.x), 2, 6) - 0.5, uniform(len(case.y), 2, 7) - 0.5
        mine, other = found.plan.hvp(v, w, tol=1e-8), alone.plan.hvp(v[live_x], w[live_y], tol=1e-8)
        assert mine.converged and other.converged
        for own, alike, live in ((mine.h_x, other.h_x, live_x), (mine.h_y, other.h_y, live_y)):
            assert not own[~live].any()
            # both are off by tol over the least eigenvalue of the system, of order eps / extent^2
            assert (own[live] - alike).norm() <= 2 * tol / case.eps * alike.norm()
        assert mine.h_a.isfinite().all() and mine.h_b.isfinite().all()

    def test_all_else_is_as_without_them(self):
        """Gradients in points, sums and costs."""
        case = Case(2)
        tensors = case.leaves()
        found = transport(*tensors, eps=case.eps, cost_scale=SCALE, tol=TOL, debias=True)
        found.value.backward()
        live_x, live_y = case.a > 0, case.b > 0
        own = [t.detach()[live].requires_grad_() for t, live in zip(tensors, 2 * [live_x, live_y], strict=True)]
        alone = transport(*own, eps=case.eps, cost_scale=SCALE, tol=TOL, debias=True)
        alone.value.backward()
        # each is off by eps (residual^2 + omitted) in each of three problems
        assert found.value.item() == pytest.approx(alone.value.item(), abs=6 * MASS * case.eps * TOL)
        for mine, other, live in zip(tensors[:2], own[:2], (live_x, live_y), strict=True):
            assert not mine.grad[~live].any()
            assert (mine.grad[live] - other.grad).norm() <= 10 * TOL * other.grad.norm()
        assert not found.plan.row_sums()[~live_x].any() and not found.plan.row_omitted()[~live_x].any()
