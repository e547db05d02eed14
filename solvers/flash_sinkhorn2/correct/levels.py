"""The pattern of tile pairs and its aggregations over the nodes of both trees, level by level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from .pairs import Pairs, compressed_rows, index_type, pairs_of

COARSEST_DEPTH = 6  # of a tree: 64 nodes
DEPTHS_A_LEVEL = 1  # a node has two children, one of the first level two to four tiles


class Depths(Protocol):
    """What is read of a tree: node k of depth l holds tiles starts(l)[k] to starts(l)[k + 1], and depths are nested."""

    @property
    def tiles(self) -> int: ...

    @property
    def depths(self) -> int: ...

    def starts(self, depth: int) -> Tensor: ...


@dataclass(eq=False)
class Coarsening:
    """From a level with K entries to the next coarser one.

    row_parents [rows], col_parents [columns]: the coarser row and column that each belongs to; entries [K]: the entries
    in the order of the coarser entries they belong to, of which the k-th holds starts[k] to starts[k + 1].
    """

    row_parents: Tensor
    col_parents: Tensor
    starts: Tensor
    entries: Tensor
    level: Level

    def sums(self, values: Tensor) -> Tensor:
        """Of values [K] over each coarser entry."""
        return compressed_rows(self.starts, self.entries, torch.ones_like(values), len(values)) @ values

    def row_sums(self, values: Tensor) -> Tensor:
        """Of values [rows] over each coarser row."""
        return values.new_zeros(self.level.pairs.shape[0]).index_add_(0, self.row_parents, values)

    def col_sums(self, values: Tensor) -> Tensor:
        """Of values [columns] over each coarser column."""
        return values.new_zeros(self.level.pairs.shape[1]).index_add_(0, self.col_parents, values)


@dataclass(eq=False)
class Level:
    """A pattern of entries, and what it is aggregated to; None at the coarsest level."""

    pairs: Pairs
    coarsening: Coarsening | None

    def masses(self, rows: Tensor, cols: Tensor) -> list[tuple[Tensor, Tensor]]:
        """rows [rows] and cols [columns] summed over the nodes of this level and of all coarser ones."""
        coarsening = self.coarsening
        if coarsening is None:
            return [(rows, cols)]
        return [(rows, cols), *coarsening.level.masses(coarsening.row_sums(rows), coarsening.col_sums(cols))]

    def places(self, *, flipped: bool) -> Tensor:
        """[K]: of each entry in the dense matrix [rows, columns], or flipped in its transpose."""
        rows, cols = self.pairs.row_of_entries.long(), self.pairs.cols.long()
        return cols * self.pairs.shape[0] + rows if flipped else rows * self.pairs.shape[1] + cols


def levels(pairs: Pairs, row_tree: Depths, col_tree: Depths) -> Level:
    """The finest level, of the tile pairs. Coarsest are 64 nodes of a tree, or its tiles if they are fewer than 128."""
    return _level(pairs, row_tree, None, col_tree, None)


def _level(pairs: Pairs, row_tree: Depths, row_depth: int | None, col_tree: Depths, col_depth: int | None) -> Level:
    """At depths of both trees; None are the tiles themselves."""
    coarser = _coarser(row_tree, row_depth), _coarser(col_tree, col_depth)
    if coarser == (row_depth, col_depth):
        return Level(pairs, None)
    row_parents = _parents(row_tree, row_depth, coarser[0])
    col_parents = _parents(col_tree, col_depth, coarser[1])
    shape = _nodes(row_tree, coarser[0]), _nodes(col_tree, coarser[1])
    keys = row_parents[pairs.row_of_entries] * shape[1] + col_parents[pairs.cols]
    keys, entries = keys.to(index_type(shape[0] * shape[1])).sort(stable=True)  # half as long if it takes half the bits
    starts = pad((keys[1:] != keys[:-1]).nonzero()[:, 0] + 1, (1, 1))
    starts[-1] = len(entries)
    keys = keys[starts[:-1]]
    coarse_pairs = pairs_of(keys // shape[1], keys % shape[1], shape)
    level = _level(coarse_pairs, row_tree, coarser[0], col_tree, coarser[1])
    index = index_type(len(entries))
    return Level(pairs, Coarsening(row_parents, col_parents, starts.to(index), entries.to(index), level))


def _coarser(tree: Depths, depth: int | None) -> int | None:
    """The depth of the next level: its own where it is coarse enough."""
    finest = tree.depths - 1
    if depth is None:
        return None if finest <= COARSEST_DEPTH else max(finest - DEPTHS_A_LEVEL, COARSEST_DEPTH)
    return max(depth - DEPTHS_A_LEVEL, COARSEST_DEPTH)


def _nodes(tree: Depths, depth: int | None) -> int:
    return tree.tiles if depth is None else 2**depth


def _parents(tree: Depths, depth: int | None, coarser: int | None) -> Tensor:
    """[nodes of depth] int64: the node of the coarser depth that each is in."""
    if coarser is None:
        return torch.arange(tree.tiles, device=tree.starts(0).device)
    starts = tree.starts(coarser)
    if depth is None:
        return torch.repeat_interleave(starts.diff(), output_size=tree.tiles)
    return torch.arange(2**depth, device=starts.device) >> (depth - coarser)
