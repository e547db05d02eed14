"""Costs that are squared distances of other points: the cosine, and a table of costs between labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..inputs.checks import kind_of, positive
from ..plan.operators import Plan
from .loss import promoted
from .transport import transport

LEAST_SHARE = 1e-12  # of a table's largest singular value: less is float64's rounding


def unit_vectors(x: torch.Tensor) -> torch.Tensor:
    """x [..., d] over its length, differentiable. With it the cost |x - y|^2 / 2 is 1 - cos(x, y).

    ValueError if a vector is zero, for it has no direction, or not finite, or x is no floating-point tensor.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise ValueError(f"x must be a floating-point torch tensor, got {kind_of(x)}")
    largest = x.detach().abs().amax(-1, keepdim=True)  # squares neither overflow nor vanish over it
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("x contains NaN or infinite values: remove or replace them first")
    if bool((largest == 0).any()):
        raise ValueError("x has a zero vector, which has no direction: remove it before asking for a cosine cost")
    scaled = x / largest
    return scaled / torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)


@dataclass(frozen=True)
class LabelTransport:
    """OT_eps of labelled clouds for C_ij = cost_scale |x_i - y_j|^2 + table[labels_x_i, labels_y_j].

    ot: min <P, C> + eps KL(P | a x b), a float64 scalar, differentiable twice in the points and weights; f [n], g [m]:
    its potentials, float64, P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps). plan: P as an operator, so that
    plan.apply(one_hot) are the labels that points receive; its own coordinates are the points' and some for labels.
    residual, converged, tol, n_passes: as of `Transport`.
    """

    ot: torch.Tensor
    f: torch.Tensor
    g: torch.Tensor
    plan: Plan
    residual: float | None
    converged: bool | None
    tol: float | None
    n_passes: float

    @property
    def value(self) -> torch.Tensor:
        """As of `Transport`: the OT value."""
        return self.ot


def label_transport(
    x: torch.Tensor,
    y: torch.Tensor,
    labels_x: torch.Tensor,
    labels_y: torch.Tensor,
    table: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    **options: Any,
) -> LabelTransport:
    """Solve OT_eps(a, b) of clouds whose points have labels, with a cost between labels added to that of the points.

    x [n, d], y [m, d], a, b, eps, cost_scale: as of `transport`. labels_x [n], labels_y [m]: integers that index
    table [labels of x, labels of y], the cost of a pair in units of C; it may be any finite numbers and is not
    differentiated. options: tol, n_iterations, max_iterations, max_seconds, precision and hessian_tol of `transport`.

    A table W of rank r is written W_kl = |u_k - v_l|^2 - alpha_k - beta_l with u, v in R^r, so that the problem is that
    of points [x, u], [y, v] with potentials f + alpha, g + beta: r more coordinates, and nothing n x m.

    Raises ValueError as `transport` does, and for labels that do not index the table.

    Source: the cost of OTDD, Alvarez-Melis and Fusi 2020 (2002.02923).
    """
    for name, points in (("x", x), ("y", y)):
        if not isinstance(points, torch.Tensor) or points.ndim != 2 or not points.is_floating_point():
            raise ValueError(f"{name} must be a floating-point torch tensor [points, d]")
    cost_scale = positive("cost_scale", cost_scale)
    if not isinstance(table, torch.Tensor) or table.ndim != 2 or 0 in table.shape or not torch.isfinite(table).all():
        raise ValueError("table must be a tensor [labels of x, labels of y] of finite costs")
    labels_x = _checked_labels("labels_x", labels_x, x, table.shape[0])
    labels_y = _checked_labels("labels_y", labels_y, y, table.shape[1])
    for name in ("debias", "rho", "rho_x", "rho_y"):
        if name in options:
            raise ValueError(f"{name} is not offered with labels: their cost has no self problem and fixed marginals")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y must have the same d, got {x.shape[1]} and {y.shape[1]}")
    u, v, alpha, beta = _coordinates(table.detach().to(x.device) / cost_scale)
    with_labels_x, with_labels_y = _appended(x, u[labels_x]), _appended(y, v[labels_y])
    result = transport(with_labels_x, with_labels_y, a, b, eps=eps, cost_scale=cost_scale, **options)
    shift_x, shift_y = cost_scale * alpha[labels_x], cost_scale * beta[labels_y]
    _, _, weight_x, weight_y = promoted(x, y, a, b)
    mass_x, mass_y = weight_x.sum(), weight_y.sum()
    shift = (weight_x / mass_x * shift_x).sum() + (weight_y / mass_y * shift_y).sum()
    return LabelTransport(
        ot=result.ot - (mass_x + mass_y) / 2 * shift,
        f=result.f - shift_x,
        g=result.g - shift_y,
        plan=result.plan,
        residual=result.residual,
        converged=result.converged,
        tol=result.tol,
        n_passes=result.n_passes,
    )


def _coordinates(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """u [K, r], v [L, r], alpha [K], beta [L], float64, with table_kl = |u_k - v_l|^2 - alpha_k - beta_l."""
    table = table.double()
    of_rows = table.mean(1)  # what belongs to one label alone needs no coordinate
    of_cols = (table - of_rows[:, None]).mean(0)
    left, size, right = torch.linalg.svd(table - of_rows[:, None] - of_cols, full_matrices=False)
    kept = size > LEAST_SHARE * table.abs().max()
    half = (size[kept] / 2).sqrt()
    u, v = left[:, kept] * half, -right[kept].T * half
    return u, v, u.square().sum(1) - of_rows, v.square().sum(1) - of_cols


def _checked_labels(name: str, labels: torch.Tensor, points: torch.Tensor, count: int) -> torch.Tensor:
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.shape != points.shape[:1]:
        raise ValueError(f"{name} must be an integer tensor [{points.shape[0]}], one label a point")
    if labels.device != points.device:
        raise ValueError(f"{name} must be on {points.device} like its points, got {labels.device}")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < count:
        raise ValueError(f"{name} must index the table's {count} labels: values from 0 to {count - 1}")
    return labels.long()


def _appended(points: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
    """[n, d + r], in float32 at least: half precision holds the points as given, not the labels' coordinates."""
    dtype = torch.promote_types(points.dtype, torch.float32)
    return torch.cat([points.to(dtype), coordinates.to(dtype)], 1)
