"""Tiny problems whose value is known on paper: single points, two points, separated masses."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked
from fsbench.problems.sampling import uneven_weights

_Two = Annotated[int, Within(2, 2)]


def _one_is_single(*, n: int, m: int, **_: object) -> None:
    if n != 1 and m != 1:
        raise ValueError(f"n or m must be 1 for single_point, got n={n}, m={m}")


@checked(_one_is_single)
def single_point(*, n: int, m: int, d: int, eps: float, seed: int) -> Clouds:
    """One point against a Gaussian cloud with uneven weights, or the reverse: the value is the mean squared distance.

    ValueError unless n or m is 1.
    """
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((n, d)), rng.standard_normal((m, d))
    a, b = uneven_weights(rng, n), uneven_weights(rng, m)
    squared = ((x[:, None] - y[None]) ** 2).sum(-1)  # [n, m], one of them 1
    return Clouds(x, y, a, b, float(a @ squared @ b))


@checked()
def two_points(*, n: _Two, m: _Two, d: int, eps: float, seed: int) -> Clouds:
    """{0, e_1} on both sides, equal weights: OT_eps = -eps log((1 + exp(-1 / eps)) / 2).

    ValueError unless n = m = 2.
    """
    x = _segment(d, 1.0)
    half = np.full(2, 0.5)
    return Clouds(x, x.copy(), half, half.copy(), float(-eps * (np.log1p(np.exp(-1 / eps)) - np.log(2))))


def _far_apart(*, eps: float, length: float, p: float, q: float, **_: object) -> None:
    if not q < p:
        raise ValueError(f"p must be above q, got {p=}, {q=}")
    if length**2 < 20 * eps:
        raise ValueError(f"length must be at least sqrt(20 eps) = {np.sqrt(20 * eps):g}, got {length}")


@checked(_far_apart)
def disjoint_masses(
    *,
    n: _Two,
    m: _Two,
    d: int,
    eps: float,
    seed: int,
    length: Annotated[float, Within(1e-6, 1e6)] = 10.0,
    p: Annotated[float, Within(1e-9, 1 - 1e-9)] = 0.7,
    q: Annotated[float, Within(1e-9, 1 - 1e-9)] = 0.2,
) -> Clouds:
    """{0, length e_1} on both sides with masses (p, 1-p) and (q, 1-q), so far apart that P = [[q, p-q], [0, 1-p]].

    Plain iterations take a number of steps proportional to length^2 / eps to find it. ValueError unless n = m = 2 and
    q < p, or if length^2 is under 20 eps, where the last entry of P is more than rounding.
    """
    x = _segment(d, length)
    a, b = np.array([p, 1 - p]), np.array([q, 1 - q])
    plan = np.array([q, p - q, 1 - p])
    relative_entropy = float(plan @ np.log(plan / np.array([p * q, p * (1 - q), (1 - p) * (1 - q)])))
    return Clouds(x, x.copy(), a, b, (p - q) * length**2 + eps * relative_entropy)


def _segment(d: int, length: float) -> np.ndarray:
    points = np.zeros((2, d))
    points[1, 0] = length
    return points
