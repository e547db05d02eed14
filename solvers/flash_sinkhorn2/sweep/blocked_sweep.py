"""A pass in torch: kept tile pairs in batches, exponents formed in float64 and rounded to the clouds' precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..geometry import TiledCloud

PAIRS_AT_ONCE = 1 << 21  # point pairs of a batch


def sweep_blocked(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float,
    *, robust: bool, partial: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """log2_sums, partial and anchor as in `Pass`."""
    tile, tiles = rows.tree.tile, rows.tree.tiles
    anchor = _anchor(rows, cols, starts, lists, u, v, k) if robust else torch.zeros_like(u, dtype=torch.float32)
    sums = torch.zeros(tiles, tile, dtype=torch.float64, device=u.device)
    stored = torch.empty(lists.shape[0], tile, dtype=torch.float32, device=u.device) if partial else None
    for batch, row_tiles, exponents in _batches(rows, cols, starts, lists, u - anchor.double(), v, k):
        s = exponents.exp2_().sum(2)
        sums.index_add_(0, row_tiles, s.double())
        if stored is not None:
            stored[batch] = s.float()
    return sums.view(-1).log2_() + anchor.double(), stored, anchor


def apply_blocked(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float, values: Tensor,
    *, robust: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sum_j 2^(t_ij - anchor_i) values_j [N, r], and anchor."""
    anchor = _anchor(rows, cols, starts, lists, u, v, k) if robust else torch.zeros_like(u, dtype=torch.float32)
    of_tiles = values.double().view(cols.tree.tiles, cols.tree.tile, -1)
    out = torch.zeros(rows.tree.tiles, rows.tree.tile, values.shape[1], dtype=torch.float64, device=u.device)
    for batch, row_tiles, exponents in _batches(rows, cols, starts, lists, u - anchor.double(), v, k):
        out.index_add_(0, row_tiles, exponents.exp2_().double() @ of_tiles[lists[batch].long()])
    return out.flatten(0, 1), anchor


def _anchor(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float
) -> Tensor:
    """The rows' largest exponents [N] float32, 0 where all are -inf."""
    largest = torch.full((rows.tree.tiles, rows.tree.tile), -torch.inf, dtype=torch.float32, device=u.device)
    for _, row_tiles, exponents in _batches(rows, cols, starts, lists, u, v, k):
        index = row_tiles[:, None].expand(-1, rows.tree.tile)
        largest.scatter_reduce_(0, index, exponents.amax(2).float(), "amax")
    return torch.where(largest == -torch.inf, 0.0, largest).view(-1)


def _batches(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(slice of the lists, row tiles [c], exponents [c, T, T]) of c tile pairs at a time."""
    row_of_pair = torch.repeat_interleave(starts[1:] - starts[:-1])
    row_tile, col_tile = rows.tree.tile, cols.tree.tile
    row_potential, col_potential = u.view(-1, row_tile), (v + cols.log2_weight).view(-1, col_tile)
    x = rows.local.double().view(-1, row_tile, rows.centre.shape[1])
    y = cols.local.double().view(-1, col_tile, cols.centre.shape[1])
    at_once = max(PAIRS_AT_ONCE // (row_tile * col_tile), 1)
    for start in range(0, lists.shape[0], at_once):
        batch = slice(start, min(start + at_once, lists.shape[0]))
        i, j = row_of_pair[batch], lists[batch].long()
        centres = (rows.centre[i] - cols.centre[j])[:, None]
        x_relative = x[i] + centres  # x_i - Y_J
        row_part = row_potential[i] - k * x_relative.square().sum(2)
        col_part = col_potential[j] - k * y[j].square().sum(2)
        brackets = row_part[:, :, None] + col_part[:, None]
        exponents = torch.baddbmm(brackets, x_relative, y[j].transpose(1, 2), alpha=2.0 * k)
        yield batch, i, exponents.to(rows.local.dtype)
