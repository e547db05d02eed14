"""FlashSinkhorn2's plan over kept pairs against the dense plan of the same potentials, float64 from the definition."""

from __future__ import annotations

import pytest
import torch
from dense_reference import cost_matrix, kl

from solvers.flash_sinkhorn.plan.averages import Motion
from solvers.flash_sinkhorn2.cascade import levels
from solvers.flash_sinkhorn2.plan.kept import Kept
from solvers.flash_sinkhorn2.plan.operators import KeptPlan
from solvers.flash_sinkhorn2.solver import solved

SCALE, TOL = 0.7, 1e-3
EPS = {1: 1e-4, 2: 1e-3, 3: 4e-3}
FLOAT32_SUMS = 2.0**-20  # relative: rows' sums over a tile are float32, of up to 2^4 roundings of 2^-24


def uniform(n, d, seed):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(n, seed, mass):
    w = uniform(n, 1, seed)[:, 0] + 0.1
    w[::7] = 0.0
    return mass * w / w.sum()


class Case:
    """A problem of which a part of the pairs is kept; plan and kept_plan [n, m]: of all pairs, and of those."""

    def __init__(self, d, dtype=torch.float64, offset=0.0, mass=1.0, stretch=1.0):
        n, m = 700, 610
        x, y = stretch * uniform(n, d, 0) + offset, stretch * uniform(m, d, 1) ** 1.5 + offset
        self.x, self.y = x.to(dtype), y.to(dtype)
        self.a, self.b, self.eps = weights(n, 2, mass), weights(m, 3, mass), stretch**2 * EPS[d]
        options = {"eps": self.eps, "cost_scale": SCALE}
        found = solved(self.x, self.y, self.a, self.b, tol=TOL, tile=8, **options)
        self.result = found.result
        kept = Kept.of(found.passes, found.u, found.v, found.rounding)
        self.operator = KeptPlan(self.x, self.y, self.a, self.b, kept, **options)
        self.cost = cost_matrix(self.x, self.y, SCALE)
        f, g = self.result.f, self.result.g
        self.plan = self.a[:, None] * self.b * torch.exp((f[:, None] + g - self.cost) / self.eps)
        self.kept_plan = torch.where(self._in_mask(kept), self.plan, 0.0)
        self.live_x, self.live_y = self.a > 0, self.b > 0

    def _in_mask(self, kept):
        pairs = torch.zeros(kept.x.tree.tiles, kept.y.tree.tiles, dtype=torch.bool)
        pairs[kept.mask.row_of_entries(), kept.mask.cols.long()] = True
        of_x, of_y = (torch.empty_like(c.tree.order) for c in (kept.x, kept.y))
        for tiles, cloud in ((of_x, kept.x), (of_y, kept.y)):
            tiles[cloud.tree.order] = torch.arange(cloud.tree.n) // cloud.tree.tile
        return pairs[of_x][:, of_y]


@pytest.fixture(autouse=True)
def small_clouds_are_screened_too(monkeypatch):
    monkeypatch.setattr(levels, "SMALL", 200)


@pytest.fixture(scope="module", params=[1, 2, 3])
def case(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "SMALL", 200)
        return Case(request.param, mass=1.7)


