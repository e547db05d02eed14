"""Symmetric updates: both half-steps read the same potentials, and each is taken half way."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..geometry import TiledCloud
from ..screen import Mask
from ..sweep import sweep

AVERAGED, WHOLE = 0.5, 1.0  # shares of a half-step
LEAST_LOG2_SUM = -1000.0  # of rows that meet no tile


def updated(
    x: TiledCloud, y: TiledCloud, mask: Mask, u: Tensor, v: Tensor, k: float, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """u [N], v [M] moved by `share` of their half-steps; and []: the larger side's mean of |log of a marginal over its
    weight| before, by weight. A row that meets no tile is taken to sum to its bound."""
    sides = (
        (x, y, mask.row_starts, mask.cols, u, v, mask.row_bound),
        (y, x, mask.col_starts, mask.rows, v, u, mask.col_bound),
    )
    moved, off = [], []
    for rows, cols, starts, lists, own, other, bound in sides:
        sums = sweep(rows, cols, starts, lists, own, other, k, robust=True).log2_sums
        most = bound.log2().clamp(min=LEAST_LOG2_SUM).repeat_interleave(rows.tree.tile)
        sums = torch.where(sums == -torch.inf, torch.where(rows.weight > 0, most, 0.0), sums)
        moved.append(own - share * sums)
        off.append((rows.weight * sums.abs()).sum())
    return moved[0], moved[1], math.log(2.0) * torch.stack(off).amax()
