"""A pass in torch: kept tile pairs in batches, exponents formed in float64 and rounded to the clouds' precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.threads import each_block

from ..geometry import TiledCloud

PAIRS_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 21}  # point pairs of a batch: on a CPU each is one thread's


def sweep_blocked(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float,
    *, robust: bool, partial: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """log2_sums, partial and anchor as in `Pass`."""
    tile, tiles = rows.tree.tile, rows.tree.tiles
    anchor = _anchor(rows, cols, starts, lists, u, v, k) if robust else torch.zeros_like(u, dtype=torch.float32)
    sums = torch.zeros(tiles, tile, dtype=torch.float64, device=u.device)
    stored = torch.empty(lists.shape[0], tile, dtype=torch.float32, device=u.device) if partial else None

    def sums_of_pairs(batch: slice, exponents: Tensor) -> Tensor:
        s = exponents.exp2_().sum(2)
        if stored is not None:
            stored[batch] = s.float()
        return s.double()

    _merge_batches(sums, _add, sums_of_pairs, rows, cols, starts, lists, u - anchor.double(), v, k)
    return sums.view(-1).log2_() + anchor.double(), stored, anchor


def apply_blocked(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float, values: Tensor,
    *, robust: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sum_j 2^(t_ij - anchor_i) values_j [N, r], and anchor."""
    anchor = _anchor(rows, cols, starts, lists, u, v, k) if robust else torch.zeros_like(u, dtype=torch.float32)
    of_tiles = values.double().view(cols.tree.tiles, cols.tree.tile, -1)
    out = torch.zeros(rows.tree.tiles, rows.tree.tile, values.shape[1], dtype=torch.float64, device=u.device)

    def products_of_pairs(batch: slice, exponents: Tensor) -> Tensor:
        return exponents.exp2_().double() @ of_tiles[lists[batch].long()]

    _merge_batches(out, _add, products_of_pairs, rows, cols, starts, lists, u - anchor.double(), v, k)
    return out.flatten(0, 1), anchor


def _anchor(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float
) -> Tensor:
    """The rows' largest exponents [N] float32, 0 where all are -inf."""
    largest = torch.full((rows.tree.tiles, rows.tree.tile), -torch.inf, dtype=torch.float32, device=u.device)
    _merge_batches(largest, _take_larger, lambda _, t: t.amax(2).float(), rows, cols, starts, lists, u, v, k)
    return torch.where(largest == -torch.inf, 0.0, largest).view(-1)


def _merge_batches(
    out: Tensor, merge: Callable[[Tensor, Tensor, Tensor], Any], work: Callable[[slice, Tensor], Tensor],
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float,
) -> None:  # fmt: skip
    """Merge work(slice of the lists, exponents [c, T, T]) [c, ...] of each batch into out [tiles, ...], by row tile.

    out holds what merging starts from. A batch is merged into the row tiles that it meets by the thread that computes
    it, and these in the order of the batches, so that the bits do not depend on the threads.
    """
    row_tiles_and_exponents = _exponents(rows, cols, starts, lists, u, v, k)

    def merged(batch: slice) -> tuple[Tensor, Tensor]:
        i, exponents = row_tiles_and_exponents(batch)
        met = torch.arange(int(i[0]), int(i[-1]) + 1, device=i.device)  # rows come in order
        part = out[met]
        merge(part, i - i[0], work(batch, exponents))
        return met, part

    slices = _slices(rows, cols, lists)
    for met, part in [merged(batch) for batch in slices] if out.is_cuda else each_block(merged, slices):
        merge(out, met, part)


def _add(out: Tensor, index: Tensor, values: Tensor) -> None:
    out.index_add_(0, index, values)


def _take_larger(out: Tensor, index: Tensor, values: Tensor) -> None:
    out.scatter_reduce_(0, index[:, None].expand_as(values), values, "amax")


def batches(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(slice of the lists, row tiles [c], exponents [c, T, T]) of c tile pairs at a time."""
    row_tiles_and_exponents = _exponents(rows, cols, starts, lists, u, v, k)
    return ((batch, *row_tiles_and_exponents(batch)) for batch in _slices(rows, cols, lists))


def _slices(rows: TiledCloud, cols: TiledCloud, lists: Tensor) -> Iterator[slice]:
    at_once = max(PAIRS_AT_ONCE[lists.device.type] // (rows.tree.tile * cols.tree.tile), 1)
    return (slice(start, min(start + at_once, lists.shape[0])) for start in range(0, lists.shape[0], at_once))


def _exponents(
    rows: TiledCloud, cols: TiledCloud, starts: Tensor, lists: Tensor, u: Tensor, v: Tensor, k: float
) -> Callable[[slice], tuple[Tensor, Tensor]]:
    """Of a slice of the lists: row tiles [c], exponents [c, T, T]."""
    row_of_pair = torch.repeat_interleave(starts[1:] - starts[:-1])
    row_tile, col_tile = rows.tree.tile, cols.tree.tile
    row_potential, col_potential = u.view(-1, row_tile), (v + cols.log2_weight).view(-1, col_tile)
    x = (rows.local.double() + rows.lost).view(-1, row_tile, rows.centre.shape[1])
    y = (cols.local.double() + cols.lost).view(-1, col_tile, cols.centre.shape[1])

    def of_pairs(batch: slice) -> tuple[Tensor, Tensor]:
        i, j = row_of_pair[batch], lists[batch].long()
        centres = (rows.centre[i] - cols.centre[j])[:, None]
        x_relative = x[i] + centres  # x_i - Y_J
        row_part = row_potential[i] - k * x_relative.square().sum(2)
        col_part = col_potential[j] - k * y[j].square().sum(2)
        brackets = row_part[:, :, None] + col_part[:, None]
        return i, torch.baddbmm(brackets, x_relative, y[j].transpose(1, 2), alpha=2.0 * k).to(rows.local.dtype)

    return of_pairs
