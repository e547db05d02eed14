"""Passes over the kept tile pairs of two clouds, with the bound of what is left out."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..correct import Coarse
from ..geometry import TiledCloud
from ..screen import Mask, screen
from ..sweep import Pass, sweep

LARGEST_PLAIN = 60.0  # of a row's |log2 sum|: times multipliers of e^-30 to e^30 it is within float32 still


class Passes(Protocol):
    """What iterations need of a problem; potentials u [N], v [M] in base 2 and kd order."""

    x: TiledCloud
    y: TiledCloud
    coarse: Coarse

    def row_pass(self, u: Tensor, v: Tensor, *, robust: bool, partial: bool) -> Pass: ...

    def column_pass(self, u: Tensor, v: Tensor, *, robust: bool, partial: bool) -> Pass: ...

    def omitted(self, u: Tensor, v: Tensor) -> Tensor:
        """[2] float64: bounds of the plan's mass left out, by rows and by columns."""
        ...

    def refresh(self, u: Tensor, v: Tensor, budget: float) -> None:
        """Choose tile pairs anew: no row or column leaves out more than `budget` of its mass at u, v."""
        ...


class ScreenedPasses:
    """Of two clouds at k = cost_scale log2(e) / eps. Without a mask until the first `refresh`, unless given one.

    n_screens: how often tile pairs were chosen.
    """

    def __init__(self, x: TiledCloud, y: TiledCloud, k: float, *, mask: Mask | None = None):
        self.x, self.y, self.k = x, y, k
        self.n_screens = 0
        self._screened_at: tuple[Tensor, Tensor] | None = None
        if mask is not None:
            self._take(mask)

    def refresh(self, u: Tensor, v: Tensor, budget: float) -> None:
        self._take(screen(self.x, self.y, u, v, self.k, budget=budget))
        self._screened_at = u, v
        self.n_screens += 1

    def _take(self, mask: Mask) -> None:
        self.mask, self.coarse = mask, Coarse(mask, self.x.tree, self.y.tree)

    def omitted(self, u: Tensor, v: Tensor) -> Tensor:
        """Sums grow by 2^(increase of u + increase of v) at most: the tile's own, and the largest opposite it."""
        if self._screened_at is None:
            return u.new_zeros(2)
        old_u, old_v = self._screened_at
        rise_u, rise_v = _tile_rise(self.x, u - old_u), _tile_rise(self.y, v - old_v)
        rows = self.x.mass * self.mask.row_bound * (rise_u + rise_v.amax()).exp2()
        cols = self.y.mass * self.mask.col_bound * (rise_v + rise_u.amax()).exp2()
        return torch.stack([rows.nansum(), cols.nansum()])  # a tile without mass is 0 times anything

    def row_pass(self, u: Tensor, v: Tensor, *, robust: bool, partial: bool) -> Pass:
        return self._pass(self.x, self.y, self.mask.row_starts, self.mask.cols, u, v, robust, partial)

    def column_pass(self, u: Tensor, v: Tensor, *, robust: bool, partial: bool) -> Pass:
        return self._pass(self.y, self.x, self.mask.col_starts, self.mask.rows, v, u, robust, partial)

    def _pass(
        self,
        rows: TiledCloud,
        cols: TiledCloud,
        starts: Tensor,
        lists: Tensor,
        u: Tensor,
        v: Tensor,
        robust: bool,
        partial: bool,
    ) -> Pass:
        found = sweep(rows, cols, starts, lists, u, v, self.k, robust=robust, partial=partial)
        flagged = ~(found.log2_sums.abs() <= LARGEST_PLAIN) & (rows.weight > 0)
        if robust or not bool(flagged.any()):
            return found
        tile = rows.tree.tile
        tiles = flagged.view(-1, tile).any(1)
        counts = starts.diff()
        entries = torch.repeat_interleave(tiles, counts)
        own = torch.cat([starts[:1], torch.where(tiles, counts, 0).cumsum(0)])
        redone = sweep(rows, cols, own, lists[entries], u, v, self.k, robust=True, partial=partial)
        of_rows = tiles.repeat_interleave(tile)
        sums, anchor = (
            torch.where(of_rows, new, old)
            for new, old in ((redone.log2_sums, found.log2_sums), (redone.anchor, found.anchor))
        )
        if found.partial is not None and redone.partial is not None:
            found.partial[entries] = redone.partial
        return Pass(sums, found.partial, anchor)


def _tile_rise(cloud: TiledCloud, change: Tensor) -> Tensor:
    """[tiles]: the largest change of a potential at the tile's points with weight; -inf where there are none."""
    return torch.where(cloud.weight > 0, change, -torch.inf).view(cloud.tree.tiles, -1).amax(1)
