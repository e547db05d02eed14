"""Second derivatives over kept pairs: against the linear system written out in dense float64, of the kept pairs and of
all, and against the dense solver's at the same potentials."""

from __future__ import annotations

import pytest
import torch
from test_fs2_plan import SCALE, Case, uniform

from solvers.flash_sinkhorn import transport as dense_transport
from solvers.flash_sinkhorn.plan.averages import Motion
from solvers.flash_sinkhorn.plan.hvp import hvp as dense_hvp
from solvers.flash_sinkhorn2 import transport
from solvers.flash_sinkhorn2.cascade import levels
from solvers.flash_sinkhorn2.plan import self_transport
from solvers.flash_sinkhorn2.plan.at_potentials import plan_at

CG = 1e-9
FLOAT32_SUMS = 2.0**-20  # rows' sums over a tile are float32, of up to 2^4 roundings of 2^-24


@pytest.fixture(autouse=True)
def small_clouds_are_screened_too(monkeypatch):
    monkeypatch.setattr(levels, "SMALL", 200)
    monkeypatch.setattr(self_transport, "SMALL", 200)


@pytest.fixture(scope="module", params=[1, 2, 3])
def case(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "SMALL", 200)
        return Case(request.param, mass=1.7)


def directions(case, seed=8):
    """Motions of both clouds, and changes of weights that keep masses equal."""
    d = case.x.shape[1]
    v_x, v_y = uniform(700, d, seed) - 0.5, uniform(610, d, seed + 1) - 0.5
    v_a, v_b = case.a * uniform(700, 1, seed + 2)[:, 0], case.b * uniform(610, 1, seed + 3)[:, 0]
    return v_x, v_y, v_a, v_b * (v_a.sum() / v_b.sum())


class Reference:
    """dP_ij = P_ij (df_i + dg_j - dC_ij) / eps + P_ij (da_i / a_i + db_j / b_j), whose sums are da and db times what P
    has of a and b; least squares, since a constant in df less dg is free. gap: the system's least eigenvalue but 0."""

    def __init__(self, case, plan, v_x, v_y, v_a, v_b):
        x, y, eps = case.x, case.y, case.eps
        live_x, live_y = case.a > 0, case.b > 0
        n = int(live_x.sum())
        P, a, b = plan[live_x][:, live_y], case.a[live_x], case.b[live_y]
        rows, cols = P.sum(1), P.sum(0)
        between = x[live_x][:, None] - y[live_y]
        dC = 2 * SCALE * (between * (v_x[live_x][:, None] - v_y[live_y])).sum(-1)
        da, db = (torch.zeros_like(w) if v is None else v for v, w in ((v_a, case.a), (v_b, case.b)))
        log_a, log_b = da[live_x] / a, db[live_y] / b
        system = torch.cat([torch.cat([rows.diag(), P], 1), torch.cat([P.T, cols.diag()], 1)])
        known = P * (dC / eps - log_a[:, None] - log_b)
        right = eps * torch.cat([known.sum(1) + rows * log_a, known.sum(0) + cols * log_b])
        found = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:, 0]
        self.df, self.dg = found[:n], found[n:]
        dP = P * (self.df[:, None] + self.dg) / eps - known
        moved = P[..., None] * (v_x[live_x][:, None] - v_y[live_y])
        change = 2 * SCALE * (dP[..., None] * between + moved)
        self.h_x, self.h_y = torch.zeros_like(x), torch.zeros_like(y)
        self.h_x[live_x], self.h_y[live_y] = change.sum(1), -change.sum(0)
        singular = torch.linalg.svdvals(P / (rows[:, None] * cols).sqrt())
        self.gap = (1 - singular[1] ** 2).item()


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


