"""A coarser cloud: the centroids and masses of a tree's nodes, and how far from them the points are."""

from __future__ import annotations

import torch

from .clouds import TiledCloud, in_kd_order
from .tree import Tree

MOST, FAR = 0.95, 4.0  # of the mass, and times its variance: smooth clouds with tails have under twice


def node_clouds(cloud: TiledCloud, depth: int) -> TiledCloud:
    """The cloud of 2^depth points that are the centroids of the nodes of `depth`, each with its node's mass.

    They are in kd order already: tiles of this cloud are nodes of depth - log2(tile) of the given one. A node without
    mass is at the mean of its tiles' centres.
    """
    tree = cloud.tree
    tiles, d = cloud.centre.shape
    weight, local = cloud.weight.view(tiles, 1, -1), cloud.local.view(tiles, -1, d)
    moment = (weight @ local.double())[:, 0] + cloud.mass[:, None] * cloud.centre
    tiles_of_node, real = tree.tiles_of_nodes(depth)
    mass = torch.where(real, cloud.mass[tiles_of_node], 0.0).sum(1)
    real = real[..., None]
    centroid = torch.where(real, moment[tiles_of_node], 0.0).sum(1) / mass[:, None]
    middle = torch.where(real, cloud.centre[tiles_of_node], 0.0).sum(1) / real.sum(1)
    points = torch.where(mass[:, None] > 0, centroid, middle)
    coarse = Tree(2**depth, tree.tile, torch.arange(2**depth, device=points.device))
    return in_kd_order(coarse, points, mass, cloud.local.dtype)


def node_variance(cloud: TiledCloud, depth: int) -> float:
    """Mean over the mass, and over axes, of the squared distance from the centroid of one's node of `depth`.

    No more than `FAR` times that of most of the mass: a few points far out do not decide for all others.
    """
    tree = cloud.tree
    tiles, d = cloud.centre.shape
    nodes = node_clouds(cloud, depth)
    node_of_tiles = tree.node_of_tiles(depth)
    centroid = nodes.local[: 2**depth].double() + nodes.centre.repeat_interleave(tree.tile, 0)[: 2**depth]
    offset = (cloud.centre - centroid[node_of_tiles])[:, None]
    square = (cloud.local.view(tiles, -1, d).double() + offset).square().sum(2)
    moment = (cloud.weight.view(tiles, -1) * square).sum(1) / d
    moments, masses = moment.new_zeros(2, 2**depth).index_add_(1, node_of_tiles, torch.stack([moment, cloud.mass]))
    order = torch.where(masses > 0, moments / masses, torch.inf).argsort()
    moments, running = moments[order].cumsum(0), masses[order].cumsum(0)
    core = torch.searchsorted(running, MOST).clamp(max=len(order) - 1)
    return float(torch.minimum(moments[-1], FAR * moments[core] / running[core]))
