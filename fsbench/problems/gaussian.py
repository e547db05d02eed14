"""Two Gaussian clouds with uneven weights: the protocol of the published forward and backward tables."""

from __future__ import annotations

import math

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import checked
from fsbench.problems.sampling import uneven_weights


@checked()
def gaussian(*, n: int, m: int, d: int, eps: float, seed: int, unit_distance: bool = False) -> Clouds:
    """x, y ~ N(0, I_d); weights U(0.1, 1.1), normalised.

    unit_distance: points over sqrt(2 d), so that the expected |x - y|^2 is one and eps is the fraction of it.
    """
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((n, d)), rng.standard_normal((m, d))
    a, b = uneven_weights(rng, n), uneven_weights(rng, m)
    unit = math.sqrt(2 * d) if unit_distance else 1.0
    return Clouds(x / unit, y / unit, a, b)
