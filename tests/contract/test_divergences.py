"""What a solver of conf/solver owes where the task is divergence: S_eps and the potentials of its three problems.

Tolerance: a dual value is off by the rounding of a cost, as the driver bounds it, for each of the three.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import host
from ot_reference import score
from test_solvers import cloud

from fsbench.api import Budget, FixedIterations, Task, ToResidual, Unsupported

TEN, TIGHT = FixedIterations(10), ToResidual(1e-5)


def supported(driver, spec) -> Budget:
    """Ten iterations, or to a residual where the solver offers no fixed number; skips if it offers neither."""
    reasons = []
    for budget in (TEN, TIGHT):
        try:
            driver.build().supports(spec, budget)
            return budget
        except Unsupported as reason:
            reasons.append(str(reason))
    pytest.skip("; ".join(reasons))


def solved(driver, x, y, a, b, *, eps: float, cost_scale: float = 1.0, budget: Budget | None = None):
    """The solution, and the budget it was found with."""
    spec = driver.spec(x, y, eps, cost_scale, task=Task.DIVERGENCE)
    solver, budget = driver.build(), budget or supported(driver, spec)
    solver.prepare(spec, budget)
    return solver.solve(driver.problem(solver, x, y, a, b, spec), budget), budget


def dual(f, g, x, y, a, b, *, eps: float, cost_scale: float) -> float:
    return score(host(f), host(g), x, y, a, b, eps=eps, cost_scale=cost_scale).value


@pytest.mark.parametrize(("d", "cost_scale"), [(1, 1.0), (3, 0.5), (40, 1.0)])
def test_value_is_that_of_the_potentials(driver, d, cost_scale):
    (x, a), (y, b) = cloud(1, 53, d), cloud(2, 37, d)
    a[4] = 0
    a /= a.sum()
    options = {"eps": 0.1 * d * cost_scale, "cost_scale": cost_scale}
    solution, budget = solved(driver, x, y, a, b, **options)
    of_x, of_y = solution.self_potentials
    pair = dual(solution.f, solution.g, x, y, a, b, **options)
    own = dual(*of_x, x, x, a, a, **options), dual(*of_y, y, y, b, b, **options)
    rounding = driver.rounding((x, y, a, b), cost_scale, "float32")
    assert solution.value.item() == pytest.approx(pair - sum(own) / 2, abs=3 * rounding)
    # Self problems are solved in few iterations, to a residual that rounding of costs over eps may add to.
    assert score(*map(host, of_x), x, x, a, a, **options).residual < 0.02 + rounding / options["eps"]
    if budget is TEN:
        assert solution.n_iterations == 10 and solution.n_passes >= 40
    else:
        assert solution.converged and solution.n_passes > 3


def test_each_problem_is_solved_to_the_residual(driver):
    (x, a), (y, b), budget = cloud(1, 53), cloud(2, 37), ToResidual(1e-3)
    a[4] = 0
    a /= a.sum()
    try:
        driver.build().supports(driver.spec(x, y, 0.05, 1.0, task=Task.DIVERGENCE), budget)
    except Unsupported as reason:
        pytest.skip(str(reason))
    solution, _ = solved(driver, x, y, a, b, eps=0.05, budget=budget)
    of_x, of_y = solution.self_potentials
    allowed = budget.tol + driver.rounding((x, y, a, b), 1.0, "float32") / 0.05
    for potentials, problem in (
        ((solution.f, solution.g), (x, y, a, b)),
        (of_x, (x, x, a, a)),
        (of_y, (y, y, b, b)),
    ):
        assert score(*map(host, potentials), *problem, eps=0.05, cost_scale=1.0).residual <= allowed
    assert solution.n_iterations is None and solution.converged is not False


def test_iterations_of_the_pair_are_those_of_a_forward_solve(driver):
    (x, a), (y, b) = cloud(3, 53), cloud(4, 37)
    solution, budget = solved(driver, x, y, a, b, eps=0.05)
    forward = driver.solve(x, y, a, b, eps=0.05, budget=budget)
    slack = driver.rounding((x, y, a, b), 1.0, "float32")
    np.testing.assert_allclose(host(solution.f), forward.f, atol=slack)
    np.testing.assert_allclose(host(solution.g), forward.g, atol=slack)


def test_a_cloud_is_at_no_distance_from_itself(driver):
    x, a = cloud(5, 41)
    there, budget = solved(driver, x, x + 2, a, a, eps=0.1)
    there, here = there.value.item(), solved(driver, x, x, a, a, eps=0.1)[0].value.item()
    slack = driver.solve(x, x, a, a, eps=0.1, budget=budget).slack  # of one value; here two differ
    assert abs(here) < 2 * slack < there
