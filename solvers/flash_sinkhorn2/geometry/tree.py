"""A balanced kd tree over tiles of consecutive points: median splits along the widest axis of each node's box."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BELOW_ONE = 1.0 - 2.0**-20  # keeps node + fraction under node + 1 in float64, for up to 2^30 nodes


@dataclass(eq=False)
class Tree:
    """n places in kd order, in tiles of `tile` consecutive ones, all full but the last.

    order [n] int64: the original index of the point at the i-th place. Depth l has 2^l nodes; node k holds the tiles
    floor(k tiles / 2^l) to floor((k + 1) tiles / 2^l): nested, never empty, and of sizes that differ by one at most.
    own [points] int64, where points have several places: the one where each has its weight.
    """

    n: int
    tile: int
    order: Tensor
    own: Tensor | None = None

    @property
    def points(self) -> int:
        return self.n if self.own is None else len(self.own)

    @property
    def tiles(self) -> int:
        return -(-self.n // self.tile)

    @property
    def depths(self) -> int:
        """Depths that may be used: 0 to depths - 1. Nodes of the last hold one tile or two."""
        return self.tiles.bit_length()

    @cached_property
    def _starts(self) -> dict[int, Tensor]:
        return {}

    def starts(self, depth: int) -> Tensor:
        """[2^depth + 1] int64: the first tile of each node, and the number of tiles."""
        if not 0 <= depth < self.depths:
            raise ValueError(f"depth is {depth}, but a tree of {self.tiles} tiles has depths 0 to {self.depths - 1}")
        found = self._starts.get(depth)
        if found is None:
            found = self._starts[depth] = torch.arange(2**depth + 1, device=self.order.device) * self.tiles >> depth
        return found

    def node_of_tiles(self, depth: int) -> Tensor:
        """[tiles] int64: the node of that depth which holds each tile."""
        starts = self.starts(depth)
        return torch.repeat_interleave(starts.diff(), output_size=self.tiles)

    def tiles_of_nodes(self, depth: int) -> tuple[Tensor, Tensor]:
        """[2^depth, width] int64: each node's tiles, its last one repeated to equal width; and bool: not a repeat."""
        starts = self.starts(depth)
        width = -(-self.tiles >> depth)  # ceil
        tiles = starts[:-1, None] + torch.arange(width, device=starts.device)
        real = tiles < starts[1:, None]
        return torch.where(real, tiles, starts[1:, None] - 1), real


def kd_tree(points: Tensor, *, tile: int, places: Tensor | None = None) -> Tree:
    """The kd tree of points [n, d], finite, each in one place or at `places` [N] int64; one sort a depth, along the
    widest axis of each node's box.

    Keys are node + relative position in the node's box, so neither offset nor outliers cost resolution. Points of one
    key stay in the order that they were in.
    """
    if places is None:
        places = torch.arange(len(points), device=points.device)
    tree = Tree(len(places), tile, places)
    if points.is_cuda:
        from . import triton_tree  # Triton need not be there on machines without a GPU

        triton_tree.sort_by_depths(tree, points)
    else:
        _sort_by_depths(tree, points)
    return tree


def _sort_by_depths(tree: Tree, points: Tensor) -> None:
    """`tree.order` sorted depth by depth, by points [points, d] at these places."""
    n = tree.n
    tiled = in_tiles(tree, points.index_select(0, tree.order))
    flat = tiled.view(-1, points.shape[1])
    for depth in range(tree.depths):
        tiles, _ = tree.tiles_of_nodes(depth)
        low = tiled.amin(1)[tiles].amin(1).double()
        width = tiled.amax(1)[tiles].amax(1).double() - low
        axis = width.argmax(1, keepdim=True)
        low, width = low.gather(1, axis), width.gather(1, axis)
        scale = torch.where(width > 0, BELOW_ONE / width, 0.0)
        node = tree.node_of_tiles(depth)
        key = tiled.gather(2, axis[node, :, None].expand(-1, tree.tile, 1))[..., 0].double()
        key.sub_(low[node]).mul_(scale[node]).add_(node[:, None])
        permutation = key.view(-1)[:n].sort(stable=True).indices
        del key
        flat[:n] = flat[permutation]
        flat[n:] = flat[n - 1]
        tree.order = tree.order[permutation]


def in_tiles(tree: Tree, values: Tensor) -> Tensor:
    """[tiles, tile, ...] of values [n, ...] that are in kd order; the last tile repeats the last value."""
    padding = tree.tiles * tree.tile - tree.n
    padded = torch.cat([values, values[-1:].expand(padding, *values.shape[1:])]) if padding else values
    return padded.view(tree.tiles, tree.tile, *values.shape[1:])
