"""A thin sheet onto a thick curve, in three dimensions: almost two- and one-dimensional supports."""

from __future__ import annotations

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.sampling import equal_weights


def sheet_curve(
    *,
    n: int,
    m: int,
    d: int,
    eps: float,
    seed: int,
    thickness: float = 0.01,
    radius: float = 0.35,
    turns: float = 3.0,
    tube: float = 0.02,
) -> Clouds:
    """x: the unit square at height 1/2 with N(0, thickness^2) across; y: a helix of so many turns about the cube's
    vertical axis, uniform in arc length, with N(0, tube^2 I_3) around it. Equal weights.

    Lengths in units of the cube's side. ValueError if d is not 3, or a length or turns is negative.
    """
    if d != 3:
        raise ValueError(f"d must be 3 for sheet_curve, got {d}")
    for name, value in (("thickness", thickness), ("radius", radius), ("turns", turns), ("tube", tube)):
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    rng = np.random.default_rng(seed)
    x = np.column_stack([rng.random((n, 2)), 0.5 + thickness * rng.standard_normal(n)])
    height = rng.random(m)
    angle = 2 * np.pi * turns * height
    helix = np.column_stack([0.5 + radius * np.cos(angle), 0.5 + radius * np.sin(angle), height])
    return Clouds(x, helix + tube * rng.standard_normal((m, 3)), equal_weights(n), equal_weights(m))
