"""The pattern of tile pairs and its aggregations over the nodes of both trees, level by level."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..lists import index_type
from .pairs import Pairs, compressed_rows, pairs_of

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

    @cached_property
    def values(self) -> tuple[Tensor, Tensor]:
        """[K] float64 each: memory of values in row order and in column order, for whoever balances."""
        values = torch.empty(2, len(self.pairs.cols), dtype=torch.float64, device=self.pairs.cols.device)
        return values[0], values[1]

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
    row_children, row_parents = _nested(row_tree, row_depth, coarser[0])
    col_children, col_parents = _nested(col_tree, col_depth, coarser[1])
    if pairs.cols.is_cuda:
        from . import triton_levels  # Triton need not be there on machines without a GPU

        nested = row_children, row_parents, col_children, col_parents
        coarse_pairs, starts, entries = triton_levels.coarsened(pairs, *nested)
    else:
        shape = len(row_children) - 1, len(col_children) - 1
        coarse_pairs, starts, entries = _coarsened(pairs, row_parents, col_parents, shape)
    level = _level(coarse_pairs, row_tree, coarser[0], col_tree, coarser[1])
    return Level(pairs, Coarsening(row_parents, col_parents, starts, entries, level))


def _coarsened(
    pairs: Pairs, row_parents: Tensor, col_parents: Tensor, shape: tuple[int, int]
) -> tuple[Pairs, Tensor, Tensor]:
    """The pattern over so many nodes, and the `starts` and `entries` of a `Coarsening`."""
    keys = row_parents[pairs.row_of_entries] * shape[1] + col_parents[pairs.cols]
    keys, entries = keys.to(index_type(shape[0] * shape[1])).sort(stable=True)  # half as long if it takes half the bits
    starts = pad((keys[1:] != keys[:-1]).nonzero()[:, 0] + 1, (1, 1))
    starts[-1] = len(entries)
    keys = keys[starts[:-1]]
    index = index_type(len(entries))
    return pairs_of(keys // shape[1], keys % shape[1], shape), starts.to(index), entries.to(index)


def _coarser(tree: Depths, depth: int | None) -> int | None:
    """The depth of the next level: its own where it is coarse enough."""
    finest = tree.depths - 1
    if depth is None:
        return None if finest <= COARSEST_DEPTH else max(finest - DEPTHS_A_LEVEL, COARSEST_DEPTH)
    return max(depth - DEPTHS_A_LEVEL, COARSEST_DEPTH)


def _nested(tree: Depths, depth: int | None, coarser: int | None) -> tuple[Tensor, Tensor]:
    """[nodes of the coarser depth + 1] int64: which nodes of `depth` each holds; [nodes of depth] int64: which of the
    coarser ones each is in."""
    device = tree.starts(0).device
    if coarser is None:
        children = torch.arange(tree.tiles + 1, device=device)
        return children, children[:-1]
    if depth is None:
        children = tree.starts(coarser)
        return children, torch.repeat_interleave(children.diff(), output_size=tree.tiles)
    children = torch.arange(2**coarser + 1, device=device) << (depth - coarser)
    return children, torch.arange(2**depth, device=device) >> (depth - coarser)
