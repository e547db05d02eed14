"""What a solver of conf/solver that has `hvp` owes: the Hessian of OT_eps in x times a direction.

The reference is central differences of the exact gradient in float64, from numpy's own solution. The error of a product
follows the residual of the linear system behind it: ten times that, as the harness allows, and rounding.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from conftest import host
from ot_reference import gradients, optimal_potentials
from test_solvers import cloud

from fsbench.api import Task, ToResidual, Unsupported

TOL = 1e-4


def product(driver, x, y, a, b, v, potentials, *, eps: float, cost_scale: float = 1.0):
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
    given = [driver.array(array.astype("float32"), solver.framework) for array in (*potentials, v)]
    return solver.hvp(driver.problem(solver, x, y, a, b, spec), *given, budget)


def slope(x, y, a, b, v, *, eps: float, cost_scale: float, step: float = 1e-4) -> np.ndarray:
    """Central differences of the exact gradient in x along v."""
    ends = []
    for moved in (x + step * v, x - step * v):
        f, g = optimal_potentials(moved, y, a, b, eps=eps, cost_scale=cost_scale)
        ends.append(gradients(f, g, moved, y, a, b, eps=eps, cost_scale=cost_scale, normalised=True)[0])
    return (ends[0] - ends[1]) / (2 * step)


@cache
def referenced(n: int, m: int, d: int, eps: float, cost_scale: float):
    """A problem and direction, its potentials and the product: the same for every solver."""
    (x, a), (y, b) = cloud(1, n, d), cloud(2, m, d)
    v = np.random.default_rng(3).normal(size=x.shape).astype("float32")
    potentials = optimal_potentials(x, y, a, b, eps=eps, cost_scale=cost_scale)
    want = slope(x.astype(float), y.astype(float), a, b, v, eps=eps, cost_scale=cost_scale)
    return (x, y, a, b), v, potentials, want


# Of a thousand points masses are small: products of 1 / n in float32 must not underflow in the linear solver.
@pytest.mark.parametrize(
    ("n", "m", "d", "eps", "cost_scale"), [(31, 47, 1, 0.2, 1.0), (31, 47, 40, 8.0, 1.0), (1000, 900, 3, 0.15, 0.5)]
)
def test_product_is_the_slope_of_the_gradient(driver, n, m, d, eps, cost_scale):
    clouds, v, potentials, want = referenced(n, m, d, eps, cost_scale)
    solution = product(driver, *clouds, v, potentials, eps=eps, cost_scale=cost_scale)
    rounding = 64 * driver.unit + 4 * driver.rounding(clouds, cost_scale, "float32") / eps
    assert np.linalg.norm(host(solution.h_x) - want) < (10 * TOL + rounding) * np.linalg.norm(want)
    if solution.converged is not None:
        assert solution.converged and solution.trace[-1].residual <= TOL


def test_a_product_needs_no_cloud_to_be_at_the_origin(driver):
    (x, a), (y, b) = cloud(4, 31), cloud(5, 29)
    v = np.random.default_rng(6).normal(size=x.shape).astype("float32")
    moved_by = [(x + shift, y + shift, a, b) for shift in map(np.float32, (0, 64))]
    here, there = (
        host(product(driver, *clouds, v, optimal_potentials(*clouds, eps=0.2), eps=0.2).h_x) for clouds in moved_by
    )
    moved = 2.0**-17 * 4 / 0.2  # coordinates at 64 keep 2^-18 of a unit; relative change of the plan, over eps
    assert np.linalg.norm(here - there) < (10 * TOL + 8 * moved + 64 * driver.unit) * np.linalg.norm(here)
