"""A kd tree with fewer points a tile where they are sparse: tiles far wider than the blur are what iterations wait for.

Points repeat without weight, so that trees are of equal counts still and kernels know no other tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import Tree, in_tiles, kd_tree

MOST_PLACES = 1.5  # a point, on average: what is wide by more than these allow stays so
STEP, STEPS = 2.0**0.5, 40  # of the widths that are tried


def roomy_tree(points: Tensor, *, tile: int, width: float) -> Tree:
    """The kd tree of points [n, d], finite, each in as many places as its tile would need parts to be no wider than
    `width` along any axis; `width` is enlarged until that takes 1.5 n places at most. Waits for the device."""
    tree = kd_tree(points, tile=tile)
    places = _places(tree, points, width)
    if places is None:
        return tree
    finer = kd_tree(points, tile=tile, places=torch.repeat_interleave(places))
    position = torch.arange(finer.n, device=places.device)
    # a point's places stay in the order that they were in: the first of them is its own
    finer.own = torch.full_like(places, finer.n).scatter_reduce_(0, finer.order, position, "amin")
    return finer


def _places(tree: Tree, points: Tensor, width: float) -> Tensor | None:
    """[n] int64, in the given order; None where it is one of each."""
    tiled = in_tiles(tree, points[tree.order])
    edges = (tiled.amax(1) - tiled.amin(1)).double()
    counts = torch.full_like(edges[:, 0], tree.tile)
    counts[-1] = tree.n - tree.tile * (tree.tiles - 1)
    widths = [width * STEP**step for step in range(STEPS)]
    parts = [(edges / wide).clamp(min=1.0).prod(1).clamp(max=tree.tile).long() for wide in widths]
    totals = torch.stack([counts @ of_tiles.double() for of_tiles in parts]).tolist()
    chosen = next((index for index, total in enumerate(totals) if total <= MOST_PLACES * tree.n), None)
    if chosen is None or totals[chosen] <= tree.n:
        return None
    places = torch.empty_like(tree.order)
    places[tree.order] = parts[chosen].repeat_interleave(tree.tile)[: tree.n]
    return places
