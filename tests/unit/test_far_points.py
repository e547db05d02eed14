"""Points without weight, however far from all others: their potentials, weights' gradients and means are those of the
soft-min extension at their true position, in float64 from its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from solvers.flash_sinkhorn import Plan, Precision, SamplesLoss, Updates, barycentric_projection, hvp, solve, transport
from solvers.flash_sinkhorn.inputs import far
from solvers.flash_sinkhorn.inputs.batches import checked_batch
from solvers.flash_sinkhorn.iteration.batches import iterate_pairs, solved
from solvers.flash_sinkhorn.iteration.fixed import iterated
from solvers.flash_sinkhorn.iteration.loop import Method
from solvers.flash_sinkhorn.iteration.self_transport import self_iterated, solve_self
from solvers.flash_sinkhorn.plan.averages import Motion

SCALE, MASS, SPANS = 0.7, 1.7, (0.8, 10.0, 1e3, 1e5, 1e8, 1e30)
EPS = {1: 0.05, 2: 0.1, 3: 0.3, 7: 1.0}
RELAXED = [{}, {"rho": 0.5}, {"rho_x": 0.5}, {"rho_x": 0.4, "rho_y": 2.0}]
DISTANT = 50.0  # the largest cost of a point that is ten spans away; that of one within a span is below 20
# Of the cost: points within a span are summed in the precision of the sweeps, a few ulps of float32's.
DIGITS = {torch.float32: 2.0**-21, torch.float64: 2.0**-48}


@pytest.fixture(params=[1 << 22, 100], autouse=True, ids=["one block", "many"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(far, "PAIRS_AT_ONCE", request.param)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def cloud(n, d, seed):
    return torch.rand(n, d, generator=generator(seed), dtype=torch.float64) + 3.0


def weighted(n, d, seed, alone=False):
    """Points and weights of MASS; those of every third point, or of all but one, are none, at each of SPANS in turn."""
    points, weight = cloud(n, d, seed), torch.rand(n, generator=generator(seed + 50), dtype=torch.float64) + 0.1
    index = torch.arange(n)
    zero = index[(index != 17) if alone else (index % 3 == 0)]
    direction = torch.randn(len(zero), d, generator=generator(seed + 99), dtype=torch.float64)
    away = torch.tensor(SPANS, dtype=torch.float64).repeat(n)[: len(zero), None]
    points[zero] = 3.5 + away * direction / direction.norm(dim=1, keepdim=True)
    weight[zero] = 0.0
    return points, weight * (MASS / weight.sum())


class Case:
    def __init__(self, d, dtype, device, seed=0, alone=False, n=80, m=71):
        self.eps = EPS[d]
        (x, self.a), (y, self.b) = weighted(n, d, seed, alone), weighted(m, d, seed + 1)
        self.x, self.y = x.to(dtype), y.to(dtype)
        self.tensors = tuple(v.to(device) for v in (self.x, self.y, self.a, self.b))
        self.options = {"eps": self.eps, "cost_scale": SCALE}
        self.digits = DIGITS[dtype if device == "cpu" else torch.float32]

    def sides(self, f, g):
        """Points, weight, potential, opposite points, weight, potential; and whether the latter are rows."""
        f, g = f.detach().cpu(), g.detach().cpu()
        yield self.x, self.a, f, self.y, self.b, g, False
        yield self.y, self.b, g, self.x, self.a, f, True


def extension(points, others, weight, potential, eps):
    """f [n] = -eps log sum_j b_j exp((g_j - C_ij) / eps), C [n], the largest, and softmax [n, m].

    C_ij = C_i0 + cost_scale (y_j - y_0).(y_j + y_0 - 2 x_i), which loses no digit of the difference, however large C.
    """
    live, rows = weight > 0, torch.zeros(len(points), len(others), dtype=torch.float64)
    x, y = points.double(), others[live].double()
    first = SCALE * (x - y[0]).square().sum(1)
    excess = SCALE * ((y - y[0]) * (y + y[0] - 2.0 * x[:, None])).sum(2)
    exponents = (potential[live] - excess) / eps + weight[live].log()
    rows[:, live] = torch.softmax(exponents, 1)
    return first - eps * torch.logsumexp(exponents, 1), (first[:, None] + excess).amax(1), rows


def check_potentials(case, f, g, relaxed=None, *, near=True):
    """Of far points, and near: of rows at any distance. Nearer columns are a half-step older than the rows, or the
    rows than the columns after a fixed number of iterations: off by the residual."""
    rho = relaxed or {}
    for points, weight, own, others, opposite, potential, transpose in case.sides(f, g):
        side = rho.get("rho", rho.get("rho_y" if transpose else "rho_x"))
        damping = 1.0 if side is None else side / (side + case.eps)
        expected, cost, _ = extension(points, others, opposite, potential, case.eps)
        zero = weight == 0
        off, cost = (own - damping * expected).abs()[zero], cost[zero]
        far = cost > DISTANT
        assert far.sum() >= 12 and (off[far] <= 1e-6 * case.eps + DIGITS[torch.float64] * cost[far]).all()
        assert transpose or not near or (off <= 1e-6 * case.eps + case.digits * cost).all()


KINDS = [(1, torch.float64), (3, torch.float32), (7, torch.float64), (7, torch.float32)]


@pytest.fixture(params=KINDS, ids=str)
def case(request, device):
    return Case(*request.param, device)


class TestPotentials:
    @pytest.mark.parametrize("how", [{"tol": 1e-5}, {"n_iterations": 30}], ids=str)
    @pytest.mark.parametrize("relaxed", RELAXED, ids=str)
    def test_of_a_solve(self, case, relaxed, how):
        found = solve(*case.tensors, **case.options, **how, **relaxed)
        check_potentials(case, found.f, found.g, relaxed, near="tol" in how)

    def test_of_all_but_one(self, device):
        case = Case(3, torch.float32, device, alone=True)
        found = solve(*case.tensors, **case.options, tol=1e-5)
        check_potentials(case, found.f, found.g)

    @pytest.mark.parametrize("rho", [None, 0.5])
    @pytest.mark.parametrize("how", [{"tol": 1e-5}, {"n_iterations": 40}], ids=str)
    def test_of_a_cloud_with_itself(self, case, rho, how):
        x, _, a, _ = case.tensors
        found = solve_self(x, a, **case.options, rho=rho, **how)
        case.y, case.b = case.x, case.a
        check_potentials(case, found.update, found.f, {} if rho is None else {"rho": rho})

    @pytest.mark.parametrize("relaxed", RELAXED[::3], ids=str)
    def test_of_batches(self, device, relaxed):
        """Problems that differ in the number of such points, one without any."""
        cases = [Case(7, torch.float32, device, seed) for seed in (0, 5, 9)]
        cases[1].x[cases[1].a == 0] = cloud(27, 7, 3).float()
        cases[2].x[:18:3] = cloud(6, 7, 4).float()
        x, y, a, b = (torch.stack([getattr(each, name) for each in cases]).to(device) for name in "xyab")
        batch = checked_batch(x, y, a, b, eps=EPS[7], cost_scale=SCALE, balanced=not relaxed)
        assert (
            batch.far_x.real.sum(1).tolist()[1] == 0 < batch.far_x.real.sum(1).tolist()[2] < batch.far_y.real.shape[1]
        )
        method = Method(SCALE, relaxed.get("rho_x"), relaxed.get("rho_y"), Updates.ALTERNATING, acceleration=True)
        tol = np.full(3, 1e-5)
        exact = Precision.EXACT
        found = solved(batch, lambda inputs, at: iterate_pairs(inputs, method, exact, EPS[7], tol[at], 500), EPS[7])
        fixed = iterated(batch, (EPS[7],) * 60, method, exact)
        for k, each in enumerate(cases):
            for f, g in ((found.f[k], found.g[k]), (fixed[0][k], fixed[1][k])):
                for points, weight, own, others, opposite, potential, transpose in each.sides(f, g):
                    rho = relaxed.get("rho_y" if transpose else "rho_x")
                    damping = 1.0 if rho is None else rho / (rho + EPS[7])
                    expected, cost, _ = extension(points, others, opposite, potential, EPS[7])
                    distant = (weight == 0) & (cost > DISTANT)
                    off = (own - damping * expected).abs()[distant]
                    assert (off <= 1e-6 * EPS[7] + DIGITS[torch.float64] * cost[distant]).all()
        own, update = self_iterated(
            checked_batch(x, x, a, a, eps=EPS[7], cost_scale=SCALE), 30, EPS[7], SCALE, None, exact
        )
        for k, each in enumerate(cases):
            expected, cost, _ = extension(each.x, each.x, each.a, own[k].cpu(), EPS[7])
            distant = (each.a == 0) & (cost > DISTANT)
            off = (update[k].cpu() - expected).abs()[distant]
            assert (off <= 1e-6 * EPS[7] + DIGITS[torch.float64] * cost[distant]).all()


class TestWeightsGradients:
    def test_are_the_extension(self, case):
        x, y, a, b = case.tensors
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        found = transport(x, y, a, b, **case.options, tol=1e-5)
        found.ot.backward()
        for points, weight, _, others, opposite, potential, transpose in case.sides(found.f, found.g):
            gradient = (b if transpose else a).grad.cpu()
            expected, cost, _ = extension(points, others, opposite, potential, case.eps)
            off = gradient - expected
            off -= (off * weight).sum() / MASS  # a constant is no matter between gradients of one side
            distant = (weight == 0) & (cost > DISTANT)
            assert (
                distant.any()
                and (off[distant].abs() <= 1e-6 * case.eps + 2 * DIGITS[torch.float64] * cost[distant]).all()
            )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("reach", [None, 1.5])
    def test_of_batches_are_those_of_single_problems(self, device, reach, dtype):
        cases = [Case(3, dtype, device, seed) for seed in (0, 5)]
        x, y, a, b = (torch.stack([getattr(each, name) for each in cases]).to(device) for name in "xyab")
        tol = 1e-5 if "cuda" in device or dtype is torch.float32 else 1e-7
        loss = SamplesLoss(blur=0.5, reach=reach, debias=False, tol=tol)
        single = []
        for k in range(2):
            own = [v[k].clone().requires_grad_() for v in (a, x, b, y)]
            loss(*own).backward()
            single.append(own)
        together = [v.clone().requires_grad_() for v in (a, x, b, y)]
        loss(*together).sum().backward()
        for position, found in enumerate(together):
            expected = torch.stack([own[position].grad for own in single])
            assert found.grad.isfinite().all()
            # off by the residual times the distances between points, or by eps times it over a share of the mass, 1e-2
            torch.testing.assert_close(found.grad, expected, rtol=1e-5, atol=100 * tol)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_of_copies_are_there_and_values_are_as_without_such_points(self, device, dtype):
        """Near copies start from the potentials of the self problems."""
        case = Case(3, dtype, device)
        live, far_x = case.a > 0, case.x
        y = torch.where(live[:, None], far_x + 0.25, -far_x)
        clouds = [v.to(device) for v in (far_x, y, case.a, case.a)]
        near = [v[live.to(device)] for v in clouds]
        found, alone = (transport(*tensors, **case.options, debias=True, tol=1e-5) for tensors in (clouds, near))
        assert found.converged and found.n_passes == alone.n_passes
        assert found.value.item() == pytest.approx(alone.value.item(), rel=1e-5)
        together = [torch.stack([v, v]) for v in clouds]
        loss = SamplesLoss(blur=0.5, tol=1e-5)
        a = together[2].clone().requires_grad_()
        values = loss(a, together[0], together[3], together[1])
        values.sum().backward()
        expected = loss(near[2], near[0], near[3], near[1])
        torch.testing.assert_close(values, expected.expand(2), rtol=1e-5, atol=0)
        assert a.grad.isfinite().all()


class TestPlan:
    def test_means_and_displacements(self, case):
        found = solve(*case.tensors, **case.options, tol=1e-5)
        plan = Plan(*case.tensors, found.f, found.g, **case.options)
        mapped = barycentric_projection(*case.tensors, found.f, found.g, **case.options)
        for points, weight, _, others, opposite, potential, transpose in case.sides(found.f, found.g):
            _, cost, rows = extension(points, others, opposite, potential, case.eps)
            distant, d = (weight == 0) & (cost > DISTANT), points.shape[1]
            values = torch.cat([others.double() * (opposite > 0)[:, None], cloud(len(others), 2, 6)], 1).to(points)
            expected = rows @ values.double()
            ulp = torch.finfo(points.dtype if plan.inputs.x.device.type == "cpu" else torch.float32).eps
            means = plan.means(values.to(plan.inputs.x.device), transpose=transpose).double().cpu()
            # values are of size four; exponents of 1e8 spans over eps = 0.05 are of size 1e10, known to 1e-6
            allowed = 8 * ulp + 4e-6
            assert (means - expected)[distant].abs().max() <= allowed
            moved = plan.displacement(transpose=transpose).double().cpu()[distant]
            away = points[distant].double() - expected[distant][:, :d]
            assert ((moved - away).abs() <= allowed + 4 * ulp * away.abs()).all()
            assert not plan.sums(transpose=transpose)[distant.to(mapped.device)].any()
            if not transpose:
                assert (mapped.double().cpu() - expected[:, :d])[distant].abs().max() <= allowed

    def test_costs_and_second_derivatives_are_as_without_such_points(self, case):
        live_x, live_y = case.a > 0, case.b > 0
        near = [v.to(case.tensors[0].device) for v in (case.x[live_x], case.y[live_y], case.a[live_x], case.b[live_y])]
        found, alone = (transport(*clouds, **case.options, tol=1e-6) for clouds in (case.tensors, near))
        assert found.linear_cost == pytest.approx(alone.linear_cost, rel=1e-4)
        v = torch.randn(case.x.shape, generator=generator(3), dtype=torch.float64).to(near[0])
        mine = hvp(*case.tensors, found.f, found.g, v, **case.options, tol=1e-6)
        other = hvp(*near, alone.f, alone.g, v[live_x.to(v.device)], **case.options, tol=1e-6)
        assert mine.converged and mine.h_x.isfinite().all() and not mine.h_x[(~live_x).to(v.device)].any()
        torch.testing.assert_close(mine.h_x[live_x.to(v.device)], other.h_x, rtol=1e-3, atol=1e-4)

    def test_changes_of_cost(self, case):
        found = solve(*case.tensors, **case.options, tol=1e-5)
        plan = Plan(*case.tensors, found.f, found.g, **case.options)
        d, device = case.x.shape[1], case.tensors[0].device
        v, w = (cloud(len(points), d, 6).to(points) - 3.5 for points in (case.x, case.y))
        _, cost, rows = extension(case.x, case.y, case.b, found.g.cpu(), case.eps)
        distant = (case.a == 0) & (cost > DISTANT)
        between = case.x.double()[:, None] - case.y.double() * (case.b > 0)[:, None]
        for motion in ((v, None), (None, w), (v, w)):
            along = (0.0 if motion[0] is None else v.double()[:, None]) - (0.0 if motion[1] is None else w.double())
            expected = (rows * 2 * SCALE * (between * along).sum(-1)).sum(1)
            change = plan.averages.cost_change_means(Motion(*(u if u is None else u.to(device) for u in motion)))
            off = (change.double().cpu() - expected)[distant].abs()
            assert (off <= 4e-6 * between[distant].abs().amax((1, 2))).all()
