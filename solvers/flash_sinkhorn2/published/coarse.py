"""The coarse stage: cells annealed to eps by averaged updates, continued when a check sends the solver back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..cascade import squared_diameter
from ..geometry import TiledCloud, node_clouds
from ..screen import every_pair
from ..sweep import sweep
from .updates import AVERAGED, WHOLE, updated

SMALL = 2048  # points a side: annealed as they are
CELL_POINTS = 64  # to twice as many
RATIO = 0.95**2  # from one update's eps to the next one's
TAIL = 64  # updates at eps after annealing; a batch of those after a second return
MOST_UPDATES, LEAST_PROGRESS, SLOW_BATCHES = 2048, 0.01, 3
CALM_SHARE, CALM_BATCHES = 0.5, 2  # a mean |log| of that share of the tolerance, so often


class Coarse:
    """Cells of both clouds with their potentials, at eps = log2(e) / k in units of C over cost_scale.

    most: updates allowed. updates, pairs_done: so far, and the pairs of cells that they went over.
    """

    def __init__(self, x: TiledCloud, y: TiledCloud, k: float, *, most: int):
        self.x, self.y, self.k, self.most = _cells(x), _cells(y), k, most
        self.mask = every_pair(self.x, self.y)
        self.u, self.v = torch.zeros_like(self.x.weight), torch.zeros_like(self.y.weight)
        self.updates, self.pairs_done = 0, 0.0

    def anneal(self) -> None:
        """From zero at a blur of the diameter: one update an eps, the first one whole."""
        k = math.log2(math.e) / max(squared_diameter(self.x, self.y), math.log2(math.e) / self.k)
        self._update(k, WHOLE)
        while k < self.k:
            last, k = k, min(k / RATIO, self.k)
            self.u, self.v = self.u * (k / last), self.v * (k / last)
            self._update(k, AVERAGED)

    def more(self) -> Tensor:
        """A batch of updates at eps; how far off the last of them found the marginals, as `updated` says it."""
        off = self.u.new_zeros(())
        for _ in range(TAIL):
            off = self._update(self.k, AVERAGED)
        return off

    def settle(self, tol: float) -> None:
        """Batches until they are calm, or bring little any more."""
        before, calm, slow = math.inf, 0, 0
        for _ in range(MOST_UPDATES // TAIL):
            off = float(self.more())
            calm = calm + 1 if off <= CALM_SHARE * tol else 0
            slow = slow + 1 if off > (1 - LEAST_PROGRESS) * before else 0
            before = off
            if calm == CALM_BATCHES or slow == SLOW_BATCHES or self.updates >= self.most:
                return

    def lifted(self, x: TiledCloud, y: TiledCloud) -> tuple[Tensor, Tensor]:
        """u [N], v [M] of the points: one half-step of each against the other cloud's cells."""
        return self._half_step(x, self.y, self.v), self._half_step(y, self.x, self.u)

    def _update(self, k: float, share: float) -> Tensor:
        if self.updates >= self.most:
            return self.u.new_zeros(())
        self.u, self.v, off = updated(self.x, self.y, self.mask, self.u, self.v, k, share)
        self.updates += 1
        self.pairs_done += 2.0 * self.x.tree.n * self.y.tree.n
        return off

    def _half_step(self, points: TiledCloud, cells: TiledCloud, potential: Tensor) -> Tensor:
        rows, cols = points.tree.tiles, cells.tree.tiles
        starts = torch.arange(rows + 1, device=potential.device) * cols
        lists = torch.arange(cols, dtype=torch.int32, device=potential.device).repeat(rows)
        zero = torch.zeros_like(points.weight)
        self.pairs_done += float(points.tree.n) * cells.tree.n
        return -sweep(points, cells, starts, lists, zero, potential, self.k, robust=True).log2_sums


def _cells(cloud: TiledCloud) -> TiledCloud:
    if cloud.tree.n <= SMALL:
        return cloud
    depth = min((cloud.tree.n // CELL_POINTS).bit_length(), cloud.tree.depths) - 1
    return node_clouds(cloud, depth)
