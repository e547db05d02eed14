"""A uniform cube onto a Gaussian."""

from __future__ import annotations

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.sampling import equal_weights


def uniform_gaussian(*, n: int, m: int, d: int, eps: float, seed: int, std: float = 0.25) -> Clouds:
    """x uniform in [0, 1]^d; y ~ N(1/2, std^2 I_d); equal weights. ValueError unless std is positive."""
    if not std > 0:
        raise ValueError(f"std must be positive, got {std}")
    rng = np.random.default_rng(seed)
    x, y = rng.random((n, d)), 0.5 + std * rng.standard_normal((m, d))
    return Clouds(x, y, equal_weights(n), equal_weights(m))
