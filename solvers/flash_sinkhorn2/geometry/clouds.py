"""Clouds in tiles: float64 tile centres, small local coordinates, weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .roomy import roomy_tree
from .tree import Tree, in_tiles, kd_tree

LARGEST_DIMENSION = 6  # above, boxes of a few points are as wide as the cloud
LARGEST_COST = 1e11  # over eps: float64 holds exponents to 1e-5 there


@dataclass(eq=False)
class TiledCloud:
    """N = tiles * tile points in kd order; padding repeats the last point with weight 0, further places repeat theirs.

    centre [tiles, d] float64, of the box of the tile's points with weight, relative to an origin common to both clouds;
    local [N, d]: x - centre of its tile, float32 (on the CPU float64 for float64 points); lost [N, d]: what rounding
    took off it where there is weight, in the same precision; half_box [tiles, d] float64: half edges of that box, 0 for
    tiles without weight; weight [N] float64 sums to 1; log2_weight [N] float64 is -inf where it is 0; mass [tiles]
    float64.
    """

    tree: Tree
    centre: Tensor
    local: Tensor
    lost: Tensor
    half_box: Tensor
    weight: Tensor
    log2_weight: Tensor
    mass: Tensor

    @property
    def points(self) -> Tensor:
        """[N, d] float64, relative to the origin."""
        tiles, d = self.centre.shape
        local, lost = (values.view(tiles, self.tree.tile, d) for values in (self.local, self.lost))
        return (self.centre[:, None] + local + lost).flatten(0, 1)

    @cached_property
    def box(self) -> tuple[list[float], list[float]]:
        """Least and largest coordinates of points with weight, relative to the origin. Waits for the device, once."""
        half = torch.where(self.mass[:, None] > 0, self.half_box, -torch.inf)
        low, high = torch.stack([(self.centre - half).amin(0), (self.centre + half).amax(0)]).tolist()
        return low, high


def tiled_clouds(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, *, tile: int = 32, width: float | None = None
) -> tuple[TiledCloud, TiledCloud]:
    """Both clouds of a problem: points x [n, d] and y [m, d], finite, float32 or float64, 1 <= d <= 6, on one device;
    weights a [n] and b [m], not negative; `tile` points a tile, a power of two, and fewer where it would be wider than
    `width` (`roomy_tree`).

    Raises ValueError on anything else but values that are not finite: those are for the caller to look for.
    """
    if tile < 1 or tile & (tile - 1):
        raise ValueError(f"tile is {tile}: choose a power of two")
    for name, points, name_w, weight in (("x", x, "a", a), ("y", y, "b", b)):
        if points.ndim != 2 or not points.shape[0]:
            raise ValueError(f"{name} has shape {tuple(points.shape)}: give [points, dimension], at least one point")
        if not 1 <= points.shape[1] <= LARGEST_DIMENSION:
            raise ValueError(
                f"{name} has dimension {points.shape[1]}: give 1 to {LARGEST_DIMENSION}, where tiles prune"
            )
        if points.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} is {points.dtype}: give float32 or float64")
        if weight.shape != points.shape[:1]:
            raise ValueError(f"{name_w} has shape {tuple(weight.shape)}: give one weight for each of {name}'s points")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has dimension {x.shape[1]} but y has {y.shape[1]}: give both clouds the same d")
    extremes = torch.stack([torch.stack(torch.aminmax(weight)).double() for weight in (a, b)])
    for name_w, (least, most) in zip(("a", "b"), extremes.tolist(), strict=True):
        if not (least >= 0 and most > 0):
            raise ValueError(f"{name_w} must have no negative weight and some positive one: clip or replace them")
    (low, high), (other_low, other_high) = (torch.aminmax(points, dim=0) for points in (x, y))
    origin = (torch.minimum(low, other_low).double() + torch.maximum(high, other_high).double()) / 2
    return _tiled(x, a, origin, tile, width), _tiled(y, b, origin, tile, width)


def _tiled(points: Tensor, weight: Tensor, origin: Tensor, tile: int, width: float | None) -> TiledCloud:
    tree = kd_tree(points, tile=tile) if width is None else roomy_tree(points, tile=tile, width=width)
    dtype = torch.float64 if points.dtype == torch.float64 and points.device.type == "cpu" else torch.float32
    weight = weight.double()
    weight = weight / weight.sum()
    weights = weight[tree.order] if tree.own is None else weight.new_zeros(tree.n).index_copy_(0, tree.own, weight)
    return in_kd_order(tree, points[tree.order].double().sub_(origin), weights, dtype)


def in_kd_order(tree: Tree, points: Tensor, weight: Tensor, dtype: torch.dtype) -> TiledCloud:
    """The cloud of points [n, d] float64 and weights [n] float64 that are in the tree's order already."""
    if points.is_cuda:
        from . import triton_clouds  # Triton need not be there on machines without a GPU

        return TiledCloud(tree, *triton_clouds.arranged(tree, points, weight, dtype))
    tiles, d = tree.tiles, points.shape[1]
    tiled = in_tiles(tree, points)
    weights = in_tiles(tree, weight).clone()
    weights.view(-1)[tree.n :] = 0.0
    mass = weights.sum(1)
    counts = (weights > 0) | (mass == 0)[:, None]  # a tile without weight is centred on all its points
    low = torch.where(counts[..., None], tiled, torch.inf).amin(1)
    high = torch.where(counts[..., None], tiled, -torch.inf).amax(1)
    centre = (low + high) / 2
    exact = tiled - centre[:, None]
    local = exact.to(dtype)
    lost = torch.where((weights > 0)[..., None], exact - local, 0.0).to(dtype)
    half_box = torch.where((weights > 0)[..., None], local.abs(), 0.0).amax(1).double()  # of the rounded coordinates
    weights = weights.view(-1)
    local, lost = (values.view(tiles * tree.tile, d) for values in (local, lost))
    return TiledCloud(tree, centre, local, lost, half_box, weights, weights.log2(), mass)


def to_tiles(cloud: TiledCloud, values: Tensor) -> Tensor:
    """[N, ...] in kd order of values [n, ...] in the original order, at all places of each point; padding repeats."""
    return in_tiles(cloud.tree, values[cloud.tree.order]).flatten(0, 1)


def from_tiles(cloud: TiledCloud, values: Tensor) -> Tensor:
    """[n, ...] in the original order of values [N, ...] in kd order."""
    if cloud.tree.own is not None:
        return values[cloud.tree.own]
    out = torch.empty_like(values[: cloud.tree.n])
    out[cloud.tree.order] = values[: cloud.tree.n]
    return out
