"""A uniform cube onto a Gaussian."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import equal_weights


@checked()
def uniform_gaussian(
    *,
    n: int,
    m: int,
    d: int,
    eps: float,
    seed: int,
    std: Annotated[float, Within(1e-6, 1e6)] = 0.25,
    offset: Annotated[float, Within(-1e6, 1e6)] = 0.0,
) -> Clouds:
    """x uniform in [0, 1]^d, y ~ N(1/2, std^2 I_d), both moved by `offset` along every axis; equal weights.

    ValueError if a setting is out of its range.
    """
    rng = np.random.default_rng(seed)
    x, y = rng.random((n, d)), 0.5 + std * rng.standard_normal((m, d))
    return Clouds(x + offset, y + offset, equal_weights(n), equal_weights(m))
