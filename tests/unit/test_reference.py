"""The float64 references: potentials against plain numpy, the Hessian product against differences of the gradient."""

from __future__ import annotations

import numpy as np
import pytest
from test_metrics import _solve

from fsbench import reference
from fsbench.api import Clouds
from fsbench.metrics import score
from fsbench.problems.gaussian import gaussian

EPS, SCALE = 0.4, 0.5


def gradient(x: np.ndarray, clouds: Clouds) -> np.ndarray:
    moved = Clouds(x, clouds.y, clouds.a, clouds.b)
    f, g = _solve(moved, EPS, SCALE)
    difference = x[:, None] - clouds.y
    plan = clouds.a[:, None] * clouds.b * np.exp((f[:, None] + g - SCALE * np.square(difference).sum(2)) / EPS)
    return 2 * SCALE * np.einsum("ij,ijd->id", plan, difference)


@pytest.mark.parametrize("d", [1, 3])
def test_potentials_are_converged_and_the_same_up_to_a_constant(d):
    clouds = gaussian(n=41, m=57, d=d, eps=EPS, seed=d)
    f, g = reference.converged_potentials(clouds, eps=EPS, cost_scale=SCALE)
    assert score(clouds, f, g, eps=EPS, cost_scale=SCALE).residual_l1 < 2 * reference.RESIDUAL
    plain_f, plain_g = _solve(clouds, EPS, SCALE)
    assert np.ptp(f - plain_f) < 1e-9 and np.ptp(g - plain_g) < 1e-9


def test_a_problem_out_of_reach_is_named(monkeypatch):
    monkeypatch.setattr(reference, "_MOST_ITERATIONS", 3)
    with pytest.raises(reference.NotConverged, match="after 3 float64 iterations: raise eps"):
        reference.converged_potentials(gaussian(n=41, m=57, d=3, eps=EPS, seed=0), eps=0.01)


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_hessian_product_is_the_slope_of_the_gradient(d, offset, monkeypatch):
    monkeypatch.setattr(reference, "_BLOCK_PAIRS", {"cpu": 150})  # several blocks, the last one short
    clouds = gaussian(n=17, m=23, d=d, eps=EPS, seed=d)
    v = np.random.default_rng(1).normal(size=clouds.x.shape)
    step = 1e-4
    slope = (gradient(clouds.x + step * v, clouds) - gradient(clouds.x - step * v, clouds)) / (2 * step)
    moved = Clouds(clouds.x + offset, clouds.y + offset, clouds.a, clouds.b)
    f, g = reference.converged_potentials(moved, eps=EPS, cost_scale=SCALE)
    product = reference.hessian_product(moved, f, g, v, eps=EPS, cost_scale=SCALE)
    assert np.linalg.norm(product - slope) < 1e-6 * np.linalg.norm(slope)  # central differences of step 1e-4


def test_a_rigid_motion_of_everything_mapped_to_itself_has_the_curvature_of_the_mean():
    """Along a common translation the plan stays, so the product is 2 cost_scale a_i v."""
    clouds = gaussian(n=17, m=23, d=2, eps=EPS, seed=0)
    f, g = reference.converged_potentials(clouds, eps=EPS, cost_scale=SCALE)
    v = np.tile([1.0, -2.0], (17, 1))
    product = reference.hessian_product(clouds, f, g, v, eps=EPS, cost_scale=SCALE)
    assert product == pytest.approx(2 * SCALE * clouds.a[:, None] * v, rel=1e-7)


def test_an_unsolved_system_is_named():
    clouds = gaussian(n=17, m=23, d=2, eps=EPS, seed=0)
    f, g = reference.converged_potentials(clouds, eps=EPS)
    with pytest.raises(reference.NotConverged, match="in 2 iterations"):
        reference.hessian_product(clouds, f, g, np.ones((17, 2)) * np.arange(17)[:, None], eps=EPS, max_iterations=2)
