"""Potentials of zero instead of lifted ones where they are better: clouds that are nearly the same need no cascade."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import TiledCloud, Tree
from ..geometry.clouds import in_kd_order
from ..screen import every_pair
from ..sweep import sweep

SAMPLE, SHARE = 1024, 1 / 16  # points of x, at most, whose row sums over all of y are formed


def better_start(x: TiledCloud, y: TiledCloud, u: Tensor, v: Tensor, k: float) -> tuple[Tensor, Tensor]:
    """u, v, or constants if their dual value is larger.

    The dual value of v is that of the u with which row sums are one, here on points of x of equal shares of its weight.
    """
    sample = _sample(x, max(min(SAMPLE, int(SHARE * x.tree.n)), 1))
    zero = torch.zeros_like(v)
    of_zero, of_v = _mean_potential(sample, y, zero, k), _mean_potential(sample, y, v, k)
    linear = torch.where(y.weight > 0, y.weight * v, 0.0).sum()
    if bool(of_v + linear >= of_zero):
        return u, v
    return torch.zeros_like(u) + of_zero, zero


def _mean_potential(sample: TiledCloud, y: TiledCloud, v: Tensor, k: float) -> Tensor:
    """Of the u [points] with which the sample's row sums are one."""
    mask = every_pair(sample, y)
    zero = torch.zeros_like(sample.weight)
    sums = sweep(sample, y, mask.row_starts, mask.cols, zero, v, k, robust=True).log2_sums
    return -torch.where(sample.weight > 0, sample.weight * sums, 0.0).sum()


def _sample(cloud: TiledCloud, size: int) -> TiledCloud:
    """Points at equal steps along the running weight in kd order: spread in space as the weight is."""
    running = cloud.weight.cumsum(0)
    steps = (torch.arange(size, dtype=running.dtype, device=running.device) + 0.5) / size * running[-1]
    index = torch.searchsorted(running, steps)
    tree = Tree(size, cloud.tree.tile, torch.arange(size, device=index.device))
    return in_kd_order(tree, cloud.points[index], torch.full_like(steps, 1 / size), cloud.local.dtype)