class TestProduct:
    @pytest.mark.parametrize("in_weights", [False, True])
    def test_it_is_that_of_the_kept_pairs(self, case, in_weights):
        v_x, v_y, v_a, v_b = directions(case)
        v_a, v_b = (v_a, v_b) if in_weights else (None, None)
        found = case.operator.hvp(v_x, v_y, v_a, v_b, tol=CG)
        exact = Reference(case, case.kept_plan, v_x, v_y, v_a, v_b)
        assert found.converged and found.residual <= CG
        # displacements are means over float32 sums, and the system multiplies what is off by 1 / gap
        allowed = (FLOAT32_SUMS + CG) / exact.gap
        assert relative(found.h_x, exact.h_x) <= allowed and relative(found.h_y, exact.h_y) <= allowed

    def test_against_all_pairs_it_is_off_by_what_was_left_out(self, case):
        v_x, v_y, v_a, v_b = directions(case)
        found = case.operator.hvp(v_x, v_y, v_a, v_b, tol=CG)
        exact = Reference(case, case.plan, v_x, v_y, v_a, v_b)
        # a row's means are off by the share left out, and so is the system's right-hand side
        allowed = case.operator.omitted / 1.7 / exact.gap
        assert relative(found.h_x, exact.h_x) <= allowed and relative(found.h_y, exact.h_y) <= allowed
        f, g = case.result.f, case.result.g
        dense = dense_hvp(case.x, case.y, case.a, case.b, f, g, v_x, v_y, v_a, v_b, eps=case.eps, cost_scale=SCALE,
                          tol=CG)  # fmt: skip
        assert relative(found.h_x, dense.h_x) <= 2 * allowed and relative(found.h_y, dense.h_y) <= 2 * allowed

    def test_moments_are_those_of_the_kept_pairs(self, case):
        d = case.x.shape[1]
        alpha, beta = uniform(700, 1, 1)[:, 0], uniform(610, 1, 2)[:, 0]
        v, w = uniform(700, d, 3) - 0.5, uniform(610, d, 4) - 0.5
        for motion in (Motion(v, w), Motion(None, w), Motion(v, None), Motion(None, None)):
            direction = (0.0 if motion.v is None else v[:, None]) - (0.0 if motion.w is None else w)
            between = case.x[:, None] - case.y
            q = alpha[:, None] + beta - 2 * SCALE * (between * direction).sum(-1)
            share = case.kept_plan / case.kept_plan.sum(1, keepdim=True)
            mean, moment = case.operator.averages.moments(alpha, beta, motion)
            centred = case.y - case.operator.averages.centre
            live = case.live_x
            torch.testing.assert_close(mean[live], (share * q).sum(1)[live], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(moment[live], ((share * q) @ centred)[live], rtol=1e-9, atol=1e-12)
            assert not mean[~live].any()

    def test_a_limit_is_told_with_the_true_residual(self, case):
        v_x, *_ = directions(case)
        found = case.operator.hvp(v_x, tol=1e-12, max_iterations=2)
        assert not found.converged and found.residual > 1e-12 and found.n_iterations == 2


def test_autograd_takes_them_over_kept_pairs():
    """Of the divergence, as the dense solver has them at tighter potentials."""
    products = []
    x, y = uniform(400, 2, 0), uniform(350, 2, 1) ** 1.5
    v = uniform(400, 2, 2) - 0.5
    for solve, tol in ((transport, 1e-6), (dense_transport, 1e-9)):
        points = x.clone().requires_grad_()
        value = solve(points, y, eps=0.01, debias=True, tol=tol).value
        (gradient,) = torch.autograd.grad(value, points, create_graph=True)
        products.append(torch.autograd.grad((gradient * v).sum(), points)[0])
    assert relative(*products) <= 1e-6 / 1e-2  # tol over the least eigenvalue, of order eps / extent^2


class TestAtPotentials:
    def test_pairs_are_chosen_for_them(self, case):
        f, g = case.result.f, case.result.g
        plan = plan_at(case.x, case.y, case.a, case.b, f, g, eps=case.eps, cost_scale=SCALE, tol=1e-3, tile=8)
        kept = len(plan.kept.mask.cols) / (plan.kept.x.tree.tiles * plan.kept.y.tree.tiles)
        assert kept < 0.7
        left_out = case.plan.sum(1) - plan.row_sums()
        assert left_out.min() > -1e-9 and (left_out <= plan.row_omitted() + 1e-9).all()
        v_x, v_y, *_ = directions(case)
        exact = Reference(case, case.plan, v_x, v_y, None, None)
        found = plan.hvp(v_x, v_y, tol=1e-6)
        # what is left out is chosen for the least eigenvalue, to be 1e-3 over it; conjugate gradients stop at 1e-6
        allowed = plan.omitted / 1.7 / exact.gap + 1e-6 / exact.gap
        assert found.converged and allowed <= 0.02
        assert relative(found.h_x, exact.h_x) <= allowed and relative(found.h_y, exact.h_y) <= allowed

    @pytest.mark.parametrize(
        ("f", "words"), [(torch.zeros(3), r"f must have shape \[5\]"), (torch.full((5,), torch.nan), "f contains NaN")]
    )
    def test_bad_potentials_are_named(self, f, words):
        x = uniform(5, 2, 0)
        with pytest.raises(ValueError, match=words):
            plan_at(x, x, None, None, f, torch.zeros(5), eps=0.1)
