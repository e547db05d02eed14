"""The harness's own scoring against plain float64 and against values known on paper (R1-R9 of optimal transport)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from fsbench.api import Clouds
from fsbench.metrics import Score, score
from fsbench.problems.closed_forms import disjoint_masses, single_point, two_points
from fsbench.problems.gaussian import gaussian
from fsbench.problems.gaussian_1d import gaussian_1d
from fsbench.problems.translated import translated


def _cost(clouds: Clouds) -> np.ndarray:
    return ((clouds.x.astype(float)[:, None] - clouds.y.astype(float)[None]) ** 2).sum(-1)


def _solve(
    clouds: Clouds, eps: float, cost_scale: float = 1.0, *, sweeps: int = 20_000
) -> tuple[np.ndarray, np.ndarray]:
    """Log-domain Sinkhorn in float64, annealed from the largest cost, until f stands still."""
    cost = cost_scale * _cost(clouds)
    log_a, log_b = np.log(clouds.a), np.log(clouds.b)
    f, g = np.zeros(len(log_a)), np.zeros(len(log_b))
    temperature = max(float(cost.max()), eps)
    while True:
        for _ in range(sweeps if temperature == eps else 20):
            before = f
            f = -temperature * logsumexp((g - cost) / temperature + log_b, axis=1)
            g = -temperature * logsumexp((f[:, None] - cost) / temperature + log_a[:, None], axis=0)
            if np.abs(f - before).max() <= 1e-14 * max(1.0, np.abs(f).max()):
                break
        if temperature == eps:
            return f, g
        temperature = max(eps, temperature * 0.7)


def _plain(clouds: Clouds, f: np.ndarray, g: np.ndarray, eps: float, cost_scale: float = 1.0) -> Score:
    """The definitions, written with the whole plan in memory."""
    cost = cost_scale * _cost(clouds)
    product = clouds.a.astype(float)[:, None] * clouds.b.astype(float)[None]
    plan = product * np.exp((f[:, None] + g[None] - cost) / eps)
    row, col = plan.sum(1), plan.sum(0)
    kl = np.sum(np.where(plan > 0, plan * np.log(np.where(plan > 0, plan, 1) / product), 0) - plan + product)
    residuals = np.abs(row - clouds.a).sum(), np.abs(col - clouds.b).sum()
    return Score(
        *residuals,
        max(residuals),
        min(np.abs(np.log(row / clouds.a)).max(), np.abs(np.log(col / clouds.b)).max()),
        clouds.a @ f + clouds.b @ g - eps * (plan.sum() - product.sum()),
        (plan * cost).sum() + eps * kl,
        plan.sum(),
    )


def _assert_close(got: Score, want: Score, rel: float, atol: float = 0.0) -> None:
    for name in Score.__dataclass_fields__:
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=rel, abs=atol), name


@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 1), (63, 100, 3), (101, 37, 64), (1, 200, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_score_is_the_definition(n: int, m: int, d: int, dtype: str) -> None:
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=(n, d)).astype(dtype), rng.normal(size=(m, d)).astype(dtype)
    clouds = Clouds(x, y, rng.dirichlet(np.ones(n)).astype(dtype), rng.dirichlet(np.ones(m)).astype(dtype))
    f, g = rng.normal(size=n) + d, rng.normal(size=m) + d
    got = score(clouds, f, g, eps=0.7, cost_scale=0.5)
    _assert_close(got, _plain(clouds, f, g, 0.7, 0.5), rel=1e-10)


def test_many_blocks_are_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clouds = gaussian(n=97, m=41, d=3, eps=0.0, seed=1)
    f, g = _solve(clouds, 0.5)
    whole = score(clouds, f, g, eps=0.5)
    monkeypatch.setattr("fsbench.metrics._BLOCK_PAIRS", 200)  # four rows a block, the last one short
    _assert_close(score(clouds, f, g, eps=0.5), whole, rel=1e-12, atol=1e-14)


def _value(clouds: Clouds, eps: float) -> float:
    """OT_eps scored from solved potentials: primal and dual must agree, and both marginals hold."""
    got = score(clouds, *_solve(clouds, eps), eps=eps)
    assert got.residual_l1 < 1e-9 + 4 * 2**-52 * _cost(clouds).max() / eps  # what rounding an exponent of C / eps costs
    assert got.primal_value == pytest.approx(got.dual_value, rel=1e-7, abs=1e-12)
    return got.dual_value


CLOSED_FORMS: list[tuple[Any, dict[str, Any]]] = [
    (single_point, {"n": 1, "m": 1, "d": 18, "eps": 1e-6}),  # R1
    (single_point, {"n": 1, "m": 77, "d": 3, "eps": 0.3}),  # R2
    (single_point, {"n": 77, "m": 1, "d": 3, "eps": 10.0}),
    (two_points, {"n": 2, "m": 2, "d": 1, "eps": 0.5}),  # R6
    (two_points, {"n": 2, "m": 2, "d": 5, "eps": 0.05}),
    (gaussian_1d, {"n": 301, "m": 401, "d": 1, "eps": 0.5}),  # R8
    (disjoint_masses, {"n": 2, "m": 2, "d": 2, "eps": 2.0}),  # R9
]


@pytest.mark.parametrize(("family", "size"), CLOSED_FORMS)
def test_value_of_closed_forms(family: Any, size: dict[str, Any]) -> None:
    clouds = family(seed=3, **size)
    assert clouds.optimal_value is not None
    assert _value(clouds, size["eps"]) == pytest.approx(clouds.optimal_value, rel=1e-6)


def test_two_points_value_and_plan_cost() -> None:
    """N08: at eps 0.5 the value is 0.283110, and the plan's cost, value - eps KL, is 0.119203."""
    clouds = two_points(n=2, m=2, d=1, eps=0.5, seed=0)
    assert _value(clouds, 0.5) == pytest.approx(0.283110, abs=1e-6)
    half = score(clouds, *_solve(clouds, 0.25, 0.5), eps=0.25, cost_scale=0.5)
    assert half.dual_value == pytest.approx(0.141555, abs=1e-6)


