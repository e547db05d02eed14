"""A start from the two self problems: clouds that differ little, or by a translation, need no cascade."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..geometry import TiledCloud
from ..iterate import Options, Outcome, ScreenedPasses, iterate
from ..sweep import sweep

SAMPLE = 32  # row tiles whose sums over all columns say whether the start is good
NEAR = 0.1  # mean error of these sums, and residual of the first iteration, beyond which clouds are not near copies
FIRST_BUDGET = 1e-3  # of the first mask


def solve_near_copy(
    x: TiledCloud, y: TiledCloud, u: Tensor, v: Tensor, k: float, *, tol: float, options: Options
) -> tuple[Outcome, ScreenedPasses] | None:
    """From potentials u [N] of x with itself and v [M] of y with itself, base 2, kd order; None where they are no good.

    If x is y moved along t, u_i + 2 k t.x_i - k |t|^2 and v_j - 2 k t.y_j solve the problem, whatever eps, and t is the
    difference of the means. Errors are then those of the self problems and cancel in the divergence.
    """
    t = _mean(x) - _mean(y)
    u = u + 2 * k * (x.points @ t) - k * t.square().sum()
    v = v - 2 * k * (y.points @ t)
    if not _sampled_error(x, y, u, v, k) <= NEAR:
        return None
    passes = ScreenedPasses(x, y, k)
    passes.refresh(u, v, min(FIRST_BUDGET, tol))
    outcome = iterate(passes, u, v, tol=tol, options=replace(options, max_passes=2))
    if outcome.converged:
        return outcome, passes
    if not outcome.residual <= NEAR:
        return None
    outcome = iterate(passes, outcome.u, outcome.v, tol=tol, options=options)
    outcome.n_passes += 2
    return outcome, passes


def _sampled_error(x: TiledCloud, y: TiledCloud, u: Tensor, v: Tensor, k: float) -> float:
    """Mean of |sum_j 2^t_ij - 1| over points of some tiles of x, by weight."""
    tiles, opposite = x.tree.tiles, y.tree.tiles
    count = min(SAMPLE, tiles)
    chosen = torch.arange(count, device=u.device) * tiles // count
    starts = torch.zeros(tiles + 1, dtype=torch.int64, device=u.device)
    starts[chosen + 1] = opposite
    lists = torch.arange(opposite, dtype=torch.int32, device=u.device).repeat(count)
    sums = sweep(x, y, starts.cumsum(0), lists, u, v, k, robust=True).log2_sums.view(tiles, -1)[chosen]
    weight = x.weight.view(tiles, -1)[chosen]
    if not bool(weight.sum() > 0):
        return math.inf
    error = torch.where(weight > 0, weight * (sums.exp2() - 1.0).abs(), 0.0)
    return float(error.sum() / weight.sum())


def _mean(cloud: TiledCloud) -> Tensor:
    """[d]."""
    return (cloud.weight[:, None] * torch.where(cloud.weight[:, None] > 0, cloud.points, 0.0)).sum(0)
