"""The harness's score of a gradient, against the definition with the plan in memory and against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from test_metrics import _solve

from fsbench.api import Clouds
from fsbench.metrics import score
from fsbench.metrics_gradient import gradient_error
from fsbench.problems.gaussian import gaussian

EPS, SCALE = 0.7, 0.5


def plain(clouds: Clouds, f, g, *, normalised: bool) -> tuple[np.ndarray, np.ndarray]:
    x, y = clouds.x.astype(float), clouds.y.astype(float)
    difference = x[:, None] - y  # [n, m, d]
    plan = clouds.a[:, None] * clouds.b * np.exp((f[:, None] + g - SCALE * np.square(difference).sum(2)) / EPS)
    rows = plan * (clouds.a / plan.sum(1))[:, None] if normalised else plan
    columns = plan * (clouds.b / plan.sum(0)) if normalised else plan
    return 2 * SCALE * np.einsum("ij,ijd->id", rows, difference), -2 * SCALE * np.einsum(
        "ij,ijd->jd", columns, difference
    )


def random_problem(n: int, m: int, d: int, offset: float = 0.0):
    clouds = gaussian(n=n, m=m, d=d, eps=EPS, seed=n)
    rng = np.random.default_rng(d)
    moved = Clouds(clouds.x + offset, clouds.y + offset, clouds.a, clouds.b)
    return moved, 0.3 * rng.normal(size=n), 0.3 * rng.normal(size=m) + d


def error(clouds, f, g, grads, **kwargs):
    return gradient_error(clouds, f, g, *grads, eps=EPS, cost_scale=SCALE, **kwargs)


@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 1), (63, 100, 3), (101, 37, 64), (1, 200, 5)])
@pytest.mark.parametrize("normalised", [False, True])
def test_either_form_has_no_error_at_any_potentials(n, m, d, normalised):
    clouds, f, g = random_problem(n, m, d)
    assert error(clouds, f, g, plain(clouds, f, g, normalised=normalised)) < 1e-12


@pytest.mark.parametrize("side", [0, 1])
def test_an_error_in_one_cloud_is_its_relative_size(side):
    clouds, f, g = random_problem(63, 100, 3)
    grads = list(plain(clouds, f, g, normalised=True))
    grads[side] = 1.01 * grads[side]
    assert error(clouds, f, g, grads) == pytest.approx(0.01)
    grads[side] = np.zeros_like(grads[side])
    assert error(clouds, f, g, grads) == pytest.approx(1.0)


def test_blocks_are_one_pass(monkeypatch):
    clouds, f, g = random_problem(97, 41, 3)
    monkeypatch.setattr("fsbench.metrics_gradient._BLOCK_PAIRS", {"cpu": 200})
    assert error(clouds, f, g, plain(clouds, f, g, normalised=False)) < 1e-12


def test_a_common_offset_costs_no_digits_that_the_points_still_have():
    clouds, f, g = random_problem(63, 100, 3, offset=1e6)
    assert error(clouds, f, g, plain(clouds, f, g, normalised=True)) < 1e-9  # 1e6 keeps 1e-10 of a coordinate


def test_points_without_weight_count_for_nothing():
    clouds, f, g = random_problem(63, 100, 3)
    a = np.where(np.arange(63) == 5, 0, clouds.a)
    clouds = Clouds(clouds.x, clouds.y, a / a.sum(), clouds.b)
    grads = plain(clouds, f, g, normalised=False)
    f[5] = np.nan
    grads[0][5] = np.nan
    assert error(clouds, f, g, grads) < 1e-12


def test_what_cannot_be_scored_is_named():
    clouds, f, g = random_problem(5, 7, 3)
    grad_x, grad_y = plain(clouds, f, g, normalised=True)
    with pytest.raises(ValueError, match=r"grad_x has shape \(7, 3\), its points \(5, 3\)"):
        error(clouds, f, g, (grad_y, grad_x))
    grad_y[2, 1] = np.inf
    with pytest.raises(ValueError, match="grad_y is not finite on 1 of 7 points"):
        error(clouds, f, g, (grad_x, grad_y))


def test_a_gradient_that_is_zero_is_measured_in_units_of_the_clouds():
    points = np.zeros((3, 2))
    weights = np.full(3, 1 / 3)
    clouds, none = Clouds(points, points, weights, weights), np.zeros(3)
    assert error(clouds, none, none, (points, points)) == 0.0
    assert error(clouds, none, none, (points + 0.1, points)) > 0.1


def test_at_convergence_it_is_the_slope_of_the_value():
    clouds = gaussian(n=17, m=23, d=2, eps=EPS, seed=3)
    f, g = _solve(clouds, EPS)
    x = clouds.x.copy()
    slopes = np.empty_like(x)
    for index in np.ndindex(x.shape):
        values = []
        for step in (1e-4, -1e-4):
            x[index] = clouds.x[index] + step
            moved = Clouds(x, clouds.y, clouds.a, clouds.b)
            values.append(score(moved, *_solve(moved, EPS), eps=EPS).dual_value)
            x[index] = clouds.x[index]
        slopes[index] = (values[0] - values[1]) / 2e-4
    difference = clouds.x[:, None] - clouds.y
    plan = clouds.a[:, None] * clouds.b * np.exp((f[:, None] + g - np.square(difference).sum(2)) / EPS)
    grad_y = -2 * np.einsum("ij,ijd->jd", plan, difference)
    assert gradient_error(clouds, f, g, slopes, grad_y, eps=EPS) < 1e-6  # central differences of step 1e-4
