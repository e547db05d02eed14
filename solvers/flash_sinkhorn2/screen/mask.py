"""Which tile pairs are kept, and what the others could hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..lists import index_type, mirrored


@dataclass(eq=False)
class Mask:
    """Kept tile pairs, by rows and by columns.

    row_starts [tiles_x + 1] int64, cols [K] int32: the tiles of y that tile I of x keeps, ascending;
    col_starts [tiles_y + 1] int64, rows [K] int32: the mirror image.
    to_columns [K] int32, int64 from 2^31 on: entry e in column order is entry to_columns[e] in row order.
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
        return torch.repeat_interleave(self.row_starts.diff(), output_size=len(self.cols))


def mask_of(row_starts: Tensor, cols: Tensor, row_bound: Tensor, col_bound: Tensor) -> Mask:
    """The mask of lists cols [K] int32, row after row and each row's columns ascending."""
    return Mask(row_starts, cols, *mirrored(row_starts, cols, len(col_bound)), row_bound, col_bound)


def thin(mask: Mask, row_tile_max: Tensor, col_tile_max: Tensor, budget: float, *, chunk: int = 2**24) -> Mask:
    """The mask without the pairs that fit into what the bounds leave of the budget.

    row_tile_max [K] in row order: for each pair, of any row with weight of its tile the largest sum of 2^t_ij over the
    pair's columns; col_tile_max [K] in column order: the mirror image; measured in a pass, or bounds. Of each row tile
    and of each column tile the cheapest pairs are left out while the sum stays within `budget`, if row and column both
    allow it. The new bounds hold where those sums and the mask's bounds hold. Works on whole tiles of about `chunk`
    entries at a time.
    """
    if row_tile_max.is_cuda:
        from . import triton_thin  # Triton need not be there on machines without a GPU

        return triton_thin.thin(mask, row_tile_max, col_tile_max, budget)
    cheap = torch.empty(len(mask.cols), dtype=torch.bool, device=mask.cols.device)
    for entries, tile in _slices(mask.row_starts, chunk):
        cheap[entries] = _affordable(tile, row_tile_max[entries], budget - mask.row_bound)
    for entries, tile in _slices(mask.col_starts, chunk):
        cheap[mask.to_columns[entries]] &= _affordable(tile, col_tile_max[entries], budget - mask.col_bound)
    row_bound, col_bound = mask.row_bound.clone(), mask.col_bound.clone()
    for entries, tile in _slices(mask.row_starts, chunk):
        row_bound.index_add_(0, tile, torch.where(cheap[entries], row_tile_max[entries].double(), 0.0))
    kept = ~cheap
    kept_by_columns = kept.index_select(0, mask.to_columns)
    for entries, tile in _slices(mask.col_starts, chunk):
        col_bound.index_add_(0, tile, torch.where(kept_by_columns[entries], 0.0, col_tile_max[entries].double()))
    before = running(kept)
    return Mask(
        before[mask.row_starts],
        mask.cols[kept],
        running(kept_by_columns)[mask.col_starts],
        mask.rows[kept_by_columns],
        before[mask.to_columns[kept_by_columns]].to(index_type(len(kept))),
        row_bound,
        col_bound,
    )


def _slices(starts: Tensor, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Entries of whole tiles, about `chunk` at a time, and the tile of each: [entries] int64."""
    total = int(starts[-1])
    targets = torch.arange(0, total + chunk, chunk, device=starts.device).clamp_max_(total)
    first_tiles = torch.searchsorted(starts, targets).unique_consecutive()
    bounds = torch.stack([first_tiles, starts[first_tiles]]).T.tolist()
    for (tile, entry), (next_tile, next_entry) in itertools.pairwise(bounds):
        counts = starts[tile : next_tile + 1].diff()
        yield slice(entry, next_entry), torch.repeat_interleave(counts, output_size=next_entry - entry).add_(tile)


def _affordable(tile: Tensor, cost: Tensor, allowance: Tensor) -> Tensor:
    """[entries] bool: the cheapest of each tile, as long as their sum is within the tile's allowance [tiles]."""
    share = cost / allowance.clamp_min(torch.finfo(torch.float64).tiny)[tile]
    group = tile - tile[0]
    order = share.log2().clamp(-62.0, 1.0).add_(62.0).div_(64.0).add_(group).sort().indices
    total = running(share.clamp_max_(2.0)[order])  # 2: too much, yet costs the other tiles no digits
    first = running(torch.bincount(group))[group]
    fits = total[1:] - total[first[order]] <= 1.0
    return torch.empty_like(fits).scatter_(0, order, fits)


def running(values: Tensor) -> Tensor:
    """[n + 1]: sums of all values before each."""
    return pad(values.cumsum(0), (1, 0))