@pytest.mark.parametrize("eps", [1.0, 5.0])
def test_translation_adds_its_squared_length(eps: float) -> None:
    """R3, the most telling one: it holds at every eps."""
    clouds = translated(n=40, m=40, d=3, eps=eps, seed=5, shift=0.7)
    own = Clouds(clouds.x, clouds.x, clouds.a, clouds.a)
    assert _value(clouds, eps) - _value(own, eps) == pytest.approx(0.49, rel=1e-6)


def test_scaling_the_points() -> None:
    """R5: OT_(s^2 eps)(sX, sY) = s^2 OT_eps(X, Y)."""
    c = gaussian(n=30, m=21, d=2, eps=0.0, seed=6)
    larger = Clouds(30 * c.x, 30 * c.y, c.a, c.b)
    assert _value(larger, 900 * 0.3) == pytest.approx(900 * _value(c, 0.3), rel=1e-6)


def test_separated_pairs_at_vanishing_eps() -> None:
    """R7: a permutation of equal points is worth its cost plus eps log n; here f / eps reaches 1e4 and more."""
    eps = 1e-5
    x = np.array([[0.0], [1.0]])
    clouds = Clouds(x, x + 0.25, np.full(2, 0.5), np.full(2, 0.5))
    f = np.full(2, 0.0625 + eps * np.log(2))
    got = score(clouds, f, np.zeros(2), eps=eps)
    assert f.max() / eps > 6e3
    assert got.dual_value == pytest.approx(0.0625 + eps * np.log(2), rel=1e-12)
    assert got.primal_value == pytest.approx(got.dual_value, rel=1e-12)
    assert got.residual_l1 < 1e-11  # exponents of 6e3 * 2^-52


def test_potentials_of_ten_thousand_eps_keep_six_digits() -> None:
    eps = 1e-4
    clouds = gaussian(n=50, m=64, d=1, eps=eps, seed=2)
    f, g = _solve(clouds, eps, sweeps=20)
    f, g = f + 1.0 + 1e-6 * np.sin(np.arange(50)), g - 1.0
    assert np.abs(f).max() / eps > 1e4
    _assert_close(score(clouds, f, g, eps=eps), _plain(clouds, f, g, eps), rel=1e-6)


def test_far_from_the_origin_in_float32() -> None:
    """A common offset of 1e4 must cost nothing: the differences are formed first (a matrix product would lose all)."""
    c = gaussian(n=60, m=45, d=3, eps=0.0, seed=4)
    x, y = ((v + 1e4).astype(np.float32) for v in (c.x, c.y))
    moved = Clouds(x, y, c.a, c.b)
    back = Clouds(x.astype(float) - 1e4, y.astype(float) - 1e4, c.a, c.b)
    f, g = _solve(back, 0.1)
    assert score(moved, f, g, eps=0.1).residual_l1 < 1e-9


