"""Two uniform cubes whose weights spread over orders of magnitude: most of the mass is on few points."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked


@checked()
def lognormal_weights(
    *, n: int, m: int, d: int, eps: float, seed: int, sigma: Annotated[float, Within(0, 20)] = 2.0
) -> Clouds:
    """x, y uniform in [0, 1]^d; the weights' logarithms N(0, sigma^2), normalised. ValueError if sigma is out of its
    range."""
    rng = np.random.default_rng(seed)
    x, y = rng.random((n, d)), rng.random((m, d))
    a, b = (np.exp(sigma * rng.standard_normal(size)) for size in (n, m))
    return Clouds(x, y, a / a.sum(), b / b.sum())
