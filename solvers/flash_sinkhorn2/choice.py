"""Whether kept pairs or all pairs are the cheaper way: an estimate of how many a mask keeps, from a sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .geometry.clouds import LARGEST_DIMENSION

SAMPLE, NEIGHBOURS = 256, 1 << 14  # points at which pairs are counted, and points that are counted
BUDGET = 1 / 4000  # of the tolerance: what a mask leaves out, its slack included
NEAREST = 8  # whose distance says how dense the cloud is
LEAST_PAIRS = {"cpu": 1 << 24, "cuda": 1 << 34}  # of both clouds: with fewer, all are done before tiles are chosen
SAVING = 8  # all pairs over kept ones, at least: tiles cost more a pair, and must be chosen


def is_sparse(x: Tensor, y: Tensor, *, eps: float, cost_scale: float, tol: float) -> bool:
    """Whether going over kept pairs of x [n, d], y [m, d] pays: d of 1 to 6, enough pairs for the device, and an eighth
    of them to be kept at most. Waits for the device if the first two are so."""
    n, m, d = len(x), len(y), x.shape[1]
    if not 1 <= d <= LARGEST_DIMENSION or n * m < LEAST_PAIRS.get(x.device.type, math.inf):
        return False
    return SAVING * kept_pairs(x, y, eps=eps, cost_scale=cost_scale, tol=tol) <= m


def kept_pairs(x: Tensor, y: Tensor, *, eps: float, cost_scale: float, tol: float, tile: int = 32) -> float:
    """Roughly how many points of y [m, d] a point of x [n, d] meets in the last mask. Waits for the device.

    A row of the plan is a Gaussian of variance eps / (2 cost_scale) an axis, times how the transport stretches. So its
    points are those within reach of their neighbour in their own cloud, by the geometric mean of both clouds' shares;
    its tiles reach further by their width.
    """
    reach = math.sqrt(eps / cost_scale * (math.log1p(1 / (BUDGET * tol)) + x.shape[1] / 2))
    shares = [_share_within(points.detach(), reach, tile) for points in (x, y)]
    return len(y) * math.sqrt(shares[0] * shares[1])


def _share_within(points: Tensor, reach: float, tile: int) -> float:
    """Mean share of the cloud within `reach` and two widths of a tile of its points."""
    n, d = points.shape
    points = _spread(points, NEIGHBOURS).double()
    distances = torch.cdist(_spread(points, SAMPLE), points, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = min(NEAREST, len(points))
    width = distances.kthvalue(nearest, 1, keepdim=True).values * (tile / n * len(points) / nearest) ** (1 / d)
    return float((distances <= reach + 2 * width).float().mean())


def _spread(points: Tensor, count: int) -> Tensor:
    """At most so many points, at equal steps."""
    step = -(-len(points) // count)
    return points[::step]
