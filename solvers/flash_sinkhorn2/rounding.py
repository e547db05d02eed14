"""What float32 coordinates within tiles, and potentials in float64, may add to the residual."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cascade import squared_diameter
from .geometry import TiledCloud
from .iterate import ScreenedPasses

SHARE = 0.1  # of the tolerance: beyond, a CPU goes over to float64, and of kernels it is bounded more closely
ENTRIES_AT_ONCE = 2**22  # tile pairs
LARGEST = 100.0  # error of an exponent: far beyond any tolerance


def of_all_pairs(x: TiledCloud, y: TiledCloud, k: float) -> float:
    """Whatever the potentials: exponents are off by what a point's coordinates lost, at the largest distance; k as in
    `ScreenedPasses`. Products of both clouds' errors are left aside, here and below."""
    of_x, of_y = (_added(cloud, errors) for cloud, errors in _largest_errors(x, y, k))
    return float(of_x + of_y)


def refined(rounding: float, passes: ScreenedPasses, u: Tensor, v: Tensor, *, tol: float) -> float:
    """`of_all_pairs`, or `of_kept_pairs` where that is too much of the tolerance."""
    return rounding if rounding <= SHARE * tol else min(rounding, of_kept_pairs(passes, u, v))


def of_kept_pairs(passes: ScreenedPasses, u: Tensor, v: Tensor) -> float:
    """Of kernels at potentials u [N], v [M], over the passes' mask.

    They make up for what lost coordinates change at the image of a point's tile (`frame_kernel`), so that it counts how
    far from there the points are that it meets; where tiles are too wide for float32, how far from itself. Pairs left
    out were bounded at rounded coordinates.
    """
    x, y, mask, k = passes.x, passes.y, passes.mask, passes.k
    rows, cols = _Side.of(x, u, k, mask.row_starts, mask.cols), _Side.of(y, v, k, mask.col_starts, mask.rows)
    far_rows, far_cols = rows.meets_wide(cols), cols.meets_wide(rows)
    kept = rows.added(cols, k, far_rows, far_cols) + cols.added(rows, k, far_cols, far_rows)
    of_x, of_y = (errors.max() for _, errors in _largest_errors(x, y, k))
    largest = float(of_x + of_y)
    return float(kept) + float(passes.omitted(u, v)) * math.expm1(min(largest, LARGEST))


def of_potentials(x: TiledCloud, y: TiledCloud, u: Tensor, v: Tensor) -> float:
    """Each is off by half an ulp, and by as much again in units of the cost: of costs of 1e10 eps that is 1e-6."""
    of_x, of_y = (torch.where(cloud.weight > 0, potential, 0.0).abs().max() for cloud, potential in ((x, u), (y, v)))
    return math.expm1(min(2.0**-52 * math.log(2.0) * float(of_x + of_y), LARGEST))


def _largest_errors(x: TiledCloud, y: TiledCloud, k: float) -> list[tuple[TiledCloud, Tensor]]:
    """Both clouds, and of exponents in natural logarithms at each of their points."""
    slope = 2.0 * math.log(2.0) * k * math.sqrt(squared_diameter(x, y))
    return [(cloud, slope * torch.linalg.vector_norm(cloud.lost, dim=1, dtype=torch.float64)) for cloud in (x, y)]


def _added(cloud: TiledCloud, errors: Tensor) -> Tensor:
    """[], to the residual, if each point sums to its weight and its exponents are off by errors [N]."""
    return (cloud.weight * errors.clamp(max=LARGEST).expm1()).sum()


@dataclass(eq=False)
class _Side:
    """A cloud with the lists of tiles that its tiles meet; the images [tiles, d] of their centres, and wide [tiles]:
    too wide for float32."""

    cloud: TiledCloud
    starts: Tensor
    lists: Tensor
    image: Tensor
    wide: Tensor

    @classmethod
    def of(cls, cloud: TiledCloud, potential: Tensor, k: float, starts: Tensor, lists: Tensor) -> _Side:
        from .sweep.kernels import WIDEST  # Triton need not be there on machines without a GPU
        from .sweep.triton_sweep import frame

        scale = torch.full((1,), k, dtype=torch.float64, device=potential.device)
        d, frames = cloud.centre.shape[1], frame(cloud, potential, scale).frame
        return cls(cloud, starts, lists, frames[1 + d : 1 + 2 * d].T, frames[-1] > WIDEST.value)

    def entries(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Own tiles and those that they meet, some at a time."""
        own = torch.repeat_interleave(self.starts.diff(), output_size=len(self.lists))
        for i, j in zip(own.split(ENTRIES_AT_ONCE), self.lists.split(ENTRIES_AT_ONCE), strict=True):
            yield i, j.long()

    def meets_wide(self, opposite: _Side) -> Tensor:
        """[tiles] bool: sums of the tile's list may be by rounded coordinates alone, for all that it meets."""
        found = self.wide.clone()
        for i, j in self.entries():
            found[i[opposite.wide[j]]] = True
        return found

    def added(self, opposite: _Side, k: float, far: Tensor, opposite_far: Tensor) -> Tensor:
        """[], to the residual, by what this cloud's coordinates lost; far, opposite_far: of `meets_wide`."""
        cloud, met = self.cloud, opposite.cloud
        reach = torch.zeros_like(self.image)  # an axis
        for i, j in self.entries():
            from_image = (met.centre[j] - self.image[i]).abs() + met.half_box[j]
            from_itself = (met.centre[j] - cloud.centre[i]).abs() + met.half_box[j] + cloud.half_box[i]
            by_rounded = (far[i] | opposite_far[j])[:, None]
            distance = torch.where(by_rounded, torch.maximum(from_image, from_itself), from_image)
            distance = torch.where((met.mass[j] > 0)[:, None], distance, 0.0)
            reach.scatter_reduce_(0, i[:, None].expand_as(distance), distance, "amax")
        lost = cloud.lost.double().abs().view(len(reach), -1, reach.shape[1])
        return _added(cloud, 2.0 * math.log(2.0) * k * (lost * reach[:, None]).sum(2).flatten())
