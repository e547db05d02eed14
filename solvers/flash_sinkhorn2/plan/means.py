"""Means over the kept pairs of a plan's rows, of values and of what displacements enter, without large numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solvers.flash_sinkhorn.inputs.checks import Inputs
from solvers.flash_sinkhorn.plan.averages import Motion

from ..correct.pairs import compressed_rows
from ..geometry import TiledCloud, from_tiles, to_tiles
from ..sweep import Pass
from .kept import Kept
from .moments import change_means
from .side import Side
from .weightless import Weightless


class KeptMeans:
    """The dense plan's `RowMeans`, over kept pairs: means with the weights P_ij / (P 1)_i, float64, in the clouds' own
    order. Rows without weight go over pairs of their own. Others that meet no kept pair, for lack of convergence, have
    means of `lost` and no displacement.

    x_i - y_j is D_IJ + dx_i - dy_j, D_IJ the difference of tile centres, float64 once a tile pair. Means of D_IJ come
    from the rows' sums over each tile, those of dy_j from a product with the plan: the rounding of float32 sums is one
    of displacements and tile widths, not of the extent of the clouds.
    """

    def __init__(self, inputs: Inputs, kept: Kept, *, eps: float, cost_scale: float, lost: float = math.nan):
        self.inputs, self.kept, self.eps, self.cost_scale, self.lost = inputs, kept, eps, cost_scale, lost
        self.centre = inputs.centre
        self.n_passes = 0
        self._passes: dict[bool, Pass] = {}

    def log2_sums(self, *, transpose: bool = False) -> Tensor:
        """log2((P 1)_i / a_i) [n] for weights as given."""
        found = self._pass(transpose, partial=False).log2_sums
        own, opposite = (self.inputs.b, self.inputs.a) if transpose else (self.inputs.a, self.inputs.b)
        mean_mass = (own.sum() + opposite.sum()) / 2
        found = from_tiles(self.kept.side(transpose=transpose).rows, found)
        apart = self._weightless(transpose)
        if apart is not None:  # by their potentials they sum to one
            found[apart.index] = 0.0
        return found + (opposite.sum() / mean_mass).log2()

    def masses(self, *, transpose: bool = False) -> Tensor:
        """Row sums over kept pairs [n]; zero where the weight is."""
        weight = self.inputs.b if transpose else self.inputs.a
        return torch.where(weight > 0, weight * self.log2_sums(transpose=transpose).exp2(), 0.0)

    def means(self, values: Tensor, *, transpose: bool = False) -> Tensor:
        """[n, r] of values [m, r]; on a GPU these are rounded to float32."""
        side = self.kept.side(transpose=transpose)
        found = from_tiles(side.rows, self._value_means(side, transpose, to_tiles(side.cols, values)))
        apart = self._weightless(transpose)
        if apart is not None:
            found[apart.index] = apart.means(values)
        return found

    def point_means(self, *, transpose: bool = False) -> Tensor:
        """[n, d] of the opposite points, about `centre`."""
        points = self.inputs.y if transpose else self.inputs.x
        found = (points - self.centre.to(points.dtype)).double() - self._displacement_with_weight(transpose)
        apart = self._weightless(transpose)
        if apart is not None:
            found[apart.index] = apart.opposite() + (apart.centre - self.centre)
        return found

    def displacement(self, *, transpose: bool = False) -> Tensor:
        """x_i less the mean of the opposite points [n, d]."""
        found = self._displacement_with_weight(transpose)
        apart = self._weightless(transpose)
        if apart is not None:
            found[apart.index] = apart.points - apart.opposite()
        return found

    def _displacement_with_weight(self, transpose: bool) -> Tensor:
        """[n, d], of rows with weight."""
        side = self.kept.side(transpose=transpose)
        between = self._tile_means(side, transpose, _between(side))
        moved = side.rows.local + between - self._value_means(side, transpose, side.cols.local)
        return from_tiles(side.rows, moved.nan_to_num(0.0))

    def cost_change_means(self, motion: Motion, *, transpose: bool = False) -> Tensor:
        """Means [n] of dC_ij = 2 cost_scale (x_i - y_j).(v_i - w_j).

        With w_j = W_J + dw_j about a tile's mean, (x_i - y_j).w_j = D.W + dx.(W + dw) + X.dw - [Y.dw + dy.(W + dw)].
        """
        change = torch.zeros_like(self.inputs.b if transpose else self.inputs.a)
        if motion.v is not None:
            change += (motion.v * self._displacement_with_weight(transpose)).sum(1)
        if motion.w is not None:
            side = self.kept.side(transpose=transpose)
            rows, cols = side.rows, side.cols
            w = to_tiles(cols, motion.w.double())
            of_tiles = _tile_mean(cols, w)
            rest = w - of_points(cols, of_tiles)
            within = (of_points(cols, cols.centre) * rest + cols.local * w).sum(1, keepdim=True)
            opposite = side.lists.long()
            along = (_between(side) * of_tiles[opposite]).sum(1, keepdim=True)
            by_tiles = self._tile_means(side, transpose, torch.cat([along, of_tiles[opposite]], 1))
            by_points = self._value_means(side, transpose, torch.cat([rest, within], 1))
            product = by_tiles[:, 0] - by_points[:, -1] + (rows.local * by_tiles[:, 1:]).sum(1)
            product += (rows.points * by_points[:, :-1]).sum(1)
            change -= from_tiles(rows, product)
        apart = self._weightless(transpose)
        if apart is not None:
            change[apart.index] = apart.change_means(motion)
        return 2.0 * self.cost_scale * change

    def moments(self, alpha: Tensor, beta: Tensor, motion: Motion, *, transpose: bool = False) -> tuple[Tensor, Tensor]:
        """Means of q_ij = alpha_i + beta_j - dC_ij [n], and of q_ij y_j [n, d] about `centre`; zero without weight.

        From means of q_ij (x_i - y_j), pair by pair: differences of large sums would have to be as small.
        """
        side = self.kept.side(transpose=transpose)
        potentials = to_tiles(side.rows, alpha), to_tiles(side.cols, beta)
        sides = (side.rows, motion.v), (side.cols, motion.w)
        v, w = (None if z is None else to_tiles(cloud, z.double()) for cloud, z in sides)
        log2_sums = self._pass(transpose, partial=False).log2_sums
        self.n_passes += 1
        found = change_means(side, log2_sums, *potentials, v, w, cost_scale=self.cost_scale)
        mean, moved = (from_tiles(side.rows, z) for z in found)
        points = self.inputs.y if transpose else self.inputs.x
        return mean, (points - self.centre.to(points.dtype)) * mean[:, None] - moved

    def _weightless(self, transpose: bool) -> Weightless | None:
        return self.kept.weightless[int(transpose)]

    def _pass(self, transpose: bool, *, partial: bool) -> Pass:
        found = self._passes.get(transpose)
        if found is None or (partial and found.partial is None):
            found = self._passes[transpose] = self.kept.side(transpose=transpose).sums(partial=partial)
            self.n_passes += 1
        return found

    def _tile_means(self, side: Side, transpose: bool, values: Tensor) -> Tensor:
        """[N, r] of values [K, r], one a tile pair."""
        found = self._pass(transpose, partial=True)
        assert found.partial is not None
        partial, entries = found.partial, torch.arange(len(values), dtype=torch.int32, device=values.device)
        counted = torch.cat([torch.ones_like(values[:, :1]), values], 1).to(partial.dtype)
        sums = torch.stack(
            [
                (compressed_rows(side.starts, entries, column.contiguous(), len(entries)) @ partial).flatten()
                for column in counted.T
            ],
            1,
        ).double()
        return sums[:, 1:] / sums[:, :1]

    def _value_means(self, side: Side, transpose: bool, values: Tensor) -> Tensor:
        """[N, r] of values [M, r] in kd order."""
        self.n_passes += 1
        found = side.means(self._pass(transpose, partial=False).log2_sums, values)
        return found if math.isnan(self.lost) else found.nan_to_num(self.lost)


def of_points(cloud: TiledCloud, of_tiles: Tensor) -> Tensor:
    """[N, d]: to each point what its tile has."""
    return of_tiles.repeat_interleave(cloud.tree.tile, 0)


def _tile_mean(cloud: TiledCloud, values: Tensor) -> Tensor:
    """[tiles, d] of values [N, d] of points with weight, which count alike."""
    live = (cloud.weight > 0).view(cloud.tree.tiles, cloud.tree.tile, 1)
    total = torch.where(live, values.view(*live.shape[:2], -1), 0.0).sum(1)
    return total / live.sum(1).clamp_min(1)


def _between(side: Side) -> Tensor:
    """D_IJ [K, d] float64, in the order of the lists."""
    return side.rows.centre.repeat_interleave(side.starts.diff(), 0) - side.cols.centre[side.lists.long()]
