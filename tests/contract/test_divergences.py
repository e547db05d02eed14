"""What a solver of conf/solver owes where the task is divergence: S_eps and the potentials of its three problems.

Tolerance: a dual value is off by the rounding of a cost, as the driver bounds it, for each of the three.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import host
from ot_reference import score
from test_solvers import cloud

from fsbench.api import FixedIterations, Task, Unsupported

TEN = FixedIterations(10)


def solved(driver, x, y, a, b, *, eps: float, cost_scale: float = 1.0):
    spec = driver.spec(x, y, eps, cost_scale, task=Task.DIVERGENCE)
    solver = driver.build()
    try:
        solver.supports(spec, TEN)
    except Unsupported as reason:
        pytest.skip(str(reason))
    solver.prepare(spec, TEN)
    return solver.solve(driver.problem(solver, x, y, a, b, spec), TEN)


def dual(f, g, x, y, a, b, *, eps: float, cost_scale: float) -> float:
    return score(host(f), host(g), x, y, a, b, eps=eps, cost_scale=cost_scale).value


@pytest.mark.parametrize(("d", "cost_scale"), [(1, 1.0), (3, 0.5), (40, 1.0)])
def test_value_is_that_of_the_potentials(driver, d, cost_scale):
    (x, a), (y, b) = cloud(1, 53, d), cloud(2, 37, d)
    a[4] = 0
    a /= a.sum()
    options = {"eps": 0.1 * d * cost_scale, "cost_scale": cost_scale}
    solution = solved(driver, x, y, a, b, **options)
    of_x, of_y = solution.self_potentials
    pair = dual(solution.f, solution.g, x, y, a, b, **options)
    own = dual(*of_x, x, x, a, a, **options), dual(*of_y, y, y, b, b, **options)
    rounding = driver.rounding((x, y, a, b), cost_scale, "float32")
    assert solution.value.item() == pytest.approx(pair - sum(own) / 2, abs=3 * rounding)
    # Self problems are solved in few iterations, to a residual that rounding of costs over eps may add to.
    assert score(*map(host, of_x), x, x, a, a, **options).residual < 0.02 + rounding / options["eps"]
    assert solution.n_iterations == 10 and solution.n_passes >= 40


def test_iterations_of_the_pair_are_those_of_a_forward_solve(driver):
    (x, a), (y, b) = cloud(3, 53), cloud(4, 37)
    solution = solved(driver, x, y, a, b, eps=0.05)
    forward = driver.solve(x, y, a, b, eps=0.05, budget=TEN)
    slack = driver.rounding((x, y, a, b), 1.0, "float32")
    np.testing.assert_allclose(host(solution.f), forward.f, atol=slack)
    np.testing.assert_allclose(host(solution.g), forward.g, atol=slack)


def test_a_cloud_is_at_no_distance_from_itself(driver):
    x, a = cloud(5, 41)
    there = solved(driver, x, x + 2, a, a, eps=0.1).value.item()
    here = solved(driver, x, x, a, a, eps=0.1).value.item()
    slack = driver.solve(x, x, a, a, eps=0.1, budget=TEN).slack  # of one value after ten iterations; here two differ
    assert abs(here) < 2 * slack < there
