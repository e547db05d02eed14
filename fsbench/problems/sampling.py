"""What several families draw: weights, and directions on a sphere."""

from __future__ import annotations

import numpy as np


def equal_weights(n: int) -> np.ndarray:
    """n weights of 1 / n."""
    return np.full(n, 1 / n)


def uneven_weights(rng: np.random.Generator, n: int) -> np.ndarray:
    """n weights U(0.1, 1.1), normalised."""
    weights = rng.uniform(0.1, 1.1, n)
    return weights / weights.sum()


def directions(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    """n unit vectors [n, d], uniform on the sphere."""
    normal = rng.standard_normal((n, d))
    return normal / np.linalg.norm(normal, axis=1, keepdims=True)
