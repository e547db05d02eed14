"""What tile pairs left out hold, on a GPU: a launch a cloud, and one for what both say together."""

# mypy: disable-error-code=assignment
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from solvers.flash_sinkhorn.sweeps.launching import launch

from ..geometry import TiledCloud

TILES = 16  # a program
PART = 1024  # tiles that the last launch looks at at once


def tile_rise(cloud: TiledCloud, now: Tensor, before: Tensor) -> Tensor:
    """[tiles] float64: the largest increase of a potential at points with weight, -inf where there are none; inf where
    it is not a number."""
    tile, tiles = cloud.tree.tile, cloud.tree.tiles
    rise = torch.empty(tiles, dtype=torch.float64, device=now.device)
    arguments = cloud.weight, now, before, rise, tiles
    launch(rise_kernel, (triton.cdiv(tiles, TILES), 1, 1), arguments, {"T": tile, "TILES": TILES, "num_warps": 4})
    return rise


def omitted(
    x: TiledCloud, y: TiledCloud, row_bound: Tensor, col_bound: Tensor, rise_u: Tensor, rise_v: Tensor
) -> Tensor:
    """[] float64: the least bound of `ScreenedPasses.omitted`, of bounds that held before both potentials rose."""
    least = torch.empty((), dtype=torch.float64, device=rise_u.device)
    sides = x.mass, row_bound, rise_u, x.tree.tiles, y.mass, col_bound, rise_v, y.tree.tiles
    launch(omitted_kernel, (1, 1, 1), (*sides, least), {"PART": PART, "num_warps": 8})
    return least


@triton.jit(do_not_specialize=["tiles"])
def rise_kernel(weight, now, before, rise, tiles, T: tl.constexpr, TILES: tl.constexpr):
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    inside = tile < tiles
    point = tile.to(tl.int64)[:, None] * T + tl.arange(0, T)[None, :]
    counts = tl.load(weight + point, inside[:, None], other=0.0) > 0
    change = tl.load(now + point, counts, other=0.0) - tl.load(before + point, counts, other=0.0)
    change = tl.where(change == change, change, float("inf"))
    tl.store(rise + tile, tl.max(tl.where(counts, change, float("-inf")), 1), inside)


@triton.jit
def _highest(rise, tiles, PART: tl.constexpr):
    found = tl.full([PART], float("-inf"), tl.float64)
    for start in range(0, tiles, PART):
        tile = start + tl.arange(0, PART)
        found = tl.maximum(found, tl.load(rise + tile, tile < tiles, other=float("-inf")))
    return tl.max(found, 0)


@triton.jit
def _held(mass, bound, rise, tiles, opposite, PART: tl.constexpr):
    """The cloud's mass left out if all that is opposite rose by as much as anything there, and if as much as itself."""
    linear = tl.zeros([PART], tl.float64)
    square = tl.zeros([PART], tl.float64)
    for start in range(0, tiles, PART):
        tile = start + tl.arange(0, PART)
        b_mass = tl.load(mass + tile, tile < tiles, other=0.0)
        counts = b_mass > 0
        before = b_mass * tl.load(bound + tile, counts, other=0.0)
        b_rise = tl.load(rise + tile, counts, other=0.0)
        linear += tl.where(counts, before * tl.exp2(b_rise + opposite), 0.0)
        square += tl.where(counts, before * tl.exp2(2.0 * b_rise), 0.0)
    return tl.sum(linear, 0), tl.sum(square, 0)


@triton.jit(do_not_specialize=["x_tiles", "y_tiles"])
def omitted_kernel(x_mass, row_bound, rise_u, x_tiles, y_mass, col_bound, rise_v, y_tiles, least, PART: tl.constexpr):
    top_u, top_v = _highest(rise_u, x_tiles, PART), _highest(rise_v, y_tiles, PART)
    rows, of_rows = _held(x_mass, row_bound, rise_u, x_tiles, top_v, PART)
    cols, of_cols = _held(y_mass, col_bound, rise_v, y_tiles, top_u, PART)
    both = tl.sqrt(of_rows * of_cols)
    rows = tl.where(rows == rows, rows, float("inf"))
    cols = tl.where(cols == cols, cols, float("inf"))
    both = tl.where(both == both, both, float("inf"))
    tl.store(least, tl.minimum(tl.minimum(rows, cols), both))
