"""Two standard Gaussian clouds with uneven weights: the protocol of the published forward and backward tables."""

from __future__ import annotations

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.sampling import uneven_weights


def gaussian(*, n: int, m: int, d: int, eps: float, seed: int) -> Clouds:
    """x, y ~ N(0, I_d); weights U(0.1, 1.1), normalised."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((n, d)), rng.standard_normal((m, d))
    return Clouds(x, y, uneven_weights(rng, n), uneven_weights(rng, m))
