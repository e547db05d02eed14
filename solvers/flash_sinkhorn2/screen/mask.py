"""Which tile pairs are kept, and what the others could hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

ROUNDS = 2  # a row's refusal leaves allowance to its columns' other tiles


@dataclass(eq=False)
class Mask:
    """Kept tile pairs, by rows and by columns.

    row_starts [tiles_x + 1] int64, cols [K] int32: the tiles of y that tile I of x keeps, ascending;
    col_starts [tiles_y + 1] int64, rows [K] int32: the mirror image.
    to_columns [K] int64: entry e in column order is entry to_columns[e] in row order.
    row_bound [tiles_x], col_bound [tiles_y] float64: bounds of sum_j 2^t_ij over all left out, for any row i of the
    tile with weight (any column), at the potentials screened with; so the row leaves out at most a_i row_bound of P.
    """

    row_starts: Tensor
    cols: Tensor
    col_starts: Tensor
    rows: Tensor
    to_columns: Tensor
    row_bound: Tensor
    col_bound: Tensor

    def row_of_entries(self) -> Tensor:
        """[K] int64: the tile of x of each entry, in row order."""
        return torch.repeat_interleave(self.row_starts.diff())


def mask_of(rows: Tensor, cols: Tensor, row_bound: Tensor, col_bound: Tensor) -> Mask:
    """The mask of tile pairs rows, cols [K], in any order."""
    order = (rows.long() * len(col_bound) + cols).sort().indices
    rows, cols = rows[order].int(), cols[order].int()
    by_column = cols.sort(stable=True).indices
    row_starts, col_starts = _starts(rows, len(row_bound)), _starts(cols, len(col_bound))
    return Mask(row_starts, cols, col_starts, rows[by_column], by_column, row_bound, col_bound)


def within_budget(
    rows: Tensor,
    cols: Tensor,
    row_cost: Tensor,
    col_cost: Tensor,
    row_bound: Tensor,
    col_bound: Tensor,
    budget: float,
) -> Mask:
    """The mask without the pairs [K] that row_bound and col_bound, sums left out already, allow to leave out too.

    A pair costs every row of its tile at most row_cost, every column at most col_cost. Of each row tile and of each
    column tile the cheapest are left out while the sum stays within `budget`, if row and column both allow it.
    """
    for _ in range(ROUNDS):
        out = _affordable(rows, row_cost, budget - row_bound) & _affordable(cols, col_cost, budget - col_bound)
        row_bound = row_bound.index_add(0, rows[out], row_cost[out])
        col_bound = col_bound.index_add(0, cols[out], col_cost[out])
        rows, cols, row_cost, col_cost = (values[~out] for values in (rows, cols, row_cost, col_cost))
    return mask_of(rows, cols, row_bound, col_bound)


def thin(mask: Mask, row_tile_max: Tensor, col_tile_max: Tensor, budget: float) -> Mask:
    """The mask without the pairs whose measured sums fit into the rest of the budget.

    row_tile_max, col_tile_max [K], both in row order: of each kept pair the largest sum over its columns of 2^t_ij of
    any row with weight, and over its rows of any column. The new bounds hold where those were measured and the mask's
    own bounds hold as well.
    """
    return within_budget(
        mask.row_of_entries(), mask.cols, row_tile_max, col_tile_max, mask.row_bound, mask.col_bound, budget
    )


def _affordable(group: Tensor, cost: Tensor, allowance: Tensor) -> Tensor:
    """[K] bool: the cheapest of each group, as long as their sum is within the group's allowance."""
    share = cost / allowance.clamp_min(torch.finfo(torch.float64).tiny)[group]
    rank = share.log2().clamp(-62.0, 1.0).add_(62.0).div_(64.0)
    order = rank.add_(group).sort().indices
    total = pad(share.clamp_max_(2.0)[order].cumsum(0), (1, 0))  # 2: too much, and too little to cost the others digits
    spent = total[1:] - total[_starts(group, len(allowance))][group[order]]
    return torch.empty_like(spent, dtype=torch.bool).scatter_(0, order, spent <= 1.0)


def _starts(group: Tensor, groups: int) -> Tensor:
    return pad(torch.bincount(group, minlength=groups).cumsum(0), (1, 0))
