"""A coarse level over all pairs of its points by the dense solver, which is sooner through with them than corrections
are made, on a GPU up to many points: there a host's launches take the time."""

from __future__ import annotations

import math
import time

from torch import Tensor

from solvers import flash_sinkhorn

from ..iterate import Options
from .anneal import squared_diameter
from .levels import Level

# by device: of points, of the largest level that is solved so
MOST_PAIRS = {"cuda": 2**26, "cpu": 2**20}
# mixing alone leaves slow waves that the residual hardly shows, so it goes further than corrected levels do
TOLERANCE, MOST_ITERATIONS = 3e-3, 200
REACH = 4e4  # of the largest cost over eps: there float32 still holds exponents to less than the tolerance


def is_dense(level: Level) -> bool:
    """Whether the level may be tried over all pairs of points."""
    n, m = level.x.cloud.tree.n, level.y.cloud.tree.n
    return n * m <= MOST_PAIRS.get(level.x.cloud.mass.device.type, 0)


def solved_densely(level: Level, *, cost_scale: float, options: Options) -> tuple[Tensor, Tensor, float] | None:
    """u, v in base 2, and how many pairs of points passes went over; None where that leads nowhere in time."""
    x, y = level.x.cloud, level.y.cloud
    left = None if options.deadline is None else options.deadline - time.perf_counter()
    if cost_scale * squared_diameter(x, y) > REACH * level.eps or (left is not None and left <= 0):
        return None
    found = flash_sinkhorn.solve(
        x.points, y.points, x.weight, y.weight,
        eps=level.eps, cost_scale=cost_scale, tol=TOLERANCE, max_iterations=MOST_ITERATIONS, max_seconds=left,
    )  # fmt: skip
    if not found.converged:
        return None
    unit = math.log2(math.e) / level.eps
    return found.f * unit, found.g * unit, found.n_passes * x.tree.n * y.tree.n
