"""The coarse correction of half-steps over the tile pairs of one mask."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from torch import Tensor

from .balance import Balance
from .levels import Depths, Level, levels
from .pairs import Pairs
from .partial_sums import corrected_sums, tile_matrix


class KeptPairs(Protocol):
    """What is read of a mask."""

    row_starts: Tensor
    cols: Tensor
    col_starts: Tensor
    rows: Tensor
    to_columns: Tensor


class Coarse:
    """Of row passes; `mirrored` is of column passes. Built once a mask.

    K entries are in row order, so those of the mirrored one are in column order.
    """

    def __init__(self, mask: KeptPairs, row_tree: Depths, col_tree: Depths):
        self.pairs = Pairs(mask.row_starts, mask.cols, mask.col_starts, mask.rows, mask.to_columns)
        self.row_tree, self.col_tree = row_tree, col_tree
        self._flipped: Level | None = None  # the other one's levels
        self._balance: Balance | None = None

    @cached_property
    def mirrored(self) -> Coarse:
        mirrored = Coarse(self.pairs.mirrored, self.col_tree, self.row_tree)
        mirrored._flipped = self.level
        return mirrored

    @cached_property
    def level(self) -> Level:
        """The finest."""
        return levels(self.pairs, self.row_tree, self.col_tree)

    def tile_matrix(self, partial: Tensor, factor: Tensor) -> Tensor:
        """S [K] float64: S_IJ = sum over the rows i of tile I of factor_i s_iJ, from s_iJ = partial [K, T]."""
        return tile_matrix(self.pairs, partial, factor)

    def balance(self, S: Tensor, A: Tensor, B: Tensor, *, fine: bool = False) -> Tensor:
        """w [column tiles], natural logarithms of the multipliers that nearly balance S [K] to the masses A, B; `fine`
        as in `Balance`."""
        flipped = self._flipped is not None
        level = self._flipped or self.level
        if self._balance is None or self._balance.A is not A or self._balance.B is not B:
            self._balance = Balance(level, A, B, flipped=flipped)
        return self._balance(S.index_select(0, self.pairs.to_columns) if flipped else S, fine=fine)

    def corrected_sums(self, partial: Tensor, multipliers: Tensor) -> Tensor:
        """[rows] float64: sum_J s_iJ multipliers_J."""
        return corrected_sums(self.pairs, partial, multipliers)
