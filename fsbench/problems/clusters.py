"""Gaussian clusters onto other Gaussian clusters: mass must move far, and eps below the cluster size is hard."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import equal_weights


@checked()
def clusters(
    *,
    n: int,
    m: int,
    d: int,
    eps: float,
    seed: int,
    count: Annotated[int, Within(1, 10**6)] = 32,
    std: Annotated[float, Within(1e-9, 1e3)] = 0.02,
) -> Clouds:
    """`count` clusters a side, centres uniform in [0, 1]^d, points N(centre, std^2 I_d), equal weights.

    ValueError if a setting is out of its range.
    """
    rng = np.random.default_rng(seed)
    x, y = (_points(rng, size, d, count, std) for size in (n, m))
    return Clouds(x, y, equal_weights(n), equal_weights(m))


def _points(rng: np.random.Generator, size: int, d: int, count: int, std: float) -> np.ndarray:
    centres = rng.random((count, d))
    return centres[rng.integers(count, size=size)] + std * rng.standard_normal((size, d))
