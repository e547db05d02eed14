"""A noisy sphere shell onto a solid torus, in three dimensions: supports of different shape and topology."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import directions, equal_weights


def _hole(*, radius: float, tube: float, **_: object) -> None:
    if tube > radius:
        raise ValueError(f"tube must be at most radius, {radius}, got {tube}")


@checked(_hole)
def shell_torus(
    *,
    n: int,
    m: int,
    d: Annotated[int, Within(3, 3)],
    eps: float,
    seed: int,
    noise: Annotated[float, Within(0, 1)] = 0.02,
    radius: Annotated[float, Within(1e-3, 1e3)] = 0.35,
    tube: Annotated[float, Within(1e-3, 1e3)] = 0.12,
) -> Clouds:
    """x on a sphere of radius 0.35 with relative radial noise; y uniform in a solid torus around the same centre.

    Equal weights. ValueError if d is not 3, tube is more than radius, or a setting is out of its range.
    """
    rng = np.random.default_rng(seed)
    x = 0.5 + radius * (1 + noise * rng.standard_normal((n, 1))) * directions(rng, n, 3)
    return Clouds(x, 0.5 + _solid_torus(rng, m, radius, tube), equal_weights(n), equal_weights(m))


def _solid_torus(rng: np.random.Generator, size: int, radius: float, tube: float) -> np.ndarray:
    """Uniform in volume: the disc is swept uniformly, then kept with probability ~ distance from the axis."""
    kept: list[np.ndarray] = []
    while sum(map(len, kept)) < size:
        r, angle = tube * np.sqrt(rng.random(size)), 2 * np.pi * rng.random(size)
        from_axis, height = radius + r * np.cos(angle), r * np.sin(angle)
        keep = rng.random(size) * (radius + tube) < from_axis
        around = 2 * np.pi * rng.random(size)
        points = np.stack([from_axis * np.cos(around), from_axis * np.sin(around), height], axis=1)
        kept.append(points[keep])
    return np.concatenate(kept)[:size]
