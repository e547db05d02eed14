"""Means of the plan's change along a motion, pair by pair: once a Hessian product, not in its linear solve."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import TiledCloud
from ..sweep.blocked_sweep import batches
from .side import Side


def change_means(
    side: Side,
    log2_sums: Tensor,
    alpha: Tensor,
    beta: Tensor,
    v: Tensor | None,
    w: Tensor | None,
    *,
    cost_scale: float,
) -> tuple[Tensor, Tensor]:
    """Means [N] of q_ij = alpha_i + beta_j - 2 cost_scale (x_i - y_j).(v_i - w_j), and [N, d] of q_ij (x_i - y_j).

    alpha [N], beta [M], v [N, d], w [M, d], None: zero; float64 and in kd order, as are the means; log2_sums [N]: of
    `Side.sums`. Rows without weight, and those that meet no pair, have zeros. In torch on either device.
    """
    rows, cols = side.rows, side.cols
    d = rows.centre.shape[1]
    u = side.u - torch.where(log2_sums.isfinite(), log2_sums, 0.0)
    total, mean = (torch.zeros_like(alpha).view(rows.tree.tiles, -1) for _ in range(2))
    moved = alpha.new_zeros(rows.tree.tiles, rows.tree.tile, d)
    alpha, x = _tiled(rows, alpha), _tiled(rows, rows.local.double())
    beta, y = _tiled(cols, beta), _tiled(cols, cols.local.double())
    v, w = None if v is None else _tiled(rows, v), None if w is None else _tiled(cols, w)
    for batch, i, exponents in batches(rows, cols, side.starts, side.lists, u, side.v, side.k):
        j = side.lists[batch].long()
        between = (rows.centre[i] - cols.centre[j])[:, None, None] + x[i][:, :, None] - y[j][:, None]  # [c, T, T, d]
        change = alpha[i][:, :, None] + beta[j][:, None]
        if v is not None:
            change -= 2.0 * cost_scale * (between * v[i][:, :, None]).sum(3)
        if w is not None:
            change += 2.0 * cost_scale * (between * w[j][:, None]).sum(3)
        weight = exponents.exp2_().double()
        total.index_add_(0, i, weight.sum(2))
        weight = weight * change
        mean.index_add_(0, i, weight.sum(2))
        moved.index_add_(0, i, (weight[:, :, None] @ between)[:, :, 0])
    counts = (total > 0) & (rows.weight.view_as(total) > 0)
    mean = torch.where(counts, mean / total, 0.0)
    moved = torch.where(counts[..., None], moved / total[..., None], 0.0)
    return mean.flatten(), moved.flatten(0, 1)


def _tiled(cloud: TiledCloud, values: Tensor) -> Tensor:
    return values.reshape(cloud.tree.tiles, cloud.tree.tile, *values.shape[1:])
