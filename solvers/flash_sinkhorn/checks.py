"""Input checks: every refusal is a ValueError that names the argument and the fix."""

from __future__ import annotations

import math

import torch

MASS_TOLERANCE = 1e-4  # relative: float32 weights that sum to one only in float32 are accepted


def checked_inputs(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    *,
    eps: float,
    cost_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """x, y in float32 or float64, a and b in float64 with sums of exactly one, and eps as a float."""
    eps = float(eps)
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be positive and finite, got {eps}")
    if not (math.isfinite(cost_scale) and cost_scale > 0):
        raise ValueError(f"cost_scale must be positive and finite, got {cost_scale}")
    for name, points in (("x", x), ("y", y)):
        if not isinstance(points, torch.Tensor) or not points.is_floating_point():
            raise ValueError(f"{name} must be a floating-point torch tensor, got {_kind(points)}")
        if points.ndim != 2 or 0 in points.shape:
            raise ValueError(f"{name} must have shape [points, d] with neither zero, got {tuple(points.shape)}")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y must have the same d, got {x.shape[1]} and {y.shape[1]}")
    if x.device != y.device:
        raise ValueError(f"y must be on the device of x, got {y.device} and {x.device}")
    a = _weights("a", a, x)
    b = _weights("b", b, y)
    _check_values({"x": x, "y": y, "a": a, "b": b})
    dtype = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    return x.to(dtype), y.to(dtype), a / a.sum(), b / b.sum(), eps


def _weights(name: str, weight: torch.Tensor | None, points: torch.Tensor) -> torch.Tensor:
    if weight is None:
        return torch.full((points.shape[0],), 1.0 / points.shape[0], dtype=torch.float64, device=points.device)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        raise ValueError(f"{name} must be a floating-point torch tensor or None, got {_kind(weight)}")
    if weight.shape != points.shape[:1]:
        raise ValueError(f"{name} must have shape [{points.shape[0]}], one weight a point, got {tuple(weight.shape)}")
    if weight.device != points.device:
        raise ValueError(f"{name} must be on {points.device} like its points, got {weight.device}")
    return weight.double()


def _check_values(arrays: dict[str, torch.Tensor]) -> None:
    """One device-to-host read for all checks: finiteness of every array, signs and sums of the weights."""
    finite = torch.stack([torch.isfinite(array.sum(dtype=torch.float64)) for array in arrays.values()]).double()
    a, b = arrays["a"], arrays["b"]
    values = torch.cat([finite, torch.stack([a.min(), b.min(), a.sum(), b.sum()])]).tolist()
    for name, is_finite in zip(arrays, values[:4], strict=True):
        if not is_finite:
            raise ValueError(f"{name} contains NaN or infinite values: remove or replace them first")
    least_a, least_b, mass_a, mass_b = values[4:]
    for name, least, mass in (("a", least_a, mass_a), ("b", least_b, mass_b)):
        if least < 0:
            raise ValueError(f"{name} has negative weights (least {least:g}): weights must be non-negative")
        if mass == 0:
            raise ValueError(f"{name} sums to zero: at least one weight must be positive")
    if abs(mass_a - mass_b) > MASS_TOLERANCE * max(mass_a, mass_b):
        raise ValueError(f"a and b must have the same mass, got {mass_a:g} and {mass_b:g}: normalise them first")


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
