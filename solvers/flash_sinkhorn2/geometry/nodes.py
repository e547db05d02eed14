"""A coarser cloud: the centroids and masses of a tree's nodes, and how far from them the points are."""

from __future__ import annotations

import torch
from torch import Tensor

from .clouds import TiledCloud, in_kd_order
from .tree import Tree

MOST, FAR = 0.95, 4.0  # of the mass, and times its variance: smooth clouds with tails have under twice


def node_clouds(cloud: TiledCloud, depth: int) -> TiledCloud:
    """The cloud of 2^depth points that are the centroids of the nodes of `depth`, each with its node's mass.

    They are in kd order already: tiles of this cloud are nodes of depth - log2(tile) of the given one. A node without
    mass is at the mean of its tiles' centres.
    """
    points, mass = _centroids(cloud, depth)
    tree = Tree(2**depth, cloud.tree.tile, torch.arange(2**depth, device=points.device))
    return in_kd_order(tree, points, mass, cloud.local.dtype)


def node_variance(cloud: TiledCloud, depth: int) -> float:
    """Mean over the mass, and over axes, of the squared distance from the centroid of one's node of `depth`.

    No more than `FAR` times that of most of the mass: a few points far out do not decide for all others.
    """
    masses, moments = _moments(cloud, depth)
    order = torch.where(masses > 0, moments / masses, torch.inf).argsort()
    moments, running = moments[order].cumsum(0), masses[order].cumsum(0)
    core = torch.searchsorted(running, MOST).clamp(max=len(order) - 1)
    return float(torch.minimum(moments[-1], FAR * moments.take(core) / running.take(core)))  # indexing would wait


def _centroids(cloud: TiledCloud, depth: int) -> tuple[Tensor, Tensor]:
    """[2^depth, d], and masses [2^depth]."""
    if cloud.mass.is_cuda:
        from . import triton_nodes  # Triton need not be there on machines without a GPU

        return triton_nodes.moments(cloud, depth)[:2]
    tiles, d = cloud.centre.shape
    weight, local = cloud.weight.view(tiles, 1, -1), cloud.local.view(tiles, -1, d)
    moment = (weight @ local.double())[:, 0] + cloud.mass[:, None] * cloud.centre
    tiles_of_node, real = cloud.tree.tiles_of_nodes(depth)
    mass = torch.where(real, cloud.mass[tiles_of_node], 0.0).sum(1)
    real = real[..., None]
    centroid = torch.where(real, moment[tiles_of_node], 0.0).sum(1) / mass[:, None]
    middle = torch.where(real, cloud.centre[tiles_of_node], 0.0).sum(1) / real.sum(1)
    return torch.where(mass[:, None] > 0, centroid, middle), mass


def _moments(cloud: TiledCloud, depth: int) -> tuple[Tensor, Tensor]:
    """[2^depth] masses of nodes, and their points' weighted squared distances from the centroid, over d."""
    if cloud.mass.is_cuda:
        from . import triton_nodes

        return triton_nodes.moments(cloud, depth)[1:]
    tiles, d = cloud.centre.shape
    centroid, mass = _centroids(cloud, depth)
    node = cloud.tree.node_of_tiles(depth)
    offset = (cloud.centre - centroid[node])[:, None]
    square = (cloud.local.view(tiles, -1, d).double() + offset).square().sum(2)
    moment = (cloud.weight.view(tiles, -1) * square).sum(1) / d
    return mass, torch.zeros_like(mass).index_add_(0, node, moment)
