"""Points without weight: the soft-min extension of the opposite potential, over pairs chosen for these points alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from solvers.flash_sinkhorn.plan.averages import Motion

from ..geometry import TiledCloud, from_tiles, kd_tree, to_tiles
from ..geometry.clouds import LARGEST_COST, in_kd_order
from ..screen import screen
from ..screen.bounds import largest_exponents
from ..screen.planes import Level, levels
from .side import Side

LEFT_OUT = 1e-6  # of a row's own sum, at most: below what any tolerance asks for
BEAM = 4  # nodes that are followed down to a good tile
FIRST_NODES = 256  # of a level at which all nodes are looked at
ROWS_AT_ONCE = 1 << 12


@dataclass(eq=False)
class Weightless:
    """Rows of the plan of the points index [r] of a cloud, which have no weight.

    potential [r]: in base 2, -log2 sum_j b_j 2^(v_j - k |x_i - y_j|^2), of which at most `LEFT_OUT` of the sum is left
    out; points [r, d] float64: as given, about `centre` [d]. side: their rows, float64 in tiles of one point each, at
    potentials with which kept pairs sum to one.
    """

    index: Tensor
    potential: Tensor
    points: Tensor
    centre: Tensor
    side: Side

    def means(self, values: Tensor) -> Tensor:
        """[r, k] float64: means of values [m, k] of the opposite points, in the order given, over each row."""
        side = self.side
        found = side.means(torch.zeros_like(side.u), to_tiles(side.cols, values.double()))
        return from_tiles(side.rows, found)

    def change_means(self, motion: Motion) -> Tensor:
        """[r] float64: means of (x_i - y_j).(v_i - w_j)."""
        change = torch.zeros_like(self.potential)
        if motion.v is not None:
            change += (motion.v[self.index] * (self.points - self.opposite())).sum(1)
        if motion.w is not None:
            w, cols = motion.w.double(), self.side.cols
            along = (from_tiles(cols, cols.points) * w).sum(1, keepdim=True)
            found = self.means(torch.cat([w, along], 1))
            change -= (self.points * found[:, :-1]).sum(1) - found[:, -1]
        return change

    def opposite(self) -> Tensor:
        """[r, d] float64: means of the opposite points about `centre`."""
        side = self.side
        return from_tiles(side.rows, side.means(torch.zeros_like(side.u), side.cols.points))


def weightless(
    points: Tensor, weight: Tensor, cols: TiledCloud, others: Tensor, v: Tensor, k: float
) -> Weightless | None:
    """Of points [n, d] with weight [n], any finite coordinates, against the opposite cloud at v [M], base 2 and kd
    order, others [m, d] being its points in the order given; None where all have weight. Waits for the device.

    Rows whose largest cost is beyond what float64 holds as an exponent are taken on their way to the centre, where it
    is not: out there a row is all but of one point, and its potential goes on as this row's mean cost does.
    """
    index = (weight == 0).nonzero()[:, 0]
    if not len(index):
        return None
    cols, centre = _exact(cols, others)
    v = torch.where(cols.weight > 0, v, 0.0)
    given = points.detach()[index].double() - centre
    distance = torch.linalg.vector_norm(given, dim=1, keepdim=True)
    farthest = math.sqrt(LARGEST_COST * math.log2(math.e) / k)
    near = given * (farthest / distance).nan_to_num(1.0).clamp(max=1.0)
    tree = kd_tree(near, tile=1)
    rows = in_kd_order(tree, near[tree.order], torch.full_like(near[:, 0], 1 / len(near)), torch.float64)
    side = _kept(rows, cols, v, k)
    found = Weightless(index, from_tiles(rows, side.u), given, centre, side)
    if bool((distance > farthest).any()):
        found.potential += k * ((given - near) * (given + near - 2.0 * found.opposite())).sum(1)
    return found


def extended(values: Tensor, found: Weightless | None) -> Tensor:
    """values [n] of a cloud's points, base 2, with the potentials of those without weight in their place."""
    return values if found is None else values.index_put((found.index,), found.potential)


def _exact(cols: TiledCloud, others: Tensor) -> tuple[TiledCloud, Tensor]:
    """The cloud in float64 about the middle [d] of its points with weight: far from it costs vary by many eps within
    what float32 rounds coordinates by."""
    points = others[cols.tree.order].double()
    live = cols.weight[: cols.tree.n, None] > 0
    low, high = torch.where(live, points, torch.inf).amin(0), torch.where(live, points, -torch.inf).amax(0)
    centre = (low + high) / 2
    return in_kd_order(cols.tree, points - centre, cols.weight[: cols.tree.n], torch.float64), centre


def _kept(rows: TiledCloud, cols: TiledCloud, v: Tensor, k: float) -> Side:
    """The pairs that matter, at potentials with which they sum to one. A part of a row's sum says how large its
    potential is at most; with that all pairs sum to one at least, and what may be left out is a share of it."""
    starts = torch.arange(rows.tree.tiles + 1, device=v.device)
    first = Side(rows, cols, starts, _good_tiles(rows, cols, v, k), torch.zeros_like(rows.weight), v, k)
    u = -first.sums(partial=False).log2_sums
    mask = screen(rows, cols, u, v, k, budget=LEFT_OUT)
    side = Side(rows, cols, mask.row_starts, mask.cols, u, v, k)
    return replace(side, u=u - side.sums(partial=False).log2_sums)


def _good_tiles(rows: TiledCloud, cols: TiledCloud, v: Tensor, k: float) -> Tensor:
    """[r] int32: for each row a tile of columns that may hold much of its sum, by bounds, a few nodes a level."""
    leaves, nodes = levels(rows, torch.zeros_like(rows.weight))[-1], levels(cols, v)
    coarse = [level for level in nodes if len(level.mass) <= FIRST_NODES]
    below = nodes[max(len(coarse) - 1, 0) :]
    chunks = torch.arange(rows.tree.tiles, device=v.device).split(ROWS_AT_ONCE)
    return torch.cat([_descent(leaves, below, chunk, k) for chunk in chunks]).int()


def _descent(rows: Level, cols: list[Level], i: Tensor, k: float) -> Tensor:
    """[c] int64: the tile that rows i [c] come to."""
    j = torch.arange(len(cols[0].mass), device=i.device).expand(len(i), -1)
    real = torch.ones_like(j, dtype=torch.bool)
    for level, after in zip(cols, [*cols[1:], None], strict=True):
        of_rows = i[:, None].expand_as(j).flatten()
        bound = largest_exponents(rows, level, of_rows, j.flatten(), k) + level.mass[j.flatten()].log2()
        bound = torch.where(real, bound.view_as(j), -torch.inf)
        j = j.gather(1, bound.topk(min(BEAM, j.shape[1]), 1).indices)
        if after is not None:
            children = level.children[j, None] + torch.arange(2, device=i.device)
            real = (children < level.children[j + 1, None]).flatten(1)
            j = torch.where(real, children.flatten(1), 0)
    return j[:, 0]
