"""Levels of the cascade: nodes of both kd trees as clouds, from a few hundred points a side to the points."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import TiledCloud, Tree, node_clouds, node_variance

SMALL = 2048  # points a side: solved as they are
COARSEST_DEPTH = 8  # of a tree: 256 nodes
DEPTHS_A_LEVEL = 3  # eight times the points a side: coarse levels together cost a fraction of the finest
BLUR_OF_NODES = 3.0  # times their variance an axis: the least eps that a cloud of centroids resolves
MOST_RATIO = 5.0  # of eps from the last nodes to the points: where it is larger, the points take it in several steps


@dataclass(eq=False)
class Side:
    """A cloud at one level: the nodes of `depth` of the cloud's tree, or its points where depth is None."""

    cloud: TiledCloud
    tree: Tree
    depth: int | None

    def tile_in(self, coarser: Side) -> Tensor:
        """[tiles] int64: the tile of a coarser level of the same cloud that each tile of this one is in."""
        tiles = self.cloud.tree.tiles
        if coarser.depth is None:
            return torch.arange(tiles, device=self.tree.order.device)
        # tiles of a level of depth l are the nodes of l - log2(tile)
        above = self.tree.tile.bit_length() - 1
        coarse_depth = max(coarser.depth - above, 0)
        if self.depth is None:
            return self.tree.node_of_tiles(coarse_depth)
        own_depth = max(self.depth - above, 0)
        return torch.arange(tiles, device=self.tree.order.device) >> (own_depth - coarse_depth)


@dataclass(eq=False)
class Level:
    """Both clouds at one level, and the eps to solve it at, in units of C."""

    x: Side
    y: Side
    eps: float

    @property
    def is_of_points(self) -> bool:
        return self.x.depth is self.y.depth is None


def levels(x: TiledCloud, y: TiledCloud, *, eps: float, cost_scale: float) -> list[Level]:
    """Coarsest first, the points at `eps` last. Nodes are solved at an eps that they resolve, `eps` at least."""
    finest = max(x.tree.depths, y.tree.depths) - 1
    found = [Level(Side(x, x.tree, None), Side(y, y.tree, None), eps)]
    if max(x.tree.n, y.tree.n) <= SMALL:
        return found
    depths = list(range(finest, COARSEST_DEPTH - 1, -DEPTHS_A_LEVEL)) or [finest]
    for depth in reversed(depths):
        sides = [_side(cloud, depth) for cloud in (x, y)]
        variance = max(
            0.0 if side.depth is None else node_variance(cloud, side.depth)
            for cloud, side in zip((x, y), sides, strict=True)
        )
        resolved = BLUR_OF_NODES * cost_scale * variance
        found.insert(-1, Level(sides[0], sides[1], max(eps, resolved)))
        if resolved <= eps:  # finer nodes would tell no more
            break
    ratio = found[-2].eps / eps  # large where points are far apart for eps, or in one or two dimensions
    steps = math.ceil(math.log(ratio) / math.log(MOST_RATIO))
    for step in range(steps - 1, 0, -1):
        found.insert(-1, Level(found[-1].x, found[-1].y, eps * ratio ** (step / steps)))
    return found


def _side(cloud: TiledCloud, depth: int) -> Side:
    if cloud.tree.n <= SMALL or depth > cloud.tree.depths:
        return Side(cloud, cloud.tree, None)
    depth = min(depth, cloud.tree.depths - 1)  # one less, where the other cloud has more points
    return Side(node_clouds(cloud, depth), cloud.tree, depth)
