"""The dual value of a pair of potentials and its derivatives in the weights: float64 formulas on n-vectors."""

from __future__ import annotations

import torch


def dual_value(
    a: torch.Tensor,
    b: torch.Tensor,
    f: torch.Tensor,
    g: torch.Tensor,
    *,
    eps: float,
    rho_x: float | None = None,
    rho_y: float | None = None,
    plan_mass: torch.Tensor | None = None,
) -> torch.Tensor:
    """OT_eps as potentials f [n], g [m] for weights a [n], b [m] bound it from below; a float64 scalar tensor.

    <a, f> + <b, g> - eps (|P| - |a| |b|), where rho <a, 1 - exp(-f / rho)> takes the place of <a, f> for a relaxed
    marginal. plan_mass: |P|, the sum of the plan. None: that of a marginal which the plan meets exactly; balanced
    only. Balanced weights count as if normalised to their mean mass, which is then no matter of constants in f and g.
    The error is of second order in the residual.

    Source: Chizat et al. 2018; for masses other than one Sejourne et al. 2019 (1910.12958).
    """
    mass_a, mass_b = a.sum(), b.sum()
    terms_x, terms_y = dual_terms(f, rho_x), dual_terms(g, rho_y)
    value_x, value_y = _total(a, terms_x), _total(b, terms_y)
    if rho_x is None and rho_y is None:
        mass = (mass_a + mass_b) / 2
        value_x, value_y = value_x * mass / mass_a, value_y * mass / mass_b
        mass_a = mass_b = mass
        plan_mass = mass if plan_mass is None else plan_mass
    if plan_mass is None:
        raise ValueError("plan_mass must be given where a marginal is relaxed: the sum of the plan's row sums")
    return value_x + value_y - eps * (plan_mass - mass_a * mass_b)


def dual_terms(potential: torch.Tensor, rho: float | None) -> torch.Tensor:
    """What each point's potential adds to the dual value a unit of weight: f, or rho (1 - exp(-f / rho))."""
    return potential if rho is None else -rho * torch.expm1(-potential / rho)


def relative_marginal(potential: torch.Tensor, rho: float | None) -> torch.Tensor:
    """(P 1)_i / a_i at the optimum [n]: exp(-f / rho), or one of a constraint."""
    return torch.ones_like(potential) if rho is None else torch.exp(-potential / rho)


def weight_gradients(
    a: torch.Tensor,
    b: torch.Tensor,
    f: torch.Tensor,
    g: torch.Tensor,
    *,
    eps: float,
    rho_x: float | None = None,
    rho_y: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of `dual_value` at converged potentials in a [n] and in b [m], zero weights included.

    d/da_i = rho (1 - exp(-f_i / rho)) - eps (exp(-f_i / rho) - |b|), which is f_i - eps (1 - |b|) for a constraint.
    With two constraints f and g are taken with <a, f> / |a| = <b, g> / |b|: that is the gradient of the value for
    weights normalised to their mean mass, and does not depend on how the potentials were found.
    """
    mass_a, mass_b = a.sum(), b.sum()
    if rho_x is None and rho_y is None:
        mass = (mass_a + mass_b) / 2
        f, g = balance(a, b, f, g)
        mean = _total(a, f) / mass_a
        constant = mean - eps * (1.0 - mass)
        return constant + (f - mean) * mass / mass_a, constant + (g - mean) * mass / mass_b
    gradient_a = dual_terms(f, rho_x) - eps * (relative_marginal(f, rho_x) - mass_b)
    gradient_b = dual_terms(g, rho_y) - eps * (relative_marginal(g, rho_y) - mass_a)
    return gradient_a, gradient_b


def weight_gradient_slope(potential: torch.Tensor, rho: float | None, eps: float) -> torch.Tensor:
    """Derivative of a point's weight gradient in its potential [n]."""
    return relative_marginal(potential, rho) * (1.0 if rho is None else 1.0 + eps / rho)


def balance(a: torch.Tensor, b: torch.Tensor, f: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f + c, g - c with equal means <a, f> / |a| and <b, g> / |b|."""
    shift = (_total(b, g) / b.sum() - _total(a, f) / a.sum()) / 2
    return f + shift, g - shift


def _total(weight: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """<weight, terms>; terms of points without weight do not enter, not even infinite ones."""
    return torch.where(weight > 0, weight * terms, 0.0).sum()
