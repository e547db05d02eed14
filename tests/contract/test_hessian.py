"""What a solver of conf/solver that has `hvp` owes: the Hessian of OT_eps in x times a direction.

The reference is central differences of the exact gradient in float64, from numpy's own solution. The error of a product
follows the residual of the linear system behind it: ten times that, as the harness allows, and rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import host
from ot_reference import gradients, optimal_potentials
from test_solvers import cloud

from fsbench.api import Task, ToResidual, Unsupported

TOL = 1e-4


def product(driver, x, y, a, b, v, *, eps: float, cost_scale: float = 1.0):
    """The solver's answer at float64-converged potentials in float32, as the harness gives them."""
    spec = driver.spec(x, y, eps, cost_scale, task=Task.HVP)
    solver, budget = driver.build(), ToResidual(TOL, max_iterations=1000)
    if not hasattr(solver, "hvp"):
        pytest.skip("no Hessian product in this solver")
    try:
        solver.supports(spec, budget)
    except Unsupported as reason:
        pytest.skip(str(reason))
    solver.prepare(spec, budget)
    potentials = optimal_potentials(x, y, a, b, eps=eps, cost_scale=cost_scale)
    given = [driver.array(array.astype("float32"), solver.framework) for array in (*potentials, v)]
    return solver.hvp(driver.problem(solver, x, y, a, b, spec), *given, budget)


def slope(x, y, a, b, v, *, eps: float, cost_scale: float, step: float = 1e-4) -> np.ndarray:
    """Central differences of the exact gradient in x along v."""
    ends = []
    for moved in (x + step * v, x - step * v):
        f, g = optimal_potentials(moved, y, a, b, eps=eps, cost_scale=cost_scale)
        ends.append(gradients(f, g, moved, y, a, b, eps=eps, cost_scale=cost_scale, normalised=True)[0])
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize(("d", "cost_scale"), [(1, 1.0), (3, 0.5), (40, 1.0)])
def test_product_is_the_slope_of_the_gradient(driver, d, cost_scale):
    (x, a), (y, b) = cloud(1, 31, d), cloud(2, 47, d)
    v = np.random.default_rng(3).normal(size=x.shape).astype("float32")
    eps = 0.2 * d * cost_scale
    solution = product(driver, x, y, a, b, v, eps=eps, cost_scale=cost_scale)
    want = slope(x.astype(float), y.astype(float), a, b, v, eps=eps, cost_scale=cost_scale)
    rounding = 64 * driver.unit + 4 * driver.rounding((x, y, a, b), cost_scale, "float32") / eps
    assert np.linalg.norm(host(solution.h_x) - want) < (10 * TOL + rounding) * np.linalg.norm(want)
    if solution.converged is not None:
        assert solution.converged and solution.trace[-1].residual <= TOL


def test_a_product_needs_no_cloud_to_be_at_the_origin(driver):
    (x, a), (y, b) = cloud(4, 31), cloud(5, 29)
    v = np.random.default_rng(6).normal(size=x.shape).astype("float32")
    here, there = (
        host(product(driver, x + shift, y + shift, a, b, v, eps=0.2).h_x) for shift in map(np.float32, (0, 64))
    )
    moved = 2.0**-17 * 4 / 0.2  # coordinates at 64 keep 2^-18 of a unit; relative change of the plan, over eps
    assert np.linalg.norm(here - there) < (10 * TOL + 8 * moved + 64 * driver.unit) * np.linalg.norm(here)


def test_a_thousand_points_have_small_masses(driver):
    """Products of 1 / n in float32 must not underflow in the linear solver."""
    (x, a), (y, b) = cloud(7, 1000), cloud(8, 900)
    v = np.random.default_rng(9).normal(size=x.shape).astype("float32")
    solution = product(driver, x, y, a, b, v, eps=0.3)
    want = slope(x.astype(float), y.astype(float), a, b, v, eps=0.3, cost_scale=1.0)
    rounding = 64 * driver.unit + 4 * driver.rounding((x, y, a, b), 1.0, "float32") / 0.3
    assert np.linalg.norm(host(solution.h_x) - want) < (10 * TOL + rounding) * np.linalg.norm(want)
