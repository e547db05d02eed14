"""A cell's inputs: the solver and problem that its targets name, and the clouds as every solver gets them."""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

import numpy as np

from fsbench.api import Cell, Clouds

WEIGHT_TOLERANCE = 1e-6  # on a sum of one: float32 rounding of the weights of 10^8 points stays below


def load_target(target: str) -> Any:
    """The object that a dotted path names. ImportError if the module or the name is not there."""
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as missing:
        raise ImportError(f"{module} has no {name!r}: check _target_: {target}") from missing


def clouds_of(cell: Cell) -> Clouds:
    """The cell's clouds as every solver gets them: from the seed in float64, then cast to the cell's dtype.

    The closed form follows the cost: OT_eps of cost_scale * C is cost_scale * OT_(eps / cost_scale) of C.
    """
    family = load_target(cell.problem_target)
    exact: Clouds = family(
        n=cell.n, m=cell.m, d=cell.d, eps=cell.eps / cell.cost_scale, seed=cell.seed, **cell.problem_params
    )
    _check_clouds(cell, exact)
    x, y, a, b = (np.ascontiguousarray(v, dtype=cell.dtype) for v in arrays_of(exact))
    return Clouds(x, y, a, b, None if exact.optimal_value is None else cell.cost_scale * exact.optimal_value)


def _check_clouds(cell: Cell, clouds: Clouds) -> None:
    """ValueError, naming the problem family, unless it kept to what `Clouds` promises."""
    whose = f"problem family {cell.problem} ({cell.problem_target})"
    if not isinstance(clouds, Clouds):
        raise ValueError(f"{whose} must return fsbench.api.Clouds, got {type(clouds).__name__}")
    shapes = {"x": (cell.n, cell.d), "y": (cell.m, cell.d), "a": (cell.n,), "b": (cell.m,)}
    for (name, shape), values in zip(shapes.items(), arrays_of(clouds), strict=True):
        if np.shape(values) != shape:
            raise ValueError(f"{whose} must return {name} of shape {shape}, got {np.shape(values)}")
        if not np.isfinite(values).all():
            raise ValueError(f"{whose} returned {name} with NaN or infinite values")
    for name, weight in (("a", clouds.a), ("b", clouds.b)):
        if (weight < 0).any() or abs(weight.sum() - 1) > WEIGHT_TOLERANCE:
            raise ValueError(f"{whose} must return non-negative {name} that sums to one, got {weight.sum():g}")


def arrays_of(clouds: Clouds) -> tuple[np.ndarray, ...]:
    """x, y, a, b."""
    return clouds.x, clouds.y, clouds.a, clouds.b


def input_hash(clouds: Clouds) -> str:
    """SHA-256 of shapes, dtypes and bytes: equal inputs, equal hash."""
    digest = hashlib.sha256()
    for values in arrays_of(clouds):
        digest.update(f"{values.shape}{values.dtype}".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
