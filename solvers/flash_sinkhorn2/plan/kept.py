"""The tile pairs of a plan that are kept, at fixed potentials, and what the others may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..geometry import TiledCloud
from ..iterate import ScreenedPasses
from ..iterate.passes import LARGEST_PLAIN
from ..screen import Mask
from ..sweep import Pass, apply, sweep


@dataclass(eq=False)
class Side:
    """Rows that meet columns: `sweep`'s arguments."""

    rows: TiledCloud
    cols: TiledCloud
    starts: Tensor
    lists: Tensor
    u: Tensor
    v: Tensor
    k: float

    def sums(self, *, partial: bool) -> Pass:
        """log2 of sum_j 2^t_ij, a row, whatever the potentials."""
        options = (self.rows, self.cols, self.starts, self.lists, self.u, self.v, self.k)
        found = sweep(*options, partial=partial)
        flagged = ~(found.log2_sums.abs() <= LARGEST_PLAIN) & (self.rows.weight > 0)
        return sweep(*options, robust=True, partial=partial) if bool(flagged.any()) else found

    def means(self, log2_sums: Tensor, values: Tensor) -> Tensor:
        """[N, r] float64: sum_j 2^t_ij values_j / sum_j 2^t_ij of values [M, r], in kd order, of rows with sums as
        given by `sums`; nan where a row meets no pair. With its sum taken out of its potential no row overflows."""
        counted = torch.cat([torch.ones_like(values[:, :1]), values], 1)
        rows = replace(self.rows, weight=torch.ones_like(self.rows.weight))  # rows without weight have means as well
        u = self.u - torch.where(log2_sums.isfinite(), log2_sums, 0.0)
        moments = apply(rows, self.cols, self.starts, self.lists, u, self.v, self.k, counted)
        return moments[:, 1:] / moments[:, :1]


@dataclass(eq=False)
class Kept:
    """Both clouds with the kept tile pairs, at potentials u [N], v [M] in base 2 and kd order, k = cost_scale log2(e) /
    eps, of weights that sum to one.

    row_bound [tiles_x], col_bound [tiles_y] float64: of what the sum of 2^t over left-out pairs is in any row, or
    column, with weight. omitted: of the plan's whole mass in left-out pairs, and of what rounded coordinates change.
    """

    x: TiledCloud
    y: TiledCloud
    mask: Mask
    k: float
    u: Tensor
    v: Tensor
    row_bound: Tensor
    col_bound: Tensor
    omitted: float

    @classmethod
    def of(cls, passes: ScreenedPasses, u: Tensor, v: Tensor, rounding: float) -> Kept:
        """Of the passes' last mask."""
        bounds = passes.bounds(u, v)
        omitted = float(passes.omitted(u, v)) + rounding
        return cls(passes.x, passes.y, passes.mask, passes.k, u, v, *bounds, omitted)

    def side(self, *, transpose: bool = False) -> Side:
        """Rows of x that meet y; transpose: of y that meet x."""
        mask = self.mask
        if transpose:
            return Side(self.y, self.x, mask.col_starts, mask.rows, self.v, self.u, self.k)
        return Side(self.x, self.y, mask.row_starts, mask.cols, self.u, self.v, self.k)
