"""Passes over the kept tile pairs of two clouds, with the bound of what is left out."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ..correct import Coarse
from ..geometry import TiledCloud
from ..screen import Mask, screen, thin
from ..sweep import Pass, sweep, tile_maxima

LARGEST_PLAIN = 60.0  # of a row's |log2 sum|: times multipliers of e^-30 to e^30 it is within float32 still
SCREENED_SHARE = 0.25  # of a budget: bounds of boxes are a few times what is there, the rest is for measured sums
LEAST_LOG2_SUM = -1000.0  # of rows that meet nothing
MOST_LOST = 1e-3  # mass of rows that meet nothing, where half-steps are corrected
LOST = 2.0**-120  # of a tile's sum: smaller terms are no float32
SCREENED_A_KEPT = 2  # tile pairs that boxes do not exclude, at least
PARTIAL_SHARE = 1 / 8  # of the device's memory: more partial sums than fit there are not kept, and nothing corrected


class Passes(Protocol):
    """What iterations need of a problem; potentials u [N], v [M] in base 2 and kd order."""

    x: TiledCloud
    y: TiledCloud
    raised: float  # mass that sums of the last column pass have more than the plan: see `_without_lost_rows`

    @property
    def coarse(self) -> Coarse: ...

    # partial: whether to keep partial sums, of masks for which there is room
    def row_pass(self, u: Tensor, v: Tensor, *, robust: bool, partial: bool) -> Pass: ...

    def column_pass(self, u: Tensor, v: Tensor, *, robust: bool, partial: bool) -> Pass: ...

    def omitted(self, u: Tensor, v: Tensor) -> Tensor:
        """float64 []: bound of the plan's mass left out, as every row and column together may miss it."""
        ...

    def refresh(self, u: Tensor, v: Tensor, budget: float) -> None:
        """Choose tile pairs anew: no row or column leaves out more than `budget` of its mass at u, v."""
        ...


