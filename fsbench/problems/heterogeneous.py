"""A density with a hundredfold contrast onto a uniform cube: spacings differ by a factor of five within one cloud."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import equal_weights


@checked()
def heterogeneous(
    *,
    n: int,
    m: int,
    d: int,
    eps: float,
    seed: int,
    mass: Annotated[float, Within(1e-6, 1 - 1e-6)] = 0.5,
    volume: Annotated[float, Within(1e-9, 0.99)] = 0.01,
) -> Clouds:
    """x: a share `mass` of the points uniform in a small cube of that `volume`, the others uniform in the rest of
    [0, 1]^d; y uniform in [0, 1]^d; equal weights.

    The small cube lies at a place that the seed picks. ValueError if a setting is out of its range.
    """
    rng = np.random.default_rng(seed)
    side = volume ** (1 / d)
    corner = rng.random(d) * (1 - side)
    inside = round(mass * n)
    dense = corner + side * rng.random((inside, d))
    x = np.concatenate([dense, _outside(rng, n - inside, corner, side)])
    return Clouds(x, rng.random((m, d)), equal_weights(n), equal_weights(m))


def _outside(rng: np.random.Generator, size: int, corner: np.ndarray, side: float) -> np.ndarray:
    """`size` points uniform in the unit cube without the small one."""
    kept = np.empty((0, len(corner)))
    while len(kept) < size:
        points = rng.random((size, len(corner)))
        is_inside = ((points >= corner) & (points < corner + side)).all(1)
        kept = np.concatenate([kept, points[~is_inside]])
    return kept[:size]
