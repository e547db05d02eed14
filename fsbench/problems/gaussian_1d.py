"""Two Gaussians on a line as weighted grids: the value is the closed form between Gaussians."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from fsbench.api import Clouds
from fsbench.problems.parameters import Within, checked

_REACH = 8.0  # standard deviations a grid spans to each side: a tail of 1e-15


@checked()
def gaussian_1d(
    *,
    n: Annotated[int, Within(2, math.inf)],
    m: Annotated[int, Within(2, math.inf)],
    d: Annotated[int, Within(1, 1)],
    eps: float,
    seed: int,
    mean: Annotated[float, Within(-1e6, 1e6)] = 1.0,
    std: Annotated[float, Within(1e-6, 1e6)] = 2.0,
) -> Clouds:
    """N(0, 1) on n nodes onto N(mean, std^2) on m nodes, each over 8 standard deviations a side.

    optimal_value holds where both grids resolve the plan (spacing below its width), else None. The seed plays
    no part. Source: Janati et al., Entropic optimal transport between unbalanced Gaussian measures has a closed form,
    2020. ValueError if d is not 1, a side has fewer than two nodes, or a setting is
    out of its range.
    """
    nodes_x, nodes_y = np.linspace(-_REACH, _REACH, n), np.linspace(-_REACH, _REACH, m)
    a, b = (np.exp(-(z**2) / 2) for z in (nodes_x, nodes_y))
    value = gaussian_value(mean=mean, std_x=1.0, std_y=std, eps=eps)
    spacing = 2 * _REACH * max(1 / (n - 1), std / (m - 1))
    # A grid as coarse as the plan is wide is off by 2 exp(-2 pi^2) = 5e-9 (Poisson summation).
    resolved = spacing < _conditional_std(std_x=1.0, std_y=std, eps=eps)
    return Clouds(
        nodes_x[:, None], mean + std * nodes_y[:, None], a / a.sum(), b / b.sum(), value if resolved else None
    )


def gaussian_value(*, mean: float, std_x: float, std_y: float, eps: float) -> float:
    """OT_eps of C = |x - y|^2 between N(0, std_x^2) and N(mean, std_y^2), KL to the product of the marginals."""
    q = eps / 2
    root = np.sqrt(4 * std_x**2 * std_y**2 + q**2)
    return float(mean**2 + std_x**2 + std_y**2 - root + q * (1 - np.log(2 * q)) + q * np.log(root + q))


def _conditional_std(*, std_x: float, std_y: float, eps: float) -> float:
    """The smaller of the standard deviations of y given x and of x given y under the optimal plan."""
    covariance = (np.sqrt(4 * std_x**2 * std_y**2 + (eps / 2) ** 2) - eps / 2) / 2
    return float(np.sqrt(std_x**2 * std_y**2 - covariance**2) / max(std_x, std_y))
