"""Boxes of a tree's nodes with a plane above the potential in each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import TiledCloud

RIDGE = 1e-2  # of the mean variance: along directions in which a node is thin its plane keeps its parent's slope


@dataclass(eq=False)
class Level:
    """Nodes of one depth: for their points with weight u_i <= offset + slope.(x_i - centre) and |x_i - centre| <= half.

    centre, half, slope [nodes, d]; offset [nodes], -inf for nodes without weight; mass [nodes]; all float64.
    children [nodes + 1] int64: where each node's one or two nodes of the next level start.
    """

    centre: Tensor
    half: Tensor
    slope: Tensor
    offset: Tensor
    mass: Tensor
    children: Tensor


def levels(cloud: TiledCloud, u: Tensor) -> list[Level]:
    """The cloud's nodes from the root, on a GPU from 256 of them, down to its tiles, with planes above u [N]."""
    if u.is_cuda:
        from . import triton_planes  # Triton need not be there on machines without a GPU

        return triton_planes.levels(cloud, u)
    tree, planes, found = cloud.tree, _Planes(cloud, u), []
    slope = torch.zeros_like(cloud.centre[:1])
    for depth in range(tree.depths):
        last = depth == tree.depths - 1
        children = tree.starts(depth) if last else 2 * torch.arange(2**depth + 1, device=u.device)
        found.append(planes.level(*tree.tiles_of_nodes(depth), tree.node_of_tiles(depth), slope, children))
        slope = found[-1].slope.repeat_interleave(children.diff(), 0)
    tiles = torch.arange(tree.tiles + 1, device=u.device)
    every = torch.ones_like(tiles[:-1, None], dtype=torch.bool)
    found.append(planes.level(tiles[:-1, None], every, tiles[:-1], slope, tiles))
    return found


class _Planes:
    """Moments of each tile's points with weight, from which any node's plane follows.

    All points count alike, since the bound is of every row, light or heavy.
    """

    def __init__(self, cloud: TiledCloud, u: Tensor):
        tiles, d = cloud.centre.shape
        self.cloud = cloud
        self.live = cloud.weight.view(tiles, -1) > 0
        self.local = cloud.local.view(tiles, -1, d).double()
        self.u = torch.where(self.live, u.view(tiles, -1), 0.0)
        self.count = self.live.sum(1).double()
        share = (self.live / self.count.clamp_min(1.0)[:, None])[:, None]  # [tiles, 1, T]
        mean = share @ self.local
        deviation = (self.local - mean) * self.live[..., None]
        self.mean = mean[:, 0] + cloud.centre
        self.mean_u = (share @ self.u[..., None])[:, 0]  # [tiles, 1]
        self.scatter = deviation.mT @ deviation  # [tiles, d, d]
        self.cross = deviation.mT @ (self.u - self.mean_u)[..., None]  # [tiles, d, 1]

    def level(self, tiles: Tensor, real: Tensor, node: Tensor, prior: Tensor, children: Tensor) -> Level:
        """Nodes that hold `tiles` [nodes, width], where `real`; node [tiles]: each tile's; prior: parents' slopes."""
        cloud = self.cloud
        solid = cloud.mass[:, None] > 0
        low = torch.where(solid, cloud.centre - cloud.half_box, torch.inf)[tiles].amin(1)
        high = torch.where(solid, cloud.centre + cloud.half_box, -torch.inf)[tiles].amax(1)
        empty = low > high
        centre, half = ((low + high) / 2).masked_fill(empty, 0.0), ((high - low) / 2).masked_fill(empty, 0.0)
        slope = self._slope(tiles, real, prior)
        above = self.u - (self.local @ slope[node, :, None])[..., 0]
        above -= ((cloud.centre - centre[node]) * slope[node]).sum(1, keepdim=True)
        offset = torch.where(self.live, above, -torch.inf).amax(1)[tiles].amax(1)
        mass = torch.where(real, cloud.mass[tiles], 0.0).sum(1)
        return Level(centre, half, slope, offset, mass, children)

    def _slope(self, tiles: Tensor, real: Tensor, prior: Tensor) -> Tensor:
        """[nodes, d]: least squares drawn towards the prior, from the moments within tiles and between their means."""
        real = real[..., None]
        count = torch.where(real, self.count[tiles, None], 0.0)  # [nodes, width, 1]
        total = count.sum(1, keepdim=True).clamp_min(1.0)
        mean, mean_u = self.mean[tiles], self.mean_u[tiles]
        mean = mean - (count * mean).sum(1, keepdim=True) / total
        mean_u = mean_u - (count * mean_u).sum(1, keepdim=True) / total
        real = real[..., None]
        scatter = torch.where(real, self.scatter[tiles], 0.0).sum(1) + (count * mean).mT @ mean
        cross = torch.where(real, self.cross[tiles], 0.0).sum(1) + (count * mean).mT @ mean_u
        variance = scatter.diagonal(dim1=1, dim2=2).mean(1)
        ridge = torch.where(variance > 0, RIDGE * variance, 1.0)[:, None].expand_as(prior).diag_embed()
        return prior + _solved(scatter + ridge, cross - scatter @ prior[..., None])


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """[batch, d] of positive definite [batch, d, d] and [batch, d, 1]: the library's batches end at 65,535 on a GPU."""
    system = torch.cat([matrix, right], 2)
    for pivot in range(matrix.shape[1]):
        row = system[:, pivot] / system[:, pivot, pivot, None]
        system = system - system[:, :, pivot, None] * row[:, None]
        system[:, pivot] = row
    return system[:, :, -1]
