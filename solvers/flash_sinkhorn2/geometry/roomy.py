"""A kd tree with fewer points a tile where they are sparse: tiles far wider than the blur are what iterations wait for.

Points repeat without weight, so that trees are of equal counts still and kernels know no other tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .tree import Tree, in_tiles, kd_tree

MOST_PLACES = 1.5  # a point, on average: what is wide by more than these allow stays so
STEP, STEPS = 2.0**0.5, 40  # of the widths that are tried


def roomy_tree(points: Tensor, *, tile: int, width: float) -> Tree:
    """The kd tree of points [n, d], finite, each in as many places as its tile would need parts to be no wider than
    `width` along any axis; `width` is enlarged until that takes 1.5 n places at most. Waits for the device."""
    tree = kd_tree(points, tile=tile)
    found = _parts(tree, points, width)
    if found is None:
        return tree
    parts, total = found
    counts = torch.empty_like(tree.order)  # of places, in the given order
    counts[tree.order] = parts.repeat_interleave(tile)[: tree.n]
    places = torch.repeat_interleave(counts, output_size=total)
    del counts, parts
    finer = kd_tree(points, tile=tile, places=places)
    position = torch.arange(finer.n, device=points.device)
    # a point's places stay in the order that they were in: the first of them is its own
    finer.own = torch.full_like(tree.order, finer.n).scatter_reduce_(0, finer.order, position, "amin")
    return finer


def _parts(tree: Tree, points: Tensor, width: float) -> tuple[Tensor, int] | None:
    """[tiles] int64: the parts that each tile needs, its points' places, and how many places that makes; None where it
    is one a point."""
    tried: Iterator[tuple[Tensor, int]]
    if points.is_cuda:
        from . import triton_tree  # Triton need not be there on machines without a GPU

        every, totals = triton_tree.parts(tree, points, width, step=STEP, steps=STEPS)
        tried = ((every[index], total) for index, total in enumerate(totals.tolist()))
    else:
        tried = _tried(tree, points, width)
    for of_tiles, total in tried:
        if total <= MOST_PLACES * tree.n:
            return (of_tiles.long(), total) if total > tree.n else None
    return None


def _tried(tree: Tree, points: Tensor, width: float) -> Iterator[tuple[Tensor, int]]:
    """Parts of each tile and places of all, at one width after another."""
    tiled = in_tiles(tree, points[tree.order])
    edges = (tiled.amax(1) - tiled.amin(1)).double()
    sizes = torch.full_like(tree.order[: tree.tiles], tree.tile)
    sizes[-1] = tree.n - tree.tile * (tree.tiles - 1)
    for _ in range(STEPS):
        parts = (edges / width).clamp(min=1.0).prod(1).clamp(max=tree.tile).long()
        yield parts, int(sizes @ parts)
        width *= STEP
