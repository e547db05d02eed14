"""Plain float64 numpy answers that know nothing of fsbench's own scoring: cost, dual value, residual, schemes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from solvers.common.scheme import Scheme


@dataclass(frozen=True)
class Scored:
    """What potentials are worth: value is the dual objective, which never exceeds OT_eps."""

    value: float
    row_residual: float  # |P1 - a|_1
    column_residual: float  # |P^T 1 - b|_1
    mass: float

    @property
    def residual(self) -> float:
        return max(self.row_residual, self.column_residual)


def cost_matrix(x: np.ndarray, y: np.ndarray, cost_scale: float = 1.0) -> np.ndarray:
    """cost_scale |x_i - y_j|^2 by direct differences, [n, m]."""
    return cost_scale * np.square(x[:, None, :].astype(float) - y[None, :, :].astype(float)).sum(-1)


def score(f, g, x, y, a, b, *, eps: float, cost_scale: float = 1.0) -> Scored:
    """Value, residuals and mass of (f, g); points without weight do not enter."""
    f, g, a, b = (np.asarray(v, float) for v in (f, g, a, b))
    rows, columns = a > 0, b > 0
    x, f, a = x[rows], f[rows], a[rows]
    y, g, b = y[columns], g[columns], b[columns]
    plan = a[:, None] * b * np.exp((f[:, None] + g - cost_matrix(x, y, cost_scale)) / eps)
    value = f @ a + g @ b - eps * (plan.sum() - 1)
    return Scored(value, abs(plan.sum(1) - a).sum(), abs(plan.sum(0) - b).sum(), plan.sum())


def optimal_value(x, y, a, b, *, eps: float, cost_scale: float = 1.0) -> float:
    """OT_eps of the weights normalised in float64."""
    f, g = optimal_potentials(x, y, a, b, eps=eps, cost_scale=cost_scale)
    a, b = (np.asarray(w, float) / np.asarray(w, float).sum() for w in (a, b))
    return float(f @ a + g @ b)


def optimal_potentials(x, y, a, b, *, eps: float, cost_scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Of the weights normalised in float64, by annealed alternating updates until f stands still."""
    cost = cost_matrix(x, y, cost_scale)
    log_a, log_b = (np.log(np.asarray(w, float) / np.asarray(w, float).sum()) for w in (a, b))
    f, g = np.zeros(len(a)), np.zeros(len(b))
    temperature = max(cost.max(), eps)
    for _ in range(20_000):
        before = f
        f = -temperature * logsumexp(log_b + (g - cost) / temperature, axis=1)
        g = -temperature * logsumexp(log_a[:, None] + (f[:, None] - cost) / temperature, axis=0)
        if temperature > eps:
            temperature = max(0.8 * temperature, eps)
        elif np.abs(f - before).max() <= 1e-12 * max(1.0, cost.max()):
            return f, g
    raise AssertionError("the reference did not converge: choose an easier problem")


def iterate(scheme: Scheme, iterations: int, x, y, a, b, *, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """(f, g) after `iterations` iterations of `scheme`, in float64; all weights positive."""
    cost = cost_matrix(x, y)
    log_a, log_b = np.log(a), np.log(b)

    def rows(g):
        return -eps * logsumexp(log_b + (g - cost) / eps, axis=1)

    def columns(f):
        return -eps * logsumexp(log_a[:, None] + (f[:, None] - cost) / eps, axis=0)

    f, g = np.zeros(len(a)), np.zeros(len(b))
    match scheme:
        case Scheme.ROWS_FIRST:
            for _ in range(iterations):
                f = rows(g)
                g = columns(f)
        case Scheme.COLUMNS_FIRST_UNWEIGHTED:
            f = -eps * log_a
            for _ in range(iterations):
                g = columns(f)
                f = rows(g)
        case Scheme.SYMMETRIC:
            for k in range(iterations):
                new_f, new_g = rows(g), columns(f)
                whole = k in (0, iterations - 1)
                f, g = (new_f, new_g) if whole else ((f + new_f) / 2, (g + new_g) / 2)
    return f, g


def gradients(f, g, x, y, a, b, *, eps: float, cost_scale: float = 1.0, normalised: bool) -> tuple[np.ndarray, ...]:
    """Gradients in x [n, d] and y [m, d] at (f, g): 2 cost_scale sum_j P_ij (x_i - y_j) and its mirror image.

    normalised: each point's plan has exactly its weight; else what the potentials give it.
    """
    x, y, a, b = (np.asarray(v, float) for v in (x, y, a, b))
    f, g = np.where(a > 0, f, 0), np.where(b > 0, g, 0)
    plan = a[:, None] * b * np.exp((f[:, None] + g - cost_matrix(x, y, cost_scale)) / eps)
    rows, columns = plan, plan
    if normalised:
        rows = plan * (a / np.where(a > 0, plan.sum(1), 1))[:, None]
        columns = plan * (b / np.where(b > 0, plan.sum(0), 1))
    grad_x = rows.sum(1)[:, None] * x - rows @ y
    grad_y = columns.sum(0)[:, None] * y - columns.T @ x
    return 2 * cost_scale * grad_x, 2 * cost_scale * grad_y
