"""What a solver of conf/solver owes where the task is forward_backward: the gradient of OT_eps in both clouds.

Tolerance: the gradient is a mean of displacements, so it is off by the rounding of a displacement and by the plan's
relative error, that of the cost over eps; 64 covers the growth of sums and different roundings. Two solvers take the
gradient at the potentials before their closing sweep, which they do not return: it differs by the residual.
"""

from __future__ import annotations

import numpy as np
import pytest
from ot_reference import gradients, optimal_value, score
from test_solvers import cloud

from fsbench.api import FixedIterations, Task, ToResidual

BACKWARD = Task.FORWARD_BACKWARD
TIGHT = ToResidual(1e-5, max_iterations=4000)
LAGGING = ("geomloss_multiscale", "flash_sinkhorn_pypi_symmetric_tf32")


def rounding(driver, outcome, eps: float, cost_scale: float = 1.0) -> float:
    """Relative error of a gradient from the precision alone."""
    return 64 * driver.unit + 4 * driver.rounding(outcome.inputs, cost_scale, "float32") / eps


def error_over_allowed(driver, outcome, eps: float, cost_scale: float = 1.0) -> float:
    """Largest relative error of the two gradients, each to the nearer form, over what is allowed."""
    forms = [
        gradients(outcome.f, outcome.g, *outcome.inputs, eps=eps, cost_scale=cost_scale, normalised=normalised)
        for normalised in (False, True)
    ]
    errors = []
    for side, got in enumerate(outcome.gradients):
        assert got.shape == outcome.inputs[side].shape
        errors.append(min(np.linalg.norm(got - form[side]) / np.linalg.norm(form[side]) for form in forms))
    lag = 8 * outcome.scored.residual if driver.name in LAGGING else 0
    return max(errors) / (rounding(driver, outcome, eps, cost_scale) + lag)


@pytest.mark.parametrize(("d", "cost_scale"), [(1, 0.5), (3, 1.0), (40, 0.5)])
def test_gradients_are_those_of_the_potentials(driver, d, cost_scale):
    (x, a), (y, b) = cloud(1, 41, d), cloud(2, 67, d)
    eps = 0.2 * d * cost_scale
    outcome = driver.solve(x, y, a, b, eps=eps, cost_scale=cost_scale, budget=TIGHT, task=BACKWARD)
    assert error_over_allowed(driver, outcome, eps, cost_scale) < 1


def test_gradient_after_a_fixed_number_of_iterations_is_of_the_same_potentials(driver):
    (x, a), (y, b) = cloud(3, 53), cloud(4, 37)
    outcome = driver.solve(x, y, a, b, eps=0.05, budget=FixedIterations(4), task=BACKWARD)
    assert error_over_allowed(driver, outcome, 0.05) < 1


def test_gradient_is_the_slope_of_the_value(driver):
    """Central differences of the exact value, one direction in both clouds."""
    (x, a), (y, b) = cloud(5, 23), cloud(6, 31)
    rng = np.random.default_rng(7)
    u, v = rng.normal(size=x.shape), rng.normal(size=y.shape)
    eps, step = 0.1, 1e-4
    outcome = driver.solve(x, y, a, b, eps=eps, budget=TIGHT, task=BACKWARD)
    ahead, behind = (
        optimal_value(x + s * step * u, y + s * step * v, a.astype(float), b.astype(float), eps=eps) for s in (1, -1)
    )
    grad_x, grad_y = outcome.gradients
    slope = (grad_x * u).sum() + (grad_y * v).sum()
    # An unconverged plan moves the gradient by its residual times the largest displacement and direction.
    unconverged = 4 * outcome.scored.residual * np.sqrt(3) * max(abs(u).max(), abs(v).max())
    rounded = rounding(driver, outcome, eps) * (abs(grad_x * u).sum() + abs(grad_y * v).sum())
    assert slope == pytest.approx((ahead - behind) / (2 * step), abs=unconverged + rounded + 1e-6)


def test_gradient_of_points_without_weight_is_zero_and_they_move_no_other(driver):
    (x, a), (y, b) = cloud(8, 29), cloud(9, 33)
    a[3] = b[5] = 0
    a, b = a / a.sum(), b / b.sum()
    outcome = driver.solve(x, y, a, b, eps=0.1, budget=TIGHT, task=BACKWARD)
    grad_x, grad_y = outcome.gradients
    assert not grad_x[3].any() and not grad_y[5].any()
    assert error_over_allowed(driver, outcome, 0.1) < 1


def test_an_offset_costs_no_more_than_its_own_rounding(driver):
    """Both clouds at 100: coordinates keep 2^-17 of a unit, and the gradient with them."""
    (x, a), (y, b) = cloud(10, 29), cloud(11, 33)
    outcome = driver.solve(x + 100, y + 100, a, b, eps=0.1, budget=TIGHT, task=BACKWARD)
    assert error_over_allowed(driver, outcome, 0.1) < 1


def test_potentials_and_passes_are_those_of_a_forward_solve(driver):
    (x, a), (y, b) = cloud(12, 41), cloud(13, 23)
    alone = driver.solve(x, y, a, b, eps=0.1, budget=TIGHT)
    both = driver.solve(x, y, a, b, eps=0.1, budget=TIGHT, task=BACKWARD)
    assert alone.solution.grad_x is None and alone.solution.grad_y is None
    assert both.solution.n_iterations == alone.solution.n_iterations
    if alone.solution.n_passes is not None:
        assert both.solution.n_passes > alone.solution.n_passes
    values = [score(o.f, o.g, *o.inputs, eps=0.1).value for o in (alone, both)]
    assert values[0] == pytest.approx(values[1], abs=alone.slack + both.slack)
