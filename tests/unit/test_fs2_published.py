"""The published method: its screen, updates and sampled check against dense float64, and how often it goes back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fsbench.api import Clouds, Problem, Spec, ToResidual
from fsbench.metrics import score
from solvers.flash_sinkhorn2 import solve
from solvers.flash_sinkhorn2.geometry import from_tiles, tiled_clouds
from solvers.flash_sinkhorn2.published import check as check_module
from solvers.flash_sinkhorn2.published import solve_published
from solvers.flash_sinkhorn2.published.bench import FlashSinkhorn2Published
from solvers.flash_sinkhorn2.published.check import SampledCheck
from solvers.flash_sinkhorn2.published.coarse import Coarse
from solvers.flash_sinkhorn2.published.mask import OMITTED_SHARE, screened
from solvers.flash_sinkhorn2.published.updates import AVERAGED, WHOLE, updated
from solvers.flash_sinkhorn2.screen import every_pair

K = math.log2(math.e) / 4e-3
TOL = 1e-2
SUMS = 1e-5  # of logarithms of tile sums, which are float32: 16 terms with a rounding of 6e-8 each


def clouds(n=700, m=650, seed=0):
    """Points float64 and uneven weights, a fifth of them zero."""
    rng = np.random.default_rng(seed)
    made = []
    for size, shift in ((n, 0.0), (m, 0.1)):
        weight = rng.gamma(0.5, size=size) * (rng.random(size) > 0.2)
        made += [torch.as_tensor(rng.random((size, 3)) + shift), torch.as_tensor(weight / weight.sum())]
    return made[0], made[2], made[1], made[3]


def densities(x, y, u, v, k=K):
    """P_ij / (a_i b_j) of potentials in base 2."""
    return torch.exp2(u[:, None] + v - k * (x[:, None] - y).square().sum(-1))


@pytest.fixture(scope="module")
def tiled():
    """Tiled clouds with the potentials that exact row and column half-steps make, also in the order given."""
    x, y, a, b = clouds()
    of_x, of_y = tiled_clouds(x, y, a, b, tile=16)
    u, v = torch.zeros_like(of_x.weight), torch.zeros_like(of_y.weight)
    for share in (WHOLE, AVERAGED, AVERAGED):
        u, v, _ = updated(of_x, of_y, every_pair(of_x, of_y), u, v, K, share)
    return (x, y, a, b), (of_x, of_y), (u, v)


class TestScreen:
    def test_a_pair_left_out_holds_less_than_its_share_and_a_row_than_its_bound(self, tiled):
        _, (x, y), (u, v) = tiled
        mask = screened(x, y, u, v, K, tol=TOL)
        points = [c.centre.repeat_interleave(16, 0) + c.local for c in (x, y)]
        density = densities(*points, u, v)
        kept = torch.zeros(x.tree.tiles, y.tree.tiles, dtype=torch.bool)
        kept[mask.row_of_entries(), mask.cols.long()] = True
        assert 0.1 < kept.double().mean() < 0.9
        share = OMITTED_SHARE * TOL / max(kept.shape)
        by_rows = (density * y.weight).view(len(u), -1, 16).sum(2) * (x.weight > 0)[:, None]  # [N, tiles]
        by_cols = (density * x.weight[:, None]).view(-1, 16, len(v)).sum(1) * (y.weight > 0)  # [tiles, M]
        left_out = ~kept.repeat_interleave(16, 0)
        assert by_rows[left_out].max() <= share
        assert by_cols[~kept.repeat_interleave(16, 1)].max() <= share
        missed = (by_rows * left_out).sum(1).view(-1, 16).amax(1)
        assert (missed <= mask.row_bound).all() and (mask.row_bound <= OMITTED_SHARE * TOL * (1 + 1e-12)).all()


class TestUpdates:
    @pytest.mark.parametrize("share", [AVERAGED, WHOLE])
    def test_both_sides_read_the_same_potentials(self, tiled, share):
        (x, y, a, b), (of_x, of_y), (u, v) = tiled
        new_u, new_v, off = updated(of_x, of_y, every_pair(of_x, of_y), u, v, K, share)
        own_u, own_v = from_tiles(of_x, u), from_tiles(of_y, v)
        density = densities(x, y, own_u, own_v)
        rows, cols = (density @ b).log2(), (a @ density).log2()
        assert torch.allclose(from_tiles(of_x, new_u), own_u - share * rows, rtol=0, atol=SUMS)
        assert torch.allclose(from_tiles(of_y, new_v), own_v - share * cols, rtol=0, atol=SUMS)
        assert float(off) == pytest.approx(math.log(2) * float(max(a @ rows.abs(), b @ cols.abs())), abs=SUMS)


def residuals(x, y, a, b, u, v, k=K):
    density = densities(x, y, u, v, k)
    return a @ (density @ b - 1).abs(), b @ (a @ density - 1).abs()


class TestCheck:
    def test_of_few_points_is_exact(self, tiled):
        (x, y, a, b), (of_x, of_y), (u, v) = tiled
        u, v = from_tiles(of_x, u), from_tiles(of_y, v)
        true = float(max(residuals(x, y, a, b, u, v)))
        for tol in (1.01 * true, 0.99 * true):
            verdict = SampledCheck(x, y, a, b, K, tol=tol)(u, v)
            assert verdict.residual == verdict.score == pytest.approx(true, rel=1e-9)
            assert verdict.accepted == (tol > true)

    def test_of_many_is_within_its_standard_errors(self, monkeypatch):
        """Three of them a side: the seed is fixed, and chance of a miss was 5e-3 when it was chosen."""
        monkeypatch.setattr(check_module, "FIRST", 200)
        monkeypatch.setattr(check_module, "SECOND", 1600)
        x, y, a, b = clouds(2600, 2100)
        rng = torch.Generator().manual_seed(1)
        u, v = (0.3 * torch.randn(len(w), generator=rng, dtype=torch.float64) for w in (a, b))
        k = 0.01
        check = SampledCheck(x, y, a, b, k, tol=1e-2)
        true = float(max(residuals(x, y, a, b, u, v, k)))
        verdict = check(u, v)
        assert not verdict.accepted and abs(verdict.residual - true) < verdict.score - verdict.residual
        assert check.pairs_done <= 200 * (len(x) + len(y))  # far from tol, a small sample is enough
        undecided = SampledCheck(x, y, a, b, k, tol=true)
        undecided(u, v)
        assert undecided.pairs_done > 1600 * min(len(x), len(y)) / 2

    def test_points_without_weight_are_not_drawn(self):
        x, y, a, b = clouds(3000, 3000)
        u, v = torch.zeros_like(a), torch.zeros_like(b)
        poisoned = torch.where(a > 0, 0.0, torch.nan)
        verdicts = [SampledCheck(x, y, a, b, K, tol=TOL)(potential, v) for potential in (u, poisoned)]
        assert verdicts[0] == verdicts[1] and math.isfinite(verdicts[0].score)

    def test_what_is_not_finite_is_not_accepted(self, tiled):
        (x, y, a, b), _, _ = tiled
        verdict = SampledCheck(x, y, a, b, K, tol=TOL)(torch.full_like(a, 1e4), torch.zeros_like(b))
        assert not verdict.accepted and verdict.score == math.inf


class TestCoarse:
    def test_cells_are_solved_at_eps_and_lifted(self):
        x, y, a, b = clouds(5000, 4000)
        of_x, of_y = tiled_clouds(x, y, a, b, tile=16)
        k = math.log2(math.e) / 0.05
        coarse = Coarse(of_x, of_y, k, most=10_000)
        assert len(coarse.x.weight) < len(x) / 32
        coarse.anneal()
        coarse.settle(1e-6)
        points, *cells = (c.centre.repeat_interleave(16, 0) + c.local for c in (of_x, coarse.x, coarse.y))
        assert max(residuals(*cells, coarse.x.weight, coarse.y.weight, coarse.u, coarse.v, k)) < SUMS
        density = densities(points, cells[1], coarse.lifted(of_x, of_y)[0], coarse.v, k) @ coarse.y.weight
        assert torch.allclose(density, torch.ones_like(density), rtol=0, atol=SUMS)


def judged(x, y, *, eps, **options):
    found = solve_published(x, y, eps=eps, tol=TOL, **options)
    a, b = (np.full(len(points), 1 / len(points)) for points in (x, y))
    given = Clouds(x.double().numpy(), y.double().numpy(), a, b)
    return found, score(given, found.f.numpy(), found.g.numpy(), eps=eps).residual_l1


class TestSolve:
    @pytest.mark.parametrize(
        ("eps", "returns", "stages"), [(1.0, 0, {"lift"}), (0.1, 2, {"averaged", "preview"})], ids=["wide", "narrow"]
    )
    def test_goes_back_to_the_cells_until_a_check_accepts_or_they_stall(self, eps, returns, stages):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.rand(2500, 3, generator=generator), torch.rand(2400, 3, generator=generator) ** 2
        found, residual = judged(x, y, eps=eps)
        assert found.converged and residual <= TOL  # the check allows for three standard errors
        assert found.coarse_returns == returns and found.trace[-1].stage in stages
        assert (found.n_iterations == 0) == (returns == 0) == (found.n_screens == 0)
        assert sum(trial.stage == "lift" for trial in found.trace) == returns + 1
        assert found.coarse_updates > 64 * returns

    def test_small_clouds_are_their_own_cells(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.rand(90, 2, generator=generator), torch.rand(71, 2, generator=generator)
        found, residual = judged(x, y, eps=0.05)
        assert found.converged and residual <= TOL + 1e-5
        assert found.n_iterations >= found.coarse_updates > 0

    def test_limits_are_kept_and_the_best_pair_is_returned(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.rand(3000, 2, generator=generator), torch.rand(3000, 2, generator=generator) ** 4
        found, residual = judged(x, y, eps=1e-4, max_iterations=3)
        assert not found.converged and found.n_iterations == 3
        # sampled in 1,024 points a side, of values about one
        assert residual == pytest.approx(min(trial.residual for trial in found.trace), abs=0.1)
        assert found.trace[-1].residual == found.residual
        found, _ = judged(x, y, eps=1e-4, max_seconds=1e-3)
        assert not found.converged and found.n_iterations == 0

    @pytest.mark.parametrize(
        ("change", "match"),
        [({"eps": 0.0}, "eps"), ({"tile": 24}, "tile"), ({"max_iterations": 0}, "max_iterations"), ({"tol": 0}, "tol"),
         ({"x": torch.ones(9, 7), "y": torch.ones(9, 7)}, "dense solver")],
        ids=lambda value: value if isinstance(value, str) else " ".join(value),
    )  # fmt: skip
    def test_bad_arguments_are_named(self, change, match):
        arguments = {"x": torch.rand(9, 2), "y": torch.rand(9, 2), "eps": 0.1} | change
        with pytest.raises(ValueError, match=match):
            solve_published(arguments.pop("x"), arguments.pop("y"), **arguments)

    def test_the_harness_is_told_how_often_it_went_back(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.rand(2500, 3, generator=generator), torch.rand(2400, 3, generator=generator)
        a, b = (torch.full((len(points),), 1 / len(points)) for points in (x, y))
        spec = Spec(2500, 2400, 3, 0.02, 1.0, "float32", "cpu")
        solution = FlashSinkhorn2Published().solve(Problem(x, y, a, b, spec), ToResidual(TOL, max_iterations=200))
        assert set(solution.stats) == {
            "kept_pairs_per_point", "screens", "coarse_returns", "coarse_updates", "sampled_residual"
        }  # fmt: skip
        assert solution.converged and solution.stats["coarse_returns"] in (0, 1, 2)
        assert solution.stats["sampled_residual"] == solution.trace[-1].residual <= TOL


def test_masks_need_not_be_thinned():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(3000, 3, generator=generator), torch.rand(3000, 3, generator=generator) ** 2
    found, thinned = (solve(x, y, eps=5e-3, tol=1e-3, lasting=False, thinning=thinning) for thinning in (False, True))
    assert found.converged and thinned.converged
    assert found.kept_pairs != thinned.kept_pairs and found.residual + found.omitted <= 1e-3
