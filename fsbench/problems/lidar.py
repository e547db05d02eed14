"""One room scanned from two poses: density falls with the squared distance to the scanner, and shadows differ."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import directions, equal_weights

POSES = np.array([[0.25, 0.3, 0.35], [0.7, 0.6, 0.45]])  # of the scanner of x and of y, in room sides


@checked()
def lidar(
    *,
    n: int,
    m: int,
    d: Annotated[int, Within(3, 3)],
    eps: float,
    seed: int,
    balls: Annotated[int, Within(0, 1000)] = 8,
    radius: Annotated[float, Within(1e-3, 0.15)] = 0.08,
    noise: Annotated[float, Within(0, 0.1)] = 0.002,
) -> Clouds:
    """Rays uniform in solid angle from either pose, each ending on the first surface of the same room, [0, 1]^3.

    The room holds `balls` balls of that radius, which the seed places clear of both poses. Points per area go as
    cos(incidence) / distance^2. noise: of the distances, Gaussian, in room sides. Equal weights.
    ValueError if d is not 3 or a setting is out of its range.
    """
    rng = np.random.default_rng(seed)
    centres = _clear_centres(rng, balls, radius)
    x, y = (_scan(rng, size, pose, centres, radius, noise) for size, pose in zip((n, m), POSES, strict=True))
    return Clouds(x, y, equal_weights(n), equal_weights(m))


def _clear_centres(rng: np.random.Generator, balls: int, radius: float) -> np.ndarray:
    """Centres [balls, 3] of balls inside the room whose surface is at least a radius away from either pose."""
    centres = np.empty((0, 3))
    while len(centres) < balls:
        drawn = radius + (1 - 2 * radius) * rng.random((balls, 3))
        gaps = np.linalg.norm(drawn[:, None] - POSES, axis=2)  # [balls, 2]
        centres = np.concatenate([centres, drawn[(gaps >= 2 * radius).all(1)]])
    return centres[:balls]


def _scan(
    rng: np.random.Generator, size: int, pose: np.ndarray, centres: np.ndarray, radius: float, noise: float
) -> np.ndarray:
    """Where `size` rays from `pose` first meet a wall or a ball, with noise along the ray."""
    rays = directions(rng, size, 3)
    with np.errstate(divide="ignore"):
        distance = (np.where(rays > 0, 1 - pose, pose) / np.abs(rays)).min(1)  # to the walls: [size]
    for centre in centres:
        along = rays @ (centre - pose)
        half_chord_squared = radius**2 - (((centre - pose) ** 2).sum() - along**2)
        entry = along - np.sqrt(np.maximum(half_chord_squared, 0))
        is_hit = (half_chord_squared > 0) & (along > 0)
        distance = np.where(is_hit & (entry < distance), entry, distance)
    return pose + (distance + noise * rng.standard_normal(size))[:, None] * rays