def test_half_step_error_is_that_of_the_side_updated_last() -> None:
    clouds = gaussian(n=30, m=20, d=2, eps=0.0, seed=8)
    cost = _cost(clouds)
    f = np.zeros(30)
    g = -0.5 * logsumexp((f[:, None] - cost) / 0.5 + np.log(clouds.a)[:, None], axis=0)
    got = score(clouds, f, g, eps=0.5)
    assert got.half_step_error < 1e-13 < got.residual_row_l1
    off = score(clouds, f, g + 0.5 * 1e-3, eps=0.5)  # the marginal is off by exp(1e-3) everywhere
    assert off.half_step_error == pytest.approx(1e-3, rel=1e-9)


def test_an_overflowing_or_vanishing_plan_is_infinite_not_nan() -> None:
    clouds = gaussian(n=5, m=4, d=2, eps=0.0, seed=8)
    assert score(clouds, np.full(5, 1e6), np.zeros(4), eps=1.0).residual_l1 == np.inf
    vanished = score(clouds, np.full(5, -1e6), np.zeros(4), eps=1.0)
    assert vanished.residual_l1 == pytest.approx(1.0) and vanished.half_step_error == np.inf


def test_bad_potentials_are_named() -> None:
    clouds = gaussian(n=5, m=4, d=2, eps=0.0, seed=8)
    with pytest.raises(ValueError, match=r"f is not finite on 2 of 5"):
        score(clouds, np.array([0, np.nan, 0, np.inf, 0]), np.zeros(4), eps=1.0)
    with pytest.raises(ValueError, match=r"g has shape \(3,\)"):
        score(clouds, np.zeros(5), np.zeros(3), eps=1.0)
    with pytest.raises(ValueError, match="eps must be positive, got 0"):
        score(clouds, np.zeros(5), np.zeros(4), eps=0)
    with pytest.raises(ValueError, match="weights of g have no positive entry"):
        score(Clouds(clouds.x, clouds.y, clouds.a, 0 * clouds.b), np.zeros(5), np.zeros(4), eps=1.0)


@st.composite
def _problems(draw: st.DrawFn) -> tuple[Clouds, np.ndarray, np.ndarray, np.random.Generator]:
    n, m, d = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    clouds = gaussian(n=n, m=m, d=d, eps=0.0, seed=int(rng.integers(2**31)))
    return clouds, rng.normal(size=n), rng.normal(size=m), rng


@settings(max_examples=40, deadline=None)
@given(_problems())
def test_order_of_points_plays_no_part(problem: Any) -> None:
    c, f, g, rng = problem
    i, j = rng.permutation(len(f)), rng.permutation(len(g))
    permuted = score(Clouds(c.x[i], c.y[j], c.a[i], c.b[j]), f[i], g[j], eps=0.5)
    _assert_close(permuted, score(c, f, g, eps=0.5), rel=1e-10, atol=1e-13)


@settings(max_examples=40, deadline=None)
@given(_problems())
def test_common_shift_and_rotation_play_no_part(problem: Any) -> None:
    c, f, g, rng = problem  # R4
    d = c.x.shape[1]
    rotation, shift = np.linalg.qr(rng.normal(size=(d, d)))[0], rng.normal(size=d) * 100
    moved = Clouds(c.x @ rotation + shift, c.y @ rotation + shift, c.a, c.b)
    # Moving rounds the points by 100 * 2^-52, the exponents by some thousand times that.
    _assert_close(score(moved, f, g, eps=0.5), score(c, f, g, eps=0.5), rel=1e-9, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(_problems(), st.sampled_from([np.nan, -np.inf, np.inf, 0.0]), st.sampled_from([np.nan, 1e30, 0.0]))
def test_points_without_weight_play_no_part(problem: Any, potential: float, coordinate: float) -> None:
    c, f, g, rng = problem  # R12
    at = rng.integers(len(f) + 1)
    padded = Clouds(
        np.insert(c.x, at, coordinate, axis=0), np.vstack([c.y, c.y[:1]]), np.insert(c.a, at, 0.0), np.append(c.b, 0.0)
    )
    got = score(padded, np.insert(f, at, potential), np.append(g, potential), eps=0.5)
    _assert_close(got, score(c, f, g, eps=0.5), rel=1e-12, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(_problems(), st.floats(0.01, 0.99))
def test_a_point_may_be_split(problem: Any, share: float) -> None:
    c, f, g, _ = problem  # R12 the other way
    a = np.append(c.a, (1 - share) * c.a[0])
    a[0] *= share
    split = Clouds(np.vstack([c.x, c.x[:1]]), c.y, a, c.b)
    _assert_close(score(split, np.append(f, f[0]), g, eps=0.5), score(c, f, g, eps=0.5), rel=1e-10, atol=1e-12)