class TestOperator:
    def test_sums_are_those_of_the_kept_pairs(self, case):
        assert 0.02 < (case.kept_plan > 0).sum() / (case.plan > 0).sum() < 0.7
        torch.testing.assert_close(case.operator.row_sums(), case.kept_plan.sum(1), rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(case.operator.col_sums(), case.kept_plan.sum(0), rtol=1e-9, atol=1e-15)

    def test_products_are_those_of_the_kept_pairs(self, case):
        v, u = uniform(610, 5, 4), uniform(700, 5, 5)
        torch.testing.assert_close(case.operator.apply(v), case.kept_plan @ v, rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(case.operator.apply(v[:, 0]), case.kept_plan @ v[:, 0], rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(case.operator.apply_transpose(u), case.kept_plan.T @ u, rtol=1e-9, atol=1e-15)

    def test_what_is_left_out_is_bounded(self, case):
        left_out = case.plan - case.kept_plan
        assert left_out.sum() > 0
        assert (left_out.sum(1) <= case.operator.row_omitted()).all()
        assert (left_out.sum(0) <= case.operator.col_omitted()).all()
        assert left_out.sum() <= case.operator.omitted <= TOL * 1.7

    def test_labels_are_carried_as_shares(self, case):
        labels = torch.nn.functional.one_hot(torch.arange(610) % 3).double()
        shares = case.operator.means(labels)
        torch.testing.assert_close(shares[case.live_x].sum(1), torch.ones(int(case.live_x.sum()), dtype=torch.float64))
        expected = (case.kept_plan @ labels) / case.kept_plan.sum(1, keepdim=True)
        torch.testing.assert_close(shares[case.live_x], expected[case.live_x], rtol=1e-9, atol=1e-12)

    def test_displacements_are_of_the_barycentres(self, case):
        for transpose, plan, points, others, live in (
            (False, case.kept_plan, case.x, case.y, case.live_x),
            (True, case.kept_plan.T, case.y, case.x, case.live_y),
        ):
            expected = points - (plan @ others) / plan.sum(1, keepdim=True)
            found = case.operator.displacement(transpose=transpose)
            torch.testing.assert_close(found[live], expected[live], rtol=0, atol=FLOAT32_SUMS)
            sums, barycentres = case.operator.barycentre(transpose=transpose)
            torch.testing.assert_close(barycentres, plan @ others, rtol=0, atol=FLOAT32_SUMS)
            torch.testing.assert_close(sums, plan.sum(1), rtol=1e-9, atol=1e-15)

    def test_change_of_cost_along_any_motion(self, case):
        d = case.x.shape[1]
        v, w = uniform(700, d, 6) - 0.5, uniform(610, d, 7) - 0.5
        between = case.x[:, None] - case.y
        for motion, direction in (
            (Motion(v, None), v[:, None]),
            (Motion(None, w), -w[None]),
            (Motion(v, w), v[:, None] - w),
        ):
            change = 2 * SCALE * (between * direction).sum(-1)
            expected = (case.kept_plan * change).sum(1) / case.kept_plan.sum(1)
            found = case.operator.averages.cost_change_means(motion)
            torch.testing.assert_close(found[case.live_x], expected[case.live_x], rtol=0, atol=2 * d * FLOAT32_SUMS)

    @pytest.mark.parametrize("values", [torch.ones(3), torch.ones(610, dtype=torch.int64), torch.ones(610, 0)], ids=str)
    def test_bad_values_are_named(self, case, values):
        with pytest.raises(ValueError, match="v must"):
            case.operator.apply(values)


class TestCosts:
    def test_they_are_those_of_the_definition(self, case):
        costs = case.operator.costs(case.result.f, case.result.g)
        plan, product = case.kept_plan, case.a[:, None] * case.b
        linear = (plan * case.cost).sum()
        assert costs.linear == pytest.approx(linear.item(), abs=4 * FLOAT32_SUMS)
        assert costs.primal == pytest.approx((linear + case.eps * kl(plan, product)).item(), abs=1e-9)
        whole = case.plan.sum() - product.sum()
        dual = (case.a * case.result.f).sum() + (case.b * case.result.g).sum() - case.eps * whole
        assert dual - case.eps * costs.omitted <= costs.dual <= dual
        assert costs.omitted == case.operator.omitted

    def test_the_gap_is_at_most_what_marginals_miss_times_the_largest_cost(self, case):
        """<P 1 - a, f> + <P^T 1 - b, g>: a constant in f or g drops out, and neither varies by more than the cost."""
        costs = case.operator.costs(case.result.f, case.result.g)
        assert costs.gap == pytest.approx(costs.primal - costs.dual - case.eps * costs.omitted, abs=1e-12)
        assert abs(costs.gap) <= 1.7 * (case.result.residual + costs.omitted) * case.cost.max().item()


class TestDigits:
    def test_float32_at_an_offset(self):
        """Points as they are after the offset rounded them: 2^-14 of a unit is 2^-24 of 1000, and no more is lost."""
        case = Case(2, torch.float32, offset=1000.0)
        x, y = case.x.double(), case.y.double()
        expected = x - (case.kept_plan @ y) / case.kept_plan.sum(1, keepdim=True)
        found = case.operator.displacement()
        # Exponents are off by a few 1e-5, and so are the shares of points within the blur, some spacings.
        blur = (case.eps / SCALE) ** 0.5
        torch.testing.assert_close(found.double()[case.live_x], expected[case.live_x], rtol=1e-4, atol=1e-4 * blur)

    def test_float32_of_a_thousand_blurs(self):
        """float32 sums of coordinates would be off by 2^-24 of the extent, 6e-5 blurs, times their roundings."""
        x = torch.linspace(0, 1000, 1500)[:, None].float()
        y = x + 0.25
        found = solved(x, y, eps=1.0, tol=1e-3, tile=8)
        kept = Kept.of(found.passes, found.u, found.v, found.rounding)
        plan = KeptPlan(x, y, None, None, kept, eps=1.0, cost_scale=1.0)
        f, g = found.result.f, found.result.g
        dense = torch.softmax((f[:, None] + g - cost_matrix(x, y)), 1)
        expected = x.double() - dense @ y.double()
        assert (plan.displacement().double() - expected).abs().max() < 3e-5


def test_points_without_weight_change_nothing():
    """Rows without weight have no share of the plan, wherever they are."""
    case = Case(2)
    assert not case.operator.row_sums()[~case.live_x].any()
    assert not case.operator.apply(torch.ones(610)).double()[~case.live_x].any()
    assert not case.operator.apply_transpose(torch.ones(700)).double()[~case.live_y].any()