class ScreenedPasses:
    """Of two clouds at k = cost_scale log2(e) / eps. Without a mask until the first `refresh`, unless given one.

    If it `thins`, a refreshed mask is thinned once a row pass and a column pass have measured what tile pairs hold.
    n_screens: how often tile pairs were chosen; pairs_done: point pairs that passes went over.
    """

    def __init__(self, x: TiledCloud, y: TiledCloud, k: float, *, mask: Mask | None = None, thins: bool = True):
        self.x, self.y, self.k, self.thins = x, y, k, thins
        self.n_screens, self.pairs_done = 0, 0.0
        self._at: tuple[Tensor, Tensor] | None = None  # where the mask's bounds hold
        self._budget: float | None = None  # to thin to
        self._measured: dict[bool, tuple[Tensor, Tensor, Tensor]] = {}  # by rows: tile maxima, and where
        self._weightless = {True: x.weight == 0, False: y.weight == 0}  # by rows
        self._lost_mass = 0.0  # of rows that met nearly nothing in the last row pass
        self.raised = 0.0
        self._coarse: Coarse | None = None
        if mask is not None:
            self._take(mask)

    def refresh(self, u: Tensor, v: Tensor, budget: float, *, limited: bool = False) -> None:
        """limited: TooManyPairs where there would be no room for partial sums."""
        screened = SCREENED_SHARE * budget if self.thins else budget
        self._coarse = None  # takes more memory than what choosing takes
        most = self._room * SCREENED_A_KEPT if limited else None
        self._take(screen(self.x, self.y, u, v, self.k, budget=screened, most_pairs=most))
        self._at, self._budget, self._measured = (u, v), budget if self.thins and self._has_room else None, {}
        self.n_screens += 1

    @property
    def _room(self) -> int:
        """Tile pairs whose partial sums are kept."""
        return int(PARTIAL_SHARE * _memory_bytes(self.x.mass.device)) // (4 * self.x.tree.tile)

    def _take(self, mask: Mask) -> None:
        self.mask, self._coarse = mask, None
        self._has_room = len(mask.cols) <= self._room

    @property
    def coarse(self) -> Coarse:
        """Of the mask."""
        if self._coarse is None:
            self._coarse = Coarse(self.mask, self.x.tree, self.y.tree)
        return self._coarse

    def _thin(self) -> None:
        """By what the last passes measured, moved to where the last of them was."""
        assert self._budget is not None
        self._coarse = None
        mask, (u, v) = self.mask, self._measured[False][1:]
        largest = []
        for by_rows, starts, lists in ((True, mask.row_starts, mask.cols), (False, mask.col_starts, mask.rows)):
            maxima, *at = self._measured[by_rows]
            rises = self._rises(u, v, (at[0], at[1]))
            largest.append(_moved(maxima, starts, lists, *(rises if by_rows else rises[::-1])))
        row_bound, col_bound = self.bounds(u, v)
        mask = replace(mask, row_bound=row_bound, col_bound=col_bound)
        self._take(thin(mask, largest[0], largest[1], self._budget))
        self._at, self._budget, self._measured = (u, v), None, {}

    def _rises(self, u: Tensor, v: Tensor, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return _tile_rise(self.x, u, at[0]), _tile_rise(self.y, v, at[1])

    def bounds(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[tiles] float64 each, of what any row or column leaves out at u, v: the mask's, for sums grow by
        2^(increase of u + increase of v) at most, the tile's own and the largest opposite it. 0 without weight."""
        return self._grown(self._rises(u, v, self._at)) if self._at else (self.mask.row_bound, self.mask.col_bound)

    def _grown(self, rises: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rise_u, rise_v = rises
        rows = self.mask.row_bound * (rise_u + rise_v.amax()).exp2()
        cols = self.mask.col_bound * (rise_v + rise_u.amax()).exp2()
        return torch.where(self.x.mass > 0, rows, 0.0), torch.where(self.y.mass > 0, cols, 0.0)

    def omitted(self, u: Tensor, v: Tensor) -> Tensor:
        """The plan's mass of a pair left out grows by 2^(increase of u + increase of v). So the sum is at most what
        rows hold, or columns, with the largest increase opposite; and, by Cauchy and Schwarz, at most the root of what
        rows hold times what columns hold, each grown by its own increase squared. Rows that met nearly nothing may
        miss their mass, and then others have it too much."""
        x, y = self.x, self.y
        rises = self._rises(u, v, self._at) if self._at else None
        if rises and u.is_cuda:
            from . import triton_omitted  # Triton need not be there on machines without a GPU

            least = triton_omitted.omitted(x, y, self.mask.row_bound, self.mask.col_bound, *rises)
            return least + 2 * self._lost_mass
        rows, cols = self._grown(rises) if rises else (self.mask.row_bound, self.mask.col_bound)
        bounds = [(x.mass * rows).sum(), (y.mass * cols).sum()]
        if rises:
            held = [
                torch.where(side.mass > 0, side.mass * bound * (2 * rise).exp2(), 0.0).sum()
                for side, bound, rise in ((x, self.mask.row_bound, rises[0]), (y, self.mask.col_bound, rises[1]))
            ]
            bounds.append((held[0] * held[1]).sqrt())
        return torch.stack(bounds).nan_to_num(torch.inf, torch.inf).amin() + 2 * self._lost_mass

    def row_pass(self, u: Tensor, v: Tensor, *, robust: bool, partial: bool) -> Pass:
        if len(self._measured) == 2:
            self._thin()
        mask, self._lost_mass = self.mask, 0.0
        partial = (partial or self._budget is not None) and self._has_room
        found, out_of_range = self._pass(self.x, self.y, mask.row_starts, mask.cols, u, v, robust, partial)
        if self._budget is not None:
            self._measured = {True: (tile_maxima(self.x, mask.row_starts, found), u, v)}
        return self._without_lost_rows(found, self.x, 0, mask.row_starts, u, v) if out_of_range else found

    def column_pass(self, u: Tensor, v: Tensor, *, robust: bool, partial: bool) -> Pass:
        mask, self.raised = self.mask, 0.0
        partial = (partial or self._budget is not None) and self._has_room
        found, out_of_range = self._pass(self.y, self.x, mask.col_starts, mask.rows, v, u, robust, partial)
        if self._measured:
            self._measured[False] = tile_maxima(self.y, mask.col_starts, found), u, v
        return self._without_lost_rows(found, self.y, 1, mask.col_starts, u, v) if out_of_range else found

    def _without_lost_rows(
        self, found: Pass, rows: TiledCloud, side: int, starts: Tensor, u: Tensor, v: Tensor
    ) -> Pass:
        """A row that meets no tile, or less than it may miss, sums to its bound or so at most: with that it may rise,
        and soon meets some. Where the bound says nothing the row stays. The plan has none of that: `raised`. Columns
        that many of them belong to would seem to have too little, so there are no partial sums to correct by."""
        tile = rows.tree.tile
        most = self.bounds(u, v)[side].log2().clamp(max=0.0).repeat_interleave(tile)
        lost = (rows.weight > 0) & ((found.log2_sums == -torch.inf) | (found.log2_sums < most - 1))
        mass = float((rows.weight * lost).sum())
        if not mass:
            return found
        sums = torch.where(lost, most.clamp(min=LEAST_LOG2_SUM), found.log2_sums)
        if side == 0:
            self._lost_mass = mass
        else:
            by = (sums.exp2() - found.log2_sums.exp2()).masked_fill(~lost, 0.0)
            self.raised = float(rows.weight @ by)
        if mass > MOST_LOST:
            return Pass(sums, None, found.anchor)
        if found.partial is not None:  # what they do meet is not what their step goes by
            lost_rows = lost.view(-1, tile)
            entries, tiles = _entries_of(lost_rows.any(1), starts)
            found.partial[entries] = found.partial[entries].masked_fill(lost_rows[tiles], 0.0)
        return Pass(sums, found.partial, found.anchor)

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
    ) -> tuple[Pass, bool]:
        """And whether sums of rows left the range of plain passes, or rows met no tile."""
        found = sweep(rows, cols, starts, lists, u, v, self.k, robust=robust, partial=partial)
        self.pairs_done += float(len(lists)) * rows.tree.tile**2
        logarithms = found.log2_sums.masked_fill(self._weightless[rows is self.x], 0.0).abs_()
        out_of_range = not float(logarithms.amax()) <= LARGEST_PLAIN  # nan is
        if robust or not out_of_range:
            return found, out_of_range
        flagged = ~(logarithms <= LARGEST_PLAIN)
        tile = rows.tree.tile
        tiles = flagged.view(-1, tile).any(1)
        entries, _ = _entries_of(tiles, starts)
        own = torch.cat([starts[:1], torch.where(tiles, starts.diff(), 0).cumsum(0)])
        redone = sweep(rows, cols, own, lists[entries], u, v, self.k, robust=True, partial=partial)
        of_rows = tiles.repeat_interleave(tile)
        sums, anchor = (
            torch.where(of_rows, new, old)
            for new, old in ((redone.log2_sums, found.log2_sums), (redone.anchor, found.anchor))
        )
        if found.partial is not None and redone.partial is not None:
            found.partial[entries] = redone.partial
        return Pass(sums, found.partial, anchor), True


def _entries_of(tiles: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of the lists of the tiles that are True, and the tile of each."""
    of = torch.repeat_interleave(starts.diff())
    entries = tiles[of].nonzero()[:, 0]
    return entries, of[entries]


def _moved(maxima: Tensor, starts: Tensor, lists: Tensor, rise: Tensor, opposite: Tensor) -> Tensor:
    """Tile maxima [K] after potentials rose by so much at the most; on a GPU where they were, and rounded up."""
    if maxima.is_cuda:
        from ..screen import triton_thin  # Triton need not be there on machines without a GPU

        return triton_thin.moved_costs(starts, lists, maxima, rise, opposite, LOST)
    tile = torch.repeat_interleave(starts.diff(), output_size=len(lists))
    return maxima.clamp_min(LOST) * (rise[tile] + opposite[lists]).clamp(-1000.0, 1000.0).exp2()


def _tile_rise(cloud: TiledCloud, now: Tensor, before: Tensor) -> Tensor:
    """[tiles]: the largest increase of a potential at the tile's points with weight; -inf where there are none."""
    if now.is_cuda:
        from .triton_omitted import tile_rise

        return tile_rise(cloud, now, before)
    return torch.where(cloud.weight > 0, now - before, -torch.inf).view(cloud.tree.tiles, -1).amax(1)


@lru_cache
def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
