"""Both trees walked at once: pairs of nodes that hold too little are left out, the others are split down to tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .bounds import largest_exponents
from .planes import Level


class TooManyPairs(Exception):
    """Boxes exclude too few tile pairs."""


@dataclass(eq=False)
class TilePairs:
    """Tile pairs that a walk kept, row after row and each row's columns ascending.

    row_starts [tiles_x + 1] int64, cols [K] int32, the bound of their exponents [K] float32; and bounds of the sums
    left out, of any row of each tile of x and any column of each tile of y.
    """

    row_starts: Tensor
    cols: Tensor
    exponent: Tensor
    row_bound: Tensor
    col_bound: Tensor


def walk(
    x: list[Level], y: list[Level], k: float, *, threshold: float, most_pairs: int | None = None, chunk: int
) -> TilePairs:
    """All tile pairs but those of node pairs whose 2^exponent is nowhere above `threshold`, at potentials whose planes
    x and y hold. All pairs of the first levels' nodes are looked at.

    At most some 4 `chunk` pairs a level are in memory, besides the result; on a GPU a level's pairs all are.
    TooManyPairs rather than more than `most_pairs`, if given.
    """
    if x[0].mass.is_cuda:
        from . import triton_walk  # Triton need not be there on machines without a GPU

        return triton_walk.walk(x, y, k, threshold=threshold, most_pairs=most_pairs)
    row_skipped = [torch.zeros_like(level.mass) for level in x]
    col_skipped = [torch.zeros_like(level.mass) for level in y]
    last = max(len(x), len(y)) - 1
    device = x[0].mass.device
    first = torch.cartesian_prod(*(torch.arange(len(levels[0].mass), device=device) for levels in (x, y)))
    infinity = torch.tensor(math.inf, device=device)
    least = math.log2(threshold)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    stack, kept = [(0, *first.T)], [(nothing, nothing, nothing.float())]
    while stack:
        depth, i, j = stack.pop()
        # the shallower tree waits at its tiles, which are their own children
        at_x, at_y = min(depth, len(x) - 1), min(depth, len(y) - 1)
        exponent = largest_exponents(x[at_x], y[at_y], i, j, k)
        near = exponent > least
        far = ~near
        most = exponent[far].exp2()
        row_skipped[at_x].index_add_(0, i[far], most * y[at_y].mass[j[far]])
        col_skipped[at_y].index_add_(0, j[far], most * x[at_x].mass[i[far]])
        i, j = i[near], j[near]
        if depth == last:
            upward = torch.nextafter(exponent[near].float(), infinity)
            kept.append((i.int(), j.int(), upward))
            if most_pairs is not None and sum(len(rows) for rows, _, _ in kept) > most_pairs:
                raise TooManyPairs
        elif len(i):
            i, j = _children(x[at_x], y[at_y], i, j)
            stack += [(depth + 1, *part) for part in zip(i.split(chunk), j.split(chunk), strict=True)][::-1]
    rows, cols, exponents = (torch.cat(parts) for parts in zip(*kept, strict=True))
    order = (rows.long() * len(y[-1].mass) + cols).sort().indices
    bounds = of_tiles(row_skipped, x), of_tiles(col_skipped, y)
    row_starts = torch.searchsorted(rows[order], torch.arange(len(x[-1].mass) + 1, dtype=rows.dtype, device=device))
    return TilePairs(row_starts, cols[order], exponents[order], *bounds)


def _children(x: Level, y: Level, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of children of node pairs (i, j)."""
    two = torch.arange(2, device=i.device)
    rows, cols = x.children[i, None, None] + two[:, None], y.children[j, None, None] + two
    real = (rows < x.children[i + 1, None, None]) & (cols < y.children[j + 1, None, None])
    return rows.expand_as(real)[real], cols.expand_as(real)[real]


def of_tiles(skipped: list[Tensor], levels: list[Level]) -> Tensor:
    """What was skipped at each node, summed over the ancestors of each tile."""
    total = skipped[0]
    for parent, own in zip(levels[:-1], skipped[1:], strict=True):
        total = torch.repeat_interleave(total, parent.children.diff(), output_size=len(own)) + own
    return total
