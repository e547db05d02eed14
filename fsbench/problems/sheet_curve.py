"""A thin sheet onto a thick curve, in three dimensions: almost two- and one-dimensional supports."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import equal_weights


@checked()
def sheet_curve(
    *,
    n: int,
    m: int,
    d: Annotated[int, Within(3, 3)],
    eps: float,
    seed: int,
    thickness: Annotated[float, Within(0, 1)] = 0.01,
    radius: Annotated[float, Within(0, 1e3)] = 0.35,
    turns: Annotated[float, Within(0, 1e3)] = 3.0,
    tube: Annotated[float, Within(0, 1)] = 0.02,
) -> Clouds:
    """x: the unit square at height 1/2 with N(0, thickness^2) across; y: a helix of so many turns about the cube's
    vertical axis, uniform in arc length, with N(0, tube^2 I_3) around it. Equal weights.

    Lengths in units of the cube's side. ValueError if d is not 3 or a setting is out of its range.
    """
    rng = np.random.default_rng(seed)
    x = np.column_stack([rng.random((n, 2)), 0.5 + thickness * rng.standard_normal(n)])
    height = rng.random(m)
    angle = 2 * np.pi * turns * height
    helix = np.column_stack([0.5 + radius * np.cos(angle), 0.5 + radius * np.sin(angle), height])
    return Clouds(x, helix + tube * rng.standard_normal((m, 3)), equal_weights(n), equal_weights(m))
