"""The tile pairs of a plan that are kept, at fixed potentials, and what the others may hold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..geometry import TiledCloud
from ..iterate import ScreenedPasses
from ..screen import Mask
from .side import Side
from .weightless import Weightless


@dataclass(eq=False)
class Kept:
    """Both clouds with the kept tile pairs, at potentials u [N], v [M] in base 2 and kd order, k = cost_scale log2(e) /
    eps, of weights that sum to one.

    row_bound [tiles_x], col_bound [tiles_y] float64: of what the sum of 2^t over left-out pairs is in any row, or
    column, with weight. omitted: of the plan's whole mass in left-out pairs, and of what rounded coordinates change.
    weightless: the rows of x, and of y, without weight, with kept pairs of their own.
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
    weightless: tuple[Weightless | None, Weightless | None]

    @classmethod
    def of(
        cls,
        passes: ScreenedPasses,
        u: Tensor,
        v: Tensor,
        rounding: float,
        weightless: tuple[Weightless | None, Weightless | None] = (None, None),
    ) -> Kept:
        """Of the passes' last mask."""
        bounds = passes.bounds(u, v)
        omitted = float(passes.omitted(u, v)) + rounding
        return cls(passes.x, passes.y, passes.mask, passes.k, u, v, *bounds, omitted, weightless)

    def side(self, *, transpose: bool = False) -> Side:
        """Rows of x that meet y; transpose: of y that meet x."""
        mask = self.mask
        if transpose:
            return Side(self.y, self.x, mask.col_starts, mask.rows, self.v, self.u, self.k)
        return Side(self.x, self.y, mask.row_starts, mask.cols, self.u, self.v, self.k)
