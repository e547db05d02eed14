"""Rows that meet columns at fixed potentials: their sums, and means of values over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..geometry import TiledCloud
from ..iterate.passes import LARGEST_PLAIN
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
        values = torch.where(self.cols.weight[:, None] > 0, values, 0.0)  # whatever they are, they do not count
        counted = torch.cat([torch.ones_like(values[:, :1]), values], 1)
        rows = replace(self.rows, weight=torch.ones_like(self.rows.weight))  # rows without weight have means as well
        u = self.u - torch.where(log2_sums.isfinite(), log2_sums, 0.0)
        moments = apply(rows, self.cols, self.starts, self.lists, u, self.v, self.k, counted)
        return moments[:, 1:] / moments[:, :1]
